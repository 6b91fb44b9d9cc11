"""C along the line between two of scikit-learn's digits; see :mod:`vkernel.reproduce.between`."""

from __future__ import annotations

import torch

from vkernel.core.errors import InputError
from vkernel.data import digits
from vkernel.reproduce.between import Sizes, exhibit
from vkernel.reproduce.page import Exhibit, Run, Skip

__all__ = ["make"]

ORDER, TITLE, SECONDS = 20, "C along the line between two digits", 20.0
FULL = Sizes(lowest=0.02, levels=33, fine=301, places=61, draws=96, pairs=200, pair_draws=16, queries=512)
QUICK = Sizes(lowest=0.02, levels=9, fine=31, places=13, draws=4, pairs=20, pair_draws=4, queries=64)


def make(run: Run) -> Exhibit:
    try:
        data = digits()
    except InputError as error:
        raise Skip(str(error)) from error
    from sklearn.datasets import load_digits

    labels = torch.from_numpy(load_digits().target)
    return exhibit(run, "digits_line", TITLE, "digits", data, labels, QUICK if run.quick else FULL)
