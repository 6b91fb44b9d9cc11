"""Linear models: least squares by three routes, what targets and weightings mean, and the limit of many draws."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import reference
import torch
from draws import normal
from hypothesis import given, settings, strategies as st
from scipy import special
from torch import Tensor

import vkernel as vk
from vkernel.core.errors import InputError
from vkernel.train import features, models
from vkernel.train.models import Linear, linear as module
from vkernel.train.models.linear import factor
from vkernel.train.objectives import J0, J1, JK, Batch, Training

PROCESS = vk.VP(eps=0.05)
LINE = torch.tensor([[-1.0], [0.1], [1.0]], dtype=torch.float64)
PLANE = torch.tensor([[-1.0, 0.3], [0.2, 0.9], [0.7, -0.6], [0.7, -0.6]], dtype=torch.float64)
W = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
GRID = features.grid("gaussian", 4, 1, -1.5, 1.5, PROCESS, per_time=3)
TARGETS, WEIGHTS = ("score", "x0", "noise", "v", "flow", "edm"), ("sigma2", "one", "x0", "v", "edm", "likelihood")


def training(goal=None, draws: int | None = 30, points: Tensor = LINE, process=PROCESS, **options) -> Training:
    return Training(vk.Empirical(points), process, goal or J1(), draws, **options)


def draws(count: int, members: int = 2, points: Tensor = LINE, goal=None, **options) -> Batch:
    return training(goal, points=points, **options).batch(range(members), count)


def levels(t: Tensor) -> tuple[Tensor, Tensor]:
    """alpha and S of the process by the formulas of the table."""
    both = [reference.levels("vp", u) for u in t.flatten().tolist()]
    return tuple(torch.tensor(a, dtype=torch.float64).reshape(t.shape) for a in zip(*both, strict=True))


def loss(model: Linear, weights: Tensor, batch: Batch, lam: Tensor) -> Tensor:
    """Mean of λ |ŝ - s~|², plus the ridge, in units of the score: what was to be minimised, for each member."""
    learned = model.score({"weights": weights}, batch.x, batch.t, PROCESS)
    alpha, S = (a[..., None] for a in levels(batch.t))
    proxy = (alpha * batch.m - batch.x) / S
    error = (lam * (learned - proxy).square().sum(-1)).mean(-1)
    return error + model.ridge * weights.square().sum((-2, -1))


# --- what a model predicts -----------------------------------------------------------------------------------------


def predicting(target, weight="sigma2"):
    return Linear(features.grid(process=PROCESS), target, weight=weight)


@settings(max_examples=60, deadline=None)
@given(
    target=st.sampled_from(TARGETS),
    name=st.sampled_from(sorted(reference.PROCESSES)),
    u=st.floats(0, 1),
    shape=st.sampled_from([(1,), (3,), (2, 2)]),
    seed=st.integers(0, 99),
)
def test_targets_turn_into_proxy_scores_and_weights_into_one_loss(target, name, u, shape, seed):
    process, par = reference.PROCESSES[name], predicting(target)
    t = torch.full((4,), reference.time_between(process, u), dtype=torch.float64)
    alpha, S = reference.levels(name, float(t[0]))
    m, f = normal(4, *shape, seed=seed), normal(4, *shape, seed=seed + 1)
    x = alpha * m + math.sqrt(S) * normal(4, *shape, seed=seed + 2)
    proxy = vk.proxy_score(x, t, m, process)
    size = float((x.abs().max() + alpha * m.abs().max()) / S)
    torch.testing.assert_close(
        par.to_score(par.training_target(m, x, t, process), x, t, process), proxy, rtol=1e-9, atol=1e-9 * size
    )
    torch.testing.assert_close(proxy, (alpha * m - x) / S, rtol=1e-6, atol=1e-6 * size)

    slope = torch.func.jvp(lambda f: par.to_score(f, x, t, process), (f,), (torch.ones_like(f),))[1]
    unit = torch.func.jvp(lambda m: par.training_target(m, x, t, process), (m,), (torch.ones_like(m),))[1]
    wide = (-1, *[1] * len(shape))
    torch.testing.assert_close(par.slope(t, process).reshape(wide).expand_as(f), slope)
    torch.testing.assert_close(par.target_slope(t, process).reshape(wide).expand_as(f), unit)
    torch.testing.assert_close(slope * unit, torch.full_like(f, alpha / S), rtol=1e-6, atol=0)
    for weight, lam in (("sigma2", S), ("one", 1.0), (lambda t: 3 * t, 3 * float(t[0]))):
        omega = predicting(target, weight).omega(t, process)
        torch.testing.assert_close(omega, lam * slope.reshape(4, -1)[:, 0].square(), rtol=1e-6, atol=0)


def test_times_that_are_shared_broadcast():
    par, x, f = predicting("x0"), normal(3, 5, 2, seed=1), normal(3, 5, 2, seed=2)
    one = torch.tensor([[0.4]], dtype=torch.float64)
    many = par.to_score(f, x, one.expand(3, 5), PROCESS)
    for t in (one, one.expand(1, 5), one.expand(3, 1)):
        torch.testing.assert_close(par.to_score(f, x, t, PROCESS), many)


# --- least squares -------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    target=st.sampled_from(TARGETS),
    count=st.sampled_from([3, 11, 12, 13, 60]),  # F = 12
    ridge=st.sampled_from([1e-3, 0.1, 2.0]),
    weight=st.sampled_from(WEIGHTS),
    plane=st.booleans(),
    seed=st.integers(0, 5),
)
def test_primal_and_dual_are_least_squares_on_the_augmented_system(target, count, ridge, weight, plane, seed):
    points = PLANE if plane else LINE
    phi = features.grid("gaussian", 2 if plane else 4, points.shape[1], -1.5, 1.5, PROCESS, per_time=3)
    assert phi.count == 12
    model, batch = Linear(phi, target, ridge, weight), draws(count, points=points, seed=seed)
    got = model.solve(batch, PROCESS)
    alpha, S = (a[..., None] for a in levels(batch.t))
    D = (0.1 + 19.9 * batch.t)[..., None]  # of the paper's VP, whose beta is D
    lam = {"sigma2": S, "one": S**0, "x0": S**2 / alpha**2, "v": S / alpha**2, "likelihood": D}
    lam = (lam | {"edm": S**2 / alpha**2 * (4 + alpha**2 / S)})[weight]
    noise, proxy = (batch.x - alpha * batch.m) / S.sqrt(), (alpha * batch.m - batch.x) / S
    total = alpha**2 / 4 + S  # variance of x for data of standard deviation .5
    slope, wanted = {
        "score": (S**0, proxy),
        "x0": (alpha / S, batch.m),
        "noise": (-1 / S.sqrt(), noise),
        "v": (-alpha / S.sqrt(), alpha * noise - S.sqrt() * batch.m),
        "flow": (-1 / D, -D * (batch.x + proxy)),
        "edm": (alpha / (2 * (S * total).sqrt()), (batch.m - alpha / 4 * batch.x / total) * 2 * (total / S).sqrt()),
    }[target]
    root = (lam * slope.square()).sqrt()
    for k in range(2):
        A = torch.cat([root[k] * phi(batch.x[k], batch.t[k]), math.sqrt(count * ridge) * torch.eye(12)])
        Y = torch.cat([root[k] * wanted[k], torch.zeros(12, points.shape[1])])
        want = torch.linalg.lstsq(A, Y, driver="gelsd").solution
        torch.testing.assert_close(got[k], want, rtol=1e-6, atol=1e-6 * float(want.abs().max()))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("points", [LINE, PLANE], ids=["line", "plane"])
def test_the_gradient_of_the_loss_in_score_units_vanishes(target, points):
    phi = features.grid("fourier", 3, points.shape[1], process=PROCESS)
    for weight, count in (("sigma2", 100), ("sigma2", 5), ("one", 100), (lambda t: 1 + t.square(), 50)):
        model, batch = Linear(phi, target, 0.05, weight), draws(count, points=points)
        lam = {"sigma2": levels(batch.t)[1], "one": torch.ones_like(batch.t)}.get(weight, 1 + batch.t.square())
        w = model.solve(batch, PROCESS).requires_grad_()
        (slope,) = torch.autograd.grad(loss(model, w, batch, lam).sum(), w)
        assert slope.norm() < 1e-8 * (1 + loss(model, 0 * w, batch, lam).sum())
        best = loss(model, w, batch, lam)
        for seed in range(3):
            assert (loss(model, w + 1e-3 * normal(*w.shape, seed=seed), batch, lam) > best).all()


def test_models_of_all_targets_that_fit_every_draw_have_its_proxy_score():
    """More features than draws, no ridge: whatever is predicted, the score at a draw is that of its target."""
    phi, batch = features.random_fourier(300, 1, PROCESS, length=0.1), draws(12, seed=3)
    alpha, S = (a[..., None] for a in levels(batch.t))
    proxy = (alpha * batch.m - batch.x) / S
    for target in TARGETS:
        model = Linear(phi, target, 0.0)
        got = model.score({"weights": model.solve(batch, PROCESS)}, batch.x, batch.t, PROCESS)
        torch.testing.assert_close(got, proxy, rtol=1e-6, atol=1e-6)
        lam = levels(batch.t)[1]
        assert loss(model, model.solve(batch, PROCESS), batch, lam).max() < 1e-9


def test_the_ridge_is_added_to_the_mean_gram_matrix():
    """So draws that are all seen twice change nothing, and neither do λ and the ridge in proportion."""
    for count in (7, 40):  # dual and primal; 14 draws have the rank of 7
        batch = draws(count, seed=4)
        twice = Batch(*(torch.cat([a, a], 1) for a in (batch.x, batch.t, batch.m)))
        for target in TARGETS:
            one = Linear(GRID, target, 0.1).solve(batch, PROCESS)
            torch.testing.assert_close(Linear(GRID, target, 0.1).solve(twice, PROCESS), one, rtol=1e-8, atol=1e-9)
            other = Linear(GRID, target, 0.7, lambda t: 7 * PROCESS.S(t)).solve(batch, PROCESS)
            torch.testing.assert_close(other, one, rtol=1e-8, atol=1e-9)
            assert Linear(GRID, target, 1e12).solve(batch, PROCESS).abs().max() < 1e-6


def test_weightings():
    batch = draws(40, seed=5)
    default = Linear(GRID, "x0").solve(batch, PROCESS)
    assert torch.equal(Linear(GRID, "x0", weight="sigma2").solve(batch, PROCESS), default)
    torch.testing.assert_close(Linear(GRID, "x0", weight=PROCESS.S).solve(batch, PROCESS), default)
    one = Linear(GRID, "x0", weight="one").solve(batch, PROCESS)
    torch.testing.assert_close(Linear(GRID, "x0", weight=lambda t: 1.0).solve(batch, PROCESS), one)
    assert (one - default).abs().max() > 1e-3
    late = Linear(GRID, "x0", weight=lambda t: (t > 0.5).to(t)).solve(batch, PROCESS)
    kept = [batch.t[0] > 0.5]
    only = Batch(*(a[:1, kept[0]] for a in (batch.x, batch.t, batch.m)))
    share = float(kept[0].double().mean())  # a mean over fewer draws: the ridge in proportion
    torch.testing.assert_close(late[:1], Linear(GRID, "x0", 0.1 / share, weight="one").solve(only, PROCESS))
    assert Linear(GRID, "x0", weight=lambda t: 0 * t).solve(batch, PROCESS).abs().max() == 0


@pytest.mark.parametrize("name", sorted(reference.PROCESSES))
def test_a_weighting_named_after_a_prediction_is_its_plain_squared_error(name):
    process = reference.PROCESSES[name]
    t = torch.tensor([reference.time_between(process, u) for u in (0.0, 0.3, 0.6, 1.0)], dtype=torch.float64)
    for target, weight in (("noise", "sigma2"), ("score", "one"), ("x0", "x0"), ("v", "v")):
        torch.testing.assert_close(predicting(target, weight).omega(t, process), torch.ones_like(t))
    torch.testing.assert_close(predicting("score", "likelihood").omega(t, process), process.D(t))


class Separate(features.Features):
    """A quadratic polynomial of x at each of three times, which share no weights."""

    dim, count, spec = 1, 9, {"kind": "separate"}
    times = torch.tensor([0.1, 0.4, 0.9], dtype=torch.float64)

    def __call__(self, x, t):
        at = (self._time(x, t)[..., None] == self.times).to(x)
        return (at[..., None] * x[..., None] ** torch.arange(3)).flatten(-2)


def test_neither_target_nor_weighting_matters_where_times_share_no_weights():
    """§6.2: every time is then a least-squares problem of its own, over the same functions whatever is predicted."""
    phi, batch = Separate(), draws(60, seed=6, times=lambda u: Separate.times[(3 * u).long()])
    alpha, S = (a[..., None] for a in levels(batch.t))
    proxy = (alpha * batch.m - batch.x) / S
    for k in range(2):
        by_hand = torch.empty_like(proxy[k])
        for t in Separate.times:
            at = batch.t[k] == t
            powers = batch.x[k][at] ** torch.arange(3)
            by_hand[at] = powers @ torch.linalg.lstsq(powers, proxy[k][at]).solution
        for target in TARGETS:
            for weight in WEIGHTS:
                model = Linear(phi, target, 0.0, weight)
                got = model.score({"weights": model.solve(batch, PROCESS)}, batch.x, batch.t, PROCESS)
                torch.testing.assert_close(got[k], by_hand, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("target", TARGETS)
def test_models_that_fit_every_draw_do_not_depend_on_the_weighting(target):
    """§6.2: with F ≥ P and no ridge the weights are those of least norm. With a ridge they depend on λ."""
    phi, batch = features.random_fourier(300, 1, PROCESS, length=0.1), draws(12, seed=3)
    y = Linear(phi, target).training_target(batch.m, batch.x, batch.t, PROCESS)
    least = torch.linalg.pinv(phi(batch.x, batch.t)) @ y
    with_ridge = Linear(phi, target, 0.1).solve(batch, PROCESS)
    for weight in WEIGHTS[1:]:
        got = Linear(phi, target, 0.0, weight).solve(batch, PROCESS)
        torch.testing.assert_close(got, least, rtol=1e-5, atol=1e-5 * float(least.abs().max()))
        assert (Linear(phi, target, 0.1, weight).solve(batch, PROCESS) - with_ridge).norm() > 0.01 * with_ridge.norm()


# --- ensembles -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [6, 40])
def test_members_do_not_depend_on_their_block(count, monkeypatch):
    model = Linear(GRID, "noise")

    def fitted(members) -> Tensor:
        told = []
        state = model.fit(training(draws=count, seed=6), members, told.append)["weights"]
        assert math.isclose(sum(told), 1)
        return state

    whole = fitted(range(7))
    for chunk in (1, 2 * count * GRID.count, 3 * count * GRID.count):
        monkeypatch.setitem(module.CHUNK, "cpu", chunk)
        torch.testing.assert_close(fitted(range(7)), whole, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(fitted([5, 2]), whole[[5, 2]], rtol=1e-9, atol=1e-11)


def normal_equations(model: Linear, batch: Batch, m: int) -> Tensor:
    """Member m's weights by the textbook's formula, in NumPy."""
    A, Y = (a[0].numpy() for a in model.system(Batch(batch.x[[m]], batch.t[[m]], batch.m[[m]]), PROCESS))
    return torch.from_numpy(np.linalg.solve(A.T @ A + model.ridge * np.eye(A.shape[1]), A.T @ Y))


@pytest.mark.parametrize("count", [6, 40])
@pytest.mark.parametrize("chunk", [1, 40, 4000, 1 << 19])
def test_members_that_share_their_inputs_share_a_factorisation(count, chunk, monkeypatch):
    """Whatever is shared, by `vary` or by a design, and however the row is cut: each member is its own solution."""
    model, factored = Linear(features.random_fourier(9, 2, PROCESS), "noise"), []
    monkeypatch.setitem(module.CHUNK, "cpu", chunk)
    monkeypatch.setattr(module, "factor", lambda gram, *rest: factored.append(len(gram)) or factor(gram, *rest))
    pairs = {"inputs": [0, 0, 1, 1, 2, 2], "targets": range(6)}
    uneven = {"inputs": [0, 0, 0, 1, 2, 2], "targets": range(6)}
    for options, systems in (({"vary": ("targets",)}, 1), ({}, 6), ({"design": pairs}, 3), ({"design": uneven}, 6)):
        factored.clear()
        made = training(draws=count, points=PLANE, seed=6, **options)
        weights = model.fit(made, range(6), lambda share: None)["weights"]
        batch = made.batch(range(6), count)
        wanted = torch.stack([normal_equations(model, batch, m) for m in range(6)])
        torch.testing.assert_close(weights, wanted, rtol=1e-8, atol=1e-9)
        assert sum(factored) == systems or chunk < 4000


def test_the_score_of_a_member_is_a_plus_B_W_phi():
    x, t = normal(5, 2, seed=7), torch.linspace(0.1, 0.9, 5, dtype=torch.float64)
    alpha, S = (a[:, None] for a in levels(t))
    phi = features.random_fourier(9, 2, PROCESS)
    for target, a, B in (("score", 0 * x, 1.0), ("x0", -x / S, alpha / S), ("noise", 0 * x, -1 / S.sqrt())):
        made = vk.train_ensemble(Linear(phi, target), PLANE, PROCESS, members=3, draws=20)
        for k in range(3):
            want = a + B * (phi(x, t) @ made.state["weights"][k])
            torch.testing.assert_close(made(x, t)[k], want)
            torch.testing.assert_close(made[k](x, t), want)
        torch.testing.assert_close(made.paired(x.expand(3, 5, 2), t), made(x, t))
        assert made(x[:0], t[:0]).shape == (3, 0, 2)
        again = models.from_spec(json.loads(json.dumps(made.model.spec)))
        torch.testing.assert_close(again.score(made.state, x[None], t[None], PROCESS), made(x, t))
    single = vk.train_ensemble(Linear(phi), PLANE.float(), PROCESS, members=2, draws=20, dtype=torch.float32)
    double = vk.train_ensemble(Linear(phi), PLANE, PROCESS, members=2, draws=20)
    assert single.dtype == torch.float32
    torch.testing.assert_close(single(x.float(), t), double(x.float().double(), t).float(), rtol=1e-3, atol=1e-3)


def test_one_training_point_is_learned_exactly():
    """Its denoiser is a constant, which Legendre's polynomials hold; J0 and J1 are one there."""
    phi, point = features.grid("polynomial", 3, 2, process=PROCESS), torch.tensor([[0.3, -0.8]], dtype=torch.float64)
    x = normal(6, 2, seed=8)
    for goal in ("J0", "J1", JK(4), JK(2, "efm")):
        made = vk.train_ensemble(Linear(phi, "x0", 0.0, "one"), point, PROCESS, members=2, draws=200, objective=goal)
        want = vk.EmpiricalScore(point, PROCESS)(x, 0.5)
        torch.testing.assert_close(made(x, 0.5), want.expand(2, 6, 2), rtol=1e-6, atol=1e-6)


