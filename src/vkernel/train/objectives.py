r"""Objectives that differ only in the noise of their target: J0, J_c, J_K, J1 (docs/theory.md, §6.1).

A model is trained on draws :math:`(x_0, t, x)`: a training point, a time, and the point noised. The *target* of a draw
is the proxy score :math:`S^{-1}(\alpha \tilde m - x)` of some :math:`\tilde m` with :math:`E[\tilde m | x, t] = m`, so
that its mean is always the true score. The noise of :math:`\tilde m` is the control parameter of the theory:

=====================  ==========================================================  ================================
objective              :math:`\tilde m`                                            :math:`\mathrm{Cov}[\tilde m|x]`
=====================  ==========================================================  ================================
``J0()``               :math:`m(x, t)`, noiseless                                  0
``J1()``               :math:`x_0`, the origin of x: denoising score matching      :math:`\mathrm{Cov}(x_0|x,t)`
``JC(c)``              :math:`m + c\,(x_0 - m)`; J0 at c = 0, J1 at c = 1          :math:`c^2\,\mathrm{Cov}(x_0|x,t)`
``JC(c, "gaussian")``  :math:`m + c\,\sum_i \sqrt{r_i}\, z_i\,(y_i - m)`             the same
``JC(c, "white")``     :math:`m + c\,\sqrt{\mathrm{tr\,Cov}(x_0|x,t)/d}\; z`          white, of the same trace
``JK(K)``              mean of :math:`x_0` and K - 1 further posterior draws       :math:`\mathrm{Cov}(x_0|x,t)/K`
``JK(K, "subset")``    :math:`E[x_0|x, B]`; B is fresh and holds the origin of x   falls with K; J1 at K = 1,
                       and K - 1 others, uniform without replacement               J0 at K = n
``JK(K, "efm")``       as subset, the others iid ~ w with replacement, slots       falls with K; J1 at K = 1;
                       weighted by p(x|y) without w (Bertrand et al. 2025)         K = n is not J0
=====================  ==========================================================  ================================

:class:`Training` computes the draws of every member of an ensemble. They come from counter-based streams of (seed,
purpose, member), so that all objectives use *the same inputs*, and a member is the same in any block and on any device.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, SupportsIndex

import torch
from torch import Tensor

from vkernel.core import rng
from vkernel.core.checks import check_choice, check_number, check_positive, check_whole, is_whole
from vkernel.core.errors import InputError, require
from vkernel.data.empirical import Array, Empirical, fingerprint
from vkernel.process import Process
from vkernel.score.empirical import EmpiricalScore
from vkernel.train.training_set import TrainingSet

Quantile = Callable[[Tensor], Tensor]
Times = str | Sequence[str | float] | Quantile  # the density of training times, as :func:`check_times` reads it
VARIES = ("inputs", "targets", "init", "order")
KINDS = ("draws", "subset", "efm")
NOISES = ("posterior", "gaussian", "white")
CHUNK = 1 << 24  # numbers held at once while the weights of subsets are computed


class Objective(ABC):
    """A training target whose mean is the true score."""

    uniforms: int = 0  # random numbers that one target takes
    ratio: float | None = None  # Cov[m̃|x] / Cov(x0|x,t), or None where it is not a constant
    settings: Mapping[str, object] = {}

    @abstractmethod
    def target(self, score: EmpiricalScore, x: Tensor, t: Tensor, origin: Tensor, u: Tensor) -> Tensor:
        r"""Return :math:`\tilde m`, like ``x (N, *shape)``, for origins of index ``origin (N,)`` and uniforms ``u``."""

    def covariance(self, score: EmpiricalScore, x: Tensor, t: Tensor, *, samples: int = 256, seed: int = 0) -> Tensor:
        r"""Return :math:`\mathrm{Cov}[\tilde m|x]`, ``(N, d, d)``; from ``samples`` targets where no form is known."""
        require(samples >= 2, f"A covariance needs two targets or more; got samples = {samples!r}.")
        post = score.posterior(x, t)
        if self.ratio is not None:
            return post.cov.dense() * self.ratio
        key = torch.tensor(rng.key(seed, "objective/covariance"), device=x.device)
        count = torch.arange(len(x) * (1 + self.uniforms), device=x.device).reshape(len(x), -1)
        mean, total = torch.zeros_like(x).flatten(1), torch.zeros((), dtype=x.dtype, device=x.device)
        for k in range(samples):  # Welford's running form: no cancellation, nothing stored
            u = rng.uniforms(key, count + k * count.numel())
            shift = self.target(score, x, t, post.indices_at(u[None, :, 0])[0], u[:, 1:]).flatten(1) - mean
            mean = mean + shift / (k + 1)
            total = total + shift[:, :, None] * shift[:, None, :] * (k / (k + 1))
        return total / (samples - 1)

    @property
    def spec(self) -> dict[str, object]:
        """The objective in JSON, read by :func:`parse`."""
        return {"kind": type(self).__name__, **self.settings}

    def __repr__(self) -> str:
        values = ", ".join(f"{v:g}" if isinstance(v, float) else repr(v) for v in self.settings.values())
        return f"{type(self).__name__}({values})" if values else type(self).__name__


class J0(Objective):
    r"""Noiseless targets: :math:`\tilde m = m(x, t)`, the exact denoiser, and so the exact score.

    >>> import vkernel as vk
    >>> vk.J0(), vk.J0().ratio
    (J0, 0.0)
    """

    ratio = 0.0

    def target(self, score: EmpiricalScore, x: Tensor, t: Tensor, origin: Tensor, u: Tensor) -> Tensor:
        return score.denoise(x, t)


class J1(Objective):
    r"""Denoising score matching, :math:`\tilde m = x_0`: the target is the proxy score of the origin of x.

    >>> import vkernel as vk
    >>> vk.J1(), vk.J1().ratio
    (J1, 1.0)
    """

    ratio = 1.0

    def target(self, score: EmpiricalScore, x: Tensor, t: Tensor, origin: Tensor, u: Tensor) -> Tensor:
        return _points(score.data, origin, x)


class JC(Objective):
    r"""Targets whose noise is scaled, :math:`\tilde m = m + c\,(x_0 - m)`: J0 at c = 0, J1 at c = 1, noisier beyond.
    ``noise`` is that of the origin, "posterior", or one of two placebos that have nothing to do with the origin of x
    but the trace of its covariance: "gaussian" has the whole covariance, "white" only the trace.

    >>> import vkernel as vk
    >>> vk.JC(3), vk.JC(3).ratio
    (JC(3), 9.0)
    >>> vk.JC(3, "white")
    JC(3, 'white')
    """

    def __init__(self, c: float, noise: str = "posterior") -> None:
        self.c, self.noise = check_number(c, "c, the factor of the noise,"), check_choice(noise, "noise of JC", NOISES)
        self.ratio, self.settings = None if noise == "white" else self.c**2, {"c": self.c}
        if noise != "posterior":
            self.uniforms, self.settings = 1, {"c": self.c, "noise": noise}

    def target(self, score: EmpiricalScore, x: Tensor, t: Tensor, origin: Tensor, u: Tensor) -> Tensor:
        m = score.denoise(x, t)
        if self.noise == "posterior":
            return m + self.c * (_points(score.data, origin, x) - m)
        cov, keys = score.posterior(x, t).cov, (u[:, 0] * 2.0**53).long()  # 53 random bits, which belong to the draw
        if self.noise == "gaussian":
            return m + self.c * cov.draw_at(keys)
        z = rng.normals(keys[:, None], torch.arange(score.data.d, device=x.device)).to(x.dtype)
        return m + self.c * (cov.trace() / score.data.d).sqrt().reshape(-1, *(1,) * (x.ndim - 1)) * z.reshape(x.shape)

    def covariance(self, score: EmpiricalScore, x: Tensor, t: Tensor, *, samples: int = 256, seed: int = 0) -> Tensor:
        if self.noise != "white":
            return super().covariance(score, x, t, samples=samples, seed=seed)
        identity = torch.eye(score.data.d, dtype=x.dtype, device=x.device)
        return self.c**2 * score.posterior(x, t).cov.trace()[:, None, None] / score.data.d * identity


class JK(Objective):
    r"""Targets between J1 (K = 1) and J0 (large K): for ``kind`` "draws", :math:`\tilde m = \frac1K \sum_k x_0^{(k)}`
    over draws from the posterior, one of which is the origin; "subset" and "efm" average over K training points
    (theory, §6.1).

    >>> import vkernel as vk
    >>> vk.JK(4), vk.JK(4).ratio
    (JK(4, 'draws'), 0.25)
    """

    def __init__(self, K: int, kind: str = "draws") -> None:
        require(is_whole(K) and K >= 1, f"K must be a whole number ≥ 1; got {K!r}. The limit of many draws is J0.")
        self.K, self.kind, self.uniforms = K, check_choice(kind, "kind of J_K", KINDS), K - 1
        self.ratio, self.settings = 1 / K if kind == "draws" else None, {"K": K, "of": kind}

    def target(self, score: EmpiricalScore, x: Tensor, t: Tensor, origin: Tensor, u: Tensor) -> Tensor:
        if self.kind == "draws":
            total = _points(score.data, origin, x)
            if self.K > 1:
                for index in score.posterior(x, t).indices_at(u.mT):
                    total = total + _points(score.data, index, x)
            return total / self.K
        n, weights = score.data.n, score.data.weights.to(x.device)
        if self.kind == "efm":
            others, weights = _drawn(weights, u.contiguous()), torch.ones_like(weights)
        else:
            require(n >= self.K, f"A subset of {self.K} points needs as many; the data have {n}.")
            others = _without_replacement(u, n - 1)
            others = others + (others >= origin[:, None])
        return _conditional_mean(score, x, t, torch.cat([origin[:, None], others], 1), weights.log())


def parse(objective: str | Objective | Mapping[str, object]) -> Objective:
    """Return an objective from ``"J0"``, ``"J1"``, an :class:`Objective`, or the ``spec`` of one."""
    if isinstance(objective, Objective):
        return objective
    match objective:
        case "J0" | {"kind": "J0"}:
            return J0()
        case "J1" | {"kind": "J1"}:
            return J1()
        case {"kind": "JC", **given}:
            return JC(given.get("c"), given.get("noise", "posterior"))  # type: ignore[arg-type]  # refused there
        case {"kind": "JK", **given}:
            return JK(given.get("K"), given.get("of"))  # type: ignore[arg-type]
    raise InputError(f"There is no objective {objective!r}; give 'J0', 'J1', vk.JC(c) or vk.JK(K, kind).")


def check_times(times: Times) -> str | tuple[str, float, float] | Quantile:
    """Return a density of training times: "uniform" in t, "log" (uniform in log(sigma/alpha)), a quantile function
    u -> t, or ("lognormal", mean, std), the normal law of log(sigma/alpha) clipped to the range of the process."""
    match times:
        case "uniform" | "log":
            return str(times)
        case ["lognormal", mean, std]:
            mean = check_number(mean, "The mean of log(sigma/alpha)")
            return "lognormal", mean, check_positive(std, "The standard deviation of log(sigma/alpha)")
    if callable(times):
        return times
    wanted = "'uniform', 'log', ('lognormal', mean, std) or a function u -> t"
    raise InputError(f"times must be {wanted}; got {times!r}.")


class Batch(NamedTuple):
    r"""Draws of several members: ``x (M, P, *shape)``, ``t (M, P)`` and the target's :math:`\tilde m`, like x."""

    x: Tensor
    t: Tensor
    m: Tensor


