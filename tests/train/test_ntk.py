"""Kernels of wide networks: against Monte Carlo, finite networks and closed forms; derivatives, draws, refusals."""

from __future__ import annotations

import json
import math

import pytest
import torch
from draws import normal
from torch import Tensor

from vkernel.core import rng
from vkernel.core.errors import InputError
from vkernel.train.models import from_spec
from vkernel.train.models.lazy import ACTIVATIONS, NNGP, NTK, RBF, NetworkKernel

ALL = [NTK(1), NTK(2), NTK(3, "erf"), NNGP(2), NNGP(1, "erf", 2.0, 0.0), RBF(0.7, 1.5)]
NETWORKS = [(kind, depth) for kind in ("relu", "erf") for depth in (1, 2)]


def cosines(u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """|u||v| and the angle, by the plain formula."""
    size = u.norm(dim=-1)[:, None] * v.norm(dim=-1)
    return size, torch.arccos((u @ v.mT / size).clamp(-1, 1))


def trained(kernel: NetworkKernel, state: dict[str, Tensor]) -> list[str]:
    """Return the names of the parameters whose training K describes."""
    if isinstance(kernel, RBF):
        return ["a", "b"]
    return [f"W{kernel.depth}", f"b{kernel.depth}"] if isinstance(kernel, NNGP) else list(state)


def finite_ntk(kernel: NetworkKernel, state: dict[str, Tensor], u: Tensor, v: Tensor) -> Tensor:
    r"""Return the tangent kernel :math:`J_u J_v^T` of one drawn network of one output, at finite width.

    u ``(N, p)`` and v ``(N', p)`` give ``(N, N')``, which tends to ``kernel.ntk(u, v)`` as width^(-1/2).
    """
    moving = {name: state[name].to(u) for name in trained(kernel, state)}

    def output(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return kernel.apply(state | parameters, x[None])[0, 0]

    def jacobian(x: Tensor) -> Tensor:
        gradients = torch.func.vmap(torch.func.grad(output), in_dims=(None, 0))(moving, x)
        return torch.cat([gradients[name].flatten(1) for name in moving], 1)

    return jacobian(u) @ jacobian(v).mT


def stacked(kernel: NetworkKernel, members: int, p: int, outputs: int, seed: int) -> dict[str, Tensor]:
    states = [kernel.draw(p, outputs, rng.stream(seed, "init", m)) for m in range(members)]
    return {name: torch.stack([s[name] for s in states]) for name in states[0]}


def within(samples: Tensor, want: Tensor, errors: float = 4.5) -> None:
    """The mean over the first axis is ``want`` to within so many standard errors."""
    se = samples.std(0) / math.sqrt(len(samples))
    worst = ((samples.mean(0) - want).abs() / se).max()
    assert worst < errors, f"{worst:.1f} standard errors off"


# ---------------------------------------------------------------------------------------------- the recursion


@pytest.mark.parametrize("activation", ["relu", "erf"])
def test_one_layer_expectations_by_monte_carlo(activation):
    u, v, phi = normal(4, 3, seed=0), normal(3, 3, seed=1), ACTIVATIONS[activation][0]
    w, b = 1.7, 0.4
    W, bias = normal(200_000, 3, seed=2), normal(200_000, 1, seed=3)
    a, c = (math.sqrt(w / 3) * W @ x.mT + math.sqrt(b) * bias for x in (u, v))
    products = phi(a)[:, :, None] * phi(c)[:, None, :]
    within(w * products + b, NTK(1, activation, w, b).prior(u, v))
    slope = (lambda h: (h > 0).double()) if activation == "relu" else (lambda h: 2 / math.pi**0.5 * (-h * h).exp())
    first = w * u @ v.mT / 3 + b
    tangent = w * products + b + w * first * slope(a)[:, :, None] * slope(c)[:, None, :]
    within(tangent, NTK(1, activation, w, b).ntk(u, v))


@pytest.mark.parametrize(("activation", "depth"), NETWORKS)
def test_finite_networks_converge_as_one_over_the_root_of_width(activation, depth):
    u, v = normal(4, 3, seed=4), normal(3, 3, seed=5)
    want, rms = NTK(depth, activation).ntk(u, v), []
    for width in (64, 256, 1024):
        kernel = NTK(depth, activation, init_width=width)
        got = [finite_ntk(kernel, kernel.draw(3, 1, rng.stream(0, "width", m)), u, v) for m in range(16)]
        rms.append(float((torch.stack(got) - want).square().mean().sqrt() / want.square().mean().sqrt()))
    exponent = math.log(rms[0] / rms[2]) / math.log(16)
    assert rms[0] > rms[1] > rms[2]
    assert 0.35 < exponent < 0.65, (rms, exponent)
    assert rms[2] < 0.15


@pytest.mark.parametrize("kernel", [NTK(1), NTK(1, "erf"), NNGP(1), RBF(0.8)], ids=str)
def test_one_hidden_layer_has_the_tangent_kernel_in_the_mean_at_any_width(kernel):
    u, v = normal(3, 2, seed=6), normal(2, 2, seed=7)
    narrow = from_spec(kernel.spec | {"init_width": 16})
    got = [finite_ntk(narrow, narrow.draw(2, 1, rng.stream(1, "mean", m)), u, v) for m in range(300)]
    within(torch.stack(got), kernel.ntk(u, v))


def test_finite_NNGP_trains_the_readout_alone():
    u, kernel = normal(3, 2, seed=8), NNGP(2, "erf", init_width=1024)
    state = kernel.draw(2, 1, 0)
    torch.testing.assert_close(finite_ntk(kernel, state, u, u), kernel.ntk(u, u), rtol=0.15, atol=0.05)


def test_relu_without_bias_is_the_arc_cosine_kernel():
    u, v = normal(5, 4, seed=9), normal(6, 4, seed=10)
    size, angle = cosines(u, v)
    k0 = 1 - angle / math.pi
    k1 = size * (torch.sin(angle) + (math.pi - angle) * torch.cos(angle)) / math.pi
    torch.testing.assert_close(NTK(1, bias_var=0.0).prior(u, v), 2 / 4 * k1)
    torch.testing.assert_close(NTK(1, bias_var=0.0).ntk(u, v), 2 / 4 * (k1 + u @ v.mT * k0))


@pytest.mark.parametrize("p", [3, 50])
@pytest.mark.parametrize("depth", [1, 2, 5])
def test_relu_on_the_diagonal(depth, p):
    """Weights of variance 2 keep q = 2|u|²/p, and each of the depth + 1 layers adds it to the tangent kernel."""
    u, kernel = normal(7, p, seed=11), NTK(depth, bias_var=0.0)
    q = 2 * u.square().mean(-1)
    exact = {"rtol": 1e-13 if p == 3 else 1e-6, "atol": 0}  # above DIRECT nearby points lose half of the digits
    torch.testing.assert_close(kernel.prior(u, u).diagonal(), q, **exact)
    torch.testing.assert_close(kernel.ntk(u, u).diagonal(), (depth + 1) * q, **exact)


def test_erf_is_the_arcsine_kernel():
    u, v, b = normal(4, 3, seed=12), normal(5, 3, seed=13), 0.3
    s, q, q2 = u @ v.mT / 3 + b, u.square().mean(-1)[:, None] + b, v.square().mean(-1) + b
    want = 2 / math.pi * torch.arcsin(2 * s / ((1 + 2 * q) * (1 + 2 * q2)).sqrt()) + b
    torch.testing.assert_close(NTK(1, "erf", bias_var=b).prior(u, v), want)
    slope = 4 / math.pi / ((1 + 2 * q) * (1 + 2 * q2) - 4 * s * s).sqrt()
    torch.testing.assert_close(NTK(1, "erf", bias_var=b).ntk(u, v), want + s * slope)


def test_opposite_and_zero_vectors():
    u = torch.tensor([[1.0, 2.0], [0.0, 0.0]], dtype=torch.float64)
    K, K0 = NTK(1, bias_var=0.0).ntk(u, -u), NTK(2, bias_var=0.0).prior(u, -u)
    torch.testing.assert_close(K, torch.zeros_like(K), rtol=0, atol=1e-7)  # π - θ is known to √ε here
    assert K0[0, 0] > 0.1  # the second layer no longer sees opposite vectors
    assert (K0[1] == 0).all()


@pytest.mark.parametrize("gap", [1e-3, 1e-6, 1e-9, 1e-12])
def test_the_kink_of_relu_is_resolved_at_any_distance(gap):
    """K(u, u) - K(u, v) → Σ¹ σ_w² θ/2π for one hidden layer, to first order in the angle θ."""
    u = torch.tensor([[0.6, 0.8]], dtype=torch.float64)
    v = u + gap * torch.tensor([[-0.8, 0.6]], dtype=torch.float64)
    K = NTK(1, bias_var=0.0).ntk(u, torch.cat([u, v]))[0]
    assert float(K[0] - K[1]) == pytest.approx(gap / math.pi, rel=2 * gap + 3e-16 / gap)


# --------------------------------------------------------------------------------------------- as a covariance


@pytest.mark.parametrize("kernel", ALL, ids=str)
def test_symmetric_and_positive(kernel):
    u = normal(30, 2, seed=14)
    u = torch.cat([u, u[:3], u[:3] + 1e-7])  # coincident and nearly coincident points too
    for K in (kernel.ntk(u, u), kernel.prior(u, u)):
        torch.testing.assert_close(K, K.mT, rtol=0, atol=0)
        values = torch.linalg.eigvalsh(K)
        assert values.min() > -1e-13 * values.max()
    assert torch.linalg.eigvalsh(kernel.ntk(u, u) - kernel.prior(u, u)).min() > -1e-12  # training moves at least K0


@pytest.mark.parametrize("kernel", ALL, ids=str)
def test_broadcasting_and_pairs(kernel):
    u, v = normal(2, 1, 4, 3, seed=15), normal(5, 6, 3, seed=16)
    for f in (kernel.ntk, kernel.prior):
        K = f(u, v)
        assert K.shape == (2, 5, 4, 6)
        torch.testing.assert_close(K[1, 3], f(u[1, 0], v[3]))
        paired = f(u[..., None, :], v[:, :4][..., None, :])[..., 0, 0]
        torch.testing.assert_close(paired, K[..., :4].diagonal(dim1=-2, dim2=-1))


@pytest.mark.parametrize("kernel", ALL, ids=str)
@pytest.mark.parametrize("p", [3, 40])
def test_float32_agrees_with_float64(kernel, p):
    u, v = normal(6, p, seed=17), normal(5, p, seed=18)
    v = torch.cat([v, u])
    for f in (kernel.ntk, kernel.prior):
        got = f(u.float(), v.float())
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), f(u.float().double(), v.float().double()), rtol=3e-6, atol=3e-6)
    state = kernel.draw(p, 2, 0)
    low = kernel.draw(p, 2, 0, torch.float32)
    assert all(x.dtype == torch.float32 for x in low.values())
    torch.testing.assert_close(kernel.apply(low, u.float()).double(), kernel.apply(state, u), rtol=1e-4, atol=1e-4)


