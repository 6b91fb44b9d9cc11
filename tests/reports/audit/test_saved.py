"""Audits of saved samples: what is found, how files are read, and units that do not fit."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import vkernel as vk
from vkernel.cli import main
from vkernel.core.errors import InputError
from vkernel.reports.audit import Audit

DIGITS = vk.data.digits()
ORDER = torch.randperm(DIGITS.n, generator=torch.Generator().manual_seed(0))
BYTES = ((DIGITS[ORDER] + 1) * 127.5).round().to(torch.uint8).numpy()
TRAIN, TEST, NEW = BYTES[:400], BYTES[400:800], BYTES[800:1000]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data, and the same new images in every form."""
    out = tmp_path_factory.mktemp("saved")
    np.save(out / "train.npy", TRAIN)
    np.save(out / "test.npy", TEST)
    np.save(out / "new.npy", NEW)
    np.save(out / "unit.npy", NEW / 255.0)
    np.save(out / "signed.npy", (NEW / 127.5 - 1).astype(">f4"))
    np.save(out / "flat.npy", NEW[:, 0])
    np.savez(out / "archive.npz", noise=np.zeros((200, 3)), samples=NEW.transpose(0, 2, 3, 1))
    torch.save({"a": torch.from_numpy(NEW), "b": torch.zeros(3)}, out / "two.pt")
    for kind in ("grey", "colour"):
        (out / kind).mkdir()
        for k, image in enumerate(NEW):
            Image.fromarray(image[0]).convert("L" if kind == "grey" else "RGB").save(out / kind / f"{k:03}.png")
    return out


def audited(samples: Any, train: Any = TRAIN, test: Any = TEST, **options: Any) -> Audit:
    own, held = (d if isinstance(d, vk.Empirical) else vk.Empirical(d, scale=(-1, 1)) for d in (train, test))
    return vk.audit_samples(samples, own, held, **options)


def levels(found: Audit) -> dict[str, str]:
    return {v.question: v.level for v in found.verdicts}


