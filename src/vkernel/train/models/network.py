r"""Networks: gradient descent on draws, all members of an ensemble at once (docs/theory.md, §6.6).

A member has parameters :math:`\theta`, and its output :math:`f_\theta(z, e)` is a function of

.. math:: z = x / \sqrt{\alpha_t^2 s^2 + \sigma_t^2}, \qquad
          e = \big(u,\; \sin \pi k u,\; \cos \pi k u\big)_{k = 1 \dots K}, \qquad u = \text{time\_input}(t) \in [-1, 1],

where :math:`s` (``spread``) is the size of a coordinate of the data and :math:`K` is ``time_features``. One step of
training takes :math:`B` draws and descends the gradient of

.. math:: L(\theta) = \frac1{2B} \sum_i \omega_{t_i} \big|f_\theta(z_i, e_i) - y_i\big|^2,

a sum over coordinates and half a mean over draws, so that SGD, which has no momentum here, is a time
:math:`\tau = \text{lr} \times \text{steps}` of the theory's gradient flow. The gradients of all members are one call of
``vmap(grad(L))``. Optimisers act on each number separately, so stacking members changes nothing, and a member that
diverges becomes inf or nan without affecting the others.

**Draws.** With a finite number P of draws, an epoch takes them in the order of random numbers that belong to (member,
epoch, draw), ``batch`` at a time, and omits the last P mod ``batch`` of that order; ``batch=None`` takes all P in every
step. Without P every step takes the next ``batch`` draws of an endless sequence.

**Averaging.** ``ema`` :math:`= \gamma` returns :math:`\sum_j \gamma^{k-j} \theta_j / \sum_j \gamma^{k-j}` over
the steps :math:`j = 1 \dots k`: bias-corrected, so the initial parameters have no part in it.

**Initial parameters** come from the generator of ("init", member) in float64 and are then rounded: matrices and filters
from :math:`N(0, 2/\text{fan-in})`, biases 0, unless the architecture overrides ``fill``.

**On a GPU** one step of a small network is some hundred operations, each shorter than its launch. With ``chunk=1`` and
Adam a step is therefore captured as a CUDA graph and replayed (:class:`_Graph`): convolutions do not become faster by
stacking members, so the gradient of each member has its own stream inside the graph, and the GPU runs as many side by
side as fit; one fused step of the optimiser follows. The numbers equal those of the plain loop up to rounding.
"""

from __future__ import annotations

import itertools
import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from vkernel.core import rng
from vkernel.core.checks import check_choice, check_positive, check_share, check_whole
from vkernel.core.covariance import over_event
from vkernel.core.errors import require
from vkernel.process import Process
from vkernel.train.models.base import Model, Report, State, Weight, time_input
from vkernel.train.objectives import Training

Shape = tuple[int, ...]
Draws = tuple[Tensor, ...]  # z, e, y and ω, each (M, B, …)
Loss = Callable[[State, Tensor, Tensor, Tensor, Tensor], Tensor]
Step = Callable[[Draws, float], None]

DRAWN = {"cpu": 1 << 20, "cuda": 1 << 24}  # numbers of x drawn at once, in float64
HELD = 1 << 25  # numbers of one layer held at once by `output`
STREAMS = 16  # members side by side in a CUDA graph
OPTIMISERS = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}
DTYPES = {"float32": torch.float32, "float64": torch.float64}


