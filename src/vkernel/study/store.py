"""Results of a study on disk: a Zarr group of labelled arrays that survives being killed at any moment.

Every quantity is one array whose dimensions are the factors of the study, ``member``, and its own. A chunk of it is one
block of members in one condition, so that blocks never share a file. A block is written quantity by quantity, each file
through a temporary one that takes its name, and last its flag in ``done``: what is flagged is whole. What is not is
computed again, to the same bits, since a block depends on the study and its index alone. The group itself is made in a
folder beside the final one, and then takes its name.

One process at a time writes: the file lock beside the store is released by the system when its holder dies.
"""

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
from typing import TYPE_CHECKING, Any

import numpy as np

from vkernel.core.errors import InputError, require
from vkernel.study.spec import Condition, Spec
from vkernel.study.work import Quantity, datasets, fingerprint, layout
from vkernel.version import __version__

if TYPE_CHECKING:
    import xarray

__all__ = ["Store", "load"]

DONE = "done"


class Store:
    """An open store of one study; made by :meth:`open`."""

    def __init__(self, path: Path, spec: Spec) -> None:
        import zarr

        self.path, self.spec = path, spec
        with _spoken(path):
            self.group: Any = zarr.open_group(str(path), mode="r+")
            try:
                flags: Any = self.group[DONE]
                self.done = np.asarray(flags[...])
            except (KeyError, ValueError, RuntimeError) as error:
                raise InputError(f"{path} is damaged: {error}. Give another --store.") from None

    @classmethod
    @contextlib.contextmanager
    def open(cls, path: Path | str, spec: Spec) -> Iterator[Store]:
        """The store at ``path``, made if it is not there; refused if it is another study's, or in use."""
        import filelock

        path = Path(path)
        with _spoken(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            real = path.resolve()  # one store, one lock, whatever links lead there
            lock = filelock.FileLock(real.parent / f".{real.name}.lock", timeout=0)
            try:
                lock.acquire()
            except filelock.Timeout:
                raise InputError(
                    f"Another run is writing to {path}. Wait for it to end, stop it, or give another --store."
                ) from None
        try:
            if not path.exists():
                _create(path, spec)
            _refuse_other(path, spec)
            _sweep(path)
            yield cls(path, spec)
        finally:
            lock.release()

    def missing(self) -> list[tuple[Condition, int]]:
        """The blocks that are not whole yet, in order."""
        return [
            (condition, block)
            for condition in self.spec.conditions()
            for block in range(self.spec.blocks)
            if not self.done[(*condition.index, block)]
        ]

    def write(self, condition: Condition, block: int, values: dict[str, np.ndarray]) -> None:
        """Keep a block: its quantities, and then its flag."""
        members = self.spec.members_of(block)
        where = (*condition.index, slice(members.start, members.stop))
        with _spoken(self.path, f"{int(self.done.sum())} of {self.done.size} blocks are safe; run again to go on."):
            for name, value in values.items():
                self.group[name][where] = value
            self.group[DONE][(*condition.index, slice(block, block + 1))] = True
        self.done[(*condition.index, block)] = True

    def dataset(self) -> xarray.Dataset:
        """All that is there so far."""
        return load(self.path)


def load(path: Path | str) -> xarray.Dataset:
    """The results in a store as labelled arrays; members that are not computed yet are NaN."""
    import xarray

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
    """Make the whole group with nothing in it, beside its place, and move it there."""
    import zarr

    quantities = layout(spec)
    with _spoken(path), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Zarr's own: consolidated metadata and text are not in its standard yet
        beside = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.new-"))
        try:
            group = zarr.open_group(str(beside), mode="w", zarr_format=3)
            group.attrs.update(_about(spec))
            for factor in spec.grid:
                about = {"long_name": factor.field, "units": factor.unit}
                _array(group, factor.dim, np.asarray(factor.coordinate), (factor.dim,), about)
            _array(group, "member", np.arange(spec.members), ("member",), {"long_name": "index of the trained model"})
            _array(group, "block", np.arange(spec.blocks), ("block",), {"long_name": "index of the block of members"})
            for name, values in {k: v for q in quantities.values() for k, v in q.coordinates.items()}.items():
                _array(group, name, values, (name,), {"long_name": _COORDINATES[name], "units": _UNITS.get(name, "")})
            for name, quantity in quantities.items():
                _quantity(group, name, quantity, spec)
            blocks = (*spec.shape, spec.blocks)
            flags = group.create_array(
                DONE,
                shape=blocks,
                chunks=(1,) * len(blocks),
                dtype="bool",
                fill_value=False,
                dimension_names=(*(f.dim for f in spec.grid), "block"),
            )
            flags.attrs.update({"long_name": "whether a block of members is computed", "units": "1"})
            zarr.consolidate_metadata(str(beside))
            beside.rename(path)
        except BaseException:
            shutil.rmtree(beside, ignore_errors=True)
            raise


_COORDINATES = {
    "x": "first coordinate of a sample",
    "y": "second coordinate of a sample",
    "time": "time of a score",
    "place": "place of a score",
    "point": "index of the training point",
    "index": "index of the sample",
    "component": "component of the sample",
}
_UNITS = {"x": "unit of the data", "y": "unit of the data", "place": "unit of the data", "time": "unit of t"}


def _quantity(group: Any, name: str, quantity: Quantity, spec: Spec) -> None:
    array = group.create_array(
        name,
        shape=(*spec.shape, spec.members, *quantity.shape),
        chunks=(*(1,) * len(spec.shape), spec.block, *quantity.shape),
        dtype="float64",
        fill_value=float("nan"),
        dimension_names=(*(f.dim for f in spec.grid), "member", *quantity.coordinates),
    )
    array.attrs.update({"long_name": quantity.about, "units": quantity.unit or "1"})


def _array(group: Any, name: str, values: np.ndarray, dims: tuple[str, ...], about: dict[str, str]) -> None:
    array = group.create_array(name, shape=values.shape, dtype=values.dtype, dimension_names=dims)
    array[...] = values
    array.attrs.update({"long_name": about["long_name"], "units": about.get("units") or "1"})


def _about(spec: Spec) -> dict[str, Any]:
    import torch

    return {
        "vkernel_study": spec.to_json(),
        "title": spec.title,
        "question": spec.question,
        "seed": spec.seed,
        "vkernel": __version__,
        "torch": torch.__version__,
        "revision": _revision(),
        "data_sha256": fingerprint(datasets(spec)),
    }


def _revision() -> str:
    """The git revision of the package's source, where it has one."""
    git, said = ["git", "-C", str(Path(__file__).parent)], ""
    try:  # a package installed into someone's repository is not that repository's
        for command in (["ls-files", "--error-unmatch", Path(__file__).name], ["rev-parse", "HEAD"]):
            said = subprocess.run([*git, *command], capture_output=True, text=True, timeout=5, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return said.strip()


def _refuse_other(path: Path, spec: Spec) -> None:
    attrs = load(path).attrs
    version = attrs.get("vkernel")
    require(
        version == __version__,
        f"{path} was made by vkernel {version}, and this is {__version__}; nothing was changed. Give another --store.",
    )
    there, ours = json.loads(attrs["vkernel_study"]), json.loads(spec.to_json())
    differ = [k for k in ours if there.get(k) != ours[k] and json.dumps(there.get(k)) != json.dumps(ours[k])]
    require(
        not differ,
        f"{path} holds another study (it differs in {', '.join(differ)}); nothing was changed. Give another --store.",
    )
    same = attrs.get("data_sha256") == fingerprint(datasets(spec))
    require(same, f"{path} was made from other training data; nothing was changed. Give another --store.")


def _sweep(path: Path) -> None:
    """Remove what a killed run left half-written; no finished chunk has such a name."""
    with _spoken(path):
        for partial in path.rglob("*.partial"):
            partial.unlink(missing_ok=True)
        for half in path.parent.glob(f".{path.name}.new-*"):
            shutil.rmtree(half, ignore_errors=True)


@contextlib.contextmanager
def _spoken(path: Path, safe: str = "") -> Iterator[None]:
    """Errors of the file system as sentences."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        what = "The disk is full" if full else f"{path} cannot be written: {error.strerror or error}"
        advice = "Free some space." if full else "Give a --store in a folder that you may write to."
        raise InputError(f"{what}. {advice} {safe}".rstrip()) from None
