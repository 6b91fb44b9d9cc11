r"""Samples for an audit: the probability flow, or ancestral steps.

:func:`draw` integrates the probability flow by the second-order multistep method, at times even in
:math:`(\sigma/\alpha)^{1/7}` (``ode``), or takes ancestral steps (``ancestral``), and ends with the denoised image at
the last time; Heun's method, order 1, and times even in t end farther from the flow. The noise of a sample belongs to
(seed, its index) and (seed, its index, step): networks of one process start from the same noise, and the number of
samples and the batch change a sample by rounding only."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from vkernel.adapters.weights import reason
from vkernel.core import rng
from vkernel.core.checks import check_choice, check_whole, is_whole
from vkernel.core.errors import InputError, require
from vkernel.core.progress import Progress
from vkernel.process import DDPM, Anisotropic
from vkernel.sample import ancestral, pf_ode
from vkernel.score import Score, Wrapped
from vkernel.score.base import check_score

KINDS = ("ode", "ancestral")
ALL = 1000  # steps in continuous time, where no number of steps is all
FEWEST_STEPS = 20  # of a sampler that could take more: with fewer its samples are coarse, and copies are missed
CHUNK = 1 << 21  # random numbers made at once


def start(score: Score, n: int, seed: int, shape: tuple[int, ...]) -> Tensor:
    r"""Draw noise :math:`N(0, \sigma_T^2)` for n samples, ``(n, *shape)``."""
    process = _check(score, seed).process
    check_whole(n, "n")
    good = isinstance(shape, tuple | list) and len(shape) > 0 and all(is_whole(k) and k >= 1 for k in shape)
    require(good, f"shape must be that of an image, such as (1, 28, 28), not {shape!r}.")
    sigma = float(process.sigma(torch.tensor(process.T, dtype=torch.float64)))
    return (sigma * _normals(rng.key(seed, "noise of samples"), n, tuple(shape))).to(torch.get_default_dtype())


def draw(
    score: Score,
    x_T: Tensor,
    kind: str = "ode",
    *,
    steps: int | Tensor | None = 50,
    seed: int = 0,
    first: int = 0,
    progress: Progress = False,
) -> Tensor:
    """Sample from ``x_T (n, *shape)``, like it; samples that diverge are returned as they are.

    ``kind`` is "ode" or "ancestral"; ``steps`` are evaluations of the network (``None``: every index of a DDPM, 1,000
    in continuous time), or their times (``sampling_times`` of another score). Ancestral steps of a DDPM are evenly
    spaced indices; times that share an index count once.
    ``first`` is the index of the first sample, where ``x_T`` is a part of more."""
    _check(score, seed)
    check_choice(kind, "kind", KINDS)
    require(isinstance(x_T, Tensor), f"x_T must be a torch tensor, not {type(x_T).__name__}.")
    require(x_T.ndim >= 2 and x_T.numel() > 0, f"x_T must be (n, *shape), not of shape {tuple(x_T.shape)}.")
    times = steps if isinstance(steps, Tensor) else sampling_times(score, kind, steps)
    shape = tuple(x_T.shape)
    score = score.conditioned(first) if isinstance(score, Wrapped) else score

    def noise(k: int) -> Tensor:
        return _normals(rng.key(seed, "noise of ancestral steps", k), len(x_T), shape[1:], x_T.device, first)

    try:
        with torch.no_grad():
            x, how = x_T, dict[str, Any](steps=times, allow_nan=True, progress=progress)
            if len(times) > 1 and kind == "ode":
                x = pf_ode(score, x_T, method="multistep", **how)
            elif len(times) > 1:
                x = ancestral(score, x_T, noise=noise, **how)
            return score.denoise(x, times[-1])
    except InputError:
        raise
    except Exception as error:
        name = score.name if isinstance(score, Wrapped) else type(score).__name__
        why = f"{type(error).__name__}: {reason(error)}"
        raise InputError(f"{name} failed on samples of shape {shape}: {why}.") from error


def sampling_times(score: Score, kind: str, steps: int | None = 50) -> Tensor:
    """Return the descending times at which :func:`draw` evaluates the network, in float64; none is without noise."""
    good = steps is None or (is_whole(steps) and steps >= 1)
    require(good, f"steps must be a whole number, 1 or more, or None for all; got {steps!r}.")
    process = score.process
    if isinstance(process, DDPM) and (kind == "ancestral" or steps is None):
        last, least = math.floor(process.T), math.ceil(process.eps)
        count = last - least + 1
        t = torch.linspace(last, least, min(steps or count, count), dtype=torch.float64).round()
    elif steps == 1:
        t = torch.tensor([process.T], dtype=torch.float64)
    else:
        t = process.times((steps or ALL) - 1, "edm" if kind == "ode" else None)
    t = (score.at(t) if isinstance(score, Wrapped) else t).unique().flip(0)
    return t[process.sigma(t) > 0]


def _check(score: Score, seed: int) -> Score:
    isotropic = not isinstance(check_score(score, "A sampler").process, Anisotropic)
    require(isotropic, "Samples are drawn under isotropic noise alone.")
    require(is_whole(seed), f"seed must be a whole number, not {seed!r}.")
    return score


def _normals(key: int, n: int, shape: tuple[int, ...], device: torch.device | str = "cpu", first: int = 0) -> Tensor:
    """Return standard normals ``(n, *shape)``, each row a function of the key and of its sample's index."""
    coordinates = torch.arange(math.prod(shape), device=device)
    own = rng.hashed(torch.tensor(key, device=device), torch.arange(first, first + n, device=device))
    parts = own.split(max(1, CHUNK // len(coordinates)))
    return torch.cat([rng.normals(part[:, None], coordinates) for part in parts]).reshape(n, *shape)
