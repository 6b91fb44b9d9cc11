"""V-kernels: the protocol, its formulas by brute force, fields that remember, refusals."""

from __future__ import annotations

import math

import pytest
import torch
from draws import normal
from torch import Tensor

import vkernel as vk
from vkernel.core.errors import InputError
from vkernel.kernels import FiniteRank, Function, Naive

PROCESS = vk.VP(eps=0.01)
DATA = torch.tensor([[-1.0, 0.0], [1.0, 0.5], [0.2, 1.0]], dtype=torch.float64)
SCORE = vk.EmpiricalScore(DATA, PROCESS)
W = torch.tensor([[0.5, 0.1, 0.0], [0.1, 0.3, -0.1], [0.0, -0.1, 0.2]], dtype=torch.float64)


def basis(x: Tensor, t) -> Tensor:
    return torch.stack([torch.ones_like(x), x, torch.sin(2 * x + 3 * torch.as_tensor(t).to(x))])


def radial(x: Tensor, t: Tensor, x2: Tensor, t2: Tensor) -> Tensor:
    return 0.5 * torch.exp(-0.5 * (x - x2).square().sum(-1) - 0.5 * (t - t2).square())


def by_weights(x: Tensor, t: Tensor, x2: Tensor, t2: Tensor) -> Tensor:
    """The covariance function of the finite-rank field above: a matrix for each pair."""
    one, two = basis(x, t[..., None]), basis(x2, t2[..., None])
    return torch.einsum("f...a,fg,g...b->...ab", one, W, two)


FINITE, FUNCTION = FiniteRank(basis, W, PROCESS), Function(radial, PROCESS)


def test_V_is_D_cov_D():
    x, x2 = normal(4, 2, seed=0), normal(4, 2, seed=1)
    D = {t: float(PROCESS.D(torch.tensor(t, dtype=torch.float64))) for t in (0.3, 0.7)}
    for kernel in (Naive(SCORE, 0.2), FINITE, FUNCTION):
        torch.testing.assert_close(kernel(x, 0.3).dense(), D[0.3] ** 2 * kernel.cov(x, 0.3).dense())
    for kernel in (FINITE, FUNCTION):
        want = D[0.3] * D[0.7] * kernel.cov(x, 0.3, x2, 0.7).dense()
        torch.testing.assert_close(kernel(x, 0.3, x2, 0.7).dense(), want)
        torch.testing.assert_close(kernel.cov(x2, 0.7, x, 0.3).dense().mT, kernel.cov(x, 0.3, x2, 0.7).dense())
    torch.testing.assert_close(Naive(SCORE, 0.2).cov(x, 0.3).dense(), 0.2 * SCORE.covariance(x, 0.3).dense())


def test_V_of_an_anisotropic_process_has_D_as_an_operator():
    process = vk.Anisotropic(PROCESS, torch.tensor([[1.0, 0.3], [0.3, 0.5]], dtype=torch.float64))
    score = vk.EmpiricalScore(DATA, process)
    x = normal(2, seed=2)
    D = process.D(torch.tensor(0.3, dtype=torch.float64)).dense()
    want = 0.2 * D @ score.covariance(x, 0.3).dense() @ D
    torch.testing.assert_close(Naive(score, 0.2)(x, 0.3).dense(), want)


def test_a_white_kernel_has_neither_two_times_nor_fields():
    kernel, x = Naive(SCORE, 0.1), normal(2, 2, seed=3)
    for call in (lambda: kernel.cov(x, 0.3, x, 0.4), lambda: kernel(x, 0.3, x), lambda: kernel.draw(2)):
        with pytest.raises(InputError, match="white"):
            call()


def test_mean_and_noise_come_from_one_posterior():
    kernel, x = Naive(SCORE, 0.1), normal(5, 2, seed=4)
    s, noise = kernel.mean_and_noise(x, 0.3, 5)
    torch.testing.assert_close(s, SCORE(x, 0.3))
    torch.testing.assert_close(noise, kernel.cov(x, 0.3).draw(5))


def test_a_finite_rank_covariance_by_brute_force():
    x, x2 = normal(3, 2, seed=5), normal(3, 2, seed=6)
    one, two = basis(x, 0.2), basis(x2, 0.9)
    for i in range(3):
        want = sum(W[f, g] * torch.outer(one[f, i], two[g, i]) for f in range(3) for g in range(3))
        torch.testing.assert_close(FINITE.cov(x, 0.2, x2, 0.9).dense()[i], want)
        same = sum(W[f, g] * torch.outer(one[f, i], one[g, i]) for f in range(3) for g in range(3))
        torch.testing.assert_close(FINITE.cov(x, 0.2).dense()[i], same)
    torch.testing.assert_close(
        FINITE.cov(x, 0.2, x2, 0.9) @ x, (FINITE.cov(x, 0.2, x2, 0.9).dense() @ x[..., None])[..., 0]
    )


