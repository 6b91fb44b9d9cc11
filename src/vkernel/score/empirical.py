r"""The exact score of a training set, its derivatives, and the noise fraction (docs/theory.md, §2).

.. math::

   s(x,t) = S^{-1} (\alpha m - x), \qquad C(x,t) = \mathrm{Cov}[\tilde s | x,t] = \alpha^2 S^{-1}
   \mathrm{Cov}(x_0|x,t)\, S^{-1} = S^{-1} + \nabla\nabla^T \log p,

where :math:`\tilde s = S^{-1}(\alpha x_0 - x)` is the proxy score that a network is trained on. The Jacobian of the
score is :math:`C - S^{-1}`; autograd, ``torch.func.vjp`` and ``torch.func.jvp`` return products with it without a graph
through the sum over training points. An anisotropic process is evaluated in whitened coordinates. The noise fraction is
the share of the training target's second moment that is noise, with expectations over x ~ p(x|t),

.. math:: \rho(t) = E\,\mathrm{tr}\,C / (E\,\mathrm{tr}\,C + E|s|^2) = E\,\mathrm{tr}\,C / \mathrm{tr}\,S^{-1} ."""

import inspect
import math
from typing import Any, Self

import torch
from torch import Tensor
from torch.autograd import forward_ad

from vkernel.core import rng
from vkernel.core.checks import check_real, check_whole
from vkernel.core.covariance import Covariance, Transformed, flat, over_event
from vkernel.core.errors import InputError, require
from vkernel.core.estimate import Estimate, stacked
from vkernel.core.rng import Generator
from vkernel.data import Empirical
from vkernel.posterior import Choice, Engine, Points, Posterior, PosteriorCovariance, Queries, Sharded
from vkernel.process import Anisotropic, Process
from vkernel.score.base import DataScore, Time, differentiated, plain, wide_time

Data = Empirical | Tensor
FARTHEST = 1e15  # |x| / σ beyond which float64 cannot distinguish training points
TIMES = 1 << 12  # times whose levels are kept
NODES = 1 << 31  # pairs (node, point) that a quadrature in one dimension may take


