"""Copies of augmented images: brute force over all versions, networks that learned them, refusals."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from draws import normal
from torch import Tensor

import vkernel as vk
from vkernel.core.errors import InputError
from vkernel.metrics.augment import Augment, lowest
from vkernel.metrics.copies import copies

DIGITS = vk.data.digits()[:400]


def seen(image: np.ndarray, spec: str) -> list[np.ndarray]:
    """All versions of one image by numpy: turned, padded with the background, and cropped."""
    found = [image]
    for kind in spec.split(","):
        if kind == "rot90":
            found = [np.rot90(x, k) for x in found for k in range(4)]
        elif kind in ("flip", "vflip"):
            found += [np.flip(x, -1 if kind == "flip" else -2) for x in found]
    k = next((int(kind[6:]) for kind in spec.split(",") if kind.startswith("shift")), 0)
    h, w = image.shape
    padded = [np.pad(x, k, constant_values=-1.0) for x in found]
    return [x[i : i + h, j : j + w] for x in padded for i in range(2 * k + 1) for j in range(2 * k + 1)]


@pytest.mark.parametrize("spec", ["flip", "flip,vflip", "rot90,flip", "shift:1", "vflip,shift:2"])
@pytest.mark.parametrize("features", ["pixels", "standardised"])
def test_distances_are_those_to_the_nearest_version_of_another_image(spec: str, features: str) -> None:
    train, x = DIGITS[:40], DIGITS[300:320] + 0.1 * normal(20, 1, 8, 8).float()
    x[0] = torch.from_numpy(seen(train[7, 0].numpy(), spec)[-1].copy())
    extract = vk.metrics.extractor(features)
    versions = torch.stack([torch.from_numpy(np.stack(seen(y[0].numpy(), spec))) for y in train])
    rows = torch.stack([extract(some[:, None]) for some in versions]).double()
    table = (extract(x).double()[:, None, None] - rows).norm(dim=3).amin(2)
    want = table.sort(dim=1, stable=True)
    found = copies(x, vk.Empirical(train), vk.Empirical(DIGITS[200:260]), features=features, augment=spec)
    torch.testing.assert_close(found.distance, want.values[:, :2], rtol=1e-5, atol=1e-5)
    assert torch.equal(found.index, want.indices[:, :2])
    assert found.index[0, 0] == 7
    assert found.ratio[0] < 1e-6
    own = torch.stack([(extract(train).double()[:, None] - rows[j]).norm(dim=2).amin(1) for j in range(40)], 1)
    own = own.fill_diagonal_(torch.inf).amin(1)
    assert found.authentic.value == float((want.values[:, 0] > own[want.indices[:, 0]]).double().mean())


@pytest.mark.parametrize(("spec", "count"), [("flip", 2), ("flip,vflip,rot90", 8), ("rot90", 4), ("flip,shift:2", 50)])
def test_versions_are_different_and_their_number_is_known(spec: str, count: int) -> None:
    image, augment = normal(1, 1, 9, 9), Augment.parse(spec, (1, 9, 9))
    versions = torch.stack(list(augment.versions(image, -1.0)))
    assert len(versions.flatten(1).unique(dim=0)) == len(versions) == augment.count == count
    assert torch.equal(versions[0], image)
    assert Augment.parse(augment.name, (9, 9)) == augment


@pytest.mark.parametrize(("spec", "alone"), [("flip", 0.7), ("shift:1", 0.4)])
def test_a_memoriser_of_augmented_images_is_seen_to_copy_them_all(spec: str, alone: float) -> None:
    """Samples of the exact score of the augmented set: a part is near the images as they were stored."""
    train, held = DIGITS[:50], vk.Empirical(DIGITS[100:400])
    augment = Augment.parse(spec, train.shape[1:])
    score = vk.EmpiricalScore(vk.Empirical(torch.cat(list(augment.versions(train, -1.0)))), vk.EDM())
    x = vk.sample.pf_ode(score, 80.0 * normal(100, 1, 8, 8).float(), steps=40)
    plain, known = (copies(x, vk.Empirical(train), held, augment=given) for given in ("", spec))
    assert plain.fraction.value < alone
    assert known.fraction.value > 0.95
    assert known.alarm
    assert known.reference.value < 0.05
    assert known.augment == spec
    fresh = copies(DIGITS[350:400], vk.Empirical(train), held, augment=spec)  # and no others are accused
    assert not fresh.alarm


def test_images_that_are_versions_of_each_other_count_as_one() -> None:
    train = DIGITS[:30]
    both = vk.Empirical(torch.cat([train, train.flip(-1)]))
    found = copies(train[:10] + 0.01, both, vk.Empirical(DIGITS[100:150]), augment="flip")
    assert found.distinct == 30
    assert found.fraction.value == 1
    assert found.index[:, 0].tolist() == list(range(10))
    one = copies(DIGITS[200:230], vk.Empirical(train), vk.Empirical(DIGITS[100:150]), augment="flip")
    two = copies(DIGITS[200:230], both, vk.Empirical(DIGITS[100:150]), augment="flip")
    torch.testing.assert_close(one.distance, two.distance)
    assert copies(train[:4], both, augment="flip").reference_kind.startswith("training")


def test_the_law_of_augmented_images_is_that_of_samples() -> None:
    def flipped(images: Tensor, seed: int) -> Tensor:
        coin = torch.rand(len(images), 1, 1, 1, generator=torch.Generator().manual_seed(seed)) < 0.5
        return torch.where(coin, images.flip(-1), images)

    images = vk.data.digits()[torch.randperm(1797, generator=torch.Generator().manual_seed(0))]
    x, train, test = flipped(images[:200], 1), images[200:1100], images[1100:]
    plain, known = (vk.metrics.likeness(x, train, test, augment=given) for given in (None, "flip"))
    assert plain.alarm
    assert not known.alarm


def test_the_background_enters_and_the_version_of_a_picture_is_the_nearest() -> None:
    stored = (127.5 * (DIGITS[:5] + 1)).byte()
    assert lowest(vk.Empirical(stored, scale=(-0.5, 0.5))) == -0.5
    assert lowest(vk.Empirical(DIGITS[:5].double() + 3)) == 2.0
    augment = Augment.parse("flip,shift:1", (1, 8, 8))
    wanted = [list(augment.versions(DIGITS[:5], -1.0))[k][i] for i, k in enumerate((0, 3, 7, 11, 17))]
    found = augment.closest(DIGITS[:5], torch.stack(wanted), -1.0, vk.metrics.extractor("pixels"))
    assert torch.equal(found, torch.stack(wanted))


@pytest.mark.parametrize(
    ("spec", "shape", "words"),
    [
        ("mirror", (1, 8, 8), "no augmentation 'mirror'; there are flip, vflip, rot90 and shift:K"),
        ("flip:2", (1, 8, 8), "no augmentation 'flip:2'"),
        ("flip,", (1, 8, 8), "no augmentation ''"),
        ("shift", (1, 8, 8), "shift:K with K from 1 to 8"),
        ("shift:0", (1, 8, 8), "shift:K with K from 1 to 8"),
        ("shift:-1", (1, 8, 8), "shift:K with K from 1 to 8"),
        ("shift:4", (3, 4, 4), "out of sight"),
        ("flip", (64,), r"these data have shape \(64,\)"),
        ("rot90", (1, 8, 6), "square"),
        (7, (1, 8, 8), "must be a text"),
    ],
)
def test_what_is_no_augmentation_is_refused(spec: str, shape: tuple[int, ...], words: str) -> None:
    with pytest.raises(InputError, match=words):
        Augment.parse(spec, shape)
