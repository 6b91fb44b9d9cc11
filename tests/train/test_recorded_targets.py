"""Targets by float64 products: against sums over all images, at every noise level; and what is noticed in a batch."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import reference
import torch
from torch import Tensor

import vkernel as vk
from vkernel.core import rng
from vkernel.train.recorded_targets import HEAVIEST, ROUNDING, Products, RecordedTargets
from vkernel.train.training_set import TrainingSet

N, SHAPE = 40, (1, 4, 6)
IMAGES = torch.randn(N, *SHAPE, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 3
WEIGHTS = torch.arange(1.0, N + 1, dtype=torch.float64)
LABELS = torch.arange(N) % 3
KEY = torch.tensor([5])
NAMES = ("vp", "ddpm", "edm", "flow")


def batch(name: str, count: int = 24, labelled: bool = False) -> SimpleNamespace:
    """Inputs at their places: noise levels at equal ratios over the range of the process."""
    process, g = reference.PROCESSES[name], torch.Generator().manual_seed(1)
    low, high = (math.log(r) for r in process.ratios)
    t = process.time(torch.linspace(low, high, count, dtype=torch.float64).exp())
    index = torch.randint(N, (count,), generator=g)
    x = process.perturb(IMAGES[index], t, generator=g)
    label = torch.where(torch.arange(count) % 4 == 0, 9, LABELS[index]) if labelled else None
    return SimpleNamespace(x=x, t=t, index=index, label=label, uniforms=lambda key: torch.empty(count, 0))


def served(name: str, goal: str | vk.JK = "J0", labels: Tensor | None = None) -> RecordedTargets:
    held = vk.Targets(vk.Empirical(IMAGES, WEIGHTS), reference.PROCESSES[name], goal, labels=labels, null=9)
    return RecordedTargets(held, held.objective, "x0", 0.5, 9)


@pytest.mark.parametrize("name", NAMES)
def test_means_are_those_of_a_sum_over_all_images(name):
    b = batch(name)
    target, good = served(name).compute(b, KEY)
    known = reference.answers(IMAGES.flatten(1), WEIGHTS, b.x.flatten(1), name, b.t)
    wanted = torch.stack([a.mean for a in known]).reshape(b.x.shape)
    torch.testing.assert_close(target, wanted, rtol=0, atol=1e-9)
    assert good.tolist() == [True, True]


def test_a_label_keeps_the_posterior_within_its_class():
    b = batch("vp", labelled=True)
    target, good = served("vp", labels=LABELS).compute(b, KEY)
    for k in range(len(b.x)):
        rows = torch.ones(N, dtype=torch.bool) if b.label[k] == 9 else b.label[k] == LABELS
        known = reference.answers(
            IMAGES[rows].flatten(1), WEIGHTS[rows], b.x[k : k + 1].flatten(1), "vp", b.t[k : k + 1]
        )
        torch.testing.assert_close(target[k].flatten(), known[0].mean, rtol=0, atol=1e-9)
    assert good.tolist() == [True, True]


def test_draws_are_at_the_quantiles_of_the_posterior():
    """JK is the mean of the origin and of the images at which the cumulative weight passes K - 1 uniforms."""
    b, K = batch("vp"), 4
    u = rng.uniforms(KEY, torch.arange(len(b.x) * (K - 1)).reshape(-1, K - 1))
    b.uniforms = lambda key: u
    target, _ = served("vp", vk.JK(K)).compute(b, KEY)
    known = reference.answers(IMAGES.flatten(1), WEIGHTS, b.x.flatten(1), "vp", b.t)
    for k, answer in enumerate(known):
        place = (answer.weight.cumsum(0)[None] < u[k][:, None]).sum(1).clamp_max(N - 1)
        wanted = (IMAGES[b.index[k]] + IMAGES[place].sum(0)) / K
        torch.testing.assert_close(target[k], wanted, rtol=0, atol=1e-12)


def test_low_noise_far_from_the_origin_is_exact_where_products_are_not():
    """Images at a distance of 1e6, noise of 1e-3: logits by products alone would be off by 1e-16 · 1e12 / 1e-6."""
    points = torch.tensor([[0.0, 0.0], [1e6, 0.0], [1e6, 3e-3]], dtype=torch.float64)
    products = Products(TrainingSet(points, vk.EDM()))
    sigma = torch.tensor([1e-3], dtype=torch.float64)
    x = points[1:2] + torch.tensor([[0.0, 1e-3]], dtype=torch.float64)
    found = products.weights(x, torch.ones(1, dtype=torch.float64), sigma**2, None, -1)[0]
    wanted = torch.softmax(-(x - points).square().sum(1) / (2 * sigma**2), 0)
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-12)
    assert products.rounding(vk.EDM()) > ROUNDING  # such a set is left to the engine
    assert len(points) < HEAVIEST


@pytest.mark.parametrize(
    ("change", "values", "noise"),
    [
        (lambda b: b.index.__setitem__(3, N), False, None),
        (lambda b: b.index.__setitem__(3, -1), False, None),
        (lambda b: b.x[2].fill_(math.nan), False, False),
        (lambda b: b.t.__setitem__(1, 2.0), False, None),
        (lambda b: b.label.__setitem__(1, (b.label[1] + 1) % 3), False, True),
        (lambda b: b.index.copy_(b.index.roll(1)), None, False),
        (lambda b: b.x.mul_(1.5), True, False),
    ],
)
def test_what_is_wrong_with_a_batch_is_noticed(change, values, noise):
    b = batch("vp", labelled=True)
    change(b)
    good = served("vp", labels=LABELS).compute(b, KEY)[1].tolist()
    for found, wanted in zip(good, (values, noise), strict=True):
        assert wanted is None or found is wanted


def test_a_cpu_and_random_placebos_are_left_to_the_engine():
    for goal in ("J0", vk.JC(2.0, "white")):
        held = vk.Targets(IMAGES, vk.VP(), goal)
        assert RecordedTargets.serving(held, held.objective, "noise", 0.5, -1) is None
