r"""Where the variance of a trained model comes from (docs/theory.md, §7.3).

Training a linear model is random in two ways, inputs (t and x) and the noise of their targets. By the law of total
variance

.. math:: \mathrm{Var}\,\hat s = \underbrace{\mathrm{Var}_X\,E[\hat s|X]}_{\text{inputs and misfit}}
          + \underbrace{E_X\,\mathrm{Var}[\hat s|X]}_{\text{target noise}} ,

and a nested design (:func:`vkernel.variance_split`) measures both: sets of inputs, and within each several draws of
the targets. Variances are averaged over places with weights :math:`p(x|t)` and over times with :math:`\sigma_t^2`, the
unit of the loss. The design is repeated with other seeds, and leaving one repetition out at a time gives the error of
the share. The linear V-kernel, given inputs, predicts the same shares from seeds of its own.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vkernel import kernels, plots
from vkernel.core import rng
from vkernel.core.estimate import student_quantile
from vkernel.data import toy
from vkernel.reproduce.memorise import one_thread
from vkernel.reproduce.page import Exhibit, Finding, Run, Table, percent
from vkernel.reproduce.v_linear import PROCESS, TIMES, denoiser, places
from vkernel.score.empirical import EmpiricalScore
from vkernel.train.ensemble import variance_split

__all__ = ["jackknife", "make", "verdict"]

ORDER, TITLE, SECONDS = 64, "Where the variance comes from", 20.0
RATIOS = (4.0, 2.0, 1.0, 0.5, 0.25, 0.125)  # F/P
QUICK = (4.0, 1.0)
HALF = 0.5
SOURCES = ("inputs", "targets")


NAMES = ("all times", *(f"t = {t:g}" for t in TIMES))


class Study:
    """Measured and predicted shares, at every F/P; places are ``x (T, n, 1)`` at ``t (T, 1)``."""

    def __init__(self, run: Run) -> None:
        self.run, self.model, self.data = run, denoiser(), toy("triple")
        self.ratios = QUICK if run.quick else RATIOS
        score = EmpiricalScore(self.data, PROCESS)
        found = [places(score, t, 31 if run.quick else 121) for t in TIMES]
        self.x, self.t = torch.stack([x for x, _ in found]), torch.tensor(TIMES, dtype=torch.float64)[:, None]
        self.weights = PROCESS.S(self.t) * torch.stack([w for _, w in found])

    def draws(self, ratio: float) -> int:
        return round(self.model.features.count / ratio)

    def design(self, ratio: float) -> tuple[int, int, int]:
        """Repetitions, sets of inputs in each, and draws of the targets for each set."""
        return (
            (3, 4, 2) if self.run.quick else (12, 14, 5) if ratio >= 1 else (12, 5, 5) if ratio >= 0.25 else (9, 4, 5)
        )

    def sets(self, ratio: float) -> tuple[int, int]:
        """Repetitions of the prediction, and sets of inputs in each."""
        return (3, 8) if self.run.quick else (6, 32) if ratio >= 1 else (6, max(8, round(32 * ratio)))

    def pooled(self, variance: Tensor) -> Tensor:
        """``(…, where)`` from ``(…, T, n)``: all times, then each."""
        each = (self.weights * variance).sum(-1)
        return torch.cat([each.sum(-1, keepdim=True), each], -1)

    def split(self, ratio: float, repetition: int, goal: str = "J1") -> Tensor:
        """Variances by inputs and by targets, ``(2, where)``."""
        found = variance_split(
            self.model,
            self.data,
            PROCESS,
            self.x,
            self.t,
            self.design(ratio)[1:],
            rng.key(self.run.seed, "reproduce/shares/trainings", repetition),
            draws=self.draws(ratio),
            objective=goal,
            show=False,
        )
        assert found.names == SOURCES
        return self.pooled(found.variance.value)

    def measured(self, ratio: float) -> Tensor:
        """``(source, where, 3)``: shares with intervals."""
        return jackknife(torch.stack([self.split(ratio, k) for k in range(self.design(ratio)[0])]))

    def predicted(self, ratio: float) -> Tensor:
        """The same by the V-kernel."""
        groups, sets = self.sets(ratio)
        found = []
        for group in range(groups):
            seed = rng.key(self.run.seed, "reproduce/shares/kernel", group)
            kernel = kernels.Linear(self.model, self.data, PROCESS, draws=self.draws(ratio), seed=seed, sets=sets)
            parts = (kernel.only(part) for part in ("misfit", "target_noise"))
            found.append(self.pooled(torch.stack([k.cov(self.x, self.t).trace() for k in parts])))
        return jackknife(torch.stack(found))


def jackknife(found: Tensor) -> Tensor:
    """Shares ``(source, where, 3)`` of variances ``(repetition, source, where)``, leaving one repetition out."""

    def share(sums: Tensor) -> Tensor:
        return sums / sums.sum(-2, keepdim=True)

    n = len(found)
    value, without = share(found.sum(0)), share(found.sum(0) - found)
    half = student_quantile(n - 1) * ((n - 1) / n * (without - without.mean(0)).square().sum(0)).sqrt()
    return torch.stack([value, value - half, value + half], -1)


@one_thread
def make(run: Run) -> Exhibit:
    study = Study(run)
    cost = torch.tensor([study.draws(r) * math.prod(study.design(r)) for r in study.ratios], dtype=torch.float64)
    measured, predicted = [], []
    for ratio, share in zip(study.ratios, (0.8 * cost / cost.sum()).tolist(), strict=True):
        measured.append(study.measured(ratio))
        run.step(share / 2)
        predicted.append(study.predicted(ratio))
        run.step(share / 2)
    twin = study.split(study.ratios[0], 0, "J0")
    run.step(0.05)
    table, theory = torch.stack(measured), torch.stack(predicted)  # (ratio, source, where, 3)
    noise, line = table[:, 1], theory[:, 1]
    saved = run.arrays(
        "shares",
        features_over_draws=study.ratios,
        where=list(NAMES),
        sources=list(SOURCES),
        share=table,
        predicted=theory,
        variance_of_J0=twin,
    )
    one = study.ratios.index(1.0)
    picture = run.picture(
        "shares",
        lambda: plots.share_curves(study.ratios, NAMES, noise.movedim(1, 0), line.movedim(1, 0)),
        alt="Left: bars of the whole variance of the learned score at each F/P, split into target noise and inputs. "
        f"Right: the share of target noise against F/P at three times. It is {_cut(noise[0, 0, 0])} at "
        f"F/P = {study.ratios[0]:g}, {_cut(noise[one, 0, 0])} at 1 and {_cut(noise[-1, 0, 0])} at "
        f"{study.ratios[-1]:g}, over all times.",
        caption=(
            "Left: what varies between two trainings, over p(x|t) and all times. Inputs and misfit is what J0 would "
            "leave: which x and t were drawn, and what the features cannot fit there. Right: the share of target noise "
            "at each time, measured (points, 95 % intervals) and by the V-kernel given inputs (lines and bands).",
            *_extremes(study, noise),
        ),
    )
    run.step(0.15)
    return Exhibit(
        name="shares",
        title=TITLE,
        pictures=(picture,),
        data=saved,
        sizes="Trainings (repetitions × sets of inputs × draws of their targets): "
        + ", ".join(" × ".join(map(str, study.design(r))) + f" at F/P = {r:g}" for r in study.ratios)
        + f"; F = {study.model.features.count}.",
        opening=(
            "Generalization through variance needs the variance to come from the noise of the target. Two trainings "
            "also differ because they see other inputs, and that part would stay if the target had no noise at all. "
            "How much is which?",
        ),
        finding=Finding(
            number=_cut(noise[one, 0, 0]),
            interval=f"95 % interval {_interval(noise[one, 0])}",
            words=(verdict(noise[one, 0]), _check(noise, line, twin, study.ratios[0])),
        ),
        tables=(_table(study, noise, line),),
    )


def _cut(share: Tensor) -> str:
    """An unbiased estimate of a share can lie beyond the ends by chance."""
    return percent(min(1.0, max(0.0, float(share))))


def _interval(curve: Tensor) -> str:
    return f"{_cut(curve[1])} to {_cut(curve[2])}"


def verdict(share: Tensor) -> str:
    """What the share of target noise ``(3,)`` at F/P = 1 says."""
    value, low, high = share.tolist()
    begin = "The share of target noise in the variance of the learned score at F/P = 1, over p(x|t) and all times. "
    if low > HALF:
        return begin + "It could have been below one half, and it is not: most of V is the noise of the target."
    if high < HALF:
        return begin + "It is below one half: most of V comes from the inputs, and would stay without target noise."
    side = "above" if value > HALF else "below"
    return begin + f"It is {side} one half, but the interval holds one half: this run cannot say which part is larger."


def _check(noise: Tensor, line: Tensor, twin: Tensor, ratio: float) -> str:
    """Do the two intervals meet, and has J0 no target noise?"""
    met = (noise[..., 1] <= line[..., 2]) & (line[..., 1] <= noise[..., 2])
    count, total = int(met.sum()), met.numel()
    worst = float((noise[..., 0] - line[..., 0]).abs().max())
    words = (
        f"Its interval meets that of the V-kernel's share in {count} of {total} cases of F/P and t; the "
        f"largest difference is {percent(worst)} of the whole. "
    )
    size = float((twin[1] / twin.sum(0)).abs().max())
    if size < 1e-9:
        return words + f"Trained on J0, as a check at F/P = {ratio:g}, the share of target noise is zero to rounding."
    return words + f"Trained on J0, at F/P = {ratio:g}, it should be zero and is {percent(size)}: something is wrong."


def _extremes(study: Study, noise: Tensor) -> tuple[str, ...]:
    """At which F/P and time the noise of the target matters least."""
    mean = noise[:, 1:, 0].mean(0)
    least, most = int(mean.argmin()), int(mean.argmax())
    few = noise[0, 0]
    meaning = (
        "inputs and misfit are the larger part"
        if few[2] < HALF
        else "target noise is the larger part"
        if few[1] > HALF
        else "which part is larger is not decided"
    )
    return (
        f"Target noise has its least share, {_cut(mean[least])} in the mean over F/P, at t = {TIMES[least]:g}, and its "
        f"largest, {_cut(mean[most])}, at t = {TIMES[most]:g}. With the fewest draws, F/P = {study.ratios[0]:g}, it "
        f"has {_cut(few[0])} ({_interval(few)}) over all times: {meaning}.",
    )


def _table(study: Study, noise: Tensor, line: Tensor) -> Table:
    rows = []
    for r, ratio in enumerate(study.ratios):
        cells = (
            f"{_cut(noise[r, k, 0])} ({_interval(noise[r, k])}); {_cut(line[r, k, 0])} ({_interval(line[r, k])})"
            for k in range(len(NAMES))
        )
        rows.append((f"F/P = {ratio:g}", *cells))
    return Table(
        caption="Share of target noise: measured; predicted by the V-kernel given inputs. 95 % intervals, cut at 100 % "
        "where an unbiased estimate lies beyond.",
        head=("features per draw", *NAMES),
        rows=tuple(rows),
    )
