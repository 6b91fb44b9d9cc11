r"""Audits of samples that another program saved: copies, repeats, drift and distances need no network.

**Units.** Samples and data must be compared in one unit, and few files state theirs. Stored bytes run from 0 to 255.
Data have the range to which they were scaled or, if they are floats that fill one of the usual ranges
:math:`[0, 1], [-.5, .5], [-1, 1], [0, 255]`, that one. Samples that are not bytes are assumed to be in it too, which is
tested: with :math:`q_k` the quantiles of all pixels of the data, and :math:`q'_k` those of the samples mapped from a
range to the data's, the range misfits by the mean of :math:`|q_k - q'_k|`. If another range, a fifth of which the
samples use, misfits by less than two fifths of that, the samples are refused unless the user states their range."""

from __future__ import annotations

import math
import time
import zipfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vkernel.core import rng
from vkernel.core.checks import is_whole
from vkernel.core.errors import InputError, require
from vkernel.core.files import expand
from vkernel.core.progress import Progress, progress as report_progress
from vkernel.data import Empirical
from vkernel.data.loaders import read
from vkernel.metrics.augment import Augment
from vkernel.metrics.features import Features, extractor
from vkernel.metrics.repeats import repeats
from vkernel.reports.audit.result import Audit, Sizes
from vkernel.reports.audit.samples import FEWEST, Comparison, Data, SavedAudit, as_data, check_count, in_memory
from vkernel.score.wrapped import RANGES, interval, remapped

MOST = 1 << 28  # numbers of the samples that are compared
REFERENCE = 1024  # real images that are compared with the training set
FILLED = 0.05  # of its width: data fill a range if they come as close to both of its ends
BETTER, LEAST = 2.5, 0.02  # how much better another range fits; the least misfit, of the data's range, that matters
USED = 0.2  # of its width: a range of which samples use less is not theirs
IMAGES, PIXELS, QUANTILES = 1024, 1 << 18, 100  # for the misfit
GREY = 0.02  # of the range: channels that differ by less are equal
KEYS = ("samples", "images", "arr_0")  # of archives that hold several arrays
Range = tuple[float, float]


def audit_samples(
    samples: Tensor | str | Path,
    data: Data,
    test: Data | None = None,
    *,
    features: Features = "pixels",
    threshold: float = 1 / 3,
    augment: str | None = None,
    range: Range | None = None,
    key: str | None = None,
    count: int | None = None,
    seed: int = 0,
    progress: Progress = False,
) -> Audit:
    """Audit samples that are in memory or in files, without the network that made them.

    Args:
        samples: ``(n, *shape)``, a folder of images, or any file that :func:`vkernel.load` reads.
        test: images of the same law that were not trained on.
        features, threshold, augment: as for :func:`vkernel.audit`.
        range: the values of black and white in the samples, where these are not the data's.
        key: the array of a file that holds several.
        count: how many of the samples to compare, chosen at random; by default all, up to 2^28 numbers.

    Returns:
        an :class:`Audit` without networks; ``audit.saved`` holds the results.

    >>> import torch, vkernel as vk
    >>> points = torch.randn(300, 2, generator=torch.Generator().manual_seed(0))
    >>> found = vk.audit_samples(points[:50] + 1e-4, points[:200], points[200:])  # copies of training points
    >>> found
    Audit(samples; alarms: copies)
    """
    began, name = time.monotonic(), Path(samples).name if isinstance(samples, str | Path) else "samples"
    if isinstance(samples, str | Path) and isinstance(data, str | Path):
        check_apart(samples, data)
    own, held = as_data(data, "training"), None if test is None else as_data(test, "test")
    check_count(own)
    require(held is None or held.shape == own.shape, f"Test images do not have the shape of the data, {own.shape}.")
    require(count is None or (is_whole(count) and count >= FEWEST), f"count must be {FEWEST} or more; got {count!r}.")
    own, extract = in_memory(own), extractor(features)
    versions, (stored, n) = Augment.parse(augment, own.shape), read_samples(samples, key, count, seed)
    x, notes = fitted(stored, own.shape)
    if len(x) < n:
        notes.append(f"{len(x):,} of {n:,} samples, chosen at random, were compared.")
    x, assumed = in_units(x, own, range)
    with report_progress(3, progress) as step:
        found = Comparison(own, held, extract, threshold, REFERENCE, seed, versions).of(x, "saved", 0)
        step("comparison with the data", 2)
        alike = repeats(x, own, held, features="standardised" if found.standardised else extract, seed=seed)
        step("comparison with one another", 1)
    saved = SavedAudit(name, {"saved": found}, alike, pixel_range(own))
    stated = extract.name, threshold, Sizes(samples=len(x), reference=REFERENCE), seed, time.monotonic() - began
    return Audit((), None, None, own, held, *stated, (*notes, *assumed), versions, saved)


