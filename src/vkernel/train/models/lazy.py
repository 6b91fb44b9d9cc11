r"""Infinitely wide networks: lazy training in closed form (docs/theory.md, §6.5).

**The network** has :math:`L` hidden layers (``depth``) on :math:`u \in R^p`, all :math:`W, b \sim N(0, 1)`, and
``weight_var, bias_var`` = :math:`\sigma_w^2, \sigma_b^2`:

.. math:: h^1 = \frac{\sigma_w}{\sqrt p} W^0 u + \sigma_b b^0, \qquad
          h^{l+1} = \frac{\sigma_w}{\sqrt n} W^l \varphi(h^l) + \sigma_b b^l, \qquad f(u) = h^{L+1}(u) .

For width :math:`n \to \infty` the outputs are independent Gaussian fields of covariance :math:`K_0 = \Sigma^{L+1}`, and
training moves them with the tangent kernel :math:`K`: :math:`\Theta^{L+1}` if all layers are trained (:class:`NTK`),
:math:`K_0` if the readout alone is (:class:`NNGP`). With :math:`(a, b)` Gaussian of covariance :math:`\Sigma^l`,

.. math:: \Sigma^1 = \Theta^1 = \sigma_w^2\, u \cdot v / p + \sigma_b^2, \quad
          \Sigma^{l+1} = \sigma_w^2\, E[\varphi(a)\varphi(b)] + \sigma_b^2, \quad
          \Theta^{l+1} = \Sigma^{l+1} + \sigma_w^2\, \Theta^l\, E[\varphi'(a)\varphi'(b)] .

Layers propagate the variances :math:`q, q'` of a and b and their *gap* :math:`E(a-b)^2`, which is exact near
:math:`u = v` where a covariance would lose half of the digits (6.5, 6.6).

**Training** is full-batch gradient flow on :math:`\frac1{2P} \sum_i \omega_i |f(u_i) - y_i|^2` from the function
:math:`f_0` of the initial weights. At time :math:`\tau`, with inputs :math:`u = (x, \text{time\_input}(t))`,

.. math:: f(u) = f_0(u) + K(u,U)\, G\, (y - f_0(U)), \qquad G = \frac1P\, \Omega^{1/2} g(A)\, \Omega^{1/2}, \\
          A = \frac1P\, \Omega^{1/2} K(U,U)\, \Omega^{1/2} = Q \rho Q^T, \qquad
          g(\rho) = \frac{1 - e^{-\tau\rho}}{\rho}, \quad g(0) = \tau .

:math:`G` is the *smoother*, :math:`F_{\mathrm{eff}} = \sum_k (1 - e^{-\rho_k\tau})` the number of learned directions.
At :math:`\tau = \infty`, kernel regression without a ridge, :math:`g = 1/\rho`, and 0 where :math:`\rho` is rounding.
"""

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vkernel.core import rng
from vkernel.core.checks import check_choice, check_number, check_positive, check_whole
from vkernel.core.errors import require
from vkernel.process import Process
from vkernel.train.models.base import Model, Report, State, Weight, time_input
from vkernel.train.objectives import Batch, Training

Generator = torch.Generator | int
CHUNK = 1 << 21  # pairs of points whose kernel is computed at once
DIRECT = 32  # up to this p, squared distances are sums of squared differences; above it they come from one product
INIT = "init."  # prefix of the tensors of f0 in a state


