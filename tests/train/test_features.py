"""Features: every kind against another library's formula, and their products in any order and any chunk."""

from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pytest
import torch
from draws import normal
from hypothesis import given, settings, strategies as st
from scipy import special, stats
from torch import Tensor

import vkernel as vk
from vkernel.core.errors import InputError
from vkernel.train import features as module
from vkernel.train.features import KINDS, Axis, Grid, grid, random_fourier
from vkernel.train.models import from_spec

PROCESS = vk.VP(eps=0.01)


def times(*shape: int, seed: int) -> Tensor:
    u = torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return PROCESS.eps + (PROCESS.T - PROCESS.eps) * u


# --- one axis ------------------------------------------------------------------------------------------------------

ends = st.floats(-3, 3)
lengths = st.floats(0.1, 5)


@settings(max_examples=30, deadline=None)
@given(count=st.integers(2, 20), low=ends, length=lengths, seed=st.integers(0, 99))
def test_gaussian_features_are_normal_densities(count, low, length, seed):
    axis, v = Axis("gaussian", count, low, low + length), normal(3, 4, seed=seed)
    centres = np.linspace(low, axis.high, count)
    want = stats.norm.pdf(v.numpy()[..., None], centres, (centres[1] - centres[0]) / 2)
    torch.testing.assert_close(axis(v), torch.from_numpy(want), rtol=1e-8, atol=1e-12)


@settings(max_examples=30, deadline=None)
@given(count=st.integers(1, 12), low=ends, length=lengths, seed=st.integers(0, 99))
def test_polynomial_features_are_those_of_legendre(count, low, length, seed):
    axis = Axis("polynomial", count, low, low + length)
    z = 2 * torch.rand(7, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) - 1
    v = low + length * (z + 1) / 2
    want = np.stack([special.eval_legendre(k, z.numpy()) for k in range(count)], -1)
    torch.testing.assert_close(axis(v), torch.from_numpy(want), rtol=1e-8, atol=1e-8)


@settings(max_examples=30, deadline=None)
@given(count=st.integers(1, 13), low=ends, length=lengths, seed=st.integers(0, 99))
def test_fourier_features_one_by_one(count, low, length, seed):
    """The order of theory §11: 1, all cosines, all sines; of x itself, wherever the axis begins."""
    axis, v = Axis("fourier", count, low, low + length), normal(5, seed=seed)
    L = axis.high - axis.low
    want = [[1.0] for _ in v]
    for row, x in zip(want, v.tolist(), strict=True):
        row += [math.cos(2 * math.pi * k * x / L) for k in range(1, count) if 2 * k <= count]
        row += [math.sin(2 * math.pi * k * x / L) for k in range(1, count) if 2 * k <= count - 1]
    assert axis(v).shape == (5, count)
    torch.testing.assert_close(axis(v), torch.tensor(want, dtype=torch.float64), rtol=1e-9, atol=1e-9)


def test_the_ten_fourier_features_of_figure_3():
    x, L = torch.linspace(-1.5, 1.5, 11, dtype=torch.float64), 3.0
    want = [torch.ones_like(x), *(torch.cos(2 * math.pi * k * x / L) for k in (1, 2, 3, 4, 5))]
    want += [torch.sin(2 * math.pi * k * x / L) for k in (1, 2, 3, 4)]
    torch.testing.assert_close(Axis("fourier", 10, -1.5, 1.5)(x), torch.stack(want, -1))


def test_fourier_and_legendre_features_are_orthogonal_on_their_axis():
    x = torch.linspace(0.3, 2.3, 20001, dtype=torch.float64)
    for kind in ("fourier", "polynomial"):
        phi = Axis(kind, 7, 0.3, 2.3)(x)
        gram = torch.trapezoid(phi[:, :, None] * phi[:, None, :], x, dim=0)
        assert (gram - gram.diagonal().diag()).abs().max() < 1e-6
        assert gram.diagonal().min() > 0.1


