"""Studies: what a file may say, what a block computes, and what is made of the results."""

from __future__ import annotations

import csv
import io
import json
import math
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from scipy import stats

import vkernel as vk
from vkernel import InputError, features, models, study
from vkernel.data import toy
from vkernel.ensemble import train_ensemble
from vkernel.objective import J0, JK
from vkernel.study import live, report, work
from vkernel.study.export import export
from vkernel.study.spec import TABLES, Spec, read
from vkernel.study.store import Store

inf = math.inf
SMALL: dict[str, Any] = {
    "title": "small",
    "members": 5,
    "block": 2,
    "data": {"name": "pair"},
    "model": {"per_axis": 4},
    "training": {"draws": 64},
    "sampler": {"samples": 16, "steps": 8},
}
PLANE = SMALL | {"data": {"name": "square"}, "model": {"per_axis": 3}}


def with_(**tables: Any) -> dict[str, Any]:
    """SMALL with fields of its tables put in."""
    merged = {k: {**SMALL.get(k, {}), **v} if isinstance(v, dict) and k != "grid" else v for k, v in tables.items()}
    return SMALL | merged


def refused(spec: Any, *words: str, large: bool = False) -> str:
    """One sentence, with these words in it, before anything is computed."""
    with pytest.raises(InputError) as error:
        work.prepare(read(spec, large=large))
    said = str(error.value)
    for word in words:
        assert word in said, said
    assert "\n" not in said
    return said


# The file


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
    said = refused({"title": "t"}, "members", "more")
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
        ({"data": {}}, ["data", "exactly one of name, path, points and even", "none"]),
        ({"data": {"name": "pair", "even": 3}}, ["data", "exactly one", "name, even"]),
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


def grid(**factors: Any) -> dict[str, Any]:
    return SMALL | {"grid": {k.replace("__", "."): v for k, v in factors.items()}}


def test_factors_that_cannot_be() -> None:
    refused(grid(nope__K=[1]), "grid", "'nope.K'", "objective")
    refused(grid(model__wdith=[1, 2]), "wdith = 1", "model.wdith", "no such key", "width")
    refused(grid(model__depth=[1, 2], data__name=["pair", "nope"]), "depth = 1, name = nope", "no toy set")
    two = {"values": [1, 2], "name": "K"}
    refused(grid(objective__K=[1, 2], model__depth=two), "two factors", "K")
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
    bad.write_bytes(b"\xff\xfe\x00")
    refused(bad, "not TOML")
    bad.write_text('title = "t"\nmembers = 3')
    refused(bad, "bad.toml", "block")


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
    refused(SMALL | {"large": {"sampler": {"nope": 3}}}, "sampler.nope", large=True)
    refused(SMALL | {"large": {"nope": 3}}, "nope", large=True)
    refused(SMALL | {"large": {"sampler": 3}}, "sampler", large=True)
    given = grid(objective__K=[1, 2], model__ridge=[0.1, 0.2]) | {"large": {"grid": {"objective.K": [1, 2, 3]}}}
    before = json.dumps(given)
    found = read(given, large=True)
    assert found.shape == (3, 2), "the other factor stays"
    assert json.dumps(given) == before, "what was given is not changed"
    assert read(SMALL | {"large": {"model": {"ridge": 0.5}}}, large=True).model.per_axis == 4


