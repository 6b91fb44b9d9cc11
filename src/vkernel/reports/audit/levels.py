r"""Denoising errors at each noise level, of a model and of the exact score, and what they reveal about membership.

At each time t, images :math:`x_0` and noise give :math:`x = \alpha x_0 + \sigma\,\mathrm{noise}`. With
:math:`\widehat{\mathrm{noise}} = -\sigma \hat s(x,t)`, the **error** of a score on a set of images is :math:`E\,
|\widehat{\mathrm{noise}} - \mathrm{noise}|^2 / d`, for the model and for the **ideal** score :math:`s` of the training
set (an EmpiricalScore) on the same noise. No score has a smaller error than the ideal one on training images; on test
images it fails at low noise. The **gap** is the model's error on test images less that on training images; its mean is
0 for a model that has seen neither. The deviation :math:`e = \hat s - s` at noisy training images has

.. math:: \mathrm{distance} = \sigma^2 E|e|^2/d, \qquad
          \mathrm{rayleigh} = E\,\frac{d\; e^T C e}{|e|^2 \operatorname{tr} C},

with :math:`C(x,t)` the covariance of the training targets (docs/theory.md, §2). The Rayleigh quotient is 1 for errors
independent of C, larger for errors along the directions in which targets vary, and d at most. It is undefined where
:math:`e = 0`, or where C underflows (one training image has all posterior weight): such draws are left out,
``rayleigh_count`` images remain, and with none the value is NaN.

Values are averaged over ``draws`` of noise first; standard errors and 95 % intervals (Student's law; Welch's for the
gap) are over images, taken as independent. Noise belongs to (seed, set, level, draw, image): ``batch`` changes results
by rounding only. Levels are even in :math:`\log(\sigma/\alpha)` from .05 s to 10 s, as far as the process reaches, with
:math:`s^2` the data's variance per coordinate.

**Membership.** An image's **loss** is its error averaged over draws and noise levels. All images of both sets get the
same noise, so that given it the losses of images are independent. Membership is measured by

.. math:: \mathrm{AUC} = P(\text{loss of a training image} < \text{loss of a test image}),

1 for a network that memorises its training images, .5 for one that treats them like any others
(:func:`vkernel.core.estimate.auc`). Intervals of single levels hold one at a time: among 8 levels of a network without
memory one may well miss .5. The AUC responds to any other difference between the laws of the two sets too."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vkernel.adapters.checkpoints import Checkpoints
from vkernel.core import rng
from vkernel.core.checks import check_whole
from vkernel.core.covariance import Covariance
from vkernel.core.errors import InputError, require
from vkernel.core.estimate import TINY, Estimate, auc, auc_p, difference_of_means, stacked
from vkernel.core.progress import Progress, progress as report_progress
from vkernel.data.empirical import Empirical
from vkernel.process import Anisotropic, Process
from vkernel.reports.html import read
from vkernel.sample.scores import Scores
from vkernel.score import EmpiricalScore, Score, Wrapped
from vkernel.score.base import check_score

if TYPE_CHECKING:
    import xarray

Points = Empirical | Tensor
Times = Sequence[float] | Tensor | None
LOW, HIGH, COUNT = 0.05, 10.0, 8  # the default levels, sigma/(alpha s)
TEXTS = tomllib.loads(read("audit.toml"))


def levels(
    model: Score | Sequence[Score],
    data: Points,
    test: Points | None = None,
    *,
    times: Times = None,
    images: int = 256,
    draws: int = 2,
    seed: int = 0,
    batch: int = 64,
    exact: EmpiricalScore | None = None,
    progress: Progress = False,
) -> xarray.Dataset:
    """Measure errors of a model and of the ideal score at each noise level, along ``t``, in ascending order.

    ``train``, ``ideal_train``, ``distance``, ``rayleigh`` and, with ``test``, ``test``, ``ideal_test`` and ``gap`` have
    their ``…_se``, ``…_low`` and ``…_high``. Several models of one process see the same noisy images and share one
    ideal score (``exact``); the result has a first axis ``model``. At most ``images`` of each set are used."""
    models = list(model) if isinstance(model, Sequence) else [model]
    require(models, "There is no model to audit.")
    process, data, held = check_inputs(models[0], data, test, images=images, draws=draws, batch=batch)
    for other in models[1:]:
        own = check_inputs(other, data, test)[0]
        require(same_process(own, process), f"Models must share one process; got {process!r} and {own!r}.")
    t, exact = audit_times(models[0], data, times), exact or EmpiricalScore(data, process)
    sets: dict[str, NoisyImages] = {}
    for key, points in {"train": data, **({} if held is None else {"test": held})}.items():
        g = rng.stream(seed, f"audit of levels, {key}")
        x0 = points[points.choose(images, g)].to(data.dtype)
        sets[key] = NoisyImages(process, t, x0, rng.keys((len(t), draws, len(x0)), g, data.device))
    found: dict[str, list[Tensor]] = {}
    with report_progress(len(t), progress) as step:
        for level in range(len(t)):
            for key, noisy in sets.items():
                for name, value in _errors(models, exact, noisy, level, batch, key):
                    found.setdefault(name, []).append(value)
            step("errors by noise level")
    each = {name: torch.stack(values, 1) for name, values in found.items()}  # (models, levels, images)
    curves = {name: _over_rows(mean_of_finite, values) for name, values in each.items()}
    if held is not None:
        curves["gap"] = _over_rows(difference_of_means, each["test"], each["train"])
    label = {"long_name": "images with a Rayleigh quotient", "units": "images"}
    count = {"rayleigh_count": (("model", "t"), (~each["rayleigh"].isnan()).sum(-1).numpy(), label)}
    names = [m.name if isinstance(m, Wrapped) else str(k) for k, m in enumerate(models)]
    coords = {**coordinates(process, t), "model": ("model", names, {"long_name": "model", "units": "1"})}
    attrs = {"draws": draws, "seed": seed, "n": data.n, "d": data.d}
    attrs |= {f"{key}_images": len(noisy.x0) for key, noisy in sets.items()}
    found_curves = dataset(variables(curves, "model", "t") | count, coords, attrs)
    return found_curves if isinstance(model, Sequence) else found_curves.isel(model=0, drop=True)


def _errors(
    models: list[Score], exact: EmpiricalScore, images: NoisyImages, level: int, batch: int, key: str
) -> Iterator[tuple[str, Tensor]]:
    """Return each quantity by name, ``(models, images)``, averaged over draws; training images have two more."""
    names, t = [key, f"ideal_{key}", *(("distance", "rayleigh") if key == "train" else ())], images.times[level]
    found = images.x0.new_zeros((len(names), len(models), *images.keys.shape[1:]), dtype=torch.float64)
    for draw, part, x, noise in images.parts(level, batch):
        if key == "train":
            s, cov = exact.with_covariance(x.double(), t)
            ideal = -float(images.process.sigma(t)) * s
        else:
            ideal, cov = predicted_noise(exact, x, t), None
        for m, model in enumerate(models):
            learned = predicted_noise(model, x, t)
            values = [mean_square(learned - noise), mean_square(ideal - noise)]
            if cov is not None:
                rounding = 4 * torch.finfo(x.dtype).eps * x.double().flatten(1).norm(dim=-1)
                rayleigh = _rayleigh(cov, learned - ideal, rounding / float(images.process.sigma(t)))
                values += [mean_square(learned - ideal), rayleigh]
            found[:, m, draw, part] = torch.stack(values)
    return zip(names, found.nanmean(2).cpu(), strict=True)


def _rayleigh(cov: Covariance, e: Tensor, rounding: Tensor) -> Tensor:
    """Return the quotient of each image, NaN where C vanishes or e is rounding; multiples of e have the same."""
    size, trace = e.flatten(1).norm(dim=-1), cov.trace()
    unit = e / size.clamp_min(TINY).reshape(-1, *(1,) * (e.ndim - 1))
    quotient = (unit * (cov @ unit)).flatten(1).sum(-1) * cov.dim / trace
    return torch.where((size > rounding) & (trace > TINY), quotient, math.nan)


@dataclass(frozen=True)
class Membership:
    """The AUC over all noise levels and (``by_level``) at each of them; ``train`` and ``test`` are the losses."""

    auc: Estimate
    process: Process = field(repr=False)
    t: Tensor
    by_level: Estimate[Tensor]
    train: Tensor = field(repr=False)  # (levels, images)
    test: Tensor = field(repr=False)

    @property
    def chance(self) -> float:
        """The chance of an AUC as large as this if training and test images could be exchanged."""
        return auc_p(self.auc.value, self.train.shape[1], self.test.shape[1])

    def to_dataset(self) -> xarray.Dataset:
        """Return the AUC of each level along ``t`` (``auc_level``) and that of all levels as a scalar (``auc``)."""
        columns = variables({"auc_level": self.by_level}, "t") | variables({"auc": self.auc})
        attrs = {"train_images": self.train.shape[1], "test_images": self.test.shape[1]}
        return dataset(columns, coordinates(self.process, self.t), attrs)


def membership(
    model: Score,
    data: Points,
    test: Points,
    *,
    times: Times = None,
    images: int = 512,
    draws: int = 4,
    seed: int = 0,
    batch: int = 64,
) -> Membership:
    """Measure how well a lower loss separates training images (``data``) from ``test`` images.

    At most ``images`` of each set are drawn without replacement, equally likely whatever their weights (if not zero).
    """
    process, data, held = check_inputs(model, data, test, images=images, draws=draws, batch=batch)
    assert held is not None
    t, g, losses = audit_times(model, data, times), rng.stream(seed, "audit of membership"), []
    keys = rng.keys((len(t), draws, 1), g, data.device)
    for points in (data, held):
        x0 = points[points.choose(images, g, distinct=True)].to(data.dtype)
        noisy, loss = NoisyImages(process, t, x0, keys), torch.zeros(len(t), len(x0), dtype=torch.float64)
        for level in range(len(t)):
            for _, part, x, noise in noisy.parts(level, batch):
                loss[level, part] += mean_square(predicted_noise(model, x, t[level]) - noise).cpu() / draws
        losses.append(loss)
    train, other = losses
    return Membership(auc(train.mean(0), other.mean(0)), process, t, auc(train, other), train, other)


@dataclass(frozen=True)
class NoisyImages:
    """Images ``(k, *shape)`` and the keys of their noise, ``(levels, draws, k)``, or ``(…, 1)`` if all share it."""

    process: Process
    times: Tensor
    x0: Tensor
    keys: Tensor

    def parts(self, level: int, batch: int) -> Iterator[tuple[int, slice, Tensor, Tensor]]:
        """Yield (draw, slice of images, x in the dtype of the data, noise in float64) at one level, by chunks."""
        t = self.times[level]
        alpha, sigma = float(self.process.alpha(t)), float(self.process.sigma(t))
        coordinates = torch.arange(math.prod(self.x0.shape[1:]), device=self.x0.device)
        for start in range(0, len(self.x0), batch):
            part, x0 = slice(start, start + batch), self.x0[start : start + batch]
            for draw, key in enumerate(self.keys[level]):
                key = key if len(key) == 1 else key[part]
                noise = rng.normals(key[:, None], coordinates).reshape(-1, *x0.shape[1:]).expand(x0.shape)
                yield draw, part, (alpha * x0.double() + sigma * noise).to(x0.dtype), noise


def check_inputs(
    model: Score | Scores, data: Points, test: Points | None = None, least: int = 2, **sizes: int
) -> tuple[Process, Empirical, Empirical | None]:
    """Return the process of the model and the two sets; refuse what cannot be audited, and fewer images than least."""
    process = (model if isinstance(model, Scores) else check_score(model, "An audit")).process
    require(not isinstance(process, Anisotropic), "Errors of predicted noise are defined for isotropic noise alone.")
    data = data if isinstance(data, Empirical) else Empirical(data)
    held = test if isinstance(test, Empirical | None) else Empirical(test)
    for name, points in {"training": data, "test": held or data}.items():
        same, several = points.shape == data.shape, (points.weights > 0).sum() >= 2
        require(same, f"Training images have shape {data.shape} and test images {points.shape}; they must be alike.")
        require(several, f"There is one {name} image; errors over images need two or more.")
    for name, size in sizes.items():
        check_whole(size, name, least if name == "images" else 1)
    return process, data, None if held is None else held.to(data.device)


def same_process(a: Process, b: Process) -> bool:
    """Return whether two processes have the same alpha and sigma at all times."""
    t, curves = torch.linspace(a.eps, a.T, 33).double().clamp(a.eps, a.T), ((a.alpha, b.alpha), (a.sigma, b.sigma))
    return (a.eps, a.T) == (b.eps, b.T) and all(torch.allclose(f(t), g(t), 1e-6, 0) for f, g in curves)


def audit_times(model: Score | Scores, data: Empirical, times: Times = None, count: int = COUNT) -> Tensor:
    """Return the times of an audit, by default ``count``, ascending and distinct; networks with an index input are
    evaluated at indices."""
    process = model.process
    if times is None:
        reach, s = process.ratios, data.spread / math.sqrt(data.d)
        low, high = max(LOW * s, reach[0]), min(HIGH * s, reach[1])
        require(low < high, f"{process!r} does not reach the scale of the data, {s:.3g} a pixel; give times=.")
        t = process.time(torch.logspace(math.log10(low), math.log10(high), count, dtype=torch.float64).clamp(low, high))
    else:
        try:
            t = torch.as_tensor(times, dtype=torch.float64).cpu().reshape(-1)
        except (TypeError, ValueError, RuntimeError):
            raise InputError(f"times must be numbers, not {times!r}.") from None
        require(len(t) > 0, "times is empty; an audit needs one noise level or more.")
        t = process.check(t)
    t = model.at(t) if isinstance(model, Wrapped | Checkpoints) else t
    require(bool((process.sigma(t) > 0).all()), "There is no noise at one of these times; choose larger ones.")
    return t.unique()


def predicted_noise(model: Score, x: Tensor, t: Tensor) -> Tensor:
    """Return the noise that a score predicts, like x but in float64."""
    with torch.no_grad():
        s = model(x, t)
    require(bool(s.isfinite().all()), f"The model returned NaN or infinite values on noisy images at t = {float(t):g}.")
    return -float(model.process.sigma(t)) * s.to(x.device, torch.float64)


def mean_square(a: Tensor) -> Tensor:
    """Return the mean square over coordinates, one for each image."""
    return a.square().flatten(1).mean(-1)


def mean_of_finite(values: Tensor) -> Estimate:
    """Estimate the mean of the finite values."""
    kept = values[values.isfinite()]
    return Estimate.of_mean(kept.double()) if len(kept) else Estimate.unknown()


def _over_rows(statistic: Callable[..., Estimate], *samples: Tensor) -> Estimate[Tensor]:
    """Return a statistic of the last axis, for each element of the first two."""
    rows = zip(*(s.flatten(0, 1) for s in samples), strict=True)
    return stacked([statistic(*row) for row in rows], tuple(samples[0].shape[:2]))


def dataset(columns: Mapping[str, object], coords: Mapping[str, object], attrs: Mapping[str, object]) -> xarray.Dataset:
    """Return labelled arrays; xarray is imported when the first result is made."""
    import xarray

    return xarray.Dataset(columns, coords, attrs)


def variables(
    estimates: Mapping[str, Estimate | Estimate[Tensor]], *dims: str, texts: Mapping[str, str] = TEXTS["variables"]
) -> dict[str, object]:
    """Return the variables ``name``, ``name_se``, ``name_low`` and ``name_high`` of a Dataset for each estimate;
    ``texts`` describe them."""
    ends = {"": "", "_se": "standard error: ", "_low": "low end (95 %): ", "_high": "high end (95 %): "}
    return {
        name + end: (dims, torch.as_tensor(v, dtype=torch.float64).numpy(), {"long_name": words + about, "units": "1"})
        for name, about in texts.items()
        if name in estimates
        for (end, words), v in zip(ends.items(), estimates[name].fields, strict=True)
    }


def coordinates(process: Process, t: Tensor) -> dict[str, object]:
    """Return t and sigma/alpha as coordinates of a Dataset."""
    ratio = ("t", (process.sigma(t) / process.alpha(t)).tolist(), {"long_name": "sigma/alpha", "units": "of the data"})
    return {"t": ("t", t.tolist(), {"long_name": "time of the process", "units": "1"}), "ratio": ratio}
