"""Targets for any training loop: their mathematics by sums over all images in float64, and what a loop relies on."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import reference
import torch
from torch import Tensor

import vkernel as vk
from vkernel.core.errors import InputError
from vkernel.score.conversions import PREDICTIONS
from vkernel.train import targets as module

SHAPE = (1, 4, 6)
IMAGES = torch.randn(9, *SHAPE, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
WEIGHTS = torch.tensor([1.0, 2, 1, 1, 3, 1, 1, 2, 1], dtype=torch.float64)
LABELS = torch.tensor([2, 0, 2, 2, 0, 5, 5, 0, 2])
TIMES = {"vp": (0.02, 0.7), "edm": (0.3, 40.0), "flow": (0.05, 0.95), "cosine": (0.05, 0.97), "ddpm": (3.5, 900.5)}
RANDOM = [vk.JK(3), vk.JK(3, "subset"), vk.JK(3, "efm"), vk.JC(2.0, "gaussian"), vk.JC(2.0, "white")]
PROCESS = vk.VP()


def drawn(
    process: vk.Process, count: int, images: Tensor = IMAGES, seed: int = 0, low: float = 0.0, high: float = 1.0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A batch (x_t, t, index, noise) in float64, as a loop makes it; noise levels at quantiles in (low, high)."""
    g = torch.Generator().manual_seed(seed)
    index = torch.randint(len(images), (count,), generator=g)
    first, last = (math.log(r) for r in process.ratios)
    u = low + (high - low) * torch.rand(count, generator=g, dtype=torch.float64)
    t = process.time((first + (last - first) * u).exp())
    noise = torch.randn(count, *images.shape[1:], generator=g, dtype=torch.float64)
    alpha, sigma = (f(t).reshape(-1, *(1,) * (images.ndim - 1)) for f in (process.alpha, process.sigma))
    return alpha * images[index] + sigma * noise, t, index, noise


def parametrised(predicts: str, name: str, x: Tensor, t: float, m: Tensor) -> Tensor:
    """The network's ideal output for one x, from its definition in alpha, sigma, the denoised m and the noise."""
    alpha, var = reference.levels(name, t)
    sigma = math.sqrt(var)
    noise = (x - alpha * m) / sigma
    if predicts == "flow":  # dx/dt of x = alpha m + sigma noise, by differences
        (a, v), (b, w) = (reference.levels(name, t + h) for h in (-1e-5 * t, 1e-5 * t))
        return ((b - a) * m + (math.sqrt(w) - math.sqrt(v)) * noise) / (2e-5 * t)
    if predicts == "edm":  # D = c_skip x + c_out F of Karras et al., for x/alpha at sigma/alpha and sigma_data = .7
        level = sigma / alpha
        skip, out = 0.49 / (level**2 + 0.49), level * 0.7 / math.sqrt(level**2 + 0.49)
        return (m - skip * x / alpha) / out
    return {"noise": noise, "x0": m, "v": alpha * noise - sigma * m, "score": -noise / sigma}[predicts]


# --- the target is the posterior mean, in the network's parametrisation ---------------------------------------------


@pytest.mark.parametrize("predicts", PREDICTIONS)
@pytest.mark.parametrize("name", TIMES)
def test_exact_targets_are_those_of_a_sum_over_all_images(name, predicts):
    process = reference.PROCESSES[name]
    t = torch.tensor(TIMES[name], dtype=torch.float64).repeat(4)
    index, g = torch.arange(8), torch.Generator().manual_seed(1)
    x = process.perturb(IMAGES[index], t, generator=g)
    found = vk.Targets(vk.Empirical(IMAGES, WEIGHTS), process, "J0", predicts, sigma_data=0.7)(x, t, index)
    known = reference.answers(IMAGES.flatten(1), WEIGHTS, x.flatten(1), name, t)
    wanted = [parametrised(predicts, name, q, float(u), a.mean) for q, u, a in zip(x.flatten(1), t, known, strict=True)]
    wanted = torch.stack(wanted).reshape(x.shape)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6 * float(wanted.abs().max()))


