"""What the tests of studies share: small studies, and how one is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest

from vkernel import InputError
from vkernel.study import work
from vkernel.study.spec import read

inf = math.inf
SMALL: dict[str, Any] = {
    "title": "small",
    "members": 5,
    "block": 2,
    "data": {"name": "pair"},
    "model": {"per_axis": 4},
    "training": {"draws": 64},
    "sampler": {"samples": 16, "steps": 8},
}
PLANE = SMALL | {"data": {"name": "square"}, "model": {"per_axis": 3}}


def with_(**tables: Any) -> dict[str, Any]:
    """SMALL with fields of its tables put in."""
    merged = {k: {**SMALL.get(k, {}), **v} if isinstance(v, dict) and k != "grid" else v for k, v in tables.items()}
    return SMALL | merged


def refused(spec: Any, *words: str, large: bool = False) -> str:
    """One sentence, with these words in it, before anything is computed."""
    with pytest.raises(InputError) as error:
        work.prepare(read(spec, large=large))
    said = str(error.value)
    for word in words:
        assert word in said, said
    assert "\n" not in said
    return said


# The file


def grid(**factors: Any) -> dict[str, Any]:
    return SMALL | {"grid": {k.replace("__", "."): v for k, v in factors.items()}}
