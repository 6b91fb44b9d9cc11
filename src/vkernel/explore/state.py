"""The state of the page as one immutable value: training points, process, sampler, map, layers; and its address.

Everything on the page is a function of a :class:`State`. Coordinates are rounded to a thousandth, so that an address
restores the same points: a coordinate in [-2, 2] is one of 4,001 numbers, two characters of the URL-safe alphabet of
64 (:math:`64^2 = 4096`); a weight from 1 to 63 is one character. The address of a thousand points has 4 kB."""

from __future__ import annotations

import csv
import math
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode

import numpy as np

from vkernel.core.errors import InputError, require
from vkernel.process import Process, from_spec

ASSETS = Path(__file__).parent / "assets"
CONTENT = tomllib.loads((ASSETS / "content.toml").read_text(encoding="utf8"))
CONTROLS: dict[str, dict[str, Any]] = {c["name"]: c for group in CONTENT["controls"].values() for c in group}
LAYERS = tuple(layer["name"] for layer in CONTENT["layers"])
BOUNDS: dict[str, tuple[float, float]] = {name: c["bounds"] for name, c in CONTROLS.items() if "bounds" in c}
BOUNDS["t"] = (0.0, math.inf)
CHOICES = {name: tuple(value for value, _ in c["options"]) for name, c in CONTROLS.items() if name not in BOUNDS}
CHOICES["map"] = tuple(made["name"] for made in CONTENT["maps"])
SAMPLERS: tuple[str, ...] = CHOICES["sampler"]
WHOLE = ("steps", "K", "seed", "k")
FLAGS = ("compare", "outcome", "dark")
VERSION = "2"  # of the address
LIMIT = 2.0  # the window, and with it every coordinate, is [-LIMIT, LIMIT]
FIT = 1.5  # imported points that exceed the window are scaled to [-FIT, FIT]
MAX_POINTS, MAX_BYTES, MAX_WEIGHT = 1000, 1 << 20, 63
PROCESS_OPTIONS = {"edm": {"T": 10.0}}  # the default T of EDM, 80, is far outside the window
ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
CODE = {letter: k for k, letter in enumerate(ALPHABET)}
HEXAGON = ((1.0, 0.0), (0.5, 0.866), (-0.5, 0.866), (-1.0, 0.0), (-0.5, -0.866), (0.5, -0.866))
FIRST: dict[str, Any] = {"points": HEXAGON, "sampler": "exact", "t": 0.1}  # what an address of version 1 leaves out
FIRST_LAYERS = ("noise", "variance", "arrows", "boundaries", "particles", "law", "members", "exact")
Point = tuple[float, ...]


