"""Results of a study on disk: a Zarr group of labelled arrays that survives being killed at any moment.

Every quantity is one array whose dimensions are the factors of the study, ``member``, and its own. A chunk of it is one
block of members in one condition, so that blocks never share a file. A block is written quantity by quantity, each file
through a temporary one that is then renamed, and last its checksums and its flag in ``done``
(:mod:`vkernel.study.checksums`). Blocks that are not complete, or damaged, are computed again, to the same bits, since
a block depends on the study and its index alone. The other files follow from the study: they are made in memory and
written where they are missing, their list last, so that a store whose making was interrupted is continued too. One
process at a time writes: the system releases the file lock in the store when its holder dies.

Nothing is written or removed in a folder that is neither empty nor a store, or through links inside a store.

``RESULTS`` is the version of the numbers: it changes when the same study would give other ones. A store of another
version can be read but not continued, so that it never mixes both. Version 1 is vkernel 0.1, which recorded none. A
store without checksums can be read but not continued either: new checksums would vouch for numbers that nobody can
verify."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import subprocess
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import xarray
from zarr.storage import LocalStore

from vkernel.core.errors import InputError, require
from vkernel.core.files import expand, make_folder
from vkernel.data import fingerprint
from vkernel.study.checksums import DONE, LIST, ROOT, SUMS, Blocks, Index, changed, get, listed, put, read_list, sha256
from vkernel.study.packed import unpack
from vkernel.study.spec import Condition, Spec, check_factors
from vkernel.study.work import datasets, layout
from vkernel.version import __version__

RESULTS = 2
LOCK, TRAINING = ".vkernel.lock", ".vkernel.training"
PARTIAL = re.compile(r".*\.[0-9a-f]{32}\.partial")  # temporary names of Zarr and of put
NAMED = 4  # damaged blocks that an error names
INDICES = {"member": "trained model", "block": "block of members", "point": "training point", "index": "sample"}
PLACES = {"x": "first coordinate of a sample", "y": "second coordinate of a sample", "place": "place of a score"}
COORDINATES = {name: (f"index of the {what}", "1") for name, what in INDICES.items()}
COORDINATES |= {name: (what, "unit of the data") for name, what in PLACES.items()}
COORDINATES |= {"time": ("time of a score", "unit of t"), "component": ("component of the sample", "1")}
COORDINATES |= {"quantity": ("array that a checksum belongs to", "1")}
COORDINATES |= {"other": ("index of another trained model", "1"), "step": ("steps of training", "1")}
COORDINATES |= {"level": ("noise level, sigma/alpha", "1"), "set": ("training or held-out images", "1")}
COORDINATES |= {name: (f"index of the {what}", "1") for name, what in (("image", "noised image"), ("draw", "sample"))}
COORDINATES |= {"held_out": ("index of the held-out image", "1"), "pixel": ("pixel of an image", "1")}
COORDINATES |= {"axis": ("axis of an image", "1")}


class Store:
    """An open store of one study; made by :meth:`open`."""

    def __init__(self, path: Path, spec: Spec) -> None:
        import zarr

        self.path, self.spec, found = path, spec, _open(path)
        _check_same(path, spec, found.attrs)
        self.blocks = _blocks(path, found)
        self.done, damaged = self.blocks.verify()
        self.count = len(list(spec.cells())) * spec.blocks
        if damaged:
            warnings.warn(f"{_named(path, spec, damaged)} They are computed again.", stacklevel=5)
        for at in np.ndindex(self.done.shape):
            if not self.done[at]:
                self.blocks.discard(at)
            elif get(path / self.blocks.key(DONE, at)) is None:  # the run was killed before it wrote the flag
                self.blocks.mark(at)
        group: Any = zarr.open_group(LocalStore(path), mode="r+")
        self.arrays = {name: group[name] for name in self.blocks.quantities}

    @classmethod
    @contextlib.contextmanager
    def open(cls, path: Path | str, spec: Spec) -> Iterator[Store]:
        """Open the store at ``path``, made if it is not there; refuse one of another study, or one in use."""
        import filelock

        path = expand(path)
        with _readable_errors(path):
            _check_place(path, spec)
            lock = filelock.FileLock(make_folder(path) / LOCK, timeout=0)
            try:
                lock.acquire()
            except filelock.Timeout:
                advice = "Wait for it to end, stop it, or give another --store."
                raise InputError(f"Another run is writing to {path}. {advice}") from None
        try:
            with _readable_errors(path):
                _sweep(path)
                _restore(path, spec)
                opened = cls(path, spec)
            yield opened
        finally:
            lock.release()

    def missing(self) -> list[tuple[Condition, int]]:
        """Return the blocks that are not complete yet, in order."""
        return [(c, b) for c in self.spec.conditions() for b in range(self.spec.blocks) if not self.done[(*c.index, b)]]

    @property
    def training(self) -> Path:
        """The folder in which networks keep the state of their training while it lasts."""
        return self.path / TRAINING

    def write(self, condition: Condition, block: int, values: dict[str, np.ndarray]) -> None:
        """Write a block: its quantities, then its checksums, and then its flag."""
        members, safe = self.spec.members_of(block), f"{int(self.done.sum())} of {self.count} blocks are safe"
        at = (*condition.index, block)
        with _readable_errors(self.path, f"{safe}; run again to go on."):
            for name, value in values.items():
                array = self.arrays[name]
                whose = (slice(members.start, members.stop),) if "member" in array.metadata.dimension_names else ()
                array[(*condition.index, *whose)] = value
            self.blocks.mark(at)
        self.done[at] = True


class _Complete(LocalStore):
    """A folder that Zarr reads, without the files in ``hidden``: those of blocks that are not complete."""

    def __init__(self, root: Path | str, hidden: set[str], *, read_only: bool = True) -> None:
        super().__init__(root, read_only=read_only)
        self.hidden = hidden

    def with_read_only(self, read_only: bool = False) -> _Complete:
        return _Complete(self.root, self.hidden, read_only=read_only)

    async def get(self, key: str, *args: Any, **options: Any) -> Any:
        return None if key in self.hidden else await super().get(key, *args, **options)


def load(path: Path | str) -> xarray.Dataset:
    """Return the results in a store as labelled arrays; members that are not computed yet are NaN. ``path`` may also
    be a ``.npz`` file that ``vk.study.export`` wrote.

    All checksums are verified first; a damaged store is refused with the names of its damaged blocks.

    >>> import vkernel as vk
    >>> import tempfile
    >>> spec = {"title": "t", "members": 1, "block": 1, "data": {"name": "triple"}, "model": {"kind": "smoothed"}}
    >>> spec |= {"sampler": {"samples": 8, "steps": 5}, "grid": {"model.h": [0.0, 0.3]}}
    >>> store = tempfile.mkdtemp() + "/store"
    >>> _ = vk.study.run(spec, store, progress=False)
    >>> vk.study.load(store).nearest.sizes["h"]
    2
    """
    path, hidden = expand(path), set[str]()
    if path.suffix == ".npz" and not path.is_dir():
        require(path.is_file(), f"There is no file {path}.")
        return unpack(path)
    with _readable_errors(path, verb="read"):
        found = _open(path, hidden)
        if SUMS in found:
            blocks, spec = _blocks(path, found), spec_of(found)
            done, damaged = blocks.verify()
            require(not damaged, f"{_named(path, spec, damaged)} {_advice(path)} computes them again.")
            lost = (tuple(at) for at in np.argwhere(~done).tolist())
            hidden.update(blocks.key(name, at) for at in lost for name in blocks.quantities)
            return found.drop_dims("quantity").assign({DONE: found[DONE].copy(data=done)})
        warnings.warn(f"{path} has no checksums, since an older vkernel made it: damage is not noticed.", stacklevel=2)
        try:
            return found.load()
        except Exception as error:
            raise InputError(f"{path} is damaged: {_first_line(error)}.") from None


def spec_of(ds: xarray.Dataset) -> Spec:
    """Return the study that made the results."""
    return _spec(ds.attrs)


def _spec(attrs: Mapping[Any, Any]) -> Spec:
    try:
        spec = Spec(**json.loads(attrs["vkernel_study"]))
        check_factors(spec)
    except (ValueError, TypeError, KeyError, RecursionError) as error:  # ValidationError and InputError are ValueErrors
        version = attrs.get("vkernel")
        what = f"The store holds a study that cannot be read ({_first_line(error)})"
        raise InputError(f"{what}; vkernel {version} made it.") from None
    return spec


def _open(path: Path, hidden: set[str] | None = None) -> xarray.Dataset:
    """Open the arrays of a store after its metadata and coordinates are verified; other values are not read yet."""
    require(path.exists(), f"There is no store at {path}; make one with 'vkernel study run SPEC --store {path}'.")
    require(path.is_dir(), f"{path} is not a store of a study: it is not a folder.")
    sums = read_list(path)
    lost = ", ".join(changed(path, sums) or [LIST] * (not sums and (path / LIST).exists()))
    require(not lost, f"{path} is damaged, {lost} changed or got lost. {_advice(path)} repairs it.")
    made = sums or not (path / LOCK).exists() or (path / ROOT).exists()
    require(made, f"The store at {path} was not made completely. {_advice(path)} makes it.")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = xarray.open_zarr(_Complete(path, set() if hidden is None else hidden), chunks=None)
    except Exception as error:
        raise InputError(f"{path} is not a store of a study: {_first_line(error)}.") from None
    require("vkernel_study" in found.attrs, f"{path} is a Zarr group, but not the store of a study.")
    require(sums or SUMS not in found, f"{path} is damaged, {LIST} got lost. {_advice(path)} repairs it.")
    spec = spec_of(found)
    dims, shape = (*(f.dim for f in spec.grid), "block"), (*spec.shape, spec.blocks)
    good = DONE in found and found[DONE].dims == dims and found[DONE].shape == shape
    good = good and found.sizes.get("member") == spec.members
    absent = ", ".join(str(n) for n in found.variables if not (path / str(n) / ROOT).is_file())
    require(good and not absent, f"{path} is damaged, arrays of its study got lost: {absent or DONE}.")
    return found


def _blocks(path: Path, found: xarray.Dataset) -> Blocks:
    """Return the blocks of a store that was opened."""
    own = {name: found[name].ndim - found[DONE].ndim for name in map(str, found["quantity"].values)}
    study = sha256((found.attrs["vkernel_study"] + str(found.attrs.get("data_sha256"))).encode())
    return Blocks(path, study, found[DONE].shape, own)


def _made(spec: Spec) -> dict[str, bytes]:
    """Return the files of a store without blocks, all but their list: Zarr's metadata and the coordinates."""
    import torch
    import zarr
    from zarr.storage import MemoryStore

    dims, cells, quantities = tuple(f.dim for f in spec.grid), (1,) * len(spec.grid), layout(spec)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from Zarr: consolidated metadata and text are not in its standard yet
        files: dict[str, Any] = {}
        memory = MemoryStore(files)
        group = zarr.open_group(memory, mode="w", zarr_format=3)
        about: dict[str, Any] = spec.model_dump(include={"title", "question", "seed"})
        about |= {"results": RESULTS, "vkernel": __version__, "torch": torch.__version__, "revision": _revision()}
        group.attrs.update(about | {"vkernel_study": spec.to_json(), "data_sha256": fingerprint(datasets(spec))})

        def create(name: str, about: str, unit: str, dims: tuple[str, ...], **options: Any) -> Any:
            array = group.create_array(name, dimension_names=dims, **options)
            array.attrs.update({"long_name": about, "units": unit or "1"})
            return array

        axes = {f.dim: (np.asarray(f.coordinate), f.field, f.unit) for f in spec.grid}
        plain = {"member": np.arange(spec.members), "block": np.arange(spec.blocks)}
        for quantity in quantities.values():
            plain |= quantity.coordinates
        plain["quantity"] = np.array(list(quantities))
        axes |= {name: (values, *COORDINATES[name]) for name, values in plain.items()}
        for name, (values, words, unit) in axes.items():
            zeros = {"config": {"write_empty_chunks": True}}  # their files are listed too
            create(name, words, unit, (name,), shape=values.shape, dtype=values.dtype, **zeros)[...] = values
        for name, q in quantities.items():
            members = (spec.members, min(spec.block, spec.members)) if q.per_member else ()
            size = {
                "shape": (*spec.shape, *members[:1], *q.shape),
                "chunks": (*cells, *members[1:], *q.shape),
            }
            own = (*dims, *["member"] * q.per_member, *q.coordinates)
            create(name, q.about, q.unit, own, dtype=q.dtype, fill_value=float("nan"), **size)
        plainly: dict[str, Any] = {"compressors": None, "fill_value": 0}  # checksums.Blocks reads these files itself
        size = {"shape": (*spec.shape, spec.blocks), "chunks": (*cells, 1)}
        create(DONE, "whether a block of members is computed", "", (*dims, "block"), dtype="bool", **plainly, **size)
        size = {part: (*given, len(quantities)) for part, given in size.items()}
        create(SUMS, "checksum", "", (*dims, "block", "quantity"), dtype="uint64", **plainly, **size)
        zarr.consolidate_metadata(memory)
    return {name: content.to_bytes() for name, content in files.items()}


