r"""Between two images: how noisy the target is there, and where the effective SDE ends.

**C along a line.** On the line :math:`x(\lambda, t) = \alpha_t\,[(1-\lambda)\,y_a + \lambda\,y_b]` between two training
images, and with the noise of training inputs, :math:`x + \sigma_t z`, averaged over draws of z, the maps show
:math:`\sigma^2\,\mathrm{tr}\,C / d`, whose mean over training inputs is the noise fraction :math:`\rho(t)`
(docs/theory.md, §2). The finding is, for random pairs of images of different class and at the noise level where
:math:`\rho` is greatest, the geometric mean of

.. math:: \frac{E_z\,\mathrm{tr}\,C(\text{midpoint} + \sigma z)}
               {\tfrac12\,[E_z\,\mathrm{tr}\,C(\alpha y_a + \sigma z) + E_z\,\mathrm{tr}\,C(\alpha y_b + \sigma z)]}

with a 95 % interval over pairs. Above 1, the target is noisier between images than at them.

**Ends of runs.** The PF-ODE of the exact score leads from a start :math:`x_T` to one training image. Runs of the
effective SDE with the naive kernel leave this path where the posterior is undecided between images (§4.4).
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from vkernel import kernels, plots, sample
from vkernel.core.errors import InputError
from vkernel.core.estimate import Estimate, leave_one_out
from vkernel.data import Empirical, digits, load
from vkernel.metrics import nearest
from vkernel.process import VP
from vkernel.reproduce.exhibit import MEMORY, Exhibit, Page, Run, Skip, one_thread, tensor
from vkernel.score import EmpiricalScore, noise_fraction

STRIP = (0.0, 0.25, 0.5, 0.75, 1.0)
EPS = 1e-3
NOISY, BARE = "with noise", "on the bare line"


def digits_line(run: Run) -> Exhibit:
    """Follow C along the line between two of scikit-learn's digits."""
    data = _digits()
    from sklearn.datasets import load_digits

    return line(run, "digits", data, torch.from_numpy(load_digits().target))


def cifar_line(run: Run) -> Exhibit:
    """Follow C along the line between two CIFAR-10 images, in 3,072 dimensions; coarser, to save time."""
    folder = _cifar()
    if folder is None:
        raise Skip("Set the environment variable VKERNEL_DATA to a folder that holds cifar10/ with its sheets.")
    try:
        data = load(folder)
        labels = _labels(folder / "labels.json", data.n)
    except InputError as error:
        raise Skip(str(error)) from error
    return line(run, "cifar", data, labels)


def _digits() -> Empirical:
    try:
        return digits()
    except InputError as error:
        raise Skip(str(error)) from error


def _cifar() -> Path | None:
    folder = Path(os.environ.get("VKERNEL_DATA", "")).expanduser() / "cifar10"
    return folder if "VKERNEL_DATA" in os.environ and folder.is_dir() else None


def _labels(path: Path, n: int) -> Tensor:
    """Read the classes of the training sheets, those numbered below 50, in order."""
    try:
        sheets = {int(number): classes for number, classes in json.loads(path.read_text()).items()}
        labels = torch.tensor([c for sheet in sorted(sheets) if sheet < 50 for c in sheets[sheet]])
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise InputError(f"{path} does not give the classes of the images: {error}.") from error
    if labels.shape != (n,):
        raise InputError(f"{path} has {labels.numel()} classes for {n} images.")
    return labels


