"""Ensembles: scores, members that depend on (seed, index) alone, samples, members that diverge, refusals."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch
from ensembles import MODELS, PLANE, POINTS, PROCESS, X, broken, grid, places, train
from hypothesis import given, settings, strategies as st

import vkernel as vk
from vkernel.core import rng
from vkernel.core.errors import InputError
from vkernel.sample import pf_ode
from vkernel.train.ensemble import Ensemble
from vkernel.train.objectives import J0, J1, VARIES, Training

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
    drawn = ens.sample(x_T=x, steps=6, method="euler", spacing="uniform")
    assert drawn.shape == (5, 3, *ens.shape)
    torch.testing.assert_close(
        drawn[2], pf_ode(member, x, method="euler", spacing="uniform", steps=6), rtol=1e-4, atol=1e-4
    )
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
    kept = {"steps": 6}
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
    monkeypatch.setattr("vkernel.sample.scores.CHUNK", 11)
    torch.testing.assert_close(line.sample(5, steps=6), whole)


def test_what_is_saved_of_a_member_is_that_of_its_score(ens):
    how = {"steps": 4, "save": ("path", "error", "logp")}
    found = ens.sample(2, seed=3, shared=False, **how)
    assert found.path.shape == (5, 5, 2, *ens.shape)
    assert found.error.shape == found.logp.shape == (5, 2)
    for m in (0, 3):
        own = pf_ode(ens[m], ens.start(2, 3, shared=False)[m], generator=rng.key(3, "ensemble/probes", m), **how)
        torch.testing.assert_close(found.times, own.times)
        for name in ("x", "error", "logp"):
            torch.testing.assert_close(getattr(found, name)[m], getattr(own, name), rtol=2e-3, atol=2e-4)
        torch.testing.assert_close(found.path[:, m], own.path, rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("method", ["exponential", "dopri5"])
def test_the_callback_receives_all_members_at_every_time(line, method, monkeypatch):
    monkeypatch.setattr("vkernel.sample.scores.CHUNK", 2)
    ens, seen, shares = broken(line[:3], {1: math.nan}), [], []
    how = {"steps": 6, "method": method, "progress": lambda label, share: shares.append(share)}
    with pytest.warns(UserWarning, match="1 of 3"):
        found = ens.sample(2, save="path", callback=lambda k, t, x: seen.append((k, t, x)), **how)
    assert [k for k, _, _ in seen] == list(range(7))
    assert [t for _, t, _ in seen] == found.times.tolist()
    torch.testing.assert_close(torch.stack([x for _, _, x in seen])[:, [0, 2]], found.path[:, [0, 2]])
    torch.testing.assert_close(found.path[-1], found.x, equal_nan=True)
    assert found.path[:, 1].isnan().all()
    assert found.path[:, [0, 2]].isfinite().all()
    assert found.error is found.logp is None
    assert shares == sorted(shares)
    assert shares[-1] == pytest.approx(1)
    alone = line[:1].sample(2, callback=lambda k, t, x: None, **how)
    torch.testing.assert_close(alone[0], found.x[0])


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
        (lambda e: e["first"], "index or a slice"),
        (lambda e: e[[0, 1]], "index or a slice"),
        (lambda e: e.sample(), "either"),
        (lambda e: e.sample(3, x_T=X), "either"),
        (lambda e: e.sample(3, steps=0), "steps"),
        (lambda e: e.sample(3, method="rk4"), "method"),
        (lambda e: e.sample(3, spacing="cubic"), "spacing"),
        (lambda e: e.sample(3, save="score"), "save"),
        (lambda e: e.sample(x_T=X * math.nan), "NaN"),
        (lambda e: e.sample(x_T=X[0]), "x_T"),
        (lambda e: e.sample(x_T=torch.zeros(5, 3, 1)), "5 members"),
        (lambda e: Ensemble(e.model, {}, PROCESS, (1,)), "state"),
    ],
)
def test_bad_questions_are_refused(line, call, says):
    with pytest.raises(InputError, match=says):
        call(line)


def test_more_members_than_memory_are_refused_at_once():
    with pytest.raises(InputError, match="1,000,000,000,000 members needs"):
        vk.train_ensemble(*MODELS["grid"], PROCESS, members=10**12, draws=8)
