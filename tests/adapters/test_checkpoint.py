"""Other people's networks from weight files: the seven, schedules, factories, hostile files."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from checkpoints import (
    CNNS,
    FASHION,
    LINEAR,
    MNIST,
    MODELS,
    Bomb,
    c,
    noise_errors,
    normal,
    u,
    with_models,
)
from networks28 import C, U
from torch import nn

import vkernel as vk
from vkernel import Checkpoint
from vkernel.adapters import weights as weight_files
from vkernel.adapters.factory import build
from vkernel.core.errors import InputError


@with_models
def test_all_seven_load_and_their_schedules_are_read() -> None:
    x = normal(2, 1, 28, 28)
    for name in ("unet28_mnist.pt", "unet28_fashion.pt"):
        net = u(name)
        assert sum(p.numel() for p in net.net.parameters()) == 606_852
        assert net(x, 300).shape == x.shape
    for name in CNNS:
        net = c(name)
        held = net.net.state_dict().values()
        assert sum(v.numel() for v in held) + 2 * 1001 == 293_235
        assert "cumulative product" in net.notes[0]
        assert len(net.process.betas) == 1001
        assert net(x, 300.5).isfinite().all()
    betas = Checkpoint.from_weights(
        Path(MODELS or "") / CNNS[0], C, betas="key:beta_t", strip="gt.", time="fraction", range=(-0.5, 0.5)
    )
    assert "read as betas" in betas.notes[0]
    t = torch.tensor([0.0, 10, 500, 1000], dtype=torch.float64)
    torch.testing.assert_close(betas.process.alpha(t), net.process.alpha(t), rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(betas(x, 300), c(CNNS[0])(x, 300), rtol=1e-4, atol=1e-4)


@with_models
@pytest.mark.skipif(not FASHION.is_file(), reason=f"Fashion-MNIST is not at {FASHION}")
def test_noise_errors_of_the_fashion_network() -> None:
    """The numbers of models/README.md, over 10,000 images there and 250 here."""
    want = (0.318, 0.129, 0.040, 0.0089, 0.0038)
    for got, there in zip(noise_errors(u(), vk.load(FASHION), 250), want, strict=True):
        assert got == pytest.approx(there, rel=0.08)


@with_models
@pytest.mark.skipif(not MNIST.is_file(), reason=f"MNIST is not at {MNIST}")
@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("cnn28_mnist_a.pth", (0.093, 0.041, 0.023, 0.0020, 0.0005)),
        ("cnn28_mnist_c.pth", (0.094, 0.042, 0.023, 0.0021, 0.0005)),
        ("cnn28_mnist_d.pth", (0.098, 0.045, 0.024, 0.0023, 0.0006)),
        ("cnn28_mnist_early.pth", (0.199, 0.087, 0.034, 0.0115, 0.0094)),
        ("unet28_mnist.pt", (0.132, 0.068, 0.033, 0.0085, 0.0028)),
    ],
)
def test_noise_errors_of_the_mnist_networks(name: str, want: tuple[float, ...]) -> None:
    net = c(name) if name.startswith("cnn") else u(name)
    for got, there in zip(noise_errors(net, vk.load(MNIST), 300), want, strict=True):
        assert got == pytest.approx(there, rel=0.15)


def test_a_stored_schedule_is_known_by_its_values() -> None:
    betas = torch.linspace(1e-4, 0.02, 50, dtype=torch.float64)
    want = vk.DDPM(betas)
    t = torch.arange(50).double()
    shapes = {
        "betas": betas,
        "alphas": 1 - betas,
        "cumulative": (1 - torch.linspace(1e-3, 0.2, 50).double()).cumprod(0),
    }
    for name, table in shapes.items():
        process, words = weight_files.read_process(f"key:{name}", {name: table}, "file")
        assert name in words
        expected = vk.DDPM(torch.linspace(1e-3, 0.2, 50).double()) if name == "cumulative" else want
        torch.testing.assert_close(process.alpha(t), expected.alpha(t), rtol=1e-5, atol=1e-7)
    process, _ = weight_files.read_process("key:a", {"a": torch.tensor([1.0, 0.9, 0.5, 0.1])}, "file")
    assert (process.eps, process.T) == (1, 3)
    torch.testing.assert_close(process.alpha(2.0) ** 2, torch.tensor(0.5))
    with pytest.raises(InputError, match="holds no buffer 'b'; it holds a"):
        weight_files.read_process("key:b", {"a": betas}, "file")
    with pytest.raises(InputError, match="no schedule"):
        weight_files.read_process("key:a", {"a": -betas}, "file")
    assert weight_files.read_process(LINEAR, {}, "")[0] == vk.DDPM.linear()
    assert weight_files.read_process("scaled_linear:8.5e-4:.012:1000", {}, "")[0] == vk.DDPM.scaled_linear()
    assert weight_files.read_process("edm", {}, "")[0] == vk.EDM()
    with pytest.raises(InputError, match="linear:1e-4"):
        weight_files.read_process("linear:1:2", {}, "")


def test_the_cosine_schedule_is_that_of_diffusers() -> None:
    diffusers = pytest.importorskip("diffusers")
    theirs = diffusers.DDPMScheduler(100, beta_schedule="squaredcos_cap_v2").alphas_cumprod.double()
    ours = weight_files.read_process("cosine:100", {}, "")[0]
    torch.testing.assert_close(ours.alpha(torch.arange(100).double()) ** 2, theirs, rtol=1e-3, atol=1e-6)


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 4))


FACTORY = """
import torch
def factory():
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 4))
def number():
    return 3
