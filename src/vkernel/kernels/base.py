r"""The base class of V-kernels, and the two kinds that users define (docs/theory.md, §5).

A V-kernel is the covariance :math:`\mathrm{Cov}_\theta[\hat s(x,t), \hat s(x',t')]` of the learned score over training
randomness, together with the mean score; :math:`V = D\,\mathrm{Cov}\,D'`. The predicted variance
:math:`\mathrm{tr}\,\mathrm{Cov}` of all but closed forms is a mean of independent ``estimates`` :math:`v_u`: U sets
of inputs (Linear, Lazy), parts of a quadrature (leading order, SGD) or members (Measured). Its relative standard error,
``error``, is :math:`\mathrm{sd}(v_u)/(\sqrt U\,\bar v)`.
"""

import warnings
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from vkernel.adapters.checkpoints import Checkpoints
from vkernel.core import rng
from vkernel.core.checks import as_tensor, check_real, check_type, check_whole
from vkernel.core.covariance import Covariance, Cross, Factored, Matrix, Transformed
from vkernel.core.errors import InputError, require
from vkernel.core.estimate import relative_se
from vkernel.core.rng import Generator
from vkernel.process import Anisotropic, Process
from vkernel.sample import Groups, Scores
from vkernel.sample.sde import Field, Learned, VKernel
from vkernel.score.base import Score, Time, as_time, wide_time

JITTER = 1e-10  # of the largest variance so far, added to the diagonal of a conditioned field's covariance
Pairwise = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # of x, t, x2 and t2


class ValidityWarning(UserWarning):
    """A theory kernel is used outside the range in which it was derived.

    >>> import vkernel as vk
    >>> issubclass(vk.kernels.ValidityWarning, UserWarning)
    True
    """


class Kernel(VKernel):
    """The covariance of the learned score; ``valid`` and ``why`` state whether its assumptions hold.

    >>> import torch, vkernel as vk
    >>> data, process = vk.data.toy("triple"), vk.VP()
    >>> score = vk.EmpiricalScore(data, process)
    >>> V = vk.kernels.Naive(score, kappa=0.1)
    >>> isinstance(V, vk.kernels.Kernel), V.valid, V(torch.zeros(5, 1), 0.5).trace().shape
    (True, True, torch.Size([5]))
    """

    valid: bool = True
    why: str = "exact"
    device: torch.device = torch.device("cpu")
    _mean: Score | None = None

    @property
    def mean(self) -> Score:
        if self._mean is None:
            raise InputError(f"This {type(self).__name__} kernel was made without a mean score: give mean=…")
        return self._mean

    def __call__(self, x: Tensor, t: Time, x2: Tensor | None = None, t2: Time | None = None) -> Covariance:
        """Return V = D Cov D', paired over the broadcast batch."""
        check_real(x, "x")
        here, there = (self.process.base.D(wide_time(u, x.device)) for u in (t, t if t2 is None else t2))
        gamma = self.process.gamma if isinstance(self.process, Anisotropic) else None
        return Transformed(self.cov(x, t, x2, t2), (here * there).sqrt(), gamma)

    def estimates(self, x: Tensor, t: Time) -> Tensor | None:
        """Return independent estimates of tr Cov, ``(units, *batch)``, with mean tr Cov; ``None`` for a closed form."""
        return None

    def error(self, x: Tensor, t: Time) -> Tensor:
        """Return the relative standard error of the predicted variance, ``(*batch,)``."""
        found = self.estimates(x, t)
        if found is None:
            return torch.zeros(self.cov(x, t).batch, dtype=x.dtype, device=x.device)
        return relative_se(found).to(x)

    def models(self, members: int, generator: Generator = None) -> Scores:
        """Draw models of this kernel, each the mean score plus an independent field."""
        keys = rng.keys((check_whole(members, "members"),), rng.as_generator(generator)).tolist()

        def alone(field: Field) -> Field:
            return lambda x, t: field(x[None], t)[0]

        return Drawn([Learned(self.mean, alone(self.draw(1, key))) for key in keys], self.device)

    def __repr__(self) -> str:
        valid = "valid" if self.valid else "not valid"
        return f"{type(self).__name__} kernel ({valid}: {self.why}) of {self.process!r}"

    def _normals(self, members: int, count: int, generator: Generator) -> Tensor:
        check_whole(members, "the number of members of a field")
        return rng.randn((members, count), rng.as_generator(generator), self.device, torch.float64)

    def _assess(self, valid: bool, why: str, advice: str) -> None:
        """Record whether the assumptions hold; warn, with an advice, if they do not."""
        self.valid, self.why = valid, why if valid else f"{why}. {advice}"
        if not valid:
            warnings.warn(f"{type(self).__name__} kernel: {self.why}", ValidityWarning, stacklevel=3)


