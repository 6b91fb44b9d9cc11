"""Audit trained networks: are their samples copies, what do they remember, what do they not see, would a rerun agree?

:func:`audit` asks everything of one or several networks (:mod:`~vkernel.auditing.inquiry`) and returns an
:class:`Audit`: numbers with intervals, verdicts (:mod:`~vkernel.auditing.verdicts`), advice
(:mod:`~vkernel.auditing.guidance`) and a report (:mod:`~vkernel.auditing.report`). Each question can be asked alone:

* :class:`Checkpoint` turns somebody's network into a score; weight files and diffusers folders are read without running
  anything in them (:mod:`~vkernel.auditing.files`, :mod:`~vkernel.auditing.pipelines`);
* :func:`check` measures whether the stated conventions fit, :func:`skill` how far training has come;
* :func:`levels` compares it with the ideal score at each noise level, :func:`membership` asks whether its errors give
  its training images away, :func:`blind` what it cannot see;
* :func:`draw` makes samples from :func:`start`, :func:`copies` finds their nearest training images, :func:`drift` and
  :func:`likeness` compare their law with that of the data, in features of an :func:`extractor`;
* :class:`Checkpoints` holds several runs, :func:`agreement` and :func:`same_noise` measure how far they agree.

:func:`as_unet` puts a score in a network's place.
"""

from __future__ import annotations

from vkernel.auditing.blindness import Blind, Drift, blind, drift
from vkernel.auditing.checkpoint import Checkpoint
from vkernel.auditing.checkpoints import Checkpoints, SameNoise, same_noise
from vkernel.auditing.conventions import Convention, Conventions, check
from vkernel.auditing.copying import Copies, copies
from vkernel.auditing.denoising import levels
from vkernel.auditing.disagreement import Agreement, agreement
from vkernel.auditing.extractors import Extractor, extractor
from vkernel.auditing.findings import Audit, Finding, Sampled, Sizes
from vkernel.auditing.guidance import Advice
from vkernel.auditing.inquiry import audit
from vkernel.auditing.members import Membership, membership
from vkernel.auditing.pipelines import as_unet
from vkernel.auditing.resemblance import Likeness, likeness
from vkernel.auditing.sampling import draw, start
from vkernel.auditing.training import Skill, skill
from vkernel.auditing.verdicts import Verdict

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
