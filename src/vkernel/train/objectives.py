r"""Objectives that differ in nothing but the noise of their target: J0, J_K, J1 (docs/theory.md, §6).

A model is trained on draws :math:`(x_0, t, x)`: a training point, a time, and the point noised. What it is asked to
predict there is a *target* whose mean is always the true score, and whose noise is the dial of the theory:

.. math:: J_0 = E\,\lambda_t |\hat s - s|^2, \qquad J_1 = E\,\lambda_t |\hat s - \tilde s|^2, \qquad
          J_K = E\,\lambda_t \Big|\hat s - \frac1K \sum_{k=1}^K \tilde s(x, t; x_0^{(k)})\Big|^2 .

Every target is the proxy score :math:`S^{-1}(\alpha \tilde m - x)` of some :math:`\tilde m` with
:math:`E[\tilde m | x, t] = m`; so a target is said here by its :math:`\tilde m`:

=====================  ==========================================================  ================================
objective              :math:`\tilde m`                                            :math:`\mathrm{Cov}[\tilde m|x]`
=====================  ==========================================================  ================================
``J0()``               :math:`m(x, t)`                                             0
``J1()``               :math:`x_0`, the point that made x                          :math:`\mathrm{Cov}(x_0|x,t)`
``JK(K)``              mean of :math:`x_0` and K - 1 further posterior draws       :math:`\mathrm{Cov}(x_0|x,t)/K`
``JK(K, "subset")``    :math:`E[x_0|x, B]`; B holds the point that made x and      falls with K; J1 at K = 1,
                       K - 1 others, uniform without replacement                   J0 at K = n
``JK(K, "efm")``       as subset, the others iid ~ w with replacement, slots       falls with K; J1 at K = 1;
                       weighted by p(x|y) without w (Bertrand et al. 2025)         K = n is not J0
=====================  ==========================================================  ================================

B must hold the point that made x, or the target is biased, and is fresh for every draw. The number of draws is P.

:class:`Training` makes the draws of every member of an ensemble. They come from counter-based streams of (seed,
purpose, member), so that J0 and J1 see *the same inputs*, and a member is the same in any block and on any device.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vkernel.core import rng
from vkernel.core.errors import InputError, require
from vkernel.data.empirical import Empirical
from vkernel.process import Process
from vkernel.score.empirical import EmpiricalScore

__all__ = ["J0", "J1", "JK", "Batch", "Objective", "Training", "parse"]

Quantile = Callable[[Tensor], Tensor]
VARIES = ("inputs", "targets", "init", "order")
CHUNK = 1 << 24  # numbers held at once while subsets are weighed


class Objective(ABC):
    """How noisy the target is; ``uniforms`` is how many random numbers one target takes."""

    uniforms: int = 0

    @abstractmethod
    def target(self, score: EmpiricalScore, x: Tensor, t: Tensor, origin: Tensor, u: Tensor) -> Tensor:
        r""":math:`\tilde m`, like ``x (N, *shape)``; ``origin (N,)`` indexes the points that made x, ``u (N, …)``."""

    def covariance(self, score: EmpiricalScore, x: Tensor, t: Tensor, *, samples: int = 256, seed: int = 0) -> Tensor:
        r""":math:`\mathrm{Cov}[\tilde m|x]`, matrices ``(N, d, d)``; by ``samples`` targets where no form is known."""
        require(samples >= 2, f"A covariance takes two targets or more; got samples = {samples!r}.")
        post = score.posterior(x, t)
        key = torch.tensor(rng.key(seed, "objective/covariance"), device=x.device)
        count = torch.arange(len(x) * (1 + self.uniforms), device=x.device).reshape(len(x), -1)
        mean, total = torch.zeros_like(x).flatten(1), torch.zeros((), dtype=x.dtype, device=x.device)
        for k in range(samples):  # Welford's running form: no cancellation, nothing kept
            u = rng.uniforms(key, count + k * count.numel())
            y = self.target(score, x, t, post.indices_at(u[None, :, 0])[0], u[:, 1:]).flatten(1)
            shift = y - mean
            mean = mean + shift / (k + 1)
            total = total + shift[:, :, None] * (y - mean)[:, None, :]
        return total / (samples - 1)

    @property
    def spec(self) -> dict[str, Any]:
        """The objective in JSON, read by :func:`parse`."""
        return {"kind": repr(self)}


class J0(Objective):
    """Noiseless targets: the true score itself."""

    def target(self, score: EmpiricalScore, x: Tensor, t: Tensor, origin: Tensor, u: Tensor) -> Tensor:
        return score.denoise(x, t)

    def covariance(self, score: EmpiricalScore, x: Tensor, t: Tensor, *, samples: int = 256, seed: int = 0) -> Tensor:
        d = score.data.d
        return torch.zeros((len(x), d, d), dtype=x.dtype, device=x.device)

    def __repr__(self) -> str:
        return "J0"


class J1(Objective):
    """Denoising score matching: the target is the proxy score of the point that made x."""

    def target(self, score: EmpiricalScore, x: Tensor, t: Tensor, origin: Tensor, u: Tensor) -> Tensor:
        return _points(score.data, origin, x)

    def covariance(self, score: EmpiricalScore, x: Tensor, t: Tensor, *, samples: int = 256, seed: int = 0) -> Tensor:
        return score.posterior(x, t).cov.dense()

    def __repr__(self) -> str:
        return "J1"


class JK(Objective):
    """Targets between J1 and J0; ``kind`` is "draws" (the default dial), "subset" or "efm"."""

    KINDS = ("draws", "subset", "efm")

    def __init__(self, K: int, kind: str = "draws") -> None:
        good = isinstance(K, int) and not isinstance(K, bool) and K >= 1
        require(good, f"K must be a whole number ≥ 1; got {K!r}. The limit of many draws is J0.")
        require(kind in self.KINDS, f"There is no kind of J_K called {kind!r}; give one of {', '.join(self.KINDS)}.")
        self.K, self.kind, self.uniforms = K, kind, K - 1

    def target(self, score: EmpiricalScore, x: Tensor, t: Tensor, origin: Tensor, u: Tensor) -> Tensor:
        if self.kind == "draws":
            total = _points(score.data, origin, x)
            if self.K > 1:
                drawn = score.posterior(x, t).indices_at(u.mT)
                for index in drawn:
                    total = total + _points(score.data, index, x)
            return total / self.K
        n, weights = score.data.n, score.data.weights.to(x.device)
        require(self.kind == "efm" or n >= self.K, f"A subset of {self.K} points needs as many; the data have {n}.")
        if self.kind == "efm":
            others = torch.searchsorted(_cumulated(weights), u.contiguous()).clamp_max(n - 1)
        else:
            others = _without_replacement(u, n - 1)
            others = others + (others >= origin[:, None])
        slots = torch.cat([origin[:, None], others], 1)
        log_w = torch.zeros_like(weights) if self.kind == "efm" else weights.log()
        return _weighed(score, x, t, slots, log_w)

    def covariance(self, score: EmpiricalScore, x: Tensor, t: Tensor, *, samples: int = 256, seed: int = 0) -> Tensor:
        if self.kind == "draws":
            return score.posterior(x, t).cov.dense() / self.K
        return super().covariance(score, x, t, samples=samples, seed=seed)

    @property
    def spec(self) -> dict[str, Any]:
        return {"kind": "JK", "K": self.K, "of": self.kind}

    def __repr__(self) -> str:
        return f"JK({self.K}, {self.kind!r})"


def parse(objective: str | Objective | dict[str, Any]) -> Objective:
    """An objective from ``"J0"``, ``"J1"``, an :class:`Objective`, or the ``spec`` of one."""
    if isinstance(objective, Objective):
        return objective
    if isinstance(objective, dict) and objective.get("kind") == "JK":
        return JK(objective.get("K"), objective.get("of"))  # type: ignore[arg-type]  # refused there
    name = objective.get("kind") if isinstance(objective, dict) else objective
    known = {"J0": J0, "J1": J1}
    if not isinstance(name, str) or name not in known:
        raise InputError(f"There is no objective {objective!r}; give 'J0', 'J1' or vk.JK(K, kind).")
    return known[name]()


@dataclass(frozen=True)
class Batch:
    r"""Draws of several members: ``x (M, P, *shape)``, ``t (M, P)`` and the target's :math:`\tilde m`, like x."""

    x: Tensor
    t: Tensor
    m: Tensor


