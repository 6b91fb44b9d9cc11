r"""The V-kernel of a linear model, predicted and measured (docs/theory.md, §8.1).

The paper's denoiser, 16 × 16 Gaussian features, ridge .1, fitted to P draws from {-1, 0, 1}. Theory says what the
variance of the learned score over trainings is; an ensemble shows it. Both are compared in the unit of the loss,
:math:`\sigma_t^2\,\mathrm{tr\,Cov}_\theta[\hat s]`, along x and, weighed by the density :math:`p(x|t)` of noised
data on ±1.5, where the features are, as

.. math:: R = \frac{\sum_t \sigma_t^2 \int p(x|t)\, \mathrm{Var}_{measured}\, dx}
                   {\sum_t \sigma_t^2 \int p(x|t)\, \mathrm{Var}_{predicted}\, dx} .

A measured variance is a mean over members of :math:`q_m = \frac{M}{M-1} |\hat s_m - s_{avg}|^2`, so its standard error
is that of the mean of q. The prediction is a mean over sets of inputs, drawn from seeds that the ensemble never sees,
in groups whose spread is its error. The J0 twin sees the inputs of J1 with noiseless targets: its variance is the
misfit alone.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from vkernel import kernels, plots
from vkernel.core import rng
from vkernel.core.estimate import student_quantile
from vkernel.data import toy
from vkernel.kernels import ValidityWarning
from vkernel.process import VP
from vkernel.reproduce.memorise import one_thread
from vkernel.reproduce.page import Exhibit, Finding, Picture, Run, Table, number
from vkernel.score.empirical import EmpiricalScore
from vkernel.train import features
from vkernel.train.ensemble import Ensemble, train_ensemble
from vkernel.train.models import Linear

__all__ = ["lognormal", "make", "places", "verdict"]

ORDER, TITLE, SECONDS = 63, "V, predicted and measured", 20.0
PROCESS = VP(eps=1e-3)
TIMES = (0.05, 0.2, 0.5)
RATIOS = (0.25, 1.0, 4.0, 20.0)  # P/F
OBJECTIVES = ("J1", "J0")
TITLES = ("J1, noisy targets", "J0, noiseless targets")
FORMS = ("given inputs", "leading order")
EXPECTED = (0.9, 1.15)  # what the theory file says of the ratio at P/F ≥ 10


@dataclass(frozen=True)
class Size:
    """How much is spent at one P/F: members of the two ensembles, and groups of sets of inputs."""

    members: tuple[int, int]
    groups: int
    sets: int


FULL = (Size((300, 300), 6, 40), Size((200, 200), 6, 24), Size((120, 120), 6, 12), Size((80, 48), 6, 8))
QUICK = (Size((60, 60), 3, 8), Size((30, 30), 3, 8))
QUICK_RATIOS = (0.25, 1.0)


def denoiser(process: VP = PROCESS, per_axis: int = 16) -> Linear:
    """The paper's linear denoiser."""
    return Linear(features.grid("gaussian", per_axis, process=process), target="x0", ridge=0.1)


def places(score: EmpiricalScore, t: float, count: int = 121, limit: float = 1.5) -> tuple[Tensor, Tensor]:
    """Places ``(count, 1)`` on an even grid and weights that are p(x|t) there, of sum 1."""
    x = torch.linspace(-limit, limit, count, dtype=torch.float64)[:, None]
    logp = score.posterior(x, t).logp
    return x, torch.softmax(logp, 0)


def squares(ensemble: Ensemble, x: Tensor, t: float) -> Tensor:
    """q ``(M, n)``: the mean over members is tr Cov at each place."""
    return ensemble.deviations(x, t).square().sum(-1) * len(ensemble)


def lognormal(value: Tensor, relative: Tensor, dof: int) -> Tensor:
    """Value, low and high end, stacked: an interval of a positive number from its relative standard error."""
    half = torch.exp(student_quantile(dof) * relative)
    return torch.stack([value, value / half, value * half])


def relative(samples: Tensor) -> Tensor:
    """The relative standard error of a mean over the first axis."""
    return samples.std(0) / math.sqrt(len(samples)) / samples.mean(0)


