r"""Training time: the variance of a lazy network against :math:`\tau` (docs/theory.md, §9).

An infinitely wide network, trained by gradient flow for time :math:`\tau`, is linear in its initial function
:math:`f_0` and in its targets y: :math:`f = f_0 + w^T (y - f_0(X))` with :math:`w` a function of the inputs X and of
:math:`\tau`. The variance of its score has three parts, each in closed form given X, and each can be measured alone by
*twins*, networks trained on the same inputs that differ in one thing:

.. math:: \text{target noise:}\quad & \mathrm{Var}[\hat s^{J_1} - \hat s^{J_0}], \\
          \text{initialisation:}\quad & \mathrm{Var}[\hat s^{J_0} - \hat s^{J_0,\,f_0 = 0}], \\
          \text{inputs:}\quad & \mathrm{Var}[\hat s^{J_0,\,f_0 = 0}] .

The first two differences have mean zero given X, so the three are uncorrelated and add up to the whole. Variances are
in units of the loss, :math:`\sigma_t^2`, at one time, averaged over :math:`p(x|t)`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from vkernel import kernels, plots
from vkernel.core import rng
from vkernel.core.estimate import Estimate
from vkernel.data import toy
from vkernel.process import VP
from vkernel.reproduce.memorise import GAP, one_thread
from vkernel.reproduce.page import Exhibit, Finding, Picture, Run, Table, number, percent
from vkernel.reproduce.v_linear import lognormal, places, quotient, relative
from vkernel.score.empirical import EmpiricalScore
from vkernel.train.ensemble import Ensemble, train_ensemble
from vkernel.train.models import NTK, Lazy

__all__ = ["crossing", "gap_words", "make", "verdict"]

ORDER, TITLE, SECONDS = 65, "Training time: a lazy network's variance against τ", 24.0
PROCESS, TIME = VP(eps=1e-3), 0.2
PARTS = ("targets", "inputs", "init")
EULER = 30  # uniform steps, as in the paper
WORDS = {"targets": "target noise", "inputs": "inputs", "init": "initialisation"}


@dataclass(frozen=True)
class Size:
    """What is spent: training draws P, members, groups of sets of inputs, samples and their steps."""

    draws: int
    members: int
    groups: int
    sets: int
    places: int
    sampled: int
    starts: int
    steps: int
    taus: tuple[float, ...]
    measured: tuple[float, ...]


FULL = Size(
    128, 72, 4, 8, 61, 44, 24, 20, tuple(10 ** (k / 2) for k in range(-4, 11)), (0.1, 1.0, 10.0, 100.0, 1e3, 1e4)
)
QUICK = Size(40, 16, 3, 4, 21, 8, 12, 6, (0.1, 1.0, 1e2, 1e4), (1.0, 1e2, 1e4))


class Study:
    """Predictions and measurements; both in units of the loss, averaged over p(x|t)."""

    def __init__(self, run: Run) -> None:
        self.run, self.size, self.data = run, QUICK if run.quick else FULL, toy("triple")
        self.x, self.weights = places(EmpiricalScore(self.data, PROCESS), TIME, self.size.places)
        self.S = float(PROCESS.S(torch.tensor(TIME, dtype=torch.float64)))

    def model(self, tau: float, init: bool = True) -> Lazy:
        return Lazy(NTK(2, "relu", init_width=256), tau, target="x0", init=init)

    def predicted(self, tau: float) -> tuple[Tensor, float]:
        """``(groups, part)``, and the number of directions that are learned."""
        out, effective = [], 0.0
        for group in range(self.size.groups):
            seed = rng.key(self.run.seed, "reproduce/v_lazy/kernel", group)
            kernel = kernels.Lazy(
                self.model(tau), self.data, PROCESS, draws=self.size.draws, sets=self.size.sets, seed=seed
            )
            found = kernel.parts(self.x, TIME)
            out.append(torch.stack([self.S * (self.weights * found[p][:, 0, 0]).sum() for p in PARTS]))
            effective += kernel.effective / self.size.groups
        return torch.stack(out), effective

    def train(self, tau: float, goal: str, init: bool = True) -> Ensemble:
        return train_ensemble(
            self.model(tau, init),
            self.data,
            PROCESS,
            members=self.size.members,
            draws=self.size.draws,
            objective=goal,
            seed=rng.key(self.run.seed, "reproduce/v_lazy/ensemble"),
            show=False,
        )

    def measured(self, tau: float) -> tuple[Tensor, Tensor]:
        """q ``(M, part + 1)``, the whole last, and gap masses ``(M, objective)`` of J1 and J0."""
        noisy, twin = self.train(tau, "J1"), self.train(tau, "J0")
        s, s0 = noisy(self.x, TIME), twin(self.x, TIME)
        still = self.train(tau, "J0", init=False)(self.x, TIME)
        q = torch.stack([self._square(d) for d in (s - s0, still, s0 - still, s)], -1)
        self.last = (noisy, twin)
        return q, torch.stack([self.gap(e, self.size.sampled, self.size.steps) for e in self.last], -1)  # paired

    def integrators(self) -> Tensor:
        """Mean gap masses ``(integrator, objective)`` of a few members, trained last: as used, finer, the paper's."""
        few, steps = max(2, self.size.sampled // 2), self.size.steps
        kinds = ((steps, "heun", "log"), (2 * steps, "heun", "log"), (EULER, "euler", "uniform"))
        return torch.stack([torch.stack([self.gap(e, few, *kind).mean() for e in self.last]) for kind in kinds])

    def _square(self, d: Tensor) -> Tensor:
        """Each member's contribution ``(M,)`` to the variance of ``d (M, n, 1)``."""
        M = len(d)
        return self.S * M / (M - 1) * (self.weights * (d - d.mean(0))[..., 0].square()).sum(-1)

    def gap(self, ensemble: Ensemble, members: int, steps: int, method: str = "heun", spacing: str = "log") -> Tensor:
        """P(.25 < |x| < .75) of the first members, ``(M,)``, from starts at the quantiles of N(0, S_T)."""
        level = (torch.arange(self.size.starts, dtype=torch.float64) + 0.5) / self.size.starts
        x_T = PROCESS.sigma(torch.tensor(PROCESS.T, dtype=torch.float64)) * torch.special.ndtri(level)[:, None]
        some = ensemble[:members]
        assert isinstance(some, Ensemble)
        x = some.sample(x_T=x_T, steps=steps, method=method, spacing=spacing, show=False).abs()
        return ((x > GAP[0]) & (x < GAP[1])).double().mean((1, 2))


def crossing(taus: Tensor, up: Tensor, down: Tensor) -> float:
    """The first τ at which ``up`` overtakes ``down``, straight lines between points on log axes; NaN where never."""
    gap = (up.clamp_min(1e-300) / down.clamp_min(1e-300)).log()
    over = ((gap[:-1] < 0) & (gap[1:] >= 0)).nonzero().flatten().tolist()
    if not over:
        return math.nan
    k, x = over[0], taus.log()
    return float((x[k] - gap[k] * (x[k + 1] - x[k]) / (gap[k + 1] - gap[k])).exp())


def jackknifed(taus: Tensor, parts: Tensor, blocks: int) -> Tensor:
    """The crossing of target noise and initialisation ``(3,)`` in ``parts (τ, repetition, part)``, with its error."""
    first, last = (PARTS.index(p) for p in ("targets", "init"))

    def at(some: Tensor) -> float:
        mean = some.mean(1)
        return math.log(crossing(taus, mean[:, first], mean[:, last]))

    pieces = torch.arange(parts.shape[1]).chunk(blocks)
    n = len(pieces)
    without = torch.tensor([at(torch.cat([parts[:, p] for p in pieces[:k] + pieces[k + 1 :]], 1)) for k in range(n)])
    se = float(((n - 1) / n * (without - without.mean()).square().sum()).sqrt())
    return lognormal(torch.tensor(at(parts)).exp(), torch.tensor(se), n - 1)


@one_thread
def make(run: Run) -> Exhibit:
    study = Study(run)
    size = study.size
    lines, effective = [], []
    for tau in size.taus:
        parts, count = study.predicted(tau)
        lines.append(parts)
        effective.append(count)
        run.step(0.3 / len(size.taus))
    found, gaps = [], []
    for tau in size.measured:
        q, gap = study.measured(tau)
        found.append(q)
        gaps.append(gap)
        run.step(0.6 / len(size.measured))
    kinds = study.integrators()
    line, q = torch.stack(lines), torch.stack(found)  # (τ, groups, part) and (τ, M, part + 1)
    value = lognormal(q.mean(1), torch.stack([relative(a) for a in q]), size.members - 1)  # (3, τ, part + 1)
    mass = torch.stack([_estimate(torch.cat([g, g[:, :1] - g[:, 1:]], 1)) for g in gaps])  # J1, J0, J1 - J0: (τ, 3, 3)
    same = [size.taus.index(tau) for tau in size.measured]
    times = torch.tensor(size.measured, dtype=torch.float64)
    cross = torch.stack([jackknifed(times, line[same], size.groups), jackknifed(times, q, 8)])  # (predicted, measured)
    ratio = torch.stack([quotient(a, _whole(b)) for a, b in zip(q, line[same], strict=True)])  # (τ, 3, part + 1)
    late = float(value[0, -1, PARTS.index("targets")] / value[0, -1, -1])
    saved = run.arrays(
        "v_lazy",
        tau=size.taus,
        parts=[*PARTS, "total"],
        predicted=_whole(line).mean(1),
        learned_directions=effective,
        measured_tau=size.measured,
        measured=value,
        ratio=ratio,
        gap_mass=mass,
        gap_mass_of_few=kinds,
        crossing=torch.nan_to_num(cross, nan=-1.0),
    )
    pictures = (_picture(run, study, line, effective, value, mass, cross),)
    run.step(0.1)
    return Exhibit(
        name="v_lazy",
        title=TITLE,
        pictures=pictures,
        data=saved,
        sizes=f"P = {size.draws} draws, {size.members} members of each of three twins at {len(size.measured)} values "
        f"of τ; prediction over {size.groups} × {size.sets} sets of inputs at {len(size.taus)}; gap mass of "
        f"{size.sampled} members, {size.starts} starts each, {size.steps} steps of Heun's method.",
        opening=(
            "How long a network trains decides which randomness is left in it. At first two networks differ because "
            "they began differently. Training erases that, and writes something else in its place: the noise of the "
            "targets. An infinitely wide network shows it in closed form.",
        ),
        finding=Finding(
            number=f"τ = {number(float(cross[1, 0]), 2)}" if cross[1].isfinite().all() else "no crossing",
            interval=f"95 % interval {_interval(cross[1])}" if cross[1].isfinite().all() else "or none that is certain",
            words=(
                verdict(cross),
                _ratios(ratio[:, :, -1], size.measured),
                gap_words(mass[-1], size.measured[-1], late),
            ),
        ),
        tables=(_table(size.measured, ratio, value),),
        closing=(_steps_words(kinds, size),),
    )


def _whole(parts: Tensor) -> Tensor:
    """The parts, and their sum last."""
    return torch.cat([parts, parts.sum(-1, keepdim=True)], -1)


def _estimate(samples: Tensor) -> Tensor:
    """Mean over members and its interval, ``(columns, 3)``."""
    e = Estimate.of_mean(samples)
    return torch.stack([e.value, e.low, e.high], -1)


def _interval(curve: Tensor, digits: int = 2) -> str:
    return f"{number(float(curve[1]), digits)} to {number(float(curve[2]), digits)}"


def verdict(cross: Tensor) -> str:
    """What the two crossings ``(predicted and measured, 3)`` say."""
    theory, seen = cross
    known = cross[:, 0].isfinite().tolist()
    if not all(known):
        which = "only one of them" if any(known) else "neither"
        return (
            f"Of prediction and measurement, {which} shows target noise overtaking initialisation in this range of τ."
        )
    begin = "The time of training at which target noise overtakes initialisation, measured by twins. Theory says "
    begin += f"τ = {number(float(theory[0]), 2)} ({_interval(theory)}), "
    if not bool(cross.isfinite().all()):
        return begin + "but with some members left out the crossing is lost, and an interval is not known."
    if theory[1] <= seen[2] and seen[1] <= theory[2]:
        return begin + "and the intervals meet."
    side = "earlier" if seen[0] > theory[0] else "later"
    return begin + f"{side} than measured, and the intervals do not meet: here theory and networks disagree."


def _ratios(ratio: Tensor, taus: tuple[float, ...]) -> str:
    """Measured over predicted of the whole, ``(τ, 3)``."""
    held = (ratio[:, 1] <= 1) & (ratio[:, 2] >= 1)
    low, high = float(ratio[:, 0].min()), float(ratio[:, 0].max())
    words = f"Measured over predicted, the whole variance is {number(low)} to {number(high)} at the {len(taus)} times, "
    if bool(held.all()):
        return words + "and every 95 % interval holds 1."
    outside = ", ".join(f"{t:g}" for t, ok in zip(taus, held.tolist(), strict=True) if not ok)
    return words + f"and {int(held.sum())} of {len(held)} intervals hold 1; the others are at τ = {outside}."


def gap_words(mass: Tensor, tau: float, share: float) -> str:
    """What the gap masses ``(J1, J0 and their difference, 3)`` say where ``share`` of the variance is target noise."""
    noisy, quiet, change = mass
    words = (
        f"At τ = {tau:g} the trained networks leave {number(float(noisy[0]), 2)} of their samples in the gaps with J1 "
        f"and {number(float(quiet[0]), 2)} with J0; member by member the difference is {number(float(change[0]), 2)} "
        f"({_interval(change)}): "
    )
    if change[1] > 0:
        return words + "here the noise of the target fills gaps."
    if change[2] < 0:
        return words + "here the noise of the target empties gaps. A large variance is not yet a full gap."
    return words + (
        f"no effect of target noise on the gaps is seen here, though {percent(share)} of the variance is target noise. "
        "A large variance is not yet a full gap."
    )


def _steps_words(kinds: Tensor, size: Size) -> str:
    """How much of the gap masses is the integrator's; ``(as used, finer, the paper's; objective)``."""
    cells = [f"{number(a, 2)} and {number(b, 2)}" for a, b in kinds.tolist()]
    words = (
        f"The integrator is part of the answer. {max(2, size.sampled // 2)} members at τ = {size.measured[-1]:g} have "
        f"{cells[0]} in the gaps (J1 and J0) with {size.steps} steps of Heun's method, even in log(σ/α), {cells[1]} "
        f"with {2 * size.steps}, and {cells[2]} with {EULER} uniform Euler steps, as in the paper. "
    )
    finer, extra = float((kinds[0] - kinds[1]).abs().max()), (kinds[2] - kinds[1]).tolist()
    if max(map(abs, extra)) > 2 * finer:
        changes = " and ".join(f"{e:+.2g} ({goal})" for e, goal in zip(extra, ("J1", "J0"), strict=True))
        return words + f"What Euler's steps change, {changes}, is an error of integration."
    return words + "The paper's steps change no more than twice what doubling the steps does."


def _picture(
    run: Run, study: Study, line: Tensor, effective: list[float], value: Tensor, mass: Tensor, cross: Tensor
) -> Picture:
    size = study.size
    first, last = line[0].mean(0), line[-1].mean(0)
    names = [*(WORDS[p] for p in PARTS), "all together"]
    share = {name: [percent(float(p[k] / p.sum())) for p in (first, last)] for k, name in enumerate(PARTS)}
    return run.picture(
        "v_lazy",
        lambda: plots.part_curves(
            size.taus,
            dict(zip(names, _whole(line).mean(1).mT, strict=True)),
            size.measured,
            dict(zip(names, value.movedim((2, 0), (0, 1)), strict=True)),
            {goal: mass[:, k].mT for k, goal in enumerate(("J1", "J0"))},
            float(cross[0, 0]),
        ),
        alt=f"Left: parts of the variance against training time τ from {size.taus[0]:g} to {size.taus[-1]:g}, on "
        f"logarithmic axes, predicted and measured. Initialisation goes from {share['init'][0]} of the whole to "
        f"{share['init'][1]}, target noise from {share['targets'][0]} to {share['targets'][1]}. Right: the mass of "
        f"samples in the gaps for J1 and J0, {number(float(mass[0, 0, 0]), 2)} and {number(float(mass[0, 1, 0]), 2)} "
        f"at τ = {size.measured[0]:g}, {number(float(mass[-1, 0, 0]), 2)} and {number(float(mass[-1, 1, 0]), 2)} at "
        f"{size.measured[-1]:g}.",
        caption=(
            f"Left: σ² tr Cov at t = {TIME:g}, over p(x|t): predicted (lines) and measured by twins (points, 95 % "
            f"intervals). A network of depth 2 with ReLU, P = {size.draws}; it has learned {number(effective[0], 2)} "
            f"directions at τ = {size.taus[0]:g} and {number(effective[-1], 2)} at {size.taus[-1]:g}.",
            "Right: P(.25 < |x| < .75) of samples of the trained networks, J1 against J0 on the same inputs and "
            "initial weights, means over members with 95 % intervals.",
        ),
    )


def _table(taus: tuple[float, ...], ratio: Tensor, value: Tensor) -> Table:
    rows = []
    for k, tau in enumerate(taus):
        cells = (f"{number(float(r[0]))} ({_interval(r, 3)})" for r in ratio[k].mT)
        rows.append((f"τ = {tau:g}", *cells, f"{number(float(value[0, k, 0] / value[0, k, -1]), 2)}"))
    return Table(
        caption="Measured over predicted variance, by part, with 95 % intervals; and the measured share of target "
        "noise.",
        head=("training time", *(WORDS[p] for p in PARTS), "all together", "share of target noise"),
        rows=tuple(rows),
    )
