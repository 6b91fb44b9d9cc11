"""Runners compute the blocks of a study, here, in threads or on a Ray cluster.

A runner takes the missing blocks in units of work and yields their results as they come; only the caller writes to the
store. A unit is one block; where networks on images are trained, it is all conditions of a part that differ in their
objective alone. Ray schedules, retries when a worker or a node is lost, and assigns GPUs. At most ``AHEAD`` units per
processor are in flight, so that results do not pile up."""

import contextlib
import itertools
import logging
import os
import socket
import sys
import warnings
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import xarray

from vkernel.core.checks import check_choice
from vkernel.core.errors import InputError, require
from vkernel.core.progress import Progress, Reporter, part, progress as show_progress
from vkernel.study.spec import Condition, Spec, check_part, read, short
from vkernel.study.store import Store, load
from vkernel.study.work import compute, compute_twins, device, prepare

Work = list[tuple[Condition, int]]
Results = Generator[tuple[Condition, int, dict[str, np.ndarray]], None, None]
Folder = Path | None  # in which trainings keep their state
AHEAD = 2
TRAINING = 0.9  # the share of the work on networks that is training
RETRIES = -1  # the block of a lost worker is tried again for as long as there is a cluster


def units(spec: Spec, missing: Work) -> list[Work]:
    """Return the missing blocks as units of work, in order."""
    if not spec.is_images:
        return [[work] for work in missing]
    found: dict[str, Work] = {}
    for condition, block in missing:
        tables = [table.model_dump_json() for table in condition.twins]
        found.setdefault(f"{condition.part} {tables}", []).append((condition, block))
    return list(found.values())


def computed(spec: Spec, unit: Work, folder: Folder = None, report: Reporter | None = None) -> Results:
    """Compute a unit of work; ``report`` receives what is done of it before there are results, ``TRAINING``."""
    if spec.is_images:
        conditions = [condition for condition, _ in unit]
        factors = [f.dim for f in spec.grid if len(f.values) > 1 and not f.field.startswith("objective")]
        label = ", ".join(f"{dim} = {short(conditions[0].labels[dim])}" for dim in factors)
        callback = report and part(report, f"training {label or 'networks'}", TRAINING * len(unit))
        for condition, values in compute_twins(spec, conditions, folder, callback or False):
            yield condition, 0, values
    else:
        for condition, block in unit:
            yield condition, block, compute(spec, condition, block)


def inline(
    spec: Spec, missing: Work, address: str | None = None, folder: Folder = None, report: Reporter | None = None
) -> Results:
    """Compute one unit after the other in this process."""
    for unit in units(spec, missing):
        yield from computed(spec, unit, folder, report)