@dataclass(frozen=True)
class State:
    """One picture."""

    points: tuple[Point, ...] = ((-1.0,), (0.0,), (1.0,))
    weights: tuple[int, ...] = ()
    process: str = "vp"
    eps: float = 0.001
    steps: int = 60
    sampler: str = "linear"
    kappa: float = 0.01
    features: str = "gaussian"
    ratio: float = 1.0  # F/P, features per noised training point
    tau: float = 100.0
    K: int = 1  # draws averaged in a target; 0 for exact targets (J0)
    h: float = 0.2  # width of the smoothed score
    k: int = 2  # training points that the nearest-points score uses
    at: float = 1.0  # sigma/alpha below which the switch follows the exact score
    t: float = 0.05
    map: str = "noise"
    layers: tuple[str, ...] = ("particles", "law", "exact")
    compare: bool = False  # show the twin with exact targets beside the run
    outcome: bool = False  # in the plane, show where samples end instead of the field at t
    seed: int = 0
    dark: bool = False
    d: int = field(init=False, default=2, compare=False)  # coordinates of a point

    def __post_init__(self) -> None:
        points = tuple(tuple(_number("A coordinate", v, -LIMIT, LIMIT) for v in p) for p in self.points)
        require(points, "There is no training point; add one, or choose a set.")
        require(len(points) <= MAX_POINTS, f"The page takes up to {MAX_POINTS:,} points; got {len(points):,}.")
        sizes = {len(p) for p in points}
        require(sizes in ({1}, {2}), f"Points have one or two coordinates, all the same; got {sorted(sizes)}.")
        weights = tuple(int(_number("weight", w, 1, MAX_WEIGHT, True)) for w in self.weights) or (1,) * len(points)
        require(len(weights) == len(points), f"There are {len(points)} points but {len(weights)} weights.")
        unknown = sorted(set(self.layers) - set(LAYERS))
        require(not unknown, f"There is no layer {', '.join(unknown)}; there are {', '.join(LAYERS)}.")
        given = vars(self)
        for name, known in CHOICES.items():
            require(given[name] in known, f"{name} must be one of {', '.join(known)}; got {given[name]!r}.")
        checked: dict[str, Any] = {name: _number(name, given[name], *BOUNDS[name], name in WHOLE) for name in BOUNDS}
        checked |= {"points": clamp(points), "weights": weights, "d": len(points[0])}
        checked |= {name: bool(given[name]) for name in FLAGS}
        checked["layers"] = tuple(name for name in LAYERS if name in self.layers)
        given.update(checked)  # the instance is frozen
        process = self.make_process()
        given["t"] = min(max(self.t, process.eps), process.T)

    def replace(self, **changes: object) -> State:
        """Return this state with some fields changed; points that remain keep their weights, new ones weigh one."""
        points, fields = changes.get("points"), dict[str, Any](changes)
        if isinstance(points, Sequence) and "weights" not in changes:
            added, known = len(points) - len(self.points), dict(zip(self.points, self.weights, strict=True))
            removed = tuple(known.get(p, 1) for p in points) if added < 0 else ()
            fields["weights"] = removed or self.weights + (1,) * added
        return replace(self, **fields)

    def make_process(self) -> Process:
        """Build the forward process."""
        return from_spec({"kind": self.process, "eps": self.eps, **PROCESS_OPTIONS.get(self.process, {})})

    def to_dict(self) -> dict[str, object]:
        """Convert to JSON types; infinity becomes "inf"."""
        lists = {"points": [list(p) for p in self.points], "weights": list(self.weights), "layers": list(self.layers)}
        return vars(self) | lists | {"tau": "inf" if math.isinf(self.tau) else self.tau, "version": VERSION}

    def to_query(self) -> str:
        """Encode as the query of an address: the fields that differ from the default."""
        default, query = State(), {"v": VERSION}
        if self.points != default.points:
            codes = [round((v + LIMIT) * 1000) for p in self.points for v in p]
            query["x"] = str(self.d) + "".join(ALPHABET[k // 64] + ALPHABET[k % 64] for k in codes)
        if any(w != 1 for w in self.weights):
            query["w"] = "".join(ALPHABET[w] for w in self.weights)
        for name in (*BOUNDS, *CHOICES):
            if (value := vars(self)[name]) != vars(default)[name]:
                query[name] = value if isinstance(value, str) else f"{value:.6g}"
        if self.layers != default.layers:
            query["layers"] = "".join(str(k) for k, name in enumerate(LAYERS) if name in self.layers)
        return urlencode(query | {name: "1" for name in FLAGS if vars(self)[name]})


def from_query(query: str | Mapping[str, str]) -> tuple[State, str | None]:
    """Decode an address; if it is malformed, return the default state and a sentence that says why."""
    given = dict(parse_qsl(query.lstrip("?"), keep_blank_values=True)) if isinstance(query, str) else dict(query)
    found: dict[str, Any] = {name: given[name] for name in (*BOUNDS, *CHOICES) if name in given}
    if not found and not given.keys() & {"v", "x", "w", "layers", *FLAGS}:
        return State(), None
    try:
        return _decode(given, found), None
    except InputError as error:
        return State(), f"This address could not be read, so the page starts with its default state. {error}"


def _decode(given: Mapping[str, str], found: dict[str, Any]) -> State:
    version = given.get("v", VERSION)
    known = version in ("1", VERSION)
    require(known, f"It was made by version {version[:8]!r} of the page; this is version {VERSION}.")
    names = LAYERS if version == VERSION else FIRST_LAYERS
    found = found if version == VERSION else FIRST | found
    if "x" in given:
        size, letters = given["x"][:1], given["x"][1:]
        valid = size in ("1", "2") and letters and len(letters) % (2 * int(size)) == 0
        require(valid and all(a in CODE for a in letters), "Its points are truncated or garbled.")
        require(len(letters) <= 4 * MAX_POINTS, f"It contains more than {MAX_POINTS:,} points.")
        codes = [64 * CODE[a] + CODE[b] for a, b in zip(letters[::2], letters[1::2], strict=True)]
        found["points"] = (np.array(codes).reshape(-1, int(size)) / 1000 - LIMIT).tolist()
    if "w" in given:
        require(all(letter in CODE for letter in given["w"]), "Its weights contain invalid characters.")
        found["weights"] = tuple(CODE[letter] for letter in given["w"])
    if "layers" in given:
        valid = all(k in "0123456789" and int(k) < len(names) for k in given["layers"])
        require(valid, f"Its layers {given['layers'][:12]!r} are not numbers from 0 to {len(names) - 1}.")
        found["layers"] = tuple(names[int(k)] for k in given["layers"])
    if version == "1":  # maps were layers, and showed shares
        layers = found.get("layers", ("noise", "particles", "law", "exact"))
        found["map"] = "variance_share" if "variance" in layers else "share" if "noise" in layers else "none"
        found["layers"] = tuple(name for name in layers if name in LAYERS)
    found |= {name: given.get(name) == "1" for name in FLAGS}
    return State(**found)


def from_csv(text: str) -> tuple[tuple[Point, ...], tuple[int, ...], str]:
    """Read points and weights from CSV text; also return a sentence on what was done. A row is a point: one or two
    coordinates and, in a column with the header "weight" or "w", a whole number. If a point exceeds the window, all
    points are shifted and scaled into it by the same numbers."""
    size = len(text.encode())
    require(size <= MAX_BYTES, f"This file has {size / 1e6:.1f} MB; the page takes up to 1 MB.")
    require("\0" not in text, "This is not a text file: it contains null characters.")
    separator = next((c for c in ",;\t" if c in text[:4096]), ",")
    try:
        rows = [[cell.strip() for cell in row] for row in csv.reader(text.splitlines(), delimiter=separator)]
    except csv.Error as error:
        raise InputError(f"This file cannot be read as CSV: {error}.") from None
    rows = [row for row in rows if any(row)]
    require(rows, "This file is empty; a point is a row of one or two numbers.")
    named = any(math.isnan(_parse(cell)) and cell.lower() != "nan" for cell in rows[0])
    header = [name.lower() for name in rows.pop(0)] if named else []
    require(rows, "This file has a header and no row.")
    require(len(rows) <= MAX_POINTS, f"This file has {len(rows):,} rows; the page takes up to {MAX_POINTS:,} points.")
    heavy = next((k for k, name in enumerate(header) if name in ("weight", "weights", "w")), None)
    points, weights = [], []
    for number, row in enumerate(rows, start=1 + bool(header)):
        require(len(row) == len(rows[0]), f"Row {number} has {len(row)} columns, the first one {len(rows[0])}.")
        values = [_parse(cell) for cell in row]
        wrong = ", ".join(cell[:20] for cell, v in zip(row, values, strict=True) if not abs(v) < 1e100)
        require(not wrong, f"Row {number} contains {wrong!r}; coordinates must be finite numbers below 1e100.")
        weight = 1 if heavy is None else values.pop(heavy)
        weights.append(int(_number(f"weight in row {number}", weight, 1, MAX_WEIGHT, True)))
        points.append(values)
    require(len(points[0]) in (1, 2), f"This file has {len(points[0])} columns of coordinates; a point has one or two.")
    placed, remark = np.array(points), ""
    if np.abs(placed).max() > LIMIT:
        low, high = placed.min(0), placed.max(0)
        scale = FIT / ((high - low).max() / 2 or FIT)
        placed, remark = scale * (placed - (low + high) / 2), f", centred and scaled by {scale:.3g} to fit the window"
    sentence = f"{len(points):,} point{'s' * (len(points) > 1)} imported{remark}."
    return tuple(map(tuple, placed.tolist())), tuple(weights), sentence


def _parse(text: object) -> float:
    """Return the number in a text; NaN for other texts."""
    try:
        return float(text)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return math.nan


def _number(name: str, value: object, low: float, high: float, whole: bool = False) -> float:
    number, kind = _parse(value), "whole number" if whole else "number"
    valid = low <= number <= high and (not whole or number == int(number))
    require(valid, f"{name} must be a {kind} between {low:g} and {high:g}; got {str(value)[:20]!r}.")
    return int(number) if whole else number


def clamp(points: Iterable[Iterable[float]]) -> tuple[Point, ...]:
    """Round points, and move those outside the window to its edge: a drag may end there."""
    return tuple(tuple(round(min(max(float(v), -LIMIT), LIMIT), 3) + 0.0 for v in p) for p in points)