class EmpiricalScore(DataScore):
    r"""The exact score :math:`s(x,t)` of a training set under a forward process.

    It is differentiable in ``x``, twice. ``memory`` bounds the engine's working memory in bytes (default: a quarter of
    the free memory). Computation happens on the data's device (``data.to("cuda")``); results return to that of ``x``.
    ``method`` is that of :class:`vkernel.posterior.Engine`: ``"auto"`` is the fastest, ``"dense"`` the reference.

    >>> import torch, vkernel as vk
    >>> score = vk.EmpiricalScore(torch.tensor([-1.0, 0.0, 1.0]), vk.VP())
    >>> score(torch.tensor([[0.5]]), 0.1).shape
    torch.Size([1, 1])
    """

    shape: tuple[int, ...]

    def __init__(self, data: Data, process: Process, memory: int | None = None, method: Choice = "auto") -> None:
        good = isinstance(process, Process)
        require(good, f"EmpiricalScore needs a forward process such as vk.VP(), not {process!r}.")
        self.data = data if isinstance(data, Empirical) else Empirical(data)
        self.process, self.shape, self.memory, self.method = process, self.data.shape, memory, method
        self._levels: dict[tuple[float, torch.dtype], tuple[float, float]] = {}
        good = process.shape in ((), self.data.shape)
        require(good, f"The data have shape {self.data.shape} but Γ acts on {process.shape}.")
        # tr Γ^-1, the precision of the noise in units of 1/sigma²
        self.precision = process.inverse_trace if isinstance(process, Anisotropic) else float(self.data.d)
        white = whitened(self.data, process)
        if isinstance(self.data, Sharded):
            own, first, ranks = whitened(self.data.own, process), self.data.first, self.data.ranks
            self.engine = Engine(own, memory, white, first, ranks, method)
        else:
            self.engine = Engine(white, memory, method=method)

    def on(self, data: Data) -> Self:
        return type(self)(data, self.process, self.memory, self.method)

    def __call__(self, x: Tensor, t: Time) -> Tensor:
        x, t = self.check(x, t)
        if not isinstance(self.process, Anisotropic):
            return self._evaluate(x, t) if x.is_cuda and plain(x, t) else _derivative(x, t, self)
        return self.process.whiten(_derivative(self.process.whiten(x.double()), t, self)).to(x.dtype)

    def posterior(self, x: Tensor, t: Time) -> Posterior:
        """Return the posterior over training points for each query."""
        x, t = self.check(x, t)
        if not isinstance(self.process, Anisotropic):
            return self._posterior(x, t)
        return _Unwhitened(self._posterior(self.process.whiten(x.double()), t), self.process, x.dtype)

    def denoise(self, x: Tensor, t: Time) -> Tensor:
        r"""Return the ideal denoiser :math:`m(x,t) = E[x_0|x,t]`, like x: nothing cancels where alpha is small."""
        if isinstance(x, Tensor) and differentiated(x):  # the mean itself carries no derivative
            return super().denoise(x, t)
        x, t = self.check(x, t)
        if isinstance(self.process, Anisotropic):
            return self.posterior(x, t).mean
        mean = self._direct(x, t, mean=True)
        if mean is None:
            mean = self.engine.moments(self.queries(x, t)).mean.to(x.device, x.dtype).reshape(x.shape)
        return mean

    def covariance(self, x: Tensor, t: Time) -> Covariance:
        r"""Return the proxy-score covariance :math:`C(x,t)` as an operator (2.6)."""
        x, t = self.check(x, t)
        # C is alpha²/sigma⁴ times something small: rounded once, at the end
        cov, (alpha, var) = self._posterior(self.process.whiten(x.double()), t).cov, self.levels(t.to(x.device))
        frame = self.process.inverse_root if isinstance(self.process, Anisotropic) else None
        return Transformed(cov, (alpha / var).expand(cov.batch), frame, x.dtype)

    def with_covariance(self, x: Tensor, t: Time) -> tuple[Tensor, Covariance]:
        """Return the score (without derivative) and C, from one posterior."""
        x, t = self.check(x, t)
        cov = self.covariance(x, t)
        inner = cov
        while not isinstance(inner, PosteriorCovariance):
            inner = inner.base  # type: ignore[attr-defined]
        queries, mean = inner.posterior.queries, inner.posterior.first.mean
        s = ((queries.alpha[:, None] * mean - queries.x) / queries.var[:, None]).reshape(x.shape).to(x.device)
        return self.process.whiten(s).to(x.dtype), cov

    def divergence(self, x: Tensor, t: Time, probes: int | Tensor = 8, generator: Generator = None) -> Tensor:
        r"""Return :math:`\nabla \cdot s = \mathrm{tr}\,C - \mathrm{tr}\,S^{-1}`, ``(*batch,)``, exactly."""
        x, t = self.check(x, t)
        return (self.covariance(x.double(), t).trace() - self.precision / self.levels(t.to(x.device))[1]).to(x.dtype)

    def noise_trace(self, x: Tensor, t: Time, probes: int | Tensor = 8, generator: Generator = None) -> Tensor:
        r"""Return :math:`\sigma^2\,\mathrm{tr}\,C` in whitened coordinates, ``(*batch,)``, exactly."""
        x, t = self.check(x, t)
        cov, (alpha, var) = self._posterior(self.process.whiten(x.double()), t).cov, self.levels(t.to(x.device))
        return Transformed(cov, (alpha / var).expand(cov.batch)).trace() * var

    def jvp(self, x: Tensor, t: Time, v: Tensor) -> Tensor:
        r"""Return :math:`(C - S^{-1}) v`, like x."""
        x, t = self.check(x, t)
        good, wanted = check_real(v, "v").shape == x.shape, tuple(x.shape)
        require(good, f"v has shape {tuple(v.shape)}; it must be like x, {wanted}.")
        return self.process.whiten(self._jacobian(self.process.whiten(x), t, self.process.whiten(v)))

    vjp = jvp  # the Jacobian is symmetric

    def __repr__(self) -> str:
        return f"EmpiricalScore({self.data!r}, {self.process!r})"

    def check(self, x: Tensor, t: Time) -> tuple[Tensor, Tensor]:
        x, t = super().check(x, t)
        if t.requires_grad:
            raise InputError("The empirical score is differentiable in x, not in t: detach t.")
        return x, t

    def queries(self, x: Tensor, t: Tensor) -> Queries:
        """Return the engine's queries for checked ``x`` and ``t``, in the isotropic coordinates."""
        rows, *levels = self._prepare(x, t)
        rows = rows.double()
        alpha, var = (rows.new_full((len(rows),), a) if isinstance(a, float) else a for a in levels)
        good = (rows.square().sum(-1) < FARTHEST**2 * var) & (var > 0)
        if not bool(good.all()):  # one synchronisation; then the reason
            raise refused(rows, var)
        return Queries(rows, alpha, var)

    def _posterior(self, x: Tensor, t: Tensor) -> Posterior:
        batch = self.split(x)[0]
        # a copy: a lazily evaluated posterior must not follow an x that is changed in place
        return Posterior(self.engine, self.queries(x.detach().clone(), t), batch, self.shape, x.dtype, x.device)

    def _prepare(self, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor | float, Tensor | float]:
        """Return rows ``(B, d)`` on the data's device; alpha and sigma², numbers where t is one, else ``(B,)``."""
        device = self.data.device
        rows = x.detach().to(device).reshape(-1, self.data.d)  # the derivative is defined below, not by autograd
        self.engine.ranks.same("The queries x and t", rows, t)  # before any refusal that depends on values
        if t.numel() == 1:
            return rows, *self._levels_at(float(t), t.dtype)
        batch = x.shape[: x.ndim - len(self.shape)]
        alpha, var = (a.to(device).expand(batch).reshape(-1) for a in self.levels(self.process.check(t)))
        return rows, alpha, var

    def _levels_at(self, t: float, dtype: torch.dtype) -> tuple[float, float]:
        """Return alpha and sigma² at one time, which a sampler comes back to; on a GPU their formulas take longer than
        launching what follows."""
        found = self._levels.get((t, dtype))
        if found is None:
            alpha, var = self.levels(self.process.check(torch.tensor(t, dtype=dtype, device="cpu")))
            if len(self._levels) >= TIMES:
                self._levels.clear()
            found = self._levels[t, dtype] = float(alpha), float(var)
        return found

    def _direct(self, x: Tensor, t: Tensor, mean: bool) -> Tensor | None:
        """Return the score, or the mean, from the GPU path by itself; ``None`` where that does not apply."""
        direct = self.engine.direct
        if direct is None or x.device != self.data.device:
            return None
        rows, alpha, var = self._prepare(x, t)
        out = direct.evaluate(rows, alpha, var, mean)
        if out is None:
            raise refused(rows, torch.as_tensor(var))
        return out.reshape(x.shape)

    def _evaluate(self, x: Tensor, t: Tensor) -> Tensor:
        """Return the score in the isotropic coordinates."""
        s = self._direct(x, t, mean=False)
        if s is not None:
            return s
        queries = self.queries(x, t)
        mean = self.engine.moments(queries).mean
        s = (queries.alpha[:, None] * mean - queries.x) / queries.var[:, None]
        return s.to(x.device, x.dtype).reshape(x.shape)

    def _jacobian(self, x: Tensor, t: Tensor, v: Tensor) -> Tensor:
        """Return :math:`(C - S^{-1}) v` in the isotropic coordinates."""
        alpha, var = (over_event(a, self.shape) for a in self.levels(t.to(v.device)))
        return (_derivative(x, t, self, v) * (alpha / var).square() - v / var).to(v.dtype)


