"""``vkernel explore``: drag the training points and watch what a model would learn.

A page in the browser, served from this machine. :mod:`~vkernel.explore.state` defines what it shows,
:mod:`~vkernel.explore.compute` gets the numbers from the library, :mod:`~vkernel.explore.captions` puts them into text,
:mod:`~vkernel.explore.figures` draws them, and :mod:`~vkernel.explore.page` connects these with the browser. The page
itself computes nothing.
"""

from vkernel.explore.serve import serve
from vkernel.explore.state import State, from_csv, from_query

__all__ = ["State", "from_csv", "from_query", "serve"]
