"""The factor c of the target's noise: twins are affine in c, and variances in c², for all models linear in the target.

With the same inputs, the targets m + c (x0 - m) are affine in c. A fit that is linear in its targets is then
ŝ_c = (1 - c) ŝ_0 + c ŝ_1, and since E[ŝ_1 - ŝ_0 | inputs] = 0, its variance is V_c = V_0 + c² V_noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import vkernel as vk
from vkernel.train.objectives import Objective, Training

PROCESS = vk.VP(eps=1e-2)
DATA = vk.Empirical(torch.tensor([[-1.0], [0.1], [0.7]], dtype=torch.float64))
LINEAR = vk.models.Linear(vk.features.grid("gaussian", 4, 1, process=PROCESS), "x0", 0.1)
COSINES = vk.models.Linear(vk.features.random_fourier(12, 1, PROCESS, generator=3), "noise", 0.0)
LAZY = vk.models.Lazy(vk.models.NTK(depth=1, init_width=64), 5.0, "x0")
X = torch.linspace(-1.5, 1.5, 9, dtype=torch.float64)[:, None]
FACTORS = (-0.5, 0.5, 2.0)
T = 0.2


def fitted(model: vk.models.Model) -> Callable[[Objective], Tensor]:
    return lambda goal: vk.train_ensemble(model, DATA, PROCESS, members=6, draws=24, objective=goal, seed=4)(X, T)


def descended(goal: Objective) -> Tensor:
    """The scores of linear models after 60 steps of SGD on fresh draws, the same draws for all objectives."""
    training, members = Training(DATA, PROCESS, goal, None, seed=4), range(6)
    weights = torch.zeros(6, COSINES.features.count, 1, dtype=torch.float64)
    for k in range(60):
        batch = training.batch(members, 8, 8 * k)
        A, Y = COSINES.system(batch, PROCESS)
        weights = weights - 0.2 * A.mT @ (A @ weights - Y)
    return vk.Ensemble(COSINES, {"weights": weights}, PROCESS, (1,))(X, T)


@pytest.mark.parametrize("train", [fitted(LINEAR), fitted(LAZY), descended], ids=["linear", "lazy", "sgd"])
def test_twins_are_affine_in_c(train: Callable[[Objective], Tensor]) -> None:
    zero, one = train(vk.J0()), train(vk.J1())
    assert (one - zero).abs().max() > 0.01
    for c in FACTORS:
        torch.testing.assert_close(train(vk.JC(c)), (1 - c) * zero + c * one, rtol=1e-9, atol=1e-9)


def linear(goal: Objective, **how: object) -> vk.kernels.Linear:
    return vk.kernels.Linear(LINEAR, DATA, PROCESS, draws=400, sets=64, objective=goal, **how)


def lazy(goal: Objective, **how: object) -> vk.kernels.Lazy:
    return vk.kernels.Lazy(LAZY, DATA, PROCESS, draws=24, sets=8, objective=goal, **how)


def sgd(goal: Objective) -> vk.kernels.SGD:
    # what is tested holds for every quadrature, coarse ones too
    how = {"nodes": 6, "quadrature": 1 << 8, "objective": goal}
    return vk.kernels.SGD(COSINES, DATA, PROCESS, lr=0.2, batch=8, steps=20, **how)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kernel", [linear, lazy, sgd])
def test_predicted_variances_are_affine_in_the_square_of_c(kernel: Callable[[Objective], vk.kernels.Kernel]) -> None:
    zero, one = (kernel(goal).cov(X, T).dense() for goal in (vk.J0(), vk.J1()))
    assert (one - zero).min() > -1e-12
    for c in FACTORS:
        got = kernel(vk.JC(c)).cov(X, T).dense()
        torch.testing.assert_close(got, zero + c**2 * (one - zero), rtol=1e-8, atol=1e-10)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kernel", [linear, lazy])
def test_given_the_inputs_the_noise_is_all(kernel: Callable[..., vk.kernels.Kernel]) -> None:
    one = kernel(vk.J1(), vary=("targets",)).cov(X, T).dense()
    for c in FACTORS:
        torch.testing.assert_close(kernel(vk.JC(c), vary=("targets",)).cov(X, T).dense(), c**2 * one, rtol=1e-8, atol=0)


def test_the_split_of_the_variance_scales_the_part_of_the_targets() -> None:
    """In one nested design the inputs have the same part for every c, and that of the targets is c² that of J1."""

    def parts(goal: Objective) -> Tensor:
        found = vk.variance_split(LINEAR, DATA, PROCESS, X, T, (200, 6), draws=24, objective=goal)
        return found.variance.value.mean(1)

    one = parts(vk.J1())
    for c in (0.5, 2.0):
        torch.testing.assert_close(parts(vk.JC(c))[1], c**2 * one[1], rtol=1e-9, atol=0)
    assert parts(vk.JC(2.0))[0] == pytest.approx(float(one[0]), rel=0.5)
    assert parts(vk.JC(0.0))[1] == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("K", [2, 4])
def test_c_and_K_have_one_covariance_and_two_third_cumulants(K: int) -> None:
    """At c = 1/√K the covariances of JC(c) and JK(K) agree; third cumulants of J1 are divided by K^1.5 and by K²."""
    count, held = 20_000, {"vary": ("targets",), "times": lambda u: torch.full_like(u, 0.1)}
    goals = {"J1": vk.J1(), "JC": vk.JC(1 / math.sqrt(K)), "JK": vk.JK(K)}
    score, at = vk.EmpiricalScore(DATA, PROCESS), torch.tensor([0.1], dtype=torch.float64)
    covariances = [goals[k].covariance(score, X[4:5], at) for k in ("JC", "JK")]
    torch.testing.assert_close(covariances[0], covariances[1])
    third, error = {}, {}
    for name, goal in goals.items():
        m = Training(DATA, PROCESS, goal, None, seed=2, **held).batch(range(count), 1).m[:, 0, 0]  # one input
        away = (m - m.mean()) ** 3
        third[name], error[name] = float(away.mean()), float(away.std()) / math.sqrt(len(away))
    assert abs(third["J1"]) > 10 * error["J1"]
    assert third["JC"] == pytest.approx(third["J1"] / K**1.5, rel=1e-9)  # the same draws
    assert abs(third["JK"] - third["J1"] / K**2) < 4 * math.hypot(error["JK"], error["J1"] / K**2)
    assert abs(third["JK"] - third["JC"]) > 3 * error["JK"]