# --- products ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dim", [1, 2, 3])
def test_a_grid_is_all_products_and_the_index_of_t_runs_fastest(kind, dim):
    phi = grid(kind, 3, dim, -1.0, 2.0, PROCESS, per_time=4)
    x, t = normal(5, dim, seed=1), times(5, seed=2)
    axis, clock = Axis(kind, 3, -1.0, 2.0), Axis(kind, 4, PROCESS.eps, PROCESS.T)
    got = phi(x, t)
    assert got.shape == (5, phi.count) == (5, 3**dim * 4)
    for f, index in enumerate(itertools.product(*[range(3)] * dim, range(4))):
        want = clock(t)[:, index[-1]].clone()
        for j in range(dim):
            want *= axis(x[:, j])[:, index[j]]
        torch.testing.assert_close(got[:, f], want)
    torch.testing.assert_close(phi(x, 0.3), phi(x, torch.full((5,), 0.3)))
    assert phi(x.float(), 0.3).dtype == torch.float32
    assert phi(x[0], 0.3).shape == (phi.count,)
    assert phi(x[:, None], times(1, 6, seed=3)).shape == (5, 6, phi.count)


def test_the_count_per_time_is_that_of_the_axes_by_default():
    assert grid("gaussian", 16, 1, -1.5, 1.5, PROCESS).count == 256
    assert grid("fourier", 10, 2, process=PROCESS).count == 1000
    mixed = Grid((Axis("gaussian", 3, 0, 1), Axis("fourier", 5, -1, 1)), Axis("polynomial", 2, 0.0, 1.0))
    assert mixed.count == 30
    assert mixed.dim == 2


MODELS = {
    "grid": grid("gaussian", 3, 2, -1.0, 1.0, PROCESS, per_time=4),
    "polynomial": grid("polynomial", 4, 1, -1.0, 1.0, PROCESS),
    "mixed": Grid((Axis("gaussian", 3, -1, 1), Axis("fourier", 5, -1, 1)), Axis("polynomial", 2, 0.01, 1.0)),
    "random": random_fourier(17, 2, PROCESS, generator=4),
}


@settings(max_examples=120, deadline=None)
@given(
    name=st.sampled_from(sorted(MODELS)),
    members=st.integers(1, 3),
    shared=st.booleans(),
    one_time=st.booleans(),
    shared_time=st.booleans(),
    n=st.integers(0, 9),
    outputs=st.integers(1, 3),
    chunk=st.sampled_from([1, 40, 200, 1 << 23]),
)
def test_applied_weights_are_the_product_with_the_features(
    name, members, shared, one_time, shared_time, n, outputs, chunk
):
    phi = MODELS[name]
    x = normal(1 if shared else members, n, phi.dim, seed=5)
    t = times(1 if shared_time else members, 1 if one_time else n, seed=6)
    w = normal(members, phi.count, outputs, seed=7)
    rows = []
    for m in range(members):
        own = x[0 if shared else m]
        when = t[0 if shared_time else m].expand(n)
        rows.append([phi(own[i], float(when[i])) @ w[m] for i in range(n)])
    want = torch.stack([torch.stack(row) for row in rows]) if n else torch.zeros(members, 0, outputs).double()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CHUNK", chunk)
        got = phi.apply(w, x, t)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", ["gaussian", "fourier", "polynomial"])
def test_the_gram_matrix_is_that_of_the_features(kind):
    source = torch.Generator().manual_seed(0)
    x, t = (torch.rand(2, 7, *shape, generator=source, dtype=torch.float64) for shape in ((2,), ()))
    for found in (vk.features.grid(kind, 4, 2, process=vk.VP()), vk.features.random_fourier(50, 2, vk.VP())):
        phi = found(x, t)
        torch.testing.assert_close(found.gram(x, t), phi @ phi.mT)


def test_the_kernel_of_random_cosines_is_gaussian():
    """Over features, 2 cos cos has mean exp(-|u - u'|² / 2 l²), u = (x, t scaled to [-1, 1])."""
    count, length = 20000, 0.7
    phi = random_fourier(count, 2, PROCESS, length=length, generator=8)
    x, t = 0.5 * normal(6, 2, seed=9), times(6, seed=10)
    table = math.sqrt(count) * phi(x, t)
    products = table[:, None] * table[None]
    scaled = 2 * (t - PROCESS.eps) / (PROCESS.T - PROCESS.eps) - 1
    u = torch.cat([x, scaled[:, None]], 1)
    want = (-(u[:, None] - u[None]).square().sum(-1) / (2 * length**2)).exp()
    se = products.std(-1) / math.sqrt(count)
    assert ((products.mean(-1) - want).abs() <= 4 * se).all()
    torch.testing.assert_close((phi(x, t) @ phi(x, t).mT), products.mean(-1))
    again = random_fourier(count, 2, PROCESS, length=length, generator=8)
    assert torch.equal(again(x, t), phi(x, t))
    assert not torch.equal(random_fourier(count, 2, PROCESS, generator=9)(x, t), phi(x, t))


