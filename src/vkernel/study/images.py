r"""What a study keeps of networks that are trained on images: errors, variance over members, copies, distances.

Let :math:`y` be a training image or a held-out one, :math:`x = \alpha y + \sigma z` the same image noised,
:math:`D_m(x)` the denoiser of member m and :math:`m(x) = E[x_0|x]` the exact one of the training set. The noised images
and the starting points of samples are the same for all members, objectives and steps. Squares are means over the d
pixels; ``level`` is :math:`\sigma/\alpha`, ``step`` the number of training steps, ``set`` training or held-out:

========================  ===================================  ========================================================
quantity                  dimensions                           value
========================  ===================================  ========================================================
error                     member, step, level, set, image      :math:`|D_m(x) - y|^2/d`
excess                    member, step, level, image           :math:`|D_m(x) - m(x)|^2/d`, noised training images
gap_members               member, other, step, level, set,     :math:`\tfrac12 |D_m(x) - D_{m'}(x)|^2/d`: V over some
                          image                                members is the mean over their pairs
corr_pixels, corr_images  member, step, level                  correlation of the variance over all members but this one
                                                               with the diagonal of :math:`\mathrm{Cov}(x_0|x)`: over
                                                               the pixels of an image, as a mean over images; and of
                                                               the means over pixels, over images
mmse                      level, image                         :math:`\mathrm{tr}\,\mathrm{Cov}(x_0|x)/d`
rho, network_share        level                                the noise fraction (``vk.noise_fraction``), and
                                                               the share of noise in the network's own target with this
                                                               objective (``vk.network_noise_fraction``)
ratio                     member, step, draw                   distance of a sample to the nearest training image over
                                                               that to the second nearest
memorised                 member, step                         share of samples with a ratio below 1/3
memorised_held_out                                             the same share of the held-out images
energy_to, kernel_to      member, step, held_out               mean over samples X of :math:`|X - y|`, and of
                                                               :math:`\kappa = \exp(-|X - y|^2/2h^2)`, h = ``bandwidth``
energy_within,            member, other, step                  the same means over pairs of samples of two members, or
kernel_within                                                  of one, from different starts
energy_held_out,                                               the same means over pairs of distinct held-out images
kernel_held_out
energy_training,                                               distance of the training set itself, as a law, from the
kernel_training                                                held-out images: :math:`\mathcal E` and MMD²
update_norm,              member, step                         mean norms since the step before (``Ensemble.info``)
gradient_norm
sample, nearest           member, index, pixel                 the first samples at the last step, and the training
                                                               image that is nearest to each
image_shape               axis                                 channels, height, width
========================  ===================================  ========================================================

The energy distance of one member from the held-out images is :math:`2\,\overline{E}_{to} - E_{within}(m, m) -
E_{held\,out}`, and that of the mean law over members has the mean of :math:`E_{within}(m, m')` over :math:`m \ne m'`
instead (:class:`vkernel.metrics.PairMeans`); MMD² is the negative of the same with :math:`\kappa`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from vkernel.core import rng
from vkernel.core.errors import require
from vkernel.data import Empirical
from vkernel.metrics import pair_means
from vkernel.metrics.copies import Reference
from vkernel.process import Process
from vkernel.score import EmpiricalScore, noise_fraction
from vkernel.study.quantity import Quantity
from vkernel.study.spec import Condition, Spec
from vkernel.train.ensemble import Ensemble
from vkernel.train.models import Model
from vkernel.train.noise_fraction import network_noise_fraction
from vkernel.train.objectives import JC, Objective

SETS = ("training", "held-out")
COPY = 1 / 3  # ratio of distances below which a sample is a copy
QUERIES = 1024  # of a noise fraction
NORMS = ("update_norm", "gradient_norm")
LAST = ("sample", "nearest")  # kept at the last step


def layout(spec: Spec, shapes: Sequence[tuple[int, ...]]) -> dict[str, Quantity]:
    """Return the quantities that a study of images keeps; ``shapes`` are those of the images of its sets."""
    conditions, m = list(spec.conditions()), spec.measure
    same: dict[str, set[object]] = {"training.snapshots": {tuple(c.training.snapshots) for c in conditions}}
    same |= {"data.test": {c.data.test for c in conditions}, "sampler.samples": {c.sampler.samples for c in conditions}}
    for key, values in same.items():
        require(len(values) == 1, f"{key} must be the same in all conditions of a study of images; got {values}.")
    require(spec.blocks == 1, f"block: a study of images computes all members at once; give block = {spec.members}.")
    condition = conditions[0]
    step = {"step": np.asarray(condition.training.snapshots)}
    level, image = {"level": np.asarray(m.levels)}, {"image": np.arange(m.images)}
    sets, held = {"set": np.array(SETS)}, {"held_out": np.arange(condition.data.test or 0)}
    other, draw = {"other": np.arange(spec.members)}, {"draw": np.arange(condition.sampler.samples)}
    pixel = {"index": np.arange(m.keep), "pixel": np.arange(max(math.prod(shape) for shape in shapes))}

    def each(about: str, *dims: dict[str, np.ndarray], dtype: str = "float32", per_member: bool = True) -> Quantity:
        return Quantity(about, "", {k: v for part in dims for k, v in part.items()}, dtype, per_member)

    def once(about: str, *dims: dict[str, np.ndarray]) -> Quantity:
        return each(about, *dims, per_member=False)

    found = {
        "error": each("squared error of the denoiser", step, level, sets, image),
        "excess": each("squared distance of the denoiser from the exact one", step, level, image),
        "gap_members": each("half the squared distance of two denoisers", other, step, level, sets, image),
        "corr_pixels": each("correlation of V with C over pixels, without this member", step, level),
        "corr_images": each("correlation of V with C over images, without this member", step, level),
        "ratio": each("ratio of the distances of a sample to two training images", step, draw),
        "memorised": each("share of samples that are copies", step),
        "mmse": once("posterior variance", level, image),
        "rho": once("noise fraction", level),
        "network_share": once("share of noise in the network's target", level),
        "memorised_held_out": once("share of held-out images that count as copies"),
        "bandwidth": once("bandwidth of the kernel"),
        "image_shape": once("shape of an image", {"axis": np.arange(3)}),
    }
    for name, words in (("energy", "distance"), ("kernel", "kernel")):
        found[f"{name}_to"] = each(f"mean {words} between a held-out image and samples", step, held)
        found[f"{name}_within"] = each(f"mean {words} between samples of two members", other, step)
        found[f"{name}_held_out"] = once(f"mean {words} between held-out images")
        found[f"{name}_training"] = once(f"{name} distance of the training set from held-out images")
    found |= {name: each(f"mean {name.replace('_', ' of the ')} of a step", step) for name in NORMS}
    if m.keep:
        found["sample"] = each("sample", pixel, dtype="float16")
        found["nearest"] = each("training image nearest to the sample", pixel, dtype="float16")
    return found


@dataclass(frozen=True)
class Probe:
    """What is measured in the same way for all networks on one training set: noised images with their exact posterior,
    the starting points of samples, and what does not depend on the networks."""

    condition: Condition
    data: Empirical
    held_out: Empirical
    process: Process
    x_T: Tensor
    seed: int
    score: EmpiricalScore = field(init=False)

    def __post_init__(self) -> None:
        law = self.data.mirrored() if self.condition.training.flips else self.data
        object.__setattr__(self, "score", EmpiricalScore(law, self.process))

    @cached_property
    def times(self) -> Tensor:
        """The times at which σ/α is each of the levels, ``(L, 1)``."""
        levels = torch.tensor(self.condition.measure.levels, dtype=torch.float64)
        return self.process.time(levels)[:, None].to(self.data.device)

    @cached_property
    def clean(self) -> Tensor:
        """Training and held-out images, ``(2, 1, I, *shape)``."""
        count = self.condition.measure.images
        return torch.stack([self.data[:count], self.held_out[:count]])[:, None].double()

    @cached_property
    def noised(self) -> Tensor:
        """The same images noised to each level, ``(2, L, I, *shape)``."""
        size = (2, len(self.times), *self.clean.shape[2:])
        z = rng.randn(size, rng.stream(self.seed, "study/noised"), self.data.device, torch.float64)
        alpha, sigma = (a.reshape(-1, *(1,) * (z.ndim - 2)) for a in self.levels)
        return alpha * self.clean + sigma * z

    @property
    def levels(self) -> tuple[Tensor, Tensor]:
        """α and σ, ``(L, 1)`` each."""
        return self.process.alpha(self.times), self.process.sigma(self.times)

    @cached_property
    def exact(self) -> tuple[Tensor, Tensor]:
        """Posterior means and variances of pixels at the noised training images, ``(L, I, d)`` each."""
        found = self.score.posterior(self.noised[0], self.times)
        return found.mean.flatten(2), found.cov.diag().flatten(2)

    @cached_property
    def reference(self) -> Reference:
        """The training set, compared with the held-out images."""
        flips = "flip" if self.condition.training.flips else None
        return Reference(self.data, self.held_out, "pixels", self.held_out.n, 0, flips)

    @cached_property
    def held(self) -> Tensor:
        """Held-out images, ``(N, d)``."""
        return self.held_out[:].double().flatten(1)

    @cached_property
    def bandwidth(self) -> Tensor:
        """The median distance of two held-out images."""
        return torch.pdist(self.held).median()

    def share(self, model: Model | None = None, c: float = 1.0) -> Tensor:
        """Return the noise fraction at the levels, in the units of a network if one is given."""
        t, how = self.times[:, 0], {"queries": QUERIES, "generator": self.seed}
        if model is None:
            return torch.as_tensor(noise_fraction(self.score, self.process, t, **how).value)
        return torch.as_tensor(network_noise_fraction(model, self.score, self.process, t, c, **how).value)

    @cached_property
    def constants(self) -> dict[str, Tensor]:
        """The quantities that are the same for all networks."""
        shape, own = self.data.shape, self.data[:].double().flatten(1)[None]
        found = {"mmse": self.exact[1].mean(-1), "rho": self.share()}
        found["image_shape"] = torch.tensor([*(1,) * (3 - len(shape)), *shape])
        copied = self.reference.own[0]
        found["memorised_held_out"] = (copied[:, 0] < COPY * copied[:, 1]).double().mean()
        found["bandwidth"] = self.bandwidth
        for name, h, sign in (("energy", None, 1), ("kernel", self.bandwidth, -1)):
            parts, n = pair_means(own, self.held, h), self.data.n
            within = parts.within[0, 0] * (1 - 1 / n) + (0 if h is None else -1 / n)  # of a law: equal images are pairs
            found[f"{name}_held_out"] = sign * parts.reference
            found[f"{name}_training"] = 2 * parts.to.mean() - within - parts.reference
        return found


def measure(
    probe: Probe, ensemble: Ensemble, objective: Objective, wanted: dict[str, Quantity]
) -> dict[str, np.ndarray]:
    """Return the quantities of an ensemble with snapshots, ``(members, …)`` or without members."""
    parts = [_of_step(probe, ensemble.snapshots[step]) for step in probe.condition.training.snapshots]
    found = {name: torch.stack([part[name] for part in parts], 1) for name in parts[0] if name not in LAST}
    for name in ("gap_members", "energy_within", "kernel_within"):
        found[name] = found[name].movedim(1, 2)  # member, other, step
    found |= {name: parts[-1][name] for name in LAST if name in wanted}
    found |= probe.constants
    square = objective.c**2 if isinstance(objective, JC) else objective.ratio  # None: Cov[m̃|x] is no multiple of J1's
    share = probe.share(ensemble.model, math.sqrt(square or 0))
    found["network_share"] = share if square is not None else share.fill_(torch.nan)
    for name in NORMS:
        found[name] = torch.tensor(ensemble.info[name], dtype=torch.float64)
    out = {}
    for name, quantity in wanted.items():
        value = found[name].cpu().numpy().astype(quantity.dtype)
        if "pixel" in quantity.coordinates:  # sets of smaller images fill the first pixels
            room = quantity.shape[-1] - value.shape[-1]
            value = np.pad(value, [(0, 0)] * (value.ndim - 1) + [(0, room)], constant_values=np.nan)
        out[name] = value
    return out


def denoised(ensemble: Ensemble, x: Tensor, t: Tensor) -> Tensor:
    """Return the denoised images of every member, ``(M, *batch, d)``, in the dtype of the members."""
    x, count = x.to(ensemble.dtype), len(ensemble.shape)
    alpha, var = (a.to(x).reshape(*a.shape, *(1,) * count) for a in (ensemble.process.alpha(t), ensemble.process.S(t)))
    return ((x + var * ensemble(x, t)) / alpha).flatten(-count)


def _of_step(probe: Probe, ensemble: Ensemble) -> dict[str, Tensor]:
    """Return the quantities of one snapshot, ``(M, …)``."""
    c, (mean, variance) = probe.condition, probe.exact
    D = denoised(ensemble, probe.noised, probe.times).double()  # (M, 2, L, I, d)
    found = {"error": (D - probe.clean.flatten(3)).square().mean(-1).movedim(1, 2)}
    found["excess"] = (D[:, 0] - mean).square().mean(-1)
    gaps = [(D - own).square().mean(-1).movedim(1, 2) / 2 for own in D]
    found["gap_members"] = torch.stack(gaps)
    found["corr_pixels"], found["corr_images"] = _correlations(D[:, 0], variance, ensemble.diverged)
    s = c.sampler
    x = ensemble.sample(x_T=probe.x_T.to(ensemble.dtype), steps=s.steps, method=s.method, spacing=s.spacing).double()
    x = x / probe.process.alpha(torch.tensor(probe.process.eps, dtype=torch.float64)).to(x)
    near = probe.reference.copies(x.flatten(0, 1), COPY)
    found["ratio"] = near.ratio.reshape(x.shape[:2])
    found["memorised"] = (found["ratio"] < COPY).double().mean(1)
    flat = x.flatten(2)
    for name, h, sign in (("energy", None, 1), ("kernel", probe.bandwidth, -1)):
        parts = pair_means(flat, probe.held, h)
        found[f"{name}_to"], found[f"{name}_within"] = sign * parts.to, sign * parts.within
    keep = c.measure.keep
    found["sample"] = flat[:, :keep]
    index = near.index[:, 0].reshape(x.shape[:2])[:, :keep].clamp_min(0)
    found["nearest"] = probe.data[index.flatten()].reshape(*index.shape, probe.data.d)
    lost = ~x.isfinite().flatten(1).all(1)
    found["memorised"][lost.cpu()] = torch.nan
    found["nearest"][lost] = torch.nan
    return found


def _correlations(D: Tensor, variance: Tensor, diverged: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the correlations of V without each member, from ``D (M, L, I, d)``, with ``variance (L, I, d)``."""
    alive = [m for m in range(len(D)) if m not in diverged]
    pixels = images = D.new_full(D.shape[:2], torch.nan)
    if len(alive) < 3:
        return pixels, images
    count, away = len(alive) - 1, D[alive] - D[alive].mean(0)  # centred, so that sums of squares do not cancel
    V = (away.square().sum(0) - away.square() - away.square() / count) / (count - 1)  # the sum over the others is -away
    over_pixels, over_images = _correlation(V, variance).nanmean(-1), _correlation(V.mean(-1), variance.mean(-1))
    rows = torch.tensor(alive, device=D.device)
    return pixels.index_copy(0, rows, over_pixels), images.index_copy(0, rows, over_images)


def _correlation(a: Tensor, b: Tensor) -> Tensor:
    """Return Pearson's correlation over the last axis; NaN where one of the two is constant."""
    a, b = (x / x.norm(dim=-1, keepdim=True) for x in (y - y.mean(-1, keepdim=True) for y in (a, b)))
    return (a * b).sum(-1)