class FiniteRank(Kernel):
    r"""A kernel linear in random weights: :math:`\delta\hat s = \sum_f w_f\, \phi_f(x,t)`, :math:`w \sim N(0, W)`.
    ``basis(x, t)`` takes ``x (*batch, d)`` and returns ``(F, *batch, d)``; ``weights`` is the covariance ``(F, F)``.

    >>> import torch, vkernel as vk
    >>> data, process = vk.data.toy("triple"), vk.VP()
    >>> score = vk.EmpiricalScore(data, process)
    >>> def basis(x, t):  # two functions: 1 and x
    ...     return torch.stack([torch.ones_like(x), x])
    >>> V = vk.kernels.FiniteRank(basis, 0.01 * torch.eye(2), process, mean=score)
    >>> V.cov(torch.ones(5, 1), 0.5).trace()
    tensor([0.0200, 0.0200, 0.0200, 0.0200, 0.0200])
    """

    def __init__(self, basis: Field, weights: Tensor, process: Process, mean: Score | None = None) -> None:
        w = as_tensor(weights, "weights").double()
        require(w.ndim == 2 and w.shape[0] == w.shape[1], f"weights must be (F, F); got {tuple(w.shape)}.")
        require(bool(w.isfinite().all()) and torch.allclose(w, w.mT), "weights must be finite and symmetric.")
        self.basis, self.process, self._mean, self.device = basis, process, mean, w.device
        self.root = Matrix(w, (len(w),)).power(0.5).dense()  # refuses what is not a covariance

    def factors(self, x: Tensor, t: Time) -> Tensor:
        phi = check_type(self.basis(x, t), "basis(x, t)", Tensor)
        F = len(self.root)
        require(phi.shape == (F, *x.shape), f"basis(x, t) has shape {tuple(phi.shape)}; it must be ({F}, *x.shape).")
        return torch.tensordot(self.root.to(phi), phi, dims=1)

    def cov(self, x: Tensor, t: Time, x2: Tensor | None = None, t2: Time | None = None) -> Covariance:
        left, shape = self.factors(x, t), tuple(x.shape[-1:])
        if x2 is None:
            return Factored(left, shape)
        return Cross(left.movedim(0, -1) @ self.factors(x2, t if t2 is None else t2).movedim(0, -1).mT, shape)

    def draw(self, members: int, generator: Generator = None) -> Field:
        z = self._normals(members, len(self.root), generator)

        def field(x: Tensor, t: Time) -> Tensor:
            modes = self.factors(x, t)  # (F, members, *batch, d)
            return (z.mT.to(modes).reshape(len(modes), members, *(1,) * (x.ndim - 1)) * modes).sum(0)

        return field


