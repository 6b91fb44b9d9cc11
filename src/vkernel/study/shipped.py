"""The studies that come with the package: ``examples/studies/*.toml`` of a clone, or their copies in an installation.

There is one set of files. A clone, or an editable install of one, has them in ``examples/studies``; a wheel carries
them as data, ``share/vkernel/studies``, found through the list of its files.
"""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

__all__ = ["ORDER", "find", "studies"]

INSTALLED = "share/vkernel/studies"
ORDER = (
    "target_noise",
    "process_and_cutoff",
    "nonlinearity",
    "capacity",
    "features",
    "training_set",
    "phase_capacity_noise",
    "phase_size_time",
    "phase_cutoff_capacity",
)


def studies() -> dict[str, Path]:
    """The shipped studies by name, in the order in which they are told."""
    source = Path(__file__).resolve().parents[2]
    clone = source.name == "src"
    beside = source.parent / "examples" / "studies" if clone else source / INSTALLED  # as pip install --target has it
    found = list(beside.glob("*.toml"))
    if not found:
        try:
            files = importlib.metadata.files("vkernel") or []
        except importlib.metadata.PackageNotFoundError:
            files = []
        found = [Path(str(f.locate())).resolve() for f in files if f.match(f"{INSTALLED}/*.toml")]
    by_name = {path.stem: path for path in found if path.is_file()}
    return {name: by_name[name] for name in ORDER if name in by_name}


def find(source: Path | str) -> Path:
    """The file, or the shipped study of that name where there is no such file."""
    path = Path(source)
    return path if path.exists() else studies().get(str(source), path)
