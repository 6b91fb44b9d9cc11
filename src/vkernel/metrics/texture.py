r"""Are samples images, or noise? Neighbouring pixels of images are alike, those of noise are not.

The **texture** of an image x is the correlation of neighbouring pixels,

.. math:: \rho = 1 - \frac{\langle (x_i - x_j)^2 \rangle_{i \sim j}}{2\,\mathrm{var}(x)} ,

over pairs one pixel apart along the last two axes: 0 on average for white noise, whatever its brightness and contrast,
.8 for a digit of MNIST. A sample is **noise** if its texture is below half of that of all but 1 % of the training
images. Where these are not smooth themselves (:math:`\rho < .25` for more than 1 % of them), or have no neighbouring
pixels, nothing can be said."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from vkernel.core.checks import check_type
from vkernel.core.estimate import Estimate, exact_share
from vkernel.data.empirical import Empirical
from vkernel.metrics.copies import check_samples

IMAGES, LEAST = 2048, 0.01  # training images; the share of them that may be rougher than the bound
SMOOTH, HALF = 0.25, 0.5  # the least texture of smooth data; the bound in its units
NOISY = 0.5  # of the samples: more than that, and the sampler gives noise


@dataclass(frozen=True)
class Texture:
    """The share of samples that are ``noise``, and the median texture of ``samples`` and of training images.

    >>> import torch, vkernel as vk
    >>> train, held_out = vk.data.images("digits", 200, 100)
    >>> found = vk.metrics.texture(torch.randn(32, 1, 8, 8, generator=torch.Generator().manual_seed(0)), train)
    >>> found.noise.value > 0.5
    True
    """

    noise: Estimate
    samples: float
    data: float

    @property
    def noisy(self) -> bool:
        """Whether most samples are noise."""
        return bool(self.noise.value > NOISY)


def texture(samples: Tensor, data: Empirical) -> Texture | None:
    """Compare the texture of ``samples (n, *shape)`` with that of the data; ``None`` where it tells nothing. Samples
    that are constant or not finite have no texture and are not noise.

    >>> import torch, vkernel as vk
    >>> train, held_out = vk.data.images("digits", 200, 100)
    >>> vk.metrics.texture(held_out[:32], train).noise.value < 0.2
    True
    """
    x = check_samples(samples, check_type(data, "data", Empirical))
    if len(data.shape) < 2 or min(data.shape[-2:]) < 3:
        return None
    own = neighbour_correlation(data[torch.arange(0, data.n, math.ceil(data.n / IMAGES))])
    bound = HALF * float(own.nanquantile(LEAST))
    if not bound >= HALF * SMOOTH:  # constant images have none
        return None
    theirs = neighbour_correlation(x)
    return Texture(exact_share(int((theirs < bound).sum()), len(x)), float(theirs.nanmedian()), float(own.nanmedian()))


def neighbour_correlation(images: Tensor) -> Tensor:
    """Return the texture of each image, ``(n,)`` in float64 on the CPU; NaN of a constant one."""
    rows = images.detach().double().flatten(1).cpu()
    rows = rows - rows.mean(1, keepdim=True)
    x = (rows / rows.abs().amax(1, keepdim=True)).reshape(images.shape)  # 0 / 0 is NaN
    steps = [x.diff(dim=axis).square().flatten(1).mean(1) for axis in (-1, -2)]
    return 1 - (steps[0] + steps[1]) / (4 * x.square().flatten(1).mean(1))
