"""Atomic writing of files: a result is on disk completely or not at all."""

import tempfile
from pathlib import Path

from vkernel.core.errors import InputError


def write(path: str | Path, content: str | bytes) -> Path:
    """Write a file in a temporary folder beside ``path`` and move it there; folders are made as needed."""
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
            written = Path(folder, path.name)
            written.write_bytes(content.encode() if isinstance(content, str) else content)
            written.replace(path)
    except OSError as error:
        raise InputError(f"Cannot write {path}: {error.strerror or error}.") from None
    return path
