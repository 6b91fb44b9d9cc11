"""Working memory stays inside the budget, also for data that lie on disk."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="anonymous memory is read from /proc")

SCRIPT = """
import sys, threading, time, numpy as np, torch, vkernel as vk
path, budget, n, d = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])

def anonymous():
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) * 1024 for line in f if line.startswith("RssAnon"))

torch.randn(64, 64) @ torch.randn(64, 64)   # thread pools
points = np.memmap(path, dtype=np.float32, mode="r", shape=(n, d))
peak, done = [0], []
def watch():
    while not done:
        peak[0] = max(peak[0], anonymous()); time.sleep(0.002)
start = anonymous()
watcher = threading.Thread(target=watch); watcher.start()
data = vk.Empirical(points)
score = vk.EmpiricalScore(data, vk.EDM(), memory=budget)
x = data[torch.arange(0, n, n // 64)[:64]] + 0.5
for sigma in (0.05, 1.0, 40.0):
    posterior = score.posterior(x, sigma)
    posterior.cov @ x
    posterior.sample(2, generator=0)
    score(x, sigma)
done.append(1); watcher.join()
print(peak[0] - start)
"""


def grown(path: Path, budget: int, n: int, d: int) -> int:
    command = [sys.executable, "-c", SCRIPT, str(path), str(budget), str(n), str(d)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def write(path: Path, n: int, d: int) -> None:
    out = np.memmap(path, dtype=np.float32, mode="w+", shape=(n, d))
    rng = np.random.default_rng(0)
    for start in range(0, n, 10000):
        stop = min(start + 10000, n)
        out[start:stop] = rng.standard_normal((stop - start, d), dtype=np.float32)
    out.flush()


def test_memory_map_within_budget(tmp_path: Path) -> None:
    """400 MB on disk, 256 MB allowed."""
    write(tmp_path / "points", 130_000, 784)
    assert grown(tmp_path / "points", 256 << 20, 130_000, 784) < 256 << 20


@pytest.mark.slow
def test_eight_gigabytes(tmp_path: Path) -> None:
    """8 GB on disk, 1 GB allowed."""
    n = 2_600_000
    write(tmp_path / "points", n, 784)
    assert grown(tmp_path / "points", 1 << 30, n, 784) < 1 << 30
