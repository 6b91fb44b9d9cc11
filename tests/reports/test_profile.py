"""The profile of a training set: each number by a second route."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest
import torch
from coarse import draw_coarsely
from torch import Tensor

import vkernel as vk
from vkernel.core.errors import InputError
from vkernel.core.estimate import Estimate
from vkernel.reports.profile import measure, tested


def quiet(label: str, done: float = 1.0) -> None:
    """A reporter that says nothing."""


def geometry(data: vk.Empirical) -> measure.Geometry:
    return measure.Geometry.measure(vk.EmpiricalScore(data, vk.VP()), 0, quiet)


@pytest.fixture(scope="module")
def triple() -> vk.Profile:
    return vk.profile(vk.data.toy("triple"), vk.VP())


@pytest.fixture(scope="module")
def cloud() -> vk.Empirical:
    g = torch.Generator().manual_seed(0)
    return vk.Empirical(torch.randn(400, 2, generator=g))


@pytest.fixture(scope="module")
def of_cloud(cloud: vk.Empirical) -> vk.Profile:
    return vk.profile(cloud, queries=64)


def interpolate(p: vk.Profile, name: str, t: float) -> float:
    """A curve at t, linear in log t and log value between levels."""
    ts, values = torch.tensor(p.curves["t"]).log(), torch.tensor(p.curves[name]).log()
    k = int(torch.searchsorted(ts, math.log(t)).clamp(1, len(ts) - 1))
    share = (math.log(t) - ts[k - 1]) / (ts[k] - ts[k - 1])
    return float((values[k - 1] + share * (values[k] - values[k - 1])).exp())


def own_weight_1d(points: list[float], i: int, t: float) -> float:
    """E[r_i | x0 = y_i] by quadrature, from the definition."""
    process, u = vk.VP(), torch.tensor(t, dtype=torch.float64)
    alpha, sigma = float(process.alpha(u)), float(process.sigma(u))
    z = torch.linspace(-9, 9, 20001, dtype=torch.float64)
    x = alpha * points[i] + sigma * z
    y = torch.tensor(points, dtype=torch.float64)
    r = (-(x[:, None] - alpha * y).square() / (2 * sigma**2)).softmax(1)[:, i]
    density = (-z.square() / 2).exp() / math.sqrt(2 * math.pi)
    return float((r * density).sum() * (z[1] - z[0]))


def root(f, low: float, high: float) -> float:
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if f(middle) > 0 else (low, middle)
    return low


def test_noise_fraction_of_three_points(triple: vk.Profile) -> None:
    """The values of the theory, quadrature of our own between them."""
    for t, rho in {0.05: 0.358, 0.1: 0.634, 0.2: 0.333, 0.4: 0.0258}.items():
        assert float(vk.noise_fraction(triple.data, vk.VP(), t)) == pytest.approx(rho, rel=2e-3)
        assert interpolate(triple, "noise_fraction", t) == pytest.approx(rho, rel=0.12)  # between levels
    assert set(triple.curves["noise_fraction_se"]) == {0.0}


def test_window_is_where_the_noise_fraction_is_one_percent(triple: vk.Profile) -> None:
    assert triple.window is not None
    for t in triple.window:
        assert float(vk.noise_fraction(triple.data, vk.VP(), t)) == pytest.approx(0.01, rel=0.05)


def test_collapse_time_by_quadrature(triple: vk.Profile) -> None:
    points = [-1.0, 0.0, 1.0]
    truth = root(lambda t: sum(own_weight_1d(points, i, t) for i in range(3)) / 3 - 0.5, 0.05, 0.4)
    assert triple.collapse_time == pytest.approx(truth, rel=0.05)


def test_own_collapse_times_by_quadrature(triple: vk.Profile) -> None:
    points = [-1.0, 0.0, 1.0]
    for one in triple.isolated:
        truth = root(lambda t, i=one.index: own_weight_1d(points, i, t) - 0.5, 0.03, 0.6)
        assert one.t == pytest.approx(truth, rel=0.01)
    assert [one.t for one in triple.isolated] == sorted((one.t for one in triple.isolated), reverse=True)


def test_pair_shares_by_quadrature(triple: vk.Profile) -> None:
    """Each pair's share of E tr C, over log(sigma/alpha) in the window, from its definition on a grid."""
    assert triple.window is not None
    process = vk.VP()
    low, high = (float(process.sigma(t) / process.alpha(t)) for t in triple.window)
    y = torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64)
    share = torch.zeros(3, 3, dtype=torch.float64)
    for ratio in torch.linspace(math.log(low), math.log(high), 60, dtype=torch.float64).exp():
        x = torch.linspace(-1 - 9 * float(ratio), 1 + 9 * float(ratio), 8001, dtype=torch.float64)
        logit = -(x[:, None] - y).square() / (2 * ratio**2)
        density = logit.exp().mean(1) / (math.sqrt(2 * math.pi) * ratio)
        r = logit.softmax(1)
        both = (density[:, None, None] * r[:, :, None] * r[:, None, :]).sum(0) * (x[1] - x[0])
        share += both * (y[:, None] - y).square() / ratio**2
    share = 2 * share / share.sum()
    for pair in triple.boundary_pairs:
        assert pair.share == pytest.approx(float(share[pair.i, pair.j]), abs=0.03)
    assert sum(pair.share for pair in triple.boundary_pairs) == pytest.approx(1.0, abs=1e-9)


