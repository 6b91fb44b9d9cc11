"""The constructor refuses what cannot be used with a sentence; a call during training warns once and never raises."""

from __future__ import annotations

import math
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from monitored import PROCESS, Denoiser, digits
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import vkernel as vk
from vkernel.core.errors import InputError


@pytest.fixture(scope="module")
def images() -> tuple[Tensor, Tensor]:
    return digits(48, 32)


SMALL = {"images": 8, "samples": 4, "sampler_steps": 3, "progress": False}


def monitor(sets: tuple[Tensor, Tensor], /, **options: object) -> vk.Monitor:
    given = {"data": sets[0], "test": sets[1], "process": PROCESS, "predicts": "x0"} | SMALL | options
    return vk.Monitor(**given)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"test": None}, r"needs held-out images, test=.*random permutation"),
        ({"predicts": "epsilon"}, 'predicts="epsilon" is called "noise" here'),
        ({"predicts": "image"}, "predicts must be one of"),
        ({"time": "steps"}, "time must be one of"),
        ({"time": "index"}, "has no index"),
        ({"process": "vp"}, "A monitor needs a process such as vk.VP"),
        ({"process": type("DDPMScheduler", (), {})()}, r"not a DDPMScheduler: vk.adapters.conventions_of\(scheduler\)"),
        ({"every": 0}, "every must be a whole number"),
        ({"budget": 0}, "budget is a share of the wall time"),
        ({"budget": 2.0}, "budget is a share of the wall time"),
        ({"images": 1}, "images must be"),
        ({"samples": -1}, "samples must be"),
        ({"sampler_steps": 0}, "sampler_steps must be"),
        ({"levels": ()}, "levels is empty"),
        ({"levels": "many"}, "levels must be"),
        ({"levels": [1e9]}, "outside"),
        ({"range": (1, -1)}, "low < high"),
        ({"range": "0,1"}, r"values in \[-1, 1\], but range says \[0, 1\]"),
        ({"range": (-2, 2)}, "but range says"),
        ({"dtype": torch.float32}, "dtype must be"),
        ({"forward": 3}, "forward must be a function"),
        ({"progress": "yes"}, "progress must be"),
        ({"decoder": 3}, "A decoder is a function"),
        ({"labels": [0, 1]}, "There are 2 labels for 48 training images"),
        ({"labels": True}, "takes the labels of a torch Dataset"),
        ({"labels": np.zeros(48, int)}, "Give test_labels"),
        ({"labels": np.zeros(48, int), "test_labels": np.ones(32, int)}, r"class \[1\], of which there is no training"),
        ({"test": torch.zeros(8, 1, 4, 4)}, "must be alike"),
        ({"test": "nowhere.npy"}, "There is no file or folder"),
        ({"data": torch.zeros(9, 1, 8, 8, dtype=torch.int64)}, "stored as int64, whose range is not that of pixels"),
        ({"data": torch.zeros(9, 1, 8, 8, dtype=torch.int16), "range": (-1, 1)}, "give them as uint8, 0 … 255, or as"),
        ({"seed": 0.5}, "seed must be a whole number"),
    ],
)
def test_the_constructor_refuses(images: tuple[Tensor, Tensor], options: dict[str, object], why: str) -> None:
    with pytest.raises(InputError, match=why):
        monitor(images, **options)


def test_it_refuses_images_that_are_wrong(images: tuple[Tensor, Tensor]) -> None:
    train, test = images
    bad = train.clone()
    bad[3, 0, 0, 0] = math.nan
    for why, data in {
        "training images cannot be used: Training point 3 is not finite": bad,
        "values in .0, 1., but range says .-1, 1.": (train + 1) / 2,
        "There is one training image": train[:1],
        "All training images are equal": torch.ones(8, 1, 8, 8),
    }.items():
        with pytest.raises(InputError, match=why):
            monitor(images, data=data, range=None if "equal" in why else (-1, 1))
    with pytest.raises(InputError, match="32 held-out images are training images"):
        monitor(images, data=torch.cat([train, test]))
    pixels = ((train + 1) * 127.5).round().to(torch.uint8)
    with pytest.raises(InputError, match="integers 0 … 255; give range"):
        monitor((pixels, pixels))
    twice = torch.cat([train[:1], *[test + 0.01 * k for k in range(4)]])
    with pytest.warns(UserWarning, match="1 of the 129 held-out images are training images; they are left out"):
        assert monitor(images, test=twice).probe.test.n == 128


