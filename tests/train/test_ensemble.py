"""Ensembles: scores, moments and cumulants by numpy and scipy, samples, members that diverge, files, refusals."""

from __future__ import annotations

import json
import math
import pickle
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

import vkernel as vk
from vkernel.core.covariance import Factored
from vkernel.core.errors import InputError
from vkernel.sample import pf_ode
from vkernel.train.ensemble import Ensemble
from vkernel.train.features import RandomFourier
from vkernel.train.objectives import J0, J1, VARIES, Training

PROCESS = vk.VP(eps=0.05)
POINTS = torch.tensor([[-1.0], [0.0], [1.0]], dtype=torch.float64)
PLANE = torch.tensor([[-1.0, 0.2], [0.4, 1.0], [0.8, -0.6]], dtype=torch.float64)
X = torch.linspace(-1.5, 1.5, 7, dtype=torch.float64)[:, None]


def grid(dim: int = 1, per_axis: int = 4) -> vk.features.Grid:
    return vk.features.grid("gaussian", per_axis, dim, process=PROCESS, per_time=3)


def train(model=None, points: Tensor = POINTS, **options) -> Ensemble:
    options = {"members": 6, "draws": 80, "show": False} | options
    return vk.train_ensemble(model or vk.models.Linear(grid()), points, PROCESS, **options)


MODELS = {
    "grid": (vk.models.Linear(grid(2), "x0"), PLANE),
    "fourier": (vk.models.Linear(vk.features.random_fourier(12, 2, PROCESS), "noise"), PLANE),
    "mlp": (vk.models.MLP(width=6, depth=2, steps=5, batch=8, ema=0.9), PLANE),
    "images": (vk.models.MLP(width=6, depth=1, steps=3, batch=8, target="x0"), PLANE.reshape(3, 1, 1, 2)),
    "lazy": (vk.models.Lazy(vk.models.NTK(2, "relu"), tau=5.0), PLANE),
}


@pytest.fixture(scope="module", params=MODELS)
def ens(request) -> Ensemble:
    model, points = MODELS[request.param]
    return train(model, points, members=5, draws=20)


@pytest.fixture(scope="module")
def line() -> Ensemble:
    return train()


def constant(values: Tensor, **info) -> Ensemble:
    """An ensemble whose score is ``values (M, d)`` at every place: one feature, which is sqrt(2) everywhere."""
    d = values.shape[1]
    features = RandomFourier(torch.zeros(1, d + 1, dtype=torch.float64), torch.zeros(1), PROCESS.eps, PROCESS.T)
    state = {"weights": values[:, None, :] / math.sqrt(2)}
    return Ensemble(vk.models.Linear(features, "score"), state, PROCESS, (d,), info)


def broken(ens: Ensemble, rows: dict[int, float]) -> Ensemble:
    name, first = next(iter(ens.state.items()))
    first = first.clone()
    for m, value in rows.items():
        first[m].view(-1)[0] = value
    return Ensemble(ens.model, {**ens.state, name: first}, ens.process, ens.shape, ens.info)