def quotient(top: Tensor, bottom: Tensor) -> Tensor:
    """The ratio of two independent means over first axes, with its interval; Welch's degrees of freedom."""
    a, b = relative(top).square(), relative(bottom).square()
    dof = (a + b).square() / (a.square() / (len(top) - 1) + b.square() / (len(bottom) - 1)).clamp_min(1e-300)
    return lognormal(top.mean(0) / bottom.mean(0), (a + b).sqrt(), max(1, int(dof.min())))


class Study:
    """Predictions and measurements at every P/F, in units of the loss."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.ratios: tuple[float, ...] = QUICK_RATIOS if run.quick else RATIOS
        self.sizes: tuple[Size, ...] = QUICK if run.quick else FULL
        self.model, self.data = denoiser(), toy("triple")
        score = EmpiricalScore(self.data, PROCESS)
        found = [places(score, t, 31 if run.quick else 121) for t in TIMES]
        self.x, self.weights = found[0][0], torch.stack([w for _, w in found])  # (n, 1) and (T, n)
        self.S = PROCESS.S(torch.tensor(TIMES, dtype=torch.float64))
        self.why: list[str] = []
        self.warned: list[bool] = []

    def draws(self, ratio: float) -> int:
        return round(ratio * self.model.features.count)

    def measured(self, ratio: float, size: Size) -> list[Tensor]:
        """q of J1 and of J0, each ``(M, T, n)``: the same inputs, two targets."""
        seed, P = rng.key(self.run.seed, "reproduce/v_linear/ensemble"), self.draws(ratio)
        out = []
        for goal, members in zip(OBJECTIVES, size.members, strict=True):
            ensemble = train_ensemble(
                self.model, self.data, PROCESS, members=members, draws=P, objective=goal, seed=seed, show=False
            )
            out.append(torch.stack([s * squares(ensemble, self.x, t) for s, t in zip(self.S, TIMES, strict=True)], 1))
        return out

    def predicted(self, ratio: float, size: Size) -> Tensor:
        """Given inputs: ``(groups, objective, T, n)``. Without target noise, the misfit is what J0 leaves."""
        out = []
        for group in range(size.groups):
            seed = rng.key(self.run.seed, "reproduce/v_linear/kernel", group)
            kernel = kernels.Linear(self.model, self.data, PROCESS, draws=self.draws(ratio), seed=seed, sets=size.sets)
            out.append(self._curves(kernel))
        return torch.stack(out)

    def leading(self) -> Tensor:
        """To leading order in 1/P, times P: ``(objective, T, n)``. It is the same for every P."""
        P = 1 << 20
        return P * self._curves(self._order(P, 1 << (12 if self.run.quick else 17)))

    def judge(self, ratio: float) -> None:
        """Keep whether the leading order warns at this P/F, and its own words."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", ValidityWarning)
            kernel = self._order(self.draws(ratio), 1 << 12)
        self.warned.append(any(issubclass(w.category, ValidityWarning) for w in caught))
        self.why.append(kernel.why)

    def _order(self, P: int, count: int) -> kernels.Linear:
        seed = rng.key(self.run.seed, "reproduce/v_linear/leading")
        return kernels.Linear(self.model, self.data, PROCESS, draws=P, seed=seed, form="leading", quadrature=count)

    def _curves(self, kernel: kernels.Linear) -> Tensor:
        both = (kernel, kernel.only("misfit"))
        return torch.stack(
            [torch.stack([s * k.cov(self.x, t).trace() for s, t in zip(self.S, TIMES, strict=True)]) for k in both]
        )

    def pooled(self, curves: Tensor) -> Tensor:
        """The mean over p(x|t), for every time and then summed over times: ``(…, 1 + T)`` from ``(…, T, n)``."""
        each = (self.weights * curves).sum(-1)
        return torch.cat([each.sum(-1, keepdim=True), each], -1)


def compare(study: Study, measured: list[Tensor], predicted: Tensor, leading: Tensor) -> tuple[Tensor, Tensor]:
    """Bands of the measurement ``(objective, 3, T, n)``; ratios ``(objective, form, 3, 1 + T)``, all times first."""
    bands, ratios = [], []
    for k, q in enumerate(measured):
        bands.append(lognormal(q.mean(0), relative(q), len(q) - 1))
        top, groups = study.pooled(q), study.pooled(predicted[:, k])
        order = lognormal(top.mean(0) / study.pooled(leading[k]), relative(top), len(q) - 1)
        ratios.append(torch.stack([quotient(top, groups), order]))
    return torch.stack(bands), torch.stack(ratios)