@pytest.mark.parametrize(
    "kernel", [FINITE, Function(by_weights, PROCESS), FUNCTION], ids=["weights", "matrix", "scalar"]
)
def test_the_values_of_a_field_have_the_kernels_covariance_across_calls(kernel):
    members = 20000
    x, x2 = normal(2, seed=7), normal(2, seed=8)
    field = kernel.draw(members, 9)
    first, second = field(x.expand(members, 1, 2), 0.2)[:, 0], field(x2.expand(members, 1, 2), 0.8)[:, 0]
    for a, b, want in (
        (first, second, kernel.cov(x, 0.2, x2, 0.8).dense()),
        (first, first, kernel.cov(x, 0.2).dense()),
        (second, second, kernel.cov(x2, 0.8).dense()),
    ):
        product = a[:, :, None] * b[:, None]
        assert ((product.mean(0) - want).abs() <= 4.5 * product.std(0) / math.sqrt(members)).all()


@pytest.mark.parametrize(
    "kernel", [FINITE, Function(by_weights, PROCESS), FUNCTION], ids=["weights", "matrix", "scalar"]
)
def test_a_field_says_the_same_twice_and_members_differ(kernel):
    field, x = kernel.draw(3, 10), normal(3, 4, 2, seed=11)
    first = field(x, 0.3)
    field(x + 0.2, 0.5)
    again = field(x[:, [2, 0, 2]], 0.3)
    assert first.shape == x.shape
    torch.testing.assert_close(again, first[:, [2, 0, 2]], rtol=0, atol=2e-3)
    shared = kernel.draw(3, 12)(x[:1].expand(3, 4, 2), 0.3)
    assert (shared[0] - shared[1]).abs().max() > 1e-2
    assert torch.equal(kernel.draw(3, 10)(x, 0.3), first)
    assert kernel.draw(3, 10)(x.float(), 0.3).dtype == torch.float32


def test_a_kernel_that_vanishes_has_a_field_that_vanishes():
    field = Function(lambda *a: 0 * radial(*a), PROCESS).draw(2, 0)
    for t in (0.1, 0.2):
        assert field(DATA.expand(2, *DATA.shape), t).abs().max() < 1e-50


@pytest.mark.parametrize(
    "kernel", [FiniteRank(basis, W, PROCESS, SCORE), Function(radial, PROCESS, SCORE)], ids=["weights", "scalar"]
)
def test_models_are_the_mean_score_plus_one_field_each(kernel):
    found, x = kernel.models(400, 3), normal(3, 2, seed=12)
    s = found(x, 0.4)
    assert s.shape == (400, 3, 2)
    torch.testing.assert_close(found[17](x, 0.4), s[17], rtol=1e-4, atol=1e-4)  # the same field, not a fresh one
    torch.testing.assert_close(found.select([4, 2])(x, 0.4), s[[4, 2]], rtol=1e-4, atol=1e-4)
    want = kernel.cov(x, 0.4).diag()
    assert ((s.mean(0) - SCORE(x, 0.4)).abs() <= 4.5 * (want / 400).sqrt()).all()
    assert ((s.var(0) / want - 1).abs() <= 4.5 * math.sqrt(2 / 399)).all()
    assert (kernel.error(x, 0.4) == 0).all()
    with pytest.raises(InputError, match="without a mean score"):
        FINITE.models(2)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: Naive(SCORE, -0.1), "kappa"),
        (lambda: Naive(SCORE, math.nan), "kappa"),
        (lambda: Naive(lambda x, t: x, 0.1), "EmpiricalScore"),
        (lambda: FiniteRank(basis, -W, PROCESS), "semidefinite"),
        (lambda: FiniteRank(basis, W[:2], PROCESS), "weights"),
        (lambda: FiniteRank(basis, W * math.nan, PROCESS), "finite"),
        (lambda: FiniteRank(basis, W + torch.triu(torch.ones(3, 3), 1), PROCESS), "symmetric"),
        (lambda: FiniteRank(basis, W[:2, :2], PROCESS).cov(normal(1, 2, seed=0), 0.1), "basis"),
        (lambda: FiniteRank(lambda x, t: 3, W, PROCESS).draw(1)(normal(1, 2, seed=0), 0.1), "basis"),
        (lambda: FINITE.draw(0), "member"),
        (lambda: FUNCTION.draw(0), "member"),
        (lambda: FUNCTION.draw(2)(normal(3, 2, seed=0), 0.1), "members"),
        (lambda: FINITE.cov(DATA, 0.1, DATA + 1, 0.2).draw(), "two different places"),
        (lambda: Function(lambda x, t, x2, t2: t[..., :0], PROCESS).cov(DATA, 0.1), "shape"),
        (lambda: Function(lambda x, t, x2, t2: None, PROCESS).cov(DATA, 0.1), "tensor"),
        (lambda: Function(lambda *a: radial(*a) * math.nan, PROCESS).draw(1)(DATA[None], 0.1), "finite"),
        (lambda: Function(lambda *a: -radial(*a), PROCESS).draw(1)(DATA[None], 0.1), "semidefinite"),
        (lambda: Function(lambda *a: -radial(*a), PROCESS).cov(DATA, 0.1).draw(), "semidefinite"),
        (lambda: Function(lambda x, t, x2, t2: (x - x2).sum(-1), PROCESS).draw(1)(DATA[None], 0.1), "symmetric"),
        (lambda: Function(lambda x, t, y, u: (x - y).norm(dim=-1), PROCESS).draw(1)(DATA[None], 0.1), "semidefinite"),
    ],
)  # fmt: skip
def test_bad_kernels_are_refused(call, says):
    with pytest.raises(InputError, match=says):
        call()
