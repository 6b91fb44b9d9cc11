"""An explanation in sentences and tables; its words stand in ``templates/explain.txt`` and ``explain.toml``."""

from __future__ import annotations

import itertools
import math
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from vkernel.core.estimate import Estimate
from vkernel.reports import html

if TYPE_CHECKING:
    import xarray
    from rich.table import Table
    from rich.text import Text

    from vkernel.reports.explain.result import Explanation

TEXTS = tomllib.loads(html.read("explain.toml"))
BASELINE = "gaussian"  # the theory over which gains are measured: its own are 0
MOST = 6  # columns of numbers on a screen
MEMORISE = 0.1  # of the samples: a share of copies that is mentioned


@dataclass(frozen=True)
class Level:
    """The best theory at one noise level, beside ceiling and floors. ``grade``: it "explains" the network, its gain is
    "weak", or there is "none" that is better than the Gaussian theory."""

    ratio: float  # σ/α
    grade: str
    theory: str | None
    gain: Estimate
    ceiling: Estimate
    permuted: float
    elsewhere: Estimate
    gaussian: float  # R² of the Gaussian theory
    ties: tuple[str, ...]  # other theories whose gain lies within the interval of the best


@dataclass(frozen=True)
class Answer:
    """The noise levels, from low to high, with the same grade and the same best theory."""

    grade: str
    theory: str | None
    levels: tuple[Level, ...]
    where: str  # their σ/α; neighbours are joined

    @property
    def gains(self) -> list[Estimate]:
        """The gain at each level, the least first."""
        return sorted((level.gain for level in self.levels), key=lambda gain: gain.value)

    @property
    def ceilings(self) -> list[float]:
        """The known ceilings."""
        return [level.ceiling.value for level in self.levels if math.isfinite(level.ceiling.value)]

    @property
    def gaussian(self) -> list[float]:
        """R² of the Gaussian theory at each level."""
        return [level.gaussian for level in self.levels]


@dataclass(frozen=True)
class Grid:
    """A table of texts; its first row is the head, and a line end divides a number from its interval."""

    title: str
    note: str
    rows: tuple[tuple[str, ...], ...]

    def __str__(self) -> str:
        return f"{self.title}\n{html.aligned(self.rows, 1)}\n{self.note}".rstrip()


def by_level(e: Explanation, network: str, images: str) -> list[Level]:
    """Return the best theory at each level, from low noise to high."""
    part = replace(e, denoising=e.denoising.sel(images=[images]))
    ds, pairs = part.verdict.sel(network=network), zip(part.best[network], part.well[network], strict=True)
    levels = [_level(ds.isel(level=k), *pair) for k, pair in enumerate(pairs)]
    return sorted((one for one in levels if math.isfinite(one.ratio)), key=lambda one: one.ratio)


def answers(levels: Sequence[Level]) -> list[Answer]:
    """Return the levels by grade and theory, in the order of the first level of each."""
    keys = [(level.grade, level.theory) for level in levels]
    held = {key: [level for level, own in zip(levels, keys, strict=True) if own == key] for key in dict.fromkeys(keys)}
    return [Answer(*key, tuple(own), where(own, levels)) for key, own in held.items()]


def where(some: Sequence[Level], levels: Sequence[Level]) -> str:
    """Return the σ/α of some of the levels, neighbours as a range: "0.1 … 0.5 and 8"."""
    runs = [list(run) for own, run in itertools.groupby(levels, lambda level: level in some) if own]
    parts = [" … ".join(dict.fromkeys((_digits(run[0].ratio), _digits(run[-1].ratio)))) for run in runs]
    return " and ".join(filter(None, (", ".join(parts[:-1]), *parts[-1:])))


def _level(at: xarray.Dataset, theory: str | None, well: bool) -> Level:
    own = at.isel(theory=int(at.gain.fillna(-math.inf).values.argmax())) if theory is None else at.sel(theory=theory)
    grade = "none" if theory is None else "explains" if well else "weak"
    # any theory has R² = 1 - E/S and R²_G = 1 - E/E_G: the Gaussian one has 1 - E_G/S, best known from a large E
    worst = at.isel(theory=int(at.gain.fillna(math.inf).values.argmin()))
    gaussian = 1 - float((1 - worst.r2) / (1 - worst.gain)) if float(worst.gain) < 1 else math.nan
    facts = _estimate(own, "gain"), _estimate(own, "ceiling"), float(own.permuted), _estimate(own, "elsewhere")
    ties = tuple(str(n) for n in at.theory.values[at.gain.values >= float(own.gain_low)] if n not in (theory, BASELINE))
    return Level(float(at.ratio), grade, theory, *facts, gaussian, ties)


def _estimate(one: xarray.Dataset, name: str) -> Estimate:
    """Return a number of a data set with the ends of its interval."""
    value, low, high = (float(one[name + end]) for end in ("", "_low", "_high"))
    return Estimate(value, math.nan, low, high)


def title(name: str) -> str:
    """Return the name of a theory in tables and figures; those of the user stay as they are."""
    return str(TEXTS["theories"].get(name, (name,))[0])


