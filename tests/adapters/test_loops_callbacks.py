"""What callbacks do with the objects of their libraries, without these libraries."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from vkernel.adapters import lightning, trainer
from vkernel.core.errors import InputError


class Recorder:
    """A monitor that keeps its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []

    def __call__(self, step: int, network: object, ema: object = None) -> None:
        self.calls.append((step, network, ema))

    def close(self) -> None:
        self.calls.append(("closed",))


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> dict[str, type]:
    """Stand-ins that hold the base classes of callbacks alone."""
    bases = {}
    for name, base in (("lightning.pytorch", "Callback"), ("transformers", "TrainerCallback")):
        module, bases[name] = ModuleType(name), type(base, (), {})
        setattr(module, base, bases[name])
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "lightning", ModuleType("lightning"))
    monkeypatch.delitem(sys.modules, "pytorch_lightning", raising=False)
    return bases


MODULE = SimpleNamespace(net="network", average="averages")
FIND = {"network": lambda module: module.net, "ema": lambda module: module.average}


@pytest.mark.parametrize("first", [True, False])
def test_lightning(libraries: dict[str, type], first: bool) -> None:
    """Rank 0 alone calls its monitor."""
    monitor = Recorder()
    callback = lightning.MonitorCallback(monitor, **FIND)
    assert isinstance(callback, libraries["lightning.pytorch"])
    for step in (7, 8):
        at = SimpleNamespace(global_step=step, is_global_zero=first)
        (callback.on_train_start if step == 7 else callback.on_train_batch_end)(at, MODULE)
    callback.on_exception(at, MODULE, KeyboardInterrupt())
    callback.teardown(at, MODULE, "fit")
    calls = [(7, "network", "averages"), (8, "network", "averages"), ("closed",)]
    assert monitor.calls == (calls if first else [])


@pytest.mark.parametrize("first", [True, False])
def test_trainer(libraries: dict[str, type], first: bool) -> None:
    monitor = Recorder()
    callback = trainer.MonitorCallback(monitor, **FIND)
    assert isinstance(callback, libraries["transformers"])
    for step in (7, 8):
        state = SimpleNamespace(global_step=step, is_world_process_zero=first)
        (callback.on_train_begin if step == 7 else callback.on_step_end)(
            None, state, None, model=MODULE, optimizer=None
        )
    callback.on_train_end(None, state, None, model=MODULE)
    calls = [(7, "network", "averages"), (8, "network", "averages"), ("closed",)]
    assert monitor.calls == (calls if first else [])


@pytest.mark.usefixtures("libraries")
def test_the_module_itself_is_the_network_by_default() -> None:
    monitor = Recorder()
    lightning.MonitorCallback(monitor).on_train_start(SimpleNamespace(global_step=0, is_global_zero=True), MODULE)
    assert monitor.calls == [(0, MODULE, None)]


def test_absent_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("lightning", "lightning.pytorch", "pytorch_lightning", "transformers"):
        monkeypatch.setitem(sys.modules, name, None)
    for module, words in ((lightning, "pip install lightning"), (trainer, "pip install transformers")):
        with pytest.raises(InputError, match=words):
            module.MonitorCallback(Recorder())
