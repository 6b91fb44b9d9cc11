"""Figure 2: laws by transport are the ensemble's own, and the numbers are those that others found."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from vkernel.reproduce.transport import carry, quantiles

import vkernel as vk
from vkernel.reproduce import figure2, page

PROCESS = vk.VP(eps=1e-3)
GRID = vk.features.grid("gaussian", 16, 1, -1.5, 1.5, PROCESS)
MODEL = vk.models.Linear(GRID, "x0", 0.1)
FINE = torch.linspace(-6, 6, 9601, dtype=torch.float64)


def ensemble(P: int, objective: str = "J1", members: int = 5, seed: int = 3) -> vk.Ensemble:
    data = vk.data.toy("triple")
    return vk.train_ensemble(MODEL, data, PROCESS, members=members, draws=P, objective=objective, seed=seed)


def test_quantiles_carry_the_prior():
    x = quantiles(PROCESS, 1000)
    assert bool((x.diff() > 0).all())
    assert float(x.mean()) == pytest.approx(0, abs=1e-12)
    assert float(x.var()) == pytest.approx(float(PROCESS.S(torch.tensor(1.0))), rel=5e-3)


@pytest.mark.parametrize(("exponential", "method", "spacing"), [(False, "euler", None), (True, "exponential", "log")])
def test_transport_is_the_samplers_own(exponential, method, spacing):
    """The same steps through the ensemble's sampler, which evaluates every feature at every point."""
    ens = ensemble(64)
    start = quantiles(PROCESS, 200)
    times = PROCESS.times(40, spacing)
    tables = figure2._tables(GRID, ens.state["weights"][..., 0])
    got = carry(tables, PROCESS, start, times, FINE, lookup="linear", exponential=exponential)
    want = ens.sample(x_T=start[:, None], steps=40, method=method, spacing=spacing)[..., 0]
    assert float((got - want).abs().median()) < 1e-4
    assert float((got - want).abs().mean()) < 3e-3  # near a boundary two neighbours may part


def test_the_published_look_up_by_a_plain_loop():
    ens = ensemble(128, members=2)
    nodes = torch.linspace(-1.5, 1.5, 200, dtype=torch.float64)
    start, times = quantiles(PROCESS, 50), PROCESS.times(30)
    tables = figure2._tables(GRID, ens.state["weights"][..., 0])
    got = carry(tables, PROCESS, start, times, nodes, lookup="right", exponential=False)
    x = start.expand(2, -1).clone()
    for t, t2 in pairwise(times):
        m = MODEL.output(ens.state, nodes[None, :, None], t.reshape(1, 1), PROCESS)[..., 0]
        j = torch.searchsorted(nodes, x).clamp_max(199)
        s = (PROCESS.alpha(t) * m.gather(1, j) - x) / PROCESS.S(t)
        x = x + (t - t2) * (PROCESS.beta(t) * x + PROCESS.D(t) * s)
    torch.testing.assert_close(got, x, rtol=1e-9, atol=1e-9)


def test_exact_score_with_thirty_euler_steps_leaves_mass_in_the_gaps():
    panel = figure2._panel(figure2._exact_tables(PROCESS), PROCESS, figure2.SCHEMES["euler100"], 4096)
    assert float(panel.gap[0]) < 1e-3
    thirty = figure2.Scheme("", 30, None, FINE, "linear", False)
    panel = figure2._panel(figure2._exact_tables(PROCESS), PROCESS, thirty, 4096)
    assert float(panel.gap[0]) == pytest.approx(0.032, abs=0.002)


# P: gap mass with J1 and J0, each with its standard error, by two other implementations (100 Euler steps, eps 1e-3)
KNOWN = {64: (0.18, 0.01, 0.09, 0.01), 256: (0.12, 0.02, 0.064, 0.004), 1024: (0.011, 0.003, 0.018, 0.002)}


@pytest.mark.parametrize("P", KNOWN)
def test_gap_mass_is_what_others_found(P):
    for objective, (value, se) in zip(("J1", "J0"), (KNOWN[P][:2], KNOWN[P][2:]), strict=True):
        ens = ensemble(P, objective, members=100, seed=0)
        tables = figure2._tables(GRID, ens.state["weights"][..., 0])
        gap = figure2._panel(tables, PROCESS, figure2.SCHEMES["euler100"], 1024).gap
        own = float(gap.std()) / 10
        assert abs(float(gap.mean()) - value) < 3 * (own**2 + se**2) ** 0.5


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    out = tmp_path_factory.mktemp("figure2")
    shares = []
    exhibit = figure2.make(page.Run(out, 0, True, shares.append))
    assert sum(shares) == pytest.approx(1)
    return out, exhibit, np.load(out / exhibit.data)


def test_arrays_are_laws(made):
    _, _, saved = made
    for scheme in ("published", "converged"):
        for objective in ("J1", "J0"):
            gap, modes = saved[f"{scheme}_{objective}_gap"], saved[f"{scheme}_{objective}_modes"]
            assert gap.shape == (3, 5, 12)
            assert modes.shape == (3, 5, 12, 3)
            assert bool((gap + modes.sum(-1) <= 1 + 1e-9).all())
            density = saved[f"{scheme}_{objective}_density"]
            np.testing.assert_allclose(density.sum(-1) * 3 / 75, 1, rtol=1e-9)


def test_page_says_what_the_arrays_say(made):
    out, exhibit, saved = made
    one, zero = (saved[f"converged_{o}_gap"][1, 2].mean() for o in ("J1", "J0"))
    assert exhibit.finding.number == f"{page.number(one / zero)} times"
    assert page.number(float(one)) in exhibit.finding.words[0]
    for picture in exhibit.pictures:
        assert (out / f"{picture.stem}.png").stat().st_size > 1000
        assert (out / f"{picture.stem}-dark.png").exists()
    assert len(exhibit.tables[0].rows) == 6
