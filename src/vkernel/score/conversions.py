r"""What networks predict, and its score (docs/theory.md, §1.5).

With :math:`x = \alpha x_0 + \sigma\epsilon`, :math:`\dot x = -\beta x - D s` the probability flow and
:math:`\tilde x = x/\alpha`, :math:`\tilde\sigma = \sigma/\alpha`:

=========  ==============================================  ==================================================
predicts   target                                          score
=========  ==============================================  ==================================================
score      :math:`\nabla\log p`                            the prediction itself
noise      :math:`\epsilon`                                :math:`-\hat\epsilon/\sigma`
x0         :math:`x_0`                                     :math:`(\alpha \hat x_0 - x)/\sigma^2`
v          :math:`\alpha\epsilon - \sigma x_0`             :math:`-(\sigma x + \alpha\hat v)/(\sigma h^2)`
flow       :math:`\dot x`                                  :math:`-(\hat u + \beta x)/D`
edm        :math:`F` with                                  as x0, of
           :math:`x_0 = c_{skip}\tilde x + c_{out} F`      :math:`c_{skip}\tilde x + c_{out}\hat F`
=========  ==============================================  ==================================================

with :math:`h^2 = \alpha^2 + \sigma^2`, :math:`c_{skip} = \sigma_d^2/(\tilde\sigma^2 + \sigma_d^2)` and
:math:`c_{out} = \tilde\sigma\sigma_d/\sqrt{\tilde\sigma^2 + \sigma_d^2}` for data of standard deviation
:math:`\sigma_d` (Karras et al. 2022); v is that of Salimans and Ho (2022).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from vkernel.core.errors import require
from vkernel.process import Anisotropic, Process
from vkernel.score.base import Score, Time, as_time, check_score

PREDICTIONS = ("noise", "x0", "v", "flow", "edm", "score")

# the table above: the score of a prediction f, and the prediction of a score s, by x, alpha, sigma, beta, D
_SCORE: dict[str, Callable[..., Tensor]] = {
    "noise": lambda f, x, a, s, b, D: -f / s,
    "x0": lambda f, x, a, s, b, D: (a * f - x) / s.square(),
    "v": lambda f, x, a, s, b, D: -(s * x + a * f) / (s * (a.square() + s.square())),
    "flow": lambda f, x, a, s, b, D: -(f + b * x) / D,
    "score": lambda f, x, a, s, b, D: f,
}
_PREDICTION: dict[str, Callable[..., Tensor]] = {
    "noise": lambda f, x, a, s, b, D: -f * s,
    "x0": lambda f, x, a, s, b, D: (x + s.square() * f) / a,
    "v": lambda f, x, a, s, b, D: -(s * (a.square() + s.square()) * f + s * x) / a,
    "flow": lambda f, x, a, s, b, D: -b * x - D * f,
    "score": lambda f, x, a, s, b, D: f,
}


def convert(
    out: Tensor, predicts: str, wants: str, x: Tensor, t: Time, process: Process, sigma_data: float = 0.5
) -> Tensor:
    """Convert the prediction ``out`` at ``(x, t)`` into another of :data:`PREDICTIONS`; the result is like ``x``."""
    if predicts == wants:
        return out
    if predicts == "x0" and wants == "score":
        return proxy_score(x, t, out, process)
    _check_isotropic(process)
    levels = _levels(x, t, process, "flow" in (predicts, wants))
    if "edm" in (predicts, wants):
        ratio = (levels[1] / levels[0]).square() / sigma_data**2
        skip, scale = x / levels[0] / (1 + ratio), sigma_data * (ratio / (1 + ratio)).sqrt()
        if predicts == "edm":
            return convert(_like(skip + scale * out, x), "x0", wants, x, t, process)
        return _like((convert(out, predicts, "x0", x, t, process) - skip) / scale, x)
    return _like(_PREDICTION[wants](_like(_SCORE[predicts](out, x, *levels), x), x, *levels), x)


def proxy_score(x: Tensor, t: Time, x0: Tensor, process: Process) -> Tensor:
    r"""Return the proxy score :math:`\tilde s = S^{-1} (\alpha x_0 - x)`, the target of score matching (2.5)."""
    if isinstance(process, Anisotropic):
        return process.whiten(proxy_score(process.whiten(x), t, process.whiten(x0), process.base))
    alpha, sigma, *_ = _levels(x, t, process, flow=False)
    return _like((alpha * x0 - x) / sigma.square(), x)


def to_noise(score: Score) -> Callable[[Tensor, Time], Tensor]:
    r"""Return the noise prediction :math:`-\sigma s` of a score."""
    return _converted(score, "noise")


def to_x0(score: Score) -> Callable[[Tensor, Time], Tensor]:
    r"""Return the x0 prediction :math:`(x + \sigma^2 s)/\alpha` of a score."""
    return _converted(score, "x0")


def to_v(score: Score) -> Callable[[Tensor, Time], Tensor]:
    r"""Return the v prediction of a score."""
    return _converted(score, "v")


def to_flow(score: Score) -> Callable[[Tensor, Time], Tensor]:
    r"""Return the velocity :math:`-\beta x - D s` of the probability flow of a score."""
    return _converted(score, "flow")


def _converted(score: Score, wants: str) -> Callable[[Tensor, Time], Tensor]:
    process = check_score(score, "A conversion").process
    _check_isotropic(process)

    def converted(x: Tensor, t: Time) -> Tensor:
        x, when = score.check(x, t)
        return convert(score(x, t), "score", wants, x, when.to(x.device).expand(score.split(x)[0]), process)

    return converted


def _check_isotropic(process: Process) -> None:
    isotropic = not isinstance(process, Anisotropic)
    require(isotropic, "Noise, x0, v, flow and edm predictions are defined for isotropic noise.")


def _levels(x: Tensor, t: Time, process: Process, flow: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return alpha, sigma, beta and D shaped to broadcast over x; the last two are empty unless ``flow``."""
    t = as_time(t, x.device)
    full = tuple(t.shape) + (1,) * (x.ndim - t.ndim)
    require(
        t.ndim <= x.ndim and all(a in (1, b) for a, b in zip(full, x.shape, strict=True)),
        f"t has shape {tuple(t.shape)}, which does not broadcast over the batch of x, of shape {tuple(x.shape)}.",
    )
    wide = process.check(t).double().clamp(process.eps, process.T).reshape(full)
    dtype = x.dtype if x.dtype in (torch.float32, torch.float64) else torch.float32
    alpha, sigma = process.alpha(wide).to(dtype), process.sigma(wide).to(dtype)
    if not flow:
        return alpha, sigma, wide.new_empty(0), wide.new_empty(0)
    return alpha, sigma, process.beta(wide).to(dtype), process.D(wide).to(dtype)


def _like(result: Tensor, x: Tensor) -> Tensor:
    return result.to(x.dtype if x.is_floating_point() else torch.get_default_dtype())
