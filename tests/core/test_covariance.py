"""Covariance operators: one contract, checked for every kind against its matrix."""

from __future__ import annotations

import math

import pytest
import torch
from draws import gen, normal
from torch import Tensor

import vkernel as vk
from vkernel.core.covariance import Covariance, Diagonal, Matrix, Transformed
from vkernel.core.errors import InputError


def positive(*shape: int, seed: int) -> Tensor:
    return 0.2 + normal(*shape, seed=seed).square()


def semidefinite(*batch: int, d: int, rank: int, seed: int) -> Tensor:
    a = normal(*batch, d, rank, seed=seed)
    return a @ a.mT


def posterior_cov(batch: tuple[int, ...], shape: tuple[int, ...]) -> Covariance:
    data = vk.Empirical(normal(12, *shape, seed=0), positive(12, seed=1))
    return vk.EmpiricalScore(data, vk.EDM()).posterior(normal(*batch, *shape, seed=2), 1.5).cov


def proxy_cov(batch: tuple[int, ...], shape: tuple[int, ...], frame: bool = False) -> Covariance:
    process = vk.Anisotropic(vk.VP(), Diagonal(positive(*shape, seed=3), shape)) if frame else vk.VP()
    return vk.EmpiricalScore(normal(12, *shape, seed=0), process).covariance(normal(*batch, *shape, seed=2), 0.4)


def spread(base: Tensor, batch: tuple[int, ...]) -> Tensor:
    return base.expand(*batch, *base.shape)


