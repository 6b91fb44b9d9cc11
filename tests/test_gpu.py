"""The same answers on a GPU; skipped where there is none."""

from __future__ import annotations

import pytest
import torch

import vkernel as vk
from vkernel.train.models.unet import dropped
from vkernel.train.objectives import J1, Training
from vkernel.train.recorded_targets import FAST

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")


@pytest.mark.parametrize(("n", "d"), [(5, 2), (2000, 64), (3000, 784)])
@pytest.mark.parametrize("sigma", [0.05, 1.0, 20.0])
def test_same_as_cpu(n: int, d: int, sigma: float) -> None:
    g = torch.Generator().manual_seed(0)
    points, weights = torch.randn(n, d, generator=g), torch.rand(n, generator=g)
    x = points[torch.randint(0, n, (33,), generator=g)] + sigma * torch.randn(33, d, generator=g)
    x[::2] = (points[0] + points[-1]) / 2 + 0.1 * sigma * x[::2]
    here = vk.EmpiricalScore(vk.Empirical(points, weights), vk.EDM())
    there = vk.EmpiricalScore(vk.Empirical(points, weights).to("cuda"), vk.EDM())
    a, b = here.posterior(x, sigma), there.posterior(x.cuda(), sigma)
    assert b.mean.device.type == "cuda"
    spread = here.data.spread
    assert float((a.mean - b.mean.cpu()).norm(dim=1).max()) < 3e-5 * spread
    for name in ("logp", "entropy", "ess"):
        assert torch.allclose(getattr(a, name), getattr(b, name).cpu(), rtol=1e-4, atol=1e-4)
    assert torch.allclose(a.cov.trace(), b.cov.trace().cpu(), rtol=1e-3, atol=1e-6 * spread**2)
    v = torch.randn(33, d, generator=g)
    assert torch.allclose(a.cov @ v, (b.cov @ v.cuda()).cpu(), rtol=1e-3, atol=1e-4 * spread**2)
    assert torch.equal(a.top(2)[1], b.top(2)[1].cpu())
    # noise belongs to (query, point): the device does not change it
    assert torch.allclose(a.cov.draw(0), b.cov.draw(0).cpu(), rtol=1e-3, atol=1e-4 * spread)
    assert float((a.sample_indices(50, 0) == b.sample_indices(50, 0).cpu()).float().mean()) > 0.99


def test_more_queries_than_blocks_of_a_grid() -> None:
    """CUDA starts at most 65,535 blocks along the second axis: few points leave memory for more queries than that."""
    g = torch.Generator().manual_seed(0)
    data, x = vk.Empirical(torch.rand(128, 64, generator=g)), torch.randn(70_000, 64, generator=g)
    some = torch.randint(len(x), (200,), generator=g)
    found = vk.EmpiricalScore(vk.Empirical(data[:].cuda()), vk.EDM())(x.cuda(), 1.0).cpu()
    torch.testing.assert_close(found[some], vk.EmpiricalScore(data, vk.EDM())(x[some], 1.0), rtol=1e-4, atol=1e-4)


def test_queries_on_another_device_than_the_data() -> None:
    score = vk.EmpiricalScore(vk.Empirical(torch.randn(10, 3)).to("cuda"), vk.VP())
    assert score(torch.randn(4, 3), 0.1).device.type == "cpu"


def test_tf32_does_not_cost_accuracy() -> None:
    """A process-wide switch to tf32 makes coarse products worse; the engine must notice."""
    g = torch.Generator().manual_seed(0)
    points = torch.randn(4000, 512, generator=g).cuda()
    x = (points[:40] + points[40:80]) / 2
    truth = vk.EmpiricalScore(vk.Empirical(points.double()), vk.EDM()).posterior(x.double(), 0.5).mean
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        got = vk.EmpiricalScore(vk.Empirical(points), vk.EDM()).posterior(x, 0.5).mean
    finally:
        torch.set_float32_matmul_precision(before)
    assert float((got - truth).norm(dim=1).max()) < 5e-5 * 512**0.5


