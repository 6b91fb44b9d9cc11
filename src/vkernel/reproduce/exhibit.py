"""The vocabulary of the page: an exhibit has pictures, tables, a finding, a text, and its numbers on disk.

Code computes numbers. The text of an exhibit is the file ``texts/NAME.toml``, whose strings are Jinja templates over
these numbers:

===========================  ==========================================================================================
``sizes``                    how much was computed, one paragraph
``opening``, ``closing``     paragraphs before and after the pictures
``[finding]``                ``number``, ``interval`` and ``words``: the result of the exhibit
``[[claims]]``               claims of the paper that the exhibit decides, for the scorecard: see :class:`Claim`
``[pictures.NAME]``          ``alt``, for readers who do not see the picture, and ``caption``
``[tables.NAME]``            ``caption``, and ``cells``: a line for the head and one for each row, cells between " | "
``base``                     another such file, whose keys are added
``[study]``                  the study that the exhibit runs (:mod:`vkernel.study.spec`)
``[full]``                   sizes of what it computes itself
``[quick.study]``, [quick]   in a test, the values that replace those
===========================  ==========================================================================================

Lists hold paragraphs; those that are empty once filled in are left out. Filters are ``number`` (three significant
figures), ``percent``, ``interval`` ("low to high") and ``estimate`` ("value (low to high)"), of an
:class:`~vkernel.core.estimate.Estimate` or of three numbers, and ``mean`` ("value ± half width"), of a sample.
"""

import functools
import io
import math
import tempfile
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, SupportsFloat, TypeAlias, TypeVar

import jinja2
import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor
from xarray import Dataset

from vkernel import plots, study
from vkernel.core import rng
from vkernel.core.errors import require
from vkernel.core.estimate import Estimate
from vkernel.core.files import check_outputs, make_folder, write
from vkernel.core.progress import part
from vkernel.study.work import torch_threads

T = TypeVar("T")
Values = dict[str, Any]
Filled: TypeAlias = "str | tuple[Filled, ...] | dict[str, Filled]"  # a text, its paragraphs, or a table of such
NONE: Mapping[str, object] = {}
Draw = Callable[..., Figure]
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
MEMORY = 1 << 28  # of exact scores: fixed, so that blocks, and with them the rounding, are the same everywhere


class Skip(Exception):
    """Raised by an exhibit that cannot be made here; the message is a sentence for the page."""


class Picture(NamedTuple):
    """A picture is three files whose names begin with ``stem``, with a description and a caption."""

    stem: str
    alt: str
    caption: tuple[str, ...]
    width: int
    height: int


class Table(NamedTuple):
    """A table has numbers as text; the first cell of a row is its name."""

    caption: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


class KeyNumber(NamedTuple):
    """The number in which an exhibit results, its interval, and sentences about it."""

    number: str
    interval: str
    words: tuple[str, ...]


class Claim(NamedTuple):
    """A claim of the paper, what was computed of it, and the verdict.

    ``rule`` states in words when the claim holds. ``tests`` are the same as expressions over the values of the exhibit:
    the verdict is the first of ``holds``, ``fails`` and ``part`` whose expression is true, otherwise "undecided".
    ``origin`` is "paper", or "project" for a question that the paper raises and does not answer.
    """

    key: str
    section: str
    claim: str
    computed: str
    number: str
    verdict: str
    rule: str
    tests: dict[str, str]
    comment: str = ""
    origin: str = "paper"


VERDICTS = {"holds": "holds", "fails": "does not hold", "part": "holds in part"}
UNDECIDED = "undecided"


@dataclass(frozen=True)
class Exhibit:
    """One section of the page."""

    name: str
    pictures: tuple[Picture, ...]
    data: str
    sizes: str
    title: str = ""
    topic: str = ""
    opening: tuple[str, ...] = ()
    finding: KeyNumber | None = None
    tables: tuple[Table, ...] = ()
    claims: tuple[Claim, ...] = ()
    closing: tuple[str, ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True)
