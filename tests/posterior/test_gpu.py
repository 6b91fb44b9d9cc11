"""The GPU path, on whatever device is here: its bounds, its stages, and that its results are the reference's."""

from __future__ import annotations

import copy
import importlib.util
import itertools
import os
from dataclasses import replace
from types import SimpleNamespace

import gpu_steps as steps
import pytest
import torch
from draws import gen
from geometries import GEOMETRIES, Truth, queries, smooth
from torch import Tensor

import vkernel as vk
from vkernel.core.errors import InputError
from vkernel.posterior import Engine, Moments, Queries, gpu
from vkernel.posterior.dense import Dense
from vkernel.posterior.gpu import GPUPath, fp16
from vkernel.posterior.gpu.fp16 import STAGES, Logits, accumulation
from vkernel.posterior.weights import Want, reduce

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
TRITON = importlib.util.find_spec("triton") is not None and (GPU or os.environ.get("TRITON_INTERPRET") == "1")
STORES = [torch.uint8, torch.int8, torch.float16, torch.float32, torch.float64]


@pytest.fixture(params=["torch", "triton"])
def triton(request) -> bool:
    if request.param == "triton" and not TRITON:
        pytest.skip("Triton's kernels need a GPU, or TRITON_INTERPRET=1")
    return request.param == "triton"


@pytest.fixture(params=["one product at first", "two at once"])
def flat(request, monkeypatch) -> str:
    monkeypatch.setattr(fp16, "SMALL", 10**6 if request.param == "two at once" else 0)
    return request.param


def store(points: Tensor, kind: torch.dtype) -> vk.Empirical:
    if kind.is_floating_point:
        return vk.Empirical(points.to(kind).to(DEVICE))
    info = torch.iinfo(kind)
    levels = ((points + 1) / 2 * 255 + info.min).round().to(kind)
    return vk.Empirical(levels.to(DEVICE), scale=(-1.0, 1.0))


def path(triton: bool) -> type[GPUPath]:
    return GPUPath if triton else steps.TorchPath


def fast(data: vk.Empirical, triton: bool = False, eps: float = 2e-3, memory: int | None = None):
    score = vk.EmpiricalScore(data, vk.EDM(eps=eps), memory)
    score.engine.gpu = path(triton)(score.engine.dense)
    return score


def own(data: vk.Empirical, eps: float = 2e-3) -> vk.EmpiricalScore:
    return vk.EmpiricalScore(data, vk.EDM(eps=eps), method="dense")


def stages(score: vk.EmpiricalScore, monkeypatch) -> list[str]:
    """Return a list that fills with the stages that are taken."""
    seen: list[str] = []
    used = score.engine.gpu
    dense, reference = used._dense, used.dense.moments
    monkeypatch.setattr(
        used,
        "_dense",
        lambda q, dtype, s, how: (seen.append(("light", "middle", "full")[how[0]]), dense(q, dtype, s, how))[1],
    )
    monkeypatch.setattr(used.dense, "moments", lambda *a: (seen.append("reference"), reference(*a))[1])
    return seen


# --- bounds ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", STORES)
def test_the_bound_holds_and_is_not_idle(kind, triton, flat):
    data = store(smooth(300, 12), kind)
    score = fast(data, triton)
    f = score.engine.gpu
    for sigma in (0.01, 0.3, 5.0):
        x = queries(data.rows(0, data.n).double().cpu(), sigma, 8).to(DEVICE)
        q = score.queries(x, torch.tensor(sigma))
        h = f.fp16
        logits = f.steps.split(q, h)
        every = (
            torch.arange(16, device=DEVICE).repeat_interleave(data.n),
            torch.arange(data.n, device=DEVICE).repeat(16),
        )
        exact = q.exact_logits(data, f.points.log_w, *every).reshape(16, data.n)
        offset = f.points.log_w[0] - logits.norm.square() / (2 * q.var)
        error = (steps.values(logits).double() + offset[:, None] - exact).abs().amax(1)
        delta = logits.delta
        assert (error <= delta).all(), (error / delta).max()
        scale = logits.size * h.radius
        assert (delta <= (1e-3 if flat == "two at once" and h.complete else 3e-3) * scale + 1e-5).all()
        for k, stage in enumerate(STAGES):  # what the calibration says of the errors that remain
            screened = f.screen(q, False)
            h.refine(screened.logits, stage)
            finer = (steps.values(screened.logits).double() + offset[:, None] - exact).square().mean(1).sqrt()
            expected = (f.error(screened.logits, k) - f.rules(16, False).table[k, 4]).sqrt()
            assert (finer <= 3 * expected + 2e-7 * exact.abs().amax(1)).all(), (sigma, stage)