@one_thread
def make(run: Run) -> Exhibit:
    study = Study(run)
    work = [sum(s.members) + 2 * s.groups * s.sets for s in study.sizes]
    cost = torch.tensor([w * max(study.draws(r), 200) for w, r in zip(work, study.ratios, strict=True)])
    bands, ratios, lines, orders, common = [], [], [], [], study.leading()
    run.step(0.1)
    for ratio, size, share in zip(study.ratios, study.sizes, (cost / cost.sum()).tolist(), strict=True):
        predicted, leading = study.predicted(ratio, size), common / study.draws(ratio)
        study.judge(ratio)
        run.step(0.4 * share)
        band, found = compare(study, study.measured(ratio, size), predicted, leading)
        bands.append(band)
        ratios.append(found)
        lines.append(predicted.mean(0))
        orders.append(leading)
        run.step(0.4 * share)
    band, line, order = torch.stack(bands, 1), torch.stack(lines, 1), torch.stack(orders, 1)
    table = torch.stack(ratios)  # (ratio, objective, form, 3, 1 + T)
    saved = run.arrays(
        "v_linear",
        draws_over_features=study.ratios,
        times=TIMES,
        x=study.x[:, 0],
        objectives=list(OBJECTIVES),
        forms=list(FORMS),
        weights=study.weights,
        measured=band,
        given_inputs=line,
        leading=order,
        ratio=table,
        leading_warned=study.warned,
        leading_why=study.why,
    )
    pictures = (_curves_picture(run, study, band, line, order), _ratio_picture(run, study, table))
    run.step(0.1)
    last = study.ratios[-1]
    return Exhibit(
        name="v_linear",
        title=TITLE,
        pictures=pictures,
        data=saved,
        sizes="Members (J1 and J0) and sets of inputs: "
        + "; ".join(
            f"P/F = {r:g}: {s.members[0]} and {s.members[1]}, {s.groups} × {s.sets}"
            for r, s in zip(study.ratios, study.sizes, strict=True)
        )
        + f". F = {study.model.features.count}; the two use different seeds.",
        opening=(
            "V is the covariance of the learned score over trainings. For a linear model theory writes it down; here "
            "it is held against ensembles of the paper's denoiser on {-1, 0, 1}, trained on draws that the prediction "
            "has never seen.",
        ),
        finding=Finding(
            number=number(float(table[-1, 0, 0, 0, 0])),
            interval=f"95 % interval {_interval(table[-1, 0, 0, :, 0])}",
            words=(verdict(table[-1, :, :, :, 0], last),),
        ),
        tables=(_ratio_table(study, table), _validity_table(study)),
    )


def _interval(curve: Tensor) -> str:
    return f"{number(float(curve[1]))} to {number(float(curve[2]))}"


def verdict(last: Tensor, ratio: float) -> str:
    """What the ratios ``(objective, form, 3)`` at the largest P/F say."""
    value, low, high = last[0, 0].tolist()
    bottom, top = EXPECTED
    begin = f"Measured over predicted variance of J1 at P/F = {ratio:g}, given inputs, over p(x|t) and all times. "
    if bottom <= low and high <= top:
        words = (
            f"The whole interval lies in {bottom:g} to {top:g}, where theory is expected to be at P/F of 10 or more."
        )
    elif bottom <= value <= top:
        words = f"It lies in {bottom:g} to {top:g}, as expected at P/F of 10 or more; the interval reaches beyond."
    elif high < bottom or low > top:
        words = f"This contradicts what was expected, {bottom:g} to {top:g}: the interval lies outside."
    else:
        words = f"It lies outside {bottom:g} to {top:g}, what was expected at P/F of 10 or more; the interval overlaps."
    twin, order = last[1, 0], last[0, 1]
    whole = "holds" if twin[1] <= 1 <= twin[2] else "does not hold"
    words += (
        f" For the J0 twin, which has misfit and no target noise, it is {number(float(twin[0]))} ({_interval(twin)}), "
        f"an interval that {whole} 1. Leading order gives {number(float(order[0]))} ({_interval(order)}) for J1"
    )
    worse = abs(math.log(float(order[0]))) > abs(math.log(value))
    return begin + words + (", farther from 1." if worse else ", no farther from 1.")


