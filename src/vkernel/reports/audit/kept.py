"""Results of finished stages, kept in a folder, so that an audit that was killed continues where it was.

A result is one file, ``<stage>-<digest>.safetensors``. The digest is over everything that determines the result:
weights and code of the networks, their conventions, the data, sizes, seed, batch, device and version. Tensors are
stored as they are, all else as JSON in the header; nothing is ever unpickled. A file begins with a checksum of it:
a damaged one is computed again. A result that is read is equal, bit for bit, to the one that was written."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
import re
import warnings
from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from vkernel.core.errors import InputError, require
from vkernel.core.files import check_outputs, expand, write
from vkernel.data import Empirical
from vkernel.process import Process
from vkernel.score import Wrapped
from vkernel.version import __version__

Result = TypeVar("Result")
GRID = 257  # times at which a process is compared
ROWS = 4096  # of the data that are hashed at once


class Kept:
    """A folder of results (``None``: nothing is kept); ``facts`` determine them, besides those of each result."""

    def __init__(self, folder: str | Path | None, *facts: object) -> None:
        self.folder = None if folder is None else expand(folder)
        good = self.folder is None or self.folder.is_dir() or not self.folder.exists()
        require(good, f"{folder} is a file; results are kept in a folder.")
        check_outputs({} if self.folder is None else {"resume": self.folder / "kept"}, ())
        self.digest = "" if folder is None else digest(__version__, *facts)

    def get(self, stage: str, compute: Callable[[], Result], *facts: object, process: Process | None = None) -> Result:
        """Return the result of a stage: the one in the folder, or a new one, which is then kept there.
        ``process`` takes the place of the processes in it, which are not stored."""
        if self.folder is None:
            return compute()
        name = re.sub(r"\W+", "_", stage)[:60]
        path = self.folder / f"{name}-{digest(self.digest, stage, *facts)[:24]}.safetensors"
        try:
            held = path.read_bytes()
            if held[:64] == hashlib.sha256(held[65:]).hexdigest().encode():
                found: Result = _unpacked(held[65:], process)
                return found
        except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError, SafetensorError):
            pass  # absent, damaged, or of another version of this package
        result = compute()
        try:
            content = _packed(result)
        except TypeError:  # a result that has no form in a file is computed each time
            return result
        try:
            write(path, hashlib.sha256(content).hexdigest().encode() + b"\n" + content)
        except InputError as error:  # a full disk does not cost the result
            warnings.warn(f"{error} The audit goes on without it.", stacklevel=2)
        return result


def digest(*facts: object) -> str:
    """Return a SHA-256 of facts: texts, numbers, tensors, data sets, networks, and lists of these."""
    found = hashlib.sha256()
    for part in _bytes(facts):
        found.update(len(part).to_bytes(8, "little") + part)
    return found.hexdigest()


def _bytes(fact: object) -> Iterable[bytes]:
    if isinstance(fact, Tensor):
        plain = fact.detach().cpu().contiguous()
        yield f"{plain.dtype}{tuple(plain.shape)}".encode()
        yield plain.reshape(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(fact, Empirical):
        yield repr((fact.n, fact.shape, fact.stored, fact.scale)).encode()
        for start in range(0, fact.n, ROWS):
            yield from _bytes(fact.rows(start, min(start + ROWS, fact.n)))
        yield from _bytes(fact.weights)
    elif isinstance(fact, Process):
        t = torch.linspace(fact.eps, fact.T, GRID, dtype=torch.float64).clamp(fact.eps, fact.T)
        yield from _bytes([repr(fact), fact.alpha(t), fact.sigma(t)])
    elif isinstance(fact, Wrapped):
        wanted = isinstance(fact.net, nn.Module) and isinstance(fact.time, str)
        require(wanted, f"Results of {fact.name} cannot be kept: only those of torch modules with a named time can be.")
        yield from _bytes([value for name, value in vars(fact).items() if name != "notes"])
    elif isinstance(fact, nn.Module):
        yield repr(fact).encode()
        for file in sorted({inspect.getsourcefile(type(m)) or "" for m in fact.modules()}):
            if "torch" not in Path(file).parts and Path(file).is_file():
                yield Path(file).read_bytes()
        for name, value in fact.state_dict().items():
            yield name.encode()
            yield from _bytes(value)
    elif isinstance(fact, list | tuple):
        yield str(len(fact)).encode()
        for one in fact:
            yield from _bytes(one)
    else:
        yield repr(fact).encode()


def _packed(result: object) -> bytes:
    """Return tensors and a description of everything else in one block."""
    tensors: dict[str, Tensor] = {}
    text = json.dumps(_plain(result, tensors))
    return save(tensors, {"result": text})


def _unpacked(content: bytes, process: Process | None) -> Any:
    size = int.from_bytes(content[:8], "little")
    text = json.loads(content[8 : 8 + size])["__metadata__"]["result"]
    return _restored(json.loads(text), load(content), process)


def _plain(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Return a value as JSON; containers and objects are one-entry dictionaries that name their kind."""
    import xarray

    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [_plain(v, tensors) for v in value]
    if isinstance(value, Tensor):
        name = str(len(tensors))
        tensors[name] = value.detach().cpu().clone().contiguous()
        return {"tensor": name}
    if isinstance(value, tuple | frozenset):
        return {type(value).__name__: [_plain(v, tensors) for v in value]}
    if isinstance(value, dict):
        return {"dict": [[_plain(k, tensors), _plain(v, tensors)] for k, v in value.items()]}
    if isinstance(value, xarray.Dataset):
        return {"dataset": value.to_dict()}
    if isinstance(value, Process):
        return {"process": None}
    if is_dataclass(value) and not isinstance(value, type):
        held = {f.name: _plain(vars(value)[f.name], tensors) for f in fields(value) if f.init}
        return {"object": [type(value).__module__, type(value).__qualname__, held]}
    raise TypeError(f"A {type(value).__name__} cannot be kept.")


def _restored(value: Any, tensors: dict[str, Tensor], process: Process | None) -> Any:
    import xarray

    if isinstance(value, list):
        return [_restored(v, tensors, process) for v in value]
    if not isinstance(value, dict):
        return value
    ((kind, held),) = value.items()
    if kind == "tensor":
        return tensors[held]
    if kind in ("tuple", "frozenset"):
        return {"tuple": tuple, "frozenset": frozenset}[kind](_restored(held, tensors, process))
    if kind == "dict":
        return {_restored(k, tensors, process): _restored(v, tensors, process) for k, v in held}
    if kind == "dataset":
        return xarray.Dataset.from_dict(held)
    if kind == "process":
        return process
    module, name, given = held
    made = getattr(importlib.import_module(module), name) if module.startswith("vkernel.") else None
    if not isinstance(made, type) or not is_dataclass(made):
        raise ValueError(f"{module}.{name} is no result.")
    return made(**{k: _restored(v, tensors, process) for k, v in given.items()})
