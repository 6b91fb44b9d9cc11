"""What a study is: a TOML file, or a dictionary of the same form, checked at the door.

================  ======================================================================================================
``[data]``        ``name`` of a toy set (``rotation`` for the square), ``path`` of a file, ``points``, or ``even = n``
                  evenly spaced numbers on [-1, 1]; ``weights``
``[process]``     ``kind`` (vp, vpsong, cosine, ve, edm, flow, toy) and its numbers, such as ``eps``; or ``cutoff``, the
                  sigma/alpha that is left at eps, to compare processes at equal noise
``[model]``       ``kind`` linear (``features`` gaussian, fourier, polynomial or random; ``per_axis``, ``low``,
                  ``high``), lazy (``kernel``, ``depth``, ``activation``, ``tau``) or mlp (``width``, ``depth``, ``lr``,
                  …)
``[training]``    ``draws`` P or ``F_over_P`` (linear models), ``times``, ``vary``
``[objective]``   ``K`` targets averaged: 1 is J1, inf is J0; ``of`` draws, subset or efm
``[sampler]``     ``samples``, ``steps``, ``method``, ``spacing``; ``law`` members, field or semiclassical
``[measure]``     what is kept of each member: ``gap``, ``away``, ``bins`` …
``[grid]``        any field of these, ``"table.field" = [values]`` or ``{name = …, values = […], labels = […]}``, where
                  ``about`` is what an axis says; a whole table is a factor too: ``data = {values = [{…}, {…}], …}``
``[large]``       the same fields with other values, for ``--large``
``[figure]``      what is drawn; ``[finding]``: which two conditions are compared
================  ======================================================================================================

Every error names the key and says what would do.
"""

from __future__ import annotations

import copy
import itertools
import json
import math
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from vkernel.core.errors import InputError, require
from vkernel.process import from_spec as make_process
from vkernel.study.shipped import find

__all__ = ["Condition", "Factor", "Spec", "read"]

