r"""What was measured of twins, resampled over members and images: the numbers that the decision rules compare.

The rules read the labelled arrays of a study on networks, :func:`vkernel.study.load` of ``images.toml``. A *cell* is a
combination of all factors but ``objective``: a data set, its size n and a network. In a cell all objectives have the
same members, and were measured on the same noised images and from the same starts. Of each objective:

=================  =====================================================================================================
``error``          (step, level, set): mean of :math:`|D - x_0|^2/d` on noised training and on held-out images
``excess``         (step, level): mean of :math:`|D - m|^2/d` on noised training images, with the exact denoiser m
``V``              (step, level, set): mean of :math:`\tfrac12 |D_m - D_{m'}|^2/d` over pairs of members
``memorised``      (step): share of samples with d1/d2 < 1/3, less that of held-out images
``single``         (kind, step): mean over members of the distance of one model to held-out images (energy, kernel)
``pooled``         (kind, step): the distance of the average :math:`\bar q` over members, from pairs of members; missing
                   where these pairs were not measured
=================  =====================================================================================================

A member **diverged** if one of its errors is not finite. It is left out, with its twins, of every comparison of that
objective; the count is reported, and a comparison that loses more than a quarter of its members is not decided, since
those that remain are a selection.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import xarray
from torch import Tensor

from vkernel.core.errors import require
from vkernel.core.twoway import DRAWS, Resamples

COPY = 1 / 3  # of the second nearest distance
FEWEST = 3  # members of a comparison
LOST = 0.25  # the largest share of members that may have diverged
SETS = ("training", "held-out")
KINDS = {"energy": 1.0, "kernel": -1.0}  # D = ±(2 E f(X,Y) - E f(X,X') - E f(Y,Y')): f is a distance, or a kernel
OWN = {"objective", "member", "other", "step", "level", "set", "image"}  # dimensions that are no factors of cells
NEEDED = ("error", "excess", "gap_members", "ratio", "rho", "network_share")


@dataclass(frozen=True)
class Measured:
    """Replicates ``(1 + draws, …)`` of the quantities of one objective; ``each`` and ``copies`` are by member."""

    error: Tensor
    excess: Tensor
    V: Tensor
    memorised: Tensor
    single: dict[str, Tensor]
    pooled: dict[str, Tensor]
    each: Tensor  # error (1 + draws, member, step, level, set)
    copies: Tensor  # memorised (1 + draws, member, step)
    copied: bool  # whether any member copied anything, at any snapshot
    least: float  # the least error of a share: one more copy in one member


@dataclass
class Cell:
    """The objectives of one data set, size and network; ``at`` are the labels of the cell."""

    ds: xarray.Dataset
    at: dict[str, str]
    draws: int = DRAWS
    seed: int = 0
    _held: dict[tuple[str, tuple[int, ...]], Measured] = field(default_factory=dict)
    _drawn: dict[int, Resamples] = field(default_factory=dict)
    _finite: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def steps(self) -> Tensor:
        return torch.from_numpy(self.ds["step"].values.astype(float))

    @property
    def levels(self) -> np.ndarray:
        found: np.ndarray = self.ds["level"].values.astype(float)
        return found

    @property
    def members(self) -> int:
        return int(self.ds.sizes["member"])

    @property
    def labels(self) -> list[str]:
        """The objectives that were run."""
        return [str(o) for o in self.ds["objective"].values if self.finite(str(o)).any()]

    def finite(self, label: str) -> np.ndarray:
        """Return which members have finite errors with an objective: none, if it was not run."""
        if label not in self.ds["objective"].values:
            return np.zeros(self.members, dtype=bool)
        if label not in self._finite:
            values = self.array("error", label)
            self._finite[label] = np.isfinite(values).reshape(len(values), -1).all(1)
        return self._finite[label]

    def array(self, name: str, label: str, *dims: str) -> np.ndarray:
        """Return an array of one objective with ``member`` and ``dims`` first."""
        one = self.ds[name].sel(objective=label) if "objective" in self.ds[name].dims else self.ds[name]
        found: np.ndarray = one.transpose(*(d for d in ("member", *dims) if d in one.dims), ...).values
        return found

    def common(self, *labels: str) -> tuple[int, ...]:
        """Return the members that are finite with all of the objectives."""
        every = np.logical_and.reduce([self.finite(label) for label in labels])
        return tuple(int(m) for m in np.flatnonzero(every))

    def level(self, name: str) -> np.ndarray:
        """Return a quantity by noise level that is the same for all members: ρ, or the network's noise share at c = 1
        (that of another c is another number)."""
        one = of_one(self.ds[name])
        found: np.ndarray = one.mean([d for d in one.dims if d != "level"]).values.astype(float)
        return found

    def scalar(self, name: str) -> float:
        """Return a number that is the same for all members and objectives."""
        return float(self.ds[name].mean()) if name in self.ds else float("nan")

    def resamples(self, count: int) -> Resamples:
        """Return the draws of so many members."""
        if count not in self._drawn:
            self._drawn[count] = Resamples(count, self.draws, self.seed)
        return self._drawn[count]

    def measured(self, label: str, members: Sequence[int]) -> Measured:
        """Return the quantities of one objective over some of its members; they are computed once."""
        key = label, tuple(members)
        if key not in self._held:
            self._held[key] = self._measure(label, list(members))
        return self._held[key]

    def _measure(self, label: str, members: list[int]) -> Measured:
        draw = self.resamples(len(members))

        def of(name: str, *dims: str) -> Tensor:
            return torch.from_numpy(np.asarray(self.array(name, label, *dims)[members], dtype=float))

        error, gaps = (
            of("error", "step", "level", "set"),
            of("gap_members", "other", "step", "level", "set")[:, members],
        )
        gaps = torch.where(gaps.isnan(), gaps.transpose(0, 1), gaps)  # one triangle is enough
        gaps[range(len(members)), range(len(members))] = 0.0
        each = torch.stack([draw.each(error[:, :, :, k], name) for k, name in enumerate(SETS)], -1)
        V = torch.stack([draw.pairs(gaps[..., k, :], name) for k, name in enumerate(SETS)], -1)
        hits = (of("ratio", "step") < COPY).double()
        copies = draw.each(hits, "samples") - self.scalar("memorised_held_out")
        single, pooled = self.distances(label, members)
        return Measured(
            error=torch.einsum("bm,bm...->b...", draw.members, each),
            excess=draw.mean(of("excess", "step", "level"), SETS[0]),
            V=V,
            memorised=torch.einsum("bm,bm...->b...", draw.members, copies),
            single=single,
            pooled=pooled,
            each=each,
            copies=copies,
            copied=bool(hits.any()),
            least=1 / (hits.shape[0] * hits.shape[-1]),
        )

    def distances(
        self, label: str, members: Sequence[int], images: bool = True
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the distances to held-out images of one model and of the average, ``(1 + draws, step)`` by kind.

        With ``images`` the held-out images are drawn too, for differences between objectives: the mean distance among
        these images, which is not drawn, cancels there. It does not in a distance by itself, whose replicates would
        spread far more than the distance does; those are over members, at the same images."""
        draw, some = self.resamples(len(members)), list(members)
        single, pooled = {}, {}
        for kind, sign in KINDS.items():
            if f"{kind}_to" not in self.ds:
                continue
            to, within = (
                torch.from_numpy(np.asarray(self.array(f"{kind}_{name}", label, *dims)[some], dtype=float))
                for name, dims in (("to", ("step",)), ("within", ("other", "step")))
            )
            near, within = draw.mean(to, "distance") if images else draw.mean(to.mean(-1)), within[:, some]
            within = torch.where(within.isnan(), within.transpose(0, 1), within)
            own = within.diagonal(dim1=0, dim2=1).movedim(-1, 0)
            apart = self.scalar(f"{kind}_held_out")
            single[kind] = sign * (2 * near - draw.mean(own) - apart)
            if within.isfinite().all():  # distances between members may not have been measured
                pooled[kind] = sign * (2 * near - draw.pairs(within) - apart)
        return single, pooled


