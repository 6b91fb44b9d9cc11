"""Results of a study on disk: a Zarr group of labelled arrays that survives being killed at any moment.

Every quantity is one array whose dimensions are the factors of the study, ``member``, and its own. A chunk of it is one
block of members in one condition, so that blocks never share a file. A block is written quantity by quantity, each file
through a temporary one that is then renamed, and last its flag in ``done``: a flagged block is complete. Other blocks
are computed again, to the same bits, since a block depends on the study and its index alone. The group itself is made
in a folder beside the final one, and then renamed. One process at a time writes: the file lock beside the store is
released by the system when its holder dies.

``RESULTS`` is the version of the numbers: it changes when the same study would give other ones. A store of another
version can be read but not continued, so that it never mixes both. Version 1 is vkernel 0.1, which recorded none."""

from __future__ import annotations

import contextlib
import errno
import json
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import xarray

from vkernel.core.errors import InputError, require
from vkernel.study.spec import Condition, Spec
from vkernel.study.work import datasets, fingerprint, layout
from vkernel.version import __version__

RESULTS = 2
DONE = "done"
INDICES = {"member": "trained model", "block": "block of members", "point": "training point", "index": "sample"}
PLACES = {"x": "first coordinate of a sample", "y": "second coordinate of a sample", "place": "place of a score"}
COORDINATES = {name: (f"index of the {what}", "1") for name, what in INDICES.items()}
COORDINATES |= {name: (what, "unit of the data") for name, what in PLACES.items()}
COORDINATES |= {"time": ("time of a score", "unit of t"), "component": ("component of the sample", "1")}


class Store:
    """An open store of one study; made by :meth:`open`."""

    def __init__(self, path: Path, spec: Spec) -> None:
        import zarr

        self.path, self.spec = path, spec
        with _readable_errors(path):
            self.group: Any = zarr.open_group(str(path), mode="r+")
            try:
                flags: Any = self.group[DONE]
                self.done = np.asarray(flags[...])
            except (KeyError, ValueError, RuntimeError) as error:
                raise InputError(f"{path} is damaged: {error}. Give another --store.") from None

    @classmethod
    @contextlib.contextmanager
    def open(cls, path: Path | str, spec: Spec) -> Iterator[Store]:
        """Open the store at ``path``, made if it is not there; refuse one of another study, or one in use."""
        import filelock

        path = Path(path)
        with _readable_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            real = path.resolve()  # one store, one lock, whatever links lead there
            lock = filelock.FileLock(real.parent / f".{real.name}.lock", timeout=0)
            try:
                lock.acquire()
            except filelock.Timeout:
                advice = "Wait for it to end, stop it, or give another --store."
                raise InputError(f"Another run is writing to {path}. {advice}") from None
        try:
            if not path.exists():
                _create(path, spec)
            _check_same(path, spec)
            with _readable_errors(path):  # a killed run left half-written files; no finished chunk has such a name
                for partial in path.rglob("*.partial"):
                    partial.unlink(missing_ok=True)
                for half in path.parent.glob(f".{path.name}.new-*"):
                    shutil.rmtree(half, ignore_errors=True)
            yield cls(path, spec)
        finally:
            lock.release()

    def missing(self) -> list[tuple[Condition, int]]:
        """Return the blocks that are not complete yet, in order."""
        return [(c, b) for c in self.spec.conditions() for b in range(self.spec.blocks) if not self.done[(*c.index, b)]]

    def write(self, condition: Condition, block: int, values: dict[str, np.ndarray]) -> None:
        """Write a block: its quantities, and then its flag."""
        members, safe = self.spec.members_of(block), f"{int(self.done.sum())} of {self.done.size} blocks are safe"
        with _readable_errors(self.path, f"{safe}; run again to go on."):
            for name, value in values.items():
                self.group[name][(*condition.index, slice(members.start, members.stop))] = value
            self.group[DONE][(*condition.index, slice(block, block + 1))] = True
        self.done[(*condition.index, block)] = True


