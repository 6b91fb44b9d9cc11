r"""Noisy images of a data set at several noise levels, and the linear denoiser that networks are compared with.

At each level, images :math:`x_0` of the data and noise give :math:`x = \alpha x_0 + \sigma\,\mathrm{noise}`, and the
error of a predictor is :math:`E|\widehat{\mathrm{noise}} - \mathrm{noise}|^2 / d`. Let :math:`s^2` be the data's
variance per coordinate, m its mean, :math:`r = \sigma/(\alpha s)`. Levels are even in :math:`\log r` from .1 to 3: at
less noise conventions cannot be distinguished, at more the trivial predictor is nearly perfect; one more lies at
:math:`\sigma/\alpha` of 3 or more. The prediction noise = 0 has the error 1, x0 = m has :math:`1/r^2`, and their best
blend, the **trivial** predictor :math:`\sigma(x - \alpha m)/(\alpha^2s^2+\sigma^2)`, has :math:`1/(1+r^2)`. The best
linear denoiser, :math:`\widehat{\mathrm{noise}}(x) = \sigma\,(\alpha^2\Sigma + \sigma^2)^{-1} (x - \alpha m)`, holds
all that a mean and a covariance can predict."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vkernel.adapters.weights import reason
from vkernel.core import rng
from vkernel.core.errors import InputError, require
from vkernel.data.empirical import Empirical
from vkernel.process import Process
from vkernel.reports.audit.levels import mean_square
from vkernel.score import Score, Wrapped, convert
from vkernel.score.base import check_score

READINGS = ("noise", "x0", "v", "flow", "score")  # of one output; an edm network scales its input, and is its own
LOW, HIGH, FAR = 0.1, 3.0, 3.0  # r of the levels; the least sigma/alpha of the last one


def as_network(model: Score, data: Empirical) -> Wrapped:
    """Return a score with its conventions; without a pixel range it takes that of the data."""
    score = check_score(model, "An audit")
    stated = score.process, "score", "t", None, score.shape, type(score).__name__
    net = score if isinstance(score, Wrapped) else Wrapped(score, *stated)
    ends = torch.iinfo(getattr(torch, data.stored)) if "int" in data.stored else None
    pixels = data.scale or ((ends.min, ends.max) if ends else (-1.0, 1.0))
    return replace(net, range=pixels) if net.range is None else net


@dataclass(frozen=True)
class LinearDenoiser:
    r"""The best linear prediction of the noise, :math:`\sigma(\alpha^2\Sigma + \sigma^2)^{-1}\delta`."""

    axes: Tensor  # principal directions of some of the data
    variances: Tensor  # along these

    @classmethod
    def of(cls, data: Empirical, seed: int, images: int = 1024) -> LinearDenoiser:
        r"""Estimate :math:`\Sigma` from at most ``images`` of the data; it is zero where these do not vary."""
        chosen, weights = torch.arange(data.n), data.weights.cpu()
        if data.n > images:
            chosen = torch.multinomial(weights, images, True, generator=rng.stream(seed, "covariance"))
            weights = torch.full((images,), 1 / images).double()
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
class NoisyBatch:
    """Images, the mean and spread of their data, and for each noise level a time and one noise for each image."""

    process: Process
    x0: Tensor
    mean: Tensor
    spread: float
    noise: Tensor
    times: Tensor
    index: Tensor  # of the images in the data

    @classmethod
    def of(cls, net: Wrapped, data: Empirical, levels: int, images: int, generator: torch.Generator) -> NoisyBatch:
        """Draw images and noise for ``levels`` levels even in log r, and for one more at large sigma/alpha."""
        shapes = f"The data have shape {data.shape}, but {net.name} takes images of shape {net.shape}."
        require(net.shape in (None, data.shape), shapes)
        data = net.scaled(data)
        require(data.spread > 0, "All points of the data are equal; at least two different ones are needed.")
        index = torch.multinomial(data.weights.cpu(), images, replacement=True, generator=generator)
        x0 = data[index].double().cpu()
        noise = torch.randn(levels + 1, *x0.shape, generator=generator, dtype=torch.float64)
        mean, spread = data.center.cpu().reshape(data.shape), data.spread / math.sqrt(data.d)
        return cls(net.process, x0, mean, spread, noise, _times(net, spread, levels), index)

    def others(self, data: Empirical, least: int = 8) -> Empirical:
        """Return the data without the images of the batch; all if too few are left."""
        kept = data.weights.cpu() > 0
        kept[self.index] = False
        return data.subset(kept.nonzero().flatten()) if int(kept.sum()) >= least else data

    def first(self, count: int) -> NoisyBatch:
        """Return the first images and their noise."""
        return replace(self, x0=self.x0[:count], noise=self.noise[:, :count])

    def mapped(self, transposed: bool, flipped: tuple[int, ...]) -> NoisyBatch:
        """Turn images and noise alike."""
        x0, mean, noise = ((a.mT if transposed else a).flip(flipped) for a in (self.x0, self.mean, self.noise))
        return replace(self, x0=x0, mean=mean, noise=noise)

    def affine(self, factor: float, shift: float) -> NoisyBatch:
        """Map pixels to ``factor`` times them, plus ``shift``, at the same times."""
        x0, mean = (factor * a + shift for a in (self.x0, self.mean))
        return replace(self, x0=x0, mean=mean, spread=abs(factor) * self.spread)

    def at_levels(self, net: Wrapped) -> NoisyBatch:
        """Return the batch at the times of ``net`` with the levels' r."""
        return replace(self, times=_times(net, self.spread, len(self.times) - 1))

    def rescaled(self, net: Wrapped, old: tuple[float, float]) -> NoisyBatch:
        """Map the images from the pixel range ``old`` to that of ``net``, at the times of the same r."""
        assert net.range is not None
        low, high = net.range
        factor = (high - low) / (old[1] - old[0])
        return self.affine(factor, low - factor * old[0]).at_levels(net)

    @property
    def r(self) -> Tensor:
        """The noise levels, sigma/(alpha s)."""
        return self.process.sigma(self.times) / (self.process.alpha(self.times) * self.spread)

    def queries(self) -> Iterator[tuple[Tensor, Tensor, float, float]]:
        """Yield (x, t, alpha, sigma) level by level."""
        for t, noise in zip(self.times, self.noise, strict=True):
            alpha, sigma = self.process.alpha(t), self.process.sigma(t)
            yield alpha * self.x0 + sigma * noise, t, float(alpha), float(sigma)

    def errors_of(self, predicted: Iterable[Tensor]) -> Tensor:
        """Return errors ``(levels, images)`` of the noise that was predicted at each level."""
        return torch.stack([mean_square(p - z) for p, z in zip(predicted, self.noise, strict=True)])

    def errors(self, net: Wrapped, kinds: Sequence[str] = ()) -> dict[str, Tensor]:
        """Return errors ``(levels, images)`` by prediction, those in ``kinds`` or all: one pass of the network, its
        output read as each."""
        kinds = kinds or (*READINGS, *(("edm",) if net.predicts == "edm" else ()))
        inputs = {kind: "edm" if kind == "edm" else "noise" for kind in kinds}  # edm networks are given scaled images
        outputs = {own: self._outputs(net, own) for own in dict.fromkeys(inputs.values())}
        queries, found = list(self.queries()), {}
        for kind in kinds:
            sign = -1 if kind == "flow" and net.time == "reversed" else 1
            pairs = zip(outputs[inputs[kind]], queries, strict=True)
            noise = (convert(sign * o, kind, "noise", x, t, self.process, net.sigma_data) for o, (x, t, *_) in pairs)
            found[kind] = self.errors_of(noise)
        return found

    def _outputs(self, net: Wrapped, predicts: str) -> list[Tensor]:
        raw = replace(net, predicts=predicts)
        try:
            return [raw.output(x.float(), t).double() for x, t, *_ in self.queries()]
        except InputError:
            raise
        except Exception as error:
            failed = f"{net.name} failed on images of shape {tuple(self.x0.shape[1:])} with time {net.time!r}"
            hint = "Other data, or another time (index, fraction, sigma), may fit it."
            if isinstance(error, TypeError) and "argument" in str(error):
                hint = "Give what it takes beside images and times: classes (--labels) or embeddings (--condition)."
            raise InputError(f"{failed}: {type(error).__name__}: {reason(error)}. {hint}") from error

    def trivial_errors(self) -> Tensor:
        """Return errors ``(levels, images)`` of the trivial predictor."""
        at = self.queries()
        return self.errors_of(s * (x - a * self.mean) / ((a * self.spread) ** 2 + s**2) for x, _, a, s in at)


def _times(net: Wrapped, spread: float, levels: int) -> Tensor:
    """Return the times of the noise levels and of the one more, as far as the process reaches."""
    process, ratios = net.process, spread * torch.logspace(math.log10(LOW), math.log10(HIGH), levels).double()
    ratios = torch.cat([ratios, torch.tensor([max(FAR, 2 * HIGH * spread)], dtype=torch.float64)])
    ends = net.at(torch.tensor([process.eps, process.T], dtype=torch.float64))
    low, high = (process.sigma(ends) / process.alpha(ends)).tolist()
    return net.at(process.time(ratios.clamp(max(low, 1e-9), high)))
