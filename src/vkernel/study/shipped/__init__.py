"""The studies that ship with the package, as TOML files beside this module."""

from __future__ import annotations

from pathlib import Path

__all__ = ["ORDER", "find", "studies"]

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
    """Return the shipped studies by name, in the order in which the documentation presents them."""
    folder = Path(__file__).resolve().parent
    return {name: folder / f"{name}.toml" for name in ORDER}


def find(source: Path | str) -> Path:
    """Return the file ``source``, or the shipped study of that name if there is no such file.

    ``examples/studies/NAME.toml``, where vkernel 0.1 had these files, is a name too.
    """
    path = Path(source)
    name = path.stem if path == Path("examples/studies", f"{path.stem}.toml") else str(source)
    return path if path.exists() else studies().get(name, path)