def test_large_and_small_p_agree():
    u, v = normal(6, 20, seed=19), normal(5, 20, seed=20)
    pad = torch.zeros(1, 30, dtype=torch.float64)
    wide = [torch.cat([x, pad.expand(len(x), -1)], 1) for x in (u, v)]
    torch.testing.assert_close(RBF(3.0).ntk(*wide), RBF(3.0).ntk(u, v))
    scaled = [x * math.sqrt(2.5) for x in wide]  # the first layer divides by p
    torch.testing.assert_close(NTK(2).ntk(*scaled), NTK(2).ntk(u, v))


# --------------------------------------------------------------------------------------------------- derivatives


@pytest.mark.parametrize("kernel", ALL, ids=str)
def test_jvp_against_differences(kernel):
    u, v, du, h = normal(4, 2, seed=21), normal(3, 2, seed=22), normal(4, 2, seed=23), 1e-5
    for f in (kernel.ntk, kernel.prior):
        got = torch.func.jvp(lambda x, f=f: f(x, v), (u,), (du,))[1]
        torch.testing.assert_close(got, (f(u + h * du, v) - f(u - h * du, v)) / (2 * h), rtol=1e-6, atol=1e-8)
    K = torch.func.jacrev(lambda x: kernel.ntk(x, v))(u)
    torch.testing.assert_close(
        torch.einsum("ijkl,kl->ij", K, du), torch.func.jvp(lambda x: kernel.ntk(x, v), (u,), (du,))[1]
    )


