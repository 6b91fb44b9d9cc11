"""A monitor in the ``Trainer`` of Hugging Face's transformers, as a callback.

The library is imported when a callback is made."""

from __future__ import annotations

import importlib
from typing import Any

from vkernel.adapters.loops import Finder, Monitoring, Watch, joined
from vkernel.core.errors import InputError


class MonitorCallback:
    """Calls a monitor after each step: ``Trainer(…, callbacks=[MonitorCallback(monitor, lambda model: model.net)])``.

    The model of a ``Trainer`` returns a loss; ``network`` and ``ema`` are functions from it to the network that
    denoises and to averaged weights. Steps are ``state.global_step``, which a checkpoint restores, so that a run that
    is resumed with ``train(resume_from_checkpoint=…)`` continues the curves in the log of the monitor. The process of
    rank 0 evaluates. The monitor is closed at the end of the training, but not by an exception."""

    def __new__(cls, *_: Any, **__: Any) -> Any:
        """Make an object that is a ``TrainerCallback``."""
        return object.__new__(joined(MonitorCallback, _base()) if cls is MonitorCallback else cls)

    def __init__(self, monitor: Monitoring, network: Finder | None = None, ema: Finder | None = None) -> None:
        super().__init__()
        self.watch = Watch(monitor, network, ema)

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return MonitorCallback, (self.watch.monitor, self.watch.network, self.watch.ema)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Evaluate before the first step, the reference for all later evaluations."""
        self.watch.check(model)
        self._call(state, model)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Call the monitor."""
        self._call(state, model)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Close the monitor."""
        self.watch.close()

    def _call(self, state: Any, model: Any) -> None:
        if state.is_world_process_zero:
            self.watch(state.global_step, model)


def _base() -> type:
    try:
        found: type = importlib.import_module("transformers").TrainerCallback
    except ImportError as error:
        raise InputError("The callback for transformers' Trainer needs it: pip install transformers.") from error
    return found
