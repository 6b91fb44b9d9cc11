"""Generalization against the truth: distances by their definitions, stored sets by their seed, texts by the arrays."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from exhibits import Made, words

import vkernel as vk
from vkernel.core import rng
from vkernel.core.estimate import Estimate
from vkernel.reproduce import generalization
from vkernel.reproduce.exhibit import Run, number


def against_uniform(points: np.ndarray, power: int) -> float:
    """∫ |F_n - F|^power dx over [-1, 1], F of the uniform law: W₁ at power 1, half the energy distance at 2."""
    x = (np.arange(20_000) + 0.5) / 10_000 - 1
    steps = np.searchsorted(np.sort(points.ravel()), x, side="right") / points.size
    return 2 * float((np.abs(steps - (x + 1) / 2) ** power).mean())


def test_distances_of_training_sets_are_integrals_of_distribution_functions(made: Made) -> None:
    saved = made.arrays["generalization"]
    for points, w1, energy in zip(saved["sets"], saved["w1_train"], saved["energy_train"], strict=True):
        assert w1 == pytest.approx(against_uniform(points, 1), abs=0.03)  # 64 quantiles, 4,000 draws
        assert energy == pytest.approx(2 * against_uniform(points, 2), abs=0.01)


def test_the_average_is_no_farther_than_single_models(made: Made) -> None:
    """The spread is a squared norm: this holds in every set, whatever was found."""
    saved = made.arrays["generalization"]
    assert (saved["energy_pooled"] <= saved["energy_single"].mean(-1) + 1e-12).all()
    held = generalization.read()
    assert (held["energy_pooled"] <= held["energy_single"] + 1e-3).all()  # independent starts, estimates without bias


def test_a_model_of_c_is_the_one_that_is_trained_with_c(tmp_path: Path) -> None:
    """Samples from interpolated weights are those of models that were trained with ``vk.JC(c)``."""
    run = Run(tmp_path, 0, True, print)
    sizes, points = run.sizes("generalization"), vk.data.population("uniform", 8, 0)
    found = generalization.sample(run, sizes, 4.0, 5, points)
    process = vk.VP(eps=sizes.eps)
    features = vk.features.grid("gaussian", sizes.per_axis, 1, process=process)
    model = vk.models.Linear(features, "x0", sizes.ridge)
    how = {"members": sizes.models, "draws": features.count // 4, "seed": run.key("generalization/models", 5)}
    trained = vk.train_ensemble(model, points, process, objective=vk.JC(0.5), **how)
    x = trained.sample(x_T=rng.quasi_normals(sizes.samples, 1, 0), steps=sizes.steps)
    at = sizes.factors.index(0.5)
    assert float((found[at] - x).abs().median()) < 1e-3  # denoisers are read from a table
    assert float((found[at + 1] - x).abs().median()) > 1e-2


def test_stored_sets_are_those_of_the_seed() -> None:
    held = generalization.read()
    for about, energy in zip(held["about"], held["energy_train"], strict=True):
        case = json.loads(str(about))
        if case["population"] != "line":
            continue
        for s in range(case["sets"]):
            points = vk.data.population("uniform", case["n"], rng.stream(case["seed"], "generalization/line", s))
            assert energy[s] == pytest.approx(2 * against_uniform(points.numpy(), 2), abs=0.01)


def test_stored_distances_are_complete() -> None:
    held = generalization.read()
    cases = [json.loads(str(about)) for about in held["about"]]
    assert len({case["name"] for case in cases}) == len(cases)
    shape = len(cases), len(cases[0]["factors"]), cases[0]["sets"]
    for key in (f"{kind}_{part}" for kind in generalization.KINDS for part in (*generalization.PARTS, "better")):
        assert held[key].shape == shape
        assert np.isfinite(held[key]).all()
    assert len(generalization.STORED.read_bytes()) < 200_000


def test_the_page_says_what_the_arrays_say(made: Made) -> None:
    saved, page = made.arrays["generalization"], made.exhibits["generalization"]
    at = saved["features_over_draws"].tolist().index(1.0)
    zero, one = (saved["c"].tolist().index(c) for c in (0.0, 1.0))
    single, pooled = saved["w1_single"][at].mean(-1), saved["w1_pooled"][at]
    ratios = [number(float(x[one].mean() / x[zero].mean())) for x in (single, pooled)]
    assert page.finding is not None
    assert page.finding.number == f"{ratios[0]} and {ratios[1]} times"
    claims = {claim.key: claim for claim in page.claims}
    for key, values in (("one_model", single), ("average_over_trainings", pooled)):
        change = Estimate[float].of_mean(torch.from_numpy(values[one] - values[zero]))
        assert f"{change.value:+.3f} ({change.low:+.3f} to {change.high:+.3f})" in claims[key].number
    for key, part in (("one_model", "single"), ("average_over_trainings", "pooled")):
        below, above = [], []
        for kind in generalization.KINDS:
            own = saved[f"{kind}_{part}"]
            rows = [*(own.mean(-1) if part == "single" else own), *saved[f"stored_{kind}_{part}"].astype(float)]
            found = [Estimate[float].of_mean(torch.from_numpy(row[one] - row[zero])) for row in rows]
            below += [e.high < 0 for e in found]
            above += [e.low > 0 for e in found]
        expected = "holds" if all(below) else "holds in part" if any(below) else "does not hold"
        assert claims[key].verdict == (expected if any(below + above) else "undecided")
    assert "stored run" in words(page)
    assert "convex" in words(page)
