"""Study files: what they say, and how mistakes in them are named."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
from studies import PLANE, SMALL, grid, inf, refused, with_

from vkernel import InputError
from vkernel.study import work
from vkernel.study.spec import LARGEST, TABLES, Spec, read


@pytest.mark.parametrize("table", [t for t in TABLES if t != "process"])
def test_a_key_that_is_not_there(table: str) -> None:
    said = refused(with_(**{table: {"nope": 1}}), f"{table}.nope", "there is no such key; there are")
    known = {"data": "even", "model": "ridge", "training": "F_over_P", "objective": "K", "measure": "away"}
    assert known.get(table, "samples") in said


def test_more_keys_that_are_not_there() -> None:
    refused(SMALL | {"nope": 1}, "nope", "no such key", "members")
    refused(SMALL | {"figure": {"x": "K", "nope": 1}}, "figure.nope", "lines")
    refused(SMALL | {"finding": {"of": {}, "to": {}, "words": "", "nope": 1}}, "finding.nope", "words")
    refused(SMALL | {"grid": {"objective.K": {"values": [1], "nope": 2}}}, "grid.objective.K.nope", "labels")
    refused(with_(process={"nope": 1}), "process", "nope")
    refused(with_(process={"kind": "nope"}), "process", "nope", "vp")
    said = refused({"title": "t", "data": {"even": 2}}, "members", "more")
    assert "required" in said


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"members": "many"}, ["members", "integer", "'many'"]),
        ({"members": 0}, ["members", "greater than or equal to 1", "0"]),
        ({"block": -1}, ["block", "-1"]),
        ({"title": 5}, ["title", "string"]),
        ({"device": "tpu"}, ["device", "cpu", "tpu"]),
        ({"data": 3}, ["data", "table"]),
        ({"model": [1]}, ["model", "table"]),
        ({"grid": 3}, ["grid"]),
        ({"grid": {"objective.K": 3}}, ["grid.objective.K.values", "list"]),
        ({"grid": {"objective.K": []}}, ["grid.objective.K.values", "at least 1"]),
        ({"data": {}}, ["data", "exactly one of name, path, points, even and population", "none"]),
        ({"data": {"name": "pair", "even": 3}}, ["data", "exactly one", "name, even"]),
        ({"data": {"population": "circle"}}, ["data", "n, the number of its draws"]),
        ({"data": {"population": "sphere", "n": 3}}, ["data.population", "'uniform'"]),
        ({"data": {"name": "pair", "set": 3}}, ["data.set", "population"]),
        ({"data": {"name": "nope"}}, ["nope", "hexagon"]),
        ({"data": {"path": "/nowhere/points.npy"}}, ["/nowhere/points.npy"]),
        ({"data": {"points": [[1.0], [2.0, 3.0]]}}, ["points"]),
        ({"data": {"points": [1.0, 2.0], "weights": [1.0]}}, ["weight"]),
        ({"data": {"name": "pair", "rotation": 3.0}}, ["rotation", "square"]),
        ({"model": {"kind": "nope"}}, ["model.kind", "linear", "nope"]),
        ({"model": {"ridge": -1}}, ["model.ridge", "-1"]),
        ({"model": {"low": 2.0, "high": 1.0}}, ["low"]),
        ({"model": {"low": math.nan}}, ["low"]),
        ({"sampler": {"method": "nope"}}, ["sampler.method", "heun"]),
        ({"sampler": {"law": "field", "sets": 2}}, ["sampler.sets"]),
        ({"measure": {"away": 1.5}}, ["measure.away", "less than 1"]),
        ({"measure": {"gap": [1.0]}}, ["measure.gap"]),
        ({"training": {"draws": 4, "vary": ["nope"]}}, ["training.vary", "nope"]),
        ({"training": {"draws": 10, "F_over_P": 1.0}}, ["training", "draws or F_over_P, not both"]),
        ({"training": {}}, ["training", "give draws", "F_over_P"]),
        ({"training": {"F_over_P": 1.0}, "model": {"kind": "lazy"}}, ["training.F_over_P", "linear", "draws"]),
        ({"sampler": {"law": "field"}, "model": {"kind": "lazy"}}, ["sampler.law", "linear"]),
        ({"objective": {"K": 3, "of": "subset"}}, ["objective.K", "3", "2"]),
        ({"objective": {"K": 3, "c": 2.0}}, ["objective", "K or c, not both"]),
        ({"objective": {"c": math.inf}}, ["objective.c", "finite"]),
    ],
)
def test_wrong_values(given: dict[str, Any], words: list[str]) -> None:
    refused(SMALL | given, *words)


@pytest.mark.parametrize("K", [0, 2.5, -1, -inf, math.nan, "many"])
def test_a_wrong_K(K: Any) -> None:
    refused(with_(objective={"K": K}), "objective", "K")


def test_K_from_one_to_inf() -> None:
    for K in (1, 2.0, 7, inf):
        assert read(with_(objective={"K": K})).objective.K == K


def test_factors_that_cannot_be() -> None:
    refused(grid(nope__K=[1]), "grid", "'nope.K'", "objective")
    said = refused(grid(model__wdith=[1, 2]), "wdith = 1", "model.wdith", "no such key", "per_axis")
    assert "width" not in said  # keys of linear models alone
    refused(with_(model={"kind": "mlp", "wdith": 1, "per_axis": 16}), "model.wdith", "there are kind, target", "width")
    refused(grid(model__ridge=[1, 2], data__name=["pair", "nope"]), "ridge = 1, name = nope", "no toy set")
    two = {"values": [1, 2], "name": "K"}
    refused(grid(objective__K=[1, 2], model__ridge=two), "two factors", "K")
    refused(
        SMALL
        | {"grid": [{"field": "objective.K", "values": [1]}, {"field": "objective.K", "values": [2], "name": "L"}]},
        "twice",
    )
    for name in ("member", "x", "time", "block", "done", "density"):
        refused(grid(objective__K={"values": [1], "name": name}), name, "another name")
    refused(grid(measure__away=[0.3, 0.5]), "away", "another name")
    for name in ("a/b", ".a", "__a"):
        refused(grid(objective__K={"values": [1], "name": name}), repr(name), "plain name")
    refused(grid(objective__K={"values": [1, 2], "labels": ["a"]}), "grid.objective.K", "2 values but 1 labels")
    refused(grid(objective__K={"values": [1, 2], "labels": ["a", "a"]}), "K has a value twice")
    refused(grid(objective__K=[1, 1.0]), "K has a value twice")
    refused(grid(measure__bins=[3, 4]), "measure.bins", "whole store")
    refused(grid(objective=[1, 2]), "objective is a table", "objective.FIELD")


def test_what_fails_in_one_cell_names_it() -> None:
    refused(grid(objective__K=[1, 2.5]), "K = 2.5", "whole number")
    refused(grid(process__eps=[1e-3, 7.0]), "eps = 7", "process")
    spec = with_(measure={"times": [0.005], "places": 2}) | {"grid": {"process.eps": [1e-3, 1e-2]}}
    refused(spec, "eps = 0.01", "0.005")
    spec = SMALL | {"grid": {"objective.of": ["draws", "subset"], "objective.K": [1, 5]}}
    refused(spec, "of = subset, K = 5", "needs as many")
    spec = SMALL | {"grid": {"model.kind": ["linear", "lazy"], "sampler.law": ["members", "field"]}}
    refused(spec, "sampler.law", "linear")


def test_sizes_that_do_not_fit() -> None:
    refused(grid(data__name=["pair", "square"]), "events of one shape", "(1,)", "(2,)")
    refused(SMALL | {"measure": {"gap": [0.7, 0.2]}}, "measure", "low < high", "[0.7, 0.2]")
    refused(SMALL | {"data": {"points": [[1.0, 2.0], [1.0]]}}, "data", "coordinates", "[1, 2]")
    assert "list[" not in refused(SMALL | {"data": {"points": ["a"]}}, "data.points.0")
    refused(PLANE | {"measure": {"gap": [0.1, 0.2]}}, "measure.gap", "one dimension", "2", "measure.away")
    refused(PLANE | {"measure": {"times": [0.5], "places": 3}}, "one dimension")
    for t in (0.0, 1e-9, 2.0):
        refused(with_(measure={"times": [t], "places": 3}), "t")


def test_figures_and_findings_are_checked_before_the_first_block() -> None:
    base = grid(objective__K=[1, inf])
    refused(base | {"figure": {"x": "nope"}}, "'nope'", "K")
    refused(base | {"figure": {"x": "K", "value": "nope"}}, "figure.value", "away", "nope")
    refused(base | {"figure": {"x": "K", "value": "density"}}, "figure.value", "density")
    said = {"words": "w", "of": {"K": 1}, "to": {"K": inf}}
    refused(base | {"finding": said | {"value": "gap"}}, "finding.value", "gap")
    refused(base | {"finding": said | {"of": {"L": 1}}}, "'L'")
    refused(base | {"finding": said | {"of": {"K": 3}}}, "finding", "K has no value 3", "inf")
    refused(base | {"finding": said | {"kind": "nope"}}, "finding.kind", "ratio")
    work.prepare(read(base | {"finding": said, "figure": {"x": "K"}}))


def test_files_that_are_no_study(tmp_path: Path) -> None:
    refused(tmp_path / "missing.toml", "missing.toml", "cannot be read", "No such file")
    refused(tmp_path, str(tmp_path), "cannot be read")
    bad = tmp_path / "bad.toml"
    bad.write_text("title = \nmembers")
    refused(bad, "bad.toml", "not TOML", "line 1")
    for raw in (b"\xff\xfe\x00", b"title = '\0'", "title = 'ä'".encode("latin1"), b"seed = " + b"9" * 5000):
        bad.write_bytes(raw)
        refused(bad, "not TOML")
    for opening in (b"a = " + b"[" * 9000, b"a." * 9000 + b"b = 1", b"a = " + b"[" * 40 + b"]" * 40):
        bad.write_bytes(opening)
        refused(bad, "nested too deeply")
    bad.write_bytes(b"#" * (LARGEST + 1))
    refused(bad, "larger than 16 MB")
    os.mkfifo(tmp_path / "pipe")
    refused(tmp_path / "pipe", "not a regular file")
    refused(tmp_path / "a\0b", "zero byte")
    refused(tmp_path / ("n" * 300), "File name too long")
    bad.write_bytes(
        b"\xef\xbb\xbf" + b'title = "t"\r\nmembers = 3\r\nblock = 1\r\ndata.even = 2\r\ntraining.draws = 2\r\n'
    )
    assert read(bad).title == "t", "as editors of Windows save it"
    bad.write_text('title = "t"\nmembers = 3\ndata.even = 2')
    refused(bad, "bad.toml", "block")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"seed": 2**63}, ["seed", "too large"]),
        ({"members": 10**400}, ["members", "too large"]),
        ({"members": 10**9}, ["members", "at most 100,000,000"]),
        ({"members": 10**7}, ["5,000,000 blocks", "at most 1,000,000"]),
        ({"grid": {"model.ridge": [10**400, 1]}}, ["grid.model.ridge.0", "too large"]),
        ({"grid": {"model.ridge": [math.nan, 1]}}, ["grid.model.ridge.0", "nan"]),
        ({"grid": {"model.ridge": {"values": [1], "name": "a\nb"}}}, ["cannot be a name"]),
        ({"grid": {"model.ridge": {"values": [1], "name": "zarr.json"}}}, ["cannot be a name"]),
        ({"grid": {"model.ridge": {"values": [1], "name": "\ud800"}}}, ["cannot be a name"]),
        ({"process": {"eps": math.nan}}, ["process.eps", "nan"]),
        ({"process": {"eps": 10**400}}, ["process.eps", "too large"]),
        ({"model": {"per_axis": 4, "length": math.inf}}, ["model.length", "finite"]),
        ({"measure": {"limit": math.inf}}, ["measure.limit", "finite"]),
        ({"measure": {"gap": [math.nan, 1]}}, ["measure.gap.0", "nan"]),
        ({"measure": {3: 4}}, ["measure", "a key must be text", "3"]),
        ({"objective": {"K": 1e300}}, ["K", "100,000,000"]),
    ],
)
@pytest.mark.parametrize("large", [False, True])
def test_numbers_that_are_none(given: dict[str, Any], words: list[str], large: bool) -> None:
    """They are refused when the file is read, in ``[large]`` too."""
    with pytest.raises(InputError) as error:
        read(SMALL | {"large": given} if large else SMALL | given)
    assert all(word in str(error.value) for word in words), error.value
    assert len(str(error.value)) < 400


def test_a_file(tmp_path: Path) -> None:
    file = tmp_path / "study.toml"
    file.write_text("""
