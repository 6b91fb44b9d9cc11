"""The texts of the page: the panel of results, the tour, the six factors, the claims, the script, the report.

They stand in ``assets``: fixed ones in ``content.toml``, the panel and the script as templates, claims as the scorecard
has them. Numbers carry their errors as estimated by the library; those of the tour and of the factors come from the
results that the package ships."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from functools import lru_cache
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader

import vkernel as vk
from vkernel.explore import compute, maps, shipped
from vkernel.explore.compute import Result
from vkernel.explore.state import ASSETS, CONTENT, LIMIT, MAX_POINTS, PROCESS_OPTIONS, State, clamp

POINTS = {  # of the named sets; those without points in the file are toy sets of the paper
    name: clamp(CONTENT["points"].get(name) or vk.data.toy(name).rows(0, MAX_POINTS).tolist())
    for group in CONTENT["presets"].values()
    for name in group
}
CLAIMS: dict[str, dict[str, str]] = json.loads((ASSETS / "claims.json").read_text(encoding="utf8"))


def percent(e: vk.Estimate) -> str:
    """Format a share in a few characters, ``18 ± 1 %``; one of zero or of all by the bound of its interval."""
    if e.high < 0.001 or (e.value <= 0 < e.high):
        return f"less than {math.ceil(1000 * max(e.high, 1e-4)) / 10:g} %"
    if e.low > 0.999 or (e.low < 1 <= e.value):
        return f"more than {math.floor(1000 * min(e.low, 0.9999)) / 10:g} %"
    if not math.isfinite(e.se) or e.se <= 0:
        return f"{100 * e.value:.{1 if e.value < 0.1 else 0}f} %"
    places = 0 if 100 * e.se >= 0.95 else 1 if 100 * e.se >= 0.05 else 2
    return f"{100 * e.value:.{places}f} ± {100 * e.se:.{places}f} %"


def clear(a: vk.Estimate, b: vk.Estimate) -> bool:
    """Return whether a and b differ by more than the error of their difference at 95 %, the root of the sum of squares
    of the arms of their intervals on the sides that face each other."""
    arms = (a.value - a.low, b.high - b.value) if a.value > b.value else (a.high - a.value, b.value - b.low)
    return abs(a.value - b.value) > math.hypot(*arms)


def compared(a: vk.Estimate, b: vk.Estimate) -> str:
    """Describe a share ``a`` relative to ``b``, as precisely as their errors allow."""
    if not clear(a, b):
        return "no clear difference"
    ratio = a.value / b.value if b.value > 0 else math.inf
    if 0.8 < ratio < 1.25:
        return f"{ratio:.2f} × as many"
    return f"{ratio:.2g} × as many" if 0.1 <= ratio < 100 else "far fewer" if ratio < 0.1 else "far more"


_TEMPLATES = Environment(loader=FileSystemLoader(ASSETS), trim_blocks=True, keep_trailing_newline=True)
_TEMPLATES.filters["percent"] = percent
_TEMPLATES.globals.update(
    compute=compute, maps=maps, compared=compared, claims=CLAIMS, median=np.median, square=POINTS["square"]
)


def headline(result: Result) -> str:
    """Return the outcome in one line."""
    if result.gap is None:
        return "one training point"
    return f"{percent(result.gap.complement())} copied · {percent(result.gap)} new"


def sentences(state: State, noise: vk.Estimate | None = None, result: Result | None = None, **rest: Any) -> list[str]:
    """Describe a run, or without one the map at the state's t, whose largest value ``most`` is at ``place``."""
    given = {"most": None, "place": None, "at_points": None, "learned": False} | rest
    text = _TEMPLATES.get_template("panel.jinja").render(state=state, noise=noise, run=result, **given)
    return [line for line in text.splitlines() if line.strip()]


def probed(found: Any, state: State) -> list[str]:
    """Describe the targets at a place."""
    if len(set(state.points)) == 1:
        return ["All targets here are the same: C = 0."]
    parts = [f"{100 * w:.3g} % from point {i + 1}" for w, i in zip(found.weights, found.which, strict=True)]
    rest = f" and {len(parts) - 3} more" if len(parts) > 3 else ""
    places: dict[tuple[float, ...], float] = {}  # of points that coincide, targets do too
    for weight, i in zip(found.weights, found.which, strict=True):
        places[state.points[i]] = places.get(state.points[i], 0.0) + float(weight)
    alike = (
        "nearly all point to one place" if max(places.values()) > 0.95 else "they point to different training points"
    )
    return [
        f"Noised points that arrive here came {', '.join(parts[:3])}{rest}.",
        f"Single targets: {alike}. The noise of the target, their spread, is σ² tr C = {found.noise:.3g}.",
    ]