class Run:
    """The folder to write to, the seed, whether small sizes suffice, and ``step(share)``, which reports progress."""

    out: Path
    seed: int
    quick: bool
    step: Callable[[float], None]
    runner: str = "threads"  # of studies; a process that has one processor to itself takes "inline"

    def key(self, purpose: str, member: int = 0) -> int:
        """Return the seed of one purpose: it depends on the seed of the page and on nothing else."""
        return rng.key(self.seed, f"reproduce/{purpose}", member)

    def stream(self, purpose: str, member: int = 0) -> torch.Generator:
        """Return the random stream of one purpose."""
        return rng.stream(self.seed, f"reproduce/{purpose}", member)

    def sizes(self, name: str, key: str = "") -> SimpleNamespace:
        """Return the sizes ``[full]`` of an exhibit, or ``[quick]``, or one table of them."""
        found = read(name)["quick" if self.quick else "full"]
        return SimpleNamespace(**found[key] if key else found)

    def spec(self, name: str) -> Values:
        """Return the study of an exhibit; a quick run replaces values, and its ``grid`` the whole grid."""
        found: Values = {"title": name, "seed": self.seed, **read(name)["study"]}
        for key, value in read(name)["quick"]["study"].items() if self.quick else ():
            found[key] = {**found.get(key, {}), **value} if isinstance(value, dict) and key != "grid" else value
        return found

    def each(self, items: Iterable[T], share: float) -> Iterator[T]:
        """Yield items, and report their equal parts of ``share`` of the work of the exhibit as they are done."""
        given = list(items)
        for item in given:
            yield item
            self.step(share / len(given))

    def progress(self, share: float) -> Callable[[str, float], None]:
        """Return a callback for the progress, from 0 to 1, of work that is ``share`` of the exhibit."""
        return part(lambda _, done=1.0: self.step(done), "", share)

    def study(self, spec: Mapping[str, object], share: float, **changes: object) -> Dataset:
        """Run a study with some tables changed and return its results; it is ``share`` of the work of the exhibit."""
        whole = {**spec, **changes}
        whole["block"] = whole["members"]
        with tempfile.TemporaryDirectory() as folder:
            return study.run(whole, Path(folder, "store.zarr"), self.runner, progress=self.progress(share)).load()


@dataclass(frozen=True)
class Part:
    """An exhibit to be made: its title, its seconds on one processor, its function, its ``topic`` in the paper, the
    file of its text, and the name of the exhibit that it comes ``after``."""

    title: str
    seconds: float
    make: Callable[[Run], Exhibit]
    name: str = ""
    topic: str = ""
    text: str = ""
    after: str | None = None


class Page:
    """An exhibit in the making: the templates of its text, the values for them, and the pictures and tables so far."""

    def __init__(self, run: Run, name: str, arrays: Mapping[str, object], text: str = "", **values: object) -> None:
        self.run, self.name, self.arrays = run, name, arrays
        self.text, self.values = read(text or name), {**arrays, **values}
        self.pictures: list[Picture] = []

    def __call__(self, key: str, **more: object) -> Filled:
        """Fill in what stands under ``key``, such as "finding.words"; a template refers to another as ``text(key)``."""
        part: object = functools.reduce(lambda tree, name: tree[name], key.split("."), self.text)
        return _fill(part, self.values | more | {"text": functools.partial(self, **dict[str, Any](more))})

    def picture(
        self, stem: str, draw: Draw, *args: object, key: str = "main", more: Mapping[str, object] = NONE, **how: object
    ) -> None:
        """Add ``draw(*args, **how)``, for light and dark pages, as PNG and SVG, with the text ``pictures.key``."""
        text: Any = self(f"pictures.{key}", **more)
        dpi = 50 if self.run.quick else 144
        for dark in (False, True):
            with plots.style(dark=dark):
                figure = draw(*args, **how)
            png = plots.to_bytes(figure, "png", dpi)
            write(self.run.out / f"{stem}{'-dark' if dark else ''}.png", png)
            if not dark:
                figure.set_layout_engine("none")  # the layout is known from the PNG
                plots.save(figure, self.run.out / f"{stem}.svg", dpi)
        width, height = (int.from_bytes(png[at : at + 4], "big") for at in (16, 20))  # from the header of the file
        self.pictures.append(Picture(stem, text["alt"], text["caption"], width, height))

    def exhibit(self, share: float = 0.0, data: str = "") -> Exhibit:
        """Write the arrays, unless a file ``data`` holds them, and return the exhibit; drawing was ``share`` of it."""
        parts = ("sizes", "opening", "closing", "finding", "tables")
        found: dict[str, Any] = {key: self(key) for key in parts if key in self.text}
        if "finding" in found:
            found["finding"] = KeyNumber(**found["finding"])
        if not data:
            buffer = io.BytesIO()
            np.savez_compressed(buffer, **{key: np.asarray(value) for key, value in self.arrays.items()})  # type: ignore[arg-type]
            data = write(self.run.out / f"{self.name}.npz", buffer.getvalue()).name
        tables = []
        for table in found.pop("tables", {}).values():
            lines = [tuple(line.strip().split(" | ")) for line in table["cells"].splitlines() if line.strip()]
            tables += [Table(table["caption"], lines[0], tuple(lines[1:]))] if lines else []
        found["claims"] = tuple(self.claim(given) for given in self.text.get("claims", ()))
        self.run.step(share)
        return Exhibit(self.name, tuple(self.pictures), data, tables=tuple(tables), **found)

    def claim(self, given: Mapping[str, str]) -> Claim:
        """Fill in a claim and evaluate its expressions."""
        tests = {key: given[key] for key in VERDICTS if key in given}
        met = (key for key, test in tests.items() if _TEMPLATES.compile_expression(test, False)(self.values))
        verdict = VERDICTS.get(next(met, ""), UNDECIDED)
        values = self.values | {"verdict": verdict, "text": self}
        texts = {key: str(_fill(text, values)) for key, text in given.items() if key not in tests}
        return Claim(**texts, verdict=verdict, tests=tests)


