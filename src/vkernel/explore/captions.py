"""The texts of the page: captions of controls and layers, the tour, the panel of results, the script, the report.

Texts that do not depend on results are in ``assets/content.toml``. In the panel every number has its error, as
estimated by the library.
"""

from __future__ import annotations

import math
import tomllib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment

from vkernel.core.errors import require
from vkernel.core.estimate import Estimate
from vkernel.data import toy
from vkernel.explore import compute
from vkernel.explore.compute import Result, run_inputs
from vkernel.explore.state import LIMIT, MAX_POINTS, PROCESS_OPTIONS, Point, State, clamp
from vkernel.process import PROCESSES
from vkernel.version import __version__

ASSETS = Path(__file__).parent / "assets"
GAP = "gap mass: samples that copy no training point"
CLOSE = 0.1  # gap mass of the exact score above which training points are too close for the cutoff
_CONTENT = tomllib.loads((ASSETS / "content.toml").read_text(encoding="utf8"))


@dataclass(frozen=True)
class Caption:
    """A control or a layer of the page: its name, caption, symbol and one sentence of help.

    ``samplers`` names the samplers that it applies to, () for all. A control has ``options``, pairs (value, caption),
    and a ``kind``: "choice" (a list), "steps" (a slider) or "pair" (two buttons).
    """

    name: str
    caption: str
    symbol: str
    help: str
    samplers: tuple[str, ...] = ()
    kind: str = ""
    options: tuple[tuple[str | float, str], ...] = ()


class Panel(NamedTuple):
    """The panel of results: a number, its caption, and sentences below it."""

    number: str
    caption: str
    sentences: list[str]


PRESETS: dict[str, dict[str, str]] = _CONTENT["presets"]  # captions of the sets by name, in groups
CONTROLS = {title: [Caption(**control) for control in group] for title, group in _CONTENT["controls"].items()}
LAYERS = [Caption(**layer) for layer in _CONTENT["layers"]]
TOUR = [(stop["title"], stop["text"], State(**stop["state"])) for stop in _CONTENT["tour"]]  # titles, texts, states


_POINTS = {  # of the sets; those without points in the file are toy sets of the paper
    name: clamp(_CONTENT["points"].get(name) or toy(name).rows(0, MAX_POINTS).tolist())
    for name in (name for group in PRESETS.values() for name in group)
}


def preset(name: str) -> tuple[Point, ...]:
    """Return the points of a named set."""
    require(name in _POINTS, f"There is no set {name!r}; there are {', '.join(_POINTS)}.")
    return _POINTS[name]


def preset_name(points: tuple[Point, ...]) -> str:
    """Return the name of the set that has these points, or ""."""
    return next((name for name, own in _POINTS.items() if own == points), "")


def layers_for(sampler: str, layers: tuple[str, ...]) -> tuple[str, ...]:
    """Keep the layers that a sampler has; the layer "law" of a trained model adds its single members."""
    available = {layer.name for layer in LAYERS if not layer.samplers or sampler in layer.samplers}
    wanted = {*layers, "members"} if "law" in layers else {*layers}
    instead = {"noise"} if "variance" in wanted - available else set()  # one of the two maps stays
    return tuple(wanted & available | instead)


def short(e: Estimate) -> str:
    """Format an estimate in a few characters, ``.18 ± .01``; a share of zero is given by its upper bound."""
    if e.value <= 0 and e.high > 0:
        return f"less than {_decimal(e.high, e.high)}"
    if not math.isfinite(e.se) or e.se <= 0:
        return _decimal(e.value, 0.01)
    return f"{_decimal(e.value, e.se)} ± {_decimal(e.se, e.se)}"


def _decimal(value: float, size: float) -> str:
    """Format a number with as many decimals as show one digit of ``size``."""
    text = f"{value:.{min(max(-math.floor(math.log10(size)), 1), 5)}f}"
    return text.replace("0.", ".", 1) if abs(value) < 1 and float(text) != 0 else text


def _percent(e: Estimate) -> str:
    value, se = 100 * e.value, 100 * e.se
    if e.high < 0.001:
        return "less than 0.1 %"
    if se < 0.05:
        return f"{value:.{1 if se > 0 else 0}f} %"
    places = 1 if se < 0.95 else 0
    return f"{value:.{places}f} ± {se:.{places}f} %"


def panel(state: State, noise: Estimate, result: Result | None) -> Panel:
    """Describe the picture of a state; ``result`` is the last run, ``None`` before the first."""
    now = f"At t = {state.t:.3g}, {_percent(noise)} of the training target is noise (ρ)."
    if result is None:
        return Panel("…", GAP, [now])
    if result.gap is None:
        alone = "One training point: there is no gap, the target has no noise, and every sampler ends at the point."
        return Panel("–", "gap mass: needs two points", [alone, now])
    sentences = [gap_sentence(result)]
    bare, sampler = result.exact_gap, result.state.sampler
    if sampler not in ("exact", "naive") and bare is not None and bare.value > CLOSE:
        sentences.append(f"Of this the exact score itself has {short(bare)}: points are close for this ε.")
    sentences += [text for text in (_sampler_sentence(result.state), now, result.note) if text]
    return Panel(short(result.gap), GAP, sentences)


