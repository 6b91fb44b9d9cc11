"""Noise of any covariance: operators against dense matrices."""

from __future__ import annotations

import math

import pytest
import torch
from processes import at, each, f64

from vkernel.core.covariance import Diagonal, Factored, Matrix, Transformed
from vkernel.core.errors import InputError
from vkernel.process import EDM, VP, Anisotropic, FlowMatching, Toy

ROOT = torch.tensor([[1.0, 0.2, 0.0], [0.0, 0.7, -0.4], [0.0, 0.0, 1.3]], dtype=torch.float64)
GAMMA = ROOT @ ROOT.T
VARIANCES = f64(0.5, 1.0, 3.0)
kinds = pytest.mark.parametrize(
    ("gamma", "dense"),
    [
        (GAMMA, GAMMA),
        (VARIANCES, VARIANCES.diag()),
        (Matrix(GAMMA, (3,)), GAMMA),
        (Diagonal(VARIANCES, (3,)), VARIANCES.diag()),
    ],
    ids=["matrix", "diagonal", "Matrix", "Diagonal"],
)


@kinds
@each
def test_anisotropic_S_and_D_against_dense_matrices(process, gamma, dense):
    """S = sigma² Γ; and D = S'/2 + beta S as matrices, S' by autodiff."""
    p = Anisotropic(process, gamma)
    t = torch.stack([at(process, u) for u in (0.2, 0.5)])
    torch.testing.assert_close(p.S(t).dense(), process.S(t)[:, None, None] * dense)
    for k in range(2):
        slopes = torch.autograd.functional.jacobian(lambda u: p.S(u).dense(), t[k])
        D = slopes / 2 + p.beta(t[k]) * p.S(t[k]).dense()
        torch.testing.assert_close(p.D(t).dense()[k], D, rtol=1e-8, atol=1e-12)
    v = torch.randn(2, 3, dtype=torch.float64)
    torch.testing.assert_close(p.S(t) @ v, process.S(t)[:, None] * (v @ dense))
    assert torch.equal(p.sigma(t), process.sigma(t))
    assert torch.equal(p.alpha(t), process.alpha(t))
    assert (p.eps, p.T, p.base, p.shape) == (process.eps, process.T, process, (3,))


@kinds
def test_whitening(gamma, dense):
    p, x = Anisotropic(VP(), gamma), torch.randn(5, 2, 3, dtype=torch.float64)
    torch.testing.assert_close(p.unwhiten(p.whiten(x)), x)
    torch.testing.assert_close(p.whiten(p.whiten(x)), x @ torch.linalg.inv(dense))
    torch.testing.assert_close(p.unwhiten(p.unwhiten(x)), x @ dense)
    torch.testing.assert_close(p.root.dense() @ p.root.dense(), dense)
    white = Transformed(p.S(0.5), map=p.inverse_root).dense()  # the noise is white in these coordinates
    torch.testing.assert_close(white, VP().S(f64(0.5)) * torch.eye(3, dtype=torch.float64))
    back = Transformed(Diagonal(VP().S(f64(0.5)).expand(3), (3,)), map=p.root).dense()
    torch.testing.assert_close(back, p.S(0.5).dense())
    assert p.half_log_det == pytest.approx(float(torch.logdet(dense)) / 2, rel=1e-12)
    assert p.inverse_trace == pytest.approx(float(torch.linalg.inv(dense).trace()), rel=1e-12)
    assert p.whiten(x.half()).dtype == torch.float16
    assert p.whiten(x.float()).dtype == torch.float32
    with pytest.raises(InputError, match=r"events of shape \(3,\)"):
        p.whiten(x[..., :2])


