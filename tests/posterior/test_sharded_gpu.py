"""Two processes on one GPU, each with half of the points on the GPU path, give the results of one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import sharded_gpu
import torch
from sharded_gpu import SIGMAS, images, results


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
def test_two_processes_on_one_card_give_the_results_of_one(tmp_path: Path) -> None:
    command = [sys.executable, sharded_gpu.__file__, str(tmp_path)]
    ranks = [subprocess.Popen([*command, str(rank), "2"], stderr=subprocess.PIPE, text=True) for rank in range(2)]
    for process in ranks:
        _, problem = process.communicate(timeout=240)
        assert process.returncode == 0, problem
    first, second = (torch.load(tmp_path / f"2-{rank}.pt") for rank in range(2))
    for kind in ("8 bits", "float32"):
        data = images(kind)
        for sigma in SIGMAS:
            one, two = results(data, sigma), first[kind, sigma]
            assert two["gpu"]
            assert all(torch.equal(a, second[kind, sigma][name]) for name, a in two.items())
            gap = {
                name: (two[name].double() - a.double()).flatten(min(1, a.ndim - 1)) for name, a in one.items() if a.ndim
            }
            worst = (gap["score"].norm(dim=1) / one["score"].double().flatten(1).norm(dim=1)).max()
            assert worst <= 1e-6, (kind, sigma, worst)
            assert gap["mean"].norm(dim=1).max() <= 1.5e-5 * data.spread, (kind, sigma)
            noise = 1e-7 * data.d * sigma**2  # of the noise that C is compared with
            assert (gap["trace"].abs() <= 3e-5 * one["trace"] + noise).all(), (kind, sigma)
