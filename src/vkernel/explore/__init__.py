"""``vkernel explore``: drag the training points and watch what a model would learn.

A page in the browser, served from this machine. :mod:`~vkernel.explore.state` says what it shows and turns it into an
address; :mod:`~vkernel.explore.compute` and :mod:`~vkernel.explore.simulate` ask the library for the numbers;
:mod:`~vkernel.explore.figures` and :mod:`~vkernel.explore.page` show them. Nothing is computed in the page itself.
"""

from vkernel.explore.serve import serve
from vkernel.explore.state import State, from_csv, from_query

__all__ = ["State", "from_csv", "from_query", "serve"]
