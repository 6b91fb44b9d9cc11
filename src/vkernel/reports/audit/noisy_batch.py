r"""Noisy images on which readings of a network are compared, and what predictors make of them.

A :class:`Trial` is images :math:`x_0`, noise and times; :math:`x = \alpha x_0 + \sigma\,\mathrm{noise}` at each. An
error is :math:`|\widehat{\mathrm{noise}} - \mathrm{noise}|^2/d` of one image at one level. Levels are even in
:math:`\log r`, where :math:`r = \sigma/(\alpha s)` and :math:`s^2` is the data's variance per coordinate; one more,
at large :math:`\sigma/\alpha`, follows (:mod:`vkernel.reports.audit.conventions` says why).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vkernel.adapters.checkpoint import PREDICTIONS, Checkpoint, read
from vkernel.core.errors import InputError
from vkernel.data.empirical import Empirical
from vkernel.process import Process
from vkernel.score.empirical import EmpiricalScore

__all__ = ["Trial", "errors", "ideal"]

LOW, HIGH = 0.1, 3.0  # r
FAR = 3.0  # sigma/alpha of the last level, at least


@dataclass(frozen=True)
class Trial:
    """Images, the mean and the spread of their data, and for each level a time and one noise for each image."""

    process: Process
    x0: Tensor
    mean: Tensor
    spread: float
    noise: Tensor
    times: Tensor

    @classmethod
    def of(cls, net: Checkpoint, data: Empirical, levels: int, images: int, generator: torch.Generator) -> Trial:
        chosen = torch.multinomial(data.weights.cpu(), images, replacement=True, generator=generator)
        x0 = data.images(chosen).double().cpu()
        noise = torch.randn(levels + 1, *x0.shape, generator=generator, dtype=torch.float64)
        mean, spread = data.center.cpu().reshape(data.shape), data.spread / math.sqrt(data.d)
        return cls(net.process, x0, mean, spread, noise, _times(net, spread, levels))

    def without_last(self) -> Trial:
        """Without the one more level."""
        return replace(self, noise=self.noise[:-1], times=self.times[:-1])

    def fewer(self, factor: int) -> Trial:
        k = max(4, len(self.x0) // factor)
        return replace(self, x0=self.x0[:k], noise=self.noise[:, :k])

    def moved(self, net: Checkpoint, old: tuple[float, float]) -> Trial:
        """The same images in the range of another reading of the network, at the times of the same r."""
        low, high = net.range
        factor = (high - low) / (old[1] - old[0])
        x0, mean = (low + (a - old[0]) * factor for a in (self.x0, self.mean))
        spread = self.spread * factor
        return replace(self, x0=x0, mean=mean, spread=spread, times=_times(net, spread, len(self.times) - 1))

    @property
    def r(self) -> Tensor:
        return self.process.sigma(self.times) / (self.process.alpha(self.times) * self.spread)

    def queries(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(x, t) level by level."""
        for t, noise in zip(self.times, self.noise, strict=True):
            yield self.process.alpha(t) * self.x0 + self.process.sigma(t) * noise, t

    def trivial(self) -> Tensor:
        """Errors of the trivial predictor, ``(levels, images)``."""
        blends = []
        for x, t in self.queries():
            alpha, sigma = self.process.alpha(t), self.process.sigma(t)
            blends.append(sigma * (x - alpha * self.mean) / ((alpha * self.spread) ** 2 + sigma**2))
        return _square(torch.stack(blends) - self.noise)


def _times(net: Checkpoint, spread: float, levels: int) -> Tensor:
    """The times of the noise levels and of the one more, as far as the process reaches."""
    process, ratios = net.process, spread * torch.logspace(math.log10(LOW), math.log10(HIGH), levels).double()
    ratios = torch.cat([ratios, torch.tensor([max(FAR, 2 * HIGH * spread)], dtype=torch.float64)])
    ends = net.at(torch.tensor([process.eps, process.T], dtype=torch.float64))
    low, high = (process.sigma(ends) / process.alpha(ends)).tolist()
    return net.at(process.time(ratios.clamp(max(low, 1e-9), high)))


def errors(net: Checkpoint, trial: Trial) -> dict[str, Tensor]:
    """Errors ``(levels, images)`` by prediction: one pass of the network, each of its outputs read in every way."""
    raw = replace(net, prediction="noise")
    try:
        outputs = [raw.output(x.float(), t).double() for x, t in trial.queries()]
    except InputError:
        raise
    except Exception as error:
        why = (str(error).strip().splitlines() or [""])[0].rstrip(".")
        raise InputError(
            f"{net.name} failed on images of shape {tuple(trial.x0.shape)} with time {net.time!r}: "
            f"{type(error).__name__}: {why}. Other data, or another time (index, fraction, sigma), "
            "may be what it takes."
        ) from error
    return {kind: _square(torch.stack(_as_noise(outputs, kind, net, trial)) - trial.noise) for kind in PREDICTIONS}


def _as_noise(outputs: Iterable[Tensor], kind: str, net: Checkpoint, trial: Trial) -> list[Tensor]:
    sign = -1 if kind == "flow" and net.time == "reversed" else 1
    pairs = zip(outputs, trial.queries(), strict=True)
    return [read(sign * out, kind, "noise", x, t, trial.process) for out, (x, t) in pairs]


def ideal(score: EmpiricalScore, trial: Trial) -> Tensor:
    """Errors ``(levels, images)`` of the data's own score."""
    noises = [-trial.process.sigma(t) * score(x, t) for x, t in trial.queries()]
    return _square(torch.stack(noises) - trial.noise)


def _square(a: Tensor) -> Tensor:
    """The mean _square over coordinates, ``(levels, images)``."""
    return a.square().flatten(2).mean(-1)
