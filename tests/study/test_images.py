"""Studies of networks on images: every quantity by a second route, parts of a grid, resuming, one small file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xarray
from torch import Tensor

import vkernel as vk
from vkernel.core.errors import InputError
from vkernel.core.variance import Groups
from vkernel.data import images
from vkernel.metrics import energy_distance, pair_means
from vkernel.study import images as measures, report, runners, work
from vkernel.study.spec import Condition, parse_part
from vkernel.train.models.kept import Kept

MODEL = {"kind": "mlp", "target": "edm", "weight": "edm", "width": 8, "depth": 1, "steps": 6, "batch": 8, "lr": 0.02}
SPEC = {
    "title": "a",
    "members": 4,
    "block": 4,
    "data": {"name": "digits", "test": 20},
    "process": {"kind": "edm"},
    "model": MODEL,
    "training": {"times": ["lognormal", -1.2, 1.2], "snapshots": [2, 6]},
    "sampler": {"samples": 10, "steps": 4, "method": "multistep", "spacing": "edm"},
    "measure": {"levels": [0.3, 2.0], "images": 6, "keep": 3},
    "grid": {
        "data.n": [12, 16],
        "objective": {
            "values": [{"c": 0.0}, {"c": 1.0}, {"c": 5.0, "noise": "white"}],
            "labels": ["c = 0", "c = 1", "w"],
        },
    },
    "parts": [{"n": 12, "objective": ["c = 0", "c = 1"]}, {"objective": "w"}],
}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("images") / "store"
    vk.study.run(SPEC, path, progress=False)
    return path


@pytest.fixture(scope="module")
def ds(store: Path) -> xarray.Dataset:
    return vk.study.load(store).load()


def condition(n: int = 12, label: str = "c = 1") -> Condition:
    whole = vk.study.read(SPEC | {"parts": []}).conditions()
    return next(c for c in whole if c.labels == {"n": n, "objective": label})


@pytest.fixture(scope="module")
def probe() -> measures.Probe:
    return work.Experiment(vk.study.read(SPEC), condition()).probe


@pytest.fixture(scope="module")
def one() -> vk.Ensemble:
    """The networks of the condition c = 1, trained on their own."""
    data, _ = images("digits", 12, 20)
    how = {k: v for k, v in MODEL.items() if k != "kind"}
    how |= {"width": 8, "depth": 1}
    return vk.train_ensemble(vk.models.MLP(**how), data, vk.EDM(), members=4, objective=vk.JC(1.0), snapshots=(2, 6))


def test_the_grid_has_its_parts_alone_and_in_their_order(ds: xarray.Dataset) -> None:
    spec = vk.study.read(SPEC)
    cells = [(c.labels["n"], c.labels["objective"]) for c in spec.conditions()]
    assert cells == [(12, "c = 0"), (12, "c = 1"), (12, "w"), (16, "w")]
    assert ds["done"].values[..., 0].tolist() == [[True, True, True], [False, False, True]]
    units = runners.units(spec, [(c, 0) for c in spec.conditions()])
    assert [len(unit) for unit in units] == [2, 1, 1], "twins are trained together, within a part"
    assert bool(ds["error"].sel(n=16, objective="c = 0").isnull().all())
    for name in ds.data_vars:
        assert bool(ds[name].sel(n=12).notnull().all()), name


def test_errors_follow_from_the_posterior(ds: xarray.Dataset, one: vk.Ensemble, probe: measures.Probe) -> None:
    """Over the posterior, E|D - x0|² = |D - m|² + tr Cov(x0|x); D is that of networks trained on their own."""
    data, here = probe.data[:].double().flatten(1), ds.sel(n=12, objective="c = 1")
    for k, level in enumerate((0.3, 2.0)):
        x = probe.noised[0, k]
        away = torch.cdist(x.flatten(1), data).square()
        r = (-away / (2 * level**2)).softmax(1)
        for j, step in enumerate((2, 6)):
            D = x + level**2 * one.snapshots[step](x, level).double()
            square = torch.cdist(D.flatten(2), data.expand(4, -1, -1)).square()
            want = (r * square).sum(-1) / 64
            got = (here["excess"] + here["mmse"]).transpose("member", "step", "level", "image").values[:, j, k]
            np.testing.assert_allclose(got, want.numpy(), rtol=1e-4)
            own = (D - probe.clean[0, 0]).square().flatten(2).mean(-1)
            np.testing.assert_allclose(here["error"].values[:, j, k, 0], own.numpy(), rtol=1e-4)


def test_pairs_of_members_give_the_variance(ds: xarray.Dataset, one: vk.Ensemble, probe: measures.Probe) -> None:
    gaps, off = ds["gap_members"].sel(n=12, objective="c = 1", step=6).values, ~np.eye(4, dtype=bool)
    for k, level in enumerate((0.3, 2.0)):
        for j in range(2):
            V = one.cov(probe.noised[j, k], level).trace() * level**4 / 64
            np.testing.assert_allclose(gaps[off][:, k, j].mean(0), V.numpy(), rtol=2e-3)


def test_correlations_leave_one_member_out(ds: xarray.Dataset, one: vk.Ensemble, probe: measures.Probe) -> None:
    others = one.select([0, 1, 3])
    for k, level in enumerate((0.3, 2.0)):
        V = others.cov(probe.noised[0, k], level).diag().double().flatten(1).numpy()
        C = vk.EmpiricalScore(probe.data, vk.EDM()).covariance(probe.noised[0, k], level).diag().flatten(1).numpy()
        here = ds.sel(n=12, objective="c = 1", step=6, member=2).isel(level=k)
        want = np.mean([np.corrcoef(a, b)[0, 1] for a, b in zip(V, C, strict=True)])
        assert float(here["corr_pixels"]) == pytest.approx(want, rel=1e-3)
        assert float(here["corr_images"]) == pytest.approx(np.corrcoef(V.mean(1), C.mean(1))[0, 1], rel=1e-3)


def test_distances_are_those_of_the_metrics(ds: xarray.Dataset, one: vk.Ensemble, probe: measures.Probe) -> None:
    """D of the mean law is the mean D of single members less the variance over members."""
    here, off = ds.sel(n=12, objective="c = 1", step=6), ~np.eye(4, dtype=bool)
    x = one.sample(x_T=probe.x_T.float(), steps=4, method="multistep", spacing="edm").double()
    to, within, held = here["energy_to"].values, here["energy_within"].values, float(here["energy_held_out"])
    single = 2 * to.mean(1) - within.diagonal() - held
    pooled = 2 * to.mean() - within[off].mean() - held
    y = probe.held_out[:].flatten(1)
    away = torch.cdist(x.flatten(2)[:, None], x.flatten(2)[None])  # member, other, start, start
    apart = ~torch.eye(x.shape[1], dtype=torch.bool)
    np.testing.assert_allclose(within, away[..., apart].mean(-1).numpy(), rtol=1e-4)
    assert single[1] == pytest.approx(energy_distance(x[1].flatten(1), y).value, rel=1e-4)
    assert pooled == pytest.approx(single.mean() - (within[off].mean() - within.diagonal().mean()), rel=1e-5)
    np.testing.assert_allclose(here["sample"].values, x[:, :3].flatten(2).numpy(), rtol=2e-3, atol=2e-3)
    h, z = float(here["bandwidth"]), x.flatten(2)
    assert h == pytest.approx(
        float(np.median(np.array([float((a - b).norm()) for i, a in enumerate(y) for b in y[:i]]))), rel=1e-2
    )
    kernel = [[torch.exp(-torch.cdist(a, b).square() / (2 * h**2)) for b in z] for a in z]
    mine = [float((kernel[m][m].sum() - 10) / 90) for m in range(4)]
    np.testing.assert_allclose(here["kernel_within"].values.diagonal(), mine, rtol=1e-5)
    assert float(here["kernel_within"][0, 2]) == pytest.approx(float(kernel[0][2][apart].mean()), rel=1e-5)


def test_pair_means_split_the_distance_of_the_mean_law() -> None:
    x, y = torch.randn(5, 7, 3, dtype=torch.float64), torch.randn(11, 3, dtype=torch.float64)
    parts, off = pair_means(x, y), ~torch.eye(5, dtype=torch.bool)
    apart = ~torch.eye(7, dtype=torch.bool)  # members share their starts
    between = torch.cdist(x[:, None], x[None])[..., apart].mean(-1)[off].mean()
    reference = torch.pdist(y).mean()
    assert float(parts.pooled) == pytest.approx(float(2 * torch.cdist(x.flatten(0, 1), y).mean() - between - reference))
    alike = pair_means(x[:1].expand(4, -1, -1), y)  # networks that agree are one law
    assert float(alike.pooled) == pytest.approx(energy_distance(x[0], y).value)
    variance = parts.within[off].mean() - parts.within.diagonal().mean()
    assert float(parts.single.mean() - parts.pooled) == pytest.approx(float(variance))


class Exact(vk.Scores):
    """Two times the exact score, in place of trained networks."""

    def __init__(self, score: vk.EmpiricalScore) -> None:
        self.score, self.process, self.shape = score, score.process, score.shape
        self.groups, self.device, self.dtype = Groups.of(None, 2), torch.device("cpu"), torch.float64
        self.model, self.snapshots = vk.models.MLP(target="edm"), {2: self, 6: self}
        self.info = {name: [[1.0, 1.0]] * 2 for name in measures.NORMS}

    def __len__(self) -> int:
        return 2

    def member(self, index: int) -> vk.Score:
        return self.score

    def select(self, indices: Sequence[int]) -> Exact:
        return self

    def __call__(self, x: Tensor, t: Tensor) -> Tensor:
        return self.score(x, t).expand(2, *x.shape)

    def paired(self, x: Tensor, t: Tensor) -> Tensor:
        return self.score(x, t)


def test_the_exact_score_copies_and_has_no_excess() -> None:
    """Its samples converge to training images, and its denoiser is m."""
    spec = vk.study.read(SPEC | {"members": 2, "block": 2, "sampler": SPEC["sampler"] | {"steps": 60}})
    probe = work.Experiment(spec, next(spec.conditions())).probe
    found = measures.measure(probe, Exact(probe.score), vk.JC(2.0), work.layout(spec))  # type: ignore[arg-type]
    assert found["excess"].max() < 1e-12
    assert found["gap_members"].max() == 0
    np.testing.assert_array_equal(found["memorised"], 1.0)
    assert found["ratio"].max() < 1 / 3
    np.testing.assert_allclose(found["sample"], found["nearest"], atol=0.05)
    given = vk.network_noise_fraction("edm", probe.score, vk.EDM(), torch.tensor([0.3, 2.0]), 2.0, 4096, 0)
    assert found["network_share"][1] == pytest.approx(float(given.value[1]), rel=0.1)


def test_the_training_set_itself_is_a_law(ds: xarray.Dataset, probe: measures.Probe) -> None:
    """Its distance is that of many draws with replacement, to the error of the draws."""
    source, data = torch.Generator().manual_seed(0), probe.data[:].flatten(1)
    x = data[torch.randint(12, (4000,), generator=source)]
    want = energy_distance(x, probe.held_out[:].flatten(1))
    held = energy_distance(data, probe.held_out[:].flatten(1))
    got = float(ds["energy_training"].sel(n=12, objective="c = 0"))
    assert got == pytest.approx(want.value, abs=0.05 * abs(want.value))
    assert got > held.value, "of images of the law, not of these"


def test_a_run_that_was_stopped_goes_on(
    store: Path, ds: xarray.Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is stopped while it trains, and after one of two twins was written; the rest is computed in threads."""
    path, seen = tmp_path / "again", list[str]()

    def stop(label: str, share: float) -> None:
        seen.append(label)
        if label == "n = 12, objective = c = 0":
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:  # first in the middle of a training, after its first snapshot
        write = Kept.write
        patch.setattr(Kept, "write", lambda *given: (write(*given), pytest.fail("killed", pytrace=False)))
        with pytest.raises(pytest.fail.Exception):
            vk.study.run(SPEC, path, "inline", progress=False)
    assert len(list(path.glob(".vkernel.training/*/training/0-snapshot-2.safetensors"))) == 1
    with pytest.raises(KeyboardInterrupt):
        vk.study.run(SPEC, path, "inline", progress=stop)
    assert int(vk.study.load(path)["done"].sum()) == 1
    vk.study.run(SPEC, path, only={"n": 12, "objective": ["c = 0", "c = 1"]}, progress=False)
    assert int(vk.study.load(path)["done"].sum()) == 2
    found = vk.study.run(SPEC, path, "threads", progress=False).load()
    xarray.testing.assert_identical(found.drop_attrs(), ds.drop_attrs())
    assert list(path.glob(".vkernel.training/*")) == []
    monkeypatch.setattr(runners, "compute_twins", lambda *a: pytest.fail("a block was computed again"))
    vk.study.run(SPEC, path, progress=False)