@pytest.mark.parametrize("p", [2, 40])
@pytest.mark.parametrize("kernel", ALL, ids=str)
def test_derivative_at_coincident_points_is_the_mean_of_both_sides(kernel, p):
    """By symmetry, half of the derivative of K(u, u); zero and opposite vectors must stay finite too."""
    u, du = normal(5, p, seed=24), normal(5, p, seed=25)
    got = torch.func.jvp(lambda x: kernel.ntk(x, u), (u,), (du,))[1].diagonal()
    half = torch.func.jvp(lambda x: kernel.ntk(x[:, None], x[:, None])[:, 0, 0], (u,), (du,))[1] / 2
    torch.testing.assert_close(got, half, rtol=1e-6, atol=1e-6)
    for other in (-u, torch.zeros_like(u), u + 1e-9):
        assert torch.func.jvp(lambda x, o=other: kernel.ntk(x, o), (u,), (du,))[1].isfinite().all()
        assert torch.func.jvp(lambda x, o=other: kernel.ntk(o * x, u), (u,), (du,))[1].isfinite().all()


def test_float32_derivative_at_coincident_points():
    u = normal(5, 2, seed=26).float()
    got = torch.func.jvp(lambda x: NTK(3).ntk(x, u), (u,), (torch.ones_like(u),))[1]
    assert got.dtype == torch.float32
    assert got.isfinite().all()


