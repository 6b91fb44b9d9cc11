r"""
3. Your training run
====================

**Question.** Is this run starting to memorise, and when will copies appear?

Copies appear after the error on held-out images has stopped falling, at a training time that grows with the number of
images. ``vk.Monitor`` is one line in the training loop. It evaluates the network on fixed noised training and held-out
images, draws samples, and raises an alarm where training images are denoised better than held-out ones. Here a network
is trained on 32 digits for much longer than is useful.
"""

# %%
# A training loop
# ---------------
#
# The network is a multilayer perceptron with the preconditioning and the loss of EDM (Karras et al. 2022): it takes a
# noisy image :math:`x = x_0 + \sigma\epsilon` and :math:`\sigma`, and returns a denoised image. The loop is that of
# any diffusion model. Three lines belong to the monitor: it is made, called at every step, and closed.

import tempfile
import warnings
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import nn

import vkernel as vk

torch.set_num_threads(1)  # with a network as small as this, threads mostly wait for one another
steps = 8000
width = 128
every = 100


class Denoiser(nn.Module):
    """D(x, σ) = c_skip x + c_out F(c_in x, log σ / 4)."""

    def __init__(self):
        super().__init__()
        layers = nn.Linear(65, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 64)
        self.layers = nn.Sequential(*layers)

    def forward(self, x, sigma):
        s, half = sigma.reshape(-1, 1), 0.5
        size = (s**2 + half**2).sqrt()
        raw = self.layers(torch.cat([x.flatten(1) / size, s.log() / 4], 1))
        return (half**2 / size**2 * x.flatten(1) + s * half / size * raw).reshape(x.shape)


torch.manual_seed(0)
train, held_out = vk.data.images("digits", 32, 256)  # a random split, which the alarm needs
images, network = train[:], Denoiser()
optimiser = torch.optim.Adam(network.parameters(), 1e-3)
folder = Path(tempfile.mkdtemp()) / "run"

# %%
# The monitor needs the training images as the network sees them, held-out images that are not trained on, the process,
# and what the network predicts. ``every`` is the least number of steps between evaluations; ``budget`` is the largest
# share of the wall time that it may take. The default is .02. This run takes ten seconds, so we allow much more.

conventions = {"predicts": "x0", "time": "sigma", "range": (-1, 1)}
monitor = vk.Monitor(train, vk.EDM(), test=held_out, **conventions, every=every, budget=0.8, log=folder, progress=False)
verdicts = {}
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for step in range(steps + 1):
        if monitor(step, network) is not None:  # None between evaluations, at once
            verdicts[step] = monitor.verdict
        x0 = images[torch.randint(len(images), (64,))]
        sigma = (1.2 * torch.randn(64) - 1.2).exp()
        x = x0 + sigma[:, None, None, None] * torch.randn_like(x0)
        weight = (sigma**2 + 0.25) / (0.5 * sigma) ** 2
        loss = (weight[:, None, None, None] * (network(x, sigma) - x0).square()).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    monitor.evaluate(steps, network)  # at the end, whatever the budget
    verdicts[steps] = monitor.verdict
monitor.close()
for one in caught:
    print(one.message)

# %%
# The messages above are warnings that the monitor gave during the run, once for each kind of event; it never raises an
# exception. The monitor changes nothing in the training: weights with and without it are equal bit for bit.
#
# What it reported
# ----------------
#
# A verdict is *learning* (the error on held-out images still falls), *settled* (it no longer does) or *memorising*
# (training images are denoised better than held-out ones by more than a tenth of the error, beyond chance).

state = None
for step, verdict in verdicts.items():
    if verdict.state != state:
        state = verdict.state
        print(f"step {step:6,}: {state}")
last = monitor.verdict
print(f"alarm at step {last.alarm}, first copies at step {last.copying}")