class Pairs(Dataset):
    def __init__(self, images: Tensor, kind: str = "pair") -> None:
        self.images, self.kind = images, kind

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, k: int) -> object:
        image = self.images[k]
        return {
            "pair": (image, k % 3),
            "alone": image,
            "named": {"pixel_values": image, "label": k % 3},
            "augmented": (image + torch.rand(()), 0),
            "unnamed": {"text": "digit"},
            "pil": ("a picture", 0),
            "ragged": image[:, : 8 - k % 2],
        }[self.kind]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(())


def test_data_of_every_kind_give_the_same_numbers(images: tuple[Tensor, Tensor], tmp_path: Path) -> None:
    train, test = images
    np.save(tmp_path / "train.npy", train.numpy())
    torch.manual_seed(0)
    network, before = Denoiser(), torch.get_rng_state()
    expected = monitor(images).evaluate(0, network).images["train"]
    kinds = [vk.Empirical(train), train.numpy(), str(tmp_path / "train.npy"), tmp_path / "train.npy"]
    kinds += [TensorDataset(train), Pairs(train), Pairs(train, "alone"), Pairs(train, "named")]
    kinds += [torch.utils.data.Subset(Pairs(train), range(48))]
    for data in kinds:
        found = monitor(images, data=data, test=Pairs(test)).evaluate(0, network)
        assert torch.allclose(found.images["train"], expected, rtol=1e-5)
    assert torch.equal(before, torch.get_rng_state())
    pixels = [((part + 1) * 127.5).round().to(torch.uint8) for part in images]
    found = monitor(images, data=pixels[0], test=pixels[1], range=(-1, 1)).evaluate(0, network)
    assert torch.allclose(found.images["train"], expected, rtol=0.1)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (lambda x: Pairs(x, "augmented"), "augmented at random"),
        (lambda x: Pairs(x, "unnamed"), "none is an image"),
        (lambda x: Pairs(x, "pil"), "add a transform to tensors"),
        (lambda x: Pairs(x, "ragged"), "must have one shape"),
        (lambda x: Pairs(x[:0]), "the Dataset is empty"),
        (lambda x: Stream(), "IterableDataset has no items by number"),
    ],
)
def test_datasets_that_are_refused(images: tuple[Tensor, Tensor], data, why: str) -> None:
    with pytest.raises(InputError, match=why):
        monitor(images, data=data(images[0]))


def test_a_shift_of_held_out_images_is_reported(images: tuple[Tensor, Tensor]) -> None:
    train, test = digits(300, 300)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        good = monitor((train, test))
    assert good.probe.shift > 1e-3
    with pytest.warns(UserWarning, match="not a random split"):
        shifted = monitor((train, (0.5 * test - 0.5)))
    network = Denoiser()
    for step in (0, 10, 20):
        shifted.evaluate(step, network)
    assert shifted.verdict.shifted
    assert shifted.verdict.alarm is None


# -------------------- calls during training


def failing(x: Tensor, t: Tensor) -> Tensor:
    raise RuntimeError("device-side assert")


@pytest.mark.parametrize(
    ("network", "step", "why"),
    [
        (failing, 0, "device-side assert"),
        (lambda x, t: x[:, :, :4], 0, "must return a tensor of the same shape"),
        (lambda x, t: "image", 0, "returned a str"),
        (lambda x: x, 0, "positional argument"),
        (3, 0, "must be callable"),
        (lambda x, t: x, "five", "step must be a whole number"),
        (lambda x, t: x, -1, "step must be 0 or more"),
    ],
)
def test_a_call_never_raises(images: tuple[Tensor, Tensor], network: object, step: object, why: str) -> None:
    watch = monitor(images, every=1, budget=0.99)
    with pytest.warns(UserWarning, match=why):
        assert watch(step, network) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for k in range(3):  # once for each kind of failure
            assert watch(step, network) is None, k
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a filter that makes warnings errors
        assert monitor(images)(step, network) is None


