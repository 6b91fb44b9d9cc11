"""Does the noise of the training target make networks generalize? Rules, numbers and figures of a study on networks.

``rules(ds)`` decides the rules of :mod:`~vkernel.reports.target_noise.rules` for the labelled arrays of a study;
``summary``, ``trends`` and ``singles`` return the numbers beside them. ``table`` states the outcomes, and ``answer``
has all of it for a JSON file. ``causes`` compares V by what varies between members. :func:`vkernel.plots.twin_curves`
and :func:`~vkernel.plots.twin_variances` draw ``in_cells(summary(ds))``, and ``sample_figure`` draws samples."""

from vkernel.reports.target_noise.causes import causes, causes_table
from vkernel.reports.target_noise.numbers import Single, Trend, singles, summary, trends
from vkernel.reports.target_noise.report import answer, in_cells, sample_figure, table, to_json
from vkernel.reports.target_noise.rules import Outcome, Part, rules

__all__ = [
    "Outcome",
    "Part",
    "Single",
    "Trend",
    "answer",
    "causes",
    "causes_table",
    "in_cells",
    "rules",
    "sample_figure",
    "singles",
    "summary",
    "table",
]
__all__ += ["to_json", "trends"]
