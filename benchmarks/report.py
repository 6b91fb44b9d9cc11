"""The report: every recorded section as a table, every curve as a picture with its exponents; ``REPORT.md``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.fit import exponent
from benchmarks.results import PARTS, folder, recorded
from vkernel.core.errors import require
from vkernel.core.estimate import Estimate
from vkernel.core.files import write

__all__ = ["fits", "render", "table"]

ORDER = ("accuracy", "neighbours", "pruning", "size", "curve-n", "curve-d", "curve-B", "curve-sigma")
ORDER += ("els", "els-fashion", "els-cifar", "els-samples", "theories-direct-1000", "theories-direct-10000")
ORDER += ("theories-gaussian-500", "theories-gaussian-10000")
ORDER += (
    "linear",
    "mlps",
    "unets",
    "targets",
    "curve-members",
)  # sections not named here come before, as they were recorded
HEADINGS = {"cpu": "On a CPU", "gpu": "On a GPU"}
OPENING = """# Benchmarks

Written by `make bench` (`python -m benchmarks`) from the numbers in `benchmarks/results`; parts from different machines
are put together by `python -m benchmarks --render`. Accuracy stands beside speed. Errors are those of the worst of the
queries, |m - m_ref| / rms|y - ȳ|, against float64; half of the queries are a training point plus noise, half lie midway
between two. Limits are measured on the same machine in the same run. Exponents are least-squares slopes of log time,
with their standard errors; a large error means that the curve is no power law.
"""

Section = Mapping[str, Any]


def render() -> Path:
    """Write the report and its plots from what is recorded in :func:`benchmarks.results.folder`."""
    held = {part: recorded(part) for part in PARTS}
    require(any(held.values()), f"Nothing is recorded in {folder() / 'results'}; run python -m benchmarks first.")
    text = [OPENING]
    for part, sections in held.items():
        if sections:
            usual = where(next(iter(sections.values()))["machine"])
            text.append(f"## {HEADINGS[part]}\n\n{usual}.\n")
            for name in sorted(sections, key=lambda k: ORDER.index(k) if k in ORDER else -1):
                text += _section(part, name, sections[name], usual)
    return write(folder() / "REPORT.md", "\n".join(text))


def _section(part: str, name: str, section: Section, usual: str) -> Iterator[str]:
    yield f"### {section['title']}\n"
    machine = section["machine"]
    here = "" if where(machine) == usual else f"{where(machine)}; "
    yield f"*{here}{machine['date']}, load {machine['load']:g}.*\n"
    if section["note"]:
        yield f"{section['note']}\n"
    if not section["plot"]:
        yield table(section["rows"])
        return
    path = Path("plots") / f"{part}-{name}.png"
    draw(section, folder() / path)
    yield f"![{section['title']}]({path.as_posix()})\n"
    plot = section["plot"]
    found = fits(section)
    if found:
        yield table([{plot.get("by", "curve"): by, "exponent": said(b)} for by, (b, _) in found.items()])
    yield "<details><summary>The numbers</summary>\n"
    yield table(section["rows"])
    yield "</details>\n"


def where(machine: Mapping[str, Any]) -> str:
    """The machine of a section in words."""
    parts = (
        [f"{machine['gpu']} ({machine['gpu memory (GiB)']} GiB, CUDA {machine['cuda']})"] if "gpu" in machine else []
    )
    parts.append(f"{machine['processor']}, {machine['cores']} cores")
    threads = f"{machine['threads']} thread{'s' if machine['threads'] != 1 else ''}"
    return "; ".join([*parts, f"{threads}, torch {machine['torch']}, Python {machine['python']}"])


def table(rows: list[dict[str, Any]]) -> str:
    """Rows in Markdown: columns in the order in which they first appear, numbers to the right."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    right = [all(not isinstance(row.get(c), str) for row in rows) for c in columns]
    lines = [columns, ["--:" if r else ":--" for r in right]]
    lines += [[shown(row.get(c), c) for c in columns] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def shown(value: Any, column: str) -> str:
    """One value: errors as powers of ten, large numbers with commas, others to three digits."""
    if value is None:
        return "–"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if "error" in column and math.isfinite(value):
        return f"{value:.0e}"
    return f"{value:,.0f}" if abs(value) >= 1000 and math.isfinite(value) else f"{value:.3g}"


def lines(section: Section) -> dict[str, list[dict[str, Any]]]:
    """The rows of each line of a plot, by the value of its column ``by``."""
    plot, found = section["plot"], {}
    for row in section["rows"]:
        if row.get(plot["y"]) is not None:
            found.setdefault(str(row.get(plot.get("by"), "measured")), []).append(row)
    return found


def fits(section: Section) -> dict[str, tuple[Estimate, float]]:
    """The exponent and the prefactor of each line that has three points or more, if the plot asks for them."""
    plot, found = section["plot"], {}
    for name, rows in lines(section).items() if plot.get("fit") else ():
        used = [row for row in rows if row[plot["x"]] >= plot.get("above", 0)]
        if len({row[plot["x"]] for row in used}) >= 3:
            found[name] = exponent([row[plot["x"]] for row in used], [row[plot["y"]] for row in used])
    return found


def draw(section: Section, path: Path) -> Path:
    """The measured times, their fits, and the limit, on logarithmic axes."""
    from matplotlib import pyplot
    from matplotlib.lines import Line2D

    from vkernel.plots import base

    plot, found = section["plot"], fits(section)
    with base.style():
        figure, axes = pyplot.subplots(figsize=(6.4, 5.0))
        handles = []
        for (name, rows), colour in zip(lines(section).items(), base.lines(), strict=False):
            x, y = ([row[key] for row in rows] for key in (plot["x"], plot["y"]))
            label = name
            if name in found:
                (b, factor) = found[name]
                label += f": exponent {said(b)}"
                reach = [v for v in x if v >= plot.get("above", 0)]
                axes.plot(reach, [factor * v**b.value for v in reach], ":", color=colour, lw=1.4)
            handles += axes.plot(x, y, "o-", color=colour, lw=1.2, label=label)
            limit = [(row[plot["x"]], row[plot["limit"]]) for row in rows if row.get(plot.get("limit")) is not None]
            if limit:
                axes.plot(*zip(*limit, strict=True), "--", color=colour, lw=1.2)
        if found:
            handles.append(
                Line2D([], [], ls=":", lw=1.4, color=base.ink(), label="fitted power law, in the same colour")
            )
        if plot.get("limit"):
            handles.append(Line2D([], [], ls="--", lw=1.2, color=base.ink(), label="limit, in the same colour"))
        axes.set(xscale="log", yscale="log", xlabel=plot.get("xlabel", plot["x"]), ylabel=plot.get("ylabel", plot["y"]))
        places = sorted({row[plot["x"]] for row in section["rows"]})
        axes.set_xticks(places, [f"{v:,}" if isinstance(v, int) else f"{v:g}" for v in places], minor=False)
        axes.set_xticks([], minor=True)
        axes.set_title(section["title"], wrap=True)
        figure.legend(handles=handles, loc="outside lower center")
        base.save(figure, path)
        pyplot.close(figure)
    return path


def said(b: Estimate) -> str:
    """An exponent with its standard error."""
    return f"{round(b.value, 2) + 0.0:.2f} ± {b.se:.2f}"
