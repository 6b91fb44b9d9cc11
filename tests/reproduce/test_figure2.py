"""Figure 2: its laws are the ensemble's own, and its numbers are those that others found."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from exhibits import Made, check, make, says
from xarray import Dataset

import vkernel as vk
from vkernel import study
from vkernel.core.estimate import Estimate
from vkernel.reproduce.exhibit import Run, number
from vkernel.reproduce.figure2 import figure2

PROCESS = vk.VP(eps=1e-3)
GRID = vk.features.grid("gaussian", 16, 1, -1.5, 1.5, PROCESS)
MODEL = vk.models.Linear(GRID, "x0", 0.1)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make(tmp_path_factory.mktemp("figure2"), 0, figure2)


def results(tmp_path: Path, scheme: int, members: int, draws: list[int], **changes: object) -> Dataset:
    """The exhibit's own study at eps = 1e-3 with one integrator."""
    spec = Run(tmp_path, 0, False, print).spec("figure2")
    sampler = spec["grid"]["sampler"]["values"][scheme] | changes
    grid = {"training.draws": draws, "objective.K": spec["grid"]["objective.K"]}
    spec |= {"members": members, "block": members, "process": {"eps": 1e-3}, "sampler": sampler, "grid": grid}
    return study.run(spec, tmp_path / "store", progress=False).load()


def test_every_exhibit_is_complete(made: Made) -> None:
    check(made)


def test_the_published_look_up_by_a_plain_loop(tmp_path: Path) -> None:
    ens = vk.train_ensemble(MODEL, vk.data.toy("triple"), PROCESS, members=2, draws=128, seed=0, progress=False)
    nodes = torch.linspace(-1.5, 1.5, 200, dtype=torch.float64)
    x = vk.core.rng.quasi_normals(50, 1, 0)[:, 0].expand(2, -1) * PROCESS.sigma(torch.tensor(1.0, dtype=torch.float64))
    for t, t2 in pairwise(PROCESS.times(30, "uniform")):
        m = MODEL.output(ens.state, nodes[None, :, None], t.reshape(1, 1), PROCESS)[..., 0]
        j = torch.searchsorted(nodes, x).clamp_max(199)
        s = (PROCESS.alpha(t) * m.gather(1, j) - x) / PROCESS.S(t)
        x = x + (t - t2) * (PROCESS.beta(t) * x + PROCESS.D(t) * s)
    found = results(tmp_path, 0, 2, [128], samples=50).sel(objective="J1", draws=128)
    size = x.abs()
    np.testing.assert_allclose(found["gap"], ((size > 0.25) & (size < 0.75)).double().mean(1))
    np.testing.assert_allclose(found["inside"], (size < 1.5).double().mean(1))
    counts = torch.stack([torch.histc(row, 75, -1.5, 1.5) for row in x])
    np.testing.assert_allclose(found["density"], counts / 50 * 25)


def test_the_exact_score_with_thirty_euler_steps_leaves_mass_in_the_gaps(made: Made) -> None:
    saved = made.arrays["figure2"]
    assert saved["published_exact_gap"][1] == pytest.approx(0.032, abs=0.006)
    assert (saved["converged_exact_gap"][:2] < 1e-3).all()


# P: gap mass with J1 and J0, each with its standard error, by two other implementations (100 Euler steps, eps 1e-3)
KNOWN = {64: (0.18, 0.01, 0.09, 0.01), 256: (0.12, 0.02, 0.064, 0.004), 1024: (0.011, 0.003, 0.018, 0.002)}


def test_gap_mass_is_what_others_found(tmp_path: Path) -> None:
    found = results(tmp_path, 1, 100, list(KNOWN))
    shares = found["gap"] / found["inside"]
    for P, known in KNOWN.items():
        for objective, (value, se) in zip(("J1", "J0"), (known[:2], known[2:]), strict=True):
            gap = shares.sel(draws=P, objective=objective).values
            own = float(gap.std(ddof=1)) / 10
            assert abs(float(gap.mean()) - value) < 3 * (own**2 + se**2) ** 0.5


def test_arrays_are_laws(made: Made) -> None:
    saved = made.arrays["figure2"]
    for scheme in ("published", "converged"):
        for objective in ("J1", "J0"):
            gap, modes = saved[f"{scheme}_{objective}_gap"], saved[f"{scheme}_{objective}_modes"]
            assert gap.shape == (3, 5, 12)
            assert modes.shape == (3, 5, 12, 3)
            assert bool((gap + modes.sum(-1) <= 1 + 1e-9).all())
            density = saved[f"{scheme}_{objective}_density"]
            np.testing.assert_allclose(density.sum(-1) * 3 / 75, 1, rtol=1e-9)


def test_page_says_what_the_arrays_say(made: Made) -> None:
    exhibit, saved = made.exhibits["figure2"], made.arrays["figure2"]
    one, zero = (saved[f"converged_{o}_gap"][1, 2].mean() for o in ("J1", "J0"))
    assert exhibit.finding is not None
    assert exhibit.finding.number == f"{number(one / zero)} times"
    assert number(float(one)) in exhibit.finding.words[0]
    assert len(exhibit.tables) == 2
    assert len(exhibit.tables[0].rows) == 6


@pytest.mark.parametrize(
    ("low", "high", "words"), [(0.1, 0.2, "fills"), (-0.2, -0.1, "empties"), (-1, 1, "beyond chance")]
)
def test_the_verdict_follows_the_interval(low: float, high: float, words: str) -> None:
    values = {"difference": Estimate(0.0, 0.1, low, high), "one": 0.1, "zero": 0.1, "eps": (0, 0)}
    assert words in says("figure2", "finding.words", **values)
