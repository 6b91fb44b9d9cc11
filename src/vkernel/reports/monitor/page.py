"""The page of a monitored run, made from its log alone: verdict and evidence, curves, copies beside their sources."""

from __future__ import annotations

import base64
import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vkernel.reports import html
from vkernel.reports.monitor.alarm import DELTA, Verdict, gaps, verdicts
from vkernel.reports.monitor.log import Run
from vkernel.reports.monitor.onset import needed
from vkernel.reports.monitor.pictures import SHOWN
from vkernel.reports.monitor.probe import SETS
from vkernel.reports.monitor.record import Evaluation, Setting
from vkernel.reports.monitor.report import COLUMNS, cells, evidence, gist, text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAMES = {"train": "training images", "test": "held-out images"}
STRIPS = 4  # evaluations whose closest samples are shown
RANKS = {1: "smallest", 2: "second", 3: "third"}


def page(run: Run, folder: Path, refresh: int = 0) -> str:
    """Return the HTML page of a run, whose pictures lie in ``folder``; ``refresh`` seconds after which a browser reads
    it again, 0 for never."""
    every = verdicts(run.records, run.setting)
    last, records, setting = every[-1] if every else None, run.records, run.setting
    j = needed(setting) if setting.samples else None
    return html.page(
        "monitor.html",
        title=f"Training run {folder.resolve().name}",
        refresh=refresh if run.running else 0,
        running=run.running,
        records=records,
        s=setting,
        gist=gist(last, setting).capitalize() + ".",
        mark=_mark(last),
        sentences=evidence(last, setting) if last is not None else [],
        notes=_notes(last, records, setting),
        figures={name: html.picture(draw) for name, draw in _figures(run, last).items()},
        rank="" if j is None else RANKS.get(j, f"{j}th"),
        pictures=_pictures(records, folder, last),
        columns=COLUMNS,
        rows=[cells(r, v, setting) for r, v in zip(records, every, strict=True)][::-1],
    )


def _mark(last: Verdict | None) -> str:
    if last is None or not last.finite or last.better or last.misfit or last.shifted:
        return "unknown"
    return {"memorising": "alarm", "settled": "good"}.get(last.state, "number")


def _notes(last: Verdict | None, records: tuple[Evaluation, ...], setting: Setting) -> list[str]:
    """Return sentences on what is wrong."""
    if last is None:
        return [text("shift", setting=setting)] if setting.shift < 1e-3 else []
    reasons = {"shift": last.shifted, "nan": not last.finite, "better": bool(last.better), "misfit": last.misfit}
    reasons["weak"] = last.weak
    reasons["weights"] = len({r.weights for r in records}) > 1
    values = {"verdict": last, "record": records[-1], "setting": setting}
    return [text(name, **values) for name, holds in reasons.items() if holds]


def _figures(run: Run, last: Verdict | None) -> dict[str, Callable[[], Figure]]:
    """Return functions that draw the figures; those for which there are no numbers are left out."""
    from vkernel import plots

    setting, records = run.setting, [r for r in run.records if r.finite]
    if not records:
        return {}
    steps, draw = [r.step for r in records], functools.partial
    alarm = {"alarm": float(last.alarm)} if last is not None and last.alarm else {}
    copied = {"copies appear": float(last.copying)} if last is not None and last.copying else {}
    errors = {NAMES[k]: np.stack([(r.train if k == "train" else r.test).stack() for r in records], 1) for k in SETS}
    found: dict[str, Callable[[], Figure]] = {
        "errors": draw(plots.training_curves, "training_error", steps, errors, {"Gaussian theory": 1.0}, alarm)
    }
    every = gaps(records)
    both = {"error lower by (G)": [(g.gap, g.gap_low) for g in every]}
    both["fallen more by (D)"] = [(g.change, g.change_low) for g in every]
    bounds = {name: 100 * np.array([(v, max(low, -1.0), v) for v, low in rows]).T for name, rows in both.items()}
    level = {f"alarm above {100 * DELTA:.0f} %": 100 * DELTA}
    found["gap"] = draw(plots.training_curves, "training_gap", steps, bounds, level, alarm)
    drawn = [(r.step, r.drawn) for r in records if r.drawn is not None]
    if drawn and setting.samples:
        at, held = [step for step, _ in drawn], setting.held_share
        shares = np.stack([100 * d.copies(setting.threshold).stack() for _, d in drawn], 1)
        band = {"held-out images": (100 * held.low, 100 * held.high)}
        found["copies"] = draw(plots.training_curves, "training_copies", at, {"samples": shares}, band, copied)
        if (j := needed(setting)) is not None:
            curve, spans = np.stack([[d.quantile(j) for _, d in drawn]] * 3), dict[str, Any](copied)
            if last is not None and last.forecast.value is not None:
                spans["copies expected"] = (last.forecast.low, last.forecast.high)
            level = {f"threshold {setting.threshold:.2g}": setting.threshold}
            found["ratio"] = draw(plots.training_curves, "training_ratio", at, {"": curve}, level, spans)
    levels = {NAMES[k]: np.stack([r.levels[k].stack() for r in records], 2) for k in SETS}
    lines = {"Gaussian theory": setting.gaussian["test"], "ideal denoiser": setting.ideal["test"]}
    found["levels"] = draw(plots.training_levels, setting.ratio, steps, levels, lines)
    unit, far = torch.tensor(setting.normaliser), {}
    for kind in ("ideal", "gaussian"):
        for k in SETS:
            held_at = [(getattr(r, kind)[k].stack() / unit).mean(1) for r in records]
            far[f"from the {kind} one, {NAMES[k]}"] = np.stack(held_at, 1)
    found["distance"] = draw(plots.training_curves, "training_distance", steps, far)
    return found


def _pictures(records: tuple[Evaluation, ...], folder: Path, last: Verdict | None) -> list[dict[str, Any]]:
    """Return the closest samples of the last evaluation, of the first copies, and of some between."""
    shown = [r for r in records if r.drawn is not None and r.drawn.picture and (folder / r.drawn.picture).is_file()]
    if not shown:
        return []
    chosen = {shown[round(k * (len(shown) - 1) / (STRIPS - 1))].step for k in range(STRIPS)}
    chosen |= {r.step for r in shown if last is not None and r.step == last.copying}
    found = []
    for record in (r for r in reversed(shown) if r.step in chosen):
        assert record.drawn is not None
        raw = (folder / record.drawn.picture).read_bytes()
        ratios = record.drawn.ratio.nan_to_num(1.0).sort().values[:SHOWN]
        width = int.from_bytes(raw[16:20])  # of the PNG header
        image = "data:image/png;base64," + base64.b64encode(raw).decode()
        values = {"step": record.step, "image": image, "width": width}
        found.append(values | {"ratios": ", ".join(f"{float(v):.2f}" for v in ratios)})
    return found