def test_profile_on_a_gpu() -> None:
    p = vk.profile(vk.Empirical(torch.randn(500, 40)).to("cuda"), queries=64)
    assert p.isolated


def test_effective_sde_on_a_gpu() -> None:
    """The same noise and the same chain on both devices."""
    g = torch.Generator().manual_seed(0)
    points = torch.randn(200, 40, generator=g)
    process, ends = vk.VP(), []
    x_T = process.prior((6, 40), generator=1)
    for device in ("cpu", "cuda"):
        score = vk.EmpiricalScore(vk.Empirical(points).to(device), process)
        V = vk.kernels.Naive(score, 0.01)
        ends.append(
            vk.sample.effective_sde(
                V, x_T.to(device), mean=score, method="euler", spacing="uniform", steps=20, generator=3
            ).cpu()
        )
    assert torch.allclose(ends[0], ends[1], atol=2e-2)


@pytest.mark.parametrize("objective", ["J1", "J0"])
def test_a_linear_ensemble_and_its_kernel_are_the_same_on_the_gpu(objective):
    process = vk.VP(eps=1e-2)
    model = vk.models.Linear(vk.features.grid("gaussian", 6, 1, -1.5, 1.5, process), "x0", 0.1)
    x = torch.linspace(-1.2, 1.2, 7, dtype=torch.float64)[:, None]
    answers = []
    for device in ("cpu", "cuda"):
        data = vk.data.toy("triple").to(device)
        ensemble = vk.train_ensemble(model, data, process, members=8, draws=100, objective=objective)
        V = vk.kernels.Linear(model, data, process, draws=100, objective=objective, sets=8)
        place = x.to(device)
        field = V.draw(8, generator=0)(place.expand(8, 7, 1), 0.2)
        sample = ensemble.sample(x_T=place, steps=20)
        assert sample.device.type == device
        answers.append([a.cpu() for a in (ensemble(place, 0.1), V.cov(place, 0.1).trace(), V.mean(place, 0.1), sample)])
        assert field.shape == (8, 7, 1)
    for a, b in zip(*answers, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-9)