def kinds(batch: tuple[int, ...], shape: tuple[int, ...]) -> dict[str, tuple[Covariance, Tensor | None]]:
    """Every kind of operator with its matrix by hand; None where the matrix is checked elsewhere."""
    d = math.prod(shape)
    variances, matrix = positive(*batch, *shape, seed=2), semidefinite(*batch, d=d, rank=d + 1, seed=3)
    factor = positive(*batch, seed=4) if batch else positive(1, seed=4)[0]
    singular = semidefinite(*batch, d=d, rank=max(1, d // 2), seed=5)
    low, map_matrix = Diagonal(positive(*shape, seed=6), shape), Matrix(semidefinite(d=d, rank=d + 2, seed=7), shape)
    f2 = factor[..., None, None] ** 2
    return {
        "diagonal": (Diagonal(variances, shape), variances.reshape(*batch, d).diag_embed()),
        "matrix": (Matrix(matrix, shape), matrix),
        "singular": (Matrix(singular, shape), singular),
        "scaled": (Transformed(Matrix(matrix, shape), factor), f2 * matrix),
        "scaled shared": (Transformed(Matrix(map_matrix.entries, shape), factor), f2 * map_matrix.entries),
        "congruent diagonal": (
            Transformed(Matrix(matrix, shape), map=low),
            low.entries.reshape(d).diag() @ matrix @ low.entries.reshape(d).diag(),
        ),
        "congruent matrix": (
            Transformed(Diagonal(variances, shape), map=map_matrix),
            map_matrix.entries @ variances.reshape(*batch, d).diag_embed() @ map_matrix.entries,
        ),
        "posterior": (posterior_cov(batch, shape), None),
        "proxy": (proxy_cov(batch, shape), None),
        "proxy anisotropic": (proxy_cov(batch, shape, frame=True), None),
    }


NAMES = list(kinds((), (2,)))
LAYOUTS = [((), (3,)), ((4,), (3,)), ((2, 3), (2, 2)), ((5,), (1,)), ((2,), (1, 2, 2))]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("batch", "shape"), LAYOUTS)
def test_every_view_of_an_operator_agrees_with_its_matrix(name, batch, shape):
    cov, matrix = kinds(batch, shape)[name]
    d = math.prod(shape)
    dense = cov.dense()
    assert (cov.batch, cov.shape, cov.dim) == (batch, shape, d)
    assert dense.shape == (*batch, d, d)
    if matrix is not None:
        torch.testing.assert_close(dense, matrix)
    torch.testing.assert_close(dense, dense.mT, rtol=1e-9, atol=1e-12)
    assert torch.linalg.eigvalsh(dense).min() > -1e-9 * dense.abs().max()
    diagonal = dense.diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(cov.diag(), diagonal.reshape(*batch, *shape))
    torch.testing.assert_close(cov.trace(), diagonal.sum(-1))
    assert cov.trace().shape == batch
    v = normal(*batch, *shape, seed=9)
    product = (dense @ v.reshape(*batch, d, 1)).reshape(*batch, *shape)
    torch.testing.assert_close(cov @ v, product)
    one = normal(*shape, seed=10)  # a vector without batch broadcasts
    torch.testing.assert_close((cov @ one).expand(*batch, *shape), (dense @ one.reshape(d, 1)).reshape(*batch, *shape))
    assert cov.draw(1).shape == (*batch, *shape)
    assert torch.equal(cov.draw(1), cov.draw(gen(1)))
    assert not torch.equal(cov.draw(1), cov.draw(2))
    assert str(batch) in repr(cov)


@pytest.mark.parametrize("name", NAMES)
def test_draws_have_the_covariance_and_are_independent_over_the_batch(name):
    """6,000 draws as one batch: second moments within 5 standard errors, neighbours uncorrelated."""
    count, shape = 6000, (3,)
    if name in ("posterior", "proxy", "proxy anisotropic"):
        data = vk.Empirical(normal(12, 3, seed=0))
        x = normal(3, seed=2).expand(count, 3)
        process = vk.Anisotropic(vk.VP(), positive(3, seed=3)) if "an" in name else vk.VP()
        score = vk.EmpiricalScore(data, process)
        cov = score.posterior(x, 0.3).cov if name == "posterior" else score.covariance(x, 0.3)
        dense = score.covariance(x[0], 0.3).dense() if name != "posterior" else score.posterior(x[0], 0.3).cov.dense()
    else:
        variances, factor = spread(positive(3, seed=2), (count,)), torch.full((count,), 0.6, dtype=torch.float64)
        matrix = semidefinite(d=3, rank=2 if name == "singular" else 4, seed=3)
        many = Matrix(spread(matrix, (count,)), shape)
        cov = {
            "diagonal": lambda: Diagonal(variances, shape),
            "matrix": lambda: many,
            "singular": lambda: many,
            "scaled": lambda: Transformed(many, factor),
            "scaled shared": lambda: Transformed(Matrix(matrix, shape), factor),
            "congruent diagonal": lambda: Transformed(many, map=Diagonal(positive(3, seed=6), shape)),
            "congruent matrix": lambda: Transformed(many, map=Matrix(semidefinite(d=3, rank=5, seed=7), shape)),
        }[name]()
        dense = cov.dense()[0]
    z = cov.draw(11)
    se = ((dense.diagonal()[:, None] * dense.diagonal() + dense.square()) / count).sqrt()
    assert ((z.mT @ z / count - dense).abs() <= 5 * se + 1e-12).all()
    assert (z.mean(0).abs() <= 5 * (dense.diagonal() / count).sqrt() + 1e-12).all()
    lag = z[1:].mT @ z[:-1] / (count - 1)
    assert (lag.abs() <= 5 * (dense.diagonal()[:, None] * dense.diagonal() / count).sqrt() + 1e-12).all()


def test_the_noise_of_an_anisotropic_process_is_independent_for_each_time():
    process = vk.Anisotropic(vk.EDM(), positive(3, seed=0))
    S = process.S(torch.full((4000,), 2.0, dtype=torch.float64))
    z = S.draw(0)
    assert z.shape == (4000, 3)
    torch.testing.assert_close(z.square().mean(0), 4 * process.gamma.entries, rtol=0.15, atol=0)


def test_powers_are_powers():
    matrix = semidefinite(d=4, rank=6, seed=0)
    cov = Matrix(matrix, (2, 2))
    torch.testing.assert_close(cov.power(0.5).entries @ cov.power(0.5).entries, matrix)
    torch.testing.assert_close(cov.power(-1).entries, torch.linalg.inv(matrix))
    low = Matrix(semidefinite(d=4, rank=2, seed=0), (4,))
    pseudo = low.power(-1).entries
    torch.testing.assert_close(pseudo, torch.linalg.pinv(low.entries, hermitian=True))
    diagonal = Diagonal(positive(3, seed=1), (3,))
    torch.testing.assert_close(diagonal.power(-0.5).entries, diagonal.entries**-0.5)


def test_equality_is_number_for_number():
    a, b = Diagonal(positive(3, seed=0), (3,)), Matrix(positive(3, seed=0).diag(), (3,))
    assert a == Diagonal(positive(3, seed=0), (3,))
    assert a != b
    assert b != a
    assert a != Diagonal(positive(3, seed=1), (3,))
    assert a != a.to(a.device, torch.float32)
    assert a != Diagonal(positive(3, seed=0)[:, None], (3, 1))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("v", [torch.zeros(4, 2), torch.zeros(5, 3), torch.zeros(())], ids=["event", "batch", "scalar"])
def test_products_refuse_another_shape_with_a_sentence(name, v):
    cov, _ = kinds((4,), (3,))[name]
    if v.ndim == 0:
        return  # a number may broadcast
    with pytest.raises(InputError, match="shape"):
        cov @ v


def test_a_matrix_of_the_wrong_size_is_refused():
    for bad in (torch.eye(3), torch.ones(4, 2), torch.ones(4)):
        with pytest.raises(InputError, match="shape"):
            Matrix(bad, (2, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_operators_keep_their_type(dtype):
    points = normal(12, 3, seed=0)
    x = normal(4, 3, seed=1).to(dtype)
    score = vk.EmpiricalScore(points, vk.VP())
    for cov in (score.covariance(x, 0.3), score.posterior(x, 0.3).cov):
        assert cov.dtype == dtype
        for a in (cov.trace(), cov.diag(), cov.dense(), cov.draw(0), cov @ x):
            assert a.dtype == dtype
            assert a.isfinite().all()
