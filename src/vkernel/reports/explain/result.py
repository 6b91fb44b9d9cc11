r"""The result of ``vk.explain``: how well each theory predicts each network.

At one noise level, with the network's denoiser D, the theory's :math:`D_{th}`, that of the Gaussian theory :math:`D_G`,
and sums over noisy images,

.. math:: R^2 = 1 - \frac{\sum |D - D_{th}|^2}{\sum |D - \bar D|^2}, \qquad
          \mathrm{gain} = 1 - \frac{\sum |D - D_{th}|^2}{\sum |D - D_G|^2}, \qquad
          \mathrm{ceiling} = 1 - \frac{\tfrac12 \sum |D - D'|^2}{\sum |D - D_G|^2} .

:math:`\bar D` is the mean of D over images: blur alone has a large :math:`R^2`, but no gain. D' is another network of
the same process, the most similar one, and the ceiling is the gain of the mean over trainings. Two floors are gains
without the image (``permuted``: :math:`D_{th}` of another image) and without the training set (``elsewhere``: the same
theory, built on as many held-out images, or on all if there are fewer)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from vkernel.core.files import write, write_json
from vkernel.reports.audit.decoder import Decoder, Decoding, decoder as as_decoder
from vkernel.reports.explain.page import figure, gallery, page, section
from vkernel.reports.explain.report import as_dict, screen, sentences, tables

if TYPE_CHECKING:
    import xarray
    from matplotlib.figure import Figure
    from rich.table import Table
    from rich.text import Text

ENOUGH = 0.5  # of the ceiling, or of 1: a theory with less gain does not explain a network


@dataclass(frozen=True)
class Sizes:
    """Noise levels; images of each set in the verdict; samples and the steps of their sampler; images of each set for
    fits; pictures that are kept."""

    levels: int = 8
    images: int = 32
    samples: int = 40
    steps: int = 20
    fit: int = 8
    pictures: int = 8

    @classmethod
    def quick(cls) -> Sizes:
        """Return sizes for a first look."""
        return cls(5, 12, 8, 20, 3)


@dataclass(frozen=True)
class Explanation:
    """The numbers of ``vk.explain``, each with the ends of a 95 % interval over images, ``…_low, …_high``.

    ``denoising`` has the dimensions ``network, theory, images, level``; ``images`` are "training" and, with a test set,
    "held-out". Variables: ``r2``, ``gain``, ``elsewhere`` with intervals, ``permuted``; ``ceiling (network, images,
    level)``. Coordinates: ``ratio`` and ``t (network, level)``, σ/α and the time; ``partner (network)``, the network of
    the ceiling, or ""; ``available (network)``, the number of its training images (those of its class); ``points``,
    ``points_elsewhere``, ``about (network, theory)``: the number of training images that the theory was built from (0
    if it is not built on data), that of the held-out images of ``elsewhere``, and its parameters, such as "k = 3 … 15".

    ``samples`` has the dimensions ``network, theory``. Samples of the network and of the theory begin at the same noise
    and take the same steps: ``r2`` (with interval), the median over samples of the squared correlation of pixels;
    ``permuted`` and ``elsewhere`` (with interval), its floors; ``ceiling (network)`` (with interval). ``copies``, the
    share of copies of training images, ``frechet`` and ``kernel``, distances to held-out images (all with intervals),
    and ``seconds`` for one sample; the same of the network itself, ``own_copies (network)`` and so on. The
    coordinates ``partner``, ``points``, ``points_elsewhere`` and ``about`` are as above.

    What could not be measured is NaN. ``pictures[network][name]`` are final images ``(P, *shape)`` of the network and
    of each theory from the same noise, in the network's pixel units, ``ranges[network]``."""

    denoising: xarray.Dataset
    samples: xarray.Dataset
    pictures: dict[str, dict[str, Tensor]] = field(repr=False)
    ranges: dict[str, tuple[float, float] | None]
    n: int  # training images
    held: int  # held-out images
    sizes: Sizes
    seed: int
    seconds: float
    quick: bool = False
    notes: tuple[str, ...] = ()

    @property
    def networks(self) -> tuple[str, ...]:
        """The names of the networks."""
        return tuple(self.denoising.network.values.tolist())

    @property
    def theories(self) -> tuple[str, ...]:
        """The names of the theories."""
        return tuple(self.denoising.theory.values.tolist())

    @property
    def verdict(self) -> xarray.Dataset:
        """The denoising of held-out images, or of training images without a test set; without the dimension images."""
        return self.denoising.isel(images=-1)

    @property
    def best(self) -> dict[str, tuple[str | None, ...]]:
        """The theory with the largest gain, by network and level; ``None`` where no gain is above 0, and above that of
        permuted images, beyond doubt."""
        found, out = self.verdict, {}
        gain = found.gain.where((found.gain_low > 0) & (found.gain_low > found.permuted), -math.inf)
        for name, rows in zip(self.networks, gain.transpose("network", "level", "theory").values, strict=True):
            out[name] = tuple(self.theories[int(row.argmax())] if row.max() > 0 else None for row in rows)
        return out

    @property
    def well(self) -> dict[str, tuple[bool, ...]]:
        """Whether the best theory has half of the ceiling's gain, or half of 1 where there is no ceiling, by network
        and level."""
        found, out = self.verdict, {}
        for name, row in self.best.items():
            most = found.ceiling.sel(network=name).fillna(1.0).clip(0.0, 1.0).values.tolist()
            own = found.gain.sel(network=name)
            pairs = enumerate(zip(row, most, strict=True))
            out[name] = tuple(
                one is not None and float(own.sel(theory=one)[k]) >= ENOUGH * top for k, (one, top) in pairs
            )
        return out

    @property
    def summary(self) -> str:
        """The verdict on each network and what qualifies it, in sentences."""
        return "\n".join(sentences(self))

    @property
    def table(self) -> str:
        """The gains by noise level and the samples of each network, in aligned columns."""
        return "\n\n".join(str(grid) for name in self.networks for grid in tables(self, name))

    def screen(self) -> list[Text | Table]:
        """Return the verdict and the tables for the terminal, in parts."""
        return screen(self)

    def figure(self, network: str | None = None) -> Figure:
        """Draw the gains against σ/α, beside ceiling and floors, of one network or of all."""
        return figure(self, network)

    def gallery(self, network: str | None = None) -> Figure:
        """Draw final images from the same noise, of a network (default: the first) and of each theory."""
        return gallery(self, network)

    def to_dict(self) -> dict[str, object]:
        """Return everything but pictures as numbers, lists and dictionaries; numbers without a value are ``None``."""
        return as_dict(self)

    def to_json(self, path: str | Path) -> Path:
        """Write :meth:`to_dict` to a file."""
        return write_json(path, self.to_dict())

    def section(self, decoder: Decoder | None = None) -> dict[str, Any]:
        """Return what the section of a page shows (``templates/explain_section.html``)."""
        return section(self, decoder)

    def to_html(self, path: str | Path, decoder: Decoding | None = None) -> Path:
        """Write one self-contained page: verdict, figures, pictures and tables. A ``decoder``
        (:func:`vkernel.reports.audit.decoder`) shows latents as images."""
        return write(path, page(self, None if decoder is None else as_decoder(decoder)))
