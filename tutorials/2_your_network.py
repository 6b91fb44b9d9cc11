r"""
2. Your network
===============

**Question.** You have a trained diffusion network. Are its samples copies of training images? Does its error reveal
which images it was trained on? Which closed-form theory predicts what it computes?

``vk.audit`` answers the first two, ``vk.explain`` the third. We train two small networks on digits: one on 40 images,
which it memorises, and one on 1,000. For a network of your own skip the training and begin at *Wrap the network*; on
the command line::

    vkernel audit WEIGHTS --module mynet.py:make --betas edm --predicts x0 --time sigma \
        --data TRAIN --test HELD_OUT --explain --html report.html
"""

# %%
# Two networks
# ------------
#
# Plain PyTorch: a multilayer perceptron with the preconditioning and the loss of EDM (Karras et al. 2022). It takes a
# noisy image :math:`x = x_0 + \sigma\epsilon` and :math:`\sigma`, and returns a denoised image.

import matplotlib.pyplot as plt
import torch
from torch import nn

import vkernel as vk

torch.set_num_threads(1)  # with networks as small as these, threads mostly wait for one another
steps = 5000
width = 256


class Denoiser(nn.Module):
    """D(x, σ) = c_skip x + c_out F(c_in x, log σ / 4)."""

    def __init__(self):
        super().__init__()
        hidden = [nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU()]
        self.layers = nn.Sequential(nn.Linear(65, width), nn.SiLU(), *hidden, nn.Linear(width, 64))

    def forward(self, x, sigma):
        s, half = sigma.reshape(-1, 1), 0.5
        size = (s**2 + half**2).sqrt()
        raw = self.layers(torch.cat([x.flatten(1) / size, s.log() / 4], 1))
        return (half**2 / size**2 * x.flatten(1) + s * half / size * raw).reshape(x.shape)


