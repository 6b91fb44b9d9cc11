"""Who computes the blocks of a study: this process, or the workers of a Ray cluster.

A runner takes the missing blocks and yields their results as they come; the caller alone writes to the store. Ray does
what Ray is for: scheduling, retries when a worker or a node is lost, requests for GPUs. At most ``AHEAD`` blocks per
processor are in flight, so that results do not pile up.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from typing import Any

import numpy as np

from vkernel.errors import InputError
from vkernel.study.spec import Condition, Spec
from vkernel.study.work import compute

__all__ = ["RUNNERS", "inline", "ray"]

Work = list[tuple[Condition, int]]
Results = Generator[tuple[Condition, int, dict[str, np.ndarray]], None, None]
AHEAD = 2
RETRIES = -1  # a lost worker's block is tried again for as long as there is a cluster


def inline(spec: Spec, missing: Work, address: str | None = None) -> Results:
    """One block after the other, here."""
    for condition, block in missing:
        yield condition, block, compute(spec, condition, block)


def ray(spec: Spec, missing: Work, address: str | None = None) -> Results:
    """One task per block on a Ray cluster, in the order in which they finish."""
    try:
        import ray as cluster
    except ImportError:
        raise InputError("The runner 'ray' needs Ray: pip install 'vkernel[ray]'.") from None

    ours = not cluster.is_initialized()
    if ours:
        try:
            cluster.init(address=address, log_to_driver=False, logging_level=logging.ERROR, include_dashboard=False)
        except (ConnectionError, ValueError, RuntimeError) as error:
            first = str(error).splitlines()[0]
            raise InputError(f"There is no Ray cluster at {address!r}: {first}. Start one with 'ray start'.") from None
    try:
        gpus = 1 if spec.device != "cpu" and cluster.cluster_resources().get("GPU", 0) >= 1 else 0
        task = cluster.remote(num_cpus=spec.threads, num_gpus=gpus, max_retries=RETRIES, scheduling_strategy="SPREAD")(
            compute
        )
        whole = cluster.put(spec)
        limit = AHEAD * max(1, int(cluster.cluster_resources().get("CPU", 1)) // spec.threads)
        waiting = list(reversed(missing))
        flying: dict[Any, tuple[Condition, int]] = {}
        while waiting or flying:
            while waiting and len(flying) < limit:
                condition, block = waiting.pop()
                flying[task.remote(whole, condition, block)] = (condition, block)
            ready, _ = cluster.wait(list(flying), num_returns=1)
            for reference in ready:
                condition, block = flying.pop(reference)
                yield condition, block, _get(cluster, reference)
    finally:
        if ours:
            cluster.shutdown()


def _get(cluster: Any, reference: Any) -> dict[str, np.ndarray]:
    try:
        return cluster.get(reference)
    except cluster.exceptions.RayTaskError as error:
        raise error.cause if isinstance(error.cause, InputError) else error from None


RUNNERS: dict[str, Callable[[Spec, Work, str | None], Results]] = {"inline": inline, "ray": ray}
