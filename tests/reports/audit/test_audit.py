"""``vk.audit`` from end to end: networks that memorise, know the law, learned little, or are blind."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from typing import Any

import pytest
import torch
from audited import (
    PROCESS,
    QUESTIONS_OF_ONE,
    SMALL,
    TINY,
    Denoiser,
    alarms,
    checkpoint,
    digits,
    marks,
    train,
    verdicts_of,
)
from scipy.stats import binom
from torch import Tensor

import vkernel as vk
from vkernel.core.errors import InputError
from vkernel.metrics import copies
from vkernel.reports.audit import Audit, membership
from vkernel.reports.audit.page import page


def test_a_network_that_memorised_is_caught(memoriser: Audit) -> None:
    verdict = verdicts_of(memoriser)
    assert list(verdict) == QUESTIONS_OF_ONE
    assert verdict["copies"].level == "alarm"
    assert verdict["copies"].answer.startswith("yes, ")
    assert memoriser.memorised is not None
    assert memoriser.memorised.value > 0.5
    assert memoriser.memorised.low > 0.5
    assert verdict["membership"].level == "alarm"
    assert memoriser.networks[0].membership.auc.low > 0.9
    assert re.search(
        r"At [1-4] of 4 noise levels the error on test images is significantly larger", verdict["membership"].words
    )
    assert bool((memoriser.networks[0].levels.gap_low > 0).any())
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
        held = memoriser.networks[0].samples[kind].comparison
        count = int((held.ratio < held.threshold).sum())
        assert count > 24
        assert f"{count} of 48 samples ({name}) count as copies." in memoriser_page


def test_the_share_that_fails_is_the_share_that_is_verdicts_of(memoriser: Audit, stages: dict[str, Audit]) -> None:
    for found in (memoriser, stages["late"]):
        shares = [s.comparison.fraction.value for s in found.networks[0].samples.values()]
        assert found.memorised.value == max(shares)
        assert f"{100 * max(shares):.2g} %" in verdicts_of(found)["copies"].answer


def test_the_score_of_the_training_set_copies_it() -> None:
    points = digits()
    score = vk.EmpiricalScore(vk.Empirical(points[:50]), PROCESS)
    found = vk.audit(score, points[:50], test=points[50:250], sizes=SMALL)
    assert found.memorised.value >= 0.95
    assert {"copies", "membership"} <= alarms(found)
    assert found.networks[0].name == "EmpiricalScore"
    assert (found.networks[0].levels.distance < 1e-6).all()  # it is the ideal
    alone = vk.audit(score, points[:50], sizes=SMALL)
    assert "copies" in alarms(alone)
    assert "membership" not in verdicts_of(alone)
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
    chances, copying, alone = [], 0, 0
    for seed in range(rounds):
        halves = law.sample(120, seed)
        one, other = (vk.Empirical(half) for half in halves.split(60))
        found = membership(score, one, other, times=[10.0, 30.0], images=60, draws=1, seed=seed)
        chances.append(found.chance)
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
    untrained, early, late = (verdicts_of(stages[name]) for name in ("untrained", "early", "late"))
    assert list(untrained) == ["conventions", "training"]
    answer = "it does not denoise these data"
    assert (untrained["conventions"].level, untrained["training"].answer) == ("unknown", answer)
    assert untrained["training"].level == "alarm"
    assert early["training"].level in ("alarm", "unknown")
    assert "under-trained" in early["training"].answer
    assert late["training"].level == "good"
    assert late["training"].answer.startswith("yes, skill")
    for found in stages.values():  # that more training helps is never measured
        assert not any(a.change.startswith("Train longer") and a.sure == "measured" for a in found.advice)
    assert not any(a.change.startswith("Train longer") for a in stages["late"].advice)
    assert stages["untrained"].memorised is None
    assert "these cannot be told apart" in stages["untrained"].summary()
    for name in ("early", "late"):
        assert not alarms(stages[name]) & {"copies", "membership", "blindness", "conventions"}


def test_a_network_that_normalises_its_image_is_blind() -> None:
    law = marks()
    train_set, net = law.sample(400, 1), Denoiser(16, 96, "noise", blind=True)
    train(net, train_set, 800, 4e-3)
    found = vk.audit(checkpoint(net, (1, 4, 4), "normed"), train_set, test=law.sample(400, 2), sizes=SMALL)
    verdict = verdicts_of(found)
    assert verdict["blindness"].level == "alarm"
    assert verdict["blindness"].answer == "yes, brightness and contrast"
    assert "ignores brightness" in verdict["blindness"].words
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
    assert [n.name for n in found.networks] == ["MixtureScore", "louder"]
    assert found.agreement is not None
    assert {"agreement", "variance"} <= set(verdicts_of(found))
    assert found.agreement.same.ratio.value < 0.5
    twins = vk.audit([exact, exact], law.sample(200, 1), PROCESS, sizes=TINY)
    assert [n.name for n in twins.networks] == ["MixtureScore (1)", "MixtureScore (2)"]
    assert twins.agreement.same.ratio.value == pytest.approx(0, abs=1e-6)
    assert verdicts_of(twins)["agreement"].answer.startswith("same-noise distance 0.00")


def test_an_ensemble_is_audited_member_by_member() -> None:
    process, data = vk.VP(), vk.Empirical(vk.GaussianMixture([[-1.0, 0], [1, 0]], variance=0.05).sample(64, 1))
    model = vk.models.MLP(32, 2, lr=1e-2, steps=500)
    ensemble = vk.train_ensemble(model, data, process, members=4, progress=False)
    sizes = dataclasses.replace(TINY, check=64)
    found = vk.audit(ensemble, data, sizes=sizes, groups=["a", "a", "b", "b"])
    names = [n.name for n in found.networks]
    assert names == [f"member {m}" for m in range(4)]
    assert found.agreement is not None, found.summary()
    assert {"agreement", "variance"} <= {v.question for v in found.verdicts if not v.network}
    assert "2 groups" in verdicts_of(found)["agreement"].words
    held = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert held["agreement"]["same_noise"]["ratio"]["value"] > 0
    assert [n["name"] for n in held["networks"]] == names


@pytest.mark.usefixtures("coarse")
def test_names_with_commas_and_groups_that_share_nothing() -> None:
    law = marks()
    nets = [checkpoint(law.score(PROCESS), (1, 4, 4), name, predicts="score") for name in ("a, b", "b")]
    given = (nets, law.sample(100, 1))
    found = vk.audit(*given, sizes=TINY)
    assert [n.name for n in found.members] == ["a, b", "b"]
    assert "The same noise, other runs" in page(found)
    alone = vk.audit(*given, sizes=TINY, groups=[1, 2])
    assert alone.agreement is None
    assert alone.members == []
    assert "alone in its group" in alone.notes[0]
    assert "copies" in verdicts_of(alone)


def test_other_conventions_are_audited_side_by_side() -> None:
    law = marks()
    process = vk.VP()
    continuous = vk.as_score(law.score(process), process, predicts="score", time="fraction", name="continuous")
    nets = [law.score(PROCESS), continuous]
    found = vk.audit(nets, law.sample(200, 1), PROCESS, law.sample(200, 2), sizes=TINY)
    assert found.agreement is None
    assert all({"copies", "membership"} <= set(verdicts_of(found, n.name)) for n in found.networks)
    assert "agreement" not in verdicts_of(found)


@pytest.mark.usefixtures("coarse")
def test_one_that_is_misread_does_not_lose_the_other() -> None:
    law = marks()
    exact = law.score(PROCESS)
    good = checkpoint(exact, (1, 4, 4), "good", predicts="score", time=lambda t: t)
    lie = dataclasses.replace(good, name="lie", predicts="x0")
    found = vk.audit([good, lie], law.sample(200, 1), test=law.sample(200, 2), sizes=SMALL)
    assert verdicts_of(found, "lie")["conventions"].level == "alarm"
    assert "predicts score" in verdicts_of(found, "lie")["conventions"].words
    assert "copies" in verdicts_of(found, "good")
    assert found.advice[0].change == "State the convention that fits, and audit again."
    assert found.advice[0].networks == ("lie",)
    assert page(found).count("–</td>") == 7  # what could not be asked of it


# --- under attack ---------------------------------------------------------------------------------------------------


def exact(data: Tensor, variance: float = 0.02) -> Any:
    """The score of the data with grain: a network that denoises."""
    return vk.GaussianMixture(data.double(), variance=variance).score(PROCESS)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"test": torch.zeros(1, 1, 4, 4)}, "one test image"),
        ({"test": torch.zeros(5, 1, 5, 5)}, r"test data have shape \(1, 5, 5\)"),
        ({"data": torch.zeros(3, 1, 4, 4)}, "needs 16 training images"),
        ({"data": torch.zeros(30, 1, 4, 4)}, "are equal"),
        ({"data": torch.full((30, 1, 4, 4), math.nan)}, "training data cannot be used"),
        ({"data": torch.zeros(0, 1, 4, 4)}, "training data cannot be used"),
        ({"test": torch.full((30, 1, 4, 4), math.inf)}, "test data cannot be used"),
        ({"models": []}, "no network"),
        ({"models": 3}, "A int cannot be audited alone"),
        ({"models": lambda x, t: -x, "process": None}, "with process="),
        ({"groups": ["a"] * 2}, "1 networks and 2 groups|one network and 2 groups"),
        ({"features": "taste"}, "taste"),
        ({"threshold": 0.0}, "threshold"),
        ({"models": "nowhere/at/all"}, "never downloaded"),
        ({"models": lambda x, t: x.flatten(1)}, "must return"),
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
    assert "copies" in verdicts_of(found)
    assert found.summary()
    json.dumps(found.to_dict(), allow_nan=False)
    alone = vk.audit(exact(points, 0.01), twice, PROCESS, sizes=TINY)
    assert verdicts_of(alone)["copies"].level in ("alarm", "note", "good")


def test_a_network_that_breaks_at_little_noise() -> None:
    law = marks()
    good = law.score(PROCESS)

    def broken(x: Tensor, t: Tensor) -> Tensor:
        return good(x, t) + torch.where(torch.as_tensor(t) < 1, math.nan, 0.0).to(x).reshape(-1, 1, 1, 1)

    found = vk.audit([broken, law.score(PROCESS)], law.sample(60, 1), PROCESS, sizes=TINY)
    first, second = found.networks
    assert "NaN or infinite" in first.failure
    assert not first.samples
    words = {v.question: v for v in found.verdicts if v.network == first.name}
    assert (words["training"].level, words["training"].answer) == ("unknown", "cannot be audited")
    assert not second.failure
    assert set(second.samples) == {"ode", "ancestral"}  # the other one is audited as if it were alone
    assert "cannot be audited" in page(found)


def test_a_lone_network_that_breaks_is_evaluated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    law, calls = marks(), []

    def fail(*args: object, **kwargs: object) -> None:
        calls.append(args)
        raise InputError("It broke.")

    monkeypatch.setattr("vkernel.reports.audit.group.levels", fail)
    found = vk.audit(law.score(PROCESS), law.sample(60, 1), PROCESS, sizes=TINY)
    assert [n.failure for n in found.networks] == ["It broke."]
    assert len(calls) == 1


@pytest.mark.usefixtures("coarse")
def test_samples_that_diverge_are_no_verdict() -> None:
    """Sound on noisy data, it runs away far from them, where samplers begin."""
    law = marks()
    good = law.score(PROCESS)

    def runaway(x: Tensor, t: Tensor) -> Tensor:
        late = (torch.as_tensor(t, dtype=torch.float64) > 98.5).reshape(-1, 1, 1, 1)
        return torch.where(late, torch.full_like(x, math.inf), good(x, t))

    found = vk.audit(runaway, law.sample(60, 1), PROCESS, law.sample(60, 2), sizes=TINY)
    verdict = verdicts_of(found)
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


def test_stored_integers_and_half_precision() -> None:
    law = marks()
    floats = law.sample(120, 1)
    stored = ((floats.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
    net = checkpoint(law.score(PROCESS), (1, 4, 4), "exact", predicts="score", time=lambda t: t)
    found = vk.audit(net, stored[:60], test=stored[60:], sizes=TINY)
    assert verdicts_of(found)["conventions"].level == "good"
    assert found.to_dict()["data"]["stored"] == "uint8"
    assert found.to_dict()["networks"][0]["range"] == [-1.0, 1.0]

    half = Denoiser(16, 48, "blend")
    train(half, floats, 400, 4e-3)
    whole = vk.audit(checkpoint(half, (1, 4, 4), "net"), floats, sizes=TINY)
    half = half.half()
    found = vk.audit(checkpoint(half, (1, 4, 4), "net"), floats, sizes=TINY)
    assert [v.level for v in found.verdicts] == [v.level for v in whole.verdicts]
    assert all(a.networks[0].conventions.fits for a in (found, whole))
    skills = [a.networks[0].skill.skill.value for a in (found, whole)]
    assert skills[0] == pytest.approx(skills[1], abs=0.02)


@pytest.mark.usefixtures("coarse")
def test_one_dimension() -> None:
    law = vk.GaussianMixture(torch.tensor([-1.0, 1.0]), variance=0.05)
    found = vk.audit(law.score(PROCESS), law.sample(100, 1), PROCESS, law.sample(100, 2), sizes=TINY)
    assert "copies" in verdicts_of(found)
    assert not re.search(r"\b(nan|inf)\b", found.summary())
    json.dumps(found.to_dict(), allow_nan=False)
    page(found)


def test_the_seed_is_the_audit() -> None:
    law = marks()

    def numbers(seed: int) -> dict[str, Any]:
        given = (law.score(PROCESS), law.sample(60, 1), PROCESS, law.sample(60, 2))
        held = vk.audit(*given, sizes=TINY, seed=seed).to_dict()
        return {key: value for key, value in held.items() if key not in ("seconds", "seed", "date")}

    one = numbers(0)
    assert numbers(0) == one
    assert numbers(1) != one


@pytest.mark.usefixtures("coarse")
def test_copies_of_flipped_images_are_found_and_shown_with_their_sources() -> None:
    points = digits()[:40]
    score = vk.EmpiricalScore(vk.Empirical(torch.cat([points, points.flip(-1)])), PROCESS)
    plain, known = (
        vk.audit(score, points, test=digits()[100:200], sizes=TINY, augment=given) for given in (None, "flip")
    )
    assert plain.memorised.value < 0.8
    assert known.memorised.value > 0.9
    assert "augmentations: flip" in known.summary()
    assert "in all versions of flip" in verdicts_of(known)["copies"].words
    assert known.to_dict()["augment"] == "flip"
    assert "<h1>" in page(known)
    with pytest.raises(InputError, match="no augmentation 'mirror'"):
        vk.audit(score, points, sizes=TINY, augment="mirror")