def gap_sentence(result: Result) -> str:
    """Compare the gap mass of a run with that of its twin."""
    gap, twin, sampler = result.gap, result.twin, result.state.sampler
    assert gap is not None
    share = f"{_percent(gap.complement())} of the samples are copies"
    if sampler == "exact" and gap.value > CLOSE:
        return f"{share}. The exact score only adds the cutoff's noise: a smaller ε separates points this close."
    if sampler == "exact":
        return f"{share}: the exact score memorises. The rest is the cutoff's noise and the discretisation error."
    if twin is None:
        return f"{share}. These targets have no noise: the gap mass comes from features and inputs alone."
    name = "that of the exact score" if sampler == "naive" else "the noiseless-target value"
    return f"{share}; gap mass is {_ratio(gap, twin)} {name}, {short(twin)}."


def _ratio(gap: Estimate, twin: Estimate) -> str:
    """The ratio of two gap masses, as precisely as their errors allow."""
    apart = math.hypot(gap.se, twin.se)
    if gap.low <= twin.high and twin.low <= gap.high and abs(gap.value - twin.value) < 2 * max(apart, 1e-12):
        return "within errors of"
    if twin.value <= 0:
        return "more than"
    ratio = gap.value / twin.value
    return f"{ratio:.2f} ×" if 0.8 < ratio < 1.25 else f"{ratio:.2g} ×" if ratio >= 0.1 else "far less than"


def _sampler_sentence(state: State) -> str:
    P, M, kind = compute.draws(state), compute.members(state), state.features.title()
    goal = {0: "noiseless targets (J0)", 1: "noisy targets (J1)"}.get(state.K, f"targets averaged over {state.K} draws")
    return {
        "exact": "",
        "naive": f"Every step follows one training point drawn at random, with strength κ = {state.kappa:g}.",
        "effective": f"Theory: one Gaussian field of covariance V per sample; {kind} features, P = {P}, {goal}.",
        "linear": f"{M} linear models, {kind} features, P = {P} draws each, {goal}.",
        "ntk": f"{M} infinitely wide networks, training time τ = {state.tau:g}, P = {P}, {goal}.",
        "mlp": f"{M} small networks, fresh draws at every step, {goal}.",
    }[state.sampler]


def outdated(state: State, result: Result | None, shown: tuple[Result, float] | None) -> tuple[bool, bool, str]:
    """Return whether the samples and the map of V belong to another state than the one shown, and a label for them.

    ``shown`` is the run and the time of the map of V, ``None`` without a map.
    """
    samples = result is not None and result.state.d == state.d and run_inputs(result.state) != run_inputs(state)
    share = shown is not None and (samples or shown != (result, state.t))
    if "variance" in state.layers and shown is None:
        return samples, False, "V follows once the run has ended"
    old = {
        "V": share,
        "particles": samples and "particles" in state.layers,
        "curves": samples and state.d == 1 and not {"law", "members", "exact"}.isdisjoint(state.layers),
    }
    names = ", ".join(name for name, is_old in old.items() if is_old)
    return samples, share, f"of an earlier state: {names}" if names else ""


def snippet(state: State) -> str:
    """Return a script that computes the page's numbers through the public API of the library.

    It defines ``fraction``, ``noise``, ``x`` and, if there are two distinct points, ``gap``.
    """
    environment = Environment(trim_blocks=True, keep_trailing_newline=True)
    template = environment.from_string((ASSETS / "script.py.jinja").read_text(encoding="utf8"))
    process, options = PROCESSES[state.process].__name__, PROCESS_OPTIONS.get(state.process, {})
    return template.render(state=state, compute=compute, limit=LIMIT, process=process, options=options)


def report(state: State, result: Result | None) -> dict[str, Any]:
    """Return state, address, numbers with errors, and script as JSON types; samples only if there is a ``result``."""
    found = {"vkernel": __version__, "state": state.to_dict(), "query": state.to_query(), "python": snippet(state)}
    found["noise_fraction"] = asdict(compute.noise_share(state))
    if result is None:
        return found
    gaps = {"gap_mass": result.gap, "twin_gap_mass": result.twin, "exact_gap_mass": result.exact_gap}
    laws = {"law": result.law.tolist(), "law_error": result.band.tolist(), "exact_law": result.exact.tolist()}
    estimates = {name: None if gap is None else asdict(gap) for name, gap in gaps.items()}
    return found | estimates | {"window": [-LIMIT, LIMIT]} | laws