def named(name: str) -> str:
    """Return the name of a theory in sentences."""
    return str(TEXTS["theories"].get(name, (name,))[-1])


def text(block: str, **values: object) -> str:
    """Return the sentences of one block of ``templates/explain.txt``."""
    return html.sentences("explain.txt", block, named=named, isfinite=math.isfinite, MEMORISE=MEMORISE, **values)


def last_images(e: Explanation) -> str:
    """Return the images of the verdict: held-out ones, where there are some."""
    return str(e.verdict.images.item())


def verdict(e: Explanation, network: str) -> str:
    """Return the answer for one network: which theory explains its denoiser at which noise levels, where none does, and
    which theory has the samples most like its own."""
    own, images = e.samples.sel(network=network), last_images(e)
    known = [name for name in e.theories if math.isfinite(own.r2.sel(theory=name))]
    likest = max(known, key=lambda name: float(own.r2.sel(theory=name)), default=None)
    given: dict[str, object] = {"network": network, "images": images, "likest": likest}
    if likest is not None:
        sample = own.sel(theory=likest)
        given |= {"r2": _estimate(sample, "r2"), "ceiling": _estimate(sample, "ceiling")}
        given |= {"permuted": float(sample.permuted), "partner": str(sample.partner.item())}
    given["rivals"] = [name for name in e.theories if name != BASELINE]
    return text("verdict", e=e, found=answers(by_level(e, network, images)), **given)


def details(e: Explanation, network: str) -> list[str]:
    """Return what qualifies the verdict on one network: training images, the held-out floor, copies."""
    copying = {n: _estimate(e.samples.sel(network=network, theory=n), "copies") for n in e.theories}
    copying = {name: share for name, share in copying.items() if share.low > MEMORISE}
    own = Estimate(*(float(e.samples[f"own_copies{end}"].sel(network=network)) for end in ("", "", "_low", "_high")))
    images = last_images(e)
    levels, trained = (by_level(e, network, some) for some in (images, "training"))
    good = [one for one in levels if one.grade == "explains" and math.isfinite(one.elsewhere.high)]
    own_images = [one for one in good if one.gain.low > one.elsewhere.high]
    given = {"images": images, "found": answers(levels), "trained": answers(trained), "copying": copying, "own": own}
    given |= {"specific": where(own_images, levels)}
    given |= {"general": where([one for one in good if one not in own_images], levels)}
    built = e.denoising.sel(network=network, theory=list(dict.fromkeys(one.theory for one in own_images)))
    sizes = zip(built.points_elsewhere.values.tolist(), built.points.values.tolist(), strict=True)
    given["fewer"] = sorted({(few, many) for few, many in sizes if few < many})
    best = [one for one in levels if one.grade == "explains"]
    given["ties"] = {n: where([one for one in best if n in one.ties], levels) for n in e.theories}
    words = (text(block, network=network, **given) for block in ("ties", "on_training", "floor", "copies"))
    return [some for some in words if some]


def compared(e: Explanation) -> list[str]:
    """Return what was compared: images, levels and samples, the training images of each theory, and notes."""
    points: dict[tuple[str, bool], list[str]] = {}
    available = e.denoising.available.values
    for name in e.theories:
        counts = e.denoising.points.sel(theory=name).values
        if counts.any():
            points.setdefault((_whole(counts), bool((counts >= available).all())), []).append(title(name))
    points = dict(sorted(points.items(), key=lambda item: not item[0][1]))
    part = not all(whole for _, whole in points)
    return [text("compared", e=e, points=points, part=part, available=_whole(available)), *e.notes]


def _whole(counts: np.ndarray) -> str:
    """Return the range of whole numbers, "100" or "100 … 200"."""
    return " … ".join(dict.fromkeys(f"{int(end):,}" for end in (counts.min(), counts.max())))


def sentences(e: Explanation) -> list[str]:
    """Return the verdict on each network and what qualifies it, then what was compared."""
    return [line for name in e.networks for line in (verdict(e, name), *details(e, name))] + compared(e)


def tables(e: Explanation, network: str) -> list[Grid]:
    """Return the tables of one network: gains on each set of images, those of the verdict first, and samples."""
    return [*(_gains(e, network, str(images)) for images in e.denoising.images.values[::-1]), _samples(e, network)]


