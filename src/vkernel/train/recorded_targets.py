r"""Targets of a training loop without waiting for the GPU: float64 products, recorded as a CUDA graph.

A loop with a small network is bound by the time in which the CPU launches kernels, and the engine, which looks at
values to choose a method for each query, makes it wait. A batch of a training holds all noise levels at once, so that
the engine takes every method for some of it. Here the whole posterior comes from two products in float64 with the
centred points :math:`y_i = x_i - c`, and :math:`z = x - \alpha c`:

.. math::

   l_i = \log w_i + \frac{1}{\sigma^2} \Big( \alpha\, z \cdot y_i - \frac{\alpha^2 |y_i|^2 + |z|^2}{2} \Big),
   \qquad m = c + \sum_i \mathrm{softmax}(l)_i\, y_i .

Labels are a mask of the logits. Rounding changes a logit by :math:`\delta \le d\,u\,\alpha |z||y|/\sigma^2` at most;
the logits of the 16 heaviest points, which are all that matter at low noise, are computed again as :math:`-|z - \alpha
y_i|^2/2\sigma^2`. This path is taken where δ is small at the least noise of the process, and on GPUs that multiply
float64 fast, for batches that it serves in a few milliseconds.

Values are checked on the GPU, and the result of the check is looked at in the next call, when it is there."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from vkernel.core import rng
from vkernel.core.graphs import Recorder
from vkernel.process import Process
from vkernel.process.base import within
from vkernel.score.conversions import convert
from vkernel.train.objectives import J0, J1, JC, JK, Objective
from vkernel.train.training_set import TrainingSet

FAST = ((8, 0), (9, 0), (10, 0))  # compute capabilities of GPUs whose float64 products are about as fast as float32's
MOST = 3e10  # B n d, beyond which the engine is faster
ROOM = 8  # the points in float64 may take one part in so many of the GPU's memory
HEAVIEST = 16  # points whose logits are computed from differences
ROUNDING = 1e-3  # largest δ
SIZES = 4  # sizes of batches whose graphs are kept
DEVIATION, ROUNDINGS = 7.5, 8.0  # of |ε| from √N, exceeded with probability 1e-9; units of rounding error in x_t


class Products:
    """The points in float64, and the posterior of a batch by products with them."""

    def __init__(self, held: TrainingSet) -> None:
        data, wide = held.data, torch.float64
        self.center = data.center.to(data.device, wide)
        self.y = data.rows(0, data.n).to(wide) - self.center
        self.half, self.log_w = self.y.square().sum(1) / 2, data.weights.log()
        self.labels, self.radius = held.labels, float((2 * self.half.max()).sqrt())

    def rounding(self, process: Process) -> float:
        """Return the bound δ at the least noise of the process, for x = αx0 + σε."""
        t = torch.tensor(process.eps, dtype=torch.float64)
        alpha, sigma, d = float(process.alpha(t)), float(process.sigma(t)), self.y.shape[1]
        far = alpha * self.radius + sigma * (math.sqrt(d) + DEVIATION)
        return d * 2.0**-53 * alpha * far * self.radius / sigma**2

    def weights(self, x: Tensor, alpha: Tensor, var: Tensor, label: Tensor | None, null: int) -> Tensor:
        """Return the posterior of queries ``x (B, d)``, ``(B, n)``; ``label (B,)`` are their classes, if any."""
        alpha, var = alpha[:, None], var[:, None]
        z = x - alpha * self.center
        logit = torch.addmm(-alpha * self.half, z, self.y.mT).mul_(alpha / var)
        logit += self.log_w - z.square().sum(1, keepdim=True) / (2 * var)
        if label is not None and self.labels is not None:
            other = (label[:, None] != self.labels) & (label[:, None] != null)
            logit.masked_fill_(other, -torch.inf)
        value, top = logit.topk(min(HEAVIEST, len(self.y)), dim=1)
        away = (z[:, None] - alpha[:, None] * self.y[top]).square().sum(-1)
        exact = torch.where(value > -torch.inf, self.log_w[top] - away / (2 * var), -torch.inf)
        return logit.scatter_(1, top, exact).softmax(1)


class RecordedTargets:
    """Targets of an objective for batches on a GPU; ``None`` from :meth:`serving` where the engine is used."""

    def __init__(self, held: TrainingSet, objective: Objective, predicts: str, sigma_data: float, null: int) -> None:
        self.held, self.objective, self.predicts = held, objective, predicts
        self.sigma_data, self.null = sigma_data, null
        self.products = Products(held)
        self.kept: dict[tuple[Any, ...], Batch] = {}

    @classmethod
    def serving(
        cls, held: TrainingSet, objective: Objective, predicts: str, sigma_data: float, null: int
    ) -> RecordedTargets | None:
        """Return this path for a training set, or ``None`` where it is not suitable."""
        data = held.data
        known = isinstance(objective, J0 | J1) or (isinstance(objective, JK) and objective.kind == "draws")
        known = known or (isinstance(objective, JC) and objective.noise == "posterior")
        if not known or data.device.type != "cuda" or not data.in_memory:
            return None
        fast = torch.cuda.get_device_capability(data.device) in FAST
        fits = 8 * data.n * data.d * ROOM < torch.cuda.get_device_properties(data.device).total_memory
        if not fast or not fits:
            return None
        made = cls(held, objective, predicts, sigma_data, null)
        return made if made.products.rounding(held.process) <= ROUNDING else None

    def place(self, x: Tensor, t: object, index: object, label: object, drawn: int) -> Batch | None:
        """Copy a batch to the place of its size, and return that; ``None`` if the engine must serve it. ``drawn`` is
        the number of targets before it."""
        rest = [a for a in (index, label) if isinstance(a, Tensor) and a.dtype in (torch.int64, torch.int32)]
        if not isinstance(t, Tensor) or len(rest) != 1 + (label is not None):
            return None
        there = all(a.device == x.device and a.shape == x.shape[:1] for a in (t, *rest))
        much = len(x) * self.held.data.n * self.held.data.d > MOST
        if not there or much or x.device != self.held.data.device or torch.cuda.is_current_stream_capturing():
            return None
        key = len(x), x.dtype, t.dtype, label is None
        if key not in self.kept:
            if len(self.kept) >= SIZES:
                del self.kept[next(iter(self.kept))]
            self.kept[key] = Batch(x, t, label is not None, self.objective.uniforms)
        self.kept[key].fill(x, t, rest[0], rest[-1], drawn)
        return self.kept[key]

    def __call__(self, b: Batch, key: Tensor) -> Tensor:
        """Return the targets of a batch that is at its place, with the random numbers of ``key``."""
        with torch.autocast("cuda", enabled=False), torch.cuda.device(b.x.device):
            return b.result(*b.take("targets", lambda: self.compute(b, key)))

    def compute(self, b: Batch, key: Tensor) -> tuple[Tensor, Tensor]:
        """Return the targets of a batch, and whether its values and its noise are good, ``(2,)``."""
        held, process, data = self.held, self.held.process, self.held.data
        when = b.t.double().clamp(process.eps, process.T)
        alpha, var = process.alpha(when), process.S(when)
        origin = b.index.clamp(0, data.n - 1)
        own = None if held.labels is None else held.labels[origin]
        label = own if b.label is None else b.label
        x = b.x.double().flatten(1)
        post = _Posterior(self.products, x, alpha, var, label, self.null)
        u = b.uniforms(key)
        m = self.objective.target(post.as_score(data), x.reshape(b.x.shape), when, origin, u)  # type: ignore[arg-type]
        target = convert(m, "x0", self.predicts, x.reshape(m.shape), when, process, self.sigma_data, checked=True)
        good = within(b.t if b.t.is_floating_point() else b.t.double(), process.eps, process.T)
        good = good & (b.index == origin) & (data.weights[origin] > 0) & x.isfinite().all(1)
        if b.label is not None:
            good = good & ((b.label == own) | (b.label == self.null))
        return target.to(b.x.dtype), torch.stack([good.all(), self._noise(b, x, alpha, var, origin)])

    def _noise(self, b: Batch, x: Tensor, alpha: Tensor, var: Tensor, origin: Tensor) -> Tensor:
        """Whether (x - αx0)/σ has the size of standard normal numbers, up to the rounding of x."""
        signal, sigma = alpha[:, None] * self.held.data.take(origin).double(), var.sqrt()[:, None]
        rounding = ROUNDINGS * torch.finfo(b.x.dtype).eps / 2 * ((x.abs() + signal.abs()) / sigma).norm()
        return (((x - signal) / sigma).norm() - math.sqrt(x.numel())).abs() <= DEVIATION + rounding


class Batch(Recorder):
    """The inputs of one size of batch at fixed places in memory, and the result of their check on the CPU."""

    def __init__(self, x: Tensor, t: Tensor, labelled: bool, uniforms: int) -> None:
        super().__init__()
        self.x, self.t = torch.empty_like(x, memory_format=torch.contiguous_format), torch.empty_like(t)
        self.index = torch.empty(len(x), dtype=torch.long, device=x.device)
        self.label = torch.empty_like(self.index) if labelled else None
        self.drawn, self.count = torch.zeros((), dtype=torch.long, device=x.device), uniforms
        self.good = torch.ones(2, dtype=torch.bool, device="cpu", pin_memory=True)
        self.free = torch.cuda.Event()  # after which another stream may write to these places
        self.free.record()

    def fill(self, x: Tensor, t: Tensor, index: Tensor, label: Tensor, drawn: int) -> None:
        """Copy a batch to its place; other streams wait until it is free."""
        torch.cuda.current_stream().wait_event(self.free)
        self.x.copy_(x)
        self.t.copy_(t)
        self.index.copy_(index)
        if self.label is not None:
            self.label.copy_(label)
        if self.count:
            self.drawn.fill_(drawn)

    def checked(self) -> bool:
        """Return whether the values of the last batch were good, once; by now the GPU has usually checked them."""
        self.free.synchronize()
        good = bool(self.good.all())
        self.good.fill_(True)
        return good

    def uniforms(self, key: Tensor) -> Tensor:
        """Return the random numbers of these targets, ``(B, count)``."""
        size = len(self.x), self.count
        counter = self.drawn * self.count + torch.arange(math.prod(size), device=self.x.device).reshape(size)
        return rng.uniforms(key, counter)

    def result(self, target: Tensor, good: Tensor) -> Tensor:
        """Return a copy of the targets; the result of the check is on its way to the CPU."""
        self.good.copy_(good, non_blocking=True)
        found = target.clone()
        self.free.record()
        return found


class _Posterior:
    """What objectives ask of an exact score at one batch: its denoiser and indices at quantiles."""

    def __init__(self, of: Products, x: Tensor, alpha: Tensor, var: Tensor, label: Tensor | None, null: int) -> None:
        self.of, self.given = of, (x, alpha, var, label, null)

    def as_score(self, data: object) -> SimpleNamespace:
        return SimpleNamespace(data=data, denoise=self.denoise, posterior=lambda x, t: self)

    def denoise(self, x: Tensor, t: Tensor) -> Tensor:
        return (self.of.weights(*self.given) @ self.of.y + self.of.center).reshape(x.shape)

    def indices_at(self, u: Tensor) -> Tensor:
        """Return the index at which the cumulative weight passes u, for u ``(k, B)``."""
        total = self.of.weights(*self.given).cumsum(1)
        place = torch.searchsorted(total, (u.mT * total[:, -1:]).contiguous(), right=True)
        return place.clamp_max(len(self.of.y) - 1).mT
