"""What a sample is, and how its units give errors: the door of every metric."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vkernel.core.errors import InputError, require
from vkernel.core.estimate import Estimate, student_quantile

__all__ = ["CHUNK", "Generator", "Law", "Members", "read", "read_two", "wilson", "with_error"]

Members = bool | None | tuple[bool | None, bool | None]
Generator = torch.Generator | int | None
CHUNK = 1 << 21  # numbers in a working array: 16 MB


@dataclass(frozen=True)
class Law:
    """Points ``(M, n, d)`` in float64, M = 1 for one sample; the units are members if there are any, else points."""

    x: Tensor
    members: bool

    @property
    def points(self) -> Tensor:
        return self.x.flatten(0, 1)

    @property
    def units(self) -> int:
        return self.x.shape[0 if self.members else 1]

    def share(self, counts: Tensor, n: Any = None, scale: float = 1.0) -> Estimate:
        """``scale`` times the share of what each member counted ``(M, …)`` among its ``n`` points, default all."""
        n = self.x.shape[1] if n is None else n
        if self.members:
            return Estimate.of_mean(counts.double() / n, scale=scale)
        return wilson(counts[0].double(), float(n), scale)

    def variance(self, influence: Tensor) -> tuple[float, int]:
        """Of the mean of ``influence``, one number for each point: from the spread of units, and their number."""
        per_unit = influence.reshape(self.units, -1).mean(1)
        return (float(per_unit.var()) / self.units if self.units > 1 else math.inf), self.units


def read(x: Any, members: Any, skip: bool, name: str = "x", shape: tuple[int, ...] | None = None) -> Law:
    """Refuse what is no sample (of events of ``shape``); drop what diverged if that was asked for."""
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
    wide = x.double().reshape(*x.shape[: 1 + ensemble], -1)
    good = wide.isfinite().flatten(1).all(1)
    if not good.all():
        bad, unit = int((~good).sum()), "members" if ensemble else "samples"
        what = f"{bad} of the {len(good)} {unit} of {name} hold NaN or infinite values"
        require(skip, f"{what}: they diverged; skip_diverged=True leaves them out, with a warning.")
        require(bad < len(good), f"{what}: nothing is left to measure.")
        warnings.warn(f"{what} and are left out.", stacklevel=3)
        wide = wide[good]
    return Law(wide if ensemble else wide[None], ensemble)


def read_two(a: Any, b: Any, members: Members, skip: bool) -> tuple[Law, Law]:
    """Two laws of one dimension on one device."""
    each = members if isinstance(members, tuple) else (members, members)
    require(len(each) == 2, f"members must be one answer for both samples or a pair of answers, not {members!r}.")
    first, second = read(a, each[0], skip, "a"), read(b, each[1], skip, "b")
    d, e = first.x.shape[-1], second.x.shape[-1]
    require(d == e, f"The points of a have {d} coordinates, those of b {e}; both must have the same.")
    return first, Law(second.x.to(first.x.device), second.members)


def wilson(hits: Tensor, n: float, scale: float = 1.0) -> Estimate:
    """``scale`` times a share with Wilson's interval, a float or a tensor."""
    z, p = student_quantile(10**9), hits / n
    middle, half = p + z * z / (2 * n), z * (p * (1 - p) / n + z * z / (4 * n * n)).sqrt()
    low = ((middle - half) / (1 + z * z / n)).masked_fill(hits == 0, 0.0)
    high = ((middle + half) / (1 + z * z / n)).masked_fill(hits == n, 1.0)
    fields = [scale * f for f in (p, (p * (1 - p) / n).sqrt(), low, high)]
    return Estimate(*(fields if p.ndim else map(float, fields)))


def with_error(value: float, parts: Sequence[tuple[float, int]], low: float, high: float, slope: float = 1) -> Estimate:
    """Independent variances, each from so many units, added; Student's interval (Welch) cut to [low, high].

    The variances are of a quantity of which the value is a function with this ``slope``.
    """
    total = sum(v for v, _ in parts)
    if not math.isfinite(total):
        return Estimate(value, math.inf, low, high)
    freedom = total**2 / s if (s := sum(v**2 / (units - 1) for v, units in parts)) > 0 else 1e9
    se = slope * math.sqrt(total)
    half = student_quantile(max(1, int(min(freedom, 1e9)))) * se
    return Estimate(value, se, max(low, value - half), min(high, value + half))
