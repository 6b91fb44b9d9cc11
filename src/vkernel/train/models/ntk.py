r"""Kernels of infinitely wide networks (docs/theory.md, §6.5).

A network of :math:`L` hidden layers (``depth``) in the tangent parametrisation (Jacot et al. 2018), on
:math:`u \in R^p`, with all :math:`W, b \sim N(0, 1)` and ``weight_var, bias_var`` = :math:`\sigma_w^2, \sigma_b^2`:

.. math:: h^1 = \frac{\sigma_w}{\sqrt p} W^0 u + \sigma_b b^0, \qquad
          h^{l+1} = \frac{\sigma_w}{\sqrt n} W^l \varphi(h^l) + \sigma_b b^l, \qquad f(u) = h^{L+1}(u) .

Every layer has a bias, **the readout too**. For width :math:`n \to \infty` the outputs are independent Gaussian
fields of covariance :math:`K_0 = \Sigma^{L+1}` (``prior``), and training moves them with the tangent kernel
:math:`K = \sum_\theta \partial_\theta f\, \partial_\theta f'` (``ntk``; Lee et al. 2019):

.. math:: \Sigma^1 = \sigma_w^2\, u \cdot v / p + \sigma_b^2, \qquad
          \Sigma^{l+1} = \sigma_w^2\, E[\varphi(a)\varphi(b)] + \sigma_b^2, \\
          \Theta^1 = \Sigma^1, \qquad \Theta^{l+1} = \Sigma^{l+1} + \sigma_w^2\, \Theta^l\, E[\varphi'(a)\varphi'(b)],

with :math:`(a, b)` Gaussian of variances :math:`q, q'` and covariance :math:`s`, all from :math:`\Sigma^l`.
:class:`NTK` trains all layers, :math:`K = \Theta^{L+1}`. :class:`NNGP` trains the readout alone, :math:`K = K_0`.

**Expectations.** With :math:`s = \sqrt{qq'} \cos\theta` and :math:`\det = qq' - s^2`:

* relu (Cho & Saul 2009): :math:`E[\varphi\varphi] = (\sqrt\det + (\pi - \theta) s)/2\pi`,
  :math:`E[\varphi'\varphi'] = (\pi - \theta)/2\pi`;
* erf (Williams 1997), with :math:`e = (1 + 2q)(1 + 2q') - 4s^2 = 1 + 2q + 2q' + 4\det`:
  :math:`E[\varphi\varphi] = (2/\pi) \arctan(2s/\sqrt e)`, :math:`E[\varphi'\varphi'] = (4/\pi)/\sqrt e`.

**Near coincident points** an arccosine would lose half of the digits, so what travels through the layers is not
:math:`s` but the *gap* :math:`g = q + q' - 2s`, the mean square of :math:`a - b`. It starts as
:math:`\sigma_w^2 |u - v|^2/p`, does not see the biases, and is exactly 0 at :math:`u = v`. Then

.. math:: d = g - (\sqrt q - \sqrt{q'})^2 = 4 \sqrt{qq'} \sin^2(\theta/2), \qquad s = \sqrt{qq'} - d/2, \qquad
          \det = d\,(4\sqrt{qq'} - d)/4,

and one relu layer makes :math:`g \to (\sigma_w^2/2)\,(g - (2/\pi)(\sqrt\det - \theta s))`. The tangent kernel of relu
has a kink :math:`\propto -|u - v|` at :math:`u = v`: a derivative taken there (``torch.func.jvp``) is the mean of the
two one-sided ones, which is finite.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from vkernel.core import rng
from vkernel.core.errors import InputError, require

__all__ = ["NNGP", "NTK", "RBF", "NetworkKernel", "finite_ntk", "from_spec"]

State = dict[str, Tensor]
Generator = torch.Generator | int
Moments = tuple[Tensor, Tensor, Tensor, Tensor]  # E[φ(a)²], E[φ(b)²], E[(φ(a) - φ(b))²] and E[φ'(a)φ'(b)]

DIRECT = 32  # up to this p, squared distances are sums of squared differences; above it they come from one product


class NetworkKernel(ABC):
    """The tangent kernel K and the covariance K0 at initialisation of a wide network, and its random functions."""

    kind: ClassVar[str]

    @abstractmethod
    def ntk(self, u: Tensor, v: Tensor) -> Tensor:
        """K for all pairs of ``u (*b, N, p)`` and ``v (*b, N', p)``: ``(*b, N, N')``."""

    @abstractmethod
    def prior(self, u: Tensor, v: Tensor) -> Tensor:
        """K0 for all pairs of ``u (*b, N, p)`` and ``v (*b, N', p)``: ``(*b, N, N')``."""

    @abstractmethod
    def draw(self, p: int, outputs: int, generator: Generator, dtype: torch.dtype = torch.float64) -> State:
        """One member's random function R^p → R^outputs, of mean 0 and covariance K0 ⊗ 1: plain tensors to stack."""

    @abstractmethod
    def apply(self, state: State, u: Tensor) -> Tensor:
        """Drawn functions at ``u (M or 1, N, p)``: ``(M, N, outputs)``; one member's state takes ``u (*b, N, p)``."""

    @abstractmethod
    def trained(self, state: State) -> list[str]:
        """The names in ``state`` of the parameters whose training K describes."""

    @abstractmethod
    def spec(self) -> dict[str, Any]:
        """All that is needed to build the kernel again by :func:`from_spec`, for JSON."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in self.spec().items() if k != 'kind')})"


class _Pairs(NamedTuple):
    """The 2×2 covariance of ``(a, b)`` for all pairs: variances ``q (*b, N, 1)``, ``q2 (*b, 1, N')``, gap, s, det."""

    q: Tensor
    q2: Tensor
    gap: Tensor
    s: Tensor
    det: Tensor


def _root(x: Tensor) -> Tensor:
    """√x whose derivative at 0 is 0 instead of infinite."""
    positive = x > 0
    return torch.where(positive, torch.where(positive, x, 1.0).sqrt(), 0.0)


def _pairs(q: Tensor, q2: Tensor, gap: Tensor) -> _Pairs:
    root, root2 = _root(q), _root(q2)
    r = root * root2
    d = torch.minimum((gap - (root - root2).square()).clamp_min(0), 4 * r)
    return _Pairs(q, q2, gap, r - d / 2, d * (4 * r - d) / 4)


def _relu(c: _Pairs) -> Moments:
    sine = _root(c.det)
    angle = torch.atan2(sine, torch.where((c.s == 0) & (sine == 0), 1.0, c.s))  # a zero vector has no angle: take 0
    gap = (c.gap - (2 / math.pi) * (sine - angle * c.s)) / 2
    return c.q / 2, c.q2 / 2, gap.clamp_min(0), (math.pi - angle) / (2 * math.pi)


def _erf(c: _Pairs) -> Moments:
    root = (1 + 2 * (c.q + c.q2) + 4 * c.det).sqrt()  # in this order u and v may be exchanged, bit for bit
    one, two = (torch.atan2(2 * q, (1 + 4 * q).sqrt()) for q in (c.q, c.q2))
    gap = one + two - 2 * torch.atan2(2 * c.s, root)
    return one * 2 / math.pi, two * 2 / math.pi, gap.clamp_min(0) * 2 / math.pi, 4 / (math.pi * root)


class _Activation(NamedTuple):
    function: Callable[[Tensor], Tensor]
    moments: Callable[[_Pairs], Moments]
    weight_var: float


# relu: 2 keeps the variance from layer to layer (half of the units are silent); erf: 1, its slope at 0 is 1.13.
ACTIVATIONS = {"relu": _Activation(torch.relu, _relu, 2.0), "erf": _Activation(torch.erf, _erf, 1.0)}


class _Network(NetworkKernel):
    """What :class:`NTK` and :class:`NNGP` share: the architecture, the recursion and the network itself."""

    def __init__(
        self,
        depth: int = 2,
        activation: str = "relu",
        weight_var: float | None = None,
        bias_var: float = 0.1,
        init_width: int = 512,
    ) -> None:
        known = tuple(ACTIVATIONS)
        require(activation in known, f"activation must be one of {', '.join(known)}; got {activation!r}.")
        self.depth, self.activation = _count("depth, the number of hidden layers,", depth), activation
        given = ACTIVATIONS[activation].weight_var if weight_var is None else weight_var
        self.weight_var = _number("weight_var", given, positive=True)
        self.bias_var = _number("bias_var", bias_var)
        self.init_width = _count("init_width", init_width)

    def spec(self) -> dict[str, Any]:
        return {"kind": self.kind} | vars(self)  # all attributes are settings

    def _recursion(self, u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        r""":math:`\Sigma^{L+1}` and :math:`\Theta^{L+1}`."""
        _check_pair(u, v)
        w, b = self.weight_var, self.bias_var
        q, q2 = (w * x.square().mean(-1) + b for x in (u, v))
        c = _pairs(q[..., :, None], q2[..., None, :], (w / u.shape[-1]) * _square_distance(u, v))
        theta = c.s
        for _ in range(self.depth):
            q, q2, gap, slope = ACTIVATIONS[self.activation].moments(c)
            c = _pairs(w * q + b, w * q2 + b, w * gap)
            theta = c.s + w * theta * slope
        return c.s, theta

    def prior(self, u: Tensor, v: Tensor) -> Tensor:
        return self._recursion(u, v)[0]

    def draw(self, p: int, outputs: int, generator: Generator, dtype: torch.dtype = torch.float64) -> State:
        sizes = [_count("p", p), *[self.init_width] * self.depth, _count("outputs", outputs)]
        g, state = rng.as_generator(generator), {}
        for layer, (fan_in, fan_out) in enumerate(itertools.pairwise(sizes)):
            state[f"W{layer}"] = _normal((fan_out, fan_in), g, dtype)
            state[f"b{layer}"] = _normal((fan_out,), g, dtype)
        return state

    def apply(self, state: State, u: Tensor) -> Tensor:
        _check_state(state, [f"{kind}{layer}" for layer in range(self.depth + 1) for kind in "Wb"], "W0", u)
        h = u
        for layer in range(self.depth + 1):
            x = ACTIVATIONS[self.activation].function(h) if layer else u
            W, b = state[f"W{layer}"].to(u), state[f"b{layer}"].to(u)
            h = math.sqrt(self.weight_var / x.shape[-1]) * x @ W.mT + math.sqrt(self.bias_var) * b[..., None, :]
        return h


class NTK(_Network):
    """A wide network of which all layers are trained."""

    kind = "ntk"

    def ntk(self, u: Tensor, v: Tensor) -> Tensor:
        return self._recursion(u, v)[1]

    def trained(self, state: State) -> list[str]:
        return list(state)


class NNGP(_Network):
    """A wide network of which the readout alone, weights and bias, is trained: K = K0."""

    kind = "nngp"

    def ntk(self, u: Tensor, v: Tensor) -> Tensor:
        return self.prior(u, v)

    def trained(self, state: State) -> list[str]:
        return [f"W{self.depth}", f"b{self.depth}"]


class RBF(NetworkKernel):
    r""":math:`K = \mathrm{variance}\, e^{-|u - v|^2/2\ell^2}`; K0 = K, or 0 without ``prior`` (training starts from 0).

    A draw reads out n = ``init_width`` random Fourier features (Rahimi & Recht 2007), all weights standard normal:
    :math:`f = \sqrt{\mathrm{variance}/n} \sum_j a_j \cos(\omega_j \cdot u/\ell) + b_j \sin(\omega_j \cdot u/\ell)`.
    Its covariance is K exactly; its law is Gaussian as n grows.
    """

    kind = "rbf"

    def __init__(self, length: float = 0.5, variance: float = 1.0, prior: bool = True, init_width: int = 512) -> None:
        require(isinstance(prior, bool), f"prior must be True (K0 = K) or False (K0 = 0); got {prior!r}.")
        self.length = _number("length", length, positive=True)
        self.variance = _number("variance", variance, positive=True)
        self.starts_random, self.init_width = prior, _count("init_width", init_width)

    def spec(self) -> dict[str, Any]:
        numbers = {"length": self.length, "variance": self.variance, "init_width": self.init_width}
        return {"kind": self.kind, "prior": self.starts_random} | numbers

    def ntk(self, u: Tensor, v: Tensor) -> Tensor:
        _check_pair(u, v)
        return self.variance * torch.exp(-_square_distance(u, v) / (2 * self.length**2))

    def prior(self, u: Tensor, v: Tensor) -> Tensor:
        return self.ntk(u, v) * float(self.starts_random)

    def draw(self, p: int, outputs: int, generator: Generator, dtype: torch.dtype = torch.float64) -> State:
        g, size = rng.as_generator(generator), (_count("outputs", outputs), self.init_width)
        omega = _normal((self.init_width, _count("p", p)), g, dtype)
        a, b = (_normal(size, g, dtype) * float(self.starts_random) for _ in range(2))
        return {"omega": omega, "a": a, "b": b}

    def apply(self, state: State, u: Tensor) -> Tensor:
        _check_state(state, ["omega", "a", "b"], "omega", u)
        omega, a, b = (state[name].to(u) for name in ("omega", "a", "b"))
        phase = u @ omega.mT / self.length
        return math.sqrt(self.variance / omega.shape[-2]) * (phase.cos() @ a.mT + phase.sin() @ b.mT)

    def trained(self, state: State) -> list[str]:
        return ["a", "b"]


def finite_ntk(kernel: NetworkKernel, state: State, u: Tensor, v: Tensor) -> Tensor:
    r"""The tangent kernel :math:`J_u J_v^T` of one drawn network of one output, at its own finite width.

    u ``(N, p)`` and v ``(N', p)`` give ``(N, N')``, which tends to ``kernel.ntk(u, v)`` as width^(-1/2).
    """
    _check_pair(u, v)
    require(u.ndim == v.ndim == 2, "finite_ntk takes u (N, p) and v (N', p): one network, no batch axes.")
    outputs = kernel.apply(state, u[:1]).shape
    require(outputs == (1, 1), f"finite_ntk takes one network of one output; f(u) had shape {tuple(outputs)}.")
    moving = {name: state[name].to(u) for name in kernel.trained(state)}

    def output(parameters: State, x: Tensor) -> Tensor:
        return kernel.apply(state | parameters, x[None])[0, 0]

    def jacobian(x: Tensor) -> Tensor:
        gradients = torch.func.vmap(torch.func.grad(output), in_dims=(None, 0))(moving, x)
        return torch.cat([gradients[name].flatten(1) for name in moving], 1)

    return jacobian(u) @ jacobian(v).mT


KINDS: dict[str, Callable[..., NetworkKernel]] = {"ntk": NTK, "nngp": NNGP, "rbf": RBF}


def from_spec(spec: dict[str, Any]) -> NetworkKernel:
    """The kernel that ``spec``, of :meth:`NetworkKernel.spec`, describes."""
    good = isinstance(spec, dict) and isinstance(spec.get("kind"), str) and spec["kind"] in KINDS
    require(good, f"A kernel's spec is a dict whose kind is one of {', '.join(KINDS)}; got {spec!r:.200}.")
    try:
        return KINDS[spec["kind"]](**{name: value for name, value in spec.items() if name != "kind"})
    except TypeError:
        raise InputError(f"The spec of a kernel of kind {spec['kind']} has unknown entries: {spec!r:.200}.") from None


def _square_distance(u: Tensor, v: Tensor) -> Tensor:
    """|u - v|² for all pairs; by differences where that is cheap, as they are exactly 0 at coincident points."""
    if u.shape[-1] <= DIRECT:
        features = zip(u[..., :, None, :].unbind(-1), v[..., None, :, :].unbind(-1), strict=True)
        return sum(((a - b).square() for a, b in features), u.new_zeros(()))  # no (N, N', p) in memory
    a, b = u.double(), v.double()  # here nearby points cancel, to 1e-16 of |u|²
    squares = a.square().sum(-1)[..., :, None] + b.square().sum(-1)[..., None, :]
    return (squares - 2 * a @ b.mT).clamp_min(0).to(u.dtype)


def _normal(shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    """Standard normals drawn in float64, so that every precision holds the same function."""
    return rng.randn(shape, generator, generator.device, torch.float64).to(dtype)


def _number(name: str, value: Any, positive: bool = False) -> float:
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    good = good and (value > 0 or (value == 0 and not positive))
    require(good, f"{name} must be a number {'> 0' if positive else '≥ 0'}; got {value!r}.")
    return float(value)


def _count(name: str, value: Any) -> int:
    good = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    require(good, f"{name} must be a whole number ≥ 1; got {value!r}.")
    return int(value)


def _check_pair(u: Tensor, v: Tensor) -> None:
    for name, x in (("u", u), ("v", v)):
        good = isinstance(x, Tensor) and x.dtype in (torch.float32, torch.float64) and x.ndim >= 2 and x.shape[-1]
        require(good, f"{name} must be a tensor (*batch, N, p) in float32 or float64.")
        require(bool(x.isfinite().all()), f"{name} holds NaN or infinite values.")
    one, two = (f"p = {x.shape[-1]} in {x.dtype} on {x.device}" for x in (u, v))
    require(one == two, f"u and v must agree; u has {one}, v has {two}.")
    try:
        torch.broadcast_shapes(u.shape[:-2], v.shape[:-2])
    except RuntimeError:
        raise InputError(f"The batches of u {tuple(u.shape)} and v {tuple(v.shape)} do not broadcast.") from None


def _check_state(state: State, names: list[str], first: str, u: Tensor) -> None:
    """The state is this kernel's, and ``u`` fits its first layer. Values are not looked at: samplers call this."""
    good = isinstance(state, dict) and sorted(state) == sorted(names)
    require(good, f"The state must be a dict of {', '.join(names)}, as draw makes it.")
    good = isinstance(u, Tensor) and u.is_floating_point() and u.ndim >= 2
    require(good, "u must be a tensor of floats of shape (members or 1, N, p).")
    *members, _, p = state[first].shape
    require(u.shape[-1] == p, f"The function was drawn on vectors of length {p}; u has {u.shape[-1]}.")
    good = not members or (u.ndim == 3 and (u.shape[0] in (1, *members) or members == [1]))
    require(good, f"The state holds {members} members; u must be (members or 1, N, p), not {tuple(u.shape)}.")
