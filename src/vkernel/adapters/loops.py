"""What callbacks for training libraries share: a monitor, and functions that find the network in the library's module.

A callback takes any monitor: an object that is called as ``monitor(step, network, ema)`` and has ``close()``."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, Protocol

from torch import nn

from vkernel.core.errors import InputError, require

Finder = Callable[[Any], object]  # from the library's module to the network, or to averaged weights


class Monitoring(Protocol):
    """A monitor, such as ``vk.Monitor``."""

    def __call__(self, step: int, network: object, ema: object = None) -> object:
        """Evaluate the network if it is time."""

    def close(self) -> None:
        """Mark the end of the run."""


class Watch:
    """Calls ``monitor`` with the network, and with averaged weights, that are found in a library's module."""

    def __init__(self, monitor: Monitoring, network: Finder | None, ema: Finder | None) -> None:
        good = callable(monitor) and callable(getattr(monitor, "close", None))
        example = "vk.Monitor(data, process, test=held_out, log=folder)"
        require(good, f"A callback needs a monitor, {example}; got {type(monitor).__name__}.")
        for name, find in (("network", network), ("ema", ema)):
            given = find is None or (callable(find) and not isinstance(find, nn.Module))
            hint = f"{name} must be a function of the module that is trained, lambda module: module.{name}"
            require(given, f"{hint}; got {type(find).__name__}.")
        self.monitor, self.network, self.ema = monitor, network, ema
        self.running, self.failed = False, False

    def find(self, module: object) -> tuple[object, object]:
        """Return the network and the averaged weights."""
        network = module if self.network is None else self.network(module)
        return network, None if self.ema is None else self.ema(module)

    def check(self, module: object) -> None:
        """Refuse functions that fail, before the training."""
        try:
            self.find(module)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            raise InputError(f"network= or ema= of the callback fails on {type(module).__name__}: {why}.") from error

    def __call__(self, step: int, module: object) -> None:
        """Call the monitor; a function that fails during training is a warning, once, and stops nothing."""
        self.running = True
        try:
            found = self.find(module)
        except Exception as error:
            if not self.failed:
                self.failed = True
                warnings.warn(f"The network is not watched, and training goes on: {error!r}", stacklevel=3)
            return
        self.monitor(step, *found)

    def close(self) -> None:
        """Close the monitor, once after each training."""
        if self.running:
            self.running = False
            self.monitor.close()


@functools.cache
def joined(*classes: type) -> type:
    """Return a class that inherits from a callback of this package and from the base classes of its library."""
    first = classes[0]
    return type(first.__name__, classes, {"__module__": first.__module__, "__doc__": first.__doc__})
