"""Derivatives of the exact score: autograd, forward mode, vmap, up to the second."""

from __future__ import annotations

import math

import pytest
import torch
from draws import gen, normal
from reference import PROCESSES, answer, levels, log_density, stack, time_between
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import vkernel as vk
from vkernel.core.errors import InputError
from vkernel.score.base import plain


def weights_of(n: int, seed: int) -> Tensor:
    return 0.1 + torch.rand(n, generator=gen(seed), dtype=torch.float64)


@pytest.mark.parametrize("name", sorted(PROCESSES))
@pytest.mark.parametrize("d", [1, 3, 36])
def test_the_jacobian_is_the_hessian_of_log_p_and_C_minus_inverse_S(name, d):
    points, weights = normal(15, d, seed=0), weights_of(15, 1)
    process = PROCESSES[name]
    score = vk.EmpiricalScore(vk.Empirical(points, weights), process)
    for u in (0.4, 0.6, 0.9):
        t = time_between(process, u)
        alpha, S = levels(name, t)
        x = alpha * points[:2].mean(0) + 0.3 * math.sqrt(S) * normal(d, seed=2)
        want = hessian(log_density)(x, points, weights / weights.sum(), alpha, S)
        torch.testing.assert_close(
            score(x, t), grad(log_density)(x, points, weights / weights.sum(), alpha, S), rtol=1e-5, atol=1e-5 / S
        )
        C = score.covariance(x, t).dense()
        scale = 1e-4 * (1 / S + float(C.diagonal().max())) if d == 36 else 1e-9 * (1 / S + float(C.diagonal().max()))
        eye = torch.eye(d, dtype=torch.float64)
        for got in (C - eye / S, jacrev(score)(x, t), jacfwd(score)(x, t)):
            assert (got - want).abs().max() <= scale
        v = normal(d, seed=3)
        torch.testing.assert_close(vjp(lambda q, t=t: score(q, t), x)[1](v)[0], want @ v, rtol=0, atol=scale * d)
        torch.testing.assert_close(jvp(lambda q, t=t: score(q, t), (x,), (v,))[1], want @ v, rtol=0, atol=scale * d)


@pytest.mark.parametrize("matrix", [False, True])
def test_derivatives_through_anisotropic_noise(matrix):
    d = 3
    a = normal(d, d, seed=5)
    gamma = a @ a.mT + 0.2 * torch.eye(d, dtype=torch.float64) if matrix else 0.2 + normal(d, seed=5).square()
    dense = gamma if matrix else gamma.diag()
    points, weights = normal(10, d, seed=0), weights_of(10, 1)
    process = vk.Anisotropic(vk.VP(), gamma)
    score = vk.EmpiricalScore(vk.Empirical(points, weights), process)
    x, t = 0.5 * normal(d, seed=2), 0.2
    alpha, S = levels("vp", t)
    args = points, weights / weights.sum(), alpha, S * dense
    torch.testing.assert_close(score(x, t), grad(log_density)(x, *args))
    want = hessian(log_density)(x, *args)
    precision = torch.linalg.inv(S * dense)
    for got in (score.covariance(x, t).dense() - precision, jacrev(score)(x, t), jacfwd(score)(x, t)):
        torch.testing.assert_close(got, want)
    torch.testing.assert_close(jacrev(jacrev(score))(x, t), jacrev(hessian(log_density))(x, *args))
    batch = normal(3, d, seed=6).requires_grad_()
    assert gradcheck(lambda q: score(q, t), (batch,))
    assert gradgradcheck(lambda q: score(q, t), (batch,))


@pytest.mark.parametrize("name", ["vp", "edm", "flow"])
def test_gradcheck_and_gradgradcheck(name):
    points = normal(8, 2, seed=0)
    process = PROCESSES[name]
    score = vk.EmpiricalScore(vk.Empirical(points, weights_of(8, 1)), process)
    t = torch.tensor([0.4, 0.5, 0.7], dtype=torch.float64)
    x = normal(3, 2, seed=2).requires_grad_()
    assert gradcheck(lambda q: score(q, t), (x,), check_forward_ad=True)
    assert gradgradcheck(lambda q: score(q, t), (x,))


@pytest.mark.parametrize("d", [2, 34])
def test_third_derivatives_of_log_p(d):
    points, weights = normal(12, d, seed=0) / math.sqrt(d), weights_of(12, 1)
    score = vk.EmpiricalScore(vk.Empirical(points, weights), vk.VP())
    t = 0.15
    alpha, S = levels("vp", t)
    x = 0.2 * normal(d, seed=2)
    if d == 2:
        want = jacrev(hessian(log_density))(x, points, weights / weights.sum(), alpha, S)
        for second in (jacrev(jacrev(score)), jacfwd(jacrev(score)), jacrev(jacfwd(score)), jacfwd(jacfwd(score))):
            torch.testing.assert_close(second(x, t), want)
    # along three directions, by nested products, in any dimension
    u, v, w = normal(3, d, seed=3)

    def along(f, q, direction):
        return jvp(f, (q,), (direction,))[1]

    def reference(q):
        return log_density(q, points, weights / weights.sum(), alpha, S)

    want = along(lambda q: along(lambda r: along(reference, r, w), q, v), x, u)
    got = along(lambda q: along(lambda r: score(r, t), q, v), x, u) @ w
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * abs(float(want)))