# --- many draws ----------------------------------------------------------------------------------------------------


def projection(target: str, ridge: float, x: Tensor, t: Tensor) -> Tensor:
    """The score of the weighted ridge projection, all expectations by quadrature in t and x, at ``x (N,), t (N,)``."""
    nodes, mass = np.polynomial.legendre.leggauss(40)
    when = PROCESS.eps + (PROCESS.T - PROCESS.eps) * (nodes + 1) / 2
    y = torch.linspace(-7, 7, 1401, dtype=torch.float64)
    gram, cross = torch.zeros(GRID.count, GRID.count).double(), torch.zeros(GRID.count).double()

    def parts(alpha: float, S: float, at: Tensor) -> tuple[Tensor, float]:
        return {
            "score": (torch.zeros_like(at), 1.0),
            "x0": (-at / S, alpha / S),
            "noise": (torch.zeros_like(at), -1 / math.sqrt(S)),
        }[target]

    for u, share in zip(when.tolist(), (mass / 2).tolist(), strict=True):
        alpha, S = reference.levels("vp", u)
        p = W * (-(y[:, None] - alpha * LINE[:, 0]).square() / (2 * S)).exp() / math.sqrt(2 * math.pi * S)
        density = p.sum(1)
        s = (p @ LINE[:, 0] / density * alpha - y) / S
        a, B = parts(alpha, S, y)
        phi = GRID(y[:, None], u)
        mass_x = share * 0.01 * density * S  # λ = S; the ends of y carry nothing
        gram += B**2 * phi.mT @ (mass_x[:, None] * phi)
        cross += B * phi.mT @ (mass_x * (s - a))
    w = torch.linalg.solve(gram + ridge * torch.eye(GRID.count), cross)
    out = []
    for at, u in zip(x, t.tolist(), strict=True):
        a, B = parts(*reference.levels("vp", u), at)
        out.append(a + B * GRID(at[None], u) @ w)
    return torch.stack(out)


