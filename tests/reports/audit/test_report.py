"""Reports of audits: sentences on results, the summary, the screen, the page, numbers in files."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import re
from pathlib import Path

import pytest
import torch
from audited import PROCESS, QUESTIONS_OF_ONE, RATIO, TINY, alarms, checkpoint, digits, marks
from draws import normal
from torch import Tensor

import vkernel as vk
from vkernel.core.errors import InputError
from vkernel.metrics import copies, drift, likeness, texture
from vkernel.reports.audit import Audit, SampleAudit, describe
from vkernel.reports.audit.page import page, relit
from vkernel.reports.audit.report import GRADES, QUESTIONS, Verdict, screen


def split_digits(seed: int, *sizes: int) -> list[Tensor]:
    """Disjoint sets of digits, (n, 1, 8, 8)."""
    data = vk.data.digits()
    order = torch.randperm(data.n, generator=torch.Generator().manual_seed(seed))
    return [data[part] for part in order[: sum(sizes)].split(list(sizes))]


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
        assert len(lines_of(found)) <= 52
        words = " ".join(w for v in found.verdicts for w in (v.answer, v.words))
        assert not re.search(r"\b(nan|inf|None)\b", words), words
        assert {v.question for v in found.verdicts} <= set(QUESTIONS)


def test_the_repr_is_one_line(memoriser: Audit) -> None:
    raised = ", ".join(v.question for v in memoriser.verdicts if v.level == "alarm")
    assert repr(memoriser) == f"Audit(memoriser; alarms: {raised})"


def test_what_has_no_sentences_is_refused() -> None:
    with pytest.raises(InputError, match="no sentences on dict"):
        describe({})


def test_the_table_says_what_was_found(memoriser: Audit) -> None:
    text = "\n".join(lines_of(memoriser))
    for question in QUESTIONS_OF_ONE:
        assert QUESTIONS[question].split()[0] in text
    assert re.search(r"^copies: \d+ of 48 samples", text, re.M)
    assert "advice (measured):" in text
    narrow = lines_of(memoriser, 60)
    assert max(map(len, narrow)) <= 60


def test_a_good_network_is_reported_without_alarm() -> None:
    law = marks()
    sizes = dataclasses.replace(TINY, queries=16, budget=4)
    found = vk.audit(law.score(PROCESS), law.sample(200, 1), PROCESS, law.sample(200, 2), sizes=sizes)
    assert alarms(found) == set(), found.summary()
    text = "\n".join(lines_of(found))
    for word in ("drift from", "It ignores", "under-trained", "untrained", "more than chance", "does not fit"):
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
    assert "//" not in re.sub(r'"data:image/[^"]*"', "", memoriser_page)
    for name in ("src", "srcset", "href"):
        for target in re.findall(rf'{name}="([^"]*)"', memoriser_page):
            assert target.startswith(("data:image/", "#")), target[:80]
    assert memoriser_page.count("<source srcset=") >= 7
    assert memoriser_page.count("<img src=") == memoriser_page.count(' alt="') > 40
    assert "prefers-color-scheme: dark" in memoriser_page
    text = re.sub(r"<[^>]*>", " ", re.sub(r"<style>.*?</style>", "", memoriser_page, flags=re.S))
    assert not re.search(r"\b(nan|inf|None|NaN)\b", text)
    assert "Rayleigh 2" not in text
    assert not re.search(r"\d(e[+-]\d\d)\b|\*\w+\*", text), "a number or a word that nobody can read"


def test_the_page_answers_first(memoriser: Audit, memoriser_page: str) -> None:
    parts = ("<h1>", "<dt>command</dt>", memoriser.date, 'id="answer"', 'id="verdicts"', 'id="pictures"', 'id="advice"')
    parts += ('id="network-1"', 'id="meaning"')
    places = [memoriser_page.index(part) for part in parts]
    assert places == sorted(places)
    answer = memoriser_page[places[3] : places[4]]
    e = memoriser.memorised
    share = "{:.0f} % ({:.0f} % to {:.0f} %)".format(*(100 * v for v in (e.value, e.low, e.high)))
    assert f"{share} of the samples are copies of training images." in answer
    assert "Its loss reveals which images it was trained on." in answer
    shown = memoriser_page[places[5] : places[6]]
    assert shown.count("<b>copy</b>") == 12  # beside their sources
    assert shown.count('alt="nearest training image') == 12
    for grade in GRADES.values():
        assert grade["meaning"] in memoriser_page


def test_the_sampler_that_gives_images_is_quoted(memoriser: Audit) -> None:
    """Copies of the probability flow are replaced by noise: the verdict is on the other sampler, and says so."""
    (net,) = memoriser.networks
    flow, other = net.samples["ode"], net.samples["ancestral"]
    noise = torch.randn(flow.images.shape, generator=torch.Generator().manual_seed(0))
    data = vk.Empirical(digits()[:50])
    spoilt = dataclasses.replace(
        flow, images=noise, copies=copies(noise, data), standardised=None, texture=texture(noise, data)
    )

    def judged(**samples: SampleAudit) -> tuple[dict[str, Verdict], str]:
        found = dataclasses.replace(memoriser, networks=(dataclasses.replace(net, samples=samples),))
        return {v.question: v for v in found.verdicts}, " ".join(a.change for a in found.advice)

    half, changes = judged(ode=spoilt, ancestral=other)
    assert "Sample with the ancestral sampler" in changes
    assert (half["images"].level, half["images"].answer) == ("note", "partly: 100 % noise (probability flow)")
    assert half["copies"].level == "alarm"
    assert "Sampler: ancestral" in half["copies"].words
    remote = dataclasses.replace(other.comparison, distance=10 + other.comparison.distance)
    _, changes = judged(ode=spoilt, ancestral=dataclasses.replace(other, copies=remote, standardised=None))
    assert "Sample with" not in changes  # no noise, but no images of this kind either
    none, _ = judged(ode=spoilt)
    assert (none["images"].level, none["images"].answer) == ("alarm", "no, noise")
    assert (none["copies"].level, none["copies"].answer) == ("unknown", "cannot be told")


def test_drift_is_evidence_of_another_range(memoriser: Audit) -> None:
    """Where errors do not tell two ranges apart, brightness and contrast of the samples do."""
    (net,) = memoriser.networks
    other = dataclasses.replace(net.conventions.stated, range=(0.0, 1.0))
    read = dataclasses.replace(net.conventions, alike=(other,))
    data = vk.Empirical(digits()[:50])

    def verdict(shift: float) -> Verdict:
        held = {k: dataclasses.replace(s, drift=drift(data[:40] + shift, data)) for k, s in net.samples.items()}
        found = dataclasses.replace(net, conventions=read, samples=held)
        return dataclasses.replace(memoriser, networks=(found,)).verdicts[0]

    assert verdict(0).level == "good"
    far = verdict(2)
    assert (far.level, far.answer) == ("unknown", "cannot be told, its range may be another")
    assert far.words.endswith("trained with another range: 0,1.")


@pytest.mark.usefixtures("coarse")
def test_hostile_names_are_escaped() -> None:
    law = marks()
    points = vk.Empirical(law.sample(100, 1).flatten(1))  # vectors: fewer pictures
    flat = vk.GaussianMixture(marks().means.reshape(8, 16), variance=0.02)
    net = checkpoint(flat.score(PROCESS), (16,), "<b>&\"'{{7*7}}</b><script>", predicts="score", time=lambda t: t)
    found = vk.audit(net, points, sizes=TINY)
    text = page(dataclasses.replace(found, command="vkernel audit '<script>' --data '{{7*7}}'"))
    assert "<b>" not in text
    assert "<script" not in text
    assert "<code>vkernel audit &#39;&lt;script&gt;&#39;" in text
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


# --- copies ---------------------------------------------------------------------------------------------------------


def test_copies_are_counted_beside_test_images():
    train, held = normal(200, 8), normal(300, 8, seed=1)
    x = torch.cat([train[:12] + 0.01 * normal(12, 8, seed=2), normal(88, 8, seed=3)])
    x[0] = train[0]
    found = describe(copies(x, vk.Empirical(train), vk.Empirical(held)))
    assert found.startswith("12 of 100 samples (12 %, 95 %: 7 to 20 %) are copies")
    assert "1 equals a training image exactly" in found
    assert "That is more than chance gives (p < 0.001): of test images 0 % are." in found
    assert "near-duplicates" not in found


def test_copies_that_near_duplicates_hide_are_mentioned():
    base = normal(200, 8)
    twins = torch.cat([base, base + 1e-3 * normal(200, 8, seed=1)])
    x = torch.cat([base[:30] + 5e-3 * normal(30, 8, seed=2), normal(70, 8, seed=3)])
    assert "near-duplicates" in describe(copies(x, vk.Empirical(twins), vk.Empirical(normal(300, 8, seed=4))))


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e300])
def test_diverged_samples_are_no_copies(bad: float):
    x = normal(10, 2, seed=1)
    x[4, 0] = bad
    found = copies(x, vk.Empirical(normal(30, 2)), vk.Empirical(normal(30, 2, seed=2)))
    assert "1 of the 10 samples diverged" in describe(found)


def test_small_sets_say_what_they_cannot_show():
    two = vk.Empirical([0.0, 1.0])
    few = copies(torch.tensor([0.1, 0.5, 0.9]), two, vk.Empirical([0.45, 0.55]))
    assert "could raise the alarm" in describe(few)
    many = copies(0.3 * normal(50, 1), two, vk.Empirical(0.3 * normal(50, 1, seed=1)))
    assert "only 2 distinct" in describe(many)


# --- drift ----------------------------------------------------------------------------------------------------------


def test_drift_names_the_moment_and_how_far_it_lies():
    samples, rest = split_digits(0, 897, 900)
    data = vk.Empirical(rest)
    words = describe(drift(samples + 0.1, data))
    assert re.search(r"[\d.]+ % \([\d.]+ % to [\d.]+ %\) of them have a mean or a variance outside", words)
    assert re.search(r"the average mean is shifted by [\d.]+ \([\d.]+ to [\d.]+\) spreads", words)
    assert re.search(r"spread of means is [\d.]+ \([\d.]+ to [\d.]+\) times", words)
    signs = torch.randn(len(samples), 1, 1, 1, generator=torch.Generator().manual_seed(0)).sign()
    assert describe(drift(samples + 2 * signs, data)).startswith("Samples drift from the data: 100 % (")
    assert describe(drift(samples, data)).startswith("Samples keep to the data's range")


# --- likeness -------------------------------------------------------------------------------------------------------


def test_likeness_says_how_large_a_distance_is():
    samples, train, test = split_digits(4, 128, 900, 300)
    found = describe(likeness(samples + 0.3, train, test))
    assert found.startswith("Samples can be distinguished from test images (p = 0.001): Fréchet distance ")
    assert "on 32 principal components; 128 test images have " in found


def test_what_principal_components_leave_out_is_reported():
    samples, train, test = split_digits(1, 64, 900, 300)
    found = likeness(samples + 0.2 * normal(64, 1, 8, 8).float(), train, test)
    assert found.alarm
    assert "; what these components leave out is 1." in describe(found)


def test_samples_far_from_the_data_are_an_alarm_and_close_ones_a_note():
    samples, train, test = split_digits(5, 128, 900, 300)
    far, near = likeness(samples + 3, train, test), likeness(samples + 0.2, train, test)
    assert (far.alarm, far.worse) == (True, True)
    assert (near.alarm, near.worse) == (True, False)
    assert not likeness(samples, train, test).worse


def test_a_distance_that_is_left_out_has_a_reason():
    samples, train, test = split_digits(3, 40, 500, 100)
    assert "64 features need 65 images or more; there are 40 samples" in describe(
        likeness(samples, train, test, features=lambda x: x.flatten(1))
    )


def test_likeness_of_diverged_and_of_few_samples():
    data, test, x = normal(200, 3, seed=1), normal(80, 3, seed=2), normal(60, 3, seed=3)
    spoilt = torch.cat([x, torch.tensor([[math.nan, 0, 0], [math.inf, 0, 0], [0, -math.inf, 0], [1e30, 0, 0]])])
    assert "4 samples diverged" in describe(likeness(spoilt, data, test))
    assert "0 are left, 30 having diverged" in describe(likeness(torch.full((30, 3), math.nan), data, test))
    assert "unknown" in describe(likeness(x[:7], data, test))


def test_few_steps_do_not_show_that_nothing_is_copied(stages: dict[str, Audit]) -> None:
    for found in stages.values():
        networks = tuple(
            dataclasses.replace(n, samples={k: dataclasses.replace(s, coarse=True) for k, s in n.samples.items()})
            for n in found.networks
        )
        coarse = dataclasses.replace(found, networks=networks)
        assert {v.level for v in coarse.verdicts if v.question == "copies"} <= {"alarm", "unknown"}
        if any(n.samples for n in networks):
            assert any("more steps" in a.change for a in coarse.advice)