# --------------------------------------------------------------------------------------------------------- draws


@pytest.mark.parametrize("kernel", [NTK(1, init_width=64), NTK(2, "erf", init_width=128), RBF(init_width=64)], ids=str)
def test_draws_have_covariance_K0(kernel):
    """Exact for one hidden layer and Fourier features; for two O(1/width) off, far below the standard error here."""
    u, members = normal(4, 2, seed=27), 800
    f = kernel.apply(stacked(kernel, members, 2, 2, seed=3), u[None])
    assert f.shape == (members, 4, 2)
    within(f, torch.zeros(4, 2, dtype=torch.float64))
    both = torch.einsum("mia,mjb->mabij", f, f)
    within(both[:, 0, 0], kernel.prior(u, u))
    within(both[:, 0, 1], torch.zeros(4, 4, dtype=torch.float64))  # outputs are independent


@pytest.mark.parametrize("kernel", ALL, ids=str)
def test_a_member_depends_on_its_own_generator_alone(kernel):
    state = stacked(kernel, 3, 2, 2, seed=5)
    own = kernel.draw(2, 2, rng.stream(5, "init", 2))
    u = normal(3, 4, 2, seed=28)
    f = kernel.apply(state, u)
    assert all(torch.equal(state[name][2], own[name]) for name in own)
    torch.testing.assert_close(f[2], kernel.apply(own, u[2]))
    torch.testing.assert_close(kernel.apply(state, u[:1])[2], kernel.apply(own, u[0]))
    assert not torch.allclose(f[0], f[1])


