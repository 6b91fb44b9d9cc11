r"""What half precision leaves, in eight bits (docs/theory.md, §2.5).

Of :math:`x' = g (X_0 + X_1)` and :math:`\tilde y = u (H + L)`, each split into a half-precision number and a rest some
2,000 times smaller, the products with a rest need few digits: rounded to the three binary digits of an 8-bit float they
err by a thirtieth of their own size, some 10⁻⁵ of the whole. Tensor cores multiply such numbers twice as fast, and one
product does both, with rests and numbers side by side,

.. math:: X_1 \cdot H + X_0 \cdot L \approx [\,X_1, X_0\,] \cdot [\,H, L\,], \qquad
          W_1 H + W_0 L \approx [\,W_1, W_0\,] \begin{bmatrix} H \\ L \end{bmatrix} .

Where :math:`H` is exact there is no :math:`L`. Half-precision numbers here are at most :math:`2^{14}` and their rests
at most 8; divided by 64 and times 32 both fit into the range of an 8-bit float, which ends at 448.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["EIGHT", "Eighths", "eighths", "supported"]

EIGHT = torch.float8_e4m3fn
NUMBER, REST = 1 / 64, 32.0


def supported(device: torch.device) -> bool:
    """Whether ``device`` multiplies 8-bit floats; that it does is seen by trying."""
    if device.type != "cuda":
        return False
    try:
        one = torch.ones((32, 32), device=device).to(EIGHT)
        _product(one, one.mT, torch.ones((), device=device), None)
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return False
    return True


def eighths(number: Tensor, rest: Tensor, both: bool) -> Tensor:
    """The left factor of a product: rests, and numbers where there are ``both`` on the right, side by side."""
    left = rest * REST
    return (torch.cat([left, number * NUMBER], -1) if both else left).to(EIGHT)


class Eighths:
    """The right factors: ``[H, L] (N, k D)`` and its like across, ``(D, k N)``; k is 1 where there is no L."""

    def __init__(self, high: Tensor, low: Tensor | None) -> None:
        self.both, (rows, width) = low is not None, high.shape
        # numbers and rests share a scale; alone, and of 8-bit data at most 255, H may stay as it is
        number = 1.0 if low is None and float(high.abs().max()) <= 256 else NUMBER
        self.scale = torch.tensor(1 / (number * REST), dtype=torch.float32, device=high.device)
        self.right = torch.empty((rows, (1 + self.both) * width), dtype=EIGHT, device=high.device)
        self.across = torch.empty((width, (1 + self.both) * rows), dtype=EIGHT, device=high.device)
        step = max(16, (1 << 24) // width)
        for start in range(0, rows, step):
            here = slice(start, min(start + step, rows))
            for k, (part, factor) in enumerate(((high, number), (low, REST))):
                if part is not None:
                    small = (part[here] * factor).to(EIGHT)
                    self.right[here, k * width : (k + 1) * width] = small
                    self.across[:, k * rows + here.start : k * rows + here.stop] = small.mT

    @property
    def nbytes(self) -> int:
        return self.right.nbytes + self.across.nbytes

    def logits(self, left: Tensor, out: Tensor) -> None:
        """Products of queries ``(B, k D)`` with all points, into ``out (B, N)``."""
        _product(left, self.right.mT, self.scale, out)

    def sums(self, left: Tensor) -> Tensor:
        """Sums of points with weights ``(B, k N)``, ``(B, D)``."""
        return _product(left, self.across.mT, self.scale, None)


def _product(a: Tensor, b: Tensor, scale: Tensor, out: Tensor | None) -> Tensor:
    if a.device.type != "cuda":
        return torch.mul(a.float() @ b.float(), scale, out=out)
    one = torch.ones_like(scale)
    more = {} if out is None else {"out": out}
    return torch._scaled_mm(a, b, scale_a=scale, scale_b=one, out_dtype=torch.float32, use_fast_accum=True, **more)
