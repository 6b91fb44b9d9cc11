"""``vkernel audit``: what a stranger types, and what an attacker does."""

from __future__ import annotations

import json
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from coarse import draw_coarsely
from command import Left
from torch import Tensor, nn

import vkernel as vk

SIDE, STEPS = 4, 100
BETAS = f"linear:1e-3:.2:{STEPS}"
FACTORY = '''
"""A class-conditional or plain denoiser of 4×4 images."""
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, classes=0, width=64):
        super().__init__()
        betas = torch.linspace(1e-3, 0.2, 100, dtype=torch.float64)
        self.register_buffer("abar", (1 - betas).cumprod(0).float())
        self.kinds = nn.Embedding(classes, 8) if classes else None
        self.body = nn.Sequential(nn.Linear(16 + 8, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(),
                                  nn.Linear(width, 16))

    def forward(self, x, t, y=None):
        abar = self.abar[t.long()][:, None]
        r = ((1 - abar) / abar).sqrt()
        phase = r.log() * torch.tensor([0.25, 0.5, 1, 2])
        inputs = torch.cat([phase.sin(), phase.cos()], 1)
        inputs = inputs if self.kinds is None else inputs + self.kinds(y)
        out = self.body(torch.cat([x.flatten(1), inputs], 1))
        return ((r * x.flatten(1) + out) / (1 + r * r).sqrt()).reshape(x.shape)


def plain():
    return Net()


def conditional():
    return Net(classes=2)


class Prompted(Net):
    def forward(self, x, t, text):
        return super().forward(x, t, text.argmax(1))


def prompted():
    return Prompted(classes=2)


def wider():
    return Net(width=65)


def contrast(images):
    return images.flatten(1).std(1, keepdim=True) * torch.ones(4)
'''


