r"""Samplers with noise: reverse SDE, ancestral steps, naive estimator, effective SDE (docs/theory.md, §4.2–4.4).

With :math:`\Delta > 0` the length of a step down in t, each is a Markov chain, Euler–Maruyama's at the pre-step point
but for ancestral steps:

* reverse SDE, for reference: :math:`x' = x + \Delta(\beta x + 2 D s) + \sqrt{2 D \Delta}\, z`;
* naive estimator: the PF-ODE step with :math:`\hat s = s + \sqrt{\kappa/\Delta}\,(\tilde s(x_0) - s)`, where
  :math:`x_0` is drawn from the posterior afresh at every step;
* ancestral sampling: :math:`x' = \alpha' m + \sigma' [c\,(x - \alpha m)/\sigma + \sqrt{1 - c^2}\, z]` with
  :math:`c = (\sigma'/\alpha')/(\sigma/\alpha)`: the law of :math:`x'` given x and :math:`x_0 = m` under the forward
  process (Ho et al. 2020, with their smaller variance);
* effective SDE: :math:`x' = x + \Delta(\beta x + D s_{avg}) + \xi`, where :math:`\xi` has the covariance V. A *white* V
  means fresh Gaussian noise of covariance :math:`\Delta D\,\mathrm{Cov}\,D`, in Itô's sense. A *quenched* V means one
  random field per trained model, drawn once: the chain is then an ODE, the PF-ODE of :math:`s_{avg} + \delta\hat s`.

Noise is drawn for all of ``x_T`` at every step. ``options`` are :class:`~vkernel.sample.loop.Options`, and results are
like ``x_T``, or a :class:`~vkernel.sample.loop.Solution` with ``save``."""

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Unpack

from torch import Tensor

from vkernel.core import rng
from vkernel.core.checks import check_choice, check_number, check_type, check_whole
from vkernel.core.covariance import Covariance
from vkernel.core.errors import require
from vkernel.core.rng import Generator
from vkernel.process import Process
from vkernel.sample.loop import Level, Options, Problem, Solution, sampler
from vkernel.sample.ode import METHODS, pf_ode
from vkernel.score.base import Score, Time, check_like, check_score
from vkernel.score.empirical import EmpiricalScore

Field = Callable[[Tensor, Time], Tensor]


class VKernel(ABC):
    """What the effective dynamics needs of a V-kernel; the kernels are in :mod:`vkernel.kernels`.

    >>> import torch, vkernel as vk
    >>> data, process = vk.data.toy("triple"), vk.VP()
    >>> score = vk.EmpiricalScore(data, process)
    >>> isinstance(vk.kernels.Naive(score, kappa=0.1), vk.sample.VKernel)
    True
    """

    process: Process
    white: bool = False

    @property
    @abstractmethod
    def mean(self) -> Score:
        """The mean score that belongs to the kernel."""

    @abstractmethod
    def cov(self, x: Tensor, t: Time, x2: Tensor | None = None, t2: Time | None = None) -> Covariance:
        r"""Return :math:`\mathrm{Cov}_\theta[\hat s(x,t), \hat s(x',t')]`, paired over the broadcast batch."""

    @abstractmethod
    def draw(self, members: int, generator: Generator = None) -> Field:
        """Draw one field for each member: a function of ``x (members, *batch, *shape)`` and t that is like x."""

    def factors(self, x: Tensor, t: Time) -> Tensor | None:
        """Return factors of the covariance, ``(F, *batch, *shape)``, or ``None`` if it is not of finite rank."""
        return None

    def mean_and_noise(self, x: Tensor, t: Time, generator: Generator = None) -> tuple[Tensor, Tensor]:
        """Return the mean score and a Gaussian draw with covariance ``cov(x, t)``, both like x."""
        return self.mean(x, t), gaussian_noise(self, x, t, generator)