def refused(rows: Tensor, var: Tensor) -> InputError:
    """Return the error that says why there is no score at some of the queries."""
    if not bool(rows.isfinite().all()):
        return InputError("x holds NaN or infinite values: the score there has no meaning.")
    if not bool((var > 0).all()):
        return InputError("There is no noise at this t (S = 0), hence no score; choose a larger t.")
    return InputError(f"x is more than {FARTHEST:.0e} sigma away: float64 cannot tell the training points apart there.")


def whitened(data: Empirical, process: Process) -> Points:
    """Return the data as points for an engine, under an anisotropic process in whitened coordinates."""
    return Whitened(data, process) if isinstance(process, Anisotropic) else data


class Whitened:
    """The data in coordinates in which the noise is isotropic, block by block."""

    def __init__(self, data: Empirical, frame: Anisotropic) -> None:
        self.data, self.frame = data, frame
        self.n, self.d, self.device, self.weights = data.n, data.d, data.device, data.weights
        self.in_memory = data.in_memory
        self.center = self._white(data.center)

    def _white(self, rows: Tensor) -> Tensor:
        return flat(self.frame.whiten(rows.double().reshape(*rows.shape[:-1], *self.data.shape)), self.data.shape)

    def rows(self, start: int, stop: int) -> Tensor:
        return self._white(self.data.rows(start, stop))

    def take(self, indices: Tensor) -> Tensor:
        return self._white(self.data.take(indices))


