"""Write docs/target_noise.md, its figures and the numbers of the scorecard: ``python docs/target_noise/page.py``.

The results of the study stand beside this file, in ``results/*.npz`` (``vkernel study export STORE --out FILE.npz``).
From them follow, in this order,

- ``src/vkernel/reproduce/results/target_noise.json``: all numbers and outcomes, which the scorecard reads too;
- the figures ``results/*.png``;
- the rows of the scorecard (``docs/scorecard.py --exhibit twins``), and with them README's table;
- ``docs/target_noise.md``, the template ``page.md.j2`` with its numbers filled in.

With ``--text`` only the last is made, from the JSON file. A test compares page and JSON with the results."""

from __future__ import annotations

import functools
import json
import math
import subprocess
import sys
from pathlib import Path

import jinja2
import xarray

from vkernel import plots, study
from vkernel.core.files import write
from vkernel.reports import target_noise
from vkernel.reports.html import significant
from vkernel.reports.target_noise.report import name as cell_name, words

HERE = Path(__file__).parent
PAGE = HERE.parent / "target_noise.md"
RESULTS = HERE / "results"
ANSWER = HERE.parents[1] / "src" / "vkernel" / "reproduce" / "results" / "target_noise.json"
CONTROLS = RESULTS / "controls.json"  # the same of the second run and of plain SGD
LEVEL = 0.3  # σ/α at which the figure shows the gap
TWINS = {"data": "fashion", "n": "128", "network": "unet"}  # whose samples are shown
DRAWS = 2000
WIDE = 3  # cells in a figure
STUDIES = "images", "images_cifar"


def results(part: str = "") -> xarray.Dataset:
    """Return the results of all files, merged: of the study, or of ``repeat``, the same seeds on another day, whose
    networks differ by rounding, or of ``sgd``, the study with plain SGD."""
    return study.merge(*(computed(study.load(path)) for path in sorted((RESULTS / part).glob("*.npz"))))


def computed(ds: xarray.Dataset) -> xarray.Dataset:
    """Return results without labels of factors with which nothing was computed: most of a large grid is empty."""
    for dim in (d for d in ds["done"].dims if d != "block"):
        ds = ds.isel({dim: ds["done"].any([d for d in ds["done"].dims if d != dim]).values})
    return ds


