"""Trainings that survive being killed: where a training of networks stands is kept in a folder.

``training.json`` describes the training. Members are trained in blocks; for block b, ``b.json`` holds the number of
steps done and the SHA-256 of the files that belong to it: ``b-run-STEP.safetensors``, which has parameters, their
average, the optimiser's memory and norms, and ``b-snapshot-STEP.safetensors``, which are written once. Files are
written whole or not at all, and ``b.json`` last, so that it always describes complete files. The draws of a step depend
on its number alone: a training that continues from these files gives the same result, bit for bit on one type of device
(with deterministic kernels). A folder is for one process at a time."""

import hashlib
import json
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vkernel.core.errors import InputError, require, shown
from vkernel.core.files import expand, make_folder, write
from vkernel.train.models.base import State
from vkernel.version import __version__

SECONDS = 60.0  # between two writes
ABOUT = "training.json"
RUNNING = ("state", "average", "memory")
WORDS = {"levels": "process, weights, times or labels"}  # for which a hash stands


@dataclass
class Progress:
    """Where the training of a block stands after ``step`` steps. ``norms`` are sums since the last snapshot, ``past``
    the means of the stages before; ``found`` are the states of snapshots and of the last step."""

    step: int = 0
    state: State = field(default_factory=dict)
    average: State = field(default_factory=dict)
    memory: State = field(default_factory=dict)
    norms: Tensor | None = None
    past: list[Tensor] = field(default_factory=list)
    found: dict[int, State] = field(default_factory=dict)