title = "t"
members = 7
block = 3
[data]
even = 5
[training]
F_over_P = 2.0
[grid]
objective.K = [1, 4, inf]
"process.eps" = { values = [1e-3, 1e-2], name = "floor", unit = "s^0" }
[large]
members = 70
sampler.steps = 500
[large.grid]
objective.K = [1, 2, 4, inf]
"process.eps" = [1e-4, 1e-3, 1e-2]
""")
    small, large = read(file), read(file, large=True)
    assert [f.dim for f in small.grid] == ["K", "floor"]
    assert small.shape == (3, 2)
    assert small.blocks == 3
    assert [list(small.members_of(b)) for b in range(3)] == [[0, 1, 2], [3, 4, 5], [6]]
    assert large.members == 70
    assert large.block == 3
    assert large.sampler.steps == 500
    assert large.sampler.samples == small.sampler.samples
    assert large.shape == (4, 3)
    assert [f.dim for f in large.grid] == ["K", "floor"], "a factor keeps its name"
    assert large.grid[1].unit == "s^0"
    cells = list(small.conditions())
    assert [c.index for c in cells] == [(i, j) for i in range(3) for j in range(2)]
    assert math.isinf(cells[5].objective.K)
    assert cells[5].process.model_dump() == {"kind": "vp", "eps": 1e-2}
    assert repr(cells[5]) == "K = inf, floor = 0.01"


def test_large() -> None:
    refused(SMALL, "no [large] table", "without --large", large=True)
    refused(SMALL | {"large": 3}, "large", "table", large=True)
    for large in (False, True):  # mistakes do not wait for --large
        refused(SMALL | {"large": {"sampler": {"nope": 3}}}, "with [large]", "sampler.nope", large=large)
        refused(SMALL | {"large": {"nope": 3}}, "nope", large=large)
        refused(SMALL | {"large": {"model": {"width": 8}}}, "with [large]", "model.width", large=large)
        refused(SMALL | {"large": {"measure": {"places": 3}}}, "with [large]", "give both", large=large)
        refused(SMALL | {"large": {"data": {"name": "none"}}}, "with [large]", "no toy set", large=large)
        refused(SMALL | {"large": {"sampler": 3}}, "sampler", large=large)
        refused(SMALL | {"large": {"grid": {"objective.K": [1, 2.5]}}}, "K = 2.5", large=large)
    given = grid(objective__K=[1, 2], model__ridge=[0.1, 0.2]) | {"large": {"grid": {"objective.K": [1, 2, 3]}}}
    before = json.dumps(given)
    found = read(given, large=True)
    assert found.shape == (3, 2), "the other factor stays"
    assert json.dumps(given) == before, "what was given is not changed"
    assert read(SMALL | {"large": {"model": {"ridge": 0.5}}}, large=True).model.per_axis == 4


def test_keys_of_another_kind_of_model() -> None:
    refused(with_(model={"width": 8}), "model.width", "kind linear", "Remove it")
    refused(SMALL | {"model": {"kind": "mlp", "tau": 3.0, "ridge": 1.0}}, "model.ridge, model.tau", "kind mlp")
    refused(grid(model__tau=[1.0, 2.0]), "model.tau")
    tables = [{"kind": "mlp", "width": 8}, {"kind": "lazy", "width": 8}]
    factor = {"grid": {"model": {"values": tables, "labels": ["a", "b"]}}}
    refused(SMALL | {"model": {}} | factor, "model.width", "kind lazy")
    # a key that one of the kinds has is of use
    read(with_(model={"tau": 3.0}) | {"grid": {"model.kind": ["linear", "lazy"]}})
    spec = read(SMALL)
    assert read(json.loads(spec.to_json())) == spec, "defaults written out change nothing"


def test_there_and_back() -> None:
    spec = read(
        with_(measure={"gap": [0.2, 0.8]})
        | {"model": {"kind": "lazy", "tau": inf}}
        | {"grid": {"objective.K": [1, inf], "training.vary": [["inputs"], ["targets"]]}}
        | {"finding": {"value": "gap", "of": {"K": 1}, "to": {"K": inf}, "words": "w"}}
    )
    again = Spec(**json.loads(spec.to_json()))
    assert again == spec
    assert again.to_json() == spec.to_json()
    assert [c.labels for c in again.conditions()] == [c.labels for c in spec.conditions()]
    assert read(spec) is spec


def test_a_study_read_back_makes_the_same_models() -> None:
    """Two studies of one text are one study: defaults do not depend on what was said in so many words."""
    for kind, name in (("mlp", "silu"), ("lazy", "relu")):
        spec = read(SMALL | {"model": {"kind": kind, "depth": 3}})
        again = Spec(**json.loads(spec.to_json()))
        for one in (spec, again):
            made = work.Experiment(one, next(one.conditions())).model
            assert name in json.dumps(made.spec)


# A block