def test_there_and_back() -> None:
    spec = read(
        with_(measure={"gap": [0.2, 0.8]}, model={"kind": "lazy", "tau": inf})
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
        spec = read(with_(model={"kind": kind, "width": 4, "steps": 2}))
        again = Spec(**json.loads(spec.to_json()))
        for one in (spec, again):
            condition = next(one.conditions())
            made = work.make_model(condition, work.make_data(condition), vk.VP())
            assert name in json.dumps(made.spec)


# A block


def block(spec: Any, number: int = 0, cell: int = 0) -> dict[str, np.ndarray]:
    found = read(spec)
    return work.compute(found, list(found.conditions())[cell], number)


def test_a_block_is_a_function_of_its_index() -> None:
    spec = with_(measure={"gap": [0.25, 0.75], "times": [0.1], "places": 3})
    torch.manual_seed(1)
    first = block(spec, 1)
    torch.manual_seed(2)
    second = block(spec, 1)
    threads = torch.get_num_threads()
    for name, value in first.items():
        assert np.array_equal(value, second[name]), name
    whole = block(spec | {"block": 5})
    for name, value in first.items():
        assert np.allclose(value, whole[name][2:4], rtol=1e-10, atol=1e-12), name
    assert len(block(spec, 2)["away"]) == 1, "the last block is what is left"
    assert torch.get_num_threads() == threads
    assert not np.array_equal(first["nearest"], block(spec | {"seed": 1}, 1)["nearest"])


def start(process: Any, n: int) -> torch.Tensor:
    u = (np.arange(n) + 0.5) / n
    return torch.from_numpy(stats.norm.ppf(u) * float(process.sigma(torch.tensor(process.T).double())))[:, None]


@pytest.mark.parametrize("K", [1, 3, inf])
def test_the_numbers_of_a_block_by_a_second_route(K: float) -> None:
    """Train and sample by hand, and count with NumPy alone."""
    spec = with_(
        data={"name": "triple"},
        objective={"K": K},
        process={"eps": 2e-3},
        measure={"gap": [0.2, 0.7], "away": 0.3, "bins": 9, "limit": 1.3, "times": [0.05, 0.6], "places": 4},
        sampler={"samples": 50, "steps": 20, "method": "heun"},
    )
    got = block(spec, 1)
    process, data = vk.VP(eps=2e-3), toy("triple")
    model = models.Linear(features.grid("gaussian", 4, 1, -1.5, 1.5, process), "x0", 0.1)
    goal = J0() if inf == K else JK(int(K))
    trained = train_ensemble(model, data, process, members=[2, 3], draws=64, objective=goal, show=False)
    x = trained.sample(x_T=start(process, 50), steps=20, method="heun", spacing="log", show=False)[..., 0].numpy()
    alpha = float(process.alpha(torch.tensor(2e-3).double()))
    points = alpha * data.rows(0, data.n).double().numpy()[:, 0]
    distance = np.abs(x[:, :, None] - points)
    least = min(abs(a - b) for i, a in enumerate(points) for b in points[:i])
    assert np.allclose(got["nearest"], distance.min(2).mean(1))
    assert np.allclose(got["away"], (distance.min(2) > 0.3 * least / 2).mean(1))
    assert np.allclose(got["gap"], ((np.abs(x) > 0.2) & (np.abs(x) < 0.7)).mean(1))
    shares = [[(row == k).mean() for k in range(3)] for row in distance.argmin(2)]
    assert np.allclose(got["share"], shares)
    counts = [np.histogram(row, 9, (-1.3, 1.3))[0] for row in x]
    assert np.allclose(got["density"], np.array(counts) / 50 / (2.6 / 9))
    places = torch.linspace(-1.3, 1.3, 4, dtype=torch.float64)[:, None]
    for k, t in enumerate((0.05, 0.6)):
        assert np.allclose(got["score"][:, k], trained(places, t)[..., 0])


def test_two_dimensions_by_a_second_route() -> None:
    spec = PLANE | {"measure": {"bins": 6, "limit": 1.2}, "sampler": {"samples": 64, "steps": 10}}
    found = read(spec)
    got = block(spec)
    quantities = work.layout(found)
    assert list(quantities["density"].coordinates) == ["y", "x"]
    process, data = vk.VP(), toy("square")
    model = models.Linear(features.grid("gaussian", 3, 2, -1.5, 1.5, process), "x0", 0.1)
    trained = train_ensemble(model, data, process, members=[0, 1], draws=64, show=False)
    x_T = work._start(process, data, 64, 0)
    assert float(x_T.mean().abs()) < 0.1
    x = trained.sample(x_T=x_T, steps=10, method="exponential", spacing="log", show=False).numpy()
    for m in range(2):
        counts, _, _ = np.histogram2d(x[m, :, 1], x[m, :, 0], 6, [(-1.2, 1.2)] * 2)
        assert np.allclose(got["density"][m], counts / 64 / 0.4**2)
    assert np.allclose(got["share"].sum(1), 1)


def test_F_over_P_and_weights_and_paths(tmp_path: Path) -> None:
    spec = read(with_(training={"draws": None, "F_over_P": 0.5}))
    condition = next(spec.conditions())
    model = work.make_model(condition, work.make_data(condition), vk.VP())
    assert work._draws(condition, model) == 32
    np.save(tmp_path / "p.npy", np.array([-1.0, 1.0]))
    base = {k: v for k, v in SMALL.items() if k != "data"}
    for data in ({"path": str(tmp_path / "p.npy")}, {"points": [-1.0, 1.0]}, {"even": 2}):
        got = block(base | {"data": data})
        assert np.allclose(got["nearest"], block(base | {"data": {"points": [[-1.0], [1.0]]}})["nearest"])
    heavy = block(base | {"data": {"points": [-1.0, 1.0], "weights": [0.95, 0.05]}})
    assert (heavy["share"][:, 0] > 0.7).all()


def test_sets_of_unequal_size_and_many_points() -> None:
    spec = grid(data__even=[2, 4]) | {"data": {"points": [0.0]}}
    refused(spec, "even = 2", "exactly one")
    spec = SMALL | {"data": {"even": 3}, "grid": {"data.even": [2, 4]}}
    got = block(spec, cell=0)
    assert got["share"].shape == (2, 4)
    assert np.isnan(got["share"][:, 2:]).all()
    assert np.allclose(got["share"][:, :2].sum(1), 1)
    assert "share" not in block(SMALL | {"data": {"even": 65}})
    single = block(SMALL | {"data": {"points": [0.5]}})
    assert np.isfinite(single["away"]).all()


@pytest.mark.parametrize(
    "model",
    [
        {"kind": "linear", "features": "fourier", "per_axis": 3},
        {"kind": "linear", "features": "polynomial", "per_axis": 3, "target": "score"},
        {"kind": "linear", "features": "random", "per_axis": 4, "target": "noise"},
        {"kind": "lazy", "kernel": "ntk", "depth": 1},
        {"kind": "lazy", "kernel": "nngp", "depth": 2, "activation": "erf", "tau": 10.0},
        {"kind": "lazy", "kernel": "rbf", "length": 0.4, "init": False},
        {"kind": "mlp", "width": 8, "depth": 1, "steps": 20, "batch": 16},
        {"kind": "mlp", "width": 8, "depth": 2, "steps": 20, "activation": "tanh", "draws": 0},
    ],
)
def test_every_kind_of_model_runs(model: dict[str, Any]) -> None:
    fresh = model.pop("draws", None) is not None
    spec = SMALL | {"model": model} | ({"training": {}} if fresh else {})
    work.prepare(read(spec))
    got = block(spec, 1)
    for value in got.values():
        assert len(value) == 2
        assert np.isfinite(value).all()
    assert not np.array_equal(got["nearest"][0], got["nearest"][1])
    assert np.array_equal(got["nearest"], block(spec, 1)["nearest"])


@pytest.mark.parametrize(
    "process",
    [{"kind": k} for k in ("vp", "vpsong", "cosine", "ve", "edm", "flow", "toy")] + [{"kind": "vp", "T": 2.0}],
)
def test_every_process_runs(process: dict[str, Any]) -> None:
    got = block(SMALL | {"process": process})
    assert np.isfinite(got["away"]).all()


@pytest.mark.parametrize("method", ["exponential", "dopri5"])
def test_the_field_with_the_predicted_V(method: str) -> None:
    """Members of the Gaussian theory scatter as trained ones do."""
    base = with_(
        training={"draws": 200},
        sampler={"samples": 32, "steps": 12, "sets": 32, "method": method},
        measure={"times": [0.3], "places": 3, "limit": 1.0},
    ) | {"members": 60 if method == "exponential" else 4, "block": 60}
    field = block(with_sampler(base, law="field"))
    again = block(with_sampler(base, law="field") | {"block": 2}, 1)
    for name in field:
        assert np.allclose(field[name][2:4], again[name], rtol=1e-8, atol=1e-8), "whatever the block"
    if method == "exponential":
        members, flow = block(base), block(with_sampler(base, law="semiclassical"))
        for found in (field, flow):
            gap = abs(found["nearest"].mean() - members["nearest"].mean())
            assert gap < 6 * members["nearest"].std() / math.sqrt(60) + 0.02
            assert np.allclose(found["score"].mean(0), members["score"].mean(0), atol=0.35)
            ratio = found["score"].std(0) / members["score"].std(0)
            assert (ratio > 0.5).all()
            assert (ratio < 2.0).all()
        assert np.array_equal(field["score"], flow["score"]), "one law of fields, two ways to sample it"


def with_sampler(spec: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return spec | {"sampler": spec["sampler"] | fields}


def test_theory_takes_what_varies_into_account() -> None:
    spec = with_sampler(with_(measure={"times": [0.3], "places": 3}), law="field", sets=16) | {"block": 5}
    some = block(spec | {"training": {"draws": 64, "vary": ["targets"]}})["score"].std(0)
    every = block(spec)["score"].std(0)
    assert (some < every).all()


@pytest.mark.parametrize("lr", [1e12, 3e37])
def test_members_that_diverge_are_nan(tmp_path: Path, lr: float) -> None:
    """Even where a whole block did: the study goes on."""
    spec = SMALL | {
        "model": {"kind": "mlp", "width": 8, "steps": 30, "batch": 8, "target": "score"},
        "grid": {"model.lr": [1e-3, lr]},
        "measure": {"times": [0.5], "places": 2},
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        ds = study.run(spec, tmp_path / "s", show=False)
    assert bool(ds["done"].all())
    lost = np.isnan(ds["away"].values)
    assert not lost[0].any()
    for name in ("nearest", "share", "density"):
        gone = np.isnan(ds[name].values).reshape(2, 5, -1)
        assert np.array_equal(gone.all(2), lost)
        assert np.array_equal(gone.any(2), lost)


def test_a_block_that_diverged_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    original = models.Linear.fit

    def fit(self: Any, *args: Any) -> Any:
        return {k: a * math.nan for k, a in original(self, *args).items()}

    monkeypatch.setattr(models.Linear, "fit", fit)
    got = block(with_(measure={"gap": [0.1, 0.2], "times": [0.5], "places": 2}))
    assert set(got) == {"away", "nearest", "share", "gap", "density", "score"}
    for name, value in got.items():
        assert np.isnan(value).all(), name


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_here() -> None:
    with pytest.raises(InputError, match="device: there is no CUDA device"):
        block(SMALL | {"device": "cuda"})
    assert np.array_equal(block(SMALL | {"device": "auto"})["away"], block(SMALL)["away"])


# What is made of it


def filled(tmp_path: Path, values: np.ndarray, **extra: Any) -> xr.Dataset:
    """A store of K = 1, inf and eps = 1e-3, 1e-2 with given numbers, ``(2, 2, members)``."""
    spec = read(
        SMALL
        | {"members": values.shape[-1], "block": values.shape[-1]}
        | {"grid": {"objective.K": [1, inf], "process.eps": [1e-3, 1e-2]}}
        | extra
    )
    with Store.open(tmp_path / "filled", spec) as store:
        for condition in spec.conditions():
            row = values[condition.index]
            rest = {n: np.zeros((len(row), *q.shape)) for n, q in work.layout(spec).items()}
            store.write(condition, 0, rest | {"away": row})
        return store.dataset()


RATIO = {"value": "away", "of": {"K": 1, "eps": 1e-3}, "to": {"K": inf, "eps": 1e-3}, "words": "more"}


def test_the_finding_by_hand(tmp_path: Path) -> None:
    source = np.random.default_rng(0)
    shared = source.uniform(0.3, 0.5, 12)
    values = source.uniform(0.1, 0.9, (2, 2, 12))
    values[0, 0], values[1, 0] = shared + source.normal(0.2, 0.01, 12), shared
    values[0, 0, 3] = values[1, 0, 5] = np.nan  # neither counts
    whole = np.isfinite(values[0, 0]) & np.isfinite(values[1, 0])
    a, b = values[0, 0, whole], values[1, 0, whole]
    q = stats.t.ppf(0.975, 9)
    found = report.finding(filled(tmp_path / "ratio", values, finding=RATIO))
    assert found is not None
    terms = a / a.mean() - b / b.mean()
    se = terms.std(ddof=1) / math.sqrt(10)
    assert math.isclose(found.value, a.mean() / b.mean())
    assert math.isclose(found.se, found.value * se)
    assert np.allclose([found.low, found.high], found.value * np.exp([-q * se, q * se]), rtol=1e-3)
    ds = filled(tmp_path / "difference", values, finding=RATIO | {"kind": "difference"})
    found = report.finding(ds)
    assert found is not None
    test = stats.ttest_rel(a, b).confidence_interval(0.95)
    assert math.isclose(found.value, (a - b).mean())
    assert np.allclose([found.low, found.high], [test.low, test.high], rtol=1e-3)
    assert "the interval lies above 0" in report.sentence(ds)
    assert report.sentence(ds).startswith("more: 0.2")


def test_a_finding_averages_over_factors_it_does_not_name(tmp_path: Path) -> None:
    values = np.random.default_rng(1).uniform(0.1, 0.9, (2, 2, 6))
    values[0, 1, 2] = np.nan  # a member that is not there in one cell is not half there
    named = RATIO | {"of": {"K": 1}, "to": {"K": inf}, "kind": "difference"}
    ds = filled(tmp_path, values, finding=named)
    found = report.finding(ds)
    assert found is not None
    pairs = np.delete(values, 2, axis=2).mean(1)
    assert math.isclose(found.value, float((pairs[0] - pairs[1]).mean()))
    test = stats.ttest_rel(*pairs).confidence_interval(0.95)
    assert np.allclose([found.low, found.high], [test.low, test.high], rtol=3e-3)


def test_findings_that_are_not_known(tmp_path: Path) -> None:
    assert report.finding(filled(tmp_path / "a", np.ones((2, 2, 3)))) is None
    assert report.sentence(filled(tmp_path / "a", np.ones((2, 2, 3)))) == ""
    zero = filled(tmp_path / "b", np.zeros((2, 2, 3)), finding=RATIO)
    assert "not known yet, or a share is zero" in report.sentence(zero)
    nothing = filled(tmp_path / "c", np.full((2, 2, 3), np.nan), finding=RATIO)
    assert report.finding(nothing) is None
    equal = filled(tmp_path / "d", np.full((2, 2, 3), 0.5), finding=RATIO)
    assert "holds 1: no difference is shown" in report.sentence(equal)


def test_means_with_members_that_are_nan(tmp_path: Path) -> None:
    values = np.random.default_rng(2).uniform(size=(2, 2, 7))
    values[0, 1, 2:4] = np.nan
    values[1, 0, 1:] = np.nan  # one is left
    values[1, 1] = np.nan
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = report.means(filled(tmp_path, values))
    assert found["away_members"].values.tolist() == [[7, 5], [1, 0]]
    for i, j in ((0, 0), (0, 1)):
        row = values[i, j][np.isfinite(values[i, j])]
        test = stats.ttest_1samp(row, 0).confidence_interval(0.95)
        assert math.isclose(float(found["away"][i, j]), row.mean())
        assert math.isclose(float(found["away_se"][i, j]), stats.sem(row))
        ends = [float(found["away_low"][i, j]), float(found["away_high"][i, j])]
        assert np.allclose(ends, [test.low, test.high], atol=1e-3), "its own number of members, not the least"
    assert math.isclose(float(found["away"][1, 0]), values[1, 0, 0])
    assert np.isnan(found["away_se"][1, 0])
    assert np.isnan(found["away"][1, 1])
    assert found["away"].attrs["long_name"]
    assert found["density"].dims == ("K", "eps", "x")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("small") / "store"
    spec = SMALL | {
        "grid": {"objective.K": [1, 4, inf], "process.eps": [1e-3, 1e-2]},
        "measure": {"gap": [0.25, 0.75]},
        "figure": {"x": "K", "lines": "eps", "value": "gap"},
        "finding": RATIO | {"value": "nearest"},
    }
    study.run(spec, path, show=False)
    return path


@pytest.mark.parametrize(
    "wanted",
    [
        None,
        {"x": "K"},
        {"x": "eps", "lines": "K", "log": True, "title": "the title"},
        {"x": "K", "y": "eps"},
        {"x": "eps", "y": "K", "value": "gap"},
    ],
)
def test_figures(small: Path, wanted: dict[str, Any] | None) -> None:
    ds = study.load(small).load()
    spec = json.loads(ds.attrs["vkernel_study"])
    figure = report.figure(ds.assign_attrs(vkernel_study=json.dumps(spec | {"figure": wanted})))
    out = io.BytesIO()
    figure.savefig(out)
    assert len(out.getvalue()) > 5000
    if wanted and "title" in wanted:
        assert figure.axes[0].get_title() == "the title"
    if wanted and "y" in wanted:
        assert len(figure.axes) == 2, "a map with its bar"


def test_a_figure_of_nothing_yet_and_of_no_factors(tmp_path: Path) -> None:
    with Store.open(tmp_path / "a", read(grid(objective__K=[1, 2]))) as opened:
        ds = opened.dataset()
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        report.figure(ds).savefig(io.BytesIO())
        report.table(ds)
    with pytest.raises(InputError, match="without factors"):
        report.figure(study.run(SMALL, tmp_path / "b", show=False))


def test_a_store_whose_study_cannot_be_read(small: Path) -> None:
    ds = study.load(small)
    for text in ("what?", "{}", json.dumps(json.loads(ds.attrs["vkernel_study"]) | {"nope": 1})):
        with pytest.raises(InputError, match="cannot be read"):
            report.spec_of(ds.assign_attrs(vkernel_study=text))


def test_exports_are_read_back_equal(small: Path, tmp_path: Path) -> None:
    ds = study.load(small).load()
    rows = list(csv.DictReader(io.StringIO(export(small, tmp_path / "s.csv").read_text())))
    assert len(rows) == 30
    assert set(rows[0]) == {"K", "eps", "member", "away", "nearest", "gap"}
    for row in rows:
        cell = ds.sel(K=float(row["K"]), eps=float(row["eps"]), member=int(row["member"]))
        for name in ("away", "nearest", "gap"):
            assert float(row[name]) == float(cell[name])
    with pytest.raises(InputError, match=r"\.nc or \.csv"):
        export(small, tmp_path / "s.xls")
    with pytest.raises(InputError, match="no store"):
        export(tmp_path / "nothing", tmp_path / "s.csv")
    pytest.importorskip("h5netcdf", reason="NetCDF needs h5netcdf: pip install 'vkernel[study]'")
    found = xr.open_dataset(export(small, tmp_path / "deep" / "s.nc"), engine="h5netcdf").load()
    assert set(found.variables) == set(ds.variables)
    for name in ds.variables:
        assert np.array_equal(found[name].values, ds[name].values, equal_nan=ds[name].dtype.kind == "f"), name
        assert found[name].attrs == ds[name].attrs
    assert found.attrs["vkernel_study"] == ds.attrs["vkernel_study"]


# How far it is


def test_the_live_table() -> None:
    from rich.console import Console

    spec = read(grid(objective__K=list(range(1, 41))))
    done = np.zeros((40, 3), dtype=bool)
    done[0] = True
    done[1, 2] = True  # the short block alone
    table = live.Table(spec, done, show=False)
    cells = list(spec.conditions())
    table.advance(cells[1], 0)
    console = Console(record=True, force_terminal=True, width=120, file=io.StringIO())
    console.print(table.render())
    said = console.export_text()
    assert "small: 5 of 120 blocks" in said
    assert "members a second" in said
    assert "left" in said
    assert "5/5" in said
    assert "3/5" in said, "one block of two and the short one"
    assert said.count("/5") == live.ROWS
    table.advance(cells[39], 0)
    console.print(table.render())
    assert "40" in console.export_text()
    assert [live._duration(s) for s in (5, 600, 7200)] == ["5 s", "10 min", "2.0 h"]


def test_plain_lines(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(live, "EVERY", 0.0)
    study.run(grid(objective__K=[1, inf]), tmp_path / "s")
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 6
    assert lines[0].startswith("K = 1: 1 of 6 blocks, ")
    assert lines[-1].startswith("K = inf: 6 of 6 blocks, ")
    study.run(grid(objective__K=[1, inf]), tmp_path / "quiet", show=False)
    assert capsys.readouterr().err == ""
    spec = read(SMALL)
    with live.Table(spec, np.array([True, False, False])):
        pass
    assert "1 of 3 blocks are there already" in capsys.readouterr().err


def test_wrong_runners(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="inline, ray"):
        study.run(SMALL, tmp_path / "s", "nope")
    with pytest.raises(InputError, match="address is for the runner 'ray'"):
        study.run(SMALL, tmp_path / "s", address="auto")
    assert not (tmp_path / "s").exists()


# The command line


def vkernel(*args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "vkernel.cli", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_the_command_line(tmp_path: Path) -> None:
    file, path = tmp_path / "study.toml", tmp_path / "store"
    file.write_text("""
title = "Noise of the target"
members = 4
block = 3
data.name = "pair"
model.per_axis = 4
training.draws = 64
sampler = { samples = 16, steps = 8 }
grid.objective.K = [1, inf]
figure = { x = "K" }
finding = { value = "nearest", of = { K = 1 }, to = { K = inf }, words = "farther" }
""")
    got = vkernel("study", "run", file, "--store", path)
    assert got.returncode == 0, got.stderr
    assert "Noise of the target" in got.stdout
    assert "farther: " in got.stdout
    assert got.stdout.endswith(f"results are in {path}\n") or "results are in" in got.stdout
    assert got.stderr == ""
    got = vkernel("study", "run", file, "--store", path, "--quiet")
    assert got.stdout.split() == f"results are in {path}".split()
    assert got.stderr == ""


def called(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *args: object) -> tuple[int, str, str]:
    """The command line, in this process."""
    from vkernel import cli

    monkeypatch.setattr(sys, "argv", ["vkernel", *map(str, args)])
    with pytest.raises(SystemExit) as left:
        cli.main()
    got = capsys.readouterr()
    return int(left.value.code or 0), got.out, got.err


def test_status_show_plot_export(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def call(*args: object) -> str:
        code, out, err = called(capsys, monkeypatch, "study", *args)
        assert (code, err) == (0, "")
        return out

    status = call("status", small)
    assert "small: 18 of 18 blocks of 2 members" in status
    assert "K = inf, eps = 0.01: 5 of 5 members" in status
    shown = call("show", small)
    assert "±" in shown
    assert "more: " in shown
    for name in ("a.png", "b.svg", "deep/c.pdf"):
        assert "wrote" in call("plot", small, "--out", tmp_path / name)
        assert (tmp_path / name).stat().st_size > 1000
    assert "wrote" in call("export", small, "--out", tmp_path / "s.csv")
    with Store.open(tmp_path / "part", read(SMALL)) as store:
        only = next(iter(store.spec.conditions()))
        store.write(only, 2, work.compute(store.spec, only, 2))  # the short one first, as a cluster may
    assert "1 of 3 blocks" in call("status", tmp_path / "part")
    assert "the one condition: 1 of 5 members" in call("status", tmp_path / "part")
    call("show", tmp_path / "part")


def test_the_command_line_refuses_in_one_sentence(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*args: object) -> str:
        code, out, err = called(capsys, monkeypatch, "study", *args)
        assert code == 2, err
        assert out == ""
        assert len(err.strip().splitlines()) == 1, err
        assert err.startswith("vkernel: ")
        return err

    bad = tmp_path / "bad.toml"
    bad.write_text('title = "t"\nmembers = 3\nblock = 2\n[data]\nnmae = "pair"')
    assert "data.nmae" in refuses("run", bad, "--store", tmp_path / "s")
    assert "missing.toml" in refuses("run", tmp_path / "missing.toml", "--store", tmp_path / "s")
    bad.write_text('title = "t"\nmembers = 3\nblock = 2\n[data]\nname = "pair"\n[training]\ndraws = 9')
    assert "inline, ray" in refuses("run", bad, "--store", tmp_path / "s", "--runner", "nope")
    assert "another study" in refuses("run", bad, "--store", small)
    assert "store" in refuses("run", bad)
    assert "no [large] table" in refuses("run", bad, "--store", tmp_path / "s", "--large")
    for command in ("status", "show"):
        assert "no store at" in refuses(command, tmp_path / "nothing")
        assert "not a store" in refuses(command, bad)
    refuses("plot", small, "--out", tmp_path / "a.xyz")
    refuses("plot", tmp_path / "nothing")
    assert ".csv" in refuses("export", small, "--out", tmp_path / "a.xyz")
    assert not (tmp_path / "s").exists()