@pytest.mark.parametrize("name", MODELS)
def test_the_spec_survives_json(name):
    phi = MODELS[name]
    again = from_spec(json.loads(json.dumps(phi.spec)))
    x, t = normal(4, phi.dim, seed=11), times(4, seed=12)
    assert torch.equal(again(x, t), phi(x, t))
    assert again.spec == phi.spec
    assert repr(again) == repr(phi)
    assert str(phi.count) in repr(phi)


@pytest.mark.parametrize("name", MODELS)
def test_derivatives_are_those_of_finite_differences(name):
    phi, h = MODELS[name], 1e-5
    x, v, t = 0.5 * normal(4, phi.dim, seed=13), normal(4, phi.dim, seed=14), times(4, seed=15)
    got = torch.func.jvp(lambda y: phi(y, t), (x,), (v,))[1]
    torch.testing.assert_close(got, (phi(x + h * v, t) - phi(x - h * v, t)) / (2 * h), rtol=1e-6, atol=1e-6)
    got = torch.func.jvp(lambda u: phi(x, u), (t,), (torch.ones_like(t),))[1]
    torch.testing.assert_close(got, (phi(x, t + h) - phi(x, t - h)) / (2 * h), rtol=1e-6, atol=1e-6)
    w = normal(1, phi.count, phi.dim, seed=16)
    got = torch.func.jvp(lambda y: phi.apply(w, y[None], t[None]), (x,), (v,))[1]
    want = (phi.apply(w, (x + h * v)[None], t[None]) - phi.apply(w, (x - h * v)[None], t[None])) / (2 * h)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


# --- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: Axis("wavelet", 3, 0, 1), "one of gaussian.* not 'wavelet'"),
        (lambda: Axis("fourier", 0, 0, 1), "1 or more"),
        (lambda: Axis("fourier", 2.0, 0, 1), "whole number"),
        (lambda: Axis("fourier", True, 0, 1), "whole number"),
        (lambda: Axis("gaussian", 1, 0, 1), "two or more centres"),
        (lambda: Axis("fourier", 2, 1, 1), "low to high"),
        (lambda: Axis("fourier", 2, 1, 0), "low to high"),
        (lambda: Axis("fourier", 2, math.nan, 0), "finite"),
        (lambda: Axis("fourier", 2, 0, math.inf), "finite"),
        (lambda: Axis("fourier", 2, None, 1), "finite"),
        (lambda: grid(low="left", process=PROCESS), "low must"),
        (lambda: grid(low=math.nan, process=PROCESS), "low must"),
        (lambda: grid(low=1.5, high=-1.5, process=PROCESS), "low to high"),
        (lambda: grid(), "process"),
        (lambda: grid(process="vp"), "process"),
        (lambda: grid(dim=0, process=PROCESS), "dim must be"),
        (lambda: grid(dim=1.5, process=PROCESS), "dim must be"),
        (lambda: grid(per_axis=0, process=PROCESS), "1 or more"),
        (lambda: grid(dim=9, process=PROCESS), "few dimensions"),
        (lambda: Grid((), Axis("fourier", 2, 0, 1)), "none"),
        (lambda: MODELS["grid"](torch.zeros(4, 3), 0.5), "vectors of 2 numbers"),
        (lambda: MODELS["random"](torch.zeros(4, 3), 0.5), "vectors of 2 numbers"),
        (lambda: MODELS["grid"](torch.tensor(1.0), 0.5), "vectors of 2 numbers"),
        (lambda: random_fourier(0, 1, PROCESS), "number of features"),
        (lambda: random_fourier(4, 0, PROCESS), "dim must be"),
        (lambda: random_fourier(4, 1, PROCESS, length=0), "length"),
        (lambda: random_fourier(4, 1, PROCESS, length=math.nan), "length"),
        (lambda: random_fourier(4, 1, None), "process"),
        (lambda: module.RandomFourier(torch.zeros(4, 1), torch.zeros(4), 0.0, 1.0), "dim \\+ 1"),
        (lambda: module.RandomFourier(torch.zeros(4, 2), torch.zeros(3), 0.0, 1.0), "phases"),
        (lambda: from_spec({"kind": "wavelet"}), "no .*features of kind"),
        (lambda: from_spec({"kind": "grid", "axes": []}), "an axis for each"),
    ],
)
def test_bad_input_is_refused(call, says):
    with pytest.raises(InputError, match=says):
        call()
