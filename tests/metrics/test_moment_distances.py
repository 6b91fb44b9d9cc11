"""Fréchet's distance and the kernel distance: second routes, closed forms, errors, bias and what is refused."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from draws import normal
from hypothesis import given, settings, strategies as st
from scipy import linalg
from torch import Tensor

import vkernel as vk
from vkernel import metrics
from vkernel.core.errors import InputError


def correlated(n: int, k: int, seed: int, shift: float = 0.0) -> Tensor:
    return normal(n, k, seed=seed) @ (normal(k, k, seed=seed + 1000) / math.sqrt(k)) + shift


def root(a: np.ndarray) -> np.ndarray:
    values, vectors = np.linalg.eigh(a)
    return (vectors * np.sqrt(values.clip(0))) @ vectors.T


def by_eigenvalues(a: Tensor, b: Tensor) -> float:
    """The formula as it is written: the root of A, then the eigenvalues of the symmetric product."""
    first, second = (np.atleast_2d(np.cov(x.numpy().T)) for x in (a, b))
    half = root(first)
    roots = np.sqrt(np.linalg.eigvalsh(half @ second @ half).clip(0)).sum()
    return float((a.mean(0) - b.mean(0)).square().sum() + np.trace(first) + np.trace(second) - 2 * roots)


def brute_kernel(a: Tensor, b: Tensor, degree: int = 3) -> float:
    """Sums over pairs, one at a time."""
    k = a.shape[1]

    def mean(pairs: list[tuple[Tensor, Tensor]]) -> float:
        return float(np.mean([(float(x @ y) / k + 1) ** degree for x, y in pairs]))

    within = [mean(list(itertools.permutations(list(x), 2))) for x in (a, b)]
    return sum(within) - 2 * mean(list(itertools.product(list(a), list(b))))


# --- Fréchet --------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=40)
@given(k=st.integers(1, 7), n=st.integers(2, 30), m=st.integers(2, 30), seed=st.integers(0, 99))
def test_frechet_is_the_symmetric_formula_with_many_samples_and_with_few(k, n, m, seed):
    a, b = correlated(n, k, seed), 2 * correlated(m, k, seed + 1, 0.5)
    got = metrics.frechet_distance(a, b, allow_singular=True)
    assert got.value == pytest.approx(by_eigenvalues(a, b), abs=1e-5)
    other = metrics.frechet_distance(b, a, allow_singular=True)
    assert other.value == pytest.approx(got.value, rel=1e-9, abs=1e-9)
    assert other.se == pytest.approx(got.se, rel=1e-6, abs=1e-9)
    if min(n, m) > k + 2:  # the matrix that is not symmetric has the same trace of its root
        product = np.atleast_2d(np.cov(a.numpy().T)) @ np.atleast_2d(np.cov(b.numpy().T))
        traces = float(a.var(0).sum() + b.var(0).sum()) - 2 * np.trace(linalg.sqrtm(product).real)
        assert got.value == pytest.approx(float((a.mean(0) - b.mean(0)).square().sum()) + traces, rel=1e-5, abs=1e-6)


def test_the_nuclear_norm_of_the_samples_cross_product_is_the_trace_of_the_root():
    a, b = correlated(9, 40, 1), correlated(14, 40, 2, 1.0)
    f_a, f_b = ((x - x.mean(0)).mT / math.sqrt(len(x) - 1) for x in (a, b))
    nuclear = float(torch.linalg.matrix_norm(f_a.mT @ f_b, "nuc"))
    want = (a.mean(0) - b.mean(0)).square().sum() + f_a.square().sum() + f_b.square().sum() - 2 * nuclear
    got = metrics.frechet_distance(a, b, allow_singular=True).value
    assert got == pytest.approx(float(want), rel=1e-12)
    turned = torch.linalg.qr(normal(40, 40)).Q
    assert metrics.frechet_distance(a @ turned + 3, b @ turned + 3, allow_singular=True).value == pytest.approx(got)


def test_frechet_of_commuting_covariances_and_of_numbers_has_a_closed_form():
    x = normal(500, 3)
    x = (x - x.mean(0)) @ torch.linalg.inv(torch.linalg.cholesky(torch.cov(x.mT))).mT  # moments 0 and 1 exactly
    a, b = x * torch.tensor([1.0, 2.0, 0.5]), x * torch.tensor([3.0, 2.0, 0.0]) + torch.tensor([0.0, 1.0, -2.0])
    assert metrics.frechet_distance(a, b).value == pytest.approx(4 + 0 + 0.25 + 5)
    p, q = normal(60, 1, seed=1), 2 * normal(80, 1, seed=2) + 1
    want = float((p.mean() - q.mean()) ** 2 + (p.std() - q.std()) ** 2)
    assert metrics.frechet_distance(p[:, 0], q[:, 0]).value == pytest.approx(want)
    assert metrics.frechet_distance(x, x).value == pytest.approx(0, abs=1e-12)
    assert metrics.frechet_distance(x, x + 2).value == pytest.approx(12)
    assert metrics.frechet_distance(1e-8 * x, 3e-8 * x).value == pytest.approx(12e-16)


def test_the_influence_of_a_sample_is_the_infinitesimal_jackknife():
    """The derivative in the weights of samples, by autodiff through the symmetric formula."""
    a, b = correlated(40, 3, 5), correlated(55, 3, 6, 0.7)

    def distance(w: Tensor, v: Tensor) -> Tensor:
        def moments(x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
            share = weights / weights.sum()
            rows = x - share @ x
            return share @ x, (rows.mT * share) @ rows * len(x) / (len(x) - 1)

        (m, first), (k, second) = moments(a, w), moments(b, v)
        values, vectors = torch.linalg.eigh(first)
        half = (vectors * values.sqrt()) @ vectors.mT
        roots = torch.linalg.eigvalsh(half @ second @ half).sqrt().sum()
        return (m - k).square().sum() + first.trace() + second.trace() - 2 * roots

    ones = (torch.ones(40, dtype=torch.float64), torch.ones(55, dtype=torch.float64))
    slopes = torch.autograd.functional.jacobian(distance, ones)
    variance = sum(float(s.square().sum()) * len(s) / (len(s) - 1) for s in slopes)
    got = metrics.frechet_distance(a, b)
    assert got.value == pytest.approx(float(distance(*ones)))
    assert got.se == pytest.approx(math.sqrt(variance), rel=0.03)  # but for n - 1 in place of n


@pytest.mark.parametrize("heavy", [False, True])
def test_frechets_interval_covers(heavy):
    scale = torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)
    truth = 3 * 1.5**2 + float((1 - scale).square().sum())
    hits, values, errors = 0, [], []
    for seed in range(300):
        a, b = normal(400, 3, seed=2 * seed), normal(300, 3, seed=2 * seed + 1)
        if heavy:  # Laplace's law, of variance 1
            u = torch.rand(400, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) - 0.5
            a = -u.sign() * (1 - 2 * u.abs()).log() / math.sqrt(2)
        e = metrics.frechet_distance(a, b * scale + 1.5)
        hits += e.low <= truth <= e.high
        values.append(e.value)
        errors.append(e.se)
    assert 0.91 < hits / 300 <= 0.99
    assert math.sqrt(np.mean(np.square(errors))) == pytest.approx(np.std(values), rel=0.15)


def test_frechets_bias_is_that_of_its_docstring():
    k, n, m = 8, 300, 500
    values = torch.tensor(
        [metrics.frechet_distance(normal(n, k, seed=s), normal(m, k, seed=s + 5000)).value for s in range(150)]
    )
    want = (k + k * (k + 1) / 4) * (1 / n + 1 / m)
    assert abs(float(values.mean()) - want) < 4 * float(values.std()) / math.sqrt(150) + 0.03 * want


def test_the_error_over_members_is_that_of_their_means():
    shift = normal(40, 1, 2, seed=3)  # each member is shifted as a whole: its points tell little of the error
    a, b = normal(40, 25, 2) + shift, normal(1000, 2, seed=9) + 3
    by_members, by_points = metrics.frechet_distance(a, b), metrics.frechet_distance(a.flatten(0, 1), b)
    assert by_members.value == pytest.approx(by_points.value)
    assert by_members.se > 2 * by_points.se


def test_the_kernel_distance_of_an_ensemble_pairs_different_members_and_leaves_out_one_at_a_time():
    a, b = normal(6, 5, 2) + normal(6, 1, 2, seed=3), normal(40, 2, seed=9)
    got, rows = metrics.kernel_distance(a, b), a.flatten(0, 1)
    member = torch.arange(30) // 5
    apart = member[:, None] != member
    among = ((rows @ rows.mT / 2 + 1) ** 3)[apart].mean()
    cross, own = ((rows @ b.mT / 2 + 1) ** 3).mean(), ((b @ b.mT / 2 + 1) ** 3)[~torch.eye(40, dtype=torch.bool)].mean()
    assert got.value == pytest.approx(float(among + own - 2 * cross))
    variance = 0.0
    for parts in (
        [metrics.kernel_distance(a[torch.arange(6) != g], b).value for g in range(6)],
        [metrics.kernel_distance(a, b[torch.arange(40) != g]).value for g in range(40)],
    ):
        variance += (len(parts) - 1) / len(parts) * float(np.square(np.array(parts) - np.mean(parts)).sum())
    assert got.se == pytest.approx(math.sqrt(variance))


def test_too_few_samples_are_refused_in_a_sentence():
    with pytest.raises(InputError, match="10 features has full rank from 11 samples on, but b has 10"):
        metrics.frechet_distance(normal(11, 10), normal(10, 10))
    with pytest.raises(InputError, match="pca:K"):
        metrics.frechet_distance(normal(3, 10), normal(100, 10))
    with pytest.raises(InputError, match="at least 2 samples; a has 1"):
        metrics.frechet_distance(normal(1, 2), normal(5, 2), allow_singular=True)
    assert metrics.frechet_distance(normal(11, 10), normal(11, 10, seed=1)).value > 0


@pytest.mark.parametrize("distance", [metrics.frechet_distance, metrics.kernel_distance])
def test_attacks(distance):
    a, b = normal(20, 2), normal(30, 2, seed=1)
    for bad in (math.nan, math.inf):
        spoilt = a.clone()
        spoilt[3, 1] = bad
        with pytest.raises(InputError, match="1 of the 20 samples of a hold NaN"):
            distance(spoilt, b)
        with pytest.warns(UserWarning, match="left out"):
            assert distance(spoilt, b, skip_diverged=True).value == distance(a[torch.arange(20) != 3], b).value
    with pytest.raises(InputError, match="2 coordinates, those of b 3"):
        distance(a, normal(9, 3))
    with pytest.raises(InputError):
        distance(a[:0], b)
    with pytest.raises(InputError):
        distance("a", b)
    same = torch.ones(12, 2)
    assert distance(same, same).value == pytest.approx(0, abs=1e-12)
    assert distance(same, same).se == pytest.approx(0, abs=1e-12)
    assert distance((4 * a).int(), b).value == distance((4 * a).int().double(), b).value
    assert distance(a.half(), b).value == pytest.approx(distance(a, b).value, rel=1e-2)
    assert distance(a.reshape(20, 1, 2), b.reshape(30, 1, 2), members=False) == distance(a, b)


# --- kernel distance ------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=25)
@given(k=st.integers(1, 4), n=st.integers(3, 8), m=st.integers(3, 8), degree=st.integers(1, 4), seed=st.integers(0, 99))
def test_the_kernel_distance_and_its_jackknife_are_brute_force(k, n, m, degree, seed):
    a, b = normal(n, k, seed=seed), normal(m, k, seed=seed + 1) + 0.5
    got = metrics.kernel_distance(a, b, degree)
    assert got.value == pytest.approx(brute_kernel(a, b, degree), rel=1e-9, abs=1e-10)
    variance = 0.0
    for count, left in (
        (n, [brute_kernel(a[torch.arange(n) != i], b, degree) for i in range(n)]),
        (m, [brute_kernel(a, b[torch.arange(m) != j], degree) for j in range(m)]),
    ):
        variance += (count - 1) / count * float(np.square(np.array(left) - np.mean(left)).sum())
    if min(n, m) > 3:
        assert got.se == pytest.approx(math.sqrt(variance), rel=1e-6, abs=1e-9)


def test_the_kernel_distance_is_unbiased_for_the_difference_of_moments():
    # k = 1: sum over q of binom(3, q) (E x^q - E y^q)², with x ~ N(0, 1) and y ~ N(μ, s²)
    mu, s = 0.3, 1.3
    moments = (mu, mu**2 + s**2 - 1, mu**3 + 3 * mu * s**2)
    truth = sum(c * d**2 for c, d in zip((3, 3, 1), moments, strict=True))
    for n, m in ((5, 6), (60, 40)):
        found = [
            metrics.kernel_distance(normal(n, seed=s0), mu + s * normal(m, seed=s0 + 9000)).value for s0 in range(600)
        ]
        assert abs(np.mean(found) - truth) < 4 * np.std(found) / math.sqrt(len(found))
        null = [metrics.kernel_distance(normal(n, seed=i), normal(m, seed=i + 9000)).value for i in range(600)]
        assert abs(np.mean(null)) < 4 * np.std(null) / math.sqrt(len(null))


def test_the_kernel_distance_is_the_distance_of_moment_tensors():
    """With all pairs, the pairs of a point with itself too, it would be that of the sample moments exactly."""
    a, b = normal(30, 3), normal(20, 3, seed=1) * 1.5
    n, m, k = len(a), len(b), 3
    tensors = ("ni->i", "ni,nj->ij", "ni,nj,nl->ijl")
    plug_in = sum(
        math.comb(3, q) / k**q * float((torch.einsum(t, *[a] * q) / n - torch.einsum(t, *[b] * q) / m).square().sum())
        for q, t in enumerate(tensors, 1)
    )
    full = [float(((x @ x.mT / k + 1) ** 3).sum()) for x in (a, b)]
    itself = [float(((x.square().sum(1) / k + 1) ** 3).sum()) for x in (a, b)]
    change = [(f - i) / (c * (c - 1)) - f / c**2 for f, i, c in zip(full, itself, (n, m), strict=True)]
    assert metrics.kernel_distance(a, b).value == pytest.approx(plug_in + sum(change))


def test_the_kernel_distances_interval_covers():
    mu, hits = 0.6, 0
    truth = 3 * mu**2 + 3 * mu**4 + (mu**3 + 3 * mu) ** 2
    for seed in range(300):
        e = metrics.kernel_distance(normal(150, seed=seed), mu + normal(200, seed=seed + 9000))
        hits += e.low <= truth <= e.high
    assert 0.9 < hits / 300 <= 0.99


def test_chunks_change_nothing(monkeypatch):
    a, b = normal(50, 4), normal(70, 4, seed=1)
    whole = metrics.kernel_distance(a, b)
    monkeypatch.setattr("vkernel.metrics.distances.CHUNK", 100)
    chunked = metrics.kernel_distance(a, b)
    assert chunked.value == pytest.approx(whole.value, rel=1e-9)
    assert chunked.se == pytest.approx(whole.se, rel=1e-9)


def test_kernel_refusals():
    a = normal(9, 2)
    for degree in (0, 2.5, True, "3"):
        with pytest.raises(InputError, match="degree must be a whole number"):
            metrics.kernel_distance(a, a, degree)
    with pytest.raises(InputError, match="at least 3 samples of b"):
        metrics.kernel_distance(a, a[:2])
    with pytest.raises(InputError, match="overflow"):
        metrics.kernel_distance(1e120 * a, a)
    assert vk.metrics.kernel_distance is metrics.kernel_distance
