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
effective SDE with the naive kernel leave this path where the posterior is undecided between images (§4.4)."""

import contextlib
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TypeVar

import torch
from matplotlib.figure import Figure
from torch import Tensor

from vkernel import kernels, plots, sample
from vkernel.core.errors import InputError, require
from vkernel.core.estimate import Estimate, leave_one_out
from vkernel.data import Empirical, digits, load
from vkernel.metrics import nearest
from vkernel.process import VP
from vkernel.reproduce.exhibit import MEMORY, Exhibit, Page, Run, Skip, Values, one_thread
from vkernel.score import EmpiricalScore, noise_fraction

T = TypeVar("T")
STRIP = (0.0, 0.25, 0.5, 0.75, 1.0)
EPS = 1e-3
NOISY, BARE = "with noise", "on the bare line"


def digits_line(run: Run) -> Exhibit:
    """Follow C along the line between two of scikit-learn's digits."""
    data = _load(digits)
    from sklearn.datasets import load_digits

    return line(run, "digits", data, torch.from_numpy(load_digits().target))


def cifar_line(run: Run) -> Exhibit:
    """Follow C along the line between two CIFAR-10 images, in 3,072 dimensions; coarser, to save time."""
    folder = _cifar()
    if folder is None:
        raise Skip("Set the environment variable VKERNEL_DATA to a folder that holds cifar10/ with its sheets.")
    data = _load(lambda: load(folder))
    return line(run, "cifar", data, _load(lambda: _labels(folder / "labels.json", data.n)))


def _load(make: Callable[[], T]) -> T:
    try:
        return make()
    except InputError as error:
        raise Skip(str(error)) from error


def _cifar() -> Path | None:
    folder = Path(os.environ.get("VKERNEL_DATA", "")).expanduser() / "cifar10"
    return folder if "VKERNEL_DATA" in os.environ and folder.is_dir() else None


def _labels(path: Path, n: int) -> Tensor:
    """Read the classes of the training sheets, those numbered below 50, in order."""
    try:
        sheets = {int(number): classes for number, classes in json.loads(path.read_text(encoding="utf8")).items()}
        labels = torch.tensor([c for sheet in sorted(sheets) if sheet < 50 for c in sheets[sheet]])
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise InputError(f"{path} does not give the classes of the images: {error}.") from error
    require(labels.shape == (n,), f"{path} has {labels.numel()} classes for {n} images.")
    return labels


