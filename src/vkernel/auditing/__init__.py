"""Audit trained networks: read a checkpoint as a score, and check that it is what it is said to be.

:class:`Checkpoint` turns somebody's network into a score (:mod:`vkernel.auditing.checkpoint`); weight files and
diffusers folders are read without running anything in them (:mod:`~vkernel.auditing.files`,
:mod:`~vkernel.auditing.pipelines`); :func:`check` measures whether the stated conventions fit
(:mod:`~vkernel.auditing.conventions`). Then questions can be asked of it: :func:`levels` compares it with the ideal
score at each noise level (:mod:`~vkernel.auditing.denoising`), :func:`membership` whether its errors give its training
images away (:mod:`~vkernel.auditing.members`), :func:`blind` what it cannot see, and :func:`drift` whether its samples
left the data's range (:mod:`~vkernel.auditing.blindness`). :func:`as_unet` puts a score in a network's place.
"""

from __future__ import annotations

from vkernel.auditing.blindness import Blind, Drift, blind, drift
from vkernel.auditing.checkpoint import Checkpoint
from vkernel.auditing.conventions import Convention, Conventions, check
from vkernel.auditing.denoising import levels
from vkernel.auditing.members import Membership, membership
from vkernel.auditing.pipelines import as_unet

__all__ = [
    "Blind",
    "Checkpoint",
    "Convention",
    "Conventions",
    "Drift",
    "Membership",
    "as_unet",
    "blind",
    "check",
    "drift",
    "levels",
    "membership",
]