def test_pairs_of_many_points_add_up(cloud: vk.Empirical) -> None:
    """All pairs together are the noise fraction: the sampled pair terms against an independent route."""
    data = cloud.subset(torch.arange(30))
    score = vk.EmpiricalScore(data, vk.VP())
    i, j = torch.triu_indices(30, 30, 1)
    for t in (0.02, 0.1, 0.3):
        ratio = float(vk.VP().sigma(t) / vk.VP().alpha(t))
        noise = measure.pair_noise(score, i, j, [ratio], 0, quiet).sum(1)
        total = Estimate.of_mean(noise)
        rho = vk.noise_fraction(score, vk.VP(), t, queries=20000, generator=1)
        assert abs(total.value - rho.value) < 4 * math.hypot(total.se, rho.se)


def test_mmse_and_noise_fraction_are_one_number(of_cloud: vk.Profile) -> None:
    curves = {name: torch.tensor(curve) for name, curve in of_cloud.curves.items()}
    assert torch.allclose(curves["mmse"] / curves["sigma_over_alpha"] ** 2, curves["noise_fraction"], rtol=1e-5)


def test_neighbours_by_brute_force(cloud: vk.Empirical) -> None:
    g = geometry(cloud)
    gaps = torch.cdist(cloud.rows(0, 400).double(), cloud.rows(0, 400).double()) + torch.eye(400) * 1e9
    assert torch.allclose(g.distance, gaps.min(1).values, atol=1e-6)
    assert torch.equal(g.neighbour, gaps.argmin(1))


def test_neighbours_by_bounds_are_those_by_brute_force() -> None:
    """A set that is large enough for pruning, with weights, and with points that few axes do not separate."""
    g = torch.Generator().manual_seed(0)
    points = torch.randn(5000, 12, generator=g) @ torch.randn(12, 160, generator=g) + 0.1 * torch.randn(
        5000, 160, generator=g
    )
    data = vk.Empirical(points, weights=torch.rand(5000, generator=g) + 0.01)
    score = vk.EmpiricalScore(data, vk.VP(), method="pruned")
    score.engine.pruned.prepare()
    assert score.engine.pruned.nearest(data.take(torch.arange(64)))[2].all()
    found = measure.Geometry.measure(score, 0, quiet)
    distance, index = vk.metrics.nearest(points[::50], data, 1, exclude=torch.arange(0, 5000, 50))
    assert torch.allclose(found.distance[::50], distance[:, 0], rtol=1e-12)
    assert torch.equal(found.neighbour[::50], index[:, 0])


@pytest.mark.parametrize(("k", "d"), [(1, 3), (2, 5), (4, 40), (8, 100)])
def test_intrinsic_dimension(k: int, d: int) -> None:
    """A k-dimensional cloud in d dimensions."""
    g = torch.Generator().manual_seed(k)
    basis = torch.linalg.qr(torch.randn(d, k, generator=g)).Q
    data = vk.Empirical(torch.randn(3000, k, generator=g) @ basis.T)
    found = geometry(data).intrinsic_dimension
    assert found is not None
    assert found.value == pytest.approx(k, rel=0.15)


def test_few_points_have_no_intrinsic_dimension() -> None:
    """Twelve neighbours of six points are the whole set: no number is better than a number without meaning."""
    few = vk.profile(torch.randn(6, 3, generator=torch.Generator().manual_seed(0)), queries=16)
    assert few.intrinsic_dimension is None
    assert few.to_dict()["intrinsic_dimension"] is None
    assert "too few, or too alike, for an estimate of their intrinsic dimension" in few.summary()
    assert "-dimensional" not in few.summary()


def test_duplicates_are_found_and_merged() -> None:
    g = torch.Generator().manual_seed(0)
    points = torch.randn(200, 40, generator=g)
    points[50] = points[3]
    points[51] = points[3]
    points[120] = points[7] + 1e-4 * torch.randn(40, generator=g)
    p = vk.profile(vk.Empirical(points), queries=64)
    assert p.duplicates == [[3, 50, 51]]
    assert [group.indices for group in p.near_duplicates] == [[7, 120]]
    assert p.n == 200
    assert p.distinct == 198


