"""Scripts of the documentation as modules, so that tests can call what they define."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

DOCS = Path(__file__).parents[2] / "docs"


def script(name: str) -> ModuleType:
    """Return ``docs/NAME`` as a module."""
    spec = importlib.util.spec_from_file_location(name.replace("/", "_").removesuffix(".py"), DOCS / name)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