def test_a_lazy_ensemble_and_an_mlp_are_the_same_on_the_gpu():
    process = vk.VP(eps=1e-2)
    lazy = vk.models.Lazy(vk.models.NTK(2, "erf"), tau=5.0)
    mlp = vk.models.MLP(width=16, depth=2, steps=20, batch=16, dtype="float64")
    x = torch.linspace(-1.2, 1.2, 7, dtype=torch.float64)[:, None]
    for model in (lazy, mlp):
        both = [
            vk.train_ensemble(model, vk.data.toy("triple").to(d), process, members=3, draws=32)(x.to(d), 0.1).cpu()
            for d in ("cpu", "cuda")
        ]
        torch.testing.assert_close(*both, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("noise", ["gaussian", "white"])
def test_placebo_targets_are_the_same_on_the_gpu(noise: str) -> None:
    points, goal = torch.rand(3000, 1, 16, 16, generator=torch.Generator().manual_seed(0)), vk.JC(3.0, noise)
    how = {"times": ("lognormal", 0.0, 1.2), "dtype": torch.float32}
    here, there = (
        Training(vk.Empirical(points).to(d), vk.EDM(), goal, None, **how).batch([0, 3], 64) for d in ("cpu", "cuda")
    )
    for a, b in zip(here, there, strict=True):
        torch.testing.assert_close(a, b.cpu(), rtol=1e-3, atol=1e-3)


STEADY = {"init_scale": 1.0}  # Adam magnifies rounding less than with the small filters of the default


@pytest.mark.parametrize("optimiser", ["adam", "sgd"])
def test_unets_from_a_graph_learn_what_the_plain_loop_learns(optimiser, monkeypatch):
    """Pairs of objectives and members, replayed, against the same steps without a graph: they differ by rounding alone,
    at a snapshot and at the end, with as many streams as pairs and with fewer."""
    points = torch.rand(20, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    data, goals = vk.Empirical(points.cuda()), ["J0", "J1", vk.JC(10.0)]
    training = Training(data, vk.VP(), J1(), None)
    options = {"steps": 12, "batch": 16, "ema": 0.9, "decay": "cosine", "optimiser": optimiser} | STEADY
    fast, plain = (vk.models.UNet((8, 8, 8), **options, chunk=c) for c in (1, 2))
    assert [model._captured(training) for model in (fast, plain)] == [True, False]
    start = torch.cat([p.flatten(1) for p in plain.initial(training, [0, 1]).values()], 1)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        known, found = (
            vk.train_ensembles(model, data, vk.VP(), goals, members=2, snapshots=[5]) for model in (plain, fast)
        )
        monkeypatch.setattr("vkernel.train.models.graph.STREAMS", 4)
        queued = vk.train_ensembles(fast, data, vk.VP(), goals, members=2, snapshots=[5])
    for want, *others in zip(known, found, queued, strict=True):
        for got in others:
            for a, b in ((want, got), (want.snapshots[5], got.snapshots[5])):
                a, b = (torch.cat([p.flatten(1) for p in ensemble.state.values()], 1) for ensemble in (a, b))
                assert (a - b).norm() < 0.02 * (a - start).norm(), float((a - b).norm() / (a - start).norm())
            for name in ("update_norm", "gradient_norm"):
                torch.testing.assert_close(
                    torch.tensor(got.info[name]), torch.tensor(want.info[name]), rtol=0.02, atol=0
                )


@pytest.mark.parametrize(("bf16", "compile"), [(False, False), (True, False), (False, True)])
def test_a_graph_with_attention_dropout_and_classes(bf16, compile):
    """Masks and labels change from step to step, also in a graph: the same steps without one give the same members."""
    points = torch.rand(20, 3, 16, 8, generator=torch.Generator().manual_seed(0))
    how = {"blocks": 2, "attention": (1, 2), "heads": 2, "dropout": 0.3, "classes": 3, "bf16": bf16}
    how |= {"steps": 12, "batch": 16, "ema": 0.9, "compile": compile} | STEADY
    fast, plain = (vk.models.UNet((8, 16, 16), **how, chunk=c) for c in (1, 2))
    options = {"members": [3, 1], "labels": torch.arange(20) % 3, "flips": True, "objective": "J0"}
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        found, known = (vk.train_ensemble(m, points.cuda(), vk.EDM(), **options).given(2) for m in (fast, plain))
        start = plain.initial(Training(points.cuda(), vk.EDM(), "J0", None), [3, 1])
        moved = torch.cat([(known.state[name] - start[name]).flatten() for name in start])
        apart = torch.cat([(known.state[name] - found.state[name]).flatten() for name in start])
    assert moved.isfinite().all()
    assert apart.norm() < (0.3 if bf16 else 0.02) * moved.norm(), float(apart.norm() / moved.norm())
    assert found(points[:2].cuda(), 1.0).isfinite().all()


@pytest.mark.parametrize("bf16", [False, True])
def test_evaluations_from_a_graph_are_those_without_one(bf16):
    """The graph is recorded at the second evaluation of a size and serves others: of other points, times and states, in
    inference mode, and with more inputs than are evaluated at once. Derivatives are taken without it."""
    models = [vk.models.UNet((8, 8), bf16=bf16, chunk=c) for c in (1, None)]
    training, g = Training(torch.rand(4, 1, 8, 8).cuda(), vk.VP(), J1(), None), torch.Generator().manual_seed(0)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False), pytest.MonkeyPatch.context() as patch:
        patch.setattr("vkernel.train.models.network.HELD", 5 * models[0].largest((1, 8, 8)))
        for k in range(4):
            state = models[0].initial(training, range(6))
            state = {name: p + 0.1 * torch.randn(p.shape, generator=g).cuda() for name, p in state.items()}
            x, t = torch.randn(6, 7, 1, 8, 8, generator=g).cuda(), torch.rand(6, 7, generator=g).cuda()
            both = [vk.Ensemble(model, state, vk.VP(), (1, 8, 8)) for model in models]
            with torch.inference_mode(k == 3):
                found, known = (ensemble.paired(x, 0.1 + 0.8 * t) for ensemble in both)
            assert (found - known).norm() < (0.03 if bf16 else 1e-5) * known.norm()
        point = torch.randn(7, 1, 8, 8, generator=g).cuda()
        a, b = (ensemble.member(0).divergence(point, 0.3, probes=4, generator=0) for ensemble in both)
        assert (a - b).norm() < (0.1 if bf16 else 1e-4) * b.norm()


def test_dropout_masks_are_those_of_the_cpu():
    h, key = torch.ones(3, 8, 5, 7), torch.tensor([123])
    assert torch.equal(dropped(h, 0.3, key), dropped(h.cuda(), 0.3, key.cuda()).cpu())


def test_a_graph_continues_where_it_was_killed(tmp_path, monkeypatch):
    """Bit for bit with deterministic kernels, where two runs without interruption are equal too."""
    from vkernel.train.models.graph import Graph

    data = vk.Empirical(torch.rand(20, 1, 8, 8, generator=torch.Generator().manual_seed(0)).cuda())
    model, true, count = vk.models.UNet((8, 8), steps=10, batch=16, ema=0.9), Graph.__call__, [0]

    def trained(checkpoint=None):
        return vk.train_ensembles(model, data, vk.VP(), ["J0", "J1"], members=2, snapshots=[4], checkpoint=checkpoint)

    def killed(*given):
        count[0] += 1
        if count[0] > 7:
            raise KeyboardInterrupt
        true(*given)

    with torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
        known, other = trained(), trained()
        with monkeypatch.context() as patch:
            patch.setattr(Graph, "__call__", killed)
            with pytest.raises(KeyboardInterrupt):
                trained(tmp_path / "run")
        found = trained(tmp_path / "run")
    for a, b, again in zip(known, other, found, strict=True):
        whole, same, parts = (torch.cat([p.flatten() for p in e.state.values()]) for e in (a, b, again))
        torch.testing.assert_close(parts, whole, rtol=0, atol=float((whole - same).abs().max()))
        torch.testing.assert_close(torch.tensor(again.info["update_norm"]), torch.tensor(a.info["update_norm"]))


def test_agreement_of_four_runs() -> None:
    from vkernel.reports.audit.agreement import agreement

    data, process = vk.Empirical(torch.randn(40, 1, 4, 4)).to("cuda"), vk.VP()
    scores = [vk.as_score(lambda x, t, a=a: -a * x, process, shape=(1, 4, 4)) for a in (0.7, 0.8, 0.9, 1.1)]
    found = agreement(vk.Checkpoints(scores), data, images=16).dataset
    assert found["variance_members"].notnull().all()


@pytest.mark.parametrize("borders", ["zeros", "circular"])
@pytest.mark.parametrize("sigma", [0.05, 0.4, 4.0])
def test_patches_are_averaged_in_tiles(borders: str, sigma: float) -> None:
    g = torch.Generator().manual_seed(0)
    pixels, weights = (
        torch.randint(0, 256, (30, 3, 12, 12), generator=g, dtype=torch.uint8),
        torch.rand(30, generator=g),
    )
    x = 2 * pixels[:5] / 255 - 1 + sigma * torch.randn(5, 3, 12, 12, generator=g)
    for data in (vk.Empirical(pixels, weights, scale=(-1, 1)), vk.Empirical(2 * pixels / 255 - 1)):
        here = vk.theories.EquivariantLocal(data, vk.EDM(), 5, borders)
        there = vk.theories.EquivariantLocal(data.to("cuda"), vk.EDM(), 5, borders)
        assert float((here.denoise(x, sigma) - there.denoise(x.cuda(), sigma).cpu()).abs().max()) < 1e-4


def test_patches_that_differ_by_less_than_the_rounding_of_their_logits() -> None:
    """Near duplicates far from the zero point at very low noise: coarse logits order them by their errors. Queries in
    float64 are evaluated in float64."""
    g = torch.Generator().manual_seed(0)
    near = torch.rand(1, 3, 16, 16, generator=g) + 1e-3 * torch.randn(12, 3, 16, 16, generator=g)
    data, process = vk.Empirical(torch.cat([near, 3 * torch.rand(4, 3, 16, 16, generator=g) - 1])), vk.EDM(eps=1e-5)
    for sigma, k in ((1e-5, 3), (1e-4, 3), (5e-4, 9), (2e-3, 9)):
        x = near[:2].double() + sigma * torch.randn(2, 3, 16, 16, generator=g, dtype=torch.float64)
        here = vk.theories.EquivariantLocal(data, process, k).denoise(x, sigma)
        there = vk.theories.EquivariantLocal(data.to("cuda"), process, k).denoise(x, sigma)
        assert float((here - there).abs().max()) < 1e-6 * data.spread / data.d**0.5


def test_an_explanation_on_a_gpu_is_that_on_a_cpu() -> None:
    digits, process = vk.data.toy("digits")[:150].reshape(-1, 8, 8).float(), vk.VP()
    sets = vk.Empirical(digits[:100]), vk.Empirical(digits[100:])
    network = vk.theories.Switch(
        vk.theories.Gaussian(sets[0], process), vk.theories.Local(sets[0], process, 3), at=1.0, width=0.5
    )
    sizes = {"levels": 3, "images": 6, "samples": 8, "steps": 8}
    here = vk.explain(network, None, *sets, **sizes)
    there = vk.explain(network, None, *(data.to("cuda") for data in sets), **sizes)
    assert there.denoising.about.values.tolist() == here.denoising.about.values.tolist()
    for name in ("r2", "gain", "elsewhere"):
        a, b = (torch.as_tensor(found.denoising[name].values) for found in (here, there))
        assert torch.allclose(a, b, rtol=1e-2, atol=1e-2, equal_nan=True)
    for name in ("r2", "copies"):
        a, b = (torch.as_tensor(found.samples[name].values) for found in (here, there))
        assert torch.allclose(a, b, atol=0.15, equal_nan=True)


def test_a_study_of_images_measures_the_same(tmp_path) -> None:
    """U-Nets on digits, twins of two objectives: errors on a GPU are those on a CPU, to rounding."""
    spec = {
        "title": "a",
        "members": 3,
        "block": 3,
        "data": {"name": "digits", "n": 24, "test": 32},
        "process": {"kind": "edm"},
        "model": {"kind": "unet", "target": "edm", "weight": "edm", "channels": [8, 8, 8], "steps": 8, "batch": 16},
        "training": {"times": ["lognormal", -1.2, 1.2], "snapshots": [2, 8]},
        "sampler": {"samples": 16, "steps": 8, "method": "multistep", "spacing": "edm"},
        "measure": {"levels": [0.3, 2.0], "images": 8, "keep": 2},
        "grid": {"objective": {"name": "objective", "values": [{"c": 0.0}, {"c": 1.0}], "labels": ["c = 0", "c = 1"]}},
    }
    here, there = (
        vk.study.run(spec | {"device": device}, tmp_path / device, progress=False).load() for device in ("cpu", "cuda")
    )
    for name in ("error", "excess", "mmse", "energy_to", "energy_within", "kernel_to", "update_norm", "rho"):
        a, b = (torch.from_numpy(ds[name].values) for ds in (here, there))
        assert torch.allclose(a, b, rtol=2e-2, atol=1e-5), name


@pytest.mark.parametrize("goal", ["J0", "J1", vk.JK(4), vk.JC(2.0, "gaussian")], ids=repr)
@pytest.mark.parametrize("labelled", [False, True])
def test_targets_of_a_batch_on_a_gpu(goal, labelled: bool) -> None:
    """Data in the memory of the CPU are copied to the device of the first batch; targets are those on a CPU."""
    g, process = torch.Generator().manual_seed(0), vk.VP()
    images = torch.randn(2000, 1, 8, 8, generator=g)
    index = torch.randint(0, 2000, (128,), generator=g)
    t = process.eps + (process.T - process.eps) * torch.rand(128, generator=g)
    x, labels = process.perturb(images[index], t, generator=g), torch.arange(2000) % 5 if labelled else None
    here, there = (vk.Targets(images, process, goal, labels=labels, generator=1) for _ in range(2))
    known = here(x, t, index)
    with torch.autocast("cuda", torch.bfloat16):
        found = there(x.cuda(), t.cuda(), index)
    assert there.data.device.type == "cuda"
    assert (found.device.type, found.dtype) == ("cuda", torch.float32)
    near = (found.cpu() - known).flatten(1).abs().amax(1) < 1e-3
    assert float(near.float().mean()) > 0.98  # a draw from the posterior may be of another image, by rounding
    stays = vk.Targets(vk.Empirical(images).to("cuda"), process, goal)
    assert stays(x, t, index).device.type == "cpu"
    assert stays.data.device.type == "cuda"
    with pytest.raises(vk.InputError, match="There is no image 2000"):
        there(x.cuda(), t.cuda(), torch.full_like(index, 2000).cuda())


@pytest.mark.parametrize("goal", ["J0", "J1", vk.JK(4), vk.JC(3.0)], ids=repr)
@pytest.mark.parametrize("process", [vk.VP(), vk.DDPM.linear()], ids=repr)
def test_targets_from_a_graph_are_those_of_the_engine(goal, process) -> None:
    """From the eleventh batch on; what is wrong with a batch is then said in the next call."""
    g = torch.Generator().manual_seed(0)
    images, labels = torch.randn(2000, 1, 8, 8, generator=g), torch.arange(2000) % 5
    here, there = (vk.Targets(images, process, goal, labels=labels, null=7, generator=1) for _ in range(2))
    for k in range(16):
        index = torch.randint(0, 2000, (64,), generator=g)
        t = process.eps + (process.T - process.eps) * torch.rand(64, generator=g)
        own = torch.where(torch.rand(64, generator=g) < 0.3, 7, labels[index])
        x = process.perturb(images[index], t, generator=g)
        batch = x, t, index, own
        known, found = here(*batch), there(*(a.cuda() for a in batch)).cpu()
        near = (found - known).flatten(1).abs().amax(1) < 1e-4 * float(known.abs().max())
        assert float(near.float().mean()) > 0.98, k
    if torch.cuda.get_device_capability() not in FAST:
        return
    assert there._recorded is not None
    assert len(there._recorded.kept) == 1
    x, t, index, own = (a.cuda() for a in batch)
    with torch.autocast("cuda", torch.bfloat16):
        first = there(x, t, index, own)
    there(x, t, torch.full_like(index, 2000), own)  # nothing looks at values of this batch yet
    assert first.isfinite().all()
    with pytest.raises(vk.InputError, match="In the batch before this one: There is no image 2000"):
        there(x, t, index, own)
    there(x, t, index, own)
    there(2 * x, t, index, own)
    with pytest.raises(vk.InputError, match="In the batch before this one: x_t is not alpha x0"):
        there(x, t, index, own)
