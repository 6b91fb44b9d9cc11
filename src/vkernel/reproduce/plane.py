r"""V over C: does the variance of the learned score follow the noise of its target over places (docs/theory.md, §8)?

Four training points on the unit circle, ensembles of linear models and of networks as in Figure 3. At a time t, in the
unit of the loss,

.. math:: \sigma^2 \mathrm{tr}\,C(x,t), \qquad \sigma^2 \mathrm{tr\,Cov}_\theta[\hat s(x,t)]
          = \frac1M \sum_m q_m(x), \quad q_m = \frac{M}{M-1} \sigma^2 |\hat s_m - s_{avg}|^2 .

Models of J0 have the inputs and features of J1 and targets without noise; :math:`\hat s_1 - \hat s_0` is the effect of
target noise. Spearman's correlation of tr V with tr C is over places drawn from :math:`p(x|t)`, and over places evenly
spaced on the lines between training points. Its error adds the variance over places (Bonett and Wright's) and over
members (the jackknife's). Places where :math:`\sigma^2 \mathrm{tr}\,C > 1`, so that the score pushes apart (§10.3), are
the *boundaries*; ``concentration`` is the share of V that is there, over the share of places that are there.
"""

from types import SimpleNamespace

import torch
from torch import Tensor

from vkernel import plots
from vkernel.core.estimate import Estimate, jackknife, jackknife_se, leave_one_out, ratio_of_means, spearman, stacked
from vkernel.data import toy
from vkernel.process import VP
from vkernel.reproduce.exhibit import Exhibit, Page, Run, Values, one_thread
from vkernel.reproduce.variances import squares
from vkernel.score import EmpiricalScore
from vkernel.train import features
from vkernel.train.ensemble import Ensemble, train_ensemble
from vkernel.train.models import MLP, Linear, Model

PROCESS, DATA, TIMES = VP(eps=0.01), toy("square"), (0.05, 0.2)
GOALS, LIMIT = ("J1", "J0"), 1.5
WHERE = ("drawn from p(x|t)", "on lines between points")