def test_new_images_raise_no_alarm_and_copies_do() -> None:
    fair = audited(torch.from_numpy(NEW))
    assert set(levels(fair).values()) == {"good"}
    assert fair.memorised is not None
    assert fair.memorised.value == 0
    noise = 0.03 * torch.randn(100, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    copied = audited(torch.from_numpy(TRAIN[:100] / 127.5 - 1).float() + noise)
    assert levels(copied)["copies"] == "alarm"
    held = copied.subjects[0].samples["saved"].comparison
    assert held.fraction.value == held.closer.value == 1
    assert held.authentic.value == 0
    assert torch.equal(held.index[:, 0], torch.arange(100))
    assert copied.advice
    collapsed = audited(torch.from_numpy(NEW[np.arange(160) % 8]))
    assert (levels(collapsed)["repeats"], levels(collapsed)["copies"]) == ("alarm", "good")
    assert collapsed.saved is not None
    assert collapsed.saved.repeats is not None
    assert collapsed.saved.repeats.equal == 160
    assert "160 equal another exactly" in collapsed.summary()


def test_samples_are_compared_as_those_of_a_network_are() -> None:
    """The numbers are those of vk.metrics, in the data's units."""
    data, test = (vk.Empirical(x, scale=(-1, 1)) for x in (TRAIN, TEST))
    found = vk.audit_samples(torch.from_numpy(NEW), data, test, seed=3).subjects[0].samples["saved"]
    x = vk.Empirical(NEW, scale=(-1, 1))[:]
    assert torch.equal(found.images, x)
    alone = vk.metrics.copies(x, data, test, seed=3)
    assert torch.equal(found.copies.distance, alone.distance)
    assert found.likeness == vk.metrics.likeness(x, data, test, seed=3)


@pytest.mark.parametrize("name", ["grey", "colour", "flat.npy", "archive.npz", "signed.npy", "two.pt", "unit.npy"])
def test_all_forms_of_a_file_hold_the_same_samples(name: str, folder: Path) -> None:
    stated = {"two.pt": {"key": "a"}, "unit.npy": {"range": (0, 1)}}.get(name, {})
    images = audited(folder / name, **stated).subjects[0].samples["saved"].images
    torch.testing.assert_close(images, vk.Empirical(NEW, scale=(-1, 1))[:], atol=1e-6, rtol=0)


def test_units_that_do_not_fit_are_refused() -> None:
    new = torch.from_numpy(NEW).double()
    for samples, words in (
        (new / 255, r"better in \[0, 1\].*--samples-range=0,1"),
        (new, r"better in \[0, 255\]"),
        (new / 255 - 0.5, r"better in \[-0.5, 0.5\]"),
        ((new > 127).byte(), r"read in \[0, 255\].*better in \[0, 1\]"),
    ):
        with pytest.raises(InputError, match=words):
            audited(samples)
    assert any("mapped from" in note for note in audited(new / 255, range=(0, 1)).notes)
    assert any("better in" in note for note in audited(new / 255, range=(-1, 1)).notes)
    floats = [vk.Empirical(x / 255.0) for x in (TRAIN, TEST)]  # their range is found by their values
    assert any("[0, 255] to [0, 1]" in note for note in audited(new.byte(), *floats).notes)
    with pytest.raises(InputError, match=r"better in \[-1, 1\]"):
        audited(new / 127.5 - 1, *floats)
    odd = [vk.Empirical(x / 100.0) for x in (TRAIN, TEST)]
    with pytest.raises(InputError, match="black and white are unknown"):
        audited(new.byte(), *odd)
    assert not audited(new / 100, *odd).notes


def test_bad_samples_are_worth_an_audit() -> None:
    """Images that are wrong, but in the right units, are reported on and not refused."""
    new = torch.from_numpy(NEW / 127.5 - 1).float()
    noise = torch.randn(200, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    for samples in (-new, 0.3 * noise, new * 0 - 1):
        assert levels(audited(samples))["likeness"] != "good"
    some = new.clone()
    some[:20] = math.nan
    found = audited(some).subjects[0].samples["saved"]
    assert (found.copies.diverged, found.likeness.diverged, len(found.images)) == (20, 20, 200)
    some[:120] = math.nan
    assert levels(audited(some))["copies"] == "unknown"


@pytest.mark.parametrize(
    ("samples", "words"),
    [
        (torch.zeros(15, 1, 8, 8), "16 samples or more; there are 15"),
        (torch.tensor(3.0), "there are 0"),
        (torch.rand(20, 1, 8, 9), r"shape \(1, 8, 9\), and the data \(1, 8, 8\)"),
        (torch.rand(20, 3, 8, 8), "colour images.*the data are grey"),
        (torch.rand(20, 64), r"shape \(64,\)"),
        (torch.zeros(20, 1, 8, 8, dtype=torch.complex64), "real numbers, not torch.complex64"),
        (torch.zeros(20, 1, 8, 8, dtype=torch.bool), "real numbers, not torch.bool"),
        (torch.full((20, 1, 8, 8), math.nan), "No sample is finite"),
        ([[1.0]], "must be a tensor, a file or a folder"),
        ("nowhere", "There is no file or folder nowhere"),
    ],
)
def test_refusals(samples: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        audited(samples)


def test_a_large_file_is_sampled(folder: Path) -> None:
    found = audited(folder / "new.npy", count=50)
    assert len(found.subjects[0].samples["saved"].images) == 50
    assert "50 of 200 samples, chosen at random, were compared." in found.notes
    again = audited(torch.from_numpy(NEW), count=50)
    assert torch.equal(again.subjects[0].samples["saved"].images, found.subjects[0].samples["saved"].images)


def test_latents_are_shown_decoded_and_compared_as_they_are(tmp_path: Path) -> None:
    law = torch.randn(300, 4, 2, 2, generator=torch.Generator().manual_seed(0))
    data, samples, seen = vk.Empirical(law[:200]), law[200:], []

    def decode(latents: torch.Tensor) -> torch.Tensor:
        seen.append(latents)
        return latents.sigmoid().reshape(-1, 1, 4, 4)

    found = vk.audit_samples(samples, data)
    assert "Copies and samples" not in found.to_html(tmp_path / "plain.html").read_text()
    page = found.to_html(tmp_path / "decoded.html", decoder=decode).read_text()
    assert "Copies and samples" in page
    assert "latents decoded by" in page
    shown, held = torch.cat(seen), found.subjects[0].samples["saved"].comparison
    worst = held.worst(12)
    expected = torch.cat([samples[worst], data[held.index[worst, 0]], samples[:12]])
    torch.testing.assert_close(shown, expected)


def test_the_command(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*options: object) -> int:
        given = (*options, "--data", folder / "train.npy", "--test", folder / "test.npy")
        monkeypatch.setattr("sys.argv", ["vkernel", "audit", *map(str, given)])
        with pytest.raises(SystemExit) as end:
            main()
        return int(end.value.code or 0)

    out = tmp_path / "out.json"
    assert run("--from-samples", folder / "grey", "--json", out, "--html", tmp_path / "out.html") == 0
    assert "are copies" in capsys.readouterr().out.replace("\n", " ")
    held = json.loads(out.read_text())
    assert held["networks"] == []
    assert held["saved"]["repeats"]["n"] == 200
    assert held["saved"]["samples"]["saved"]["copies"]["fraction"]["value"] == 0
    np.save(tmp_path / "copies.npy", TRAIN[:50])
    memorised = ("--from-samples", tmp_path / "copies.npy", "-q", "--fail-if-memorised")
    assert [run(*memorised, limit) for limit in (".5", "1")] == [1, 0]
    for options, words in (
        (("--from-samples", folder / "grey", "--betas", "cosine:100"), "--betas describes a network"),
        (("--from-samples", folder / "unit.npy"), "--samples-range=0,1"),
        (("--from-samples", folder / "train.npy"), "compared with themselves"),
        (("--from-samples", folder), "compared with themselves"),
        ((), "--from-samples"),
        (("--samples-key", "a", folder / "new.npy"), "--samples-key describes saved samples"),
        (("--from-samples", folder / "two.pt"), "several arrays; pick one with --samples-key"),
    ):
        assert run(*options) == 2
        assert words in capsys.readouterr().err
