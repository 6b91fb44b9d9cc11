"""Rules on target noise: each comes out as planted, in studies whose effects are known."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray
from planted import LEVELS, RHO, SHARE, STEPS, Effect, planted
from rich.console import Console
from scipy import stats

from vkernel import plots, study
from vkernel.cli.study import study_report
from vkernel.core.errors import InputError
from vkernel.core.estimate import jackknife_se
from vkernel.reports import target_noise
from vkernel.reports.target_noise.rules import FAILS, HOLDS, NOT_RUN, UNDECIDED, Outcome

A, B = ("fashion", 128, "unet"), ("fashion", 1024, "unet")
LIKE = Effect()
NOISY = Effect(V=2.0, training=1.3, copies=0.4, pooled=-0.05)  # what Vastola's rule describes


def outcomes(*cells: dict[str, Effect], **how: float) -> list[Outcome]:
    keys = [A, B, ("digits", 128, "unet"), ("digits", 1024, "unet")]
    return target_noise.rules(planted(dict(zip(keys, cells, strict=False)), **how), draws=100)  # type: ignore[arg-type]


def of(found: list[Outcome], rule: str, variant: str = "", c: str = "c = 1", n: int = 128) -> Outcome:
    (one,) = (o for o in found if (o.rule, o.variant, o.of, o.cell["n"]) == (rule, variant, c, str(n)))
    return one


def test_equal_twins() -> None:
    found = outcomes({"c = 0": LIKE, "c = 1": LIKE})
    verdicts = {(o.rule, o.variant): o.verdict for o in found if o.of == "c = 1" and o.to == "c = 0"}
    assert verdicts.pop(("average", "energy")) == verdicts.pop(("average", "kernel")) == UNDECIDED
    holds = {("bertrand", ""): HOLDS, ("regularisation", ""): HOLDS}
    assert verdicts == holds | {("vastola", "rho"): FAILS, ("vastola", "network"): FAILS}
    assert {o.verdict for o in found if o.of == "c = 10" or o.rule == "shape"} == {NOT_RUN}
    assert of(found, "bertrand").by_step == tuple((int(s), HOLDS) for s in STEPS)
    assert all(math.isnan(o.p_holds) and o.parts == () for o in found if o.verdict == NOT_RUN)


def test_noise_that_widens_v_and_lowers_the_frontier() -> None:
    found = outcomes({"c = 0": LIKE, "c = 1": NOISY})
    for window in ("rho", "network"):
        assert of(found, "vastola", window).verdict == HOLDS
    assert of(found, "bertrand").verdict == of(found, "regularisation").verdict == FAILS
    assert of(found, "average", "energy").verdict == of(found, "average", "kernel").verdict == HOLDS
    parts = {p.name: p for p in of(found, "vastola", "rho").parts}
    assert parts["V"].low < 2 < parts["V"].high
    assert parts["frontier_gap"].value == pytest.approx(-math.log(1.3), abs=0.05)  # at equal held-out error
    assert parts["frontier_memorised"].high < 0
    pooled, single = of(found, "average", "energy").parts
    assert pooled.value == pytest.approx(-0.05, abs=0.005)
    assert single.value == pytest.approx(0, abs=0.005)


def test_a_larger_v_alone_is_not_enough() -> None:
    found = outcomes({"c = 0": LIKE, "c = 1": Effect(V=2.0, training=0.7)})
    one = of(found, "vastola", "rho")
    assert one.verdict == FAILS  # the frontier lies above
    assert dict(one.groups) == {"frontier_memorised": UNDECIDED, "frontier_gap": FAILS, "V": HOLDS}
    assert next(p.low for p in one.parts if p.name == "V") > 1.5


def test_a_change_of_time() -> None:
    found = outcomes({"c = 0": LIKE, "c = 10": Effect(time=0.5)})
    one = of(found, "regularisation", c="c = 10")
    assert one.verdict == HOLDS
    times = [p for p in one.parts if p.name == "time"]
    assert [p.value for p in times] == pytest.approx([0.5] * len(times), abs=0.05)
    assert [p.step for p in times] == [2000, 4000, 8000]  # the others lie at or before the first snapshot
    assert of(found, "bertrand", c="c = 10").verdict == FAILS
    assert of(found, "bertrand").verdict == NOT_RUN


def test_few_members_have_curves_of_v() -> None:
    one = of(outcomes({"c = 0": LIKE, "c = 1": LIKE}, members=4), "regularisation")
    assert {p.name for p in one.parts} == {"training", "held_out", "excess", "V", "memorised", "time"}
    assert all(math.isfinite(p.low) for p in one.parts)


def test_shape_against_placebos() -> None:
    ten = Effect(V=0.5, held_out=0.7)
    cell = {"c = 0": LIKE, "c = 10": ten, "gaussian 10": ten, "white 10": Effect(V=0.8, held_out=0.9)}
    found = outcomes(cell | {"c = 1": LIKE, "white 1": Effect(held_out=1.02)})
    assert of(found, "shape", "white", "c = 10").verdict == HOLDS
    assert of(found, "shape", "gaussian", "c = 10").verdict == FAILS
    assert of(found, "shape", "white").verdict == FAILS  # a difference within the margins
    assert of(found, "shape", "gaussian").verdict == NOT_RUN


def test_without_common_errors_the_frontier_is_undecided() -> None:
    found = outcomes({"c = 0": LIKE, "c = 1": Effect(V=2.0, held_out=0.1)})
    one = of(found, "vastola", "rho")
    assert one.verdict == UNDECIDED
    assert all(math.isnan(p.low) for p in one.parts if p.name != "V")
    assert next(p.low for p in one.parts if p.name == "V") > 1.5


def test_without_copies_the_gap_alone_is_a_frontier() -> None:
    found = outcomes({"c = 0": LIKE, "c = 1": NOISY}, overfit=0.0)
    one = of(found, "vastola", "rho")
    assert [p.name for p in one.parts] == ["frontier_gap", "V"]
    assert one.verdict == HOLDS
    (copies,) = (p for p in of(found, "bertrand").parts if p.name == "memorised")
    assert copies.value == 0
    assert 0 < copies.high < 0.02  # nothing was copied among 8 × 64 samples, which is not certainty


def test_noise_of_twins_leaves_it_undecided() -> None:
    found = outcomes({"c = 0": LIKE, "c = 1": Effect(V=1.5)}, noise=0.15)
    assert of(found, "bertrand").verdict == FAILS  # by V
    assert of(found, "vastola", "rho").verdict == UNDECIDED
    assert of(outcomes({"c = 0": LIKE, "c = 1": LIKE}, noise=0.15), "bertrand").verdict == UNDECIDED


def test_holm_takes_more_for_more_cells() -> None:
    """A p value that suffices alone does not among four cells, of which the others show nothing."""
    twins = {"c = 0": LIKE, "c = 1": LIKE}
    base = outcomes({"c = 0": LIKE, "c = 1": Effect(pooled=-0.002)}, twins, twins, twins, seed=2)
    family = [o for o in base if o.rule == "average" and o.variant == "energy" and o.of == "c = 1"]
    p = np.array([2 * min(o.p_holds, o.p_fails) for o in family])
    expected = p <= 0.05 / np.array([4 - k for k in np.argsort(np.argsort(p))])
    order = np.argsort(p)
    met = np.cumprod(expected[order]).astype(bool)
    assert [family[i].verdict != UNDECIDED for i in order] == met.tolist()
    assert [o.alone != UNDECIDED for o in family] == (p <= 0.05).tolist()


def test_members_that_diverged_are_left_out_with_their_twins() -> None:
    found = outcomes({"c = 0": Effect(diverged=(3,)), "c = 1": Effect(diverged=(5,))})
    one = of(found, "bertrand")
    assert (one.members, one.diverged, one.verdict) == (6, 2, HOLDS)
    lost = of(outcomes({"c = 0": LIKE, "c = 1": Effect(diverged=(1, 2, 3))}), "bertrand")
    assert (lost.members, lost.diverged, lost.verdict, lost.parts) == (5, 3, UNDECIDED, ())


def test_parts_are_ratios_of_means() -> None:
    ds = planted({A: {"c = 0": LIKE, "c = 1": Effect(V=1.4)}})
    one = ds.isel(data=0, n=0, network=0, step=-1)
    a, b = (one["error"].sel(objective=c).mean(["member", "image"]) for c in ("c = 1", "c = 0"))
    every = target_noise.rules(ds, draws=60)
    found = of(every, "bertrand")
    for name, which in (("training", "training"), ("held_out", "held-out")):
        values = [p.value for p in found.parts if p.name == name]
        assert values == pytest.approx((a / b).sel(set=which).values, rel=1e-6)
    V = one["gap_members"].isel(set=0).mean("image").sum(["member", "other"]) / 56
    ratio = (V.sel(objective="c = 1") / V.sel(objective="c = 0")).values
    assert [p.value for p in found.parts if p.name == "V"] == pytest.approx(ratio, rel=1e-6)
    for window, by in (("rho", RHO), ("network", SHARE)):
        part = of(every, "vastola", window).parts[-1]
        assert part.value == pytest.approx(np.exp(np.log(ratio)[by > by.max() / 2].mean()), rel=1e-6)


def test_numbers_beside_the_rules() -> None:
    cell = {"c = 0": LIKE, "c = 1": Effect(V=1.5, held_out=0.9), "c = 10": Effect(V=1.5 ** math.log2(11), held_out=0.8)}
    ds = planted({A: cell, B: {"c = 0": LIKE}})
    found = target_noise.summary(ds, draws=50)
    raw = ds["error"].sel(set="held-out").mean(["member", "image"]).squeeze()
    assert np.allclose(found["held_out"].sel(end="value").squeeze(), raw, equal_nan=True)
    assert found["members"].squeeze().sel(objective="c = 1").values.tolist() == [8, 0]
    (slope,) = (t for t in target_noise.trends(ds, draws=50) if t.part.name == "V")
    assert slope.objectives == ("c = 0", "c = 1", "c = 10")
    assert slope.part.value == pytest.approx(1.5, rel=0.05)  # V is 1.5^log₂(1 + c)
    twins = {(t.of, t.name): t for t in target_noise.singles(ds)}
    assert twins["c = 1", "held_out"].median == pytest.approx(math.log(0.9), abs=0.03)
    assert twins["c = 1", "held_out"].below == len(twins["c = 1", "held_out"].values) == 8
    assert found.sizes["level"] == len(LEVELS)


def test_distances_between_members_that_were_not_measured() -> None:
    """D(q̄) alone is not run; all else is decided as it is with them."""
    ds = planted({A: {"c = 0": LIKE, "c = 1": LIKE, "c = 10": LIKE}})
    for name in ("energy_within", "kernel_within"):
        own = xarray.DataArray(np.eye(8, dtype=bool), dims=("member", "other"))
        ds[name] = ds[name].where(own).transpose(*ds[name].dims)
    held = target_noise.answer(ds, draws=50)
    assert {o["verdict"] for o in held["outcomes"] if o["rule"] == "average"} == {NOT_RUN}
    one = next(o for o in held["outcomes"] if (o["rule"], o["of"]) == ("bertrand", "c = 1"))
    assert one["verdict"] == HOLDS
    assert {k for k, v in one["groups"] if v == NOT_RUN} == {"energy_pooled", "kernel_pooled"}
    assert {n["name"] for n in held["numbers"] if n["name"].startswith("energy")} == {"energy_single"}


def test_intervals_of_one_objective() -> None:
    """Distances have intervals over members; values without one member have those of the jackknife."""
    ds = planted({A: {"c = 0": LIKE}})
    ds["corr_pixels"] = ds["error"].mean(["set", "image"])
    found = target_noise.summary(ds, draws=4000).squeeze().sel(objective="c = 0")
    one = ds.squeeze().sel(objective="c = 0").isel(step=-1)
    each = 2 * one["energy_to"].mean("held_out").values - np.diag(one["energy_within"]) - 1
    low, high = stats.t.interval(0.95, 7, each.mean(), stats.sem(each))
    ends = found["energy_single"].isel(step=-1).values
    assert ends == pytest.approx([each.mean(), low, high], abs=0.03 * (high - low))
    without = one["corr_pixels"].isel(level=0).values
    half = stats.t.ppf(0.975, 7) * float(jackknife_se(torch.from_numpy(without)))
    assert found["corr_pixels"].isel(step=-1, level=0).sel(end="high").item() == pytest.approx(
        without.mean() + half, abs=0.05 * half
    )


def test_the_window_of_the_network_is_that_of_c_1() -> None:
    ds = planted({A: {"c = 0": LIKE, "c = 1": Effect(V=1.4), "c = 10": LIKE}})
    by_c = xarray.DataArray([0.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0], dims="objective")
    flat = ds["network_share"].where(ds["objective"] != "c = 10", 1.0)  # nothing but noise, at every level
    one = of(target_noise.rules(ds.assign(network_share=flat * by_c), draws=20), "vastola", "network").parts[-1]
    assert repr(one) == repr(of(target_noise.rules(ds, draws=20), "vastola", "network").parts[-1])  # which has NaN


def test_other_studies_are_refused() -> None:
    with pytest.raises(InputError, match=r"images\.toml; this one has no error, excess"):
        target_noise.rules(planted({A: {"c = 0": LIKE}})[["memorised"]])


def test_tables_json_and_pictures() -> None:
    ds = planted({A: {"c = 0": LIKE, "c = 1": NOISY, "c = 10": Effect(time=0.5)}, B: {"c = 0": LIKE, "c = 1": LIKE}})
    found = target_noise.rules(ds, draws=60)
    held = target_noise.to_json(found)
    assert json.loads(json.dumps(held, allow_nan=False)) == held
    assert [one["verdict"] for one in held] == [o.verdict for o in found]
    bertrand = next(one for one in held if one["rule"] == "bertrand" and one["verdict"] == FAILS)
    (part,) = bertrand["parts"]  # of all, the farthest outside its margins
    assert part["name"] in ("memorised", "V")
    console = Console(width=250, file=io.StringIO())
    console.print(target_noise.table(found))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "Vastola, window of ρ" in text
    assert "fashion, n = 1,024, unet" in text
    assert f"{sum(o.verdict == NOT_RUN for o in found)} of {len(found)} comparisons were not run." in text
    cells = target_noise.in_cells(target_noise.summary(ds, draws=60))
    assert cells["cell"].values.tolist() == ["fashion, n = 128, unet", "fashion, n = 1,024, unet"]
    above = plots.twin_curves(cells, 0.25).axes
    assert len(above) == 4
    assert "σ/α = 0.3" in above[2].get_ylabel()
    drawn = {line.get_label(): line.get_ydata() for line in above[2].get_lines()}
    assert np.allclose(drawn["c = 1"], cells["gap"].sel(objective="c = 1", level=0.3, end="value")[0])
    assert len(plots.twin_variances(cells).axes) == 6
    path = plots.twin_frontiers(cells).axes[2].get_lines()[0]
    value = cells.isel(cell=0).sel(objective="c = 0", end="value")
    assert np.allclose(path.get_xdata(), np.exp(np.log(value["held_out"]).mean("level")))
    assert np.allclose(path.get_ydata(), np.log(value["held_out"] / value["training"]).mean("level"))
    figure = target_noise.sample_figure(ds, {"data": "fashion", "n": "128", "network": "unet"})
    assert [ax.get_ylabel() for ax in figure.axes][::2] == ["c = 0", "c = 1", "c = 10"]


def test_the_answer_is_plain_numbers() -> None:
    ds = planted({A: {"c = 0": LIKE, "c = 1": NOISY, "c = 10": LIKE}, B: {"c = 0": LIKE}})
    found = target_noise.answer(ds, draws=60)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    (one,) = (
        n
        for n in found["numbers"]
        if (n["cell"], n["objective"], n["name"]) == ("fashion, n = 128, unet", "c = 1", "V") and n["level"] == 1.0
    )
    cell = ds.isel(data=0, n=0, network=0).sel(objective="c = 1", level=1.0, set="training").isel(step=-1)
    assert one["value"] == pytest.approx(float(cell["gap_members"].mean("image").sum() / 56), rel=1e-5)
    assert one["low"] < one["value"] < one["high"]
    assert {t["part"]["name"] for t in found["trends"]} >= {"V", "held_out", "memorised", "energy_pooled"}
    assert {s["below"] for s in found["singles"] if s["of"] == "c = 1" and s["name"] == "memorised"} == {8}


def test_the_command_on_a_file_of_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ds = planted({A: {"c = 0": LIKE, "c = 1": LIKE}})
    file = study.export(ds, tmp_path / "planted.npz")
    study_report(file, tmp_path / "out", draws=100)
    said = capsys.readouterr().out
    assert "Equivalence" in said
    held = json.loads((tmp_path / "out" / "answer.json").read_text(encoding="utf-8"))
    assert [o["verdict"] for o in held["outcomes"] if o["rule"] == "bertrand" and o["of"] == "c = 1"] == [HOLDS]
    assert {path.suffix for path in (tmp_path / "out").iterdir()} == {".json", ".png"}