def test_one_small_file_holds_everything(ds: xarray.Dataset, tmp_path: Path) -> None:
    path = vk.study.export(ds, tmp_path / "all.npz")
    found = vk.study.load(path)
    assert found.attrs == ds.attrs
    assert report.spec_of(found) == vk.study.read(SPEC)
    for name, array in ds.data_vars.items():
        assert found[name].dims == array.dims
        limits = {"gap_members": (0.05, 0)} | dict.fromkeys(("sample", "nearest"), (0, 0.006))
        relative, absolute = limits.get(name, (2.0**-10, 1e-7))
        clipped = array.clip(-1.25, 1.25) if name == "sample" else array
        np.testing.assert_allclose(found[name].values, clipped.values, rtol=relative, atol=absolute, err_msg=name)
    parts = [found.where(found["objective"] == label) for label in ("c = 0", "c = 1", "w")]
    parts = [
        part.assign(done=found["done"] & (found["objective"] == part_label))
        for part, part_label in zip(parts, ("c = 0", "c = 1", "w"), strict=True)
    ]
    xarray.testing.assert_equal(vk.study.merge(*parts)[["error", "done"]], found[["error", "done"]])
    np.savez(tmp_path / "other.npz", a=np.zeros(3))
    with pytest.raises(InputError, match="holds no results of a study"):
        vk.study.load(tmp_path / "other.npz")


