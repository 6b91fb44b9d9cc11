r"""The V-kernel of online SGD: fresh draws at every step, as real models are trained (docs/theory.md, §8.3).

Plain SGD on :math:`\tfrac12 E\,\omega|W\phi - y|^2` with learning rate :math:`\eta` and batches of B, from
:math:`W = 0`. In training time :math:`\tau = \eta \times` steps and the eigenbasis :math:`\Sigma q_k = \rho_k q_k` of
:math:`\Sigma = E\,\omega\phi\phi^T`, for small :math:`\eta`,

.. math:: \bar W_k(\tau) = \frac{1 - e^{-\rho_k\tau}}{\rho_k}\, E[\omega\,y\,\phi_k], \qquad
          \mathrm{Cov}_{kl}(\tau) = \frac{\eta}{B} \int_0^\tau e^{-(\rho_k+\rho_l)(\tau-u)}\, N_{kl}(u)\, du ,

.. math:: N_{kl}(u) = E[\omega^2 (N + b_u b_u^T)\,\phi_k\phi_l] - E[\omega b_u\phi_k]\,E[\omega b_u\phi_l]^T ,
          \qquad b_u = E[y|x] - \bar W(u)\phi .

The control parameter is :math:`\eta/B`, not F/P. N changes while the residual does: it is evaluated at nodes in u and
interpolated linearly, and the exponential is integrated exactly. ``stationary=True`` uses N at the end throughout,
which is accurate once the residual no longer changes. A ridge :math:`\gamma` (weight decay) is added to every
:math:`\rho`.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from vkernel.core.checks import check_positive, check_whole
from vkernel.core.progress import Progress
from vkernel.core.progress import progress as show_progress
from vkernel.data.empirical import Empirical
from vkernel.kernels.linear import Gradients, LinearField, check_linear
from vkernel.process import Process
from vkernel.train.models.linear import Linear as Model
from vkernel.train.objectives import VARIES, Objective, Quantile, Training

STEP = 0.2  # eta * rho above which the step is not small


class SGD(LinearField):
    """The covariance that ``steps`` of SGD with rate ``lr`` and batches of ``batch`` give a linear ``model``.

    Expectations are over ``quadrature`` draws; ``nodes`` is the number of times at which N is evaluated.
    """

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
        progress: Progress = False,
    ) -> None:
        self.lr, self.batch, self.steps = (
            check_positive(lr, "lr"),
            check_whole(batch, "batch"),
            check_whole(steps, "steps"),
        )
        check_whole(nodes, "nodes, the times at which the noise is evaluated,", 2)
        training = Training(data, process, objective, None, VARIES, seed, times)
        gradients = Gradients(check_linear(model, training), training, quadrature)
        rho, Q = torch.linalg.eigh(gradients.gram)
        rho, pull, self.tau = rho.clamp_min(0) + model.ridge, Q.mT @ gradients.cross, lr * steps
        rates = (rho[:, None] + rho)[:, None, :, None]

        def mean(u: float) -> Tensor:  # E[W] at time u, (F, o)
            return Q @ (_relaxed(rho, u)[:, None] * pull)

        def noise(u: float) -> Tensor:  # N(u) in the eigenbasis, (F, o, F, o)
            target, misfit = gradients.covariance(mean(u))
            N = (target + misfit).reshape(*pull.shape, *pull.shape)
            return torch.einsum("fk,fagb,gl->kalb", Q, N, Q)

        with show_progress(nodes - 1, progress) as report:
            if stationary:
                cov = noise(self.tau) * _relaxed(rates, self.tau)
            else:
                u = (
                    self.tau * torch.linspace(0, 1, nodes, dtype=torch.float64).square()
                )  # the residual moves fast at first
                before, cov = noise(0.0), torch.zeros((*pull.shape, *pull.shape), dtype=torch.float64).to(pull)
                for left, right in pairwise(u.tolist()):
                    h, after = right - left, noise(right)
                    whole, tilted = _relaxed(rates, h), _tilted(rates, h)  # ∫ e^{-r(h-v)} dv and ∫ e^{-r(h-v)} v/h dv
                    cov = cov * (-rates * h).exp() + before * (whole - tilted) + after * tilted
                    before = after
                    report("training time")
        weights = torch.einsum("fk,kalb,gl->fagb", Q, cov, Q).reshape(pull.numel(), pull.numel())
        super().__init__(model, process, lr / batch * weights, mean(self.tau))
        self.largest = lr * float(rho.max())
        why = f"lr × largest eigenvalue = {self.largest:.2g}; the closed form is for small steps, up to {STEP}"
        self._assess(self.largest <= STEP, why, "Lower the learning rate.")


def _relaxed(rate: Tensor, h: float) -> Tensor:
    """Return (1 - e^{-rate h})/rate, which is h at rate 0."""
    z = rate * h
    return h * torch.where(z > 1e-8, -torch.expm1(-z) / z.clamp_min(1e-300), 1 - z / 2)


def _tilted(rate: Tensor, h: float) -> Tensor:
    """Return (1/h) ∫_0^h v e^{-rate (h - v)} dv = (1 - (1 - e^{-z})/z)/rate with z = rate h; h/2 at rate 0."""
    z = rate * h
    near = h * (0.5 - z / 6 + z.square() / 24)
    return torch.where(z > 1e-3, h * (1 + torch.expm1(-z) / z.clamp_min(1e-300)) / z.clamp_min(1e-300), near)
