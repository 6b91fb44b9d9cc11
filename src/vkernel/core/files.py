"""Atomic writing of files: a result is on disk completely or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from vkernel.core.errors import InputError


def write(path: str | Path, content: str | bytes) -> Path:
    """Write a temporary file beside ``path`` and rename it; folders are made as needed."""
    path = Path(path)
    raw = content.encode() if isinstance(content, str) else content
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as stream:
                stream.write(raw)
            Path(name).chmod(0o644)
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise InputError(f"Cannot write {path}: {error.strerror or error}.") from None
    return path
