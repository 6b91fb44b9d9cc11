"""The state of the page survives its address; invalid states, addresses and files are refused with a sentence."""

from __future__ import annotations

import math
import string

import pytest
from hypothesis import given, settings, strategies as st

from vkernel.core.errors import InputError
from vkernel.explore.state import CHOICES, HEXAGON, LAYERS, LIMIT, SAMPLERS, State, from_csv, from_query

coordinate = st.floats(-LIMIT, LIMIT)
sets = st.integers(1, 2).flatmap(lambda d: st.lists(st.tuples(*[coordinate] * d), min_size=1, max_size=40))


@st.composite
def states(draw: st.DrawFn) -> State:
    points = tuple(draw(sets))
    return State(
        points=points,
        weights=tuple(draw(st.lists(st.integers(1, 63), min_size=len(points), max_size=len(points)))),
        process=draw(st.sampled_from(CHOICES["process"])),
        eps=draw(st.sampled_from((1e-4, 0.003, 0.1))),
        steps=draw(st.integers(5, 300)),
        sampler=draw(st.sampled_from(SAMPLERS)),
        kappa=draw(st.sampled_from((0.0, 0.003, 1.0))),
        features=draw(st.sampled_from(("gaussian", "fourier"))),
        ratio=draw(st.sampled_from((0.25, 1.0, 8.0))),
        tau=draw(st.sampled_from((0.0, 10.0, math.inf))),
        K=draw(st.integers(0, 64)),
        t=draw(st.sampled_from((0.0, 0.1, 0.375, 0.9, 5.0))),
        h=draw(st.sampled_from((0.05, 0.2, 1.0))),
        k=draw(st.integers(1, 9)),
        at=draw(st.sampled_from((0.1, 1.0, 10.0))),
        map=draw(st.sampled_from(CHOICES["map"])),
        layers=tuple(draw(st.sets(st.sampled_from(LAYERS)))),
        compare=draw(st.booleans()),
        seed=draw(st.integers(0, 9999)),
        dark=draw(st.booleans()),
    )


@settings(max_examples=150, deadline=None)
@given(states())
def test_address_restores_the_state(state: State) -> None:
    again, message = from_query("?" + state.to_query())
    assert message is None
    assert again == state


@settings(max_examples=200, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(
            ("v", "x", "w", "eps", "t", "K", "steps", "layers", "process", "sampler", "tau", "map", "k", "zz")
        ),
        st.text(string.printable, max_size=30),
    )
)
def test_malformed_address_gives_the_default_and_a_sentence(query: dict[str, str]) -> None:
    state, message = from_query(query)
    if message is not None:
        assert state == State()
        assert message.startswith("This address could not be read")


@pytest.mark.parametrize(
    ("query", "word"),
    [
        ("v=9", "version"),
        ("v=1&x=2AAA", "garbled"),
        ("v=1&x=2" + "AAAA" * 1001, "points"),
        ("v=1&eps=nan", "eps"),
        ("v=1&eps=-1", "eps"),
        ("v=1&tau=nan", "tau"),
        ("v=1&t=inf", "t"),
        ("v=1&K=1.5", "whole"),
        ("v=1&sampler=magic", "magic"),
        ("v=1&layers=99", "layers"),
        ("v=1&w=!", "weights"),
        ("v=1&w=BB", "weights"),
        ("v=1&x=2____", "between"),
    ],
)
def test_error_of_an_address_is_named(query: str, word: str) -> None:
    state, message = from_query(query)
    if query == "v=1&t=inf":  # a time beyond T is T
        assert state.t == state.make_process().T
        return
    assert state == State()
    assert message is not None
    assert word in message


def test_addresses_of_version_1_are_read() -> None:
    """They left out the hexagon at t = .1 with the exact score; maps were layers, and showed shares."""
    state, message = from_query("v=1")
    assert message is None
    assert (state.points, state.sampler, state.t, state.map) == (HEXAGON, "exact", 0.1, "share")
    assert state.layers == ("particles", "law", "exact")
    state, message = from_query("v=1&x=1Pou4&sampler=linear&K=0&layers=1246&dark=1")
    assert message is None
    assert state.points == ((-1.0,), (1.0,))
    assert (state.sampler, state.K, state.map, state.dark) == ("linear", 0, "variance_share", True)
    assert state.layers == ("arrows", "particles", "members")
    assert from_query("v=1&layers=45")[0].map == "none"
    assert from_query(state.to_query())[0] == state