@pytest.mark.parametrize("target", TARGETS[:3])
def test_many_draws_give_the_weighted_projection_whatever_the_noise_of_the_target(target):
    x = torch.tensor([-1.2, -0.4, 0.3, 0.9], dtype=torch.float64)
    t = torch.tensor([0.1, 0.5, 0.2, 0.8], dtype=torch.float64)
    want, spread = projection(target, 0.1, x, t), {}
    data, members = vk.Empirical(LINE, W), 16
    for goal in (J0(), J1(), JK(2), JK(2, "subset")):
        made = vk.train_ensemble(
            Linear(GRID, target, 0.1), data, PROCESS, members=members, draws=8000, objective=goal, seed=9
        )
        s = made(x[:, None], t)[..., 0]
        spread[repr(goal)] = s.std(0)
        assert ((s.mean(0) - want).abs() <= 4.5 * s.std(0) / math.sqrt(members)).all()
    assert spread["J0"].norm() < spread["JK(2, 'draws')"].norm() < spread["J1"].norm()


def test_the_gap_of_figure_2_at_one_feature_a_draw():
    """Theory §12: .12 with noisy targets, .064 with the same inputs and noiseless ones (100 Euler steps, eps 1e-3)."""
    process, members, n = vk.VP(eps=1e-3), 60, 300
    phi = features.grid("gaussian", 16, 1, -1.5, 1.5, process)
    assert phi.count == 256
    top = float(process.sigma(torch.tensor(process.T, dtype=torch.float64)))
    start = top * torch.from_numpy(special.ndtri((np.arange(n) + 0.5) / n))[:, None]
    data, gap = torch.tensor([[-1.0], [0.0], [1.0]], dtype=torch.float64), {}
    for goal, known, error in (("J1", 0.12, 0.02), ("J0", 0.064, 0.004)):
        made = vk.train_ensemble(Linear(phi, "x0", 0.1), data, process, members=members, draws=256, objective=goal)
        x = made.sample(x_T=start, steps=100)[..., 0].abs()
        gap[goal] = ((x > 0.25) & (x < 0.75)).double().mean(1)
        se = float(gap[goal].std()) / math.sqrt(members)
        assert abs(float(gap[goal].mean()) - known) <= 3 * math.hypot(se, error)
    more = gap["J1"] - gap["J0"]  # the noise of the target alone
    assert more.mean() > 2 * more.std() / math.sqrt(members)