def test_chance_is_not_called_a_duplicate() -> None:
    for seed in range(5):
        g = torch.Generator().manual_seed(seed)
        for d in (1, 2, 10):
            p = geometry(vk.Empirical(torch.rand(500, d, generator=g)))
            assert len(p.near) <= 1


def test_an_outlier_is_isolated(cloud: vk.Empirical) -> None:
    points = cloud.rows(0, 400).clone()
    points[123] = torch.tensor([9.0, 9.0])
    p = vk.profile(vk.Empirical(points), queries=32)
    assert p.isolated[0].index == 123


def test_a_point_given_often_is_listed_also_from_the_middle_of_many(cloud: vk.Empirical, of_cloud: vk.Profile) -> None:
    points = cloud.rows(0, 400)
    middle = int(points.norm(dim=1).argmin())
    p = vk.profile(vk.Empirical(torch.cat([points, points[middle].expand(200, -1)])), queries=16)
    assert middle in {one.index for one in p.isolated}
    assert middle not in {one.index for one in of_cloud.isolated}


def test_a_far_pair_shares_a_boundary() -> None:
    """Two points that only compete with one another hold all the noise in n = 2, and their weight's part otherwise."""
    assert vk.profile(vk.data.toy("pair"), queries=64).boundary_pairs[0].share == pytest.approx(1.0)


def test_one_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw_coarsely(monkeypatch)
    p = vk.profile(vk.Empirical(torch.ones(1, 3)), queries=16)
    assert p.collapse_time == vk.VP().T
    assert p.window is None
    assert set(p.curves["noise_fraction"]) == {0.0}
    assert p.isolated == [measure.IsolatedPoint(0, vk.VP().T)]
    assert "the exact score leads to it alone" in p.to_html(tmp_path / "p.html").read_text()


@pytest.mark.parametrize("process", [vk.EDM(), vk.FlowMatching(), vk.DDPM.linear(), vk.VE(), vk.Cosine(), vk.Toy()])
def test_every_process(process: vk.Process) -> None:
    p = vk.profile(vk.data.toy("hexagon"), process, queries=64)
    assert p.window is not None
    assert process.eps <= p.window[0] < p.window[1] <= process.T
    assert p.curves["t"] == sorted(p.curves["t"])


def test_processes_agree_on_sigma_over_alpha() -> None:
    """The profile depends on sigma/alpha only."""
    found = []
    for process in (vk.VP(), vk.EDM(), vk.FlowMatching()):
        window = vk.profile(vk.data.toy("triple"), process, queries=64).window
        assert window is not None
        found.append([float(process.sigma(t) / process.alpha(t)) for t in window])
    assert torch.allclose(torch.tensor(found[0]), torch.tensor(found[1]), rtol=0.02)
    assert torch.allclose(torch.tensor(found[0]), torch.tensor(found[2]), rtol=0.02)


def test_weights_count_as_copies() -> None:
    """A point given twice and a point of double weight profile alike."""
    twice = vk.profile(vk.Empirical(torch.tensor([-1.0, 0.0, 1.0, 1.0])), queries=128)
    heavy = vk.profile(vk.Empirical(torch.tensor([-1.0, 0.0, 1.0]), weights=[1, 1, 2]), queries=128)
    assert twice.curves["noise_fraction"] == pytest.approx(heavy.curves["noise_fraction"])
    assert twice.window == pytest.approx(heavy.window)


def test_results_are_reproducible(cloud: vk.Empirical, of_cloud: vk.Profile) -> None:
    a, b, c = (p.to_dict() for p in (of_cloud, *(vk.profile(cloud, queries=64, seed=seed) for seed in (0, 1))))
    assert a == b
    assert a["noise_fraction"] != c["noise_fraction"]


def test_json_has_the_promised_keys(triple: vk.Profile, tmp_path: Path) -> None:
    got = json.loads(triple.to_json(tmp_path / "a" / "p.json").read_text())
    for key in ("t", "noise_fraction", "noise_fraction_se", "ess", "mmse"):
        assert len(got[key]) == len(got["t"]) > 20
    for key in ("collapse_time", "window", "duplicates", "isolated", "boundary_pairs", "n", "d", "scale"):
        assert key in got
    assert set(got["isolated"][0]) >= {"index", "t"}
    assert set(got["boundary_pairs"][0]) >= {"i", "j", "share"}


def test_dataset_is_labelled(triple: vk.Profile) -> None:
    ds = triple.to_dataset()
    assert float(ds.noise_fraction.sel(t=0.1, method="nearest")) > 0.5


def test_page_is_self_contained(tmp_path: Path) -> None:
    images = vk.data.digits().subset(torch.arange(24))
    html = vk.profile(images, queries=32, top=3).to_html(tmp_path / "p.html").read_text()
    assert "http" not in html.replace("http://www.w3.org", "")
    assert html.count("data:image/png") >= 8  # four figures, light and dark
    assert "Largest collapse times" in html