class Answer:
    """The numbers of the JSON file, as the template writes them."""

    def __init__(self, held: dict) -> None:
        self.held, self.cells = held, [cell["cell"] for cell in held["cells"]]

    def number(self, cell: str, objective: str, name: str, level: float | None = None, step: int | None = None) -> dict:
        """Return a number with the ends of its interval; the nearest level, and the last step if none is given."""
        found = [n for n in self.held["numbers"] if (n["cell"], n["objective"], n["name"]) == (cell, objective, name)]
        if level is not None:
            near = min((n["level"] for n in found), key=lambda v: abs(v - level), default=None)
            found = [n for n in found if n["level"] == near]
        last = max((n["step"] for n in found), default=0)
        return next((n for n in found if n["step"] == (step or last)), {})

    def outcome(self, rule: str, cell: str, variant: str = "", of: str = "c = 1") -> dict:
        """Return the outcome of a rule in a cell."""
        wanted = (rule, cell, variant, of)
        return next((o for o in self.held["outcomes"] if (o["rule"], o["cell"], o["variant"], o["of"]) == wanted), {})

    def verdicts(self, of: str = "c = 1") -> str:
        """Return the verdicts on one objective, a row for each rule and a column for each cell."""
        lines = head("rule", *self.cells)
        for title, found in self.by_rule(of).items():
            each = {o["cell"]: o for o in found}
            lines.append(row(title, *(verdict(each[cell]) if cell in each else "not run" for cell in self.cells)))
        return "\n".join(lines)

    def details(self, of: str = "c = 1") -> str:
        """Return what decided the verdicts on one objective; comparisons that were not run are left out."""
        lines = head("rule", "cell", "verdict", "decided by (95 % intervals)")
        for title, found in self.by_rule(of).items():
            run = (o for o in found if o["verdict"] != "not run")
            lines += [row(title, o["cell"], verdict(o), o["numbers"] or "–") for o in run]
        return "\n".join(lines)

    def by_rule(self, of: str) -> dict[str, list[dict]]:
        """Return the outcomes of one objective by the title of the rule and its variant."""
        found: dict[str, list[dict]] = {}
        for rule, name in words()["rules"].items():
            for o in (o for o in self.held["outcomes"] if (o["rule"], o["of"]) == (rule, of)):
                title = name + (f", {words()['variants'][o['variant']]}" if o["variant"] else "")
                found.setdefault(title, []).append(o)
        return found

    def quantities(self, names: dict[str, tuple[str, float | None]], objectives: tuple[str, ...] = ()) -> str:
        """Return a table of numbers at the last step, a row for each cell and objective that was run. ``names`` maps
        the heads of columns to a quantity and its level."""
        lines = head("cell", "objective", "members", *names)
        for cell in self.cells:
            run = dict.fromkeys(n["objective"] for n in self.held["numbers"] if n["cell"] == cell)
            for label in run:
                if objectives and label not in objectives:
                    continue
                found = [self.number(cell, label, key, level) for key, level in names.values()]
                count = next((str(n["members"]) for n in found if n), "–")
                lines.append(row(cell, label, count, *map(interval, found)))
        return "\n".join(lines)

    def along(self, name: str, digits: int = 3) -> str:
        """Return a quantity by step, a row for each cell and objective that was run."""
        lines = head("cell", "objective", *(f"{step:,} steps" for step in self.held["steps"]))
        for cell, label in self.run(name):
            found = (self.number(cell, label, name, step=step) for step in self.held["steps"])
            lines.append(row(cell, label, *(significant(n["value"], digits) if n else "–" for n in found)))
        return "\n".join(lines)

    def by_level(self, name: str) -> str:
        """Return a quantity at the last step by noise level, a row for each cell and objective that was run."""
        levels = self.held["cells"][0]["levels"]
        lines = head("cell", "objective", *(f"σ/α = {significant(level)}" for level in levels))
        for cell, label in self.run(name):
            found = (self.number(cell, label, name, level) for level in levels)
            lines.append(row(cell, label, *map(interval, found)))
        return "\n".join(lines)

    def run(self, name: str) -> list[tuple[str, str]]:
        """Return the cells and objectives that have a quantity."""
        return list(dict.fromkeys((n["cell"], n["objective"]) for n in self.held["numbers"] if n["name"] == name))

    def value(self, cell: str, objective: str, name: str, level: float | None = None, step: int | None = None) -> str:
        """Return a number without its interval."""
        found = self.number(cell, objective, name, level, step)
        return significant(found["value"], 3) if found else "(not run)"

    def percent(self, cell: str, objective: str, name: str) -> str:
        """Return a share in percent."""
        found = self.number(cell, objective, name)
        return f"{100 * found['value']:.3g} %" if found else "(not run)"

    def part(self, rule: str, cell: str, name: str, variant: str = "", of: str = "c = 1") -> str:
        """Return a quantity of an outcome with its 95 % interval."""
        parts = self.outcome(rule, cell, variant, of).get("parts", ())
        return next((part(p) for p in parts if p["name"] == name and p["low"] is not None), "unknown")

    def group(self, cell: str, name: str, of: str = "c = 1") -> str:
        """Return the verdict on equivalence of one kind of quantity."""
        return dict(self.outcome("bertrand", cell, of=of).get("groups", ())).get(name, "not run")

    def single(self, cell: str, name: str, of: str = "c = 1") -> dict:
        """Return what single pairs of twins do."""
        found = (s for s in self.held["singles"] if (s["cell"], s["of"], s["name"]) == (cell, of, name))
        return next(found, {"below": "?", "values": [], "median": float("nan")})

    def median(self, cell: str, name: str, of: str = "c = 1") -> str:
        """Return the median over pairs of twins of a ratio, as a change in percent."""
        return f"{100 * math.expm1(self.single(cell, name, of)['median']):+.1f} %"

    def most(self, cell: str, name: str) -> str:
        """Return the largest value over levels of ρ or of the network's noise share."""
        found = next(c for c in self.held["cells"] if c["cell"] == cell)
        return significant(max(found[name]), 2)

    def at(self, cell: str, name: str, level: float) -> str:
        """Return ρ or the network's noise share at a level."""
        found = next(c for c in self.held["cells"] if c["cell"] == cell)
        return significant(found[name][found["levels"].index(level)], 2)

    def done(self) -> str:
        """Return the conditions that were run, by cell."""
        return listed(self.run("memorised"))

    def missing(self) -> str:
        """Return the planned conditions that were not run, by cell."""
        return listed([(one["cell"], one["objective"]) for one in self.held["missing"]]) or "none"

    def trends(self) -> str:
        """Return the slopes over log₂(1 + c), a row for each cell."""
        names = dict.fromkeys(t["part"]["name"] for t in self.held["trends"])
        lines = head("cell", "c", *(words()["quantities"][n] for n in names))
        for cell in self.cells:
            found = {t["part"]["name"]: t for t in self.held["trends"] if t["cell"] == cell}
            if found:
                factors = ", ".join(o.removeprefix("c = ") for o in next(iter(found.values()))["objectives"])
                lines.append(row(cell, factors, *(part(found[n]["part"]) if n in found else "–" for n in names)))
        return "\n".join(lines)

    def singles(self, of: str = "c = 1") -> str:
        """Return what single pairs of twins do: medians, and how many are lower."""
        names = dict.fromkeys(s["name"] for s in self.held["singles"])
        lines = head("cell", "comparison", *(f"{words()['quantities'][n]}: median, lower in" for n in names))
        for cell in self.cells:
            found = {s["name"]: s for s in self.held["singles"] if (s["cell"], s["of"]) == (cell, of)}
            if found:
                each = []
                for n, s in found.items():
                    middle = f"{s['median']:+.3f}" if n == "memorised" else f"{100 * math.expm1(s['median']):+.1f} %"
                    each.append(f"{middle}, {s['below']} of {len(s['values'])}")
                lines.append(row(cell, f"{of} against c = 0", *each))
        return "\n".join(lines)

    def count(self, rule: str, verdict: str, of: str = "c = 1", variant: str | None = None) -> int:
        """Return in how many cells a rule has a verdict."""
        found = (o for o in self.held["outcomes"] if (o["rule"], o["of"]) == (rule, of))
        return sum(o["verdict"] == verdict and variant in (None, o["variant"]) for o in found)