@pytest.fixture(autouse=True)
def coarse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few pictures, and figures that are made but not drawn: nobody looks at these pages."""
    draw_coarsely(monkeypatch, drawn=False)
    for number in ("SHOWN", "PAIRED"):
        monkeypatch.setattr(f"vkernel.reports.audit.page.{number}", 3)


def marks() -> vk.GaussianMixture:
    signs = torch.randint(0, 2, (8, 1, SIDE, SIDE), generator=torch.Generator().manual_seed(3)) * 2 - 1
    return vk.GaussianMixture(0.7 * signs, variance=0.02)


def train(net: nn.Module, images: Tensor, steps: int, labels: Tensor | None = None) -> None:
    g = torch.Generator().manual_seed(0)
    optimiser = torch.optim.Adam(net.parameters(), 4e-3, fused=True)
    process = vk.DDPM.linear(1e-3, 0.2, STEPS)
    scales = [f(torch.arange(STEPS).double()).float() for f in (process.alpha, process.sigma)]
    for _ in range(steps):
        some = torch.randint(len(images), (64,), generator=g)
        t, x0 = torch.randint(STEPS, (64,), generator=g), images[some]
        noise = torch.randn(x0.shape, generator=g)
        alpha, sigma = (scale[t].reshape(-1, 1, 1, 1) for scale in scales)
        out = net(alpha * x0 + sigma * noise, t, *(() if labels is None else (labels[some],)))
        loss = ((getattr(out, "sample", out) - noise).square() / alpha.square()).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()


@dataclass
class Bench:
    """Files that all tests read: data as stored bytes and as floats, code, and weights of trained networks."""

    folder: Path

    def __call__(self, name: str) -> Path:
        return self.folder / name

    def options(self, **change: object) -> list[object]:
        """The usual options, changed."""
        usual: dict[str, object] = {
            "module": f"{self('net.py')}:plain",
            "betas": BETAS,
            "data": self("train.npy"),
            "test": self("test.npy"),
        }
        held = {key.replace("_", "-"): value for key, value in {**usual, **change}.items() if value is not None}
        return [part for key, value in held.items() for part in (f"--{key}", value)] + ["--quick"]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    from safetensors.torch import save_file

    here = Bench(tmp_path_factory.mktemp("bench"))
    law = marks()
    for name, seed in (("train", 1), ("test", 2)):
        floats = law.sample(300, seed)
        np.save(here(f"{name}-floats.npy"), floats.numpy())
        stored = ((floats.clamp(-1.27, 1.27) / 1.27 + 1) * 127.5).round().to(torch.uint8)
        np.save(here(f"{name}.npy"), stored.numpy())
        labels = (floats[:, 0, 0, 0] > 0).long()
        np.save(here(f"{name}-labels.npy"), labels.numpy())
    images = torch.from_numpy(np.load(here("train.npy"))).float() / 127.5 - 1
    labels = torch.from_numpy(np.load(here("train-labels.npy")))
    here("net.py").write_text(FACTORY)
    held: dict[str, Any] = {}
    exec(FACTORY, held)
    for name in ("a", "c", "b"):
        torch.manual_seed(ord(name))
        net = held["plain"]()
        train(net, images, 700)
        torch.save(net.state_dict(), here(f"{name}.pt"))
    save_file({f"ema.{k}": v.clone() for k, v in net.state_dict().items()}, here("b.safetensors"))
    torch.manual_seed(0)
    conditional = held["conditional"]()
    train(conditional, images, 700, labels)
    torch.save(conditional.state_dict(), here("conditional.pt"))
    return here


# --- weights and a factory ------------------------------------------------------------------------------------------


def test_two_networks_from_their_weights(bench: Bench, vkernel: Callable[..., Left], tmp_path: Path) -> None:
    html, numbers = tmp_path / "a.html", tmp_path / "a.json"
    options = bench.options(group="one,one,two", json=numbers, html=html)
    left = vkernel("audit", bench("a.pt"), bench("b.pt"), bench("c.pt"), *options)
    assert left.code == 0, left.err
    assert "a.pt, b.pt, c.pt, against 300 training images and 300 test images" in left.out.replace("\n", " ")
    assert f"wrote {numbers}" in left.out.replace("\n", "")
    held = json.loads(numbers.read_text())
    assert [n["name"] for n in held["networks"]] == ["a.pt", "b.pt", "c.pt"]
    assert all(n["conventions"]["fits"] for n in held["networks"])
    assert held["agreement"], [v["words"] for v in held["verdicts"]]
    assert held["agreement"]["same_noise"]["ratio"]["value"] < 1
    assert held["data"]["stored"] == "uint8"
    assert "All runs together" in html.read_text()


def test_buffers_prefixes_and_safetensors(bench: Bench, vkernel: Callable[..., Left], tmp_path: Path) -> None:
    """The schedule from the file, pixels as they were, a prefix; quiet tells only what it wrote."""
    options = bench.options(betas="key:ema.abar", strip="ema.", range="-1,1", json=tmp_path / "a.json")
    left = vkernel("audit", bench("b.safetensors"), *options, "--quiet", "--samples", 16)
    assert (left.code, left.err) == (0, "")
    assert left.out.strip() == f"wrote {tmp_path / 'a.json'}"
    held = json.loads((tmp_path / "a.json").read_text())["networks"][0]
    assert held["conventions"]["fits"]
    assert "cumulative product" in held["notes"][0]
    assert len(held["samples"]["ode"]["copies"]["ratio"]) == 16


def test_another_range_is_noticed(bench: Bench, vkernel: Callable[..., Left], tmp_path: Path) -> None:
    left = vkernel("audit", bench("a.pt"), *bench.options(range="0,255", json=tmp_path / "a.json"))
    assert left.code == 0
    held = json.loads((tmp_path / "a.json").read_text())
    assert held["networks"][0]["conventions"]["better"] == "predicts noise, time index, range -1,1"
    assert held["verdicts"][0]["level"] == "alarm"
    assert held["memorised"] is None


def test_all_steps_of_a_short_sampler(bench: Bench, vkernel: Callable[..., Left], tmp_path: Path) -> None:
    left = vkernel("audit", bench("a.pt"), *bench.options(json=tmp_path / "a.json", test=None), "--full-sampler", "-q")
    assert left.code == 0
    held = json.loads((tmp_path / "a.json").read_text())
    assert held["sizes"]["steps"] is None
    assert {s["steps"] for s in held["networks"][0]["samples"].values()} == {STEPS}
    assert held["test"] is None


@pytest.mark.parametrize("features", ["standardised", "pca:4", "net.py:contrast"])
def test_features(features: str, bench: Bench, vkernel: Callable[..., Left], tmp_path: Path) -> None:
    name = features if ".py" not in features else f"{bench.folder}/{features}"
    options = bench.options(features=name, json=tmp_path / "a.json", samples=16)
    assert vkernel("audit", bench("a.pt"), *options, "-q").code == 0
    assert json.loads((tmp_path / "a.json").read_text())["features"] == name


def test_one_class_of_a_conditional_network(bench: Bench, vkernel: Callable[..., Left], tmp_path: Path) -> None:
    labels = {"labels": bench("train-labels.npy"), "test_labels": bench("test-labels.npy"), "label": 1}
    options = bench.options(module=f"{bench('net.py')}:conditional", json=tmp_path / "a.json", **labels)
    left = vkernel("audit", bench("conditional.pt"), *options, "-q")
    assert left.code == 0, left.err
    held = json.loads((tmp_path / "a.json").read_text())
    assert held["data"]["n"] == int(np.load(bench("train-labels.npy")).sum())
    assert held["networks"][0]["label"] == 1
    assert held["networks"][0]["conventions"]["fits"]


def test_all_classes_of_a_conditional_network(bench: Bench, vkernel: Callable[..., Left], tmp_path: Path) -> None:
    """Every class against its own images; the total counts all samples, and indices are those of the whole set."""
    labels = {"labels": bench("train-labels.npy"), "test_labels": bench("test-labels.npy")}
    options = bench.options(module=f"{bench('net.py')}:conditional", json=tmp_path / "a.json", samples=48, **labels)
    left = vkernel("audit", bench("conditional.pt"), *options)
    assert left.code == 0, left.err
    held, kinds = json.loads((tmp_path / "a.json").read_text()), np.load(bench("train-labels.npy"))
    assert [(n["name"], n["label"]) for n in held["networks"]] == [(f"conditional.pt, class {c}", c) for c in (0, 1)]
    for n in held["networks"]:
        assert n["conventions"]["fits"]
        index = np.array(n["samples"]["ode"]["copies"]["index"])
        assert index.shape == (24, 2)
        assert (kinds[index] == n["label"]).all()
    assert "Each of 2 classes was audited with its own images. Of all samples of conditional.pt" in held["notes"][0]
    for kind in ("ode", "ancestral"):
        copied = [n["samples"][kind]["copies"]["fraction"]["value"] for n in held["networks"]]
        assert held["memorised"]["value"] >= sum(copied) / 2 - 1e-12
    assert "│1 " in left.out


def test_the_embedding_of_a_prompt(bench: Bench, vkernel: Callable[..., Left], tmp_path: Path) -> None:
    """A network that takes an embedding by name gives the numbers of the same network with a label."""
    np.save(tmp_path / "text.npy", np.eye(2, dtype=np.float32)[[1]])
    sets, found = {}, []
    for name in ("train", "test"):
        sets[name] = np.load(bench(f"{name}.npy"))[np.load(bench(f"{name}-labels.npy")) == 1]
        np.save(tmp_path / f"{name}.npy", sets[name])
        np.save(tmp_path / f"{name}-labels.npy", np.ones(len(sets[name]), dtype=np.int64))
    labels = {"labels": tmp_path / "train-labels.npy", "test_labels": tmp_path / "test-labels.npy", "label": 1}
    prompt = {"condition": tmp_path / "text.npy", "condition_name": "text"}
    for factory, more in (("conditional", labels), ("prompted", prompt)):
        files = {"data": tmp_path / "train.npy", "test": tmp_path / "test.npy", "json": tmp_path / "a.json"}
        options = bench.options(module=f"{bench('net.py')}:{factory}", samples=16, **files, **more)
        left = vkernel("audit", bench("conditional.pt"), *options, "-q")
        assert left.code == 0, left.err
        found.append(json.loads((tmp_path / "a.json").read_text())["networks"][0])
    one, two = (np.array(n["samples"]["ode"]["copies"]["distance"]) for n in found)
    np.testing.assert_allclose(one, two, rtol=1e-5)
    np.testing.assert_allclose(*(n["conventions"]["error"] for n in found), rtol=1e-5)


def test_labels_that_are_not_enough(bench: Bench, refused: Callable[..., str], tmp_path: Path) -> None:
    module, own = f"{bench('net.py')}:conditional", bench("train-labels.npy")
    np.save(tmp_path / "few.npy", np.zeros(7, dtype=np.int64))

    def given(**more: object) -> str:
        return refused("audit", bench("conditional.pt"), *bench.options(module=module, **more))

    assert "--label audits one class" in given(label=1)
    assert "Give --test-labels" in given(labels=own)
    assert "Give --test-labels" in given(labels=own, label=1)
    assert "No training image is of class 7" in given(labels=own, label=7, test=None)
    assert "7 × 1 labels for 300 images" in given(labels=tmp_path / "few.npy", label=0, test=None)
    assert "conditional.pt failed" in given()  # it wants labels


def test_latents(bench: Bench, vkernel: Callable[..., Left], refused: Callable[..., str], tmp_path: Path) -> None:
    latents = bench("train-floats.npy")
    options = bench.options(data=None, latents=latents, test=bench("test-floats.npy"), json=tmp_path / "a.json")
    assert vkernel("audit", bench("a.pt"), *options, "-q").code == 0
    assert json.loads((tmp_path / "a.json").read_text())["data"]["stored"] == "float32"
    assert "takes the place of --data" in refused("audit", bench("a.pt"), *bench.options(latents=latents))
    told = refused("audit", bench("a.pt"), *bench.options(data=None, latents=latents, range="0,1"))
    assert "--range does not apply" in told


def memorising(bench: Bench) -> dict[str, object]:
    """The exact score of 20 images as a network, exact.pt: what training on them to the end would give."""
    few = bench("few.npy")
    np.save(few, np.load(bench("train.npy"))[:20])
    bench("exact.py").write_text(
        "import numpy, torch, vkernel as vk\n"
        f"images = torch.from_numpy(numpy.load({str(few)!r})).float() / 127.5 - 1\n"
        f"process = vk.DDPM.linear(1e-3, .2, {STEPS})\n"
        "class Exact(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.unused = torch.nn.Parameter(torch.zeros(1))\n"
        "        self.score = vk.EmpiricalScore(vk.Empirical(images), process)\n"
        "    def forward(self, x, t):\n"
        "        sigma = process.sigma(t.double()).reshape(-1, 1, 1, 1).to(x)\n"
        "        return -sigma * self.score(x, t.double())\n"
    )
    torch.save({"unused": torch.zeros(1)}, bench("exact.pt"))
    return {"module": f"{bench('exact.py')}:Exact", "data": few}


def test_a_network_that_memorises(
    bench: Bench, vkernel: Callable[..., Left], refused: Callable[..., str], tmp_path: Path
) -> None:
    """It copies, and the exit code says so if asked; the exact denoiser explains it, wholly."""
    given, files = memorising(bench), {"json": tmp_path / "a.json", "html": tmp_path / "a.html"}
    options = [*bench.options(**given), "--samples", 16]
    named = [part for name, path in files.items() for part in (f"--{name}", path)]
    left = vkernel("audit", bench("exact.pt"), *options, *named, "--explain", "--theories", "gaussian, exact")
    assert left.code == 0, left.err
    assert "copies" in left.out
    out, found = " ".join(left.out.split()), json.loads(files["json"].read_text())["explanation"]
    assert "the exact denoiser of the training set explains it best, R²_G = 1.00 (1.00 to 1.00)" in out
    assert "Training images that each theory was built from: all 20 (Gaussian, exact)." in out
    assert set(found["best"]["exact.pt"]) == {"exact"}
    assert all(found["well"]["exact.pt"])
    own = found["denoising"]["theory"]["values"].index("exact")
    assert np.array(found["denoising"]["r2"]["values"])[0, own].min() > 1 - 1e-6
    assert found["samples"]["r2"]["values"][0][own] > 1 - 1e-6
    page = files["html"].read_text()
    assert "Which theory explains it?" in page
    assert "the exact denoiser of the training set explains it best, R²<sub>G</sub> = 1.00" in page
    left = vkernel("audit", bench("exact.pt"), *options, "--fail-if-memorised", 0.1, "-q")
    assert left.code == 1
    assert "% of the samples are copies, more than 10 %." in left.err
    assert "e+" not in left.err
    assert vkernel("audit", bench("exact.pt"), *options, "--fail-if-memorised", 1, "-q").code == 0
    wrong = bench.options(**given, predicts="v", json=files["json"])
    left = vkernel("audit", bench("exact.pt"), *wrong, "--fail-if-memorised", 1, "--explain", "-q")
    assert left.code == 2  # misread, and so not measured
    assert "copies its training images cannot be told" in left.err
    held = json.loads(files["json"].read_text())
    assert held["explanation"] is None
    assert "exact.pt is not compared with theories" in " ".join(held["notes"])
    assert "between 0 and 1" in refused("audit", bench("exact.pt"), *options, "--fail-if-memorised", 2)


def test_theories_that_cannot_be_compared(bench: Bench, refused: Callable[..., str]) -> None:
    labels = bench.options(labels=bench("train-labels.npy"), test=None)
    assert "give both" in refused("audit", bench("a.pt"), *bench.options(), "--theories", "exact")
    assert "'blur'" in refused("audit", bench("a.pt"), *bench.options(), "--explain", "--theories", "exact,blur")
    assert "one class at a time" in refused("audit", bench("conditional.pt"), *labels, "--explain")
    assert "--explain describes a network" in refused("audit", "--from-samples", bench("test.npy"), "--explain")


# --- diffusers ------------------------------------------------------------------------------------------------------


def pipeline(kind: str, steps: int, bench: Bench) -> Path:
    """A folder with a tiny network, trained to predict what its scheduler says."""
    diffusers = pytest.importorskip("diffusers")
    folder = bench(f"pipeline-{kind}")
    if folder.exists():
        return folder
    torch.manual_seed(0)
    blocks = {"down_block_types": ("DownBlock2D",), "up_block_types": ("UpBlock2D",), "add_attention": False}
    sizes = {"sample_size": 8, "layers_per_block": 1, "norm_num_groups": 4, "block_out_channels": (16,)}
    unet = diffusers.UNet2DModel(in_channels=1, out_channels=1, **sizes, **blocks)
    stored = vk.data.digits()[:400].add(1).mul(127.5).round().byte()
    np.save(bench("digits.npy"), stored[:300].numpy())
    np.save(bench("digits-test.npy"), stored[300:].numpy())
    images, process, g = stored[:300].float() / 127.5 - 1, vk.DDPM.linear(), torch.Generator().manual_seed(0)
    optimiser = torch.optim.Adam(unet.parameters(), 5e-3, fused=True)
    for _ in range(steps):
        x0 = images[torch.randint(300, (32,), generator=g)]
        t, noise = torch.randint(1000, (32,), generator=g), torch.randn(x0.shape, generator=g)
        alpha, sigma = (f(t.float())[:, None, None, None] for f in (process.alpha, process.sigma))
        target = {"epsilon": noise, "sample": x0, "v_prediction": alpha * noise - sigma * x0}[kind]
        loss = (unet(alpha * x0 + sigma * noise, t).sample - target).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    diffusers.DDPMPipeline(unet.eval(), diffusers.DDPMScheduler(prediction_type=kind)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "kind", ["epsilon", *(pytest.param(k, marks=pytest.mark.slow) for k in ("sample", "v_prediction"))]
)
def test_a_pipeline_folder(kind: str, bench: Bench, vkernel: Callable[..., Left], tmp_path: Path) -> None:
    folder = pipeline(kind, 100 if kind == "epsilon" else 600, bench)
    numbers, html = tmp_path / "a.json", tmp_path / "a.html"
    data = ["--data", bench("digits.npy"), "--test", bench("digits-test.npy")]
    left = vkernel("audit", folder, *data, "--quick", "--samples", 16, "--json", numbers, "--html", html)
    assert left.code == 0, left.err
    held = json.loads(numbers.read_text())
    verdicts = {v["question"]: v for v in held["verdicts"]}
    assert verdicts["conventions"]["level"] in ("good", "unknown")  # it was trained for seconds
    assert held["networks"][0]["predicts"] == {"epsilon": "noise", "sample": "x0", "v_prediction": "v"}[kind]
    assert verdicts["copies"]["level"] != "alarm"
    assert html.read_text().startswith("<!doctype html>")


def test_a_config_that_lies(bench: Bench, vkernel: Callable[..., Left], tmp_path: Path) -> None:
    shutil.copytree(pipeline("epsilon", 100, bench), tmp_path / "lie")
    config = tmp_path / "lie" / "scheduler" / "scheduler_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "prediction_type": "v_prediction"}))
    numbers, html = tmp_path / "a.json", tmp_path / "a.html"
    given = ("--data", bench("digits.npy"), "--quick", "--json", numbers, "--html", html)
    left = vkernel("audit", tmp_path / "lie", *given)
    assert left.code == 0, left.err
    verdict = json.loads(numbers.read_text())["verdicts"][0]
    # what fits makes a network of so little training no better than a linear denoiser: a hint, not a cure
    assert (verdict["question"], verdict["level"]) == ("conventions", "unknown")
    assert "With (predicts noise, time index" in verdict["words"]
    for told in (" ".join(left.out.split()), html.read_text()):
        assert "cannot be told" in told


def test_a_folder_needs_no_module(bench: Bench, refused: Callable[..., str]) -> None:
    folder = pipeline("epsilon", 100, bench)
    told = refused("audit", folder, *bench.options(data=bench("digits.npy"), test=None))
    assert "--module is for weight files" in told
    told = refused("audit", folder, "--data", bench("train.npy"), "--quick")
    assert "shape" in told


# --- hostile --------------------------------------------------------------------------------------------------------


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


def test_hostile_weights(bench: Bench, refused: Callable[..., str], tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    for name in ("bomb.pt", "bomb.safetensors", "bomb.pth"):
        (tmp_path / name).write_bytes(pickle.dumps(Bomb(mark)))
        refused("audit", tmp_path / name, *bench.options())
        assert not mark.exists()
    (tmp_path / "data.npy").write_bytes(pickle.dumps(Bomb(mark)))
    refused("audit", bench("a.pt"), *bench.options(data=tmp_path / "data.npy"))
    assert not mark.exists()
    whole = bench("b.safetensors").read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(whole[: len(whole) // 2])
    assert "truncated or damaged" in refused("audit", tmp_path / "cut.safetensors", *bench.options(strip="ema."))
    other = refused("audit", bench("a.pt"), *bench.options(module=f"{bench('net.py')}:wider"))
    assert "shapes differ" in other
    assert "would fit" in refused("audit", bench("b.safetensors"), *bench.options())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"module": None}, "--module"),
        ({"module": "nowhere.at:all"}, "cannot be imported"),
        ({"data": None}, "--data"),
        ({"data": "absent.npy"}, "absent.npy"),
        ({"test": "absent.npy"}, "absent.npy"),
        ({"betas": "linear:1"}, "linear:1"),
        ({"betas": "key:absent"}, "holds no buffer 'absent'"),
        ({"predicts": "truth"}, "predicts must be one of"),
        ({"time": "noon"}, "time must be one of"),
        ({"range": "1,-1"}, "low < high"),
        ({"strip": "nope."}, "begins with 'nope.'"),
        ({"features": "taste"}, "taste"),
        ({"group": "a,b"}, "groups"),
        ({"samples": 3}, "16 or more"),
        ({"samples": "many"}, "--samples"),
        ({"threshold": 2}, "threshold"),
        ({"json": "."}, "folder"),
        ({"html": "."}, "folder"),
        ({"seed": "x"}, "--seed"),
    ],
)
def test_refusals(change: dict[str, object], words: str, bench: Bench, refused: Callable[..., str]) -> None:
    assert words in refused("audit", bench("a.pt"), *bench.options(**change))


def test_data_that_cannot_be(bench: Bench, refused: Callable[..., str], tmp_path: Path) -> None:
    floats = np.load(bench("train-floats.npy"))
    hurt = floats.copy()
    hurt[3, 0, 1, 1] = np.nan
    wide = np.pad(floats, [(0, 0)] * 3 + [(0, 2)])
    for name, held in (("nan", hurt), ("few", floats[:5]), ("one", floats[:1]), ("wide", wide)):
        np.save(tmp_path / f"{name}.npy", held)
    own = bench("train-floats.npy")
    assert "not finite" in refused("audit", bench("a.pt"), *bench.options(data=tmp_path / "nan.npy"))
    assert "not finite" in refused("audit", bench("a.pt"), *bench.options(data=own, test=tmp_path / "nan.npy"))
    assert "16 training images" in refused("audit", bench("a.pt"), *bench.options(data=tmp_path / "few.npy", test=None))
    assert "one test image" in refused("audit", bench("a.pt"), *bench.options(data=own, test=tmp_path / "one.npy"))
    assert "(1, 4, 6)" in refused("audit", bench("a.pt"), *bench.options(data=own, test=tmp_path / "wide.npy"))
    assert "(1, 4, 6)" in refused("audit", bench("a.pt"), *bench.options(data=tmp_path / "wide.npy", test=None))


def test_nothing_at_all(bench: Bench, refused: Callable[..., str], tmp_path: Path) -> None:
    assert "There is no file or folder" in refused("audit", tmp_path / "absent.pt", *bench.options())
    (tmp_path / "empty").mkdir()
    refused("audit", tmp_path / "empty", *bench.options(module=None))
    assert "WEIGHTS" in refused("audit")


def test_the_command_stands_alone() -> None:
    """In a process of its own."""
    command = [sys.executable, "-m", "vkernel.cli", "audit", "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert shown.returncode == 0
    for option in ("--module", "--betas", "--fail-if-memorised", "--full-sampler", "--latents"):
        assert option in shown.stdout
