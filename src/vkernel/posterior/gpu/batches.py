"""How a batch takes the steps of the GPU path: as they are, or recorded as CUDA graphs, for sizes that repeat.

There are two steps. The first screens the points and counts the queries of each stage; the second evaluates a dense
stage, if there are queries for it. Which one follows from the counts, which the CPU must read. A recorded batch does
not wait for them: it takes the second step that its size needed last, and reads the counts afterwards. Samplers and
loops repeat a noise level, or change it slowly, so that this is usually the right one; otherwise both steps are taken
again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from vkernel.core.graphs import Recorder
from vkernel.posterior.gpu.fp16 import WIDE
from vkernel.posterior.weights import Queries

Level = Tensor | float  # α or σ², one for each query or one for all
How = tuple[int, bool]  # a dense stage, and whether points are taken out
COUNTS = 8  # numbers of queries that the first step counts; one more is of queries that the second one left
SIZES = 6  # sizes of batches whose graphs are kept


class First(Protocol):
    """The first step has counted queries, ``(COUNTS,)``."""

    @property
    def numbers(self) -> Tensor: ...


class Second(Protocol):
    """The second step has a number of queries that it left to the reference path, ``()``."""

    @property
    def left(self) -> Tensor: ...


One = TypeVar("One", bound=First)
Two = TypeVar("Two", bound=Second)
Taken = tuple[One, Two | None, How | None, list[int]]  # the results of both steps, how the second was taken, and counts


class Batch:
    """The queries of a batch, with ``vector (B, d)`` for products; its steps are taken as they are."""

    def __init__(self, queries: Queries, vector: Tensor | None) -> None:
        self.queries, self.vector = queries, vector

    def take(
        self,
        kind: str,
        first: Callable[[], One],
        second: Callable[[One, How], Two],
        choose: Callable[[list[int]], How | None],
    ) -> Taken[One, Two]:
        """Take the steps of this kind; ``choose`` returns how the second is taken, given the counts, if at all."""
        one = first()
        numbers = one.numbers.tolist()
        how = choose(numbers)
        two = None if how is None else second(one, how)
        return one, two, how, [*numbers, 0 if two is None else int(two.left)]


class Recording(Batch):
    """A batch that stays at one place in memory, and whose steps are recorded."""

    def __init__(self, x: Tensor) -> None:
        wide = torch.empty_like(x, dtype=WIDE, memory_format=torch.contiguous_format)
        super().__init__(Queries(wide, wide.new_empty(len(x)), wide.new_empty(len(x))), None)
        self.recorder, self.stream = Recorder(), torch.cuda.current_stream()
        self.counts = torch.zeros(COUNTS + 1, dtype=torch.int64, device="cpu", pin_memory=True)
        self.levels: list[float | None] = [None, None]
        self.last: dict[str, How | None] = {}

    def fill(self, x: Tensor, alpha: Level, var: Level, vector: Tensor | None) -> None:
        """Copy queries to the place, once another stream that took steps there has ended them."""
        stream = torch.cuda.current_stream()
        if stream != self.stream:
            stream.wait_stream(self.stream)
            self.stream = stream
        self.queries.x.copy_(x)
        for k, (place, level) in enumerate(((self.queries.alpha, alpha), (self.queries.var, var))):
            if isinstance(level, Tensor):
                place.copy_(level)
                self.levels[k] = None
            elif level != self.levels[k]:
                place.fill_(level)
                self.levels[k] = level
        if vector is not None:
            self.vector = torch.empty_like(vector) if self.vector is None else self.vector
            self.vector.copy_(vector)

    def take(
        self,
        kind: str,
        first: Callable[[], One],
        second: Callable[[One, How], Two],
        choose: Callable[[list[int]], How | None],
    ) -> Taken[One, Two]:
        def begin() -> One:
            one = self.recorder.take(kind, first)
            self.counts[:COUNTS].copy_(one.numbers, non_blocking=True)
            return one

        def go_on(one: One, how: How) -> Two:
            two = self.recorder.take(f"{kind}, {how}", lambda: second(one, how))
            self.counts[COUNTS:].copy_(two.left[None], non_blocking=True)
            return two

        def read() -> list[int]:
            self.stream.synchronize()
            return self.counts.tolist()

        one, guess = begin(), self.last.get(kind)
        two = None if guess is None else go_on(one, guess)
        numbers = read()
        how = choose(numbers[:COUNTS])
        if how != guess:
            one = one if guess is None else begin()  # the second step changes logits
            two = None if how is None else go_on(one, how)
            numbers = read()
            self.last[kind] = how
        return one, two, how, numbers if two is not None else [*numbers[:COUNTS], 0]


class Recordings:
    """Keep one recording for each size and precision of batch that was used lately; a copy is empty."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # a batch may hold back some of its queries, which continue as another
        self.kept: dict[tuple[int, torch.dtype], Recording] = {}

    def __reduce__(self) -> tuple[type[Recordings], tuple[()]]:
        return Recordings, ()

    def at(self, x: Tensor, alpha: Level, var: Level, vector: Tensor | None) -> Recording:
        """Return the recording for batches like ``x``, filled with these queries."""
        key = len(x), x.dtype
        recording = self.kept.pop(key) if key in self.kept else Recording(x)
        self.kept[key] = recording  # the last in the order of use
        if len(self.kept) > SIZES:
            del self.kept[next(iter(self.kept))]
        recording.fill(x, alpha, var, vector)
        return recording