@sampler
def reverse_sde(score: Score, x_T: Tensor, **options: Unpack[Options]) -> Tensor | Solution:
    """Sample the reverse SDE of ``score`` from ``x_T``.

    >>> import torch, vkernel as vk
    >>> data, process = vk.data.toy("triple"), vk.VP()
    >>> score = vk.EmpiricalScore(data, process)
    >>> x_T = process.prior((5, 1), generator=0)
    >>> vk.sample.reverse_sde(score, x_T, steps=20, generator=0).shape
    torch.Size([5, 1])
    """
    problem = Problem(score, x_T, **options)

    def step(x: Tensor, here: Level, there: Level) -> Tensor:
        dt, z = here.t - there.t, problem.noise(x)
        return x + dt * (here.beta * x + 2 * here.D * problem.s(x, here)) + math.sqrt(2 * here.D * dt) * z

    return problem.solve(step)


@sampler
def ancestral(
    score: Score, x_T: Tensor, *, noise: Callable[[int], Tensor] | None = None, **options: Unpack[Options]
) -> Tensor | Solution:
    """Sample ``score`` by ancestral steps from ``x_T``.

    ``noise(k)`` returns the standard normals of step k = 0, 1, …, like ``x_T``; by default ``generator`` draws them.

    >>> import torch, vkernel as vk
    >>> data, process = vk.data.toy("triple"), vk.VP()
    >>> score = vk.EmpiricalScore(data, process)
    >>> x_T = process.prior((5, 1), generator=0)
    >>> vk.sample.ancestral(score, x_T, steps=20, generator=0).shape
    torch.Size([5, 1])
    """
    problem, count = Problem(score, x_T, **options), itertools.count()

    def step(x: Tensor, here: Level, there: Level) -> Tensor:
        m = problem.m(x, here)
        c = there.sigma * here.alpha / (there.alpha * here.sigma)
        z = problem.noise(x) if noise is None else noise(next(count)).to(x)
        mean = there.alpha * m + (c * there.sigma / here.sigma) * (x - here.alpha * m)
        return mean + there.sigma * math.sqrt((1 - c) * (1 + c)) * z

    return problem.solve(step)


@sampler
def naive(score: EmpiricalScore, x_T: Tensor, *, kappa: float, **options: Unpack[Options]) -> Tensor | Solution:
    """Sample with the naive score estimator of strength ``kappa`` (unit of t): x0 is drawn afresh at every step.
    ``kappa = 0`` is the PF-ODE by Euler's method; at a step of length ``kappa`` the estimate is the raw proxy score.

    >>> import torch, vkernel as vk
    >>> data, process = vk.data.toy("triple"), vk.VP()
    >>> score = vk.EmpiricalScore(data, process)
    >>> x_T = process.prior((5, 1), generator=0)
    >>> vk.sample.naive(score, x_T, kappa=0.1, steps=20, generator=0).shape
    torch.Size([5, 1])
    """
    require(isinstance(score, EmpiricalScore), "The naive estimator draws training points: it needs an EmpiricalScore.")
    check_number(kappa, "kappa, in the unit of t,", least=0)
    problem = Problem(score, x_T, **options)
    process = problem.process

    def step(x: Tensor, here: Level, there: Level) -> Tensor:
        dt = here.t - there.t
        posterior = score.posterior(process.unwhiten(x), here.t)
        target = m = process.whiten(posterior.mean)
        if kappa > 0:
            target = m + math.sqrt(kappa / dt) * (process.whiten(posterior.sample(1, problem.generator)[0]) - m)
        rate, gain = here.D / here.sigma**2 - here.beta, here.alpha * here.D / here.sigma**2
        return x - dt * (rate * x - gain * target)

    return problem.solve(step)