def train(images, seed):
    """Fit a denoiser to images (n, 1, 8, 8)."""
    torch.manual_seed(seed)
    network = Denoiser()
    optimiser = torch.optim.Adam(network.parameters(), 1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    for _ in range(steps):
        x0 = images[torch.randint(len(images), (128,))]
        sigma = (1.2 * torch.randn(128) - 1.2).exp()
        x = x0 + sigma[:, None, None, None] * torch.randn_like(x0)
        weight = (sigma**2 + 0.25) / (0.5 * sigma) ** 2
        loss = (weight[:, None, None, None] * (network(x, sigma) - x0).square()).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
    return network.eval()


many, held_out = vk.data.images("digits", 1000, 512)  # a random split; the smaller set is a part of the larger
few, _ = vk.data.images("digits", 40, 512)
networks = {"40 images": train(few[:], 0), "1,000 images": train(many[:], 0)}

# %%
# Wrap the network
# ----------------
#
# ``vk.as_score`` needs the conventions of the network: the process of its training, what it predicts, its time input
# and its pixel range. This one returns a denoised image (``"x0"``) and takes σ. The result is a ``vk.Score``: it can be
# sampled, compared and audited. :doc:`Other people's networks </howto/networks>` has the conventions of common codes.

process = vk.EDM()
scores = {
    name: vk.as_score(network, process, shape=(1, 8, 8), predicts="x0", time="sigma", range=(-1, 1))
    for name, network in networks.items()
}
with torch.no_grad():
    samples = {
        name: vk.sample.pf_ode(score, process.prior((8, 1, 8, 8), generator=0)) for name, score in scores.items()
    }

figure, axes = plt.subplots(2, 8, figsize=(8, 2.6), layout="constrained")
figure.suptitle("Samples of two networks from the same noise: above trained on 40 images, below on 1,000")
for row, x in zip(axes, samples.values(), strict=True):
    for ax, image in zip(row, x, strict=True):
        ax.imshow(image[0], cmap="gray_r", vmin=-1, vmax=1)
        ax.set_axis_off()
plt.show()

# %%
# Audit: does it copy?
# --------------------
#
# An audit compares the network with its training set and with held-out images of the same kind. ``quick=True`` is a
# first look with 64 samples of each sampler and wide intervals. The first check is whether the stated conventions fit
# the network: with a wrong one every later number would be meaningless, and the audit stops there.

found = {
    "40 images": vk.audit(scores["40 images"], few, test=held_out, quick=True),
    "1,000 images": vk.audit(scores["1,000 images"], many, test=held_out, quick=True),
}
for name, audit in found.items():
    print(f"trained on {name}")
    for verdict in audit.verdicts:
        print(f"  {verdict.level:8} {verdict.question:12} {verdict.answer}")

# %%
# What the questions mean: *training* is whether the network denoises better than a linear denoiser, *images* whether
# its samples are images rather than noise, *blindness* which changes of an image leave the output unchanged, *drift*
# how many samples lie outside the data's brightness and contrast, *likeness* whether a statistical test distinguishes
# samples from real images, *deviation* at which noise levels the network is far from the exact score.
#
# A *copy* is a sample at least three times nearer to one training image than to the second nearest. The share of copies
# has a Wilson interval and is compared with that of held-out images, which are no copies by construction. *Membership*
# is whether the error of the network separates training images from held-out ones: an AUC of .5 is chance.
#
# Both questions matter, because they differ: the second network has smaller errors on its training images, which raises
# the alarm of membership, and still makes no copies.
#
# The report has the copies beside their sources. This is the core of it: samples of the first network above the
# training images nearest to them.

x = vk.sample.pf_ode(scores["40 images"], process.prior((8, 1, 8, 8), generator=1)).detach()
nearest = torch.cdist(x.flatten(1), few[:].flatten(1)).argmin(1)
figure, axes = plt.subplots(2, 8, figsize=(8, 2.6), layout="constrained")
figure.suptitle("Samples of the network trained on 40 images, above the nearest training images")
for row, pictures in zip(axes, (x, few[nearest]), strict=True):
    for ax, image in zip(row, pictures, strict=True):
        ax.imshow(image[0], cmap="gray_r", vmin=-1, vmax=1)
        ax.set_axis_off()
plt.show()

# %%
# What an audit suggests, and how sure that is. *Measured*: this audit shows it. *Theory*: it follows from a result that
# is cited. *Doubtful*: theory and experience disagree, or nobody has measured it.

for advice in found["40 images"].advice:
    print(f"- {advice.change} ({advice.sure})")

# %%
# Explain: which theory predicts the network?
# -------------------------------------------
#
# There are closed-form accounts of what a network learns: the exact score of the training set, which memorises; the
# Gaussian theory, which keeps only mean and covariance; the training set smoothed by noise; theories in which every
# pixel depends on some of the others only. ``vk.explain`` builds each on the same training set and compares its
# denoiser with the network's, on held-out images at several noise levels.

explanation = vk.explain(
    scores["1,000 images"], ["exact", "gaussian", "smoothed", "pca"], many, held_out, quick=True, train=250, seed=0
)
print(explanation.summary)  # explanation.table has all numbers

# %%
# The *gain* is the share that a theory explains of what the Gaussian theory leaves over: 1 is the network itself, 0 no
# better than the best linear denoiser, below 0 worse. The report writes it R²_G. A theory explains the network at a
# noise level if its gain is at least one half and beyond what permuted images give. Here none does at any level: the
# Gaussian theory is close in the middle, and what it leaves over is explained by no other. Gains below -1 are not
# shown.

denoising = explanation.verdict.isel(network=0)
figure, ax = plt.subplots(figsize=(7, 3.6), layout="constrained")
figure.suptitle("Gain of theories over the Gaussian theory, on held-out images")
for theory in explanation.theories:
    if theory != "gaussian":
        one = denoising.sel(theory=theory)
        (line,) = ax.plot(one.ratio, one.gain, "o-", label=theory)
        ax.fill_between(one.ratio, one.gain_low, one.gain_high, alpha=0.2, color=line.get_color())
ax.axhline(0, color="gray", lw=1, ls=":")
ax.set(xscale="log", xlabel="σ/α", ylabel="gain", ylim=(-1, 1.05))
ax.legend()
plt.show()

# %%
# What this does not show
# -----------------------
#
# With no copy among 64 samples the share of copies may still be up to 5.7 % (95 %). A copy here is a copy of a whole
# image in pixels, and one network is one training run. :doc:`What an audit cannot tell you </howto/audit_limits>` has
# the full list.
#
# What to read next
# -----------------
#
# - :ref:`sphx_glr_tutorials_3_your_training_run.py`: notice memorisation while the network is trained.
# - :doc:`Audit a checkpoint </howto/audit>`: weight files, diffusers folders, saved samples, a worked audit of seven
#   public networks.
# - :doc:`From a diffusers folder to a report </howto/diffusers>`: two lines.
# - :doc:`Rival theories </howto/theories>` defines gain, ceiling and floors; :doc:`which theory explains trained
#   networks? </explained>` has the results for larger networks.