def places(t: float, count: int, line: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return ``count`` places drawn from p(x|t), and ``line`` places on each line between two training points."""
    y, u = DATA[:], torch.linspace(0, 1, line, dtype=torch.float64)[:, None, None]
    alpha, sigma = (f(torch.tensor(t, dtype=torch.float64)) for f in (PROCESS.alpha, PROCESS.sigma))
    which = torch.randint(len(y), (count,), generator=generator)
    drawn = alpha * y[which] + sigma * torch.randn(count, 2, generator=generator, dtype=torch.float64)
    i, j = torch.triu_indices(len(y), len(y), 1)
    return drawn, alpha * ((1 - u) * y[i] + u * y[j]).flatten(0, 1)


def follows(q: Tensor, noise: Tensor) -> Estimate:
    """Return the rank correlation of the mean of ``q (M, place)`` over members with ``noise (place,)``."""
    over = spearman(q.mean(0), noise)
    without = leave_one_out(lambda some: spearman(some.mean(0), noise).value, q)
    return Estimate[float].of_variances(
        over.value, [(over.se**2, len(noise)), (float(jackknife_se(without)) ** 2, len(q))], -1.0, 1.0
    )


def concentration(q: Tensor, inside: Tensor) -> Estimate:
    """Return the share of ``q (M, place)`` at the places ``inside``, over their share of all places."""

    def at(some: Tensor) -> Tensor:
        return some[:, inside].sum() / some.sum() / inside.double().mean()

    return jackknife(at(q), leave_one_out(at, q), low=0.0)


def variances(pair: tuple[Ensemble, Ensemble], x: Tensor, t: float) -> Tensor:
    """Return q of J1, of J0 and of their difference, ``(3, M, place)``."""
    one, zero = (members(x.to(members.dtype), t).double() for members in pair)
    S = PROCESS.S(torch.tensor(t, dtype=torch.float64))
    return torch.stack([S * squares(s).sum(-1) for s in (one, zero, one - zero)])


@one_thread()
def v_over_c(run: Run) -> Exhibit:
    """Map V of linear models and of networks over C, and correlate the two over places."""
    s, score = run.sizes("v_over_c"), EmpiricalScore(DATA, PROCESS)
    linear = Linear(features.grid("gaussian", 10, 2, process=PROCESS), target="x0", ridge=0.1)
    pairs = {"linear": _twins(run, linear, s.linear, s.draws)}
    run.step(0.1)
    pairs["network"] = _twins(run, MLP(target="x0", **s.network), s.networks, s.draws)
    run.step(0.6)
    axis = torch.linspace(-LIMIT, LIMIT, s.side, dtype=torch.float64)
    grid = torch.stack(torch.meshgrid(axis, axis, indexing="xy"), -1)
    unit, alpha = (f(torch.tensor(TIMES, dtype=torch.float64)) for f in (PROCESS.S, PROCESS.alpha))

    def noise(x: Tensor, k: int) -> Tensor:
        return unit[k] * score.covariance(x, TIMES[k]).trace()

    where = [places(t, s.places, s.line, run.stream("v_over_c/places", k)) for k, t in enumerate(TIMES)]
    C = [tuple(noise(x, k) for x in both) for k, both in enumerate(where)]
    maps = {"σ² tr C": torch.stack([noise(grid, k) for k in range(len(TIMES))])}
    cases: dict[str, list[SimpleNamespace]] = {}
    for name, pair in pairs.items():
        for j, goal in enumerate(GOALS):
            maps[f"V, {name}, {goal}"] = torch.stack([variances(pair, grid, t)[j].mean(0) for t in TIMES])
        found = [[variances(pair, x, t) for x in both] for t, both in zip(TIMES, where, strict=True)]
        for j, goal in enumerate((*GOALS, "J1 − J0")):
            of_goal = zip(found, C, strict=True)
            cases[f"{name}, {goal}"] = [about([q[j] for q in both], c, both[0][0]) for both, c in of_goal]
        run.step(0.1)
    learned = [at for name in pairs for at in cases[f"{name}, J1"]]
    arrays: Values = {"times": TIMES, "x": axis, "maps": torch.stack(list(maps.values())), "columns": list(maps)}
    arrays |= {"points": alpha[:, None, None] * DATA[:], "where": WHERE, "at": torch.stack([x for x, _ in where])}
    arrays |= {"noise": torch.stack([c for c, _ in C]), "cases": list(cases)}
    arrays["variance"] = torch.stack([torch.stack([at.V for at in case]) for case in cases.values()])
    arrays["rho"] = torch.stack([torch.stack([stacked(at.rho).stack(-1) for at in case]) for case in cases.values()])
    values: Values = {"all": cases, "learned": learned, "members": {name: len(pair[0]) for name, pair in pairs.items()}}
    edges = {name: tuple(cases[f"{name}, {goal}"][0].edge for goal in GOALS) for name in pairs}
    values["due"] = [name for name, (one, zero) in edges.items() if one.low > max(1.0, zero.high)]
    values["alike"] = [name for name, (one, zero) in edges.items() if one.low < zero.value < one.high]
    values |= {"lows": [at.rho[0].low for at in learned], "highs": [at.rho[0].high for at in learned]}
    inside = C[0][0] > 1
    values |= {"edge": float(inside.double().mean()), "of_C": float(C[0][0][inside].mean() / C[0][0].mean())}
    page = Page(run, "v_over_c", arrays, seed=run.seed, range_C=C[1][1].aminmax(), **values, **vars(s))
    rows, label = [f"t = {t:g}" for t in TIMES], "σ² tr C and σ² tr V"
    rho = [[cases[name.removeprefix("V, ")][k].rho[0].value for name in [*maps][1:]] for k in range(len(TIMES))]
    notes = [["", *(f"ρ = {v:.2f}" for v in row)] for row in rho]
    page.picture("v_over_c", plots.kernel_maps, axis, maps, maps["σ² tr C"], arrays["points"], rows, notes, label)
    return page.exhibit(0.1)


def about(q: list[Tensor], C: tuple[Tensor, ...], whole: Tensor) -> SimpleNamespace:
    """Return correlations with C, concentration on boundaries, the mean, and its share of the ``whole``, that of J1."""
    out = SimpleNamespace(V=q[0].mean(0), mean=Estimate[float].of_mean(q[0].mean(-1)))
    out.rho = [follows(part, noise) for part, noise in zip(q, C, strict=True)]
    out.share = ratio_of_means(q[0].mean(-1), whole.mean(-1), paired=True)
    inside = C[0] > 1
    out.edge = concentration(q[0], inside) if bool(inside.any()) else None
    return out


def _twins(run: Run, model: Model, members: int, draws: int) -> tuple[Ensemble, Ensemble]:
    """Return members of J1 and of J0 on the same inputs that are finite in both."""
    how: Values = {"members": members, "draws": draws, "seed": run.key("v_over_c/members")}
    one, zero = (train_ensemble(model, DATA, PROCESS, objective=goal, **how) for goal in GOALS)
    kept = [m for m in range(members) if m not in {*one.diverged, *zero.diverged}]
    return one.select(kept), zero.select(kept)
