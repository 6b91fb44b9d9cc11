"""Audits of seven networks that other people trained: two cannot see brightness, one was trained for too short."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from networks28 import C, U

import vkernel as vk
from vkernel import Checkpoint
from vkernel.adapters.weights import read_process
from vkernel.reports.audit import Audit, Sizes, check, skill

MODELS = os.environ.get("VKERNEL_MODELS")
DATA = Path(os.environ.get("VKERNEL_DATA", "/usr/share/datasets"))
SETS = {
    "mnist": [DATA / "mnist" / f"{part}-images-idx3-ubyte" for part in ("train", "t10k")],
    "fashion": [Path("/usr/share/datasets/fashion-mnist") / f"{p}-images-idx3-ubyte.gz" for p in ("train", "t10k")],
}
SMALL = Sizes(8, 16, 1, 4, 48, 4, 0, 16, 20, 128, 10, 0)
pytestmark = pytest.mark.skipif(MODELS is None, reason="VKERNEL_MODELS does not say where the seven networks lie")


def images(name: str) -> tuple[vk.Empirical, vk.Empirical]:
    """Some thousand training images, and test images."""
    for path in SETS[name]:
        if not path.is_file():
            pytest.skip(f"{name} is not at {path}")
    train, test = (vk.load(path) for path in SETS[name])
    return train.subset(torch.arange(2000)), test.subset(torch.arange(1000))


def network(name: str) -> Checkpoint:
    path = Path(MODELS or "") / name
    if name.startswith("unet"):
        stated = {"betas": "linear:1e-4:.02:1000", "strip": "network."}
        return Checkpoint.from_weights(path, U, shape=(1, 28, 28), **stated)
    stated = {"betas": "key:alpha_t", "strip": "gt.", "time": "fraction:1000", "range": "-.5,.5"}
    return Checkpoint.from_weights(path, C, shape=(1, 28, 28), **stated)


def levels(found: Audit, name: str) -> dict[str, str]:
    return {v.question: v.level for v in found.verdicts if v.network == name}


def answer(found: Audit, name: str, question: str) -> str:
    return next(v.answer for v in found.verdicts if (v.network, v.question) == (name, question))


@pytest.mark.parametrize(("name", "data"), [("unet28_fashion.pt", "fashion"), ("unet28_mnist.pt", "mnist")])
def test_the_networks_that_normalise_are_blind_and_drift(name: str, data: str) -> None:
    train, test = images(data)
    found = vk.audit(network(name), train, test=test, sizes=SMALL)
    verdict = levels(found, name)
    assert verdict["conventions"] == "good"
    assert verdict["blindness"] == "alarm"
    assert answer(found, name, "blindness").startswith("yes, brightness and contrast")
    assert verdict["drift"] == "alarm"
    assert verdict["copies"] != "alarm"
    assert found.advice[0].change.startswith("Let the network see brightness and contrast")
    assert "drift along what it cannot see" in found.advice[0].evidence


def test_a_trained_network_is_distinguished_from_an_early_one() -> None:
    train, test = images("mnist")
    names = ["cnn28_mnist_a.pth", "cnn28_mnist_early.pth"]
    found = vk.audit([network(name) for name in names], train, test=test, sizes=replace(SMALL, check=64))
    good, early = (levels(found, name) for name in names)
    assert good["training"] == "good"
    assert (early["training"], early["conventions"], good["conventions"]) == ("unknown", "unknown", "good")
    assert "under-trained: cannot be told apart" in answer(found, names[1], "training")
    for verdict in (good, early):
        assert not {"copies", "membership", "blindness"} & {q for q, level in verdict.items() if level == "alarm"}
    assert found.agreement is not None
    assert [n.name for n in found.members] == names


@pytest.mark.slow
def test_four_good_networks_are_not_accused() -> None:
    """As many images as ``--quick`` takes; another run would have given nearly the same."""
    train, test = images("mnist")
    names = [f"cnn28_mnist_{letter}.pth" for letter in "abcd"]
    found = vk.audit([network(name) for name in names], train, test=test, quick=True)
    for name in names:
        verdict = levels(found, name)
        raised = {q for q, level in verdict.items() if level == "alarm"}
        assert not raised & {"conventions", "training", "copies", "membership", "blindness"}, (name, raised)
    assert found.agreement is not None
    assert found.agreement.same is not None
    assert found.agreement.same.ratio.value < 1
    assert found.memorised is not None
    assert found.memorised.high < 0.1


@pytest.mark.parametrize(
    ("name", "own", "other"), [("unet28_fashion.pt", "fashion", "mnist"), ("cnn28_mnist_a.pth", "mnist", "fashion")]
)
def test_wrong_data_and_wrong_betas_are_not_praised(name: str, own: str, other: str) -> None:
    """Other data, transposed images and other betas; the right ones are named where they can be tested."""
    net, (right, _), (wrong, _) = network(name), images(own), images(other)
    assert check(net, right, images=24).fits
    assert not skill(net, right, images=24).doubtful
    elsewhere = skill(net, wrong, images=24)
    assert elsewhere.doubtful
    assert skill(net, right, images=24).fits_better(elsewhere)
    turned = check(net, vk.Empirical(net.scaled(right)[:500].mT.contiguous()), images=24)
    assert turned.better is not None
    assert turned.better.images == "transposed images"
    lied = check(replace(net, process=read_process("cosine:1000", {}, "")[0]), right, images=24)
    assert lied.better is not None
    assert lied.better.betas == "linear:1e-4:.02:1000" or lied.better.betas.startswith("key:")
