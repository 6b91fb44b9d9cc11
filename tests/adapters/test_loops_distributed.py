"""Two processes train one network on CPUs: rank 0 evaluates, nothing hangs, and no weight or buffer changes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from loops import equal, steps_of

import vkernel as vk

SUPPORT = Path(__file__).resolve().parents[1] / "support"
needed = torch.distributed.is_available() and torch.distributed.is_gloo_available()


@pytest.mark.slow
@pytest.mark.skipif(not needed, reason="this build of torch has no gloo")
def test_distributed_data_parallel(tmp_path: Path) -> None:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        env.pop(name, None)
    command = [sys.executable, str(SUPPORT / "ddp_training.py")]
    runs = [subprocess.Popen([*command, str(rank), str(tmp_path)], env=env, stderr=subprocess.PIPE) for rank in (0, 1)]
    try:
        errors = [run.communicate(timeout=300)[1].decode() for run in runs]
    finally:
        for run in runs:
            run.kill()
    assert [run.returncode for run in runs] == [0, 0], errors

    def weights(name: str, rank: int) -> dict[str, torch.Tensor]:
        return torch.load(tmp_path / f"{name}-{rank}.pt", weights_only=True)

    for rank in (0, 1):
        assert "norm.running_mean" in weights("alone", rank)
        assert equal(weights("alone", rank), weights("before", rank))
        assert equal(weights("alone", rank), weights("after", rank))
        assert equal(weights("compiled-alone", rank), weights("compiled-compiled", rank))
    assert steps_of(tmp_path / "before-0") == steps_of(tmp_path / "after-0") == [0, 4, 8]
    assert steps_of(tmp_path / "compiled-0") == [0, 4, 8]
    assert steps_of(tmp_path / "before-1") == []  # made before its rank was known: it has a log, and is silent
    assert not (tmp_path / "after-1").exists()


@pytest.mark.parametrize(
    ("variables", "silent"),
    [
        ({}, False),
        ({"RANK": "0", "WORLD_SIZE": "2"}, False),
        ({"RANK": "1", "WORLD_SIZE": "2"}, True),
        ({"RANK": "1", "WORLD_SIZE": "1"}, False),
        ({"LOCAL_RANK": "1", "NODE_RANK": "0", "WORLD_SIZE": "4"}, True),
        ({"LOCAL_RANK": "0", "NODE_RANK": "1", "WORLD_SIZE": "4"}, True),
        ({"RANK": "0", "LOCAL_RANK": "1", "WORLD_SIZE": "4"}, False),
    ],
)
def test_variables_of_launchers(
    variables: dict[str, str], silent: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the group of processes is made, the rank is known from the launcher, and other ranks write no log."""
    for name in ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    images = torch.randn(16, 2, generator=torch.Generator().manual_seed(0))
    small = {"images": 4, "samples": 0, "progress": False}
    monitor = vk.Monitor(images[:8], vk.VP(), test=images[8:], log=tmp_path / "log", **small)
    assert (monitor.evaluate(0, lambda x, t: x) is None) == silent
    assert (tmp_path / "log").exists() != silent