def test_RBF():
    u, v = normal(4, 3, seed=29), normal(5, 3, seed=30)
    want = 2.0 * torch.exp(-torch.cdist(u, v).square() / (2 * 0.8**2))
    torch.testing.assert_close(RBF(0.8, 2.0).ntk(u, v), want)
    torch.testing.assert_close(RBF(0.8, 2.0).prior(u, v), want)
    still = RBF(0.8, 2.0, prior=False)
    torch.testing.assert_close(still.ntk(u, v), want)
    assert (still.prior(u, v) == 0).all()
    assert (still.apply(still.draw(3, 2, 0), u) == 0).all()
    state = still.draw(3, 1, 0)
    torch.testing.assert_close(finite_ntk(still, state, u, u).diagonal(), torch.full((4,), 2.0, dtype=torch.float64))


# ----------------------------------------------------------------------------------------- specs and refusals


@pytest.mark.parametrize("kernel", [*ALL, RBF(prior=False)], ids=str)
def test_specs_go_through_json(kernel):
    again = from_spec(json.loads(json.dumps(kernel.spec)))
    u = normal(3, 2, seed=31)
    assert type(again) is type(kernel)
    assert again.spec == kernel.spec
    assert torch.equal(again.ntk(u, u), kernel.ntk(u, u))
    assert torch.equal(again.prior(u, u), kernel.prior(u, u))


ONE = torch.ones(2, 3, dtype=torch.float64)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: NTK(0), "depth"),
        (lambda: NTK(1.5), "depth"),  # type: ignore[arg-type]
        (lambda: NTK(activation="tanh"), "relu, erf"),
        (lambda: NTK(activation=["relu"]), "relu, erf"),  # type: ignore[arg-type]
        (lambda: NTK(weight_var=-1.0), "weight_var"),
        (lambda: NTK(weight_var=0.0), "positive"),
        (lambda: NNGP(bias_var=-0.1), "bias_var"),
        (lambda: NNGP(bias_var=math.nan), "bias_var"),
        (lambda: NTK(init_width=0), "init_width"),
        (lambda: RBF(length=0.0), "length"),
        (lambda: RBF(variance=-1.0), "variance"),
        (lambda: RBF(prior=2.0), "prior"),  # type: ignore[arg-type]
        (lambda: NTK().ntk(ONE * math.nan, ONE), "u holds NaN"),
        (lambda: RBF().prior(ONE, ONE / 0), "v holds NaN"),
        (lambda: NTK().prior(ONE, ONE[:, :2]), "p = 3 .* p = 2"),
        (lambda: NTK().ntk(ONE, ONE.float()), "float32"),
        (lambda: NTK().ntk(ONE.half(), ONE.half()), "float64"),
        (lambda: NTK().ntk(ONE[0], ONE), "batch, N, p"),
        (lambda: NTK().ntk([[1.0]], ONE), "tensor"),  # type: ignore[arg-type]
        (lambda: NTK().ntk(ONE.expand(2, 2, 3), ONE.expand(3, 2, 3)), "broadcast"),
        (lambda: NTK().draw(0, 1, 0), "p must"),
        (lambda: RBF().draw(1, 0, 0), "outputs"),
        (lambda: NTK().draw(2, 1, "seed"), "generator"),  # type: ignore[arg-type]
        (lambda: NTK(1).apply(NTK(1).draw(2, 1, 0), ONE), "length 2"),
        (lambda: NTK(1).apply(NTK(2).draw(3, 1, 0), ONE), "W0, b0, W1, b1"),
        (lambda: RBF().apply({}, ONE), "omega"),
        (lambda: RBF().apply(stacked(RBF(), 3, 3, 1, 0), ONE.expand(2, 2, 3)), "members"),
        (lambda: from_spec({"kind": "cnn"}), "ntk, nngp, rbf"),
        (lambda: from_spec({"kind": "ntk", "length": 1.0}), "length"),
        (lambda: from_spec("ntk"), "dict"),  # type: ignore[arg-type]
    ],
)
def test_refusals_are_sentences(call, words):
    with pytest.raises(InputError, match=words) as error:
        call()
    assert str(error.value).endswith(".")
