"""The release check runs every command."""

from __future__ import annotations

import runpy
from pathlib import Path

from typer.main import get_command

from vkernel.cli.commands import app

ROOT = Path(__file__).resolve().parent.parent


def test_the_release_check_runs_every_command() -> None:
    check = runpy.run_path(str(ROOT / "release" / "check.py"))
    command = get_command(app)
    names = check["names"](command)
    assert {"profile", "study run"} <= set(names)
    assert check["not_listed"](names) == []
    assert check["not_listed"]([*names, "study other"]) != []


def test_the_table_of_versions_is_that_of_pyproject_and_constraints() -> None:
    table = runpy.run_path(str(ROOT / "release" / "compatibility.py"))
    text = table["PAGE"].read_text()
    assert text == table["page"](text), "run python release/compatibility.py"
    assert any(row.startswith("| zarr | study | ") for row in table["rows"]())
