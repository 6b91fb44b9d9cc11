r"""Networks: gradient descent on draws, all members of an ensemble at once (docs/theory.md, §6.6).

A member has parameters :math:`\theta`, and its output :math:`f_\theta(z, e)` is a function of

.. math:: z = x / \sqrt{\alpha_t^2 s^2 + \sigma_t^2}, \qquad
          e = \big(u,\; \sin \pi k u,\; \cos \pi k u\big)_{k = 1 \dots K}, \qquad u = \text{time\_input}(t) \in [-1, 1],

where :math:`s` (``spread``) is the size of a coordinate of the data and :math:`K` is ``time_features``. One step of
training takes :math:`B` draws and descends the gradient of :math:`L(\theta) = \frac1{2B} \sum_i \omega_{t_i}
|f_\theta(z_i, e_i) - y_i|^2`, a sum over coordinates and half a mean over draws. SGD has no momentum. The gradients of
all members are one call of ``vmap(grad(L))``; a member that diverges becomes inf or nan without affecting the others.

**Draws.** With a finite number P of draws, an epoch takes them in the order of random numbers that belong to (member,
epoch, draw), ``batch`` at a time, and omits the last P mod ``batch`` of that order; ``batch=None`` takes all P in every
step. Without P every step takes the next ``batch`` draws of an endless sequence.

**Averaging.** ``ema`` :math:`= \gamma` gives :math:`\sum_j \gamma^{k-j} \theta_j / \sum_j \gamma^{k-j}` over the steps
:math:`j = 1 \dots k`, without the initial parameters.

**Snapshots** after chosen steps are averaged likewise. With them are recorded, for every member, the means over the
steps since the snapshot before of :math:`|\theta_j - \theta_{j-1}|` and of the norm of the gradient.

**Several objectives** are trained in one run: all use the same initial parameters, inputs and order of batches, and
inputs and exact moments are computed once.

**Checkpoints** keep where a training stands (:mod:`vkernel.train.models.kept`).

**Initial parameters** come from the generator of ("init", member) in float64 and are then rounded: matrices and filters
from :math:`N(0, 2/\text{fan-in})`, biases 0. The last matrix of an MLP has :math:`N(0, 1/\text{fan-in})`. Filters of a
U-Net are multiplied by ``init_scale``. The second filter of every residual block and the last one are 0, so that f = 0.
"""

import itertools
import math
import warnings
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from vkernel.core import rng
from vkernel.core.checks import check_choice, check_positive, check_share, check_whole
from vkernel.core.covariance import over_event
from vkernel.core.errors import require
from vkernel.process import Process
from vkernel.train.models.base import Model, Report, State, Trained, Weight, time_input
from vkernel.train.models.compiled import WORTH, Loss, compiled, laid_out, missing
from vkernel.train.models.graph import Graph
from vkernel.train.models.kept import Kept, Progress
from vkernel.train.models.replay import replayed
from vkernel.train.models.step import OPTIMISERS, Draws, Plain, Step
from vkernel.train.objectives import Objective, Training

Shape = tuple[int, ...]
DRAWN = {"cpu": 1 << 20, "cuda": 1 << 24}  # numbers of x drawn at once, in float64
HELD = 1 << 25  # numbers of one layer held at once by `output`
WIDE = 10  # ratio of the size of the data to ``spread`` above which a network trains badly
PAIRS = 64  # pairs (objective, member) in a CUDA graph
DTYPES = {"float32": torch.float32, "float64": torch.float64}


