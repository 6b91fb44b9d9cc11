"""Explanations with chosen numbers, for tests of reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import xarray

from vkernel.reports.explain import Explanation, Sizes

RATIOS = np.array([8.0, 2.0, 0.5, 0.1])  # from high noise to low, as samplers go


def explanation(
    gains: Mapping[str, Sequence[float]],
    networks: Sequence[str] = ("net",),
    held: bool = True,
    ceiling: float = 0.8,
    half: float = 0.05,
) -> Explanation:
    """Return one with these gains by theory and noise level, ± ``half``, for every network and set of images; the
    Gaussian theory has R² = .9, and held-out floors are .1 lower than gains. One network has no ceiling."""
    names, several = ["gaussian", *gains], len(networks) > 1
    images = ["training", "held-out"] if held else ["training"]
    shape = (len(networks), len(names), len(images), len(RATIOS))
    gain = np.broadcast_to(np.array([np.zeros(len(RATIOS)), *gains.values()])[None, :, None], shape).copy()
    dims, few = ("network", "theory", "images", "level"), ("network", "images", "level")
    top = np.full((len(networks), len(images), len(RATIOS)), ceiling if several else np.nan)
    numbers = ends("gain", dims, gain, half) | ends("r2", dims, 1 - 0.1 * (1 - gain), half / 10)
    numbers |= ends("elsewhere", dims, gain - 0.1 if held else np.full(shape, np.nan), half / 2)
    numbers |= ends("ceiling", few, top, half) | {"permuted": (dims, np.full(shape, -3.0))}
    about = [["" if name == "gaussian" else f"about {name}" for name in names]] * len(networks)
    points = [[600 if name == "gaussian" else 100 for name in names]] * len(networks)
    coords: dict[str, Any] = {"network": list(networks), "theory": names, "images": images}
    coords |= {"about": (dims[:2], about), "points": (dims[:2], points), "points_elsewhere": (dims[:2], points)}
    coords["available"] = ("network", [600] * len(networks))
    coords["partner"] = ("network", [networks[1 - k] if several and k < 2 else "" for k in range(len(networks))])
    level = {"ratio": (("network", "level"), np.tile(RATIOS, (len(networks), 1)))}
    denoising = xarray.Dataset(numbers, coords | level | {"t": level["ratio"]})
    both, like = dims[:2], np.linspace(0.2, 0.6, len(names))
    rows = {"r2": like, "elsewhere": like - 0.1, "permuted": like / 10}
    rows |= {"copies": like, "frechet": 10 * like, "kernel": 0.01 * like, "seconds": like}
    found = {}
    for name, row in rows.items():
        found |= ends(name, both, np.tile(row, (len(networks), 1)), 0.1)
    for name in ("copies", "frechet", "kernel", "seconds"):
        found |= ends(f"own_{name}", ("network",), np.full(len(networks), 0.02), 0.01)
    found |= ends("ceiling", ("network",), top[:, 0, 0], half)
    samples = xarray.Dataset(found, coords)
    shown = {name: torch.rand(8, 1, 8, 8) * 2 - 1 for name in names}
    pictures = {name: {name: -shown["gaussian"], **shown} for name in networks}
    ranges: dict[str, tuple[float, float] | None] = dict.fromkeys(networks, (-1.0, 1.0))
    return Explanation(denoising, samples, pictures, ranges, 600, 200 if held else 0, Sizes(), 0, 12.0)


def ends(name: str, dims: tuple[str, ...], value: np.ndarray, half: float) -> dict[str, Any]:
    return {name: (dims, value), f"{name}_low": (dims, value - half), f"{name}_high": (dims, value + half)}
