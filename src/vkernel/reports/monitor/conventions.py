"""How a training loop calls its network: the conventions of :mod:`vkernel.score.wrapped`, with a label for each image.

A network is called as ``network(x, time)``, or ``network(x, time, labels)`` if it is class-conditional, or through a
function ``forward(network, x, time, labels)`` of the user. Inputs are on the device and in the precision of its
parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from vkernel.core.errors import require
from vkernel.process import DDPM, Process
from vkernel.score.wrapped import TimeInput, Wrapped, interval

Forward = Callable[[object, Tensor, Tensor, Tensor | None], object]  # forward(network, x, time, labels)
Range = tuple[float, float]


@dataclass(frozen=True)
class Conventions:
    """The conventions of a network; the fields are those of ``vk.as_score``."""

    process: Process
    predicts: str
    time: TimeInput
    range: Range | None
    shape: tuple[int, ...] | None = None
    sigma_data: float = 0.5
    dtype: torch.dtype | None = None
    forward: Forward | None = None

    @classmethod
    def of(
        cls,
        process: Process,
        predicts: str,
        time: TimeInput | None,
        range: Range | str | None,
        sigma_data: float,
        dtype: torch.dtype | None,
        forward: Forward | None,
    ) -> Conventions:
        """Check and return conventions; ``time=None`` is "index" for DDPM, and "t" for other processes."""
        require(forward is None or callable(forward), f"forward must be a function, not {type(forward).__name__}.")
        good = dtype in (None, torch.bfloat16, torch.float16)
        require(good, f"dtype must be torch.bfloat16, torch.float16 or None (no autocast), not {dtype!r}.")
        chosen = ("index" if isinstance(process, DDPM) else "t") if time is None else time
        ends = None if range is None else interval(range)
        found = cls(process, predicts, chosen, ends, None, sigma_data, dtype, forward)
        found.score(lambda x, t: x)  # checks process, predicts, time and sigma_data
        return found

    def on(self, shape: tuple[int, ...]) -> Conventions:
        """Return the conventions for events of this shape."""
        return replace(self, shape=shape)

    def score(self, network: Callable[..., object], labels: Tensor | None = None) -> Wrapped:
        """Return the network as a score on one batch, whose images have these ``labels``."""
        held = network.parameters() if isinstance(network, nn.Module) else ()
        home = next((p for p in held if p.is_floating_point()), None)

        def call(x: Tensor, time: Tensor) -> object:
            near = x.device if home is None else home.device
            rows = x if home is None else x.to(home.device, home.dtype)
            when = time if home is None or not time.is_floating_point() else time.to(home.dtype)
            given = None if labels is None else labels.to(near)
            if self.forward is not None:
                return self.forward(network, rows, when.to(near), given)
            return network(rows, when.to(near), *(() if given is None else (given,)))

        more = {"sigma_data": self.sigma_data, "dtype": self.dtype, "batch": 1 << 30}
        return Wrapped(call, self.process, self.predicts, self.time, self.range, self.shape, **more)  # type: ignore[arg-type]


def device_of(network: object) -> torch.device:
    """Return the device of a network's parameters; the CPU for a function."""
    held = network.parameters() if isinstance(network, nn.Module) else ()
    return next((p.device for p in held), torch.device("cpu"))