class Training(TrainingSet):
    """The random draws on which the members of an ensemble are trained; arguments as for ``vk.train_ensemble``.
    Where inputs (t and x) and targets vary together, or neither does, the target has the origin of x; otherwise the
    origin is drawn from the posterior, so that each can be held fixed while the other varies. ``design`` holds, for
    names of ``vary``, the stream that each member uses: members with the same stream share that randomness."""

    def __init__(
        self,
        data: Empirical | Tensor,
        process: Process,
        objective: str | Objective,
        draws: int | None,
        vary: Sequence[str] = VARIES,
        seed: int = 0,
        times: Times = "uniform",
        dtype: torch.dtype = torch.float64,
        design: Mapping[str, Sequence[int]] | None = None,
        labels: Array | None = None,
        flips: bool = False,
    ) -> None:
        super().__init__(data, process, labels, flips)
        good = isinstance(seed, SupportsIndex) and not isinstance(seed, bool)
        require(good, f"seed must be a whole number; got {seed!r}.")
        good = dtype in (torch.float32, torch.float64)
        require(good, f"dtype, in which a model is trained, is torch.float32 or torch.float64; got {dtype!r}.")
        self.objective, self.seed, self.times = parse(objective), seed, check_times(times)
        self.draws = None if draws is None else check_whole(draws, "draws, the number P of training draws,")
        names = (vary,) if isinstance(vary, str) else vary
        self.vary = tuple(check_choice(name, "an entry of vary", VARIES) for name in names)
        self.dtype, self.design = dtype, design

    def without_noise(self) -> Training:
        """Return the same draws with the targets of J0; targets that are held fixed keep their noise."""
        return self.with_objective(J0() if "targets" in self.vary else self.objective)

    def with_objective(self, objective: Objective) -> Training:
        """Return the same draws with the targets of another objective."""
        found = copy.copy(self)
        found.objective = objective
        return found

    @property
    def density(self) -> str | list[str | float]:
        """The density of times in JSON; a quantile function is not kept."""
        return list(self.times) if isinstance(self.times, tuple) else "function" if callable(self.times) else self.times

    def facts(self, omega: Callable[[Tensor, Process], Tensor]) -> dict[str, object]:
        """Return what determines the draws and their weights ``omega``, in JSON; functions by their values."""
        u = (torch.arange(64, dtype=torch.float64, device=self.data.device) + 0.5) / 64
        t = self.time(u)
        levels = torch.stack([t, self.process.alpha(t), self.process.sigma(t), omega(t, self.process)]).flatten()
        text = " ".join(f"{a:.6g}" for a in levels.tolist()) + str(
            None if self.labels is None else self.labels.tolist()
        )
        found: dict[str, object] = {"draws": self.draws, "vary": list(self.vary), "seed": int(self.seed)}
        found |= {
            "times": self.density,
            "flips": self.flips,
            "dtype": str(self.dtype),
            "data": fingerprint([self.data]),
        }
        return found | {"levels": hashlib.sha256(text.encode()).hexdigest(), "device": self.data.device.type}

    def finite_draws(self, model: str) -> int:
        """Return P; refuse an endless sequence."""
        if self.draws is None:
            raise InputError(f"{model} is fitted to a finite number of draws: give draws=P.")
        return self.draws

    def keys(self, purpose: str, members: Sequence[int]) -> Tensor:
        """Return one key per member; where the purpose does not vary, that of member 0."""
        found = [rng.key(self.seed, f"ensemble/{purpose}", self._stream(purpose, m)) for m in members]
        return torch.tensor(found, dtype=torch.int64, device=self.data.device)

    def generator(self, purpose: str, member: int) -> torch.Generator:
        """Return the generator of one member for draws made at once, such as initial weights."""
        return rng.stream(self.seed, f"ensemble/{purpose}", self._stream(purpose, member))

    def _stream(self, purpose: str, member: int) -> int:
        what = purpose.partition("/")[0]
        if self.design is not None and what in self.design:
            return self.design[what][member]
        return member if what in self.vary else 0

    def origins(self, members: Sequence[int], count: int, start: int = 0) -> Tensor:
        """Return the indices of the points that are noised in draws ``start`` to ``start + count``, ``(M, count)``."""
        index = torch.arange(start, start + count, device=self.data.device)
        return _drawn(self.data.weights, rng.uniforms(self.keys("inputs/point", members)[:, None], index))

    def batch(self, members: Sequence[int], count: int, start: int = 0) -> Batch:
        """Return draws ``start`` to ``start + count`` of the endless sequence of every member."""
        return self.batches((self.objective,), members, count, start)[0]

    def batches(self, objectives: Sequence[Objective], members: Sequence[int], count: int, start: int) -> list[Batch]:
        """Return the draws of :meth:`batch` with the targets of each objective. Inputs and exact moments are computed
        once; a target is the same, bit for bit, in any company."""
        index = torch.arange(start, start + count, device=self.data.device)

        def u(purpose: str) -> Tensor:
            return rng.uniforms(self.keys(purpose, members)[:, None], index)

        origin, t = self.origins(members, count, start), self.time(u("inputs/time"))
        shape = (len(members), count, *self.data.shape)
        counter = torch.arange(self.data.d, device=index.device) + self.data.d * index[:, None]
        z = rng.normals(self.keys("inputs/noise", members)[:, None, None], counter)
        clean = self.data.take(origin.flatten()).double().reshape(z.shape)
        x = (self.process.alpha(t)[..., None] * clean + self.process.sigma(t)[..., None] * z).reshape(shape)
        flat_x, flat_t = x.reshape(-1, *self.data.shape), t.flatten()
        drawn_again = self.design is not None or ("inputs" in self.vary) != ("targets" in self.vary)
        key, more = self.keys("targets/noise", members)[:, None, None], list[Tensor]()
        for k in (objective.uniforms for objective in objectives):
            counter = k * index[:, None] + torch.arange(k, device=index.device)
            more.append(rng.uniforms(key, counter).reshape(len(flat_x), k))
        found = [torch.empty_like(flat_x) for _ in objectives]
        for exact, rows, own in self.by_class(origin.flatten()):
            score, at = _Once(exact), (flat_x[rows], flat_t[rows])
            if drawn_again:
                own = score.posterior(*at).indices_at(u("targets/origin").reshape(1, -1)[:, rows])[0]
            for objective, m, drawn in zip(objectives, found, more, strict=True):
                m[rows] = objective.target(score, *at, own, drawn[rows])
        x, t = x.to(self.dtype), t.to(self.dtype)
        return [Batch(x, t, m.reshape(shape).to(self.dtype)) for m in found]

    def time(self, u: Tensor) -> Tensor:
        """Return the times at the quantiles u."""
        low, high = self.process.eps, self.process.T
        match self.times:
            case "uniform":
                return (low + (high - low) * u).clamp(low, high)
            case "log":
                least, most = map(math.log, self.process.ratios)
                return self.process.time((least + (most - least) * u).exp())
            case (_, float(mean), float(std)):
                return self.process.time((mean + std * torch.special.ndtri(u)).exp().clamp(*self.process.ratios))
        assert callable(self.times)
        t = self.process.check(self.times(u))
        require(t.shape == u.shape, f"times must give one t for each u; got {tuple(t.shape)} for {tuple(u.shape)}.")
        return t.to(u).clamp(low, high)


