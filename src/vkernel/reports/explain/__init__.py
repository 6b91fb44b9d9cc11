"""Which closed-form theory explains a trained network: :func:`explain` and its result, :class:`Explanation`."""

from vkernel.reports.explain.explain import explain
from vkernel.reports.explain.result import Explanation, Sizes

__all__ = ["Explanation", "Sizes", "explain"]
