r"""Networks: gradient descent on draws, all members of an ensemble at once (docs/theory.md, §6.6).

A member has parameters :math:`\theta`, and its output is a plain function of them, :math:`f_\theta(z, e)`, of

.. math:: z = x / \sqrt{\alpha_t^2 s^2 + \sigma_t^2}, \qquad
          e = \big(u,\; \sin \pi k u,\; \cos \pi k u\big)_{k = 1 \dots K}, \qquad u = \text{time\_input}(t) \in [-1, 1],

where :math:`s` (``spread``) is the size of a coordinate of the data and :math:`K` is ``time_features``. One step of
training takes :math:`B` draws and goes down the gradient of

.. math:: L(\theta) = \frac1{2B} \sum_i \omega_{t_i} \big|f_\theta(z_i, e_i) - y_i\big|^2,

a sum over coordinates and half a mean over draws, so that SGD, which has no momentum here, is a time
:math:`\tau = \text{lr} \times \text{steps}` of the theory's gradient flow. The gradients of all members are one call of
``vmap(grad(L))``; the step of the optimiser acts on each number alone, so stacking the members changes nothing, and a
member that diverges becomes inf or nan by itself.

**Which draws.** With a finite number P of draws, an epoch takes them in the order of random numbers that belong to
(member, epoch, draw), ``batch`` at a time, and leaves out the last P mod ``batch`` of that order; ``batch=None`` takes
all P in every step. Without P every step takes the next ``batch`` draws of an endless sequence.

**Averaging.** ``ema`` :math:`= \gamma` returns :math:`\sum_j \gamma^{k-j} \theta_j / \sum_j \gamma^{k-j}` over
the steps :math:`j = 1 \dots k`: bias-corrected, so the initial parameters have no part in it.

**Initial parameters** come from the generator of ("init", member), are drawn in float64, and then rounded: matrices and
filters from :math:`N(0, 2/\text{fan-in})`, biases 0, unless the kind of network says otherwise.
"""

from __future__ import annotations

import itertools
import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from vkernel.core import rng
from vkernel.core.covariance import over_event
from vkernel.core.errors import require
from vkernel.process import Process
from vkernel.train.models.base import Model, State, Tell, time_input
from vkernel.train.models.graphs import MEMBERS, Recorded
from vkernel.train.models.parametrisation import Weight
from vkernel.train.objectives import Training

__all__ = ["Network"]

Shape = tuple[int, ...]
Draws = tuple[Tensor, ...]  # z, e, y and ω, each (M, B, …)

DRAWN = {"cpu": 1 << 20, "cuda": 1 << 24}  # numbers of x made at once, in float64
HELD = 1 << 25  # numbers of one layer held at once by `output`
OPTIMISERS = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}
DTYPES = {"float32": torch.float32, "float64": torch.float64}
COMMON = ("lr", "batch", "steps", "ema", "optimiser", "decay", "time_features", "spread", "chunk")


