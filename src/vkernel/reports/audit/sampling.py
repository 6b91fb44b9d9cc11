r"""Samples of a network, each from noise of its own.

One step from t down to s, with the denoised image :math:`m = E[x_0|x_t]` and :math:`r = \sigma/\alpha`, is

.. math:: x_s = \alpha_s m + \sigma_s \Big[ c\,\frac{x_t - \alpha_t m}{\sigma_t} + \sqrt{1 - c^2}\, z \Big] .

* ``ancestral``: :math:`c = r_s/r_t`. Given :math:`x_0`, the forward process has :math:`x_t = (\alpha_t/\alpha_s) x_s +
  (\sigma_t^2 - \sigma_s^2\alpha_t^2/\alpha_s^2)^{1/2}\, z`; by Bayes' rule :math:`x_s` then has the variance
  :math:`\sigma_s^2 (1 - c^2)` and the mean :math:`\alpha_s x_0 + c\,(\sigma_s/\sigma_t)(x_t - \alpha_t x_0)`, and m
  takes the place of :math:`x_0`. For whole indices one apart this is Ho et al.'s step with their smaller variance.
* ``ode``: c = 1, the probability flow while m stands still (DDIM). That m moves is seen from the step before,
  :math:`m + \tfrac12 (\Lambda/\Lambda') (m - m')` with :math:`\Lambda` the step in log r: order 2 at one call of the
  network a step (Lu et al. 2022). Times are even in :math:`r^{1/7}`. On the networks that were tried Heun's method with
  as many calls, order 1 with twice as many, and times even in t end farther from the flow; times even in log r do as
  well, but a network told an index has few of them at little noise.

Both end with m at the last time: ``steps`` calls of the network, and no noise left in the image. The noise of a sample
belongs to (seed, its index) and (seed, its index, step): networks of one process start from the same noise, and
neither the number of samples nor the batch changes a sample but by rounding.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from vkernel.core import rng
from vkernel.core.checks import is_whole
from vkernel.core.errors import InputError, require
from vkernel.core.progress import Reporter
from vkernel.metrics.samples import CHUNK
from vkernel.process import DDPM, Anisotropic, Process
from vkernel.process.base import real_dtype, wide_dtype
from vkernel.score import conversions as pr
from vkernel.score.base import Score

__all__ = ["KINDS", "draw", "start"]

KINDS = ("ode", "ancestral")
ALL = 1000  # steps in continuous time, where there is no number that is all


def start(net: Any, n: int, seed: int, shape: tuple[int, ...], *, first: int = 0) -> Tensor:
    """Noise :math:`N(0, \\sigma_T^2)` for samples ``first`` to ``first + n``, ``(n, *shape)``."""
    process = _process(net)
    require(is_whole(n) and n >= 1, f"n must be a whole number of samples, 1 or more, not {n!r}.")
    given = tuple(shape) if isinstance(shape, tuple | list | torch.Size) else ()
    good = given and all(is_whole(k) and k >= 1 for k in given)
    require(good, f"shape must be that of an image, such as (1, 28, 28), not {shape!r}.")
    sigma = float(process.sigma(torch.tensor(process.T, dtype=torch.float64)))
    return (sigma * _normals(rng.key(_seed(seed), "noise of samples"), n, given, first)).to(torch.get_default_dtype())


def draw(
    net: Score,
    x_T: Tensor,
    kind: str = "ode",
    *,
    steps: int | None = 50,
    seed: int = 0,
    clip: bool = False,
    first: int = 0,
    step: Reporter | None = None,
) -> Tensor:
    """Samples from ``x_T (n, *shape)``, like it; those that diverge are left as they come out.

    ``net`` is a ``vk.Checkpoint`` or another score with its process. ``steps=None``: every index
    of a DDPM, 1,000 steps in continuous time; ancestral steps of a DDPM are whole indices at even distances, from the
    last to the first, and at most all of them. Times that a network told an index cannot tell apart are taken once.
    ``clip``: denoised images are cut to the network's range at every step, as in diffusers. Row i of ``x_T`` is sample
    ``first + i``, so that samples may be drawn in parts. ``step`` hears of each call of the network.
    """
    process = _process(net)
    require(kind in KINDS, f"kind must be one of {', '.join(KINDS)}, not {kind!r}.")
    require(
        steps is None or (is_whole(steps) and steps >= 1),
        f"steps must be a whole number, 1 or more, or None for all; got {steps!r}.",
    )
    require(isinstance(x_T, Tensor), f"x_T must be a torch tensor, not {type(x_T).__name__}.")
    require(x_T.ndim >= 2 and x_T.numel() > 0, f"x_T must be (n, *shape), not of shape {tuple(x_T.shape)}.")
    require(not x_T.is_complex() and bool(x_T.isfinite().all()), "x_T must hold real, finite numbers.")
    require(not clip or hasattr(net, "range"), "clip=True needs a network with a range, such as a Checkpoint.")
    root, told = _seed(seed), real_dtype(x_T.dtype)
    t = times(net, kind, steps)
    alpha, sigma = process.alpha(t).tolist(), process.sigma(t).tolist()
    level = (process.sigma(t) / process.alpha(t)).log().tolist()  # log r
    x, before = x_T.to(wide_dtype(told)), None
    for k in range(len(t) - 1):
        m = _denoised(net, x, t[k], clip, step)
        down = level[k + 1] - level[k]
        image = m if before is None else m + down / (2 * (level[k] - level[k - 1])) * (m - before)
        before = m if kind == "ode" else None
        c = 1.0 if kind == "ode" else math.exp(down)
        x = alpha[k + 1] * image + (c * sigma[k + 1] / sigma[k]) * (x - alpha[k] * image)
        if kind == "ancestral":
            z = _normals(rng.key(root, "noise of ancestral steps", k), len(x), tuple(x.shape[1:]), first, x.device)
            x = x + sigma[k + 1] * math.sqrt(-math.expm1(2 * down)) * z.to(x)
    return _denoised(net, x, t[-1], clip, step).to(told)


def times(net: Any, kind: str, steps: int | None = 50) -> Tensor:
    """The descending times at which :func:`draw` asks the network, in float64; none is without noise."""
    process: Process = net.process
    whole = isinstance(process, DDPM) and (kind == "ancestral" or steps is None)
    if whole:
        last, least = math.floor(process.T), math.ceil(process.eps)
        count = last - least + 1
        t = torch.linspace(last, least, min(steps or count, count), dtype=torch.float64).round()
    elif steps == 1:
        t = torch.tensor([process.T], dtype=torch.float64)
    else:
        t = process.times((steps or ALL) - 1, "edm" if kind == "ode" else None)
    t = (net.at(t) if callable(getattr(net, "at", None)) else t).unique().flip(0)
    return t[process.sigma(t) > 0]


def _process(net: Any) -> Process:
    process = getattr(net, "process", None)
    require(
        callable(net) and isinstance(process, Process),
        f"Samples are drawn from a score with its process, such as a Checkpoint, not from {net!r}.",
    )
    require(not isinstance(process, Anisotropic), "Samples are drawn under isotropic noise alone.")
    return process  # type: ignore[return-value]


def _seed(seed: Any) -> int:
    require(is_whole(seed), f"seed must be a whole number, not {seed!r}.")
    return int(seed)


def _normals(key: int, n: int, shape: tuple[int, ...], first: int, device: torch.device | str = "cpu") -> Tensor:
    """Standard normals ``(n, *shape)``, each row a function of the key and of its sample's index."""
    require(is_whole(first) and first >= 0, f"first must be the index of a sample, 0 or more, not {first!r}.")
    coordinates = torch.arange(math.prod(shape), device=device)
    own = rng.hashed(torch.tensor(key, device=device), torch.arange(first, first + n, device=device))
    parts = own.split(max(1, CHUNK // len(coordinates)))
    return torch.cat([rng.normals(part[:, None], coordinates) for part in parts]).reshape(n, *shape)


@torch.no_grad()
def _denoised(net: Any, x: Tensor, t: Tensor, clip: bool, step: Reporter | None) -> Tensor:
    """E[x0 | x], by the network; like x."""
    name = getattr(net, "name", type(net).__name__)
    try:
        m = net.denoise(x, t) if hasattr(net, "denoise") else pr.to_x0(net, net.process)(x, t)
    except InputError:
        raise
    except Exception as error:
        why = (str(error).strip().splitlines() or ["no reason given"])[0].rstrip(".")
        raise InputError(
            f"{name} failed on samples of shape {tuple(x.shape)} at t = {float(t):g}: {type(error).__name__}: {why}."
        ) from error
    good = isinstance(m, Tensor) and m.shape == x.shape
    require(good, f"{name} must return a tensor like x, {tuple(x.shape)}, not {tuple(getattr(m, 'shape', ()))}.")
    if step is not None:
        step(f"samples of {name}")
    return (m.clamp(*net.range) if clip else m).to(x)