def test_address_of_a_thousand_points_is_short() -> None:
    points = tuple((round(-2 + 0.004 * k, 3), round(2 - 0.003 * k, 3)) for k in range(1000))
    query = State(points=points).to_query()
    assert len(query) < 4100
    assert from_query(query)[0].points == points
    with pytest.raises(InputError, match="1,000"):
        State(points=(*points, (0.0, 0.0)))


@pytest.mark.parametrize(
    "given",
    [
        {"points": ()},
        {"points": ((math.nan, 0.0),)},
        {"points": ((math.inf, 0.0),)},
        {"points": ((3.0, 0.0),)},
        {"points": ((0.0, 0.0), (1.0,))},
        {"points": (("a", "b"),)},
        {"weights": (1, 2)},
        {"weights": (0,) * 3},
        {"weights": (64,) * 3},
        {"layers": ("particles", "nope")},
        {"map": "noise of all"},
        {"h": 0},
        {"k": 0},
        {"process": "ddpm"},
        {"kappa": -1},
        {"tau": math.nan},
        {"steps": 2.5},
        {"K": "many"},
    ],
)
def test_invalid_states_are_refused(given: dict[str, object]) -> None:
    with pytest.raises(InputError):
        State(**given)  # type: ignore[arg-type]


def test_times_are_clamped_to_the_process() -> None:
    assert State(t=0.0).t == State().eps
    assert State(process="edm", t=99.0).t == 10.0
    assert State(process="edm", t=5.0).replace(process="flow").t == 0.999


def test_points_that_remain_keep_their_weights() -> None:
    state = State(points=((0.0,), (1.0,)), weights=(3, 1))
    assert state.replace(points=((0.5,), (1.0,))).weights == (3, 1)
    assert state.replace(points=((0.5,),)).weights == (1,)
    assert state.replace(points=((0.0,),)).weights == (3,)
    assert state.replace(points=((0.5,), (1.0,), (2.0,))).weights == (3, 1, 1)


def test_csv_accepts_headers_weights_separators_and_one_column() -> None:
    assert from_csv("x,y\n0,1\n-1,.5\n")[0] == ((0.0, 1.0), (-1.0, 0.5))
    points, weights, _ = from_csv("a;b;weight\n0;1;3\n1;0;1\n")
    assert points == ((0.0, 1.0), (1.0, 0.0))
    assert weights == (3, 1)
    assert from_csv("0.5\n\n-0.5\n")[0] == ((0.5,), (-0.5,))
    assert from_csv("1\t2\n0\t0\n")[0] == ((1.0, 2.0), (0.0, 0.0))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.floats(-1e6, 1e6), st.floats(-1e6, 1e6)), min_size=1, max_size=20))
def test_csv_points_are_scaled_alike_into_the_window(rows: list[tuple[float, float]]) -> None:
    points, _, sentence = from_csv("\n".join(f"{a!r},{b!r}" for a, b in rows))
    State(points=points)
    if "scaled" in sentence and len(rows) > 2:
        i, j, k = rows[0], rows[1], rows[-1]
        a, b, c = points[0], points[1], points[-1]
        before, after = math.dist(i, j) * math.dist(a, c), math.dist(i, k) * math.dist(a, b)
        assert before == pytest.approx(after, rel=1e-6, abs=1e-9 * (1 + math.dist(i, j) + math.dist(i, k)))


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "empty"),
        ("x,y\n", "no row"),
        ("0,1\n2\n", "columns"),
        ("0,nan\n", "finite"),
        ("0,1\n0,nan\n", "Row 2"),
        ("0,1\n0,inf\n", "finite"),
        ("0,1\n0,one\n", "finite number"),
        ("0,1,2\n", "3 columns"),
        ("x,y,weight\n0,1,0\n", "weight"),
        ("x,y,weight\n0,1,1.5\n", "whole"),
        ("0,1\n" * 1001, "1,001"),
        ("0,1\n" * (1 << 19), "MB"),
        ("\0\0\0", "not a text"),
        ("0,1e300\n1,0\n", "below"),
    ],
)
def test_error_of_a_csv_is_named(text: str, word: str) -> None:
    with pytest.raises(InputError, match=word):
        from_csv(text)