class Kept:
    """The folder of one training, which ``facts`` describe; a folder of another training is refused."""

    def __init__(self, folder: str | Path, facts: Mapping[str, object]) -> None:
        self.folder, self.last = expand(folder), time.monotonic()
        good = self.folder.is_dir() or not self.folder.exists()
        require(good, f"{shown(folder)} is a file; a checkpoint is a folder.")
        about, path = json.loads(json.dumps(dict(facts))), self.folder / ABOUT
        left = set(self.folder.glob(".vkernel-*"))  # of a write that was killed
        if path.exists():
            held = self._read_json(path).get("training")
            require(isinstance(held, dict), f"{shown(path)} does not describe a training. {self._remedy}")
            assert isinstance(held, dict)
            what = _difference(held, about)
            other = f"The checkpoint in {shown(folder)} is of another training, with other {what}"
            require(not what, f"{other}. {self._remedy}")
        else:
            good = not self.folder.exists() or set(self.folder.iterdir()) == left
            what = f"{shown(self.folder)} holds other files and no checkpoint"
            require(good, f"{what}; give an empty folder or a new one.")
            make_folder(self.folder)
            write(path, json.dumps({"vkernel": __version__, "training": about}, indent=1))
        for old in left:
            old.unlink(missing_ok=True)

    @property
    def due(self) -> bool:
        """Whether the last write was long ago."""
        return time.monotonic() - self.last > SECONDS

    def read(self, block: int, like: State, device: torch.device) -> Progress | None:
        """Return where a block stands, or ``None`` if it has not begun; its parameters must be ``like`` the given."""
        path = self.folder / f"{block}.json"
        if not path.exists():
            return None
        about = self._read_json(path)
        try:
            step, digests = int(about["step"]), {str(k): str(v) for k, v in about["files"].items()}
            steps = sorted(int(k.partition("-")[2]) for k in digests if k.startswith("snapshot-"))
            parts = self._read_file(block, f"run-{step}", digests, device)
            past = parts.pop("past/")
            found = Progress(step, norms=parts.pop("norms/", None), past=list(past) if past.ndim > 1 else [])
            for key, value in parts.items():
                part, _, name = key.partition("/")
                vars(found)[part][name] = value
            found.found = {k: self._read_file(block, f"snapshot-{k}", digests, device) for k in steps}
            for state in filter(None, (found.state, found.average, *found.found.values())):
                if _layout(state) != _layout(like):
                    raise ValueError("its parameters are not those of the model")
                for name in like:  # files have no order; the optimiser's memory goes by that of the model
                    state[name] = state.pop(name)
        except InputError:  # of one of the files, which is also a ValueError
            raise
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise InputError(f"{shown(path)} is damaged: {error!r:.80}. {self._remedy}") from None
        return found

    def write(self, block: int, progress: Progress) -> None:
        """Write where a block stands; a disk that is full does not end the training."""
        self.last = time.monotonic()
        run = {f"{part}/{name}": a for part in RUNNING for name, a in vars(progress)[part].items()}
        run |= {} if progress.norms is None else {"norms/": progress.norms}
        run["past/"] = torch.stack(progress.past) if progress.past else torch.empty(0)
        path, own = self.folder / f"{block}.json", f"run-{progress.step}"
        try:
            held = self._read_json(path)["files"] if path.exists() else {}
            digests = {f"snapshot-{k}": held.get(f"snapshot-{k}") for k in progress.found}
            for k, state in progress.found.items():
                digests[f"snapshot-{k}"] = digests[f"snapshot-{k}"] or self._write_file(block, f"snapshot-{k}", state)
            digests[own] = self._write_file(block, own, run)
            write(path, json.dumps({"step": progress.step, "files": digests}, indent=1))
            for old in set(self.folder.glob(f"{block}-run-*.safetensors")) - {self._path(block, own)}:
                old.unlink(missing_ok=True)
        except (InputError, OSError) as error:
            warnings.warn(f"{error} The training goes on; its checkpoint stays as it was.", stacklevel=2)

    @property
    def _remedy(self) -> str:
        return f"Remove {shown(self.folder)} to train from the beginning, or give another folder."

    def _path(self, block: int, name: str) -> Path:
        return self.folder / f"{block}-{name}.safetensors"

    def _read_json(self, path: Path) -> dict[str, Any]:
        try:
            found = json.loads(path.read_text(encoding="utf8"))
        except (OSError, ValueError, RecursionError) as error:
            raise InputError(f"{shown(path)} cannot be read: {error}. {self._remedy}") from None
        require(isinstance(found, dict), f"{shown(path)} is damaged: it holds no description. {self._remedy}")
        return dict(found)

    def _read_file(self, block: int, name: str, digests: Mapping[str, str], device: torch.device) -> State:
        from safetensors import SafetensorError
        from safetensors.torch import load

        path = self._path(block, name)
        try:
            raw = path.read_bytes()
            good = hashlib.sha256(raw).hexdigest() == digests[name]
            require(good, f"{shown(path)} is damaged: its content is not what was written. {self._remedy}")
            return {key: a.to(device) for key, a in load(raw).items()}
        except OSError as error:
            raise InputError(f"{shown(path)} cannot be read: {error.strerror}. {self._remedy}") from None
        except SafetensorError as error:
            raise InputError(f"{shown(path)} is damaged: {error}. {self._remedy}") from None

    def _write_file(self, block: int, name: str, tensors: State) -> str:
        from safetensors.torch import save

        raw = save({key: a.detach().cpu().contiguous() for key, a in tensors.items()})
        write(self._path(block, name), raw)
        return hashlib.sha256(raw).hexdigest()


def _layout(state: State) -> set[tuple[str, torch.Size, torch.dtype]]:
    return {(name, a.shape, a.dtype) for name, a in state.items()}


def _difference(there: Mapping[str, object], here: Mapping[str, object]) -> str:
    """Return in words in which facts two trainings differ; of a model, in which settings. Hashes have no values."""
    words: list[str] = []
    for name in {**here, **there}:
        a, b = there.get(name), here.get(name)
        if isinstance(a, dict) and isinstance(b, dict):
            words += filter(None, [_difference(a, b)])
        elif a != b:
            values = f"{name} ({a!r} there, {b!r} here)"
            words.append(values if len(values) <= 120 else WORDS.get(name, name))
    return ", ".join(words)
