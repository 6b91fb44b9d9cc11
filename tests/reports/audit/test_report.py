"""Reports of audits: sentences, the screen, the page, numbers in files."""

from __future__ import annotations

import dataclasses
import io
import json
import re
from pathlib import Path

import pytest
import torch
from audited import PROCESS, QUESTIONS_OF_ONE, RATIO, TINY, alarms, checkpoint, digits, marks

import vkernel as vk
from vkernel.core.errors import InputError
from vkernel.reports.audit import Audit
from vkernel.reports.audit.report import page, relit, screen
from vkernel.reports.audit.verdicts import QUESTIONS


def lines_of(found: Audit, width: int = 100) -> list[str]:
    from rich.console import Console

    console = Console(width=width, file=io.StringIO())
    console.print(screen(found))
    return console.file.getvalue().splitlines()


def test_the_summary_is_sentences(memoriser: Audit, stages: dict[str, Audit]) -> None:
    for found in (memoriser, *stages.values()):
        for line in found.summary().splitlines():
            assert line.endswith("."), line
            assert not re.search(r"\b(nan|inf|None|NaN)\b", line), line
        assert len(lines_of(found)) <= 45
        words = " ".join(w for v in found.verdicts for w in (v.answer, v.words))
        assert not re.search(r"\b(nan|inf|None)\b", words), words
        assert {v.question for v in found.verdicts} <= set(QUESTIONS)


def test_the_table_says_what_was_found(memoriser: Audit) -> None:
    text = "\n".join(lines_of(memoriser))
    for question in QUESTIONS_OF_ONE:
        assert QUESTIONS[question].split()[0] in text
    assert re.search(r"^copies: \d+ of 48 samples", text, re.M)
    assert "advice (measured):" in text
    narrow = lines_of(memoriser, 60)
    assert max(map(len, narrow)) <= 60


def test_a_good_one_is_told_without_alarm() -> None:
    law = marks()
    sizes = dataclasses.replace(TINY, queries=16, budget=4)
    found = vk.audit(law.score(PROCESS), law.sample(200, 1), PROCESS, law.sample(200, 2), sizes=sizes)
    assert alarms(found) == set(), found.summary()
    text = "\n".join(lines_of(found))
    for word in ("drift from", "is blind", "under-trained", "untrained", "more than chance", "does not fit"):
        assert word not in found.summary().replace("no more than chance", "")
        assert word not in text.replace("no more than chance", "")
    assert found.statistics is not None
    assert found.to_dict()["statistics"]["cutoff"] == pytest.approx(float(RATIO[0]), rel=1e-5)


def test_numbers_are_json(memoriser: Audit, tmp_path: Path) -> None:
    path = memoriser.to_json(tmp_path / "new" / "audit.json")
    held = json.loads(path.read_text())
    assert held["memorised"]["value"] == memoriser.memorised.value
    assert len(held["verdicts"]) == len(memoriser.verdicts)
    assert held["data"]["n"] == 50
    assert held["test"]["n"] == 200
    one = held["networks"][0]
    assert one["predicts"] == "noise"
    assert one["conventions"]["fits"] is True
    assert one["membership"]["auc"] > 0.9
    assert len(one["samples"]["ode"]["copies"]["ratio"]) == 48
    assert len(one["levels"]["t"]) == 4
    assert held["advice"][0]["sure"] == "measured"


def test_the_page_is_self_contained(memoriser_page: str) -> None:
    assert "<h1>Audit of memoriser</h1>" in memoriser_page
    assert "Macro" not in memoriser_page
    assert "<script" not in memoriser_page
    assert "//" not in re.sub(r'"data:image/[^"]*"', "", memoriser_page).replace("https://www.w3.org", "")
    for name in ("src", "srcset", "href"):
        for target in re.findall(rf'{name}="([^"]*)"', memoriser_page):
            assert target.startswith(("data:image/", "#")), target[:80]
    assert memoriser_page.count("<source srcset=") == memoriser_page.count("<img src=") >= 8
    assert "prefers-color-scheme: dark" in memoriser_page
    text = re.sub(r"<[^>]*>", " ", re.sub(r"<style>.*?</style>", "", memoriser_page, flags=re.S))
    assert not re.search(r"\b(nan|inf|None|NaN)\b", text)
    for heading in ("Verdicts", "What to change", "What the numbers mean, and what would change them"):
        assert heading in memoriser_page


@pytest.mark.usefixtures("coarse")
def test_hostile_names_are_escaped() -> None:
    law = marks()
    points = vk.Empirical(law.sample(100, 1).flatten(1))  # vectors: fewer pictures
    flat = vk.GaussianMixture(marks().means.reshape(8, 16), variance=0.02)
    net = checkpoint(flat.score(PROCESS), (16,), "<b>&\"'{{7*7}}</b><script>", predicts="score", time=lambda t: t)
    found = vk.audit(net, points, sizes=TINY)
    text = page(found)
    assert "<b>" not in text
    assert "<script" not in text
    assert "&lt;b&gt;&amp;" in text
    assert "{{7*7}}" in text
    markup = dataclasses.replace(found.networks[0].net, name="[/red]a[bold].pt")
    lines = lines_of(dataclasses.replace(found, networks=(dataclasses.replace(found.networks[0], net=markup),)))
    assert any("[/red]a[bold].pt" in line for line in lines)


def test_a_full_disk_leaves_no_half_file(memoriser: Audit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "audit.json"
    target.write_text("before")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(InputError, match=r"No space left on device\."):
        memoriser.to_json(target)
    assert target.read_text() == "before"
    assert [p.name for p in tmp_path.iterdir()] == ["audit.json"]


def test_drifted_images_are_shown_with_the_light_of_others() -> None:
    images, like = torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(0)), digits()[:5]
    lit = relit(7 * images - 20, like)
    assert torch.allclose(lit.flatten(1).mean(1), like.mean().expand(3), atol=1e-5)
    assert torch.allclose(lit.flatten(1).std(1, correction=0), like.std(correction=0).expand(3), atol=1e-5)
    assert torch.allclose(lit, relit(images, like), atol=1e-4)  # what was there before the drift
    assert torch.allclose(relit(torch.full((1, 1, 8, 8), 9.0), like), like.mean().expand(1, 1, 8, 8), atol=1e-5)
