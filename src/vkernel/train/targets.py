r"""Training targets for any training loop: the exact denoiser in the parametrisation of the network (theory, §6.1-6.2).

A loop draws an image :math:`x_0` of the training set, a time t, and :math:`x_t = \alpha x_0 + \sigma\epsilon`. Its
network f is fitted to a target :math:`y(\tilde m)` that is linear in :math:`\tilde m`, and :math:`E[\tilde m|x_t, t] =
m(x_t, t)`, the mean of the posterior: :math:`y(m)`, the minimiser of the loss, is the same for every objective.

========  ==========================================================  ===============================
predicts  :math:`y(\tilde m)`                                         at :math:`\tilde m = x_0` (J1)
========  ==========================================================  ===============================
noise     :math:`(x_t - \alpha\tilde m)/\sigma`                       :math:`\epsilon`
x0        :math:`\tilde m`                                            :math:`x_0`
v         :math:`(\alpha x_t - h^2 \tilde m)/\sigma`                  :math:`\alpha\epsilon-\sigma x_0`
flow      :math:`-\beta x_t + D\,(x_t - \alpha\tilde m)/\sigma^2`     :math:`\dot\alpha x_0 + \dot\sigma\epsilon`
edm       :math:`(\tilde m - c_{skip}\, x_t/\alpha)/c_{out}`          the same with :math:`x_0`
score     :math:`(\alpha\tilde m - x_t)/\sigma^2`                     :math:`-\epsilon/\sigma`
========  ==========================================================  ===============================

with :math:`h^2 = \alpha^2 + \sigma^2` and :math:`c_{skip}, c_{out}` of :mod:`vkernel.score.conversions`, and
:math:`\tilde m` of :mod:`vkernel.train.objectives`: :math:`x_0` for J1, m for J0, the mean of :math:`x_0` and K - 1
draws from the posterior for JK.

**Check.** The posterior is that of the training set only if :math:`x_t` was made from the image that ``index`` names.
Then the :math:`N = B d` numbers :math:`\epsilon = (x_t - \alpha x_0)/\sigma` of a batch are standard normal, and
:math:`|\epsilon|` is a function of them with Lipschitz constant 1 and a mean between :math:`\sqrt N - 1` and
:math:`\sqrt N`, so that (Gaussian concentration)

.. math:: P\big(\,\big||\epsilon| - \sqrt N\big| > 7.5\big) < 10^{-9} .

:math:`x_t` is computed with relative errors of a few units u of its dtype, which move :math:`|\epsilon|` by no more
than :math:`8u\,\big|(|x_t| + \alpha|x_0|)/\sigma\big|`. A batch outside the sum of both bounds is refused.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from vkernel.core import rng
from vkernel.core.checks import as_tensor, check_positive, check_real, check_whole
from vkernel.core.covariance import over_event
from vkernel.core.errors import InputError, require
from vkernel.core.rng import Generator
from vkernel.data.empirical import Array, Empirical
from vkernel.process import Process
from vkernel.score.base import Time, as_time
from vkernel.score.conversions import check_predicts, convert
from vkernel.train.objectives import Objective, parse
from vkernel.train.recorded_targets import DEVIATION, ROUNDINGS, RecordedTargets
from vkernel.train.training_set import TrainingSet

FIRST, EVERY = 10, 100  # the first calls, and every so many, are checked


class Targets(TrainingSet):
    r"""Targets of one objective for batches of a training loop: ``targets(x_t, t, index)``.

    Args:
        data: the training images, :class:`~vkernel.data.Empirical` or an array ``(n, *shape)``, in the units of x_t.
        process: the forward process with which x_t is made, such as ``vk.VP()``; its noise is isotropic.
        objective: ``"J0"``, the exact target without noise; ``"J1"``, the usual one; ``vk.JK(K)``, ``vk.JC(c)``.
        predicts: what the network returns: noise, x0, v, flow, edm (the raw network F) or score.
        labels: ``(n,)``, the class of each image, for class-conditional networks: the posterior is within the class.
        flips: with random horizontal flips, ``index + n`` names the mirror image of image ``index``.
        null: the label of images whose label was dropped, as for classifier-free guidance: the posterior is over all.
        sigma_data: the standard deviation of the data in the scaling of ``edm``.
        generator: the random numbers of ``JK`` and of the placebos of ``JC``; number i belongs to the i-th target.
            Ranks of a distributed training need different ones.
        device: where the data are held and targets are computed. By default data in the memory of the CPU are copied
            once to the device of the first batch, and data on another device stay there.

    Attributes: ``data`` and ``labels``, with the mirror images if ``flips``; ``drawn``, the number of targets so far.

    >>> import torch, vkernel as vk
    >>> images, process = torch.rand(100, 1, 8, 8), vk.VP()
    >>> targets = vk.Targets(images, process, "J0", predicts="noise")
    >>> index, t = torch.randint(100, (16,)), torch.rand(16).clamp_min(process.eps)
    >>> targets(process.perturb(images[index], t), t, index).shape
    torch.Size([16, 1, 8, 8])
    """

    def __init__(
        self,
        data: Empirical | Array,
        process: Process,
        objective: str | Objective = "J0",
        predicts: str = "noise",
        *,
        labels: Array | None = None,
        flips: bool = False,
        null: int = -1,
        sigma_data: float = 0.5,
        generator: Generator = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(data, process, labels, flips)
        self.objective, self.predicts = parse(objective), check_predicts(predicts)
        self.sigma_data, self.null = check_positive(sigma_data, "sigma_data"), check_whole(null, "null", -1)
        taken = self.labels is not None and bool((self.labels == null).any())
        require(not taken, f"null, the label of images whose label was dropped, is {null}, which some images have.")
        self.device = None if device is None else torch.device(device)
        self._key, self.drawn, self._calls = rng.keys((1,), rng.as_generator(generator)), 0, 0

    @torch.no_grad()
    def __call__(self, x_t: Tensor, t: Time, index: Array | None = None, labels: Array | None = None) -> Tensor:
        """Return the targets of a batch, like ``x_t (B, *shape)``, without gradient; autocast does not affect them.

        ``t`` is the time of the process, one number or ``(B,)``: the index of the network under ``vk.DDPM``. ``index
        (B,)`` are the images from which x_t was made. ``labels (B,)`` are their labels, or ``null`` where dropped; by
        default none is. Posterior weights are computed in float32 or better, whatever the dtype of x_t, and the result
        is rounded once. The first ten batches, and every hundredth, are checked to be noised versions of the images. On
        GPUs with fast float64 all are, and from the eleventh on the next call reports what was wrong with a batch."""
        good = check_real(x_t, "x_t").is_floating_point() and x_t.ndim > 0 and tuple(x_t.shape[1:]) == self.data.shape
        wanted = f"x_t must be a batch of noised images, floats (B, {', '.join(map(str, self.data.shape))})"
        require(good, f"{wanted}; got {_about(x_t)}.")
        if index is None:
            raise InputError("targets(x_t, t, index) needs index (B,), the images from which x_t was made.")
        good = labels is None or self.labels is not None
        require(good, "The labels of a batch need those of the data: give labels=(n,) to vk.Targets too.")
        if self._calls == 0:
            self._place(x_t.device)
        if self._calls >= FIRST and self._recorded is not None:
            self._look_back()
            if (place := self._recorded.place(x_t, t, index, labels, self.drawn)) is not None:
                self._calls, self.drawn = self._calls + 1, self.drawn + len(x_t)
                return self._recorded(place, self._key)
        with torch.autocast(self.data.device.type, enabled=False):
            x, u = x_t.detach().to(self.data.device, torch.float64), self._uniforms(len(x_t))
            when, origin = self._times(t, len(x)), self._numbers(index, "index", len(x))
            label = None if labels is None else self._numbers(labels, "labels", len(x))
            self._check_values(x, origin, label)
            if self._calls < FIRST or self._calls % EVERY == 0:
                self._check_noise(x, when, origin, torch.finfo(x_t.dtype).eps / 2)
            m = torch.empty_like(x)
            for score, rows, own in self.by_class(origin, label):
                m[rows] = self.objective.target(score, x[rows], when[rows], own, u[rows])
            target = convert(m, "x0", self.predicts, x, when, self.process, self.sigma_data)
        self._calls, self.drawn = self._calls + 1, self.drawn + len(x)
        return target.to(x_t.device, x_t.dtype)

    @functools.cached_property
    def _recorded(self) -> RecordedTargets | None:
        return RecordedTargets.serving(self, self.objective, self.predicts, self.sigma_data, self.null)

    def _look_back(self) -> None:
        """Refuse what was wrong with the batch before, of which the GPU has checked the values meanwhile."""
        for place in self._recorded.kept.values() if self._recorded is not None else ():
            if place.checked():
                continue
            try:
                x, when = place.x.double(), self._times(place.t, len(place.x))
                self._check_values(x, place.index, place.label)
                self._check_noise(x, when, place.index, torch.finfo(place.x.dtype).eps / 2)
            except InputError as error:
                raise InputError(f"In the batch before this one: {error}") from None

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in vars(self).items() if name != "_recorded"}  # graphs are not copied

    def __repr__(self) -> str:
        return f"Targets({self.objective!r}, predicts {self.predicts}, {self.data!r}, {self.process!r})"

    def _place(self, device: torch.device) -> None:
        """Copy the data to where targets are computed, before anything is prepared there."""
        stays = self.data.device.type != "cpu"
        self.data = self.data.to(self.device or (self.data.device if stays else device))
        self.labels = None if self.labels is None else self.labels.to(self.data.device)
        self._key = self._key.to(self.data.device)

    def _uniforms(self, count: int) -> Tensor:
        """Return the random numbers of the next targets, ``(count, objective.uniforms)``."""
        k, device = self.objective.uniforms, self.data.device
        if k == 0:  # J0 and J1: a call on a GPU costs launches, also of kernels that compute nothing
            return torch.empty((count, 0), dtype=torch.float64, device=device)
        counter = torch.arange(self.drawn * k, (self.drawn + count) * k, device=device).reshape(count, k)
        return rng.uniforms(self._key, counter)

    def _times(self, t: Time, count: int) -> Tensor:
        """Return times ``(B,)`` in float64."""
        t = as_time(t, self.data.device).detach()
        good = t.numel() == 1 or tuple(t.shape) == (count,) + (1,) * (t.ndim - 1)
        require(good, f"t must be one time, or one for each of the {count} images; got shape {tuple(t.shape)}.")
        t = self.process.check(t if t.is_floating_point() else t.double()).double()
        return t.clamp(self.process.eps, self.process.T).reshape(-1).expand(count)

    def _numbers(self, values: Array, name: str, count: int) -> Tensor:
        """Return whole numbers ``(B,)``, of images or of labels."""
        found = as_tensor(values, name).detach()
        good = tuple(found.shape) == (count,) and "int" in str(found.dtype)
        wanted = f"{name} must be ({count},), one whole number for each image of the batch"
        require(good, f"{wanted}; got {_about(found)}.")
        return found.to(self.data.device).long()

    def _check_values(self, x: Tensor, index: Tensor, label: Tensor | None) -> None:
        """Refuse images and labels that the data do not have, and x that is not finite, by one look at the device."""
        inside = index.clamp(0, self.data.n - 1)
        weight, finite = self.data.weights[inside], x.flatten(1).isfinite().all(1)
        own = None if label is None or self.labels is None else self.labels[inside]
        same = torch.ones_like(finite) if own is None else (label == own) | (label == self.null)
        good = (index == inside) & (weight > 0) & finite & same
        if bool(good.all()):
            return
        k = int((~good).nonzero()[0])
        i = int(index[k])
        hint = "" if self.flips else "; with flips=True, index + n is the mirror image of image index"
        require(bool(finite[k]), f"x_t holds NaN or infinite values, in image {k} of the batch.")
        require(i == int(inside[k]), f"There is no image {i}: index runs from 0 to {self.data.n - 1}{hint}.")
        require(bool(weight[k] > 0), f"No x_t is made from image {i}: its weight is zero.")
        assert label is not None
        assert own is not None
        given = f"labels has {int(label[k])} for image {i}, whose label is {int(own[k])}"
        raise InputError(f"{given}; give the labels of the images, or {self.null} where a label was dropped.")

    def _check_noise(self, x: Tensor, t: Tensor, index: Tensor, u: float) -> None:
        """Refuse a batch that is no noised version of the images ``index``; ``u`` is the rounding error of x_t."""
        alpha, sigma = (over_event(f(t), self.data.shape) for f in (self.process.alpha, self.process.sigma))
        signal = alpha * self.data.take(index).double().reshape(x.shape)
        found, usual = float(((x - signal) / sigma).norm()), math.sqrt(x.numel())
        if abs(found - usual) <= DEVIATION:
            return
        rounding = ROUNDINGS * u * float(((x.abs() + signal.abs()) / sigma).norm())
        if abs(found - usual) > DEVIATION + rounding:
            what = "x_t is not alpha x0 + sigma noise, with x0 the images that index names"
            much = f"(x_t - alpha x0)/sigma has the root mean square {found / usual:.3g} instead of 1"
            hint = "Process, t and the pixel range of the data must be those of x_t, and index positions in the data"
            flip = "Random horizontal flips need flips=True, and index + n for the mirror image of image index"
            whole = "int" in self.data.stored and self.data.scale is None
            bytes_ = f" The data are {self.data.stored}: vk.Empirical(images, scale=(-1, 1)) maps them to [-1, 1]."
            refused = f"{what}: {much}. {hint}. {flip}; crops and other augmentations are refused."
            raise InputError(refused + bytes_ * whole)


def _about(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')}, shape {tuple(x.shape)}"
