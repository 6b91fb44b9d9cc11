"""``vkernel explore``: drag the training points and watch what a model would learn.

The browser owns the state and draws; the server is a function of the state. Numbers come from the library
(``compute``) and are put into text (``captions``); ``answers`` combines these, ``session`` sends them over the
websocket of a tab, and ``serve`` starts the server."""

from vkernel.explore.serve import serve
from vkernel.explore.state import State, from_csv, from_query

__all__ = ["State", "from_csv", "from_query", "serve"]