@pytest.mark.parametrize("predicts", PREDICTIONS)
@pytest.mark.parametrize("name", TIMES)
def test_a_network_that_returns_the_exact_target_is_the_exact_score(name, predicts):
    process = reference.PROCESSES[name]
    x, t, index, _ = drawn(process, 32, high=0.9)
    targets = vk.Targets(IMAGES, process, predicts=predicts)
    score = vk.as_score(lambda z, time: targets(x, t, index), process, SHAPE, predicts)
    exact = vk.EmpiricalScore(IMAGES, process)(x, t)
    torch.testing.assert_close(score(x, t), exact, rtol=1e-6, atol=1e-8 * float(exact.abs().max()))


@pytest.mark.parametrize("name", TIMES)
def test_j1_with_noise_is_the_noise_that_was_added(name):
    process = reference.PROCESSES[name]
    x, t, index, noise = drawn(process, 64)
    targets = vk.Targets(IMAGES, process, "J1", "noise")
    torch.testing.assert_close(targets(x, t, index), noise, rtol=1e-9, atol=1e-9)
    # in float32 x_t is rounded, by 6e-8 of its size
    sigma = process.sigma(t).reshape(-1, 1, 1, 1)
    error = (targets(x.float(), t, index) - noise).abs() * sigma / (x.abs() + IMAGES[index].abs() + sigma)
    assert float(error.max()) < 5e-7


