"""Masses and distances of laws: each by a second route, with the coverage of its interval."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from draws import gen, normal
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats

import vkernel as vk
from vkernel import metrics
from vkernel.core.errors import InputError
from vkernel.metrics import distances, masses

Z = 1.959963984540054


def covered(truth: float, estimates: list[vk.Estimate]) -> float:
    return sum(e.low <= truth <= e.high for e in estimates) / len(estimates)


def spread(estimates: list[vk.Estimate]) -> tuple[float, float]:
    """The standard deviation of the values, and the root mean square of the errors they claimed."""
    return float(np.std([e.value for e in estimates])), math.sqrt(np.mean([e.se**2 for e in estimates]))


# --- gap and boundary mass -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("hits", "n"), [(0, 7), (3, 10), (10, 10), (1, 1), (40, 1000)])
def test_the_interval_of_one_sample_solves_wilsons_quadratic(hits, n):
    got = metrics.gap_mass(torch.cat([torch.full((hits,), -0.5), torch.zeros(n - hits)]))
    p = hits / n
    roots = np.sort(np.roots([1 + Z**2 / n, -2 * p - Z**2 / n, p**2]).real)
    assert got.value == p
    assert got.se == pytest.approx(math.sqrt(p * (1 - p) / n))
    np.testing.assert_allclose([got.low, got.high], roots, atol=1e-7)


def test_the_gap_mass_of_an_ensemble_is_over_members():
    x = normal(9, 50, 1)
    share = np.array([np.mean((abs(m) > 0.25) & (abs(m) < 0.75)) for m in x.numpy()])
    got, half = metrics.gap_mass(x), stats.t.ppf(0.975, 8) * share.std(ddof=1) / 3
    want = [share.mean(), share.mean() - half, share.mean() + half]
    np.testing.assert_allclose([got.value, got.low, got.high], want, rtol=1e-5)
    assert metrics.gap_mass(x[..., 0], members=True) == got
    assert metrics.gap_mass(x.reshape(-1)).value == pytest.approx(got.value)
    assert metrics.gap_mass(x[:1]).se == math.inf  # one member tells nothing of the spread of members


@pytest.mark.parametrize("name", ["triple", "hexagon", "random", "doubled"])
@pytest.mark.parametrize("t", [1e-3, 1e-2, 0.03])
def test_training_points_are_on_no_boundary_and_middles_are(name, t):
    data = vk.Empirical(torch.tensor([-1.0, -1.0, 0.0, 0.0, 1.0])) if name == "doubled" else vk.data.toy(name)
    score = vk.EmpiricalScore(data, vk.VP(eps=1e-3))
    points = data.rows(0, data.n).double()
    alpha = score.process.alpha(torch.tensor(t, dtype=torch.float64))
    if name != "random":  # two of its points are nearer to each other than this noise
        assert metrics.boundary_mass(alpha * points, score, t=t).value == 0
    middle = (points[-2] + points[-1]) / 2
    if name != "random" or t < 0.03:
        assert metrics.boundary_mass((alpha * middle)[None], score, t=t).value == 1
    assert metrics.boundary_mass(points, score).value == 0  # at eps, and where alpha is taken as 1
    near = points + 1e-3 * normal(*points.shape)
    assert metrics.gap_mass(near, score=score).value == 0


def test_boundary_mass_is_the_share_of_its_own_definition():
    """In one dimension and with two points everything is a closed form."""
    t, y = 0.02, torch.tensor([-1.0, 1.0], dtype=torch.float64)
    score = vk.EmpiricalScore(vk.Empirical(y), vk.VP(eps=1e-3))
    x = torch.linspace(-0.2, 0.2, 4001, dtype=torch.float64)
    alpha, var = (float(f(torch.tensor(t, dtype=torch.float64))) for f in (score.process.alpha, score.process.S))
    m = torch.tanh(alpha * x / var)
    c, s = (alpha / var) ** 2 * (1 - m**2), (alpha * m - x) / var
    for threshold in (0.2, 0.5, 0.9):
        want = ((c > 1 / var) & (c / (c + s**2) > threshold)).double().mean()
        got = metrics.gap_mass(x, score=score, threshold=threshold, t=t)
        assert got.value == pytest.approx(float(want), abs=1e-9)
        assert 0 < got.value < 1


def test_boundary_mass_in_an_anisotropic_frame_and_of_members():
    data = vk.data.toy("hexagon")
    score = vk.EmpiricalScore(data, vk.Anisotropic(vk.VP(eps=1e-3), torch.tensor([1.0, 2.0])))
    points = data.rows(0, 6).double()
    middles = 0.9999 * (points + points.roll(1, 0)) / 2
    x = torch.stack([points, torch.zeros_like(points), points])
    got = metrics.boundary_mass(x, score)
    assert got == vk.Estimate.of_mean(torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64))
    assert metrics.boundary_mass(middles[[0, 3]], score, t=0.01).value == 1


# --- total variation, histograms, KL -------------------------------------------------------------------------------


def test_total_variation_of_two_normals():
    a, b = normal(200_000, seed=1), normal(200_000, seed=2) + 1
    got = metrics.total_variation(a, b, bins=60, range=(-4, 5), generator=1)
    want = 2 * stats.norm.cdf(0.5) - 1
    assert got.value == pytest.approx(want, abs=4 * got.se + 2e-3)
    assert 5e-4 < got.se < 3e-3
    assert metrics.total_variation(b, a, bins=60, range=(-4, 5)).value == pytest.approx(got.value)
    assert metrics.total_variation(a, b, bins=60, range=(-4, 5), generator=1) == got


def test_total_variation_of_equal_laws_is_its_bias():
    n, bins = 2000, 50
    values = [
        metrics.total_variation(*torch.rand(2, n, generator=gen(k)), bins=bins, range=(0, 1)).value for k in range(20)
    ]
    assert np.mean(values) == pytest.approx(math.sqrt(bins / (math.pi * n)), rel=0.07)


def test_total_variation_by_hand():
    same, other = torch.tensor([[0.0, 0.0], [1.0, 1.0]]), torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    assert metrics.total_variation(same, same).value == 0
    assert metrics.total_variation(same, other, bins=2).value == 1
    assert metrics.total_variation(same, other, bins=1).value == 0
    # what is outside the range is one cell
    got = metrics.total_variation(torch.tensor([0.5, 5.0]), torch.tensor([0.5, 0.5, -7.0, 0.5]), bins=1, range=(0, 1))
    assert got.value == 0.25
    assert metrics.total_variation(torch.zeros(5), torch.zeros(5)).value == 0


def test_the_errors_of_total_variation_are_its_spread():
    samples, ensembles = [], []
    for k in range(100):
        a, b = normal(400, seed=k), normal(300, seed=1000 + k) + 1
        samples.append(metrics.total_variation(a, b, bins=12, range=(-4, 5)))
        field = normal(10, 1, 1, seed=2000 + k) * 0.5  # members differ: the error is much larger than that of samples
        member = normal(10, 40, 1, seed=k) + field
        ensembles.append(metrics.total_variation(member, b + 2, bins=12, range=(-4, 8), members=(True, False)))
    for estimates in (samples, ensembles):
        sd, claimed = spread(estimates)
        assert claimed == pytest.approx(sd, rel=0.3)


@pytest.mark.parametrize("normalise", ["inside", "all"])
def test_histograms_are_numpys(normalise):
    x = normal(6, 300, 1)
    x[0, 0], x[0, 1] = 2.0, -2.0  # the ends belong to it
    got, edges = metrics.histogram(x, bins=16, range=(-2, 2), normalise=normalise)
    each = np.stack([np.histogram(m, bins=16, range=(-2, 2))[0] for m in x[..., 0].numpy()]) / 0.25
    total = each.sum(1, keepdims=True) * 0.25 if normalise == "inside" else 300
    np.testing.assert_allclose(got.value, (each / total).mean(0))
    np.testing.assert_allclose(got.se, (each / total).std(0, ddof=1) / math.sqrt(6))
    np.testing.assert_allclose(edges, np.linspace(-2, 2, 17))
    flat = x[0].float()
    one, _ = metrics.histogram(flat, bins=16, range=(-2, 2), normalise=normalise)
    np.testing.assert_allclose(one.value, each[0] / (total if normalise == "all" else total[0]))
    assert (one.low <= one.value).all()
    assert (one.value <= one.high).all()


def test_histograms_of_the_plane():
    x = normal(500, 2)
    got, edges = metrics.histogram(x, bins=7, range=((-1, 1), (-2, 3)))
    want, first, second = np.histogram2d(*x.T.numpy(), bins=7, range=((-1, 1), (-2, 3)), density=True)
    np.testing.assert_allclose(got.value, want)
    np.testing.assert_allclose(edges, np.stack([first, second]))


def test_kl_of_normals_on_a_grid():
    x = torch.linspace(-12, 12, 4001, dtype=torch.float64)
    p, q = (-0.5 * x**2).exp(), (-0.5 * ((x - 1) / 1.5) ** 2).exp()
    got = metrics.kl(p, q)
    assert got.value == pytest.approx(math.log(1.5) + (1 + 1) / (2 * 1.5**2) - 0.5, rel=1e-9)
    assert got.se == 0
    assert metrics.kl(p, p).value == 0
    assert metrics.kl([1, 1], [1, 0]).value == math.inf
    assert metrics.kl([1, 0], [1, 1]).value == pytest.approx(math.log(2))


# --- energy distance -----------------------------------------------------------------------------------------------


def energy_of_normals(delta: float) -> float:
    """2 ∫ (F - G)² dx."""
    cdf = stats.norm.cdf
    return 2 * integrate.quad(lambda x: (cdf(x) - cdf(x - delta)) ** 2, -12, 12 + delta)[0]


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


# --- Wasserstein ---------------------------------------------------------------------------------------------------


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


# --- properties ----------------------------------------------------------------------------------------------------

seeds = st.integers(0, 2**31)
sizes = st.integers(3, 12)


@settings(max_examples=40, deadline=None)
@given(seeds, sizes, st.sampled_from([1, 2]), st.sampled_from([1, 2.0, 3]))
def test_wasserstein_is_a_metric(seed, n, d, p):
    a, b, c = torch.randn(3, n, d, generator=gen(seed), dtype=torch.float64)
    for kind in ("exact", "sliced"):
        ab, bc, ac, ba = (
            metrics.wasserstein(x, y, p, kind, projections=8).value for x, y in ((a, b), (b, c), (a, c), (b, a))
        )
        assert ac <= ab + bc + 1e-9
        assert ab == pytest.approx(ba)
        assert metrics.wasserstein(a, a.flip(0), p, kind).value == pytest.approx(0, abs=1e-7)


@settings(max_examples=40, deadline=None)
@given(seeds, sizes, st.sampled_from([1, 2]))
def test_order_does_not_matter(seed, n, d):
    a, b = torch.randn(2, n, d, generator=gen(seed), dtype=torch.float64)
    again = a[torch.randperm(n, generator=gen(seed))]
    for metric in (metrics.energy_distance, metrics.wasserstein, metrics.total_variation):
        one, two = metric(a, b), metric(again, b)
        assert one.value == pytest.approx(two.value)
        assert one.se == pytest.approx(two.se)
    data = vk.data.toy("pair" if d == 1 else "hexagon")
    assert metrics.memorised_fraction(a, data) == metrics.memorised_fraction(again, data)
    assert torch.equal(metrics.mode_weights(a, data).share.value, metrics.mode_weights(again, data).share.value)


REPEATED = {
    "gap mass": (stats.norm.cdf(0.75) * 2 - stats.norm.cdf(0.25) * 2, lambda a, b: metrics.gap_mass(a)),
    "gap mass of members": (
        stats.norm.cdf(0.75) * 2 - stats.norm.cdf(0.25) * 2,
        lambda a, b: metrics.gap_mass(a.reshape(8, -1), members=True),
    ),
    "energy distance": (energy_of_normals(1.0), lambda a, b: metrics.energy_distance(a, b + 1)),
    "energy distance of members": (
        energy_of_normals(1.0),
        lambda a, b: metrics.energy_distance(a.reshape(8, -1, 1), b.reshape(8, -1, 1) + 1),
    ),
    "wasserstein": (2.0, lambda a, b: metrics.wasserstein(a, b + 2)),
    "wasserstein, members": (2.0, lambda a, b: metrics.wasserstein(a.reshape(8, -1, 1), b.reshape(8, -1, 1) + 2)),
}


@pytest.mark.parametrize("name", REPEATED)
def test_intervals_cover(name):
    truth, metric = REPEATED[name]
    rate = covered(truth, [metric(*normal(2, 120, seed=k)) for k in range(200)])
    assert 0.88 <= rate <= 1, rate


# --- training points -----------------------------------------------------------------------------------------------


def test_mode_weights_by_hand():
    data = vk.Empirical(torch.tensor([-1.0, 0.0, -1.0, 1.0]), weights=[0.25, 0.25, 0.25, 0.25])
    got = metrics.mode_weights(torch.tensor([-1.1, -0.9, 0.1, 0.4, 5.0]), data, radius=0.3)
    np.testing.assert_allclose(got.share.value, [0.4, 0.2, 0.0])
    np.testing.assert_allclose(got.weights, [0.5, 0.25, 0.25])
    assert got.outside.value == 0.4
    assert got.distance.value == pytest.approx((0.1 + 0.05 + 0.25 + 0.4) / 2)
    everyone = metrics.mode_weights(torch.tensor([-1.1, -0.9, 0.1, 0.4, 5.0]), data)
    np.testing.assert_allclose(everyone.share.value, [0.4, 0.4, 0.2])
    assert everyone.outside.value == 0


def test_mode_weights_of_members():
    data, x = vk.data.toy("hexagon"), normal(7, 40, 2)
    got = metrics.mode_weights(x, data)
    nearest = torch.cdist(x, data.rows(0, 6).double()).argmin(-1)
    each = torch.stack([torch.bincount(m, minlength=6) for m in nearest]).double() / 40
    want = vk.Estimate.of_mean(each)
    np.testing.assert_allclose(got.share.value, want.value)
    np.testing.assert_allclose(got.share.high, want.high)
    assert got.distance.value == pytest.approx(float((want.value - 1 / 6).abs().sum()) / 2)


def test_memorised_fraction_by_a_plain_loop(monkeypatch):
    data = vk.Empirical(normal(37, 4, 5, seed=1))
    points = data.rows(0, 37)
    x = torch.cat([points[:30] + 0.3 * normal(30, 20, seed=2), 2 * normal(30, 20, seed=3)]).reshape(-1, 4, 5)
    ratio = [np.divide(*np.sort(np.linalg.norm(points.numpy() - v.ravel(), axis=1))[:2]) for v in x.numpy()]
    want = np.mean(np.array(ratio) < 1 / 3)
    assert 0.1 < want < 0.9
    assert metrics.memorised_fraction(x, data).value == pytest.approx(want)
    monkeypatch.setattr(masses, "CHUNK", 2048)  # four points and twelve queries at once
    assert metrics.memorised_fraction(x, data).value == pytest.approx(want)
    assert metrics.memorised_fraction(x.reshape(6, 10, 4, 5), data).value == pytest.approx(want)


def test_memorised_fraction_sees_copies_of_copies_and_tiny_distances():
    far = 1000.0
    points = torch.tensor([far, far, far + 1e-9, 0.0], dtype=torch.float64)
    data = vk.Empirical(points)
    # the second copy is no second point, and 1e-10 of 1e-9 is near though both vanish beside 1000²
    assert metrics.memorised_fraction(torch.tensor([far], dtype=torch.float64), data).value == 1
    assert metrics.memorised_fraction(torch.tensor([far + 5e-10], dtype=torch.float64), data).value == 0


# --- what is refused -----------------------------------------------------------------------------------------------

x1, x2, image = normal(10), normal(10, 2), normal(4, 10, 3, 3)
hole = torch.tensor([1.0, math.nan, 2.0])
triple = vk.data.toy("triple")
triple_score = vk.EmpiricalScore(triple, vk.VP())

REFUSED = {
    "NaN": (lambda: metrics.gap_mass(hole), "1 of the 3 samples of x hold NaN"),
    "all NaN": (lambda: metrics.gap_mass(hole[1:2], skip_diverged=True), "nothing is left"),
    "empty": (lambda: metrics.gap_mass(torch.zeros(0)), "at least one point"),
    "a number": (lambda: metrics.gap_mass(torch.tensor(1.0)), "shape ()"),
    "words": (lambda: metrics.gap_mass("words"), "not str"),
    "booleans": (lambda: metrics.gap_mass(torch.tensor([True])), "bool"),
    "ambiguous": (lambda: metrics.energy_distance(image, image), "say members="),
    "members": (lambda: metrics.gap_mass(x1, members="yes"), "members must be"),
    "no members": (lambda: metrics.gap_mass(x1, members=True), "an ensemble"),
    "three answers": (lambda: metrics.wasserstein(x1, x1, members=(True, True, True)), "pair of answers"),
    "gap in the plane": (lambda: metrics.gap_mass(x2), "give score="),
    "gap reversed": (lambda: metrics.gap_mass(x1, (0.7, 0.2)), "low < high"),
    "gap is data": (lambda: metrics.gap_mass(x1, triple), "(low, high)"),
    "gap of three": (lambda: metrics.gap_mass(x1, (0.1, 0.2, 0.3)), "(low, high)"),
    "other shape": (lambda: metrics.gap_mass(x2, score=triple_score), "training points' (1,)"),
    "no score": (lambda: metrics.boundary_mass(x1, lambda x, t: x), "EmpiricalScore"),
    "threshold": (lambda: metrics.boundary_mass(x1, triple_score, 2.0), "between 0 and 1"),
    "time": (lambda: metrics.boundary_mass(x1, triple_score, t=7.0), "outside"),
    "dimensions": (lambda: metrics.energy_distance(x1, x2), "1 coordinates, those of b 2"),
    "too few": (lambda: metrics.energy_distance(x1[:2], x1), "at least 3 samples of a"),
    "grid in space": (lambda: metrics.total_variation(normal(5, 3), normal(5, 3)), "one or two dimensions"),
    "bins": (lambda: metrics.histogram(x1, bins=0), "bins must be"),
    "range": (lambda: metrics.histogram(x1, range=(1, 0)), "must increase"),
    "range of three": (lambda: metrics.histogram(x1, range=(1, 2, 3)), "(low, high)"),
    "nothing inside": (lambda: metrics.histogram(x1, range=(100, 101)), "nothing in the range"),
    "normalise": (lambda: metrics.histogram(x1, normalise="none"), "'inside' or 'all'"),
    "p": (lambda: metrics.wasserstein(x1, x1, p=0.5), "p must be"),
    "kind": (lambda: metrics.wasserstein(x1, x1, kind="best"), "kind must be"),
    "unequal": (lambda: metrics.wasserstein(x2, x2[:4], kind="exact"), "as many points"),
    "too many": (lambda: metrics.wasserstein(normal(4001, 2), normal(4001, 2), kind="exact"), "'sliced'"),
    "projections": (lambda: metrics.wasserstein(x2, x2, projections=1), "2 or more"),
    "kl shapes": (lambda: metrics.kl([1, 1], [1, 1, 1]), "one grid"),
    "kl negative": (lambda: metrics.kl([1, -1], [1, 1]), "p must hold"),
    "kl empty law": (lambda: metrics.kl([1, 1], [0, 0]), "q must hold"),
    "kl of objects": (lambda: metrics.kl([1, 1], object()), "not list and object"),
    "kl of data": (lambda: metrics.kl([1, 1], triple), "one grid"),
    "radius": (lambda: metrics.mode_weights(x1, triple, radius=0), "radius"),
    "one point": (lambda: metrics.memorised_fraction(x1, torch.tensor([1.0, 1.0])), "two distinct"),
    "ratio": (lambda: metrics.memorised_fraction(x1, triple, threshold=0), "threshold"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_a_sentence(name):
    call, words = REFUSED[name]
    with pytest.raises(InputError) as caught:
        call()
    message = str(caught.value)
    assert words in message
    assert message.endswith(".")


def test_diverged_members_are_left_out_with_a_warning():
    x = normal(5, 20, 1)
    broken = x.clone()
    broken[3, 7] = math.inf
    with pytest.raises(InputError, match="1 of the 5 members of x hold NaN or infinite"):
        metrics.gap_mass(broken)
    with pytest.warns(UserWarning, match="1 of the 5 members"):
        got = metrics.gap_mass(broken, skip_diverged=True)
    assert got == metrics.gap_mass(x[[0, 1, 2, 4]])


def test_images_are_events_once_said():
    a, b = image, image[0] + 1
    got = metrics.energy_distance(a, b, members=(True, False))
    assert got.value == pytest.approx(metrics.energy_distance(a.reshape(4, 10, 9), b.reshape(10, 9)).value)
