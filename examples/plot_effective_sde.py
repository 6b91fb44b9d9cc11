r"""
Noise that empties a gap
========================

Samples of the exact score of :math:`\{-1, +1\}`, and of the effective SDE with the naive kernel of theory (5.9),
stopped at :math:`\varepsilon = 0.05`, where the two peaks still touch. The noise is strongest half-way between the
points, and it moves samples out of there: Itô's noise has no drift, which in Stratonovich's notation (4.9) is a drift
away from large :math:`C`.
"""

import matplotlib.pyplot as plt
import torch

import vkernel as vk
from vkernel import kernels, sample

data, process = vk.data.toy("pair"), vk.VP(eps=0.05)
score = vk.EmpiricalScore(data, process)
x_T = process.prior((2000, 1), generator=0)
grid = torch.linspace(-1.6, 1.6, 400)

fig, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
for t in (0.3, 0.2, 0.1, 0.05):
    noise = score.covariance(grid[:, None], t).trace() * process.S(t)
    left.plot(grid, noise, label=f"t = {t}")
left.set(xlabel="x", ylabel=r"$\sigma^2\,\mathrm{tr}\,C$", title="where the noise is")
left.legend()

for kappa in (0, 0.1, 1):
    V = kernels.Naive(score, kappa)
    x = sample.effective_sde(V, x_T, steps=80, generator=1)[:, 0]
    gap = (x.abs() < 0.5).float().mean()
    label = f"κ = {kappa}: {100 * gap:.1f} % in |x| < ½"
    right.hist(x, bins=60, range=(-2, 2), density=True, histtype="step", lw=1.6, label=label)
right.set(xlabel="x", ylabel="density of samples", title="where samples are not")
right.legend(loc="upper center", fontsize="small")
right.set_ylim(top=1.35 * right.get_ylim()[1])
plt.show()
