"""The study file: TOML, or a dictionary of the same form, which is checked before anything is computed.

Each class below is a table of the file and its fields are the keys, which docs/howto/studies.md explains. ``[data]``,
``[process]``, ``[model]``, ``[training]``, ``[objective]``, ``[sampler]`` and ``[measure]`` describe a condition.
``[grid]`` has the factors, each of any of their fields: ``"table.field" = [values]`` or ``{values = […], labels = […],
name = …, about = …}``; or of a whole table: ``sampler = {values = [{…}, {…}], labels = […]}``. ``parts`` lists parts of
the grid in the order in which they are computed, ``{factor = label or [labels], …}``; conditions in none of them are
not part of the study. ``[large]`` has other values for ``--large``. ``measure.levels`` makes a study one of images
(:mod:`vkernel.study.images`). An error names the key and says what would be valid."""

from __future__ import annotations

import functools
import itertools
import json
import math
import tomllib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import AfterValidator, BaseModel, Field, ValidationError, ValidationInfo, field_validator

from vkernel.core.errors import InputError, require
from vkernel.core.files import expand
from vkernel.data import IMAGES, TOYS
from vkernel.process import from_spec as make_process

TAKEN = {"member", "block", "done", "x", "y", "time", "place", "point", "index", "component"}  # names in the store
TAKEN |= {"checksum", "quantity", "away", "gap", "nearest", "share", "density", "score", "sample"}
TAKEN_BY_IMAGES = {"other", "step", "level", "set", "image", "held_out", "draw", "pixel", "axis", "error", "excess"}
TAKEN_BY_IMAGES |= {"mmse", "rho", "ratio", "memorised", "bandwidth"}
MOST, MOST_BLOCKS, DEEPEST, LARGEST = 10**8, 10**6, 16, 2**24  # whole numbers, blocks, nested tables, bytes of a file
MODEL_KEYS = {
    "linear": {"kind", "target", "weight", "ridge", "features", "per_axis", "low", "high", "length"},
    "lazy": {"kind", "target", "weight", "kernel", "activation", "depth", "tau", "init", "init_width", "length"},
}
NETWORK_KEYS = {"kind", "target", "weight", "lr", "batch", "steps", "decay", "ema", "optimiser", "time_features"}
NETWORK_KEYS |= {"spread", "bf16", "chunk"}
MODEL_KEYS["mlp"] = NETWORK_KEYS | {"activation", "depth", "width"}
MODEL_KEYS["unet"] = NETWORK_KEYS | {"channels", "blocks", "attention", "heads", "dropout", "init_scale"}
NETWORKS = ("mlp", "unet")
THEORY_KEYS = {  # models without training
    "exact": {"kind"},
    "gaussian": {"kind", "rank"},
    "smoothed": {"kind", "h", "smoothing", "draws"},
    "nearest": {"kind", "k"},
    "local": {"kind", "k", "borders"},
    "equivariant": {"kind", "k", "borders"},
    "pca": {"kind", "threshold", "soft", "published"},
    "switch": {"kind", "above", "below", "at", "log_width"},
}
MODEL_KEYS |= THEORY_KEYS
NEEDED = {"smoothed": ["h"], "local": ["k"], "equivariant": ["k"], "switch": ["above", "below", "at"]}
WITHOUT_MODEL, IN_THEORY = ("exact", "naive", "resampled"), ("field", "semiclassical")  # laws of sampler.law
NOISY, ODES = ("naive", "resampled"), ("members", "mean", "field", "exact")
SHIPPED = ["target_noise", "process_and_cutoff", "nonlinearity", "parametrisation", "capacity"]  # as documented
SHIPPED += ["features", "training_set", "phase_capacity_noise", "phase_size_time", "phase_cutoff_capacity"]
SHIPPED_IMAGES = ["images", "images_causes", "images_cifar", "images_sgd"]  # studies of networks on images


class Table(BaseModel, extra="forbid", frozen=True):
    """A table of the file; unknown keys are refused, and numbers that are no sizes or values."""

    @field_validator("*")
    @classmethod
    def _check_size(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, int) and info.field_name != "seed":
            require(value <= MOST, f"it must be at most {MOST:,}; got {value}.")
        if isinstance(value, float) and info.field_name not in ("K", "tau"):
            require(math.isfinite(value), f"it must be a finite number; got {value}.")
        return value


