r"""Several scores that differ in the randomness of training alone: their moments and samples (docs/theory.md, §7).

For members :math:`\hat s_m`, :math:`m = 1 \ldots M`,

.. math:: s_{avg} = \frac1M \sum_m \hat s_m, \qquad
          \mathrm{Cov}_\theta[\hat s, \hat s'] = \frac{1}{M-1} \sum_m (\hat s_m - s_{avg})(\hat s_m' - s_{avg}')^T ,
          \qquad \bar q(x_\epsilon) = E_\theta\,q_\theta(x_\epsilon) ,

and the covariance is unbiased. Members that share something, an initialisation say, are not independent: with their
``groups`` the covariance is split by the analysis of variance of :class:`~vkernel.core.variance.Groups`."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Self, TypedDict, Unpack, overload

import torch
from torch import Tensor

from vkernel.core import rng
from vkernel.core.checks import check_real, check_shape, check_whole, is_whole
from vkernel.core.covariance import Covariance, Cross, Factored, flat
from vkernel.core.errors import InputError, require
from vkernel.core.progress import Progress, part, progress as show_progress
from vkernel.core.variance import Cumulants, Groups, cumulants
from vkernel.process import Process
from vkernel.sample.loop import Callback, Options, Save, Solution, grid
from vkernel.sample.ode import PROBES, pf_ode
from vkernel.score.base import Score, Time, signs

CHUNK = 1 << 22  # numbers of a sample taken at once
AXES = {"x": 0, "path": 1, "error": 0, "logp": 0}  # of the member, in a Solution


class Sampling(TypedDict, total=False):
    """The options of :meth:`Scores.sample`, besides ``save``."""

    x_T: Tensor | None
    steps: int | Tensor
    method: str
    spacing: str | None
    seed: int
    shared: bool
    callback: Callback | None
    progress: Progress


class Scores(ABC):
    """M scores of one process and one event shape that differ in the randomness of training alone.
    ``scores[m]`` is the :class:`~vkernel.score.base.Score` of one member, ``scores[a:b]`` several. A member that
    diverged in training stays in its place, is listed in ``diverged``, and takes part in no moment.

    >>> import torch, vkernel as vk
    >>> data, process = vk.data.toy("triple"), vk.VP()
    >>> model = vk.models.Linear(vk.features.grid("gaussian", 4, process=process), target="x0")
    >>> ens = vk.train_ensemble(model, data, process, members=3, draws=32)  # an Ensemble is Scores
    >>> x = torch.zeros(5, 1)
    >>> len(ens), ens(x, 0.5).shape, ens.mean(x, 0.5).shape, ens.cov(x, 0.5).trace().shape
    (3, torch.Size([3, 5, 1]), torch.Size([5, 1]), torch.Size([5]))
    """

    process: Process
    shape: tuple[int, ...] | None
    groups: Groups
    device: torch.device  # on which samples start
    dtype: torch.dtype
    diverged: Sequence[int] = ()

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of members."""

    @abstractmethod
    def member(self, index: int) -> Score:
        """Return the score of one member."""

    @abstractmethod
    def select(self, indices: Sequence[int]) -> Self:
        """Return some of the members, in the given order."""

    @abstractmethod
    def __call__(self, x: Tensor, t: Time) -> Tensor:
        """Return the scores of all members at the same points, ``(M, *batch, *shape)`` for ``x (*batch, *shape)``."""

    @abstractmethod
    def paired(self, x: Tensor, t: Time) -> Tensor:
        """Return each member's score at its own points: ``x (M, *batch, *shape)``, t a scalar or one per point."""

    @overload
    def __getitem__(self, m: int) -> Score: ...
    @overload
    def __getitem__(self, m: slice) -> Self: ...
    def __getitem__(self, m: int | slice) -> Score | Self:
        if isinstance(m, slice):
            return self.select(range(len(self))[m])
        require(is_whole(m), f"Scores take a member's index or a slice, not {m!r}.")
        if not -len(self) <= m < len(self):
            raise IndexError(f"There are {len(self)} members; {m} is not among them.")
        return self.member(m % len(self))

    @property
    def report(self) -> str:
        """How many members diverged, as a sentence."""
        if not self.diverged:
            return f"All {len(self)} members are finite."
        which = f"indices {list(self.diverged[:8])}{', …' if len(self.diverged) > 8 else ''}"
        lost = f"{len(self.diverged)} of {len(self)} members diverged ({which})"
        return f"{lost}: they take part in no mean. Try a smaller learning rate."

    @property
    def finite(self) -> Self:
        """The members that did not diverge."""
        require(not self.diverged or len(self.diverged) < len(self), self.report)
        return self.select([m for m in range(len(self)) if m not in self.diverged]) if self.diverged else self

    def mean(self, x: Tensor, t: Time) -> Tensor:
        """Return s_avg, the mean score of the finite members, like x."""
        return self._scores(x, t).mean(0)

    def _scores(self, x: Tensor, t: Time) -> Tensor:
        """Return the scores of the finite members; refuse NaN at an x that is finite, which would spread to moments."""
        finite = self.finite
        s = finite(x, t)
        if not _finite(s) and _finite(x):
            lost = (~s.flatten(1).isfinite().all(1)).nonzero().flatten().tolist()
            kept = [m for m in range(len(self)) if m not in self.diverged]
            which = ", ".join(str(kept[m]) for m in lost[:8]) + ", …" * (len(lost) > 8)
            raise InputError(f"{len(lost)} of {len(self)} members return NaN or infinite scores here: {which}.")
        return s

    @property
    def mean_score(self) -> Score:
        """s_avg as a score."""
        return Mean(self, self.shape)

    def deviations(self, x: Tensor, t: Time) -> Tensor:
        r"""Return factors of V, ``(K, *batch, *shape)``: :math:`(\hat s_m - s_{avg})/\sqrt{M - 1}` without groups."""
        finite = self.finite
        require(len(finite) >= 2, f"A covariance over members needs two finite members; there are {len(finite)}.")
        return finite.groups.factors(finite._scores(x, t))

    def cov(self, x: Tensor, t: Time, x2: Tensor | None = None, t2: Time | None = None) -> Covariance:
        """Return Cov over members of the score at (x, t), or between (x, t) and (x2, t2), paired over the batch."""
        left = self.deviations(x, t)
        shape = tuple(x.shape[1:]) if self.shape is None else self.shape
        if x2 is None:
            require(t2 is None, "Give x2 with t2: the covariance is between two points and times.")
            return Factored(left, shape)
        one, two = (flat(a, shape).movedim(0, -1) for a in (left, self.deviations(x2, t if t2 is None else t2)))
        return Cross(one @ two.mT, shape)

    def split(self, x: Tensor, t: Time) -> tuple[Tensor, Tensor]:
        """Return the variances of each coordinate between and within groups, both like x."""
        return self.finite.groups.split(self._scores(x, t))

    def cumulants(self, x: Tensor, t: Time, components: int = 3) -> Cumulants:
        """Return third and fourth cumulants of the score over members, with errors: zero for a Gaussian law."""
        return cumulants(self._scores(x, t), components)

    def combine(self, weights: Tensor) -> Callable[[Tensor, Time], Tensor]:
        r"""Return the field :math:`\sum_m w_{km} \hat s_m(x_k, t)` of ``weights (K, M)``; ``len(x)`` is K."""

        self._check_weights(weights)

        def field(x: Tensor, t: Time) -> Tensor:
            good = check_real(x, "x").ndim >= 2 and len(x) == len(weights)
            require(good, f"A field of {len(weights)} members takes x ({len(weights)}, *batch, *shape).")
            s = self(x, t)  # (M, K, *batch, *shape)
            return (weights.mT.to(s).reshape(*weights.mT.shape, *(1,) * (x.ndim - 1)) * s).sum(0)

        return field

    def _check_weights(self, weights: Tensor) -> None:
        good = check_real(weights, "weights").ndim == 2 and weights.shape[1] == len(self)
        require(good, f"weights must be (K, {len(self)}), one for each member; got {tuple(weights.shape)}.")
        require(not self.diverged, f"A sum over members needs finite ones; combine those of .finite. {self.report}")

    def start(self, n: int, seed: int = 0, *, shared: bool = True) -> Tensor:
        """Draw x_T from the prior: ``(n, *shape)``, the same for all members, or ``(M, n, *shape)``."""
        if self.shape is None:
            raise InputError("The event shape is not known yet: give shape= when the scores are read, or x_T.")
        event = (check_whole(n, "The number of samples"), *self.shape)
        sources = (rng.stream(seed, "ensemble/x_T", m) for m in ([0] if shared else self.indices))
        draws = [self.process.prior(event, device=self.device, dtype=self.dtype, generator=g) for g in sources]
        return draws[0] if shared else torch.stack(draws)

    @property
    def indices(self) -> Sequence[int]:
        """The index of each member, from which its random streams are derived."""
        return range(len(self))

    @overload
    def sample(self, n: int | None = ..., **options: Unpack[Sampling]) -> Tensor: ...
    @overload
    def sample(self, n: int | None = ..., *, save: Save, **options: Unpack[Sampling]) -> Solution: ...
    def sample(
        self,
        n: int | None = None,
        *,
        x_T: Tensor | None = None,
        steps: int | Tensor = 100,
        method: str = "exponential",
        spacing: str | None = "log",
        seed: int = 0,
        shared: bool = True,
        save: Save = (),
        callback: Callback | None = None,
        progress: Progress = False,
    ) -> Tensor | Solution:
        """Sample every member by the PF-ODE, from ``x_T`` or from :meth:`start`; ``(M, n, *shape)``.
        ``save`` and ``callback`` are those of :func:`~vkernel.sample.pf_ode` for the batch ``(M, n)``: a path is
        ``(steps + 1, M, n, *shape)``, and with a callback all members are sampled at once. Probes of "logp" depend on
        ``seed`` and member. Members that diverged, in training or while sampling, are NaN, with a warning."""
        require((n is None) != (x_T is None), "Give either n, the number of samples of each member, or x_T.")
        require(len(self.diverged) < len(self), self.report)
        x_T = check_real(x_T if n is None else self.start(n, seed, shared=shared), "x_T")
        x_T = x_T if x_T.is_floating_point() else x_T.to(torch.get_default_dtype())
        shape = tuple(x_T.shape[1:]) if self.shape is None else self.shape
        lead = check_shape(x_T, "x_T", shape).ndim - len(shape)
        require(1 <= lead <= 2, f"x_T must be (n, *shape) or (M, n, *shape); got {tuple(x_T.shape)}.")
        require(lead == 1 or len(x_T) == len(self), f"x_T has {len(x_T)} members; there are {len(self)}.")
        x_T = x_T if lead == 2 else x_T.expand(len(self), *x_T.shape)
        names = [save] if isinstance(save, str) else list(save)
        members = [m for m in range(len(self)) if callback is not None or m not in self.diverged]
        # an adaptive method shares its steps within a block: one member each, or members would depend on each other
        adaptive, at_once = method == "dopri5", max(1, CHUNK // max(1, x_T[0].numel()))
        at_once = 1 if adaptive else at_once if callback is None else len(self)
        kept = [*names, "path"] if adaptive and callback is not None else names
        how: Options = {"steps": steps, "spacing": spacing, "allow_nan": True}
        how["callback"] = None if adaptive else callback
        seeds, blocks = [rng.key(seed, "ensemble/probes", m) for m in self.indices], []
        with show_progress(len(members), progress) as report:
            for which in (members[k : k + at_once] for k in range(0, len(members), at_once)):
                score, x = _Paired(self.select(which), shape), x_T[which].contiguous()
                signed = [signs(x[k], PROBES, seeds[m]) for k, m in enumerate(which)] if "logp" in names else []
                how["progress"] = part(report, "sampling", len(which))
                probes = torch.stack(signed, 1) if signed else PROBES
                found = pf_ode(score, x, method=method, probes=probes, save=kept, **how)
                blocks.append(vars(found) if isinstance(found, Solution) else {"x": found})
                if adaptive:  # it reports no steps
                    report("sampling", len(which))
        kinds = {k: axis for k, axis in AXES.items() if blocks[0].get(k) is not None}
        out = {k: _placed([b[k] for b in blocks], axis, members, len(self)) for k, axis in kinds.items()}
        times = grid(self.process, steps, spacing)
        if callback is not None and adaptive:
            for k, t in enumerate(times.tolist()):
                callback(k, t, out["path"][k])
        lost = {*self.diverged, *(~out["x"].flatten(1).isfinite().all(1)).nonzero().flatten().tolist()}
        if lost:
            rows = torch.tensor(sorted(lost), device=x_T.device)
            out = {name: a.index_fill(AXES[name], rows, torch.nan) for name, a in out.items()}
            before = f"{len(self.diverged)} of {len(self)} members diverged in training"
            text = f"{before}, {len(lost) - len(self.diverged)} while sampling: their samples are NaN."
            warnings.warn(f"{text} More steps may help the latter.", stacklevel=2)
        return Solution(times=times, **{k: a for k, a in out.items() if k in ("x", *names)}) if names else out["x"]


def _finite(a: Tensor) -> bool:
    """Return whether all values are finite; under ``torch.vmap``, which hides values, say that they are."""
    try:
        return bool(a.isfinite().all())
    except RuntimeError:
        return True


def _placed(blocks: list[Tensor], axis: int, rows: Sequence[int], count: int) -> Tensor:
    """Join ``blocks``, which belong to the members ``rows``, along ``axis``, with NaN for the other members."""
    a = torch.cat(blocks, axis)
    if len(rows) == count:
        return a
    whole = a.new_full((*a.shape[:axis], count, *a.shape[axis + 1 :]), torch.nan)
    return whole.index_copy(axis, torch.tensor(rows, device=a.device), a)


class Mean(Score):
    """The mean score of several members, as a score."""

    def __init__(self, scores: Scores, shape: tuple[int, ...] | None) -> None:
        self.scores, self.process, self.shape = scores, scores.process, shape

    def __call__(self, x: Tensor, t: Time) -> Tensor:
        return self.scores.mean(x, t)

    def __repr__(self) -> str:
        return f"mean score of {self.scores!r}"


class _Paired(Mean):
    """Each member at its own points, ``x (M, n, *shape)``, as one score."""

    def __call__(self, x: Tensor, t: Time) -> Tensor:
        return self.scores.paired(x, t)
