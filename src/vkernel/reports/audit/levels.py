r"""What a network learned, noise level by noise level: as good as the ideal, better on its own images, wrong where?

At each time t, images :math:`x_0` and noise give :math:`x = \alpha x_0 + \sigma\,\mathrm{noise}`. With
:math:`\widehat{\mathrm{noise}} = -\sigma \hat s(x,t)`, the **error** of a score on a set of images is

.. math:: E\,|\widehat{\mathrm{noise}} - \mathrm{noise}|^2 / d ,

for the model and for the **ideal** score :math:`s` of the training set (an EmpiricalScore), which no score beats on
training images, and which remembers them: on test images it fails at little noise. Model and ideal see the same noise.
The **gap** is the model's error on test images less that on training images; of a model that never saw either it is 0
on average. Where the model parts from the ideal, :math:`e = \hat s - s` at noised training images has

.. math:: \mathrm{distance} = \sigma^2 E|e|^2/d, \qquad
          \mathrm{rayleigh} = E\,\frac{d\; e^T C e}{|e|^2 \operatorname{tr} C},

with :math:`C(x,t)` the covariance of the training targets (docs/theory.md, §2). The Rayleigh quotient is 1 for errors
indifferent to C, larger for errors along the directions in which targets vary, d at most. It has no meaning where
:math:`e = 0`, or where C underflows (the noisy image is of one training image beyond all doubt): such draws are left
out, ``rayleigh_count`` images remain, and with none the value is NaN.

Values are averaged over ``draws`` of noise first; standard errors and 95 % intervals (Student's law) are over images,
taken as independent. Training and test images have independent noise, so that the gap has :math:`\mathrm{se}^2 =
\mathrm{se}_{test}^2 + \mathrm{se}_{train}^2` (and Welch's degrees of freedom). Noise belongs to (seed, set, level,
draw, image): ``batch`` changes no number but by rounding. Levels are even in :math:`\log(\sigma/\alpha)` from .05 s to
10 s, as far as the process reaches, where :math:`s^2` is the data's variance per coordinate.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vkernel.core import rng
from vkernel.core.checks import is_whole
from vkernel.core.covariance import Covariance
from vkernel.core.errors import InputError, require
from vkernel.core.estimate import Estimate, student_quantile
from vkernel.core.progress import Reporter
from vkernel.data.empirical import Empirical
from vkernel.process import Anisotropic, Process
from vkernel.score.base import Score
from vkernel.score.empirical import EmpiricalScore

if TYPE_CHECKING:
    import xarray

__all__ = ["Noised", "levels"]

LOW, HIGH, COUNT = 0.05, 10.0, 8  # the default levels, sigma/(alpha s)
_TINY = 1e-280  # traces below have lost digits to underflow
ENDS = {"value": "", "se": "standard error: ", "low": "low end (95 %): ", "high": "high end (95 %): "}
_MEANS = {
    "train": "squared error per coordinate of the model's noise on training images",
    "test": "squared error per coordinate of the model's noise on test images",
    "ideal_train": "squared error per coordinate of the ideal noise on training images",
    "ideal_test": "squared error per coordinate of the ideal noise on test images",
    "gap": "squared error per coordinate of the model's noise, test less training images",
    "distance": "squared distance per coordinate of the model's score from the ideal one, times sigma²",
    "rayleigh": "Rayleigh quotient of the deviation against C; 1 is indifferent",
}


def levels(
    model: Score | Sequence[Score],
    data: Empirical | Tensor,
    test: Empirical | Tensor | None = None,
    *,
    times: Any = None,
    images: int = 256,
    draws: int = 2,
    seed: int = 0,
    batch: int = 64,
    exact: EmpiricalScore | None = None,
    step: Reporter | None = None,
) -> xarray.Dataset:
    """Errors of a model and of the ideal score at each noise level, along ``t``; little noise first.

    ``model`` is a score with its ``process`` (a Checkpoint, an EmpiricalScore, a member of an ensemble); ``data`` is
    what it was trained on and ``test`` what it was not, both in its pixel range. At most ``images`` of each are used.
    Each of ``train``, ``ideal_train``, ``distance``, ``rayleigh``, and with ``test`` also ``test``, ``ideal_test``,
    ``gap``, comes with ``…_se``, ``…_low`` and ``…_high``. Several models of one process see the same noisy images
    and share one ideal score, which is most of the work: the result then has a first axis ``model``. ``exact`` is that
    ideal score, if it was made already; ``step`` is told of each level that is done.
    """
    import xarray

    several = isinstance(model, Sequence)
    models: list[Score] = list(model) if isinstance(model, Sequence) else [model]
    require(models, "There is no model to audit.")
    process, data, held = opened(models[0], data, test)
    for other in models[1:]:
        require(
            alike(opened(other, data, test)[0], process),
            f"Models that are compared need one process; got {process!r} and {other.process!r}.",  # type: ignore[attr-defined]
        )
    whole(images=(images, 2), draws=(draws, 1), batch=(batch, 1))
    t, exact = times_of(models[0], data, times), exact or EmpiricalScore(data, process)
    sets: dict[str, Noised] = {}
    for name, points in {"train": data, **({} if held is None else {"test": held})}.items():
        g = rng.stream(seed, f"audit of levels, {name}")
        x0 = points.images(chosen(points, images, g)).to(data.dtype)
        sets[name] = Noised(process, t, x0, rng.keys((len(t), draws, len(x0)), g, data.device))
    curves: dict[str, list[list[Estimate]]] = {}  # by model, by level
    counts: list[list[int]] = [[] for _ in models]
    for level in range(len(t)):
        found = {name: value for key in sets for name, value in _errors(models, exact, sets[key], level, batch, key)}
        for m in range(len(models)):
            counts[m].append(int((~found["rayleigh"][m].isnan()).sum()))
            for name, value in found.items():
                curves.setdefault(name, [[] for _ in models])[m].append(_mean(value[m]))
            if "test" in sets:
                gap = _difference(found["test"][m], found["train"][m])
                curves.setdefault("gap", [[] for _ in models])[m].append(gap)
        if step is not None:
            step("errors by noise level")
    parts = []
    for m in range(len(models)):
        own = {
            k: v for name in _MEANS if name in curves for k, v in labelled(name, _MEANS[name], curves[name][m]).items()
        }
        own["rayleigh_count"] = ("t", counts[m], {"long_name": "images with a Rayleigh quotient", "units": "images"})
        attrs = {"draws": draws, "seed": seed, "n": data.n, "d": data.d}
        attrs |= {f"{key}_images": len(images.x0) for key, images in sets.items()}
        parts.append(xarray.Dataset(own, coordinates(process, t), attrs))
    if not several:
        return parts[0]
    names = [str(getattr(m, "name", k)) for k, m in enumerate(models)]
    return xarray.concat(
        parts, xarray.Variable("model", names, {"long_name": "model", "units": "1"}), combine_attrs="override"
    )


@dataclass(frozen=True)
class Noised:
    """Images ``(k, *shape)`` and the keys of their noise, ``(levels, draws, k)``, or ``(…, 1)`` if all share it."""

    process: Process
    times: Tensor
    x0: Tensor
    keys: Tensor

    def parts(self, level: int, batch: int) -> Iterator[tuple[int, slice, Tensor, Tensor]]:
        """(draw, which images, x in the type of the data, noise in float64) at one level, by chunks."""
        t = self.times[level]
        alpha, sigma = float(self.process.alpha(t)), float(self.process.sigma(t))
        coordinates = torch.arange(math.prod(self.x0.shape[1:]), device=self.x0.device)
        for start in range(0, len(self.x0), batch):
            part, x0 = slice(start, start + batch), self.x0[start : start + batch]
            for draw, key in enumerate(self.keys[level]):
                key = key if len(key) == 1 else key[part]
                noise = rng.normals(key[:, None], coordinates).reshape(-1, *x0.shape[1:]).expand(x0.shape)
                yield draw, part, (alpha * x0.double() + sigma * noise).to(x0.dtype), noise


def opened(model: Any, data: Any, test: Any) -> tuple[Process, Empirical, Empirical | None]:
    """The process of the model and the two sets; refuses what cannot be audited."""
    process = getattr(model, "process", None)
    require(
        callable(model) and isinstance(process, Process),
        f"An audit needs a score with its process, such as a Checkpoint or an EmpiricalScore, not {model!r}.",
    )
    require(not isinstance(process, Anisotropic), "Errors of predicted noise are defined for isotropic noise alone.")
    data = data if isinstance(data, Empirical) else Empirical(data)
    if test is not None:
        test = (test if isinstance(test, Empirical) else Empirical(test)).to(data.device)
        words = f"Training images have shape {data.shape} and test images {test.shape}; they must be alike."
        require(test.shape == data.shape, words)
    for name, points in (("training", data), ("test", test)):
        if points is not None and (points.weights > 0).sum() < 2:
            raise InputError(f"There is one {name} image; errors over images need two or more.")
    return process, data, test  # type: ignore[return-value]


def alike(a: Process, b: Process) -> bool:
    """Whether two processes have the same alpha and sigma all along."""
    if (a.eps, a.T) != (b.eps, b.T):
        return False
    t = torch.linspace(a.eps, a.T, 33, dtype=torch.float64).clamp(a.eps, a.T)
    return bool(torch.allclose(a.alpha(t), b.alpha(t), 1e-6, 0) and torch.allclose(a.sigma(t), b.sigma(t), 1e-6, 0))


def whole(**given: tuple[Any, int]) -> None:
    """Refuse what is not a whole number, or is less than the least: ``name=(number, least)``."""
    for name, (number, least) in given.items():
        require(
            is_whole(number) and number >= least, f"{name} must be a whole number, {least} or more, not {number!r}."
        )


def times_of(model: Any, data: Empirical, times: Any = None) -> Tensor:
    """The times of an audit, ascending and distinct; for networks told an index, indices."""
    process: Process = model.process
    if times is None:
        ends = torch.tensor([process.eps, process.T], dtype=torch.float64)
        reach, s = (process.sigma(ends) / process.alpha(ends)).tolist(), data.spread / math.sqrt(data.d)
        low, high = max(LOW * s, reach[0]), min(HIGH * s, reach[1])
        require(low < high, f"{process!r} does not reach the scale of the data, {s:.3g} a pixel; give times=.")
        ratios = torch.logspace(math.log10(low), math.log10(high), COUNT, dtype=torch.float64)
        t = process.time(ratios.clamp(low, high))
    else:
        try:
            t = torch.as_tensor(times, dtype=torch.float64).cpu().reshape(-1)
        except (TypeError, ValueError, RuntimeError):
            raise InputError(f"times must be numbers, not {times!r}.") from None
        require(len(t) > 0, "times is empty; an audit needs one noise level or more.")
        t = process.check(t)
    t = model.at(t) if callable(getattr(model, "at", None)) else t
    require(bool((process.sigma(t) > 0).all()), "There is no noise at one of these times; choose larger ones.")
    return t.unique()


def chosen(data: Empirical, k: int, generator: torch.Generator, distinct: bool = False) -> Tensor:
    """Indices of ``k`` images, distinct ones if weights are equal or it is asked; else by weight, with replacement."""
    weights, positive = data.weights.cpu(), data.weights.cpu().nonzero().flatten()
    if distinct or bool((weights[positive] == weights.max()).all()):
        return positive[torch.randperm(len(positive), generator=generator)[:k]]
    return torch.multinomial(weights, k, replacement=True, generator=generator)


def predicted(model: Score, x: Tensor, t: Tensor, process: Process) -> Tensor:
    """The noise that a score predicts, like x but in float64; refuses what is no score of x."""
    with torch.no_grad():
        s = model(x, t)
    good = isinstance(s, Tensor) and s.shape == x.shape
    require(good, f"The model must return a tensor like x, {tuple(x.shape)}, not {tuple(getattr(s, 'shape', ()))}.")
    require(bool(s.isfinite().all()), f"The model returned NaN or infinite values on noisy images at t = {float(t):g}.")
    return -float(process.sigma(t)) * s.to(x.device, torch.float64)


def mean_square(a: Tensor) -> Tensor:
    """The mean square over coordinates, one for each image."""
    return a.square().flatten(1).mean(-1)


def _errors(
    models: list[Score], exact: EmpiricalScore, images: Noised, level: int, batch: int, key: str
) -> Iterator[tuple[str, Tensor]]:
    """Each quantity by name, ``(models, images)``, averaged over draws; of training images there are more."""
    names = [key, f"ideal_{key}", *(("distance", "rayleigh") if key == "train" else ())]
    shape, t = (len(names), len(models), *images.keys.shape[1:]), images.times[level]
    found = images.x0.new_zeros(shape, dtype=torch.float64)
    for draw, part, x, noise in images.parts(level, batch):
        if key == "train":
            s, cov = exact.with_covariance(x.double(), t)
            sigma = float(images.process.sigma(t))
            ideal, rounding = -sigma * s, 4 * torch.finfo(x.dtype).eps * x.double().flatten(1).norm(dim=-1) / sigma
        else:
            ideal = predicted(exact, x, t, images.process)
        for m, model in enumerate(models):
            learned = predicted(model, x, t, images.process)
            found[0, m, draw, part], found[1, m, draw, part] = mean_square(learned - noise), mean_square(ideal - noise)
            if key == "train":
                found[2, m, draw, part] = mean_square(learned - ideal)
                found[3, m, draw, part] = _rayleigh(cov, learned - ideal, rounding)
    return zip(names, found.nanmean(2).cpu(), strict=True)


def _rayleigh(cov: Covariance, e: Tensor, rounding: Tensor) -> Tensor:
    """The quotient for each image, NaN where C vanishes or e is no more than rounding; any multiple of e will do."""
    size, trace = e.flatten(1).norm(dim=-1), cov.trace()
    unit = e / size.clamp_min(_TINY).reshape(-1, *(1,) * (e.ndim - 1))
    quotient = (unit * (cov @ unit)).flatten(1).sum(-1) * cov.dim / trace
    return torch.where((size > rounding) & (trace > _TINY), quotient, math.nan)


def _mean(values: Tensor) -> Estimate:
    """The mean of what is a number."""
    kept = values[~values.isnan()]
    return Estimate.of_mean(kept) if len(kept) else Estimate(math.nan, math.nan, math.nan, math.nan)


def _difference(a: Tensor, b: Tensor) -> Estimate:
    """The mean of a less that of b, with Welch's interval."""
    (va, da), (vb, db) = ((float(x.var()) / len(x), len(x) - 1) for x in (a, b))
    value, se, weight = float(a.mean() - b.mean()), math.sqrt(va + vb), va**2 / da + vb**2 / db
    half = student_quantile(int((va + vb) ** 2 / weight)) * se if weight > 0 else 0.0
    return Estimate(value, se, value - half, value + half)


def labelled(name: str, words: str, curve: list[Estimate]) -> dict[str, Any]:
    """Four columns along t: the value as ``name``, and its errors as ``name_se``, ``name_low``, ``name_high``."""
    label = {part: {"long_name": start + words, "units": "1"} for part, start in ENDS.items()}
    values = {part: ("t", [getattr(e, part) for e in curve], label[part]) for part in ENDS}
    return {name if part == "value" else f"{name}_{part}": value for part, value in values.items()}


def coordinates(process: Process, t: Tensor) -> dict[str, Any]:
    """t and sigma/alpha, labelled."""
    ratio = ("t", (process.sigma(t) / process.alpha(t)).tolist(), {"long_name": "sigma/alpha", "units": "of the data"})
    return {"t": ("t", t.tolist(), {"long_name": "time of the process", "units": "1"}), "ratio": ratio}
