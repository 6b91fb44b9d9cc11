"""A guided tour in five steps: each sets the page and says, in sixty words at most, what to look at."""

from __future__ import annotations

from dataclasses import dataclass

from vkernel.explore.presets import preset
from vkernel.explore.state import State

__all__ = ["STEPS", "Step"]


@dataclass(frozen=True)
class Step:
    """A heading, a text, and the state that it talks about."""

    title: str
    text: str
    state: State


STEPS = (
    Step(
        "The exact score memorises",
        "Six training points, and the exact score of their noised law. Press play: particles flow from noise to data, "
        "and every one ends on a training point. A model that learned this score perfectly would only copy. Real "
        "models do not, so something else must be going on.",
        State(t=0.05, layers=("arrows", "particles", "law", "exact")),
    ),
    Step(
        "But the target is noisy",
        "A model never sees the score. Its target points at one training point at a time, and the covariance of that "
        "target is C. The map shows which share of the target is noise: far outside hardly any, between the points "
        "nearly all. Dashed lines hold the boundaries. Drag a point and watch them follow; move t.",
        State(t=0.1, layers=("noise", "boundaries", "particles")),
    ),
    Step(
        "Trainings disagree: V",
        "Now 48 linear models are trained on noisy targets. Each learns another score, and the map shows where they "
        "disagree: the covariance V over trainings, relative to their mean. The noise of their targets, and their "
        "different inputs, have become difference between models. Each panel on the right is what one of them samples.",
        State(sampler="linear", t=0.15, layers=("variance", "particles", "law", "members")),
    ),
    Step(
        "Noise fills gaps",
        "Three numbers. The blue curve is the average law of 96 models: some of its mass lies between the training "
        "points. Twins on the same inputs, without noise in their targets, leave less there; the panel says how much. "
        "Turn the noise of the target from J1 to J0 and look again.",
        State(
            points=preset("triple"),
            sampler="linear",
            ratio=1.0,
            eps=0.001,
            steps=100,
            t=0.05,
            layers=("noise", "particles", "law", "members", "exact"),
        ),
    ),
    Step(
        "Features decide where",
        "Four points on a circle, and Fourier features instead of Gaussian ones. Same data, same noise, another law: "
        "what a model can express decides which gaps it fills. Switch the features, turn the capacity F/P, drag a "
        "point. The rest of the page is yours.",
        State(
            points=preset("square"),
            sampler="linear",
            features="fourier",
            ratio=1.0,
            t=0.1,
            layers=("noise", "particles", "law", "members", "exact"),
        ),
    ),
)