def listed(pairs: list[tuple[str, str]]) -> str:
    """Return conditions, cells with objectives, as a phrase."""
    found: dict[str, list[str]] = {}
    for cell, objective in pairs:
        found.setdefault(cell, []).append(objective)
    return "; ".join(f"{cell}: {', '.join(labels)}" for cell, labels in found.items())


def verdict(outcome: dict) -> str:
    """Return a verdict, in bold if it is one, with that of the cell alone where Holm's method changes it."""
    alone = f" ({outcome['alone']} alone)" if outcome["alone"] != outcome["verdict"] else ""
    return (f"**{outcome['verdict']}**" if outcome["verdict"] in ("holds", "fails") else outcome["verdict"]) + alone


def row(*cells: str) -> str:
    """Return a line of a table in Markdown."""
    return f"| {' | '.join(cells)} |"


def head(*cells: str) -> list[str]:
    """Return the first two lines of a table."""
    return [row(*cells), row(*["---"] * len(cells))]


def interval(found: dict, digits: int = 3) -> str:
    """Return a number with its 95 % interval."""
    if not found:
        return "–"
    value, low, high = (found[end] for end in ("value", "low", "high"))
    if low is None or low == high:  # nothing was copied: the bootstrap cannot say how sure that is
        return significant(value, digits)
    return f"{significant(value, digits)} ({significant(low, digits)} to {significant(high, digits)})"


