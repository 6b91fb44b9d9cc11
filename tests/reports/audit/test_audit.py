"""``vk.audit`` from end to end: networks that memorise, that know the law, that learned little, that cannot see."""

from __future__ import annotations

import copy
import dataclasses
import io
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import binom
from torch import Tensor, nn

import vkernel as vk
from vkernel.core.errors import InputError
from vkernel.reports.audit import Audit, Checkpoint, Sizes, copies, membership
from vkernel.reports.audit.report import _relit, page, screen
from vkernel.reports.audit.verdicts import QUESTIONS, chance_of

SMALL = Sizes(24, 32, 1, 2, 96, 8, 0, 48, 20, 256, 12, 0)
TINY = Sizes(8, 8, 1, 4, 48, 4, 0, 32, 20, 64, 10, 0)
STEPS = 100
PROCESS = vk.DDPM.linear(1e-3, 0.2, STEPS)
INDEX = torch.arange(STEPS, dtype=torch.float64)
RATIO = (PROCESS.sigma(INDEX) / PROCESS.alpha(INDEX)).float()  # r = sigma/alpha
EVERY_QUESTION = ["conventions", "training", "copies", "membership", "blindness", "drift", "likeness", "deviation"]


class Denoiser(nn.Module):
    """Predicts noise from an image and an index, by ``out``: the noise itself, the image, or a blend of the two."""

    def __init__(self, d: int, width: int, out: str, depth: int = 2, blind: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.out, self.blind = out, blind
        self.register_buffer("ratio", RATIO)
        hidden = [m for _ in range(depth - 1) for m in (nn.Linear(width, width), nn.ReLU())]
        self.body = nn.Sequential(nn.Linear(d + 8, width), nn.ReLU(), *hidden, nn.Linear(width, d))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        r, rows = self.ratio[t.long()][:, None], x.flatten(1)
        if self.blind:
            rows = nn.functional.layer_norm(rows, rows.shape[1:])
        phase = r.log() * torch.tensor([0.25, 0.5, 1, 2]).to(r)
        told = self.body(torch.cat([rows, phase.sin(), phase.cos()], 1))
        root = (1 + r * r).sqrt()
        if self.out == "image":
            told = (rows * root - told) / r
        elif self.out == "blend":
            told = (r * rows + told) / root
        return told.reshape(x.shape)


def train(net: Denoiser, images: Tensor, steps: int, rate: float, keep: tuple[int, ...] = ()) -> list[Denoiser]:
    """Adam on the noise error, weighted so that the network's own output has an even one; copies along the way."""
    g, kept = torch.Generator().manual_seed(0), []
    optimiser = torch.optim.Adam(net.parameters(), rate, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, rate, total_steps=steps)
    middle = ((RATIO > 0.1) & (RATIO < 4)).nonzero()[:, 0]  # where images are told apart
    for k in range(steps):
        x0 = images[torch.randint(len(images), (64,), generator=g)] if len(images) > 64 else images
        among = middle if k % 4 else torch.arange(STEPS)
        t = among[torch.randint(len(among), (len(x0),), generator=g)]
        r, noise = RATIO[t].reshape(-1, 1, 1, 1), torch.randn(x0.shape, generator=g)
        weight = {"noise": 1.0, "image": r * r, "blend": 1 + r * r}[net.out]
        x = (x0 + r * noise) / (1 + r * r).sqrt()
        loss = ((net(x, t) - noise).square() * weight).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
        if k + 1 in keep:
            kept.append(copy.deepcopy(net))
    return kept


def checkpoint(net: Any, shape: tuple[int, ...], name: str, **more: Any) -> Checkpoint:
    return Checkpoint.from_callable(net, PROCESS, shape=shape, name=name, **more)


def digits() -> Tensor:
    held = vk.data.digits()
    return held[torch.randperm(held.n, generator=torch.Generator().manual_seed(1))].float()


def marks() -> vk.GaussianMixture:
    """A law on 4×4 images: eight marks of black and white, with grain."""
    signs = torch.randint(0, 2, (8, 1, 4, 4), generator=torch.Generator().manual_seed(3)) * 2 - 1
    return vk.GaussianMixture(0.7 * signs, variance=0.02)


def told(found: Audit, network: str | None = None) -> dict[str, Any]:
    """The verdicts of one network by question, and those of all."""
    name = found.findings[0].name if network is None else network
    return {v.question: v for v in found.verdicts if v.network in (name, "")}


def alarms(found: Audit) -> set[str]:
    return {v.question for v in found.verdicts if v.level == "alarm"}


@pytest.fixture(scope="module")
def memoriser() -> Audit:
    """The audit of a network that was trained on 50 digits until it knew them."""
    images = digits()
    net = Denoiser(64, 256, "image", depth=3)
    train(net, images[:50], 4500, 4e-3)
    return vk.audit(checkpoint(net, (1, 8, 8), "memoriser"), images[:50], test=images[50:250], sizes=SMALL)


@pytest.fixture
def coarse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few pictures of few dots, for pages that are not looked at."""
    monkeypatch.setattr("vkernel.reports.html.DOTS", 20)
    for number in ("SHOWN", "PAIRED"):
        monkeypatch.setattr(f"vkernel.reports.audit.report.{number}", 3)


@pytest.fixture(scope="module")
def memoriser_page(memoriser: Audit) -> str:
    return page(memoriser)


@pytest.fixture(scope="module")
def stages() -> dict[str, Audit]:
    """One network before, early in and after its training on a law that it can learn, but not learn by heart."""
    law = marks()
    train_set, test_set = law.sample(400, 1), law.sample(400, 2)
    net = Denoiser(16, 96, "blend")
    nets = {"untrained": copy.deepcopy(net)}
    (nets["early"],) = train(net, train_set, 2000, 4e-3, keep=(400,))
    nets["late"] = net
    shape = (1, 4, 4)
    return {
        name: vk.audit(checkpoint(n, shape, name), train_set, test=test_set, sizes=SMALL) for name, n in nets.items()
    }


# --- copies ---------------------------------------------------------------------------------------------------------


def test_a_network_that_memorised_is_caught(memoriser: Audit) -> None:
    verdict = told(memoriser)
    assert list(verdict) == EVERY_QUESTION
    assert verdict["copies"].level == "alarm"
    assert verdict["copies"].answer.startswith("yes, ")
    assert memoriser.memorised is not None
    assert memoriser.memorised.value > 0.5
    assert memoriser.memorised.low > 0.5
    assert verdict["membership"].level == "alarm"
    assert memoriser.findings[0].membership.auc.low > 0.9
    assert re.search(r"At [1-4] of 4 noise levels the error on test images is larger", verdict["membership"].words)
    assert bool((memoriser.findings[0].levels.gap_low > 0).any())
    assert verdict["training"].level == "good"
    assert verdict["blindness"].level == "good"


def test_what_is_advised_against_memory(memoriser: Audit) -> None:
    advice = memoriser.advice
    changes = " ".join(a.change for a in advice)
    for words in ("Stop training earlier", "more images", "learning rate to batch size", "smaller network"):
        assert words in changes
    assert [a.sure for a in advice] == sorted((a.sure for a in advice), key=("measured", "theory", "doubtful").index)
    earlier = next(a for a in advice if a.change.startswith("Stop training earlier"))
    assert earlier.sure == "measured"
    assert "memoriser denoises its training images better than test images" in earlier.evidence
    assert all(a.networks == ("memoriser",) for a in advice)


def test_copies_are_shown_beside_their_sources(memoriser: Audit, memoriser_page: str) -> None:
    for kind, name in (("ode", "probability flow"), ("ancestral", "ancestral")):
        held = memoriser.findings[0].samples[kind].judged
        count = int((held.ratio < held.threshold).sum())
        assert count > 24
        assert f"Copies beside their sources ({name})" in memoriser_page
        assert f"{count} of 48 samples count as copies." in memoriser_page


def test_the_share_that_fails_is_the_share_that_is_told(memoriser: Audit, stages: dict[str, Audit]) -> None:
    for found in (memoriser, stages["late"]):
        shares = [s.judged.fraction.value for s in found.findings[0].samples.values()]
        assert found.memorised.value == max(shares)
        assert f"{100 * max(shares):.2g} %" in told(found)["copies"].answer


def test_the_score_of_the_training_set_copies_it() -> None:
    points = digits()
    score = vk.EmpiricalScore(vk.Empirical(points[:50]), PROCESS)
    found = vk.audit(score, points[:50], test=points[50:250], sizes=SMALL)
    assert found.memorised.value >= 0.95
    assert {"copies", "membership"} <= alarms(found)
    assert found.findings[0].name == "EmpiricalScore"
    assert (found.findings[0].levels.distance < 1e-6).all()  # it is the ideal
    alone = vk.audit(score, points[:50], sizes=SMALL)
    assert "copies" in alarms(alone)
    assert "membership" not in told(alone)
    assert "no test set" in alone.summary()


# --- what is good ---------------------------------------------------------------------------------------------------


def test_the_law_itself_is_not_accused() -> None:
    """Twelve audits of an exact score; the chances are .01 for membership, for each sampler, each test of drift."""
    law, raised = marks(), []
    score = law.score(PROCESS)
    for seed in range(12):
        train_set, test_set = law.sample(200, 100 + seed), law.sample(200, 300 + seed)
        found = vk.audit(score, train_set, PROCESS, test_set, sizes=TINY, seed=seed)
        assert "blindness" not in alarms(found)
        assert "conventions" not in alarms(found)
        raised.append(alarms(found) & {"copies", "membership", "drift"})
    chances = {"copies": 0.02, "membership": 0.01, "drift": 0.08}
    for question, chance in chances.items():
        assert sum(question in r for r in raised) <= binom.ppf(0.99, 12, chance), question


def test_false_alarms_of_two_halves_are_as_stated() -> None:
    """A model that has seen neither half; what is called training set is a matter of names."""
    law, rounds = marks(), 150
    score = law.score(PROCESS)
    score.process = PROCESS  # type: ignore[attr-defined]
    chances, copying, alone = [], 0, 0
    for seed in range(rounds):
        halves = law.sample(120, seed)
        one, other = (vk.Empirical(half) for half in halves.split(60))
        found = membership(score, one, other, times=[10.0, 30.0], images=60, draws=1, seed=seed)
        chances.append(chance_of(found))
        fresh = law.sample(60, 10_000 + seed)
        copying += copies(fresh, one, other, seed=seed).alarm
        alone += copies(fresh, one, seed=seed).alarm
    most = binom.ppf(0.999, rounds, 0.01)
    assert sum(c < 0.01 for c in chances) <= most
    assert copying <= most
    assert alone <= most
    for level in (0.1, 0.5, 0.9):  # and the chance is a chance
        share = sum(c < level for c in chances) / rounds
        assert share == pytest.approx(level, abs=4 * math.sqrt(level * (1 - level) / rounds))


def test_three_stages_of_training(stages: dict[str, Audit]) -> None:
    untrained, early, late = (told(stages[name]) for name in ("untrained", "early", "late"))
    assert list(untrained) == ["conventions", "training"]
    assert (untrained["conventions"].level, untrained["training"].answer) == ("unknown", "untrained")
    assert untrained["training"].level == "alarm"
    assert early["training"].level == "alarm"
    assert early["training"].answer.startswith("under-trained, skill")
    assert late["training"].level == "good"
    assert late["training"].answer.startswith("yes, skill")
    for name in ("untrained", "early"):
        assert any(a.change.startswith("Train longer") for a in stages[name].advice)
    assert not any(a.change.startswith("Train longer") for a in stages["late"].advice)
    assert stages["untrained"].memorised is None
    assert "It does not beat a trivial predictor." in stages["untrained"].summary()
    for name in ("early", "late"):
        assert not alarms(stages[name]) & {"copies", "membership", "blindness", "conventions"}


def test_a_network_that_normalises_its_image_is_blind() -> None:
    law = marks()
    train_set, net = law.sample(400, 1), Denoiser(16, 96, "noise", blind=True)
    train(net, train_set, 800, 4e-3)
    found = vk.audit(checkpoint(net, (1, 4, 4), "normed"), train_set, test=law.sample(400, 2), sizes=SMALL)
    verdict = told(found)
    assert verdict["blindness"].level == "alarm"
    assert verdict["blindness"].answer == "yes: brightness, contrast"
    assert "blind to brightness" in verdict["blindness"].words
    assert verdict["copies"].level != "alarm"
    advice = found.advice[0]
    assert advice.change.startswith("Let the network see brightness and contrast")
    assert ("drift along what it cannot see" in advice.evidence) == (verdict["drift"].level == "alarm")


# --- several networks -----------------------------------------------------------------------------------------------


def test_two_callables_are_compared() -> None:
    law = marks()
    exact = law.score(PROCESS)

    def louder(x: Tensor, t: Tensor) -> Tensor:
        return 1.1 * exact(x, t)

    found = vk.audit([exact, louder], law.sample(200, 1), PROCESS, law.sample(200, 2), sizes=TINY)
    assert [f.name for f in found.findings] == ["population_score", "louder"]
    assert found.agreement is not None
    assert {"agreement", "variance"} <= set(told(found))
    assert found.agreement.same.ratio.value < 0.5
    twins = vk.audit([exact, exact], law.sample(200, 1), PROCESS, sizes=TINY)
    assert [f.name for f in twins.findings] == ["population_score (1)", "population_score (2)"]
    assert twins.agreement.same.ratio.value == pytest.approx(0, abs=1e-6)
    assert told(twins)["agreement"].answer.startswith("same-noise distance 0.00")


def test_an_ensemble_is_audited_member_by_member() -> None:
    process, data = vk.VP(), vk.Empirical(vk.GaussianMixture([[-1.0, 0], [1, 0]], variance=0.05).sample(64, 1))
    model = vk.models.MLP(32, 2, lr=1e-2, steps=500)
    ensemble = vk.train_ensemble(model, data, process, members=4, show=False)
    sizes = dataclasses.replace(TINY, check=64)
    found = vk.audit(ensemble, data, sizes=sizes, groups=["a", "a", "b", "b"])
    names = [f.name for f in found.findings]
    assert names == [f"member {m}" for m in range(4)]
    assert found.agreement is not None, found.summary()
    assert {"agreement", "variance"} <= {v.question for v in found.verdicts if not v.network}
    assert "2 groups" in told(found)["agreement"].words
    held = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert held["agreement"]["same_noise"]["ratio"]["value"] > 0
    assert [n["name"] for n in held["networks"]] == names


@pytest.mark.usefixtures("coarse")
def test_names_with_commas_and_groups_that_share_nothing() -> None:
    law = marks()
    nets = [checkpoint(law.score(PROCESS), (1, 4, 4), name, prediction="score") for name in ("a, b", "b")]
    given = (nets, law.sample(100, 1))
    found = vk.audit(*given, sizes=TINY)
    assert [f.name for f in found.members] == ["a, b", "b"]
    assert "The same noise, other runs" in page(found)
    alone = vk.audit(*given, sizes=TINY, groups=[1, 2])
    assert alone.agreement is None
    assert alone.members == []
    assert "alone in its group" in alone.notes[0]
    assert "copies" in told(alone)


def test_other_conventions_are_audited_side_by_side() -> None:
    law = marks()
    process = vk.VP()
    nets = [law.score(PROCESS), Checkpoint(law.score(process), process, "score", "fraction", name="continuous")]
    found = vk.audit(nets, law.sample(200, 1), PROCESS, law.sample(200, 2), sizes=TINY)
    assert found.agreement is None
    assert all({"copies", "membership"} <= set(told(found, f.name)) for f in found.findings)
    assert "agreement" not in told(found)


@pytest.mark.usefixtures("coarse")
def test_one_that_is_misread_does_not_lose_the_other() -> None:
    law = marks()
    exact = law.score(PROCESS)
    good = checkpoint(exact, (1, 4, 4), "good", prediction="score", time=lambda t: t)
    lie = dataclasses.replace(good, name="lie", prediction="x0")
    found = vk.audit([good, lie], law.sample(200, 1), test=law.sample(200, 2), sizes=SMALL)
    assert told(found, "lie")["conventions"].level == "alarm"
    assert "prediction score" in told(found, "lie")["conventions"].words
    assert "copies" in told(found, "good")
    assert found.advice[0].change == "State the convention that fits, and audit again."
    assert found.advice[0].networks == ("lie",)
    assert page(found).count("–</td>") == 7  # what could not be asked of it


# --- the report -----------------------------------------------------------------------------------------------------


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
    for question in EVERY_QUESTION:
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
    assert found.ground is not None
    assert found.to_dict()["ground"]["cutoff"] == pytest.approx(float(RATIO[0]), rel=1e-5)


def test_numbers_are_json(memoriser: Audit, tmp_path: Path) -> None:
    path = memoriser.to_json(tmp_path / "new" / "audit.json")
    held = json.loads(path.read_text())
    assert held["memorised"]["value"] == memoriser.memorised.value
    assert len(held["verdicts"]) == len(memoriser.verdicts)
    assert held["data"]["n"] == 50
    assert held["test"]["n"] == 200
    one = held["networks"][0]
    assert one["prediction"] == "noise"
    assert one["conventions"]["fits"] is True
    assert one["membership"]["auc"] > 0.9
    assert len(one["samples"]["ode"]["copies"]["ratio"]) == 48
    assert len(one["levels"]["t"]) == 4
    assert held["advice"][0]["sure"] == "measured"


def test_the_page_is_self_contained(memoriser_page: str) -> None:
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
    net = checkpoint(flat.score(PROCESS), (16,), "<b>&\"'{{7*7}}</b><script>", prediction="score", time=lambda t: t)
    found = vk.audit(net, points, sizes=TINY)
    text = page(found)
    assert "<b>" not in text
    assert "<script" not in text
    assert "&lt;b&gt;&amp;" in text
    assert "{{7*7}}" in text
    markup = dataclasses.replace(found.findings[0].net, name="[/red]a[bold].pt")
    lines = lines_of(dataclasses.replace(found, findings=(dataclasses.replace(found.findings[0], net=markup),)))
    assert any("[/red]a[bold].pt" in line for line in lines)


# --- under attack ---------------------------------------------------------------------------------------------------


def exact(data: Tensor, variance: float = 0.02) -> Any:
    """The score of the data with grain: a network that denoises."""
    return vk.GaussianMixture(data.double(), variance=variance).score(PROCESS)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"test": torch.zeros(1, 1, 4, 4)}, "one test image"),
        ({"test": torch.zeros(5, 1, 5, 5)}, "must be alike"),
        ({"data": torch.zeros(3, 1, 4, 4)}, "needs 16 training images"),
        ({"data": torch.zeros(30, 1, 4, 4)}, "are equal"),
        ({"data": torch.full((30, 1, 4, 4), math.nan)}, "training data cannot be used"),
        ({"data": torch.zeros(0, 1, 4, 4)}, "training data cannot be used"),
        ({"test": torch.full((30, 1, 4, 4), math.inf)}, "test data cannot be used"),
        ({"models": []}, "no network"),
        ({"models": 3}, "A int cannot be audited alone"),
        ({"process": None}, "with process="),
        ({"groups": ["a"] * 2}, "1 networks and 2 groups|one network and 2 groups"),
        ({"features": "taste"}, "taste"),
        ({"threshold": 0.0}, "threshold"),
        ({"models": "nowhere/at/all"}, "never downloaded"),
        ({"models": lambda x, t: x.flatten(1)}, "must return|returned"),
    ],
)
def test_refusals(change: dict[str, Any], words: str) -> None:
    law = marks()
    given = {"models": law.score(PROCESS), "data": law.sample(40, 1), "process": PROCESS, "sizes": TINY, **change}
    with pytest.raises(InputError, match=words) as caught:
        vk.audit(**given)
    assert str(caught.value).strip().endswith((".", "…"))


def test_fewer_images_than_pixels_and_duplicates() -> None:
    points = digits()[:40]
    twice = torch.cat([points, points])
    found = vk.audit(exact(points, 0.01), twice, PROCESS, digits()[100:140], sizes=TINY)
    assert "copies" in told(found)
    assert found.summary()
    json.dumps(found.to_dict(), allow_nan=False)
    alone = vk.audit(exact(points, 0.01), twice, PROCESS, sizes=TINY)
    assert told(alone)["copies"].level in ("alarm", "note", "good")


def test_a_network_that_breaks_at_little_noise() -> None:
    law = marks()
    good = law.score(PROCESS)

    def broken(x: Tensor, t: Tensor) -> Tensor:
        return good(x, t) + torch.where(torch.as_tensor(t) < 1, math.nan, 0.0).to(x).reshape(-1, 1, 1, 1)

    found = vk.audit([broken, law.score(PROCESS)], law.sample(60, 1), PROCESS, sizes=TINY)
    first, second = found.findings
    assert "NaN or infinite" in first.failure
    assert not first.samples
    words = {v.question: v for v in found.verdicts if v.network == first.name}
    assert (words["training"].level, words["training"].answer) == ("unknown", "cannot be audited")
    assert not second.failure
    assert set(second.samples) == {"ode", "ancestral"}  # the other one is audited as if it were alone
    assert "cannot be audited" in page(found)


@pytest.mark.usefixtures("coarse")
def test_samples_that_diverge_are_no_verdict() -> None:
    """Sound on noisy data, it runs away far from them, where samplers begin."""
    law = marks()
    good = law.score(PROCESS)

    def runaway(x: Tensor, t: Tensor) -> Tensor:
        late = (torch.as_tensor(t, dtype=torch.float64) > 98.5).reshape(-1, 1, 1, 1)
        return torch.where(late, torch.full_like(x, math.inf), good(x, t))

    found = vk.audit(runaway, law.sample(60, 1), PROCESS, law.sample(60, 2), sizes=TINY)
    verdict = told(found)
    assert (verdict["copies"].level, verdict["copies"].answer) == ("unknown", "cannot be told")
    assert verdict["drift"].level == "alarm"
    assert verdict["likeness"].level == "unknown"
    words = " ".join(w for v in found.verdicts for w in (v.answer, v.words))
    assert not re.search(r"\b(nan|inf)\b", words), words
    json.dumps(found.to_dict(), allow_nan=False)
    page(found)


def test_copies_of_repeated_images_call_for_deduplication() -> None:
    points = digits()[:30]
    twice = torch.cat([points, points[:10]])
    sizes = dataclasses.replace(SMALL, queries=32)
    found = vk.audit(vk.EmpiricalScore(vk.Empirical(twice), PROCESS), twice, test=digits()[100:200], sizes=sizes)
    assert "copies" in alarms(found)
    advice = next(a for a in found.advice if "uplicate" in a.change)
    assert "20 of 40 training images have exact" in advice.evidence
    assert any("cutoff" in a.change for a in found.advice)


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


def test_stored_integers_and_half_precision() -> None:
    law = marks()
    floats = law.sample(120, 1)
    stored = ((floats.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
    net = checkpoint(law.score(PROCESS), (1, 4, 4), "exact", prediction="score", time=lambda t: t)
    found = vk.audit(net, stored[:60], test=stored[60:], sizes=TINY)
    assert told(found)["conventions"].level == "good"
    assert found.to_dict()["data"]["stored"] == "uint8"
    assert found.to_dict()["networks"][0]["range"] == [-1.0, 1.0]

    half = Denoiser(16, 48, "blend")
    train(half, floats, 400, 4e-3)
    whole = vk.audit(checkpoint(half, (1, 4, 4), "net"), floats, sizes=TINY)
    half = half.half()
    found = vk.audit(checkpoint(half, (1, 4, 4), "net"), floats, sizes=TINY)
    assert told(found)["conventions"].level == told(whole)["conventions"].level == "good"
    skills = [a.findings[0].skill.skill.value for a in (found, whole)]
    assert skills[0] == pytest.approx(skills[1], abs=0.02)


@pytest.mark.usefixtures("coarse")
def test_one_dimension() -> None:
    law = vk.GaussianMixture(torch.tensor([-1.0, 1.0]), variance=0.05)
    found = vk.audit(law.score(PROCESS), law.sample(100, 1), PROCESS, law.sample(100, 2), sizes=TINY)
    assert "copies" in told(found)
    assert not re.search(r"\b(nan|inf)\b", found.summary())
    json.dumps(found.to_dict(), allow_nan=False)
    page(found)


def test_the_seed_is_the_audit() -> None:
    law = marks()

    def numbers(seed: int) -> dict[str, Any]:
        given = (law.score(PROCESS), law.sample(60, 1), PROCESS, law.sample(60, 2))
        held = vk.audit(*given, sizes=TINY, seed=seed).to_dict()
        return {key: value for key, value in held.items() if key not in ("seconds", "seed")}

    one = numbers(0)
    assert numbers(0) == one
    assert numbers(1) != one


def test_drifted_images_are_shown_with_the_light_of_others() -> None:
    images, like = torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(0)), digits()[:5]
    lit = _relit(7 * images - 20, like)
    assert torch.allclose(lit.flatten(1).mean(1), like.mean().expand(3), atol=1e-5)
    assert torch.allclose(lit.flatten(1).std(1, correction=0), like.std(correction=0).expand(3), atol=1e-5)
    assert torch.allclose(lit, _relit(images, like), atol=1e-4)  # what was there before the drift
    assert torch.allclose(_relit(torch.full((1, 1, 8, 8), 9.0), like), like.mean().expand(1, 1, 8, 8), atol=1e-5)
