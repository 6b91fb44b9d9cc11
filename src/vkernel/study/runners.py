"""Who computes the blocks of a study: this process, or the workers of a Ray cluster.

A runner takes the missing blocks and yields their results as they come; the caller alone writes to the store. Ray does
what Ray is for: scheduling, retries when a worker or a node is lost, requests for GPUs. At most ``AHEAD`` blocks per
processor are in flight, so that results do not pile up.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Generator
from typing import Any

import numpy as np

from vkernel.core.errors import InputError, require
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
        _knock(address)
        try:
            cluster.init(address=address, log_to_driver=False, logging_level=logging.ERROR, include_dashboard=False)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise _nobody(address, str(error)) from None
    flying: dict[Any, tuple[Condition, int]] = {}
    try:
        most = max((node["Resources"].get("CPU", 0) for node in cluster.nodes() if node["Alive"]), default=0)
        require(most >= spec.threads, f"threads: no node of the Ray cluster has {spec.threads} CPUs; it has {most:g}.")
        gpus = 1 if spec.device != "cpu" and cluster.cluster_resources().get("GPU", 0) >= 1 else 0
        task = cluster.remote(num_cpus=spec.threads, num_gpus=gpus, max_retries=RETRIES, scheduling_strategy="SPREAD")(
            compute
        )
        whole = cluster.put(spec)
        limit = AHEAD * max(1, int(cluster.cluster_resources().get("CPU", 1)) // spec.threads)
        waiting = list(reversed(missing))
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
        else:  # whoever stopped early wants no more of these
            for reference in flying:
                cluster.cancel(reference, force=True)


def _knock(address: str | None) -> None:
    """Ray waits minutes for a cluster that is not there; a plain connection tells at once."""
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
        except (OSError, OverflowError) as error:
            raise _nobody(address, getattr(error, "strerror", None) or str(error)) from None


def _nobody(address: str | None, why: str) -> InputError:
    first = (why.splitlines() or ["no answer"])[0].rstrip(".")
    return InputError(f"There is no Ray cluster at {address!r}: {first}. Start one with 'ray start --head'.")


def _get(cluster: Any, reference: Any) -> dict[str, np.ndarray]:
    try:
        return cluster.get(reference)
    except cluster.exceptions.RayTaskError as error:
        raise error.cause if isinstance(error.cause, InputError) else error from None
    except cluster.exceptions.RayError as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(f"The Ray cluster failed: {first} Finished blocks are safe; run again to go on.") from None


RUNNERS: dict[str, Callable[[Spec, Work, str | None], Results]] = {"inline": inline, "ray": ray}
