"""Theories as models of a study: their laws in closed form, their limits, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import optimize, stats
from studies import SMALL, refused

import vkernel as vk
from vkernel import study
from vkernel.study import report
from vkernel.study.spec import Spec

BASE: dict[str, Any] = {
    "title": "theories",
    "members": 2,
    "block": 2,
    "data": {"name": "triple"},
    "model": {"kind": "exact"},
    "sampler": {"samples": 40, "steps": 30, "method": "heun"},
    "measure": {"keep": 40, "times": [0.1, 0.5], "places": 5},
}
POINTS = np.array([-1.0, 0.0, 1.0])


def models(*tables: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return (
        BASE | {"grid": {"model": {"values": list(tables), "labels": [str(i) for i in range(len(tables))]}}} | changes
    )


def test_samples_of_theories_are_quantiles_of_their_laws(tmp_path: Path) -> None:
    """A flow in one dimension keeps the order of samples, so that the i-th is the i-th quantile of the law at eps."""
    exact, gaussian = {"kind": "exact"}, {"kind": "gaussian"}
    switch = {"kind": "switch", "above": gaussian, "below": exact}
    ds = study.run(
        models(
            exact,
            {"kind": "smoothed", "h": 0.0},
            {"kind": "smoothed", "h": {"0.01": 0.0, "200": 0.0}},
            {"kind": "nearest", "k": 3},
            switch | {"at": 1e3},
            {"kind": "smoothed", "h": 0.3},
            gaussian,
            switch | {"at": 1e-4, "log_width": 0.1},
        ),
        tmp_path / "store",
        progress=False,
    )
    x, score = ds["sample"].values[..., 0], ds["score"].values
    assert np.array_equal(x[:, 0], x[:, 1])  # one score for all members
    for other in range(1, 5):
        assert np.allclose(x[other], x[0], atol=1e-6)
        assert np.allclose(score[other], score[0], atol=1e-6)
    assert np.allclose(x[7], x[6], atol=1e-6)
    process = vk.VP()
    alpha, sigma = (float(a(torch.tensor(process.eps).double())) for a in (process.alpha, process.sigma))
    u = (np.arange(40) + 0.5) / 40
    width = np.hypot(alpha * 0.3, sigma)
    assert np.allclose(np.sort(x[6, 0]), stats.norm.ppf(u) * np.hypot(alpha * POINTS.std(), sigma), atol=5e-3)

    def beyond(z: float, share: float) -> float:
        return float(stats.norm.cdf((z - alpha * POINTS) / width).mean() - share)

    quantiles = [optimize.brentq(beyond, -9, 9, args=(share,)) for share in u]
    assert np.allclose(np.sort(x[5, 0]), quantiles, atol=5e-3)


def test_theories_of_images_beside_trained_models(tmp_path: Path) -> None:
    images = torch.randn(6, 3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    np.save(tmp_path / "images.npy", images.numpy())
    spec = models(
        {"kind": "exact"}, {"kind": "local", "k": 5}, {"kind": "equivariant", "k": {"1.0": 5}},
        {"kind": "pca", "threshold": 0.0}, {"kind": "mlp", "width": 4, "steps": 2},
        data={"path": str(tmp_path / "images.npy")}, measure={"keep": 4}, sampler={"samples": 4, "steps": 4},
    )  # fmt: skip
    x = study.run(spec, tmp_path / "store", progress=False)["sample"].values
    assert np.allclose(x[1:4], x[0], atol=1e-6)
    assert not np.allclose(x[4, 0], x[4, 1])


def test_a_grid_over_h_has_a_finding(tmp_path: Path) -> None:
    found = {"value": "nearest", "of": {"h": 0.3}, "to": {"h": 0.1}, "words": "Distance"}
    spec = BASE | {"model": {"kind": "smoothed"}, "grid": {"model.h": [0.0, 0.1, 0.3]}, "finding": found}
    ds = study.run(spec, tmp_path / "store", progress=False)
    mean = ds["nearest"].mean("member").values
    assert mean[0] < mean[1] < mean[2]
    estimate = report.finding(ds)
    assert estimate is not None
    assert float(estimate.value) == pytest.approx(mean[2] / mean[1])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": {"kind": "smoothed"}}, ["model.h", "smoothed needs it"]),
        ({"model": {"kind": "smoothed", "h": -1.0}}, ["h must be", "0 or more"]),
        ({"model": {"kind": "smoothed", "h": {"a": 1.0}}}, ["model.h:", "number"]),
        ({"model": {"kind": "local", "k": 3}}, ["images", "(1,)"]),
        ({"model": {"kind": "nearest", "k": 4}}, ["k must be", "1 to 3"]),
        ({"model": {"kind": "nearest", "h": 1.0}}, ["model.h", "kind nearest"]),
        ({"model": {"kind": "gaussian", "target": "noise"}}, ["model.target", "kind gaussian"]),
        ({"model": {"kind": "gaussian", "rnak": 1}}, ["model.rnak", "there are kind, rank"]),
        ({"model": {"kind": "switch", "at": 1.0}}, ["model.above", "switch needs it"]),
        ({"model": {"kind": "switch", "at": 1.0, "above": {"kind": "exact"}, "below": {}}}, ["model.below", "linear"]),
        ({"model": {"kind": "switch", "above": {"kind": "exact", "k": 1}}}, ["model.below", "needs it"]),
        ({"model": {"kind": "exact"}, "sampler": {"law": "mean"}}, ["'mean'", "kind exact", "law = 'members'"]),
        ({"model": {"kind": "exact"}, "sampler": {"law": "naive", "kappa": 1.0}}, ["'naive'", "closed form"]),
        ({"model": {"kind": "exact"}, "sampler": {"first": 1}}, ["sampler.first"]),
        ({"model": {"kind": "exact"}, "training": {"draws": 8}}, ["training", "trained"]),
        ({"model": {"kind": "exact"}, "grid": {"objective.K": [1, 2]}}, ["objective", "trained"]),
    ],
)
def test_mistakes_get_a_sentence(changes: dict[str, Any], words: list[str]) -> None:
    refused(BASE | changes, *words)


def test_a_store_is_continued_that_is_older_than_some_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def before(spec: Spec) -> str:
        tables = spec.model_dump()
        del tables["model"]["h"]
        return json.dumps(tables, sort_keys=True)

    with monkeypatch.context() as patch:
        patch.setattr(Spec, "to_json", before)
        ds = study.run(SMALL, tmp_path / "store", progress=False)
    assert '"h"' not in ds.attrs["vkernel_study"]
    again = study.run(SMALL, tmp_path / "store", progress=False)
    assert np.array_equal(ds["nearest"], again["nearest"])
    with pytest.raises(vk.InputError, match="another study"):
        study.run(BASE, tmp_path / "store")