def _revision() -> str:
    """Return the git revision of the package's source, where it has one."""
    git, answer = ["git", "-C", str(Path(__file__).parent)], ""
    try:  # a package installed into someone's repository is not that repository's
        for command in (["ls-files", "--error-unmatch", Path(__file__).name], ["rev-parse", "HEAD"]):
            answer = subprocess.run([*git, *command], capture_output=True, text=True, timeout=5, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return answer.strip()


def _check_place(path: Path, spec: Spec) -> None:
    """Refuse another's folder before anything is written."""
    require(path.is_dir() or not path.exists(), f"{path} is not a store of a study: it is not a folder.")
    ours = any((path / name).is_file() for name in (LOCK, LIST, f"{SUMS}/{ROOT}"))
    if path.is_dir() and not ours and any(path.iterdir()):
        attrs = _open(path).attrs
        _check_same(path, spec, attrs)
        advice = "It can be shown, plotted and exported, but not continued; nothing was changed."
        raise InputError(f"{path} has no checksums; {_maker(attrs)}. {advice} Give another --store.")


def _sweep(path: Path) -> None:
    """Remove temporary files that a killed run left; refuse links, through which a run would write elsewhere."""
    for folder, folders, files in os.walk(path):
        for found in (Path(folder, name) for name in (*folders, *files)):
            where = found.relative_to(path)
            require(not found.is_symlink(), f"{path} has a link in it, {where}, which a store has not. Replace it.")
        for partial in filter(PARTIAL.fullmatch, files):
            Path(folder, partial).unlink(missing_ok=True)


def _restore(path: Path, spec: Spec) -> None:
    """Write the files that follow from the study where they are lost or damaged, and then their list."""
    sums = read_list(path)
    if sums and not changed(path, sums):
        return
    made, begun = _made(spec), (path / SUMS / "c").exists()

    def right(name: str) -> bytes:
        """Return the file in the store if it is listed, or if it is as it would be made; otherwise make it."""
        there, listed, new = get(path / name), sums.get(name), made.get(name)
        if there is not None and (sha256(there) == listed or there == new):
            return there
        # without a list it is not known which study the blocks belong to
        same = listed == sha256(new or b"") if listed else there is None or name != ROOT or not begun
        other = f"vkernel {__version__} does not make the same one: another study, vkernel or torch made the store"
        advice = "Nothing was changed. Give another --store."
        require(new is not None and same, f"{path} is damaged, {name} changed or got lost, and {other}. {advice}")
        return new or b""

    root = right(ROOT)
    _check_same(path, spec, json.loads(root)["attributes"])
    found = {name: right(name) for name in sums or made if name != ROOT} | {ROOT: root}
    for name, content in found.items():
        if get(path / name) != content:
            put(path / name, content)
    put(path / LIST, listed({name: sha256(content) for name, content in found.items()}))


def _check_same(path: Path, spec: Spec, attrs: Mapping[str, Any]) -> None:
    """Refuse a store of another version of the results, of another study, or of other data."""
    version, refusal = attrs.get("results", 1), "nothing was changed. Give another --store"
    stated = f"{path} holds results of version {version}; {_maker(attrs)}"
    ours = f"vkernel {__version__} computes version {RESULTS}, whose numbers may differ, and never mixes both"
    advice = f"It can be shown, plotted and exported, but not continued; {refusal} to compute it anew."
    require(version == RESULTS, f"{stated}; {ours} in one store. {advice}")
    # both with all keys: a store may be older than some of them
    there, here = (json.loads(study.to_json()) for study in (_spec(attrs), spec))
    differ = [k for k in here if there.get(k) != here[k] and json.dumps(there.get(k)) != json.dumps(here[k])]
    require(not differ, f"{path} holds another study (it differs in {', '.join(differ)}); {refusal}.")
    same = attrs.get("data_sha256") == fingerprint(datasets(spec))
    require(same, f"{path} was made from other training data; {refusal}.")


def _named(path: Path, spec: Spec, damaged: Mapping[Index, list[str]]) -> str:
    """Return a sentence that names damaged blocks: the condition, the members, and the arrays."""
    cells, parts = {c.index: c for c in spec.conditions()}, []
    for (*cell, block), names in list(damaged.items())[:NAMED]:
        members = spec.members_of(block)
        parts.append(f"{cells[tuple(cell)]}, members {members.start} to {members.stop - 1} ({', '.join(names)})")
    more = f" and {len(damaged) - NAMED} more" if len(damaged) > NAMED else ""
    return f"{path} is damaged, files of {len(damaged)} blocks changed or got lost: {'; '.join(parts)}{more}."


def _maker(attrs: Mapping[str, Any]) -> str:
    return f"it was made by vkernel {attrs.get('vkernel')}"


def _advice(path: Path) -> str:
    return f"'vkernel study run SPEC --store {path}'"


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__).rstrip(".")


@contextlib.contextmanager
def _readable_errors(path: Path, safe: str = "", verb: str = "written") -> Iterator[None]:
    """Turn errors of the file system into sentences."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        what = "The disk is full" if full else f"{path} cannot be {verb}: {error.strerror or error}"
        advice = "Free some space." if full else "Give a --store in a folder that you may write to."
        raise InputError(f"{what}. {advice if verb == 'written' else ''} {safe}".rstrip()) from None
