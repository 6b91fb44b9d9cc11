r"""C along the line between two images, against t: what the paper's Figure 1 becomes in image space.

On the line :math:`x(\lambda, t) = \alpha_t\,[(1-\lambda)\,y_a + \lambda\,y_b]` and, as a network meets it, with
noise, :math:`x + \sigma_t z`, averaged over draws of z. Shown is :math:`\sigma^2\,\mathrm{tr}\,C / d`, whose mean over
training inputs is the noise fraction :math:`\rho(t)` (docs/theory.md, §2). It ends in one number: for random pairs of
images of different class, at the noise level where :math:`\rho` is greatest, the geometric mean of

.. math:: \frac{E_z\,\mathrm{tr}\,C(\text{midpoint} + \sigma z)}
               {\tfrac12\,[E_z\,\mathrm{tr}\,C(\alpha y_a + \sigma z) + E_z\,\mathrm{tr}\,C(\alpha y_b + \sigma z)]}

with a 95 % interval over pairs (Student's, on the log scale). Above 1, the target is noisier between images than at
them; nothing in the definition forbids a value below 1.

:class:`Study` computes; :func:`exhibit` draws and says what is seen. Which images: ``digits_line`` and ``cifar_line``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from vkernel import plots
from vkernel.core import rng
from vkernel.core.estimate import Estimate
from vkernel.data.empirical import Empirical
from vkernel.process import VP
from vkernel.reproduce.page import Exhibit, Finding, Picture, Run, number
from vkernel.score.empirical import EmpiricalScore
from vkernel.score.noise import noise_fraction

__all__ = ["Sizes", "Study", "exhibit"]

MEMORY = 1 << 28  # fixed, so that blocks, and with them the rounding, are the same everywhere
STRIP = (0.0, 0.25, 0.5, 0.75, 1.0)
NOISY, BARE = "with noise", "on the bare line"


@dataclass(frozen=True)
class Sizes:
    """How fine and how often: the lowest time (below it one training image explains every input, but for seams too
    thin to draw), number of times, places λ without and with noise, draws of z there, pairs, draws of z for each pair,
    and draws of x for ρ."""

    lowest: float
    levels: int
    fine: int
    places: int
    draws: int
    pairs: int
    pair_draws: int
    queries: int


class Study:
    """The computations, all in float64, with streams that depend on the seed and their purpose alone."""

    def __init__(self, run: Run, name: str, data: Empirical, labels: Tensor, sizes: Sizes) -> None:
        self.run, self.name, self.data, self.labels, self.sizes = run, name, data, labels, sizes
        self.process = VP()
        self.score = EmpiricalScore(data, self.process, memory=MEMORY)
        ends = math.log10(sizes.lowest), math.log10(self.process.T)
        self.t = torch.logspace(*ends, sizes.levels, dtype=torch.float64).clamp_max(self.process.T)
        self.fine, self.places = (
            torch.linspace(-0.25, 1.25, k, dtype=torch.float64) for k in (sizes.fine, sizes.places)
        )
        self.pairs = self._random_pairs()

    def stream(self, purpose: str, member: int = 0) -> torch.Generator:
        return rng.stream(self.run.seed, f"reproduce/{self.name}/{purpose}", member)

    def nearest(self) -> tuple[int, int, float]:
        """The nearest two images of different class, and their distance."""
        rows = self.data.rows(0, self.data.n)
        best = (0, 0, math.inf)
        for start in range(0, self.data.n, 512):
            distance = torch.cdist(rows[start : start + 512], rows)
            distance[self.labels[start : start + 512, None] == self.labels] = math.inf
            low, at = distance.min(1)
            i = int(low.argmin())
            if float(low[i]) < best[2]:
                best = (start + i, int(at[i]), float(low[i]))
        a, b, _ = best
        return a, b, float((rows[a].double() - rows[b].double()).norm())

    def fractions(self) -> tuple[Estimate, int]:
        """ρ at every time, and the index of the greatest."""
        parts = []
        for k, t in enumerate(self.t):
            parts.append(noise_fraction(self.score, self.process, float(t), self.sizes.queries, self.stream("rho", k)))
            self.run.step(0.1 / len(self.t))
        fields = ([getattr(p, f) for p in parts] for f in ("value", "se", "low", "high"))
        rho = Estimate(*(torch.tensor(f, dtype=torch.float64) for f in fields))
        return rho, int(rho.value.argmax())

    def noise(self, x: Tensor, t: Tensor) -> Tensor:
        """sigma² tr C / d."""
        return self.score.covariance(x, t).trace() * (self.process.S(t) / self.data.d)

    def line(self, a: int, b: int) -> tuple[Tensor, Estimate]:
        """Without noise (t, fine λ); with noise (t, λ), the mean over draws of z of which every place has its own."""
        bare, path = self._path(a, b, self.fine), self._path(a, b, self.places)
        z = torch.randn((self.sizes.draws, *path.shape), generator=self.stream("line"), dtype=torch.float64)
        clean, noisy = [], []
        for t in self.t:
            clean.append(self.noise(self.process.alpha(t) * bare, t))
            noisy.append(self.noise(self.process.alpha(t) * path + self.process.sigma(t) * z, t))
            self.run.step(0.4 / len(self.t))
        return torch.stack(clean), Estimate.of_mean(torch.stack(noisy, 1))

    def ratios(self, chosen: int) -> tuple[list[int], dict[str, Tensor], Tensor]:
        """Around the chosen time: indices of times; there the mean ratio and its interval, (3, t), with noise and
        without; and at the chosen time, with noise, the ratio of every pair."""
        near = (self.t / self.t[chosen]).log2().abs() < 1.05
        levels = [int(k) for k in near.nonzero().flatten() if (int(k) - chosen) % 2 == 0]
        a, b = (self.data.images(self.pairs[:, side]).double() for side in (0, 1))
        places = torch.stack([a, (a + b) / 2, b])
        z = torch.randn((self.sizes.pair_draws, 1, *a.shape), generator=self.stream("pair noise"), dtype=torch.float64)
        logs: dict[str, list[Tensor]] = {NOISY: [], BARE: []}
        for k in levels:
            x = self.process.alpha(self.t[k]) * places
            for label, queries in ((NOISY, x + self.process.sigma(self.t[k]) * z), (BARE, x[None])):
                logs[label].append(_log_ratio(self.noise(queries, self.t[k])))
            self.run.step(0.35 / len(levels))
        curves = {label: _geometric(torch.stack(values, 1)) for label, values in logs.items()}
        return levels, curves, logs[NOISY][levels.index(chosen)].exp()

    def profiles(self, chosen: int) -> list[int]:
        """Four times: the chosen one, and about 1/√2, a half and a quarter of it."""
        wanted = [float(self.t[chosen]) / k for k in (4, 2, 2**0.5, 1)]
        return sorted({int((self.t.log() - math.log(w)).abs().argmin()) for w in wanted})

    def strip(self, a: int, b: int, chosen: int) -> tuple[Tensor, Tensor]:
        """The images at the places STRIP, without noise and with one draw of it at the chosen time."""
        path = self._path(a, b, torch.tensor(STRIP, dtype=torch.float64))
        return path, self.process.perturb(path, float(self.t[chosen]), generator=self.stream("strip"))

    def _path(self, a: int, b: int, lam: Tensor) -> Tensor:
        first, second = self.data.images([a, b]).double()
        weight = lam.reshape(-1, *(1,) * len(self.data.shape))
        return (1 - weight) * first + weight * second

    def _random_pairs(self) -> Tensor:
        """Disjoint pairs of different class, in random order."""
        order = torch.randperm(self.data.n, generator=self.stream("pairs"))
        both = order[: self.data.n // 2 * 2].reshape(-1, 2)
        return both[self.labels[both[:, 0]] != self.labels[both[:, 1]]][: self.sizes.pairs]


def _log_ratio(noise: Tensor) -> Tensor:
    """log of the middle over the mean of the ends, ``(draws, 3, pairs)`` to ``(pairs,)``; NaN where the ends underflow.

    The logarithm of a mean over K draws is off by O(1/K); Quenouille's jackknife leaves O(1/K²).
    """
    k, total = len(noise), noise.sum(0)
    logs = [_log(total)]
    if k > 1:
        logs = [k * logs[0], -(k - 1) * _log(total - noise).mean(0)]
    return sum(logs, torch.zeros_like(logs[0]))


def _log(noise: Tensor) -> Tensor:
    ends = (noise[..., 0, :] + noise[..., 2, :]) / 2
    return torch.where(ends > 0, (noise[..., 1, :] / ends.clamp_min(1e-300)).log(), torch.nan)


def _geometric(logs: Tensor) -> Tensor:
    """The geometric mean over pairs and the ends of its interval, ``(pairs, t)`` to ``(3, t)``."""
    mean = Estimate.of_mean(logs)
    return torch.stack([mean.value, mean.low, mean.high]).exp()


def exhibit(run: Run, name: str, title: str, kind: str, data: Empirical, labels: Tensor, sizes: Sizes) -> Exhibit:
    """The exhibit for any labelled images; ``kind`` is their plural."""
    study = Study(run, name, data, labels, sizes)
    a, b, distance = study.nearest()
    rho, chosen = study.fractions()
    clean, noisy = study.line(a, b)
    levels, curves, ratios = study.ratios(chosen)
    best, bare = ([float(v) for v in curves[label][:, levels.index(chosen)]] for label in (NOISY, BARE))
    t = study.t
    saved = run.arrays(
        name,
        pair=[a, b],
        pair_labels=labels[[a, b]],
        pair_distance=distance,
        t=t,
        lam_clean=study.fine,
        clean=clean,
        lam=study.places,
        noisy=noisy.value,
        noisy_se=noisy.se,
        rho=rho.value,
        rho_se=rho.se,
        chosen_t=t[chosen],
        ratio_t=t[levels],
        ratio_noisy=curves[NOISY],
        ratio_clean=curves[BARE],
        ratio_pairs=study.pairs,
        ratio_at_chosen=ratios,
        ratio=best,
    )
    classes = f"{int(labels[a])} and {int(labels[b])}"
    pictures = (
        _maps(run, study, (a, b), chosen, clean, noisy, classes),
        _ratio_picture(run, study, levels, curves, ratios, best, float(t[chosen])),
    )
    return Exhibit(
        name=name,
        title=title,
        pictures=pictures,
        data=saved,
        sizes=f"{data.n:,} images of {data.d:,} numbers in [-1, 1]; the paper's VP; {len(t)} times from "
        f"{float(t[0]):g} to {float(t[-1]):g}; {sizes.draws} draws of z on the line, {sizes.pair_draws} for each pair.",
        opening=(
            "Figure 1 needs a plane. In image space one can walk instead, from one training image to another, and ask "
            "at each place λ and each noise level t how noisy the target is. At λ = 0 and λ = 1 are images "
            f"{a} and {b} of the set (classes {classes}): of all pairs of different class the nearest, at distance "
            f"{distance:.2f}.",
        ),
        finding=_finding(kind, best, bare, len(ratios), float(t[chosen]), rho, chosen),
    )


def _finding(
    kind: str, best: list[float], bare: list[float], pairs: int, t: float, rho: Estimate, chosen: int
) -> Finding:
    if best[1] > 1:
        verdict = (
            f"The interval lies above 1: the target is noisier in the gaps between {kind}, where the paper expects a "
            "model to generalize, than at the training images. A ratio below 1 would have said the opposite."
        )
    elif best[2] < 1:
        verdict = (
            f"The interval lies below 1: the target is noisier at the {kind} than in the gaps between them, against "
            "what Figure 1 suggests."
        )
    else:
        verdict = "The interval holds 1: these pairs show no difference between the gaps and the images themselves."
    return Finding(
        number=f"{number(best[0])} times",
        interval=f"95 % interval {number(best[1])} to {number(best[2])}",
        words=(
            f"The variance of the target, tr C, halfway between two {kind} of different class, as a multiple of what "
            f"it is at the {kind} themselves: geometric mean over {pairs} random pairs (no image twice), with noise, "
            f"at t = {t:.3g}. At this noise level the noisy share of the set's target is greatest, "
            f"ρ = {number(float(rho.value[chosen]))} ± {number(float(rho.se[chosen]), 2)}; "
            "the interval is over pairs, at this t.",
            f"{verdict} Without noise, on the bare line, the same ratio is {number(bare[0])} "
            f"({number(bare[1])} to {number(bare[2])}).",
        ),
    )


def _maps(
    run: Run, study: Study, pair: tuple[int, int], chosen: int, clean: Tensor, noisy: Estimate, classes: str
) -> Picture:
    t, sizes, profiles = study.t, study.sizes, study.profiles(chosen)
    strips = study.strip(*pair, chosen)
    first = profiles[0]

    def three(values: Tensor, lam: Tensor, k: int) -> str:
        a, middle, b = (number(float(values[k, int((lam - at).abs().argmin())]), 2) for at in (0.0, 0.5, 1.0))
        return f"{a} at the one image, {middle} halfway, {b} at the other"

    def peak(values: Tensor, lam: Tensor) -> str:
        return f"{number(float(values.max()))}, at λ = {float(lam[int(values.amax(0).argmax())]):.2f}"

    return run.picture(
        study.name,
        lambda: plots.line_maps(
            t,
            study.fine,
            clean,
            study.places,
            noisy.value,
            noisy.se,
            at=STRIP,
            strip_clean=strips[0],
            strip_noisy=strips[1],
            profiles=profiles,
            titles=(
                "On the line itself",
                f"With noise: mean of {sizes.draws} draws (images: one draw, t = {float(t[chosen]):.3g})",
            ),
        ),
        alt="Two heat maps of σ² tr C / d over the place λ on the line between two images and the noise level t, "
        f"without noise and with it; the images are of classes {classes}. Above the maps are images on the line, below "
        "them profiles along λ at four times. Without noise the greatest value is "
        f"{peak(clean, study.fine)}; with noise {peak(noisy.value, study.places)}.",
        caption=(
            "Colour is σ² tr C / d on a logarithmic scale; its mean over training inputs is ρ(t). Left, on the line "
            f"itself, at t = {float(t[first]):.3g}: {three(clean, study.fine, first)}. The boundary between the two "
            "images is a seam from which C falls off exponentially; dark means that one training image alone explains "
            "the input.",
            "Training never meets the bare line: its inputs carry noise, which points in all directions and by itself "
            f"decides which image is nearer. Right, with that noise, at the same t: "
            f"{three(noisy.value, study.places, first)}; at t = {float(t[chosen]):.3g}, where the set's target is "
            f"noisiest: {three(noisy.value, study.places, chosen)}. Bands are 95 % intervals over draws of the noise.",
        ),
    )


def _ratio_picture(
    run: Run, study: Study, levels: list[int], curves: dict[str, Tensor], ratios: Tensor, best: list[float], t: float
) -> Picture:
    near = [k for k in range(len(levels)) if abs(float(study.t[levels[k]]) / t - 1) < 0.5]
    steps = [f"{number(float(curves[NOISY][0, k]))} at t = {float(study.t[levels[k]]):.3g}" for k in near]
    picture = run.picture(
        f"{study.name}_ratio",
        lambda: plots.ratio_curve(study.t[levels], curves, ratios, best[1], best[2], t),
        alt="Left: the ratio of tr C at the midpoint to tr C at the ends against t, with noise and on the bare line. "
        f"Right: histogram of the ratio at t = {t:.3g} over {len(ratios)} pairs, from {number(float(ratios.min()))} to "
        f"{number(float(ratios.max()))}, geometric mean {number(best[0])}.",
        caption=(
            f"Left: the ratio depends on t. With noise it is {', '.join(steps)}. Right: at t = {t:.3g}, with noise, "
            f"every pair; {int((ratios > 1).sum())} of {len(ratios)} are above 1.",
        ),
    )
    run.step(0.15)
    return picture
