"""The texts of the page: every number has its error, and a copied script gives the same numbers."""

from __future__ import annotations

import contextlib
import io
import math
from typing import Any

import numpy as np
import pytest

from vkernel.core.estimate import Estimate
from vkernel.explore import captions, compute
from vkernel.explore.captions import POINTS, TOUR
from vkernel.explore.state import CONTENT, CONTROLS, LAYERS, SAMPLERS, State, from_query

TRIPLE, CLUSTERS = POINTS["triple"], POINTS["clusters"]


@pytest.mark.parametrize("points", [TRIPLE, CLUSTERS], ids=["line", "plane"])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_snippet_gives_the_numbers_of_the_page(sampler: str, points: Any, small: None) -> None:
    K = {"effective": 4, "ntk": 0}.get(sampler, 1)
    state = State(
        points=points, weights=(2,) + (1,) * (len(points) - 1), sampler=sampler, eps=0.01, steps=12, seed=3, K=K, t=0.2
    )
    result = compute.simulate(state)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    with contextlib.redirect_stdout(io.StringIO()) as output:
        exec(compile(captions.snippet(state), "snippet", "exec"), namespace)
    assert result.gap is not None
    assert namespace["gap"] == pytest.approx(result.gap.value, abs=1e-12)
    fraction = compute.exact(state).fraction
    assert namespace["fraction"].reshape(fraction.shape).numpy() == pytest.approx(fraction, abs=1e-6)
    assert namespace["noise"] == compute.noise_share(state)
    assert "gap mass" in output.getvalue()
    assert result.frames.shape[0] == 13
    assert result.frames.shape[2] == state.d
    assert np.isfinite(result.frames).all()
    assert result.law.shape == (compute.BINS[state.d],) * state.d
    assert (result.twin is None) == (sampler == "exact" or (K == 0 and sampler not in ("exact", "naive")))
    sentences = captions.panel(state, compute.noise_share(state), result)["sentences"]
    assert all(s.endswith(".") for s in sentences)
    share = compute.variance(result, state.t)
    assert (share is None) == (sampler in ("exact", "naive"))
    if share is not None:
        assert np.isfinite(share).all()
        assert share.min() >= 0
        assert share.max() <= 1


def test_sentences_carry_errors_and_claim_no_more_than_they_allow() -> None:
    def sentence(gap: Estimate, twin: Estimate | None, sampler: str = "linear", K: int = 1) -> str:
        none = np.zeros(1)
        state = State(sampler=sampler, K=K)
        result = compute.Result(state, none, none, none, none, none, (), gap, twin, gap)
        return captions.panel(state, gap, result)["sentences"][0]

    half = Estimate(0.18, 0.01, 0.16, 0.2), Estimate(0.09, 0.01, 0.07, 0.11)
    assert captions.short(half[0]) == ".18 ± .01"
    assert sentence(*half).startswith("82 ± 1 % of the samples are copies; ")
    assert "2 × the noiseless-target value, .09 ± .01" in sentence(*half)
    assert "within errors of" in sentence(half[0], Estimate(0.17, 0.01, 0.15, 0.19))
    assert "far less than" in sentence(Estimate(0.01, 0.001, 0.008, 0.012), Estimate(0.5, 0.01, 0.48, 0.52))
    assert "1.06 ×" in sentence(Estimate(0.53, 0.001, 0.528, 0.532), Estimate(0.5, 0.001, 0.498, 0.502))
    assert "no noise" in sentence(half[0], None, K=0)
    assert captions.short(Estimate(0.0, 0.0, 0.0, 0.002)) == "less than .002"
    assert captions.short(Estimate.exact(0.25)) == ".25"
    assert captions.short(Estimate(1.0, 0.0, 0.99, 1.0)) == "1.00"
    none = Estimate(0.0, 0.0, 0.0, 0.002)
    assert "more than that of the exact score" in sentence(half[0], none, sampler="naive")
    assert "less than 0.1 % of" in sentence(Estimate(1.0, 0.0, 0.9995, 1.0), half[1])
    assert captions.panel(State(), Estimate.exact(0.5), None)["number"] == "…"


def test_data_of_an_earlier_state_is_named(small: None) -> None:
    state = State(points=TRIPLE, sampler="linear", steps=8, layers=LAYERS)
    found = compute.simulate(state)
    assert captions.outdated(state, found, (found, state.t)) == (False, False, "")
    assert captions.outdated(state.replace(t=0.3), found, (found, state.t)) == (False, True, "of an earlier state: V")
    moved = state.replace(points=((-1.0,), (0.1,), (1.0,)))
    assert captions.outdated(moved, found, (found, state.t)) == (
        True,
        True,
        "of an earlier state: V, particles, curves",
    )
    assert captions.outdated(moved.replace(layers=()), found, None) == (True, False, "")
    assert captions.outdated(state, None, None) == (False, False, "V follows once the run has ended")


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


def test_tour_has_five_short_stops() -> None:
    assert len(TOUR) == 5
    for _, text, state in TOUR:
        assert len(text.split()) <= 60
        assert from_query(state.to_query())[0] == state
