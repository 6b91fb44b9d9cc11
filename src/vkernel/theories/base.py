r"""The base class of theories: scores that are given by a denoiser, and averages over training points in parts.

A theory defines the denoiser :math:`m(x,t)`, its estimate of :math:`x_0`; its score is

.. math:: s(x,t) = \frac{\alpha\, m(x,t) - x}{\sigma^2} .

Under an anisotropic process both are evaluated in whitened coordinates :math:`\Gamma^{-1/2} x`, where the noise is
isotropic; theories of pixels need a diagonal :math:`\Gamma`, which leaves every pixel its own coordinate.

**Averages in parts.** A pixel's estimate :math:`m = \sum_i r_i v_i` with :math:`r_i = e^{l_i} / z` over all training
points follows from those of parts: two parts merge as :math:`m = m_a + p\,(m_b - m_a)` with the share :math:`p = z_b /
(z_a + z_b)`. The result does not depend on the parts, unlike an average of the parts' own estimates.

**Float32.** Queries in float64 are evaluated in float64. For queries in float32 some theories evaluate logits by
products of float32 numbers, :math:`l_i = \frac{\alpha}{\sigma^2} x \cdot y_i - \frac{\alpha^2}{2\sigma^2} |y_i|^2`, x
and y less the mean. The rounding error of a logit, a sum of K products, has a standard deviation of about
:math:`\delta = 2^{-24} \big(1 + \sqrt K / 3\big) \big(\frac{\alpha}{\sigma^2} |x| |y| / \sqrt d +
\frac{\alpha^2}{\sigma^2} |y|^2 + |\log z|\big)`: partial sums are as large as products of random signs or, of the heavy
points, :math:`\alpha x \cdot y \approx \sigma^2 \log z + \alpha^2 |y|^2 / 2`. It is independent between points, so that
the mean is off by :math:`\sum_i r_i \epsilon_i (v_i - m)`, of standard deviation at most :math:`\delta \sqrt{\max r
\operatorname{tr} \mathrm{Cov}(v|x)}`. The products of weights and values are rounded likewise.
Images for which four of these errors, all pixels together, exceed a tolerance, or :math:`\delta > 1`, are evaluated
again in float64, or parts of them."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torch.autograd import forward_ad

from vkernel.core.checks import check_number
from vkernel.core.covariance import Diagonal, over_event
from vkernel.core.errors import require
from vkernel.core.memory import free_memory
from vkernel.data import Empirical
from vkernel.posterior import Engine, Points, Posterior, Queries
from vkernel.posterior.dense import unit_roundoff
from vkernel.posterior.weights import blocks
from vkernel.process import Process
from vkernel.score.base import DataScore, Time, differentiated
from vkernel.score.empirical import FARTHEST, refused, whitened

Data = Empirical | Tensor
TOLERANCE = 8e-5  # the error of an image in float32 that may remain, of the data's spread


class Theory(DataScore):
    """A score given by its denoiser of a training set; ``memory`` bounds the working memory in bytes (default: a
    quarter of what is free). Training points of weight zero are left out.

    >>> import torch, vkernel as vk
    >>> data = torch.randn(20, 2, generator=torch.Generator().manual_seed(0))
    >>> theory = vk.theories.Gaussian(data, vk.VP())
    >>> isinstance(theory, vk.theories.Theory), theory(torch.zeros(3, 2), 0.5).shape
    (True, torch.Size([3, 2]))
    >>> theory.on(data[:10]).data.n  # the same theory, built on other data
    10
    """

    shape: tuple[int, ...]
    narrow = False  # whether :meth:`mean` evaluates queries in float32 faster, to 1e-4 of the data's spread

    def __init__(self, data: Data, process: Process, memory: int | None = None) -> None:
        good = isinstance(process, Process)
        require(good, f"{type(self).__name__} needs a forward process such as vk.VP(), not {process!r}.")
        self.process = process
        data = data if isinstance(data, Empirical) else Empirical(data)
        good = process.shape in ((), data.shape)
        require(good, f"The data have shape {data.shape} but Γ acts on {process.shape}.")
        kept = data.weights.nonzero().flatten()
        self.data = data if len(kept) == data.n else data.subset(kept)
        self.shape, self.device = data.shape, data.device
        self.memory = free_memory(data.device) // 4 if memory is None else int(check_number(memory, "memory", 1))
        self._kept: tuple[int, list[tuple[Tensor, Tensor]]] = 0, []

    @abstractmethod
    def mean(self, x: Tensor, alpha: Tensor, var: Tensor) -> Tensor:
        """Return the denoiser in whitened coordinates at ``x (B, *shape)``, with alpha and sigma² ``(B,)``, float64.
        ``x`` is in float64; in float32 if that is what was given, the theory is ``narrow`` and no derivative is taken.
        """

    def denoise(self, x: Tensor, t: Time) -> Tensor:
        x, rows, alpha, var = self._rows(x, t)
        return self.process.unwhiten(self.mean(rows, alpha, var).reshape(x.shape)).to(x.device, x.dtype)

    def __call__(self, x: Tensor, t: Time) -> Tensor:
        x, rows, alpha, var = self._rows(x, t)
        s = self.residual(rows, alpha, var) / over_event(var, self.shape)
        return self.process.whiten(s.reshape(x.shape)).to(x.device, x.dtype)

    def residual(self, x: Tensor, alpha: Tensor, var: Tensor) -> Tensor:
        r"""Return :math:`\alpha m - x`; theories override it if they have it without cancellation."""
        return over_event(alpha, self.shape) * self.mean(x, alpha, var) - x

    def _rows(self, x: Tensor, t: Time) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return x as a floating-point tensor, its whitened rows on the data's device, alpha and sigma² of each."""
        x, t = self.check(x, t)
        require(not t.requires_grad, f"{type(self).__name__} is differentiable in x, not in t: detach t.")
        levels = self.levels(self.process.check(t))
        alpha, var = (a.to(self.device).expand(self.split(x)[0]).reshape(-1) for a in levels)
        rows = self.process.whiten(x.to(self.device, torch.float64)).reshape(-1, *self.shape)
        far = rows.detach().flatten(1).square().sum(1) / var
        if not bool(((far < FARTHEST**2) & (var > 0)).all()):
            raise refused(rows.detach(), var)
        narrow = self.narrow and x.dtype != torch.float64 and not differentiated(x)
        return x, rows.float() if narrow else rows, alpha, var

    @property
    def white(self) -> Points:
        """The training points in whitened coordinates, for an engine."""
        return whitened(self.data, self.process)

    def points(self, step: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the training points in whitened coordinates, ``(k, *shape)`` in float64, and their log weights."""
        for part in blocks(self.data.n, step):
            rows = self.data.rows(part.start, part.stop).double().reshape(-1, *self.shape)
            yield self.process.whiten(rows), self.data.weights[part].log()

    @functools.cached_property
    def center(self) -> Tensor:
        """The mean of the training points in whitened coordinates, ``(d,)``."""
        return self.process.whiten(self.data.center.reshape(self.shape)).flatten()

    def columns(
        self, step: int, dtype: torch.dtype, arrange: Callable[[Tensor], Tensor]
    ) -> Iterable[tuple[Tensor, Tensor]]:
        """Return ``arrange(y - mean)``, contiguous, and the log weights of the training points, in parts of ``step``.
        In float32 they are kept between calls if they fit into half of the memory and into an eighth of what is free:
        several theories may keep theirs."""
        parts = (
            (arrange(y.flatten(1) - self.center).to(dtype).contiguous(), log_w.to(dtype))
            for y, log_w in self.points(step)
        )
        if dtype == torch.float64:
            return parts
        if self._kept[0] != step:
            self._kept = 0, []  # frees those of another step
            if 16 * self.data.n * self.data.d > min(self.memory, free_memory(self.device) // 4):
                return parts
            self._kept = step, list(parts)
        return self._kept[1]

    @functools.cached_property
    def weighted(self) -> bool:
        """Whether the weights of the training points differ."""
        return bool((self.data.weights != self.data.weights[0]).any())

    @property
    def options(self) -> dict[str, object]:
        """The arguments of the constructor besides data, process and memory."""
        return {}

    def on(self, data: Data) -> Self:
        return type(self)(data, self.process, **self.options, memory=self.memory)

    def __repr__(self) -> str:
        given = "".join(f", {name}={value!r}" for name, value in self.options.items())
        return f"{type(self).__name__}({self.data!r}, {self.process!r}{given})"


class Average:
    """The average of values with weights exp(logit) over training points that arrive in parts; ``peak`` is the largest
    weight."""

    def __init__(self) -> None:
        self.log_z: Tensor | None = None
        self.value = self.peak = torch.zeros(())

    def add(self, logit: Tensor, value: Tensor) -> None:
        """Add k points: ``logit (…, B, k)`` and ``value (…, k, V)``, for which :attr:`value` is ``(…, B, V)``."""
        top, r = logit.amax(-1).double(), logit.softmax(-1)
        peak, mean = r.amax(-1).double(), (r @ value).double()
        log_z = top - peak.log()  # of any point; the heaviest one's weight is not 0
        if self.log_z is not None:
            share = torch.sigmoid(log_z - self.log_z)
            mean = self.value + share[..., None] * (mean - self.value)
            peak = torch.maximum((1 - share) * self.peak, share * peak)
            log_z = torch.logaddexp(log_z, self.log_z)
        self.log_z, self.value, self.peak = log_z, mean, peak


def rounding(
    alpha: Tensor, var: Tensor, x: Tensor, y: Tensor, size: Tensor | int, terms: Tensor | int, log_z: Tensor
) -> Tensor:
    """Return the error of logits that are float32 sums of ``terms`` numbers, given the norms ``x`` and ``y`` of
    vectors of ``size`` coordinates."""
    size, terms = (torch.as_tensor(count, dtype=torch.float64, device=log_z.device) for count in (size, terms))
    scale = alpha / var * x * y / size.sqrt() + alpha.square() / var * y.square() + log_z.abs()
    return unit_roundoff(log_z.device) * (1 + terms.sqrt() / 3) * scale


def doubt(value: Tensor, peak: Tensor, error: Tensor) -> Tensor:
    """Return the squared errors ``(…)`` that averages ``value (…, V + 1)`` of ``[v…, |v|²]`` with the largest weight
    ``peak (…)`` may have, four standard deviations, given the ``error (…)`` of their logits; infinite if that is > 1.
    """
    mean, square = value[..., :-1], value[..., -1]
    # where nearly all weight is on one point the difference is rounding, and 1 - max r is not
    trace = torch.minimum((square - mean.square().sum(-1)).clamp_min(0), (1 - peak) * 4 * square)
    moved = error.square() * trace + unit_roundoff(value.device) ** 2 * square  # weights and values are rounded too
    return torch.where(error > 1, torch.inf, 16 * peak * moved)


class PosteriorMean(torch.autograd.Function):
    r"""The mean of an engine's posterior and its derivatives. ``apply(x, alpha, var, engine, *vectors)`` is
    :math:`m(x) = \sum_i r_i y_i` without vectors, :math:`\mathrm{Cov}(x_0|x)\, v` with one, and with two
    :math:`\sum_i r_i (y_i-m) ((y_i-m)\cdot v) ((y_i-m)\cdot u)`; the derivative of each is :math:`\alpha/\sigma^2`
    times the next. ``x`` and the vectors are ``(B, d)``, ``alpha`` and ``var`` ``(B,)``, all in float64."""

    @staticmethod
    def forward(x: Tensor, alpha: Tensor, var: Tensor, engine: Engine, *vectors: Tensor) -> Tensor:
        queries, (count, d) = Queries(x.detach(), alpha, var), x.shape
        if not vectors:
            return engine.moments(queries).mean
        v, *more = (v.detach() for v in vectors)
        if not more:
            return engine.moments(queries, vector=v).present()["product"]
        return Posterior(engine, queries, (count,), (d,), x.dtype, x.device).third(v, more[0])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, alpha, var, ctx.engine, *vectors = inputs
        ctx.save_for_backward(x, alpha, var, *vectors)
        ctx.save_for_forward(x, alpha, var, *vectors)
        ctx.set_materialize_grads(False)

    @staticmethod
    def _along(ctx: Any, saved: Sequence[Tensor], dx: Tensor | None, dv: Tensor | None) -> Tensor | None:
        """Return the derivative for the changes dx of x and dv of the vector; it is symmetric in both."""
        x, alpha, var, *vectors = saved
        good = dx is None or len(vectors) < 2
        require(good, "Theories of posteriors have derivatives up to the second; the third is not provided.")
        by_x = None if dx is None else (alpha / var)[:, None] * posterior_mean(ctx.engine, x, alpha, var, *vectors, dx)
        by_v = None if dv is None else posterior_mean(ctx.engine, x, alpha, var, dv)
        return by_x if by_v is None else by_v if by_x is None else by_x + by_v

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        g, needed = grads[0], ctx.needs_input_grad
        dx = PosteriorMean._along(ctx, ctx.saved_tensors, g, None) if needed[0] else None
        return dx, None, None, None, *(PosteriorMean._along(ctx, ctx.saved_tensors, None, g) for _ in needed[4:])

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor | None:
        # what was saved, without the tangents of the level that is being differentiated
        saved = [forward_ad.unpack_dual(a).primal for a in ctx.saved_tensors]
        with forward_ad._set_fwd_grad_enabled(True):  # torch turns it off here, and with it every outer jvp
            return PosteriorMean._along(ctx, saved, tangents[0], *(tangents[4:] or (None,)))

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> tuple[Tensor, int]:
        """Map: the mapped axis becomes part of the batch."""
        size = info.batch_size
        pairs = zip((*inputs[:3], *inputs[4:]), (*in_dims[:3], *in_dims[4:]), strict=True)
        mapped = [a.expand(size, *a.shape) if k is None else a.movedim(k, 0) for a, k in pairs]
        x, alpha, var, *vectors = (a.flatten(0, 1) for a in mapped)
        return posterior_mean(inputs[3], x, alpha, var, *vectors).unflatten(0, (size, -1)), 0


def posterior_mean(engine: Engine, x: Tensor, alpha: Tensor, var: Tensor, *vectors: Tensor) -> Tensor:
    """Return the mean of the posterior over the engine's points, or with vectors its derivatives, ``(B, d)``; twice
    differentiable in ``x``."""
    out: Tensor = PosteriorMean.apply(x, alpha, var, engine, *vectors)
    return out


def check_images(data: Empirical, process: Process, theory: str) -> tuple[int, int, int]:
    """Return channels, height and width of images ``(H, W)`` or ``(C, H, W)`` whose pixels have independent noise."""
    shape = data.shape
    good = len(shape) in (2, 3)
    require(good, f"{theory} compares pixels of images, (H, W) or (C, H, W); the data have shape {shape}.")
    diagonal = process.gamma is None or isinstance(process.gamma, Diagonal)
    require(diagonal, f"{theory} needs noise that is independent between pixels; this Γ is not diagonal.")
    return (1, *shape) if len(shape) == 2 else shape  # type: ignore[return-value]
