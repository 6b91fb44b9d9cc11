"""Other people's networks as scores: adapters, the check of conventions, scores inside pipelines, hostile files."""

from __future__ import annotations

import json
import os
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from networks28 import C, U
from torch import Tensor, nn

import vkernel as vk
from vkernel.adapters import weights as weight_files
from vkernel.core.errors import InputError
from vkernel.reports.audit import Checkpoint, Convention, as_unet, check
from vkernel.score import conversions as pr

MODELS = os.environ.get("VKERNEL_MODELS")
FASHION = Path("/usr/share/datasets/fashion-mnist/t10k-images-idx3-ubyte.gz")
MNIST = Path(os.environ.get("VKERNEL_DATA", "/usr/share/datasets")) / "mnist" / "t10k-images-idx3-ubyte"
CNNS = [f"cnn28_mnist_{name}.pth" for name in ("a", "b", "c", "d", "early")]
with_models = pytest.mark.skipif(MODELS is None, reason="VKERNEL_MODELS does not say where the seven networks lie")
LINEAR = "linear:1e-4:.02:1000"
LEVELS = (20, 100, 300, 600, 900)
TO = {"noise": pr.to_noise, "x0": pr.to_x0, "v": pr.to_v, "flow": pr.to_flow}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def digits(n: int = 64) -> vk.Empirical:
    return vk.data.digits().subset(torch.arange(n))


def u(name: str = "unet28_fashion.pt") -> Checkpoint:
    return Checkpoint.from_weights(Path(MODELS or "") / name, U, betas=LINEAR, strip="network.", shape=(1, 28, 28))


def c(name: str) -> Checkpoint:
    options = {"betas": "key:alpha_t", "strip": "gt.", "time": "fraction", "range": "-.5,.5"}
    return Checkpoint.from_weights(Path(MODELS or "") / name, C, **options)


def noise_errors(net: Checkpoint, data: vk.Empirical, count: int) -> list[float]:
    x0, found = net.scaled(data).images(torch.arange(count)), []
    for t in LEVELS:
        noise = normal(*x0.shape, seed=t)
        time = torch.tensor(t, dtype=torch.float64)
        x = (net.process.alpha(time) * x0 + net.process.sigma(time) * noise).float()
        found.append(float((net.noise(x, t) - noise).square().mean()))
    return found


# --- the seven networks ---------------------------------------------------------------------------------------------


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
    """The numbers of models/README.md, over 10,000 images there and 500 here."""
    want = (0.318, 0.129, 0.040, 0.0089, 0.0038)
    for got, there in zip(noise_errors(u(), vk.load(FASHION), 500), want, strict=True):
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


@with_models
@pytest.mark.skipif(not FASHION.is_file(), reason=f"Fashion-MNIST is not at {FASHION}")
def test_conventions_of_the_fashion_network() -> None:
    data, net = vk.load(FASHION).subset(torch.arange(300)), u()
    right = Convention("noise", "index", (-1.0, 1.0))
    found = check(net, data, levels=4, images=32)
    assert found.fits
    assert "range 0,1" in found.words  # it normalises its input: the check says that it cannot tell
    for change in ({"prediction": "x0"}, {"prediction": "v"}, {"time": "reversed"}, {"range": (0, 255)}):
        found = check(replace(net, **change), data, levels=4, images=32)
        assert not found.fits
        assert found.better == right, change
    with pytest.raises(InputError, match="another time"):
        check(replace(net, time="fraction"), data, levels=2, images=4)


@with_models
@pytest.mark.parametrize("name", ["cnn28_mnist_a.pth", "cnn28_mnist_early.pth"])
def test_conventions_of_the_mnist_networks_on_digits_of_their_size(name: str) -> None:
    """Other digits than MNIST's, blown up: enough for conventions. The under-trained network passes too."""
    small = nn.functional.interpolate(digits(100).images(torch.arange(100)), size=20, mode="bilinear")
    data = vk.Empirical(((nn.functional.pad(small, (4, 4, 4, 4), value=-1) + 1) * 127.5).round().to(torch.uint8))
    net, right = c(name), Convention("noise", "fraction", (-0.5, 0.5))
    assert check(net, data, levels=3, images=16).fits
    changes = [{"prediction": "v"}, {"time": "index"}, {"range": (-1, 1)}]
    for change in [*changes, {"prediction": "v", "time": "index"}]:
        found = check(replace(net, **change), data, levels=3, images=16)
        assert not found.fits
        assert found.better == right, change


