r"""The V-kernel of online SGD: fresh draws at every step, as real models are trained (docs/theory.md, §8.3).

Plain SGD on :math:`\tfrac12 E\,\omega|W\phi - y|^2` with learning rate :math:`\eta` and batches of B, from
:math:`W = 0`. In training time :math:`\tau = \eta \times` steps and the eigenbasis :math:`\Sigma q_k = \rho_k q_k` of
:math:`\Sigma = E\,\omega\phi\phi^T`, for small :math:`\eta`,

.. math:: \bar W_k(\tau) = \frac{1 - e^{-\rho_k\tau}}{\rho_k}\, E[\omega\,y\,\phi_k], \qquad
          \mathrm{Cov}_{kl}(\tau) = \frac{\eta}{B} \int_0^\tau e^{-(\rho_k+\rho_l)(\tau-u)}\, N_{kl}(u)\, du ,

.. math:: N_{kl}(u) = E[\omega^2 (N + b_u b_u^T)\,\phi_k\phi_l] - E[\omega b_u\phi_k]\,E[\omega b_u\phi_l]^T ,
          \qquad b_u = E[y|x] - \bar W(u)\phi .

The knob is :math:`\eta/B`, not F/P. N moves while the residual does: it is evaluated at nodes in u, taken linear in
between, and the exponential is integrated exactly. ``stationary=True`` takes N at the end throughout, which is right
once the residual stands still. A ridge :math:`\gamma` (weight decay) is added to every :math:`\rho`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vkernel.core.errors import require
from vkernel.data.empirical import Empirical
from vkernel.kernels.linear import CHUNK, LARGEST, LinearField, _Parts
from vkernel.process import Process
from vkernel.train.models.linear import Linear as Model
from vkernel.train.objectives import J0, VARIES, Objective, Quantile, Training, parse

__all__ = ["SGD"]

STEP = 0.2  # eta * rho at which the step is no longer small


class SGD(LinearField):
    """The covariance that ``steps`` of SGD with rate ``lr`` and batches of ``batch`` give a linear ``model``."""

    def __init__(
        self,
        model: Model,
        data: Empirical | Tensor,
        process: Process,
        *,
        lr: float,
        batch: int,
        steps: int,
        objective: str | Objective = "J1",
        stationary: bool = False,
        seed: int = 0,
        times: str | Quantile = "uniform",
        quadrature: int = 1 << 16,
        nodes: int = 24,
    ) -> None:
        require(isinstance(model, Model), f"This kernel belongs to a linear model, not {model!r}.")
        good = isinstance(lr, int | float) and 0 < lr < float("inf")
        require(good, f"lr must be a positive number; got {lr!r}.")
        for name, count in (("batch", batch), ("steps", steps), ("quadrature", quadrature)):
            require(isinstance(count, int) and count >= 1, f"{name} must be a whole number ≥ 1; got {count!r}.")
        require(isinstance(nodes, int) and nodes >= 2, f"The moving residual needs two nodes or more; got {nodes!r}.")
        data = data if isinstance(data, Empirical) else Empirical(data)
        size = model.features.count * data.d
        require(size <= LARGEST, f"Cov[W] would be {size} × {size}; this kernel takes up to F d = {LARGEST}.")
        training = Training(data, process, J0(), None, VARIES, seed, times)
        flow = _Flow(_Parts(model, training, parse(objective)), quadrature)
        self.lr, self.batch, self.steps, self.tau = lr, batch, steps, lr * steps
        u = self.tau * torch.linspace(0, 1, nodes, dtype=torch.float64).square()  # the residual moves fast at first
        cov = flow.stationary(self.tau) if stationary else flow.moving(u)
        super().__init__(model, process, lr / batch * cov, flow.mean(self.tau))
        self.largest = lr * float(flow.rho.max())
        words = f"lr × largest eigenvalue = {self.largest:.2g}; the closed form is for small steps, up to {STEP}"
        small = self.largest <= STEP
        self._judge(small, words if small else f"{words}. Lower the learning rate.")


class _Flow:
    """The mean and the noise of gradient flow in the eigenbasis of Σ."""

    def __init__(self, parts: _Parts, count: int) -> None:
        self.parts, self.F, self.o = parts, parts.F, parts.o
        step = min(count, max(1, CHUNK // self.F))
        self.blocks = [(start, step) for start in range(0, count - count % step, step)]
        self.total = len(self.blocks) * step
        gram = torch.zeros(())
        cross = torch.zeros(())
        for start, size in self.blocks:
            A, Y = parts.model.system(parts._batch(start, size), parts.process)
            gram, cross = gram + A[0].mT @ A[0] / len(self.blocks), cross + A[0].mT @ Y[0] / len(self.blocks)
        rho, self.Q = torch.linalg.eigh(gram)
        self.rho = rho.clamp_min(0) + parts.model.ridge
        self.pull = self.Q.mT @ cross  # E[ω y φ_k]

    def mean(self, u: float) -> Tensor:
        """E[W] at time u, ``(F, o)``."""
        return self.Q @ (_relaxed(self.rho, u)[:, None] * self.pull)

    def noise(self, W: Tensor) -> Tensor:
        """N(u) for the mean weights W, in the eigenbasis, ``(F, o, F, o)``."""
        parts, total, mean = self.parts, torch.zeros(()), torch.zeros(())
        for start, size in self.blocks:
            batch = parts._batch(start, size)
            phi = parts.model.features(batch.x, batch.t) @ self.Q
            omega = parts.model.parametrisation.omega(batch.t, parts.process)[..., None]
            wanted = parts.model.parametrisation.training_target(batch.m, batch.x, batch.t, parts.process)
            b = wanted - phi @ (self.Q.mT @ W)
            square = b[..., :, None] * b[..., None, :]
            if not isinstance(parts.goal, J0):
                square = square + parts.noise(batch)
            total = total + parts.outer(phi.mT, omega[..., None].square() * square / self.total)
            mean = mean + (phi.mT @ (omega * b))[0] / self.total
        flat = mean.reshape(-1)
        return (total - flat[:, None] * flat).reshape(self.F, self.o, self.F, self.o)

    def rates(self) -> Tensor:
        return (self.rho[:, None] + self.rho)[:, None, :, None]

    def stationary(self, tau: float) -> Tensor:
        return self._back(self.noise(self.mean(tau)) * _relaxed(self.rates(), tau))

    def moving(self, u: Tensor) -> Tensor:
        """The integral with N linear between nodes: on a piece of length h, weights of its two ends."""
        rates, cov = self.rates(), torch.zeros((self.F, self.o, self.F, self.o), dtype=torch.float64)
        before = self.noise(self.mean(float(u[0])))
        for left, right in zip(u[:-1].tolist(), u[1:].tolist(), strict=True):
            h = right - left
            after = self.noise(self.mean(right))
            whole = _relaxed(rates, h)  # ∫ e^{-r(h-v)} dv
            tilted = _tilted(rates, h)  # ∫ e^{-r(h-v)} v/h dv
            cov = cov.to(after) * (-rates * h).exp() + before * (whole - tilted) + after * tilted
            before = after
        return self._back(cov)

    def _back(self, cov: Tensor) -> Tensor:
        """From the eigenbasis to features."""
        return torch.einsum("fk,kalb,gl->fagb", self.Q, cov, self.Q).reshape(self.F * self.o, -1)


def _relaxed(rate: Tensor, h: float) -> Tensor:
    """(1 - e^{-rate h})/rate, which is h at rate 0."""
    z = rate * h
    return h * torch.where(z > 1e-8, -torch.expm1(-z) / z.clamp_min(1e-300), 1 - z / 2)


def _tilted(rate: Tensor, h: float) -> Tensor:
    """(1/h) ∫_0^h v e^{-rate (h - v)} dv = (1 - (1 - e^{-z})/z)/rate with z = rate h; h/2 at rate 0."""
    z = rate * h
    near = h * (0.5 - z / 6 + z.square() / 24)
    return torch.where(z > 1e-3, h * (1 + torch.expm1(-z) / z.clamp_min(1e-300)) / z.clamp_min(1e-300), near)