class Function(Kernel):
    r"""A quenched kernel that is known as a function, :math:`\mathrm{Cov}[\hat s_a(x,t), \hat s_b(x',t')]`.
    ``function(x, t, x2, t2)`` takes broadcast batches of vectors ``(*batch, d)`` and times ``(*batch,)`` and returns
    either ``(*batch,)``, a scalar kernel times the identity, or ``(*batch, d, d)``.

    >>> import torch, vkernel as vk
    >>> data, process = vk.data.toy("triple"), vk.VP()
    >>> score = vk.EmpiricalScore(data, process)
    >>> def k(x, t, x2, t2):
    ...     return 0.01 * torch.exp(-(x - x2).square().sum(-1))
    >>> V = vk.kernels.Function(k, process, mean=score)
    >>> V.cov(torch.zeros(5, 1), 0.5).trace()
    tensor([0.0100, 0.0100, 0.0100, 0.0100, 0.0100])
    """

    def __init__(self, function: Pairwise, process: Process, mean: Score | None = None) -> None:
        self.function, self.process, self._mean = function, process, mean

    def cov(self, x: Tensor, t: Time, x2: Tensor | None = None, t2: Time | None = None) -> Covariance:
        there = x if x2 is None else x2
        matrix = self._matrix(x, times_of(t, x), there, times_of(t if t2 is None else t2, there))
        return (Matrix if x2 is None else Cross)(matrix, tuple(x.shape[-1:]))

    def _matrix(self, x: Tensor, t: Tensor, x2: Tensor, t2: Tensor) -> Tensor:
        k, d = self.function(x, t, x2, t2), x.shape[-1]
        require(isinstance(k, Tensor) and bool(k.isfinite().all()), "The kernel function must return a finite tensor.")
        batch = np.broadcast_shapes(x.shape[:-1], x2.shape[:-1])
        if k.shape == batch:
            return k[..., None, None] * torch.eye(d, dtype=k.dtype, device=k.device)
        good = k.shape == (*batch, d, d)
        require(good, f"The kernel function returned shape {tuple(k.shape)}; it must be {batch} or {(*batch, d, d)}.")
        return k

    def pairs(self, x: Tensor, t: Tensor, x2: Tensor, t2: Tensor) -> Tensor:
        """Return the kernel for all pairs of ``x (m, N, d)`` and ``x2 (m, N', d)``: ``(m, N d, N' d)``."""
        k = self._matrix(x[:, :, None], t[:, :, None], x2[:, None], t2[:, None])
        return k.movedim(3, 2).flatten(3, 4).flatten(1, 2)

    def draw(self, members: int, generator: Generator = None) -> Field:
        r"""Draw a Gaussian field where it is evaluated, conditioned on all earlier values.
        With :math:`L L^T` the covariance of all values so far and :math:`z` their normals, the next values are
        :math:`B z + R z_{new}` with :math:`B = K_{new,old} L^{-T}` and :math:`R R^T = K_{new,new} - B B^T`."""
        check_whole(members, "the number of members of a field")
        source, scale = rng.as_generator(generator), 0.0
        past: tuple[Tensor, ...] = ()  # points, times, the normals z, the factor L

        def field(x: Tensor, t: Time) -> Tensor:
            nonlocal past, scale
            good = x.ndim >= 2 and x.shape[0] == members
            require(good, f"A field of {members} members takes x ({members}, *batch, d); got {tuple(x.shape)}.")
            new = x.detach().double().reshape(members, -1, x.shape[-1])
            when = times_of(t, x).double().reshape(members, -1)
            rest = self.pairs(new, when, new, when).double()
            require(torch.allclose(rest, rest.mT), "The kernel is not symmetric under exchange of its arguments.")
            scale = max(scale, float(rest.diagonal(dim1=-2, dim2=-1).amax()))
            fresh = rng.randn((members, rest.shape[-1]), source, x.device, torch.float64)
            if not past:
                root = _cholesky(rest, scale)
                value, past = root @ fresh[..., None], (new, when, fresh, root)
            else:
                points, old_times, z, old = past
                k = self.pairs(new, when, points, old_times).double()
                cross = torch.linalg.solve_triangular(old, k.mT, upper=False).mT
                root = _cholesky(rest - cross @ cross.mT, scale)
                value = cross @ z[..., None] + root @ fresh[..., None]
                top, bottom = torch.nn.functional.pad(old, (0, root.shape[-1])), torch.cat([cross, root], -1)
                points, old_times, z = (torch.cat(a, 1) for a in ((points, new), (old_times, when), (z, fresh)))
                past = points, old_times, z, torch.cat([top, bottom], -2)
            return value.reshape(x.shape).to(x.dtype)

        return field


def _cholesky(matrix: Tensor, scale: float) -> Tensor:
    """Return a Cholesky factor of covariances of values whose variance is at most ``scale``."""
    jitter = JITTER * max(scale, 1e-100) * torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    root, info = torch.linalg.cholesky_ex(matrix + jitter)
    if bool((info > 0).any()):  # rounding leaves up to about 1e-12 of the scale; more is no covariance
        values, vectors = torch.linalg.eigh(matrix)
        low = float(values.min())
        require(low > -1e-7 * max(scale, 1e-300), f"The kernel is not positive semidefinite: {low:.3g}.")
        square = (vectors * values.clamp_min(0).sqrt()[..., None, :]) @ vectors.mT
        root = torch.linalg.cholesky(square @ square.mT + 1e3 * jitter)
    return root


class Drawn(Checkpoints):
    """Models drawn from a kernel, which start in float64."""

    dtype = torch.float64
    device = torch.device("cpu")

    def __init__(self, members: Sequence[Score], device: torch.device) -> None:
        self.members, self.names = list(members), [f"draw {m}" for m in range(len(members))]
        self.process, self.groups, self.device = members[0].process, Groups.of(None, len(members)), device


def times_of(t: Time, x: Tensor) -> Tensor:
    """Return t over the batch of vectors x."""
    return as_time(t, x.device).to(x.dtype).expand(check_real(x, "x").shape[:-1])
