"""Studies on Ray: the same bits as inline, on a real local cluster whose worker and node are killed in mid-run."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import studies

from vkernel import InputError, study
from vkernel.study.store import Store

ray = pytest.importorskip("ray", reason="the runner 'ray' is tested where Ray is: pip install 'vkernel[ray]'")
psutil = pytest.importorskip("psutil", reason="a worker is found, to be killed, with psutil")

SMALL = studies.SMALL | {"grid": {"objective.K": [1, float("inf")]}}
# 12 blocks of half a second; a block's results are larger than what Ray keeps in the driver (100 kB), so that they
# are lost with their node, and Ray must make them again
LONG: dict[str, Any] = SMALL | {
    "title": "long",
    "members": 24,
    "block": 4,
    "model": {"per_axis": 10},
    "training": {"draws": 2000},
    "sampler": {"samples": 400, "steps": 400},
    "measure": {"bins": 8000},
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    quick = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 4}
    node = {"num_cpus": 1, "object_store_memory": 100 * 2**20, "include_dashboard": False}
    ray.shutdown()
    made = Cluster(initialize_head=True, head_node_args=node | {"_system_config": quick})
    made.second = made.add_node(num_cpus=1, object_store_memory=100 * 2**20)
    made.wait_for_nodes()
    try:
        yield made
    finally:
        ray.shutdown()
        made.shutdown()


def same(a: Any, b: Any) -> None:
    assert set(a.variables) == set(b.variables)
    for name in a.variables:
        assert a[name].dtype == b[name].dtype
        x, y = np.asarray(a[name].values), np.asarray(b[name].values)
        assert np.array_equal(x, y, equal_nan=x.dtype.kind == "f"), name


def test_ray_is_inline_bit_for_bit(cluster: Any, tmp_path: Path) -> None:
    assert not ray.is_initialized()
    far = study.run(SMALL, tmp_path / "far", "ray", address=cluster.address, progress=False)
    assert not ray.is_initialized(), "what was opened is closed"
    same(far, study.run(SMALL, tmp_path / "near", progress=False))
    ours, theirs = (
        {p.relative_to(s): p.read_bytes() for p in s.rglob("c/**/*") if p.is_file()}
        for s in tmp_path.iterdir()
        if s.is_dir()
    )
    assert ours == theirs
    # begun on Ray, ended here, and the other way round: nothing is left to do
    assert study.run(SMALL, tmp_path / "far", progress=False).equals(far)


def test_an_error_in_a_task_is_the_same_sentence(cluster: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="CUDA"):
        study.run(SMALL | {"device": "cuda"}, tmp_path / "s", "ray", address=cluster.address, progress=False)
    assert not ray.is_initialized()
    with pytest.raises(InputError, match="64 CPUs"):  # or it would wait for ever
        study.run(SMALL | {"threads": 64}, tmp_path / "t", "ray", address=cluster.address, progress=False)


def test_no_cluster_there(tmp_path: Path) -> None:
    start = time.monotonic()
    for address in ("127.0.0.1:1", "nonsense", "127.0.0.1:99999999"):
        with pytest.raises(InputError, match="no Ray cluster at") as error:
            study.run(SMALL, tmp_path / "s", "ray", address=address, progress=False)
        assert address in str(error.value)
    assert time.monotonic() - start < 30
    assert study.run(SMALL, tmp_path / "s", progress=False)["done"].values.all(), "the store is good"


def workers() -> list[Any]:
    """Processes of this test's own cluster that are at work on a block."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if (process.cmdline() or [""])[0].startswith("ray::compute"):
                found.append(process)
    return found


def test_a_worker_and_then_a_node_are_killed(cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run ends, nothing is lost, nothing is counted twice, and every bit is that of an undisturbed run."""
    plain = study.run(LONG, tmp_path / "plain", progress=False)
    written: Counter[tuple[Any, ...]] = Counter()
    killed: list[str] = []
    original: Callable[..., None] = Store.write

    def write(self: Store, condition: Any, block: int, values: dict[str, np.ndarray]) -> None:
        original(self, condition, block, values)
        written[(*condition.index, block)] += 1
        if len(written) == 2:  # a worker, at work
            deadline = time.monotonic() + 20
            while not (busy := workers()) and time.monotonic() < deadline:
                time.sleep(0.02)
            os.kill(busy[0].pid, signal.SIGKILL)
            killed.append("worker")
        if len(written) == 5:  # a whole node, without good-byes; what it has finished meanwhile is lost with it
            time.sleep(3)
            cluster.remove_node(cluster.second, allow_graceful=False)
            killed.append("node")

    monkeypatch.setattr(Store, "write", write)
    found = study.run(LONG, tmp_path / "hurt", "ray", address=cluster.address, progress=False)
    assert killed == ["worker", "node"]
    assert len(written) == 12
    assert set(written.values()) == {1}
    same(found, plain)
