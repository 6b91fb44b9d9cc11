r"""How an audit is run: the batch, the number of threads, and what it will cost, measured before the work.

**Batch.** By default the largest power of two at which the outputs of all layers, measured in one call with one image,
take an eighth of the free memory (derivatives keep all of them), and no more than fills a processor: 2¹⁶ numbers and 64
images on a CPU, 256 images elsewhere.

**Threads.** On a machine that is busy, threads wait for one another: two may take longer than one. One call of the
network is timed with 1, 2, 4, … threads, and the fewest that come within a tenth of the fastest are used, during the
audit only. Nothing is changed where ``OMP_NUM_THREADS`` or ``torch.set_num_threads`` have set a number.

**Cost.** With E evaluations of the network (images, over all stages), Q of the ideal score and K images that are
compared with the training set, an audit takes :math:`aE + bQ + cK`; a, b and c are timed. A query and a comparison take
a time in proportion to the training set: they are timed on a part of it. A derivative costs about seven evaluations.
Under-trained and misread networks end sooner."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from vkernel.core import rng
from vkernel.core.memory import free_memory
from vkernel.metrics import nearest
from vkernel.reports.audit.result import BISECTIONS, Sizes
from vkernel.score import EmpiricalScore, Wrapped

if TYPE_CHECKING:
    from vkernel.data import Empirical

SHARE = 8  # of the free memory is for the outputs of layers
NUMBERS, IMAGES, ELSEWHERE = 1 << 16, 64, 256  # in a batch on a CPU; on other devices
TIE = 0.9  # of the time that fewer threads take is a gain
TRIED, TRIED_ON = 11, 8  # other conventions, each on a quarter of the images, at least so many
TURNED, TURNED_ON = 12, 32  # other orientations and ranges, each on so many images
DERIVATIVE, DERIVED = 7, 2  # what a derivative costs, in evaluations; images that it gives to the network
SLOW = 1.0  # seconds; a slower call is timed once
QUERIES = 32  # of the ideal score, and compared images, that are timed
PART = 1 << 13  # training images on which these are timed


@dataclass(frozen=True)
class Plan:
    """The batch, the threads (0: as they are), and seconds for one image, one query and one compared image."""

    batch: int
    threads: int
    evaluation: float
    query: float
    compared: float

    def evaluations(self, sizes: Sizes, steps: int, nets: int = 1, test: bool = True) -> int:
        """Return how many images all stages give to the networks."""
        levels = -(-8 // sizes.every)
        tried = TRIED * max(TRIED_ON, sizes.check // 4) + TURNED * min(TURNED_ON, sizes.check)
        check = 7 * sizes.check + 7 * tried + 6 * sizes.check
        errors = levels * sizes.draws * sizes.images * (1 + test) + 2 * test * levels * sizes.members
        blind = 4 * 4 * sizes.blind + DERIVED * _derivatives(sizes)
        together = 4 * levels * sizes.places * (nets > 1)
        return nets * (check + errors + blind + 2 * sizes.samples * steps + together)

    def seconds(self, sizes: Sizes, steps: int, nets: int = 1, test: bool = True) -> float:
        """Return about how long an audit of these sizes takes."""
        levels = -(-8 // sizes.every)
        queries = nets * 7 * sizes.check + levels * sizes.draws * sizes.images * (1 + test)
        queries += sizes.queries * BISECTIONS + 3 * levels * sizes.places * (nets > 1)
        compared = (1 + test) * sizes.reference + 4 * nets * sizes.samples
        work = self.evaluations(sizes, steps, nets, test) + (DERIVATIVE - DERIVED) * nets * _derivatives(sizes)
        return work * self.evaluation + queries * self.query + compared * self.compared


def _derivatives(sizes: Sizes) -> int:
    """Return how many derivatives the test of blind directions takes."""
    return 4 * (6 * sizes.blind + 2 * sizes.budget)


def measure(net: Wrapped, data: Empirical, batch: int | None = None, seed: int = 0) -> Plan:
    """Choose the batch and the threads for a network, and time what an audit consists of."""
    data, reach = net.scaled(data), net.process.ratios
    source = rng.stream(seed, "images for the plan")
    x0 = data[data.choose(ELSEWHERE, source)].float()
    ratio = torch.tensor(data.spread / data.d**0.5, dtype=torch.float64).clamp(*reach)
    t = net.at(net.process.time(ratio))
    x = float(net.process.alpha(t)) * x0 + float(net.process.sigma(t)) * rng.randn(
        tuple(x0.shape), source, x0.device, x0.dtype
    )
    try:
        with torch.no_grad():
            return _measured(net, data, x, t, batch)
    except Exception:  # the check of conventions reports why a network cannot be evaluated
        return Plan(batch or IMAGES, 0, math.nan, math.nan, math.nan)


def _measured(net: Wrapped, data: Empirical, x: Tensor, t: Tensor, batch: int | None) -> Plan:
    size, few, some_data = batch or largest_batch(net, x[:1], t), x[:QUERIES], _part(data)
    exact, times = EmpiricalScore(some_data, net.process), data.n / some_data.n
    own, some = replace(net, batch=size), x[:size]
    threads = fastest_threads(lambda: own(some, t), device_of(net).type)
    with using_threads(threads):
        each = _seconds(lambda: own(some, t)) / len(some)
        query = times * _seconds(lambda: exact.with_covariance(few.double(), t)[0]) / len(few)
        compared = times * _seconds(lambda: nearest(few.flatten(1), some_data, 2)[0]) / len(few)
    return Plan(size, threads, each, query, compared)


def _part(data: Empirical) -> Empirical:
    """Return images with weight, spread over the data, at most :data:`PART`."""
    kept = (data.weights > 0).nonzero().flatten().cpu()
    return data if len(kept) <= PART else data.subset(kept[torch.linspace(0, len(kept) - 1, PART).long()])


def device_of(net: Wrapped) -> torch.device:
    """Return the device of a network, the CPU for a function."""
    held = net.net.parameters() if isinstance(net.net, nn.Module) else ()
    return next((p.device for p in held), torch.device("cpu"))


def largest_batch(net: Wrapped, x: Tensor, t: Tensor) -> int:
    """Return the default batch, from the sizes of the outputs of all layers in one call with the image ``x``."""
    held, hooks = [x.numel() * x.element_size()], []

    def count(_: nn.Module, __: object, out: object) -> None:
        held.append(out.numel() * out.element_size() if isinstance(out, Tensor) else 0)

    if isinstance(net.net, nn.Module):
        hooks = [module.register_forward_hook(count) for module in net.net.modules()]
    try:
        net(x, t)
    finally:
        for hook in hooks:
            hook.remove()
    home = device_of(net)
    full = min(IMAGES, NUMBERS // x.numel()) if home.type == "cpu" else ELSEWHERE
    most = max(1, min(full, free_memory(home) // (SHARE * sum(held))))
    return 1 << (most.bit_length() - 1)


def fastest_threads(call: Callable[[], Tensor], device: str = "cpu") -> int:
    """Return the number of threads for a call, 0 where it is not to be changed."""
    now, processors = torch.get_num_threads(), len(os.sched_getaffinity(0))
    stated = any(name in os.environ for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"))
    if stated or device != "cpu" or now == 1 or now not in (processors, processors // 2):
        return 0
    best, least = 0, float("inf")
    for count in sorted({min(1 << k, now) for k in range(now.bit_length() + 1)}):
        with using_threads(count):
            seconds = _seconds(call)
        if seconds < TIE * least:
            best, least = count, seconds
    return best


@contextlib.contextmanager
def using_threads(count: int) -> Iterator[None]:
    """Run with so many threads of torch (0: as many as now), and restore the number afterwards."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(count or before)
        yield
    finally:
        torch.set_num_threads(before)


def _seconds(call: Callable[[], Tensor]) -> float:
    """Return the least time of three calls after a warm-up; a slow call is made once."""

    def once() -> float:
        began = time.perf_counter()
        float(call().flatten()[0])  # waits for the device
        return time.perf_counter() - began

    first = once()
    return first if first > SLOW else min(once() for _ in range(3))