def line(run: Run, key: str, data: Empirical, labels: Tensor) -> Exhibit:
    """Make the exhibit for labelled images, with the sizes ``key``."""
    process, s, name = VP(), run.sizes("line", key), f"{key}_line"
    score = EmpiricalScore(data, process, memory=MEMORY)
    t = torch.logspace(math.log10(s.lowest), math.log10(process.T), s.levels, dtype=torch.float64).clamp_max(process.T)
    a, b, distance = closest_pair(data, labels)
    streams = [(time, run.stream(f"{name}/rho", k)) for k, time in enumerate(t.tolist())]
    rho = [noise_fraction(score, process, time, s.queries, stream) for time, stream in run.each(streams, 0.1)]
    chosen = max(range(len(t)), key=lambda k: rho[k].value)
    fine, places = (torch.linspace(-0.25, 1.25, k, dtype=torch.float64) for k in (s.fine, s.places))
    first, second = data[[a, b]].double()
    lambdas = (fine, places, torch.tensor(STRIP, dtype=torch.float64))
    weights = (lam.reshape(-1, *(1,) * len(data.shape)) for lam in lambdas)
    bare, path, strip = ((1 - weight) * first + weight * second for weight in weights)
    z = torch.randn((s.draws, *path.shape), generator=run.stream(f"{name}/line"), dtype=torch.float64)
    clean, draws = [], []
    for time in run.each(t, 0.4):
        clean.append(_noise(score, process.alpha(time) * bare, time))
        draws.append(_noise(score, process.alpha(time) * path + process.sigma(time) * z, time))
    noisy: Estimate[Tensor] = Estimate.of_mean(torch.stack(draws, 1))
    both = torch.randperm(data.n, generator=run.stream(f"{name}/pairs"))[: data.n // 2 * 2].reshape(-1, 2)
    pairs = both[labels[both[:, 0]] != labels[both[:, 1]]][: s.pairs]  # disjoint, of different class
    levels = [k for k, r in enumerate((t / t[chosen]).log2().abs().tolist()) if r < 1.05 and (k - chosen) % 2 == 0]
    logs = _log_ratios(run, name, score, t[levels], pairs, s.pair_draws)
    curves: Values = {label: Estimate.of_mean(values, dim=1).exp() for label, values in logs.items()}
    at, lines = levels.index(chosen), {label: curve.stack() for label, curve in curves.items()}
    ratios, best = logs[NOISY][at].exp(), curves[NOISY][at].stack()
    found: Values = {"pair": [a, b], "pair_labels": labels[[a, b]], "pair_distance": distance}
    found |= {"t": t, "lam_clean": fine, "clean": torch.stack(clean), "lam": places}
    found |= {"noisy": noisy.value, "noisy_se": noisy.se, "rho": torch.tensor([r.value for r in rho])}
    found |= {"rho_se": torch.tensor([r.se for r in rho]), "chosen_t": t[chosen], "ratio_t": t[levels]}
    found |= {"ratio_noisy": lines[NOISY], "ratio_clean": lines[BARE], "ratio_pairs": pairs}
    found |= {"ratio_at_chosen": ratios, "ratio": best}
    wanted = [float(t[chosen]) / k for k in (4, 2, 2**0.5, 1)]
    profiles = sorted({int((t.log() - math.log(w)).abs().argmin()) for w in wanted})
    values: Values = {"bare": curves[BARE][at], "first": profiles[0], "chosen": chosen, "data": data, "s": s}
    values["around"] = [k for k in range(len(levels)) if abs(float(t[levels[k]] / t[chosen]) - 1) < 0.5]
    page = Page(run, name, found, text="line", **values)
    noised = process.perturb(strip, float(t[chosen]), generator=run.stream(f"{name}/strip"))
    with_noise = f"With noise: mean of {s.draws} draws (images: one draw, t = {t[chosen]:.3g})"
    how: Values = {"at": STRIP, "strips": (strip, noised), "profiles": profiles, "key": "map"}
    page.picture(name, plots.line_maps, found, titles=("On the line itself", with_noise), **how)
    drawn = (t[levels], lines, ratios, *best.tolist()[1:], float(t[chosen]))
    page.picture(f"{name}_ratio", plots.ratio_curve, *drawn, key="ratio")
    return page.exhibit(0.15)


def closest_pair(data: Empirical, labels: Tensor) -> tuple[int, int, float]:
    """Return the indices of the nearest two images of different class, and their distance."""
    best = (0, 0, math.inf)
    for label in labels.unique():
        own, others = (which.nonzero().flatten() for which in (labels == label, labels != label))
        distance, index = nearest(data.take(own), data.subset(others), 1)
        i = int(distance[:, 0].argmin())
        if float(distance[i, 0]) < best[2]:
            a, b = sorted((int(own[i]), int(others[index[i, 0]])))
            best = a, b, float(distance[i, 0])
    return best


def _noise(score: EmpiricalScore, x: Tensor, t: Tensor) -> Tensor:
    """Return σ² tr C / d."""
    return score.covariance(x, t).trace() * (score.process.S(t) / score.data.d)


def _log_ratios(run: Run, key: str, score: EmpiricalScore, t: Tensor, pairs: Tensor, draws: int) -> dict[str, Tensor]:
    """Return the log ratios ``(t, pair)`` of midpoints to ends, with noise and on the line itself."""
    a, b = (score.data[pairs[:, side]].double() for side in (0, 1))
    places = torch.stack([a, (a + b) / 2, b])
    z = torch.randn((draws, 1, *a.shape), generator=run.stream(f"{key}/pair noise"), dtype=torch.float64)
    logs: dict[str, list[Tensor]] = {NOISY: [], BARE: []}
    for time in run.each(t, 0.35):
        x = score.process.alpha(time) * places
        for label, queries in ((NOISY, x + score.process.sigma(time) * z), (BARE, x[None])):
            logs[label].append(log_ratio(_noise(score, queries, time)))
    return {label: torch.stack(values) for label, values in logs.items()}


def log_ratio(noise: Tensor) -> Tensor:
    """Return the log of middle over mean of the ends, ``(draws, 3, pairs)`` to ``(pairs,)``; NaN if that is 0."""

    def plain(part: Tensor) -> Tensor:
        first, middle, last = part.sum(0)
        ends = (first + last) / 2
        return torch.where(ends > 0, (middle / ends.clamp_min(1e-300)).log(), torch.nan)

    k = len(noise)  # the logarithm of a mean over k draws has a bias of O(1/k); Quenouille's jackknife leaves O(1/k²)
    return plain(noise) if k == 1 else k * plain(noise) - (k - 1) * leave_one_out(plain, noise).mean(0)


def ends(run: Run, name: str, sizes: SimpleNamespace) -> SimpleNamespace:
    """Sample the PF-ODE and, ``sizes.runs`` times at each of ``sizes.kappas``, the effective SDE from equal starts.

    Of the ends ``flow (start, …)`` and ``x (κ, run, start, …)``, divided by alpha: the nearest training image ``at``,
    the ``distance`` to it and to the ``second`` nearest, their ``quartiles (3, κ)``, and whether a run ends
    ``elsewhere`` than the PF-ODE, with the ``shares`` of those at each κ and an interval over starts."""
    process, data = VP(eps=EPS), sizes.data
    score = EmpiricalScore(data, process, memory=MEMORY)
    x_T = process.prior((sizes.starts, *data.shape), generator=run.stream(f"images/{name}"))
    alpha = float(process.alpha(torch.tensor(EPS, dtype=torch.float64)))
    flow = sample.pf_ode(score, x_T, steps=sizes.steps) / alpha
    runs = []
    for kappa in sizes.kappas:
        V, stream = kernels.Naive(score, kappa), run.stream(f"images/{name}/{kappa:g}")
        runs.append(sample.effective_sde(V, x_T, steps=sizes.steps, members=sizes.runs, generator=stream))
    x = torch.stack(runs) / alpha

    def near(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        distance, index = nearest(x.reshape(-1, data.d), data, 2)
        batch = x.shape[: x.ndim - len(data.shape)]
        return index[:, 0].reshape(batch), distance[:, 0].reshape(batch), distance[:, 1].reshape(batch)

    (flow_at, flow_distance, _), (at, distance, second) = near(flow), near(x)
    elsewhere, q = at != flow_at, torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)
    share: Estimate[Tensor] = Estimate.of_mean(elsewhere.double().mean(1), dim=1)
    found: Values = {"flow": flow, "flow_at": flow_at, "flow_distance": flow_distance, "elsewhere": elsewhere}
    found["quartiles"] = [torch.quantile(v.double().flatten(1), q, dim=1) for v in (distance, second)]
    found["shares"] = Estimate(share.value, share.se, share.low.clamp_min(0), share.high.clamp_max(1))
    return SimpleNamespace(x=x, at=at, distance=distance, second=second, **found)


@one_thread()
def between_images(run: Run) -> Exhibit:
    """Find where runs of the effective SDE end, on digits and, where they are, on CIFAR images."""
    data, folder = {"digits": _load(digits)}, _cifar()
    if folder is not None:
        with contextlib.suppress(InputError):  # without CIFAR the digits suffice
            data["cifar"] = load(folder)
    sets = {name: run.sizes("between_images", name) for name in data}
    found: dict[str, Tensor | tuple[float, ...]] = {}
    all_ends = {}
    for name, given in run.each(sets.items(), 0.7):
        given.data = data[name]
        end = all_ends[name] = ends(run, name, given)
        arrays = {"kappa": given.kappas, "share": end.shares.stack(1), "second": end.second, "at": end.at}
        arrays |= {"flow_at": end.flow_at, "flow_distance": end.flow_distance, "distance": end.distance}
        found |= {f"{name}_{key}": value for key, value in arrays.items()}
    first, eps = all_ends["digits"], torch.tensor(EPS, dtype=torch.float64)
    halfway = (first.distance[-1] / (first.distance[-1] + first.second[-1])).median()
    values: Values = {"sets": sets, "ends": all_ends, "eps": EPS, "share": first.shares[-1], "halfway": halfway}
    page, noise = Page(run, "between_images", found, **values), float(VP().sigma(eps) / VP().alpha(eps))
    for name, end in all_ends.items():
        s, curves = sets[name], dict(zip(("to the nearest", "to the second nearest"), end.quartiles, strict=True))
        more: Values = {"s": s, "end": end, "residue": noise * s.data.d**0.5}
        page.picture(f"between_{name}", _draw, s, end, key="images", more=more)
        if name == "digits":
            how: Values = {"key": "curves", "more": more}
            page.picture("between_digits_share", plots.share_curve, s.kappas, end.shares.stack(), curves, **how)
    return page.exhibit(0.3)


def _draw(sizes: SimpleNamespace, end: SimpleNamespace) -> Figure:
    """Draw ends of runs, from the starts whose runs differ most."""
    order = end.elsewhere.double().mean((0, 1)).argsort(descending=True, stable=True)[: sizes.rows].sort().values

    def row(values: Tensor, first: Tensor) -> Tensor:  # (start, PF-ODE and κ × run, …)
        return torch.cat([first[order][:, None], values[:, : sizes.columns, order].movedim(2, 0).flatten(1, 2)], 1)

    notes = [[f"{float(v):.2f}" for v in line] for line in row(end.distance, end.flow_distance)]
    groups = [("PF-ODE", 1), *((f"effective SDE, κ = {k:g}", sizes.columns) for k in sizes.kappas)]
    mark, at = row(end.elsewhere, torch.zeros_like(end.flow_at, dtype=torch.bool)), end.flow_at[order]
    return plots.end_images(sizes.data[at], row(end.x, end.flow), [f"no. {int(i)}" for i in at], groups, mark, notes)