def _curves_picture(run: Run, study: Study, band: Tensor, line: Tensor, order: Tensor) -> Picture:
    inside = _covered(study, band, line)
    return run.picture(
        "v_linear",
        lambda: plots.variance_panels(study.ratios, TIMES, study.x[:, 0], OBJECTIVES, line, order, band, study.weights),
        alt="Panels of the variance of the learned score along x on a logarithmic scale: P/F from "
        f"{study.ratios[0]:g} to {study.ratios[-1]:g} as columns, t = {', '.join(f'{t:g}' for t in TIMES)} as rows. "
        f"Lines are predicted and bands measured, for J1 and J0; the bands hold the lines at {100 * inside[-1]:.0f} % "
        "of all places in the last column.",
        caption=(
            "Lines are predicted (given inputs), bands measured with their 95 % intervals, dotted lines the leading "
            "order. The grey hill is p(x|t), where data are: V counts there. J1 has target noise and misfit, J0 on the "
            "same inputs misfit alone; the distance between them is what the noise of the target does.",
            "Share of places, weighed by p(x|t), whose band holds the line (95 % would be perfect, were "
            "the line exact): "
            + ", ".join(f"{100 * s:.0f} % at P/F = {r:g}" for s, r in zip(inside, study.ratios, strict=True))
            + ".",
        ),
    )


def _covered(study: Study, band: Tensor, line: Tensor) -> list[float]:
    """The share of places, over p(x|t), where the band holds the prediction, for every P/F."""
    held = (band[:, :, 1] <= line) & (line <= band[:, :, 2])  # (objective, ratio, T, n)
    return (held * study.weights).sum(-1).mean((0, 2)).tolist()


def _ratio_picture(run: Run, study: Study, table: Tensor) -> Picture:
    first, last = table[0, :, :, 0, 0], table[-1, :, :, 0, 0]
    curves = {
        TITLES[k]: {form: table[:, k, f, :, 0].mT for f, form in enumerate(FORMS)} for k in range(len(OBJECTIVES))
    }
    return run.picture(
        "v_linear_ratio",
        lambda: plots.ratio_panels(study.ratios, curves, EXPECTED),
        alt="Two panels, J1 and J0: measured over predicted variance against P/F. Given inputs it is "
        f"{number(float(first[0, 0]))} and {number(float(first[1, 0]))} at P/F = {study.ratios[0]:g}, "
        f"{number(float(last[0, 0]))} and {number(float(last[1, 0]))} at {study.ratios[-1]:g}; by leading order "
        f"{number(float(first[0, 1]))} and {number(float(first[1, 1]))} become {number(float(last[0, 1]))} and "
        f"{number(float(last[1, 1]))}.",
        caption=(
            "Measured over predicted, over p(x|t) and all times, with 95 % intervals. The form given inputs is exact "
            "but for the number of sets, and should lie at 1 for every P/F; leading order is for P much greater than "
            "F. An interval of the first has the error of the prediction in it; one of the second has not.",
        ),
    )


def _ratio_table(study: Study, table: Tensor) -> Table:
    rows = []
    for k, goal in enumerate(OBJECTIVES):
        for f, form in enumerate(FORMS):
            for r, ratio in enumerate(study.ratios):
                cells = (table[r, k, f, :, c] for c in range(1 + len(TIMES)))
                words = (f"{number(float(c[0]))} ({_interval(c)})" for c in cells)
                rows.append((f"{goal}, {form}, P/F = {ratio:g}", *words))
    return Table(
        caption="Measured over predicted variance, weighed by p(x|t), with 95 % intervals.",
        head=("objective, form, P/F", "all times", *(f"t = {t:g}" for t in TIMES)),
        rows=tuple(rows),
    )


def _validity_table(study: Study) -> Table:
    return Table(
        caption="What the leading-order kernel says of itself.",
        head=("P/F", "warned", "its reason"),
        rows=tuple(
            (f"{r:g}", "yes" if w else "no", why)
            for r, w, why in zip(study.ratios, study.warned, study.why, strict=True)
        ),
    )
