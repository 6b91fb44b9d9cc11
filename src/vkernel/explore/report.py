"""What is saved as JSON: the state, the address, the numbers with their errors, and the script that gives them."""

from __future__ import annotations

from typing import Any

from vkernel.core.estimate import Estimate
from vkernel.explore.compute import noise_share
from vkernel.explore.simulate import Result
from vkernel.explore.snippet import snippet
from vkernel.explore.state import LIMIT, State
from vkernel.version import __version__

__all__ = ["report"]


def report(state: State, result: Result | None) -> dict[str, Any]:
    """The numbers of a picture; those of samples where there is a ``result``."""
    found: dict[str, Any] = {
        "vkernel": __version__,
        "state": state.to_dict(),
        "query": state.to_query(),
        "noise_fraction": _estimate(noise_share(state)),
        "python": snippet(state),
    }
    if result is not None:
        found |= {
            "gap_mass": _estimate(result.gap),
            "twin_gap_mass": _estimate(result.twin),
            "exact_gap_mass": _estimate(result.exact_gap),
            "window": [-LIMIT, LIMIT],
            "law": result.law.tolist(),
            "law_error": result.band.tolist(),
            "exact_law": result.exact.tolist(),
        }
    return found


def _estimate(e: Estimate | None) -> dict[str, float] | None:
    return None if e is None else {name: float(getattr(e, name)) for name in ("value", "se", "low", "high")}
