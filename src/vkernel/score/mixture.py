r"""Populations whose score is known exactly: mixtures of isotropic Gaussians (theory, §2.9).

With components of mean :math:`\mu_k`, weight
:math:`w_k` and variance :math:`v_k`, and :math:`\tau_k = \alpha^2 v_k + \sigma^2`,

.. math:: p(x|t) = \sum_k w_k\, N(x;\, \alpha \mu_k, \tau_k), \qquad
          s = \sum_k r_k \frac{\alpha \mu_k - x}{\tau_k}, \qquad
          E[x_0|x,t] = \sum_k r_k \Big(\mu_k + \frac{\alpha v_k}{\tau_k} (x - \alpha \mu_k)\Big).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from vkernel.core import rng
from vkernel.core.covariance import Covariance, flat, over_event
from vkernel.core.errors import require
from vkernel.data import Empirical
from vkernel.process import Process
from vkernel.score.base import Score, Time


class GaussianMixture:
    """A population of Gaussian components, isotropic, with exact score, density and posterior mean at every time.

    ``means`` is ``(k, *shape)`` (a vector of k numbers: shape ``(1,)``), ``weights`` ``(k,)`` or ``None`` for equal
    ones, ``variance`` one number or ``(k,)``. ``process`` is isotropic; ``x`` is
    ``(*batch, *shape)`` and ``t`` broadcasts to the batch. Results have x's type and can be differentiated.
    """

    def __init__(self, means: Any, weights: Any = None, variance: Any = 1.0) -> None:
        centers = Empirical(means, weights)
        self.shape, self.weights, self.means = centers.shape, centers.weights, centers.rows(0, len(centers)).double()
        given = torch.as_tensor(variance, dtype=torch.float64, device=self.means.device)
        require(
            given.ndim == 0 or given.shape == self.weights.shape,
            f"variance must be one number or one for each of {len(centers)} components; got {tuple(given.shape)}.",
        )
        require(bool((given.isfinite() & (given >= 0)).all()), "variance must be finite and not negative.")
        self.variance = given.expand(len(centers)).clone()

    def __repr__(self) -> str:
        return f"GaussianMixture(components={len(self.means)}, shape={self.shape})"

    def sample(self, n: int, generator: torch.Generator | int | None = None) -> Tensor:
        """``n`` independent draws, ``(n, *shape)``, in the default float type."""
        g = rng.as_generator(generator)
        device = self.means.device
        which = torch.multinomial(self.weights.to(g.device), n, replacement=True, generator=g).to(device)
        noise = rng.randn((n, self.means.shape[1]), g, device, torch.float64)
        draws = self.means[which] + self.variance[which].sqrt().unsqueeze(-1) * noise
        return draws.reshape(n, *self.shape).to(torch.get_default_dtype())

    def logp(self, x: Tensor, t: Time, process: Process) -> Tensor:
        """log p(x|t), ``(*batch,)``."""
        return self._terms(x, t, process)[0].logsumexp(-1).to(_result_dtype(x))

    def posterior_mean(self, x: Tensor, t: Time, process: Process) -> Tensor:
        """E[x0|x,t], like x."""
        logits, flat_x, alpha, tau, means = self._terms(x, t, process)
        r = logits.softmax(-1)
        gain = alpha * self.variance.to(tau) / tau
        m = (r * (1 - gain * alpha)) @ means + (r * gain).sum(-1, keepdim=True) * flat_x
        return m.reshape(x.shape).to(_result_dtype(x))

    def score(self, process: Process) -> MixtureScore:
        """Return the exact score of the population under ``process``."""
        return MixtureScore(self, process)

    def _terms(self, x: Tensor, t: Time, process: Process) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """log w_k N(x; alpha mu_k, tau_k); flat x; alpha ``(*batch, 1)``; tau ``(*batch, k)``; means."""
        ndim = x.ndim - len(self.shape)
        require(
            ndim >= 0 and tuple(x.shape[max(ndim, 0) :]) == self.shape,
            f"x must end in the shape {self.shape} of the mixture; got {tuple(x.shape)}.",
        )
        dtype = torch.promote_types(_result_dtype(x), torch.float32)
        flat_x, batch = flat(x.to(dtype), self.shape), x.shape[:ndim]
        t = torch.as_tensor(t, dtype=dtype, device=x.device)
        S = process.S(t)
        require(not isinstance(S, Covariance), "GaussianMixture needs an isotropic process; S(t) is a matrix here.")
        alpha, S = (torch.as_tensor(a, dtype=dtype, device=x.device).expand(batch) for a in (process.alpha(t), S))
        means, variance, log_w = (a.to(x.device, dtype) for a in (self.means, self.variance, self.weights.log()))
        alpha = over_event(alpha, (1,))
        tau = alpha**2 * variance + over_event(S, (1,))
        square = torch.stack([(flat_x - alpha * mu).square().sum(-1) for mu in means], dim=-1)
        logits = log_w - 0.5 * (square / tau + means.shape[1] * torch.log(2 * math.pi * tau))
        return logits, flat_x, alpha, tau, means


class MixtureScore(Score):
    """The exact score of a :class:`GaussianMixture` under a forward process."""

    def __init__(self, mixture: GaussianMixture, process: Process) -> None:
        self.mixture, self.process, self.shape = mixture, process, mixture.shape

    def __call__(self, x: Tensor, t: Time) -> Tensor:
        logits, flat_x, alpha, tau, means = self.mixture._terms(x, t, self.process)
        pull = logits.softmax(-1) / tau
        s = (pull * alpha) @ means - pull.sum(-1, keepdim=True) * flat_x
        return s.reshape(x.shape).to(_result_dtype(x))

    def denoise(self, x: Tensor, t: Time) -> Tensor:
        """Return E[x0|x,t], like x."""
        return self.mixture.posterior_mean(x, t, self.process)

    def __repr__(self) -> str:
        return f"MixtureScore({self.mixture!r}, {self.process!r})"


def _result_dtype(x: Tensor) -> torch.dtype:
    return x.dtype if x.is_floating_point() else torch.get_default_dtype()
