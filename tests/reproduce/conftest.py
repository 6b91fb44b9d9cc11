"""One quick run of ``vkernel reproduce`` for all tests of exhibits, also where several processes run them."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from exhibits import Made, make
from filelock import FileLock


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Made:
    """Return all exhibits but CIFAR's, made quickly by the process that comes first."""
    root = tmp_path_factory.getbasetemp()
    root = root.parent if hasattr(request.config, "workerinput") else root  # the workers of pytest-xdist share it
    kept = Path(root, "reproduce.pickle")
    with FileLock(root / "reproduce.lock"):
        if not kept.exists():
            kept.write_bytes(pickle.dumps(make(root / "figures" / "new" / "out", 3)))
        found: Made = pickle.loads(kept.read_bytes())
    return found
