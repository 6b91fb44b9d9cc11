"""The V-kernel of linear models: both forms derived a second time, and against trained ensembles."""

from __future__ import annotations

import math
import warnings
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from trained import (
    PLANE,
    POINTS,
    PROCESS,
    TARGETS,
    Leading,
    X,
    fitted,
    levels,
    maps,
    model,
    moments,
    posterior,
    quietly,
    ratio,
    scores,
)

import vkernel as vk
from vkernel.core.errors import InputError
from vkernel.kernels import SGD, FiniteRank, Linear, ValidityWarning, linear as linear_module
from vkernel.sample import effective_sde, pf_ode, semiclassical
from vkernel.sample.sde import Learned
from vkernel.train.objectives import J0, J1, VARIES, Batch, Training

# -------------------- linear: given the inputs, exactly


def noise_by_hand(goal, x: Tensor, t: Tensor, data: vk.Empirical) -> Tensor:
    """Cov of the target's m given x, ``(N, d, d)``, by listing what can be drawn."""
    r, y = posterior(x, t, data)
    if not (isinstance(goal, vk.JK) and goal.kind == "subset"):
        return moments(x, t, data)[1] / getattr(goal, "K", 1)
    assert goal.K == 2
    out = torch.zeros(len(x), data.d, data.d, dtype=torch.float64)
    for k in range(len(x)):
        seen = []
        for i in range(data.n):  # the point that made x, and one other of the rest, each with the same chance
            for j in set(range(data.n)) - {i}:
                pair = r[k, [i, j]] / r[k, [i, j]].sum()
                seen.append((r[k, i] / (data.n - 1), pair @ y[[i, j]]))
        mean = sum(p * m for p, m in seen)
        out[k] = sum(p * torch.outer(m - mean, m - mean) for p, m in seen)
    return out


def by_hand(m, x: Tensor, t: Tensor, N: Tensor, data: vk.Empirical) -> tuple[Tensor, Tensor]:
    """E[W] and Cov[W] over targets, ``(F, o)`` and ``(F, o, F, o)``, draw by draw."""
    P, o, F = len(x), data.d, m.features.count
    _, omega, y, unit = maps(m.target, x, t, moments(x, t, data)[0])
    phi = m.features(x, t)
    gram = m.ridge * torch.eye(F, dtype=torch.float64)
    for i in range(P):
        gram = gram + omega[i] / P * torch.outer(phi[i], phi[i])
    inverse = torch.linalg.inv(gram)
    mean, cov = torch.zeros(F, o, dtype=torch.float64), torch.zeros(F, o, F, o, dtype=torch.float64)
    for i in range(P):
        h = inverse @ phi[i] * omega[i] / P
        mean += torch.outer(h, y[i])
        for a in range(o):
            for b in range(o):
                cov[:, a, :, b] += unit[i] ** 2 * N[i, a, b] * torch.outer(h, h)
    return mean, cov


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("goal", [J1(), vk.JK(3), J0()], ids=repr)
@pytest.mark.parametrize(("data", "P"), [("line", 25), ("plane", 40), ("plane", 8)])  # the last has P < F
def test_given_the_inputs_the_covariance_of_the_weights_is_exact(data, P, goal, target):
    points = vk.Empirical(POINTS, [0.2, 0.3, 0.5]) if data == "line" else PLANE
    m = model(3, target, 0.05, points.d, per_time=2)
    kernel = Linear(m, points, PROCESS, draws=P, objective=goal, vary=("targets",), seed=3)
    batch = Training(points, PROCESS, J0(), P, ("targets",), 3).batch([0], P)
    x, t = batch.x[0], batch.t[0]
    N = noise_by_hand(goal, x, t, points) * (not isinstance(goal, J0))
    mean, cov = by_hand(m, x, t, N, points)
    size = m.features.count * points.d
    torch.testing.assert_close(kernel.target_noise, cov.reshape(size, size), rtol=1e-9, atol=1e-12 * float(cov.max()))
    torch.testing.assert_close(kernel.mean_weights, mean, rtol=1e-9, atol=1e-12)
    assert not kernel.misfit.any()
    assert kernel.valid
    assert "held" in kernel.why
    if m.features.count > P:  # effective features, by the other matrix
        assert kernel.effective < P
    # and the covariance of the score, with its Kronecker order: B φ(x)_f Cov[fa, gb] φ(x')_g B'
    there, when = x[:2].flip(0) * 0.7, torch.tensor([0.3, 0.5], dtype=torch.float64)
    (B, *_), (B2, *_) = maps(target, x[:2], t[:2], x[:2]), maps(target, there, when, there)
    phi, phi2 = m.features(x[:2], t[:2]), m.features(there, when)
    want = torch.einsum("n,nf,fagb,ng,n->nab", B, phi, cov, phi2, B2)
    scale = float(want.abs().max())
    torch.testing.assert_close(kernel.cov(x[:2], t[:2], there, when).dense(), want, rtol=1e-7, atol=1e-9 * scale)
    V = torch.einsum("n,nab,n->nab", PROCESS.D(t[:2]), want, PROCESS.D(when))
    torch.testing.assert_close(kernel(x[:2], t[:2], there, when).dense(), V, rtol=1e-7, atol=1e-7 * scale)


