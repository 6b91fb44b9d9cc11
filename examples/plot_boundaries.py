r"""
Target noise is on boundaries
=============================

The map of :math:`\operatorname{tr} C(x,t)` for the paper's L-shaped set, with the score as arrows. As :math:`t` falls,
the target noise becomes exponentially small near the training points, by theory (2.21), and concentrates on thin layers
between them, where it grows without bound by (2.19).
"""

import matplotlib.pyplot as plt
import torch

import vkernel as vk

data, process = vk.data.toy("L"), vk.Toy()
score = vk.EmpiricalScore(data, process)
times = (0.5, 0.2, 0.1, 0.05)


def grid(size):
    """The points of a square grid over [-2, 2]², row by row from below."""
    axis = torch.linspace(-2, 2, size)
    vertical, horizontal = torch.meshgrid(axis, axis, indexing="ij")
    return torch.stack([horizontal, vertical], dim=-1)


fine, coarse = grid(161), grid(17)
fig, axes = plt.subplots(2, 2, figsize=(8, 6.6), sharex=True, sharey=True, layout="constrained")
for ax, t in zip(axes.flat, times, strict=True):
    noise = score.covariance(fine, t).trace() * process.S(t)  # in units of 1/sigma²
    picture = ax.imshow(noise, origin="lower", extent=(-2, 2, -2, 2), cmap="magma", vmin=0)
    arrows = torch.nn.functional.normalize(score(coarse, t), dim=-1)
    ax.quiver(*coarse.unbind(-1), *arrows.unbind(-1), color="white", alpha=0.6, scale=26, width=0.004)
    ax.plot(*(process.alpha(t) * data.rows(0, data.n)).T, "o", color="deepskyblue", ms=5)
    ax.set(title=f"t = {t}", xticks=(-2, 0, 2), yticks=(-2, 0, 2))
    fig.colorbar(picture, ax=ax, label=r"$\sigma^2\,\mathrm{tr}\,C$")
plt.show()