@kinds
def test_anisotropic_draws_have_covariance_gamma(gamma, dense):
    p, n, t = Anisotropic(Toy(), gamma), 40_000, f64(0.4)
    x = p.perturb(f64(1.0, 2.0, 3.0).expand(n, 3), t, generator=0)
    error = (dense**2 + dense.diag().outer(dense.diag())).div(n).sqrt()
    assert ((x.T.cov() - 0.4 * dense).abs() < 4 * 0.4 * error).all()
    assert ((x.mean(0) - 0.6**0.5 * f64(1.0, 2.0, 3.0)).abs() < 4 * (0.4 * dense.diag() / n).sqrt()).all()
    prior = p.prior((n, 3), dtype=torch.float64, generator=1)
    assert ((prior.T.cov() - 0.999 * dense).abs() < 4 * error).all()
    whitened = p.whiten(p.perturb(p.unwhiten(torch.ones(4, 3)), 0.4, generator=7))
    torch.testing.assert_close(whitened, p.base.perturb(torch.ones(4, 3), 0.4, generator=7))
    with pytest.raises(InputError, match="one for each element of the batch"):
        p.perturb(torch.ones(4, 3), torch.full((4, 3), 0.4))


def test_anisotropic_for_images():
    images = Anisotropic(EDM(), torch.rand(2, 4, 4) + 0.5)
    assert images.S(torch.ones(5)).batch == (5,)
    assert images.S(torch.ones(5)).diag().shape == (5, 2, 4, 4)
    assert images.perturb(torch.zeros(5, 2, 4, 4), torch.ones(5)).shape == (5, 2, 4, 4)
    square = Anisotropic(EDM(), Diagonal(torch.rand(4, 4) + 0.5, (4, 4)))
    assert square.shape == (4, 4)
    flat = Anisotropic(EDM(), Matrix(torch.eye(16), (4, 4)))
    torch.testing.assert_close(flat.whiten(torch.ones(3, 4, 4)), torch.ones(3, 4, 4))


def test_anisotropic_operators_follow_t():
    p = Anisotropic(VP(), GAMMA)
    assert p.S(0.5).dtype == torch.float64
    assert p.S(torch.tensor(0.5)).dtype == torch.float32
    assert (p.S(torch.tensor([0.5, 0.6])) @ torch.ones(2, 3)).dtype == torch.float32


@pytest.mark.parametrize(
    ("gamma", "sentence"),
    [
        (f64(1.0, 0.0), "must be positive; the smallest is 0"),
        (f64(1.0, -2.0), "must be positive; the smallest is -2"),
        (f64(1.0, math.nan), "finite"),
        (torch.tensor([[1.0, 0.3], [0.0, 1.0]]), "not symmetric: .* differ by 0.3.*Diagonal"),
        (torch.ones(3, 3), "not positive definite: eigenvalues"),
        (torch.tensor([[1.0, 2.0], [2.0, 1.0]]), "not positive definite: eigenvalues from -1 to 3"),
        (Factored(torch.eye(3), (3,)), "Diagonal or Matrix"),
        (Diagonal(torch.ones(2, 3), (3,)), "without batch"),
    ],
    ids=str,
)
def test_gamma_must_be_positive_definite(gamma, sentence):
    with pytest.raises(InputError, match=sentence):
        Anisotropic(VP(), gamma)


def test_anisotropic_equality_and_conversion():
    a, b = Anisotropic(VP(), GAMMA), Anisotropic(VP(), Matrix(GAMMA.clone(), (3,)))
    assert a == b
    assert hash(a) == hash(b)
    assert a not in (Anisotropic(VP(), VARIANCES), Anisotropic(Toy(), GAMMA), Anisotropic(VP(), 2 * GAMMA), VP())
    assert "alpha = exp(" in repr(a)
    with pytest.raises(AttributeError):
        a.eps = 0.1
    with pytest.raises(InputError, match="isotropic process"):
        Anisotropic(a, GAMMA)
    x = torch.randn(4, 3, dtype=torch.float64)
    moved, there = a.convert(x, 0.3, Anisotropic(FlowMatching(), GAMMA))
    expected, time = VP().convert(x, 0.3, FlowMatching())
    assert torch.equal(moved, expected)
    assert torch.equal(there, time)
    for p, q in ((a, VP()), (VP(), a), (a, Anisotropic(VP(), VARIANCES))):
        with pytest.raises(InputError, match="different covariances"):
            p.convert(x, 0.3, q)
