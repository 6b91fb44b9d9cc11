"""Random streams: distributions and independence."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from draws import gen
from hypothesis import given, settings, strategies as st
from scipy import stats

import vkernel as vk
from vkernel.core import rng
from vkernel.core.errors import InputError

# --- counter-based numbers -----------------------------------------------------------------------------------------


def splitmix64(state: int) -> int:
    """Steele, Lea and Flood's finaliser in Python's own integers."""
    mask = (1 << 64) - 1
    z = (state + 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**63 - 1), st.integers(0, 2**40))
def test_the_hash_is_splitmix64(key, counter):
    want = splitmix64((key + counter * 0x9E3779B97F4A7C15) & ((1 << 64) - 1))
    got = int(rng.hashed(torch.tensor(key), torch.tensor(counter))) & ((1 << 64) - 1)
    assert got == want


def test_the_hash_of_the_reference_implementation():
    """The first outputs of splitmix64 from state 0, as published with it."""
    out = rng.hashed(torch.tensor(0), torch.arange(3))
    assert [int(v) & (2**64 - 1) for v in out] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


KEYS = {
    "one key": lambda n: (torch.tensor(12345), torch.arange(n)),
    "random keys, one counter": lambda n: (rng.keys((n,), gen(0)), torch.tensor(7)),
    "neighbouring keys": lambda n: (torch.arange(n), torch.tensor(0)),
    "large counters": lambda n: (torch.tensor(1), torch.arange(n) + 2**40),
    "zero key": lambda n: (torch.tensor(0), torch.arange(n)),
}


@pytest.mark.parametrize("kind", KEYS)
def test_uniforms_are_uniform(kind):
    u = rng.uniforms(*KEYS[kind](50_000)).numpy()
    assert u.dtype == np.float64
    assert 0 < u.min() < u.max() < 1
    assert stats.kstest(u, "uniform").pvalue > 1e-3
    assert stats.kstest((u * 2**20) % 1, "uniform").pvalue > 1e-3  # the low bits too
    assert abs(np.corrcoef(u[1:], u[:-1])[0, 1]) < 5 / math.sqrt(len(u))
    assert len(np.unique(u)) == len(u)


@pytest.mark.parametrize("kind", KEYS)
def test_normals_are_normal(kind):
    n = 50_000
    z = rng.normals(*KEYS[kind](n)).numpy()
    assert z.dtype == np.float64
    assert np.isfinite(z).all()
    assert abs(z.mean()) < 4.5 / math.sqrt(n)
    assert abs(z.var() - 1) < 4.5 * math.sqrt(2 / n)
    assert abs(stats.skew(z)) < 4.5 * math.sqrt(6 / n)
    assert abs(stats.kurtosis(z)) < 4.5 * math.sqrt(24 / n)
    assert stats.kstest(z, "norm").pvalue > 1e-3
    for lag in (1, 2, 3, 64):
        assert abs(np.corrcoef(z[lag:], z[:-lag])[0, 1]) < 5 / math.sqrt(n)
        assert abs(np.corrcoef(z[lag:] ** 2, z[:-lag] ** 2)[0, 1]) < 5 / math.sqrt(n)


def test_normals_of_keys_and_counters_are_independent():
    z = rng.normals(rng.keys((200,), gen(1))[:, None], torch.arange(500))
    assert z.shape == (200, 500)
    across = torch.corrcoef(z)
    across.fill_diagonal_(0)
    assert across.abs().max() < 6 / math.sqrt(500)
    down = torch.corrcoef(z.mT)
    down.fill_diagonal_(0)
    assert down.abs().max() < 6.5 / math.sqrt(200)
    assert abs(across.square().mean() * 500 - 1) < 0.05
    assert stats.kstest(z.flatten().numpy(), "norm").pvalue > 1e-3


def test_tails_reach_as_far_as_they_should():
    z = rng.normals(torch.tensor(3), torch.arange(1_000_000)).abs()
    for q in (3.0, 4.0):
        expected = 1e6 * 2 * stats.norm.sf(q)
        assert abs(int((z > q).sum()) - expected) < 5 * math.sqrt(expected)
    assert 4.5 < z.max() < 6.5


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**62), st.integers(1, 500), st.integers(1, 97))
def test_a_number_belongs_to_its_pair_alone(seed, n, step):
    key, counter = rng.keys((3, 1), gen(seed)), torch.arange(n)
    whole = rng.normals(key, counter)
    parts = torch.cat([rng.normals(key, counter[s : s + step]) for s in range(0, n, step)], 1)
    assert torch.equal(whole, parts)
    assert torch.equal(whole[1], rng.normals(key[1], counter))
    order = torch.randperm(n, generator=gen(1))
    assert torch.equal(whole[:, order], rng.normals(key, counter[order]))


def test_keys_are_spread_over_63_bits():
    k = rng.keys((20_000,), gen(0))
    assert k.dtype == torch.int64
    assert k.min() >= 0
    assert len(k.unique()) == 20_000
    assert stats.kstest(k.double().numpy() / 2**63, "uniform").pvalue > 1e-3
    assert torch.equal(k, rng.keys((20_000,), gen(0)))


# --- streams -------------------------------------------------------------------------------------------------------


def first(generator: torch.Generator) -> list[float]:
    return torch.rand(4, generator=generator).tolist()


def test_a_stream_depends_on_seed_purpose_and_member_alone():
    want = first(rng.stream(3, "inputs", 5))
    torch.manual_seed(99)
    torch.rand(10)
    assert first(rng.stream(3, "inputs", 5)) == want
    for m in range(20):
        rng.stream(3, "inputs", m)
    assert first(rng.stream(3, "inputs", 5)) == want
    others = [
        (4, "inputs", 5),
        (3, "targets", 5),
        (3, "inputs", 6),
        (3, "inputs", 0),
        (35, "inputs", 5),
        (-3, "inputs", 5),
    ]
    seen = {tuple(first(rng.stream(*o))) for o in others} | {tuple(want)}
    assert len(seen) == len(others) + 1
    # the parts do not run together: (1, "a/2", 3) is not (1, "a", 2/3)
    assert first(rng.stream(1, "a", 23)) != first(rng.stream(1, "a/2", 3))


def test_drawing_leaves_the_global_stream_alone():
    state = torch.random.get_rng_state()
    rng.stream(0, "x")
    rng.normals(torch.tensor(1), torch.arange(4))
    score = vk.EmpiricalScore(vk.data.triple(), vk.VP())
    x = torch.zeros(3, 1)
    score.covariance(x, 0.3).draw()
    score.posterior(x, 0.3).sample(4)
    vk.VP().perturb(x, 0.3)
    vk.noise_fraction(vk.data.hexagon(), vk.VP(), 0.3, queries=8)
    assert torch.equal(state, torch.random.get_rng_state())


def test_members_are_independent():
    z = torch.stack([torch.randn(400, generator=rng.stream(0, "noise", m)) for m in range(200)])
    c = torch.corrcoef(z)
    c.fill_diagonal_(0)
    assert c.abs().max() < 6 / 20
    assert stats.kstest(z.flatten().numpy(), "norm").pvalue > 1e-3


def test_generators_seeds_and_nothing():
    g = gen(0)
    assert rng.as_generator(g) is g
    assert first(rng.as_generator(7)) == first(gen(7))
    assert first(rng.as_generator(None)) != first(rng.as_generator(None))
    for bad in ("1", 1.0, True, [1], np.random.default_rng(0)):
        with pytest.raises(InputError, match="generator"):
            rng.as_generator(bad)


@pytest.mark.parametrize("d", [3, 40])
@pytest.mark.parametrize("sigma", [0.5, 2.0])
def test_draws_do_not_depend_on_chunks_and_blocks(d, sigma):
    points = torch.randn(500, d, generator=gen(0), dtype=torch.float64)
    x = points[:6] + sigma * torch.randn(6, d, generator=gen(1), dtype=torch.float64)
    want = None
    for chunk, block in ((500, 6), (64, 6), (64, 1), (9, 4), (500, 2)):
        score = vk.EmpiricalScore(points, vk.EDM())
        score.engine.points.chunk, score.engine.dense.block = chunk, block
        posterior = score.posterior(x, sigma)
        got = posterior.cov.draw(3), posterior.sample(40, 3)
        if want is None:
            want = got
        assert torch.equal(got[1], want[1])
        assert (got[0] - want[0]).norm(dim=1).le(1e-3 * posterior.cov.trace().sqrt() + 1e-6 * score.data.spread).all()
        assert (posterior.cov.draw(3) == got[0]).all()


@pytest.mark.parametrize("d", [1, 2, 8, 9])
def test_quasi_random_normals_fill_the_law_evenly(d):
    z = rng.quasi_normals(1024, d, 5)
    assert z.shape == (1024, d)
    assert z.isfinite().all()
    assert torch.equal(z, rng.quasi_normals(1024, d, 5))
    even = 3 * d / 1024 if d <= 8 else 3 / 32  # against 1/sqrt(n) of independent draws
    assert (z.mean(0).abs() < even).all()
    if d == 1:
        assert torch.equal(z, z.sort(0).values)
        assert stats.kstest(z[:, 0].numpy(), "norm").statistic < 1 / 1024
