"""Fixed starts, weights of paths, V over C: partitions, actions from their definition, weights of a known law."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from exhibits import Made, brute_force

import vkernel as vk
from vkernel.reproduce import paths, plane
from vkernel.reproduce.exhibit import Page, Run

# --- a fixed start --------------------------------------------------------------------------------------------------


def test_every_end_is_of_one_kind(made: Made) -> None:
    saved = made.arrays["conditional"]
    assert list(saved["kinds"]) == ["same", "other", "off"]
    np.testing.assert_allclose(saved["by_start"].sum(1), 1)
    np.testing.assert_allclose(saved["mean"][..., 0].sum(1), 1)
    np.testing.assert_allclose(saved["mean"][..., 0], saved["by_start"].mean(-1))
    np.testing.assert_allclose(saved["law"].sum(-1), 1)


def test_the_exact_flow_divides_the_prior_equally(made: Made) -> None:
    """The map is increasing and each of three equal points gets a third of the prior."""
    saved = made.arrays["conditional"]
    assert (np.diff(saved["exact"]) > 0).all()
    nearest = np.abs(saved["exact"][:, None] - saved["points"]).argmin(1)
    np.testing.assert_array_equal(nearest, np.floor(3 * saved["u"]))


def test_kinds_by_hand() -> None:
    points, exact = torch.tensor([-1.0, 0.0, 1.0]).double(), torch.tensor([-0.9, 0.1]).double()
    x = torch.tensor([[-1.2, 0.2], [0.1, 0.6], [-0.5, 1.1]]).double()
    same, other, off = paths.kinds_of(x, points, exact)
    assert same.tolist() == [[1, 1], [0, 0], [0, 0]]
    assert other.tolist() == [[0, 0], [1, 0], [0, 1]]
    assert off.tolist() == [[0, 0], [0, 1], [1, 0]]


def test_a_model_without_error_keeps_every_start() -> None:
    at = paths.Starts(1e-3, 12, 60)
    found = at.shares(at.exact.expand(5, -1), vk.EmpiricalScore(at.data, at.process))
    assert (found.mean["same"].value, found.bias["same"], found.none.value) == (1, 1, 1)


def test_the_flow_of_a_mean_of_equal_members_has_no_error() -> None:
    at = paths.Starts(1e-2, 12, 30)
    model = vk.models.Linear(vk.features.grid("gaussian", 8, process=at.process), target="x0", ridge=0.1)
    one = vk.train_ensemble(model, at.data, at.process, members=1, draws=100)
    same = one.select([0] * 16)
    found, ends = paths.still(at, same), paths.kinds_of(at.flow(one.mean_score), at.points, at.exact).mean(-1)
    for k, kind in enumerate(paths.KINDS):
        assert (found[kind].value, found[kind].se) == (pytest.approx(float(ends[k])), pytest.approx(0, abs=1e-9))


# --- weights of paths -----------------------------------------------------------------------------------------------


def action(path: np.ndarray, y: np.ndarray, times: np.ndarray, kappa: float) -> float:
    """½ Σ Δ Rᵀ (κ D C D)⁻¹ R from the definitions of the toy process: α² = 1 - t, σ² = t, β = D = ½/(1 - t)."""
    total = 0.0
    for x, after, t, t2 in zip(path[:-1], path[1:], times[:-1], times[1:], strict=True):
        proxy, D = (math.sqrt(1 - t) * y - x) / t, 0.5 / (1 - t)
        logit = -0.5 * t * (proxy**2).sum(-1)
        weight = np.exp(logit - logit.max()) / np.exp(logit - logit.max()).sum()
        s = weight @ proxy
        C = (weight[:, None] * (proxy - s)).T @ (proxy - s)
        R = D * (x + s) - (after - x) / (t - t2)
        total += 0.5 * (t - t2) * R @ np.linalg.solve(kappa * D * D * C, R)
    return total


def test_actions_from_the_definition(made: Made) -> None:
    saved, process = made.arrays["path_integral"], vk.Toy(eps=0.1)
    drawn, y = saved["paths"], vk.data.toy("square")[:].numpy()
    times = process.times(len(drawn) - 1, "log").numpy()
    for k in range(3):
        assert saved["action_along"][-1, k] == pytest.approx(action(drawn[:, k], y, times, 0.3), rel=1e-6)
    assert action(saved["zero_action"], y, times, 0.3) == pytest.approx(0, abs=1e-12)
    assert (np.diff(saved["action_along"], axis=0) >= -1e-9).all()
    np.testing.assert_allclose(saved["most_probable"][-1, 1:], saved["points"], atol=1e-8)
    np.testing.assert_allclose(saved["best_share"].sum(), 1)


def test_shares_of_paths_add_up(made: Made) -> None:
    saved = made.arrays["path_integral"]
    np.testing.assert_allclose(saved["own"][:, 0].sum(-1), 1)
    np.testing.assert_allclose(saved["difference"][:, 0], saved["weighted"][:, 0] - saved["own"][:, 0])
    assert (saved["difference"][:, 1] < saved["difference"][:, 2]).all()


def test_weights_turn_one_law_into_another() -> None:
    """Draws of a known law q with weights p/q have the shares p, and wrong weights are found."""
    source = torch.Generator().manual_seed(0)
    p, q = torch.tensor([0.7, 0.2, 0.1]).double(), torch.tensor([0.3, 0.3, 0.4]).double()
    own, other = (torch.nn.functional.one_hot(torch.multinomial(v, 20_000, True, generator=source)) > 0 for v in (p, q))
    index = other.long().argmax(-1)
    found = paths.compare(own, other, (p / q)[index])
    assert found.worst < 3.5
    assert found.left < 0.02 < 0.35 < found.moved
    assert found.total.low < 1 < found.total.high
    assert paths.compare(own, other, (p / q)[index].sqrt()).worst > 5


# --- V over C -------------------------------------------------------------------------------------------------------


def test_noise_of_the_target_by_brute_force(made: Made) -> None:
    saved, y = made.arrays["v_over_c"], plane.DATA[:].numpy()
    for k, t in enumerate(saved["times"]):
        alpha = math.exp(-(0.1 * t + 9.95 * t * t))
        for i in (0, 7, 50):
            trace, _ = brute_force(y, saved["at"][k, i], alpha, 1 - alpha**2)
            assert saved["noise"][k, i] == pytest.approx((1 - alpha**2) * trace, rel=1e-6)
        x = np.array([saved["x"][3], saved["x"][5]])
        trace, _ = brute_force(y, x, alpha, 1 - alpha**2)
        assert saved["maps"][0, k, 5, 3] == pytest.approx((1 - alpha**2) * trace, rel=1e-6)  # rows are x₂
    assert (saved["variance"] >= 0).all()
    assert (np.abs(saved["rho"]) <= 1).all()


def test_variances_are_those_of_the_ensembles() -> None:
    model = vk.models.Linear(vk.features.grid("gaussian", 4, 2, process=plane.PROCESS), target="x0", ridge=0.1)
    pair = tuple(
        vk.train_ensemble(model, plane.DATA, plane.PROCESS, members=5, draws=50, objective=o) for o in ("J1", "J0")
    )
    x = torch.randn(7, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    S = plane.PROCESS.S(torch.tensor(0.2, dtype=torch.float64))
    found = plane.variances(pair, x, 0.2)
    for q, members in zip(found, pair, strict=False):
        torch.testing.assert_close(q.mean(0), S * members.cov(x, 0.2).trace())


def test_rank_correlation_and_concentration_of_known_fields() -> None:
    noise = torch.linspace(0.1, 2, 50, dtype=torch.float64)
    spread = 1 + 0.01 * torch.rand(6, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for q, sign in ((spread * noise**3, 1), (spread / noise, -1)):
        assert plane.follows(q, noise).value == pytest.approx(sign)
    inside = noise > 1
    assert plane.concentration(spread.expand(6, 50), inside).value == pytest.approx(1)
    one = plane.concentration(spread * inside.double(), inside)
    assert one.value == pytest.approx(1 / float(inside.double().mean()))


@pytest.mark.parametrize(
    ("ends", "verdict"), [((0.1, 0.9), "holds"), ((-0.9, -0.1), "does not hold"), ((-0.1, 0.1), "undecided")]
)
def test_verdicts_follow_the_intervals(ends: tuple[float, float], verdict: str, made: Made) -> None:
    page = Page(Run(made.out, 0, True, print), "v_over_c", {})
    given = {"key": "k", "section": "", "claim": "", "computed": "", "number": "", "rule": ""}
    tests = {key: page.text["claims"][0][key] for key in ("holds", "fails", "part")}
    page.values |= {"lows": [ends[0]] * 4, "highs": [ends[1]] * 4}
    assert page.claim(given | tests).verdict == verdict
    page.values["lows"] = [0.2, *page.values["lows"][1:]]
    if verdict == "undecided":
        assert page.claim(given | tests).verdict == "holds in part"