# --- refusals ------------------------------------------------------------------------------------------------------


def fit(model: Linear, **options):
    return vk.train_ensemble(model, options.pop("points", LINE), PROCESS, **{"draws": 30, "members": 2} | options)


SAME = {"times": lambda u: torch.full_like(u, 0.5)}  # features of t are no longer independent
IMAGES = torch.zeros(3, 4, 4)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: fit(Linear(GRID, ridge=0.0), **SAME), r"singular for 2 of 2.*F = 12.*P = 30.*ridge = 0"),
        (lambda: fit(Linear(GRID, ridge=0.0, weight=lambda t: 0 * t)), r"singular.*F = 12.*P = 30"),
        (lambda: fit(Linear(GRID, ridge=0.0, weight=lambda t: 0 * t), draws=3), r"F = 12 features, P = 3 draws"),
        (lambda: fit(Linear(GRID), draws=0), "draws"),
        (lambda: fit(Linear(GRID), draws=-3), "draws"),
        (lambda: fit(Linear(GRID), draws=None), "give draws=P"),
        (lambda: fit(Linear(GRID), points=PLANE), r"vectors of 1 numbers.*\(2,\)"),
        (lambda: fit(Linear(GRID), points=IMAGES), r"vectors of 1 numbers.*\(4, 4\)"),
        (lambda: fit(Linear(GRID, weight=lambda t: -t)), "not negative"),
        (lambda: fit(Linear(GRID, weight=lambda t: t / 0)), "finite"),
        (lambda: fit(Linear(GRID, weight=lambda t: torch.ones(7))), "must be like t"),
        (lambda: fit(Linear(GRID), objective="J3"), "no objective"),
        (lambda: Linear(None), "needs features"),
        (lambda: Linear(features.grid("fourier", 0, 1, process=PROCESS)), "1 or more"),
        (lambda: Linear(features.random_fourier(0, 1, PROCESS)), "number of features"),
        (lambda: Linear(GRID, ridge=-0.1), "ridge must be"),
        (lambda: Linear(GRID, ridge=math.nan), "ridge must be"),
        (lambda: Linear(GRID, ridge=math.inf), "ridge must be"),
        (lambda: Linear(GRID, ridge="0.1"), "ridge must be"),
        (lambda: Linear(GRID, "velocity"), "target is one of"),
        (lambda: Linear(GRID, weight="snr"), "weight must be"),
    ],
)
def test_bad_input_is_refused(call, says):
    with pytest.raises(InputError, match=says):
        call()
