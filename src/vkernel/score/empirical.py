r"""Scores: of a training set, of one training point, and of other people's networks (docs/theory.md, §2).

A *score* is any callable ``(x, t) -> tensor like x``. The training set's own is

.. math::

   s(x,t) = S^{-1} (\alpha m - x), \qquad C(x,t) = \mathrm{Cov}[\tilde s | x,t] = \alpha^2 S^{-1}
   \mathrm{Cov}(x_0|x,t)\, S^{-1} = S^{-1} + \nabla\nabla^T \log p,

where :math:`\tilde s = S^{-1}(\alpha x_0 - x)` is the proxy score that a network is trained on. Its Jacobian is
:math:`C - S^{-1}`, which is what autograd, ``torch.func.vjp`` and ``torch.func.jvp`` return here, without a graph
through the sum over training points.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable

from vkernel.core import rng
from vkernel.core.covariance import Congruent, Covariance, Generator, Rounded, Scaled, fits, flat, over_event
from vkernel.core.errors import InputError, require
from vkernel.core.estimate import Estimate
from vkernel.data.empirical import Empirical
from vkernel.posterior import Engine, Posterior, Queries, Sharded
from vkernel.posterior.pieces import Points
from vkernel.posterior.result import PosteriorCovariance
from vkernel.process import Anisotropic, Process
from vkernel.score.conversions import (
    Score,
    Time,
    as_time,
    from_flow,
    from_noise,
    from_v,
    from_x0,
    proxy_score,
    to_flow,
    to_noise,
    to_v,
    to_x0,
    wide_time,
)

__all__ = [
    "EmpiricalScore",
    "Score",
    "from_flow",
    "from_noise",
    "from_v",
    "from_x0",
    "noise_fraction",
    "proxy_score",
    "to_flow",
    "to_noise",
    "to_v",
    "to_x0",
]


NODES = 1 << 31  # pairs (node, point) that a quadrature in one dimension may take


class EmpiricalScore:
    r"""The exact score :math:`s(x,t)` of a training set under a forward process, and what comes with it.

    ``score(x, t)`` takes ``x (*batch, *data.shape)`` and ``t`` that broadcasts to ``batch``; the result is like ``x``,
    and differentiable in ``x``. ``memory`` bounds the engine's working memory in bytes (default: a quarter of what is
    free). Computation happens on the data's device (``data.to("cuda")``), results return to that of ``x``.
    """

    def __init__(self, data: Empirical | Tensor, process: Process, memory: int | None = None) -> None:
        require(
            isinstance(process, Process), f"EmpiricalScore needs a forward process such as vk.VP(), not {process!r}."
        )
        self.data = data if isinstance(data, Empirical) else Empirical(data)
        self.process = process
        self._frame = process if isinstance(process, Anisotropic) else None
        if self._frame is not None and self._frame.shape != self.data.shape:
            raise InputError(f"The data have shape {self.data.shape} but Γ acts on {self._frame.shape}.")
        if isinstance(self.data, Sharded):
            own, first, ranks = self._seen(self.data.own), self.data.first, self.data.ranks
            self._engine = Engine(own, memory, self._seen(self.data), first, ranks)
        else:
            self._engine = Engine(self._seen(self.data), memory)

    def __call__(self, x: Tensor, t: Time) -> Tensor:
        x, t = self._door(x, t)
        if self._frame is None:
            return _Score.apply(x, t, self)
        return self._frame.whiten(_Score.apply(self._frame.whiten(x.double()), t, self)).to(x.dtype)

    def posterior(self, x: Tensor, t: Time) -> Posterior:
        """The posterior over training points for each query."""
        x, t = self._door(x, t)
        if self._frame is None:
            return self._posterior(x, t)
        return _Unwhitened(self._posterior(self._frame.whiten(x.double()), t), self._frame, x.dtype)

    def denoise(self, x: Tensor, t: Time) -> Tensor:
        r"""The ideal denoiser :math:`m(x,t) = E[x_0|x,t]`, like x: nothing cancels where alpha is small."""
        x, t = self._door(x, t)
        if self._frame is not None:
            return self.posterior(x, t).mean
        return self._engine.moments(self._queries(x, t)).mean.to(x.device, x.dtype).reshape(x.shape)

    def with_covariance(self, x: Tensor, t: Time) -> tuple[Tensor, Covariance]:
        """The score (without derivative) and C, from one posterior."""
        x, t = self._door(x, t)
        cov = self.covariance(x, t)
        inner = cov
        while not isinstance(inner, PosteriorCovariance):
            inner = inner.base  # type: ignore[attr-defined]
        queries, mean = inner.posterior._queries, inner.posterior._first.mean
        s = ((queries.alpha[:, None] * mean - queries.x) / queries.var[:, None]).reshape(x.shape).to(x.device)
        return (s if self._frame is None else self._frame.whiten(s)).to(x.dtype), cov

    def covariance(self, x: Tensor, t: Time) -> Covariance:
        r"""The proxy-score covariance :math:`C(x,t)` as an operator (2.6)."""
        x, t = self._door(x, t)
        wide = x.double()  # C is alpha²/sigma⁴ times something small: rounded once, at the end
        cov = self._posterior(wide if self._frame is None else self._frame.whiten(wide), t).cov
        alpha, var = self._levels(t.to(x.device))
        scaled: Covariance = Scaled(cov, (alpha / var).expand(cov.batch))
        scaled = scaled if self._frame is None else Congruent(scaled, self._frame.inverse_root)
        return scaled if x.dtype == torch.float64 else Rounded(scaled, x.dtype)

    def _seen(self, data: Empirical) -> Points:
        """The data as the engine sees them: in coordinates in which the noise is isotropic."""
        return data if self._frame is None else _Whitened(data, self._frame)

    def __repr__(self) -> str:
        return f"EmpiricalScore({self.data!r}, {self.process!r})"

    def _levels(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """alpha and sigma² in float64."""
        base, t = self.process.base, t.double().clamp(self.process.eps, self.process.T)
        return base.alpha(t), base.S(t)

    def _door(self, x: Any, t: Time) -> tuple[Tensor, Tensor]:
        """Refuse what cannot be a query; bring integers to the default float."""
        require(isinstance(x, Tensor), f"x must be a torch tensor, not {type(x).__name__}.")
        shape, k = self.data.shape, len(self.data.shape)
        require(not x.is_complex(), "x must be real.")
        require(
            x.ndim >= k and tuple(x.shape[x.ndim - k :]) == shape,
            f"x has shape {tuple(x.shape)}; it must end in the data's shape {shape}.",
        )
        x = x if x.is_floating_point() else x.to(torch.get_default_dtype())
        t = as_time(t, x.device if isinstance(t, Tensor) else torch.device("cpu"))  # a number is looked at on the CPU
        require(not t.requires_grad, "The empirical score is differentiable in x, not in t: detach t.")
        batch = tuple(x.shape[: x.ndim - k])
        require(
            fits(tuple(t.shape), batch),
            f"t has shape {tuple(t.shape)}, which does not broadcast to the batch shape {batch} of x.",
        )
        return x, t

    def _posterior(self, x: Tensor, t: Tensor) -> Posterior:
        shape = self.data.shape
        batch = tuple(x.shape[: x.ndim - len(shape)])
        # a copy: what a posterior answers later must not follow an x that is changed in place
        return Posterior(self._engine, self._queries(x.detach().clone(), t), batch, shape, x.dtype, x.device)

    def _prepare(self, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor | float, Tensor | float]:
        """Rows ``(B, d)`` on the data's device; alpha and sigma², numbers where t is one, else ``(B,)``."""
        device, batch = self.data.device, x.shape[: x.ndim - len(self.data.shape)]
        rows = x.detach().to(device).reshape(-1, self.data.d)  # detach: the derivative is ours (below), not autograd's
        self._engine.ranks.same("The queries x and t", rows, t)  # first: what follows refuses by values
        one = t.numel() == 1
        alpha, var = self._levels(self.process.check(t.cpu() if one else t))  # one is looked at where that is cheap
        if one:
            return rows, float(alpha), float(var)
        alpha, var = (a.to(device).expand(batch).reshape(-1) for a in (alpha, var))
        return rows, alpha, var

    def _queries(self, x: Tensor, t: Tensor) -> Queries:
        rows, *levels = self._prepare(x, t)
        rows = rows.double()
        alpha, var = (rows.new_full((len(rows),), a) if isinstance(a, float) else a for a in levels)
        if not bool(((rows.square().sum(-1) < 1e30 * var) & (var > 0)).all()):  # one look at the device; then why
            raise _unfit(rows, var)
        return Queries(rows, alpha, var)

    def _evaluate(self, x: Tensor, t: Tensor) -> Tensor:
        """The score in the isotropic frame."""
        direct = self._engine.direct
        if direct is not None and x.device == self.data.device:
            rows, alpha, var = self._prepare(x, t)
            s = direct.score(rows, alpha, var)
            if s is None:
                raise _unfit(rows, torch.as_tensor(var))
            return s.reshape(x.shape)
        queries = self._queries(x, t)
        mean = self._engine.moments(queries).mean
        s = (queries.alpha[:, None] * mean - queries.x) / queries.var[:, None]
        return s.to(x.device, x.dtype).reshape(x.shape)

    def _jacobian(self, x: Tensor, t: Tensor, v: Tensor) -> Tensor:
        """:math:`(C - S^{-1}) v` in the isotropic frame."""
        alpha, var = (over_event(a, self.data.shape) for a in self._levels(t.to(v.device)))
        product = _CovProduct.apply(x, t, v, self)
        return (product * (alpha / var).square() - v / var).to(v.dtype)