class Data(Table):
    """The table of the training set; it has exactly one of name, path, points and even."""

    name: str | None = None
    rotation: float | None = None
    path: str | None = None
    points: list[list[float]] | list[float] | None = None
    even: int | None = Field(None, ge=2)
    population: Literal["uniform", "normal", "square", "circle", "two_moons"] | None = None
    n: int | None = Field(None, ge=1)
    set: int = Field(0, ge=0)
    weights: list[float] | None = None
    test: int | None = Field(None, ge=3)
    size: int | None = Field(None, ge=1)
    grey: bool = False

    @property
    def is_images(self) -> bool:
        """Whether these are n images of a set with held-out images."""
        return self.name in IMAGES and self.n is not None


class ProcessTable(Table, extra="allow"):
    """The table of the forward process, whose parameters a condition checks by making it."""

    kind: str = "vp"

    def with_eps(self) -> ProcessTable:
        """Return the table of a process that can be made, with the eps at which sigma/alpha is ``cutoff``, if given."""
        given = self.model_dump()
        cutoff = given.pop("cutoff", None)
        if cutoff is not None:
            require("eps" not in given, "give eps or cutoff, not both.")
            good = isinstance(cutoff, int | float) and math.isfinite(cutoff) and cutoff > 0
            require(good, f"cutoff must be a positive number, sigma/alpha at eps; got {cutoff!r}.")
            given["eps"] = float(make_process({**given, "eps": 0.0}).time(torch.tensor(cutoff, dtype=torch.float64)))
        make_process(given)
        return ProcessTable(**given)


class Model(Table):
    """The table of the model; keys are arguments of its constructor, and each kind has its own (MODEL_KEYS)."""

    kind: Literal[
        "linear", "lazy", "mlp", "unet",
        "exact", "gaussian", "smoothed", "nearest", "local", "equivariant", "pca", "switch",
    ] = "linear"  # fmt: skip
    target: Literal["score", "x0", "noise", "v", "flow", "edm"] = "x0"
    weight: Literal["sigma2", "one", "x0", "v", "edm", "likelihood"] = "sigma2"
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
    init_width: int = Field(512, ge=1)
    width: int = Field(64, ge=1)
    lr: float = Field(1e-3, gt=0)
    batch: int | None = Field(64, ge=1)
    steps: int = Field(1000, ge=1)
    decay: Literal["cosine"] | None = None
    ema: float | None = Field(None, gt=0, lt=1)  # None of these and the next is the default of the network
    optimiser: Literal["adam", "sgd"] | None = None
    time_features: int | None = Field(None, ge=0)
    spread: float | None = Field(None, gt=0)
    bf16: bool = False
    chunk: int | None = Field(None, ge=1)
    channels: list[int] | None = None
    blocks: int | None = Field(None, ge=1)
    attention: list[int] | None = None
    heads: int | None = Field(None, ge=1)
    dropout: float | None = Field(None, ge=0, lt=1)
    init_scale: float = Field(1.0, gt=0)  # not the default of the network: stores were computed with it
    rank: int | None = Field(None, ge=1)
    h: float | dict[float, float] | None = None  # tables are by σ/α
    smoothing: Literal["kde", "draws"] = "kde"
    draws: int = Field(64, ge=1)
    k: int | dict[float, int] | None = None
    borders: Literal["zeros", "circular"] = "zeros"
    threshold: float | dict[float, float] = 0.02
    soft: bool = False
    published: bool = False
    above: Model | None = None
    below: Model | None = None
    at: float | None = Field(None, gt=0)
    log_width: float = Field(0.0, ge=0)

    @property
    def is_theory(self) -> bool:
        """Whether the model is a score in closed form, which is not trained."""
        return self.kind in THEORY_KEYS


class TrainingTable(Table):
    """The table that sets the number of draws, the density of their times, what differs between members, and the steps
    at which networks are measured."""

    draws: int | None = Field(None, ge=1)
    F_over_P: float | None = Field(None, gt=0)
    times: Literal["uniform", "log"] | tuple[Literal["lognormal"], float, float] = "uniform"
    vary: list[Literal["inputs", "targets", "init", "order"]] = ["inputs", "targets", "init", "order"]
    snapshots: list[int] = []
    flips: bool = False


class ObjectiveTable(Table):
    """The table that sets how many targets are averaged (1 is J1, inf is J0), or the factor and the law of their
    noise."""

    K: float = 1.0
    of: Literal["draws", "subset", "efm"] = "draws"
    c: float | None = Field(None, allow_inf_nan=False, ge=-1e9, le=1e9)
    noise: Literal["posterior", "gaussian", "white"] = "posterior"