def line(run: Run, key: str, data: Empirical, labels: Tensor) -> Exhibit:
    """Make the exhibit for labelled images, with the sizes ``key``."""
    process, sizes, name = VP(), run.sizes("line", key), f"{key}_line"
    score = EmpiricalScore(data, process, memory=MEMORY)
    ends = math.log10(sizes.lowest), math.log10(process.T)
    t = torch.logspace(*ends, sizes.levels, dtype=torch.float64).clamp_max(process.T)
    a, b, distance = closest_pair(data, labels)
    rho = []
    for k, time in enumerate(t.tolist()):
        rho.append(noise_fraction(score, process, time, sizes.queries, run.stream(f"{name}/rho", k)))
        run.step(0.1 / len(t))
    chosen = max(range(len(t)), key=lambda k: rho[k].value)
    fine, places = (torch.linspace(-0.25, 1.25, k, dtype=torch.float64) for k in (sizes.fine, sizes.places))
    bare, path, strip = (_path(data, a, b, lam) for lam in (fine, places, torch.tensor(STRIP, dtype=torch.float64)))
    z = torch.randn((sizes.draws, *path.shape), generator=run.stream(f"{name}/line"), dtype=torch.float64)
    clean, draws = [], []
    for time in t:
        clean.append(_noise(score, process.alpha(time) * bare, time))
        draws.append(_noise(score, process.alpha(time) * path + process.sigma(time) * z, time))
        run.step(0.4 / len(t))
    noisy: Estimate[Tensor] = Estimate.of_mean(torch.stack(draws, 1))
    pairs = _random_pairs(labels, sizes.pairs, run.stream(f"{name}/pairs"))
    near = (t / t[chosen]).log2().abs() < 1.05
    levels = [int(k) for k in near.nonzero().flatten() if (int(k) - chosen) % 2 == 0]
    logs = _log_ratios(run, name, score, t[levels], pairs, sizes.pair_draws)
    curves: dict[str, Any] = {label: Estimate.of_mean(values, dim=1).exp() for label, values in logs.items()}
    at = levels.index(chosen)
    found: dict[str, Any] = {
        "pair": [a, b],
        "pair_labels": labels[[a, b]],
        "pair_distance": distance,
        "t": t,
        "lam_clean": fine,
        "clean": torch.stack(clean),
        "lam": places,
        "noisy": noisy.value,
        "noisy_se": noisy.se,
        "rho": torch.tensor([r.value for r in rho]),
        "rho_se": torch.tensor([r.se for r in rho]),
        "chosen_t": t[chosen],
        "ratio_t": t[levels],
        "ratio_noisy": curves[NOISY].stack(),
        "ratio_clean": curves[BARE].stack(),
        "ratio_pairs": pairs,
        "ratio_at_chosen": logs[NOISY][at].exp(),
        "ratio": curves[NOISY][at].stack(),
    }
    wanted = [float(t[chosen]) / k for k in (4, 2, 2**0.5, 1)]
    profiles = sorted({int((t.log() - math.log(w)).abs().argmin()) for w in wanted})
    around = [k for k in range(len(levels)) if abs(float(t[levels[k]] / t[chosen]) - 1) < 0.5]
    page = Page(
        run,
        name,
        found,
        text="line",
        data=data,
        s=sizes,
        bare=curves[BARE][at],
        first=profiles[0],
        chosen=chosen,
        around=around,
    )
    noised = process.perturb(strip, float(t[chosen]), generator=run.stream(f"{name}/strip"))
    titles = "On the line itself", f"With noise: mean of {sizes.draws} draws (images: one draw, t = {t[chosen]:.3g})"
    shown: dict[str, Any] = {"at": STRIP, "strip_clean": strip, "strip_noisy": noised}
    maps = [found[k] for k in ("t", "lam_clean", "clean", "lam", "noisy", "noisy_se")]
    page.picture(name, lambda: plots.line_maps(*maps, profiles=profiles, titles=titles, **shown), "map")
    lines = {label: curve.stack() for label, curve in curves.items()}
    (_, low, high), time = found["ratio"].tolist(), float(t[chosen])
    draw = functools.partial(plots.ratio_curve, t[levels], lines, found["ratio_at_chosen"], low, high, time)
    page.picture(f"{name}_ratio", draw, "ratio")
    return page.exhibit(0.15)


def closest_pair(data: Empirical, labels: Tensor) -> tuple[int, int, float]:
    """Return the indices of the nearest two images of different class, and their distance."""
    best = (0, 0, math.inf)
    for label in labels.unique():
        own, others = ((labels == label).nonzero().flatten(), (labels != label).nonzero().flatten())
        distance, index = nearest(data.take(own), data.subset(others), 1)
        i = int(distance[:, 0].argmin())
        if float(distance[i, 0]) < best[2]:
            a, b = sorted((int(own[i]), int(others[index[i, 0]])))
            best = a, b, float(distance[i, 0])
    return best