TAKEN = {"member", "x", "y", "time", "place", "point", "block", "done"} | {
    "away", "gap", "nearest", "share", "density", "score",
}  # fmt: skip
TABLES = ("data", "process", "model", "training", "objective", "sampler", "measure")


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Data(_Table):
    """Which training set."""

    name: str | None = None
    rotation: float | None = None
    path: str | None = None
    points: list[list[float]] | list[float] | None = None
    even: int | None = Field(None, ge=2)
    weights: list[float] | None = None

    @model_validator(mode="after")
    def _one(self) -> Data:
        given = [k for k in ("name", "path", "points", "even") if getattr(self, k) is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one of name, path, points and even; got {', '.join(given) or 'none'}")
        sizes = {len(p) for p in self.points or [] if isinstance(p, list)}
        if len(sizes) > 1:
            raise ValueError(f"points must have equally many coordinates; got {sorted(sizes)}")
        return self


class ProcessTable(BaseModel):
    """Which forward process; its own numbers are checked when it is made."""

    model_config = ConfigDict(extra="allow", frozen=True)
    kind: str = "vp"

    def with_eps(self) -> ProcessTable:
        """The table with the eps that a ``cutoff`` asks for."""
        given = self.model_dump()
        cutoff = given.pop("cutoff", None)
        if cutoff is None:
            return self
        require("eps" not in given, "process: give eps or cutoff, not both.")
        good = isinstance(cutoff, int | float) and math.isfinite(cutoff) and cutoff > 0
        require(good, f"process.cutoff must be a positive number, sigma/alpha at eps; got {cutoff!r}.")
        try:
            eps = make_process({**given, "eps": 0.0}).time(torch.tensor(cutoff, dtype=torch.float64))
        except InputError as error:
            raise InputError(f"process.cutoff: {error}") from None
        return ProcessTable(**given, eps=float(eps))


class Model(_Table):
    """Which model, with the arguments of its constructor."""

    kind: Literal["linear", "lazy", "mlp"] = "linear"
    target: Literal["score", "x0", "noise"] = "x0"
    ridge: float = Field(0.1, ge=0)
    features: Literal["gaussian", "fourier", "polynomial", "random"] = "gaussian"
    per_axis: int = Field(16, ge=1)
    low: float = -1.5
    high: float = 1.5
    length: float = Field(0.5, gt=0)
    kernel: Literal["ntk", "nngp", "rbf"] = "ntk"
    activation: str | None = None  # relu for lazy models, silu for networks
    depth: int = Field(2, ge=1)
    tau: float = Field(math.inf, gt=0)
    init: bool = True
    width: int = Field(64, ge=1)
    lr: float = Field(1e-3, gt=0)
    batch: int | None = Field(64, ge=1)
    steps: int = Field(1000, ge=1)


class TrainingTable(_Table):
    """How many draws, of which times, and what differs between members."""

    draws: int | None = Field(None, ge=1)
    F_over_P: float | None = Field(None, gt=0)
    times: Literal["uniform", "log"] = "uniform"
    vary: list[Literal["inputs", "targets", "init", "order"]] = ["inputs", "targets", "init", "order"]

    @model_validator(mode="after")
    def _one(self) -> TrainingTable:
        if self.draws is not None and self.F_over_P is not None:
            raise ValueError("give draws or F_over_P, not both")
        return self


class ObjectiveTable(_Table):
    """How many targets are averaged: 1 is J1, inf is J0."""

    K: float = 1.0
    of: Literal["draws", "subset", "efm"] = "draws"

    @model_validator(mode="after")
    def _whole(self) -> ObjectiveTable:
        if not (math.inf == self.K or (self.K >= 1 and int(self.K) == self.K)):
            raise ValueError(f"K must be a whole number ≥ 1, or inf for J0; got {self.K!r}")
        return self


class Sampler(_Table):
    """How samples are taken: of the members, of Gaussian fields with their V, or semiclassically."""

    samples: int = Field(256, ge=1)
    steps: int = Field(100, ge=1)
    method: Literal["euler", "heun", "exponential", "dopri5"] = "exponential"
    spacing: Literal["uniform", "log", "edm"] | None = "log"
    law: Literal["members", "field", "semiclassical"] = "members"
    sets: int = Field(64, ge=8)


class Measure(_Table):
    """What is kept of each member."""

    gap: tuple[float, float] | None = None
    away: float = Field(0.5, gt=0, lt=1)
    bins: int = Field(60, ge=1)
    limit: float = Field(1.5, gt=0)
    times: list[float] = []
    places: int = Field(0, ge=0)

    @model_validator(mode="after")
    def _ordered(self) -> Measure:
        if self.gap is not None and not 0 <= self.gap[0] < self.gap[1]:
            raise ValueError(f"gap must be [low, high] with 0 ≤ low < high; got {list(self.gap)}")
        return self


class Figure(_Table):
    """What ``study plot`` draws: a value against a factor, one line for each value of another, or a phase diagram."""

    x: str
    lines: str | None = None
    y: str | None = None
    value: str = "away"
    log: bool = False
    title: str | None = None


class Finding(_Table):
    """The number a study ends in: the ratio or the difference of a value between two conditions."""

    value: str = "away"
    of: dict[str, Any]
    to: dict[str, Any]
    kind: Literal["ratio", "difference"] = "ratio"
    words: str


class Factor(_Table):
    """One axis of the grid: a field, its values, and how they and it are called."""

    field: str
    values: list[Any] = Field(min_length=1)
    labels: list[str | float | int] | None = None
    name: str | None = None
    unit: str = ""
    about: str = ""

    @model_validator(mode="after")
    def _sizes(self) -> Factor:
        if self.labels is not None and len(self.labels) != len(self.values):
            raise ValueError(f"there are {len(self.values)} values but {len(self.labels)} labels")
        return self

    @property
    def dim(self) -> str:
        """The name of the dimension."""
        return self.name or self.field.rpartition(".")[2]

    @property
    def coordinate(self) -> list[Any]:
        """The labels, or the values: numbers where all are, else text."""
        given: list[Any] = list(self.labels if self.labels is not None else self.values)
        if all(isinstance(v, int | float) and not isinstance(v, bool) for v in given):
            return [float(v) for v in given]
        return [v if isinstance(v, str) else json.dumps(v, default=str) for v in given]


class _Cell(_Table):
    data: Data
    process: ProcessTable
    model: Model
    training: TrainingTable
    objective: ObjectiveTable
    sampler: Sampler
    measure: Measure


class Condition:
    """One cell of the grid: the index along each factor, and the tables with their values in place."""

    def __init__(self, index: tuple[int, ...], labels: dict[str, Any], tables: dict[str, Any]) -> None:
        self.index, self.labels = index, labels
        cell = _Cell(**tables)
        self.data, self.process, self.model = cell.data, cell.process.with_eps(), cell.model
        self.training, self.objective = cell.training, cell.objective
        self.sampler, self.measure = cell.sampler, cell.measure

    def __repr__(self) -> str:
        return ", ".join(f"{k} = {_short(v)}" for k, v in self.labels.items()) or "the one condition"


class Spec(_Table):
    """A whole study."""

    title: str
    question: str = ""
    seed: int = 0
    members: int = Field(ge=1)
    block: int = Field(ge=1)
    threads: int = Field(1, ge=1)
    device: Literal["cpu", "cuda", "auto"] = "cpu"
    data: Data
    process: ProcessTable = ProcessTable()
    model: Model = Model()
    training: TrainingTable = TrainingTable()
    objective: ObjectiveTable = ObjectiveTable()
    sampler: Sampler = Sampler()
    measure: Measure = Measure()
    grid: list[Factor] = []
    figure: Figure | None = None
    finding: Finding | None = None

    @property
    def blocks(self) -> int:
        """Blocks of members in each condition."""
        return -(-self.members // self.block)

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of values of each factor."""
        return tuple(len(f.values) for f in self.grid)

    def conditions(self) -> Iterator[Condition]:
        """All cells of the grid, the last factor fastest; a cell that makes no sense is named in the error."""
        base = {t: getattr(self, t).model_dump(exclude_unset=True) for t in TABLES}
        for index in itertools.product(*(range(n) for n in self.shape)):
            tables = copy.deepcopy(base)
            labels = {}
            for factor, i in zip(self.grid, index, strict=True):
                labels[factor.dim] = factor.coordinate[i]
                _put(tables, factor.field, copy.deepcopy(factor.values[i]))
            try:
                yield Condition(index, labels, tables)
            except ValidationError as error:
                where = ", ".join(f"{k} = {_short(v)}" for k, v in labels.items())
                raise InputError(f"Where {where}: {_sentence(error)}") from None

    def members_of(self, block: int) -> range:
        """The indices of the members of a block."""
        return range(block * self.block, min((block + 1) * self.block, self.members))

    def to_json(self) -> str:
        """The whole study, one line; two studies are the same if these are."""
        return json.dumps(self.model_dump(), sort_keys=True)


def read(source: str | Path | dict[str, Any] | Spec, *, large: bool = False) -> Spec:
    """A study from a TOML file, the name of a shipped one, a dictionary, or as it is.

    ``large`` takes the values of its ``[large]`` table.
    """
    if isinstance(source, Spec):
        return source
    raw, name = (source, "the study") if isinstance(source, dict) else (_toml(Path(source)), str(source))
    given = copy.deepcopy(raw)
    bigger = given.pop("large", {})
    require(isinstance(bigger, dict), f"{name}: large: it must be a table, [large]; got {bigger!r:.60}.")
    require(bigger or not large, f"{name} has no [large] table; run it without --large.")
    for key, table in given.items():
        if key in TABLES:
            require(isinstance(table, dict), f"{name}: {key}: it must be a table, [{key}]; got {table!r:.60}.")
    if isinstance(given.get("grid"), dict):
        given["grid"] = dict(_flat(given["grid"]))
    if large:
        for key, value in _leaves(bigger):
            _put(given, key, value)
    grid = given.get("grid", {})
    if isinstance(grid, dict):
        given["grid"] = [
            {"field": field, **(value if isinstance(value, dict) else {"values": value})}
            for field, value in grid.items()
        ]
    try:
        spec = Spec(**given)
    except ValidationError as error:
        raise InputError(f"{name}: {_sentence(error, given['grid'])}") from None
    _check(spec, name)
    return spec


def _check(spec: Spec, name: str) -> None:
    dims = [f.dim for f in spec.grid]
    require(len(set(dims)) == len(dims), f"{name}: two factors are called the same, {dims}; give them a name.")
    taken = TAKEN & set(dims)
    require(not taken, f"{name}: grid: the store itself has a {', '.join(taken)}; give the factor another name.")
    fields = [f.field for f in spec.grid]
    require(len(set(fields)) == len(fields), f"{name}: grid: a field is varied twice, {fields}; keep one of them.")
    for factor in spec.grid:
        head, _, rest = factor.field.partition(".")
        require(
            head in TABLES, f"{name}: grid: there is no field {factor.field!r}; fields begin with {', '.join(TABLES)}."
        )
        good = not (factor.dim.startswith((".", "__")) or set(factor.dim) & set("/\\"))
        require(good, f"{name}: grid: a factor cannot be called {factor.dim!r}; give it a plain name.")
        good = rest != "" or all(isinstance(v, dict) for v in factor.values)
        require(good, f"{name}: grid: {head} is a table; vary one of its fields, as in {head}.FIELD.")
        good = head != "measure" or rest == "away"
        require(good, f"{name}: grid: {factor.field} is one for the whole store; of measure, only away may vary.")
        values = factor.coordinate
        require(len(set(values)) == len(values), f"{name}: grid: {factor.dim} has a value twice, {values}.")
    drawn, found = spec.figure, spec.finding
    used = [drawn.x, drawn.lines, drawn.y] if drawn else []
    for part in (used, [*found.of, *found.to] if found else []):
        for dim in filter(None, part):
            require(dim in dims, f"{name}: there is no factor {dim!r}; there are {', '.join(dims) or 'none'}.")
    for condition in _named(spec, name):
        linear = condition.model.kind == "linear"
        ratio = condition.training.F_over_P
        require(ratio is None or linear, f"{name}: training.F_over_P is for linear models; give training.draws.")
        some = ratio is not None or condition.training.draws is not None or condition.model.kind == "mlp"
        require(some, f"{name}: training: give draws, the number P of noised points, or F_over_P.")
        law = condition.sampler.law
        require(law == "members" or linear, f"{name}: sampler.law {law!r} needs the V-kernel of a linear model.")


def _named(spec: Spec, name: str) -> Iterator[Condition]:
    try:
        yield from spec.conditions()
    except InputError as error:
        raise InputError(f"{name}: {error}") from None


def _toml(path: Path) -> dict[str, Any]:
    path = find(path)
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise InputError(f"The study {path} cannot be read: {error.strerror or error}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not TOML: {error}.") from None


def _leaves(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, dict) and prefix == "" and key in TABLES:
            yield from _leaves(value, f"{key}.")
        elif isinstance(value, dict) and prefix == "" and key == "grid":
            yield from ((f"grid.{field}", values) for field, values in _flat(value))
        else:
            yield prefix + key, value


def _flat(grid: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """``objective.K = […]`` without quotes is a table in a table in TOML; the same as with them."""
    for field, value in grid.items():
        if field in TABLES and isinstance(value, dict) and "values" not in value:
            yield from ((f"{field}.{rest}", inner) for rest, inner in value.items())
        else:
            yield field, value


def _put(tables: dict[str, Any], field: str, value: Any) -> None:
    head, _, rest = field.partition(".")
    if head in TABLES and rest:
        tables.setdefault(head, {})[rest] = value
    elif head == "grid" and rest and isinstance(tables.setdefault("grid", {}), dict):
        before = tables["grid"].get(rest)
        named = isinstance(before, dict) and not isinstance(value, dict)  # it keeps its name
        tables["grid"][rest] = {**before, "values": value} if named else value
    else:
        tables[head] = value


def _sentence(error: ValidationError, grid: Any = None) -> str:
    """The first mistake, with the key it is at and what would do."""
    first = error.errors()[0]
    at = list(first["loc"])
    if len(at) > 1 and at[0] == "grid" and isinstance(at[1], int) and isinstance(grid, list):
        at[1] = str(grid[at[1]].get("field", at[1])) if isinstance(grid[at[1]], dict) else at[1]
    key = ".".join(str(part) for part in at if "[" not in str(part))  # not the names of pydantic's unions
    said = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        tables: dict[str, type[BaseModel]] = {"data": Data, "model": Model, "training": TrainingTable}
        tables |= {"objective": ObjectiveTable, "sampler": Sampler, "measure": Measure}
        tables |= {"grid": Factor, "figure": Figure, "finding": Finding}
        table = tables.get(str(at[0]), Spec) if len(at) > 1 else Spec
        said = f"there is no such key; there are {', '.join(table.model_fields)}"
    given = "" if first["type"] in ("missing", "value_error", "extra_forbidden") else f"; got {first['input']!r:.60}"
    more = f" ({error.error_count() - 1} more)" if error.error_count() > 1 else ""
    return f"{key or 'the study'}: {_small(said)}{given}.{more}"


def _small(said: str) -> str:
    """In mid-sentence, but a symbol keeps its case."""
    return said[0].lower() + said[1:] if said[1:2].islower() else said


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
