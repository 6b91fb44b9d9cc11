"""Studies of target noise with planted effects: the labelled arrays of images.toml, drawn from known laws.

Twins share most of their randomness, as trained ones do. ``Effect`` is what an objective does, compared with c = 0."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import xarray as xr

STEPS = np.array([500, 1000, 2000, 4000, 8000])
LEVELS = np.array([0.1, 0.3, 1.0, 3.0, 8.0, 16.0])
RHO = np.array([1e-6, 1e-5, 4e-4, 5e-3, 4e-3, 1e-3])
SHARE = np.array([1e-6, 1e-5, 1e-2, 0.2, 0.64, 0.88])
OBJECTIVES = ["c = 0", "c = 1", "c = 10", "gaussian 1", "white 1", "gaussian 10", "white 10"]


@dataclass(frozen=True)
class Effect:
    """Factors of V, of errors on training and held-out images, of the copied share and of the time of training, and
    what is added to the distances of one model and of the average."""

    V: float = 1.0
    training: float = 1.0
    held_out: float = 1.0
    copies: float = 1.0
    time: float = 1.0
    single: float = 0.0
    pooled: float = 0.0
    run: bool = True
    diverged: tuple[int, ...] = ()


SAME = Effect()


def planted(
    cells: Mapping[tuple[str, int, str], Mapping[str, Effect]],
    *,
    members: int = 8,
    images: int = 12,
    samples: int = 64,
    overfit: float = 0.5,
    noise: float = 0.01,
    seed: int = 0,
) -> xr.Dataset:
    """Return a study whose cells (data, n, network) have these effects; objectives that are not named were not run.

    ``overfit`` is by how much log held-out error rises after its minimum; 0 copies nothing. ``noise`` is the relative
    difference between twins that is not shared."""
    axes = [list(dict.fromkeys(key[k] for key in cells)) for k in range(3)]
    rng = np.random.default_rng(seed)
    M, S, L, J = members, len(STEPS), len(LEVELS), 40
    shape = (*(len(a) for a in axes), len(OBJECTIVES), M)
    full = {
        "error": (S, L, 2, images),
        "excess": (S, L, images),
        "gap_members": (M, S, L, 2, images),
        "ratio": (S, samples),
        "memorised": (S,),
        "energy_to": (S, J),
        "energy_within": (M, S),
        "kernel_to": (S, J),
        "kernel_within": (M, S),
        "update_norm": (S,),
        "gradient_norm": (S,),
        "sample": (4, 64),
        "nearest": (4, 64),
    }
    out = {name: np.full(shape + more, np.nan) for name, more in full.items()}
    for key, effects in cells.items():
        at = tuple(axis.index(k) for axis, k in zip(axes, key, strict=True))
        shared = {
            "member": 0.03 * rng.standard_normal((M, 1, 1, 1, 1)),
            "image": 0.2 * rng.standard_normal((1, 1, L, 2, images)),
            "D": rng.standard_normal((M, 12, 1, L, 2, images)),
            "copy": rng.random((M, 1, samples)),
            "to": 0.3 * rng.standard_normal((1, 1, J)),
            "law": 0.02 * rng.standard_normal((M, 1, 1)),
        }
        for label, effect in effects.items():
            if not effect.run:
                continue
            where = (*at, OBJECTIVES.index(label))
            for name, value in _objective(effect, shared, rng, overfit, noise).items():
                out[name][where] = value
            for m in effect.diverged:
                for name in full:
                    out[name][(*where, m)] = np.nan
    dims = {"error": ("step", "level", "set", "image"), "excess": ("step", "level", "image")}
    dims |= {"gap_members": ("other", "step", "level", "set", "image"), "ratio": ("step", "draw")}
    dims |= {f"{kind}_to": ("step", "held_out") for kind in ("energy", "kernel")}
    dims |= {f"{kind}_within": ("other", "step") for kind in ("energy", "kernel")}
    dims |= {"sample": ("index", "pixel"), "nearest": ("index", "pixel")}
    grid = ("data", "n", "network", "objective", "member")
    found = {name: ((*grid, *dims.get(name, ("step",))), value) for name, value in out.items()}
    fixed: dict[str, tuple[tuple[str, ...], np.ndarray]] = {
        "rho": (("level",), RHO),
        "network_share": (("level",), SHARE),
    }
    fixed["image_shape"] = ("axis",), np.array([1, 8, 8])
    numbers = {"memorised_held_out": 0.0, "energy_held_out": 1.0, "energy_training": 0.2}
    numbers |= {"kernel_held_out": -1.0, "kernel_training": 0.2}
    fixed |= {name: ((), np.array(value)) for name, value in numbers.items()}
    run = np.where(np.isfinite(out["memorised"][..., 0, 0]), 1.0, np.nan)  # like a store: NaN where nothing was run
    for name, (own, value) in fixed.items():
        found[name] = (*grid[:4], *own), np.multiply.outer(run, value)
    return xr.Dataset(
        found,
        coords=dict(zip(grid[:3], (axes[0], [float(n) for n in axes[1]], axes[2]), strict=True))
        | {
            "objective": OBJECTIVES,
            "member": range(M),
            "step": STEPS,
            "level": LEVELS,
            "set": ["training", "held-out"],
        },
    )


def _objective(
    effect: Effect, shared: dict[str, np.ndarray], rng: np.random.Generator, overfit: float, noise: float
) -> dict[str, np.ndarray]:
    """Return the arrays of one objective."""
    M, L = len(shared["member"]), len(LEVELS)
    x = np.log(STEPS * effect.time / STEPS[0])  # 0 to log 16
    bend = np.log(4.0)
    falls = 0.4 * np.exp(-0.4 * x)
    base = 0.02 * LEVELS / (1 + LEVELS) + 1e-3
    rise = overfit * np.clip(x - bend, 0, None) ** 2
    size = np.stack(
        [base * effect.training * (0.5 + falls[:, None]), base * effect.held_out * (0.9 + (falls + rise)[:, None])], -1
    )
    own = noise * rng.standard_normal((M, 1, 1, 1, 1))
    each = noise * rng.standard_normal((M, len(x), L, 2, shared["image"].shape[-1]))
    error = size[None, ..., None] * np.exp(shared["member"] + shared["image"] + own + each)
    rest = rng.standard_normal(shared["D"].shape)
    D = np.sqrt(0.97) * shared["D"] + np.sqrt(0.03) * rest
    away = D[:, None] - D[None, :]
    V = effect.V * 0.1 * base[None, :, None, None] * np.exp(0.2 * x)[:, None, None, None]
    gaps = 0.5 * V * (away**2).mean(2)
    p = effect.copies * overfit * np.clip(x - bend, 0, None) / 2
    ratio = np.where(shared["copy"] < p[None, :, None], 0.2, 0.8)
    to = 0.7 + 0.05 * np.exp(-x)[None, :, None] + 0.01 * shared["to"] + shared["law"] * 0.1
    to = to + 0.001 * rng.standard_normal((M, len(x), 1))
    spread = 0.05 + effect.single - effect.pooled
    within = np.full((M, M, len(x)), 0.2 + spread) - 0.0
    within[range(M), range(M)] = 0.2
    to = to + effect.single / 2
    found = {"error": error, "excess": error[..., 0, :] * 0.8, "gap_members": gaps, "ratio": ratio}
    found |= {"memorised": (ratio < 1 / 3).mean(-1), "energy_to": to, "energy_within": within}
    found |= {"kernel_to": -to, "kernel_within": -within}
    norms = np.exp(-0.3 * x) * np.exp(0.05 * rng.standard_normal((M, 1)))
    pictures = np.tanh(rng.standard_normal((M, 4, 64)))
    return found | {"update_norm": norms, "gradient_norm": 3 * norms, "sample": pictures, "nearest": pictures * 0.9}
