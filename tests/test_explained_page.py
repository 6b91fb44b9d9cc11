"""docs/explained.md: its tables are those of the results beside it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

EXPLAINED = Path(__file__).parents[1] / "docs" / "explained"


def test_tables_are_those_of_the_results() -> None:
    spec = importlib.util.spec_from_file_location("page", EXPLAINED / "page.py")
    assert spec is not None
    assert spec.loader is not None
    page = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(page)
    text = page.PAGE.read_text()
    for name, table in page.tables().items():
        found = page.block(name).search(text)
        assert found is not None, name
        assert found.group() == table, name
