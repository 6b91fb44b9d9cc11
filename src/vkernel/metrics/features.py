r"""Features of images, in which laws of images are compared.

An :class:`Extractor` maps images ``(n, *shape)`` to features ``(n, k)``:

==========================  =========================================================================================
pixels                      the image as it is
standardised                less the mean, over the root mean square of the rest: without brightness and contrast
pca:K, pca:K of SPEC        the first K principal components of the pixels, or of other features
package.file:function,      the user's own: called with images, it returns their features, of any shape after the first
path/to/file.py:function    axis. Naming it imports that file, which runs it. Also a function or a network.
FACTORY@WEIGHTS             a network: the factory (``package.file:make`` or ``path/to/file.py:Net(depth=3)``) builds it
                            and a weight file on this machine fills it; nothing is downloaded.
==========================  =========================================================================================

Principal components are fitted on at most 4,096 training images with features :math:`f`: with the largest eigenvalues
:math:`\lambda_1 \ge \dots \ge \lambda_K` of their covariance and the eigenvectors :math:`e_j`,

.. math:: z_j = e_j \cdot (f - \bar f) / s, \qquad s^2 = \frac1K \sum_j \lambda_j .

One number s for all: they are not whitened, and have mean variance 1 whatever the unit of pixels."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from torch import Tensor, nn

from vkernel.adapters import factory as files, weights
from vkernel.core import rng
from vkernel.core.checks import as_tensor, check_real
from vkernel.core.errors import InputError, require
from vkernel.data.empirical import Empirical

FITTED = 4096  # images, for principal components
CALL = 2**21  # pixels in one call
FLAT = 1e-6  # of an image's largest value: smaller contrasts are rounding
Images = Empirical | Tensor


@dataclass(frozen=True, eq=False)
class Extractor:
    """``extract(images)`` returns features ``(n, k)``; principal components must be fitted first.

    >>> import torch, vkernel as vk
    >>> train, held_out = vk.data.images("digits", 200, 100)
    >>> extract = vk.metrics.extractor("pixels")
    >>> extract(train[:5]).shape
    torch.Size([5, 64])
    """

    name: str
    function: Callable[[Tensor], Tensor] = field(repr=False)
    custom: bool = False  # the user's own
    components: int | None = None  # principal components, if any
    center: Tensor | None = field(default=None, repr=False)
    axes: Tensor | None = field(default=None, repr=False)

    @property
    def plain(self) -> bool:
        """Whether the features are the pixels themselves."""
        return self.name == "pixels" and not self.custom

    def __call__(self, images: Tensor) -> Tensor:
        features = self._features(images)
        if self.components is None:
            return features
        center, axes = (a.to(features.device) for a in self._fitted())
        own, k = len(axes), features.shape[1]
        require(k == own, f"{self.name!r} was fitted on {own} features, but these images have {k}.")
        return (features.double() - center) @ axes

    def over(self, images: Images, indices: Tensor | None = None) -> Tensor:
        """Return the features of all images, or of those at ``indices``, ``(n, k)``, computed chunk by chunk."""
        images = images if isinstance(images, Empirical) else check_real(images, "Images (n, *shape)")
        require(len(images) > 0, "There are no images to take features of.")
        which = torch.arange(len(images)) if indices is None else indices
        size = images.d if isinstance(images, Empirical) else math.prod(images.shape[1:])
        require(len(which) > 0 and size > 0, "There are no images to take features of.")
        parts: list[Tensor] = []
        for some in which.split(max(1, CALL // size)):
            chunk = images[some]
            parts.append(self(chunk if chunk.is_floating_point() else chunk.float()))
            k, first = parts[-1].shape[1], parts[0].shape[1]
            require(k == first, f"{self.name!r} returned {first} features for some images and {k} for others.")
        return torch.cat(parts)

    def fit(self, data: Images, seed: int = 0) -> Extractor:
        """Fit principal components on ``data``; an extractor without any returns itself."""
        from scipy.linalg import eigh

        if self.components is None:
            return self
        data = data if isinstance(data, Empirical) else Empirical(data)
        which = data.choose(min(FITTED, data.n), rng.stream(seed, "images for principal components"))
        features = replace(self, components=None).over(data, which).double().cpu()
        (n, k), center = features.shape, features.mean(0)
        most = min(n - 1, k)
        good = self.components <= most
        require(good, f"{self.name!r} is too many: {n} images with {k} features have {most} at most.")
        rows = features - center
        product = (rows.mT @ rows if k <= n else rows @ rows.mT) / (n - 1)  # the smaller of the two
        last = len(product) - 1
        values, vectors = eigh(product.numpy(), subset_by_index=[last + 1 - self.components, last])
        mean, axes = float(values.clip(0).mean()), torch.from_numpy(vectors).flip(1)
        require(mean > 0, "All images have the same features; there are no principal components.")
        axes = axes if k <= n else torch.linalg.qr(rows.mT @ axes).Q
        return replace(self, center=center, axes=axes / math.sqrt(mean))

    def reduced(self, components: int) -> Extractor:
        """Return the first principal components of these features, not fitted yet."""
        require(self.components is None, f"{self.name!r} are principal components already.")
        name = f"pca:{components}" + ("" if self.plain else f" of {self.name}")
        return replace(self, name=name, components=components)

    def remainder(self) -> Extractor:
        """Return one feature: the norm of the part outside the fitted principal components, in their unit s."""
        center, axes = self._fitted()
        unit = 1 / float(axes[:, 0].norm())

        def length(images: Tensor) -> Tensor:
            rows, own = self._features(images).double() - center.to(images.device), unit * axes.to(images.device)
            return (rows - rows @ own @ own.mT).norm(dim=1) / unit

        return Extractor(f"remainder of {self.name}", length)

    def _fitted(self) -> tuple[Tensor, Tensor]:
        if self.center is None or self.axes is None:
            raise InputError(f"The principal components of {self.name!r} are not fitted; call .fit(data).")
        return self.center, self.axes

    def _features(self, images: Tensor) -> Tensor:
        """Return the features, refused unless they are one finite row of numbers for each image."""
        require(check_real(images, "Images (n, *shape)").ndim > 0, "Images must be (n, *shape); one number was given.")
        images, n = images.to(torch.get_default_dtype()) if self.custom else images, len(images)
        try:
            with torch.no_grad():
                out = self.function(images)
                out = out.float() if isinstance(out, Tensor) and out.dtype == torch.bool else out
                out = as_tensor(out, "what it returns").detach()
        except Exception as error:
            why = f"of shape {tuple(images.shape)}: {type(error).__name__}: {files.reason(error)}"
            raise InputError(f"The features {self.name!r} failed on images {why}.") from error
        good = out.ndim > 0 and len(out) == n and out.numel() > 0
        given = f"{out.dtype} of shape {tuple(out.shape)}"
        require(good, f"The features {self.name!r} must be real numbers, one row for each of {n} images; got {given}.")
        out = out.reshape(n, -1).to(images.device)
        out = out if out.dtype in (torch.float32, torch.float64) else out.float()
        bad = int((~out.isfinite().all(1)).sum())
        require(not bad, f"The features {self.name!r} of {bad} of {n} images are NaN or infinite.")
        return out


Features = Extractor | Callable[[Tensor], Tensor] | str


def extractor(spec: Features) -> Extractor:
    """Return the extractor of ``spec``: a text of the table above, a function, a network or an extractor.

    >>> import torch, vkernel as vk
    >>> train, held_out = vk.data.images("digits", 200, 100)
    >>> extract = vk.metrics.extractor(lambda x: x.flatten(1)[:, :10])
    >>> extract(train[:5]).shape
    torch.Size([5, 10])
    """
    if isinstance(spec, Extractor):
        return spec
    if isinstance(spec, str):
        text = spec.strip()
        if text in _BUILT_IN:
            return Extractor(text, _BUILT_IN[text])
        if text.startswith("pca:"):
            count, _, rest = text.removeprefix("pca:").partition(" of ")
            whole = count.strip().isdecimal() and len(count) < 10 and int(count) > 0
            require(whole, f"Principal components are written pca:32 or pca:32 of standardised, not {spec!r}.")
            return extractor(rest or "pixels").reduced(int(count))
        known = f"{', '.join(_BUILT_IN)}, pca:K, your own function as package.file:function or path/to/file.py:function"
        network = "and a network as FACTORY@WEIGHTS, such as mynet.py:make@weights.pt; nothing is downloaded"
        require(":" in text, f"There are no features {spec!r}; there are {known}, {network}.")
        factory, _, held = text.rpartition("@")
        name, function = text, _network(factory, held) if ":" in factory else files.named(text, "function")
    else:
        name, function = (spec.__name__ if inspect.isroutine(spec) else type(spec).__name__), spec
        require(callable(spec), f"Features are named by a text or computed by a function, not {name}.")
    ready = not (isinstance(function, nn.Module) and function.training)
    require(ready, f"The network {name!r} is in training mode: features may change between calls; call .eval() first.")
    return Extractor(name, cast(Callable[[Tensor], Tensor], function), custom=True)


def _network(factory: str, path: str) -> Callable[[Tensor], Tensor]:
    """Return the network of a factory with the weights of a file; it follows the images to their device."""
    module = weights.fill(files.build(factory), weights.read_weights(path), path).eval().requires_grad_(False)

    def features(images: Tensor) -> Tensor:
        return cast(Tensor, module.to(images)(images))

    return features


def _pixels(images: Tensor) -> Tensor:
    return images.flatten(1) if images.ndim > 1 else images[:, None]


def _standardised(images: Tensor) -> Tensor:
    rows = _pixels(images).double()
    rest = rows - rows.mean(1, keepdim=True)
    size = rest.square().mean(1, keepdim=True).sqrt()
    flat = size <= FLAT * rows.abs().amax(1, keepdim=True)
    return (rest / size.masked_fill(flat, 1.0)).masked_fill(flat, 0.0).to(images.dtype)


_BUILT_IN: dict[str, Callable[[Tensor], Tensor]] = {"pixels": _pixels, "standardised": _standardised}