def _unfit(rows: Tensor, var: Tensor) -> InputError:
    """Why there is no score at some of the queries."""
    if not bool(rows.isfinite().all()):
        return InputError("x holds NaN or infinite values: the score there has no meaning.")
    if not bool((var > 0).all()):
        return InputError("There is no noise at this t (S = 0), hence no score; choose a larger t.")
    return InputError("x is more than 1e15 sigma away: float64 cannot tell the training points apart there.")


class _Whitened:
    """The data in coordinates in which the noise is isotropic, block by block."""

    def __init__(self, data: Empirical, frame: Anisotropic) -> None:
        self.data, self.frame = data, frame
        self.n, self.d, self.device, self.weights = data.n, data.d, data.device, data.weights
        self.in_memory, self.dtype = data.in_memory, data.dtype
        self.center = self._white(data.center)

    def _white(self, rows: Tensor) -> Tensor:
        wide = rows.double().reshape(*rows.shape[:-1], *self.data.shape)
        return flat(self.frame.whiten(wide), self.data.shape)

    def rows(self, start: int, stop: int) -> Tensor:
        return self._white(self.data.rows(start, stop))

    def take(self, indices: Tensor) -> Tensor:
        return self._white(self.data.take(indices))


class _Unwhitened(Posterior):
    """A posterior that was computed in whitened coordinates, told in the data's own."""

    def __init__(self, white: Posterior, frame: Anisotropic, dtype: torch.dtype) -> None:
        super().__init__(white._engine, white._queries, white.batch, white.shape, dtype, white.device)
        self._white, self._frame = white, frame

    @property
    def mean(self) -> Tensor:
        return self._frame.unwhiten(self._white.mean).to(self.dtype)

    @property
    def logp(self) -> Tensor:
        return (self._white.logp - self._frame.half_log_det).to(self.dtype)

    @property
    def cov(self) -> Covariance:  # type: ignore[override]
        return Rounded(Congruent(PosteriorCovariance(self._white), self._frame.root), self.dtype)

    def sample(self, k: int, generator: Generator = None) -> Tensor:
        index = self.sample_indices(k, generator)
        points = self._engine.whole.data.take(index.flatten())  # type: ignore[attr-defined]
        return points.to(self.device, self.dtype).reshape(index.shape + self.shape)

    def third(self, v: Tensor, u: Tensor) -> Tensor:
        return self._frame.unwhiten(self._white.third(self._frame.unwhiten(v), self._frame.unwhiten(u)))


