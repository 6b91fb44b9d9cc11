"""Images by name: nested training sets, held-out images apart from them, mean-pooled sides, files in VKERNEL_DATA."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from vkernel.core.errors import InputError
from vkernel.data import images

PIXELS = np.random.default_rng(0).integers(0, 256, (2, 40, 28, 28), dtype=np.uint8)


@pytest.fixture
def fashion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez(tmp_path / "fashion-mnist.npz", train=PIXELS[0], test=PIXELS[1])
    monkeypatch.setenv("VKERNEL_DATA", str(tmp_path))


def test_sets_are_nested_and_held_out_images_are_others() -> None:
    (small, held), (large, same) = (images("digits", n, 100, seed=3) for n in (20, 50))
    assert torch.equal(large[:20], small[:])
    assert torch.equal(held[:], same[:])
    everything = torch.cat([large[:], held[:]]).flatten(1)
    assert len(everything.unique(dim=0)) == 150
    for other in (images("digits", 20, 100, seed=4)[0], images("digits", 20, 100, seed=3, set=1)[0]):
        assert not torch.equal(other[:], small[:])


@pytest.mark.usefixtures("fashion")
def test_pixels_are_means_over_squares() -> None:
    whole, held = images("fashion", 40, 40)
    assert whole.shape == (1, 28, 28)
    stored = {image.tobytes() for image in PIXELS[0]}
    assert {((image + 1) * 127.5).round().to(torch.uint8).numpy().tobytes() for image in whole[:]} == stored
    half = images("fashion", 40, 40, size=14)[0]
    want = whole[:].numpy().reshape(40, 14, 2, 14, 2).mean((2, 4))
    np.testing.assert_allclose(half[:][:, 0].numpy(), want, atol=1e-6)
    padded = np.pad(held[:][:, 0].numpy(), [(0, 0), (2, 2), (2, 2)], constant_values=-1)
    eight = images("fashion", 4, 40, size=8)[1]
    np.testing.assert_allclose(eight[:][:, 0].numpy(), padded.reshape(40, 8, 4, 8, 4).mean((2, 4)), atol=1e-6)


@pytest.mark.usefixtures("fashion")
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"name": "fashion", "n": 41, "test": 5}, "40 training and 40 test images here; n = 41"),
        ({"name": "fashion", "n": 4, "test": 5, "size": 9}, "divides neither 28 nor"),
        ({"name": "digits", "n": 1700, "test": 200}, "has 1,797 images in all"),
        ({"name": "faces", "n": 4}, "fashion"),
        ({"name": "cifar10", "n": 4}, "no CIFAR-10 sheets; set VKERNEL_DATA"),
    ],
)
def test_what_is_not_there_is_refused(given: dict, said: str) -> None:
    with pytest.raises(InputError, match=said):
        images(**given)
