r"""The central type: a score, which any sampler, metric and report takes (docs/theory.md, §1 and §2).

A :class:`Score` estimates :math:`\nabla \log p(x|t)` under a forward process :math:`x = \alpha_t x_0 + \sigma_t
\epsilon`. Three functions follow from it: the denoiser :math:`m(x,t) = (x + S_t\, s(x,t))/\alpha_t = E[x_0|x,t]`
(Tweedie's formula), the divergence :math:`\nabla \cdot s`, and :math:`\nabla s\, v` .

Subclasses that know one of them in closed form override it. Everyone else's network becomes a score with
:func:`vkernel.as_score`."""

import math
from abc import ABC, abstractmethod
from typing import Self

import torch
from torch import Tensor
from torch.autograd import forward_ad

from vkernel.core import rng
from vkernel.core.checks import as_tensor, check_dense, check_real, check_whole
from vkernel.core.covariance import fits, flat, over_event
from vkernel.core.errors import InputError, require
from vkernel.core.rng import Generator
from vkernel.data import Empirical
from vkernel.process import Process

Time = float | Tensor


def as_time(t: Time, device: torch.device) -> Tensor:
    """Return ``t`` as a tensor on ``device``: tensors keep their dtype, numbers become float64."""
    if isinstance(t, float):
        return torch.tensor(t, dtype=torch.float64, device=device)
    return check_real(t, "t").to(device) if isinstance(t, Tensor) else as_tensor(t, "t").to(device, torch.float64)


def wide_time(t: Time, device: torch.device) -> Tensor:
    """Return ``t`` in float64: at low noise the posterior depends on the seventh digit of t."""
    return as_time(t, device).double()


