"""``vkernel explore``: drag the training points and watch what a model would learn.

The state defines what the page shows; numbers come from the library (``compute``) and are put into text (``captions``)
and drawn (``figures``); ``page`` connects these with the browser, and ``serve`` serves it."""

from vkernel.explore.serve import serve
from vkernel.explore.state import State, from_csv, from_query

__all__ = ["State", "from_csv", "from_query", "serve"]
