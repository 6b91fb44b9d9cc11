"""Energy and Wasserstein distances: each by a second route."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from draws import gen, normal, spread
from scipy import stats

import vkernel as vk
from vkernel import metrics
from vkernel.metrics import distances

Z = 1.959963984540054


def test_energy_distance_is_scipys_without_its_bias():
    a, b = normal(150, seed=1), 1.4 * normal(90, seed=2) + 0.3
    n, m = len(a), len(b)
    inner = [float(torch.cdist(x[:, None], x[:, None]).mean()) / (len(x) - 1) for x in (a, b)]
    want = stats.energy_distance(a, b) ** 2 - sum(inner)  # scipy's pairs (i, i) are no pairs
    got = metrics.energy_distance(a, b)
    assert got.value == pytest.approx(want, rel=1e-9)
    left = [metrics.energy_distance(torch.cat([a[:i], a[i + 1 :]]), b).value for i in range(n)]
    right = [metrics.energy_distance(a, torch.cat([b[:i], b[i + 1 :]])).value for i in range(m)]
    variance = sum((len(v) - 1) * np.var(v) for v in (left, right))
    assert got.se == pytest.approx(math.sqrt(variance), rel=1e-9)


def test_energy_distance_of_members_takes_pairs_from_different_members():
    x, y = normal(5, 20, 3, seed=1), normal(30, 3, seed=2) + 1
    cross = torch.cdist(x.reshape(-1, 3), y).mean()
    blocks = torch.stack([torch.stack([torch.cdist(u, v).mean() for v in x]) for u in x])
    within = (blocks.sum() - blocks.diagonal().sum()) / 20
    other = torch.cdist(y, y).sum() / (30 * 29)
    got = metrics.energy_distance(x, y)
    assert got.value == pytest.approx(float(2 * cross - within - other), rel=1e-9)
    assert metrics.energy_distance(y, x).value == pytest.approx(got.value)


def test_energy_distance_in_many_dimensions_chunked(monkeypatch):
    x, y = normal(60, 40, seed=1) + 1e4, normal(50, 40, seed=2) + 1e4
    want = 2 * torch.cdist(x, y).mean() - torch.cdist(x, x).sum() / (60 * 59) - torch.cdist(y, y).sum() / (50 * 49)
    monkeypatch.setattr(distances, "CHUNK", 300)
    assert metrics.energy_distance(x, y).value == pytest.approx(float(want), abs=1e-4)


@pytest.mark.parametrize("sizes", [(50, 50), (50, 70), (7, 21), (1, 9)])
def test_wasserstein_of_numbers_is_scipys(sizes):
    a, b = normal(sizes[0], seed=1), 1.5 * normal(sizes[1], seed=2) + 0.3
    got = metrics.wasserstein(a, b)
    assert got.value == pytest.approx(stats.wasserstein_distance(a, b), rel=1e-12)
    copies = math.lcm(*sizes)
    x, y = (v.repeat_interleave(copies // len(v)).sort().values for v in (a, b))
    assert metrics.wasserstein(a, b, p=3).value == pytest.approx(float((x - y).abs().pow(3).mean()) ** (1 / 3))
    assert metrics.wasserstein(a, b, kind="sliced").value == got.value


@pytest.mark.parametrize("p", [1, 2, 2.5])
@pytest.mark.parametrize("sizes", [(20, 20), (20, 13), (6, 18)])
def test_potentials_on_a_line_are_dual(p, sizes):
    """Feasible, and of the same value as the coupling: which proves both optimal."""
    x, y = normal(1, sizes[0], seed=1), normal(1, sizes[1], seed=2) + 0.5
    cost, phi, psi = distances._along_lines(x, y, p)
    shift = (x.T - y).abs().pow(p) - phi[:, None] - psi  # potentials are known up to a constant
    slack = shift.min()
    assert float(phi.mean() + psi.mean() + slack) == pytest.approx(float(cost), rel=1e-9)


@pytest.mark.parametrize("p", [1, 2])
def test_potentials_of_a_matching_are_dual(p):
    x, y = normal(40, 3, seed=1), 1.3 * normal(40, 3, seed=2) + 0.5
    cost, phi, psi = distances._matching(x, y, p)
    assert float((torch.cdist(x, y) ** p - phi[:, None] - psi).min()) > -1e-9
    assert float(phi.mean() + psi.mean()) == pytest.approx(float(cost), rel=1e-12)


def test_wasserstein_of_shifted_samples_is_the_shift():
    x, shift = normal(200, 3), torch.tensor([3.0, -4.0, 0.0], dtype=torch.float64)
    for p in (1, 2):
        exact = metrics.wasserstein(x, x[torch.randperm(200, generator=gen(0))] + shift, p, "exact")
        assert exact.value == pytest.approx(5)
        assert metrics.wasserstein(x[:, 0], x[:, 0] - 0.7, p).value == pytest.approx(0.7)
    # E |u·v|² = |v|²/d over directions; the projections' share of the error is what is left
    sliced = metrics.wasserstein(x, x + shift, 2, projections=2000)
    assert sliced.value == pytest.approx(5 / math.sqrt(3), rel=0.05)
    assert sliced.value <= exact.value


def test_exact_and_line_agree_for_points_on_a_line():
    a, b = normal(60, seed=1), normal(60, seed=2) * 2
    plane = [torch.stack([v, torch.zeros_like(v)], 1) for v in (a, b)]
    for p in (1, 2):
        one, two = metrics.wasserstein(a, b, p), metrics.wasserstein(*plane, p, "exact")
        assert one.value == pytest.approx(two.value)
        assert one.se == pytest.approx(two.se, rel=0.1)  # potentials of finite samples have some freedom


@pytest.mark.parametrize("p", [1, 2])
def test_the_error_of_wasserstein_is_the_bootstraps(p):
    a, b, source = normal(300, seed=1), 1.5 * normal(200, seed=2) + 0.5, gen(3)
    again = []
    for _ in range(300):
        i, j = (torch.randint(len(v), (len(v),), generator=source) for v in (a, b))
        again.append(metrics.wasserstein(a[i], b[j], p).value)
    assert metrics.wasserstein(a, b, p).se == pytest.approx(np.std(again), rel=0.2)


def test_the_errors_of_members_are_their_spread():
    """The members' fields make the error; one average law, many ensembles."""
    lines, planes = [], []
    for k in range(100):
        field = 0.5 * normal(12, 1, 2, seed=k)
        x = normal(12, 25, 2, seed=1000 + k) + field + 3
        lines.append(metrics.wasserstein(x[..., :1], normal(200, 1, seed=2000 + k)))
        planes.append(metrics.wasserstein(x, normal(200, 2, seed=2000 + k), 2, projections=16))
    for estimates in (lines, planes):
        sd, claimed = spread([vk.Estimate(e.value, e.se, 0, 0) for e in estimates])
        assert claimed > 0.9 * sd  # of the sliced one the directions, the same here each time, have a share
    assert spread(lines)[1] == pytest.approx(spread(lines)[0], rel=0.3)
