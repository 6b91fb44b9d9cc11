"""One quick run of ``vkernel reproduce`` for all tests of the page."""

from __future__ import annotations

from pathlib import Path

import pytest

from vkernel import reproduce


@pytest.fixture(scope="session")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a quick run without CIFAR."""
    folder = tmp_path_factory.mktemp("figures") / "new" / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("VKERNEL_DATA", raising=False)
        index = reproduce.run(folder, seed=3, quick=True)
    assert index == (folder / "index.html").resolve()
    return folder