class _Unwhitened(Posterior):
    """A posterior that was computed in whitened coordinates, expressed in data coordinates."""

    def __init__(self, white: Posterior, frame: Anisotropic, dtype: torch.dtype) -> None:
        super().__init__(white.engine, white.queries, white.batch, white.shape, dtype, white.device)
        self._white, self._frame = white, frame

    @property
    def mean(self) -> Tensor:
        return self._frame.unwhiten(self._white.mean).to(self.dtype)

    @property
    def logp(self) -> Tensor:
        return (self._white.logp - self._frame.half_log_det).to(self.dtype)

    @property
    def cov(self) -> Covariance:  # type: ignore[override]
        return Transformed(PosteriorCovariance(self._white), map=self._frame.root, dtype=self.dtype)

    def sample(self, k: int, generator: Generator = None) -> Tensor:
        index = self.sample_indices(k, generator)
        points: Tensor = self.engine.whole.data.take(index.flatten())  # type: ignore[attr-defined]
        return points.to(self.device, self.dtype).reshape(index.shape + self.shape)

    def third(self, v: Tensor, u: Tensor) -> Tensor:
        return self._frame.unwhiten(self._white.third(self._frame.unwhiten(v), self._frame.unwhiten(u)))


class _Derivative(torch.autograd.Function):
    r"""The score and its derivatives in whitened coordinates, each the Jacobian of the one before.
    ``apply(x, t, score, *vectors)`` is s without vectors; :math:`\mathrm{Cov}(x_0|x,t)\, v` with one; with two
    :math:`(\alpha/\sigma^2) \sum_i r_i (y_i-m) ((y_i-m)\cdot v) ((y_i-m)\cdot u)`, its derivative along u."""

    @staticmethod
    def forward(x: Tensor, t: Tensor, score: EmpiricalScore, *vectors: Tensor) -> Tensor:
        if not vectors:
            return score._evaluate(x, t)
        if len(vectors) == 1:
            v = vectors[0].detach().to(score.data.device, torch.float64).reshape(-1, score.data.d)
            product = score.engine.moments(score.queries(x, t), vector=v).product
            assert product is not None
            return product.to(x.device).reshape(x.shape)
        alpha, var = score.levels(t.to(x.device))
        third = score._posterior(x.double(), t).third(vectors[0].detach(), vectors[1].detach())
        return over_event(alpha / var, score.shape) * third

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, t, ctx.score, *vectors = inputs
        ctx.save_for_backward(x, t, *vectors)
        ctx.save_for_forward(x, t, *vectors)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> tuple[Tensor | None, ...]:
        x, t, *vectors = ctx.saved_tensors
        none = (None,) * (2 + len(vectors))
        if g is None:
            return None, *none
        if not vectors:
            return ctx.score._jacobian(x, t, g), *none
        v = _at_most_one(vectors)
        dx = _derivative(x, t, ctx.score, v, g).to(x.dtype) if ctx.needs_input_grad[0] else None
        return dx, None, None, _derivative(x, t, ctx.score, g).to(v.dtype) if ctx.needs_input_grad[3] else None

    @staticmethod
    def jvp(ctx: Any, dx: Tensor | None, dt: Tensor | None, _: None, *dvs: Tensor | None) -> Tensor:
        require(dt is None, "The empirical score is differentiable in x, not in t: detach t.")
        # what was saved, without the tangents of the level that is being differentiated
        x, t, *vectors = (forward_ad.unpack_dual(a).primal for a in ctx.saved_tensors)
        with forward_ad._set_fwd_grad_enabled(True):  # torch turns it off here, and with it every outer jvp
            score: EmpiricalScore = ctx.score
            if not vectors and dx is not None:
                return score._jacobian(x, t, dx)
            v, out = _at_most_one(vectors), torch.zeros_like(x, dtype=torch.float64)
            out = out if dx is None else out + _derivative(x, t, score, v, dx)
            return out if dvs[0] is None else out + _derivative(x, t, score, dvs[0])

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, t: Tensor, score: EmpiricalScore, *vs: Tensor) -> tuple[Tensor, int]:
        """Map: the mapped axis becomes one more batch axis in front, of x, of the vectors and of t."""
        pairs = zip((x, *vs), (in_dims[0], *in_dims[3:]), strict=True)
        x, *mapped = (a.expand(info.batch_size, *a.shape) if k is None else a.movedim(k, 0) for a, k in pairs)
        if in_dims[1] is not None:
            t = t.movedim(in_dims[1], 0)
            t = t.reshape(t.shape[:1] + (1,) * (x.ndim - len(score.shape) - t.ndim) + t.shape[1:])
        return _derivative(x, t, score, *mapped), 0


