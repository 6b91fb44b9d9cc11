r"""The V-kernel of infinitely wide networks (docs/theory.md, §8.2).

A lazy network :math:`\hat s = a_t + B_t f`, trained for time :math:`\tau` on the inputs X = U and the targets y, is
linear in both :math:`f_0` and y (:mod:`vkernel.train.models.lazy`): with the smoother G,

.. math:: f(x) = f_0(x) + w(x)^T (y - f_0(X)), \qquad w(x)^T = K(u,U)\, G .

So, with the noise of the targets :math:`N_i = \mathrm{Cov}[y_i|x_i]` and the covariance :math:`K_0 \otimes 1` of
:math:`f_0`, the covariance of f is a sum of three parts, each exact given the inputs:

.. math:: \text{targets:}\quad & E_X\Big[\sum_i w_i(x)\, w_i(x')\, N_i\Big], \\
          \text{init:}\quad & E_X\big[K_0(x,x') - w^T K_0(X,x') - K_0(x,X)\, w' + w^T K_0(X,X)\, w'\big] \otimes 1, \\
          \text{inputs:}\quad & \mathrm{Cov}_X\big[E(f|X)\big], \qquad E(f|X) = w(x)^T E[y|X] ,

and :math:`\mathrm{Cov}[\hat s, \hat s'] = B_t B_{t'}` times it. :math:`E_X` is a mean over ``sets`` sets of inputs and
:math:`\mathrm{Cov}_X` their sample covariance. What does not vary is held as member 0 of the ensemble has it: the
inputs (then there is one set), the random numbers of the targets, :math:`f_0`; the last two then belong to
:math:`E(f|X)`. The targets part vanishes for J0, so that the inputs part is the covariance of the J0 ensemble on the
same inputs, started from :math:`f_0 = 0`. Full batches have no order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vkernel.core.errors import require
from vkernel.data.empirical import Empirical
from vkernel.kernels.base import PredictedMean, Time, times
from vkernel.kernels.fields import Function
from vkernel.process import Process
from vkernel.score.base import Score
from vkernel.train.models.lazy import Lazy as Model
from vkernel.train.objectives import J0, VARIES, Batch, Objective, Quantile, Training, parse

__all__ = ["Lazy"]

CHUNK = 1 << 21  # pairs of a place and an input held at once
LARGEST = 64  # dimension up to which covariances are matrices
FEW = 4  # fewer sets of inputs than this do not measure a covariance over them

Dot = Callable[[Tensor, Tensor], Tensor]


class _Places(NamedTuple):
    """What the parts need to know of n places; sums over inputs and sets are sums over their one axis S P."""

    u: Tensor  # (n, p)
    slope: Tensor  # B, (n, 1)
    w: Tensor  # (n, S P)
    prior: Tensor  # K0(x, X), (n, S P), or w where f0 does not vary
    rest: Tensor  # w^T K0(X, X) - K0(x, X), (n, S P), likewise
    mean: Tensor  # E(f|X), centred, (d, n, S)

    def reshape(self, *batch: int) -> _Places:
        u, slope, w, prior, rest = (a.reshape(*batch, -1) for a in self[:-1])
        return _Places(u, slope, w, prior, rest, self.mean.reshape(len(self.mean), *batch, -1))


class Lazy(Function):
    """The covariance that training gives a lazy ``model`` fitted to ``draws`` noised points.

    ``sets`` sets of inputs are averaged over, those of the first members of an ensemble of this ``seed``; one, member
    0's, where inputs do not vary. ``objective``, ``vary``, ``seed`` and ``times`` as for
    :func:`~vkernel.train.ensemble.train_ensemble`. ``effective`` is F_eff, the mean number of learned directions.
    """

    def __init__(
        self,
        model: Model,
        data: Empirical | Tensor,
        process: Process,
        *,
        draws: int,
        objective: str | Objective = "J1",
        vary: Sequence[str] = VARIES,
        sets: int = 16,
        seed: int = 0,
        times: str | Quantile = "uniform",
    ) -> None:
        require(isinstance(model, Model), f"This kernel belongs to a lazy model, not {model!r}.")
        good = isinstance(sets, int) and not isinstance(sets, bool) and sets >= 1
        require(good, f"sets, the number of sets of inputs, must be a whole number ≥ 1; got {sets!r}.")
        good = isinstance(draws, int) and not isinstance(draws, bool) and draws >= 1
        require(good, f"draws, the number P of training draws, must be a whole number ≥ 1; got {draws!r}.")
        data = data if isinstance(data, Empirical) else Empirical(data)
        good = data.shape == (data.d,) and data.d <= LARGEST
        require(good, f"This kernel takes vectors of up to {LARGEST} numbers; an event of the data is {data.shape}.")
        vary = (vary,) if isinstance(vary, str) else tuple(vary)
        goal = parse(objective)
        super().__init__(self._sum, process)
        self.model, self.draws, self.d = model, draws, data.d
        self.sets = sets if "inputs" in vary else 1
        self.varies_init = model.init and "init" in vary
        # E(f|X): targets without noise where that varies, from f0 = 0 where f0 varies
        weight = model.parametrisation.weight
        self._centre = Model(model.kernel, model.tau, model.target, weight, model.init and "init" not in vary)
        training = Training(data, process, J0() if "targets" in vary else goal, draws, vary, seed, times)
        self._learn(training, goal if "targets" in vary else J0())
        self._state_validity("inputs" in vary)

    def _learn(self, training: Training, goal: Objective) -> None:
        """All sets: U, G, G K0(X,X), the noise N of the targets ``(d, d, S P)``, and the states of E(f|X)."""
        at_once = max(1, CHUNK // self.draws**2)
        smoothers, mixed, noise, states, learned = [], [], [], [], 0.0
        for start in range(0, self.sets, at_once):
            block = range(start, min(start + at_once, self.sets))
            batch = training.batch(block, self.draws)
            G, effective = self.model.smoother(batch.x, batch.t, self.process)
            states.append(self._centre.learn(batch, G, self._centre.initial(training, block), self.process))
            smoothers.append(G)
            learned += float(effective.sum())
            if self.varies_init:
                U = states[-1]["inputs"]
                mixed.append(G @ self.model.kernel.prior(U, U))
            if not isinstance(goal, J0):
                noise.append(self._noise(training, goal, batch))
        self.effective = learned / self.sets
        self._states = {name: torch.cat([s[name] for s in states]) for name in states[0]}
        self._G = torch.cat(smoothers)
        self._mixed = torch.cat(mixed) if mixed else None
        self._N = torch.cat(noise).movedim((-2, -1), (0, 1)).flatten(2).contiguous() if noise else None

    def _noise(self, training: Training, goal: Objective, batch: Batch) -> Tensor:
        x = batch.x.reshape(-1, self.d)
        cov = goal.covariance(training.score, x, batch.t.flatten())
        unit = self.model.parametrisation.target_slope(batch.t, self.process).square()
        return unit[..., None, None] * cov.reshape(*batch.t.shape, self.d, self.d)

    def _state_validity(self, varies: bool) -> None:
        words = f"F_eff/P = {self.effective / self.draws:.2g}"
        if not varies:
            self._judge(True, f"exact in the lazy limit, for one set of inputs; {words}")
            return
        words = f"exact in the lazy limit given the inputs, averaged over {self.sets} sets of them; {words}"
        few = self.sets < FEW
        advice = f". Give sets ≥ {FEW}: the covariance over inputs is hardly measured." if few else ""
        self._judge(not few, words + advice)

    def parts(self, x: Tensor, t: Time, x2: Tensor | None = None, t2: Time | None = None) -> dict[str, Tensor]:
        """The terms of the covariance of the score, "targets", "inputs" and "init": each ``(*batch, d, d)``."""
        there = x if x2 is None else x2
        here_t, there_t = times(t, x), times(t if t2 is None else t2, there)
        for name, a in (("x", x), ("x2", there)):
            require(a.shape[-1] == self.d, f"{name} must be vectors of {self.d} numbers; got {tuple(a.shape)}.")
        batch = torch.broadcast_shapes(x.shape[:-1], there.shape[:-1])
        same = there is x and torch.equal(here_t, there_t)
        flat = [_rows(a, batch, 1) for a in (x, there)] + [_rows(a, batch, 0) for a in (here_t, there_t)]
        found: list[dict[str, Tensor]] = []
        for rows in torch.arange(len(flat[0]), device=x.device).split(max(1, CHUNK // self._w_size)):
            a, b, s, s2 = (f[rows] for f in flat)
            one = self._places(a, s)
            two = one if same else self._places(b, s2)
            prior = self.model.kernel.prior(one.u[:, None], two.u[:, None])[:, 0, 0] if self.varies_init else None
            found.append(self._combine(one, two, lambda p, q: (p * q).sum(-1), prior))
        shape = (*batch, self.d, self.d)
        return {name: torch.cat([f[name] for f in found]).reshape(shape).to(x.dtype) for name in found[0]}

    def _sum(self, x: Tensor, t: Tensor, x2: Tensor, t2: Tensor) -> Tensor:
        found = self.parts(x, t, x2, t2)
        return found["targets"] + found["inputs"] + found["init"]

    def pairs(self, x: Tensor, t: Tensor, x2: Tensor, t2: Tensor) -> Tensor:
        m, n, d = x.shape
        one = self._places(x.reshape(-1, d), t.reshape(-1)).reshape(m, n)
        columns = []
        for some, when in zip(*(a.split(max(1, CHUNK // (m * self._w_size)), 1) for a in (x2, t2)), strict=True):
            two = self._places(some.reshape(-1, d), when.reshape(-1)).reshape(m, some.shape[1])
            prior = self.model.kernel.prior(one.u, two.u) if self.varies_init else None
            found = self._combine(one, two, lambda p, q: p @ q.mT, prior)
            total = found["targets"] + found["inputs"] + found["init"]  # (m, n, n', d, d)
            columns.append(total.movedim(3, 2).reshape(m, n * d, -1))
        return torch.cat(columns, -1)

    @property
    def _w_size(self) -> int:
        return self.sets * self.draws

    def _places(self, x: Tensor, t: Tensor) -> _Places:
        """w and its like at ``x (n, d)`` and ``t (n,)``."""
        x, t = x.double(), t.double()
        U, kernel = self._states["inputs"], self.model.kernel
        u = self.model.inputs(x[None], t[None], self.process)
        slope = self.model.parametrisation.slope(t, self.process)[:, None]
        k = kernel.ntk(u, U)  # (S, n, P)
        mean = k @ self._states["coefficients"]  # an f0 that does not vary is the same for all sets
        mean = (mean - mean.mean(0)).movedim((2, 1), (0, 1))
        w = prior = rest = k @ self._G
        if self._mixed is not None:
            prior = kernel.prior(u, U)
            rest = k @ self._mixed - prior
        w, prior, rest = (a.movedim(0, 1).flatten(1) for a in (w, prior, rest))
        return _Places(u[0], slope, w, prior, rest, mean)

    def _combine(self, one: _Places, two: _Places, dot: Dot, prior: Tensor | None) -> dict[str, Tensor]:
        """The parts, ``(*batch, d, d)``; ``dot`` sums over the last axis, for a batch of pairs or for all pairs."""
        slopes = dot(one.slope, two.slope)[..., None, None]
        inputs = self._matrix_of(lambda a, b: dot(one.mean[a], two.mean[b])) / max(self.sets - 1, 1)
        targets, init = torch.zeros_like(inputs), torch.zeros_like(inputs)
        if self._N is not None:
            N = self._N
            targets = self._matrix_of(lambda a, b: dot(one.w * N[a, b], two.w)) / self.sets
        if prior is not None:
            change = (dot(one.rest, two.w) - dot(one.w, two.prior)) / self.sets
            init = (prior + change)[..., None, None] * torch.eye(self.d, dtype=slopes.dtype, device=slopes.device)
        return {"targets": slopes * targets, "inputs": slopes * inputs, "init": slopes * init}

    def _matrix_of(self, entry: Callable[[int, int], Tensor]) -> Tensor:
        rows = [torch.stack([entry(a, b) for b in range(self.d)], -1) for a in range(self.d)]
        return torch.stack(rows, -2)

    @property
    def mean(self) -> Score:
        """The predicted mean score."""
        return PredictedMean(self.mean_at, self.process, self.d)

    def mean_at(self, x: Tensor, t: Time) -> Tensor:
        """The mean of the learned score over the sets, like x."""
        when = times(t, x).reshape(1, -1)
        s = self._centre.score(self._states, x.reshape(1, -1, x.shape[-1]), when, self.process)
        return s.mean(0).reshape(x.shape)


def _rows(a: Tensor, batch: tuple[int, ...], event: int) -> Tensor:
    """A tensor spread over the batch, and the batch flattened; ``event`` axes at the end stay as they are."""
    shape = a.shape[a.ndim - event :]
    return a.expand(*batch, *shape).reshape(-1, *shape)
