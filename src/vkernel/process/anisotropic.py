"""Noise of any covariance: the isotropic process in whitened coordinates (theory, §1)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vkernel.core.covariance import Covariance, Diagonal, Matrix, Scaled
from vkernel.core.errors import InputError, require
from vkernel.process.base import Process, Time, real_dtype, wide_dtype


@dataclass(frozen=True, repr=False, eq=False, init=False)
class Anisotropic(Process):
    """Noise of covariance Γ: S = sigma² Γ and D = D_base Γ, as covariance operators; alpha, sigma, beta of ``process``.

    Args:
        process: the isotropic process in whitened coordinates, ``base``.
        gamma: Γ, positive definite. A square matrix ``(d, d)`` is the covariance of d coordinates; any other tensor
            holds the variances of independent coordinates and has the data's shape. For what this rule cannot say (a
            matrix for images, variances for square data) pass
            :class:`~vkernel.core.covariance.Matrix` or :class:`~vkernel.core.covariance.Diagonal` with their shape.

    Attributes:
        root, inverse_root: Γ^(1/2) and Γ^(-1/2), of gamma's kind: maps for :class:`~vkernel.core.covariance.Congruent`.
        half_log_det, inverse_trace: ½ log det Γ and tr Γ^-1, for densities and norms in whitened coordinates.
    """

    process: Process
    gamma: Diagonal | Matrix
    root: Diagonal | Matrix
    inverse_root: Diagonal | Matrix
    half_log_det: float
    inverse_trace: float
    eps: float
    T: float

    def __init__(self, process: Process, gamma: Tensor | Covariance) -> None:
        require(
            isinstance(process, Process) and not isinstance(process, Anisotropic),
            f"Anisotropic needs an isotropic process such as VP(), not {process!r}.",
        )
        operator = _definite(gamma)
        g = operator.entries
        variances = torch.linalg.eigvalsh(g) if isinstance(operator, Matrix) else g
        for name, value in {
            "process": process,
            "gamma": operator,
            "root": operator.power(0.5),
            "inverse_root": operator.power(-0.5),
            "half_log_det": float(variances.log().sum()) / 2,
            "inverse_trace": float(variances.reciprocal().sum()),
            "eps": process.eps,
            "T": process.T,
        }.items():
            object.__setattr__(self, name, value)

    @property
    def law(self) -> str:
        kind = "diagonal" if isinstance(self.gamma, Diagonal) else "matrix"
        return f"({self.process.law}) · Γ, a {kind} Γ for events of shape {self.shape}"

    @property
    def base(self) -> Process:
        return self.process

    @property
    def shape(self) -> tuple[int, ...]:
        return self.gamma.shape

    def same_frame(self, other: Process) -> bool:
        return isinstance(other, Anisotropic) and self.gamma.equals(other.gamma)

    def alpha(self, t: Time, /) -> Tensor:
        return self.process.alpha(t)

    def sigma(self, t: Time, /) -> Tensor:
        return self.process.sigma(t)

    def beta(self, t: Time, /) -> Tensor:
        return self.process.beta(t)

    def S(self, t: Time, /) -> Scaled:  # type: ignore[override]
        """sigma² Γ, batch of t's shape, in t's dtype (for a number: Γ's)."""
        return self._scaled(t, self.process.sigma)

    def D(self, t: Time, /) -> Scaled:  # type: ignore[override]
        """D_base Γ, batch of t's shape, in t's dtype (for a number: Γ's)."""
        return self._scaled(t, lambda t: self.process.D(t).sqrt())

    def whiten(self, x: Tensor) -> Tensor:
        return self._product(self.inverse_root, x)

    def unwhiten(self, x: Tensor) -> Tensor:
        return self._product(self.root, x)

    def times(self, steps: int, spacing: str | None = None) -> Tensor:
        return self.process.times(steps, spacing)

    def _time(self, r: Time, /) -> Tensor:
        return self.process._time(r)

    def _scaled(self, t: Time, factor: Callable[[Time], Tensor]) -> Scaled:
        t = t if isinstance(t, Tensor) else torch.tensor(t, dtype=self.gamma.dtype, device=self.gamma.device)
        a = factor(t)
        return Scaled(self.gamma.to(a.device, a.dtype), a)

    def _product(self, map: Diagonal | Matrix, x: Tensor) -> Tensor:
        require(
            tuple(x.shape[max(x.ndim - len(self.shape), 0) :]) == self.shape,
            f"Γ is for events of shape {self.shape}; points of shape {tuple(x.shape)} do not end in it.",
        )
        v = x.to(wide_dtype(real_dtype(x.dtype)))
        return (map.to(v.device, v.dtype) @ v).to(real_dtype(x.dtype))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Anisotropic):
            return NotImplemented
        return self.process == other.process and self.same_frame(other)

    def __hash__(self) -> int:
        return hash((self.process, type(self.gamma), self.shape))


def _definite(gamma: Any) -> Diagonal | Matrix:
    """Γ as an operator, refused unless symmetric and positive definite."""
    if not isinstance(gamma, Covariance):
        g = torch.as_tensor(gamma)
        g = g.to(wide_dtype(real_dtype(g.dtype)))
        square = g.ndim == 2 and g.shape[0] == g.shape[1]
        gamma = Matrix(g, tuple(g.shape[:1])) if square else Diagonal(g, tuple(g.shape))
    if not isinstance(gamma, Diagonal | Matrix) or gamma.batch:
        raise InputError(f"Γ must be a tensor, or a Diagonal or Matrix covariance without batch, not {gamma!r}.")
    g = gamma.entries.detach().clone()
    require(g.isfinite().all() and g.numel(), "Γ must be finite and not empty.")
    if isinstance(gamma, Diagonal):
        require(g.min() > 0, f"The variances in Γ must be positive; the smallest is {g.min().item():g}.")
        return Diagonal(g, gamma.shape)
    u, gap = torch.finfo(g.dtype).eps, (g - g.mT).abs().max().item()
    hint = "If it holds the variances of square data, pass Diagonal(gamma, shape)."
    require(gap <= 64 * u * g.abs().max(), f"Γ is not symmetric: entries across the diagonal differ by {gap:g}. {hint}")
    g = (g + g.mT) / 2
    low, high = torch.linalg.eigvalsh(g)[[0, -1]].tolist()
    require(low > gamma.dim * u * high, f"Γ is not positive definite: eigenvalues from {low:g} to {high:g}. {hint}")
    return Matrix(g, gamma.shape)
