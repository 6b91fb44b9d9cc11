"""What the page shows, as one immutable value: training points, process, sampler, layers, and the address that says it.

Everything on the page is a function of a :class:`State`. Coordinates are kept to a thousandth, so that the address
gives the same points back: a coordinate in [-2, 2] is one of 4,001 numbers, two characters of the URL-safe alphabet of
64 (:math:`64^2 = 4096`); a weight from 1 to 63 is one character. A thousand points are an address of 4 kB.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any
from urllib.parse import parse_qsl, urlencode

from vkernel.core.errors import InputError, require
from vkernel.process import PROCESSES, Process

__all__ = ["LAYERS", "LIMIT", "SAMPLERS", "State", "from_csv", "from_query", "weights_after"]

VERSION = "1"
LIMIT = 2.0  # points, and the window, lie in [-LIMIT, LIMIT]
FIT = 1.5  # imported points that do not fit are scaled to this
MOST_POINTS, MOST_BYTES, MOST_WEIGHT = 1000, 1 << 20, 63
SAMPLERS = ("exact", "naive", "effective", "linear", "ntk", "mlp")
LAYERS = ("noise", "variance", "arrows", "boundaries", "particles", "law", "members", "exact")
KINDS = ("vp", "vpsong", "cosine", "flow", "toy", "edm")
LATEST = {"edm": 10.0}  # EDM's own T, 80, is far outside the window
ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
CODE = {letter: k for k, letter in enumerate(ALPHABET)}
HEXAGON = ((1.0, 0.0), (0.5, 0.866), (-0.5, 0.866), (-1.0, 0.0), (-0.5, -0.866), (0.5, -0.866))

Point = tuple[float, ...]


@dataclass(frozen=True)
class State:
    """One picture. ``K`` is the number of draws averaged in a target, 0 for noiseless targets (J0)."""

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
        points = tuple(tuple(_rounded(v) for v in p) for p in self.points)
        require(points, "There is no training point; add one, or choose a set.")
        require(len(points) <= MOST_POINTS, f"The page takes up to {MOST_POINTS:,} points; got {len(points):,}.")
        sizes = {len(p) for p in points}
        require(sizes in ({1}, {2}), f"Points have one or two coordinates, all the same; got {sorted(sizes)}.")
        weights = tuple(_whole("weight", w, 1, MOST_WEIGHT) for w in self.weights) or (1,) * len(points)
        good = len(weights) == len(points)
        require(good, f"There are {len(points)} points but {len(weights)} weights; give one to each.")
        require(self.process in KINDS, f"There is no process {self.process!r} here; there are {', '.join(KINDS)}.")
        require(self.sampler in SAMPLERS, f"Nothing samples by {self.sampler!r}; choose from {', '.join(SAMPLERS)}.")
        known = ("gaussian", "fourier")
        require(self.features in known, f"Features are gaussian or fourier, not {self.features!r}.")
        layers = tuple(name for name in LAYERS if name in self.layers)
        odd = sorted(set(self.layers) - set(LAYERS))
        require(not odd, f"There is no layer {', '.join(odd)}; there are {', '.join(LAYERS)}.")
        given: dict[str, Any] = {
            "points": points,
            "weights": weights,
            "layers": layers,
            "d": len(points[0]),
            "eps": _number("eps", self.eps, 1e-4, 0.3),
            "kappa": _number("kappa", self.kappa, 0.0, 1.0),
            "ratio": _number("F/P", self.ratio, 0.125, 8.0),
            "tau": _number("tau", self.tau, 0.0, math.inf),
            "steps": _whole("steps", self.steps, 5, 300),
            "K": _whole("K", self.K, 0, 64),
            "seed": _whole("seed", self.seed, 0, 9999),
            "dark": bool(self.dark),
        }
        for name, value in given.items():
            object.__setattr__(self, name, value)
        process, t = self.make_process(), _number("t", self.t, 0.0, math.inf)
        object.__setattr__(self, "t", min(max(t, process.eps), process.T))

    def but(self, **changes: Any) -> State:
        """The same picture with some things changed; new points have weight one unless told."""
        if "points" in changes and "weights" not in changes:
            changes["weights"] = self.weights if len(changes["points"]) == len(self.points) else ()
        return replace(self, **changes)

    def make_process(self) -> Process:
        """The forward process."""
        kind: Any = PROCESSES[self.process]
        made: Process = kind(eps=self.eps, **({"T": LATEST[self.process]} if self.process in LATEST else {}))
        return made

    def has(self, layer: str) -> bool:
        """Whether a layer is on."""
        return layer in self.layers

    def to_dict(self) -> dict[str, Any]:
        """The state in JSON; infinity is the word "inf"."""
        found = {f.name: getattr(self, f.name) for f in fields(self)}
        lists = {"points": [list(p) for p in self.points], "weights": list(self.weights), "layers": list(self.layers)}
        return found | lists | {"tau": "inf" if math.isinf(self.tau) else self.tau, "version": VERSION}

    def to_query(self) -> str:
        """The state as the query of an address: what differs from the default."""
        default, said = State(), {"v": VERSION}
        if self.points != default.points:
            said["x"] = str(self.d) + "".join(_letters(v) for p in self.points for v in p)
        if any(w != 1 for w in self.weights):
            said["w"] = "".join(ALPHABET[w] for w in self.weights)
        for name in NUMBERS + WORDS:
            if (value := getattr(self, name)) != getattr(default, name):
                said[name] = value if isinstance(value, str) else f"{value:.6g}"
        if self.layers != default.layers:
            said["layers"] = "".join(str(k) for k, name in enumerate(LAYERS) if name in self.layers)
        if self.dark:
            said["dark"] = "1"
        return urlencode(said)


NUMBERS = ("eps", "steps", "kappa", "ratio", "tau", "K", "t", "seed")
WORDS = ("process", "sampler", "features")


def from_query(query: str | Mapping[str, str]) -> tuple[State, str | None]:
    """The state that an address says, and a sentence where it says none: then the state is the default one."""
    given = dict(parse_qsl(query.lstrip("?"), keep_blank_values=True)) if isinstance(query, str) else dict(query)
    if not given.keys() & {"v", "x", "w", "layers", "dark", *NUMBERS, *WORDS}:
        return State(), None
    try:
        return _read(given), None
    except InputError as error:
        return State(), f"This address could not be read, so the page starts afresh. {error}"


def _read(given: Mapping[str, str]) -> State:
    version = given.get("v", VERSION)
    require(version == VERSION, f"It was made by version {version[:8]!r} of the page; this is version {VERSION}.")
    found: dict[str, Any] = {name: given[name] for name in WORDS if name in given}
    for name in NUMBERS:
        if name in given:
            found[name] = _parsed(name, given[name])
    if "x" in given:
        found["points"] = _decoded(given["x"])
    if "w" in given:
        good = all(letter in CODE for letter in given["w"])
        require(good, "Its weights hold characters that stand for none.")
        found["weights"] = tuple(CODE[letter] for letter in given["w"])
    if "layers" in given:
        good = all(k in "0123456789" and int(k) < len(LAYERS) for k in given["layers"])
        require(good, f"Its layers {given['layers'][:12]!r} are not numbers from 0 to {len(LAYERS) - 1}.")
        found["layers"] = tuple(LAYERS[int(k)] for k in given["layers"])
    return State(**found, dark=given.get("dark") == "1")


def _parsed(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise InputError(f"Its {name} is {text[:20]!r}, which is no number.") from None
    return value


def _letters(v: float) -> str:
    k = round((v + LIMIT) * 1000)
    return ALPHABET[k // 64] + ALPHABET[k % 64]


def _decoded(text: str) -> tuple[Point, ...]:
    size, letters = text[:1], text[1:]
    good = size in ("1", "2") and letters and len(letters) % (2 * int(size)) == 0
    require(good and all(a in CODE for a in letters), "Its points are cut off or garbled.")
    require(len(letters) <= 4 * MOST_POINTS, f"It holds more than {MOST_POINTS:,} points.")
    pairs = zip(letters[::2], letters[1::2], strict=True)
    values = [(64 * CODE[a] + CODE[b]) / 1000 - LIMIT for a, b in pairs]
    return tuple(tuple(values[i : i + int(size)]) for i in range(0, len(values), int(size)))


def from_csv(text: str) -> tuple[tuple[Point, ...], tuple[int, ...], str]:
    """Points and weights of a CSV file, and a sentence on what was done.

    One point a row: one or two columns of coordinates. A heading may name them, and a column "weight" or "w" holds
    whole numbers. Points that leave the window are moved and scaled into it, all alike.
    """
    size = len(text.encode())
    require(size <= MOST_BYTES, f"This file has {size / 1e6:.1f} MB; the page takes up to 1 MB.")
    require("\0" not in text, "This is no text file: it holds null characters.")
    try:
        sample = text[:4096]
        separator = next((c for c in (",", ";", "\t") if c in sample), ",")
        rows = [[cell.strip() for cell in row] for row in csv.reader(io.StringIO(text), delimiter=separator)]
    except csv.Error as error:
        raise InputError(f"This file cannot be read as CSV: {error}.") from None
    rows = [row for row in rows if any(row)]
    require(rows, "This file is empty; a point is a row of one or two numbers.")
    head = [] if _are_numbers(rows[0]) else [name.lower() for name in rows.pop(0)]
    require(rows, "This file has a heading and no row.")
    require(len(rows) <= MOST_POINTS, f"This file has {len(rows):,} rows; the page takes up to {MOST_POINTS:,} points.")
    heavy = next((k for k, name in enumerate(head) if name in ("weight", "weights", "w")), None)
    points, weights = [], []
    for number, row in enumerate(rows, start=1 + bool(head)):
        good = len(row) == len(rows[0])
        require(good, f"Row {number} has {len(row)} columns, the first one {len(rows[0])}.")
        values = [_cell(cell, number) for cell in row]
        weights.append(1 if heavy is None else _whole(f"weight in row {number}", values.pop(heavy), 1, MOST_WEIGHT))
        points.append(values)
    d = len(points[0])
    require(d in (1, 2), f"This file has {d} columns of coordinates; a point here has one or two.")
    placed, said = _placed(points)
    plural = "s" if len(points) > 1 else ""
    return placed, tuple(weights), f"{len(points):,} point{plural} imported{said}."


def _are_numbers(row: Sequence[str]) -> bool:
    try:
        return all(math.isfinite(float(cell)) or True for cell in row)
    except ValueError:
        return False


def _cell(cell: str, row: int) -> float:
    try:
        value = float(cell)
    except ValueError:
        raise InputError(f"Row {row} holds {cell[:20]!r}, which is no number.") from None
    require(math.isfinite(value), f"Row {row} holds {cell[:20]!r}; coordinates must be finite.")
    require(abs(value) < 1e100, f"Row {row} holds {cell[:20]!r}, which is too large.")
    return value


def _placed(points: Sequence[Sequence[float]]) -> tuple[tuple[Point, ...], str]:
    """Points as they are if they fit the window, else moved and scaled, all by the same numbers."""
    if all(abs(v) <= LIMIT for p in points for v in p):
        return tuple(tuple(p) for p in points), ""
    ends = [(min(axis), max(axis)) for axis in zip(*points, strict=True)]
    half = max((high - low) / 2 for low, high in ends)
    scale = FIT / half if half > 0 else 1.0
    middles = [(low + high) / 2 for low, high in ends]
    moved = tuple(tuple(scale * (v - m) for v, m in zip(p, middles, strict=True)) for p in points)
    return moved, f", moved to the middle and scaled by {scale:.3g} to fit the window"


def _rounded(v: Any) -> float:
    try:
        value = float(v)
    except (TypeError, ValueError):
        raise InputError(f"A coordinate is {v!r}, which is no number.") from None
    require(math.isfinite(value), f"A coordinate is {value}; points must be finite.")
    require(abs(value) <= LIMIT, f"A coordinate is {value:g}, outside the window [-{LIMIT:g}, {LIMIT:g}].")
    return round(value, 3) + 0.0


def _number(name: str, value: Any, low: float, high: float) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise InputError(f"{name} must be a number, not {value!r}.") from None
    require(low <= number <= high, f"{name} must lie between {low:g} and {high:g}; got {number:g}.")
    return number


def _whole(name: str, value: Any, low: int, high: int) -> int:
    number = _number(name, value, low, high)
    require(number == int(number), f"{name} must be a whole number; got {number:g}.")
    return int(number)


def clamped(points: Iterable[Iterable[float]]) -> tuple[Point, ...]:
    """Points brought back to the window's edge: a drag may end outside it."""
    return tuple(tuple(min(max(float(v), -LIMIT), LIMIT) for v in p) for p in points)


def weights_after(state: State, points: Sequence[Point]) -> tuple[int, ...]:
    """Weights after points were moved, added at the end or removed."""
    if len(points) == len(state.points):
        return state.weights
    if len(points) > len(state.points):
        return state.weights + (1,) * (len(points) - len(state.points))
    known = dict(zip(state.points, state.weights, strict=True))
    return tuple(known.get(p, 1) for p in points)
