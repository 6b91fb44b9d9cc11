"""Every sentence of the page is true at random settings of all controls: its numbers are computed again, from formulas.

Posterior weights, C and the score are those of a few points, written out with numpy; shares of copies are counted from
samples; the statements in words are tested against these numbers."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
import torch

from vkernel.core.errors import InputError
from vkernel.explore import captions, compute, maps, probe
from vkernel.explore.answers import map as answer_map
from vkernel.explore.compute import Result
from vkernel.explore.state import CHOICES, CONTROLS, LAYERS, State

NUMBER = r"(-?\d[\d.]*(?:e[+-]?\d+)?)"
TRAINED = ("effective", "linear", "average", "ntk", "mlp")
THEORIES = ("gaussian", "smoothed", "nearest", "switch")
MOST = {
    "linear": 16,
    "average": 12,
    "effective": 10,
    "ntk": 6,
    "mlp": 4,
}  # runs of each kind of model; others are quick


def random_states(count: int) -> list[State]:
    rng, found = np.random.default_rng(7), []
    left = dict(MOST)
    while len(found) < count:
        n, d = int(rng.choice([1, 2, 3, 4, 6, 9])), int(rng.integers(1, 3))
        points = np.round(rng.uniform(-1.6, 1.6, (n, d)), 3)
        if n > 2 and rng.random() < 0.15:
            points[1] = points[0]
        given: dict[str, Any] = {
            name: c["options"][rng.integers(len(c["options"]))][0] for name, c in CONTROLS.items() if name != "steps"
        }
        if left.get(given["sampler"], 1) <= 0:
            continue
        left[given["sampler"]] = left.get(given["sampler"], 1000) - 1
        process = State(process=given["process"], eps=given["eps"]).make_process()
        t = float(np.exp(rng.uniform(math.log(process.eps), math.log(process.T))))
        given |= {
            "t": t,
            "steps": int(rng.choice([5, 6, 9], p=[0.8, 0.1, 0.1])),
            "map": str(rng.choice(CHOICES["map"])),
        }
        layers = tuple(name for name in LAYERS if rng.random() < 0.5)
        weights = tuple(rng.integers(1, 5, n).tolist()) if rng.random() < 0.4 else ()
        found.append(State(points=tuple(map(tuple, points.tolist())), weights=weights, layers=layers, **given))
    return found


class Target:
    """The targets of a state at places ``x (N, d)``, by the formulas: weights ``r (N, n)``, noise, signal ``(N,)``."""

    def __init__(self, state: State, x: np.ndarray) -> None:
        self.alpha, var = level(state)
        y = np.array(state.points)
        logit = np.log(state.weights) - ((x[:, None] - self.alpha * y) ** 2).sum(-1) / (2 * var)
        self.r = np.exp(logit - logit.max(1, keepdims=True))
        self.r /= self.r.sum(1, keepdims=True)
        mean = self.r @ y
        self.noise = self.alpha**2 / var * (self.r * ((y - mean[:, None]) ** 2).sum(-1)).sum(1)  # sigma² tr C
        self.signal = ((self.alpha * mean - x) ** 2).sum(1) / var  # sigma² |s|²


def level(state: State) -> tuple[float, float]:
    """Return alpha and sigma² at the state's t."""
    process, t = state.make_process(), torch.tensor(state.t, dtype=torch.float64)
    return float(process.alpha(t)), float(process.S(t))


def numbers(pattern: str, text: str) -> tuple[float, ...]:
    found = re.search(pattern, text)
    assert found is not None, (pattern, text)
    return tuple(float(g.rstrip(".")) for g in found.groups())


def check_percent(text: str, value: float, se: float = 0.0) -> None:
    """Check the share in "12 ± 2 %", "less than 0.2 %", "more than 99.8 %" or "36 %"."""
    if bound := re.match(r"less than ([\d.]+) %", text):
        assert 100 * value <= float(bound[1]) + 1e-9
    elif bound := re.match(r"more than ([\d.]+) %", text):
        assert 100 * value >= float(bound[1]) - 1e-9
    else:
        parts = re.match(r"([\d.]+)(?: ± ([\d.]+))? %", text)
        assert parts is not None, text
        decimals = len(parts[1].partition(".")[2])
        assert float(parts[1]) == pytest.approx(100 * value, abs=0.5001 * 10**-decimals)
        if parts[2]:
            assert float(parts[2]) == pytest.approx(100 * se, abs=0.5001 * 10**-decimals)


