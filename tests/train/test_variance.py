"""The split of the variance: known components, the nested design, and the linear theory's shares."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

import vkernel as vk
from vkernel.core.errors import InputError
from vkernel.core.variance import variance_components
from vkernel.kernels import Linear
from vkernel.train.ensemble import VarianceSplit
from vkernel.train.objectives import J1, VARIES, Training

PROCESS = vk.VP(eps=0.05)
POINTS = torch.tensor([[-1.0], [0.0], [1.0]], dtype=torch.float64)
X = torch.linspace(-1.5, 1.5, 16, dtype=torch.float64)[:, None]


def split(model, members=(8, 8), x: Tensor = X, t=0.2, points: Tensor = POINTS, **options) -> VarianceSplit:
    return vk.variance_split(model, points, PROCESS, x, t, members, **{"draws": 64} | options)


def linear(per_axis: int = 4, **options) -> vk.models.Linear:
    return vk.models.Linear(vk.features.grid("gaussian", per_axis, 1, process=PROCESS), **options)


# -------------------- known components


def analysis_of_variance(y: np.ndarray) -> list[float]:
    """Components by the mean squares of a balanced nested analysis of variance, ``y (n_1, …, n_L)``."""
    squares, levels = [], y.ndim
    for level in range(levels):
        inner = y.mean(axis=tuple(range(level + 1, levels)), keepdims=True)
        outer = y.mean(axis=tuple(range(level, levels)), keepdims=True)
        each = np.broadcast_to((inner - outer) ** 2, y.shape).sum()
        freedom = math.prod(y.shape[:level]) * (y.shape[level] - 1)
        squares.append(each / freedom)
    below = [*squares[1:], 0.0]
    return [(squares[k] - below[k]) / math.prod(y.shape[k + 1 :]) for k in range(levels)]


@settings(max_examples=40, deadline=None)
@given(sizes=st.lists(st.integers(2, 4), min_size=1, max_size=4), d=st.integers(1, 3), seed=st.integers(0, 99))
def test_components_are_those_of_the_analysis_of_variance(sizes, d, seed):
    y = np.random.default_rng(seed).standard_normal((*sizes, 2, d))
    got = variance_components(torch.from_numpy(y), y.ndim - 2)
    for n in range(2):
        want = sum(np.array(analysis_of_variance(y[..., n, a])) for a in range(d))
        np.testing.assert_allclose(got[:, n], want, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(
        variance_components(torch.from_numpy(3 * y + 7), y.ndim - 2), 9 * got, rtol=1e-9, atol=1e-10
    )


def test_components_are_unbiased():
    """3000 repetitions at once: y = a_i + b_ij + c_ijk."""
    sizes, true, reps = (5, 4, 3), (1.0, 2.0, 0.5), 3000
    g = np.random.default_rng(0)
    y = sum(math.sqrt(v) * g.standard_normal((*sizes[: k + 1], *(1,) * (2 - k), reps, 1)) for k, v in enumerate(true))
    got = variance_components(torch.from_numpy(y), y.ndim - 2)
    se = got.std(1) / math.sqrt(reps)
    assert ((got.mean(1) - torch.tensor(true)).abs() <= 4 * se).all()


class Effects(vk.models.Model):
    """A score that is a sum of effects, one from each stream, independent for each of N places x = 0 … N - 1."""

    randomness = ("init", "inputs", "targets")

    def __init__(self, variances: tuple[float, ...], count: int) -> None:
        self.target, self.weight, self.variances, self.count = "score", "sigma2", variances, count
        super().__post_init__()

    def fit(self, training, members, report):
        rows = []
        for m in members:
            parts = [
                math.sqrt(v) * torch.randn(self.count, generator=training.generator(name, m), dtype=torch.float64)
                for name, v in zip(self.randomness, self.variances, strict=True)
            ]
            rows.append(sum(parts))
        return {"values": torch.stack(rows)}

    def output(self, state, x, t, process):
        return state["values"][:, x[0, :, 0].long()][..., None]

    @property
    def spec(self):
        return {}


def test_a_nested_design_finds_known_components_with_honest_errors():
    true, N = torch.tensor([1.0, 0.5, 2.0], dtype=torch.float64), 400
    places = torch.arange(N, dtype=torch.float64)[:, None]
    found = split(Effects(tuple(true.tolist()), N), (12, 3, 2), places)
    assert found.names == ("init", "inputs", "targets")
    assert found.sizes == (12, 3, 2)
    value, se = found.variance.value, found.variance.se
    assert value.shape == (3, N)
    seen = value.std(1)
    assert ((value.mean(1) - true).abs() <= 4 * seen / math.sqrt(N)).all()
    assert ((se.mean(1) / seen - 1).abs() < 0.25).all()
    inside = (found.variance.low <= true[:, None]) & (true[:, None] <= found.variance.high)
    assert (inside.double().mean(1) > 0.85).all()
    torch.testing.assert_close(found.share.value.sum(0), torch.ones(N, dtype=torch.float64))
    shares = true / true.sum()  # pooled over places: all but exact
    assert ((found.pooled.value - shares).abs() <= 4 * found.pooled.se).all()
    assert found.pooled.se.max() < 0.05
    torch.testing.assert_close(found.pooled.value, value.sum(1) / value.sum())


# -------------------- the design


class Watched(vk.models.Linear):
    """Keeps what it is fitted to."""

    def fit(self, training, members, report):
        self.seen = training, list(members)
        return super().fit(training, members, report)


def test_streams_are_nested():
    model = Watched(linear().features)
    split(model, (3, 4))
    training, members = model.seen
    assert members == list(range(12))
    batch = training.batch(members, 64)
    x, m = batch.x.reshape(3, 4, 64), batch.m.reshape(3, 4, 64)
    for i in range(3):
        for j in range(1, 4):
            assert torch.equal(x[i, 0], x[i, j])
            assert not torch.equal(m[i, 0], m[i, j])
    assert not torch.equal(x[0, 0], x[1, 0])
    assert not torch.equal(m[0, 0], m[1, 0])
    assert training.design == {"inputs": [i for i in range(3) for _ in range(4)], "targets": list(range(12))}


def test_redrawn_origins_leave_the_law_of_the_draws():
    """With a design the target is drawn from the posterior of x: (x, x0) have the law of noising x0."""
    design = {"inputs": [0] * 2, "targets": [0, 1]}
    nested = Training(vk.Empirical(POINTS), PROCESS, J1(), 4000, VARIES, 3, design=design).batch([0, 1], 4000)
    plain = Training(vk.Empirical(POINTS), PROCESS, J1(), 4000, seed=4).batch([0, 1], 4000)
    for a, b in ((nested.m, plain.m), (nested.m * nested.x, plain.m * plain.x)):
        se = math.sqrt(float(a[0].var() + b.var() / 2) / 4000)
        assert abs(float(a[0].mean() - b.mean())) < 4 * se


def test_every_source_of_a_network():
    model = vk.models.MLP(width=4, depth=1, steps=6, batch=8, lr=1e-2)
    found = split(model, (3, 2, 2, 2), draws=24)
    assert found.names == ("init", "inputs", "targets", "order")
    assert found.sizes == (3, 2, 2, 2)
    assert found.variance.value.shape == (4, 16)
    assert "order" in str(found)
    assert split(model, (3,), draws=24).sizes == (3, 2, 2, 2)
    fresh = split(model, (3, 2), draws=None)
    assert fresh.names == ("init", "inputs", "targets")
    whole = vk.models.MLP(width=4, depth=1, steps=6, batch=None, lr=1e-2)
    assert split(whole, (3, 2), draws=24).names == ("init", "inputs", "targets")
    lazy = vk.models.Lazy(vk.models.NTK(2, "relu"), tau=3.0)
    assert split(lazy, (3, 2), draws=24).names == ("init", "inputs", "targets")
    still = vk.models.Lazy(vk.models.NTK(2, "relu"), tau=3.0, init=False)
    assert split(still, (3, 2), draws=24).names == ("inputs", "targets")


def test_a_network_that_hardly_moves_varies_by_its_start():
    model = vk.models.MLP(width=4, depth=1, steps=1, batch=8, lr=1e-9, optimiser="sgd", dtype="float64")
    found = split(model, (5, 2, 2, 2), draws=24)
    assert float(found.pooled.value[0]) == pytest.approx(1, abs=1e-6)


def test_images_and_batches_of_places():
    points = torch.rand(4, 1, 2, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    model = vk.models.MLP(width=4, depth=1, steps=2, batch=8)
    x = torch.zeros(2, 3, 1, 2, 2)
    t = torch.tensor([0.1, 0.2, 0.3])
    found = split(model, (3,), x, t, points, draws=24)
    assert found.share.value.shape == (4, 2, 3)
    torch.testing.assert_close(found.share.value.sum(0), torch.ones(2, 3, dtype=torch.float64))


# -------------------- linear models


def test_without_target_noise_there_is_no_such_variance():
    found = split(linear(), (6, 4), objective="J0")
    total = found.variance.value.sum(0)
    assert (found.variance.value[1].abs() <= 1e-20 * total).all()
    torch.testing.assert_close(found.pooled.value, torch.tensor([1.0, 0.0], dtype=torch.float64))


def test_the_parts_add_up_to_the_ensembles_variance():
    found = split(linear(), (200, 2), seed=1)
    ens = vk.train_ensemble(linear(), POINTS, PROCESS, members=400, draws=64, seed=2)
    s = ens(X, 0.2)[..., 0]
    q = ((s - s.mean(0)) ** 2).sum(1) * 400 / 399
    total, parts = float(q.mean()), float(found.variance.value.sum())
    se = math.hypot(float(q.std()) / 20, float(q.std()) / math.sqrt(200))  # 200 sets of inputs, two targets each
    assert abs(total - parts) < 4 * se
    assert se < 0.1 * total


@pytest.mark.parametrize("goal", ["J1", vk.JK(4)], ids=str)
def test_the_share_of_the_targets_is_what_the_linear_kernel_says(goal):
    """P/F = 8."""
    model, P = linear(), 128
    found = split(model, (250, 3), draws=P, objective=goal, seed=1)
    kernel = Linear(model, POINTS, PROCESS, draws=P, objective=goal, seed=2, sets=1500)
    parts = [float(kernel.only(part).cov(X, 0.2).trace().sum()) for part in ("misfit", "target_noise")]
    share = parts[1] / sum(parts)
    assert float(found.pooled.se[1]) < 0.05
    assert abs(float(found.pooled.value[1]) - share) < 3.5 * float(found.pooled.se[1]) + 0.01
    assert 0.02 < share < 0.98
    pooled = found.variance.value.sum(1)
    for got, want in zip(pooled.tolist(), parts, strict=True):
        assert abs(got / want - 1) < 0.25


# -------------------- refusals


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"members": (2, 4)}, "at least 3"),
        ({"members": (4, 1)}, "at least 2"),
        ({"members": (4, 0)}, "at least 2"),
        ({"members": (4, 3, 2)}, "inputs, targets"),
        ({"members": 8}, "members"),
        ({"model": "linear"}, "model"),
        ({"objective": "J2"}, "objective"),
        ({"draws": 0}, "draws"),
        ({"draws": None}, "draws"),
        ({"x": torch.zeros(3, 2)}, "event shape"),
        ({"x": [0.0]}, "tensor"),
        ({"seed": 1.5}, "seed"),
        ({"t": 2.0}, "2"),
        ({"t": torch.full((3,), 0.2)}, "broadcast"),
    ],
)
def test_bad_questions_are_refused(options, says):
    with pytest.raises(InputError, match=says):
        split(**{"model": linear()} | options)


def test_a_design_with_a_diverged_member_is_refused():
    model = vk.models.MLP(width=4, depth=2, steps=60, batch=8, optimiser="sgd", lr=1e12, activation="relu")
    with pytest.raises(InputError, match="must be whole"):
        split(model, (3,), draws=24)
