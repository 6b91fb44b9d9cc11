r"""
1. Your data
============

**Question.** You are about to train a diffusion model on a data set. At which noise levels is the training target
noisy? Below which noise level would a perfect fit only return training images? Which images are duplicated or far from
all others?

``vk.profile`` answers this from the data alone, before any training. This tutorial profiles 600 images of digits, to
which we add a few copies and one outlier, so that there is something to find. On your own data the same is one
command::

    vkernel profile YOUR_DATA --html report.html

You need to know what a diffusion model is, and nothing about this package.
"""

# %%
# A data set with known problems
# ------------------------------
#
# ``vk.Empirical`` holds a training set: an array ``(n, *shape)``, here ``(n, 1, 8, 8)`` with values in [-1, 1].
# ``vk.load(path)`` reads one from a file or a folder of images. We plant two problems: image 3 occurs four times, and
# one image is inverted.

import matplotlib.pyplot as plt
import torch

import vkernel as vk

images = vk.data.digits()[:600]
planted = torch.cat([images[3:4]] * 3 + [-images[7:8]])  # three more copies of image 3, one inverted image
data = vk.Empirical(torch.cat([images, planted]), name="digits with problems")
print(data)

# %%
# The profile
# -----------
#
# The forward process says how noise is added: :math:`x_t = \alpha_t x_0 + \sigma_t \epsilon`. A time t has no meaning
# without it, so give the process that you will train with. ``VPSong`` is that of score SDEs; ``DDPM``, ``EDM``,
# ``FlowMatching`` and others are there too.

process = vk.VPSong()
found = vk.profile(data, process, queries=256, seed=0)
print(found.summary())

# %%
# Where is the target noisy?
# --------------------------
#
# In training, the network sees a noisy image :math:`x_t` and gets as target the noise :math:`\epsilon` that was added.
# Several training images could have led to the same :math:`x_t`, so this target is random. Its mean is, up to a factor
# :math:`-\sigma_t`, the exact score of the training set, which a perfect fit would return. The *noise fraction*
#
# .. math:: \rho(t) = \frac{E\,\mathrm{tr}\,C}{E\,\mathrm{tr}\,C + E|s|^2}
#
# is the share of the target's second moment that is noise; C is the covariance of the target given :math:`x_t`. The
# window in which it exceeds 1 % is shaded. To the left of it the target is nearly deterministic: each noisy image has
# one possible source. To the right of it C itself is small, in these units, because noise hides what the sources were.
# For a network that predicts the clean image or the output of EDM the share is another, and large at high noise:
# ``vk.network_noise_fraction`` returns it.

curves = found.curves
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
figure.suptitle("Target noise and the effective number of training images against time, for 604 digits")
left.plot(curves["t"], curves["noise_fraction"])
left.set(xscale="log", xlabel="t", ylabel=r"noise fraction $\rho(t)$")
right.plot(curves["t"], curves["ess"])
right.set(xscale="log", yscale="log", xlabel="t", ylabel="effective number of training images")
for ax in (left, right):
    ax.axvspan(*found.window, color="tab:orange", alpha=0.15, label="noisy window")
    ax.axvline(found.collapse_time, color="tab:red", ls="--", label="collapse time")
left.legend()
plt.show()

# %%
# The right panel shows how many training images share the posterior weight of a noisy image. Below the *collapse time*
# one of them has, on average, more than half of it. A sampler that follows the exact score is then close to one
# training image, and converges to it as t decreases.
#
# What to do with these numbers:
#
# - Compare the window with the noise levels that your loss weights most. Below the window the exact target is a
#   denoiser that returns training images; what a network learns there depends on how it interpolates.
# - Compare the collapse time with the cutoff of your sampler. A sampler that stops above it leaves noise in the images;
#   one that stops below it uses levels at which the exact score has selected one training image.

low, high = found.window
print(f"noisy between t = {low:.3g} and {high:.3g}; collapse at t = {found.collapse_time:.3g}")

# %%
# Duplicates and isolated images
# ------------------------------
#
# Exact copies act as weights: the image is drawn more often. Of everything that a profile finds, the number of copies
# has the clearest effect on what networks reproduce (:doc:`scorecard </scorecard>`). An *isolated* image has the
# largest collapse time of its own. Indices count images as they were given.

print("exact copies:", found.duplicates)
print("groups of near-duplicates:", len(found.near_duplicates))
for point in found.isolated[:5]:
    print(f"image {point.index}: own collapse time {point.t:.3g}")

shown = [3, *(point.index for point in found.isolated[:5])]
figure, axes = plt.subplots(1, len(shown), figsize=(9, 2), layout="constrained")
figure.suptitle("The image with copies, and the five most isolated images of the set")
for ax, index in zip(axes, shown, strict=True):
    ax.imshow(data[index][0], cmap="gray_r", vmin=-1, vmax=1)
    ax.set_title(f"{index}" + (", 4 times" if index == 3 else ""), fontsize="medium")
    ax.set_axis_off()
plt.show()

# %%
# The planted copies, 600 to 602, are in one group with image 3. The inverted image is number 603.
#
# Pairs that share the noise
# --------------------------
#
# Between two training images the target varies most. The profile lists the pairs with the largest shares of the noise.
# In many dimensions the noise is spread over many pairs, and usually none stands out.

first = found.boundary_pairs[0]
print(f"images {first.i} and {first.j}: {100 * first.share:.3f} ± {100 * first.share_se:.3f} % of the target noise")

# %%
# What a profile does not show
# ----------------------------
#
# All of this describes the training target, not a network. The order of images by collapse time was tested on several
# hundred trained networks: in 1 of 12 conditions it predicted better than both the number of copies and the distance to
# the nearest image which images are reproduced (:doc:`the test </howto/profile>`). Remove duplicates; do not conclude
# that a network will copy the isolated images.
#
# What to read next
# -----------------
#
# - :ref:`sphx_glr_tutorials_3_your_training_run.py`: watch the training that follows.
# - :ref:`sphx_glr_tutorials_2_your_network.py`: audit the network that comes out of it.
# - :doc:`Profile a data set </howto/profile>`: options, files and the test on trained networks.
# - :ref:`Theory, section 3 <sec-3>`: the definitions of window, collapse time and shares.
# - :doc:`Glossary </glossary>`.