class NetworkKernel(ABC):
    """The tangent kernel K and the initial covariance K0 of a wide network, and random functions of that covariance."""

    @abstractmethod
    def _both(self, u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return K0 and K for all pairs."""

    @abstractmethod
    def draw(self, p: int, outputs: int, generator: Generator, dtype: torch.dtype = torch.float64) -> State:
        """Draw a random function R^p → R^outputs of mean 0 and covariance K0 ⊗ 1, as named tensors."""

    @abstractmethod
    def apply(self, state: State, u: Tensor) -> Tensor:
        """Evaluate drawn functions at ``u (M or 1, N, p)``: ``(M, N, outputs)``; one member takes ``u (*b, N, p)``."""

    def ntk(self, u: Tensor, v: Tensor) -> Tensor:
        """Return K for all pairs of ``u (*b, N, p)`` and ``v (*b, N', p)``: ``(*b, N, N')``."""
        _check_pair(u, v)
        return self._both(u, v)[1]

    def prior(self, u: Tensor, v: Tensor) -> Tensor:
        """Return K0, as :meth:`ntk` returns K."""
        _check_pair(u, v)
        return self._both(u, v)[0]

    @property
    def spec(self) -> dict[str, object]:
        """The kernel in JSON, read by :func:`vkernel.train.models.from_spec`."""
        settings = {name.removeprefix("_"): value for name, value in vars(self).items()}  # all attributes are settings
        return {"kind": type(self).__name__.lower()} | settings


def _root(x: Tensor) -> Tensor:
    """Return √x, with derivative 0 instead of infinity at 0: a kink there has the mean of its one-sided derivatives."""
    positive = x > 0
    return torch.where(positive, torch.where(positive, x, 1.0).sqrt(), 0.0)


def _covariance(q: Tensor, q2: Tensor, gap: Tensor) -> tuple[Tensor, Tensor]:
    """Return the covariance s and qq' - s² for all pairs of variances ``q (*b, N, 1)`` and ``q2 (*b, 1, N')``."""
    root, root2 = _root(q), _root(q2)
    r = root * root2
    d = torch.minimum((gap - (root - root2).square()).clamp_min(0), 4 * r)
    return r - d / 2, d * (4 * r - d) / 4


def _relu(q: Tensor, q2: Tensor, gap: Tensor, s: Tensor, det: Tensor) -> tuple[Tensor, ...]:
    """Return E[φ(a)²], E[φ(b)²], E[(φ(a) - φ(b))²] and E[φ'(a)φ'(b)]; so does :func:`_erf`."""
    sine = _root(det)
    angle = torch.atan2(sine, torch.where((s == 0) & (sine == 0), 1.0, s))  # a zero vector has no angle: take 0
    gap = (gap - (2 / math.pi) * (sine - angle * s)) / 2
    return q / 2, q2 / 2, gap.clamp_min(0), (math.pi - angle) / (2 * math.pi)


def _erf(q: Tensor, q2: Tensor, gap: Tensor, s: Tensor, det: Tensor) -> tuple[Tensor, ...]:
    root = (1 + 2 * (q + q2) + 4 * det).sqrt()  # in this order u and v may be exchanged, bit for bit
    one, two = (torch.atan2(2 * v, (1 + 4 * v).sqrt()) for v in (q, q2))
    gap = one + two - 2 * torch.atan2(2 * s, root)
    return one * 2 / math.pi, two * 2 / math.pi, gap.clamp_min(0) * 2 / math.pi, 4 / (math.pi * root)


# function, moments, default weight_var: 2 preserves the variance through relu layers (half of the units are 0)
ACTIVATIONS = {"relu": (torch.relu, _relu, 2.0), "erf": (torch.erf, _erf, 1.0)}


@dataclass(eq=False)
class NTK(NetworkKernel):
    """A wide network of which all layers are trained; every layer has a bias, the readout too.

    >>> import vkernel as vk
    >>> vk.models.NTK(depth=2)
    NTK(depth=2, activation='relu', weight_var=2.0, bias_var=0.1, init_width=512)
    """

    depth: int = 2
    activation: str = "relu"
    weight_var: float | None = None  # None: 2 for relu, 1 for erf
    bias_var: float = 0.1
    init_width: int = 512

    def __post_init__(self) -> None:
        check_whole(self.depth, "depth, the number of hidden layers,")
        *_, default = ACTIVATIONS[check_choice(self.activation, "activation", ACTIVATIONS)]
        self.weight_var = check_positive(default if self.weight_var is None else self.weight_var, "weight_var")
        self.bias_var = check_number(self.bias_var, "bias_var", 0)
        check_whole(self.init_width, "init_width")

    def _both(self, u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        w, b = check_positive(self.weight_var, "weight_var"), self.bias_var
        q, q2 = (w * u.square().mean(-1) + b)[..., :, None], (w * v.square().mean(-1) + b)[..., None, :]
        gap = (w / u.shape[-1]) * _square_distance(u, v)
        s, det = _covariance(q, q2, gap)
        theta = s
        for _ in range(self.depth):
            q, q2, gap, slope = ACTIVATIONS[self.activation][1](q, q2, gap, s, det)
            q, q2, gap = w * q + b, w * q2 + b, w * gap
            s, det = _covariance(q, q2, gap)
            theta = s + w * theta * slope
        return s, theta

    def draw(self, p: int, outputs: int, generator: Generator, dtype: torch.dtype = torch.float64) -> State:
        sizes = [check_whole(p, "p"), *[self.init_width] * self.depth, check_whole(outputs, "outputs")]
        g, state = rng.as_generator(generator), {}
        for layer, (fan_in, fan_out) in enumerate(itertools.pairwise(sizes)):
            state[f"W{layer}"] = _normal((fan_out, fan_in), g, dtype)
            state[f"b{layer}"] = _normal((fan_out,), g, dtype)
        return state

    def apply(self, state: State, u: Tensor) -> Tensor:
        _check_state(state, [f"{kind}{layer}" for layer in range(self.depth + 1) for kind in "Wb"], u)
        h, w = u, check_positive(self.weight_var, "weight_var")
        for layer in range(self.depth + 1):
            x = ACTIVATIONS[self.activation][0](h) if layer else u
            W, b = state[f"W{layer}"].to(u), state[f"b{layer}"].to(u)
            h = math.sqrt(w / x.shape[-1]) * x @ W.mT + math.sqrt(self.bias_var) * b[..., None, :]
        return h


class NNGP(NTK):
    """A wide network of which the readout alone, weights and bias, is trained: K = K0.

    >>> import vkernel as vk
    >>> vk.models.NNGP(depth=2)
    NNGP(depth=2, activation='relu', weight_var=2.0, bias_var=0.1, init_width=512)
    """

    def ntk(self, u: Tensor, v: Tensor) -> Tensor:
        return self.prior(u, v)


class RBF(NetworkKernel):
    r""":math:`K = \mathrm{variance}\, e^{-|u - v|^2/2\ell^2}`; K0 = K, or 0 without ``prior`` (training starts from 0).
    A draw :math:`\sqrt{\mathrm{variance}/n} \sum_j a_j \cos(\omega_j \cdot u/\ell) + b_j \sin(\omega_j \cdot u/\ell)`
    has n = ``init_width`` random features, all a, b, ω standard normal. Its covariance is K exactly.

    >>> import vkernel as vk
    >>> vk.models.RBF()
    RBF(length=0.5, variance=1.0, prior=True)
    """

    def __init__(self, length: float = 0.5, variance: float = 1.0, prior: bool = True, init_width: int = 512) -> None:
        require(isinstance(prior, bool), f"prior must be True (K0 = K) or False (K0 = 0); got {prior!r}.")
        self.length, self.variance = check_positive(length, "length"), check_positive(variance, "variance")
        self._prior, self.init_width = prior, check_whole(init_width, "init_width")

    def _both(self, u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        K = self.variance * torch.exp(-_square_distance(u, v) / (2 * self.length**2))
        return K * float(self._prior), K

    def draw(self, p: int, outputs: int, generator: Generator, dtype: torch.dtype = torch.float64) -> State:
        g, size = rng.as_generator(generator), (check_whole(outputs, "outputs"), self.init_width)
        omega = _normal((self.init_width, check_whole(p, "p")), g, dtype)
        a, b = (_normal(size, g, dtype) * float(self._prior) for _ in range(2))
        return {"omega": omega, "a": a, "b": b}

    def apply(self, state: State, u: Tensor) -> Tensor:
        _check_state(state, ["omega", "a", "b"], u)
        omega, a, b = (state[name].to(u) for name in ("omega", "a", "b"))
        phase = u @ omega.mT / self.length
        return math.sqrt(self.variance / omega.shape[-2]) * (phase.cos() @ a.mT + phase.sin() @ b.mT)

    def __repr__(self) -> str:
        return f"RBF(length={self.length}, variance={self.variance}, prior={self._prior})"


def _square_distance(u: Tensor, v: Tensor) -> Tensor:
    """Return |u - v|² for all pairs; by differences where that is cheap, as they are exactly 0 at coincident points."""
    if u.shape[-1] <= DIRECT:
        features = zip(u[..., :, None, :].unbind(-1), v[..., None, :, :].unbind(-1), strict=True)
        return sum(((a - b).square() for a, b in features), u.new_zeros(()))  # no (N, N', p) in memory
    a, b = u.double(), v.double()  # here nearby points cancel, to 1e-16 of |u|²
    squares = a.square().sum(-1)[..., :, None] + b.square().sum(-1)[..., None, :]
    return (squares - 2 * a @ b.mT).clamp_min(0).to(u.dtype)


def _normal(shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    # in float64, so that every precision represents the same function
    return rng.randn(shape, generator, generator.device, torch.float64).to(dtype)


def _check_pair(u: Tensor, v: Tensor) -> None:
    for name, x in (("u", u), ("v", v)):
        good = isinstance(x, Tensor) and x.dtype in (torch.float32, torch.float64) and x.ndim >= 2 and x.shape[-1]
        require(good, f"{name} must be a tensor (*batch, N, p) in float32 or float64.")
        require(bool(x.isfinite().all()), f"{name} holds NaN or infinite values.")
    one, two = (f"p = {x.shape[-1]} in {x.dtype} on {x.device}" for x in (u, v))
    require(one == two, f"u and v must agree; u has {one}, v has {two}.")
    good = all(1 in (a, b) or a == b for a, b in zip(u.shape[-3::-1], v.shape[-3::-1], strict=False))
    require(good, f"The batches of u {tuple(u.shape)} and v {tuple(v.shape)} do not broadcast.")


def _check_state(state: State, names: list[str], u: Tensor) -> None:
    """Refuse the state of another kernel, and ``u`` of another length; values are not checked, for speed."""
    good = isinstance(state, dict) and sorted(state) == sorted(names)
    require(good, f"The state must be a dict of {', '.join(names)}, as draw makes it.")
    *members, _, p = state[names[0]].shape
    require(u.shape[-1] == p, f"The function was drawn on vectors of length {p}; u has {u.shape[-1]}.")
    good = not members or (u.ndim == 3 and (u.shape[0] in (1, *members) or members == [1]))
    require(good, f"The state holds {members} members; u must be (members or 1, N, p), not {tuple(u.shape)}.")


@dataclass(eq=False)
class Lazy(Model):
    """The wide network of ``kernel``, trained by gradient flow for time ``tau``; from f0 = 0 where not ``init``.

    >>> import torch, vkernel as vk
    >>> data, process = vk.data.toy("triple"), vk.VP()
    >>> model = vk.models.Lazy(vk.models.NTK(depth=2), tau=10.0)
    >>> vk.train_ensemble(model, data, process, members=2, draws=16)(torch.zeros(5, 1), 0.5).shape
    torch.Size([2, 5, 1])
    """

    kernel: NetworkKernel
    tau: float = math.inf
    target: str = "x0"
    weight: Weight = "sigma2"
    init: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        good = isinstance(self.kernel, NetworkKernel)
        require(good, f"A lazy model needs the kernel of a network such as vk.models.NTK(), not {self.kernel!r}.")
        good = isinstance(self.tau, int | float) and not isinstance(self.tau, bool) and self.tau >= 0
        require(good, f"tau, the time of training, must be a number ≥ 0 (infinity is allowed); got {self.tau!r}.")
        require(isinstance(self.init, bool), f"init must be True (f0 is random) or False (f0 = 0); got {self.init!r}.")
        self.randomness = ("init", "inputs", "targets") if self.init else ("inputs", "targets")

    @property
    def spec(self) -> dict[str, object]:
        return super().spec | {"kernel": self.kernel.spec, "tau": self.tau if math.isfinite(self.tau) else "inf"}

    def fit(self, training: Training, members: Sequence[int], report: Report) -> State:
        P, d = training.finite_draws("A lazy model"), training.data.d
        shared = "inputs" not in training.vary
        at_once = max(1, CHUNK // (P * (d if shared else P)))
        found, G = list[State](), torch.empty(0)
        for block in (members[i : i + at_once] for i in range(0, len(members), at_once)):
            batch = training.batch(block, P)
            if not (shared and found):
                some = slice(1 if shared else None)
                G, _ = self.smoother(batch.x[some], batch.t[some], training.process)
            found.append(self.learn(batch, G, self.initial(training, block), training.process))
            report(len(block) / len(members))
        # one block is not copied: an f0 that all members share stays one tensor in memory
        state = {name: torch.cat([s[name] for s in found]) for name in found[0]} if len(found) > 1 else found[0]
        return {name: a.to(training.dtype) for name, a in state.items()}

    def inputs(self, x: Tensor, t: Tensor, process: Process) -> Tensor:
        """Return u ``(M, N, d + 1)`` for ``x (M or 1, N, *shape)`` and ``t (M or 1, N or 1)``."""
        batch = np.broadcast_shapes(x.shape[:2], t.shape)
        when = time_input(t, process).to(x.dtype).expand(batch)
        return torch.cat([x.flatten(2).expand(*batch, -1), when[..., None]], -1)

    def smoother(self, x: Tensor, t: Tensor, process: Process) -> tuple[Tensor, Tensor]:
        """Return G ``(M, P, P)`` and F_eff ``(M,)`` for inputs ``x (M, P, *shape)`` and ``t (M, P)``, in float64."""
        u, wide = self.inputs(x.double(), t.double(), process), t.double()
        root = (self.omega(wide, process) / t.shape[-1]).sqrt()
        rho, Q = torch.linalg.eigh(root[..., :, None] * self.kernel.ntk(u, u) * root[..., None, :])
        if math.isinf(self.tau):
            seen = rho > rho.shape[-1] * torch.finfo(rho.dtype).eps * rho.amax(-1, keepdim=True)
            learned, g = seen.to(rho), torch.where(seen, 1 / torch.where(seen, rho, 1.0), 0.0)
        else:
            positive = rho > 0  # A is semidefinite: eigenvalues that are not positive are rounding
            learned = -torch.expm1(-self.tau * rho.clamp_min(0))
            g = torch.where(positive, learned / torch.where(positive, rho, 1.0), self.tau)
        half = root[..., None] * Q
        return half * g[..., None, :] @ half.mT, learned.sum(-1)

    def initial(self, training: Training, members: Sequence[int]) -> State:
        """Return the tensors of the members' f0, their names prefixed by ``INIT``; none where f0 = 0."""
        if not self.init:
            return {}
        d, which = training.data.d, members if "init" in training.vary else members[:1]
        drawn = [self.kernel.draw(d + 1, d, training.generator("init", m), training.dtype) for m in which]
        stacked = {name: torch.stack([one[name] for one in drawn]).to(training.data.device) for name in drawn[0]}
        return {INIT + name: a.expand(len(members), *a.shape[1:]) for name, a in stacked.items()}

    def learn(self, batch: Batch, G: Tensor, initial: State, process: Process) -> State:
        """Return the state after training on a batch with the smoother ``G (M or 1, P, P)``, from f0 of ``initial``."""
        u = self.inputs(batch.x.double(), batch.t.double(), process)
        y = self.training_target(batch.m, batch.x, batch.t, process).double().flatten(2)
        if initial:  # f0 at the inputs: a state of no draws
            y = y - self._function({"inputs": u[:, :0], "coefficients": y[:, :0], **initial}, u)
        return {"inputs": u, "coefficients": G @ y, **initial}

    def output(self, state: State, x: Tensor, t: Tensor, process: Process) -> Tensor:
        f = self._function(state, self.inputs(x.to(torch.promote_types(x.dtype, state["inputs"].dtype)), t, process))
        return f.to(x.dtype).reshape(*f.shape[:2], *x.shape[2:])

    def _function(self, state: State, u: Tensor) -> Tensor:
        """Return f ``(M, N, o)`` at ``u (M or 1, N, p)``, by blocks of members and of points."""
        held = {name: a.to(u) for name, a in state.items()}
        if len(u) == 1:  # inputs or f0 that all members share are evaluated once
            for names in (["inputs"], [name for name in held if name.startswith(INIT)]):
                if all(len(held[n]) > 0 and bool((held[n] == held[n][:1]).all()) for n in names):
                    held |= {name: held[name][:1] for name in names}
        members = max(len(state["inputs"]), len(u))
        cost = max(1, held["inputs"].shape[1], *(a.shape[-1] for name, a in held.items() if name.startswith(INIT)))
        height = min(members, max(1, CHUNK // cost))
        found = []
        for i in range(0, members, height):
            some = {name: a if len(a) == 1 else a[i : i + height] for name, a in (held | {"u": u}).items()}
            f0 = {name.removeprefix(INIT): a for name, a in some.items() if name.startswith(INIT)}
            blocks = []
            for v in some["u"].split(max(1, CHUNK // (height * cost)), 1):
                k, a = self.kernel.ntk(v, some["inputs"]), some["coefficients"]
                # no copies of a k that members share
                f = k @ a if len(k) > 1 or len(a) == 1 else torch.einsum("np,mpo->mno", k[0], a)
                blocks.append(f + self.kernel.apply(f0, v) if f0 else f)
            found.append(torch.cat(blocks, 1))
        return torch.cat(found)
