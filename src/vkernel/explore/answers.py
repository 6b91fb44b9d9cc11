"""The answers of the page, each a function of the state: a header of JSON types and arrays to be drawn."""

from __future__ import annotations

import csv as _csv
import io
import json as _json
from collections import OrderedDict
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

import vkernel as vk
from vkernel.explore import captions, compute
from vkernel.explore.compute import Report, Result, run_inputs
from vkernel.explore.state import State, from_csv

Answer = tuple[dict[str, Any], dict[str, np.ndarray]]
KEPT = 12  # results that are kept, for all tabs
_results: OrderedDict[State, Result] = OrderedDict()


def _estimate(e: vk.Estimate | None) -> dict[str, float] | None:
    return None if e is None else asdict(e)


def fresh(state: State, result: Result | None) -> Result | None:
    """Return the run if its inputs are those of the state."""
    return result if result is not None and run_inputs(result.state) == run_inputs(state) else None


def map(state: State, result: Result | None, given: object = None) -> Answer:
    """Evaluate the map of the state at its time."""
    found, process, noise = compute.exact(state), state.make_process(), compute.noise_share(state)
    header = {
        "query": state.to_query(),
        "range": [process.eps, process.T],
        "map": state.map,
        "t": state.t,
        "inputs": hash(run_inputs(state)) % (1 << 32),
        "noise": _estimate(noise),
        "line_sizes": [line.shape[1] for line in found.lines],
        "scale": {"low": 0.0, "high": 1.0, "log": False, "caption": "share of the target that is noise", "unit": ""},
        "panel": captions.panel(state, noise, None),
    }
    lines = np.concatenate(found.lines, 1) if found.lines else np.zeros((2, 0))
    arrays = {"values": found.fraction, "arrows": found.arrows, "lines": lines}
    if state.d == 1:
        assert found.density is not None
        arrays |= {"x": np.linspace(-2, 2, len(found.fraction)), "density": found.density}
    return header, arrays


def probe(state: State, result: Result | None, given: Any) -> Answer:
    """Describe the training targets at one place."""
    x = torch.tensor([float(v) for v in given["x"]], dtype=torch.float64)[None]
    score, t = vk.EmpiricalScore(compute.empirical(state), state.make_process()), state.t
    s, C = score.with_covariance(x, t)
    var = float(score.process.S(torch.tensor(t, dtype=torch.float64)))
    header = {"sigma2_trC": var * float(C.trace()), "s2": float(s.square().sum()), "text": []}
    return header, {"mean": var * s[0].numpy()}


def member(state: State, result: Result | None, given: Any) -> Answer:
    """Return the learned arrows of one model."""
    return {"k": int(given["k"])}, {}


def python(state: State, result: Result | None, given: object) -> Answer:
    """Return a script that computes the page's numbers."""
    return {"text": captions.snippet(state)}, {}


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
    """Return the result of a run that was made before."""
    return _results.get(run_inputs(state))


def simulate(state: State, report: Report) -> Result:
    """Run the state's sampler and keep the result."""
    found = compute.simulate(state, report)
    _results[run_inputs(state)] = found
    while len(_results) > KEPT:
        _results.popitem(last=False)
    return found


def result(state: State, found: Result) -> Answer:
    """Describe the outcome of a run."""
    panel = captions.panel(found.state, compute.noise_share(found.state), found)
    header = {
        "gap": _estimate(found.gap),
        "twin": _estimate(found.twin),
        "exact_gap": _estimate(found.exact_gap),
        "headline": panel["number"],
        "sentences": panel["sentences"],
        "note": found.note,
        "inputs": hash(run_inputs(found.state)) % (1 << 32),
        "members": compute.members(found.state),
        "precomputed": False,
    }
    arrays = {"times": found.times, "frames": found.frames, "law": found.law, "band": found.band, "exact": found.exact}
    if found.members:
        arrays["members"] = np.stack(found.members)
    return header, arrays