@dataclass(eq=False, kw_only=True)
class Network(Model):
    """An ``nn.Module`` of (z, e) trained for all members at once; final kinds are MLP and UNet.

    ``decay="cosine"`` lowers ``lr`` to 0; ``chunk`` is the number of members trained at once, ``None`` all of them.
    ``bf16=True`` evaluates the module in bfloat16 (``torch.autocast``); parameters, gradients and the loss keep
    ``dtype``.
    """

    target: str = "noise"
    weight: Weight = "sigma2"
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

    def __post_init__(self) -> None:
        super().__post_init__()
        self.lr, self.spread = check_positive(self.lr, "lr"), check_positive(self.spread, "spread")
        for name, count in (("batch", self.batch), ("chunk", self.chunk)):
            if count is not None:
                check_whole(count, name)
        check_whole(self.steps, "steps")
        check_whole(self.time_features, "time_features", 0)
        if self.ema is not None:
            check_share(self.ema, "ema, the decay of the average,")
        check_choice(self.optimiser, "optimiser", OPTIMISERS)
        require(self.decay in (None, "cosine"), f"decay of lr must be 'cosine' or None (constant); got {self.decay!r}.")
        self.dtype = check_choice(str(self.dtype).removeprefix("torch."), "dtype", DTYPES)
        good = not self.bf16 or self.dtype == "float32"
        require(good, f"bf16=True rounds float32 numbers, so dtype must be float32; got {self.dtype}.")
        self._modules: dict[Shape, nn.Module] = {}

    @property
    def state_dtype(self) -> torch.dtype:
        return DTYPES[str(self.dtype)]

    @property
    def randomness(self) -> tuple[str, ...]:
        return ("init", "inputs", "targets", "order")[: 3 if self.batch is None else 4]

    @abstractmethod
    def module(self, shape: Shape) -> nn.Module:
        """Return the architecture for events of ``shape``: ``forward(z (N, *shape), e (N, 1 + 2K))`` is like z."""

    @abstractmethod
    def largest(self, shape: Shape) -> int:
        """Return how many numbers the largest layer holds for one input."""

    def fill(self, name: str, p: Tensor, generator: torch.Generator) -> None:
        """Draw the initial values of the parameter ``name`` into ``p``."""
        if p.ndim > 1:
            nn.init.kaiming_normal_(p, nonlinearity="relu", generator=generator)
        else:
            nn.init.constant_(p, float(name.endswith("weight")))  # scales of normalisations are 1, biases 0

    def initial(self, training: Training, members: Sequence[int]) -> State:
        """Return the parameters of ``members`` before any step."""
        shapes = {name: p.shape for name, p in self._module(training.data.shape).named_parameters()}
        out = {name: torch.empty(len(members), *shape, dtype=self.state_dtype) for name, shape in shapes.items()}
        for row, member in enumerate(members):
            generator = training.generator("init", member)
            for name, shape in shapes.items():
                drawn = torch.empty(shape, dtype=torch.float64)
                self.fill(name, drawn, generator)
                out[name][row] = drawn
        return {name: p.to(training.data.device) for name, p in out.items()}

    def fit(self, training: Training, members: Sequence[int], report: Report) -> State:
        P, B = training.draws, self.batch
        good = P is not None or B is not None
        require(good, "batch=None takes all draws in every step, and there is no end of them: give draws=P, or batch.")
        good = P is None or B is None or B <= P
        require(good, f"A batch of {B} draws needs as many, but draws={P}; give a smaller batch, or None for all.")
        blocks = _blocks(members, STREAMS if self._captured(training) else self.chunk)
        found = [self._train(training, some, report, len(some) / len(members)) for some in blocks]
        return {name: torch.cat([state[name] for state in found]) for name in found[0]}

    def output(self, state: State, x: Tensor, t: Tensor, process: Process) -> Tensor:
        like, shape = next(iter(state.values())), tuple(x.shape[2:])
        M, N = len(like), max(x.shape[1], t.shape[1])
        z, e = (a.to(like).expand(M, N, *a.shape[2:]) for a in self.inputs(x, t, process))
        f, found = vmap(self.function(shape)), []
        for some in _blocks(range(M), self.chunk):
            members, width = slice(some[0], some[-1] + 1), max(1, HELD // (len(some) * self.largest(shape)))
            part = {name: p[members] for name, p in state.items()}
            parts = zip(z[members].split(width, 1), e[members].split(width, 1), strict=True)
            found.append(torch.cat([f(part, *each).to(like.dtype) for each in parts], 1))
        return torch.cat(found).to(x)

    def inputs(self, x: Tensor, t: Tensor, process: Process) -> tuple[Tensor, Tensor]:
        """Return z and e for ``x (M, N, *shape)`` and ``t (M, N)``."""
        size = (process.alpha(t).square() * self.spread**2 + process.S(t)).sqrt()
        u = time_input(t, process)[..., None]
        angle = math.pi * torch.arange(1, self.time_features + 1, dtype=u.dtype, device=u.device) * u
        return x / over_event(size, tuple(x.shape[2:])), torch.cat([u, angle.sin(), angle.cos()], -1)

    def function(self, shape: Shape) -> Callable[[State, Tensor, Tensor], Tensor]:
        """Return the output of one member, ``f(parameters, z (N, *shape), e)``."""
        module = self._module(shape)

        def function(parameters: State, z: Tensor, e: Tensor) -> Tensor:
            with torch.autocast(z.device.type, dtype=torch.bfloat16, enabled=self.bf16, cache_enabled=False):
                out: Tensor = functional_call(module, parameters, (z, e))
                return out

        return function

    def loss(self, shape: Shape) -> Loss:
        """Return L of one member, ``L(parameters, z, e, y, ω)``."""
        f = self.function(shape)

        def loss(parameters: State, z: Tensor, e: Tensor, y: Tensor, omega: Tensor) -> Tensor:
            residual = f(parameters, z, e).to(y.dtype) - y
            return (omega * residual.square().flatten(1).sum(1)).mean() / 2

        return loss

    # Training

    def _train(self, training: Training, members: Sequence[int], report: Report, share: float) -> State:
        state = self.initial(training, members)
        step = (self._graph_step if self._captured(training) else self._plain_step)(training, state)
        parameters = list(state.values())
        average = [p.clone() for p in parameters] if self.ema else []
        every, reported = max(1, self.steps // 100), 0
        for k, draws in enumerate(self.minibatches(training, members), 1):
            step(draws, self.lr * ((1 + math.cos(math.pi * (k - 1) / self.steps)) / 2 if self.decay else 1.0))
            if self.ema:
                torch._foreach_lerp_(average, parameters, (1 - self.ema) / (1 - self.ema**k))
            if k % every == 0 or k == self.steps:
                report(share * (k - reported) / self.steps)
                reported = k
        return dict(zip(state, average or [p.detach() for p in parameters], strict=True))

    def _plain_step(self, training: Training, state: State) -> Step:
        """Return a step of all members, which changes ``state`` in place: their gradients at once."""
        optimiser = OPTIMISERS[self.optimiser](list(state.values()), lr=self.lr, fused=True)
        gradient = vmap(grad(self.loss(training.data.shape)))

        def step(draws: Draws, lr: float) -> None:
            slopes = gradient(state, *draws)
            for name, p in state.items():
                p.grad = slopes[name]
            optimiser.param_groups[0]["lr"] = lr
            optimiser.step()

        return step

    def _graph_step(self, training: Training, state: State) -> Step:
        """Return the same step, replayed from a CUDA graph."""
        graphs = list[_Graph]()

        def step(draws: Draws, lr: float) -> None:
            if not graphs:  # the shapes of the first draws are those of all
                graphs.append(_Graph(self.loss(training.data.shape), state, draws, self.lr))
            graphs[0](draws, lr)

        return step

    def _captured(self, training: Training) -> bool:
        """Return whether steps are replayed from a CUDA graph."""
        return training.data.device.type == "cuda" and self.chunk == 1 and self.optimiser == "adam"

    def minibatches(self, training: Training, members: Sequence[int]) -> Iterator[Draws]:
        """Yield the draws of every step."""
        P, B = training.draws, self.batch or 1
        if P is None:
            at_once = max(1, self._room(training, members) // B)
            for first in range(0, self.steps, at_once):
                count = min(at_once, self.steps - first)
                drawn = self._draws(training, members, first * B, count * B)
                yield from (tuple(a[:, k * B : (k + 1) * B] for a in drawn) for k in range(count))
            return
        pool = self.pool(training, members, P)
        if self.batch is None:
            yield from itertools.repeat(pool, self.steps)
            return
        keys = training.keys("order", members)[:, None]
        rows, counter = torch.arange(len(members), device=keys.device)[:, None], torch.arange(P, device=keys.device)
        for epoch in range(math.ceil(self.steps / (P // B))):
            order = rng.uniforms(keys, epoch * P + counter).argsort(1)
            for k in range(min(P // B, self.steps - epoch * (P // B))):
                chosen = order[:, k * B : (k + 1) * B]
                yield tuple(a[rows, chosen] for a in pool)

    def pool(self, training: Training, members: Sequence[int], P: int) -> Draws:
        """Return the first P draws of every member, computed in blocks."""
        size = self._room(training, members)
        parts = [self._draws(training, members, first, min(size, P - first)) for first in range(0, P, size)]
        return tuple(torch.cat(a, 1) for a in zip(*parts, strict=True))

    def _room(self, training: Training, members: Sequence[int]) -> int:
        """Return the number of draws of each member that are computed at once."""
        return max(1, DRAWN.get(training.data.device.type, DRAWN["cpu"]) // (len(members) * training.data.d))

    def _draws(self, training: Training, members: Sequence[int], start: int, count: int) -> Draws:
        drawn, process = training.batch(members, count, start), training.process
        y = self.parametrisation.training_target(drawn.m, drawn.x, drawn.t, process)
        omega = self.parametrisation.omega(drawn.t, process)
        return tuple(a.to(self.state_dtype) for a in (*self.inputs(drawn.x, drawn.t, process), y, omega))

    def _module(self, shape: Shape) -> nn.Module:
        """Return the architecture on the meta device: parameters are always passed in."""
        if shape not in self._modules:
            with torch.device("meta"):
                self._modules[shape] = self.module(shape)
        return self._modules[shape]


def _blocks(members: Sequence[int], size: int | None) -> list[Sequence[int]]:
    size = size or len(members)
    return [members[i : i + size] for i in range(0, len(members), size)]


class _Graph:
    """One step of Adam for all members as a CUDA graph; ``graph(draws, lr)`` changes ``state`` in place.

    ``loss(parameters, *draws)`` is that of one member; draws have the member as their first axis. The graph reads what
    changes between steps, draws and learning rate, from fixed memory, into which each call copies them. Capturing needs
    a few steps that really run; parameters and the optimiser's memory are restored after them.
    """

    def __init__(self, loss: Callable[..., Tensor], state: State, draws: Draws, lr: float) -> None:
        self.loss, self.state, self.draws = loss, state, [torch.empty_like(a).copy_(a) for a in draws]
        self.lr = torch.tensor(lr, device=self.draws[0].device)
        self.optimiser = torch.optim.Adam(list(state.values()), lr=self.lr, fused=True, capturable=True)
        self.streams = [torch.cuda.Stream() for _ in range(len(self.draws[0]))]
        before = {name: p.detach().clone() for name, p in state.items()}
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(3):
                self._step()
        torch.cuda.current_stream().wait_stream(aside)
        with torch.no_grad():
            for name, p in state.items():
                p.copy_(before[name])
            for memory in self.optimiser.state.values():
                for value in memory.values():
                    value.zero_()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):  # capturing runs nothing: the state is as before the first step
            self._step()

    def __call__(self, draws: Draws, lr: float) -> None:
        for held, drawn in zip(self.draws, draws, strict=True):
            held.copy_(drawn)
        self.lr.fill_(lr)
        self.graph.replay()

    def _step(self) -> None:
        main, slopes = torch.cuda.current_stream(), []
        for m, stream in enumerate(self.streams):
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                own = {name: p.detach()[m].requires_grad_() for name, p in self.state.items()}
                loss = self.loss(own, *(a[m] for a in self.draws))
                slopes.append(torch.autograd.grad(loss, list(own.values())))  # torch.func has no fused backward
        for stream in self.streams:
            main.wait_stream(stream)
        for p, *slope in zip(self.state.values(), *slopes, strict=True):
            p.grad = torch.stack(slope)
        self.optimiser.step()