class Lookup(Table):
    """The table of a grid on which scores in one dimension are evaluated once a step for all samples."""

    nodes: int = Field(2001, ge=2)
    limit: float = Field(5.0, gt=0)
    read: Literal["linear", "right"] = "linear"


class Sampler(Table):
    """The table that sets which law is sampled, and how."""

    samples: int = Field(256, ge=0)
    steps: int = Field(100, ge=1)
    method: Literal["euler", "heun", "exponential", "multistep", "dopri5"] = "exponential"
    spacing: Literal["uniform", "log", "edm"] | None = "log"
    law: Literal["members", "mean", "field", "semiclassical", "exact", "naive", "resampled"] = "members"
    sets: int = Field(64, ge=8)
    kappa: float | None = Field(None, ge=0)
    lookup: Lookup | None = None
    first: int | None = Field(None, ge=1)  # members beyond the first so many are not sampled
    dtype: Literal["float32", "float64"] | None = None  # in which samples are computed; that of the model if not given


class Region(Table):
    """The table of a part of space; a sample lies in it if it meets every condition that is given."""

    norm: tuple[float, float] | None = None
    away: float | None = Field(None, gt=0)
    beside: float | None = Field(None, gt=0)
    around: list[float] | None = None
    within: float | None = Field(None, gt=0)


class Measure(Table):
    """The table that sets what is kept of each member."""

    gap: tuple[float, float] | None = None
    away: float = Field(0.5, gt=0, lt=1)
    bins: int = Field(60, ge=1)
    limit: float = Field(1.5, gt=0)
    times: list[float] = []
    places: int = Field(0, ge=0)
    regions: dict[str, Region] = {}
    keep: int = Field(0, ge=0)
    levels: list[float] = []
    images: int = Field(64, ge=1)


class Figure(Table):
    """The table that sets what study plot draws: a value against x, with lines for another factor, or over x and y."""

    x: str
    lines: str | None = None
    y: str | None = None
    value: str = "away"
    log: bool = False
    title: str | None = None


class Finding(Table):
    """The table of the number a study ends in: the ratio or the difference of a value between two conditions."""

    value: str = "away"
    of: dict[str, str | float]
    to: dict[str, str | float]
    kind: Literal["ratio", "difference"] = "ratio"
    words: str


class Factor(Table):
    """The table of one axis of the grid: a field, its values, their labels, and the name of the axis."""

    field: str
    values: list[Any] = Field(min_length=1)
    labels: list[str | float | int] | None = None
    name: str | None = None
    unit: str = ""
    about: str = ""

    @property
    def dim(self) -> str:
        return self.name or self.field.rpartition(".")[2]

    @property
    def axis(self) -> str:
        """The name of the dimension for a reader."""
        return self.about or self.dim.replace("_over_", "/")

    @property
    def coordinate(self) -> list[str] | list[float]:
        """The labels, or the values: numbers where all are numbers, otherwise text."""
        given = list(self.labels if self.labels is not None else self.values)
        if all(isinstance(v, int | float) and not isinstance(v, bool) for v in given):
            return [float(v) for v in given]
        return [v if isinstance(v, str) else json.dumps(v, default=str) for v in given]


class Tables(Table):
    """The tables that describe one condition."""

    data: Data
    process: ProcessTable = ProcessTable()
    model: Model = Model()
    training: TrainingTable = TrainingTable()
    objective: ObjectiveTable = ObjectiveTable()
    sampler: Sampler = Sampler()
    measure: Measure = Measure()


TABLES = tuple(Tables.model_fields)


class Condition(Tables):
    """One cell of the grid: the index along each factor, its labels, and the tables with their values in place."""

    index: tuple[int, ...]
    labels: dict[str, str | float]
    part: int = 0  # of the study's parts
    process: Annotated[ProcessTable, AfterValidator(ProcessTable.with_eps)]

    @property
    def trained(self) -> tuple[BaseModel, ...]:
        """The tables that determine the trained models; conditions that differ in others share their models."""
        return self.data, self.process, self.model, self.training, self.objective

    @property
    def twins(self) -> tuple[BaseModel, ...]:
        """The tables that are equal for conditions whose networks are trained on the same inputs."""
        return self.data, self.process, self.model, self.training

    def within(self, part: Mapping[str, object]) -> bool:
        """Return whether the condition is in a part of the grid, factors with a label or a list of them."""
        return all(
            self.labels[dim] in (given if isinstance(given, list | tuple) else [given]) for dim, given in part.items()
        )

    def __str__(self) -> str:
        return _labelled(self.labels) or "the one condition"

    __repr__ = __str__


