r"""The noise of the training target in the units of the network's output.

Whether a target is "noisy" depends on its units. The noise fraction :math:`\rho(t)` (:func:`vkernel.noise_fraction`)
compares noise and signal of a score, or of a noise prediction. A network that predicts y has the target :math:`y = k\,
\tilde m + q\,x` (the table of :mod:`vkernel.score.conversions`), of which :math:`\tilde m` alone is noisy given x. With
:math:`\mathrm{mmse} = E\,\mathrm{tr\,Cov}(x_0|x,t) = \rho\, d\, \sigma^2/\alpha^2`, targets of :class:`vkernel.JC`
and :math:`x = \alpha x_0 + \sigma\epsilon`,

.. math:: \text{noise} = E\,\mathrm{tr\,Cov}[y|x] = c^2 k^2\,\mathrm{mmse}, \qquad
          \text{signal} = E\,|E[y|x] - E[y]|^2
              = (k + \alpha q)^2\,\mathrm{tr\,Cov}(x_0) + \sigma^2 q^2 d - k^2\,\mathrm{mmse},

and the share is noise / (noise + signal). For a noise prediction or a score it is :math:`\rho` at c = 1; for a denoiser
mmse / tr Cov(x0). For EDM's raw output :math:`k = 1/c_{out}`, and noise + signal is about d where the data have the
standard deviation :math:`\sigma_d`: the share at c = 1 is about :math:`\mathrm{mmse}/(d\, c_{out}^2)`."""

import torch
from torch import Tensor

from vkernel.core.checks import check_choice, check_number
from vkernel.core.estimate import Estimate
from vkernel.core.rng import Generator
from vkernel.data.empirical import Empirical
from vkernel.process import Process
from vkernel.score.base import Time, wide_time
from vkernel.score.conversions import PREDICTIONS, convert
from vkernel.score.empirical import EmpiricalScore, noise_fraction
from vkernel.train.models.base import Model


def network_noise_fraction(
    model: Model | str,
    data: Empirical | EmpiricalScore,
    process: Process,
    t: Time,
    c: float = 1.0,
    queries: int = 4096,
    generator: Generator = None,
) -> Estimate[float] | Estimate[Tensor]:
    """Estimate the share of the variance of a network's training target that is noise, in the network's own units.
    ``model`` is a model or its target, such as "edm"; ``c`` is that of ``vk.JC``, 1 for "J1". The other arguments are
    those of :func:`vkernel.noise_fraction`, from which the estimate and its error follow.

    >>> import vkernel as vk
    >>> data, process = vk.data.toy("triple"), vk.EDM()
    >>> share = vk.network_noise_fraction("edm", data, process, 2.0)
    >>> round(share.value, 2), round(vk.noise_fraction(data, process, 2.0).value, 2)
    (0.94, 0.14)
    """
    target = model.target if isinstance(model, Model) else check_choice(model, "The target of a network", PREDICTIONS)
    c = check_number(c, "c, the factor of the noise,")
    score = data if isinstance(data, EmpiricalScore) else EmpiricalScore(data, process)
    rho = noise_fraction(score, process, t, queries, generator)
    when = process.check(wide_time(t, torch.device("cpu")))
    one, (alpha, sigma), d = torch.ones_like(when), (process.alpha(when), process.sigma(when)), score.data.d
    k, q = (convert(m, "x0", target, x, when, process) for m, x in ((one, 0 * one), (0 * one, one)))
    variance = ((k + alpha * q) * score.data.spread).square() + d * (sigma * q).square()
    unit = d * (k * sigma / alpha).square()  # of the noise, at rho = 1 and c = 1
    return rho.mapped(lambda r: c**2 * unit * r / (variance + (c**2 - 1) * unit * r))
