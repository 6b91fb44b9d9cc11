"""The texts of the page: captions of controls and layers, the tour, the panel of results, the script, the report.

They stand in ``assets``: fixed ones in ``content.toml``, the panel and the script as templates. In the panel every
number has its error, as estimated by the library."""

import math
from collections.abc import Mapping
from dataclasses import asdict

from jinja2 import Environment, FileSystemLoader

import vkernel as vk
from vkernel.explore import compute
from vkernel.explore.compute import Result, run_inputs
from vkernel.explore.state import ASSETS, CONTENT, LIMIT, MAX_POINTS, PROCESS_OPTIONS, State, clamp

POINTS = {  # of the named sets; those without points in the file are toy sets of the paper
    name: clamp(CONTENT["points"].get(name) or vk.data.toy(name).rows(0, MAX_POINTS).tolist())
    for group in CONTENT["presets"].values()
    for name in group
}


def tour() -> list[dict[str, object]]:
    """Return the steps of the tour, each with its whole state."""
    return [stop | {"state": State(**stop["state"]).to_dict()} for stop in CONTENT["tour"]]


def factors() -> list[dict[str, object]]:
    """Return the pairs of states that show one factor each."""
    return []


def claims() -> list[dict[str, object]]:
    """Return the claims of the scorecard that the page shows."""
    return []


def short(e: vk.Estimate) -> str:
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


_TEMPLATES = Environment(loader=FileSystemLoader(ASSETS), trim_blocks=True, keep_trailing_newline=True)
_TEMPLATES.filters["short"] = short
_TEMPLATES.globals["compute"] = compute


def panel(state: State, noise: vk.Estimate, result: Result | None) -> dict[str, str | list[str]]:
    """Describe the picture by a number, its caption and sentences; ``result`` is the last run, if there was one."""
    text = _TEMPLATES.get_template("panel.jinja").render(state=state, noise=noise, run=result)
    number, caption, *sentences = filter(None, text.splitlines())
    return {"number": number, "caption": caption, "sentences": sentences}


def outdated(state: State, result: Result | None, shown: tuple[Result, float] | None) -> tuple[bool, bool, str]:
    """Return whether the samples and the map of V, of the run and the time ``shown``, are outdated, and their label."""
    samples = result is not None and result.state.d == state.d and run_inputs(result.state) != run_inputs(state)
    share = shown is not None and (samples or shown != (result, state.t))
    if "variance" in state.layers and shown is None:
        return samples, False, "V follows once the run has ended"
    curves = state.d == 1 and not {"law", "members", "exact"}.isdisjoint(state.layers)
    old = {"V": share, "particles": samples and "particles" in state.layers, "curves": samples and curves}
    names = ", ".join(name for name, is_old in old.items() if is_old)
    return samples, share, f"of an earlier state: {names}" if names else ""


def snippet(state: State) -> str:
    """Return a script that computes the page's numbers ``fraction``, ``noise``, ``x`` and, for two points, ``gap``."""
    process, options = vk.process.PROCESSES[state.process].__name__, PROCESS_OPTIONS.get(state.process, {})
    return _TEMPLATES.get_template("script.py.jinja").render(state=state, limit=LIMIT, process=process, options=options)


def report(state: State, result: Result | None) -> Mapping[str, object]:
    """Return state, address, numbers with errors, and script as JSON types; samples only if there is a ``result``."""
    found = {"vkernel": vk.__version__, "state": state.to_dict(), "query": state.to_query(), "python": snippet(state)}
    found["noise_fraction"] = asdict(compute.noise_share(state))
    if result is None:
        return found
    gaps = {"gap_mass": result.gap, "twin_gap_mass": result.twin, "exact_gap_mass": result.exact_gap}
    laws = {"law": result.law.tolist(), "law_error": result.band.tolist(), "exact_law": result.exact.tolist()}
    estimates = {name: None if gap is None else asdict(gap) for name, gap in gaps.items()}
    return found | estimates | {"window": [-LIMIT, LIMIT]} | laws
