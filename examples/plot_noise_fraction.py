r"""
How much of the target is noise?
================================

The noise fraction :math:`\rho(t)` of theory (2.8) for two training sets of the paper, and beside it the same by a
plain sum over a grid. In two dimensions the package draws queries, and the band is the 95 % interval; in one it
integrates, and there is no band. At large :math:`t` the posterior is almost that of no observation; at
small :math:`t` every noisy point determines its training point. Between them the target is mostly noise.
"""

import matplotlib.pyplot as plt
import torch

import vkernel as vk

process = vk.VP()
times = torch.logspace(-2, 0, 25, dtype=torch.float64)


def by_quadrature(data, t, nodes=801):
    """E tr C sigma²/d as an integral over a grid that covers p(x|t), in one or two dimensions."""
    axis = torch.linspace(-7, 7, nodes, dtype=torch.float64)
    x = torch.cartesian_prod(*[axis] * data.d).reshape(-1, data.d)
    points = process.alpha(t) * data.rows(0, data.n)
    density = torch.exp(-torch.cdist(x, points).square() / (2 * process.S(t))).sum(-1)  # up to a constant
    noise = vk.EmpiricalScore(data, process).covariance(x, t).trace()
    return float((density * noise).sum() / density.sum() * process.S(t) / data.d)


fig, ax = plt.subplots(figsize=(6.4, 4))
for name, nodes in (("triple", 4001), ("hexagon", 301)):
    data = vk.data.toy(name)
    rho = [vk.noise_fraction(data, process, float(t), queries=300, generator=0) for t in times]
    (curve,) = ax.plot(times, [r.value for r in rho], label=name)
    ax.fill_between(times, [r.low for r in rho], [r.high for r in rho], color=curve.get_color(), alpha=0.3)
    exact = [by_quadrature(data, t, nodes) for t in times[6::3]]
    ax.plot(times[6::3], exact, "o", color=curve.get_color(), mfc="none", label=f"{name}, sum over a grid")
ax.set(xscale="log", xlabel="t", ylabel=r"noise fraction $\rho$", ylim=(0, 1), title="The paper's VP process")
ax.legend()
fig.tight_layout()
plt.show()