def respecified(ds: xarray.Dataset, **changes: Any) -> xarray.Dataset:
    """The same arrays, as those of a study with other tables."""
    return ds.assign_attrs(vkernel_study=vk.study.read(SPEC | changes).to_json())


def test_results_of_a_study_that_grew_are_merged(ds: xarray.Dataset) -> None:
    """What both hold, or nobody computed, may not differ, or may; new values and a new factor are added."""
    objective = SPEC["grid"]["objective"]
    one = ds.where(ds["objective"] == "c = 0").assign(done=ds["done"] & (ds["objective"] == "c = 0"))
    values = [{"c": 0.0}, {"c": 0.7}, *objective["values"][2:]]  # c = 1 was not computed yet, and is another c now
    grid = SPEC["grid"] | {"objective": objective | {"values": values, "labels": ["c = 0", "c = 0.7", "w"]}}
    two = ds.assign_coords(objective=["c = 0", "c = 0.7", "w"])
    parts = [
        {k: ["c = 0.7" if v == "c = 1" else v for v in x] if k == "objective" else x for k, x in part.items()}
        for part in SPEC["parts"]
    ]
    found = vk.study.merge(one, respecified(two, grid=grid, parts=parts))
    assert found["objective"].values.tolist() == ["c = 0", "c = 1", "w", "c = 0.7"]
    assert not found["done"].sel(objective="c = 1").any()
    for a, b in (("c = 0", "c = 0"), ("c = 0.7", "c = 1")):
        np.testing.assert_array_equal(found["error"].sel(objective=a), ds["error"].sel(objective=b))
    with pytest.raises(InputError, match="Merge the stores or files themselves"):
        vk.study.merge(found, one)
    sets = SPEC["grid"] | {"data.set": {"name": "draw_of_data", "values": [0, 1]}}
    second = ds.expand_dims(draw_of_data=[1.0]).reindex(draw_of_data=[0.0, 1.0], fill_value={"done": False})
    both = vk.study.merge(ds, respecified(second, grid=sets))
    for label in (0, 1):
        np.testing.assert_array_equal(both["error"].sel(draw_of_data=label).transpose(*ds["error"].dims), ds["error"])
    for change, said in (
        ({"seed": 8}, "differ in seed"),
        ({"measure": SPEC["measure"] | {"keep": 1}}, "measure"),
        ({"model": MODEL | {"lr": 0.01}}, "n = 12.0, objective = c = 0 was computed with another model"),
    ):
        with pytest.raises(InputError, match=said):
            vk.study.merge(ds, respecified(ds, **change))
    with pytest.raises(InputError, match="differ in 'step'"):
        vk.study.merge(ds, ds.assign_coords(step=ds["step"] + 1))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"block": 2}, "computes all members at once; give block = 4"),
        ({"training": {"times": "log", "snapshots": [2, 5]}}, "end at model.steps, 6"),
        ({"measure": {"levels": [0.3], "images": 13}}, "13 noised images need as many"),
        ({"data": {"name": "triple"}}, "data.n is for a population, or for a name of images"),
        ({"model": {"kind": "linear"}, "training": {"draws": 9}}, "measure.levels is for networks"),
        (
            {
                "model": MODEL | {"kind": "unet", "channels": [8, 8, 8]} | {"width": 64, "depth": 2},
                "training": {"snapshots": [6]},
            },
            "training.times: a model of kind unet needs it",
        ),
        ({"parts": [{"n": 13}]}, "parts, number 1: n has no value 13"),
        ({"parts": [{"m": 12}]}, "there is no factor 'm'"),
        ({"measure": {}, "training": {"snapshots": [6]}}, "snapshots and flips are for studies of images"),
        ({"grid": {"data.set": [0, 1]}, "parts": []}, "the store itself has a set"),
    ],
)
def test_studies_that_cannot_be_run_are_refused(change: dict, said: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=said):
        vk.study.run(SPEC | change, tmp_path / "a", progress=False)


def test_a_part_is_written_on_the_command_line() -> None:
    assert parse_part("network=unet, n=128|1024,objective=c = 0") == {
        "network": ["unet"],
        "n": [128.0, 1024.0],
        "objective": ["c = 0"],
    }
    with pytest.raises(InputError, match="written FACTOR=LABEL"):
        parse_part("unet")


def test_the_shipped_study_has_the_core_first() -> None:
    large = vk.study.read("images", large=True)
    first = [c for c in large.conditions() if c.part < 2]
    assert {(c.labels["network"], c.labels["n"]) for c in first} == {("unet", 128), ("unet", 1024)}
    assert large.members == 8
    small = vk.study.read("images")
    assert {c.data.name for c in small.conditions()} == {"digits"}
    for spec in (small, large):
        assert {f.dim for f in spec.grid} == {"data", "n", "network", "objective"}
        assert report.Figure(x="step", lines="objective", value="memorised") == spec.figure
