r"""Changes of an image that a network does not respond to, and directions along which it responds least.

Let :math:`f(x,t)` be the predicted noise. If a change :math:`g` of the image leaves f unchanged, nothing restores a
sample along :math:`g`: its brightness, say, is set by the accidents of integration. Noisy images :math:`x = \alpha x_0
+ \sigma\,\mathrm{noise}` are made brighter (:math:`x + c\mathbf 1`), stronger (:math:`kx`) and shifted by a pixel, and

.. math:: R_g = \frac{|f(gx) - f(x)|}{|L(gx - x)|}, \qquad L = \sigma\,(\alpha^2\Sigma + \sigma^2)^{-1},

where L is the best linear prediction of the noise and :math:`\Sigma` the covariance of the data. (The score of the data
would be a poor measure at low noise: it treats every change of a training image as noise, a network that generalises
does not.) A network is **blind** to g at a level if the 95 % interval of R over images lies below .05; the alarm is
raised if it is blind at half of the levels or more.

With the Jacobian :math:`J = \partial f/\partial x` at an image, the **gain** along u is :math:`|Ju|/|u|`, for u
constant, u = x and random directions. The smallest gain is sought in the block Krylov space :math:`\{u, J^TJu,
(J^TJ)^2u, \dots\}` of these, as the least singular value of J there (Rayleigh and Ritz): an upper bound, no larger than
the gain along any u, and exact once the space is complete. J is never formed; it is applied by ``torch.func.jvp``, its
transpose by autograd. Where a network has no such derivative, or one that finite differences contradict (it detaches,
say), finite differences are used; without a transpose, random directions replace Krylov's."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vkernel.core import rng
from vkernel.core.checks import check_type
from vkernel.core.errors import require
from vkernel.core.estimate import Estimate
from vkernel.data.empirical import Empirical
from vkernel.reports.audit.denoising import LinearDenoiser, NoisyBatch, as_network
from vkernel.reports.audit.levels import Times, dataset, variables
from vkernel.score import Score, Wrapped

if TYPE_CHECKING:
    import xarray

THRESHOLD = 0.05  # of R
STEP = 0.25  # c in units of the noisy image's spread per coordinate, and k - 1
LEVELS = 4
LARGEST = 4096  # coordinates, for the smallest gain
NUDGE = 1e-2  # of finite differences, in units of the noisy image
PROBES = 4  # random directions for each image


@dataclass(frozen=True)
class Blind:
    """The result of :func:`blind`; lists and tensors run along the noise levels, in ascending order by default."""

    t: list[float]
    r: list[float]
    response: dict[str, Estimate[Tensor]]  # R by change
    blind: dict[str, list[bool]]  # whether it is below the threshold
    gain: dict[str, Estimate[Tensor]]  # along constant, image and random directions
    least: list[float]  # the smallest gain found, NaN where it was not sought
    cosine: list[float]  # of its direction with the constant image
    derivative: str  # how J was applied

    @property
    def changes(self) -> list[str]:
        """The changes to which the network is blind at half of the levels or more."""
        return [change for change, levels in self.blind.items() if 2 * sum(levels) >= len(levels)]

    @property
    def alarm(self) -> bool:
        return bool(self.changes)

    @property
    def smallest(self) -> tuple[float, float] | None:
        """The smallest gain found, in units of a random direction's, and its cosine; ``None`` if it was not sought."""
        columns = zip(self.least, self.gain["random"].value.tolist(), self.cosine, strict=True)
        return min(((a / max(b, 1e-300), c) for a, b, c in columns if not math.isnan(a)), default=None)

    def to_dataset(self) -> xarray.Dataset:
        """Return the curves as a Dataset along ``t``, ``change`` and ``direction``."""
        curves: dict[str, Any] = {"r": ("t", self.r), "least": ("t", self.least), "cosine": ("t", self.cosine)}
        for name, axis, held in (("response", "change", self.response), ("gain", "direction", self.gain)):
            fields = zip(*(e.fields for e in held.values()), strict=True)
            curves |= variables({name: Estimate(*(torch.stack(f) for f in fields))}, axis, "t")
        curves["blind"] = (("change", "t"), list(self.blind.values()))
        coords = {"t": self.t, "change": list(self.response), "direction": list(self.gain)}
        return dataset(curves, coords, {"alarm": int(self.alarm)})


