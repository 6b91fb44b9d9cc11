"""The knobs of the page: in the user's words, with the symbol beside them, and one sentence each."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

__all__ = ["GROUPS", "LAYER_WORDS", "Knob", "Layer", "layers_for"]


@dataclass(frozen=True)
class Knob:
    """A field of the state. ``options`` are pairs (value, words); ``kind`` is "choice" (a list), "steps" (a slider over
    the options) or "pair" (buttons side by side); ``only`` names the samplers that it belongs to, () for all."""

    field: str
    words: str
    symbol: str
    sentence: str
    kind: str
    options: tuple[tuple[Any, str], ...]
    only: tuple[str, ...] = ()


@dataclass(frozen=True)
class Layer:
    """A layer of the picture; ``only`` names the samplers that have it."""

    name: str
    words: str
    symbol: str
    sentence: str
    only: tuple[str, ...] = ()


TRAINED = ("linear", "ntk", "mlp")
LEARNED = ("effective", *TRAINED)

_SAMPLER = Knob(
    "sampler",
    "What samples",
    "ŝ",
    "Whose score carries the particles from noise to data.",
    "choice",
    (
        ("exact", "the exact score"),
        ("naive", "the naive estimator"),
        ("effective", "effective SDE (theory)"),
        ("linear", "linear models, trained"),
        ("ntk", "infinitely wide networks"),
        ("mlp", "small networks, trained"),
    ),
)
_MODEL = (
    Knob(
        "K",
        "Target noise",
        "K",
        "J1 trains on single noisy targets, J0 on exact ones; in between a target is the mean of K draws.",
        "steps",
        ((1, "J1"), (2, "2"), (4, "4"), (8, "8"), (16, "16"), (0, "J0")),
        LEARNED,
    ),
    Knob(
        "ratio",
        "Capacity",
        "F/P",
        "Features for each noised point in training: more means a more flexible, noisier model.",
        "steps",
        ((0.25, "¼"), (0.5, "½"), (1.0, "1"), (2.0, "2"), (4.0, "4")),
        ("linear", "effective"),
    ),
    Knob(
        "features",
        "Features",
        "φ",
        "The functions of place and time that a linear model adds up.",
        "pair",
        (("gaussian", "Gaussian"), ("fourier", "Fourier")),
        ("linear", "effective"),
    ),
    Knob(
        "tau",
        "Training",
        "τ",
        "How long the wide network is trained; at ∞ it fits every noisy target.",
        "steps",
        ((1.0, "1"), (10.0, "10"), (100.0, "100"), (1000.0, "1000"), (math.inf, "∞")),
        ("ntk",),
    ),
    Knob(
        "kappa",
        "Strength",
        "κ",
        "Each step follows one training point drawn anew; κ = 0 is the exact score.",
        "steps",
        ((0.0, "0"), (0.001, ".001"), (0.003, ".003"), (0.01, ".01"), (0.03, ".03"), (0.1, ".1")),
        ("naive",),
    ),
)
_PROCESS = (
    Knob(
        "process",
        "Noising process",
        "α, σ",
        "How data turn into noise as t grows.",
        "choice",
        (
            ("vp", "VP, the paper's"),
            ("vpsong", "VP, Song's"),
            ("cosine", "cosine"),
            ("flow", "flow matching"),
            ("toy", "Figure 1's"),
            ("edm", "EDM, T = 10"),
        ),
    ),
    Knob(
        "eps",
        "Cutoff",
        "ε",
        "The time at which sampling stops: a larger one leaves more noise in the samples.",
        "steps",
        tuple((v, f"{v:g}") for v in (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)),
    ),
    Knob(
        "steps",
        "Steps",
        "S",
        "Steps of the sampler, even in log(σ/α); with few, the error of the steps fills gaps too.",
        "steps",
        tuple((v, str(v)) for v in (10, 20, 30, 60, 100, 200)),
    ),
    Knob(
        "seed",
        "Seed",
        "",
        "Another seed, other draws; everything else stays.",
        "steps",
        tuple((v, str(v)) for v in range(10)),
    ),
)
GROUPS: tuple[tuple[str, tuple[Knob, ...]], ...] = (("Model", (_SAMPLER, *_MODEL)), ("Noise and steps", _PROCESS))

LAYER_WORDS = (
    Layer("noise", "Noise", "C", "Which share of the training target is noise here, tr C/(tr C + |s|²)."),
    Layer("variance", "Disagreement", "V", "Where trained models disagree, tr Cov/(tr Cov + |s̄|²).", LEARNED),
    Layer("arrows", "Arrows", "s", "The exact score at time t; long arrows are shortened."),
    Layer("boundaries", "Boundaries", "", "Inside these lines the target is mostly noise and the score divides."),
    Layer("particles", "Particles", "x", "Samples on their way from noise to data; press play."),
    Layer("law", "Learned", "q̄", "The learned law: where samples end, averaged over trainings."),
    Layer("members", "Models", "q", "Single models: where the samples of each of a few trained models end.", TRAINED),
    Layer("exact", "Exact", "p", "The exact law: where samples of the exact score end, for contrast."),
)


def layers_for(sampler: str, layers: tuple[str, ...]) -> tuple[str, ...]:
    """The layers that a sampler has; models that are trained come with single ones beside their average."""
    having = {layer.name for layer in LAYER_WORDS if not layer.only or sampler in layer.only}
    kept = [name for name in layers if name in having]
    if "variance" in layers and "variance" not in kept and "noise" not in kept:
        kept.append("noise")
    if "members" in having and "law" in kept and "members" not in kept:
        kept.append("members")
    return tuple(kept)
