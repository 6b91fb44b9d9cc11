"""The loss of a member, compiled by ``torch.compile``: its elementwise operations become few kernels.

Compiling a U-Net takes 20 to 50 s. A compiled loss serves all members, objectives and trainings of a process with the
same architecture, precision and shapes. Its kernels read filters with the channels last, and in the precision of
products: :func:`laid_out` makes such copies of the parameters of all members, once a step."""

import importlib.util
import os
import shutil
import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from vkernel.train.models.base import State
from vkernel.train.models.step import gradient

Loss = Callable[..., Tensor]
WORTH = 40_000  # steps of members: about as many as win back the time of compiling a small network
_COMPILED: dict[object, Loss | None] = {}  # by architecture and shapes; None where compiling failed


def missing() -> str | None:
    """Return what is missing here to compile for a GPU, in words."""
    if importlib.util.find_spec("triton") is None:
        return "Triton, which comes with PyTorch for GPUs"
    if not any(shutil.which(name) for name in (os.environ.get("CC", "cc"), "gcc", "clang")):
        return "a C compiler (cc, gcc or clang)"
    return None


def compiled(loss: Loss, key: object, parameters: State, draws: Sequence[Tensor], backend: str = "inductor") -> Loss:
    """Return ``loss`` of one member, compiled for ``parameters`` and ``draws`` like the given; where compiling fails,
    the loss itself, with a warning. Of equal keys it is compiled once."""
    shapes = tuple((tuple(a.shape), a.dtype) for a in draws)
    if (key, shapes) not in _COMPILED:
        options: dict[str, str | int | bool | Callable[..., object]] = {"force_layout_optimization": True}
        try:
            fast = torch.compile(
                loss, fullgraph=True, dynamic=False, backend=backend, options=options if backend == "inductor" else None
            )
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "TensorFloat32")  # whether it is used is the caller's choice
                gradient(fast, parameters, draws)
            _COMPILED[key, shapes] = fast
        except Exception as error:  # a compiler's, of many kinds, and none is the user's
            warnings.warn(f"torch.compile fails here, so training is slower: {error!r:.300}", stacklevel=2)
            _COMPILED[key, shapes] = None
    return _COMPILED[key, shapes] or loss


def laid_out(state: State, dtype: torch.dtype) -> State:
    """Return memory for the matrices and filters of all members, in ``dtype`` and with the channels last."""
    out = {}
    for name, p in state.items():
        if p.ndim == 5:
            M, o, i, *sides = p.shape
            out[name] = torch.empty(M, o, *sides, i, dtype=dtype, device=p.device).permute(0, 1, 4, 2, 3)
        elif p.ndim > 2:
            out[name] = torch.empty_like(p, dtype=dtype)
    return out