def names(state: State, result: Result) -> dict[str, str]:
    """Return short captions of the laws of a run."""
    count, goal = compute.members(state), {0: "J0", 1: "J1"}.get(state.K, f"K = {state.K}")
    own = {
        "exact": "exact score",
        "naive": "naive estimator",
        "effective": f"effective SDE, {goal}",
        "average": f"average model, {goal}",
        "linear": f"{count} models, {goal}",
        "ntk": f"{count} wide networks, {goal}",
        "mlp": f"{count} networks, {goal}",
        "gaussian": "Gaussian theory",
        "smoothed": f"smoothed, h = {state.h:g}",
        "nearest": f"{compute.neighbours(state)} nearest",
        "switch": "Gaussian, then exact",
    }[state.sampler]
    twin = "κ = 0" if state.sampler == "naive" else own.replace(goal, "J0: exact targets")
    return {"law": own, "exact": "exact score"} | ({"twin": twin} if result.twin_law is not None else {})


def bars(state: State, result: Result) -> list[dict[str, Any]]:
    """Return the shares of copied and of new samples, of the run and of what it is compared with."""
    found: list[dict[str, Any]] = []
    named = names(state, result)
    rows = [(named["law"], result.gap), (named.get("twin", ""), result.twin), ("exact score", result.exact_gap)]
    for name, gap in rows:
        if gap is not None and not any(bar["name"] == name for bar in found):
            found.append({"name": name, "copied": 1 - gap.value, "new": gap.value, "se": gap.se})
    return found


def _fill(text: str, **given: Any) -> str:
    helpers = {"percent": percent, "headline": headline, "found_noise": maps.noise_at, "largest": maps.largest}
    return _TEMPLATES.from_string(text).render(**helpers, **given)


@lru_cache(maxsize=1)
def tour() -> list[dict[str, Any]]:
    """Return the steps of the tour with their whole states; numbers of answers come from shipped results."""
    steps = []
    for step in CONTENT["tour"]:
        state = State(**step.get("state", {}))
        given = {"run": shipped.find(state), "state": state, "found": shipped.named}
        texts: dict[str, Any] = {
            key: _fill(step[key], **given) for key in ("text", "answer") if isinstance(step.get(key), str)
        }
        if isinstance(step.get("text"), list):
            texts["text"] = [_fill(line, **given) for line in step["text"]]
        steps.append({"play": False, "view": "field"} | step | texts | {"state": state.to_dict()})
    return steps


@lru_cache(maxsize=1)
def factors() -> list[dict[str, Any]]:
    """Return the pairs of states that show one factor each, with the answer of the shipped results."""
    found = []
    for factor in CONTENT["factors"]:
        sides = [State(**factor[side]["state"]) for side in "ab"]
        runs = [shipped.find(state) for state in sides]
        texts = CONTENT["texts"]["factor"], factor["text"]
        answers = [] if None in runs else [_fill(text, a=runs[0], b=runs[1], factor=factor) for text in texts]
        pair = {s: factor[s] | {"state": state.to_dict()} for s, state in zip("ab", sides, strict=True)}
        found.append(factor | pair | {"text": " ".join(answers)})
    return found


def claims() -> list[dict[str, str]]:
    """Return the claims of the scorecard that the page shows, with their verdicts."""
    return [{"key": key, **claim} for key, claim in CLAIMS.items()]


def snippet(state: State, place: list[float] | None = None, t: float | None = None) -> str:
    """Return a script that computes the page's numbers: ``values`` of the map, ``noise``, ``x`` and ``gap``, those of
    the twin, ``twin_x`` and ``twin_gap``, and the targets at a ``place`` that is probed at ``t``."""
    process, options = vk.process.PROCESSES[state.process].__name__, PROCESS_OPTIONS.get(state.process, {})
    given = {"state": state, "limit": LIMIT, "process": process, "options": options, "place": place}
    given["place_t"] = state.t if t is None else state.replace(t=t).t
    return _TEMPLATES.get_template("script.py.jinja").render(given)


def report(state: State, result: Result | None) -> Mapping[str, object]:
    """Return state, address, numbers with errors, and script as JSON types; samples only if there is a ``result``."""
    found = {"vkernel": vk.__version__, "state": state.to_dict(), "query": state.to_query(), "python": snippet(state)}
    found["noise_fraction"] = asdict(compute.noise_share(state))
    if result is None:
        return found
    gaps = {"gap_mass": result.gap, "twin_gap_mass": result.twin, "exact_gap_mass": result.exact_gap}
    laws = {"law": result.law.tolist(), "law_error": result.band.tolist(), "exact_law": result.exact.tolist()}
    if result.twin_law is not None:
        laws["twin_law"] = result.twin_law.tolist()
    estimates = {name: None if gap is None else asdict(gap) for name, gap in gaps.items()}
    return found | estimates | {"window": [-LIMIT, LIMIT]} | laws
