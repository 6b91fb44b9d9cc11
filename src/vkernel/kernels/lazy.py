r"""The V-kernel of infinitely wide networks (docs/theory.md, §8.3).

They are linear in both :math:`f_0` and y: :math:`f(x) = f_0(x) + w(x)^T (y - f_0(X))` with
:math:`w(x)^T = K(u,U)\, G` and the smoother G (:mod:`vkernel.train.models.lazy`). The covariance of f is a sum of three
parts, exact given X (8.3):

.. math:: \text{targets:}\quad & E_X\Big[\sum_i w_i(x)\, w_i(x')\, N_i\Big], \\
          \text{init:}\quad & E_X\big[K_0(x,x') - w^T K_0(X,x') - K_0(x,X)\, w' + w^T K_0(X,X)\, w'\big] \otimes 1, \\
          \text{inputs:}\quad & \mathrm{Cov}_X\big[E(f|X)\big], \qquad E(f|X) = w(x)^T E[y|X] .

What does not vary is fixed at its value for member 0: the inputs (then there is one set), the random numbers of the
targets, :math:`f_0`; the last two then belong to :math:`E(f|X)`.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vkernel.core.checks import check_whole
from vkernel.core.errors import require
from vkernel.core.progress import Progress, progress as show_progress
from vkernel.data.empirical import Empirical
from vkernel.kernels.base import Function, times_of
from vkernel.kernels.linear import known, largest_error, target_noise
from vkernel.process import Process
from vkernel.score.base import Time
from vkernel.train import models
from vkernel.train.ensemble import Ensemble
from vkernel.train.objectives import VARIES, Objective, Times, Training

PAIRS, WIDEST, FEW = 1 << 21, 64, 4  # of Lazy: pairs held at once, the largest dimension, the fewest sets
PLACES = 128  # at which the error is taken


class _Points(NamedTuple):
    """The functions of N points in m groups that the parts need; sums over inputs and sets are over one axis S P."""

    u: Tensor  # (m, N, p)
    slope: Tensor  # B, (m, N, 1)
    w: Tensor  # (m, N, S P)
    prior: Tensor  # K0(x, X), (m, N, S P), or w where f0 does not vary
    rest: Tensor  # w^T K0(X, X) - K0(x, X), (m, N, S P), likewise
    mean: Tensor  # E(f|X), centred, (d, m, N, S)


class Lazy(Function):
    """The covariance that training gives a lazy ``model`` fitted to ``draws`` noised points.
    The mean is over ``sets`` sets of inputs, those of the first members of an ensemble of this ``seed``; the other
    arguments are those of ``vk.train_ensemble``. ``effective`` is F_eff, the mean number of learned directions.

    >>> import torch, vkernel as vk
    >>> data, process = vk.data.toy("triple"), vk.VP()
    >>> model = vk.models.Lazy(vk.models.NTK(depth=2), tau=10.0)
    >>> V = vk.kernels.Lazy(model, data, process, draws=16, sets=4)
    >>> V.cov(torch.zeros(3, 1), 0.5).trace().shape
    torch.Size([3])
    """

    def __init__(
        self,
        model: models.Lazy,
        data: Empirical | Tensor,
        process: Process,
        *,
        draws: int,
        objective: str | Objective = "J1",
        vary: Sequence[str] = VARIES,
        sets: int = 64,
        seed: int = 0,
        times: Times = "uniform",
        progress: Progress = False,
    ) -> None:
        require(isinstance(model, models.Lazy), f"This kernel belongs to a lazy model, not {model!r}.")
        training = Training(data, process, objective, draws, vary, seed, times)
        P, shape, self.d = training.finite_draws("A lazy model"), training.data.shape, training.data.d
        check_whole(sets, "sets, the number of sets of inputs,")
        good = shape == (self.d,) and self.d <= WIDEST
        require(good, f"This kernel takes vectors of up to {WIDEST} numbers; an event of the data is {shape}.")
        super().__init__(self._sum, process)
        self.held = "inputs" not in training.vary
        self.model, self.draws, self.sets, self.device = model, P, 1 if self.held else sets, training.data.device
        self.varies_init = model.init and "init" in training.vary
        # the model of E(f|X): from f0 = 0 where f0 varies
        centre = replace(model, init=model.init and not self.varies_init)
        self._states = self._learn(centre, training, progress)
        self._mean = Ensemble(centre, self._states, process, shape).mean_score
        self.relative_error = largest_error(training, self.estimates, PLACES)
        inputs = "for one set of inputs" if self.held else f"averaged over {sets} sets of inputs"
        why = f"exact in the lazy limit, {inputs}; F_eff/P = {self.effective / P:.2g}; {known(self.relative_error)}"
        self._assess(self.held or sets >= FEW, why, f"Give sets ≥ {FEW}: the misfit is hardly measured.")

    def _learn(self, centre: models.Lazy, training: Training, progress: Progress) -> dict[str, Tensor]:
        """Compute G, G K0(X,X) and the noise N of the targets ``(d, d, S P)``; return the states of E(f|X)."""
        exact = training.without_noise()
        smoothers, mixed, noise, states, self.effective = [], [], [], [], 0.0
        with show_progress(self.sets, progress) as report:
            for block in torch.arange(self.sets).split(max(1, PAIRS // self.draws**2)):
                batch = exact.batch(block.tolist(), self.draws)
                G, effective = self.model.smoother(batch.x, batch.t, self.process)
                states.append(centre.learn(batch, G, centre.initial(training, block.tolist()), self.process))
                smoothers.append(G)
                self.effective += float(effective.sum()) / self.sets
                if self.varies_init:
                    U = states[-1]["inputs"]
                    mixed.append(G @ self.model.kernel.prior(U, U))
                N = target_noise(self.model, training, batch)
                if N is not None:
                    noise.append(N)
                report("sets of inputs", len(block))
        self._G, self._mixed = torch.cat(smoothers), torch.cat(mixed) if mixed else None
        self._N = torch.cat(noise).movedim((-2, -1), (0, 1)).flatten(2).contiguous() if noise else None
        return {name: torch.cat([s[name] for s in states]) for name in states[0]}

    def parts(self, x: Tensor, t: Time, x2: Tensor | None = None, t2: Time | None = None) -> dict[str, Tensor]:
        """Return the terms of the covariance, "targets", "inputs" and "init", each ``(*batch, d, d)``."""
        there = x if x2 is None else x2
        for name, a in (("x", x), ("x2", there)):
            require(a.shape[-1] == self.d, f"{name} must be vectors of {self.d} numbers; got {tuple(a.shape)}.")
        batch = np.broadcast_shapes(x.shape[:-1], there.shape[:-1])
        when = times_of(t, x), times_of(t if t2 is None else t2, there)
        same = there is x and torch.equal(*when)
        flat = [a.expand(*batch, self.d).reshape(-1, 1, self.d) for a in (x, there)]
        flat += [a.expand(batch).reshape(-1, 1) for a in when]
        found = []
        for a, b, s, s2 in zip(*(f.split(self._width(1)) for f in flat), strict=True):
            one = self._points(a, s)
            found.append(self._terms(one, one if same else self._points(b, s2)))
        shape = (*batch, self.d, self.d)
        return {name: torch.cat([f[name] for f in found]).reshape(shape).to(x.dtype) for name in found[0]}

    def _sum(self, x: Tensor, t: Tensor, x2: Tensor, t2: Tensor) -> Tensor:
        return sum(self.parts(x, t, x2, t2).values(), torch.zeros(()).to(x))

    def pairs(self, x: Tensor, t: Tensor, x2: Tensor, t2: Tensor) -> Tensor:
        one, width, columns = self._points(x, t), self._width(len(x)), []
        for some, when in zip(x2.split(width, 1), t2.split(width, 1), strict=True):
            total = sum(self._terms(one, self._points(some, when)).values(), x.new_zeros(()).double())
            columns.append(total.movedim(3, 2).flatten(3, 4).flatten(1, 2))
        return torch.cat(columns, -1)

    def estimates(self, x: Tensor, t: Time) -> Tensor | None:
        if self.held:
            return None
        flat = x.reshape(-1, 1, self.d).split(self._width(1)), times_of(t, x).reshape(-1, 1).split(self._width(1))
        found = torch.cat([self._by_set(a, u) for a, u in zip(*flat, strict=True)])
        return found.movedim(-1, 0).reshape(self.sets, *x.shape[:-1])

    def _by_set(self, x: Tensor, t: Tensor) -> Tensor:
        """Return the variance at ``x (N, 1, d)`` that each set of inputs gives, ``(N, S)``."""
        points, S = self._points(x, t), self.sets
        v = points.mean.square().sum(0)[:, 0] * S / max(S - 1, 1)
        if self._N is not None:
            v = v + (points.w.square() * self._N.diagonal().sum(-1)).reshape(-1, S, self.draws).sum(-1)
        if self.varies_init:
            change = ((points.rest - points.prior) * points.w).reshape(-1, S, self.draws).sum(-1)
            v = v + self.d * (self.model.kernel.prior(points.u, points.u)[:, 0] + change)
        return v * points.slope[:, 0].square()

    def _width(self, groups: int) -> int:
        """Return how many points of each of several groups are evaluated at once."""
        return max(1, PAIRS // (groups * self.sets * self.draws))

    def _points(self, x: Tensor, t: Tensor) -> _Points:
        """Return w and its like at ``x (m, N, d)`` and ``t (m, N)``."""
        (m, n, d), kernel, U = x.shape, self.model.kernel, self._states["inputs"]
        u = self.model.inputs(x.double().reshape(1, -1, d), t.double().reshape(1, -1), self.process)
        slope = self.model.slope(t.double(), self.process)[..., None]
        k = kernel.ntk(u, U)  # (S, m N, P)
        mean = k @ self._states["coefficients"]  # an f0 that does not vary is the same for all sets
        mean = (mean - mean.mean(0)).movedim((2, 1), (0, 1)).reshape(d, m, n, -1)
        w = prior = rest = k @ self._G
        if self._mixed is not None:
            prior = kernel.prior(u, U)
            rest = k @ self._mixed - prior
        w, prior, rest = (a.movedim(0, 1).reshape(m, n, -1) for a in (w, prior, rest))
        return _Points(u.reshape(m, n, -1), slope, w, prior, rest, mean)

    def _terms(self, one: _Points, two: _Points) -> dict[str, Tensor]:
        """Return the parts for all pairs within each group, ``(m, N, N', d, d)``."""
        slopes, d = (one.slope @ two.slope.mT)[..., None, None], range(self.d)
        inputs = torch.einsum("amns,bmks->mnkab", one.mean, two.mean) / max(self.sets - 1, 1)
        targets, init = torch.zeros_like(inputs), torch.zeros_like(inputs)
        if self._N is not None:
            rows = [torch.stack([(one.w * self._N[a, b]) @ two.w.mT for b in d], -1) for a in d]
            targets = torch.stack(rows, -2) / self.sets
        if self.varies_init:
            change = (one.rest @ two.w.mT - one.w @ two.prior.mT) / self.sets
            eye = torch.eye(self.d, dtype=slopes.dtype, device=slopes.device)
            init = (self.model.kernel.prior(one.u, two.u) + change)[..., None, None] * eye
        return {"targets": slopes * targets, "inputs": slopes * inputs, "init": slopes * init}