class Spec(Tables):
    """A whole study.

    >>> import vkernel as vk
    >>> tables = {"data": {"name": "triple"}, "training": {"draws": 8}}
    >>> spec = vk.study.read({"title": "t", "members": 2, "block": 2, **tables})
    >>> isinstance(spec, vk.study.Spec), spec.members
    (True, 2)
    """

    title: str
    question: str = ""
    seed: int = 0
    members: int = Field(ge=1)
    block: int = Field(ge=1)
    threads: int = Field(1, ge=1)
    device: Literal["cpu", "cuda", "auto"] = "cpu"
    grid: list[Factor] = []
    parts: list[dict[str, Any]] = []
    figure: Figure | None = None
    finding: Finding | None = None

    @property
    def blocks(self) -> int:
        """The number of blocks of members in each condition."""
        return -(-self.members // self.block)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(len(f.values) for f in self.grid)

    @property
    def is_images(self) -> bool:
        """Whether networks on images are measured, at noise levels and steps."""
        return bool(self.measure.levels)

    def cells(self) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Yield the part and the index of each condition: all cells of the grid, the last factor fastest, or those of
        the first part, then those of the second that are not in it, and so on."""
        axes, seen = [list(enumerate(factor.coordinate)) for factor in self.grid], set[tuple[int, ...]]()
        for k, part in enumerate(self.parts or [{}]):
            wanted = {dim: given if isinstance(given, list) else [given] for dim, given in part.items()}
            pairs = zip(self.grid, axes, strict=True)
            chosen = ([i for i, label in axis if label in wanted.get(f.dim, [label])] for f, axis in pairs)
            for index in itertools.product(*chosen):
                if index not in seen:
                    seen.add(index)
                    yield k, index

    def conditions(self) -> Iterator[Condition]:
        """Yield the conditions in the order of :meth:`cells`; the error about an invalid one names it."""
        base = self.model_dump(include=set(TABLES), exclude_unset=True)
        for part, index in self.cells():
            tables, cell = {t: base.get(t, {}) for t in TABLES}, list(zip(self.grid, index, strict=True))
            labels = {f.dim: f.coordinate[i] for f, i in cell}
            for factor, i in cell:
                table, _, field = factor.field.partition(".")
                tables[table] = {**tables[table], field: factor.values[i]} if field else factor.values[i]
            try:
                condition = Condition(index=index, labels=labels, part=part, **tables)
                _check_condition(condition)
            except ValueError as error:  # ValidationError and InputError
                where = f"Where {_labelled(labels)}: " if labels else ""
                raise InputError(f"{where}{_sentence(error, tables)}") from None
            yield condition

    def members_of(self, block: int) -> range:
        """Return the indices of the members of a block."""
        return range(block * self.block, min((block + 1) * self.block, self.members))

    def to_json(self) -> str:
        """Return the whole study as one line; two studies are the same if their lines are."""
        return json.dumps(self.model_dump(), sort_keys=True)


def read(source: str | Path | Mapping[str, object] | Spec, *, large: bool = False) -> Spec:
    """Read a study from a TOML file, the name of a shipped one, or a dictionary; ``[large]`` is checked in any case.

    >>> import vkernel as vk
    >>> vk.study.read("capacity").members
    200
    """
    if isinstance(source, Spec):
        return source
    name = "the study" if isinstance(source, Mapping) else str(source)
    raw: dict[str, Any] = _copied(source if isinstance(source, Mapping) else _toml(source), name)
    larger = raw.pop("large", {})
    require(isinstance(larger, dict), f"{name}: large: it must be a table, [large]; got {larger!r:.60}.")
    require(larger or not large, f"{name} has no [large] table; run it without --large.")
    small = _build(raw, {}, name)
    whole = _build(raw, larger, f"{name}: with [large]") if larger else small
    return whole if large else small


def shipped() -> dict[str, Path]:
    """Return the files of the studies that ship with the package, by name.

    >>> import vkernel as vk
    >>> "capacity" in vk.study.shipped()
    True
    """
    names = [*SHIPPED, *SHIPPED_IMAGES]
    return {name: Path(__file__).resolve().parent / "shipped" / f"{name}.toml" for name in names}


def _toml(source: str | Path) -> dict[str, Any]:
    """Read a file, or the shipped study of that name if there is none; 0.1 had them as examples/studies/NAME.toml."""
    path = expand(source)
    name = path.stem if path == Path("examples/studies", f"{path.stem}.toml") else str(source)
    try:
        path = path if path.exists() else shipped().get(name, path)
        good = path.is_file() or not path.exists() or path.is_dir() or path.is_relative_to("/dev")
        require(good, f"The study {path} cannot be read: it is not a regular file.")  # a pipe may never be written to
        with path.open("rb") as file:
            text = file.read(LARGEST + 1)
        require(len(text) <= LARGEST, f"The study {path} cannot be read: it is larger than {LARGEST >> 20} MB.")
        return tomllib.loads(text.decode("utf-8-sig"))
    except OSError as error:
        names = "'vkernel study list' shows those that ship with the package"
        raise InputError(f"The study {path} cannot be read: {error.strerror or error}; {names}.") from None
    except RecursionError:
        raise InputError(f"{path} is not a study: its tables or lists are nested too deeply.") from None
    except InputError:
        raise
    except ValueError as error:  # of TOML, of UTF-8, and of numbers with thousands of digits
        raise InputError(f"{path} is not TOML: {str(error).rstrip('.')}.") from None


def _copied(value: Any, name: str, at: tuple[str, ...] = ()) -> Any:
    """Return a copy of tables and lists; refuse numbers that are none, and names that are not text."""
    key = ".".join(at[:DEEPEST])
    require(len(at) < DEEPEST, f"{name}: {key:.60}: tables or lists are nested too deeply.")
    if isinstance(value, Mapping):
        odd = next((k for k in value if not isinstance(k, str)), "")
        require(odd == "", f"{name}: {key or 'the study'}: a key must be text; got {odd!r:.60}.")
        return {k: _copied(v, name, (*at, k)) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_copied(v, name, (*at, str(i))) for i, v in enumerate(value)]
    require(not isinstance(value, int) or abs(value) < 2**63, f"{name}: {key}: the number is too large.")
    require(not isinstance(value, float) or not math.isnan(value), f"{name}: {key}: nan is no number.")
    return value


def _build(given: dict[str, Any], larger: dict[str, Any], name: str) -> Spec:
    """Return the study with the values of ``[large]`` in place; refuse it where it cannot be run."""
    tables, grid = {**given}, _flat(given.get("grid", {}))
    for key, value in larger.items():
        if key == "grid" and isinstance(value, dict):
            for field, new in _flat(value).items():
                old = grid.get(field)  # the factor keeps its name
                grid[field] = {**old, "values": new} if isinstance(old, dict) and not isinstance(new, dict) else new
        else:
            tables[key] = {**given.get(key, {}), **value} if key in TABLES and isinstance(value, dict) else value
    if isinstance(tables.get("grid", {}), dict):
        tables["grid"] = [{"field": k, **(v if isinstance(v, dict) else {"values": v})} for k, v in grid.items()]
    try:
        spec = Spec(**tables)
        check_factors(spec)
        _check_keys(spec, list(spec.conditions()))
    except ValueError as error:
        raise InputError(f"{name}: {_sentence(error, tables)}") from None
    return spec


def _flat(grid: Any) -> dict[str, Any]:
    """Return factors by their dotted names; unquoted, ``objective.K = […]`` is a table in a table in TOML."""
    found: dict[str, Any] = {}
    for field, value in grid.items() if isinstance(grid, dict) else ():
        nested = field in TABLES and isinstance(value, dict) and "values" not in value
        found |= {f"{field}.{rest}": inner for rest, inner in value.items()} if nested else {field: value}
    return found


def check_factors(spec: Spec) -> None:
    """Refuse factors, regions, figures and findings that do not fit together."""
    dims, fields, regions = [f.dim for f in spec.grid], [f.field for f in spec.grid], set(spec.measure.regions)
    require(len(set(dims)) == len(dims), f"two factors have the same name, {dims}; give them a name.")
    require(len(set(fields)) == len(fields), f"grid: a field is varied twice, {fields}; keep one of them.")
    own = TAKEN_BY_IMAGES if spec.is_images else set()
    for what, names, taken in (("grid", set(dims), TAKEN | regions | own), ("measure.regions", regions, TAKEN)):
        twice = ", ".join(names & taken)
        require(not twice, f"{what}: the store itself has a {twice}; give it another name.")
        for name in names:
            good = name.isprintable() and 0 < len(name.encode()) <= 200
            good = good and name != "zarr.json" and not name.startswith((".", "__")) and not set(name) & set("/\\")
            require(good, f"{what}: {name!r} cannot be a name; give it a plain name.")
    for factor in spec.grid:
        (head, _, rest), values, n = factor.field.partition("."), factor.coordinate, len(factor.values)
        require(head in TABLES, f"grid: there is no field {factor.field!r}; fields begin with {', '.join(TABLES)}.")
        good = rest != "" or all(isinstance(v, dict) for v in factor.values)
        require(good, f"grid: {head} is a table; vary one of its fields, as in {head}.FIELD.")
        good = head != "measure" or rest == "away"
        require(good, f"grid: {factor.field} is one for the whole store; of measure, only away may vary.")
        require(len(values) == n, f"grid.{factor.field}: there are {n} values but {len(values)} labels.")
        require(len(set(values)) == n, f"grid: {factor.dim} has a value twice, {values}.")
    count = math.prod(spec.shape) * spec.blocks
    require(count <= MOST_BLOCKS, f"the grid has {count:,} blocks of members; at most {MOST_BLOCKS:,} are stored.")
    for k, part in enumerate(spec.parts):
        check_part(spec, part, f"parts, number {k + 1}")
    drawn, found = spec.figure, spec.finding
    used = ([drawn.x, drawn.lines, drawn.y] if drawn else []) + ([*found.of, *found.to] if found else [])
    for dim in filter(None, used):
        known = dim in dims or (spec.is_images and dim == "step")
        require(known, f"there is no factor {dim!r}; there are {', '.join(dims) or 'none'}.")
    for cell in (found.of, found.to) if found else ():
        for f in spec.grid:
            good = f.dim not in cell or cell[f.dim] in f.coordinate
            require(good, f"finding: {f.dim} has no value {cell.get(f.dim)!r}; it has {f.coordinate}.")


def check_part(spec: Spec, part: Mapping[str, object], name: str) -> None:
    """Refuse a part of the grid that names a factor or a label that is not there."""
    factors = {factor.dim: factor for factor in spec.grid}
    for dim, given in part.items():
        require(dim in factors, f"{name}: there is no factor {dim!r}; there are {', '.join(factors) or 'none'}.")
        values = factors[dim].coordinate
        for label in given if isinstance(given, list | tuple) else [given]:
            require(label in values, f"{name}: {dim} has no value {label!r}; it has {values}.")


def parse_part(text: str) -> dict[str, list[str | float]]:
    """Read a part of a grid as a command line writes it: ``"network=unet,n=128|1024"``.

    >>> import vkernel as vk
    >>> vk.study.parse_part("network=unet,n=128|1024")
    {'network': ['unet'], 'n': [128.0, 1024.0]}
    """
    found: dict[str, list[str | float]] = {}
    for item in filter(None, (item.strip() for item in text.split(","))):
        dim, equals, labels = item.partition("=")
        require(equals, f"A part of the grid is written FACTOR=LABEL, as in n=128; got {item!r}.")
        found[dim.strip()] = [_label(label.strip()) for label in labels.split("|")]
    return found


def _label(text: str) -> str | float:
    try:
        return float(text)
    except ValueError:
        return text


def _check_keys(spec: Spec, conditions: list[Condition]) -> None:
    """Refuse keys that no model, or no law, of the study has."""
    good = any(c.sampler.law in NOISY for c in conditions) or all(c.sampler.kappa is None for c in conditions)
    require(good, "sampler.kappa is for the laws naive and resampled; remove it.")
    for table in ("training", "objective"):
        used = any(not c.model.is_theory for c in conditions)
        given = table in spec.model_fields_set or any(f.field.partition(".")[0] == table for f in spec.grid)
        require(used or not given, f"{table}: no model of this study is trained; remove it.")
    keys = _given(spec.model) | {f.field.removeprefix("model.") for f in spec.grid if f.field.startswith("model.")}
    tables = [("model", keys, {c.model.kind for c in conditions})]
    for values in (f.values for f in spec.grid if f.field == "model"):
        tables += [("model", set(v), {v.get("kind", "linear")}) for v in values]
    for model in (c.model for c in conditions):
        parts = {"model.above": model.above, "model.below": model.below}
        tables += [(at, _given(part), {part.kind}) for at, part in parts.items() if part is not None]
    for at, keys, kinds in tables:
        unused = ", ".join(f"{at}.{key}" for key in sorted(keys.difference(*(MODEL_KEYS[kind] for kind in kinds))))
        kind = " or ".join(sorted(kinds))
        require(not unused, f"{unused}: no model of kind {kind} has this key, which vkernel 0.1 ignored. Remove it.")


def _given(model: Model) -> set[str]:
    """Return the keys with other values than their defaults."""
    return {key for key, value in model if value != Model.model_fields[key].default}


def _check_condition(c: Condition) -> None:
    """Refuse tables that contradict themselves or each other."""
    d, t, o, s, m, linear = c.data, c.training, c.objective, c.sampler, c.measure, c.model.kind == "linear"
    sources = [
        key for key in ("name", "path", "points", "even", "population") if key in d.model_dump(exclude_none=True)
    ]
    got, sizes = ", ".join(sources) or "none", sorted({len(p) for p in d.points or [] if isinstance(p, list)})
    (low, high), whole = m.gap or (0, 1), math.inf == o.K or (1 <= o.K <= MOST and o.K.is_integer())
    drawn = t.draws is not None or t.F_over_P is not None or c.model.kind in NETWORKS or s.law in WITHOUT_MODEL
    theory, closed = c.model.is_theory, f"a model of kind {c.model.kind}, which is one score in closed form"
    checks: list[tuple[object, str]] = [
        (len(sources) == 1, f"data: give exactly one of name, path, points, even and population; got {got}."),
        (d.population is None or d.n is not None, "data: population and n, the number of its draws, belong together."),
        (d.n is None or d.population or d.name in IMAGES, "data.n is for a population, or for a name of images."),
        (d.name in (None, *TOYS) or d.is_images, _unknown_name(d)),
        (d.is_images or not (d.test or d.size or d.grey), "data: test, size and grey are for images by name, with n."),
        (c.model.low < c.model.high, f"model: low must be below high; got {c.model.low} and {c.model.high}."),
        (d.set == 0 or d.population or d.is_images, "data.set counts training sets drawn from a population; give one."),
        (len(sizes) <= 1, f"data: points must have equally many coordinates; got {sizes}."),
        (t.draws is None or t.F_over_P is None, "training: give draws or F_over_P, not both."),
        (t.F_over_P is None or linear, "training.F_over_P is for linear models; give training.draws."),
        (drawn or theory, "training: give draws, the number P of noised points, or F_over_P."),
        (whole, f"objective: K must be a whole number from 1 to {MOST:,}, or inf for J0; got {o.K!r}."),
        (o.c is None or o.K == 1, "objective: give K or c, not both."),
        (o.noise == "posterior" or o.c is not None, "objective.noise is the law of the noise of a factor c; give c."),
        (not theory or s.law == "members", f"sampler.law {s.law!r} does not sample {closed}; give law = 'members'."),
        (not theory or s.first is None, f"sampler.first is for trained models; this is {closed}."),
        (linear or s.law not in IN_THEORY, f"sampler.law {s.law!r} needs the V-kernel of a linear model."),
        (s.kappa is not None or s.law not in NOISY, f"sampler.law {s.law!r} needs sampler.kappa, its strength."),
        (s.lookup is None or s.law in ODES, f"sampler.lookup is for probability-flow ODEs; sampler.law is {s.law!r}."),
        (s.first is None or s.law == "members", f"sampler.first is for the law members; sampler.law is {s.law!r}."),
        (bool(m.times) == bool(m.places), "measure: scores are kept at places and times; give both, or neither."),
        (s.samples or m.places, "sampler.samples = 0 keeps scores only; give measure.places and measure.times."),
        (m.keep <= s.samples, f"measure.keep: {m.keep} samples cannot be kept of {s.samples} (sampler.samples)."),
        (0 <= low < high, f"measure: gap must be [low, high] with 0 ≤ low < high; got {[low, high]}."),
    ]
    checks += _image_checks(c) if m.levels else [(not t.snapshots and not t.flips, NOT_IMAGES)]
    if c.model.kind == "unet":
        for table, key in (("model", "target"), ("model", "weight"), ("training", "times")):
            stated = key in vars(c)[table].model_fields_set
            checks.append((stated, f"{table}.{key}: a model of kind unet needs it; {GOOD[key]} trains well."))
    for name, region in m.regions.items():
        key, given = f"measure.regions.{name}", region.model_dump(exclude_none=True)
        paired = ("around" in given) == ("within" in given)
        checks.append((paired, f"{key}: around, a place, and within, a distance, belong together."))
        checks.append((given, f"{key}: a region needs a condition: norm, away, beside, or around and within."))
    for good, sentence in checks:
        require(good, sentence)
    _check_theory(c.model, "model")


NOT_IMAGES = "training: snapshots and flips are for studies of images; give measure.levels."
GOOD = {"target": '"edm"', "weight": '"edm"', "times": '["lognormal", -1.2, 1.2]'}


def _unknown_name(d: Data) -> str:
    images = ", ".join(sorted(set(IMAGES) - set(TOYS)))
    return f"data.name: there is no toy set {d.name!r:.60}; there are {', '.join(TOYS)} and, with data.n, {images}."


def _image_checks(c: Condition) -> list[tuple[object, str]]:
    """Return what must hold where networks on images are measured."""
    d, t, m, s, last = c.data, c.training, c.measure, c.sampler, c.model.steps
    rising = t.snapshots == sorted(set(t.snapshots)) and t.snapshots[:1] > [0] and t.snapshots[-1:] == [last]
    most = min(d.n or 0, d.test or 0)
    other, fixed = m.gap is None and not m.places and not m.regions, s.method != "dopri5" and not s.lookup
    steps = f"training.snapshots must be steps in rising order that end at model.steps, {last}"
    return [
        (c.model.kind in NETWORKS, f"measure.levels is for networks, model.kind {' or '.join(NETWORKS)}."),
        (d.is_images and d.test, f"measure.levels needs data of images: name ({', '.join(IMAGES)}), n and test."),
        (rising, f"{steps}; got {t.snapshots}."),
        (all(r > 0 for r in m.levels), f"measure.levels are positive noise levels σ/α; got {m.levels}."),
        (m.images <= most, f"measure.images: {m.images} noised images need as many of n and of test; got {most}."),
        (s.law == "members" and s.samples >= 2, "measure.levels needs sampler.law 'members' and two samples or more."),
        (fixed and not s.first, "sampler: images are sampled in fixed steps, all members alike."),
        (other, "measure: gap, regions and places are for studies without levels."),
    ]


def _check_theory(model: Model, at: str) -> None:
    """Refuse a theory without its parameters, and a switch between models that are trained."""
    for key in NEEDED.get(model.kind, ()):
        require(vars(model)[key] is not None, f"{at}.{key}: a model of kind {model.kind} needs it.")
    for key, part in (("above", model.above), ("below", model.below)):
        if part is not None:
            require(part.is_theory, f"{at}.{key}: a part of a switch is {', '.join(THEORY_KEYS)}, not {part.kind}.")
            _check_theory(part, f"{at}.{key}")


def _sentence(error: ValueError, tables: Mapping[str, Any]) -> str:
    """Return the first mistake as a sentence: the key, what is wrong, and what would be valid."""
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors()[0]
    at, grid = list(first["loc"]), tables.get("grid")
    if len(at) > 1 and at[0] == "grid" and isinstance(at[1], int) and isinstance(grid, list):
        at[1] = str(grid[at[1]].get("field", at[1])) if isinstance(grid[at[1]], dict) else at[1]
    # without the names of types in pydantic's unions
    key = ".".join(str(part) for part in at if "[" not in str(part) and part not in ("int", "float"))
    message = first["msg"].removeprefix("Value error, ").rstrip(".")
    if first["type"] == "extra_forbidden":
        known: dict[str, Any] = {"grid": Factor, "figure": Figure, "finding": Finding}
        known |= {name: field.annotation for name, field in Tables.model_fields.items()}
        table = Region if "regions" in at else Lookup if "lookup" in at else known[str(at[0])] if len(at) > 1 else Spec
        keys: Collection[str] = table.model_fields
        if table is Model:  # or a part of a switch
            model = functools.reduce(lambda table, part: table[part], at[1:-1], tables[str(at[0])])
            keys = MODEL_KEYS.get(str(model.get("kind", "linear")), keys)
        message = f"there is no such key; there are {', '.join(key for key in table.model_fields if key in keys)}"
    elif first["type"] == "model_type":
        message = f"it must be a table, [{key}]"
    elif message[1:2].islower():  # in mid-sentence, but a symbol keeps its case
        message = message[0].lower() + message[1:]
    given = "" if first["type"] in ("missing", "value_error", "extra_forbidden") else f"; got {first['input']!r:.60}"
    more = f" ({error.error_count() - 1} more)" if error.error_count() > 1 else ""
    return f"{key or 'the study'}: {message}{given}.{more}"


def short(value: str | float) -> str:
    """Return a label of a factor in few characters."""
    return f"{value:g}" if isinstance(value, float) else str(value)


def _labelled(labels: Mapping[str, str | float]) -> str:
    return ", ".join(f"{k} = {short(v):.60}" for k, v in labels.items())