# --- derivatives: three functions, each the Jacobian of the one before -------------------------------------------


def _fold(info: Any, in_dims: tuple[Any, ...], score: EmpiricalScore, t: Tensor, *xs: Tensor) -> tuple[Any, ...]:
    """A vmapped axis becomes one more batch axis in front, of x, v, … and of t."""
    k = len(score.data.shape)
    moved = []
    for a, dim in zip(xs, (in_dims[0], *in_dims[2:]), strict=False):
        moved.append(a.unsqueeze(0).expand(info.batch_size, *a.shape) if dim is None else a.movedim(dim, 0))
    if in_dims[1] is not None:
        t = t.movedim(in_dims[1], 0)
        pad = moved[0].ndim - k - t.ndim
        t = t.reshape(t.shape[:1] + (1,) * pad + t.shape[1:])
    return moved[0], t, *moved[1:]


def _primals(ctx: Any) -> tuple[Tensor, ...]:
    """What was saved, without the tangents of the level that is being differentiated."""
    return tuple(forward_ad.unpack_dual(a).primal for a in ctx.saved_tensors)


class _Score(torch.autograd.Function):
    """s(x, t), whose Jacobian is C - S^-1."""

    @staticmethod
    def forward(x: Tensor, t: Tensor, score: EmpiricalScore) -> Tensor:
        return score._evaluate(x, t)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, t, ctx.score = inputs
        ctx.save_for_backward(x, t)
        ctx.save_for_forward(x, t)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, None, None]:
        return (None if g is None else ctx.score._jacobian(*ctx.saved_tensors, g)), None, None

    @staticmethod
    def jvp(ctx: Any, dx: Tensor, dt: Tensor | None, _: None) -> Tensor:
        require(dt is None, "The empirical score is differentiable in x, not in t: detach t.")
        x, t = _primals(ctx)
        with forward_ad._set_fwd_grad_enabled(True):  # torch turns it off here, and with it every outer jvp
            return ctx.score._jacobian(x, t, dx)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor, t: Tensor, score: EmpiricalScore) -> tuple[Tensor, int]:
        return _Score.apply(*_fold(info, in_dims[:2], score, t, x), score), 0