@pytest.mark.parametrize(
    ("target", "weight"), [("x0", "one"), ("v", "x0"), ("flow", "likelihood"), ("edm", "v"), ("noise", lambda t: 1 + t)]
)
def test_the_covariance_follows_the_target_and_the_weighting(target, weight):
    """Fitted weights are linear in the targets: Cov[W] = J Cov[x0|x] J^T with J the derivative of the fit itself."""
    m, P = vk.models.Linear(vk.features.grid("gaussian", 3, 2, process=PROCESS, per_time=2), target, 0.05, weight), 30
    kernel = Linear(m, PLANE, PROCESS, draws=P, vary=("targets",), seed=3)
    x, t, mean = Training(PLANE, PROCESS, J0(), P, ("targets",), 3).batch([0], P)
    J = torch.func.jacrev(lambda y: m.solve(Batch(x, t, y), PROCESS))(mean).reshape(-1, P, 2)
    want = torch.einsum("wpa,pab,vpb->wv", J, moments(x[0], t[0], PLANE)[1], J)
    torch.testing.assert_close(kernel.target_noise, want, rtol=1e-7, atol=1e-10 * float(want.max()))
    torch.testing.assert_close(kernel.mean_weights, m.solve(Batch(x, t, mean), PROCESS)[0])


def test_a_subset_objective_has_the_noise_of_all_its_subsets():
    m, P = model(3, "x0", 0.05, 2, per_time=2), 60
    goal = vk.JK(2, "subset")
    kernel = Linear(m, PLANE, PROCESS, draws=P, objective=goal, vary=("targets",), seed=3)
    batch = Training(PLANE, PROCESS, J0(), P, ("targets",), 3).batch([0], P)
    cov = by_hand(m, batch.x[0], batch.t[0], noise_by_hand(goal, batch.x[0], batch.t[0], PLANE), PLANE)[1]
    got, want = (a.reshape(36, 36).trace() for a in (kernel.target_noise, cov))
    assert abs(float(got / want) - 1) < 0.08  # 256 targets for each draw: 9 % each, fewer draws matter than there are
    full = Linear(m, PLANE, PROCESS, draws=P, vary=("targets",), seed=3).target_noise.trace()
    assert want < 0.95 * full


def test_weights_in_the_plane_scatter_as_the_full_matrix_says():
    m, P, M = model(2, "noise", 0.05, 2, per_time=2), 50, 4000
    ens = vk.train_ensemble(m, PLANE, PROCESS, members=M, draws=P, vary=("targets",), seed=3)
    kernel = Linear(m, PLANE, PROCESS, draws=P, vary="targets", seed=3)
    W = ens.state["weights"].flatten(1)
    want = kernel.target_noise
    se = ((want.diagonal()[:, None] * want.diagonal() + want**2) / M).sqrt()
    assert ((torch.cov(W.mT) - want).abs() <= 6 * se + 1e-12).all()
    assert ((W.mean(0) - kernel.mean_weights.flatten()).abs() <= 5 * (want.diagonal() / M).sqrt() + 1e-12).all()
    assert want.reshape(8, 2, 8, 2)[:, 0, :, 1].abs().max() > 0.1 * want.abs().max()  # coordinates do hang together


