"""Checks that are made when the documentation is built; each finding is a warning, and ``make docs`` fails on warnings.

Every image has an alternative text of at least three words. Every public name has a docstring with an example that runs
(``tests/test_docs.py`` runs them): the names of ``vkernel`` itself, and those of the namespaces in :data:`NAMESPACES`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a test imports this file without Sphinx
    from docutils import nodes
    from sphinx.application import Sphinx

NAMESPACES = (
    "process",
    "data",
    "posterior",
    "score",
    "sample",
    "sample.path",
    "theories",
    "adapters",
    "train.models",
    "train.features",
    "kernels",
    "metrics",
    "study",
    "reproduce",
)
WORDS = 3  # of an alternative text, at least
DECORATION = "/thumb/"  # small copies of images in the gallery, beside the title that they link to


def public() -> Iterator[tuple[str, object]]:
    """Yield the classes and functions of the public interface by name, each once."""
    known: set[int] = set()
    for module in ("", *NAMESPACES):
        package = import_module(f"vkernel.{module}".rstrip("."))
        own = [name for name, thing in vars(package).items() if getattr(thing, "__module__", "") == package.__name__]
        for name in getattr(package, "__all__", [name for name in own if not name.startswith("_")]):
            thing = getattr(package, name)
            if (inspect.isclass(thing) or inspect.isroutine(thing)) and id(thing) not in known:
                known.add(id(thing))
                yield f"{package.__name__}.{name}", thing


def without_example() -> list[str]:
    """Return the public names whose docstring is missing or has no example."""
    return [name for name, thing in public() if ">>>" not in (thing.__doc__ or "")]


def check_names(app: Sphinx) -> None:
    """Warn of public names without an example."""
    from sphinx.util import logging

    for name in without_example():
        logging.getLogger(__name__).warning("%s has no docstring with an example (a line that begins with >>>)", name)


def check_images(app: Sphinx, doctree: nodes.document) -> None:
    """Warn of images without an alternative text."""
    from docutils import nodes
    from sphinx.util import logging

    for image in doctree.findall(nodes.image):
        if DECORATION not in image["uri"] and len(image.get("alt", "").split()) < WORDS:
            message = "the image %s has no alternative text of %d words or more: %r"
            shown = image["uri"], WORDS, image.get("alt", "")
            logging.getLogger(__name__).warning(message, *shown, location=image)


def skip(app: Sphinx, what: str, name: str, thing: object, skipped: bool, options: object) -> bool | None:
    """Leave out the fields of named tuples, whose docstrings say nothing but their place."""
    return True if (getattr(thing, "__doc__", None) or "").startswith("Alias for field number") else None


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the checks."""
    app.connect("autodoc-skip-member", skip)
    app.connect("builder-inited", check_names)
    app.connect("doctree-read", check_images)
    return {"parallel_read_safe": True}
