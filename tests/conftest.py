"""Shared fixtures. Seeded tensors are in ``tests/support/draws.py``."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import digits, tiny_unet
from torch import nn

import vkernel as vk

# Tests that share fixtures, or processes, that take many seconds to make; the longest first.
TOGETHER = {
    "tests/reproduce/": "exhibits",
    "tests/explore/test_browser.py": "browser",
    "tests/study/test_runners_ray.py": "ray",
    "tests/reports/audit/test_audit.py": "audit",
    "tests/reports/audit/test_report.py": "audit",
    "tests/cli/test_audit_cli.py": "cli",
    "tests/study/test_shipped.py": "shipped",
    "tests/posterior/test_sharded.py": "sharded",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the long groups first: what takes long must not begin last."""
    order = list(TOGETHER)
    items.sort(key=lambda item: next((k for k, start in enumerate(order) if item.nodeid.startswith(start)), len(order)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each group to one worker, and all other tests one by one to the worker that is free."""
    from xdist.scheduler import LoadScopeScheduling

    class Grouped(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return next((group for start, group in TOGETHER.items() if nodeid.startswith(start)), nodeid)

    config.option.loadscopereorder = False
    return Grouped(config, log)


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
def chromium() -> Iterator[Any]:
    """Return a headless browser, or skip."""
    playwright = pytest.importorskip("playwright.sync_api", reason="the browser tests need playwright")
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        pytest.skip("the browser tests need Debian's chromium")
    with playwright.sync_playwright() as p:
        made = p.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        yield made
        made.close()


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Run on one thread: small tensors on shared cores would spend their time waiting."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def diffusers() -> object:
    """Return the library diffusers, or skip."""
    return pytest.importorskip("diffusers")


@pytest.fixture(scope="session")
def trained(diffusers: object) -> nn.Module:
    """A tiny network, trained for seconds to predict noise on digits."""
    unet, process, data = tiny_unet(diffusers), vk.DDPM.linear(), digits(256)[:256]
    optimiser, generator = torch.optim.Adam(unet.parameters(), 3e-3, fused=True), torch.Generator().manual_seed(0)
    for _ in range(150):
        x0 = data[torch.randint(len(data), (32,), generator=generator)]
        t = torch.randint(1000, (32,), generator=generator)
        noise = torch.randn(x0.shape, generator=generator)
        alpha, sigma = (f(t.float())[:, None, None, None] for f in (process.alpha, process.sigma))
        loss = (unet(alpha * x0 + sigma * noise, t).sample - noise).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return unet
