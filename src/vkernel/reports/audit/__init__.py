"""Audits of trained networks: copies, membership, blind directions, drift, and agreement of runs.

:func:`audit` examines one or several networks and returns an :class:`Audit`: numbers with intervals, verdicts, advice
and reports; :func:`audit_samples` examines samples that were saved, without a network. Each question can be examined
alone: :func:`check` and :func:`skill` (do the stated conventions fit, how far has training come), :func:`levels` and
:func:`membership` (errors beside those of the ideal score), :func:`blind`, :func:`draw` from :func:`start` (samples,
which :mod:`vkernel.metrics` compares with the data), :func:`agreement`, :func:`same_noise` and :func:`weight_cosine` of
several runs. :func:`describe` puts any of the results into sentences."""

from vkernel.reports.audit.agreement import Agreement, SameNoise, agreement, same_noise
from vkernel.reports.audit.audit import audit
from vkernel.reports.audit.blind import Blind, blind
from vkernel.reports.audit.conventions import Convention, Conventions, check
from vkernel.reports.audit.decoder import Decoder, decoder
from vkernel.reports.audit.draw import draw, start
from vkernel.reports.audit.levels import Membership, levels, membership
from vkernel.reports.audit.report import Advice, Verdict, describe
from vkernel.reports.audit.result import Audit, DataStatistics, NetworkAudit, Sizes
from vkernel.reports.audit.runs import weight_cosine
from vkernel.reports.audit.samples import SampleAudit, SavedAudit
from vkernel.reports.audit.saved import audit_samples
from vkernel.reports.audit.schedule import Schedule
from vkernel.reports.audit.skill import Skill, skill

__all__ = ["Advice", "Agreement", "Audit", "Blind", "Convention", "Conventions", "DataStatistics", "Decoder"]
__all__ += ["Membership", "NetworkAudit", "SameNoise", "SampleAudit", "SavedAudit", "Schedule", "Sizes", "Skill"]
__all__ += ["Verdict", "agreement", "audit", "audit_samples", "blind", "check", "decoder", "describe", "draw"]
__all__ += ["levels", "membership", "same_noise", "skill", "start", "weight_cosine"]
