r"""Image sets by name: a training set of n images, and held-out images of the same law.

=============  =====================================================  ==============================================
name           images                                                 where
=============  =====================================================  ==============================================
``digits``     1,797 of 8×8; held-out images are a part of these      scikit-learn
``fashion``    60,000 and 10,000 of 28×28                             ``$VKERNEL_DATA/fashion-mnist``, or the Debian
                                                                      package ``dataset-fashion-mnist``
``cifar10``    sheets of 32×32 in colour; those from number 50 on     ``$VKERNEL_DATA/cifar10``, ``…/cifar10_more``
               are held out
=============  =====================================================  ==============================================

A file ``NAME.npz`` with uint8 arrays ``train`` and ``test``, beside such a folder or in it, replaces the folder.
Values 0 … 255 become [-1, 1]. Set number k takes the first n images of a permutation that depends on (seed, k) alone,
so that a larger set contains a smaller one; held-out images are those of the test set in the same way, or the last ones
of the permutation where there is no test set. ``size`` is the side after averaging over squares of pixels; a side that
``size`` does not divide is first padded on both sides, with the lowest value, to the next multiple of 4."""

import functools
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from vkernel.core import rng
from vkernel.core.checks import check_choice, check_whole
from vkernel.core.errors import InputError, require
from vkernel.data.empirical import Empirical
from vkernel.data.loaders import read
from vkernel.data.toys import digits

LUMA = (0.299, 0.587, 0.114)  # of red, green and blue in a grey level (ITU-R BT.601)
DEBIAN = Path("/usr/share/datasets")
Pool = tuple[Tensor, Tensor | None]  # training images and, where they are apart, test images, (n, C, H, W)


def images(
    name: str, n: int, test: int = 512, *, size: int | None = None, grey: bool = False, seed: int = 0, set: int = 0
) -> tuple[Empirical, Empirical]:
    """Return ``n`` training images and ``test`` held-out ones of a set in :data:`IMAGES`, ``(C, size, size)`` each.

    >>> import vkernel as vk
    >>> train, held_out = vk.data.images("digits", 100, 50)
    >>> train.n, held_out.n, train.shape
    (100, 50, (1, 8, 8))
    """
    check_choice(name, "name of an image set", IMAGES)
    check_whole(n, "n, the number of training images,")
    check_whole(test, "test, the number of held-out images,")
    train, held_out = _pool(name, os.environ.get("VKERNEL_DATA"))
    order = torch.randperm(len(train), generator=rng.stream(seed, f"images/{name}/train", set))
    if held_out is None:
        good, rest = n + test <= len(train), train[order[len(order) - test :]]
        require(good, f"{name} has {len(train):,} images in all; n = {n:,} and test = {test:,} are more.")
    else:
        good = n <= len(train) and test <= len(held_out)
        has = f"{name} has {len(train):,} training and {len(held_out):,} test images here"
        require(good, f"{has}; n = {n:,} and test = {test:,} are more.")
        rest = held_out[torch.randperm(len(held_out), generator=rng.stream(seed, f"images/{name}/test", set))[:test]]
    first, second = (_shaped(part, size, grey) for part in (train[order[:n]], rest))
    return Empirical(first, name=name), Empirical(second, name=f"{name}, held out")


def _shaped(pixels: Tensor, size: int | None, grey: bool) -> Tensor:
    """Return images in [-1, 1], grey and of the given side if wanted."""
    x = pixels.float() / 127.5 - 1 if pixels.dtype == torch.uint8 else pixels.float()
    if grey and x.shape[1] == 3:
        x = (x * torch.tensor(LUMA)[:, None, None]).sum(1, keepdim=True)
    side = x.shape[-1]
    if size is None or size == side:
        return x
    good = 1 <= size <= side + (-side % 8)
    require(good, f"size, the side of an image, must be from 1 to {side}; got {size!r}.")
    if side % size:
        more = next((k for k in range(0, 8, 2) if (side + k) % 4 == 0 and (side + k) % size == 0), None)
        if more is None:
            whole = ", ".join(str(k) for k in range(4, side + 1) if side % k == 0)
            raise InputError(f"size {size} divides neither {side} nor that side padded; {whole} do.")
        x = F.pad(x, (more // 2,) * 4, value=-1.0)
    return F.avg_pool2d(x, x.shape[-1] // size)


@functools.lru_cache(maxsize=2)
def _pool(name: str, root: str | None) -> Pool:
    """Return all images of a set; ``root`` is the folder VKERNEL_DATA."""
    return IMAGES[name](Path(root).expanduser() if root else None)


def _packed(root: Path | None, name: str) -> Pool | None:
    """Return the images in NAME.npz, if there is one."""
    for path in (root / f"{name}.npz", root / name / f"{name}.npz") if root else ():
        if path.is_file():
            train, test = (torch.from_numpy(np.asarray(read(path, key=key))) for key in ("train", "test"))
            return (train, test) if train.ndim == 4 else (train[:, None], test[:, None])
    return None


def _digits(root: Path | None) -> Pool:
    return _packed(root, "digits") or (digits()[:], None)


def _fashion(root: Path | None) -> Pool:
    packed = _packed(root, "fashion-mnist")
    if packed is not None:
        return packed
    files = [f"{part}-images-idx3-ubyte" for part in ("train", "t10k")]
    for folder in ([root] if root else []) + [DEBIAN]:
        found = [path for file in files for path in sorted((folder / "fashion-mnist").glob(f"{file}*"))]
        if len(found) == len(files):
            train, test = (torch.from_numpy(np.array(read(path))) for path in found)
            return train, test
    advice = "Set VKERNEL_DATA to a folder that holds fashion-mnist/, or install the Debian package."
    raise InputError(f"There are no Fashion-MNIST files in $VKERNEL_DATA/fashion-mnist or {DEBIAN}. {advice}")


def _cifar10(root: Path | None) -> Pool:
    packed = _packed(root, "cifar10")
    if packed is not None:
        return packed
    folders = [root / name for name in ("cifar10", "cifar10_more")] if root else []
    tests = [path for folder in folders for path in sorted(folder.glob("cifar10_batch_[5-9][0-9].png"))]
    require(
        tests, "There are no CIFAR-10 sheets; set VKERNEL_DATA to a folder that holds cifar10/ with its PNG sheets."
    )
    parts = [[read(folder) for folder in folders if folder.is_dir()], [read(path) for path in tests]]
    train, test = (torch.from_numpy(np.concatenate([np.asarray(a) for a in part])) for part in parts)
    return train, test


IMAGES: dict[str, Callable[[Path | None], Pool]] = {"digits": _digits, "fashion": _fashion, "cifar10": _cifar10}
