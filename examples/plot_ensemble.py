"""
Noise of the target, and the share in the gap
=============================================

A linear model with 64 features is trained a hundred times on 64 noised copies of three numbers: once with noisy targets
(J1), once, on the same inputs, with noiseless ones (J0). Above: the average learned laws, which are not the law of one
model; the legend has mean and median over models. Below: the variance of the score over trainings, measured and
predicted.
"""

# %%
# Train both ensembles. They share every input; only the targets differ.

import warnings

import matplotlib.pyplot as plt
import torch

import vkernel as vk

data, process = vk.data.toy("triple"), vk.VP(eps=1e-3)
model = vk.models.Linear(vk.features.grid("gaussian", 8, 1, -1.5, 1.5, process), target="x0", ridge=0.1)
P = 64
ensembles = {
    goal: vk.train_ensemble(model, data, process, members=100, draws=P, objective=goal) for goal in ("J1", "J0")
}

# %%
# Sample every member from the same quantiles of the prior, and predict the covariance of its score.

warnings.filterwarnings("ignore", message="Linear kernel: variances are known")  # to a few per cent
x_T = process.sigma(process.T).double() * torch.special.ndtri((torch.arange(256, dtype=torch.float64) + 0.5) / 256)
places = torch.linspace(-1.4, 1.4, 57, dtype=torch.float64)[:, None]
figure, (above, below) = plt.subplots(2, 1, figsize=(6, 6), sharex=True, layout="constrained")
for goal, ensemble in ensembles.items():
    samples = ensemble.sample(x_T=x_T[:, None], steps=100)
    law, edges = vk.metrics.histogram(samples, bins=60, range=(-1.5, 1.5))
    mass = vk.metrics.gap_mass(samples)
    half = ((samples.abs() > 0.25) & (samples.abs() < 0.75)).double().mean((1, 2)).median()
    label = f"{goal}: {mass.value:.2f} ± {mass.se:.2f} in the gaps, median {half:.2f}"
    above.stairs(law.value.clamp_min(1e-3), edges, label=label)
    (line,) = below.plot(places, ensemble.cov(places, 0.1).trace(), label=f"{goal}, measured")
    V = vk.kernels.Linear(model, data, process, draws=P, objective=goal, seed=1)
    below.plot(places, V.cov(places, 0.1).trace(), "--", color=line.get_color(), label=f"{goal}, predicted")
above.set(yscale="log", ylabel="density at eps", ylim=(1e-2, 30))
below.set(yscale="log", ylabel="variance of the score, t = 0.1", xlabel="x")
above.legend()
below.legend()
plt.show()
