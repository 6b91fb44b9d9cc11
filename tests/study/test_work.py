"""One block of a study: its numbers by a second route."""

from __future__ import annotations

import math
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from studies import PLANE, SMALL, grid, inf, refused, with_

import vkernel as vk
from vkernel import InputError, study
from vkernel.data import toy
from vkernel.study import work
from vkernel.study.spec import read
from vkernel.train import features, models
from vkernel.train.ensemble import train_ensemble
from vkernel.train.objectives import J0, JK


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


def test_sets_of_a_population_depend_on_the_seed_and_their_index_alone() -> None:
    drawn = {"data": {"population": "uniform", "n": 5, "set": 3}}
    spec = with_(measure={"keep": 8}, sampler={"samples": 8}) | drawn
    other = with_(model={"per_axis": 5}, objective={"c": 2.0}) | drawn

    def points(given: Any) -> torch.Tensor:
        found = read(given)
        return work.Experiment(found, next(iter(found.conditions()))).data[:]

    assert torch.equal(points(spec), points(other))
    assert points(spec).shape == (5, 1)
    assert not torch.equal(points(spec), points(spec | {"data": spec["data"] | {"set": 4}}))
    assert not torch.equal(points(spec), points(spec | {"seed": 1}))
    assert torch.equal(points(spec), vk.data.population("uniform", 5, vk.core.rng.stream(0, "study/set", 3)))
    # the same cell of a grid over sets, and models that do not share their randomness between sets
    whole = spec | {"grid": {"data.set": [2, 3]}}
    assert np.array_equal(block(whole, cell=1)["sample"], block(spec)["sample"])
    same = spec | {"data": {"points": points(spec).tolist()}}
    assert not np.allclose(block(same)["sample"], block(spec)["sample"])


@pytest.mark.parametrize(
    ("name", "mean", "covariance"),
    [
        ("uniform", [0], [[1 / 3]]),
        ("normal", [0], [[1]]),
        ("square", [0, 0], [[1 / 3, 0], [0, 1 / 3]]),
        ("circle", [0, 0], [[1 / 2, 0], [0, 1 / 2]]),
    ],
)
def test_moments_of_populations(name: str, mean: list[float], covariance: list[list[float]]) -> None:
    x = vk.data.population(name, 40_000, 0)
    assert np.allclose(x.mean(0), mean, atol=0.02)
    assert np.allclose(torch.cov(x.mT).reshape(len(mean), -1), covariance, atol=0.02)


def test_two_moons_are_two_half_circles() -> None:
    x = vk.data.population("two_moons", 2000, 0) * 1.5
    upper, lower = x - torch.tensor([-0.5, -0.25]), x - torch.tensor([0.5, 0.25])
    on = [(y.norm(dim=1) - 1).abs() < 1e-6 for y in (upper, lower)]
    assert bool((on[0] | on[1]).all())
    assert 900 < int((on[0] & (upper[:, 1] >= 0)).sum()) < 1100
    with pytest.raises(InputError, match="population"):
        vk.data.population("disk", 3)


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
    trained = train_ensemble(model, data, process, members=[2, 3], draws=64, objective=goal)
    x = trained.sample(x_T=start(process, 50), steps=20, method="heun", spacing="log")[..., 0].numpy()
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


def test_the_factor_of_the_noise() -> None:
    """c = 0 is J0 and c = 1 is J1."""
    spec = with_(measure={"times": [0.1], "places": 3}, sampler={"samples": 0})
    for c, K in ((0.0, inf), (1.0, 1)):
        one, other = (block(spec | {"objective": o})["score"] for o in ({"c": c}, {"K": K}))
        assert np.allclose(one, other, rtol=1e-9)
    assert not np.allclose(one, block(spec | {"objective": {"c": 3.0}})["score"], rtol=0.1)


def test_two_dimensions_by_a_second_route() -> None:
    spec = PLANE | {"measure": {"bins": 6, "limit": 1.2}, "sampler": {"samples": 64, "steps": 10}}
    found = read(spec)
    got = block(spec)
    quantities = work.layout(found)
    assert list(quantities["density"].coordinates) == ["y", "x"]
    process, data = vk.VP(), toy("square")
    model = models.Linear(features.grid("gaussian", 3, 2, -1.5, 1.5, process), "x0", 0.1)
    trained = train_ensemble(model, data, process, members=[0, 1], draws=64)
    x_T = work.Experiment(found, next(found.conditions())).start(64)
    assert float(x_T.mean().abs()) < 0.1
    x = trained.sample(x_T=x_T, steps=10, method="exponential", spacing="log").numpy()
    for m in range(2):
        counts, _, _ = np.histogram2d(x[m, :, 1], x[m, :, 0], 6, [(-1.2, 1.2)] * 2)
        assert np.allclose(got["density"][m], counts / 64 / 0.4**2)
    assert np.allclose(got["share"].sum(1), 1)