@dataclass(frozen=True)
class Training:
    """What the members of an ensemble are trained on.

    ``vary`` names what differs between members: "inputs" (t and x), "targets" (their noise), "init", "order". Where
    inputs and targets vary together, or neither does, the point that made x is the origin of its target; where only one
    of them varies, the origin is drawn anew from the posterior, so that each can be held while the other moves.
    ``times`` is the density of t: "uniform", "log" (uniform in log sigma/alpha) or a quantile function u -> t.
    ``design``, if given, says for each of those names which stream each member uses: members that share one share that
    randomness (see :mod:`vkernel.train.variance`).
    """

    data: Empirical
    process: Process
    objective: Objective
    draws: int | None
    vary: tuple[str, ...] = VARIES
    seed: int = 0
    times: str | Quantile = "uniform"
    dtype: torch.dtype = torch.float64
    design: Mapping[str, Sequence[int]] | None = None

    def __post_init__(self) -> None:
        require(isinstance(self.process, Process), f"Training needs a process such as vk.VP(), not {self.process!r}.")
        require(isinstance(self.objective, Objective), f"Training needs an Objective, not {self.objective!r}.")
        require(self.process.base is self.process, "Ensembles are trained with isotropic noise; whiten the data first.")
        whole = isinstance(self.draws, int) and not isinstance(self.draws, bool)
        good = self.draws is None or (whole and self.draws >= 1)
        require(good, f"draws, the number P of training draws, must be a whole number ≥ 1; got {self.draws!r}.")
        for name in self.vary:
            require(name in VARIES, f"vary takes any of {', '.join(VARIES)}; got {name!r}.")
        good = hasattr(self.seed, "__index__") and not isinstance(self.seed, bool)
        require(good, f"seed must be a whole number; got {self.seed!r}.")
        good = self.dtype in (torch.float32, torch.float64)
        require(good, f"dtype, in which a model is trained, is torch.float32 or torch.float64; got {self.dtype!r}.")
        good = callable(self.times) or self.times in ("uniform", "log")
        require(good, f"times must be 'uniform', 'log' or a function u -> t; got {self.times!r}.")
        sigma = float(self.process.sigma(torch.tensor(self.process.eps, dtype=torch.float64)))
        require(sigma > 0, f"There is no noise at eps in {self.process!r}, so the score has no value there; raise eps.")
        object.__setattr__(self, "score", EmpiricalScore(self.data, self.process))

    def keys(self, purpose: str, members: Sequence[int]) -> Tensor:
        """One key per member; where the purpose does not vary, that of member 0."""
        what = purpose.partition("/")[0]
        found = [rng.key(self.seed, f"ensemble/{purpose}", self._stream(what, m)) for m in members]
        return torch.tensor(found, dtype=torch.int64, device=self.data.device)

    def generator(self, purpose: str, member: int) -> torch.Generator:
        """A generator for what one member draws at once, such as its initial weights."""
        return rng.stream(self.seed, f"ensemble/{purpose}", self._stream(purpose, member))

    def _stream(self, what: str, member: int) -> int:
        if self.design is not None and what in self.design:
            return self.design[what][member]
        return member if what in self.vary else 0

    def batch(self, members: Sequence[int], count: int, start: int = 0) -> Batch:
        """Draws ``start`` to ``start + count`` of every member's endless sequence."""
        index = torch.arange(start, start + count, device=self.data.device)

        def u(purpose: str) -> Tensor:
            return rng.uniforms(self.keys(purpose, members)[:, None], index)

        origin = torch.searchsorted(_cumulated(self.data.weights), u("inputs/point")).clamp_max(self.data.n - 1)
        t = self.time(u("inputs/time"))
        shape = (len(members), count, *self.data.shape)
        places = torch.arange(self.data.d, device=index.device) + self.data.d * index[:, None]
        z = rng.normals(self.keys("inputs/noise", members)[:, None, None], places)
        clean = self.data.take(origin.flatten()).double().reshape(z.shape)
        x = (self.process.alpha(t)[..., None] * clean + self.process.sigma(t)[..., None] * z).reshape(shape)
        rows, when = x.reshape(-1, *self.data.shape), t.flatten()
        if self.design is not None or ("inputs" in self.vary) != ("targets" in self.vary):
            origin = self.score.posterior(rows, when).indices_at(u("targets/origin").reshape(1, -1))  # type: ignore[attr-defined]
        k = self.objective.uniforms
        numbers = k * index[:, None] + torch.arange(k, device=index.device)
        more = rng.uniforms(self.keys("targets/noise", members)[:, None, None], numbers).reshape(len(rows), k)
        m = self.objective.target(self.score, rows, when, origin.flatten(), more)  # type: ignore[attr-defined]
        return Batch(x.to(self.dtype), t.to(self.dtype), m.reshape(shape).to(self.dtype))

    def time(self, u: Tensor) -> Tensor:
        """Times of the density's quantiles u."""
        low, high = self.process.eps, self.process.T
        if self.times == "uniform":
            return (low + (high - low) * u).clamp(low, high)
        if self.times == "log":
            least, most = (math.log(r) for r in self.process._ratios())
            return self.process.time((least + (most - least) * u).exp())
        assert callable(self.times)
        t = self.process.check(self.times(u))
        require(t.shape == u.shape, f"times must give one t for each u; got {tuple(t.shape)} for {tuple(u.shape)}.")
        return t.to(u).clamp(low, high)


