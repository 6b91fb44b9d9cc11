r"""Populations whose score is known exactly: mixtures of isotropic Gaussians (theory, §2.9).

With components of mean :math:`\mu_k`, weight
:math:`w_k` and variance :math:`v_k`, and :math:`\tau_k = \alpha^2 v_k + \sigma^2`,

.. math:: p(x|t) = \sum_k w_k\, N(x;\, \alpha \mu_k, \tau_k), \qquad
          s = \sum_k r_k \frac{\alpha \mu_k - x}{\tau_k}, \qquad
          E[x_0|x,t] = \sum_k r_k \Big(\mu_k + \frac{\alpha v_k}{\tau_k} (x - \alpha \mu_k)\Big).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vkernel.core import rng
from vkernel.core.checks import as_tensor
from vkernel.core.covariance import Covariance, flat
from vkernel.core.errors import require
from vkernel.core.rng import Generator
from vkernel.data.empirical import Array, Empirical
from vkernel.process import Process
from vkernel.process.base import real_dtype, wide_dtype
from vkernel.score.base import Score, Time


class GaussianMixture:
    """A population of isotropic Gaussian components, with exact score and density at every time.
    ``means`` is ``(k, *shape)`` (a vector of k numbers: shape ``(1,)``), ``weights`` ``(k,)`` or ``None`` for equal
    ones, ``variance`` one number or ``(k,)``.

    >>> import torch, vkernel as vk
    >>> population = vk.GaussianMixture([[-1.0, 0.0], [1.0, 0.0]], variance=0.05)
    >>> population.sample(5, generator=0).shape
    torch.Size([5, 2])
    >>> population.score(vk.VP())(torch.zeros(3, 2), 0.1).shape
    torch.Size([3, 2])
    """

    def __init__(self, means: Array, weights: Array | None = None, variance: float | Array = 1.0) -> None:
        centers = Empirical(means, weights)
        k, self.shape, self.weights = len(centers), centers.shape, centers.weights
        self.means = centers.rows(0, k).double()
        given = as_tensor(variance, "variance").to(self.means.device, torch.float64)
        good = given.ndim == 0 or given.shape == self.weights.shape
        require(good, f"variance must be one number or one for each of {k} components; got {tuple(given.shape)}.")
        require(bool((given.isfinite() & (given >= 0)).all()), "variance must be finite and not negative.")
        self.variance = given.expand(k).clone()

    def __repr__(self) -> str:
        return f"GaussianMixture(components={len(self.means)}, shape={self.shape})"

    def sample(self, n: int, generator: Generator = None) -> Tensor:
        """Return ``n`` independent draws, ``(n, *shape)``, in the default float type."""
        g, device = rng.as_generator(generator), self.means.device
        which = torch.multinomial(self.weights.to(g.device), n, replacement=True, generator=g).to(device)
        noise = rng.randn((n, self.means.shape[1]), g, device, torch.float64)
        draws = self.means[which] + self.variance[which].sqrt().unsqueeze(-1) * noise
        return draws.reshape(n, *self.shape).to(torch.get_default_dtype())

    def logp(self, x: Tensor, t: Time, process: Process) -> Tensor:
        """Return log p(x|t), ``(*batch,)``."""
        return self.score(process).terms(x, t)[0].logsumexp(-1).to(real_dtype(x.dtype))

    def score(self, process: Process) -> MixtureScore:
        """Return the exact score of the population under ``process``, which must be isotropic."""
        return MixtureScore(self, process)


class MixtureScore(Score):
    """The exact score of a :class:`GaussianMixture` under a forward process.

    >>> import torch, vkernel as vk
    >>> score = vk.GaussianMixture([-1.0, 1.0], variance=0.1).score(vk.VP())
    >>> score(torch.zeros(3, 1), 0.5).shape
    torch.Size([3, 1])
    """

    def __init__(self, mixture: GaussianMixture, process: Process) -> None:
        self.mixture, self.process, self.shape = mixture, process, mixture.shape

    def __call__(self, x: Tensor, t: Time) -> Tensor:
        logits, rows, alpha, tau, means, _ = self.terms(x, t)
        pull = logits.softmax(-1) / tau
        s = (pull * alpha) @ means - pull.sum(-1, keepdim=True) * rows
        return s.reshape(x.shape).to(real_dtype(x.dtype))

    def denoise(self, x: Tensor, t: Time) -> Tensor:
        """Return E[x0|x,t], like x."""
        logits, rows, alpha, tau, means, variance = self.terms(x, t)
        r, gain = logits.softmax(-1), alpha * variance / tau
        m = (r * (1 - gain * alpha)) @ means + (r * gain).sum(-1, keepdim=True) * rows
        return m.reshape(x.shape).to(real_dtype(x.dtype))

    def terms(self, x: Tensor, t: Time) -> tuple[Tensor, ...]:
        """Return log w_k N(x; alpha mu_k, tau_k), flat x, alpha ``(*batch, 1)``, tau ``(*batch, k)``, mu and v."""
        (batch, shape), mixture = self.split(x), self.mixture
        dtype = wide_dtype(real_dtype(x.dtype))
        rows, t = flat(x.to(dtype), shape), self.check(x, t)[1].to(x.device, dtype)
        require(bool((t >= 0).all() and t.isfinite().all()), "t must be finite and not negative.")
        alpha, S = self.process.alpha(t), self.process.S(t)
        require(not isinstance(S, Covariance), "GaussianMixture needs an isotropic process; S(t) is a matrix here.")
        alpha, S = (a.to(x.device, dtype).expand(batch).unsqueeze(-1) for a in (alpha, S))
        means, v, weights = (a.to(x.device, dtype) for a in (mixture.means, mixture.variance, mixture.weights))
        tau = alpha**2 * v + S
        square = torch.stack([(rows - alpha * mu).square().sum(-1) for mu in means], dim=-1)
        logits = weights.log() - 0.5 * (square / tau + means.shape[1] * torch.log(2 * math.pi * tau))
        return logits, rows, alpha, tau, means, v

    def __repr__(self) -> str:
        return f"MixtureScore({self.mixture!r}, {self.process!r})"
