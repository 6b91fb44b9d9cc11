"""TensorBoard: the curves of a run as scalars, and the closest samples as images, if tensorboard is installed.

Weights & Biases and MLflow import these files (``wandb.init(sync_tensorboard=True)``; docs/howto/monitor.md)."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np

from vkernel.reports.monitor.alarm import Verdict
from vkernel.reports.monitor.record import Evaluation, Setting


@functools.cache
def load() -> Any:
    """Return TensorBoard's writer, or ``None`` if tensorboard is not installed or cannot be imported."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except Exception:  # whatever its dependencies raise
        return None
    return SummaryWriter


class Board:
    """Writes evaluations to TensorBoard's files in ``folder``; ``step`` is the first, from which
    on those of a run that was stopped are superseded."""

    def __init__(self, folder: Path, setting: Setting, step: int) -> None:
        self.setting, self.writer = setting, load()(str(folder), purge_step=step)

    def add(self, record: Evaluation, verdict: Verdict, picture: np.ndarray | None) -> None:
        """Write one evaluation; ``picture (H, W, 3)`` are the closest samples above their nearest training images."""
        for name, value in scalars(record, verdict, self.setting).items():
            self.writer.add_scalar(f"monitor/{name}", value, record.step)
        if picture is not None:
            self.writer.add_image("monitor/closest samples", picture, record.step, dataformats="HWC")
        self.writer.flush()

    def close(self) -> None:
        """Close the files."""
        self.writer.close()


def scalars(record: Evaluation, verdict: Verdict, setting: Setting) -> dict[str, float]:
    """Return the numbers of an evaluation by name."""
    found = {"error/training": record.train.value, "error/held-out": record.test.value}
    for k, ratio in enumerate(setting.ratio):
        found |= {f"level {ratio:.3g}/{name}": float(e.value[k]) for name, e in record.levels.items()}
    for name, held in (("ideal", record.ideal), ("gaussian", record.gaussian)):
        found |= {f"distance from {name}/{key}": float(e.value.mean()) for key, e in held.items()}
    if verdict.gap is not None:
        gap = verdict.gap
        found |= {"alarm/change": gap.change, "alarm/change, lower bound": gap.change_low}
        found |= {"alarm/gap": gap.gap, "alarm/gap, lower bound": gap.gap_low}
    if record.drawn is not None:
        found["copies/share"] = record.drawn.copies(setting.threshold).value
    found["cost/share of wall time"] = record.spent / record.wall if record.wall > 0 else 0.0
    return {name: value for name, value in found.items() if np.isfinite(value)}