def places(ens: Ensemble, *batch: int) -> Tensor:
    return torch.randn(*batch, *ens.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


# -------------------- scores


def test_shapes_and_times(ens):
    x = places(ens, 2, 3)
    t = torch.linspace(0.1, 0.9, 6, dtype=torch.float64).reshape(2, 3)
    s = ens(x, t)
    assert s.shape == (5, 2, 3, *ens.shape)
    assert s.dtype == x.dtype
    for i in range(2):
        for j in range(3):
            one = ens(x[i, j], float(t[i, j]))
            assert one.shape == (5, *ens.shape)
            torch.testing.assert_close(s[:, i, j], one, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ens(x, 0.3), ens(x, torch.full((2, 3), 0.3).double()), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(ens(x, t[0]), ens(x, t[0].expand(2, 3)))


def test_results_take_the_dtype_of_x(ens):
    x = places(ens, 4)
    wide = ens(x, 0.5)
    for kind, digits in ((torch.float32, 1e-3), (torch.float16, 3e-2)):
        got = ens(x.to(kind), 0.5)
        assert got.dtype == kind
        torch.testing.assert_close(got.double(), wide, rtol=digits, atol=digits)
        assert ens.paired(x.to(kind).expand(5, *x.shape), 0.5).dtype == kind
    assert ens(torch.zeros(2, *ens.shape, dtype=torch.int64), 0.5).dtype == torch.get_default_dtype()


def test_paired_is_the_diagonal_of_shared(ens):
    x = places(ens, 5, 3)
    own = torch.linspace(0.1, 0.9, 15, dtype=torch.float64).reshape(5, 3)
    for t, at in ((0.3, lambda m: 0.3), (own[0], lambda m: own[0]), (own, lambda m: own[m])):
        got = ens.paired(x, t)
        assert got.shape == x.shape
        for m in range(5):
            torch.testing.assert_close(got[m], ens(x[m], at(m))[m], rtol=1e-4, atol=1e-5)
    lone = ens.paired(x[:, 0], own[:, 0])  # one place for each member, with its own time
    torch.testing.assert_close(lone, ens.paired(x, own)[:, 0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ens.paired(x[:, 0], 0.3), ens.paired(x, 0.3)[:, 0], rtol=1e-4, atol=1e-5)


@settings(max_examples=30, deadline=None)
@given(batch=st.lists(st.integers(1, 3), max_size=3), data=st.data())
def test_any_batch_and_any_time_that_broadcasts(line, batch, data):
    """Against one call for each place."""
    x = torch.rand(*batch, 1, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    keep = data.draw(st.integers(0, len(batch)))
    shape = [data.draw(st.sampled_from([1, n])) for n in batch[len(batch) - keep :]]
    t = 0.1 + 0.8 * torch.rand(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    s = line(x, t)
    assert s.shape == (6, *batch, 1)
    for place in np.ndindex(*batch):
        torch.testing.assert_close(s[(slice(None), *place)], line(x[place], float(t.expand(batch)[place])))


def test_a_member_is_a_score(ens):
    x = places(ens, 3)
    member = ens[2]
    torch.testing.assert_close(member(x, 0.4), ens(x, 0.4)[2], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ens[-1](x, 0.4), ens(x, 0.4)[4], rtol=1e-5, atol=1e-6)
    drawn = ens.sample(x_T=x, steps=6)
    assert drawn.shape == (5, 3, *ens.shape)
    torch.testing.assert_close(
        drawn[2], pf_ode(member, x, method="euler", spacing="uniform", steps=6), rtol=1e-4, atol=1e-4
    )
    with pytest.raises(InputError, match="another process"):
        pf_ode(member, x, method="euler", spacing="uniform")
    assert "member 2 of" in repr(member)
    with pytest.raises(IndexError, match="5 members"):
        ens[5]


def test_slices_are_ensembles(line):
    some = line[1:5:2]
    assert isinstance(some, Ensemble)
    assert some.info["members"] == [1, 3]
    assert torch.equal(some(X, 0.2), line(X, 0.2)[1:5:2])
    assert len(line[-2:]) == 2
    torch.testing.assert_close(some.start(3, shared=False), line.start(3, shared=False)[1:5:2])


# -------------------- moments and cumulants


def test_mean_and_covariances_are_numpys(ens):
    x, x2, d = places(ens, 4), 0.5 * places(ens, 4), math.prod(ens.shape)
    one, two = (ens(a, t).reshape(5, 4, d).numpy() for a, t in ((x, 0.3), (x2, 0.6)))
    np.testing.assert_allclose(ens.mean(x, 0.3).reshape(4, d), one.mean(0), rtol=1e-10)
    cov, cross = ens.cov(x, 0.3), ens.cov(x, 0.3, x2, 0.6)
    for k in range(4):
        whole = np.cov(np.concatenate([one[:, k], two[:, k]], 1), rowvar=False)
        np.testing.assert_allclose(cov.dense()[k], whole[:d, :d], rtol=1e-8, atol=1e-10)
        np.testing.assert_allclose(cross.dense()[k], whole[:d, d:], rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(ens.cov(x, 0.3, x).dense(), cov.dense())
    every = ens.cov(x[:1], 0.3, x2, 0.6)  # one place with each of four
    torch.testing.assert_close(every.dense()[2], ens.cov(x[0], 0.3, x2[2], 0.6).dense(), rtol=1e-5, atol=1e-7)


def test_the_covariance_is_an_operator(ens):
    x = places(ens, 4)
    cov, v = ens.cov(x, 0.3), places(ens, 4).flip(0)
    assert isinstance(cov, Factored)
    dense = cov.dense()
    torch.testing.assert_close((cov @ v).flatten(1), (dense @ v.flatten(1)[..., None])[..., 0])
    torch.testing.assert_close(cov.trace(), dense.diagonal(dim1=-2, dim2=-1).sum(-1))
    torch.testing.assert_close(cov.diag().flatten(1), dense.diagonal(dim1=-2, dim2=-1))
    drawn = torch.stack([cov.draw(k).flatten(1) for k in range(800)])
    got = torch.einsum("kna,knb->nab", drawn, drawn) / 800
    variance = dense.diagonal(dim1=-2, dim2=-1)
    se = ((variance[:, :, None] * variance[:, None] + dense**2) / 800).sqrt()
    assert ((got - dense).abs() <= 5 * se + 1e-12).all()


@pytest.mark.parametrize("law", ["normal", "exponential"])
def test_cumulants_are_scipys(law):
    values = getattr(np.random.default_rng(0), f"standard_{law}")((40, 9))
    found = constant(torch.from_numpy(values)).cumulants(torch.zeros(2, 9, dtype=torch.float64), 0.3)
    for k in range(2):
        np.testing.assert_allclose(found.skewness.value[k], stats.skew(values, bias=False), rtol=1e-9)
        np.testing.assert_allclose(found.kurtosis.value[k], stats.kurtosis(values, bias=False), rtol=1e-9)
    off = values - values.mean(0)
    left, sizes, _ = np.linalg.svd(off)
    np.testing.assert_allclose(found.shares, (sizes**2 / (sizes**2).sum())[:3], rtol=1e-9)
    skew = stats.skew(left[:, :3], bias=False)
    np.testing.assert_allclose(found.joint_skewness.value.abs(), np.abs(skew), rtol=1e-7)
    np.testing.assert_allclose(found.joint_kurtosis.value, stats.kurtosis(left[:, :3], bias=False), rtol=1e-7)


def test_jackknife_by_leaving_one_out_by_hand():
    values = np.random.default_rng(1).standard_exponential((12, 4))
    found = constant(torch.from_numpy(values)).cumulants(torch.zeros(4, dtype=torch.float64), 0.3)
    for got, statistic in ((found.skewness, stats.skew), (found.kurtosis, stats.kurtosis)):
        others = np.stack([statistic(np.delete(values, k, 0), bias=False) for k in range(12)])
        np.testing.assert_allclose(got.se, np.sqrt(11 / 12 * ((others - others.mean(0)) ** 2).sum(0)), rtol=1e-8)
        np.testing.assert_allclose(got.high - got.value, stats.t.ppf(0.975, 11) * got.se.numpy(), rtol=2e-3)


@pytest.mark.parametrize("law", ["normal", "exponential"])
def test_errors_of_cumulants_are_of_the_right_size(law):
    """400 repetitions at once, as coordinates; the exponential law has skewness 2 and excess kurtosis 6."""
    values = getattr(np.random.default_rng(2), f"standard_{law}")((150, 400))
    found = constant(torch.from_numpy(values)).cumulants(torch.zeros(400, dtype=torch.float64), 0.3)
    for got, true in ((found.skewness, 2.0), (found.kurtosis, 6.0)):
        told, seen = float(got.se.mean()), float(got.value.std())
        assert 0.6 < told / seen < 1.3
        if law == "normal":
            assert abs(float(got.value.mean())) < 4 * seen / 20
            inside = (got.low < 0) & (got.high > 0)
            assert inside.double().mean() > 0.88
        else:
            assert abs(float(got.value.mean()) - true) < 0.4 * true  # few members see the tail
            assert (got.value > got.se).double().mean() > 0.9


def test_where_nothing_varies_cumulants_are_zero():
    values = torch.ones(8, 3, dtype=torch.float64)
    values[:, 1] = torch.arange(8)
    found = constant(values).cumulants(torch.zeros(3, dtype=torch.float64), 0.3)
    for got in (found.skewness, found.kurtosis):
        assert got.value[[0, 2]].tolist() == [0.0, 0.0]
        assert got.se.isfinite().all()
    with pytest.raises(InputError, match="five"):
        constant(values[:4]).cumulants(torch.zeros(3, dtype=torch.float64), 0.3)


# -------------------- members depend on (seed, index) alone


@pytest.mark.parametrize("name", MODELS)
def test_members_do_not_depend_on_their_company(name):
    model, points = MODELS[name]
    whole = train(model, points, members=8, draws=20)
    some = train(model, points, members=[5, 7], draws=20)
    again = train(model, points, members=range(8), draws=20)
    assert some.info["members"] == [5, 7]
    for key, a in whole.state.items():
        digits = 1e-9 if a.dtype == torch.float64 else 1e-4  # Adam divides by what may be rounding
        torch.testing.assert_close(some.state[key], a[[5, 7]], rtol=digits, atol=digits)
        assert torch.equal(again.state[key], a)
    assert not torch.equal(train(model, points, members=8, draws=20, seed=1)(places(whole, 1), 0.2),
                           whole(places(whole, 1), 0.2))  # fmt: skip


def test_objectives_share_inputs_and_differ_in_targets():
    model, points = MODELS["lazy"]
    one, none, some = (train(model, points, draws=20, objective=goal) for goal in ("J1", "J0", vk.JK(2)))
    assert torch.equal(one.state["inputs"], none.state["inputs"])
    assert torch.equal(one.state["inputs"], some.state["inputs"])
    assert not torch.allclose(one.state["coefficients"], none.state["coefficients"])
    first, second = (Training(vk.Empirical(PLANE), PROCESS, goal, 30).batch([0, 4], 30) for goal in (J1(), J0()))
    assert torch.equal(first.x, second.x)
    assert torch.equal(first.t, second.t)
    assert not torch.allclose(first.m, second.m)


def test_what_does_not_vary_is_the_same_for_all():
    held = train(vary=())
    assert torch.equal(held.state["weights"], held.state["weights"][:1].expand(6, -1, -1))
    inputs = train(MODELS["lazy"][0], PLANE, draws=20, vary="targets").state["inputs"]
    assert torch.equal(inputs, inputs[:1].expand_as(inputs))
    same = Training(vk.Empirical(PLANE), PROCESS, J1(), 30, VARIES).batch([0, 1], 30)
    assert not torch.equal(same.x[0], same.x[1])


# -------------------- samples


def test_starts_seeds_and_steps(line):
    n = 5
    shared, separate = line.start(n, 3), line.start(n, 3, shared=False)
    assert shared.shape == (n, 1)
    assert separate.shape == (6, n, 1)
    assert not torch.equal(separate[0], separate[1])
    kept = {"steps": 6, "show": False}
    assert torch.equal(line.sample(n, seed=3, **kept), line.sample(x_T=shared, **kept))
    assert torch.equal(line.sample(n, seed=3, shared=False, **kept), line.sample(x_T=separate, **kept))
    assert not torch.equal(line.sample(n, seed=3, **kept), line.sample(n, seed=4, **kept))
    assert not torch.equal(line.sample(n, seed=3, **kept), line.sample(n, seed=3, steps=7))
    torch.testing.assert_close(line.sample(x_T=separate, **kept)[4], line.sample(x_T=separate[4], **kept)[4])
    assert line.sample(x_T=shared.float(), **kept).dtype == torch.float32


@pytest.mark.parametrize("method", ["euler", "heun", "exponential", "dopri5"])
def test_samples_are_each_members_own_by_every_method(line, method):
    x = line.start(3, 1)
    got = line.sample(x_T=x, steps=8, method=method, spacing="log")
    for m in (0, 4):
        want = pf_ode(line[m], x, steps=8, method=method, spacing="log")
        torch.testing.assert_close(got[m], want, rtol=1e-7, atol=1e-7)
    alone = line[4:5].sample(x_T=x, steps=8, method=method, spacing="log")
    torch.testing.assert_close(alone[0], got[4], rtol=1e-9, atol=1e-9)


def test_blocks_of_samples_change_nothing(line, monkeypatch):
    whole = line.sample(5, steps=6)
    monkeypatch.setattr("vkernel.train.ensemble.CHUNK", 11)
    torch.testing.assert_close(line.sample(5, steps=6), whole)


# -------------------- members that diverge


def test_diverged_members_are_counted_and_left_out(line):
    ens = broken(line, {1: math.nan, 4: math.inf})
    keep = [0, 2, 3, 5]
    assert ens.diverged == [1, 4]
    assert "2 diverged" in repr(ens)
    assert "2 of 6" in ens.report
    assert "6 members are finite" in line.report
    s = line(X, 0.2)[keep]
    torch.testing.assert_close(ens.mean(X, 0.2), s.mean(0))
    torch.testing.assert_close(ens.cov(X, 0.2).trace(), s[..., 0].var(0))
    assert ens(X, 0.2)[1].isnan().any()
    assert len(ens) == 6
    with pytest.warns(UserWarning, match="2 of 6 members diverged in training, 0 while sampling"):
        drawn = ens.sample(4, steps=5)
    assert drawn[[1, 4]].isnan().all()
    torch.testing.assert_close(drawn[keep], line.sample(4, steps=5)[keep])


@pytest.mark.parametrize("method", ["euler", "dopri5"])
def test_members_that_diverge_while_sampling_are_lost_alone(line, method):
    weights = line.state["weights"].clone()
    weights[2] = 1e305
    ens = Ensemble(line.model, {"weights": weights}, PROCESS, (1,), line.info)
    assert ens.diverged == []
    with pytest.warns(UserWarning, match="0 of 6 members diverged in training, 1 while sampling"):
        drawn = ens.sample(4, steps=5, method=method)
    assert drawn[2].isnan().all()
    assert drawn[[0, 1, 3, 4, 5]].isfinite().all()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        line.sample(4, steps=5)


def test_an_ensemble_of_none_is_refused(line):
    ens = broken(line, dict.fromkeys(range(6), math.nan))
    for call in (lambda: ens.mean(X, 0.2), lambda: ens.cov(X, 0.2), lambda: ens.sample(3)):
        with pytest.raises(InputError, match="6 of 6 members diverged"):
            call()
    with pytest.raises(InputError, match="two finite"):
        broken(line, dict.fromkeys(range(5), math.inf)).cov(X, 0.2)


def test_training_that_diverges_warns():
    model = vk.models.MLP(width=4, depth=2, steps=60, batch=8, optimiser="sgd", lr=1e12, activation="relu")
    with pytest.warns(UserWarning, match="3 of 3 members diverged"):
        ens = train(model, members=3, draws=20)
    assert ens.diverged == [0, 1, 2]


# -------------------- files


def test_saved_ensembles_come_back_bit_for_bit(ens, tmp_path):
    folder = ens.save(tmp_path / "new" / "folder")
    assert sorted(p.name for p in folder.iterdir()) == ["ensemble.json", "state.safetensors"]
    back = vk.load_ensemble(str(folder))
    assert list(map(repr, (back.model, back.process))) == list(map(repr, (ens.model, ens.process)))
    assert back.process == ens.process
    assert (back.shape, back.info) == (ens.shape, ens.info)
    assert set(back.state) == set(ens.state)
    for name, a in ens.state.items():
        assert torch.equal(back.state[name], a)
        assert back.state[name].dtype == a.dtype
    x = places(ens, 4)
    assert torch.equal(back(x, 0.3), ens(x, 0.3))


def test_diverged_members_survive_a_file(line, tmp_path):
    back = vk.load_ensemble(broken(line, {3: math.nan}).save(tmp_path))
    assert back.diverged == [3]


@pytest.fixture
def folder(line, tmp_path) -> Path:
    return line.save(tmp_path / "ens")


def refused(folder: Path, says: str) -> None:
    with pytest.raises(InputError, match=says):
        vk.load_ensemble(folder)


def test_damaged_files_are_refused(folder, tmp_path):
    refused(tmp_path / "nowhere", "no ensemble")
    text, raw = (folder / "ensemble.json").read_text(), (folder / "state.safetensors").read_bytes()
    for bad in ("", "{", text[: len(text) // 2]):
        (folder / "ensemble.json").write_text(bad)
        refused(folder, "not JSON")
    (folder / "ensemble.json").write_bytes(b"\xff\xfe\x00")
    refused(folder, "not JSON")
    (folder / "ensemble.json").write_text(text)
    for bad in (b"", raw[:7], raw[: len(raw) // 2], raw[:-1], b"\xff" * 64):
        (folder / "state.safetensors").write_bytes(bad)
        refused(folder, "damaged")
    (folder / "state.safetensors").unlink()
    refused(folder, "no ensemble")


def test_json_of_another_kind_is_refused(folder):
    about = json.loads((folder / "ensemble.json").read_text())
    others = [[], None, 3, "text", {}, {"kind": "study"}]
    for key in ("model", "process", "shape", "info"):
        others.append({k: v for k, v in about.items() if k != key})
        others += [{**about, key: bad} for bad in (3, "text", ["a", "b"])]
    others += [
        {**about, "model": {**about["model"], "kind": "transformer"}},
        {**about, "model": {**about["model"], "depth": 3}},
        {**about, "model": {**about["model"], "features": {"kind": "grid", "axes": [["gaussian", 4]]}}},
        {**about, "model": {**about["model"], "features": {"kind": "wavelets"}}},
        {**about, "process": {"kind": "vp", "beta_mean": 1}},
    ]
    for other in others:
        (folder / "ensemble.json").write_text(json.dumps(other))
        with pytest.raises(InputError):
            vk.load_ensemble(folder)


class Evil:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return (Path.touch, (self.mark,))


def test_a_pickle_in_disguise_is_refused_and_not_run(folder, tmp_path):
    mark = tmp_path / "ran"
    for name in ("state.safetensors", "ensemble.json"):
        kept = (folder / name).read_bytes()
        (folder / name).write_bytes(pickle.dumps(Evil(mark)))
        refused(folder, "damaged" if name.startswith("state") else "not JSON")
        torch.save({"a": Evil(mark)}, folder / name)
        refused(folder, "damaged" if name.startswith("state") else "not JSON")
        (folder / name).write_bytes(kept)
    assert not mark.exists()
    assert len(vk.load_ensemble(folder)) == 6


def test_tensors_that_are_no_state_are_refused(folder):
    from safetensors.torch import save_file

    about = json.loads((folder / "ensemble.json").read_text())
    del about["sha256"]  # written by an earlier version
    (folder / "ensemble.json").write_text(json.dumps(about))
    assert len(vk.load_ensemble(folder)) == 6
    for bad in ({"a": torch.zeros(2, 1), "b": torch.zeros(3, 1)}, {"a": torch.zeros(())}, {}):
        save_file(bad, folder / "state.safetensors")
        with pytest.raises(InputError, match="member"):
            vk.load_ensemble(folder)


def test_a_place_that_cannot_be_written_is_refused(line, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="Cannot write"):
        line.save(tmp_path / "file" / "ens")


def test_saving_that_fails_leaves_the_old_files(line, folder, monkeypatch):
    before = {p.name: p.read_bytes() for p in folder.iterdir()}

    def full(self, target):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full)
        with pytest.raises(InputError, match="No space left"):
            line[:2].save(folder)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before


def test_saving_that_is_killed_between_its_files_is_noticed(line, folder, monkeypatch):
    plain = Path.replace

    def killed(self, target):
        if Path(target).name == "ensemble.json":
            raise KeyboardInterrupt
        return plain(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            line[:2].save(folder)
    assert len(list(folder.iterdir())) == 2  # nothing half-written lies about
    refused(folder, "do not belong together")
    line[:2].save(folder)
    assert len(vk.load_ensemble(folder)) == 2


# -------------------- refusals


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"members": 0}, "members"),
        ({"members": -2}, "members"),
        ({"members": []}, "members"),
        ({"members": [1, 1]}, "members"),
        ({"members": [0, -1]}, "members"),
        ({"members": 2.5}, "members"),
        ({"members": [0.5]}, "members"),
        ({"members": "ab"}, "members"),
        ({"draws": 0}, "draws"),
        ({"draws": 2.5}, "draws"),
        ({"draws": None}, "draws"),
        ({"objective": "J2"}, "objective"),
        ({"objective": None}, "objective"),
        ({"vary": ("weather",)}, "vary"),
        ({"times": "sometimes"}, "times"),
        ({"seed": "a"}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"dtype": torch.float16}, "dtype"),
        ({"dtype": torch.int64}, "dtype"),
        ({"model": "linear"}, "model"),
        ({"model": grid()}, "model"),
        ({"points": PLANE}, "vectors of 1"),
        ({"points": POINTS * math.nan}, "not finite"),
    ],
)
def test_bad_training_is_refused(options, says):
    with pytest.raises(InputError, match=says):
        train(**options)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda e: e([0.0], 0.2), "tensor"),
        (lambda e: e(torch.zeros(3, 2), 0.2), "event shape"),
        (lambda e: e(torch.zeros(()), 0.2), "event shape"),
        (lambda e: e(X, 0.01), "0.01"),
        (lambda e: e(X, 1.5), "1.5"),
        (lambda e: e(X, math.nan), "nan"),
        (lambda e: e(X, "noon"), "number"),
        (lambda e: e(X, torch.full((3,), 0.2)), "broadcast"),
        (lambda e: e.paired(X, 0.2), "paired"),
        (lambda e: e.paired(X[0], 0.2), "paired"),
        (lambda e: e.paired(X[:6], torch.full((6, 2), 0.2)), "broadcast"),
        (lambda e: e.mean(torch.zeros(3, 2), 0.2), "event shape"),
        (lambda e: e.cov(X, 0.2, None, 0.3), "x2 with t2"),
        (lambda e: e[:1].cov(X, 0.2), "two finite"),
        (lambda e: e.sample(0), "samples"),
        (lambda e: e.sample(2.5), "samples"),
        (lambda e: e.sample(True), "samples"),
        (lambda e: e["first"], "number or a slice"),
        (lambda e: e[[0, 1]], "number or a slice"),
        (lambda e: e.sample(), "either"),
        (lambda e: e.sample(3, x_T=X), "either"),
        (lambda e: e.sample(3, steps=0), "steps"),
        (lambda e: e.sample(3, method="rk4"), "method"),
        (lambda e: e.sample(3, spacing="cubic"), "spacing"),
        (lambda e: e.sample(x_T=X * math.nan), "NaN"),
        (lambda e: e.sample(x_T=X[0]), "x_T"),
        (lambda e: e.sample(x_T=torch.zeros(5, 3, 1)), "5 members"),
        (lambda e: Ensemble(e.model, {}, PROCESS, (1,)), "state"),
    ],
)
def test_bad_questions_are_refused(line, call, says):
    with pytest.raises(InputError, match=says):
        call(line)