@pytest.mark.parametrize("d", [64, 3072])
def test_accumulation(d):
    """Half-precision products of all signs and of one sign, summed as the engine sums them."""
    for sign in (False, True):
        a, b = (torch.randn(64, d, generator=gen(s)).half() for s in (0, 1))
        a, b = (a.abs(), b.abs()) if sign else (a, b)
        got = fp16.product(a.to(DEVICE), b.to(DEVICE).mT).double().cpu()
        error = (got - a.double() @ b.double().mT).abs() / (a.double().abs() @ b.double().abs().mT)
        assert error.max() <= accumulation(d, DEVICE)


def test_eight_bits_need_one_number():
    for kind in (torch.uint8, torch.int8):
        f = fast(store(smooth(100, 8), kind)).engine.gpu.fp16
        assert f.low is None
        assert f.complete
        assert f.residual < 1e-6 * f.radius
    f = fast(store(smooth(100, 8), torch.float32)).engine.gpu.fp16
    assert f.low is not None
    assert f.last < 1e-6 * f.radius < f.residual < 1e-3 * f.radius


def test_fp16_numbers_and_the_points_agree():
    data = store(smooth(130, 9), torch.float64)
    f = fast(data).engine.gpu.fp16
    both = f.center + f.unit * (f.high.double() + f.low.double())[: data.n, : data.d]
    assert (both - data.rows(0, data.n)).norm(dim=1).max() <= f.last * (1 + 1e-6)
    assert f.high[data.n :].abs().max() == 0
    assert f.high[:, data.d :].abs().max() == 0


def test_what_sums_lose_is_measured_and_given_back(monkeypatch):
    """Products that come out too small by 1e-4, as those of some hardware might: means are as good as before."""
    data = store(smooth(900, 10), torch.uint8)
    product = fp16.product

    def short(a, b):
        return product(a, b).mul_(1 - 1e-4)

    def added(out, a, b):
        out += (1 - 1e-4) * (product(a, b))

    monkeypatch.setattr(fp16, "product", short)
    monkeypatch.setattr(fp16, "add_product", added)
    monkeypatch.setattr(gpu, "MOST", 32)
    score, truth = fast(data), Truth(data.rows(0, data.n).cpu())
    for loss in score.engine.gpu.losses.values():
        assert abs(loss.logits - 1e-4) < 2e-6
        assert abs(loss.means - 1e-4) < 2e-6
    for sigma in (1.0, 3.0, 10.0):
        x = queries(truth.points, sigma, 8)
        error = (score.denoise(x.to(DEVICE), sigma).cpu() - truth(x, sigma)[0]).norm(dim=1) / data.spread
        assert (error < 2e-5).all(), (sigma, error)


# --- answers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", STORES)
def test_means_at_every_noise_level(kind, triton, flat, monkeypatch):
    data = store(smooth(700, 12), kind)
    monkeypatch.setattr(gpu, "MOST", 32)
    monkeypatch.setattr(fp16, "SLICE", 256)
    score, truth = fast(data, triton), Truth(data.rows(0, data.n).cpu())
    seen = stages(score, monkeypatch)
    for sigma in (0.02, 0.05, 0.1, 0.3, 1.0, 3.0, 10.0):
        x = queries(truth.points, sigma, 8)
        mean, _, ess = truth(x, sigma)
        error = (score.denoise(x.to(DEVICE), sigma).cpu() - mean).norm(dim=1) / data.spread
        assert (error <= torch.where(ess < 50, 1e-6, 2e-5)).all(), (sigma, error, ess)
    assert {"light", "middle", "full"} & set(seen)


@pytest.mark.parametrize("name", GEOMETRIES)
def test_hard_geometries(name, flat, monkeypatch):
    make, sigmas = GEOMETRIES[name]
    monkeypatch.setattr(gpu, "MOST", 64)
    data = vk.Empirical(make().float().to(DEVICE))
    score, truth = fast(data, eps=1e-3), Truth(data.rows(0, data.n).cpu())
    for sigma in sigmas:
        x = queries(truth.points, sigma, 3)
        mean, _, ess = truth(x, sigma)
        error = (score.denoise(x.to(DEVICE), sigma).cpu() - mean).norm(dim=1) / data.spread
        slack = 1e-15 * x.norm(dim=1) / data.spread
        assert (error <= torch.where(ess < 50, 5e-6, 5e-5) + slack).all(), (name, sigma, error, ess)