# %%
# The curves show what happens. Errors are in units of the best linear denoiser's error on held-out images. The error on
# training images falls faster than that on held-out images. The alarm is raised when the gap exceeds a tenth of the
# held-out error, beyond chance. Copies among samples appear later. Shaded bands are 95 % intervals.

records = monitor.records
at = torch.tensor([max(record.step, 1) for record in records])
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
figure.suptitle("Errors on training and held-out images, and copies among samples, against steps")
for name, label in (("train", "training images"), ("test", "held-out images")):
    errors = [getattr(record, name) for record in records]
    (line,) = left.plot(at, [e.value for e in errors], label=label)
    left.fill_between(at, [e.low for e in errors], [e.high for e in errors], alpha=0.2, color=line.get_color())
left.set(xscale="log", yscale="log", xlabel="step", ylabel="error / error of linear denoiser")
drawn = [record for record in records if record.drawn is not None]
shares = [record.drawn.copies(monitor.setting.threshold) for record in drawn]
at = [max(record.step, 1) for record in drawn]
right.plot(at, [s.value for s in shares], color="tab:red", label="samples")
right.fill_between(at, [s.low for s in shares], [s.high for s in shares], alpha=0.2, color="tab:red")
right.axhspan(
    monitor.setting.held_share.low, monitor.setting.held_share.high, color="gray", alpha=0.3, label="held-out images"
)
right.set(xscale="log", xlabel="step", ylabel="share that are copies")
for ax in (left, right):
    if last.alarm is not None:
        ax.axvline(max(last.alarm, 1), color="black", ls=":", label="alarm")
    if last.copying is not None:
        ax.axvline(last.copying, color="tab:red", ls="--", label="first copies")
    ax.legend(fontsize="small")
plt.show()

# %%
# A run that is stopped between the two lines makes no copies that 128 samples show. The monitor also estimates the step
# at which copies appear, with a 90 % interval, where the closest samples show a trend:

for step, verdict in verdicts.items():
    expected = verdict.forecast
    if expected.value is not None and (last.copying is None or step < last.copying):
        interval = f"{expected.low:,.0f} to {expected.high:,.0f}"
        print(f"at step {step:,}: copies are expected at step {expected.value:,.0f} ({interval})")

# %%
# Estimates are extrapolations of one run. :doc:`The tests of the monitor </howto/monitor>` state how often the interval
# contained the step in 58 runs that copied, and :doc:`three longer runs </three_runs>` show them beside what happened.
#
# The closest samples
# -------------------
#
# The log folder holds a picture for each evaluation: the samples most like copies, above the training images that they
# resemble. ``vkernel monitor FOLDER --html page.html --watch`` shows curves, verdict and these pictures while the run
# goes on.

pictures = sorted(folder.glob("closest-*.png"))
figure, axes = plt.subplots(2, 1, figsize=(8, 4.6), layout="constrained")
figure.suptitle("Closest samples above their nearest training images: first and last evaluation")
for ax, path in zip(axes, (pictures[0], pictures[-1]), strict=True):
    ax.imshow(plt.imread(path))
    ax.set_title(f"step {int(path.stem.split('-')[1]):,}", fontsize="medium")
    ax.set_axis_off()
plt.show()

# %%
# What an alarm does not show
# ---------------------------
#
# It means that training images are denoised better than others, not that samples are copies: of networks with an alarm
# some never copied within their run. Copies are looked for among 128 samples; a network that copies once in a thousand
# samples is not seen. The chance of a false alarm in a whole run is at most 1 % by construction, if the held-out images
# are a random split.
#
# What to read next
# -----------------
#
# - :doc:`Watch a training run </howto/monitor>`: all arguments, the conventions of common training codes, tests and
#   costs.
# - :doc:`The monitor in your training loop </howto/monitor_loops>`: diffusers with accelerate, Lightning, the Trainer
#   of transformers.
# - :ref:`sphx_glr_tutorials_2_your_network.py`: audit the checkpoint that you keep.
# - :ref:`Theory, section 10.9 <sec-10-9>`: the statistics of the alarm.