def test_beyond_the_last_derivative_there_is_a_sentence():
    score = vk.EmpiricalScore(normal(5, 2, seed=0), vk.VP())
    x = normal(2, seed=1).requires_grad_()
    s = score(x, 0.3)
    (first,) = torch.autograd.grad(s.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
    assert second.isfinite().all()
    with pytest.raises((InputError, RuntimeError), match="third is not provided"):
        torch.autograd.grad(second.sum(), x)
    for beyond in (jacfwd(jacfwd(jacfwd(score))), jacfwd(jacrev(jacrev(score))), jacrev(jacfwd(jacrev(score)))):
        with pytest.raises((InputError, RuntimeError), match="third is not provided"):
            beyond(x.detach(), 0.3)


def test_vmap_is_a_batch():
    points = normal(9, 3, seed=0)
    score = vk.EmpiricalScore(points, vk.VP())
    x, t = normal(6, 3, seed=1), torch.linspace(0.05, 0.9, 6, dtype=torch.float64)
    torch.testing.assert_close(vmap(lambda q: score(q, 0.3))(x), score(x, 0.3))
    torch.testing.assert_close(vmap(score)(x, t), score(x, t))
    torch.testing.assert_close(vmap(lambda u: score(x[0], u))(t), score(x[:1].expand(6, 3), t))
    torch.testing.assert_close(vmap(lambda u: score(x, u))(t)[2], score(x, t[2]))
    torch.testing.assert_close(vmap(score, in_dims=(1, 0))(x.mT.reshape(3, 6), t), score(x, t))
    torch.testing.assert_close(vmap(lambda q: score(q, t))(x.expand(4, 6, 3)), score(x, t).expand(4, 6, 3))
    nested = vmap(vmap(score))(x.reshape(2, 3, 3), t.reshape(2, 3))
    torch.testing.assert_close(nested, score(x, t).reshape(2, 3, 3))
    jacobians = vmap(jacrev(score))(x, t)
    for b in range(6):
        torch.testing.assert_close(jacobians[b], jacrev(score)(x[b], t[b]))
    second = vmap(jacfwd(jacrev(score)))(x, t)
    torch.testing.assert_close(second[4], jacrev(jacrev(score))(x[4], t[4]))
    divergence = vmap(lambda q, u: jacrev(score)(q, u).trace())(x, t)
    torch.testing.assert_close(
        divergence, score.covariance(x, t).trace() - 3 / torch.tensor([levels("vp", u)[1] for u in t.tolist()])
    )


def test_vmap_over_images_and_anisotropic_noise():
    points = normal(7, 2, 3, seed=0)
    frame = vk.core.covariance.Diagonal(0.5 + normal(2, 3, seed=1).square(), (2, 3))
    for process in (vk.EDM(), vk.Anisotropic(vk.EDM(), frame)):
        score = vk.EmpiricalScore(vk.Empirical(points), process)
        x, t = normal(4, 2, 3, seed=2), torch.tensor([0.3, 0.5, 1.0, 2.0], dtype=torch.float64)
        torch.testing.assert_close(vmap(score)(x, t), score(x, t))
        torch.testing.assert_close(vmap(jacrev(score))(x, t)[1], jacrev(score)(x[1], t[1]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("d", [2, 40])
def test_autograd_in_every_precision(dtype, d):
    points = normal(20, d, seed=0) / math.sqrt(d)
    score = vk.EmpiricalScore(points, vk.VP())
    x = (0.3 * normal(3, d, seed=1)).to(dtype).requires_grad_()
    v = normal(3, d, seed=2).to(dtype)
    s = score(x, 0.2)
    (got,) = torch.autograd.grad(s, x, v)
    assert s.dtype == got.dtype == dtype
    alpha, S = levels("vp", 0.2)
    truth = [answer(points, None, q, alpha, S) for q in x.detach()]
    want = torch.stack([a.C @ u - u / S for a, u in zip(truth, v.double(), strict=True)])
    assert (got.double() - want).abs().max() <= (torch.finfo(dtype).eps * 2 + 1e-5) * want.abs().max()
    assert (s.double() - stack(truth, "score")).abs().max() <= (torch.finfo(dtype).eps * 2 + 1e-5) * s.abs().max()


@pytest.mark.parametrize("mode", ["reverse", "requires_grad", "forward", "both"])
def test_derivatives_in_t_are_refused_not_zero(mode):
    score = vk.EmpiricalScore(normal(5, 2, seed=0), vk.VP())
    x, t = normal(3, 2, seed=1), torch.tensor(0.3, dtype=torch.float64)
    derivative = {
        "reverse": lambda: grad(lambda u: score(x, u).sum())(t),
        "requires_grad": lambda: score(x, t.requires_grad_()),
        "forward": lambda: jvp(lambda u: score(x, u), (t,), (torch.ones_like(t),)),
        "both": lambda: jvp(score, (x, t), (torch.ones_like(x), torch.ones_like(t))),
    }
    with pytest.raises(InputError, match="not in t"):
        derivative[mode]()


def test_what_derivatives_and_maps_look_at_is_not_plain() -> None:
    seen: list[bool] = []

    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append(plain(x) or plain(torch.ones(2)))  # the latter, too: it may be captured by a transform
        return x.sum()

    torch.func.grad(look)(torch.ones(3))
    torch.func.vmap(look)(torch.ones(3, 2))
    torch.func.jvp(look, (torch.ones(3),), (torch.ones(3),))
    assert seen == [False] * 3
    assert not plain(torch.ones(2), torch.ones(2, requires_grad=True))
    assert plain(torch.ones(2), torch.ones(()))
