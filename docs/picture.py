"""Draw the picture of the start page and of README, in a light and a dark version.

``python docs/picture.py`` computes it in about a minute and writes ``docs/_static/question-light.png`` and
``question-dark.png``. Ten training points lie on a circle. Left: paths of the probability flow of the exact score,
which end at training points. Middle: the share of the training target that is noise, tr C / (tr C + |s|²). Right:
samples of eight small networks that differ in the randomness of their training alone, one colour each.
"""

from pathlib import Path

import torch
from matplotlib.figure import Figure

import vkernel as vk
from vkernel.plots import base

STATIC = Path(__file__).parent / "_static"
TIME, LIMIT, MEMBERS, SAMPLES = 0.03, 1.75, 8, 160
TITLES = (
    "The exact score returns\nthe training points.",
    "The target of training is\nnoisy between them.",
    "Trained networks differ from it,\nand from one another.",
)


def compute() -> dict[str, torch.Tensor]:
    """Return the points, paths of the exact score, the map of the noise fraction and samples of networks."""
    angles = torch.tensor([0.0, 0.55, 1.3, 1.75, 2.6, 3.2, 3.9, 4.5, 5.1, 5.75], dtype=torch.float64)
    data, process = vk.Empirical(torch.stack([angles.cos(), angles.sin()], 1)), vk.VP(eps=1e-2)
    score = vk.EmpiricalScore(data, process)
    paths = vk.sample.pf_ode(score, process.prior((60, 2), generator=3), steps=200, save="path").path
    axis = torch.linspace(-LIMIT, LIMIT, 501, dtype=torch.float64)
    grid = torch.stack(torch.meshgrid(axis, axis, indexing="xy"), -1)
    noise = score.covariance(grid, TIME).trace()
    fraction = noise / (noise + score(grid, TIME).square().sum(-1))
    model = vk.models.MLP(width=64, depth=3, target="noise", steps=4000, batch=64)
    networks = vk.train_ensemble(model, data, process, members=MEMBERS, draws=None, seed=0)
    samples = networks.sample(SAMPLES, steps=60, seed=1)
    return {"points": data[:], "paths": paths, "fraction": fraction, "samples": samples.detach()}


def draw(found: dict[str, torch.Tensor]) -> Figure:
    """Return the three panels."""
    figure, ((left, middle, right),) = base.axes((9.6, 3.7), 1, 3)
    for line in found["paths"].unbind(1):
        left.plot(*line.T, color=base.lines()[0], lw=0.8, alpha=0.6)
    box = (-LIMIT, LIMIT, -LIMIT, LIMIT)
    middle.imshow(found["fraction"], origin="lower", extent=box, cmap="magma", vmin=0, vmax=1)
    for k, x in enumerate(found["samples"]):
        right.plot(*x.T, ".", color=base.lines()[k % 6], ms=2.6, alpha=0.7)
    for ax, title in zip((left, middle, right), TITLES, strict=True):
        ax.plot(*found["points"].T, "o", color=base.DOT, ms=6, mec=base.ink(), mew=0.8)
        ax.set(xlim=box[:2], ylim=box[2:], aspect="equal", xticks=(), yticks=(), title=title)
        ax.grid(False)
    return figure


if __name__ == "__main__":
    result = compute()
    for dark in (False, True):
        with vk.plots.style(dark=dark):
            vk.plots.save(draw(result), STATIC / f"question-{'dark' if dark else 'light'}.png")