def cells(ds: xarray.Dataset, draws: int = DRAWS, seed: int = 0) -> Iterator[Cell]:
    """Yield the cells of a study that were run, in the order of its factors."""
    missing = [name for name in (*NEEDED, "objective") if name not in ds]
    kind = "The rules on target noise need a study of networks such as images.toml"
    require(not missing, f"{kind}; this one has no {', '.join(missing)}.")
    factors = [str(d) for d in ds["error"].dims if d not in OWN]
    for index in np.ndindex(*(ds.sizes[d] for d in factors)):
        one = ds.isel(dict(zip(factors, index, strict=True)))
        cell = Cell(one.load(), {d: text(ds[d].values[i]) for d, i in zip(factors, index, strict=True)}, draws, seed)
        if cell.labels:
            yield cell


def of_one(share: xarray.DataArray) -> xarray.DataArray:
    """Return ρ or the noise share of c = 1, from an array over objectives; NaN where c = 1 is not among them."""
    return share.reindex(objective=[label_of(1)]) if "objective" in share.dims else share


def text(value: object) -> str:
    """Return the label of a value of a factor: whole numbers without a point."""
    return f"{value:.15g}" if isinstance(value, int | float | np.number) else str(value)


def label_of(c: float, placebo: str = "") -> str:
    """Return the label of an objective: "c = 1", or "white 1" for a placebo."""
    return f"{placebo} {c:g}" if placebo else f"c = {c:g}"


def factors_of(labels: Sequence[str]) -> Mapping[str, float]:
    """Return the factor c of each label that names one, without placebos, ascending."""
    named = {label: float(label[4:].replace("½", "0.5")) for label in labels if label.startswith("c = ")}
    return dict(sorted(named.items(), key=lambda pair: pair[1]))
