"""Audits of trained networks: copies, membership, blind directions, drift, and agreement of runs.

:func:`audit` examines one or several networks and returns an :class:`Audit`: numbers with intervals, verdicts, advice
and reports. Each question can be examined alone:

* :func:`check` measures whether the stated conventions of a network fit, :func:`skill` how far training has come;
* :func:`levels` compares its errors with those of the ideal score at each noise level, :func:`membership` measures
  whether they reveal training images, :func:`blind` which changes of an image it does not respond to;
* :func:`draw` samples it from :func:`start`; :func:`vkernel.metrics.copies`, :func:`vkernel.metrics.drift` and
  :func:`vkernel.metrics.likeness` compare samples with the data;
* :func:`agreement` and :func:`same_noise` measure how far several runs agree.

:func:`describe` puts any of the results into sentences.
"""

from vkernel.reports.audit.agreement import Agreement, SameNoise, agreement, same_noise
from vkernel.reports.audit.audit import Audit, DataStatistics, NetworkAudit, SampleAudit, Sizes, audit
from vkernel.reports.audit.blind import Blind, blind
from vkernel.reports.audit.conventions import Convention, Conventions, Skill, check, skill
from vkernel.reports.audit.levels import Membership, levels, membership
from vkernel.reports.audit.report import Advice, Verdict, describe
from vkernel.reports.audit.sampling import draw, start

__all__ = [
    "Advice",
    "Agreement",
    "Audit",
    "Blind",
    "Convention",
    "Conventions",
    "DataStatistics",
    "Membership",
    "NetworkAudit",
    "SameNoise",
    "SampleAudit",
    "Sizes",
    "Skill",
    "Verdict",
    "agreement",
    "audit",
    "blind",
    "check",
    "describe",
    "draw",
    "levels",
    "membership",
    "same_noise",
    "skill",
    "start",
]
