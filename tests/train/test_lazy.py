"""Lazy networks: the model against gradient flow by brute force, the V-kernel against ensembles, limits, refusals."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from draws import normal
from torch import Tensor

import vkernel as vk
from vkernel.core.errors import InputError
from vkernel.kernels import Function, Lazy as Kernel, ValidityWarning
from vkernel.train.models import NNGP, NTK, RBF, Lazy, from_spec
from vkernel.train.objectives import VARIES, Batch, Training, parse

PROCESS = vk.VP(eps=1e-2)
TRIPLE = vk.data.toy("triple")
PLANE = vk.Empirical(torch.tensor([[-1.0, 0.0], [1.0, 0.5], [0.2, 1.0]], dtype=torch.float64))
RELU = NTK(depth=1, init_width=256)
X = torch.linspace(-1.5, 1.5, 7, dtype=torch.float64)[:, None]
TIMES = (0.05, 0.2, 0.5)


def train(model: Lazy, data=TRIPLE, **settings) -> vk.Ensemble:
    return vk.train_ensemble(model, data, PROCESS, **({"draws": 16, "times": "log"} | settings))


def kernel(model: Lazy, data=TRIPLE, **settings) -> Kernel:
    return Kernel(model, data, PROCESS, **({"draws": 16, "times": "log"} | settings))


def training(data=TRIPLE, draws=16, vary=VARIES, objective="J1", seed=0) -> Training:
    return Training(data, PROCESS, parse(objective), draws, vary, seed, "log")


def measured(ensemble: vk.Ensemble, x: Tensor, t: float) -> tuple[Tensor, Tensor]:
    """The variance of the score over members, and its standard error."""
    dev = (ensemble(x, t) - ensemble.mean(x, t)).square()
    return dev.sum(0) / (len(dev) - 1), dev.std(0) / math.sqrt(len(dev))


# The model


@pytest.mark.parametrize("tau", [0.3, 20.0])
@pytest.mark.parametrize(
    ("data", "network", "target"),
    [(TRIPLE, RELU, "x0"), (PLANE, NNGP(depth=1, init_width=32), "noise"), (PLANE, RBF(0.7, init_width=16), "x0")],
)
def test_the_output_is_gradient_flow(data, network, target, tau):
    model, P, x = Lazy(network, tau, target), 8, normal(5, data.d, seed=0)
    batch = training(data, P).batch([0, 1], P)
    state = model.fit(training(data, P), [0, 1], lambda share: None)
    got = model.output(state, x[None], torch.full((1, 1), 0.3, dtype=torch.float64), PROCESS)
    for m in range(2):
        u = model.inputs(batch.x[m : m + 1], batch.t[m : m + 1], PROCESS)[0]
        both = torch.cat([u, model.inputs(x[None], torch.full((1, 1), 0.3, dtype=torch.float64), PROCESS)[0]])
        f = network.apply({k[5:]: a[m] for k, a in state.items() if k.startswith("init.")}, both)
        y = model.training_target(batch.m, batch.x, batch.t, PROCESS)[m]
        # df/dτ = rate (y - f(U)), as one linear system for f on U and on the new places, and a constant
        rate = network.ntk(both, u) * model.omega(batch.t, PROCESS)[m] / P
        flow = torch.zeros(P + len(x) + data.d, P + len(x) + data.d, dtype=torch.float64)
        flow[: P + len(x), :P], flow[: P + len(x), P + len(x) :] = -rate, rate @ y
        grown = torch.linalg.matrix_exp(tau * flow)
        start = torch.cat([f, torch.eye(data.d, dtype=torch.float64)])
        torch.testing.assert_close(got[m], (grown @ start)[P : P + len(x)], rtol=1e-7, atol=1e-9)


def test_training_for_ever_is_kernel_regression():
    model, P = Lazy(RELU), 8
    state = train(model, draws=P, members=2).state
    batch = training(draws=P).batch([0, 1], P)
    near = {"rtol": 0, "atol": 1e-4}  # the weights of the draws, and so the eigenvalues, span nine decades
    torch.testing.assert_close(model.output(state, batch.x, batch.t, PROCESS), batch.m, **near)
    long = train(Lazy(RELU, 1e12), draws=P, members=2)
    torch.testing.assert_close(long(X, 0.2), train(model, draws=P, members=2)(X, 0.2), **near)
    plain = train(Lazy(RELU, init=False), draws=P, members=1, objective="J0")
    u = model.inputs(batch.x[:1], batch.t[:1], PROCESS)
    m = vk.EmpiricalScore(TRIPLE, PROCESS).denoise(batch.x[0], batch.t[0])
    v = model.inputs(X[None], torch.full((1, 1), 0.2, dtype=torch.float64), PROCESS)
    want = RELU.ntk(v, u) @ torch.linalg.solve(RELU.ntk(u, u), m[None])
    f = plain.model.output(plain.state, X[None], torch.full((1, 1), 0.2, dtype=torch.float64), PROCESS)
    torch.testing.assert_close(f, want, **near)


def test_a_singular_kernel_is_fitted_as_far_as_it_sees():
    """Ten draws, but a kernel of long range sees only a few directions above rounding."""
    far = Lazy(RBF(200.0, prior=False))
    _, effective = far.smoother(normal(1, 10, 1, seed=1), torch.full((1, 10), 0.5, dtype=torch.float64), PROCESS)
    assert 2 <= float(effective) <= 8
    assert train(far, draws=10, members=2)(X, 0.3).isfinite().all()
    zero = Lazy(RELU, 3.0, weight=lambda t: torch.zeros_like(t), init=False)  # nothing pulls: f stays 0
    assert torch.equal(zero.output(train(zero, members=1).state, X[None], X[None, :1, 0] * 0 + 0.3, PROCESS)[0], X * 0)


@pytest.mark.parametrize("vary", [VARIES, ("targets",), ("init",), ("inputs", "init")])
def test_blocks_change_nothing(vary, monkeypatch):
    model = Lazy(RELU, 2.0)
    whole = train(model, PLANE, members=5, vary=vary)
    x = normal(6, 2, seed=2)
    own = normal(5, 3, 2, seed=3)
    want, paired = whole(x, 0.3), whole.paired(own, 0.3)
    for m in range(5):
        torch.testing.assert_close(whole[m](x, 0.3), want[m])
        torch.testing.assert_close(whole[m](own[m], 0.3), paired[m])
    for chunk in (1, 600):
        monkeypatch.setattr("vkernel.train.models.lazy.CHUNK", chunk)
        again = train(model, PLANE, members=5, vary=vary)
        torch.testing.assert_close(again(x, 0.3), want)
        torch.testing.assert_close(again.paired(own, 0.3), paired)
    torch.testing.assert_close(train(model, PLANE, members=[3], vary=vary)(x, 0.3)[0], want[3])


def test_events_of_any_shape_and_precision():
    data = vk.Empirical(normal(4, 1, 2, 2, seed=4))
    ensemble = train(Lazy(RELU, 1.0), data, members=3)
    x = normal(5, 1, 2, 2, seed=5)
    assert ensemble(x, 0.4).shape == (3, 5, 1, 2, 2)
    narrow = train(Lazy(RELU, 1.0), data, members=3, dtype=torch.float32)
    assert narrow.dtype == torch.float32
    assert narrow(x.float(), 0.4).dtype == torch.float32
    torch.testing.assert_close(narrow(x.float(), 0.4).double(), ensemble(x, 0.4), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("model", [Lazy(RELU, 2.0, "noise"), Lazy(RBF(0.6, init_width=8), init=False)])
def test_saved_and_loaded_bit_for_bit(model, tmp_path):
    ensemble = train(model, members=3)
    again = vk.load_ensemble(ensemble.save(tmp_path / "lazy"))
    assert again.model.spec == model.spec
    assert from_spec(model.spec).spec == model.spec
    assert torch.equal(again(X, 0.3), ensemble(X, 0.3))
    assert repr(again.model) == repr(model)


def test_derivatives_of_the_mean_are_finite_and_right():
    ensemble = train(Lazy(RELU, 2.0), members=4)
    x, v, h = X + 0.013, torch.ones_like(X), 1e-6
    got = torch.func.jvp(lambda y: ensemble.mean(y, 0.3), (x,), (v,))[1]
    want = (ensemble.mean(x + h, 0.3) - ensemble.mean(x - h, 0.3)) / (2 * h)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    at_input = ensemble.state["inputs"][:1, :1, :1].reshape(1, 1)
    assert torch.func.jvp(lambda y: ensemble.mean(y, 0.3), (at_input,), (at_input,))[1].isfinite().all()


# The V-kernel


def by_loops(model: Lazy, data, x: Tensor, t: float, x2: Tensor, t2: float, sets: int) -> dict[str, Tensor]:
    """The three parts as the theory writes them, one set of inputs and one pair of places at a time."""
    batch = training(data, objective="J0").batch(range(sets), 16)
    score, par = vk.EmpiricalScore(data, PROCESS), model
    one, two = (torch.full((), s, dtype=torch.float64) for s in (t, t2))
    B = par.slope(one, PROCESS) * par.slope(two, PROCESS)
    out = {name: torch.zeros(len(x), data.d, data.d, dtype=torch.float64) for name in ("targets", "init")}
    means: tuple[list[Tensor], list[Tensor]] = ([], [])
    for s in range(sets):
        U = model.inputs(batch.x[s][None], batch.t[s][None], PROCESS)[0]
        u, v = (model.inputs(a[None], b.reshape(1, 1), PROCESS)[0] for a, b in ((x, one), (x2, two)))
        K, omega = model.kernel.ntk(U, U), par.omega(batch.t[s], PROCESS)
        M = K * omega / 16  # K Λ / P, not symmetric
        inner = (
            omega[:, None]
            / 16
            * torch.linalg.solve(M, torch.eye(16, dtype=torch.float64) - torch.linalg.matrix_exp(-model.tau * M))
        )
        w, w2 = model.kernel.ntk(u, U) @ inner, model.kernel.ntk(v, U) @ inner
        N = (
            par.target_slope(batch.t[s], PROCESS).square()[:, None, None]
            * score.posterior(batch.x[s], batch.t[s]).cov.dense()
        )
        k0, k02, K0 = (model.kernel.prior(a, U) for a in (u, v, U))
        y = par.training_target(batch.m[s], batch.x[s], batch.t[s], PROCESS)
        for n in range(len(x)):
            out["targets"][n] += B / sets * sum(w[n, i] * w2[n, i] * N[i] for i in range(16))
            part = model.kernel.prior(u[n : n + 1], v[n : n + 1])[0, 0]
            part = part - w[n] @ k02[n] - k0[n] @ w2[n] + w[n] @ K0 @ w2[n]
            out["init"][n] += B / sets * part * torch.eye(data.d, dtype=torch.float64)
        means[0].append(w @ y)
        means[1].append(w2 @ y)
    a, b = (torch.stack(m) - torch.stack(m).mean(0) for m in means)
    return out | {"inputs": B * torch.einsum("sna,snb->nab", a, b) / (sets - 1)}


@pytest.mark.parametrize("target", ["x0", "score", "noise"])
def test_the_parts_are_the_formulas(target, monkeypatch):
    model = Lazy(NTK(depth=2, activation="erf", init_width=8), 4.0, target)
    V, x, x2 = kernel(model, PLANE, sets=4), normal(5, 2, seed=6), normal(5, 2, seed=7)
    want = by_loops(model, PLANE, x, 0.2, x2, 0.6, 4)
    got = V.parts(x, 0.2, x2, 0.6)
    for name in ("targets", "inputs", "init"):
        torch.testing.assert_close(got[name], want[name], rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(V.cov(x, 0.2, x2, 0.6).dense(), sum(want.values()), rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(V.cov(x2, 0.6, x, 0.2).dense().mT, V.cov(x, 0.2, x2, 0.6).dense())
    torch.testing.assert_close(V.cov(x, 0.2).dense(), V.cov(x, 0.2, x.clone(), 0.2).dense())
    assert V.cov(x.reshape(5, 1, 2), 0.2).batch == (5, 1)
    own, other = x.reshape(1, 5, 2), x2[None, :3]
    times = torch.full((1, 5), 0.2, dtype=torch.float64), torch.full((1, 3), 0.6, dtype=torch.float64)
    want_pairs = Function.pairs(V, own, times[0], other, times[1])
    torch.testing.assert_close(V.pairs(own, times[0], other, times[1]), want_pairs)
    monkeypatch.setattr("vkernel.kernels.lazy.PAIRS", 100)
    torch.testing.assert_close(V.pairs(own, times[0], other, times[1]), want_pairs)
    torch.testing.assert_close(kernel(model, PLANE, sets=4).parts(x, 0.2, x2, 0.6)["init"], got["init"])


def noise_error(V: Kernel, batch: Batch, x: Tensor, t: float, members: int) -> Tensor:
    """The standard error of the variance over members, from the exact fourth cumulants of the targets.

    A target that nearly always is one point is rarely seen to be another: the error taken from members misses that.
    """
    alpha, S = PROCESS.alpha(batch.t[0]), PROCESS.S(batch.t[0])
    y = torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64)
    r = (-(batch.x[0] - alpha[:, None] * y).square() / (2 * S[:, None])).softmax(-1)  # the posterior, (P, 3)
    dev = y - (r * y).sum(-1, keepdim=True)
    second, fourth = ((r * dev**k).sum(-1) for k in (2, 4))
    u = V.model.inputs(batch.x, batch.t, PROCESS)
    G, _ = V.model.smoother(batch.x, batch.t, PROCESS)
    w = (V.model.kernel.ntk(V.model.inputs(x[None], torch.full((1, 1), t).double(), PROCESS), u) @ G)[0]
    B = V.model.slope(torch.tensor(t, dtype=torch.float64), PROCESS)
    kappa = B**4 * w**4 @ (fourth - 3 * second**2)
    return ((kappa + 2 * (B**2 * w**2 @ second) ** 2) / members).sqrt()[:, None]


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_target_noise_against_an_ensemble(seed):
    model, members, same = Lazy(RELU, 5.0), 4000, {"vary": ("targets",), "seed": seed}
    ensemble, V = train(model, members=members, **same), kernel(model, **same)
    half = kernel(model, objective=vk.JK(2), **same)
    assert "one set" in V.why
    for t in TIMES:
        var, _ = measured(ensemble, X, t)
        want = V.cov(X, t).diag()
        error = noise_error(V, training(**same).batch([0], 16), X, t, members)
        assert ((var - want).abs() <= 4 * error).all()
        bulk = error < 0.03 * want
        assert bulk.any() or seed in (0, 2)  # there a rare target carries the variance everywhere
        assert ((var / want)[bulk] > 0.9).all()
        assert ((var / want)[bulk] < 1.15).all()
        assert ((ensemble.mean(X, t) - V.mean(X, t)).abs() <= 4 * (want / members).sqrt()).all()
        torch.testing.assert_close(half.cov(X, t).diag(), want / 2)


def test_initialisation_against_an_ensemble():
    """With one hidden layer the covariance of f0 is K0 at any width: only the fourth moment, in se, sees the width."""
    model = Lazy(RELU, 1.0)
    ensemble, V = train(model, members=4000, vary=("init",)), kernel(model, vary=("init",))
    for t in TIMES:
        var, se = measured(ensemble, X, t)
        want = V.parts(X, t)["init"][..., 0]
        torch.testing.assert_close(want, V.cov(X, t).diag())
        assert ((var - want).abs() <= 4 * se).all()
        # the targets are held as they are, noise included
        assert ((ensemble.mean(X, t) - V.mean(X, t)).abs() <= 4 * (want / 4000).sqrt()).all()


@pytest.mark.parametrize(("data", "objective"), [(TRIPLE, "J1"), (TRIPLE, "J0"), (PLANE, "J1")])
def test_all_terms_against_an_ensemble(data, objective):
    model = Lazy(RELU, 1.0)
    x = X if data.d == 1 else normal(7, 2, seed=8)
    ensemble = train(model, data, members=2000, objective=objective)
    batches = [kernel(model, data, sets=250, seed=k, objective=objective) for k in range(1, 9)]  # inputs of their own
    for t in TIMES:
        var, se = measured(ensemble, x, t)
        want = torch.stack([V.cov(x, t).diag() for V in batches])
        error = (se.square() + want.var(0) / len(want)).sqrt()
        assert ((var - want.mean(0)).abs() <= 4 * error).all()
        assert (error < 0.1 * var).all()
    parts = batches[0].parts(x, 0.2)
    twin = kernel(Lazy(RELU, 1.0, init=False), data, sets=250, seed=1, objective="J0").cov(x, 0.2)  # from f0 = 0
    torch.testing.assert_close(parts["inputs"], twin.dense())
    torch.testing.assert_close(batches[0].cov(x, 0.2).dense(), sum(parts.values()))
    assert (parts["targets"] == 0).all() == (objective == "J0")


def test_what_is_held_is_as_the_ensemble_has_it():
    """Over the same sets of inputs the covariance is the ensemble's own, with J1's targets and f0 held."""
    for objective, vary in (("J1", ("inputs",)), ("J0", ("inputs", "targets"))):
        ensemble = train(Lazy(RELU, 1.0), PLANE, members=20, vary=vary, objective=objective)
        V = kernel(Lazy(RELU, 1.0), PLANE, vary=vary, sets=20, objective=objective)
        x, x2 = normal(4, 2, seed=9), normal(4, 2, seed=10)
        torch.testing.assert_close(V.cov(x, 0.2, x2, 0.5).dense(), ensemble.cov(x, 0.2, x2, 0.5).dense())
        torch.testing.assert_close(V.mean(x, 0.2), ensemble.mean(x, 0.2))
        assert all((V.parts(x, 0.2)[name] == 0).all() for name in ("targets", "init"))


def test_limits():
    t = torch.full((7,), 0.3, dtype=torch.float64)
    V = kernel(Lazy(RELU, 0.0), sets=4)
    u = V.model.inputs(X[None], t[None], PROCESS)
    B = V.model.slope(t, PROCESS)
    parts = V.parts(X, t)
    torch.testing.assert_close(parts["init"][:, 0, 0], B.square() * RELU.prior(u, u)[0].diagonal())
    assert V.effective == float(parts["targets"].abs().max()) == float(parts["inputs"].abs().max()) == 0
    early = kernel(Lazy(RELU, 1e-5), sets=4).parts(X, t)
    later = kernel(Lazy(RELU, 2e-5), sets=4).parts(X, t)
    torch.testing.assert_close(later["targets"], 4 * early["targets"], rtol=0.1, atol=0)  # w grows as τ
    for model in (Lazy(RELU, 1.0, init=False), Lazy(RBF(prior=False), 1.0)):
        assert (kernel(model, sets=4).parts(X, 0.3)["init"] == 0).all()
    trained = kernel(Lazy(RELU), vary=("init",), draws=8)
    batch = training(draws=8, vary=("init",)).batch([0], 8)
    left = (
        trained.parts(batch.x[0], batch.t[0])["init"]
        / kernel(Lazy(RELU, 0.0), sets=4).parts(batch.x[0], batch.t[0])["init"]
    )
    assert left.abs().max() < 1e-6  # what was fitted exactly has forgotten f0
    assert trained.effective == 8


# In the samplers


def test_fields_and_samplers():
    model = Lazy(RELU, 3.0, init=False)
    V = kernel(model, vary=("targets",), draws=128, objective=vk.JK(50))
    members, x_T = 400, torch.tensor([[0.9]], dtype=torch.float64)
    field, x = V.draw(members, 1), X[[1, 4]]
    values = torch.cat([field(x.expand(members, 2, 1), 0.2), field(x.expand(members, 2, 1), 0.5)], 1)[..., 0]
    cross = V.cov(x, 0.2, x, 0.5).diag()[:, 0]
    product = values[:, :2] * values[:, 2:]
    assert ((product.mean(0) - cross).abs() <= 4.5 * product.std(0) / math.sqrt(members)).all()
    settings = {"steps": 12, "spacing": "log"}
    samples = vk.sample.effective_sde(V, x_T, members=members, method="euler", generator=2, **settings)
    assert samples.shape == (members, 1, 1)
    mean, cov = vk.sample.semiclassical(V, x_T, **settings)
    ratio = float(samples.var(0) / cov.dense())
    assert float(cov.dense()) < 0.05
    assert 0.75 < ratio < 1.33  # 7 % of statistical error, and the next order in V
    assert float((samples.mean(0) - mean).abs()) < 0.5 * float(samples.std(0))
    assert vk.sample.effective_sde(V, x_T, generator=3, **settings).shape == (1, 1)


# Refusals


def test_few_sets_are_warned_about():
    with pytest.warns(ValidityWarning, match="sets ≥ 4"):
        V = kernel(Lazy(RELU, 1.0), sets=3)
    assert not V.valid
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kernel(Lazy(RELU, 1.0), sets=3, vary=("targets", "init")).valid
        good = kernel(Lazy(RELU, 1.0), sets=4)
    assert good.valid
    assert "4 sets" in good.why
    assert "F_eff/P" in good.why


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: Lazy("ntk"), "kernel of a network"),
        (lambda: Lazy(RELU, -1.0), "tau"),
        (lambda: Lazy(RELU, math.nan), "tau"),
        (lambda: Lazy(RELU, True), "tau"),
        (lambda: Lazy(RELU, init=1), "init"),
        (lambda: Lazy(RELU, target="x"), "target"),
        (lambda: train(Lazy(RELU), draws=None, members=1), "draws=P"),
        (lambda: kernel(RELU), "lazy model"),
        (lambda: kernel(Lazy(RELU), sets=0), "sets"),
        (lambda: kernel(Lazy(RELU), draws=None), "draws"),
        (lambda: kernel(Lazy(RELU), vary=("seeds",)), "vary"),
        (lambda: kernel(Lazy(RELU), objective="J2"), "objective"),
        (lambda: kernel(Lazy(RELU), normal(3, 1, 2, 2, seed=0)), "vectors"),
        (lambda: kernel(Lazy(RELU), normal(3, 65, seed=0)), "up to 64"),
        (lambda: kernel(Lazy(RELU), sets=4).cov(normal(3, 2, seed=0), 0.1), "vectors of 1"),
        (lambda: kernel(Lazy(RELU), sets=4).draw(0), "member"),
        (lambda: from_spec({"kind": "lazy", "kernel": {"kind": "cnn"}, "tau": 1.0}), "kind"),
    ],
)
def test_bad_input_is_refused(call, says):
    with pytest.raises(InputError, match=says):
        call()
