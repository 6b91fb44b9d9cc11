"""Which closed-form theory explains a trained network: the result, :class:`Explanation`."""

from vkernel.reports.explain.result import Explanation, Sizes

__all__ = ["Explanation", "Sizes"]