def test_j1_is_the_usual_target_of_v_and_flow():
    x, t, index, noise = drawn(vk.FlowMatching(), 64)
    flow = vk.Targets(IMAGES, vk.FlowMatching(), "J1", "flow")(x, t, index)
    torch.testing.assert_close(flow, noise - IMAGES[index], rtol=1e-8, atol=1e-8)
    process = vk.DDPM.linear()
    t, index = torch.arange(0, 1000, 20), torch.arange(50) % 9
    noise = torch.randn(50, *SHAPE, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    alpha, sigma = (f(t.double()).reshape(-1, 1, 1, 1) for f in (process.alpha, process.sigma))
    x = alpha * IMAGES[index] + sigma * noise
    v = vk.Targets(IMAGES, process, "J1", "v")(x, t, index)  # integer timesteps
    torch.testing.assert_close(v, alpha * noise - sigma * IMAGES[index], rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("goal", ["J1", vk.JC(3.0), *RANDOM], ids=repr)
@pytest.mark.parametrize("predicts", ["noise", "edm"])
def test_the_mean_over_posterior_draws_is_the_exact_target(goal, predicts, monkeypatch):
    monkeypatch.setattr(module, "DEVIATION", math.inf)  # one x, many times, is no batch of independent noise
    count, t = 20000, 0.35
    x = PROCESS.perturb(IMAGES[:1], t, generator=3)
    r = reference.answers(IMAGES.flatten(1), WEIGHTS, x.flatten(1), "vp", t)[0].weight
    assert float(r.max()) < 0.9  # several images could have been the origin
    index = torch.multinomial(r, count, replacement=True, generator=torch.Generator().manual_seed(4))
    data, many = vk.Empirical(IMAGES, WEIGHTS), x.expand(count, *SHAPE)
    targets = vk.Targets(data, PROCESS, goal, predicts, generator=5)
    found = targets(many, t, index)
    exact = vk.Targets(data, PROCESS, "J0", predicts)(x, t, torch.zeros(1, dtype=torch.long))
    error = (found.mean(0) - exact[0]).abs() / (found.std(0) / math.sqrt(count))
    assert float(error.max()) < 5


def test_a_plain_loop_has_quieter_gradients():
    """Gradient of the loss of a linear network, in plain PyTorch: its variance falls from J1 to JK to J0."""
    process, net, variance = vk.VP(), torch.nn.Linear(24, 24, dtype=torch.float64), {}
    torch.nn.init.zeros_(net.weight)
    for goal in ("J1", vk.JK(4), "J0"):
        targets, gradients = vk.Targets(IMAGES, process, goal, generator=0), []
        for step in range(200):
            x, t, index, _ = drawn(process, 16, seed=step, low=0.5, high=0.9)
            loss = (net(x.flatten(1)) - targets(x, t, index).flatten(1)).square().mean()
            gradients.append(torch.autograd.grad(loss, net.weight)[0])
        variance[str(goal)] = float(torch.stack(gradients).var(0).sum())
    noisy, between, exact = variance.values()
    assert noisy > between > exact


# --- labels and flips -----------------------------------------------------------------------------------------------


def denoised(x: Tensor, t: Tensor, y: Tensor, w: Tensor) -> Tensor:
    """E[x0|x] of one x by the sum over images y with weights w."""
    away = (x - PROCESS.alpha(t) * y).square().flatten(1).sum(1)
    return torch.tensordot((w.log() - away / (2 * PROCESS.S(t))).softmax(0), y, 1)


@pytest.mark.parametrize("flips", [False, True])
def test_labels_and_flips_by_hand(flips):
    y, w, labels = IMAGES, WEIGHTS, LABELS
    if flips:
        y, w, labels = torch.cat([y, y.flip(-1)]), torch.cat([w, w]), torch.cat([labels, labels])
    x, t, index, _ = drawn(PROCESS, 60, y, high=0.8)
    targets = vk.Targets(vk.Empirical(IMAGES, WEIGHTS), PROCESS, predicts="x0", labels=LABELS, flips=flips)
    torch.testing.assert_close(targets.data[index], y[index])  # from which a loop may take its images
    given = labels[index].clone()
    given[::3] = -1  # dropped
    for chosen in (None, given):
        found = targets(x, t, index, chosen)
        label = labels[index] if chosen is None else chosen
        for k in range(60):
            same = (labels == label[k]) | (label[k] == -1)
            torch.testing.assert_close(found[k], denoised(x[k], t[k], y[same], w[same]), rtol=1e-6, atol=1e-8)


def test_a_null_label_and_labels_of_other_integers():
    x, t, index, _ = drawn(PROCESS, 20, high=0.8)
    targets = vk.Targets(IMAGES, PROCESS, labels=LABELS.to(torch.uint8), null=6)
    dropped = targets(x, t, index.int().numpy(), np.full(20, 6, dtype=np.int32))
    torch.testing.assert_close(dropped, vk.Targets(IMAGES, PROCESS)(x, t, index))
    with pytest.raises(InputError, match=r"null, .*, is 5, which some images have"):
        vk.Targets(IMAGES, PROCESS, labels=LABELS, null=5)
    with pytest.raises(InputError, match="labels has -1 for image"):
        targets(x, t, index, torch.full((20,), -1))


# --- what a training loop relies on ---------------------------------------------------------------------------------


@pytest.mark.parametrize("goal", ["J0", "J1", vk.JC(3.0), *RANDOM], ids=repr)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_results_are_rounded_once(goal, dtype):
    """Half precision costs the rounding of x_t and of the result, nothing in between."""
    x, t, index, _ = drawn(PROCESS, 64, low=0.2)
    x = x.to(dtype)
    found, wide = (vk.Targets(IMAGES, PROCESS, goal, generator=0)(a, t, index) for a in (x, x.double()))
    assert found.dtype == dtype
    assert found.shape == x.shape
    torch.testing.assert_close(found, wide.to(dtype), rtol=0, atol=0)


@pytest.mark.parametrize("goal", ["J0", vk.JK(3), vk.JC(2.0, "gaussian")], ids=repr)
def test_autocast_gradients_and_random_numbers_of_the_loop_are_left_alone(goal):
    """In 40 dimensions, where the engine uses float32 products too."""
    images = torch.randn(300, 40, generator=torch.Generator().manual_seed(0))
    x, t, index, _ = drawn(PROCESS, 64, images)
    x = x.float().requires_grad_()
    plain = vk.Targets(images, PROCESS, goal, generator=0)(x, t, index)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = vk.Targets(images, PROCESS, goal, generator=0)(x, t, index)
        assert torch.is_autocast_enabled("cpu")
    torch.testing.assert_close(inside, plain, rtol=0, atol=0)
    assert inside.dtype == torch.float32
    assert not inside.requires_grad
    assert torch.is_grad_enabled()
    vk.Targets(images, PROCESS, goal)(x, t, index)  # fresh randomness
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("goal", RANDOM, ids=repr)
def test_random_numbers_belong_to_the_number_of_the_target(goal):
    """The same generator gives the same targets, whatever the sizes of batches; other generators give others."""
    x, t, index, _ = drawn(PROCESS, 40, low=0.4, high=0.8)

    def batches(generator, *sizes):
        targets = vk.Targets(IMAGES, PROCESS, goal, generator=generator)
        parts = zip(*(a.split(sizes) for a in (x, t, index)), strict=True)
        found = torch.cat([targets(*part) for part in parts])
        assert targets.drawn == 40
        return found

    whole = batches(7, 40)
    torch.testing.assert_close(batches(7, 1, 24, 15), whole)
    torch.testing.assert_close(batches(torch.Generator().manual_seed(7), 39, 1), whole)
    assert not torch.allclose(batches(8, 40), whole)
    assert not torch.allclose(batches(None, 40), batches(None, 40))


@pytest.mark.parametrize("count", [1, 64, 4096])
def test_batches_of_any_size(count):
    x, t, index, _ = drawn(PROCESS, count)
    found = vk.Targets(IMAGES.numpy(), PROCESS)(x, t, index.tolist())
    torch.testing.assert_close(found, vk.to_noise(vk.EmpiricalScore(IMAGES, PROCESS))(x, t), rtol=1e-6, atol=1e-8)


def test_times_of_any_kind():
    process = vk.EDM()
    sigma, index = torch.full((5,), 0.5), torch.arange(5)
    x = process.perturb(IMAGES[:5], 0.5, generator=0)
    targets = vk.Targets(IMAGES, process)
    known = targets(x, 0.5, index)
    for t in (sigma, sigma[:, None, None, None], torch.tensor(0.5), np.float32(0.5), sigma.to(torch.bfloat16)):
        torch.testing.assert_close(targets(x, t, index), known)
    ends = torch.tensor([process.eps, process.T])  # rounded to float32 they lie outside
    assert targets(process.perturb(IMAGES[:2], ends, generator=0), ends, index[:2]).isfinite().all()


def test_integers_memory_maps_and_one_dimension(tmp_path):
    pixels = (IMAGES * 40 + 128).clamp(0, 255).to(torch.uint8)
    np.save(tmp_path / "images.npy", pixels.numpy())
    x, t, index, _ = drawn(PROCESS, 32, pixels / 127.5 - 1.0)
    known = vk.Targets(pixels / 127.5 - 1.0, PROCESS)(x, t, index)
    for points in (pixels, np.load(tmp_path / "images.npy", mmap_mode="r")):
        found = vk.Targets(vk.Empirical(points, scale=(-1, 1)), PROCESS)(x, t, index)
        torch.testing.assert_close(found, known, rtol=1e-4, atol=1e-4)
    line = torch.tensor([-1, 0, 1])  # whole numbers, which stay as they are
    x, t, index, noise = drawn(PROCESS, 16, line[:, None].double())
    torch.testing.assert_close(vk.Targets(line, PROCESS, "J1")(x, t, index), noise)


def test_the_data_stay_as_they_are():
    x, t, index, _ = drawn(PROCESS, 16)
    before, first = x.clone(), IMAGES.clone()
    for goal in ("J0", "J1"):
        for predicts in ("x0", "noise"):
            vk.Targets(IMAGES, PROCESS, goal, predicts)(x, t, index).fill_(9.0)
    assert torch.equal(x, before)
    assert torch.equal(IMAGES, first)


def test_it_says_what_it_is():
    assert repr(vk.Targets(IMAGES, PROCESS, vk.JC(3), "v")).startswith("Targets(JC(3), predicts v, Empirical(n=9,")
    copied = copy.deepcopy(vk.Targets(IMAGES, PROCESS))
    assert copied.objective.spec == {"kind": "J0"}


# --- the check of the batch -----------------------------------------------------------------------------------------

FAR = "x_t is not alpha x0 \\+ sigma noise, .* flips=True, .* crops and other augmentations are refused"


def test_the_norm_of_the_noise_is_as_concentrated_as_stated():
    """P(||ε| - √N| > 7.5) < 1e-9 for every N, by the law of chi."""
    from scipy import stats

    for N in (1, 2, 10, 100, 1000, 10**5, 10**7):
        low, high = math.sqrt(N) - 7.5, math.sqrt(N) + 7.5
        outside = stats.chi.sf(high, N) + (stats.chi.cdf(low, N) if low > 0 else 0.0)
        assert outside < 1e-9


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", TIMES)
def test_noised_images_pass(name, dtype):
    """At every noise level, the lowest too, where the rounding of x_t in half precision exceeds the noise."""
    process = reference.PROCESSES[name]
    for seed, (low, high) in enumerate([(0.0, 0.0), (0.0, 0.1), (0.0, 1.0), (1.0, 1.0)]):
        for count in (1, 256):
            x, t, index, _ = drawn(process, count, seed=seed, low=low, high=high)
            vk.Targets(IMAGES, process, "J1")(x.to(dtype), t, index)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_noise_that_was_added_in_the_precision_of_the_batch_passes(dtype):
    process, index = vk.VP(), torch.arange(256) % 9
    t = torch.linspace(process.eps, process.T, 256)
    alpha, sigma = (f(t).to(dtype).reshape(-1, 1, 1, 1) for f in (process.alpha, process.sigma))
    noise = torch.randn(256, *SHAPE, generator=torch.Generator().manual_seed(0)).to(dtype)
    x = alpha * IMAGES.to(dtype)[index] + sigma * noise
    vk.Targets(IMAGES, process, "J1")(x, t, index)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda y: y.flip(-1),
        lambda y: y.roll(1, -1),
        lambda y: (y + 1) / 2,
        lambda y: y.roll(1, 0),
        lambda y: 1.2 * y,
        lambda y: y + 0.3 * torch.sin(9 * y),
    ],
    ids=["flipped", "shifted", "other range", "other index", "scaled", "distorted"],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_other_images_are_refused(wrong, dtype):
    x, t, index, _ = drawn(PROCESS, 64, wrong(IMAGES))
    with pytest.raises(InputError, match=FAR):
        vk.Targets(IMAGES, PROCESS)(x.to(dtype), t, index)


def test_clean_images_other_noise_and_other_processes_are_refused():
    x, t, index, noise = drawn(PROCESS, 64)
    targets = vk.Targets(IMAGES, PROCESS)
    for bad in (PROCESS.alpha(t).reshape(-1, 1, 1, 1) * IMAGES[index], x + 0.2 * noise):
        with pytest.raises(InputError, match=FAR):
            targets(bad, t, index)
    x, t, index, _ = drawn(PROCESS, 512)
    with pytest.raises(InputError, match=r"root mean square .* instead of 1"):
        vk.Targets(IMAGES, vk.VPSong())(x, t, index)


def test_one_flipped_image_in_a_batch_is_refused_without_flips():
    both = torch.cat([IMAGES, IMAGES.flip(-1)])
    x, t, index, _ = drawn(PROCESS, 64, both)
    vk.Targets(IMAGES, PROCESS, flips=True)(x, t, index)
    with pytest.raises(InputError, match=FAR):
        vk.Targets(IMAGES, PROCESS)(x, t, index % 9)
    with pytest.raises(InputError, match=r"There is no image \d+: index runs from 0 to 8; with flips=True"):
        vk.Targets(IMAGES, PROCESS)(x, t, index)


def test_the_first_ten_batches_and_every_hundredth_are_checked():
    (x, t, index, _), bad = drawn(PROCESS, 16), drawn(PROCESS, 16, IMAGES.flip(-1))[0]
    targets, refused = vk.Targets(IMAGES, PROCESS, "J1"), []
    for step in range(205):
        try:
            targets(bad, t, index)
        except InputError:
            refused.append(step)
            targets(x, t, index)
    assert refused == [*range(10), 100, 200]


# --- errors are sentences -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"x": torch.zeros(4, 4, 6)},
            r"x_t must be a batch of noised images, floats \(B, 1, 4, 6\); got float32, shape",
        ),
        ({"x": torch.zeros(4, 1, 4, 6, dtype=torch.long)}, "x_t must be a batch .* got int64"),
        ({"x": np.zeros((4, 1, 4, 6))}, "x_t must be a torch tensor, not ndarray"),
        ({"x": torch.full((4, 1, 4, 6), torch.nan)}, "x_t holds NaN or infinite values, in image 0 of the batch"),
        ({"x": torch.full((4, 1, 4, 6), torch.inf)}, "x_t holds NaN or infinite"),
        ({"index": [0, 1, 9, 2]}, "There is no image 9: index runs from 0 to 8"),
        ({"index": [0, 1, -1, 2]}, "There is no image -1"),
        (
            {"index": [0, 1]},
            r"index must be \(4,\), one whole number for each image of the batch; got int64, shape \(2,\)",
        ),
        ({"index": [0.0, 1, 2, 3]}, r"index must be \(4,\).* got float64"),
        ({"index": torch.ones(4, dtype=torch.bool)}, "index must be real numbers, not True and False"),
        ({"index": [0, 1, 2, 8]}, "No x_t is made from image 8: its weight is zero"),
        ({"t": 2.0}, "t = 2 is outside"),
        ({"t": torch.tensor([0.1, 0.2, 0.3, torch.nan])}, "t = nan is outside"),
        ({"t": torch.rand(3)}, r"t must be one time, or one for each of the 4 images; got shape \(3,\)"),
        ({"t": torch.rand(1, 4)}, "t must be one time"),
        (
            {"labels": [2, 0, 2, 1]},
            "labels has 1 for image 3, whose label is 2; give .* or -1 where a label was dropped",
        ),
        ({"labels": [2, 0]}, r"labels must be \(4,\)"),
        ({"index": None}, r"needs index \(B,\), the images from which"),
    ],
)
def test_bad_batches(change, says):
    targets = vk.Targets(vk.Empirical(IMAGES, [1] * 8 + [0]), PROCESS, labels=LABELS)
    index, t = torch.arange(4), torch.full((4,), 0.5)
    given = {"x": PROCESS.perturb(IMAGES[:4].float(), t, generator=0), "t": t, "index": index, "labels": None} | change
    with pytest.raises(InputError, match=says):
        targets(given["x"], given["t"], given["index"], given["labels"])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"predicts": "epsilon"}, 'predicts="epsilon" is called "noise" here'),
        ({"predicts": "image"}, "predicts must be one of noise, x0, v, flow, edm, score, not 'image'"),
        ({"objective": "J2"}, "There is no objective 'J2'"),
        ({"process": vk.Anisotropic(vk.VP(), torch.ones(SHAPE))}, "isotropic noise; whiten the data first"),
        ({"process": vk.FlowMatching(eps=0.0)}, "There is no noise at eps"),
        ({"process": "vp"}, "needs a process such as vk.VP"),
        ({"flips": 1}, "flips is True"),
        ({"data": torch.randn(5, 3), "flips": True}, "Mirror images need images"),
        ({"labels": [0, 1]}, r"labels must be \(9,\)"),
        ({"sigma_data": 0.0}, "sigma_data must be positive"),
        ({"null": -2}, "null must be a whole number, -1 or more"),
        ({"generator": "x"}, "generator must be a torch.Generator"),
    ],
)
def test_bad_settings(options, says):
    with pytest.raises(InputError, match=says):
        vk.Targets(**({"data": IMAGES, "process": PROCESS} | options))


def test_labels_of_a_batch_need_those_of_the_data():
    x, t, index, _ = drawn(PROCESS, 4)
    with pytest.raises(InputError, match=r"give labels=\(n,\) to vk.Targets too"):
        vk.Targets(IMAGES, PROCESS)(x, t, index, LABELS[index])