def test_F_over_P_and_weights_and_paths(tmp_path: Path) -> None:
    spec = read(with_(training={"draws": None, "F_over_P": 0.5}))
    condition = next(spec.conditions())
    assert work.Experiment(spec, condition).training["draws"] == 32
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
        ds = study.run(spec, tmp_path / "s", progress=False)
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
    monkeypatch.setattr(work, "_LAST", threading.local())
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


def test_the_exact_score_needs_no_model() -> None:
    """One law, whoever asks: all members are equal, and the ODE is that of the exact score."""
    base = {k: v for k, v in SMALL.items() if k not in ("model", "training")}
    spec = base | {
        "data": {"name": "triple"},
        "sampler": {"samples": 40, "steps": 30, "method": "euler", "spacing": "uniform", "law": "exact"},
        "measure": {"keep": 40, "times": [0.2], "places": 5},
    }
    got = block(spec)
    process, data = vk.VP(), toy("triple")
    score = vk.EmpiricalScore(data, process)
    x = vk.sample.pf_ode(score, start(process, 40), steps=30, method="euler", spacing="uniform")
    assert np.allclose(got["sample"], x[None].numpy(), rtol=1e-9, atol=1e-12)
    places = torch.linspace(-1.5, 1.5, 5, dtype=torch.float64)[:, None]
    assert np.allclose(got["score"][1, 0], score(places, 0.2)[:, 0])


@pytest.mark.parametrize("law", ["naive", "resampled"])
def test_the_noise_of_the_naive_estimator(law: str) -> None:
    """Each member has noise of its own, whatever the block; without noise it is Euler's ODE."""
    spec = with_(sampler={"samples": 64, "steps": 40, "law": law, "kappa": 0.1}, measure={"keep": 64})
    first, second = block(spec), block(spec | {"block": 1}, 1)
    assert np.allclose(first["sample"][1], second["sample"][0])
    assert not np.allclose(first["sample"][0], first["sample"][1])
    still = block(with_sampler(spec, kappa=0.0))["sample"]
    euler = block(with_sampler(spec, law="exact", kappa=None, method="euler"))["sample"]
    assert np.allclose(still, euler, atol=1e-6)
    refused(with_(sampler={"law": law}), "sampler.law", "needs sampler.kappa")
    refused(with_(sampler={"kappa": 0.1}), "sampler.kappa", "remove it")


def test_the_mean_score_of_trained_models() -> None:
    spec = with_(sampler={"samples": 20, "steps": 8, "law": "mean", "sets": 8}, measure={"keep": 20})
    got = block(spec)
    process, data = vk.VP(), toy("pair")
    model = models.Linear(features.grid("gaussian", 4, 1, -1.5, 1.5, process), "x0", 0.1)
    trained = train_ensemble(model, data, process, members=8, draws=64)
    x = vk.sample.pf_ode(trained.mean_score, start(process, 20), steps=8, method="exponential", spacing="log")
    assert np.allclose(got["sample"], x[None].numpy(), rtol=1e-8, atol=1e-10)


def test_a_look_up_table_is_the_flow_it_tabulates() -> None:
    spec = with_(sampler={"samples": 50, "steps": 20}, measure={"keep": 50})
    direct, looked = block(spec)["sample"], block(with_sampler(spec, lookup={"nodes": 4001}))["sample"]
    assert np.allclose(direct, looked, atol=2e-4)
    # the next node to the right: the denoiser is a step function, and the error of first order in the spacing
    errors = []
    for nodes in (201, 401, 801):
        looked = block(with_sampler(spec, lookup={"nodes": nodes, "limit": 4.0, "read": "right"}))["sample"]
        errors.append(np.abs(direct - looked).mean())
    assert errors[0] > 1.5 * errors[1] > 2.25 * errors[2]
    refused(PLANE | {"sampler": {"lookup": {}}}, "sampler.lookup", "one dimension", "2")
    refused(with_(sampler={"law": "semiclassical", "lookup": {}}), "sampler.lookup", "semiclassical")


