"""Which closed-form theory explains a network: the comparison of networks with theories, in denoising and in samples.

Networks of one process, pixel range, class and time input form a group (:func:`vkernel.reports.audit.group.alike`):
they are evaluated on the same noisy images, and their samples start at the same noise. Theories are built in their
pixel units."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import Tensor

from vkernel.core import rng
from vkernel.core.checks import check_whole
from vkernel.core.errors import InputError, require
from vkernel.core.memory import check_memory
from vkernel.core.progress import Progress, Reporter, progress as report_progress
from vkernel.data import Empirical
from vkernel.process import Process
from vkernel.reports.audit.axes import arranged, for_network
from vkernel.reports.audit.classes import Class, Labels, by_class, in_class
from vkernel.reports.audit.draw import draw, start
from vkernel.reports.audit.group import alike
from vkernel.reports.audit.levels import NoisyImages, audit_times, check_inputs
from vkernel.reports.audit.networks import Model, as_networks
from vkernel.reports.audit.plan import device_of, fastest_threads, using_threads
from vkernel.reports.audit.samples import Data, as_data, in_memory
from vkernel.reports.explain.candidates import Builder, Candidate, Given, Theories, named
from vkernel.reports.explain.denoising import denoising
from vkernel.reports.explain.images import Split
from vkernel.reports.explain.result import Explanation, Sizes
from vkernel.reports.explain.samples import SAMPLES, Quality, Sampler, ceiling, samples as sampled
from vkernel.score import Wrapped

if TYPE_CHECKING:
    import xarray

FIT = 4  # the work of building a theory, in units of one noise level
TRIAL = 16  # images that the number of threads is chosen with
LEAST = {"images": 2, "samples": 2}
ALONE = ("permuted_", "seconds_", "own_seconds_")  # variables without an interval


def explain(
    networks: Model | Sequence[Model],
    theories: Theories = None,
    data: Data | None = None,
    test: Data | None = None,
    *,
    process: Process | None = None,
    levels: int | None = None,
    images: int | None = None,
    samples: int | None = None,
    steps: int | None = None,
    train: int | None = None,
    labels: Labels = None,
    test_labels: Labels = None,
    quick: bool = False,
    seed: int = 0,
    progress: Progress = False,
) -> Explanation:
    r"""Measure how well theories predict the denoisers and the samples of networks.

    At each noise level the network's denoiser D and the theory's :math:`D_{th}` are compared on the same noisy images:
    :math:`R^2` and the gain over the Gaussian theory, :math:`R^2_G = 1 - \sum |D - D_{th}|^2 / \sum |D - D_G|^2`, with
    floors and a ceiling (:mod:`vkernel.reports.explain.result`). Samples start at the same noise.

    Args:
        networks: as for ``vk.audit``: a score, several as ``Scores``, a diffusers folder, a function ``(x,
            t)`` that returns the score under ``process``, or a list of these.
        theories: names (``"gaussian"``, ``"exact"``, ``"smoothed"``, ``"nearest"``, ``"local"``, ``"equivariant"``,
            ``"pca"``), scores under the network's process and in its pixel units, ``Scores`` such as ``V.models(M)``,
            or functions ``(data, process)`` that return a score, such as the classes of :mod:`vkernel.theories`; one of
            these, a list or a dictionary by name. By default all names but ``"nearest"``. The parameters of
            ``"smoothed"``, ``"local"``, ``"equivariant"`` and ``"pca"`` are fitted to each network, on images apart
            from the others.
        data: the training set; theories are evaluated on its device.
        test: images of the same law that the networks were not trained on.
        process: that of networks which are functions.
        levels, images, samples, steps: noise levels, even in log σ/α; noisy images of each set; samples, and the steps
            of their sampler. The defaults are those of :class:`Sizes`, smaller ones with ``quick``.
        train: the number of training images that theories of pixels are built from, by default all on a GPU and as many
            as are affordable on a CPU; the result holds the number for each theory.
        labels, test_labels: the classes of the images. Class-conditional networks ``net(x, time, labels)`` are then
            compared in every class with theories of its images.
        quick: whether to use smaller sizes, and fewer training images for theories of pixels on a CPU.
        seed: of images, noise and starts of samples.

    >>> import vkernel as vk
    >>> images = vk.data.toy("digits")[:60].reshape(-1, 8, 8)
    >>> network = vk.theories.Smoothed(images[:40], vk.VP(), h=0.2)  # or a trained one
    >>> found = vk.explain(network, ["exact", "gaussian"], images[:40], images[40:], levels=2, images=4, samples=2)
    >>> found.denoising.gain.dims
    ('network', 'theory', 'images', 'level')
    """
    began = time.monotonic()
    if data is None:
        raise InputError("Give data=, the training set of the networks.")
    training, held = as_data(data, "training"), None if test is None else as_data(test, "test")
    nets, given = as_networks(networks, process, training), named(theories)
    shape = for_network(nets[0], training.shape)
    training, held = in_memory(arranged(training, shape)), None if held is None else in_memory(arranged(held, shape))
    for net in nets:
        fits = net.shape in (None, training.shape)
        require(fits, f"The training data have shape {training.shape}, but {net.name} takes {net.shape}.")
        held = check_inputs(net, training, held)[2]
    require(training.spread > 0, "All training images are equal: all theories return this image.")
    nets, notes, classes = [replace(net, shape=shape) for net in nets], list[str](), dict[int, Class]()
    if labels is not None:
        classes, notes = by_class(training, labels, held, test_labels)
        nets = [replace(net, label=c, name=net.name + in_class(c)) for net in nets for c in classes]
    taken = {net.name for net in nets}  # the samples of networks and theories are stored by name
    given = {f"{name} (theory)" if name in taken else name: one for name, one in given.items()}
    sizes = _sizes(Sizes.quick() if quick else Sizes(), levels=levels, images=images, samples=samples, steps=steps)
    if train is not None:
        check_whole(train, "train")
    scores = len(nets) * (1 + 2 * len(given))
    check_memory(8 * sizes.images * training.d * scores, f"An explanation with {sizes.images:,} images")
    kinds, whole = 1 if held is None else 2, Class(None, training, held)
    work = len(nets) * (FIT * len(given) + kinds * sizes.levels + SAMPLES * len(given))
    for net in nets:
        draw(net, start(net, 2, seed, shape).to(training.device), steps=1)  # what fails does so before the work
    trial = functools.partial(draw, nets[0], start(nets[0], TRIAL, seed, shape).to(training.device), steps=1)
    threads = fastest_threads(trial, device_of(nets[0]).type)
    with using_threads(threads), report_progress(work, progress) as step:
        options = (sizes, train, quick, seed)
        groups = [Group.of(some, classes.get(some[0].label or 0, whole), *options) for some in alike(nets)]
        for name, one in list(given.items()):
            try:
                for group in groups:
                    group.add(name, one, step)
            except InputError as error:
                if theories is not None:
                    raise
                notes.append(f"{name}: {error}")  # such as theories of pixels for vectors
                del given[name]
        curves = {name: found for group in groups for name, found in group.denoising(given, step).items()}
        drawn = {name: found for group in groups for name, found in group.samples(given, step).items()}
    own = {name: images[name] for name, (_, images) in drawn.items()}
    pairs = {net.name: [other for other in nets if other is not net and other.label == net.label] for net in nets}
    tables = [drawn[net.name][0].merge(ceiling(net, own, pairs[net.name])) for net in nets]
    return Explanation(
        _joined(nets, [curves[net.name] for net in nets]),
        _joined(nets, tables),
        {name: {key: x[: sizes.pictures] for key, x in images.items()} for name, (_, images) in drawn.items()},
        {net.name: net.range for net in nets},
        training.n,
        0 if held is None else held.n,
        sizes,
        seed,
        time.monotonic() - began,
        quick,
        tuple(notes),
    )


def _sizes(sizes: Sizes, **given: int | None) -> Sizes:
    """Return the sizes with those that were given."""
    for name, value in given.items():
        if value is not None:
            check_whole(value, name, LEAST.get(name, 1))
    return replace(sizes, **{name: value for name, value in given.items() if value is not None})


def _joined(nets: Sequence[Wrapped], tables: Sequence[xarray.Dataset]) -> xarray.Dataset:
    """Return one Dataset with the dimension ``network``; networks with fewer different levels have NaN at the end."""
    import xarray

    names = xarray.DataArray([net.name for net in nets], dims="network", name="network")
    joined = xarray.concat(tables, names, coords="all", join="outer")
    return joined.drop_vars([name for name in map(str, joined) if name.endswith("_se") or name.startswith(ALONE)])


@dataclass(eq=False)
class Group:
    """Networks that are evaluated on the same noisy images, and theories for each of them, by network and name."""

    nets: list[Wrapped]
    builder: Builder
    times: Tensor
    sizes: Sizes
    test: Empirical | None
    theories: dict[str, dict[str, Candidate]]

    @classmethod
    def of(
        cls,
        nets: list[Wrapped],
        own: Class,
        sizes: Sizes,
        train: int | None,
        quick: bool,
        seed: int,
    ) -> Group:
        """Divide images in the networks' units; theories are added later."""
        first = nets[0]
        data, test = first.scaled(own.data), None if own.test is None else first.scaled(own.test)
        times, process = audit_times(first, data, count=sizes.levels), first.process
        ratios = (process.sigma(times) / process.alpha(times)).clamp(*process.ratios).tolist()
        split = Split.of(data, test, sizes.images, sizes.fit, seed)
        builder = Builder(process, split, ratios, train, quick, seed)
        return cls(nets, builder, times, sizes, test, {net.name: {} for net in nets})

    def add(self, name: str, given: Given, step: Reporter) -> None:
        """Build a theory for each network."""
        for net, theory in zip(self.nets, self.builder.of(given, name, self.nets), strict=True):
            self.theories[net.name][name] = theory
            step(f"{net.name}: {name}", FIT)

    def denoising(self, names: Iterable[str], step: Reporter) -> dict[str, xarray.Dataset]:
        """Compare denoisers; theories that are not among ``names`` are left out."""
        g, sets = rng.stream(self.builder.seed, "noise of an explanation"), dict[str, NoisyImages]()
        for kind, x0 in self.builder.split.verdict.items():
            keys = rng.keys((len(self.times), 1, len(x0)), g, x0.device)
            sets[kind] = NoisyImages(self.builder.process, self.times, x0, keys)
        found = denoising(self.nets, self._chosen(names), self.builder.gaussian, sets, step)
        return {name: ds.assign_coords(available=self.builder.split.data.n) for name, ds in found.items()}

    def samples(self, names: Iterable[str], step: Reporter) -> dict[str, tuple[xarray.Dataset, dict[str, Tensor]]]:
        """Compare samples."""
        data, seed = self.builder.split.data, self.builder.seed
        sampler = Sampler(self.nets[0], data, self.sizes.samples, self.sizes.steps, seed)
        quality, theories = Quality(data, self.test, seed), self._chosen(names)
        return {net.name: sampled(net, theories[net.name], sampler, quality, step) for net in self.nets}

    def _chosen(self, names: Iterable[str]) -> dict[str, dict[str, Candidate]]:
        return {net: {name: theories[name] for name in names} for net, theories in self.theories.items()}