class _Once(EmpiricalScore):
    """An exact score for one set of queries: the posterior and its mean are computed once for all objectives."""

    def __init__(self, score: EmpiricalScore) -> None:
        vars(self).update(vars(score))
        self.denoise = functools.cache(score.denoise)  # type: ignore[method-assign]
        self.posterior = functools.cache(score.posterior)  # type: ignore[method-assign]


def _points(data: Empirical, index: Tensor, like: Tensor) -> Tensor:
    return data.take(index).to(like).reshape(like.shape)


def _drawn(weights: Tensor, u: Tensor) -> Tensor:
    """Return the indices at the quantiles u of a law with the given weights."""
    total = weights.double().cumsum(0)
    return torch.searchsorted(total / total[-1], u).clamp_max(len(weights) - 1)


def _without_replacement(u: Tensor, n: int) -> Tensor:
    """Return for each row of ``u (N, k)`` a uniform set of k of the numbers 0 … n - 1, by Floyd's algorithm."""
    k = u.shape[1]
    chosen = torch.full(u.shape, -1, dtype=torch.long, device=u.device)
    for j in range(k):
        last = n - k + j
        drawn = (u[:, j] * (last + 1)).long().clamp_max(last)
        chosen[:, j] = torch.where((chosen[:, :j] == drawn[:, None]).any(1), last, drawn)
    return chosen


def _conditional_mean(score: EmpiricalScore, x: Tensor, t: Tensor, slots: Tensor, log_w: Tensor) -> Tensor:
    """Return the mean of the points with indices ``slots (N, K)``, each weighted by w p(x|y)."""
    data, process = score.data, score.process
    out, t = torch.empty_like(x), t.double().expand(len(x))
    for rows in torch.arange(len(x), device=x.device).split(max(1, CHUNK // (slots.shape[1] * data.d))):
        y = data.take(slots[rows].flatten()).to(x.device).double().reshape(*slots[rows].shape, data.d)
        wide = t[rows]
        away = x[rows].double().reshape(len(rows), 1, data.d) - process.alpha(wide)[:, None, None] * y
        logit = log_w.double()[slots[rows]] - away.square().sum(-1) / (2 * process.S(wide)[:, None])
        out[rows] = (logit.softmax(1)[..., None] * y).sum(1).reshape(len(rows), *x.shape[1:]).to(x.dtype)
    return out