# torch binds the arguments of every call by the signature, which is made anew unless it is stored
vars(_Derivative.forward)["__signature__"] = inspect.signature(_Derivative.forward)


def _derivative(x: Tensor, t: Tensor, score: EmpiricalScore, *vectors: Tensor) -> Tensor:
    out: Tensor = _Derivative.apply(x, t, score, *vectors)  # type: ignore[no-untyped-call]
    return out


def _at_most_one(vectors: list[Tensor]) -> Tensor:
    require(len(vectors) < 2, "The empirical score has derivatives up to the second; the third is not provided.")
    return vectors[0]


def noise_fraction(
    data: Empirical | EmpiricalScore, process: Process, t: Time, queries: int = 4096, generator: Generator = None
) -> Estimate[float] | Estimate[Tensor]:
    r"""Estimate the noise fraction :math:`\rho(t)`, the share of the training target that is noise (2.8).
    In one dimension by quadrature, exact to rounding; else over ``queries`` draws of x, with their standard error.
    ``t`` may be a vector: then the estimate's fields are vectors.

    >>> import vkernel as vk
    >>> round(vk.noise_fraction(vk.data.toy("triple"), vk.VP(), 0.1).value, 3)
    0.634
    >>> vk.noise_fraction(vk.data.toy("L"), vk.VP(), [0.1, 0.5], generator=0).value.shape
    torch.Size([2])
    """
    score = data if isinstance(data, EmpiricalScore) else EmpiricalScore(data, process)
    require(score.process == process, "The score that was given belongs to another process.")
    check_whole(queries, "queries", least=2)
    times = process.check(wide_time(t, torch.device("cpu")))
    require(times.numel() > 0, "t must hold at least one time.")
    source = rng.as_generator(generator)
    parts = [_noise_fraction(score, u, queries, source) for u in times.reshape(-1)]
    return stacked(parts, tuple(times.shape)) if times.ndim else parts[0]


def _noise_fraction(score: EmpiricalScore, t: Tensor, queries: int, source: torch.Generator) -> Estimate:
    data, (alpha, var) = score.data, (float(a) for a in score.levels(t))
    exact = _quadrature(score, t, alpha, math.sqrt(var)) if data.d == 1 and not score.process.shape else None
    if exact is not None:
        return Estimate.exact(exact)
    u = rng.rand((queries,), source, data.device)
    index = torch.searchsorted(data.weights.cumsum(0), u, right=True).clamp_max(data.n - 1)
    x = score.process.perturb(data[index], float(t), generator=source)
    return Estimate.of_mean(score.covariance(x, float(t)).trace().double(), scale=var / score.precision)


def _quadrature(score: EmpiricalScore, t: Tensor, alpha: float, sigma: float) -> float | None:
    """Return E[C] sigma² in one dimension by the trapezoidal rule, exponentially accurate for an analytic integrand.
    Points farther apart than 18 sigma have nothing between them (to e^-40): each island has a grid of its own. ``None``
    where the grids would be larger than a Monte Carlo estimate is worth."""
    support = alpha * score.data.rows(0, score.data.n).double().flatten().sort().values
    cut = (support.diff() > 18 * sigma).nonzero().flatten() + 1
    ends = [(float(i[0]) - 9 * sigma, float(i[-1]) + 9 * sigma) for i in support.cpu().tensor_split(cut.cpu())]
    steps = [max(int((high - low) / sigma * 16), 512) for low, high in ends]
    if sum(steps) * score.data.n > NODES:
        return None
    grids = [torch.linspace(*end, k + 1, dtype=torch.float64) for end, k in zip(ends, steps, strict=True)]
    widths = [torch.full_like(g, (high - low) / k) for g, (low, high), k in zip(grids, ends, steps, strict=True)]
    x, dx = (torch.cat(a).to(score.data.device) for a in (grids, widths))
    posterior = score.posterior(x.reshape(-1, *score.data.shape), t)
    return float((posterior.logp.exp() * posterior.cov.trace() * (alpha / sigma) ** 2 * dx).sum())