def check_map(state: State, result: Result | None) -> None:
    header, arrays = answer_map(state, result, {})
    told = header["panel"]["sentences"]
    assert all(sentence.endswith(".") for sentence in told)
    text, distinct = " ".join(told), len(set(state.points))
    spoken = state.sampler in TRAINED or state.map in ("noise", "share")  # of a target that is used or shown
    if distinct == 1:
        assert "C = 0" in told[0]
    elif not spoken:
        assert "is noise" not in text
    else:
        # rho by a mean over noised points, as its definition says
        rng = np.random.default_rng(0)
        (alpha, var), w = level(state), np.array(state.weights) / sum(state.weights)
        x = alpha * np.array(state.points)[rng.choice(len(w), 4000, p=w)] + var**0.5 * rng.normal(size=(4000, state.d))
        at = Target(state, x)
        rho, spread = (
            at.noise.mean() / (at.noise + at.signal).mean(),
            at.noise.std() / 63 / (at.noise + at.signal).mean(),
        )
        share = re.search(r"t = ([\d.e+-]+), (.*?) of the mean square of single targets is noise", told[0])
        assert share is not None
        assert float(share[1]) == pytest.approx(state.t, rel=0.006)
        assert header["noise"]["value"] == pytest.approx(rho, abs=4 * math.hypot(spread, header["noise"]["se"]) + 0.01)
        check_percent(share[2], header["noise"]["value"], header["noise"]["se"])
        trained = state.sampler in TRAINED
        assert ("exact targets (J0), which have none" in text) == (state.K == 0 and trained)
        assert (f"means of {state.K} such targets" in text) == (state.K > 1 and trained)
    if state.map == "noise" and distinct > 1:
        most, low = numbers(rf"reaches {NUMBER} near.*it is (?:at most|less than) {NUMBER}\.$", told[1])
        place = re.search(r"near \(?(?:x = )?(-?[\d.]+)(?:, (-?[\d.]+)\))?;", told[1])
        assert place is not None
        where = np.array([float(v) for v in place.groups() if v is not None])
        half = 2 / 31 if state.d == 2 else 0.005  # of a cell; the place is that of its centre
        near = Target(state, where + np.random.default_rng(1).uniform(-half, half, (20_000, state.d)))
        assert most == pytest.approx(float(arrays["values"].max()), rel=0.006, abs=1e-28)
        thin = level(state)[1] < 0.005 * half  # a boundary that random places miss
        assert thin or near.noise.max() > 0.7 * most - 1e-9
        assert near.noise.max() < 1.5 * most + 1e-9  # nor is there more nearby
        want = Target(state, level(state)[0] * np.array(state.points)).noise.max()
        assert low == pytest.approx(want, rel=0.006, abs=1e-9)
    else:
        assert "reaches" not in text
    assert ("does not say how large" in text) == (state.map in ("share", "variance_share"))
    models = result is not None and result.learned is not None
    assert ("no map of V" in text) == (state.map.startswith("variance") and not models and state.sampler not in TRAINED)


def check_probe(state: State, rng: np.random.Generator) -> None:
    x = rng.uniform(-1.5, 1.5, state.d)
    found, want = probe.evaluate(state, x.tolist()), Target(state, x[None])
    text = captions.probed(found, state)
    if len(set(state.points)) == 1:
        assert "C = 0" in text[0]
        return
    named = re.findall(r"([\d.e+-]+) % from point (\d+)", text[0])
    assert named
    for share, which in named:
        assert float(share) == pytest.approx(100 * want.r[0, int(which) - 1], rel=0.006)
    more = re.search(r"and (\d+) more", text[0])
    assert (int(more[1]) if more else 0) == max(0, min(int((want.r > 1e-3).sum()), probe.TARGETS) - 3)
    (noise,) = numbers(rf"σ² tr C = {NUMBER}\.$", text[1])
    assert noise == pytest.approx(want.noise[0], rel=0.006, abs=1e-9)
    spots: dict[tuple[float, ...], float] = {}
    for point, weight in zip(state.points, want.r[0], strict=True):
        spots[point] = spots.get(point, 0.0) + float(weight)
    assert ("to one place" in text[1]) == (max(spots.values()) > 0.95)
    assert found.signal == pytest.approx(want.signal[0], rel=1e-6)