def load(path: Path | str) -> xarray.Dataset:
    """Return the results in a store as labelled arrays; members that are not computed yet are NaN."""
    path = Path(path)
    require(path.exists(), f"There is no store at {path}; make one with 'vkernel study run SPEC --store {path}'.")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = xarray.open_zarr(path, chunks=None)
    except Exception as error:
        raise InputError(f"{path} is not a store of a study: {str(error).splitlines()[0]}.") from None
    require("vkernel_study" in found.attrs, f"{path} is a Zarr group, but not the store of a study.")
    return found


def _create(path: Path, spec: Spec) -> None:
    """Make the whole group, still empty, beside its place, and rename it."""
    import torch
    import zarr

    dims, cells, quantities = tuple(f.dim for f in spec.grid), (1,) * len(spec.grid), layout(spec)
    with _readable_errors(path), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from Zarr: consolidated metadata and text are not in its standard yet
        beside = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.new-"))
        try:
            group = zarr.open_group(str(beside), mode="w", zarr_format=3)
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
            axes |= {name: (values, *COORDINATES[name]) for name, values in plain.items()}
            for name, (values, words, unit) in axes.items():
                create(name, words, unit, (name,), shape=values.shape, dtype=values.dtype)[...] = values
            for name, q in quantities.items():
                size = {"shape": (*spec.shape, spec.members, *q.shape), "chunks": (*cells, spec.block, *q.shape)}
                own = (*dims, "member", *q.coordinates)
                create(name, q.about, q.unit, own, dtype="float64", fill_value=float("nan"), **size)
            size = {"shape": (*spec.shape, spec.blocks), "chunks": (*cells, 1)}
            whether = "whether a block of members is computed"
            create(DONE, whether, "", (*dims, "block"), dtype="bool", fill_value=False, **size)
            zarr.consolidate_metadata(str(beside))
            beside.rename(path)
        except BaseException:
            shutil.rmtree(beside, ignore_errors=True)
            raise


def _revision() -> str:
    """Return the git revision of the package's source, where it has one."""
    git, answer = ["git", "-C", str(Path(__file__).parent)], ""
    try:  # a package installed into someone's repository is not that repository's
        for command in (["ls-files", "--error-unmatch", Path(__file__).name], ["rev-parse", "HEAD"]):
            answer = subprocess.run([*git, *command], capture_output=True, text=True, timeout=5, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return answer.strip()


def _check_same(path: Path, spec: Spec) -> None:
    """Refuse a store of another version of the results, of another study, or of other data."""
    attrs = load(path).attrs
    version, refusal = attrs.get("results", 1), "nothing was changed. Give another --store"
    stated = f"{path} holds results of version {version}, made by vkernel {attrs.get('vkernel')}"
    ours = f"vkernel {__version__} computes version {RESULTS}, whose numbers may differ, and never mixes both"
    advice = f"It can be shown, plotted and exported, but not continued; {refusal} to compute it anew."
    require(version == RESULTS, f"{stated}; {ours} in one store. {advice}")
    there, here = json.loads(attrs["vkernel_study"]), json.loads(spec.to_json())
    differ = [k for k in here if there.get(k) != here[k] and json.dumps(there.get(k)) != json.dumps(here[k])]
    require(not differ, f"{path} holds another study (it differs in {', '.join(differ)}); {refusal}.")
    same = attrs.get("data_sha256") == fingerprint(datasets(spec))
    require(same, f"{path} was made from other training data; {refusal}.")


@contextlib.contextmanager
def _readable_errors(path: Path, safe: str = "") -> Iterator[None]:
    """Turn errors of the file system into sentences."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        what = "The disk is full" if full else f"{path} cannot be written: {error.strerror or error}"
        advice = "Free some space." if full else "Give a --store in a folder that you may write to."
        raise InputError(f"{what}. {advice} {safe}".rstrip()) from None
