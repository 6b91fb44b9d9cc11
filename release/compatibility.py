"""Write the table of versions in docs/compatibility.md: ``python release/compatibility.py``.

The lowest versions are those of pyproject.toml, with which ``make test-oldest`` runs the tests; the newest are those of
constraints.txt, with which ``make test`` does."""

from __future__ import annotations

import runpy
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "compatibility.md"
BEGIN, END = "<!-- versions -->\n", "<!-- end of versions -->\n"
TOOLS = {"bench", "docs", "release", "dev"}  # extras of development, which promise no lowest version


def rows() -> list[str]:
    """Return the lines of the table, one for each package that the core or an extra asks for."""
    oldest = runpy.run_path(str(ROOT / "release" / "oldest.py"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    groups = {"core": project["dependencies"]} | {name: extras[name] for name in extras if name not in TOOLS}
    tried = {"core", *oldest["EXTRAS"]}  # of which make test-oldest installs the lowest versions
    pinned = (line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    newest = {name.lower(): version for name, version in pinned}
    where: dict[str, list[str]] = {}
    lowest: dict[str, str] = {}
    for group, asked in groups.items():
        for name, version in oldest["lowest"](asked).items():
            where.setdefault(name, []).append(group)
            lowest[name] = version
    lines = ["| package | for | lowest promised | its tests | pinned, all tests |", "|---|---|---|---|---|"]
    for name, used in where.items():
        how = "`make test-oldest`" if tried & set(used) else "by hand, see below"
        lines.append(f"| {name} | {', '.join(used)} | {lowest[name]} | {how} | {newest[name]} |")
    return lines


def page(text: str) -> str:
    """Return the text of the page with a new table."""
    before, rest = text.split(BEGIN)
    return before + BEGIN + "\n".join(rows()) + "\n" + END + rest.split(END)[1]


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