def _points(data: Empirical, index: Tensor, like: Tensor) -> Tensor:
    return data.take(index).to(like.device, like.dtype).reshape(like.shape)


def _cumulated(weights: Tensor) -> Tensor:
    total = weights.double().cumsum(0)
    return total / total[-1]


def _without_replacement(u: Tensor, n: int) -> Tensor:
    """For each row of ``u (N, k)`` a uniform set of k of the numbers 0 … n - 1, by Floyd's algorithm."""
    k = u.shape[1]
    chosen = torch.full(u.shape, -1, dtype=torch.long, device=u.device)
    for j in range(k):
        last = n - k + j
        drawn = (u[:, j] * (last + 1)).long().clamp_max(last)
        chosen[:, j] = torch.where((chosen[:, :j] == drawn[:, None]).any(1), last, drawn)
    return chosen


def _weighed(score: EmpiricalScore, x: Tensor, t: Tensor, slots: Tensor, log_w: Tensor) -> Tensor:
    """The mean of the points in the slots, weighed by w p(x|y) among themselves."""
    data, process = score.data, score.process
    out, t = torch.empty_like(x), t.double().expand(len(x))
    for rows in torch.arange(len(x), device=x.device).split(max(1, CHUNK // (slots.shape[1] * data.d))):
        y = data.take(slots[rows].flatten()).to(x.device).double().reshape(*slots[rows].shape, data.d)
        wide = t[rows]
        away = x[rows].double().reshape(len(rows), 1, data.d) - process.alpha(wide)[:, None, None] * y
        logit = log_w.double()[slots[rows]] - away.square().sum(-1) / (2 * process.S(wide)[:, None])
        out[rows] = (logit.softmax(1)[..., None] * y).sum(1).reshape(len(rows), *x.shape[1:]).to(x.dtype)
    return out