@functools.cache
def read(name: str) -> dict[str, Any]:
    """Return the text of an exhibit."""
    found = tomllib.loads((resources.files("vkernel.reproduce") / "texts" / f"{name}.toml").read_text(encoding="utf-8"))
    return {**read(found["base"]), **found} if "base" in found else found


def _fill(part: Any, values: Mapping[str, object]) -> Filled:
    if isinstance(part, Mapping):
        return {key: _fill(value, values) for key, value in part.items()}
    if not isinstance(part, str):
        return tuple(text for text in (_fill(value, values) for value in part) if text)
    text = _TEMPLATES.from_string(part).render(values)
    for pattern in (" = ", " · ", " %", " / ", " → ", " ± ", "tr C", "σ² tr"):  # no line ends in a formula
        text = text.replace(pattern, pattern.replace(" ", "\u00a0"))
    return text.strip()


def number(value: SupportsFloat, digits: int = 3) -> str:
    """Format a number for a sentence, with powers of ten where it is very small or large; a count as it is."""
    if isinstance(value, int):
        return f"{value:,}"
    value = float(value)
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    if 1e-3 <= abs(value) < 1e5:
        return f"{value:,.{max(0, digits - 1 - math.floor(math.log10(abs(value))))}f}"
    mantissa, exponent = f"{value:.{digits - 2}e}".split("e")
    return f"{mantissa} · 10{str(int(exponent)).translate(_RAISED)}"


def percent(share: SupportsFloat) -> str:
    """Format a share of a whole, cut at 0 and 1, with one decimal below 10 %."""
    share = min(1.0, max(0.0, float(share)))
    return f"{100 * share:.1f} %" if share < 0.0995 else f"{100 * share:.0f} %"


def interval(found: Estimate | Sequence[SupportsFloat], form: int | str = 3) -> str:
    """Format the interval of an estimate, "low to high", with so many digits, as "%" or in a format such as ".2f"."""
    low, high = (found.low, found.high) if isinstance(found, Estimate) else found[1:]
    return f"{_format(low, form)} to {_format(high, form)}"


def estimate(found: Estimate | Sequence[SupportsFloat], form: int | str = 3, ends: int | str = "") -> str:
    """Format an estimate with its interval, "value (low to high)"; ``ends`` is the format of the interval."""
    value = found.value if isinstance(found, Estimate) else found[0]
    return f"{_format(value, form)} ({interval(found, ends or form)})"


def _format(value: SupportsFloat, form: int | str) -> str:
    if form == "%":
        return percent(value)
    return number(value, form) if isinstance(form, int) else f"{float(value):{form}}"


def mean(values: Tensor) -> str:
    """Format the mean of a sample with the half width of its interval, "value ± half width"."""
    found = Estimate.of_mean(values)
    return f"{found.value:.3f} ± {found.high - found.value:.3f}"


_TEMPLATES = jinja2.Environment(undefined=jinja2.StrictUndefined)
_TEMPLATES.filters |= {"number": number, "percent": percent, "interval": interval, "estimate": estimate, "mean": mean}

one_thread = functools.partial(torch_threads, 1)  # in many steps on small arrays, threads wait longer than they work


def open_folder(out: Path) -> Path:
    """Make the folder if needed; refuse one where nothing can be written, and one that holds other files than ours:
    figures have plain names, such as weights.npz, and would overwrite some. Hidden files do not matter."""
    out = make_folder(out)
    foreign = any(not p.name.startswith(".") for p in out.iterdir()) and not (out / "scorecard.json").exists()
    require(not foreign, f"{out} holds files that vkernel reproduce did not write. Give another --out.")
    check_outputs({"--out": out / "index.html"}, ())
    return out
