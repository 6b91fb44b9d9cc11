"""The answers of the page, each a function of the state: a header of JSON types and arrays to be drawn."""

from __future__ import annotations

import csv as _csv
import io
import json as _json
import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import numpy as np

import vkernel as vk
from vkernel.core.errors import require
from vkernel.explore import captions, compute, maps, probe as probes, shipped
from vkernel.explore.compute import Report, Result
from vkernel.explore.state import CONTENT, State, from_csv

Answer = tuple[dict[str, Any], dict[str, np.ndarray]]
KEPT = 12  # results that are kept, for all tabs
_results: OrderedDict[str, Result] = OrderedDict()


def _estimate(e: vk.Estimate | None) -> dict[str, float] | None:
    return None if e is None else asdict(e)


def fresh(state: State, result: Result | None) -> Result | None:
    """Return the run if its inputs are those of the state."""
    return result if result is not None and compute.key(result.state) == compute.key(state) else None


def map(state: State, result: Result | None, given: Mapping[str, Any]) -> Answer:
    """Evaluate the map of the state at its time; ``member`` in the request has the arrows of that model drawn."""
    ensemble = isinstance(compute.models(state, result), vk.Ensemble)
    member = _member(result, given["member"]) if ensemble and given.get("member") is not None else None
    found, process, noise = maps.evaluate(state, result, member), state.make_process(), compute.noise_share(state)
    rest: dict[str, Any] = {"learned": compute.models(state, result) is not None}
    if state.map == "noise" and len(set(state.points)) > 1:
        k = int(found.values.argmax())
        if state.d == 1:
            assert found.x is not None
            place = [round(float(found.x[k]), 2) + 0.0]
        else:
            place = maps.centres(2, len(found.values))[k].tolist()
        rest |= {"most": float(found.values.flat[k]), "place": place, "at_points": maps.at_points(state)}
    header = {
        "query": state.to_query(),
        "range": [process.eps, process.T],
        "t": state.t,
        "map": state.map if found.values.size else "none",
        "inputs": compute.key(state),
        "noise": _estimate(noise),
        "line_sizes": [line.shape[1] for line in found.lines],
        "scale": scale(state, found),
        "panel": {"sentences": captions.sentences(state, noise, None, **rest)},
    }
    arrays = {
        "values": found.values,
        "arrows": found.arrows,
        "lines": np.concatenate([*found.lines, np.zeros((2, 0))], 1),
    }
    return header, arrays | {
        name: value
        for name in ("exact_arrows", "x", "density", "field", "field_t")
        if (value := getattr(found, name)) is not None
    }


def scale(state: State, found: maps.Map) -> dict[str, Any]:
    """Return the range of colours: shares from 0 to 1, the others on a logarithmic scale of whole decades."""
    about = next(made for made in CONTENT["maps"] if made["name"] == state.map)
    caption = {"caption": about["caption"], "unit": about["symbol"]}
    if state.map not in ("noise", "variance") or not found.values.size:
        return {"low": 0.0, "high": 1.0, "log": False, **caption}
    shown = found.values if found.field is None else found.field  # one scale for all times
    if shown.max() <= 1e-12:  # nothing differs anywhere
        return {"low": 0.01, "high": 1.0, "log": True, **caption}
    top = math.ceil(math.log10(max(float(shown.max()), 1e-6)))
    low = min(-2, top - 3) if state.map == "noise" else top - 3
    return {"low": 10.0**low, "high": 10.0 ** max(top, low + 1), "log": True, **caption}


def probe(state: State, result: Result | None, given: Mapping[str, Any]) -> Answer:
    """Describe the training targets at one place."""
    found = probes.evaluate(state, _place(state, given), result)
    header = {"which": found.which, "sigma2_trC": found.noise, "share": found.share, "s2": found.signal}
    header |= {"text": captions.probed(found, state)}
    return header, {name: getattr(found, name) for name in ("weights", "targets", "mean", "ellipse", "learned")}


def _place(state: State, given: Mapping[str, Any]) -> list[float]:
    """Return the place that a request names."""
    require(isinstance(given.get("x"), list), "A probe needs a place x, a list of coordinates.")
    return probes.check(state, [float(v) for v in given["x"]])