"""


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_weights_by_factory_and_prefix(suffix: str, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    (tmp_path / "theirs.py").write_text(FACTORY)
    net, path = small(), tmp_path / f"weights{suffix}"
    held = {f"ema.net.{k}": v for k, v in net.state_dict().items()} | {"other": torch.zeros(3)}
    if suffix == ".pt":
        torch.save({"ema": {"net": net.state_dict()}, "other": torch.zeros(3), "step": 7}, path)
    else:
        save_file(held, path)
    module = build(f"{tmp_path / 'theirs.py'}:factory")
    weight_files.fill(module, weight_files.read_weights(path), "file", "ema.net.")
    for name, value in module.state_dict().items():
        torch.testing.assert_close(value, net.state_dict()[name])
    factory = f"{tmp_path / 'theirs.py'}:factory"
    with pytest.raises(InputError, match=r"lacks 0\.weight.*besides.*--strip ema\.net\.\) would fit"):
        Checkpoint.from_weights(path, factory, betas=LINEAR)
    with pytest.raises(InputError, match=r"No key .* begins with 'model'"):
        Checkpoint.from_weights(path, factory, betas=LINEAR, strip="model")
    for bad, words in (("number", "returned a int"), ("absent", "has no 'absent'")):
        with pytest.raises(InputError, match=words):
            build(f"{tmp_path / 'theirs.py'}:{bad}")
    for bad, words in (("nowhere.at:all", "cannot be imported"), ("nothing", "is named"), ("x.py:f", "no file")):
        with pytest.raises(InputError, match=words):
            build(bad)


def test_hostile_weight_files(tmp_path: Path) -> None:
    """Clear errors, nothing executed."""
    from safetensors.torch import save_file

    mark, path = tmp_path / "executed", tmp_path / "bomb.pt"
    for write in (lambda: torch.save({"a": Bomb(mark)}, path), lambda: path.write_bytes(pickle.dumps(Bomb(mark)))):
        write()
        with pytest.raises(InputError, match="could run code and are never loaded"):
            Checkpoint.from_weights(path, small, betas=LINEAR)
        assert not mark.exists()
    safe = tmp_path / "cut.safetensors"
    save_file(small().state_dict(), safe)
    whole = safe.read_bytes()
    for cut in (len(whole) - 5, 40, 3):
        safe.write_bytes(whole[:cut])
        with pytest.raises(InputError, match="truncated or damaged"):
            Checkpoint.from_weights(safe, small, betas=LINEAR)
    torch.save(nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 4)).state_dict(), path)
    with pytest.raises(InputError, match=r"shapes differ: 0\.weight is 5×4, not 3×4"):
        Checkpoint.from_weights(path, small, betas=LINEAR)
    for held, words in (
        (U().state_dict(), r"lacks 0\.weight.*besides time_embed\.weight.* and \d+ more"),
        ({k: v * float("nan") for k, v in small().state_dict().items()}, "NaN"),
        ({k: v.double() * 1e300 for k, v in small().state_dict().items()}, "NaN or infinite"),  # as float32
        ([1, 2], "holds a list"),
        ({"a": 1}, "holds no tensors"),
    ):
        torch.save(held, path)
        with pytest.raises(InputError, match=words):
            Checkpoint.from_weights(path, small, betas=LINEAR)
    path.write_bytes(b"")
    with pytest.raises(InputError, match="empty file"):
        Checkpoint.from_weights(path, small, betas=LINEAR)
    with pytest.raises(InputError, match="no weight file"):
        Checkpoint.from_weights(tmp_path / "absent.pt", small, betas=LINEAR)