class _CovProduct(torch.autograd.Function):
    r"""Cov(x0|x,t) v, whose derivative along u is :math:`(\alpha/\sigma^2)` times the third central moment."""

    @staticmethod
    def forward(x: Tensor, t: Tensor, v: Tensor, score: EmpiricalScore) -> Tensor:
        vector = v.detach().to(score.data.device, torch.float64).reshape(-1, score.data.d)
        product = score._engine.moments(score._queries(x, t), vector=vector).product
        assert product is not None
        return product.to(x.device).reshape(x.shape)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, t, v, ctx.score = inputs
        ctx.save_for_backward(x, t, v)
        ctx.save_for_forward(x, t, v)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        x, t, v = ctx.saved_tensors
        dx = _Third.apply(x, t, v, g, ctx.score).to(x.dtype) if ctx.needs_input_grad[0] else None
        dv = _CovProduct.apply(x, t, g, ctx.score).to(v.dtype) if ctx.needs_input_grad[2] else None
        return dx, None, dv, None

    @staticmethod
    def jvp(ctx: Any, dx: Tensor | None, dt: None, dv: Tensor | None, _: None) -> Tensor:
        x, t, v = _primals(ctx)
        out = torch.zeros_like(x, dtype=torch.float64)
        with forward_ad._set_fwd_grad_enabled(True):
            if dx is not None:
                out = out + _Third.apply(x, t, v, dx, ctx.score)
            if dv is not None:
                out = out + _CovProduct.apply(x, t, dv, ctx.score)
        return out

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor, t: Tensor, v: Tensor, score: Any) -> tuple[Tensor, int]:
        return _CovProduct.apply(*_fold(info, in_dims[:3], score, t, x, v), score), 0


class _Third(torch.autograd.Function):
    r""":math:`(\alpha/\sigma^2) \sum_i r_i (y_i-m) ((y_i-m)\cdot v) ((y_i-m)\cdot u)`; the chain ends here."""

    @staticmethod
    def forward(x: Tensor, t: Tensor, v: Tensor, u: Tensor, score: EmpiricalScore) -> Tensor:
        alpha, var = score._levels(t.to(x.device))
        wide = score._posterior(x.double(), t)
        return over_event(alpha / var, score.data.shape) * wide.third(v.detach(), u.detach())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Tensor:
        raise InputError("The empirical score has derivatives up to the second; the third is not provided.")

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        raise InputError("The empirical score has derivatives up to the second; the third is not provided.")

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: Any, t: Any, v: Any, u: Any, score: Any) -> tuple[Tensor, int]:
        return _Third.apply(*_fold(info, in_dims[:4], score, t, x, v, u), score), 0


