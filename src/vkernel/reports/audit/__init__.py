"""Audit trained networks: are their samples copies, what do they remember, what do they not see, would a rerun agree?

:func:`audit` asks everything of one or several networks (:mod:`~vkernel.reports.audit.audit`) and returns an
:class:`Audit`: numbers with intervals, verdicts (:mod:`~vkernel.reports.audit.verdicts`), advice
(:mod:`~vkernel.reports.audit.advice`) and a report (:mod:`~vkernel.reports.audit.report`).
Each question can be asked alone:

* :class:`Checkpoint` turns somebody's network into a score; weight files and diffusers folders are read without running
  anything in them (:mod:`~vkernel.adapters.weights`, :mod:`~vkernel.adapters.diffusers`);
* :func:`check` measures whether the stated conventions fit, :func:`skill` how far training has come;
* :func:`levels` compares it with the ideal score at each noise level, :func:`membership` asks whether its errors give
  its training images away, :func:`blind` what it cannot see;
* :func:`draw` makes samples from :func:`start`, :func:`copies` finds their nearest training images, :func:`drift` and
  :func:`likeness` compare their law with that of the data, in features of an :func:`extractor`;
* :class:`Checkpoints` holds several runs, :func:`agreement` and :func:`same_noise` measure how far they agree.

:func:`as_unet` puts a score in a network's place.
"""

from __future__ import annotations

from vkernel.adapters.checkpoint import Checkpoint
from vkernel.adapters.checkpoints import Checkpoints
from vkernel.adapters.diffusers import as_unet
from vkernel.reports.audit.advice import Advice
from vkernel.reports.audit.agreement import Agreement, agreement
from vkernel.reports.audit.audit import audit
from vkernel.reports.audit.blind import Blind, Drift, blind, drift
from vkernel.reports.audit.conventions import Convention, Conventions, check
from vkernel.reports.audit.copies import Copies, copies
from vkernel.reports.audit.extractors import Extractor, extractor
from vkernel.reports.audit.findings import Audit, Finding, Sampled, Sizes
from vkernel.reports.audit.levels import levels
from vkernel.reports.audit.likeness import Likeness, likeness
from vkernel.reports.audit.membership import Membership, membership
from vkernel.reports.audit.same_noise import SameNoise, same_noise
from vkernel.reports.audit.sampling import draw, start
from vkernel.reports.audit.skill import Skill, skill
from vkernel.reports.audit.verdicts import Verdict

__all__ = [
    "Advice",
    "Agreement",
    "Audit",
    "Blind",
    "Checkpoint",
    "Checkpoints",
    "Convention",
    "Conventions",
    "Copies",
    "Drift",
    "Extractor",
    "Finding",
    "Likeness",
    "Membership",
    "SameNoise",
    "Sampled",
    "Sizes",
    "Skill",
    "Verdict",
    "agreement",
    "as_unet",
    "audit",
    "blind",
    "check",
    "copies",
    "draw",
    "drift",
    "extractor",
    "levels",
    "likeness",
    "membership",
    "same_noise",
    "skill",
    "start",
]