def member(state: State, result: Result | None, given: Mapping[str, Any]) -> Answer:
    """Return the arrows of one model at the state's time and its law, for "train another"."""
    k = _member(result, given.get("k"))
    assert result is not None
    assert isinstance(result.learned, vk.Ensemble)
    k = max(k, 0) % len(result.learned)
    require(compute.models(state, result) is not None, "These models belong to another noising process; run again.")
    found = maps.evaluate(state.replace(map="none"), result, k)
    law, gap = compute.member(result, k)
    header = {"k": k, "members": len(result.learned), "gap": gap, "inputs": compute.key(result.state)}
    return header, {"arrows": found.arrows, "law": law}


def _member(result: Result | None, k: object) -> int:
    """Return the index of a model; -1 is the mean of all."""
    has = result is not None and isinstance(result.learned, vk.Ensemble)
    require(has, "No model has been trained yet, or the last run has none.")
    require(type(k) is int and -1 <= k < 1 << 31, "A model has an index, a whole number.")
    assert result is not None
    assert isinstance(result.learned, vk.Ensemble)
    return int(k) if k == -1 else int(k) % len(result.learned)  # type: ignore[call-overload]


def python(state: State, result: Result | None, given: Mapping[str, Any]) -> Answer:
    """Return a script that computes the page's numbers; ``x`` in the request is a place that is probed, at
    the time ``at``."""
    place, t = None if given.get("x") is None else _place(state, given), given.get("at")
    return {"text": captions.snippet(state, place, None if t is None else float(t))}, {}


def json(state: State, result: Result | None, given: object) -> Answer:
    """Return state, numbers and script as JSON text."""
    return {"text": _json.dumps(captions.report(state, fresh(state, result)), indent=1)}, {}


def csv(state: State, result: Result | None, given: object) -> Answer:
    """Return the training points as CSV text, one row each, with a column of weights."""
    text = io.StringIO()
    rows = _csv.writer(text, lineterminator="\n")
    rows.writerow([*("x", "y")[: state.d], "weight"])
    rows.writerows((*p, w) for p, w in zip(state.points, state.weights, strict=True))
    return {"text": text.getvalue()}, {}


def imported(text: object) -> dict[str, Any]:
    """Read points from CSV text."""
    points, weights, sentence = from_csv(text if isinstance(text, str) else "")
    made = State(points=points, weights=weights)
    return {"points": [list(p) for p in made.points], "weights": list(made.weights), "text": sentence}


def known(state: State) -> Result | None:
    """Return the result of a run that was made before, or that the package ships."""
    return _results.get(compute.key(state)) or shipped.find(state)


def keep(found: Result) -> Result:
    """Keep a result, and drop the oldest."""
    _results[compute.key(found.state)] = found
    while len(_results) > KEPT:
        _results.popitem(last=False)
    return found


def simulate(state: State, report: Report) -> Result:
    """Run the state's sampler and keep the result."""
    return keep(compute.simulate(state, report))


def learn(found: Result, report: Report) -> Result:
    """Train the models of a shipped result, which maps of V and single models need."""
    return keep(replace(found, learned=compute.learn(found.state, report)))


def result(found: Result) -> Answer:
    """Describe the outcome of a run."""
    state = found.state
    header = {
        "gap": _estimate(found.gap),
        "twin": _estimate(found.twin),
        "exact_gap": _estimate(found.exact_gap),
        "headline": captions.headline(found),
        "bars": captions.bars(state, found),
        "names": captions.names(state, found),
        "sentences": captions.sentences(state, None, found),
        "note": found.note,
        "inputs": compute.key(state),
        "sampler": state.sampler,
        "members": compute.members(state),
        "precomputed": found.precomputed,
        "learned": found.learned is not None,
    }
    fields = ("times", "frames", "law", "band", "exact", "members", "twin_law", "twin_frames", "member_gaps")
    arrays = {name: getattr(found, name) for name in fields}
    return header, {name: a for name, a in arrays.items() if a is not None and a.size}
