"""The state of the page as one immutable value: training points, process, sampler, layers; and its address.

Everything on the page is a function of a :class:`State`. Coordinates are rounded to a thousandth, so that an address
restores the same points: a coordinate in [-2, 2] is one of 4,001 numbers, two characters of the URL-safe alphabet of
64 (:math:`64^2 = 4096`); a weight from 1 to 63 is one character. The address of a thousand points has 4 kB.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import parse_qsl, urlencode

import numpy as np

from vkernel.core.errors import InputError, require
from vkernel.process import Process, from_spec

VERSION = "1"  # of the address
LIMIT = 2.0  # the window, and with it every coordinate, is [-LIMIT, LIMIT]
FIT = 1.5  # imported points that exceed the window are scaled to [-FIT, FIT]
MAX_POINTS, MAX_BYTES, MAX_WEIGHT = 1000, 1 << 20, 63
SAMPLERS = ("exact", "naive", "effective", "linear", "ntk", "mlp")
LAYERS = ("noise", "variance", "arrows", "boundaries", "particles", "law", "members", "exact")
PROCESS_OPTIONS = {"edm": {"T": 10.0}}  # the default T of EDM, 80, is far outside the window
PROCESSES, FEATURES = ("vp", "vpsong", "cosine", "flow", "toy", "edm"), ("gaussian", "fourier")
CHOICES = {"process": PROCESSES, "sampler": SAMPLERS, "features": FEATURES}
BOUNDS = {
    "eps": (1e-4, 0.3), "steps": (5, 300), "kappa": (0.0, 1.0), "ratio": (0.125, 8.0), "tau": (0.0, math.inf),
    "K": (0, 64), "t": (0.0, math.inf), "seed": (0, 9999),
}  # fmt: skip
WHOLE = ("steps", "K", "seed")
ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
CODE = {letter: k for k, letter in enumerate(ALPHABET)}
HEXAGON = ((1.0, 0.0), (0.5, 0.866), (-0.5, 0.866), (-1.0, 0.0), (-0.5, -0.866), (0.5, -0.866))

Point = tuple[float, ...]


@dataclass(frozen=True)
class State:
    """One picture.

    ``ratio`` is F/P, features per noised training point; ``K`` the number of draws averaged in a target, 0 for
    noiseless targets (J0); ``d`` follows from the points.
    """

    points: tuple[Point, ...] = HEXAGON
    weights: tuple[int, ...] = ()
    process: str = "vp"
    eps: float = 0.001
    steps: int = 60
    sampler: str = "exact"
    kappa: float = 0.01
    features: str = "gaussian"
    ratio: float = 1.0
    tau: float = 100.0
    K: int = 1
    t: float = 0.1
    layers: tuple[str, ...] = ("noise", "particles", "law", "exact")
    seed: int = 0
    dark: bool = False
    d: int = field(init=False, default=2, compare=False)

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
        checked |= {"points": clamp(points), "weights": weights, "d": len(points[0]), "dark": bool(self.dark)}
        checked["layers"] = tuple(name for name in LAYERS if name in self.layers)
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        process = self.make_process()
        object.__setattr__(self, "t", min(max(self.t, process.eps), process.T))

    def replace(self, **changes: Any) -> State:
        """Return this state with some fields changed; a different number of points resets the weights to one."""
        if "points" in changes and "weights" not in changes:
            changes["weights"] = self.weights if len(changes["points"]) == len(self.points) else ()
        return replace(self, **changes)

    def make_process(self) -> Process:
        """Build the forward process."""
        return from_spec({"kind": self.process, "eps": self.eps, **PROCESS_OPTIONS.get(self.process, {})})

    def to_dict(self) -> dict[str, Any]:
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
        return urlencode(query | ({"dark": "1"} if self.dark else {}))


def from_query(query: str | Mapping[str, str]) -> tuple[State, str | None]:
    """Decode an address; if it is malformed, return the default state and a sentence that says why."""
    given = dict(parse_qsl(query.lstrip("?"), keep_blank_values=True)) if isinstance(query, str) else dict(query)
    if not given.keys() & {"v", "x", "w", "layers", "dark", *BOUNDS, *CHOICES}:
        return State(), None
    try:
        return _decode(given), None
    except InputError as error:
        return State(), f"This address could not be read, so the page starts with its default state. {error}"


def _decode(given: Mapping[str, str]) -> State:
    version = given.get("v", VERSION)
    require(version == VERSION, f"It was made by version {version[:8]!r} of the page; this is version {VERSION}.")
    found: dict[str, Any] = {name: given[name] for name in (*BOUNDS, *CHOICES) if name in given}
    if "x" in given:
        found["points"] = _decode_points(given["x"])
    if "w" in given:
        require(all(letter in CODE for letter in given["w"]), "Its weights contain invalid characters.")
        found["weights"] = tuple(CODE[letter] for letter in given["w"])
    if "layers" in given:
        valid = all(k in "0123456789" and int(k) < len(LAYERS) for k in given["layers"])
        require(valid, f"Its layers {given['layers'][:12]!r} are not numbers from 0 to {len(LAYERS) - 1}.")
        found["layers"] = tuple(LAYERS[int(k)] for k in given["layers"])
    return State(**found, dark=given.get("dark") == "1")


def _decode_points(text: str) -> tuple[Point, ...]:
    size, letters = text[:1], text[1:]
    valid = size in ("1", "2") and letters and len(letters) % (2 * int(size)) == 0
    require(valid and all(a in CODE for a in letters), "Its points are truncated or garbled.")
    require(len(letters) <= 4 * MAX_POINTS, f"It contains more than {MAX_POINTS:,} points.")
    pairs = zip(letters[::2], letters[1::2], strict=True)
    values = [(64 * CODE[a] + CODE[b]) / 1000 - LIMIT for a, b in pairs]
    return tuple(tuple(values[i : i + int(size)]) for i in range(0, len(values), int(size)))


def from_csv(text: str) -> tuple[tuple[Point, ...], tuple[int, ...], str]:
    """Read points and weights from CSV text; also return a sentence on what was done.

    A row is a point: one or two columns of coordinates. A header may name them; a column "weight" or "w" holds whole
    numbers. If a point exceeds the window, all points are shifted and scaled into it by the same numbers.
    """
    size = len(text.encode())
    require(size <= MAX_BYTES, f"This file has {size / 1e6:.1f} MB; the page takes up to 1 MB.")
    require("\0" not in text, "This is not a text file: it contains null characters.")
    separator = next((c for c in ",;\t" if c in text[:4096]), ",")
    try:
        rows = [[cell.strip() for cell in row] for row in csv.reader(io.StringIO(text), delimiter=separator)]
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
    placed, remark = _fit_window(np.array(points))
    sentence = f"{len(points):,} point{'s' * (len(points) > 1)} imported{remark}."
    return tuple(map(tuple, placed.tolist())), tuple(weights), sentence


def _parse(text: object) -> float:
    """Return the number in a text; NaN for other texts."""
    try:
        return float(text)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return math.nan


def _fit_window(points: np.ndarray) -> tuple[np.ndarray, str]:
    if np.abs(points).max() <= LIMIT:
        return points, ""
    low, high = points.min(0), points.max(0)
    half = (high - low).max() / 2
    scale = FIT / half if half > 0 else 1.0
    return scale * (points - (low + high) / 2), f", centred and scaled by {scale:.3g} to fit the window"


def _number(name: str, value: object, low: float, high: float, whole: bool = False) -> float:
    number, kind = _parse(value), "whole number" if whole else "number"
    valid = low <= number <= high and (not whole or number == int(number))
    require(valid, f"{name} must be a {kind} between {low:g} and {high:g}; got {str(value)[:20]!r}.")
    return int(number) if whole else number


def clamp(points: Iterable[Iterable[float]]) -> tuple[Point, ...]:
    """Round points, and move those outside the window to its edge: a drag may end there."""
    return tuple(tuple(round(min(max(float(v), -LIMIT), LIMIT), 3) + 0.0 for v in p) for p in points)


def weights_after(state: State, points: Sequence[Point]) -> tuple[int, ...]:
    """Match weights to points that were moved, appended or removed."""
    if len(points) < len(state.points):
        known = dict(zip(state.points, state.weights, strict=True))
        return tuple(known.get(p, 1) for p in points)
    return state.weights + (1,) * (len(points) - len(state.points))