def test_interrupts_pass(images: tuple[Tensor, Tensor]) -> None:
    def stopped(x: Tensor, t: Tensor) -> Tensor:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        monitor(images)(0, stopped)


def test_weights_that_are_not_finite_are_reported(images: tuple[Tensor, Tensor]) -> None:
    watch, network = monitor(images), Denoiser()
    assert watch.evaluate(0, network).finite
    with torch.no_grad():
        network.last.bias[0] = math.nan
    with pytest.warns(UserWarning, match="NaN or infinite values at step 1"):
        record = watch.evaluate(1, network)
    assert not record.finite
    assert not watch.verdict.finite
    assert "NaN" in repr(watch)
    with torch.no_grad():
        network.last.bias[0] = 0.0
    assert watch.evaluate(2, network).finite
    assert watch.verdict.gap.k == 2  # the evaluation between does not count


def test_a_wrong_prediction_is_named(images: tuple[Tensor, Tensor]) -> None:
    """The ideal denoiser in another parametrisation than stated is recognised at the third evaluation."""
    ideal = vk.EmpiricalScore(vk.Empirical(images[0]), PROCESS)
    forms = {"noise": vk.to_noise, "x0": vk.to_x0, "v": vk.to_v, "flow": vk.to_flow}
    for true, convert in forms.items():
        for stated in forms:
            watch = monitor(images, predicts=stated, samples=0)
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                for step in range(3):
                    watch.evaluate(step, convert(ideal))
            assert watch.verdict.better == ("" if true == stated else true), (true, stated)
            assert any(f'fit predicts="{true}"' in str(w.message) for w in seen) == (true != stated)


@pytest.mark.parametrize("predicts", ["noise", "x0", "v", "flow", "edm", "score"])
def test_networks_that_learn_are_not_accused_of_a_wrong_prediction(
    images: tuple[Tensor, Tensor], predicts: str
) -> None:
    torch.manual_seed(0)
    watch, network = monitor(images, predicts=predicts, samples=0), Denoiser(64)
    score = watch.conventions.score(network)
    optimiser = torch.optim.Adam(network.parameters(), 3e-3)
    for step in range(300):
        x0, t = images[0][torch.randint(48, (64,))], 0.95 * torch.rand(64) + 0.04
        alpha, sigma = (f(t)[:, None, None, None] for f in (PROCESS.alpha, PROCESS.sigma))
        noise = torch.randn_like(x0)
        x = alpha * x0 + sigma * noise
        loss = (sigma / alpha).pow(-2).clamp_max(5) * (score.denoise(x.requires_grad_(), t) - x0).square()
        optimiser.zero_grad()
        loss.mean().backward()
        optimiser.step()
        if step % 20 == 0:
            watch.evaluate(step, network)
            assert not watch.verdict.better, step
    assert watch.records[-1].train.value < 3


def test_a_network_of_noise_that_is_declared_v(images: tuple[Tensor, Tensor]) -> None:
    """A network that is little better than a linear denoiser: read as v it is worse, though no worse than zeros."""
    theory, watch = vk.theories.Gaussian(vk.Empirical(images[0]), PROCESS), monitor(images, predicts="v", samples=0)
    for step in (0, 1):
        watch.evaluate(step, vk.to_noise(theory))
    with pytest.warns(UserWarning, match='fit predicts="noise"'):
        watch.evaluate(2, vk.to_noise(theory))
    assert watch.verdict.better == "noise"


def test_repeated_training_images_are_no_shift(images: tuple[Tensor, Tensor]) -> None:
    """Of a random split some training images are there ten times: the probe holds each once."""
    train, test = images
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        watch = monitor((torch.cat([train, train[:4].repeat(9, 1, 1, 1)]), test), images=48)
    shown = watch.probe.data[watch.probe.sets["train"].index].flatten(1)
    assert len(shown) == len(shown.unique(dim=0)) == len(train)
    assert watch.setting.shift > 1e-3