def blind(
    model: Score, data: Empirical, *, times: Times = None, images: int = 16, seed: int = 0, budget: int = 32
) -> Blind:
    """Measure which changes of an image the network does not respond to, and its smallest gain.

    ``times`` are by default four noise levels. ``budget`` is the largest number of applications of J, and of its
    transpose, at each level in search of the smallest gain; with 0 it is not sought, nor beyond 4,096 coordinates."""
    require(budget >= 0, f"budget must be 0 or more applications of the Jacobian; got {budget}.")
    require(images >= 4, f"Intervals over images need 4 images or more; got {images}.")
    net = as_network(model, check_type(data, "data", Empirical)).conditioned(count=1)  # for all changes and directions
    at = None if times is None else net.at(torch.as_tensor(times, dtype=torch.float64).reshape(-1))
    require(at is None or len(at) > 0, "times holds no time; give one or more, or leave it out.")
    levels, source = LEVELS if at is None else len(at), rng.stream(seed, "images for blindness")
    batch = NoisyBatch.of(net, data, levels - 1, images, source)
    batch = batch if at is None else replace(batch, times=at)
    linear, generator = LinearDenoiser.of(net.scaled(data), seed), rng.stream(seed, "blind directions")
    ratios: dict[str, list[Tensor]] = {}
    along: dict[str, list[Tensor]] = {}
    smallest: list[tuple[float, float]] = []
    derivatives: set[str] = set()
    for x, t, alpha, sigma in batch.queries():
        require(sigma > 0, f"There is no noise at t = {float(t):g}; blindness is measured on noisy images.")
        scale = math.hypot(alpha * batch.spread, sigma)
        f = functools.partial(_predicted_noise, net, t)
        changes = {"brightness": torch.full_like(x, STEP * scale), "contrast": STEP * x}  # gx - x
        if x.ndim > 2 and x.shape[-1] > 1:
            changes["translation"] = torch.roll(x, 1, -1) - x
        here, *moved = f(torch.cat([x, *(x + delta for delta in changes.values())])).split(len(x))
        for (name, delta), there in zip(changes.items(), moved, strict=True):
            ratios.setdefault(name, []).append(_norms(there - here) / _norms(linear(delta, alpha, sigma)))
        jacobian = Jacobian.of(f, x, NUDGE * scale, generator)
        probes = [rng.randn(tuple(x.shape), generator, x.device, x.dtype) for _ in range(PROBES)]
        # all directions at once: with few images, the time of a derivative hardly depends on their number
        gains = jacobian.gain(torch.cat([torch.ones_like(x), x, *probes])).reshape(-1, len(x))
        for name, gain in {"constant": gains[0], "image": gains[1], "random": gains[2:].mean(0)}.items():
            along.setdefault(name, []).append(gain)
        one, size = replace(jacobian, x=x[:1]), min(budget, x[0].numel()) * (x[0].numel() <= LARGEST)
        smallest.append(smallest_gain(one, size, generator) if size else (math.nan, math.nan))
        derivatives.add("derivatives" if jacobian.forward else "finite differences")
    response = {name: Estimate[Tensor].of_mean(torch.stack(found), 1) for name, found in ratios.items()}
    unseen = {name: (e.high < THRESHOLD).tolist() for name, e in response.items()}
    gain_along = {name: Estimate[Tensor].of_mean(torch.stack(found), 1) for name, found in along.items()}
    least, cosine = (list(column) for column in zip(*smallest, strict=True))
    how = " and ".join(sorted(derivatives))
    return Blind(batch.times.tolist(), batch.r.tolist(), response, unseen, gain_along, least, cosine, how)


