"""The command line, in this process: a process of its own takes seconds to import torch."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
from command import Left

from vkernel.cli import main


@pytest.fixture
def vkernel(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Left]:
    """Run the command."""

    def run(*args: object) -> Left:
        monkeypatch.setattr(sys, "argv", ["vkernel", *map(str, args)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main()
        held = capsys.readouterr()
        return Left(int(left.value.code or 0), held.out, held.err)

    return run


@pytest.fixture
def refused(vkernel: Callable[..., Left]) -> Callable[..., str]:
    """One sentence on standard error, exit code 2, nothing else."""

    def run(*args: object) -> str:
        left = vkernel(*args)
        assert left.code == 2, left
        assert "Traceback" not in left.err
        assert len(left.err.strip().splitlines()) == 1, left.err
        assert left.err.startswith("vkernel: ")
        assert left.err.rstrip().endswith((".", "'.")), left.err
        assert left.out == ""
        return left.err

    return run
