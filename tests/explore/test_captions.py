"""The texts of the page: every number has its error, and a copied script gives the same numbers."""

from __future__ import annotations

import contextlib
import io
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import vkernel as vk
from vkernel.core.errors import InputError
from vkernel.core.estimate import Estimate
from vkernel.explore import captions, compute, maps, probe, shipped
from vkernel.explore.captions import POINTS
from vkernel.explore.state import CONTENT, CONTROLS, LAYERS, SAMPLERS, State, from_query

TRIPLE, CLUSTERS = POINTS["triple"], POINTS["clusters"]


MAPS = ("noise", "share", "variance", "variance_share")


@pytest.mark.parametrize("points", [TRIPLE, CLUSTERS], ids=["line", "plane"])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_snippet_gives_the_numbers_of_the_page(sampler: str, points: Any, small: None) -> None:
    number = SAMPLERS.index(sampler) + len(points[0])
    K, name = {"effective": 4, "ntk": 0}.get(sampler, 1), MAPS[number % 4]
    weights = (2,) + (1,) * (len(points) - 1)
    state = State(points=points, weights=weights, sampler=sampler, eps=0.01, steps=12, seed=3, K=K, t=0.2, map=name)
    result = compute.simulate(state)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    with contextlib.redirect_stdout(io.StringIO()) as output:
        exec(compile(captions.snippet(state, place := [0.3, -0.2][: state.d]), "snippet", "exec"), namespace)
    assert namespace["gap"] == result.gap
    assert namespace["exact_gap"] == result.exact_gap
    assert namespace.get("twin_gap") == result.twin
    assert namespace["noise"] == compute.noise_share(state)
    found = probe.evaluate(state, place)
    assert float(namespace["target_noise"]) == pytest.approx(found.noise, rel=1e-9)
    assert float(namespace["signal"]) == pytest.approx(found.signal, rel=1e-9)
    assert namespace["which"][: len(found.which)].tolist() == found.which
    assert (result.member_gaps is None) == ("each" not in namespace)
    if result.member_gaps is not None:
        assert namespace["each"].numpy() == pytest.approx(result.member_gaps, abs=1e-7)
    if "at_points" in namespace:
        assert float(namespace["at_points"]) == pytest.approx(maps.at_points(state), rel=1e-9)
    values = maps.evaluate(state, result).values
    if "values" in namespace:
        assert namespace["values"].detach().numpy() == pytest.approx(values.flatten(), rel=1e-5, abs=1e-6)
    else:
        assert result.learned is None
    assert "new" in output.getvalue()
    assert result.frames.shape[0] == len(result.times)
    assert np.isfinite(result.frames).all()
    assert result.law.shape == (compute.BINS[state.d],) * state.d
    none = ("exact", "gaussian", "smoothed", "nearest", "switch", "ntk")
    assert (result.twin is None) == (result.twin_law is None) == (sampler in none)


@pytest.mark.parametrize(("name", "process", "t"), [("square", "vp", 0.05), ("square", "edm", 0.1), ("L", "edm", 0.1)])
def test_snippet_draws_the_map_where_three_points_tie(name: str, process: str, t: float, small: None) -> None:
    """Of equally likely training points both take the same two; and a probe has a time of its own."""
    state = State(points=POINTS[name], sampler="exact", process=process, t=t, steps=5)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile(captions.snippet(state, [0.3, -0.2], 0.2), "snippet", "exec"), namespace)
    values = maps.evaluate(state).values.flatten()
    assert np.maximum(namespace["values"].numpy(), maps.TINY) == pytest.approx(values, rel=1e-5, abs=1e-6)
    assert float(namespace["target_noise"]) == pytest.approx(maps.noise_at(state.replace(t=0.2), 0.3, -0.2), rel=1e-9)


def test_shares_carry_errors() -> None:
    assert captions.percent(Estimate(0.18, 0.01, 0.16, 0.2)) == "18 ± 1 %"
    assert captions.percent(Estimate(0.034, 0.007, 0.02, 0.048)) == "3.4 ± 0.7 %"
    assert captions.percent(Estimate(0.0, 0.0, 0.0, 0.00187)) == "less than 0.2 %"
    assert captions.percent(Estimate(1.0, 0.0, 0.99813, 1.0)) == "more than 99.8 %"
    assert captions.percent(Estimate.exact(0.3585)) == "36 %"
    assert captions.percent(Estimate.exact(0.0)) == "less than 0.1 %"
    assert captions.percent(Estimate.exact(1e-9)) == "less than 0.1 %"


def test_comparisons_claim_no_more_than_errors_allow() -> None:
    low, high = Estimate(0.09, 0.01, 0.07, 0.11), Estimate(0.18, 0.01, 0.16, 0.2)
    assert captions.compared(high, low) == "2 × as many"
    assert captions.compared(low, high) == "0.5 × as many"
    assert captions.compared(high, Estimate(0.17, 0.01, 0.15, 0.19)) == "no clear difference"
    assert (
        captions.compared(Estimate(0.53, 0.001, 0.528, 0.532), Estimate(0.5, 0.001, 0.498, 0.502)) == "1.06 × as many"
    )
    assert captions.compared(Estimate(0.01, 0.001, 0.008, 0.012), Estimate(0.5, 0.01, 0.48, 0.52)) == "far fewer"
    none = Estimate(0.0, 0.0, 0.0, 0.002)
    assert captions.compared(high, none) == "far more"
    assert captions.compared(none, none) == "no clear difference"