def test_held_targets_leave_the_inputs_and_the_leading_order_refuses_them():
    m, P = model(4), 100
    ens = fitted(m, members=200, draws=P, vary=("inputs",), seed=5)
    kernel = Linear(m, POINTS, PROCESS, draws=P, vary=("inputs",), seed=5, sets=200)
    torch.testing.assert_close(kernel.cov(X, 0.2).diag(), ens.cov(X, 0.2).diag(), rtol=1e-6, atol=1e-12)
    assert not kernel.target_noise.any()
    with pytest.raises(InputError, match="held"):
        Linear(m, POINTS, PROCESS, draws=P, vary=("inputs",), form="leading")


def test_the_misfit_given_inputs_is_the_covariance_of_the_noiseless_ensemble():
    m, P = model(4), 150
    kernel = Linear(m, POINTS, PROCESS, draws=P, sets=60, seed=2)
    ens = fitted(m, members=60, draws=P, objective="J0", seed=2)
    W = ens.state["weights"].flatten(1)
    torch.testing.assert_close(kernel.misfit, torch.cov(W.mT), rtol=1e-8, atol=1e-14)
    torch.testing.assert_close(kernel.mean(X, 0.2), ens.mean(X, 0.2))
    torch.testing.assert_close(kernel.only("misfit").cov(X, 0.2).diag(), ens.cov(X, 0.2).diag(), rtol=1e-6, atol=1e-9)


def test_blocks_of_sets_and_of_draws_change_nothing(monkeypatch):
    m = model(4)
    forms = ({"sets": 20}, {"form": "leading", "quadrature": 1 << 12})
    whole = [Linear(m, POINTS, PROCESS, draws=500, **o).root for o in forms]
    sgd = SGD(m, POINTS, PROCESS, lr=1e-3, batch=4, steps=50, quadrature=1 << 12, nodes=4).root
    monkeypatch.setattr(linear_module, "CHUNK", 1 << 14)
    for options, root in zip(forms, whole, strict=True):
        torch.testing.assert_close(Linear(m, POINTS, PROCESS, draws=500, **options).root, root, rtol=1e-6, atol=1e-9)
    again = SGD(m, POINTS, PROCESS, lr=1e-3, batch=4, steps=50, quadrature=1 << 12, nodes=4).root
    torch.testing.assert_close(again, sgd, rtol=1e-6, atol=1e-9)


# -------------------- linear: leading order


@pytest.mark.parametrize("target", TARGETS)
def test_the_leading_order_is_its_formula_by_quadrature(target):
    m, P = model(4, target), 5000
    kernel = Linear(m, POINTS, PROCESS, draws=P, form="leading", quadrature=1 << 18)
    hand = Leading(m)
    torch.testing.assert_close(kernel.mean_weights[:, 0], hand.W, rtol=0.05, atol=0.02 * float(hand.W.abs().max()))
    for got, middle in ((kernel.target_noise, hand.noise()), (kernel.misfit, hand.misfit())):
        want = hand.weights(middle, P)
        assert float((got - want).norm() / want.norm()) < 0.05  # the rule and 2^18 draws: each about a per cent
    learned = float((hand.sigma @ torch.linalg.inv(hand.ridged)).trace())
    assert abs(kernel.effective - learned) < 0.01 * learned


def test_the_leading_order_in_the_plane_keeps_coordinates_in_order():
    """The same draws as the kernel's, with gradients g_fa = ω b_a φ_f written out as vectors."""
    m, P, Q = model(2, "x0", 0.05, 2, per_time=2), 900, 1 << 11
    kernel = quietly(lambda: Linear(m, PLANE, PROCESS, draws=P, form="leading", quadrature=Q, seed=2))
    batch = Training(PLANE, PROCESS, J0(), P, VARIES, 2).batch([0], Q)
    x, t, F = batch.x[0], batch.t[0], m.features.count
    mean, cov = moments(x, t, PLANE)
    _, omega, y, unit = maps("x0", x, t, mean)
    phi = m.features(x, t)
    ridged = phi.mT @ (omega[:, None] * phi) / Q + 0.05 * torch.eye(F, dtype=torch.float64)
    W = torch.linalg.solve(ridged, phi.mT @ (omega[:, None] * y) / Q)
    g = torch.stack([torch.kron(phi[i], omega[i] * (y[i] - W.mT @ phi[i])) for i in range(Q)])
    noise = sum(torch.kron(torch.outer(phi[i], phi[i]), (omega[i] * unit[i]) ** 2 * cov[i]) for i in range(Q)) / Q
    inverse = torch.kron(torch.linalg.inv(ridged).contiguous(), torch.eye(2, dtype=torch.float64))
    for got, middle in ((kernel.target_noise, noise), (kernel.misfit, torch.cov(g.mT, correction=0))):
        want = inverse @ middle @ inverse / P
        torch.testing.assert_close(got, want, rtol=1e-7, atol=1e-9 * float(want.max()))


