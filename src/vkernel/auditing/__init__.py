"""Audit trained networks: read a checkpoint as a score, and check that it is what it is said to be.

:class:`Checkpoint` turns somebody's network into a score (:mod:`vkernel.auditing.checkpoint`); weight files and
diffusers folders are read without running anything in them (:mod:`~vkernel.auditing.files`,
:mod:`~vkernel.auditing.pipelines`); :func:`check` measures whether the stated conventions fit
(:mod:`~vkernel.auditing.conventions`); and :func:`as_unet` puts a score in a network's place.
"""

from __future__ import annotations

from vkernel.auditing.checkpoint import Checkpoint
from vkernel.auditing.conventions import Convention, Conventions, check
from vkernel.auditing.pipelines import as_unet

__all__ = ["Checkpoint", "Convention", "Conventions", "as_unet", "check"]
