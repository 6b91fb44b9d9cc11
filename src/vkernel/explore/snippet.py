"""*Copy as Python*: a short script that gives the page's numbers by the public interface of the library."""

from __future__ import annotations

import math

from vkernel.explore import simulate
from vkernel.explore.compute import CELLS, NODES, QUERIES
from vkernel.explore.state import LATEST, LIMIT, State
from vkernel.process import PROCESSES

__all__ = ["snippet"]


def snippet(state: State) -> str:
    """The script; it defines ``fraction``, ``noise`` and ``x``, and ``gap`` where there are two points."""
    parts = [_head(state), _map(state), _samples(state)]
    if len(set(state.points)) > 1:
        parts.append("gap = 1 - vk.metrics.memorised_fraction(x, data).value  # samples that copy no training point\n")
        parts.append('print(f"gap mass {gap:.4f}")\n')
    return "\n".join(part for part in parts[:3]) + "".join(parts[3:])


def _head(state: State) -> str:
    rows = [tuple(p) if state.d == 2 else p[0] for p in state.points]
    listed = ", ".join(str(row) for row in rows)
    weights = f", weights={list(state.weights)}" if any(w != 1 for w in state.weights) else ""
    T = f", T={LATEST[state.process]:g}" if state.process in LATEST else ""
    return (
        "import torch\nimport vkernel as vk\n\n"
        f"points = torch.tensor([{listed}], dtype=torch.float64)\n"
        f"data = vk.Empirical(points{weights})\n"
        f"process = vk.{PROCESSES[state.process].__name__}(eps={state.eps!r}{T})\n"
        "score = vk.EmpiricalScore(data, process)\n"
    )


def _map(state: State) -> str:
    count = NODES if state.d == 1 else CELLS
    nodes = (
        "grid = line[:, None]\n"
        if state.d == 1
        else 'second, first = torch.meshgrid(line, line, indexing="ij")\ngrid = torch.stack([first, second], -1)\n'
    )
    return (
        f"t = {state.t!r}  # the map: which share of the training target is noise\n"
        f"line = torch.linspace(-{LIMIT:g}, {LIMIT:g}, {count}, dtype=torch.float64)\n"
        f"{nodes}"
        "s, C = score.with_covariance(grid, t)\n"
        "fraction = C.trace() / (C.trace() + s.square().sum(-1))\n"
        f"noise = vk.noise_fraction(data, process, t, queries={QUERIES}, generator={state.seed})\n"
        'print(f"noise of the target at t = {t:g}: {noise}")\n'
    )


def _samples(state: State) -> str:
    flow = f'steps={state.steps}, method="exponential", spacing="log"'
    start = f"x_T = process.prior(({simulate.ALONE}, {state.d}), dtype=torch.float64, generator={state.seed})\n"
    if state.sampler == "exact":
        return f"{start}x = vk.sample.pf_ode(score, process, x_T, {flow})\n"
    if state.sampler == "naive":
        how = f'kappa={state.kappa!r}, steps={state.steps}, spacing="log", generator={state.seed}'
        return f"{start}x = vk.sample.naive(score, process, x_T, {how})\n"
    goal = {0: '"J0"', 1: '"J1"'}.get(state.K, f"vk.JK({state.K})")
    P = simulate.draws(state)
    if state.sampler == "effective":
        return (
            f"{_model(state)}"
            f"V = vk.kernels.Linear(\n    model, data, process, draws={P}, objective={goal}, seed={state.seed}, "
            f"sets={simulate.SETS}\n)\n"
            f"{start}x = vk.sample.effective_sde(V.s_avg, V, process, x_T, {flow}, generator={state.seed})\n"
        )
    return (
        f"{_model(state)}"
        f"ensemble = vk.train_ensemble(\n    model, data, process, members={simulate.members(state)}, draws={P}, "
        f"objective={goal}, seed={state.seed}\n)\n"
        f"x = ensemble.sample({simulate.EACH[state.sampler]}, {flow}, seed={state.seed})\n"
    )


def _model(state: State) -> str:
    if state.sampler in ("linear", "effective"):
        per, span = simulate.PER_AXIS[state.d], simulate.SPAN
        return (
            f'features = vk.features.grid("{state.features}", per_axis={per}, dim={state.d}, low=-{span}, high={span}, '
            f'process=process)\nmodel = vk.models.Linear(features, target="x0", ridge={simulate.RIDGE})\n'
        )
    if state.sampler == "ntk":
        tau = "float('inf')" if math.isinf(state.tau) else repr(state.tau)
        return f'model = vk.models.Lazy(vk.models.NTK(depth=2, activation="relu"), tau={tau})\n'
    given = ", ".join(f"{name}={value!r}" for name, value in simulate.NETWORK.items())
    return f"model = vk.models.MLP({given})\n"