def _predicted_noise(net: Wrapped, t: Tensor, x: Tensor) -> Tensor:
    out = net.noise(x, t)
    require(bool(out.detach().isfinite().all()), f"{net.name} returned NaN or infinite values on noisy images.")
    return out


def _norms(a: Tensor) -> Tensor:
    return a.flatten(1).norm(dim=1)


@dataclass(frozen=True)
class Jacobian:
    """J at images x, applied to one direction each; ``forward`` and ``back`` are the derivatives that can be used."""

    f: Callable[[Tensor], Tensor]
    x: Tensor
    nudge: float
    forward: bool = False
    back: bool = False

    @classmethod
    def of(cls, f: Callable[[Tensor], Tensor], x: Tensor, nudge: float, generator: torch.Generator) -> Jacobian:
        """Test the derivatives at the first image against finite differences of size ``nudge``."""
        v, w = rng.randn((2, 1, *x.shape[1:]), generator, x.device, x.dtype)
        plain = cls(f, x[:1], nudge)
        numeric = plain(v)
        forward, back = replace(plain, forward=True), replace(plain, back=True)
        close = _holds(lambda: (forward(v) - numeric).norm() <= 0.1 * numeric.norm())
        jv = forward(v) if close else numeric
        size = 0.1 * jv.norm() * w.norm() / math.sqrt(w.numel())
        adjoint = _holds(lambda: ((back.transposed(w) * v).sum() - (w * jv).sum()).abs() <= size)
        return cls(f, x, nudge, close, adjoint)

    def __call__(self, v: Tensor) -> Tensor:
        """Return J v for ``v (B, *shape)``: the first directions are at the images, the next ones at them again, …"""
        x = self.x.repeat(len(v) // len(self.x), *(1,) * (self.x.ndim - 1))
        if self.forward:
            return torch.func.jvp(self.f, (x,), (v,))[1].detach()
        size = v.flatten(1).square().mean(1).sqrt().clamp_min(1e-300).reshape(-1, *(1,) * (v.ndim - 1)) / self.nudge
        return (self.f(x + v / size) - self.f(x - v / size)).detach() * size / 2

    def gain(self, u: Tensor) -> Tensor:
        """Return |Ju|/|u| for each direction."""
        return _norms(self(u)) / _norms(u)

    def transposed(self, w: Tensor) -> Tensor:
        """Return the transpose of J applied to ``w (B, *shape)``."""
        x = self.x.expand(len(w), *self.x.shape[1:]).clone().requires_grad_()
        with torch.enable_grad():
            return torch.autograd.grad(self.f(x), x, w)[0]


def _holds(condition: Callable[[], Tensor]) -> bool:
    """Whether a derivative exists and is right; networks can fail here with any exception."""
    with contextlib.suppress(Exception):
        return bool(condition())
    return False


def smallest_gain(jacobian: Jacobian, size: int, generator: torch.Generator) -> tuple[float, float]:
    """Return the smallest gain at one image in a Krylov space of ``size``, and the cosine of its direction with 1."""
    shape, d = jacobian.x.shape[1:], jacobian.x[0].numel()
    noise = rng.randn((2, d), generator, jacobian.x.device, jacobian.x.dtype)
    block = torch.cat([torch.ones_like(noise[:1]), jacobian.x.reshape(1, d), noise])
    space = images = noise[:0]
    while len(space) < size:
        basis = torch.linalg.qr(torch.cat([space, block[: size - len(space)]]).mT).Q.mT
        new = basis[len(space) :]  # directions that vanish are replaced by others, orthogonal as well
        moved = jacobian(new.reshape(-1, *shape))
        space, images = torch.cat([space, new]), torch.cat([images, moved.reshape(-1, d)])
        if len(space) < size:
            fresh = rng.randn(tuple(new.shape), generator, new.device, new.dtype)
            block = jacobian.transposed(moved).reshape(-1, d) if jacobian.back else fresh
    u, s, _ = torch.linalg.svd(images, full_matrices=False)
    return float(s[-1]), min(1.0, float((u[:, -1] @ space).sum().abs() / math.sqrt(d)))
