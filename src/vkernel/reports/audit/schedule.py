r"""Was the network trained with the stated noise schedule?

Noisy images :math:`x = \alpha_t x_0 + \sigma_t\,\mathrm{noise}` of the stated process are given to the network with
other times :math:`t'`. The error of its predicted noise is least at the :math:`t'` where the schedule *of its
training* has the noise of these images,

.. math:: (\sigma/\alpha)_{\mathrm{trained}}(t') = (\sigma/\alpha)_{\mathrm{stated}}(t) ,

which is t itself if the stated betas are right. Times are tried at which the stated :math:`\sigma/\alpha` is smaller
and larger by the :data:`FACTORS`. A level **moves** if the least error is below :data:`GAIN` of that at t, by four
standard errors of the (paired) difference over images; the schedule is wrong if two levels or more with r ≥ .25 move.
On networks that were read as they were trained none moved, under-trained ones included; at low noise, and for networks
that infer the noise level from the image, the curve is flat and nothing can be said.

Images of another law can move levels too. A schedule is therefore named only if the network denoises well under it
(:func:`vkernel.reports.audit.conventions.check`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from vkernel.adapters.weights import read_process
from vkernel.core.estimate import Estimate
from vkernel.process import DDPM, VP, Cosine, FlowMatching, Process, VPSong
from vkernel.reports.audit.denoising import NoisyBatch
from vkernel.score import Wrapped, convert

FACTORS = (0.25, 0.5, 2**-0.5, 2**0.5, 2.0, 4.0)  # of sigma/alpha
GAIN, SURE, LEVELS = 0.97, 4.0, 2  # of the error at the stated time; standard errors; levels that must move
SMOOTH = 0.25  # the least r of a level that counts
STEPS = (1000, 100, 200, 250, 300, 400, 500, 2000, 4000)  # numbers of betas in common use
CONTINUOUS = {"vp": VP(), "vpsong": VPSong(), "cosine": Cosine(), "flow": FlowMatching()}


@dataclass(frozen=True)
class Schedule:
    """The result of ``schedule``; lists run along the noise levels, ascending."""

    t: list[float]  # stated
    ratio: list[float]  # sigma/alpha of the noisy images
    best: list[float]  # the time with the least error
    gain: list[float]  # its error, of that at t
    moved: list[bool]
    errors: Tensor = field(repr=False, metadata={"files": False})  # (levels, images), at the best times

    @property
    def fits(self) -> bool:
        """Whether the stated times are the best, as far as the errors can tell."""
        return sum(self.moved) < LEVELS

    @property
    def most(self) -> int:
        """The level at which another time gains most."""
        return min(range(len(self.gain)), key=lambda k: (not self.moved[k], self.gain[k]))


def schedule(net: Wrapped, batch: NoisyBatch, factors: Sequence[float] = FACTORS) -> Schedule:
    """Find the times at which the network denoises a batch best."""
    process, best, errors, gains, moved = net.process, [], [], [], []
    for level, (x, t, alpha, sigma) in enumerate(batch.queries()):
        tried: dict[float, Tensor] = {}
        for factor in (1.0, *factors):
            ratio = torch.tensor(factor * sigma / alpha, dtype=torch.float64).clamp(*process.ratios)
            at = t if factor == 1 else net.at(process.time(ratio))
            if float(at) not in tried:
                out = net.output(x.float(), at).double()
                noise = convert(out, net.predicts, "noise", x, t, process, net.sigma_data)
                error = (noise - batch.noise[level]).square().flatten(1).mean(-1)
                tried[float(at)] = error.nan_to_num(torch.inf, torch.inf)
        own = tried[float(t)]
        least = min(tried, key=lambda when: float(tried[when].mean()))
        difference, gain = Estimate[float].of_mean(own - tried[least]), float(tried[least].mean() / own.mean())
        # at lower noise a network that smooths its training images seems to take others' times
        clear = gain < GAIN and difference.value > SURE * difference.se and sigma >= SMOOTH * alpha * batch.spread
        moved.append(clear)
        gains.append(gain)
        best.append(least if clear else float(t))
        errors.append(tried[least] if clear else own)
    ratios = (process.sigma(batch.times) / process.alpha(batch.times)).tolist()
    return Schedule(batch.times.tolist(), ratios, best, gains, moved, torch.stack(errors))


def candidates(net: Wrapped) -> Iterator[tuple[str, Process]]:
    """Yield schedules by the names under which they can be stated: those in the weight file, then common ones."""
    yield from net.schedules
    if not isinstance(net.process, DDPM):
        yield from CONTINUOUS.items() if net.process.T <= 1 else ()
        return
    stated = len(net.process.betas)
    held = net.net.parameters() if isinstance(net.net, nn.Module) else ()
    here = next(iter(held), torch.empty(0)).device.type == "cpu"
    for count in dict.fromkeys([stated, *STEPS]):
        if here or count <= stated:  # an index beyond a table of embeddings ends the process on a GPU
            kinds = [f"linear:1e-4:.02:{count}", f"scaled_linear:.00085:.012:{count}", f"cosine:{count}"]
            kinds += [f"linear:{0.1 / count:g}:{20 / count:g}:{count}"] if count != 1000 else []
            for kind in kinds:
                yield kind, read_process(kind, {}, "")[0]


def under(net: Wrapped, process: Process, batch: NoisyBatch) -> tuple[Wrapped, NoisyBatch]:
    """Return the network under another process, and the batch at the times with the same noise."""
    other = replace(net, process=process)
    ratios = (batch.process.sigma(batch.times) / batch.process.alpha(batch.times)).clamp(*process.ratios)
    return other, replace(batch, process=process, times=other.at(process.time(ratios)))
