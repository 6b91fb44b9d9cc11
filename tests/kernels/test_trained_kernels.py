"""Kernels of trained models: the errors of their predictions, models drawn from them, refusals."""

from __future__ import annotations

import pytest
import torch
from trained import PLANE, POINTS, PROCESS, X, fitted, model, quietly

import vkernel as vk
from vkernel.core.errors import InputError
from vkernel.kernels import SGD, Lazy, Linear, Measured, linear

LINE = model(3)
GOOD = {"lr": 0.1, "batch": 4, "steps": 3}

# -------------------- errors and models

COSINES = vk.models.Linear(vk.features.random_fourier(16, 1, PROCESS, generator=3), "noise", 0.0)
LAZY = vk.models.Lazy(vk.models.NTK(1, init_width=64), 2.0)
PREDICTIONS = {
    "linear": lambda seed: Linear(model(4), POINTS, PROCESS, draws=60, sets=24, seed=seed),
    "misfit": lambda seed: Linear(model(4), POINTS, PROCESS, draws=60, sets=24, seed=seed).only("misfit"),
    "leading": lambda seed: Linear(model(4), POINTS, PROCESS, draws=900, form="leading", quadrature=1 << 10, seed=seed),
    "sgd": lambda seed: SGD(
        COSINES, POINTS, PROCESS, lr=0.1, batch=8, steps=100, nodes=6, quadrature=1 << 10, seed=seed
    ),
    "lazy": lambda seed: Lazy(LAZY, POINTS, PROCESS, draws=12, sets=16, seed=seed),
    "measured": lambda seed: Measured(fitted(model(4), members=40, draws=60, seed=seed)),
}


@pytest.mark.parametrize("name", PREDICTIONS)
def test_the_error_is_the_spread_of_independent_predictions(name):
    made = [PREDICTIONS[name](seed) for seed in range(24)]
    variances = torch.stack([V.cov(X, 0.2).trace() for V in made])
    seen = variances.std(0) / variances.mean(0)
    told = torch.stack([V.error(X, 0.2) for V in made])
    assert told.shape == (24, len(X))
    assert 0.7 < float((told.square().mean(0).sqrt() / seen).mean()) < 1.4
    for V, variance in zip(made[:3], variances, strict=False):
        close = {"rtol": 0.2} if name in ("leading", "sgd") else {"rtol": 1e-8}  # parts of a quadrature have a bias
        torch.testing.assert_close(V.estimates(X, 0.2).mean(0), variance, atol=1e-3 * float(variance.max()), **close)


def test_closed_forms_have_no_error():
    held = Linear(model(4), POINTS, PROCESS, draws=60, vary=("targets",))
    fixed = Lazy(LAZY, POINTS, PROCESS, draws=12, vary=("targets", "init"))
    for V in (held, fixed):
        assert torch.equal(V.error(X, 0.2), torch.zeros(len(X), dtype=torch.float64))
        assert V.relative_error == 0
        assert "without sampling error" in V.why


def test_sets_are_added_until_the_error_is_small(monkeypatch):
    monkeypatch.setattr(linear, "FIRST", 16)
    monkeypatch.setattr(linear, "MOST", 128)
    V = quietly(lambda: Linear(model(4), POINTS, PROCESS, draws=60))
    same = Linear(model(4), POINTS, PROCESS, draws=60, sets=V.sets)
    assert V.sets in (16, 32, 64, 128)
    assert V.relative_error <= 0.05 or V.sets == 128
    torch.testing.assert_close(V.cov(X, 0.2).trace(), same.cov(X, 0.2).trace())
    monkeypatch.setattr(linear, "ACCURATE", 1e-6)
    with pytest.warns(UserWarning, match="variances are known to .* a larger sets=… lowers this"):
        assert Linear(model(4), POINTS, PROCESS, draws=60).sets == 128


def test_one_set_of_inputs_has_an_unknown_error():
    V = quietly(lambda: Linear(model(4), POINTS, PROCESS, draws=60, sets=1))
    assert V.error(X, 0.2).isnan().all()