class Score(ABC):
    """A score :math:`s(x, t)` under the forward process ``process`` on events of shape ``shape``.
    ``x`` is ``(*batch, *shape)`` and ``t`` broadcasts to ``batch``; results have the device and dtype of ``x``
    (integers become the default float). ``shape`` may be ``None`` until the first call decides it.

    >>> import torch, vkernel as vk
    >>> data, process = vk.data.toy("triple"), vk.VP()
    >>> score = vk.EmpiricalScore(data, process)
    >>> isinstance(score, vk.Score), score.shape
    (True, (1,))
    >>> x = torch.zeros(5, 1)
    >>> score(x, 0.5).shape, score.denoise(x, 0.5).shape, score.divergence(x, 0.5).shape
    (torch.Size([5, 1]), torch.Size([5, 1]), torch.Size([5]))
    """

    process: Process
    shape: tuple[int, ...] | None
    jumps: tuple[float, ...] = ()  # times at which the score jumps: samplers place a time at each

    @abstractmethod
    def __call__(self, x: Tensor, t: Time) -> Tensor:
        """Return the score at ``x``, like ``x``."""

    def denoise(self, x: Tensor, t: Time) -> Tensor:
        r"""Return the denoiser :math:`m = (x + S s)/\alpha`, like ``x``."""
        x, t = self.check(x, t)
        wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
        alpha, var = (over_event(a.to(wide), self.split(x)[1]) for a in self.levels(t.to(x.device)))
        s = self.process.unwhiten(self.process.unwhiten(check_like(self(wide, t), wide)))  # Γ s
        return ((wide + var * s) / alpha).to(x.dtype)

    def divergence(self, x: Tensor, t: Time, probes: int | Tensor = 8, generator: Generator = None) -> Tensor:
        r"""Return :math:`\nabla \cdot s`, ``(*batch,)``, by Hutchinson's estimate (Hutchinson 1989).
        ``probes`` is the number of random sign vectors, or the vectors themselves, ``(count, *x.shape)``."""
        x, t = self.check(x, t)
        shape = self.split(x)[1]
        along = [flat(self.jvp(x, t, v) * v, shape).sum(-1) for v in signs(x, probes, generator)]
        return torch.stack(along).double().mean(0).to(x.dtype)

    def noise_trace(self, x: Tensor, t: Time, probes: int | Tensor = 8, generator: Generator = None) -> Tensor:
        r"""Return :math:`\sigma^2 \nabla \cdot s + d` in whitened coordinates, ``(*batch,)``, float64."""
        x, t = self.check(x, t)
        shape, root = self.split(x)[1], self.process.unwhiten
        along = [flat(root(self.jvp(x, t, root(v))) * v, shape).sum(-1) for v in signs(x, probes, generator)]
        return self.levels(t.to(x.device))[1] * torch.stack(along).double().mean(0) + math.prod(shape)

    def jvp(self, x: Tensor, t: Time, v: Tensor) -> Tensor:
        r"""Return the directional derivative :math:`\nabla s\, v`, like ``x``."""
        product: Tensor = torch.func.jvp(lambda y: self(y, t), (x,), (v,))[1]
        return product

    def vjp(self, x: Tensor, t: Time, v: Tensor) -> Tensor:
        r"""Return :math:`(\nabla s)^T v`, like ``x``."""
        product: Tensor = torch.func.vjp(lambda y: self(y, t), x)[1](v)[0]
        return product

    def levels(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """Return alpha and sigma² in float64 at times that :meth:`check` accepted."""
        base, t = self.process.base, t.double().clamp(self.process.eps, self.process.T)
        return base.alpha(t), base.S(t)

    def split(self, x: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the batch shape and the event shape of ``x``; refuse another event shape than ``shape``."""
        booleans = isinstance(x, Tensor) and x.dtype == torch.bool  # they become 0 and 1, like integers
        (check_dense if booleans else check_real)(x, "x")
        if self.shape is None:
            require(x.ndim >= 1, "x must have a batch dimension: the first call of this score decides its event shape.")
            self.shape = tuple(x.shape[1:])
        whole = tuple(x.shape)
        k = len(whole) - len(self.shape)
        if k < 0 or whole[k:] != self.shape:  # the sentence is not made in vain: calls on a GPU wait for this
            raise InputError(f"x has shape {whole}; it must end in the event shape {self.shape} of the score.")
        return whole[:k], self.shape

    def check(self, x: Tensor, t: Time) -> tuple[Tensor, Tensor]:
        """Return ``x`` as a floating-point tensor and ``t`` as a tensor that broadcasts to its batch."""
        batch, _ = self.split(x)
        x = x if x.is_floating_point() else x.to(torch.get_default_dtype())
        # a number stays on the CPU, where looking at its value costs nothing
        t = as_time(t, x.device if isinstance(t, Tensor) else torch.device("cpu"))
        if t.ndim and not fits(tuple(t.shape), batch):
            raise InputError(f"t has shape {tuple(t.shape)}, which does not broadcast to the batch shape {batch} of x.")
        return x, t


class DataScore(Score):
    """A score that is built on a training set: the exact score, and theories.

    >>> import torch, vkernel as vk
    >>> data, process = vk.data.toy("triple"), vk.VP()
    >>> score = vk.EmpiricalScore(data, process)
    >>> isinstance(score, vk.score.DataScore), score.data.n
    (True, 3)
    """

    @abstractmethod
    def on(self, data: Empirical | Tensor) -> Self:
        """Return the same score, with the same process and parameters, built on other data."""


def signs(x: Tensor, probes: int | Tensor, generator: Generator) -> Tensor:
    """Return random sign vectors ``(count, *x.shape)``, unless ``probes`` already holds them."""
    if isinstance(probes, Tensor):
        return check_real(probes, "probes").to(x)
    count = check_whole(probes, "The number of probes")
    return rng.randn((count, *x.shape), rng.as_generator(generator), x.device, x.dtype).sign()


def check_score(score: object, what: str = "A sampler") -> Score:
    """Return ``score`` if it is a :class:`Score`; otherwise say how to make one."""
    if isinstance(score, Score):
        return score
    hint = " Wrap a function with vk.as_score(fn, process)." if callable(score) else ""
    raise InputError(f"{what} needs a Score, not {score!r}.{hint}")


def check_like(out: object, x: Tensor, what: str = "score") -> Tensor:
    """Return what a score, or a denoiser, returned for ``x``; refuse what is not a tensor of its shape."""
    if isinstance(out, Tensor) and check_real(out, f"What the {what} returns").shape == x.shape:
        return out
    got = f"shape {tuple(out.shape)}" if isinstance(out, Tensor) else type(out).__name__
    raise InputError(f"The {what} returned {got} for x of shape {tuple(x.shape)}; it must return a tensor like x.")


def differentiated(x: Tensor) -> bool:
    """Return whether a derivative with respect to ``x`` is being recorded."""
    return x.requires_grad or forward_ad.unpack_dual(x).tangent is not None


def plain(*tensors: Tensor) -> bool:
    """Return whether no derivative and no map of ``torch.func`` looks at these tensors."""
    return not torch._C._are_functorch_transforms_active() and not any(differentiated(a) for a in tensors)
