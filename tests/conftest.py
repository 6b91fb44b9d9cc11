"""Shared fixtures. Seeded tensors are in ``tests/support/draws.py``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


@pytest.fixture(scope="session")
def cifar() -> Path:
    """Return the folder with CIFAR-10's sheets, or skip."""
    folder = Path(os.environ.get("VKERNEL_DATA", "absent")) / "cifar10"
    if not (folder / "cifar10_batch_0.png").is_file():
        pytest.skip("VKERNEL_DATA names no folder with cifar10/cifar10_batch_0.png")
    return folder


@pytest.fixture(scope="session")
def models() -> Path:
    """Return the folder with the seven networks of other people, or skip."""
    folder = Path(os.environ.get("VKERNEL_MODELS", "absent"))
    if not (folder / "cnn28_mnist_a.pth").is_file():
        pytest.skip("VKERNEL_MODELS names no folder with cnn28_mnist_a.pth")
    return folder


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Run on one thread: small tensors on shared cores would spend their time waiting."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