def test_claims_are_those_of_the_scorecard() -> None:
    rows = json.loads((Path(__file__).parents[2] / "docs" / "scorecard.json").read_text(encoding="utf8"))["claims"]
    known = {row["key"]: {name: row[name] for name in ("claim", "verdict", "number")} for row in rows}
    assert {key: known[key] for key in captions.CLAIMS} == captions.CLAIMS
    assert {"holds", "holds in part", "does not hold"} == {claim["verdict"] for claim in captions.CLAIMS.values()}


def test_probe_is_described_by_its_numbers() -> None:
    """At x halfway between two points of a triple both have half of the weight, and the ellipse is α Δ/2."""
    state = State(t=0.02)
    process, t = state.make_process(), torch.tensor(0.02, dtype=torch.float64)
    alpha, var = float(process.alpha(t)), float(process.S(t))
    found = probe.evaluate(state, [alpha / 2])
    assert found.weights == pytest.approx([0.5, 0.5])
    assert sorted(found.which) == [1, 2]
    assert found.mean == pytest.approx([0.0], abs=1e-9)
    assert found.ellipse == pytest.approx(np.array([[alpha / 2]]), abs=1e-9) or found.ellipse == pytest.approx(
        -alpha / 2
    )
    assert found.noise == pytest.approx(alpha**2 / (4 * var))
    assert sorted(set(np.round(found.targets[:, 0], 6))) == pytest.approx([-alpha / 2, alpha / 2], abs=1e-6)
    text = captions.probed(found, state)
    assert "50 % from point 2, 50 % from point 3" in text[0]
    assert "different training points" in text[1]
    assert "nearly all point to one place" in captions.probed(probe.evaluate(state, [0.0]), state)[1]
    twice = State(points=((0.0,), (0.0,), (1.0,)), t=0.02)  # equal points: equal targets
    assert "nearly all point to one place" in captions.probed(probe.evaluate(twice, [0.0]), twice)[1]
    plane = State(points=CLUSTERS, t=0.1)
    found = probe.evaluate(plane, [0.3, -0.2])
    score = vk.EmpiricalScore(compute.empirical(plane), plane.make_process())
    C = score.covariance(torch.tensor([[0.3, -0.2]], dtype=torch.float64), 0.1).dense()[0].numpy()
    var = float(plane.make_process().S(torch.tensor(0.1, dtype=torch.float64)))
    assert found.ellipse.T @ found.ellipse == pytest.approx(var**2 * C, abs=1e-9)
    assert found.share == pytest.approx(found.noise / (found.noise + found.signal))
    for bad in ([0.0], [0.0, math.nan], [9.0, 0.0]):
        with pytest.raises(InputError):
            probe.evaluate(plane, bad)


@pytest.mark.parametrize("name", POINTS)
def test_presets_are_sets_and_have_addresses(name: str) -> None:
    state = State(points=POINTS[name])
    assert 2 <= len(set(state.points)) == len(state.points) <= 64
    assert from_query(state.to_query())[0] == state


def test_every_control_and_layer_has_a_sentence_and_a_field() -> None:
    default = State()
    for name, control in CONTROLS.items():
        assert control["help"].endswith(".")
        assert control["help"].count(". ") == 0
        for value, caption in control["options"]:
            assert caption
            assert vars(default.replace(**{name: value}))[name] == (math.inf if value == "inf" else value)
    assert {layer["name"] for layer in CONTENT["layers"]} == set(LAYERS)
    assert all(layer["help"].endswith(".") for layer in CONTENT["layers"])


def test_tour_and_factors_are_complete() -> None:
    steps = captions.tour()
    assert 6 <= len(steps) <= 10
    for step in steps:
        words = " ".join(step["text"]) if isinstance(step["text"], list) else step["text"]
        assert len(words.split()) <= (160 if step is steps[-1] else 90)
        assert "{" not in words.replace("{−1, 0, 1}", "") + step["answer"]
        assert 5 <= step["seconds"] <= 20
        assert step["view"] in ("field", "outcome")
        fields = {k: v for k, v in step["state"].items() if k not in ("version", "d")}
        assert State(**fields) in shipped.states() or compute.key(State(**fields)) in shipped._entries()["about"]
    assert all(step["action"] and step["question"].endswith("?") and step["answer"] for step in steps[:-1])
    assert isinstance(steps[-1]["text"], list)
    found = captions.factors()
    assert len(found) == 6
    for factor in found:
        assert factor["question"].endswith("?")
        a, b = (shipped.find(State(**CONTENT["factors"][found.index(factor)][side]["state"])) for side in "ab")
        assert a is not None
        assert b is not None
        assert captions.percent(a.gap) in factor["text"]
        assert captions.percent(b.gap) in factor["text"]
        assert captions.compared(b.gap, a.gap) in factor["text"]
        assert captions.clear(a.gap, b.gap)  # a factor that shows nothing would teach nothing


def test_tour_begins_where_the_claim_holds_and_ends_where_it_does_not() -> None:
    for name, holds in (
        ("Is it the noise of the target?", True),
        ("Where target noise makes no clear difference", False),
    ):
        step = next(step for step in CONTENT["tour"] if step["title"] == name)
        run = shipped.find(State(**step["state"]))
        assert run is not None
        assert run.gap is not None
        assert run.twin is not None
        assert captions.clear(run.gap, run.twin) == holds
        assert not holds or run.gap.value > run.twin.value
    # what the texts say beside their numbers
    (quarter, _), (_, moved) = (
        [shipped.named("factors", k, side) for side in "ab"]
        for k in ([f["name"] for f in CONTENT["factors"]].index(name) for name in ("capacity", "set"))
    )
    assert not captions.clear(quarter.gap, quarter.twin)
    assert not captions.clear(moved.gap, moved.twin)
    run, average = shipped.named("tour", 4), shipped.named("tour", 6)
    assert np.median(run.member_gaps) < average.gap.value < run.gap.value