def test_a_wrong_range_is_noticed(images: tuple[Tensor, Tensor]) -> None:
    ideal = vk.EmpiricalScore(vk.Empirical(20 + images[0]), PROCESS)  # trained on other pixels
    watch = monitor(images, predicts="noise")
    for step in (0, 10):
        watch.evaluate(step, vk.to_noise(ideal))
    with pytest.warns(UserWarning, match="Check predicts, time, range and process"):
        watch.evaluate(20, vk.to_noise(ideal))
    assert watch.verdict.misfit


# -------------------- kinds of networks


def test_a_class_conditional_network_gets_each_image_its_label(images: tuple[Tensor, Tensor]) -> None:
    train, test = images
    classes = {name: (part.flatten(1).mean(1) > -0.4).long() for name, part in (("train", train), ("test", test))}
    scores = [vk.EmpiricalScore(vk.Empirical(train[classes["train"] == c]), PROCESS) for c in (0, 1)]
    seen = []

    def network(x: Tensor, t: Tensor, labels: Tensor) -> Tensor:
        seen.append(labels)
        rows = [scores[int(label)].denoise(x[k : k + 1], t[k : k + 1]) for k, label in enumerate(labels)]
        return torch.cat(rows)

    labels = {"labels": classes["train"], "test_labels": classes["test"]}
    watch = monitor(images, **labels)
    record = watch.evaluate(0, network)
    assert float(record.ideal["train"].value.max()) < 1e-8  # it is the ideal denoiser of the class
    assert float(record.ideal["test"].value.max()) < 1e-8
    assert set(torch.cat(seen).tolist()) == {0, 1}
    other = monitor(images).evaluate(0, lambda x, t: network(x, t, torch.zeros(len(x))))
    assert float(other.ideal["train"].value.max()) > 1e-3
    named = monitor(images, **labels, forward=lambda net, x, time, labels: (net(x, time, labels),))
    assert torch.equal(named.evaluate(0, network).images["test"], record.images["test"])
    listed = monitor(images, data=Pairs(train), test=Pairs(test), labels=True)
    assert set(listed.probe.sets["train"].labels.tolist()) == {0, 1, 2}


@pytest.mark.parametrize("process", [vk.EDM(), vk.FlowMatching(), vk.DDPM.linear(), vk.Cosine(), vk.VE()])
def test_processes(images: tuple[Tensor, Tensor], process: vk.Process) -> None:
    """The ideal denoiser has no distance from itself, and its samples are copies."""
    ideal = vk.EmpiricalScore(vk.Empirical(images[0]), process)
    watch = monitor(images, process=process, predicts="x0", samples=16, sampler_steps=18)
    record = watch.evaluate(0, lambda x, t: ideal.denoise(x, t.double()))
    assert float(record.ideal["train"].value.max()) < 1e-6
    assert record.drawn.copies(1 / 3).value == 1.0
    assert watch.verdict.copying == 0


def test_a_decoder_that_fails_costs_the_picture_alone(images: tuple[Tensor, Tensor]) -> None:
    def broken(z: Tensor) -> Tensor:
        raise RuntimeError("on another device")

    watch = monitor(images, decoder=broken)
    with pytest.warns(UserWarning, match="picture of the closest samples failed, and training goes on"):
        record = watch.evaluate(0, vk.to_noise(vk.EmpiricalScore(vk.Empirical(images[0]), PROCESS)))
    assert record is not None
    assert record.drawn is not None


def test_latents_are_shown_by_a_decoder(images: tuple[Tensor, Tensor], tmp_path: Path) -> None:
    train, test = (part.flatten(1)[:, :, None, None] for part in images)
    decoder = lambda z: z.reshape(-1, 1, 8, 8)  # noqa: E731
    watch = monitor((train, test), decoder=decoder, log=tmp_path)
    record = watch.evaluate(0, lambda x, t: x)
    assert (tmp_path / record.drawn.picture).is_file()
    watch = monitor((train.flatten(1), test.flatten(1)))  # points, of which there are no pictures
    assert watch.evaluate(0, lambda x, t: x).drawn.picture == ""