def _noise(score: EmpiricalScore, x: Tensor, t: Tensor) -> Tensor:
    """Return σ² tr C / d."""
    return score.covariance(x, t).trace() * (score.process.S(t) / score.data.d)


def _path(data: Empirical, a: int, b: int, lam: Tensor) -> Tensor:
    first, second = data[[a, b]].double()
    weight = lam.reshape(-1, *(1,) * len(data.shape))
    return (1 - weight) * first + weight * second


def _random_pairs(labels: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Return disjoint pairs of different class, in random order."""
    both = torch.randperm(len(labels), generator=generator)[: len(labels) // 2 * 2].reshape(-1, 2)
    return both[labels[both[:, 0]] != labels[both[:, 1]]][:count]


def _log_ratios(
    run: Run, name: str, score: EmpiricalScore, times: Tensor, pairs: Tensor, draws: int
) -> dict[str, Tensor]:
    """Return the log ratios ``(t, pair)`` of midpoints to ends, with noise and on the line itself."""
    a, b = (score.data[pairs[:, side]].double() for side in (0, 1))
    places = torch.stack([a, (a + b) / 2, b])
    z = torch.randn((draws, 1, *a.shape), generator=run.stream(f"{name}/pair noise"), dtype=torch.float64)
    logs: dict[str, list[Tensor]] = {NOISY: [], BARE: []}
    for t in times:
        x = score.process.alpha(t) * places
        for label, queries in ((NOISY, x + score.process.sigma(t) * z), (BARE, x[None])):
            logs[label].append(log_ratio(_noise(score, queries, t)))
        run.step(0.35 / len(times))
    return {label: torch.stack(values) for label, values in logs.items()}


def log_ratio(noise: Tensor) -> Tensor:
    """Return the log of the middle over the mean of the ends, ``(draws, 3, pairs)`` to ``(pairs,)``; NaN if that is 0.

    The logarithm of a mean over K draws has a bias of O(1/K); Quenouille's jackknife leaves O(1/K²).
    """

    def plain(part: Tensor) -> Tensor:
        first, middle, last = part.sum(0)
        ends = (first + last) / 2
        return torch.where(ends > 0, (middle / ends.clamp_min(1e-300)).log(), torch.nan)

    k = len(noise)
    return plain(noise) if k == 1 else k * plain(noise) - (k - 1) * leave_one_out(plain, noise).mean(0)


@dataclass(frozen=True)
class Ends:
    """Ends of the PF-ODE ``(start, …)`` and of runs ``(κ, run, start, …)``: samples divided by alpha, index of the
    nearest training image, distances to it and to the second nearest."""

    flow: Tensor
    flow_at: Tensor
    flow_distance: Tensor
    x: Tensor
    at: Tensor
    distance: Tensor
    second: Tensor

    @property
    def elsewhere(self) -> Tensor:
        """Whether a run ends at another image than the PF-ODE, ``(κ, run, start)``."""
        return self.at != self.flow_at

    @property
    def shares(self) -> Estimate[Tensor]:
        """The share of runs that end at another image, at each κ; the interval is over starts."""
        found: Estimate[Tensor] = Estimate.of_mean(self.elsewhere.double().mean(1), dim=1)
        return Estimate(found.value, found.se, found.low.clamp_min(0), found.high.clamp_max(1))

    @property
    def quartiles(self) -> list[Tensor]:
        """The quartiles ``(3, κ)`` of the distances to the nearest and the second nearest image."""
        q = torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)
        return [torch.quantile(v.double().flatten(1), q, dim=1) for v in (self.distance, self.second)]


def ends(run: Run, name: str, sizes: SimpleNamespace) -> Ends:
    """Sample the PF-ODE and, ``sizes.runs`` times at each of ``sizes.kappas``, the effective SDE from equal starts."""
    process, data = VP(eps=EPS), sizes.data
    score = EmpiricalScore(data, process, memory=MEMORY)
    x_T = process.prior((sizes.starts, *data.shape), generator=run.stream(f"images/{name}"))
    alpha = float(process.alpha(torch.tensor(EPS, dtype=torch.float64)))
    flow = tensor(sample.pf_ode(score, x_T, steps=sizes.steps)) / alpha
    runs = []
    for kappa in sizes.kappas:
        V, stream = kernels.Naive(score, kappa), run.stream(f"images/{name}/{kappa:g}")
        runs.append(tensor(sample.effective_sde(V, x_T, steps=sizes.steps, members=sizes.runs, generator=stream)))
    x = torch.stack(runs) / alpha

    def near(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        distance, index = nearest(x.reshape(-1, data.d), data, 2)
        batch = x.shape[: x.ndim - len(data.shape)]
        return index[:, 0].reshape(batch), distance[:, 0].reshape(batch), distance[:, 1].reshape(batch)

    return Ends(flow, *near(flow)[:2], x, *near(x))


@one_thread()
def between_images(run: Run) -> Exhibit:
    """Find where runs of the effective SDE end, on digits and, where they are, on CIFAR images."""
    sources: dict[str, Callable[[], Empirical]] = {"digits": _digits}
    folder = _cifar()
    if folder is not None:
        sources["cifar"] = functools.partial(load, folder)
    sets = {}
    for name, source in sources.items():
        with contextlib.suppress(InputError):  # without CIFAR the digits suffice
            data = source()
            sets[name] = run.sizes("between_images", name)
            sets[name].data = data
    found: dict[str, Tensor | tuple[float, ...]] = {}
    all_ends = {}
    for name, given in sets.items():
        end = all_ends[name] = ends(run, name, given)
        found |= {f"{name}_kappa": given.kappas, f"{name}_share": end.shares.stack(1)}
        found |= {f"{name}_flow_at": end.flow_at, f"{name}_flow_distance": end.flow_distance}
        found |= {f"{name}_at": end.at, f"{name}_distance": end.distance, f"{name}_second": end.second}
        run.step(0.7 / len(sets))
    first = all_ends["digits"]
    halfway = (first.distance[-1] / (first.distance[-1] + first.second[-1])).median()
    values: dict[str, Any] = {"sets": sets, "ends": all_ends, "eps": EPS, "share": first.shares[-1], "halfway": halfway}
    page, eps = Page(run, "between_images", found, **values), torch.tensor(EPS, dtype=torch.float64)
    noise = float(VP().sigma(eps) / VP().alpha(eps))
    for name, end in all_ends.items():
        about: dict[str, Any] = {"s": sets[name], "end": end, "residue": noise * sets[name].data.d ** 0.5}
        page.picture(f"between_{name}", _images(sets[name], end), "images", **about)
        if name == "digits":
            curves = dict(zip(("to the nearest", "to the second nearest"), end.quartiles, strict=True))
            draw = functools.partial(plots.share_curve, sets[name].kappas, end.shares.stack(), curves)
            page.picture("between_digits_share", draw, "curves", **about)
    return page.exhibit(0.3)


def _images(sizes: SimpleNamespace, end: Ends) -> Callable[[], Figure]:
    """Return a function that draws ends of runs, from the starts whose runs differ most."""
    order = end.elsewhere.double().mean((0, 1)).argsort(descending=True, stable=True)[: sizes.rows].sort().values

    def row(values: Tensor, first: Tensor) -> Tensor:  # (start, PF-ODE and κ × run, …)
        shown = values[:, : sizes.columns, order].movedim(2, 0).flatten(1, 2)
        return torch.cat([first[order][:, None], shown], 1)

    notes = [[f"{float(v):.2f}" for v in line] for line in row(end.distance, end.flow_distance)]
    groups = [("PF-ODE", 1), *((f"effective SDE, κ = {k:g}", sizes.columns) for k in sizes.kappas)]
    mark, at = row(end.elsewhere, torch.zeros_like(end.flow_at, dtype=torch.bool)), end.flow_at[order]
    labels, images = [f"no. {int(i)}" for i in at], row(end.x, end.flow)
    return lambda: plots.end_images(sizes.data[at], images, labels, groups, mark, notes)
