r"""The base class of models, and the quantities that a model may predict (docs/theory.md, §6.2).

A model holds settings and no weights. :meth:`Model.fit` returns the weights of many members at once as a *state*:
named tensors whose first axis is the member. :meth:`Model.output` evaluates :math:`f(x, t)` for a state, and the score
is :math:`\hat s = a_t(x) + B_t f(x,t)`, by the table of :mod:`vkernel.score.base`. The training target of f is
the inverse of this map, applied to the proxy score of :math:`\tilde m` (:mod:`vkernel.train.objectives`). Its weight is
:math:`\omega_t = \lambda_t B_t^2`, so that models with equal :math:`\lambda_t` minimise the same loss. The weightings:

==========  ====================================  =================================================================
weight      :math:`\lambda_t`                     the loss is
==========  ====================================  =================================================================
sigma2      :math:`\sigma^2`                      the squared error of a noise prediction: the paper's, DDPM's
one         1                                     that of the score
x0          :math:`\sigma^4/\alpha^2`             that of a denoiser
v           :math:`\sigma^2 h^4/\alpha^2`         that of a v prediction, :math:`h^2 = \alpha^2 + \sigma^2`
edm         :math:`\sigma^4/(\alpha c_{out})^2`    that of EDM's raw network (Karras et al. 2022); :math:`c_{out}` below
likelihood  :math:`D`                             a bound on the likelihood for t uniform (Song et al. 2021)
==========  ====================================  =================================================================

For edm :math:`c_{out}^{-2} = \sigma_d^{-2} + (\alpha/\sigma)^2` with :math:`\sigma_d = .5`. An edm target has
:math:`B = \alpha c_{out}/\sigma^2`, hence :math:`\omega = 1` at every noise level of every process. With times from
("lognormal", -1.2, 1.2) the loss is then EDM's, in :math:`x/\alpha` and :math:`\sigma/\alpha`. These two are the
:data:`PRECONDITIONED` defaults of networks; where ``weight`` or ``times`` is ``None``, :meth:`Model.defaults` decides.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import ClassVar, Self

import torch
from torch import Tensor

from vkernel.core.covariance import fits
from vkernel.core.errors import InputError, require
from vkernel.process import Process
from vkernel.score.conversions import PREDICTIONS, convert
from vkernel.train.objectives import Objective, Times, Training

State = dict[str, Tensor]
Report = Callable[[float], None]
Weight = str | Callable[[Tensor], Tensor]
WEIGHTS = ("sigma2", "one", "x0", "v", "edm", "likelihood")
PRECONDITIONED: tuple[Weight, Times] = "edm", ("lognormal", -1.2, 1.2)  # of Karras et al. (2022)


@dataclass(frozen=True)
class Trained:
    """The result of a training: a state, states after fewer steps, and what was recorded of the steps, in JSON."""

    state: State
    snapshots: dict[int, State] = field(default_factory=dict)
    info: dict[str, object] = field(default_factory=dict)


class Model(ABC):
    """An architecture and the method that fits it; final kinds are dataclasses, whose fields are the settings.
    ``target`` is what f predicts ("edm" with sigma_data = .5); ``weight`` is the weighting λ, a function of t, or
    ``None`` for that of :meth:`defaults`.

    >>> import vkernel as vk
    >>> isinstance(vk.models.MLP(), vk.models.Model), vk.models.MLP().target
    (True, 'noise')
    """

    linear: ClassVar[bool] = False  # whether the output is linear in the state
    state_dtype = torch.float64  # in which the model is trained by default
    randomness: tuple[str, ...] = ("inputs", "targets")  # the sources on which the result depends, outermost first
    classes: int | None = None  # the number of labels of a class-conditional model
    label: int | None = None  # at which it is evaluated
    dropout: float = 0.0
    target: str
    weight: Weight | None

    def __post_init__(self) -> None:
        good = self.target in PREDICTIONS
        require(good, f"A model's target is one of {', '.join(PREDICTIONS)}; not {self.target!r}.")
        good = self.weight is None or callable(self.weight) or self.weight in WEIGHTS
        require(good, f"weight must be one of {', '.join(WEIGHTS)}, or a function λ(t); got {self.weight!r}.")

    @abstractmethod
    def fit(self, training: Training, members: Sequence[int], report: Report) -> State:
        """Return the states of ``members``; ``report`` receives shares of the work done, which add up to 1."""

    def train(
        self,
        training: Training,
        objectives: Sequence[Objective],
        members: Sequence[int],
        report: Report,
        snapshots: Sequence[int] = (),
        checkpoint: str | Path | None = None,
    ) -> list[Trained]:
        """Return ``members`` as trained with each objective on the same inputs, and after the steps ``snapshots``.
        A training that was killed continues from what it kept in the folder ``checkpoint``."""
        good = isinstance(snapshots, Sequence) and len(snapshots) == 0
        require(good, f"Snapshots are of networks: {self!r} is fitted at once, without steps; got {snapshots!r:.60}.")
        good = checkpoint is None
        require(good, f"Checkpoints are of networks: {self!r} is fitted at once, without steps; leave checkpoint out.")
        share = 1 / len(objectives)
        return [
            Trained(self.fit(training.with_objective(goal), members, lambda part: report(share * part)))
            for goal in objectives
        ]

    @abstractmethod
    def output(self, state: State, x: Tensor, t: Tensor, process: Process) -> Tensor:
        """Return f, ``(M, N, *shape)``, for ``x (M or 1, N, *shape)`` and ``t (M or 1, N or 1)``."""

    def defaults(self, process: Process) -> tuple[Weight, Times]:
        """Return the weighting and the density of training times that are used where none is given."""
        return "sigma2", "uniform"

    def given(self, label: int) -> Self:
        """Return the class-conditional model that is evaluated at one label."""
        raise InputError("Only class-conditional models take a label: vk.models.UNet(…, classes=K).")

    def check_labels(self, labels: Tensor | None) -> None:
        """Refuse a training set whose labels do not fit the classes of the model."""
        if self.classes is None:
            require(labels is None, "labels need a class-conditional model, vk.models.UNet(…, classes=K).")
        elif labels is None:
            raise InputError(f"A model with classes={self.classes} is trained with labels=(n,), one for each point.")
        else:
            good, most = int(labels.max()) < self.classes, int(labels.max())
            require(good, f"There is no label {most} in a model with classes={self.classes}: 0 to {self.classes - 1}.")

    def score(self, state: State, x: Tensor, t: Tensor, process: Process, affine: bool = True) -> Tensor:
        """Return the learned score a + B f, or B f without ``affine``; shapes as in :meth:`output`."""
        return self.to_score(self.output(state, x, t, process), x if affine else torch.zeros_like(x), t, process)

    def to_score(self, f: Tensor, x: Tensor, t: Tensor, process: Process) -> Tensor:
        """Return a + B f; ``t`` has the shape of the batch, or axes of length 1."""
        return convert(f, self.target, "score", x, t, process)

    def training_target(self, m: Tensor, x: Tensor, t: Tensor, process: Process) -> Tensor:
        """Return the training target of f for draws ``x`` whose denoised target is ``m``."""
        return convert(m, "x0", self.target, x, t, process)

    def slope(self, t: Tensor, process: Process) -> Tensor:
        """Return B, like t."""
        return self.to_score(torch.ones_like(t), torch.zeros_like(t), t, process)

    def target_slope(self, t: Tensor, process: Process) -> Tensor:
        """Return the derivative of the training target with respect to ``m``, like t."""
        return self.training_target(torch.ones_like(t), torch.zeros_like(t), t, process)

    def omega(self, t: Tensor, process: Process) -> Tensor:
        """Return ω, the weight of the squared error of f, like t."""
        one, weight = torch.ones_like(t), self.defaults(process)[0] if self.weight is None else self.weight
        if callable(weight):
            lam = torch.as_tensor(weight(t)).to(t)
            good = fits(tuple(lam.shape), tuple(t.shape))
            require(good, f"The weighting λ(t) must be like t, {tuple(t.shape)}; it is {tuple(lam.shape)}.")
            good = bool((lam.isfinite() & (lam >= 0)).all())
            require(good, "The weighting λ(t) must be finite and not negative everywhere on [eps, T].")
        elif weight in PREDICTIONS:
            lam = convert(one, weight, "score", 0 * one, t, process).square().reciprocal()
        else:
            lam = process.S(t) if weight == "sigma2" else process.D(t) if weight == "likelihood" else one
        return lam * self.slope(t, process).square()

    @property
    def spec(self) -> dict[str, object]:
        """The settings in JSON, read by :func:`vkernel.train.models.from_spec`; a weighting function is not kept."""
        settings = {f.name: vars(self)[f.name] for f in fields(self)}  # type: ignore[arg-type]
        settings["weight"] = "function" if callable(self.weight) else self.weight
        return {"kind": type(self).__name__.lower(), **settings}


def time_input(t: Tensor, process: Process) -> Tensor:
    """Return log(sigma/alpha), shifted and scaled to [-1, 1] between eps and T: the time input of all networks."""
    wide, (low, high) = t.double(), (math.log(r) for r in process.ratios)
    return (((process.sigma(wide) / process.alpha(wide)).log() - (low + high) / 2) / ((high - low) / 2)).to(t.dtype)