@dataclass(eq=False, kw_only=True)
class Network(Model):
    """An ``nn.Module`` of (z, e) trained for all members at once; final kinds are MLP and UNet.
    ``decay="cosine"`` lowers ``lr`` to 0; ``chunk`` is the number of members trained at once, ``None`` all of them.
    ``bf16=True`` evaluates the module in bfloat16; parameters, gradients and the loss keep ``dtype``. With ``chunk=1``
    training on a GPU is a CUDA graph, whose loss ``compile=True`` compiles by ``torch.compile``; ``None`` does so where
    Triton and a C compiler are found and training is long enough to win back the 20 to 50 s of it."""

    target: str = "noise"
    weight: Weight | None = None
    lr: float = 1e-3
    batch: int | None = 64
    steps: int = 2000
    ema: float | None = None
    optimiser: str = "adam"
    decay: str | None = None
    time_features: int = 4
    spread: float = 1.0
    dtype: str | torch.dtype = "float32"
    chunk: int | None = None
    bf16: bool = False
    compile: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.lr, self.spread = check_positive(self.lr, "lr"), check_positive(self.spread, "spread")
        check_whole(self.steps, "steps")
        check_whole(self.time_features, "time_features", 0)
        check_whole(1 if self.batch is None else self.batch, "batch")
        check_whole(1 if self.chunk is None else self.chunk, "chunk")
        check_share(0.5 if self.ema is None else self.ema, "ema, the decay of the average,")
        check_choice(self.optimiser, "optimiser", OPTIMISERS)
        require(self.decay in (None, "cosine"), f"decay of lr must be 'cosine' or None (constant); got {self.decay!r}.")
        self.dtype = check_choice(str(self.dtype).removeprefix("torch."), "dtype", DTYPES)
        require(not self.bf16 or self.dtype == "float32", f"bf16=True needs dtype float32; got {self.dtype}.")
        good = self.compile is None or isinstance(self.compile, bool)
        require(good, f"compile must be True, False or None (where it pays); got {self.compile!r}.")
        self.state_dtype, self._modules = DTYPES[self.dtype], dict[Shape, nn.Module]()
        self.randomness = ("init", "inputs", "targets", "order")[: 3 if self.batch is None else 4]

    @abstractmethod
    def module(self, shape: Shape) -> nn.Module:
        """Return the architecture for events of ``shape``: ``forward(z (N, *shape), e (N, 1 + 2K))`` is like z."""

    @abstractmethod
    def largest(self, shape: Shape) -> int:
        """Return how many numbers the largest layer holds for one input."""

    @abstractmethod
    def gain(self, name: str) -> float:
        """Return the factor of the initial values of the matrix or filter ``name``."""

    def initial(self, training: Training, members: Sequence[int]) -> State:
        """Return the parameters of ``members`` before any step."""
        shapes = {name: p.shape for name, p in self._module(training.data.shape).named_parameters()}
        out = {name: torch.empty(len(members), *shape, dtype=self.state_dtype) for name, shape in shapes.items()}
        for row, member in enumerate(members):
            generator = training.generator("init", member)
            for name, shape in shapes.items():
                # scales of normalisations are 1, biases 0
                drawn = torch.full(shape, float(name.endswith("weight")), dtype=torch.float64)
                if drawn.ndim > 1:
                    nn.init.kaiming_normal_(drawn, nonlinearity="relu", generator=generator).mul_(self.gain(name))
                out[name][row] = drawn
        return {name: p.to(training.data.device) for name, p in out.items()}

    def fit(self, training: Training, members: Sequence[int], report: Report) -> State:
        return self.train(training, (training.objective,), members, report)[0].state

    def train(
        self,
        training: Training,
        objectives: Sequence[Objective],
        members: Sequence[int],
        report: Report,
        snapshots: Sequence[int] = (),
        checkpoint: str | Path | None = None,
    ) -> list[Trained]:
        P, B, J = training.draws, self.batch, len(objectives)
        require(P is not None or B is not None, "batch=None takes all draws in every step: give draws=P, or batch.")
        good = P is None or B is None or B <= P
        require(good, f"A batch of {B} draws needs as many, but draws={P}; give a smaller batch, or None for all.")
        scale = training.data.spread / math.sqrt(training.data.d)
        if scale > WIDE * self.spread:
            what = f"Coordinates of the data have the standard deviation {scale:.3g}, but spread={self.spread:g}"
            warnings.warn(f"{what}: the network will train badly. Scale images to [-1, 1].", stacklevel=3 + (J == 1))
        wanted = self._check_snapshots(snapshots)
        M, size = len(members), self.chunk
        if self._captured(training):
            size = math.ceil(M / math.ceil(M * J / PAIRS))  # blocks of nearly equal size
        blocks, kept = _blocks(members, size), None
        if checkpoint is not None:
            facts: dict[str, object] = {"model": self.spec, "objectives": [goal.spec for goal in objectives]}
            facts |= {"members": list(members), "blocks": len(blocks), "snapshots": wanted}
            kept = Kept(checkpoint, facts | training.facts(self.omega))
        done = [
            self._train(training, objectives, some, partial(_part, report, len(some) / M), wanted, block, kept)
            for block, some in enumerate(blocks)
        ]
        # of each block, states with rows (objective, member) by step, and norms
        states = {
            step: {name: torch.cat([a[step][name].unflatten(0, (J, -1)) for a, _ in done], 1) for name in state}
            for step, state in done[0][0].items()
        }
        info = [dict[str, object]() for _ in objectives]
        if wanted:
            norms = torch.cat([a.unflatten(2, (J, -1)) for _, a in done], 3).cpu()  # (step, kind, objective, member)
            for j, found in enumerate(info):
                update, gradient = norms[:, :, j].permute(1, 2, 0).tolist()
                found |= {"steps": list(states), "update_norm": update, "gradient_norm": gradient}
        each = [{step: {name: p[j] for name, p in state.items()} for step, state in states.items()} for j in range(J)]
        return [
            Trained(own[self.steps], {step: own[step] for step in wanted}, about)
            for own, about in zip(each, info, strict=True)
        ]

    def output(self, state: State, x: Tensor, t: Tensor, process: Process) -> Tensor:
        like, shape = next(iter(state.values())), tuple(x.shape[2:])
        M, N = len(like), max(x.shape[1], t.shape[1])
        z, e = (a.to(like).expand(M, N, *a.shape[2:]) for a in self.inputs(x, t, process, self.label))
        self._module(shape)  # vmap refuses the random numbers with which a module is made
        at_once = max(1, HELD // self.largest(shape))  # inputs
        if self.chunk == 1:
            replay = replayed(self, self.function, state, z, e, at_once)
            if replay is not None:
                return replay.to(x)
        f, found = vmap(self.function), []
        for some in _blocks(range(M), self.chunk):
            members, width = slice(some[0], some[-1] + 1), max(1, at_once // len(some))
            part = {name: p[members] for name, p in state.items()}
            parts = zip(z[members].split(width, 1), e[members].split(width, 1), strict=True)
            if len(some) == 1:  # vmap costs time, and autocast is not complete in it
                one = {name: p[0] for name, p in part.items()}
                each = [self.function(one, a[0], b[0])[None] for a, b in parts]
            else:
                each = [f(part, a, b) for a, b in parts]
            found.append(torch.cat([a.to(like.dtype) for a in each], 1))
        return torch.cat(found).to(x)

    def inputs(
        self, x: Tensor, t: Tensor, process: Process, label: Tensor | int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return z and e for ``x (M, N, *shape)`` and ``t (M, N)``; e holds the label, where the network takes one."""
        size = (process.alpha(t).square() * self.spread**2 + process.S(t)).sqrt()
        u = time_input(t, process)[..., None]
        angle = math.pi * torch.arange(1, self.time_features + 1, dtype=u.dtype, device=u.device) * u
        return x / over_event(size, tuple(x.shape[2:])), torch.cat([u, angle.sin(), angle.cos()], -1)

    def function(self, parameters: State, z: Tensor, e: Tensor, *key: Tensor) -> Tensor:
        """Return the output of one member for ``z (N, *shape)`` and e; with a ``key``, with dropout."""
        with torch.autocast(z.device.type, dtype=torch.bfloat16, enabled=self.bf16, cache_enabled=False):
            out: Tensor = functional_call(self._module(tuple(z.shape[1:])), parameters, (z, e, *key))
            return out

    def loss(self, parameters: State, z: Tensor, e: Tensor, y: Tensor, omega: Tensor, *key: Tensor) -> Tensor:
        """Return L of one member."""
        residual = self.function(parameters, z, e, *key).to(y.dtype) - y
        return (omega * residual.square().flatten(1).sum(1)).mean() / 2

    def minibatches(
        self, training: Training, members: Sequence[int], objectives: Sequence[Objective] = (), done: int = 0
    ) -> Iterator[Draws]:
        """Yield the draws of every step after the first ``done``; of the objective of ``training``, or several."""
        P, B = training.draws, self.batch
        if P is None:
            assert B is not None
            at_once = max(1, self._room(training, members) // B)
            # draws are computed in the same blocks wherever a training begins: they are equal bit for bit
            for first in range(done - done % at_once, self.steps, at_once):
                pool = self.pool(training, members, min(at_once, self.steps - first) * B, first * B, objectives)
                steps = zip(*(a.split(B, 1) for a in pool), strict=True)
                yield from itertools.islice(steps, max(0, done - first), None)
            return
        pool = self.pool(training, members, P, 0, objectives)
        if B is None:
            yield from itertools.repeat(pool, self.steps - done)
            return
        keys, each = training.keys("order", members)[:, None], P // B
        rows = [torch.arange(len(a), device=keys.device)[:, None] for a in pool]
        for epoch in range(done // each, math.ceil(self.steps / each)):
            order = rng.uniforms(keys, epoch * P + torch.arange(P, device=keys.device)).argsort(1)
            for chosen in order.split(B, 1)[max(0, done - epoch * each) : min(each, self.steps - epoch * each)]:
                yield tuple(a[r, chosen.repeat(len(a) // len(chosen), 1)] for a, r in zip(pool, rows, strict=True))

    def pool(
        self,
        training: Training,
        members: Sequence[int],
        count: int,
        start: int = 0,
        objectives: Sequence[Objective] = (),
    ) -> Draws:
        """Return draws ``start`` to ``start + count`` of every member, computed in blocks."""
        process, size, parts = training.process, self._room(training, members), []
        for first in range(start, start + count, size):
            some = members, min(size, start + count - first), first
            batches = training.batches(objectives or (training.objective,), *some)
            x, t, _ = batches[0]
            label = None if training.labels is None else training.labels[training.origins(*some)]
            y = torch.cat([self.training_target(m, x, t, process) for _, _, m in batches])
            drawn = *self.inputs(x, t, process, label), y, self.omega(t, process)
            parts.append([a.to(self.state_dtype) for a in drawn])
        return tuple(torch.cat(a, 1) for a in zip(*parts, strict=True))

    def _room(self, training: Training, members: Sequence[int]) -> int:
        """Return the number of draws of each member that are computed at once."""
        return max(1, DRAWN.get(training.data.device.type, DRAWN["cpu"]) // (len(members) * training.data.d))

    def _module(self, shape: Shape) -> nn.Module:
        """Return the architecture on the meta device: parameters are always passed in."""
        if shape not in self._modules:
            with torch.device("meta"):
                self._modules[shape] = self.module(shape)
        return self._modules[shape]

    def _captured(self, training: Training) -> bool:
        return training.data.device.type == "cuda" and self.chunk == 1

    def _check_snapshots(self, snapshots: Sequence[int]) -> list[int]:
        """Return the steps in ascending order."""
        wanted = f"snapshots must be distinct whole numbers from 1 to steps = {self.steps}"
        good = isinstance(snapshots, Iterable) and not isinstance(snapshots, str | Mapping)
        require(good, f"{wanted}, in a list; got {snapshots!r:.80}.")
        steps = [check_whole(step, "A snapshot's step") for step in snapshots]
        good = len(set(steps)) == len(steps) and max(steps, default=1) <= self.steps
        require(good, f"{wanted}; got {steps!r:.80}.")
        return sorted(steps)

    def _train(
        self,
        training: Training,
        objectives: Sequence[Objective],
        members: Sequence[int],
        report: Report,
        snapshots: Sequence[int],
        block: int,
        kept: Kept | None,
    ) -> tuple[dict[int, State], Tensor]:
        """Return states after the steps ``snapshots`` and the last one, and norms ``(steps, 2, rows)`` if there are
        snapshots; a row is a pair (objective, member)."""
        state = {name: torch.cat([p] * len(objectives)) for name, p in self.initial(training, members).items()}
        average = {name: p.clone() for name, p in state.items()} if self.ema else state
        now = None if kept is None else kept.read(block, state, training.data.device)
        if now is None:
            now = Progress(0, state, average if self.ema else {})
        elif now.step < self.steps:
            state, average = now.state, now.average if self.ema else now.state
        report(now.step / self.steps)
        step: Step | None = None
        marks, every, reported = {*snapshots, self.steps}, max(1, self.steps // 100), now.step
        left = self.minibatches(training, members, objectives, now.step) if now.step < self.steps else ()
        for k, draws in enumerate(left, now.step + 1):
            if step is None:  # the shapes of the first draws are those of all
                step = self._step(training, state, draws, len(members), norms=len(snapshots) > 0)
                step.restore(now.memory, now.norms)
            step(draws, self.lr * ((1 + math.cos(math.pi * (k - 1) / self.steps)) / 2 if self.decay else 1.0))
            if self.ema:
                torch._foreach_lerp_(list(average.values()), list(state.values()), (1 - self.ema) / (1 - self.ema**k))
            if k in marks:
                if step.norms is not None:
                    now.past.append(step.norms / (k - max(now.found, default=0)))
                    step.norms.zero_()
                last = k == self.steps
                now.found[k] = {name: p.detach() if last else p.detach().clone() for name, p in average.items()}
            if kept is not None and (k in marks or kept.due):
                done = k == self.steps  # then only the results are kept
                run = {} if done else {"state": state, "average": now.average, "memory": step.memory}
                kept.write(block, Progress(k, norms=step.norms, past=now.past, found=now.found, **run))
            if k % every == 0 or k == self.steps:
                report((k - reported) / self.steps)
                reported = k
        return now.found, torch.stack(now.past) if now.past else torch.empty(0)

    def _step(self, training: Training, state: State, draws: Draws, members: int, norms: bool) -> Step:
        if self._captured(training):
            loss, copies = self._compiled(training, state, draws)
            return Graph(loss, state, draws, self.optimiser, norms, copies)
        return Plain(self.loss, state, members, self.optimiser, norms)

    def _compiled(self, training: Training, state: State, draws: Draws) -> tuple[Loss, State]:
        """Return the loss of a CUDA graph, compiled where wanted, and the copies of parameters that it takes."""
        absent, rows = missing(), len(next(iter(state.values())))
        good = not self.compile or absent is None
        require(good, f"compile=True needs {absent}, which is not found here; compile=None is without it where needed.")
        if self.compile is False or absent or (self.compile is None and rows * self.steps < WORTH):
            return self.loss, {}
        self._module(training.data.shape)
        copies = laid_out(state, torch.bfloat16 if self.bf16 else self.state_dtype)
        own = {name: p[0] for name, p in {**state, **copies}.items()}
        others = {f.name for f in fields(Network)} - {"time_features", "dtype", "bf16"}
        key = training.data.shape, str([(name, a) for name, a in self.spec.items() if name not in others])
        loss = compiled(self.loss, key, own, [a[0] for a in draws])
        return (self.loss, {}) if loss == self.loss else (loss, copies)


def _part(report: Report, share: float, done: float) -> None:
    report(share * done)


def _blocks(members: Sequence[int], size: int | None) -> list[Sequence[int]]:
    size = size or len(members)
    return [members[i : i + size] for i in range(0, len(members), size)]