@pytest.mark.parametrize("batch", [1, 7])
@pytest.mark.parametrize(("n", "d"), [(1, 40), (2, 33), (65, 64), (400, 100)])
def test_every_result_agrees_with_the_reference_path(n, d, batch, triton, flat, monkeypatch):
    monkeypatch.setattr(gpu, "MOST", 64)
    points = torch.randn(n, d, generator=gen(0))
    points[n // 2] = points[0]
    weights = torch.rand(n, generator=gen(1))
    weights[-1] = 0 if n > 2 else 1
    data = vk.Empirical(points.to(DEVICE), weights)
    t = torch.tensor([0.01, 0.1, 0.5, 1.0, 2.0, 8.0, 60.0])[:batch]
    x = (points[torch.arange(batch) % n] + t[:, None] * torch.randn(batch, d, generator=gen(2))).to(DEVICE)
    a, b = fast(data, triton).posterior(x.double(), t), own(data).posterior(x.double(), t)
    spread = max(data.spread, 1e-3)
    assert ((a.mean - b.mean).norm(dim=1) < 2e-5 * spread).all()
    torch.testing.assert_close(fast(data, triton)(x.double(), t), own(data)(x.double(), t), rtol=1e-4, atol=1e-3)
    for name in ("logp", "entropy", "ess"):
        torch.testing.assert_close(getattr(a, name), getattr(b, name), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(a.cov.trace(), b.cov.trace(), rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(a.cov.diag(), b.cov.diag(), rtol=1e-3, atol=1e-6)
    v = torch.randn(batch, d, generator=gen(3), dtype=torch.float64).to(DEVICE)
    torch.testing.assert_close(a.cov @ v, b.cov @ v, rtol=1e-3, atol=1e-5)
    k = min(n, 3)
    assert torch.equal(a.top(k)[1][..., :1], b.top(k)[1][..., :1])
    torch.testing.assert_close(a.top(k)[0], b.top(k)[0], rtol=1e-4, atol=1e-8)
    assert (a.sample_indices(40, 0) == b.sample_indices(40, 0)).double().mean() > 0.95
    torch.testing.assert_close(a.cov.draw(0), b.cov.draw(0), rtol=1e-3, atol=1e-4)


def test_every_noise_level_in_one_batch(triton, flat, monkeypatch):
    """Each query takes its own stage."""
    monkeypatch.setattr(gpu, "MOST", 64)
    data = store(smooth(900, 10), torch.uint8)
    t = torch.tensor([0.002, 0.02, 0.2, 0.6, 1.0, 2.0, 5.0, 20.0, 80.0], dtype=torch.float64)
    points = data.rows(0, data.n).double().cpu()
    x = points[:9] + t[:, None] * torch.randn(9, 100, generator=gen(1), dtype=torch.float64)
    score, truth = fast(data, triton), Truth(points)
    seen = stages(score, monkeypatch)
    got = score.denoise(x.to(DEVICE), t).cpu()
    for b, sigma in enumerate(t.tolist()):
        assert (got[b] - truth(x[b : b + 1], sigma)[0][0]).norm() <= 1e-5 * data.spread
    assert seen == ["full"] if flat == "two at once" else {"light", "middle", "full"} & set(seen)


def test_blocks_of_queries_and_an_empty_batch(triton):
    data = store(smooth(500, 8), torch.uint8)
    score = fast(data, triton)
    x = queries(data.rows(0, data.n).double().cpu(), 1.0, 9).to(DEVICE)
    whole = score.denoise(x, 1.0)
    assert score.engine.gpu.most <= 65_535  # blocks along the second axis of a grid
    score.engine.gpu.most = 2
    torch.testing.assert_close(score.denoise(x, 1.0), whole, rtol=1e-5, atol=1e-5)
    assert score.denoise(x[:0], 1.0).shape == (0, 64)
    assert score.posterior(x[:0], 1.0).entropy.shape == (0,)


def test_far_queries_and_fp16_sums_take_the_reference_path(monkeypatch):
    data = store(smooth(200, 8), torch.float32)
    score, truth = fast(data), Truth(data.rows(0, data.n).cpu())
    x = queries(truth.points, 0.5, 3)
    x[1] = 1e5
    mean, _, _ = truth(x, 0.5)
    assert ((score.denoise(x.to(DEVICE), 0.5).cpu() - mean).norm(dim=1) <= 1e-6 * data.spread).all()
    assert score.engine.gpu.usable
    matmul = type("matmul", (), {"allow_fp16_accumulation": True})
    monkeypatch.setattr(torch.backends.cuda, "matmul", matmul)
    assert not score.engine.gpu.usable


@pytest.mark.parametrize("T", [4.0, 8.0])
def test_where_nothing_is_left_of_the_data(T, triton, flat):
    """alpha is 5e-70, or 1e-277: all points weigh the same, and a query is no farther away than its noise."""
    data, process = store(smooth(3000, 8), torch.uint8), vk.VP(T=T)
    ours, other = (vk.EmpiricalScore(data, process) for _ in range(2))
    ours.engine.gpu, other.engine.gpu = path(triton)(ours.engine.dense), None
    x = torch.randn(5, 64, generator=gen(0), dtype=torch.float64).to(DEVICE)
    torch.testing.assert_close(ours(x, T), other(x, T), rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(ours.denoise(x, T), other.denoise(x, T), rtol=0, atol=1e-5 * data.spread)
    torch.testing.assert_close(ours.posterior(x, T).logp, other.posterior(x, T).logp, rtol=1e-6, atol=1e-6)
    with pytest.raises(InputError, match="NaN"):
        ours(x * torch.nan, T)


def test_without_room_for_the_residual(monkeypatch):
    """Then lists are still made, and long ones go the engine's own way."""
    data = store(smooth(500, 8), torch.float32)
    score = fast(data, memory=4 * data.n * 128)
    assert score.engine.gpu.fp16.low is None
    assert not score.engine.gpu.fp16.complete
    truth, seen = Truth(data.rows(0, data.n).cpu()), stages(score, monkeypatch)
    for sigma in (0.02, 5.0):
        x = queries(truth.points, sigma, 3)
        error = (score.denoise(x.to(DEVICE), sigma).cpu() - truth(x, sigma)[0]).norm(dim=1)
        assert (error <= 1e-5 * data.spread).all()
    assert not {"light", "middle", "full"} & set(seen)


@pytest.mark.parametrize("sigma", [0.3, 2.0, 20.0])
def test_a_measured_floor_above_the_tolerance_leaves_no_light_points(sigma, triton):
    """Small sets have a floor that no stage with one residual meets: results must be exact, not NaN."""
    data = vk.Empirical(torch.randn(200, 40, generator=gen(0)).to(DEVICE))
    ours, other = fast(data, triton), own(data)
    used = ours.engine.gpu
    used.losses = {key: replace(loss, floor=1e-4) for key, loss in used.losses.items()}
    used.tables.clear()
    x = sigma * torch.randn(6, 40, generator=gen(1)).to(DEVICE)
    torch.testing.assert_close(ours(x, sigma), other(x, sigma), rtol=1e-5, atol=1e-5 / sigma**2)


def test_equal_inputs_give_equal_bits(triton):
    if GPU and not triton:
        pytest.skip("torch adds rows on a GPU in any order")
    data = store(smooth(600, 8), torch.uint8)
    x = queries(data.rows(0, data.n).double().cpu(), 0.7, 9).to(DEVICE)
    score = fast(data, triton)
    assert all(torch.equal(score.denoise(x, 0.7), score.denoise(x, 0.7)) for _ in range(3))


def test_again_and_again_in_any_mode(triton):
    """Steps are recorded the second time and repeated from the third; sizes and kinds of query may change between."""
    data = store(smooth(600, 8), torch.uint8)
    score, other = fast(data, triton), own(data)
    points = data.rows(0, data.n).double().cpu()
    with torch.inference_mode():
        score.denoise(points[:5].to(DEVICE), 1.0)
    for round in range(4):
        for sigma, count in ((0.05, 4), (4.0, 4), (0.05, 3), (0.7, 4), (4.0, 2)):
            x = queries(points, sigma, count, seed=round).to(DEVICE)
            error = (score.denoise(x, sigma) - other.denoise(x, sigma)).norm(dim=1)
            assert (error <= 2e-5 * data.spread).all(), (round, sigma, error)
    copied = copy.deepcopy(score)
    torch.testing.assert_close(copied.denoise(x, 1.0), score.denoise(x, 1.0), rtol=1e-6, atol=1e-9)


@pytest.mark.skipif(TRITON is False, reason="Triton's kernels need a GPU, or TRITON_INTERPRET=1")
@pytest.mark.parametrize("weighted", [False, True])
def test_kernels_agree_with_torch(weighted):
    from vkernel.posterior.gpu import triton_steps

    n, columns, count = 4500, 4544, 6
    raw = torch.randn(2, count, columns, generator=gen(0)).to(DEVICE)
    gain, slope = torch.rand(2, count, generator=gen(1)).to(DEVICE)
    delta = 1e-3 * torch.rand(count, generator=gen(3), dtype=torch.float64).to(DEVICE)
    half, log_w = torch.rand(2, columns, generator=gen(2)).to(DEVICE)
    points = SimpleNamespace(n=n, rows=columns, half=half, log_w=log_w if weighted else None)
    both = triton_steps, steps

    for made in (0, 1):
        one, two = (Logits(points, None, gain, slope, None, None, delta, raw[made].clone()) for _ in both)
        for second in (False, True):
            made_of = [k.levels(part, second) for k, part in zip(both, (one, two), strict=True)]
            for a, b in zip(*made_of, strict=True):
                torch.testing.assert_close(a, b)
            _, pivot, levels = made_of[1]
            levels[1, 0] = -1e9  # longer than the list
            a, b = (k.survey(part, levels, pivot) for k, part in zip(both, (one, two), strict=True))
            assert torch.equal(a[0].sum(2), b[0].sum(2))
            torch.testing.assert_close(a[1].sum(2), b[1].sum(2), rtol=1e-5, atol=1e-5)
            a, b = (
                k.choose(part, *seen, levels, second) for k, part, seen in zip(both, (one, two), (a, b), strict=True)
            )
            for got, want in zip(
                (a[0].threshold, a[0].count, *a[1:]), (b[0].threshold, b[0].count, *b[1:]), strict=True
            ):
                torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
            listed = [k.above(part, pivot - 1.0) for k, part in zip(both, (one, two), strict=True)]
            assert torch.equal(listed[0].count, listed[1].count)
            for one_list, other in ((a[0], b[0]), listed):
                i1, i2 = triton_steps.select(one, one_list, 64), steps.select(two, other, 64)
                held = steps.held(other.count, 64)
                assert torch.equal(i1[held], i2[held])
        q, k = held.nonzero().unbind(1)
        for part in (one, two):
            part.raw[q, i1[q, k].long()] = -torch.inf
        shift = steps.levels(two, True)[0]
        along = Logits(points, None, torch.full_like(gain, 0.2), slope, None, None, None, raw[1 - made].clamp(-5, 5))
        for planes, second, vector in itertools.product((1, 2), (False, True), (None, along)):
            if second or vector is None:
                pair = [k.weights(a, shift, planes, second, vector) for k, a in zip(both, (one, two), strict=True)]
                sums = [found[1].double().sum(2) for found in pair]
                torch.testing.assert_close(*sums, rtol=1e-5, atol=10.0)  # signed sums of numbers up to 2^14
                rtol = 2e-3 if planes == 1 else 1e-5  # a product with a vector is rounded to fp16 twice
                for a, b in zip(pair[0][0].float().split(planes), pair[1][0].float().split(planes), strict=True):
                    torch.testing.assert_close(a.sum(0), b.sum(0), rtol=rtol, atol=1e-3)


@pytest.mark.skipif(TRITON is False, reason="Triton's kernels need a GPU, or TRITON_INTERPRET=1")
@pytest.mark.parametrize("planes", [1, 2])
def test_split_agrees_with_torch(planes):
    from vkernel.posterior.gpu import triton_steps

    x = torch.randn(5, 70, generator=gen(0), dtype=torch.float64).to(DEVICE)
    alpha, var = torch.rand(2, 5, generator=gen(1), dtype=torch.float64).to(DEVICE)
    alpha[2] = 0.0
    center = torch.randn(70, generator=gen(2), dtype=torch.float64).to(DEVICE)
    points = SimpleNamespace(d=70, width=128, unit=0.25, center=center, multiply=lambda factors: factors)
    points.bound = lambda count: (planes, 2.0, 1e-3, 1e-4, 0.5)
    a, b = (k.split(Queries(x, alpha, var), points) for k in (triton_steps, steps))
    assert torch.equal(a.factors, b.factors)
    for field in ("gain", "slope", "norm", "size", "delta"):
        torch.testing.assert_close(getattr(a, field), getattr(b, field), rtol=1e-6, atol=0)


@pytest.mark.skipif(TRITON is False, reason="Triton's kernels need a GPU, or TRITON_INTERPRET=1")
@pytest.mark.parametrize("kind", STORES)
def test_candidates_means_and_scores_agree_with_torch(kind):
    from vkernel.posterior.gpu import triton_steps

    data = store(smooth(300, 9), kind)
    points = fast(data).engine.gpu.fp16
    asked = own(data).queries(queries(data.rows(0, 300).double().cpu(), 0.3, 3).to(DEVICE), torch.tensor(0.3))
    size, cap = len(asked), 20
    count = torch.tensor([0, 1, 2, 19, 20, 21], dtype=torch.int32)[:size].to(DEVICE)
    index = torch.stack([torch.randperm(300, generator=gen(q))[:cap].sort().values for q in range(size)]).int()
    index, made, held = index.to(DEVICE), [], steps.held(count, cap)
    scale, share = torch.rand(2, size, generator=gen(5), dtype=torch.float64).to(DEVICE)
    wanted, logits = torch.arange(size, device=DEVICE) % 2 == 0, steps.split(asked, points)
    parts = points.sums(steps.weights(logits, steps.levels(logits, False)[0], 2)[0], STAGES[2])
    vector = torch.randn(size, points.d, generator=gen(6), dtype=torch.float64).to(DEVICE)
    for kernels in (triton_steps, steps):
        logits = kernels.split(asked, points)
        exact = kernels.exact(asked, points, count, index, logits)
        log_z, mean = kernels.mean(points, count, index, torch.where(held, exact, -torch.inf))
        out = kernels.finish(points, parts, scale, share, wanted, mean, mean + 1)
        scores = [kernels.score(asked, out, dtype) for dtype in (torch.float32, torch.float64)]
        second = kernels.moments(points, count, index, torch.where(held, exact, -torch.inf), vector)
        second.product *= (count <= cap)[:, None]  # of none there is no product
        values = list(second.present().values())
        made.append([exact[held], log_z, mean, out, *scores, *values, steps.values(logits) == -torch.inf])
    for got, want in zip(*made, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-8 if got.dtype == torch.float64 else 1e-6, atol=1e-9)
    assert int(made[0][-1].sum()) == int(held.sum())  # the candidates were taken out of the logits
    again = triton_steps.split(asked, points)
    triton_steps.exact(asked, points, count, index)
    assert not (steps.values(again) == -torch.inf).any()


@pytest.mark.skipif(not GPU, reason="there is no GPU here")
def test_the_engine_takes_this_path_on_a_gpu():
    assert vk.EmpiricalScore(store(smooth(100, 8), torch.uint8), vk.EDM()).engine.gpu is not None
    assert vk.EmpiricalScore(vk.Empirical(torch.randn(9, 2).cuda()), vk.EDM()).engine.gpu is None


@pytest.mark.parametrize("wrong", ["fails", "means", "traces", "products"])
def test_a_path_that_fails_or_is_inaccurate_is_not_used(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are compiled where they run: the engine compares them with the reference path on a few points."""

    class Broken:
        def __init__(self, dense: Dense) -> None:
            self.dense = dense

        def moments(self, queries: Queries, want: Want = frozenset(), vector: Tensor | None = None) -> Moments:
            if wrong == "fails":
                raise RuntimeError("no such instruction")
            exact = reduce(self.dense.weights(queries), queries.x, want, vector)
            table = {"means": exact.mean, "traces": exact.trace, "products": exact.product}[wrong]
            if table is not None:
                table += 1.0
            return exact

    monkeypatch.setattr(gpu, "suitable", lambda points: True)
    monkeypatch.setattr(gpu, "GPUPath", Broken)
    points = torch.randn(50, 40, generator=torch.Generator().manual_seed(0))
    with pytest.warns(UserWarning, match="cannot be used" if wrong == "fails" else "is not used"):
        assert Engine(vk.Empirical(points)).gpu is None


@pytest.mark.parametrize("sigma", [0.05, 3.0])
def test_a_query_that_is_nan_spoils_no_other(sigma):
    data = vk.Empirical(smooth(300, 8))
    ours, x = fast(data), queries(data.rows(0, data.n), sigma, 6).double().to(DEVICE)
    asked = ours.queries(x.reshape(-1, *data.shape), torch.tensor(sigma))
    whole = ours.engine.moments(asked)
    bad = replace(asked, x=torch.cat([asked.x[:-1], torch.full_like(asked.x[:1], torch.nan)]))
    torch.testing.assert_close(ours.engine.moments(bad).mean[:-1], whole.mean[:-1])