def _gains(e: Explanation, network: str, images: str) -> Grid:
    """Return gains by noise level: a row for each theory but the Gaussian one, then ceiling, floors and its R²."""
    levels, heads = by_level(e, network, images), TEXTS["gains"]
    ds = e.denoising.sel(network=network, images=images).sortby("ratio")  # NaN are last
    rows = [(heads["ratio"], *(_digits(level.ratio) for level in levels))]
    for name in (name for name in e.theories if name != BASELINE):
        own = [_estimate(ds.sel(theory=name).isel(level=k), "gain") for k in range(len(levels))]
        marks = ["*" if level.theory == name and level.grade == "explains" else "" for level in levels]
        cells = [mark + _cell(gain) for mark, gain in zip(marks, own, strict=True)]
        rows.append((f"{title(name)}\n{ds.about.sel(theory=name).item()}".rstrip(), *cells))
    rows.append((heads["ceiling"], *(_cell(level.ceiling) for level in levels)))
    rows.append((heads["elsewhere"], *(_cell(level.elsewhere) for level in levels)))
    rows.append((heads["permuted"], *(_number(level.permuted) for level in levels)))
    rows.append((heads["gaussian"], *(_number(level.gaussian) for level in levels)))
    kept = [row for row in rows if len(rows) == 1 or set(row[1:]) != {"–"}]
    return Grid(text("gains_title", network=network, images=images, e=e), text("gains_note", e=e), tuple(kept))


def _samples(e: Explanation, network: str) -> Grid:
    """Return a row for the network itself and for each theory: likeness to its samples, copies, distances, cost."""
    ds, heads = e.samples.sel(network=network), TEXTS["samples"]
    rows = [tuple(heads.values()), (network, "", _cell(_estimate(ds, "ceiling")), *_of_samples(ds, "own_"))]
    for name in e.theories:
        own = ds.sel(theory=name)
        built = f"{int(own.points):,}" if own.points else "–"
        rows.append((title(name), built, _cell(_estimate(own, "r2")), *_of_samples(own)))
    known = [k for k, column in enumerate(zip(*rows[1:], strict=True)) if set(column) != {"–"}]
    kept = tuple(tuple(row[k] for k in known) for row in rows)
    return Grid(text("samples_title", network=network, e=e), text("samples_note", e=e), kept)


def _of_samples(one: xarray.Dataset, who: str = "") -> tuple[str, ...]:
    """Return the cells on copies, distances to held-out images and seconds for a sample."""
    copies, *distances = (_estimate(one, who + name) for name in ("copies", "frechet", "kernel"))
    share = Estimate(*(100 * v for v in (copies.value, copies.se, copies.low, copies.high)))
    return (_cell(share, _digits), *(_cell(d, _digits) for d in distances), _digits(float(one[f"{who}seconds"])))


def _number(value: float) -> str:
    """Return two decimals, or two digits of a large number."""
    return "–" if not math.isfinite(value) else f"{value:.2f}" if abs(value) < 9.995 else _digits(value)


def _digits(value: float) -> str:
    return html.significant(value) if math.isfinite(value) else "–"


def _cell(e: Estimate, form: Callable[[float], str] = _number) -> str:
    """Return a number above its interval."""
    return form(e.value) + (f"\n{form(e.low)}…{form(e.high)}" if math.isfinite(e.low + e.high) else "")


def as_dict(e: Explanation) -> dict[str, object]:
    """Return everything but pictures as numbers, lists and dictionaries; numbers without a value are ``None``."""
    names = ("n", "held", "seed", "seconds", "quick")
    found: dict[str, object] = {name: vars(e)[name] for name in names} | {"sizes": vars(e.sizes)}
    found |= {"denoising": _columns(e.denoising), "samples": _columns(e.samples), "notes": list(e.notes)}
    found |= {"best": {k: list(v) for k, v in e.best.items()}, "well": {k: list(v) for k, v in e.well.items()}}
    return found | {"verdicts": {name: verdict(e, name) for name in e.networks}, "sentences": sentences(e)}


def _columns(ds: xarray.Dataset) -> dict[str, dict[str, list[object]]]:
    """Return the dimensions and the values of every variable."""
    found = {}
    for name, column in {**ds.coords, **ds.data_vars}.items():
        held = column.values.astype(object)
        if column.dtype.kind == "f":
            held[~np.isfinite(column.values)] = None
        found[str(name)] = {"dimensions": [*map(str, column.dims)], "values": held.tolist()}
    return found


def screen(e: Explanation) -> list[Text | Table]:
    """Return the verdict and the tables of each network for the terminal, without that of training images if there are
    others."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Column, Table
    from rich.text import Text

    lines: list[Text | Table] = []
    for name in e.networks:
        lines += [Text(verdict(e, name), "bold"), *map(Text, details(e, name))]
        gains, *_, samples = tables(e, name)
        for grid in (gains, samples):
            for rows in _narrow(grid.rows):
                head = [Column(Text(cell), justify="right" if k else "left") for k, cell in enumerate(rows[0])]
                table = Table(
                    *head, title=Text(grid.title), title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0)
                )
                table.pad_edge = False
                for row in rows[1:]:
                    table.add_row(*map(Text, row))
                lines.append(table)
            lines.append(Text(grid.note))
    return [*lines, *map(Text, compared(e))]


def _narrow(rows: Sequence[tuple[str, ...]]) -> list[list[tuple[str, ...]]]:
    """Return the rows of a table in parts with at most seven columns, each with the first one."""
    count = len(rows[0]) - 1
    parts = np.array_split(np.arange(1, count + 1), -(-count // MOST))
    return [[(row[0], *(row[k] for k in part)) for row in rows] for part in parts]