def threads(
    spec: Spec, missing: Work, address: str | None = None, folder: Folder = None, report: Reporter | None = None
) -> Results:
    """Compute units in as many threads of this process as there are processors; blocks of equal models share one."""
    shared = itertools.groupby(missing, lambda work: (work[0].trained, work[1]))
    groups = units(spec, missing) if spec.is_images else [list(group) for _, group in shared]
    workers = max(1, min(len(groups), (os.cpu_count() or 1) // spec.threads))
    with warnings.catch_warnings(), ThreadPoolExecutor(workers) as pool:  # each block changes the filters of warnings
        try:
            for group in pool.map(lambda group: list(computed(spec, group, folder, report)), groups):
                yield from group
        finally:
            pool.shutdown(cancel_futures=True)


def compute_unit(spec: Spec, unit: Work) -> list[dict[str, np.ndarray]]:
    """Return the results of a unit of work, in its order: a task on a cluster."""
    return [values for _, _, values in computed(spec, unit)]


def ray(
    spec: Spec, missing: Work, address: str | None = None, folder: Folder = None, report: Reporter | None = None
) -> Results:
    """Compute one task per unit on a Ray cluster; results come in the order in which tasks finish. Workers may be on
    other machines: a training that is lost is begun again."""
    try:
        import ray as cluster
    except ImportError:
        raise InputError("The runner 'ray' needs Ray: pip install 'vkernel[ray]'.") from None

    ours = not cluster.is_initialized()
    if ours:
        host, _, port = (address or "").removeprefix("ray://").rpartition(":")
        try:
            if host and port.isdigit():  # a plain connection fails at once, where Ray would wait minutes for a server
                socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
            cluster.init(address=address, log_to_driver=False, logging_level=logging.ERROR, include_dashboard=False)
        except (OSError, OverflowError, ValueError, RuntimeError) as error:
            why = (isinstance(error, OSError) and error.strerror) or str(error)
            first = (why.splitlines() or ["no answer"])[0].rstrip(".")
            advice = "Start one with 'ray start --head'."
            raise InputError(f"There is no Ray cluster at {address!r}: {first}. {advice}") from None
    flying: dict[Any, Work] = {}
    try:
        resources = cluster.cluster_resources()
        most = max((node["Resources"].get("CPU", 0) for node in cluster.nodes() if node["Alive"]), default=0)
        require(most >= spec.threads, f"threads: no node of the Ray cluster has {spec.threads} CPUs; it has {most:g}.")
        gpus = 1 if spec.device != "cpu" and resources.get("GPU", 0) >= 1 else 0
        remote = cluster.remote(num_cpus=spec.threads, num_gpus=gpus, max_retries=RETRIES, scheduling_strategy="SPREAD")
        task, whole = remote(compute_unit), cluster.put(spec)
        limit = AHEAD * max(1, int(resources.get("CPU", 1)) // spec.threads)
        waiting = list(reversed(units(spec, missing)))
        while waiting or flying:
            while waiting and len(flying) < limit:
                work = waiting.pop()
                flying[task.remote(whole, work)] = work
            ready, _ = cluster.wait(list(flying), num_returns=1)
            for reference in ready:
                for (condition, block), values in zip(flying.pop(reference), cluster.get(reference), strict=True):
                    yield condition, block, values
    except cluster.exceptions.RayTaskError as error:
        raise error.cause if isinstance(error.cause, InputError) else error from None
    except cluster.exceptions.RayError as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(f"The Ray cluster failed: {first} Finished blocks are safe; run again to go on.") from None
    finally:
        if ours:
            cluster.shutdown()
        else:  # the cluster stays: cancel what an early stop left on it
            for reference in flying:
                cluster.cancel(reference, force=True)


RUNNERS: dict[str, Callable[[Spec, Work, str | None, Folder, Reporter | None], Results]]
RUNNERS = {"inline": inline, "threads": threads, "ray": ray}


def run(
    spec: str | Path | Mapping[str, object] | Spec,
    store: str | Path,
    runner: str | None = None,
    *,
    address: str | None = None,
    large: bool = False,
    only: Mapping[str, object] | None = None,
    seed: int | None = None,
    progress: Progress = True,
) -> xarray.Dataset:
    """Compute the missing blocks of a study in the folder ``store``, and return all of its results.

    ``spec`` is a TOML file, the name of a shipped study, or a dictionary; ``large`` takes the values of its ``[large]``
    table, and ``seed`` another seed. ``only`` computes a part of the grid, ``{factor: label or [labels], …}``.
    ``runner`` is "inline", "threads" or "ray", with the ``address`` of a cluster, "auto" or HOST:PORT, unless it is on
    this machine; by default networks on images are trained in threads where there is no GPU, and all else is inline.
    ``progress`` is a bool, or a function of a condition and the share of blocks that are done.

    >>> import vkernel as vk
    >>> import tempfile
    >>> spec = {"title": "t", "members": 1, "block": 1, "data": {"name": "triple"}, "model": {"kind": "smoothed"}}
    >>> spec |= {"sampler": {"samples": 8, "steps": 5}, "grid": {"model.h": [0.0, 0.3]}}
    >>> found = vk.study.run(spec, tempfile.mkdtemp() + "/store", progress=False)
    >>> found.nearest.sizes["h"]
    2
    """
    study = read(spec, large=large)
    study = study if seed is None else study.model_copy(update={"seed": seed})
    runner = runner or ("threads" if study.is_images and device(study) == "cpu" else "inline")
    check_choice(runner, "runner", RUNNERS)
    check_part(study, only or {}, "only")
    require(address is None or runner == "ray", "An address is for the runner 'ray'.")
    prepare(study)
    with Store.open(store, study) as opened:
        missing = [work for work in opened.missing() if work[0].within(only or {})]
        total = sum(condition.within(only or {}) for condition in study.conditions()) * study.blocks
        before = total - len(missing)
        if progress is True and 0 < before < total:
            print(f"{before} of {total} blocks are there already.", file=sys.stderr)
        with show_progress(total, progress) as report:
            report(study.title, before)
            rest = 1 - TRAINING if study.is_images and runner != "ray" else 1.0
            with contextlib.closing(RUNNERS[runner](study, missing, address, opened.training, report)) as blocks:
                for condition, block, values in blocks:
                    opened.write(condition, block, values)
                    report(str(condition), rest)
        return load(opened.path)