# --- one score, however a network tells it --------------------------------------------------------------------------


@pytest.mark.parametrize("prediction", [*TO, "score"])
@pytest.mark.parametrize(
    ("process", "time"),
    [(vk.DDPM.linear(), "index"), (vk.DDPM.linear(), "reversed"), (vk.DDPM.linear(), "fraction"), (vk.EDM(), "sigma")],
    ids=["index", "reversed", "fraction", "edm"],
)
def test_every_prediction_and_time_gives_the_same_score(prediction: str, process: vk.Process, time: str) -> None:
    """A network made of the exact score, in any convention, is read back as that score."""
    exact = vk.EmpiricalScore(digits(), process)
    back = {"index": lambda a: a, "reversed": lambda a: 999 - a, "fraction": lambda a: a * 999, "sigma": lambda a: a}
    sign = -1 if (prediction, time) == ("flow", "reversed") else 1

    def net(x: Tensor, told: Tensor) -> Tensor:
        assert told.shape == x.shape[:1]
        assert told.is_floating_point() == (time in ("fraction", "sigma"))
        t = back[time](told.double()).clamp(process.eps, process.T)
        return sign * (exact(x, t) if prediction == "score" else TO[prediction](exact, process)(x, t))

    read = Checkpoint.from_callable(net, process, prediction=prediction, time=time, shape=(1, 8, 8))
    x = normal(2, 3, 1, 8, 8).double()
    t = torch.tensor([0.3, 0.6, 0.9], dtype=torch.float64).mul(process.T)
    rounded = t.round() if time in ("index", "reversed") else t
    torch.testing.assert_close(read(x, t), exact(x, rounded), rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(read.denoise(x, t), exact.posterior(x, rounded).mean, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        read.noise(x, t), pr.to_noise(exact, process)(x, rounded.expand(2, 3)), rtol=1e-6, atol=1e-8
    )


def test_flow_matching_both_ways_of_time() -> None:
    process = vk.FlowMatching()
    exact = vk.EmpiricalScore(digits(), process)
    flow = pr.to_flow(exact, process)
    x, t = normal(4, 1, 8, 8).double(), torch.tensor([0.1, 0.4, 0.7, 0.9], dtype=torch.float64)
    here = Checkpoint.from_callable(flow, process, prediction="flow", time="fraction")
    there = Checkpoint.from_callable(lambda x, u: -flow(x, 1 - u), process, prediction="flow", time="reversed")
    scaled = Checkpoint.from_callable(lambda x, u: flow(x, u / 1000), process, prediction="flow", time="index:1000")
    for net in (here, there, scaled):
        torch.testing.assert_close(net(x, t), exact(x, t))
    found = check(replace(here, time="reversed"), digits(), levels=4, images=16)
    assert found.better == Convention("flow", "fraction", (-1.0, 1.0))
    assert check(there, digits(), levels=4, images=16).fits


def test_batches_chunks_types_and_gradients() -> None:
    torch.manual_seed(0)
    net = nn.Conv2d(1, 1, 3, padding=1).double()

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.sizes = net, []

        def forward(self, x: Tensor, i: Tensor) -> tuple[Tensor]:
            self.sizes.append(len(x))
            return (torch.tanh(self.inner(x)) * (1 + i.to(x)[:, None, None, None]),)

    module = Net()
    whole = Checkpoint.from_callable(module, vk.DDPM.linear(), shape=(1, 4, 4))
    assert not module.training
    x, t = normal(3, 5, 1, 4, 4), torch.tensor([7.0, 300.4, 999.0])[:, None]
    out = whole(x, t)
    assert (out.dtype, out.requires_grad) == (torch.float32, False)
    parts = replace(whole, batch=4)
    module.sizes.clear()
    torch.testing.assert_close(parts(x, t), out, rtol=1e-6, atol=1e-7)
    assert module.sizes == [4, 4, 4, 3]
    torch.testing.assert_close(whole(x[1, 2], 300.4), out[1, 2])
    torch.testing.assert_close(whole(x, 300.4)[1], out[1])
    v = normal(3, 5, 1, 4, 4, seed=1).double()
    a = x.double().requires_grad_()
    (gradient,) = torch.autograd.grad(whole(a, t), a, v)
    with pytest.raises(InputError, match="does not broadcast"):
        whole(x, torch.ones(3))
    forward = torch.func.jvp(lambda q: whole(q, t), (x.double(),), (v,))[1]
    numeric = (whole(x.double() + 1e-6 * v, t) - whole(x.double() - 1e-6 * v, t)) / 2e-6
    torch.testing.assert_close(forward, numeric, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close((gradient * v).sum(), (forward * v).sum())


def test_data_come_to_the_range_of_the_network() -> None:
    stored = torch.randint(0, 256, (5, 1, 4, 4), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    net = Checkpoint.from_callable(lambda x, t: x, vk.EDM(), prediction="x0", time="sigma", range="-.5,.5")
    for scale in (None, (-1, 1), (0, 1), (-0.5, 0.5)):
        moved = net.scaled(vk.Empirical(stored, scale=scale))
        want = vk.Empirical(stored, scale=(-0.5, 0.5))
        torch.testing.assert_close(moved.images(torch.arange(5)), want.images(torch.arange(5)))
        torch.testing.assert_close(moved.center, want.center)
        assert moved.spread == pytest.approx(want.spread)
    floats = vk.Empirical(stored.float())
    assert net.scaled(floats) is floats


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prediction": "epsilon"}, "prediction must be one of noise"),
        ({"time": "seconds"}, "time must be one of index"),
        ({"time": "fraction:x"}, "no number after the colon"),
        ({"time": "index:1000"}, "indices of .* its own"),
        ({"range": "1,-1"}, "low < high"),
        ({"range": "0"}, "two numbers"),
        ({"process": vk.FlowMatching()}, "index:1000"),
        ({"process": None}, "process must be"),
        ({"net": 3}, "callable"),
    ],
)
def test_what_makes_no_checkpoint_is_refused(change: dict, words: str) -> None:
    with pytest.raises(InputError, match=words):
        replace(Checkpoint.from_callable(lambda x, t: x, vk.DDPM.linear()), **change)


def test_what_a_network_may_not_return() -> None:
    process = vk.DDPM.linear()
    with pytest.raises(InputError, match="returned a str"):
        Checkpoint.from_callable(lambda x, t: "no", process)(normal(2, 1, 4, 4), 3)
    with pytest.raises(InputError, match="like the one it is given"):
        Checkpoint.from_callable(lambda x, t: x[:, :, :2], process)(normal(2, 1, 4, 4), 3)
    with pytest.raises(InputError, match="outside"):
        Checkpoint.from_callable(lambda x, t: x, process)(normal(2, 1, 4, 4), 1000.5)
    with pytest.raises(InputError, match="images of shape"):
        Checkpoint.from_callable(lambda x, t: x, process, shape=(3, 4, 4))(normal(2, 1, 4, 4), 3)


# --- schedules and weight files -------------------------------------------------------------------------------------


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
    module = weight_files.build(f"{tmp_path / 'theirs.py'}:factory")
    weight_files.fill(module, weight_files.stripped(weight_files.read_weights(path), "ema.net.", "file"), "file")
    for name, value in module.state_dict().items():
        torch.testing.assert_close(value, net.state_dict()[name])
    factory = f"{tmp_path / 'theirs.py'}:factory"
    with pytest.raises(InputError, match=r"lacks 0\.weight.*besides.*--strip ema\.net\.\) would fit"):
        Checkpoint.from_weights(path, factory, betas=LINEAR)
    with pytest.raises(InputError, match=r"No key .* begins with 'model'"):
        Checkpoint.from_weights(path, factory, betas=LINEAR, strip="model")
    for bad, words in (("number", "returned a int"), ("absent", "has no 'absent'")):
        with pytest.raises(InputError, match=words):
            weight_files.build(f"{tmp_path / 'theirs.py'}:{bad}")
    for bad, words in (("nowhere.at:all", "cannot be imported"), ("nothing", "is named"), ("x.py:f", "no file")):
        with pytest.raises(InputError, match=words):
            weight_files.build(bad)


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return (Path.touch, (self.path,))


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


# --- diffusers ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def diffusers() -> object:
    return pytest.importorskip("diffusers")


def tiny_unet(diffusers: object, **options: object) -> nn.Module:
    torch.manual_seed(0)
    blocks = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2}
    sizes = {"sample_size": 8, "in_channels": 1, "out_channels": 1, "layers_per_block": 1, "norm_num_groups": 4}
    more = {"block_out_channels": (16, 16), "add_attention": False, **options}
    return diffusers.UNet2DModel(**{**blocks, **sizes, **more}).eval()