def test_forms_differ_by_the_next_order_in_one_over_P():
    m = model(4, ridge=1e-3)
    want = Leading(m)
    noise, sizes = want.weights(want.noise(), 1), (160, 640)
    apart = []
    for P in sizes:
        got = P * Linear(m, POINTS, PROCESS, draws=P, sets=320000 // P, seed=1).target_noise
        apart.append(abs(float((want.sigma * (got - noise)).sum() / (want.sigma * noise).sum())))
    assert apart[0] > 0.1  # about F/P
    assert 0.8 < math.log(apart[0] / apart[1]) / math.log(4) < 1.5


@pytest.mark.parametrize("options", [{"sets": 12}, {"form": "leading", "quadrature": 1 << 13}], ids=str)
def test_objectives_share_the_misfit_and_differ_in_the_noise_alone(options):
    m = model(4)

    def make(goal):
        return quietly(lambda: Linear(m, POINTS, PROCESS, draws=1000, objective=goal, seed=4, **options))

    one, none, three = make("J1"), make("J0"), make(vk.JK(3))
    assert torch.equal(one.misfit, none.misfit)
    assert torch.equal(one.mean_weights, none.mean_weights)
    assert not none.target_noise.any()
    torch.testing.assert_close(one.target_noise, 3 * three.target_noise, rtol=1e-12, atol=1e-16)
    parts = [one.only(p).cov(X, 0.1).diag() for p in ("target_noise", "misfit")]
    torch.testing.assert_close(parts[0] + parts[1], one.cov(X, 0.1).diag(), rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(parts[1], none.cov(X, 0.1).diag(), rtol=1e-12, atol=1e-12)


# -------------------- linear: against trained ensembles


@pytest.mark.parametrize("goal", ["J1", "J0"])
def test_trained_ensembles_vary_as_both_forms_say(goal):
    m, P = model(6), 720
    s = scores(fitted(m, members=1000, draws=P, objective=goal, seed=1))
    for options in ({"sets": 300}, {"form": "leading"}):
        found, se = ratio(
            s, quietly(lambda o=options: Linear(m, POINTS, PROCESS, draws=P, objective=goal, seed=2, **o))
        )
        assert se < 0.04
        assert 0.9 < found < 1.15


def test_the_centring_of_the_ridge_is_needed():
    """J0 at P/F = 200: right with it, too much variance without."""
    m, M = model(3), 2000
    P = 200 * m.features.count
    s = scores(fitted(m, members=M, draws=P, objective="J0", seed=1))
    hand = Leading(m)
    found, se = ratio(s, Linear(m, POINTS, PROCESS, draws=P, objective="J0", form="leading", quadrature=1 << 18))
    assert abs(found - 1) < 0.03 + se
    without = FiniteRank(
        lambda x, t: m.features(x, torch.as_tensor(t, dtype=x.dtype).expand(x.shape[:-1])).movedim(-1, 0)[..., None],
        hand.weights(hand.misfit(centred=False), P),
        PROCESS,
    )
    assert ratio(s, without)[0] < 0.95


# -------------------- fields


@pytest.fixture(scope="module")
def kernel() -> Linear:
    return quietly(lambda: Linear(model(3, "x0"), POINTS, PROCESS, draws=400, sets=100, seed=1))


def test_fields_have_the_covariance_between_any_two_places(kernel):
    M, x = 4000, X[::8]
    t = torch.linspace(0.1, 0.6, len(x), dtype=torch.float64)
    field = kernel.draw(M, 7)
    v = field(x.expand(M, *x.shape), t)[..., 0]
    pairs = [kernel.cov(x[[i]].expand_as(x), t[[i]].expand_as(t), x, t).dense()[:, 0, 0] for i in range(len(x))]
    want = torch.stack(pairs)
    torch.testing.assert_close(want.diagonal(), kernel.cov(x, t).trace())
    se = ((want.diagonal()[:, None] * want.diagonal() + want**2) / M).sqrt()
    assert ((v.mT @ v / M - want).abs() <= 5 * se).all()
    assert torch.equal(field(x.expand(M, *x.shape), t)[..., 0], v)  # one field, not fresh noise
    assert torch.equal(kernel.draw(M, 7)(x.expand(M, *x.shape), t)[..., 0], v)
    single = torch.stack([field(x.expand(M, *x.shape)[:, k], float(t[k]))[..., 0] for k in range(len(x))], 1)
    torch.testing.assert_close(single, v)


def test_the_effective_sde_is_the_ode_with_a_field_added(kernel):
    x = PROCESS.prior((5, 1), generator=0, dtype=torch.float64)
    got = effective_sde(kernel, x, method="euler", spacing="uniform", steps=12, members=3, generator=4)
    field = kernel.draw(3, 4)
    want = pf_ode(
        Learned(kernel.mean, field),
        x.expand(3, 5, 1).contiguous(),
        method="euler",
        spacing="uniform",
        steps=12,
    )
    torch.testing.assert_close(got, want)
    lone = effective_sde(kernel, x, method="euler", spacing="uniform", steps=12, generator=4)
    assert lone.shape == x.shape
    assert (
        effective_sde(kernel, x.float(), method="euler", spacing="uniform", steps=3, generator=4).dtype == torch.float32
    )


@pytest.mark.parametrize("dim", [1, 2])
def test_the_semiclassical_law_is_the_delta_method(dim):
    """J Cov(W) J^T, J the derivative of the end of the Euler chain by the weights."""
    points = vk.Empirical(POINTS) if dim == 1 else PLANE
    m = model(2, "x0", 0.05, dim, per_time=2)
    V = quietly(lambda: Linear(m, points, PROCESS, draws=300, sets=40, seed=1))
    x_T, steps = PROCESS.prior((2, dim), generator=1, dtype=torch.float64), 10

    def end(W: Tensor) -> Tensor:
        x, t = x_T, PROCESS.times(steps, "uniform")
        for here, there in pairwise(t):
            alpha, S = levels(here)
            s = (alpha * m.features(x, here.expand(len(x))) @ W - x) / S
            x = x + (here - there) * (PROCESS.beta(here) * x + PROCESS.D(here) * s)
        return x

    J = torch.func.jacrev(end)(V.mean_weights).reshape(2, dim, -1)
    mean, cov = semiclassical(V, x_T, spacing="uniform", steps=steps)
    torch.testing.assert_close(mean, end(V.mean_weights), rtol=1e-10, atol=1e-12)
    want = J @ (V.target_noise + V.misfit) @ J.mT
    torch.testing.assert_close(cov.dense(), want, rtol=1e-8, atol=1e-10 * float(want.abs().max()))


# -------------------- validity


def test_a_time_outside_the_process_is_refused():
    V = Linear(model(3), POINTS, PROCESS, draws=40, sets=8)
    with pytest.raises(InputError, match="outside"):
        V.cov(X, 9.0)
    assert "Linear kernel" in repr(V)


def test_kernels_say_where_they_hold():
    m = model(6)
    with pytest.warns(ValidityWarning, match="given-inputs"):
        far = Linear(m, POINTS, PROCESS, draws=50, form="leading", quadrature=1 << 12)
    assert not far.valid
    with pytest.warns(ValidityWarning, match="sets"):
        few = Linear(m, POINTS, PROCESS, draws=500, sets=4)
    assert not few.valid
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for options in ({"draws": 20000, "form": "leading", "quadrature": 1 << 12}, {"draws": 50, "sets": 8}):
            good = Linear(m, POINTS, PROCESS, **options)
            assert good.valid
            assert good.why
    with pytest.warns(ValidityWarning, match="learning rate"):
        fast = SGD(m, POINTS, PROCESS, lr=1.0, batch=4, steps=3, quadrature=1 << 10)
    assert not fast.valid