def test_sentences_state_how_the_order_did_on_trained_networks(triple: vk.Profile) -> None:
    found = tested.results()
    assert [cell.kind for cell in found.halves] == ["plane", "digits"]
    assert f"was tested on {found.networks} networks" in triple.summary()
    assert len(found.decided["beaten"]) > len(found.decided["best"])  # else the sentence would be another one
    for cell in found.halves:
        assert abs(cell("copied samples").value - 0.5) < 0.1  # "about half"
        for order in ("profile single", "multiplicity single"):
            e = cell(f"copied auc all {order}")
            assert f"{e.value:.2f} ({e.low:.2f} to {e.high:.2f})" in triple.summary()


def test_sentences_say_what_was_found(triple: vk.Profile) -> None:
    text = triple.summary()
    assert text.startswith("3 points in 1 dimensions, values as they are, under VP: ")
    assert f"Below t = {triple.collapse_time:.3g} one training point holds" in text


def test_a_pair_is_named_only_if_it_carries_a_noticeable_share(
    triple: vk.Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a hundred points at equal distances every pair carries the same share, 1/4950."""
    draw_coarsely(monkeypatch)
    assert triple.leading_pairs
    assert "No pair stands out" not in triple.summary()
    corners = vk.profile(vk.Empirical(torch.eye(100)), queries=32)
    largest = corners.boundary_pairs[0]
    assert largest.share == pytest.approx(2 / (100 * 99), rel=0.5)  # all pairs are alike
    assert not corners.leading_pairs
    said = f"No pair stands out: the largest share of the target noise, that of points {largest.i} and {largest.j}, is"
    assert said in corners.summary()
    assert "would" not in corners.to_html(tmp_path / "p.html").read_text()


def test_all_points_can_be_listed() -> None:
    points = torch.randn(130, 3, generator=torch.Generator().manual_seed(0))
    assert {one.index for one in vk.profile(points, queries=16, top=130).isolated} == set(range(130))


@pytest.mark.parametrize(
    "wrong", [{"queries": 1}, {"top": 0}, {"process": vk.Anisotropic(vk.VP(), torch.tensor([1.0, 2.0]))}]
)
def test_bad_arguments(wrong: dict, cloud: vk.Empirical) -> None:
    with pytest.raises(InputError):
        vk.profile(cloud, **wrong)


def test_unwritable_file(triple: vk.Profile, tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    with pytest.raises(InputError, match="cannot be made"):
        triple.to_json(blocker / "p.json")


def test_large_sets_are_sampled() -> None:
    assert measure.neighbour_count(60_000, 784) == 60_000
    assert measure.neighbour_count(1_000_000, 3072) < 1_000_000
    assert measure.WORK > measure.LEVELS


@pytest.mark.skipif(
    not os.environ.get("VKERNEL_DATA"), reason="VKERNEL_DATA does not name the folder with the CIFAR sheets"
)
@pytest.mark.slow
def test_cifar_sheets() -> None:
    data = vk.load(Path(os.environ["VKERNEL_DATA"]) / "cifar10")
    p = vk.profile(data.subset(torch.arange(0, 4000, 8)), queries=32)
    assert p.d == 3072
    assert p.scale == (-1, 1)
    assert 0 < max(p.curves["noise_fraction"]) < 0.2


def brute_force_rho(y: Tensor, t: float, draws: int) -> tuple[float, float]:
    process = vk.VP()
    u = torch.tensor(t, dtype=torch.float64)
    alpha, sigma = process.alpha(u), process.sigma(u)
    g = torch.Generator().manual_seed(9)
    x0 = y[torch.randint(0, len(y), (draws,), generator=g)]
    x = alpha * x0 + sigma * torch.randn(x0.shape, generator=g, dtype=torch.float64)
    r = (-torch.cdist(x, alpha * y).square() / (2 * sigma**2)).softmax(1)
    error = (x0 - r @ y).square().sum(1) * alpha**2 / (sigma**2 * y.shape[1])  # |x0 - m|², not the trace
    return float(error.mean()), float(error.std() / math.sqrt(draws))


def test_noise_fraction_of_digits_from_the_denoiser_error() -> None:
    """rho = alpha² E|x0 - m|² / (d sigma²): a route that knows no covariance."""
    y = vk.data.digits().rows(0, 1797).double()
    for t in (0.12, 0.2, 0.3):
        rho = vk.noise_fraction(vk.data.digits(), vk.VP(), t, queries=2048, generator=0)
        value, se = brute_force_rho(y, t, 4000)
        assert abs(rho.value - value) < 4 * math.hypot(rho.se, se)