class Network(Model):
    """An ``nn.Module`` of (z, e) trained for all members at once; final kinds are MLP and UNet."""

    def __init__(
        self,
        target: str,
        weight: str | Weight | None,
        *,
        lr: float,
        batch: int | None,
        steps: int,
        ema: float | None,
        optimiser: str,
        decay: str | None,
        time_features: int,
        spread: float,
        dtype: str | torch.dtype,
        chunk: int | None,
        bf16: bool = False,
    ) -> None:
        super().__init__(target, weight)
        for name, value in (("lr", lr), ("spread", spread)):
            require(_number(value) and value > 0, f"{name} must be a number above 0; got {value!r}.")
        for name, count in (("batch", batch), ("chunk", chunk)):
            require(count is None or whole(count, 1), f"{name} must be a whole number ≥ 1, or None; got {count!r}.")
        require(whole(steps, 1), f"steps must be a whole number ≥ 1; got {steps!r}.")
        require(whole(time_features, 0), f"time_features must be a whole number ≥ 0; got {time_features!r}.")
        good = ema is None or (_number(ema) and 0 < ema < 1)
        require(good, f"ema, the decay of the average, must be between 0 and 1, or None for no average; got {ema!r}.")
        require(optimiser in OPTIMISERS, f"optimiser must be one of {', '.join(OPTIMISERS)}; got {optimiser!r}.")
        require(decay in (None, "cosine"), f"decay, how lr falls, must be 'cosine' or None (constant); got {decay!r}.")
        named = str(dtype).removeprefix("torch.")
        require(named in DTYPES, f"A network's dtype is float32 or float64; got {dtype!r}.")
        require(
            not bf16 or named == "float32", f"bf16=True rounds float32 numbers, so dtype must be float32; got {named}."
        )
        self.lr, self.batch, self.steps, self.ema, self.dtype = float(lr), batch, steps, ema, DTYPES[named]
        self.optimiser, self.decay, self.chunk, self.bf16 = optimiser, decay, chunk, bool(bf16)
        self.time_features, self.spread = time_features, float(spread)
        self.randomness = ("init", "inputs", "targets", "order")[: 3 if batch is None else 4]
        self._built: dict[Shape, nn.Module] = {}

    @abstractmethod
    def module(self, shape: Shape) -> nn.Module:
        """The architecture for events of ``shape``: ``forward(z (N, *shape), e (N, 1 + 2K))`` is like z."""

    @abstractmethod
    def held(self, shape: Shape) -> int:
        """How many numbers the largest layer holds for one input."""

    def fill(self, name: str, p: Tensor, generator: torch.Generator) -> None:
        """Draw the initial values of the parameter ``name`` into ``p``."""
        if p.ndim > 1:
            nn.init.kaiming_normal_(p, nonlinearity="relu", generator=generator)
        else:
            nn.init.constant_(p, float(name.endswith("weight")))  # what multiplies is 1, what is added is 0

    def initial(self, training: Training, members: Sequence[int]) -> State:
        """The parameters of ``members`` before any step."""
        shapes = {name: p.shape for name, p in self._template(training.data.shape).named_parameters()}
        out = {name: torch.empty(len(members), *shape, dtype=self.dtype) for name, shape in shapes.items()}
        for row, member in enumerate(members):
            generator = training.generator("init", member)
            for name, shape in shapes.items():
                drawn = torch.empty(shape, dtype=torch.float64)
                self.fill(name, drawn, generator)
                out[name][row] = drawn
        return {name: p.to(training.data.device) for name, p in out.items()}

    def fit(self, training: Training, members: Sequence[int], tell: Tell) -> State:
        self._check(training)
        blocks = _blocks(members, MEMBERS if self._recorded(training) else self.chunk)
        found = [self._train(training, some, tell, len(some) / len(members)) for some in blocks]
        return {name: torch.cat([state[name] for state in found]) for name in found[0]}

    def output(self, state: State, x: Tensor, t: Tensor, process: Process) -> Tensor:
        like, shape = next(iter(state.values())), tuple(x.shape[2:])
        M, N = len(like), max(x.shape[1], t.shape[1])
        z, e = (a.to(like).expand(M, N, *a.shape[2:]) for a in self.inputs(x, t, process))
        f, found = vmap(self.function(shape)), []
        for some in _blocks(range(M), self.chunk):
            members, piece = slice(some[0], some[-1] + 1), max(1, HELD // (len(some) * self.held(shape)))
            part = {name: p[members] for name, p in state.items()}
            with self._precision(like.device):
                pieces = zip(z[members].split(piece, 1), e[members].split(piece, 1), strict=True)
                found.append(torch.cat([f(part, *each).to(like.dtype) for each in pieces], 1))
        return torch.cat(found).to(x)

    def inputs(self, x: Tensor, t: Tensor, process: Process) -> tuple[Tensor, Tensor]:
        """z and e, for ``x (M, N, *shape)`` and ``t (M, N)``."""
        size = (process.alpha(t).square() * self.spread**2 + process.S(t)).sqrt()
        u = time_input(t, process)[..., None]
        angle = math.pi * torch.arange(1, self.time_features + 1, dtype=u.dtype, device=u.device) * u
        return x / over_event(size, tuple(x.shape[2:])), torch.cat([u, angle.sin(), angle.cos()], -1)

    def function(self, shape: Shape) -> Callable[[State, Tensor, Tensor], Tensor]:
        """The output of one member: ``f(parameters, z (N, *shape), e)``."""
        module = self._template(shape)
        return lambda parameters, z, e: functional_call(module, parameters, (z, e))

    def loss(self, shape: Shape) -> Callable[..., Tensor]:
        """L of one member: ``L(parameters, z, e, y, ω)``."""
        f = self.function(shape)

        def loss(parameters: State, z: Tensor, e: Tensor, y: Tensor, omega: Tensor) -> Tensor:
            off = f(parameters, z, e).to(y.dtype) - y
            return (omega * off.square().flatten(1).sum(1)).mean() / 2

        return loss

    def _train(self, training: Training, members: Sequence[int], tell: Tell, share: float) -> State:
        state = self.initial(training, members)
        step = (self._replayed if self._recorded(training) else self._stepped)(training, state)
        parameters = list(state.values())
        average = [p.clone() for p in parameters] if self.ema else []
        every, told = max(1, self.steps // 100), 0
        for k, draws in enumerate(self._minibatches(training, members), 1):
            step(draws, self._rate(k))
            if self.ema:
                torch._foreach_lerp_(average, parameters, (1 - self.ema) / (1 - self.ema**k))
            if k % every == 0 or k == self.steps:
                tell(share * (k - told) / self.steps)
                told = k
        return dict(zip(state, average or [p.detach() for p in parameters], strict=True))

    def _stepped(self, training: Training, state: State) -> Callable[[Draws, float], None]:
        """One step of all members, which moves ``state``: their gradients at once."""
        optimiser = OPTIMISERS[self.optimiser](list(state.values()), lr=self.lr, fused=True)
        gradient = vmap(grad(self.loss(training.data.shape)))

        def step(draws: Draws, lr: float) -> None:
            with self._precision(training.data.device):
                slopes = gradient(state, *draws)
            for name, p in state.items():
                p.grad = slopes[name]
            optimiser.param_groups[0]["lr"] = lr
            optimiser.step()

        return step

    def _recorded(self, training: Training) -> bool:
        """Whether steps are replayed from a graph: one by one, on a GPU, by an optimiser that can be recorded."""
        return training.data.device.type == "cuda" and self.chunk == 1 and self.optimiser == "adam"

    def _replayed(self, training: Training, state: State) -> Callable[[Draws, float], None]:
        """The same, member beside member, replayed from a graph."""
        lr = torch.tensor(self.lr, device=training.data.device)
        optimiser = torch.optim.Adam(list(state.values()), lr=lr, fused=True, capturable=True)
        plain, held = self.loss(training.data.shape), list[Recorded]()

        def loss(*given: Any) -> Tensor:
            with self._precision(training.data.device):
                return plain(*given)

        def step(draws: Draws, rate: float) -> None:
            if not held:  # the first draws tell the shapes of all
                held.append(Recorded(loss, state, optimiser, draws, lr))
            held[0](draws, rate)

        return step

    def _rate(self, k: int) -> float:
        """The learning rate of step k = 1, 2, …"""
        return self.lr * ((1 + math.cos(math.pi * (k - 1) / self.steps)) / 2 if self.decay else 1.0)

    def _minibatches(self, training: Training, members: Sequence[int]) -> Iterator[Draws]:
        """The draws of every step."""
        if training.draws is None:
            return self._fresh(training, members)
        pool = self._pool(training, members, training.draws)
        return itertools.repeat(pool, self.steps) if self.batch is None else self._epochs(training, members, pool)

    def _fresh(self, training: Training, members: Sequence[int]) -> Iterator[Draws]:
        B = self.batch or 1
        at_once = max(1, _drawn(training) // (len(members) * B * training.data.d))
        for first in range(0, self.steps, at_once):
            count = min(at_once, self.steps - first)
            drawn = self._draws(training, members, first * B, count * B)
            for k in range(count):
                yield tuple(a[:, k * B : (k + 1) * B] for a in drawn)

    def _epochs(self, training: Training, members: Sequence[int], pool: Draws) -> Iterator[Draws]:
        P, B = pool[0].shape[1], self.batch or 1
        keys = training.keys("order", members)[:, None]
        rows, counter = torch.arange(len(members), device=keys.device)[:, None], torch.arange(P, device=keys.device)
        for epoch in range(math.ceil(self.steps / (P // B))):
            order = rng.uniforms(keys, epoch * P + counter).argsort(1)
            for k in range(min(P // B, self.steps - epoch * (P // B))):
                chosen = order[:, k * B : (k + 1) * B]
                yield tuple(a[rows, chosen] for a in pool)

    def _pool(self, training: Training, members: Sequence[int], P: int) -> Draws:
        """All P draws, made a piece at a time, and kept."""
        piece = max(1, _drawn(training) // (len(members) * training.data.d))
        made = [self._draws(training, members, first, min(piece, P - first)) for first in range(0, P, piece)]
        return tuple(torch.cat(parts, 1) for parts in zip(*made, strict=True))

    def _draws(self, training: Training, members: Sequence[int], start: int, count: int) -> Draws:
        drawn, process = training.batch(members, count, start), training.process
        y = self.parametrisation.wanted(drawn.m, drawn.x, drawn.t, process)
        omega = self.parametrisation.omega(drawn.t, process)
        return tuple(a.to(self.dtype) for a in (*self.inputs(drawn.x, drawn.t, process), y, omega))

    def _check(self, training: Training) -> None:
        P, B = training.draws, self.batch
        good = P is not None or B is not None
        require(good, "batch=None takes all draws in every step, and there is no end of them: give draws=P, or batch.")
        good = P is None or B is None or B <= P
        require(good, f"A batch of {B} draws needs as many, but draws={P}; give a smaller batch, or None for all.")

    def _template(self, shape: Shape) -> nn.Module:
        """The architecture without any numbers in it: parameters are always given from outside."""
        if shape not in self._built:
            with torch.device("meta"):
                self._built[shape] = self.module(shape)
        return self._built[shape]

    def _precision(self, device: torch.device) -> torch.autocast:
        return torch.autocast(device.type, dtype=torch.bfloat16, enabled=self.bf16, cache_enabled=False)

    def _common(self) -> dict[str, Any]:
        shared = {name: getattr(self, name) for name in COMMON}
        return {**super()._common(), **shared, "dtype": str(self.dtype).removeprefix("torch.")}

    def __repr__(self) -> str:
        told = ", ".join(f"{name}={value!r}" for name, value in self.spec.items() if name != "kind")
        return f"{type(self).__name__}({told})"


def _drawn(training: Training) -> int:
    return DRAWN.get(training.data.device.type, DRAWN["cpu"])


def whole(value: Any, least: int) -> bool:
    """Whether ``value`` is a whole number that is not less than ``least``."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _blocks(members: Sequence[int], size: int | None) -> list[Sequence[int]]:
    size = size or len(members)
    return [members[i : i + size] for i in range(0, len(members), size)]