# --- how noisy is the target? -------------------------------------------------------------------------------------


def draw_queries(
    data: Empirical, process: Process, t: float, count: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """``count`` draws of x from p(x|t): the indices of the points that made them, and x ``(count, *shape)``."""
    u = torch.rand(count, generator=generator, device=generator.device, dtype=torch.float64).to(data.device)
    index = torch.searchsorted(data.weights.cumsum(0), u, right=True).clamp_max(data.n - 1)
    x0 = data.images(index)
    return index, process.perturb(x0, t, generator=generator)


def noise_fraction(
    data: Empirical | EmpiricalScore,
    process: Process,
    t: Time,
    queries: int = 4096,
    generator: Generator = None,
) -> Estimate:
    r"""The share of the training target's second moment that is noise (2.8),

    .. math:: \rho(t) = \frac{E\,\mathrm{tr}\,C}{E\,\mathrm{tr}\,C + E|s|^2} =
              \frac{E\,\mathrm{tr}\,C}{\mathrm{tr}\,S^{-1}}.

    In one dimension by quadrature, exact to rounding; else over ``queries`` draws of x, with their standard error.
    ``t`` may be a vector: then the estimate's fields are vectors.
    """
    score = data if isinstance(data, EmpiricalScore) else EmpiricalScore(data, process)
    require(score.process == process, "The score that was given belongs to another process.")
    require(queries >= 2, f"A standard error needs at least 2 queries; got {queries}.")
    times = process.check(wide_time(t, torch.device("cpu")))
    source = rng.as_generator(generator)
    parts = [_noise_fraction(score, float(u), queries, source) for u in times.reshape(-1)]
    if times.ndim == 0:
        return parts[0]
    columns = ([getattr(p, f) for p in parts] for f in ("value", "se", "low", "high"))
    return Estimate(*(torch.tensor(c, dtype=torch.float64).reshape(times.shape) for c in columns))


def _noise_fraction(score: EmpiricalScore, t: float, queries: int, generator: torch.Generator) -> Estimate:
    data, process = score.data, score.process
    alpha, var = (float(a) for a in score._levels(torch.tensor(t, dtype=torch.float64)))
    precision = process.inverse_trace if isinstance(process, Anisotropic) else data.d
    if data.d == 1 and not isinstance(process, Anisotropic):
        exact = _quadrature(score, t, alpha, math.sqrt(var))
        if exact is not None:
            return Estimate.exact(exact)
    _, x = draw_queries(data, process, t, queries, generator)
    trace = score.covariance(x, t).trace().double()
    return Estimate.of_mean(trace, scale=var / precision)


def _quadrature(score: EmpiricalScore, t: float, alpha: float, sigma: float) -> float | None:
    """E[C] sigma² in one dimension: the trapezoidal rule, exponentially accurate for an analytic integrand.

    Points farther apart than 18 sigma have nothing between them (to e^-40): each island has a grid of its own. ``None``
    where the grids would be larger than a Monte Carlo estimate is worth.
    """
    support = alpha * score.data.rows(0, score.data.n).double().flatten().sort().values
    cut = (support.diff() > 18 * sigma).nonzero().flatten() + 1
    ends = [(float(i[0]) - 9 * sigma, float(i[-1]) + 9 * sigma) for i in support.cpu().tensor_split(cut.cpu())]
    steps = [max(int((high - low) / sigma * 16), 512) for low, high in ends]
    if sum(steps) * score.data.n > NODES:
        return None
    grids = [torch.linspace(*end, k + 1, dtype=torch.float64) for end, k in zip(ends, steps, strict=True)]
    width = [torch.full_like(g, (high - low) / k) for g, (low, high), k in zip(grids, ends, steps, strict=True)]
    x, dx = torch.cat(grids).to(score.data.device), torch.cat(width).to(score.data.device)
    posterior = score.posterior(x.reshape(-1, *score.data.shape), t)
    c = posterior.cov.trace() * (alpha / sigma) ** 2
    return float((posterior.logp.exp() * c * dx).sum())