def part(found: dict) -> str:
    """Return a quantity of a rule with its 95 % interval."""
    sign, form = ("×", "{:.3f}") if found["ratio"] else ("", "{:+.3f}")
    value, low, high = (form.format(found[end]) for end in ("value", "low", "high"))
    return f"{sign}{value} ({low} to {high})"


def missing(ds: xarray.Dataset) -> list[dict[str, str]]:
    """Return the conditions of the shipped studies that the results do not hold."""
    found = []
    for condition in (c for name in STUDIES for c in study.read(name, large=True).conditions()):
        there = all(value in ds[dim].values for dim, value in condition.labels.items())
        if not (there and bool(ds["done"].sel(condition.labels).all())):
            cell = {k: f"{v:g}" if isinstance(v, float) else str(v) for k, v in condition.labels.items()}
            found.append({"objective": cell.pop("objective"), "cell": cell_name(cell)})
    return found


def page(held: dict, controls: dict[str, dict]) -> str:
    """Return the text of the page, from the answer of the study and those of its controls."""
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True, trim_blocks=True)
    answer = Answer(held)
    about = {
        "others": [ending for ending in split(answer.cells) if ending],
        "level": LEVEL,
        "a": answer,
        **{name: Answer(part) for name, part in controls.items()},
        "about": held,
    }
    text = environment.from_string((HERE / "page.md.j2").read_text(encoding="utf-8")).render(about)
    return text


def split(cells: list[str]) -> dict[str, list[str]]:
    """Return the cells of the first figures, the U-Net's on the first data set, and of those with other networks and
    data, at most ``WIDE`` in a figure, by the ending of files."""
    first = [c for c in cells if c.startswith(f"{TWINS['data']}, n = ") and c.endswith(f", {TWINS['network']}")]
    rest = [cell for cell in cells if cell not in first]
    parts = [rest[k : k + WIDE] for k in range(0, len(rest), WIDE)]
    return {"": first} | {f"_others{k or ''}": part for k, part in enumerate(parts)}


def figures(ds: xarray.Dataset) -> None:
    """Draw the three figures."""
    numbers = target_noise.in_cells(target_noise.summary(ds, draws=DRAWS))
    save = functools.partial(plots.save, dpi=90)
    for ending, cells in split(numbers["cell"].values.tolist()).items():
        if cells:
            some = numbers.sel(cell=cells)
            save(plots.twin_curves(some, LEVEL), RESULTS / f"curves{ending}.png")
            save(plots.twin_frontiers(some), RESULTS / f"frontiers{ending}.png")
            save(plots.twin_variances(some), RESULTS / f"variances{ending}.png")
    save(target_noise.sample_figure(ds, TWINS), RESULTS / "samples.png")


def main() -> None:
    if "--text" not in sys.argv:
        ds = results().load()
        held = target_noise.answer(ds, draws=DRAWS) | {"missing": missing(ds)}
        controls = {part: target_noise.answer(results(part).load(), draws=DRAWS) for part in ("repeat", "sgd")}
        for path, content in ((ANSWER, held), (CONTROLS, controls)):
            write(path, json.dumps(content, ensure_ascii=False, separators=(",", ":")) + "\n")
        figures(ds)
        subprocess.run([sys.executable, str(HERE.parent / "scorecard.py"), "--exhibit", "twins"], check=True)
    write(PAGE, page(*(json.loads(path.read_text(encoding="utf-8")) for path in (ANSWER, CONTROLS))))


if __name__ == "__main__":
    main()
