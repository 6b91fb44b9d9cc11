"""A monitor in PyTorch Lightning, as a callback of its ``Trainer``.

Lightning is imported when a callback is made; it is installed as ``lightning`` or as ``pytorch_lightning``."""

from __future__ import annotations

import contextlib
import importlib
import sys
from typing import Any

from vkernel.adapters.loops import Finder, Monitoring, Watch, joined
from vkernel.core.errors import require

NAMES = ("lightning.pytorch", "pytorch_lightning")


class MonitorCallback:
    """Calls a monitor after each batch: ``Trainer(callbacks=[MonitorCallback(monitor, lambda module: module.net)])``.

    ``network`` and ``ema`` are functions from the ``LightningModule`` to the network and to averaged weights; by
    default the module itself is called as ``module(x, time)``. Steps are ``trainer.global_step``, which a checkpoint
    restores, so that a run that is resumed with ``fit(ckpt_path=…)`` continues the curves in the log of the monitor.
    The process of rank 0 evaluates. The monitor is closed at the end of ``fit``, or by an exception."""

    def __new__(cls, *_: Any, **__: Any) -> Any:
        """Make an object that is a ``Callback`` of the Lightning that is in use."""
        return object.__new__(joined(MonitorCallback, *_bases()) if cls is MonitorCallback else cls)

    def __init__(self, monitor: Monitoring, network: Finder | None = None, ema: Finder | None = None) -> None:
        super().__init__()
        self.watch = Watch(monitor, network, ema)

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return MonitorCallback, (self.watch.monitor, self.watch.network, self.watch.ema)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Evaluate before the first step, the reference for all later evaluations."""
        self.watch.check(pl_module)
        self._call(trainer, pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any, **__: Any) -> None:
        """Call the monitor."""
        self._call(trainer, pl_module)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Close the monitor."""
        self.watch.close()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Close the monitor at the end of ``fit``."""
        self.watch.close()

    def _call(self, trainer: Any, pl_module: Any) -> None:
        if trainer.is_global_zero:
            self.watch(trainer.global_step, pl_module)


def _bases() -> tuple[type, ...]:
    """Return the class ``Callback`` of the packages that are imported, or else of the first that can be."""
    loaded = [name for name in NAMES if sys.modules.get(name) is not None]
    found: list[type] = []
    for name in loaded or NAMES:
        with contextlib.suppress(ImportError):
            found.append(importlib.import_module(name).Callback)
            if not loaded:
                break
    require(found, "The callback for PyTorch Lightning needs it: pip install lightning.")
    return tuple(dict.fromkeys(found))
