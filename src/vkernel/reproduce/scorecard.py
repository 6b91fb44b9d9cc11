"""The scorecard: every claim of the paper that an exhibit decides, with its number, its rule and its verdict.

Claims stand in the texts of the exhibits (:class:`~vkernel.reproduce.exhibit.Claim`); ``scorecard`` in
``texts/page.toml`` has their order. A claim whose exhibit was not made is listed as not computed. The same table is
written as ``scorecard.html``, as ``scorecard.md`` and, for programs, as ``scorecard.json``.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from vkernel.core.files import write
from vkernel.reports import html
from vkernel.reproduce import exhibit
from vkernel.reproduce.exhibit import Claim, Exhibit, Part

NOT_COMPUTED = "not computed"


def collect(made: Iterable[Exhibit], parts: Iterable[Part]) -> list[tuple[Claim, str]]:
    """Return the claims of all ``parts`` in their order, each with the name of the first exhibit that decided it."""
    found: dict[str, tuple[Claim, str]] = {}
    for item in made:
        for claim in item.claims:
            found.setdefault(claim.key, (claim, item.name))
    for part in parts:
        for given in exhibit.read(part.text or part.name).get("claims", ()) if part.name else ():
            known = {key: given[key] for key in ("key", "section", "claim", "rule", "origin") if key in given}
            missing = Claim(**known, computed="", number="", verdict=NOT_COMPUTED, tests={})
            found.setdefault(missing.key, (missing, part.name))
    return [found[key] for key in exhibit.read("page")["scorecard"] if key in found]


def save(out: Path, made: Iterable[Exhibit], parts: Iterable[Part], about: Mapping[str, object]) -> dict[str, int]:
    """Write the scorecard into a folder and return how many claims got each verdict."""
    claims = collect(made, parts)
    counts = Counter(claim.verdict for claim, _ in claims)
    rows = [claim._asdict() | {"exhibit": name} for claim, name in claims]
    write(out / "scorecard.json", json.dumps({**about, "claims": rows}, indent=1, ensure_ascii=False) + "\n")
    write(out / "scorecard.html", html.page("scorecard.html", claims=rows, counts=counts, **about))
    write(out / "scorecard.md", html.render("scorecard.md", claims=rows, counts=counts, **about))
    return dict(counts)
