"""Copy the scorecard of a run into the documentation and draw README's table from it.

``python docs/scorecard.py out`` does it, and ``python docs/scorecard.py --exhibit twins`` makes one exhibit again and
replaces its rows. ``docs/scorecard.json`` and ``docs/scorecard.md`` are those of a full run of
``vkernel reproduce``. README shows the central claims between two comments; a test compares that block with
:func:`table`. ``vkernel explore`` has claims in a file of its own, which is renewed too.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections import Counter
from pathlib import Path

from vkernel.core.files import write
from vkernel.reports import html
from vkernel.reproduce import exhibit, exhibits
from vkernel.reproduce.exhibit import Run

DOCS = Path(__file__).parent
README = DOCS.parent / "README.md"
PAGE = DOCS.parent / "src" / "vkernel" / "explore" / "assets" / "claims.json"  # of vkernel explore
BLOCK = re.compile(r"(?<=<!-- scorecard -->\n).*?(?=<!-- end of scorecard -->)", re.DOTALL)
CENTRAL = ("noise_fills_gaps", "effective_sde", "average_over_trainings", "one_model", "networks_alike", "v_follows_c")


def table(found: dict[str, object]) -> str:
    """Return the counts of all verdicts and the central claims, as Markdown."""
    claims = {claim["key"]: claim for claim in found["claims"]}
    counts = Counter(claim["verdict"] for claim in claims.values())
    summary = ", ".join(f"{counts[verdict]} {verdict.replace('holds', 'hold')}" for verdict in sorted(counts))
    head = f"Of {len(claims)} claims on [the scorecard](docs/scorecard.md), {summary.replace('does not', 'do not')}."
    lines = [head, "Every verdict follows from a rule that is stated there. The central ones:", ""]
    lines += ["| claim | verdict | number |", "|---|---|---|"]
    for key in CENTRAL:
        cells = (claims[key][name].replace("|", "\\|") for name in ("claim", "verdict", "number"))
        lines.append("| {} | **{}** | {} |".format(*cells))
    return "\n".join([*lines, ""])


def renew(name: str) -> None:
    """Replace the rows of one exhibit in the committed scorecard; of the others, the words of the claims."""
    found = json.loads((DOCS / "scorecard.json").read_text(encoding="utf8"))
    with tempfile.TemporaryDirectory() as folder:
        part = next(part for part in exhibits() if part.name == name)
        made = part.make(Run(Path(folder), int(found["seed"]), False, lambda share: None))
    rows = {claim["key"]: claim for claim in found.pop("claims")}
    rows |= {claim.key: claim._asdict() | {"exhibit": name} for claim in made.claims}
    texts = (exhibit.read(part.text or part.name) for part in exhibits())
    names = {claim["key"]: claim["claim"] for text in texts for claim in text.get("claims", ())}
    claims = [rows[key] | {"claim": names[key]} for key in exhibit.read("page")["scorecard"]]
    counts = Counter(claim["verdict"] for claim in claims)
    write(DOCS / "scorecard.json", json.dumps({**found, "claims": claims}, indent=1, ensure_ascii=False) + "\n")
    write(DOCS / "scorecard.md", html.render("scorecard.md", claims=claims, counts=counts, **found))
    readme()


def main(out: Path) -> None:
    """Replace the committed scorecard by that of the folder ``out``."""
    for name in ("scorecard.json", "scorecard.md"):
        write(DOCS / name, (out / name).read_bytes())
    readme()


def readme() -> None:
    """Draw README's table, and the claims that ``vkernel explore`` shows, from the committed scorecard."""
    found = json.loads((DOCS / "scorecard.json").read_text(encoding="utf8"))
    text, count = BLOCK.subn(lambda _: table(found), README.read_text(encoding="utf8"))
    if count != 1:
        raise SystemExit("README has no block between <!-- scorecard --> and <!-- end of scorecard -->.")
    write(README, text)
    claims = {claim["key"]: claim for claim in found["claims"]}
    shown = json.loads(PAGE.read_text(encoding="utf8"))
    shown = {key: {name: claims[key][name] for name in one} for key, one in shown.items()}
    write(PAGE, json.dumps(shown, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    renew(sys.argv[2]) if sys.argv[1] == "--exhibit" else main(Path(sys.argv[1]))