def test_regions_by_a_second_route() -> None:
    regions = {
        "arcs": {"away": 0.25, "norm": [0.75, 1.25]},
        "sides": {"away": 0.25, "beside": 0.15},
        "centre": {"norm": [0.0, 0.5]},
        "corner": {"around": [1.0, 0.0], "within": 0.3},
    }
    spec = PLANE | {"measure": {"regions": regions, "keep": 64}, "sampler": {"samples": 64, "steps": 6}}
    spec |= {"training": {"draws": 20}, "process": {"eps": 0.05}}
    got = block(spec)
    x = got["sample"]
    process = vk.VP(eps=0.05)
    points = float(process.alpha(torch.tensor(process.eps).double())) * toy("square").rows(0, 4).double().numpy()
    away = np.linalg.norm(x[:, :, None] - points, axis=-1).min(2) > 0.25
    size = np.linalg.norm(x, axis=-1)
    assert np.allclose(got["arcs"], (away & (size > 0.75) & (size < 1.25)).mean(1))
    assert np.allclose(got["centre"], (size < 0.5).mean(1))
    assert np.allclose(got["corner"], (np.hypot(x[..., 0] - 1, x[..., 1]) < 0.3).mean(1))
    u = np.linspace(0, 1, 2001)[:, None]
    line = np.concatenate([(1 - u) * a + u * b for a, b in zip(points, np.roll(points, -1, 0), strict=True)])
    beside = np.array([[np.linalg.norm(line - p, axis=1).min() < 0.15 for p in row] for row in x])
    assert np.allclose(got["sides"], (away & beside).mean(1))
    assert all(0 < got[name].mean() < 1 for name in regions)
    refused(with_(measure={"regions": {"a": {}}}), "measure.regions.a", "needs a condition")
    refused(with_(measure={"regions": {"a": {"around": [0.0]}}}), "belong together")
    refused(with_(measure={"regions": {"a": {"around": [0.0, 1.0], "within": 1.0}}}), "around", "1 coordinates")
    refused(with_(measure={"regions": {"gap": {"away": 1.0}}}), "another name")
    refused(with_(measure={"regions": {"a": {"nope": 1.0}}}), "measure.regions.a.nope", "beside")


def test_scores_alone() -> None:
    """Without samples nothing of them is kept; the scores are the same."""
    spec = with_(measure={"times": [0.1, 0.4], "places": 7})
    both, alone = block(spec), block(with_sampler(spec, samples=0))
    assert set(alone) == {"score"}
    assert np.array_equal(alone["score"], both["score"])
    refused(with_(sampler={"samples": 0}), "sampler.samples", "measure.places")
    refused(with_(measure={"places": 3}), "places and times", "both")
    refused(with_(measure={"times": [0.3]}), "places and times", "both")
    refused(with_(measure={"keep": 17}), "measure.keep", "17", "16")


def test_conditions_that_differ_in_the_sampler_train_once(monkeypatch: pytest.MonkeyPatch) -> None:
    trained = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        trained.append(kwargs["members"])
        return train_ensemble(*args, **kwargs)

    monkeypatch.setattr(work, "train_ensemble", counted)
    monkeypatch.setattr(work, "_LAST", threading.local())
    spec = grid(
        objective__K=[1, inf], sampler={"values": [{"samples": 8, "steps": s} for s in (4, 8)], "labels": [4, 8]}
    )
    cells = list(read(spec).conditions())
    assert [c.sampler.steps for c in cells] == [4, 8, 4, 8]
    for cell in range(4):
        block(spec, cell=cell)
    assert trained == [[0, 1], [0, 1]]


def test_the_first_members_alone() -> None:
    """Members beyond ``first`` are NaN, whatever the block; the others are what they are without it."""
    spec = with_(measure={"keep": 4, "times": [0.3], "places": 3})
    some = with_sampler(spec, first=3)
    for number, kept in enumerate((2, 1, 0)):
        got, whole = block(some, number), block(spec, number)
        assert np.array_equal(got["score"], whole["score"])
        for name in ("away", "nearest", "sample"):
            assert np.allclose(got[name][:kept], whole[name][:kept], rtol=1e-9)
            assert np.isnan(got[name][kept:]).all()
    refused(with_(sampler={"first": 3, "law": "exact"}), "sampler.first", "law members")


def test_blocks_that_do_not_fit_into_memory(tmp_path: Path) -> None:
    many = {"members": 10**8, "block": 10**8}
    refused(with_(measure={"bins": 10**4}, **many), "block: a block of 100,000,000 members needs")
    found = study.run(SMALL | {"block": 10**8}, tmp_path / "store", progress=False)  # stored as one block of 5
    assert found["density"].encoding["chunks"][0] == 5