@sampler
def effective_sde(
    V: VKernel,
    x_T: Tensor,
    mean: Score | None = None,
    members: int | None = None,
    *,
    method: str = "exponential",
    **options: Unpack[Options],
) -> Tensor | Solution:
    """Sample random models with mean score ``mean`` (default ``V.mean``) and covariance ``V``.

    ``members=None`` draws one model for each sample, and the result is like ``x_T``; ``members=M`` draws M models that
    all start from ``x_T``, and the result is ``(M, *x_T.shape)``. For a white V every sample has independent noise, so
    M members are M repetitions. ``method`` is the ODE method for a quenched V, for which ``save`` is that of
    :func:`~vkernel.sample.pf_ode`; a white V is integrated by Euler–Maruyama, in Itô's sense.

    >>> import torch, vkernel as vk
    >>> data, process = vk.data.toy("triple"), vk.VP()
    >>> score = vk.EmpiricalScore(data, process)
    >>> x_T = process.prior((5, 1), generator=0)
    >>> def basis(x, t):
    ...     return torch.stack([torch.ones_like(x), x])
    >>> V = vk.kernels.FiniteRank(basis, 0.01 * torch.eye(2), process, mean=score)
    >>> vk.sample.effective_sde(V, x_T, members=3, steps=20, generator=0).shape
    torch.Size([3, 5, 1])
    """
    own, mean = mean is None, check_kernel(V, mean)
    check_choice(method, "method", METHODS)
    if members is not None:
        check_whole(members, "members")
    start = check_type(x_T, "x_T", Tensor) if members is None else x_T.expand(members, *x_T.shape).contiguous()
    process, generator = mean.process, rng.as_generator(options.get("generator"))
    options["generator"] = generator
    if not V.white:
        require(process.base is process, "Quenched kernels are for isotropic processes; whiten the data first.")
        batch, shape = mean.split(x_T)
        field = V.draw(math.prod(batch) if members is None else members, generator)

        def alone(x: Tensor, t: Time) -> Tensor:
            return field(x.reshape(-1, 1, *shape), t).reshape(x.shape)

        return pf_ode(Learned(mean, alone if members is None else field), start, method=method, **options)
    problem = Problem(mean, start, **options)

    def step(x: Tensor, here: Level, there: Level) -> Tensor:
        dt, data = here.t - there.t, process.unwhiten(x)
        if own:  # score and noise share one evaluation
            s, noise = (process.unwhiten(a) for a in V.mean_and_noise(data, here.t, generator))
        else:
            s, noise = problem.s(x, here), process.unwhiten(gaussian_noise(V, data, here.t, generator))
        return x + dt * (here.beta * x + here.D * s) + math.sqrt(dt) * here.D * noise

    return problem.solve(step)


class Learned(Score):
    """Mean score plus a field: the scores of several trained models, each at its own ``x[m]``."""

    def __init__(self, mean: Score, field: Field) -> None:
        self.base, self.field, self.process, self.shape = mean, field, mean.process, mean.shape

    def __call__(self, x: Tensor, t: Time) -> Tensor:
        return self.base(x, t) + check_like(self.field(x, t), x, "field of V")


def check_kernel(V: VKernel, mean: Score | None) -> Score:
    """Return the mean score to use with ``V``; refuse what is not a V-kernel, or belongs to another process."""
    known = "vk.kernels.Naive or a subclass of vk.sample.VKernel"
    require(isinstance(V, VKernel), f"V must be a V-kernel, such as {known}, not {V!r}.")
    mean = check_score(V.mean if mean is None else mean, "The effective dynamics")
    processes = f"another process ({V.process!r}) than the mean score ({mean.process!r})"
    require(V.process == mean.process, f"The V-kernel belongs to {processes}.")
    return mean


def covariance(V: VKernel, x: Tensor, t: Time) -> Covariance:
    """Return ``V.cov(x, t)``; refuse what is not a covariance operator on ``x``."""
    cov = V.cov(x, t)
    good = isinstance(cov, Covariance) and cov.batch + cov.shape == tuple(x.shape)
    require(good, f"V.cov(x, t) must be a Covariance on shape {tuple(x.shape)}; got {cov!r}.")
    return cov


def gaussian_noise(V: VKernel, x: Tensor, t: Time, generator: Generator) -> Tensor:
    """Draw a Gaussian with covariance ``V.cov(x, t)``, like x."""
    noise = covariance(V, x, t).draw(generator)
    require(bool(noise.isfinite().all()), "V is not a covariance here: its draw is not finite.")
    return noise
