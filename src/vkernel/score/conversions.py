r"""What networks predict, and its score (docs/theory.md, §1.5).

A *score* is any callable ``(x, t) -> tensor like x``. Networks predict other things than the score. With
:math:`x = \alpha x_0 + \sigma\,\mathrm{noise}`:

=========  ==========================================================  ==============================================
name       what the network returns                                    score
=========  ==========================================================  ==============================================
noise      :math:`E[\mathrm{noise}|x]`                                 :math:`-\mathrm{noise} / \sigma`
x0         :math:`E[x_0|x]`                                            :math:`(\alpha x_0 - x)/\sigma^2`
v          :math:`E[\alpha\,\mathrm{noise} - \sigma x_0|x]`            :math:`-(\sigma x + \alpha v) /
                                                                       (\sigma (\alpha^2 + \sigma^2))`
flow       :math:`E[dx/dt|x] = -\beta x - D s`                         :math:`-(\mathrm{flow} + \beta x) / D`
=========  ==========================================================  ==============================================

Each ``from_…`` turns such a network into a score, each ``to_…`` a score into such a network.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vkernel.core.errors import InputError, require
from vkernel.process import Anisotropic, Process

__all__ = [
    "Score",
    "from_flow",
    "from_noise",
    "from_v",
    "from_x0",
    "proxy_score",
    "to_flow",
    "to_noise",
    "to_v",
    "to_x0",
]

Score = Callable[[Tensor, Any], Tensor]
Time = float | Tensor


def as_time(t: Time, device: torch.device) -> Tensor:
    """``t`` as a tensor in its own precision; numbers in float64."""
    try:
        t = t.to(device) if isinstance(t, Tensor) else torch.tensor(t, dtype=torch.float64, device=device)
    except (TypeError, ValueError, RuntimeError):
        raise InputError(f"t must be a number or a tensor of times, not {t!r}.") from None
    require(not t.is_complex(), "t must be real.")
    return t


def wide_time(t: Time, device: torch.device) -> Tensor:
    """``t`` as a float64 tensor: at low noise the seventh digit of t is seen in the posterior."""
    return as_time(t, device).double()


def _isotropic(process: Process) -> Process:
    require(not isinstance(process, Anisotropic), "Noise, x0, v and flow predictions are defined for isotropic noise.")
    return process


def _over(x: Tensor, t: Time, process: Process) -> Tensor:
    """``t``, a scalar or one value for each element of leading batch axes, shaped to broadcast over ``x``."""
    t = as_time(t, x.device)
    full = tuple(t.shape) + (1,) * (x.ndim - t.ndim)
    require(
        t.ndim <= x.ndim and all(a in (1, b) for a, b in zip(full, x.shape, strict=True)),
        f"t has shape {tuple(t.shape)}, which does not broadcast over the batch of x, of shape {tuple(x.shape)}.",
    )
    return process.check(t).double().clamp(process.eps, process.T).reshape(full)


def _working(x: Tensor) -> torch.dtype:
    return x.dtype if x.dtype in (torch.float32, torch.float64) else torch.float32


def _terms(x: Tensor, t: Time, process: Process) -> tuple[Tensor, Tensor]:
    """alpha and sigma over x."""
    wide = _over(x, t, process)
    return process.alpha(wide).to(_working(x)), process.sigma(wide).to(_working(x))


def _like(result: Tensor, x: Tensor) -> Tensor:
    return result.to(x.dtype if x.is_floating_point() else torch.get_default_dtype())


def proxy_score(x: Tensor, t: Time, x0: Tensor, process: Process) -> Tensor:
    r"""The proxy score :math:`\tilde s = S^{-1} (\alpha x_0 - x)`: the noisy target of score matching (2.5)."""
    if isinstance(process, Anisotropic):
        return process.whiten(proxy_score(process.whiten(x), t, process.whiten(x0), process.base))
    alpha, sigma = _terms(x, t, process)
    return _like((alpha * x0 - x) / sigma.square(), x)


def from_noise(net: Score, process: Process) -> Score:
    """The score of a network that predicts the added noise."""
    process = _isotropic(process)
    return lambda x, t: _like(-net(x, t) / _terms(x, t, process)[1], x)


def to_noise(score: Score, process: Process) -> Score:
    """The noise prediction of a score."""
    process = _isotropic(process)
    return lambda x, t: _like(-score(x, t) * _terms(x, t, process)[1], x)


def from_x0(net: Score, process: Process) -> Score:
    """The score of a denoiser."""
    return lambda x, t: proxy_score(x, t, net(x, t), process)


def to_x0(score: Score, process: Process) -> Score:
    r"""The denoiser of a score, :math:`(x + S s)/\alpha` (Tweedie's formula)."""
    process = _isotropic(process)

    def x0(x: Tensor, t: Time) -> Tensor:
        alpha, sigma = _terms(x, t, process)
        return _like((x + sigma.square() * score(x, t)) / alpha, x)

    return x0


def from_v(net: Score, process: Process) -> Score:
    """The score of a network that predicts ``v = alpha noise - sigma x0`` (Salimans and Ho 2022)."""
    process = _isotropic(process)

    def score(x: Tensor, t: Time) -> Tensor:
        alpha, sigma = _terms(x, t, process)
        return _like(-(sigma * x + alpha * net(x, t)) / (sigma * (alpha.square() + sigma.square())), x)

    return score


def to_v(score: Score, process: Process) -> Score:
    """The v prediction of a score."""
    process = _isotropic(process)

    def v(x: Tensor, t: Time) -> Tensor:
        alpha, sigma = _terms(x, t, process)
        return _like(-(sigma * (alpha.square() + sigma.square()) * score(x, t) + sigma * x) / alpha, x)

    return v


def _drift(x: Tensor, t: Time, process: Process) -> tuple[Tensor, Tensor]:
    wide = _over(x, t, process)
    return process.beta(wide).to(_working(x)), process.D(wide).to(_working(x))


def from_flow(net: Score, process: Process) -> Score:
    """The score of a network that predicts the velocity of the probability flow (flow matching)."""
    process = _isotropic(process)

    def score(x: Tensor, t: Time) -> Tensor:
        beta, diffusion = _drift(x, t, process)
        return _like(-(net(x, t) + beta * x) / diffusion, x)

    return score


def to_flow(score: Score, process: Process) -> Score:
    r"""The velocity :math:`-\beta x - D s` of the probability flow of a score."""
    process = _isotropic(process)

    def flow(x: Tensor, t: Time) -> Tensor:
        beta, diffusion = _drift(x, t, process)
        return _like(-beta * x - diffusion * score(x, t), x)

    return flow