def check_run(state: State, found: Result) -> None:
    told, line = captions.sentences(state, None, found), captions.headline(found)
    assert all(sentence.endswith(".") for sentence in told)
    text, sampler = " ".join(told), state.sampler
    if len(set(state.points)) == 1:
        assert found.gap is None
        assert line == "one training point"
        assert "one training point" in text
        return
    gap, twin = found.gap, found.twin
    assert gap is not None
    copied, new = line.split(" · ")
    check_percent(copied, 1 - gap.value, gap.se)
    check_percent(new, gap.value, gap.se)
    if found.member_gaps is None and len(found.frames[0]) >= compute.PARTICLES:
        # the particles are the first samples: their share of copies, counted here, agrees with that of all
        y, end = np.unique(np.array(state.points), axis=0), found.frames[-1].astype(float)
        near = np.sort(np.sqrt(((end[:, None] - y) ** 2).sum(-1)), 1)
        share = (near[:, 0] > near[:, 1] / 3).mean()
        assert share == pytest.approx(gap.value, abs=0.16)
    noiseless = sampler in TRAINED and state.K == 0
    assert ("have no noise (J0)" in text) == noiseless
    assert (
        ("against" in told[0])
        == (twin is not None)
        == ((sampler in TRAINED and state.K > 0) or (sampler == "naive" and state.kappa > 0))
    )
    if twin is not None:
        parts = re.match(r"(.*?) are new, against (.*? %) .*: (.*)\.$", told[0])
        assert parts is not None
        check_percent(parts[1], gap.value, gap.se)
        check_percent(parts[2], twin.value, twin.se)
        times = re.match(r"([\d.e+]+) × as many", parts[3])
        apart = gap.low > twin.high or twin.low > gap.high
        if times:
            assert float(times[1]) == pytest.approx(gap.value / twin.value, rel=0.06)
            assert abs(gap.value - twin.value) > 1.9 * min(gap.se, twin.se)
        elif parts[3] == "no clear difference":
            assert not apart
        else:
            assert parts[3] == ("far more" if gap.value > twin.value else "far fewer")
            assert not 0.1 <= gap.value / max(twin.value, 1e-12) < 100
    if found.member_gaps is not None:
        median, best, worst = numbers(rf"median model {NUMBER} % .* over models it is {NUMBER} to {NUMBER} %", text)
        many, all_ = numbers(rf"{NUMBER} of {NUMBER} models have more than 10 %", text)
        assert (many, all_) == (sum(g > 0.1 for g in found.member_gaps), len(found.member_gaps))
        ordered, M = np.sort(found.member_gaps), len(found.member_gaps)
        assert median == pytest.approx(50 * (ordered[(M - 1) // 2] + ordered[M // 2]), abs=0.051)
        assert best == pytest.approx(100 * min(found.member_gaps), abs=0.51)
        assert worst == pytest.approx(100 * max(found.member_gaps), abs=0.51)
        assert found.member_gaps.mean() == pytest.approx(gap.value, abs=1e-6)
    assert found.exact_gap is not None
    assert ("The exact score itself" in text) == (found.exact_gap.value > 0.1 and sampler != "exact")
    if sampler in ("linear", "average"):
        assert int(numbers(r"(\d+) linear models", text)[0]) == compute.members(state)
        features = compute.PER_AXIS[state.d] ** (state.d + 1)
        draws, ratio = numbers(rf"{NUMBER} draws per model \(F/P = {NUMBER}\)", text)
        assert features / draws == pytest.approx(ratio, rel=0.05)
        assert f"{state.features.title()} features" in text
    if sampler == "nearest":
        assert numbers(r"of the (\d+) nearest", text)[0] == min(state.k, len(state.points))
    if sampler in THEORIES:
        assert "without training" in told[0]
    if sampler == "effective":
        ratio = float(captions.CLAIMS["effective_sde"]["number"].split()[0])
        assert numbers(r"Scorecard, on \{-1, 0, 1\}: ([\d.]+)", text)[0] == ratio > 1


def test_sentences_are_true_at_200_random_settings(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maps, "CELLS", ((1000, 31),))
    monkeypatch.setattr(maps, "FIELD", dict.fromkeys(("noise", "share"), (4, 9)))
    monkeypatch.setattr(maps, "COARSE_FIELD", (4, 9))
    rng, seen = np.random.default_rng(3), set()
    for state in random_states(200):
        try:
            found = compute.simulate(state)
        except InputError:  # every model diverged
            continue
        seen.add(state.sampler)
        check_map(state, found)
        check_probe(state, rng)
        check_run(state, found)
    assert seen == set(CHOICES["sampler"])


@pytest.mark.parametrize("sampler", TRAINED)
def test_exact_targets_are_never_called_noisy(sampler: str) -> None:
    """J0: the panel at t speaks of a single noisy target, and says that these models do not train on it."""
    state = State(sampler=sampler, K=0)
    told = captions.sentences(state, compute.noise_share(state))
    assert "36 % of the mean square of single targets is noise" in told[0]
    assert "train on exact targets (J0), which have none" in told[0]
