r"""Infinitely wide networks: lazy training in closed form (docs/theory.md, §6.5).

A network so wide that training hardly moves its weights is linear in them. Full-batch gradient flow on the loss
:math:`\frac1{2P} \sum_i \omega_i |f(u_i) - y_i|^2`, from the function :math:`f_0` of the initial weights, then obeys
:math:`\dot f(u) = \frac1P K(u,U)\, \Omega\, (y - f(U))` with the tangent kernel K. Its solution at time :math:`\tau` is

.. math:: f(u) = f_0(u) + K(u,U)\, a, \qquad a = G\, (y - f_0(U)), \qquad
          G = \frac1P\, \Omega^{1/2} g(A)\, \Omega^{1/2}, \\
          A = \frac1P\, \Omega^{1/2} K(U,U)\, \Omega^{1/2} = Q \rho Q^T, \qquad
          g(\rho) = \frac{1 - e^{-\tau\rho}}{\rho}, \quad g(0) = \tau .

:math:`G` is the *smoother*. At :math:`\tau = \infty`, where this is kernel regression without a ridge,
:math:`g = 1/\rho`, and 0 where :math:`\rho` is rounding (training never moves what the kernel does not see). Inputs
are :math:`u = (x, \text{time})`, the time being ``time_input``. The number of directions that
have been learned is :math:`F_{\mathrm{eff}}(\tau) = \sum_k (1 - e^{-\rho_k\tau})`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vkernel.core.errors import require
from vkernel.process import Process
from vkernel.train.models.base import Model, State, Tell, time_input
from vkernel.train.models.ntk import NetworkKernel
from vkernel.train.models.parametrisation import Weight
from vkernel.train.objectives import Batch, Training

__all__ = ["Lazy"]

CHUNK = 1 << 21  # pairs of points whose kernel is computed at once
INIT = "init."  # prefix of the tensors of f0 in a state


class Lazy(Model):
    """The wide network of ``kernel``, trained by gradient flow for time ``tau``; from f0 = 0 where not ``init``."""

    def __init__(
        self,
        kernel: NetworkKernel,
        tau: float = math.inf,
        target: str = "x0",
        weight: str | Weight | None = None,
        init: bool = True,
    ) -> None:
        super().__init__(target, weight)
        self.randomness = ("init", "inputs", "targets") if init else ("inputs", "targets")
        good = isinstance(kernel, NetworkKernel)
        require(good, f"A lazy model needs the kernel of a network such as vk.models.NTK(), not {kernel!r}.")
        good = isinstance(tau, int | float) and not isinstance(tau, bool) and tau >= 0
        require(good, f"tau, the time of training, must be a number ≥ 0 (infinity is allowed); got {tau!r}.")
        require(isinstance(init, bool), f"init must be True (f0 is random) or False (f0 = 0); got {init!r}.")
        self.kernel, self.tau, self.init = kernel, float(tau), init

    def fit(self, training: Training, members: Sequence[int], tell: Tell) -> State:
        P, d = training.draws, training.data.d
        require(P is not None, "A lazy model is fitted to a finite number of draws: give draws=P.")
        assert P is not None
        shared = "inputs" not in training.vary
        at_once = max(1, CHUNK // (P * (d if shared else P)))
        G: Tensor | None = None
        found = []
        for block in (members[i : i + at_once] for i in range(0, len(members), at_once)):
            batch = training.batch(block, P)
            if G is None or not shared:
                some = slice(1 if shared else None)
                G, _ = self.smoother(batch.x[some], batch.t[some], training.process)
            found.append(self.learn(batch, G, self.begin(training, block), training.process))
            tell(len(block) / len(members))
        state = {name: torch.cat([s[name] for s in found]) if len(found) > 1 else found[0][name] for name in found[0]}
        return {name: a.to(training.dtype) for name, a in state.items()}

    def inputs(self, x: Tensor, t: Tensor, process: Process) -> Tensor:
        """u ``(M, N, d + 1)`` for ``x (M or 1, N, *shape)`` and ``t (M or 1, N or 1)``."""
        batch = torch.broadcast_shapes(x.shape[:2], t.shape)
        flat = x.flatten(2).expand(*batch, -1)
        return torch.cat([flat, time_input(t, process).to(x.dtype).expand(batch)[..., None]], -1)

    def smoother(self, x: Tensor, t: Tensor, process: Process) -> tuple[Tensor, Tensor]:
        """G ``(M, P, P)`` and F_eff ``(M,)`` for inputs ``x (M, P, *shape)`` and ``t (M, P)``, in float64."""
        u, wide = self.inputs(x.double(), t.double(), process), t.double()
        root = (self.parametrisation.omega(wide, process) / t.shape[-1]).sqrt()
        rho, Q = torch.linalg.eigh(root[..., :, None] * self.kernel.ntk(u, u) * root[..., None, :])
        learned, g = self._filter(rho)
        half = root[..., None] * Q
        return half * g[..., None, :] @ half.mT, learned.sum(-1)

    def _filter(self, rho: Tensor) -> tuple[Tensor, Tensor]:
        """1 - exp(-τρ) and g(ρ)."""
        rounding = rho.shape[-1] * torch.finfo(rho.dtype).eps * rho.amax(-1, keepdim=True)
        if math.isinf(self.tau):
            seen = rho > rounding
            return seen.to(rho), torch.where(seen, 1 / torch.where(seen, rho, 1.0), 0.0)
        positive = rho > 0  # A is semidefinite: what is not positive is rounding
        learned = -torch.expm1(-self.tau * rho.clamp_min(0))
        return learned, torch.where(positive, learned / torch.where(positive, rho, 1.0), self.tau)

    def begin(self, training: Training, members: Sequence[int]) -> State:
        """The tensors of the members' f0, each named with a prefix; none where f0 = 0."""
        if not self.init:
            return {}
        d, varies = training.data.d, "init" in training.vary
        which = members if varies else members[:1]
        drawn = [self.kernel.draw(d + 1, d, training.generator("init", m), training.dtype) for m in which]
        stacked = {name: torch.stack([one[name] for one in drawn]).to(training.data.device) for name in drawn[0]}
        return {INIT + name: a.expand(len(members), *a.shape[1:]) for name, a in stacked.items()}

    def learn(self, batch: Batch, G: Tensor, begin: State, process: Process) -> State:
        """The state that a smoother ``G (M or 1, P, P)`` gives the draws of a batch, from f0 of ``begin``."""
        u = self.inputs(batch.x.double(), batch.t.double(), process)
        y = self.parametrisation.wanted(batch.m, batch.x, batch.t, process).double().flatten(2)
        if begin:  # f0 at the inputs: a state of no draws
            y = y - self._function({"inputs": u[:, :0], "coefficients": y[:, :0], **begin}, u)
        return {"inputs": u, "coefficients": G @ y, **begin}

    def output(self, state: State, x: Tensor, t: Tensor, process: Process) -> Tensor:
        kind = torch.promote_types(x.dtype, state["inputs"].dtype)
        f = self._function(state, self.inputs(x.to(kind), t, process))
        return f.to(x.dtype).reshape(*f.shape[:2], *x.shape[2:])

    def _function(self, state: State, u: Tensor) -> Tensor:
        """f ``(M, N, o)`` at ``u (M or 1, N, p)``, by blocks of members and of places."""
        a = state["coefficients"].to(u)
        rest = {name: v.to(u) for name, v in state.items() if name != "coefficients"}
        if len(u) == 1:  # where members have inputs or f0 in common, they are computed once
            begin = {name: v for name, v in rest.items() if name.startswith(INIT)}
            rest = _merged({"inputs": rest["inputs"]}) | _merged(begin)
        cost = max([1, *(v.shape[-2] if name == "inputs" else v.shape[-1] for name, v in rest.items())])
        members = max(len(a), len(u))
        height = min(members, max(1, CHUNK // cost))
        width = max(1, CHUNK // (height * cost))
        rows = []
        for i in range(0, members, height):
            some = {name: _rows(v, i, height) for name, v in rest.items()}
            places = _rows(u, i, height).split(width, 1)
            rows.append(torch.cat([self._block(some, _rows(a, i, height), v) for v in places], 1))
        return torch.cat(rows)

    def _block(self, rest: State, a: Tensor, u: Tensor) -> Tensor:
        begin = {name.removeprefix(INIT): v for name, v in rest.items() if name.startswith(INIT)}
        f = _times(self.kernel.ntk(u, rest["inputs"]), a)
        return f + self.kernel.apply(begin, u) if begin else f

    @property
    def spec(self) -> dict[str, Any]:
        tau = self.tau if math.isfinite(self.tau) else "inf"
        return {"kind": "lazy", "kernel": self.kernel.spec(), "tau": tau, "init": self.init, **self._common()}

    def __repr__(self) -> str:
        return f"Lazy({self.kernel!r}, tau={self.tau:g}, target={self.target!r}, init={self.init})"


def _rows(a: Tensor, start: int, count: int) -> Tensor:
    """The block of members of a tensor that may hold one for all of them."""
    return a if len(a) == 1 else a[start : start + count]


def _merged(tensors: State) -> State:
    """One member in place of all, where all are equal."""
    equal = all(len(a) > 0 and bool((a == a[:1]).all()) for a in tensors.values())
    return {name: a[:1] for name, a in tensors.items()} if equal else tensors


def _times(k: Tensor, a: Tensor) -> Tensor:
    """k a for ``k (M or 1, N, P)`` and ``a (M or 1, P, o)``, without copies of a k that members share."""
    if len(k) > 1 or len(a) == 1:
        return k @ a
    M, P, o = a.shape
    return (k[0] @ a.movedim(0, 1).reshape(P, M * o)).reshape(-1, M, o).movedim(1, 0)
