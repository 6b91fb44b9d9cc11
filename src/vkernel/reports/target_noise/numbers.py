"""Numbers of a study of target noise beside its rules: curves with intervals, trends over c, and single members."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import xarray
from torch import Tensor

from vkernel.core.twoway import DRAWS, Resamples
from vkernel.reports.target_noise.cells import FEWEST, OWN, SETS, Cell, Measured, cells, factors_of, of_one, text
from vkernel.reports.target_noise.rules import ZERO, Comparison, Part, log_ratio

ENDS = ("value", "low", "high")
CURVES = ("step", "end")
LEVELS = ("step", "level", "end")
WITHOUT_ONE = ("corr_pixels", "corr_images")  # values without one member, of which the jackknife gives the error
BY_MEMBER = {"update_norm": CURVES, "gradient_norm": CURVES, "corr_pixels": LEVELS, "corr_images": LEVELS}


@dataclass(frozen=True)
class Trend:
    """The slope of a quantity over log₂(1 + c), with what was compared: ``objectives`` by ascending c."""

    cell: dict[str, str]
    objectives: tuple[str, ...]
    part: Part


@dataclass(frozen=True)
class Single:
    """What single pairs of twins do at the last snapshot: differences or logarithms of ratios, by member."""

    cell: dict[str, str]
    of: str
    to: str
    name: str
    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return float(np.median(self.values))

    @property
    def below(self) -> int:
        """The number of members that are lower with the first objective."""
        return sum(v < 0 for v in self.values)


def summary(ds: xarray.Dataset, *, draws: int = DRAWS, seed: int = 0) -> xarray.Dataset:
    """Return means with 95 % intervals over members × images, by factors, objective, step, level and ``end``.

    ``training``, ``held_out``, ``gap`` (their difference), ``excess`` and ``V`` are by step and level; ``V_ratio`` is
    that to the twins of c = 0, and ``corr_pixels`` and ``corr_images`` are the correlations of V with C. By step are
    ``memorised``, ``energy_single``, ``energy_pooled`` (and ``kernel_…``), ``update_norm`` and ``gradient_norm``.
    ``held_out_mean`` is the geometric mean of ``held_out`` over levels. Intervals of distances, norms and correlations
    are over members alone, and so are those of ``gap_band`` and ``memorised_band``, on the same images and starts, for
    figures in which objectives are compared.
    ``members`` are those that did not diverge. What was not run is NaN."""
    factors = [str(d) for d in ds["error"].dims if d not in OWN]
    shape = tuple(ds.sizes[d] for d in (*factors, "objective"))
    steps, levels, labels = ds.sizes["step"], ds.sizes["level"], [str(o) for o in ds["objective"].values]
    out: dict[str, tuple[tuple[str, ...], np.ndarray]] = {}
    lost = np.zeros(shape, dtype=int)
    for cell in cells(ds, draws, seed):
        at = tuple([text(v) for v in ds[d].values].index(cell.at[d]) for d in factors)
        for label in cell.labels:
            where = (*at, labels.index(label))
            members = cell.common(label)
            lost[where] = len(members)
            if len(members) < FEWEST:
                continue
            for name, (dims, values) in _curves(cell, label, members).items():
                size = tuple({"step": steps, "level": levels, "end": len(ENDS)}[d] for d in dims)
                empty = ((*factors, "objective", *dims), np.full(shape + size, np.nan))
                out.setdefault(name, empty)[1][where] = values
    found = xarray.Dataset(
        {**out, "members": ((*factors, "objective"), lost)},
        {d: ds[d] for d in (*factors, "objective", "step", "level")} | {"end": list(ENDS)},
    )
    keep = {*factors, "level"}
    for name in ("rho", "network_share"):
        one = of_one(ds[name])
        found[name] = one.mean([d for d in one.dims if d not in keep])
    return found


def _curves(cell: Cell, label: str, members: tuple[int, ...]) -> dict[str, tuple[tuple[str, ...], np.ndarray]]:
    """Return the quantities of one objective, each with its dimensions."""
    draw, own = cell.resamples(len(members)), cell.measured(label, members)
    error = {"training": own.error[..., 0], "held_out": own.error[..., 1], "excess": own.excess, "V": own.V[..., 0]}
    found: dict[str, tuple[tuple[str, ...], Tensor]]
    found = {name: (LEVELS, _ends(draw, torch.where(x > 0, x, torch.nan).log()).exp()) for name, x in error.items()}
    found["gap"] = LEVELS, _ends(draw, own.error[..., 1] - own.error[..., 0])
    held = own.error[..., 1]
    found["held_out_mean"] = CURVES, _ends(draw, torch.where(held > 0, held, torch.nan).log().mean(-1)).exp()
    found["memorised"] = CURVES, _ends(draw, own.memorised)
    each = own.each[0]
    found["gap_band"] = LEVELS, _ends(draw, draw.mean(each[..., 1] - each[..., 0]))
    found["memorised_band"] = CURVES, _ends(draw, draw.mean(own.copies[0]))
    for name, distances in zip(("single", "pooled"), cell.distances(label, members, images=False), strict=True):
        found |= {f"{kind}_{name}": (CURVES, _ends(draw, curve)) for kind, curve in distances.items()}
    for name, dims in BY_MEMBER.items():
        if name in cell.ds:
            values = torch.from_numpy(cell.array(name, label, *dims[:-1])[list(members)].astype(float))
            if name in WITHOUT_ONE:
                values = values.mean(0) - (len(members) - 1) * (values - values.mean(0))
            ends = _ends(draw, draw.mean(values))
            found[name] = dims, ends.clamp(-1, 1) if name in WITHOUT_ONE else ends  # those are correlations
    pair = Comparison(cell, label, ZERO)
    if pair.run and pair.enough and label != ZERO:
        found["V_ratio"] = LEVELS, _ends(pair.draw, log_ratio(pair.a.V[..., 0], pair.b.V[..., 0])).exp()
    return {name: (dims, values.numpy()) for name, (dims, values) in found.items()}


def _ends(draw: Resamples, replicates: Tensor) -> Tensor:
    return draw.estimate(replicates).stack(-1)


def trends(ds: xarray.Dataset, *, draws: int = DRAWS, seed: int = 0) -> list[Trend]:
    """Return the slope of each quantity over log₂(1 + c), at the last snapshot, where three values of c or more were
    run; errors and V (mean of the logarithm over levels) as ratios for each unit of it."""
    found = []
    for cell in cells(ds, draws, seed):
        named = factors_of(cell.labels)
        members = cell.common(*named) if named else ()
        if len(named) < 3 or len(members) < FEWEST:
            continue
        draw, x = cell.resamples(len(members)), torch.tensor([math.log2(1 + c) for c in named.values()])
        weights = ((x - x.mean()) / (x - x.mean()).square().sum()).double()
        values = [last(cell.measured(label, members)) for label in named]
        for name, (ratio, _) in ((k, v) for k, v in values[0].items() if all(k in other for other in values)):
            slope = sum(w * v[name][1] for w, v in zip(weights, values, strict=True))
            assert isinstance(slope, Tensor)
            part = Part.of(name, draw.contrast(slope), ratio, step=int(cell.steps[-1]))
            found.append(Trend(cell.at, tuple(named), part))
    return found


def last(one: Measured) -> dict[str, tuple[bool, Tensor]]:
    """Return replicates of each quantity at the last snapshot, and whether they are logarithms."""
    positive = {"training": one.error[..., 0], "held_out": one.error[..., 1], "excess": one.excess, "V": one.V[..., 0]}
    found = {k: (True, torch.where(v > 0, v, torch.nan)[:, -1].log().mean(-1)) for k, v in positive.items()}
    found["memorised"] = False, one.memorised[:, -1]
    for name, distances in (("single", one.single), ("pooled", one.pooled)):
        found |= {f"{kind}_{name}": (False, curve[:, -1]) for kind, curve in distances.items()}
    return found


def singles(ds: xarray.Dataset, *, seed: int = 0) -> Iterator[Single]:
    """Yield what each pair of twins does, for every c against c = 0: errors as mean logarithms of ratios over levels,
    and the memorised fraction as differences."""
    for cell in cells(ds, 2, seed):
        for label in factors_of(cell.labels):
            pair = Comparison(cell, label, ZERO)
            if label == ZERO or not (pair.run and pair.members):
                continue
            index = list(pair.members)
            errors = [cell.array("error", o, "step", "level", "set")[index, -1].mean(-1) for o in (label, ZERO)]
            copies = [(cell.array("ratio", o, "step")[index, -1] < 1 / 3).mean(-1) for o in (label, ZERO)]
            values = {name: np.log(errors[0] / errors[1])[..., k].mean(-1) for k, name in enumerate(SETS)}
            values = {name.replace("-", "_"): v for name, v in values.items()} | {"memorised": copies[0] - copies[1]}
            for name, v in values.items():
                yield Single(cell.at, label, ZERO, name, tuple(float(u) for u in v))
