r"""Gains of a map along directions, the smallest of them, and what the best linear denoiser would do.

With the Jacobian :math:`J = \partial f/\partial x` at an image, the gain along u is :math:`|Ju|/|u|`. The smallest is
sought in the block Krylov space :math:`\{u, J^TJu, (J^TJ)^2u, \dots\}` of a few directions u (constant, the image,
random), as the least singular value of J there (Rayleigh and Ritz): a bound from above, no larger than the gain along
any u, and exact once the space is everything. J is never formed and nothing is inverted.

J is applied by ``torch.func.jvp``, its transpose by autograd. Where a network has no such derivative, or one that
finite differences contradict (it detaches, say), finite differences serve; without a transpose, random directions take
the place of Krylov's.

The best linear prediction of the noise answers a change :math:`\delta` by :math:`\sigma(\alpha^2\Sigma +
\sigma^2)^{-1}\delta`; :math:`\Sigma` is taken from at most 1,024 of the data, and is zero where these do not vary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vkernel.core import rng
from vkernel.core.errors import InputError
from vkernel.data.empirical import Empirical

__all__ = ["Jacobian", "Linear", "gains", "least"]

SEEN = 1024  # images that make Sigma
PROBES = 4  # random directions for each image

Map = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Linear:
    """The best linear prediction of the noise: the principal directions of some of the data, and their variances."""

    axes: Tensor
    variances: Tensor

    @classmethod
    def of(cls, data: Empirical, seed: int, seen: int = SEEN) -> Linear:
        """From at most ``seen`` of the data."""
        chosen = torch.arange(data.n)
        if data.n > seen:
            chosen = torch.multinomial(data.weights.cpu(), seen, True, generator=rng.stream(seed, "covariance"))
        weights = data.weights.cpu()[chosen] if data.n <= seen else torch.full((seen,), 1 / seen).double()
        rows = (data.take(chosen).double().cpu() - data.center.cpu()) * weights.sqrt()[:, None]
        few = len(rows) < rows.shape[1]  # the smaller of the two products has the same variances
        variances, axes = torch.linalg.eigh(rows @ rows.mT if few else rows.mT @ rows)
        kept = variances > 1e-12 * variances[-1]
        variances, axes = variances[kept], axes[:, kept].mT
        return cls((axes @ rows) / variances.sqrt()[:, None] if few else axes, variances)

    def __call__(self, delta: Tensor, alpha: float, sigma: float) -> Tensor:
        flat, signal = delta.flatten(1), alpha**2 * self.variances
        kept = (flat @ self.axes.T) * (signal / (signal + sigma**2))
        return ((flat - kept @ self.axes) / sigma).reshape(delta.shape)


@dataclass(frozen=True)
class Jacobian:
    """J at images x, applied to one direction each; ``forward`` and ``back`` say whether derivatives can be used."""

    f: Map
    x: Tensor
    nudge: float
    forward: bool = False
    back: bool = False

    @classmethod
    def of(cls, f: Map, x: Tensor, nudge: float, generator: torch.Generator) -> Jacobian:
        """Tries the derivatives at the first image."""
        v, w = rng.randn((2, 1, *x.shape[1:]), generator, x.device, x.dtype)
        plain = cls(f, x[:1], nudge)
        numeric = plain(v)
        forward, back = replace(plain, forward=True), replace(plain, back=True)
        close = _tried(lambda: (forward(v) - numeric).norm() <= 0.1 * numeric.norm())
        jv = forward(v) if close else numeric
        size = 0.1 * jv.norm() * w.norm() / math.sqrt(w.numel())
        adjoint = _tried(lambda: ((back.transposed(w) * v).sum() - (w * jv).sum()).abs() <= size)
        return cls(f, x, nudge, close, adjoint)

    @property
    def d(self) -> int:
        return self.x[0].numel()

    @property
    def how(self) -> str:
        return "derivatives" if self.forward else "finite differences"

    def at(self, x: Tensor) -> Jacobian:
        return replace(self, x=x)

    def __call__(self, v: Tensor) -> Tensor:
        """J v, ``v (B, *shape)``; one x serves all directions."""
        x = self.x.expand(len(v), *self.x.shape[1:]).contiguous()
        if self.forward:
            return torch.func.jvp(self.f, (x,), (v,))[1].detach()
        size = v.flatten(1).square().mean(1).sqrt().clamp_min(1e-300) / self.nudge
        size = size.reshape(-1, *(1,) * (v.ndim - 1))
        return (self.f(x + v / size) - self.f(x - v / size)).detach() * size / 2

    def transposed(self, w: Tensor) -> Tensor:
        x = self.x.expand(len(w), *self.x.shape[1:]).clone().requires_grad_()
        with torch.enable_grad():
            return torch.autograd.grad(self.f(x), x, w)[0]


def _tried(condition: Callable[[], Tensor]) -> bool:
    """Whether a derivative exists and is right; networks fail at it in many ways."""
    try:
        return bool(condition())
    except InputError:
        raise
    except Exception:
        return False


def gains(jacobian: Jacobian, x: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """|Ju|/|u| for each image."""

    def gain(u: Tensor) -> Tensor:
        return jacobian(u).flatten(1).norm(dim=1) / u.flatten(1).norm(dim=1)

    some = [gain(rng.randn(tuple(x.shape), generator, x.device, x.dtype)) for _ in range(PROBES)]
    return {"constant": gain(torch.ones_like(x)), "image": gain(x), "random": torch.stack(some).mean(0)}


def least(jacobian: Jacobian, size: int, generator: torch.Generator) -> tuple[float, float]:
    """The smallest gain at one image in a space of that size, and the cosine of its direction with the constant."""
    shape, d = jacobian.x.shape[1:], jacobian.d
    noise = rng.randn((2, d), generator, jacobian.x.device, jacobian.x.dtype)
    block = torch.cat([torch.ones_like(noise[:1]), jacobian.x.reshape(1, d), noise])
    space = images = noise[:0]
    while len(space) < size:
        new = _new(space, block[: size - len(space)], generator)
        moved = jacobian(new.reshape(-1, *shape))
        space, images = torch.cat([space, new]), torch.cat([images, moved.reshape(-1, d)])
        if len(space) < size:
            fresh = rng.randn(tuple(new.shape), generator, new.device, new.dtype)
            block = jacobian.transposed(moved).reshape(-1, d) if jacobian.back else fresh
    u, s, _ = torch.linalg.svd(images, full_matrices=False)
    direction = u[:, -1] @ space
    return float(s[-1]), min(1.0, float(direction.sum().abs() / math.sqrt(d)))


def _new(space: Tensor, block: Tensor, generator: torch.Generator) -> Tensor:
    """The rows of ``block`` made orthonormal to ``space`` and to each other; random ones for those that vanish."""
    for row in block:
        rest, size = row, row.norm()
        for again in range(3):
            rest = rest - (space @ rest) @ space
            if rest.norm() <= 1e-6 * size and again < 2:
                rest = rng.randn(tuple(row.shape), generator, row.device, row.dtype)
                size = rest.norm()
        space = torch.cat([space, rest[None] / rest.norm()])
    return space[len(space) - len(block) :]