def read_samples(samples: Tensor | str | Path, key: str | None, count: int | None, seed: int) -> tuple[Tensor, int]:
    """Return samples as they are stored, ``(k, *shape)``, from memory, a folder of images or a file, and the number
    there. No more than ``count``, or 2^28 numbers, are read, chosen at random."""
    if isinstance(samples, str | Path):
        path = expand(samples)
        if key is None and path.suffix.lower() == ".npz" and zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                names = archive.namelist()
            key = next((k for k in KEYS if len(names) > 1 and f"{k}.npy" in names), None)
        try:
            held = read(path, key=key)
        except InputError as error:
            option = "pick one with --samples-key, key= in Python:"
            raise InputError(str(error).replace("pick one with key:", option)) from error
    else:
        require(isinstance(samples, Tensor), f"Samples must be a tensor, a file or a folder, not {samples!r}.")
        held = samples.detach().cpu()
    n, kind = len(held) if held.ndim else 0, str(held.dtype)
    require(n >= FEWEST, f"An audit needs {FEWEST} samples or more; there are {n}.")
    most = min(n, count or n, max(FEWEST, MOST // max(1, math.prod(held.shape[1:]))))
    if most < n:
        chosen = torch.randperm(n, generator=rng.stream(seed, "samples that are compared"))[:most].sort().values
        held = held[chosen if isinstance(held, Tensor) else chosen.numpy()]
    try:
        native = held if isinstance(held, Tensor) else np.array(held, held.dtype.newbyteorder("="))
        found = torch.as_tensor(native)
    except TypeError:
        raise InputError(f"Samples must be real numbers of at most 64 bits, not {kind}.") from None
    require(found.dtype != torch.bool and not found.is_complex(), f"Samples must be real numbers, not {kind}.")
    return found, n


def check_apart(samples: str | Path, data: str | Path) -> None:
    """Refuse samples that lie among the training images: they would be compared with themselves."""
    a, b = expand(samples).resolve(), expand(data).resolve()
    apart = a != b and not ((b.is_dir() and b in a.parents) or (a.is_dir() and a in b.parents))
    require(apart, f"{samples} and {data} hold the same images: samples would be compared with themselves.")


def fitted(x: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, list[str]]:
    """Return samples with the axes of the data, and sentences on what was changed: channels come first, and three equal
    channels are one. Samples of another size are refused."""
    own = tuple(x.shape[1:]) or (1,)
    if [k for k in own if k > 1] == [k for k in shape if k > 1]:
        return x.reshape(len(x), *shape), []
    if len(own) == 3 and (own[2], *own[:2]) == shape:
        return x.movedim(-1, 1), ["Samples have their channels last; they were put first."]
    turned = x.movedim(-1, 1) if len(own) == 3 and own[0] != 3 else x
    if tuple(turned.shape[1:]) in ((3, *shape), (3, *shape[1:])) and (len(shape) == 2 or shape[0] == 1):
        colours = turned.double().nan_to_num()
        grey, (low, high) = colours.mean(1), colours.aminmax()
        same = (colours - grey[:, None]).abs().max() <= GREY * (high - low)
        require(same, f"Samples are colour images, shape {own}, and the data are grey, shape {shape}.")
        return turned[:, 1].reshape(len(x), *shape), ["Samples have three equal channels and were read as grey."]
    raise InputError(f"Samples have shape {own}, and the data {shape}; give them the shape of the training images.")


def in_units(x: Tensor, data: Empirical, stated: Range | None = None) -> tuple[Tensor, list[str]]:
    """Return samples in the data's units, and sentences on what was assumed; ``stated`` is their range."""
    stated = None if stated is None else interval(stated)
    own, theirs, target = _quantiles(data[_some(data.n)]), _quantiles(x[_some(len(x))]), pixel_range(data)
    floats = x.to(torch.get_default_dtype())
    if target is None:
        why = f"The data are {data.stored} from {own[0]:.3g} to {own[-1]:.3g}: their black and white are unknown"
        known = stated is None and x.dtype != torch.uint8
        require(known, f"{why}. Save the samples in the units of the data, and state no range.")
        return floats, []
    source, width = stated or ((0.0, 255.0) if x.dtype == torch.uint8 else target), target[1] - target[0]
    likely = [r for r in (target, *RANGES) if theirs[-1] - theirs[0] >= USED * (r[1] - r[0])]
    misfit = {r: float((remapped(theirs, r, target) - own).abs().mean()) / width for r in (source, *likely)}
    best, notes = min(misfit, key=lambda r: misfit[r]), []
    if misfit[source] > LEAST and BETTER * misfit[best] < misfit[source] and misfit[best] < USED:
        what = f"Samples from {theirs[0]:.3g} to {theirs[-1]:.3g} are read in {_ends(source)}, and the data lie in "
        what += f"{_ends(target)}; the law of their pixels fits that of the data better in {_ends(best)}"
        flag = f"range=({best[0]:g}, {best[1]:g}), on the command line --samples-range={best[0]:g},{best[1]:g}"
        require(stated is not None, f"{what}. State it as {flag}; or state {_ends(source)} if that is theirs.")
        notes.append(f"{what}.")
    if source != target and not (x.dtype == torch.uint8 and data.stored == "uint8"):
        notes.append(f"Samples were mapped from {_ends(source)} to {_ends(target)}, the range of the data.")
    return remapped(floats, source, target), notes


def pixel_range(data: Empirical) -> Range | None:
    """Return the values of black and white: of bytes those of their scale, of others a usual range that they fill."""
    if data.scale is not None or data.stored == "uint8":
        return data.scale or (0.0, 255.0)
    low, high = (float(end) for end in data[_some(data.n)].aminmax())
    filled = (r for r in RANGES if max(abs(low - r[0]), abs(high - r[1])) <= FILLED * (r[1] - r[0]))
    return next(filled, None)


def _some(n: int) -> Tensor:
    return torch.arange(0, n, math.ceil(n / IMAGES))


def _quantiles(images: Tensor) -> Tensor:
    values = images.flatten().double().cpu()
    values = values[values.isfinite()][:: math.ceil(values.numel() / PIXELS)].sort().values
    require(len(values) > 0, "No sample is finite.")
    return values[torch.linspace(0, len(values) - 1, QUANTILES).round().long()]


def _ends(r: Range) -> str:
    return f"[{r[0]:g}, {r[1]:g}]"
