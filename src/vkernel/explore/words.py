"""The panel that says in words what is seen; every number has its error, from the estimates of the library."""

from __future__ import annotations

import math
from dataclasses import dataclass

from vkernel.core.estimate import Estimate
from vkernel.explore.simulate import Result, concerns, draws, members
from vkernel.explore.state import State

__all__ = ["Words", "earlier", "said", "short", "tells"]


CAPTION = "gap mass: samples that copy no training point"
CLOSE = 0.1  # gap mass of the exact score above which training points are too close for the cutoff


@dataclass(frozen=True)
class Words:
    """A number to look at first, what it is, and the sentences under it."""

    number: str
    caption: str
    sentences: tuple[str, ...]


def short(e: Estimate) -> str:
    """An estimate in a few characters: ``.18 ± .01``; a share of nothing is said by its upper bound."""
    if e.value <= 0 and e.high > 0:
        return f"less than {_plain(e.high, _places(e.high))}"
    if not math.isfinite(e.se) or e.se <= 0:
        return _plain(e.value, 2)
    places = _places(e.se)
    return f"{_plain(e.value, places)} ± {_plain(e.se, places)}"


def _places(size: float) -> int:
    """Decimals that show one digit of ``size``."""
    return min(max(-math.floor(math.log10(size)) if size > 0 else 2, 1), 5)


def _plain(value: float, places: int) -> str:
    text = f"{value:.{places}f}"
    return text.replace("0.", ".", 1) if abs(value) < 1 and float(text) != 0 else text


def _percent(e: Estimate) -> str:
    if e.high < 0.001:
        return "less than 0.1 %"
    if e.se <= 0:
        return f"{100 * e.value:.0f} %"
    if 100 * e.se < 0.05:
        return f"{100 * e.value:.1f} %"
    places = 1 if 100 * e.se < 0.95 else 0
    return f"{100 * e.value:.{places}f} ± {100 * e.se:.{places}f} %"


def said(state: State, noise: Estimate, result: Result | None) -> Words:
    """What the picture of a state shows; ``result`` is the last run, ``None`` before the first."""
    now = f"At t = {state.t:.3g}, {_percent(noise)} of the training target is noise (ρ)."
    if result is None:
        return Words("…", CAPTION, (now,))
    gap = result.gap
    if gap is None:
        lone = "One training point: there is no gap, the target has no noise, and every sampler ends at the point."
        return Words("–", "gap mass: needs two points", (lone, now))
    sentences = [tells(result), *_who(result.state), now]
    bare = result.exact_gap
    if result.state.sampler not in ("exact", "naive") and bare is not None and bare.value > CLOSE:
        sentences.insert(1, f"Of this the exact score itself has {short(bare)}: points are close for this ε.")
    if result.note:
        sentences.append(result.note)
    return Words(short(gap), CAPTION, tuple(sentences))


def tells(result: Result) -> str:
    """The gap mass in a sentence, against its twin."""
    gap, twin, state = result.gap, result.twin, result.state
    assert gap is not None
    share = f"{_percent(Estimate(1 - gap.value, gap.se, 1 - gap.high, 1 - gap.low))} of the samples are copies"
    if state.sampler == "exact" and gap.value > CLOSE:
        return f"{share}. The exact score only adds the cutoff's noise: a smaller ε tells points this close apart."
    if state.sampler == "exact":
        return f"{share}: the exact score memorises. What is left is the cutoff's noise and the steps' error."
    if twin is None:
        return f"{share}. These targets have no noise: the gap mass comes from features and inputs alone."
    name = "that of the exact score" if state.sampler == "naive" else "the noiseless-target value"
    return f"{share}; gap mass is {_against(gap, twin)} {name}, {short(twin)}."


def _against(gap: Estimate, twin: Estimate) -> str:
    """By how much two gap masses differ, in words that their errors allow."""
    apart = math.hypot(gap.se, twin.se)
    if gap.low <= twin.high and twin.low <= gap.high and abs(gap.value - twin.value) < 2 * max(apart, 1e-12):
        return "within errors of"
    if twin.value <= 0:
        return "more than"
    ratio = gap.value / twin.value
    close = 0.8 < ratio < 1.25
    return f"{ratio:.2f} ×" if close else f"{ratio:.2g} ×" if ratio >= 0.1 else "far less than"


def _who(state: State) -> tuple[str, ...]:
    """Who sampled."""
    P = None if state.sampler in ("exact", "naive") else draws(state)
    goal = {0: "noiseless targets (J0)", 1: "noisy targets (J1)"}.get(state.K, f"targets averaged over {state.K} draws")
    kind = state.features.title()
    if state.sampler == "naive":
        return (f"Every step follows one training point drawn anew, with strength κ = {state.kappa:g}.",)
    if state.sampler == "effective":
        return (f"Theory: one Gaussian field of covariance V for each sample; {kind} features, P = {P}, {goal}.",)
    if state.sampler == "linear":
        return (f"{members(state)} linear models, {kind} features, P = {P} draws each, {goal}.",)
    if state.sampler == "ntk":
        return (f"{members(state)} infinitely wide networks, training time τ = {state.tau:g}, P = {P}, {goal}.",)
    if state.sampler == "mlp":
        return (f"{members(state)} small networks, fresh draws at every step, {goal}.",)
    return ()


def earlier(state: State, result: Result | None, shown: tuple[Result, float] | None) -> tuple[bool, bool, str]:
    """Whether the samples and the map of V belong to another state than the one that is seen, and a word on it.

    ``shown`` is the run and the time of the map of V, ``None`` where there is none.
    """
    samples = result is not None and result.state.d == state.d and concerns(result.state) != concerns(state)
    share = shown is not None and (samples or shown != (result, state.t))
    named = {
        "V": share,
        "particles": samples and state.has("particles"),
        "curves": samples and state.d == 1 and any(state.has(name) for name in ("law", "members", "exact")),
    }
    old = ", ".join(name for name, true in named.items() if true)
    if state.has("variance") and shown is None:
        return samples, False, "V follows once the run has ended"
    return samples, share, f"of an earlier state: {old}" if old else ""