def test_models_of_a_linear_kernel_are_linear_ensembles():
    V = Linear(model(4), POINTS, PROCESS, draws=60, sets=24)
    found = V.models(2000, 3)
    assert isinstance(found, vk.Ensemble)
    want = V.cov(X, 0.2).trace()
    assert ((found.cov(X, 0.2).trace() / want - 1).abs() < 5 * (2 / 2000) ** 0.5).all()
    assert ((found.mean(X, 0.2) - V.mean(X, 0.2)).abs()[:, 0] < 5 * (want / 2000).sqrt()).all()


def test_progress_is_reported():
    heard: list[tuple[str, float]] = []
    Linear(model(3), POINTS, PROCESS, draws=20, sets=16, progress=lambda label, share: heard.append((label, share)))
    Lazy(LAZY, POINTS, PROCESS, draws=12, sets=4, progress=lambda label, share: heard.append((label, share)))
    SGD(LINE, POINTS, PROCESS, **GOOD, nodes=3, quadrature=64, progress=lambda *told: heard.append(told))
    assert sum(share == pytest.approx(1) for _, share in heard) == 3


# -------------------- refusals


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: Linear(vk.models.MLP(), POINTS, PROCESS, draws=9), "linear model"),
        (lambda: Linear(LINE, POINTS, PROCESS, draws=9, form="exact"), "form"),
        (lambda: Linear(LINE, POINTS, PROCESS, draws=0), "draws"),
        (lambda: Linear(LINE, POINTS, PROCESS, draws=None), "draws"),
        (lambda: Linear(LINE, POINTS, PROCESS, draws=9, objective="J2"), "objective"),
        (lambda: Linear(LINE, POINTS, PROCESS, draws=9, vary=("noise",)), "vary"),
        (lambda: Linear(LINE, POINTS, PROCESS, draws=9, sets=0), "sets"),
        (lambda: Linear(LINE, POINTS, PROCESS, draws=9, form="leading", quadrature=0), "quadrature"),
        (lambda: Linear(LINE, PLANE, PROCESS, draws=9), "vectors of 1"),
        (lambda: Linear(model(80), POINTS, PROCESS, draws=9), "6400 × 6400"),
        (lambda: Linear(LINE, POINTS, PROCESS, draws=40, sets=8).only("noise"), "target_noise"),
        (lambda: Linear(LINE, POINTS, PROCESS, draws=40, sets=8).draw(0), "number of members"),
        (lambda: Linear(LINE, POINTS, PROCESS, draws=40, sets=8).draw(3)(torch.zeros(6, 2, 1), 0.2), "3 members"),
        (lambda: SGD(vk.models.MLP(), POINTS, PROCESS, **GOOD), "linear model"),
        (lambda: SGD(LINE, POINTS, PROCESS, **GOOD | {"lr": 0}), "lr"),
        (lambda: SGD(LINE, POINTS, PROCESS, **GOOD | {"lr": "fast"}), "lr"),
        (lambda: SGD(LINE, POINTS, PROCESS, **GOOD | {"batch": 0}), "batch"),
        (lambda: SGD(LINE, POINTS, PROCESS, **GOOD | {"steps": 2.5}), "steps"),
        (lambda: SGD(LINE, POINTS, PROCESS, **GOOD, nodes=1), "nodes"),
        (lambda: SGD(LINE, POINTS, PROCESS, **GOOD, quadrature=0), "quadrature"),
        (lambda: SGD(LINE, PLANE, PROCESS, **GOOD), "vectors of 1"),
        (lambda: SGD(LINE, POINTS, PROCESS, **GOOD, objective="J2"), "objective"),
        (lambda: Measured(LINE), "Ensemble"),
        (lambda: Measured(fitted(LINE, members=1, draws=30)), "two finite"),
        (lambda: Measured(fitted(LINE, members=20, draws=30)).draw(0), "number of members"),
        (lambda: Measured(fitted(LINE, members=20, draws=30)).draw(3)(torch.zeros(6, 2, 1), 0.2), "3 members"),
        (lambda: Measured(fitted(LINE, members=20, draws=30)).cov(X, 0.2, None, 0.3), "x2 with t2"),
    ],
)
def test_bad_input_is_refused(call, says):
    with pytest.raises(InputError, match=says):
        quietly(call)
