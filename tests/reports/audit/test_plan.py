"""How an audit is run: batches, threads, precision, cost, and results that survive a kill."""

from __future__ import annotations

import functools
import os
import time
from pathlib import Path

import pytest
import torch
from audited import PROCESS, TINY, marks
from checkpoints import wrap
from torch import Tensor, nn

import vkernel as vk
from vkernel.reports.audit import Audit, Sizes, plan as plans
from vkernel.reports.audit.kept import Kept, digest

SIZES = Sizes(24, 32, 1, 2, 48, 8, 4, 48, 10, 64, 10, 8)


class Counted(nn.Module):
    """The ideal denoiser of some points; it counts images and calls, and stops after ``limit`` calls."""

    def __init__(self, points: Tensor) -> None:
        super().__init__()
        self.points = nn.Parameter(points.flatten(1), requires_grad=False)
        self.register_buffer("ratio", (PROCESS.sigma(torch.arange(100)) / PROCESS.alpha(torch.arange(100))).float())
        self.batches, self.limit, self.kinds = [], 10**9, set()
        self.layer = nn.Linear(16, 16, bias=False)
        nn.init.eye_(self.layer.weight)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        self.batches.append(len(x))
        if len(self.batches) > self.limit:
            raise KeyboardInterrupt
        r = self.ratio[t][:, None]
        rows = self.layer(x.flatten(1))
        self.kinds.add(rows.dtype)
        y = rows.float() * (1 + r * r).sqrt()
        away = (y[:, None] - self.points).square().sum(2)
        m = torch.softmax(-away / (2 * r * r), 1) @ self.points
        return ((y - m) / r).reshape(x.shape)


@functools.cache
def data() -> tuple[vk.Empirical, vk.Empirical]:
    points = marks().sample(96, generator=0).float()
    return vk.Empirical(points[:48]), vk.Empirical(points[48:])


def audited(net: Counted, **options: object) -> Audit:
    own, held = data()
    net.batches.clear()
    score = wrap(net, PROCESS, shape=(1, 4, 4), name="counted")
    return vk.audit(score, own, test=held, **{"sizes": SIZES, "batch": 20} | options)


def facts(found: Audit) -> dict[str, object]:
    return {k: v for k, v in found.to_dict().items() if k not in ("seconds", "date")} | {
        kind: s.images.tolist() for kind, s in found.networks[0].samples.items()
    }


def test_an_audit_that_was_killed_continues(tmp_path: Path) -> None:
    net = Counted(data()[0][:])
    plain = facts(audited(net))
    calls = len(net.batches)
    assert max(net.batches) == 20
    for limit in (3 * calls // 4, calls // 5):  # the check of conventions is the longest stage of so small an audit
        net.limit = limit
        with pytest.raises(KeyboardInterrupt):
            audited(net, resume=tmp_path / "kept")
    net.limit = 10**9
    assert facts(audited(net, resume=tmp_path / "kept")) == plain
    assert len(net.batches) < 0.3 * calls
    files = sorted((tmp_path / "kept").iterdir())
    assert sum("samples_ode" in f.name for f in files) == 3  # 48 samples, 20 at a time
    for path in files[::3]:  # a flipped bit, an empty file
        held = bytearray(path.read_bytes())
        held[len(held) // 2] ^= 1
        path.write_bytes(held)
    files[1].write_bytes(b"")
    assert facts(audited(net, resume=tmp_path / "kept")) == plain
    assert facts(audited(net, resume=tmp_path / "kept")) == plain
    assert not net.batches
    with torch.no_grad():
        net.points[0] += 1  # other weights: nothing is reused
    assert facts(audited(net, resume=tmp_path / "kept")) != plain
    assert len(net.batches) >= calls


def test_what_can_be_kept(tmp_path: Path) -> None:
    with pytest.raises(vk.InputError, match="only those of torch modules"):
        vk.audit(lambda x, t: -x, data()[0], vk.VP(), resume=tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(vk.InputError, match="is a file; results are kept in a folder"):
        Kept(tmp_path / "file", 1)
    one, other = Counted(torch.zeros(2, 16)), Counted(torch.zeros(2, 16))
    assert digest(one) == digest(other) != digest(Counted(torch.ones(2, 16)))
    assert digest([1, 2], 3) != digest([1], 2, 3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    net = Counted(data()[0][:])
    found = audited(net, dtype=dtype).networks[0]
    assert net.kinds == {dtype, torch.float32}  # derivatives are those of float32
    assert found.conventions.fits
    assert found.samples["ode"].images.dtype == torch.float32
    assert found.samples["ode"].copies.fraction.value > 0.9


@pytest.mark.parametrize("sizes", [SIZES, TINY])
def test_the_number_of_evaluations_is_predicted(sizes: Sizes) -> None:
    net = Counted(data()[0][:])
    said: list[str] = []
    audited(net, sizes=sizes, progress=lambda label, share: said.append(label))
    expected = plans.Plan(20, 0, 1.0, 0.0, 0.0).evaluations(sizes, sizes.steps or 0)
    assert 1 / 1.5 < sum(net.batches) / expected < 1.5
    assert said[0].startswith(f"About {expected:,} images go through the network, 20 at a time: about ")


def test_a_part_of_the_data_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times of queries and comparisons are those of a part, in proportion; the clock counts points."""
    points, sizes = marks().sample(400, generator=0).float(), []
    weights = torch.arange(400) % 4 > 0
    held = vk.Empirical(points, weights.double())
    net = wrap(Counted(points[:48]), PROCESS, shape=(1, 4, 4))

    def nearest(x: Tensor, some: vk.Empirical, k: int) -> tuple[Tensor, Tensor]:
        sizes.append(some.n)
        assert some.n == 400 or bool((some.weights > 0).all())
        return torch.full((len(x), k), float(some.n)), torch.zeros(len(x), k).long()

    monkeypatch.setattr(plans, "nearest", nearest)
    monkeypatch.setattr(plans, "_seconds", lambda call: float(call().flatten()[0]))
    assert plans.measure(net, held).compared * plans.QUERIES == pytest.approx(400)
    monkeypatch.setattr(plans, "PART", 100)
    assert plans.measure(net, held).compared * plans.QUERIES == pytest.approx(400)
    assert set(sizes) == {400, 100}


def test_threads_are_those_that_are_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(4))
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)

    def takes(seconds: dict[int, float]) -> int:
        def call() -> Tensor:
            time.sleep(seconds[torch.get_num_threads()])
            return torch.zeros(1)

        return plans.fastest_threads(call)

    try:
        torch.set_num_threads(4)
        assert takes({1: 0.02, 2: 0.03, 4: 0.06}) == 1
        assert takes({1: 0.04, 2: 0.01, 4: 0.01}) == 2  # of equally fast numbers the fewest
        assert takes({1: 0.06, 2: 0.03, 4: 0.01}) == 4
        assert torch.get_num_threads() == 4
        monkeypatch.setenv("OMP_NUM_THREADS", "4")
        assert takes({1: 0.0, 2: 0.0, 4: 0.0}) == 0
    finally:
        torch.set_num_threads(before)


def test_the_default_batch_follows_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    net = wrap(Counted(torch.zeros(2, 16)), PROCESS, shape=(1, 4, 4))
    x, t = torch.zeros(1, 1, 4, 4), torch.tensor(5.0)
    each = 64 * 3  # bytes: the image, the layer, the whole
    for free, batch in ((10**9, 64), (8 * each * 40, 32), (8 * each, 1), (0, 1)):
        monkeypatch.setattr(plans, "free_memory", lambda _, free=free: free)
        assert plans.largest_batch(net, x, t) == batch