@pytest.fixture(scope="module")
def trained(diffusers: object) -> nn.Module:
    """A tiny network, trained for seconds to predict noise on digits."""
    unet, process, data = tiny_unet(diffusers), vk.DDPM.linear(), digits(256).images(torch.arange(256))
    optimiser, generator = torch.optim.Adam(unet.parameters(), 3e-3), torch.Generator().manual_seed(0)
    for _ in range(150):
        x0 = data[torch.randint(len(data), (64,), generator=generator)]
        t = torch.randint(1000, (64,), generator=generator)
        noise = torch.randn(x0.shape, generator=generator)
        alpha, sigma = (f(t.float())[:, None, None, None] for f in (process.alpha, process.sigma))
        loss = (unet(alpha * x0 + sigma * noise, t).sample - noise).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return unet


@pytest.mark.parametrize("kind", ["epsilon", "sample", "v_prediction"])
@pytest.mark.parametrize("safe", [True, False])
def test_a_pipeline_folder_is_its_network_and_betas(kind: str, safe: bool, diffusers: object, tmp_path: Path) -> None:
    unet = tiny_unet(diffusers)
    scheduler = diffusers.DDPMScheduler(200, beta_schedule="squaredcos_cap_v2", prediction_type=kind)
    diffusers.DDPMPipeline(unet, scheduler).save_pretrained(tmp_path, safe_serialization=safe)
    net = Checkpoint.from_diffusers(tmp_path)
    x, i = normal(3, 1, 8, 8), torch.tensor([0, 70, 199])
    abar = scheduler.alphas_cumprod[i][:, None, None, None]
    with torch.no_grad():
        out = unet(x, i).sample
    noise, x0 = {
        "epsilon": lambda: (out, (x - (1 - abar).sqrt() * out) / abar.sqrt()),
        "sample": lambda: ((x - abar.sqrt() * out) / (1 - abar).sqrt(), out),
        "v_prediction": lambda: (abar.sqrt() * out + (1 - abar).sqrt() * x, abar.sqrt() * x - (1 - abar).sqrt() * out),
    }[kind]()
    torch.testing.assert_close(net.noise(x, i), noise, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(net.denoise(x, i), x0, rtol=1e-3, atol=1e-3 * float(x0.abs().max()))
    torch.testing.assert_close(net(x, i), -noise / (1 - abar).sqrt(), rtol=1e-3, atol=1e-2)
    assert net.shape == (1, 8, 8)
    others = [
        Checkpoint.from_diffusers(diffusers.DDPMPipeline(unet, scheduler)),
        Checkpoint.from_diffusers(unet, scheduler),
        Checkpoint.from_diffusers(tmp_path / "unet", tmp_path / "scheduler"),
    ]
    for other in others:
        torch.testing.assert_close(other(x, i), net(x, i))


def test_a_trained_pipeline_is_checked_from_its_folder(trained: nn.Module, diffusers: object, tmp_path: Path) -> None:
    data = digits(256)
    diffusers.DDPMPipeline(trained, diffusers.DDPMScheduler()).save_pretrained(tmp_path)
    net = Checkpoint.from_diffusers(tmp_path)
    found = check(net, data, levels=4, images=32)
    assert found.fits
    assert found.loss.value < 0.8
    assert found.to_dataset().error.shape == (5,)
    for below, above in zip(found.ideal[:-1], found.error[:-1], strict=True):
        assert below < above
    path = tmp_path / "scheduler" / "scheduler_config.json"
    for lie in ("sample", "v_prediction"):
        path.write_text(json.dumps({**json.loads(path.read_text()), "prediction_type": lie}))
        found = check(Checkpoint.from_diffusers(tmp_path), data, levels=4, images=32)
        assert not found.fits
        assert found.better == Convention("noise", "index", (-1.0, 1.0))
        assert "prediction noise" in found.words
    for change in ({"time": "fraction"}, {"range": (0, 255)}, {"range": (0, 1)}):
        moved = replace(net, **change)
        low, high = moved.range
        mine = vk.Empirical((data.images(torch.arange(256)) + 1) / 2 * (high - low) + low)
        found = check(moved, mine, levels=4, images=32)
        assert not found.fits
        assert found.better == Convention("noise", "index", (-1.0, 1.0)), change


@pytest.mark.parametrize("prediction", ["noise", "x0", "v"])
def test_random_weights_are_called_untrained(prediction: str, diffusers: object) -> None:
    net = Checkpoint.from_callable(tiny_unet(diffusers), vk.DDPM.linear(), prediction=prediction)
    found = check(net, digits(256), levels=4, images=32)
    assert (found.fits, found.untrained, found.better) == (False, True, None)
    assert "looks untrained" in found.words


def test_a_network_that_returns_zero_is_untrained_in_every_parametrisation() -> None:
    """A v network that returns zero blends mean and noise: it must not pass for a denoiser."""
    for prediction in ("noise", "x0", "v", "score"):
        net = Checkpoint.from_callable(lambda x, t: 0 * x, vk.DDPM.linear(), prediction=prediction)
        assert check(net, digits(256), levels=4, images=16).untrained


def test_checks_at_the_door() -> None:
    net = Checkpoint.from_callable(lambda x, t: x, vk.DDPM.linear(), shape=(1, 28, 28))
    with pytest.raises(InputError, match="takes images of shape"):
        check(net, digits())
    with pytest.raises(InputError, match="NaN"):
        check(Checkpoint.from_callable(lambda x, t: x * float("nan"), vk.DDPM.linear()), digits())
    with pytest.raises(InputError, match="are equal"):
        check(net, vk.Empirical(torch.ones(3, 1, 28, 28)))
    far = vk.Empirical((digits().images(torch.arange(64)) + 1) * 127.5)
    assert "these data lie in [0, 255]" in check(replace(net, shape=None), far, levels=2, images=4).words


def test_hostile_folders(diffusers: object, tmp_path: Path) -> None:
    pipeline = diffusers.DDPMPipeline(tiny_unet(diffusers), diffusers.DDPMScheduler())
    pipeline.save_pretrained(tmp_path)
    index, unet, scheduler = (
        tmp_path / name for name in ("model_index.json", "unet/config.json", "scheduler/scheduler_config.json")
    )

    def refuse(path: Path, words: str, **change: object) -> None:
        before = path.read_text()
        path.write_text(json.dumps({**json.loads(before), **change}))
        with pytest.raises(InputError, match=words):
            Checkpoint.from_diffusers(tmp_path)
        path.write_text(before)

    refuse(index, "also has vae.*latent", vae=["diffusers", "AutoencoderKL"])
    refuse(unet, "UNet2DConditionModel, which is not supported", _class_name="UNet2DConditionModel")
    refuse(unet, "class-conditional", num_class_embeds=10)
    refuse(unet, "variance exploding", time_embedding_type="fourier")
    refuse(unet, "is not a state dict of UNet2DModel", block_out_channels=[8, 16])
    refuse(unet, "No UNet2DModel can be made", block_out_channels=[8])
    refuse(scheduler, "no scheduler of diffusers", _class_name="os.system")
    refuse(scheduler, "prediction_type must be one of", prediction_type="truth")
    refuse(scheduler, "has no betas", _class_name="ScoreSdeVeScheduler")
    weights = tmp_path / "unet" / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(InputError, match="truncated"):
        Checkpoint.from_diffusers(tmp_path)
    mark = tmp_path / "executed"
    weights.unlink()
    torch.save({"a": Bomb(mark)}, tmp_path / "unet" / "diffusion_pytorch_model.bin")
    (tmp_path / "unet" / "unet_2d.py").write_text(f"open({str(mark)!r}, 'w')")
    with pytest.raises(InputError, match="never loaded"):
        Checkpoint.from_diffusers(tmp_path)
    assert not mark.exists()
    index.write_text("{")
    with pytest.raises(InputError, match="not JSON"):
        Checkpoint.from_diffusers(tmp_path)
    with pytest.raises(InputError, match="never downloaded"):
        Checkpoint.from_diffusers("google/ddpm-cifar10-32")
    with pytest.raises(InputError, match="without a scheduler"):
        Checkpoint.from_diffusers(tiny_unet(diffusers))


def test_learned_variances_are_left_out(diffusers: object) -> None:
    unet = tiny_unet(diffusers, out_channels=2)
    net, x = Checkpoint.from_diffusers(unet, diffusers.DDPMScheduler()), normal(2, 1, 8, 8)
    with torch.no_grad():
        torch.testing.assert_close(net.noise(x, 5), unet(x, 5).sample[:, :1])


# --- a score in the place of a network ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["epsilon", "sample", "v_prediction"])
def test_the_exact_score_in_a_real_pipeline_returns_training_images(kind: str, diffusers: object) -> None:
    data = digits(40)
    scheduler = diffusers.DDIMScheduler(prediction_type=kind, clip_sample=False)
    process = vk.DDPM.from_alphas_cumprod(scheduler.alphas_cumprod)
    unet = as_unet(vk.EmpiricalScore(data, process), process, scheduler)
    pipeline = diffusers.DDIMPipeline(unet, scheduler)
    pipeline.set_progress_bar_config(disable=True)
    made = pipeline(6, torch.Generator().manual_seed(0), num_inference_steps=25, output_type="pt").images * 2 - 1
    distance = torch.cdist(made.flatten(1), data.rows(0, 40)).min(1).values
    assert float(distance.max()) < 0.05
    assert len(made.flatten(1).unique(dim=0)) > 1


def test_as_unet_answers_for_any_process_and_only_what_it_can(diffusers: object) -> None:
    data, scheduler = digits(40), diffusers.DDPMScheduler()
    same = vk.DDPM.linear()  # the scheduler's to seven digits
    other = vk.EDM(eps=0.005, T=200)
    x, i = normal(3, 1, 8, 8), torch.tensor([3, 200, 999])
    units = [as_unet(vk.EmpiricalScore(data, p), p, scheduler) for p in (same, other)]
    first, second = (unit(x, i).sample for unit in units)
    torch.testing.assert_close(first, second, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(units[0](x, 200, return_dict=False)[0], units[0](x, torch.tensor(200)).sample)
    torch.testing.assert_close(first, pr.to_noise(vk.EmpiricalScore(data, same), same)(x, i), rtol=1e-3, atol=1e-3)
    assert (units[0].config.sample_size, units[0].config.in_channels, units[0].dtype) == (8, 1, torch.float32)
    plain = as_unet(lambda x, t: vk.EmpiricalScore(data, same)(x, t), same, scheduler, shape=(1, 8, 8))
    torch.testing.assert_close(plain(x, i).sample, first, rtol=1e-3, atol=1e-3)
    with pytest.raises(InputError, match="smaller eps"):
        as_unet(vk.EmpiricalScore(data, vk.VP()), vk.VP(), scheduler)
    with pytest.raises(InputError, match="give shape="):
        as_unet(lambda x, t: x, same, scheduler)
    with pytest.raises(InputError, match="belongs to"):
        as_unet(vk.EmpiricalScore(data, other), same, scheduler)


def test_a_round_trip_network_to_score_to_network(trained: nn.Module, diffusers: object) -> None:
    """A checkpoint is a score; put back into a pipeline it answers as the network did."""
    scheduler = diffusers.DDPMScheduler()
    net = Checkpoint.from_diffusers(trained, scheduler)
    x, i = normal(3, 1, 8, 8), torch.tensor([3, 200, 999])
    with torch.no_grad():
        want = trained(x, i).sample
    torch.testing.assert_close(as_unet(net, net.process, scheduler)(x, i).sample, want, rtol=1e-3, atol=1e-3)
