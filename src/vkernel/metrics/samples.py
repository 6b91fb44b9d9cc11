"""Samples and ensembles of samples: reading, and the units over which errors are taken."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from vkernel.core.errors import InputError, require
from vkernel.core.estimate import Estimate
from vkernel.data.empirical import Array

Members = bool | None | tuple[bool | None, bool | None]
CHUNK = 1 << 21  # numbers in a working array: 16 MB


@dataclass(frozen=True)
class Samples:
    """Points ``(M, n, d)`` in float64, M = 1 for one sample; the units are members if there are any, else points."""

    x: Tensor
    members: bool

    @property
    def points(self) -> Tensor:
        """All points, ``(M n, d)``."""
        return self.x.flatten(0, 1)

    @property
    def units(self) -> int:
        """The number of independent units."""
        return self.x.shape[0 if self.members else 1]

    @property
    def unit(self) -> str:
        """The name of the units."""
        return "members" if self.members else "samples"

    def share(self, counts: Tensor, n: Tensor | int | None = None, scale: float = 1.0) -> Estimate[Tensor]:
        """Estimate ``scale`` times the share of what each member counted, ``(M, …)``, of its ``n`` points (all)."""
        n = self.x.shape[1] if n is None else n
        if self.members:
            return Estimate.of_mean(counts.double() / n, scale=scale)
        return Estimate.of_share(counts[0], float(n), scale)

    def share_of(self, hits: Tensor) -> Estimate:
        """Estimate the share of the points ``(M n,)`` that are marked."""
        return Estimate(*map(float, self.share(hits.reshape(self.x.shape[:2]).sum(1)).fields))

    def variance(self, influence: Tensor) -> tuple[float, int]:
        """Return the variance of the mean of ``influence``, one number for each point, and the number of units."""
        per_unit = influence.reshape(self.units, -1).mean(1)
        return (float(per_unit.var()) / self.units if self.units > 1 else math.inf), self.units


def read(
    x: Array, members: Members, skip_diverged: bool, name: str = "x", shape: tuple[int, ...] | None = None
) -> Samples:
    """Read a sample or an ensemble (of events of ``shape``); leave out what diverged if ``skip_diverged``."""
    try:
        x = torch.as_tensor(x).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"{name} must be a tensor or an array of numbers, not {type(x).__name__}.") from error
    require(x.dtype != torch.bool and not x.is_complex(), f"{name} must hold real numbers, not {x.dtype}.")
    require(members in (None, True, False), f"members must be True, False or None, not {members!r}.")
    given = f"{name} has shape {tuple(x.shape)}"
    require(
        members is not None or shape is not None or x.ndim <= 3,
        f"{given}, one sample or an ensemble: say members=False if its first axis counts samples, True if members.",
    )
    ensemble = bool(x.ndim == (3 if shape is None else len(shape) + 2) if members is None else members)
    kind = "an ensemble (M, n, *shape)" if ensemble else "one sample (n, *shape)"
    require(x.ndim > ensemble and x.numel() > 0, f"{given}, but {kind} with at least one point was expected.")
    event = tuple(x.shape[1 + ensemble :]) or (1,)
    require(shape in (None, event), f"{given}, read as {kind}; its last axes must be the training points' {shape}.")
    found = Samples(x.double().reshape(*((1,) * (not ensemble)), *x.shape[: 1 + ensemble], -1), ensemble)
    good = found.x.isfinite().all(-1).reshape(found.units, -1).all(1)
    if not good.all():
        bad = int((~good).sum())
        what = f"{bad} of the {len(good)} {found.unit} of {name} hold NaN or infinite values"
        require(skip_diverged, f"{what}: they diverged; skip_diverged=True leaves them out, with a warning.")
        require(bad < len(good), f"{what}: nothing is left to measure.")
        warnings.warn(f"{what} and are left out.", stacklevel=3)
        return Samples(found.x[good] if ensemble else found.x[:, good], ensemble)
    return found


def read_pair(a: Array, b: Array, members: Members, skip_diverged: bool) -> tuple[Samples, Samples]:
    """Read two samples or ensembles of one dimension, on the device of the first."""
    each = members if isinstance(members, tuple) else (members, members)
    require(len(each) == 2, f"members must be one answer for both samples or a pair of answers, not {members!r}.")
    first, second = read(a, each[0], skip_diverged, "a"), read(b, each[1], skip_diverged, "b")
    d, e = first.x.shape[-1], second.x.shape[-1]
    require(d == e, f"The points of a have {d} coordinates, those of b {e}; both must have the same.")
    return first, Samples(second.x.to(first.x.device), second.members)
