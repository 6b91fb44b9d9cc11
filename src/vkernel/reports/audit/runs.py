r"""Several networks beside each other: did they start from the same weights, and which samples can be compared?

**Initialisation.** Weights of independent trainings are uncorrelated, since the hidden units of a network can be
exchanged: the cosine of two matrices of N weights is 0 ± :math:`1/\sqrt N`. Trainings from one initialisation keep a
part of it. The :func:`weight_cosine` is the median, over weight matrices and kernels of convolutions, of

.. math:: \cos = \frac{(a - \bar a) \cdot (b - \bar b)}{|a - \bar a|\,|b - \bar b|} .

Normalisations and embeddings are left out (their gains and tables are alike in all networks), and so are tensors that
are equal in both, unless all are. Public networks of independent trainings have at most .013; a pair from one seed,
trained on different data, .45.

**Samples.** With :math:`y = x/\alpha` and :math:`r = \sigma/\alpha` the probability flow is :math:`dy/dr =
\epsilon(y, r)`, whatever the schedule, and begins at :math:`y = r z` with the same normals z: samples of networks with
different schedules, time inputs and pixel ranges (mapped to one) can be compared, where their scores at a time cannot.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from vkernel.data.empirical import Empirical
from vkernel.metrics.features import Extractor, extractor
from vkernel.reports.audit.agreement import SameNoise, same_noise
from vkernel.reports.audit.levels import same_process
from vkernel.reports.audit.report import text
from vkernel.score.wrapped import remapped

if TYPE_CHECKING:
    from vkernel.reports.audit.result import NetworkAudit

SHARED, DOUBT = 0.05, 4.0  # the least cosine of a shared initialisation, and in units of its spread by chance
SMALL = 64  # weights; smaller tensors are left out
FEWEST = 2  # matrices: without hidden units nothing can be exchanged
LEAST = 3  # starts of samples that are compared


def weight_cosine(a: object, b: object) -> tuple[float, float] | None:
    """Return the cosine of the weights of two modules, and its spread by chance; ``None`` of different architectures
    and of functions."""
    if not (isinstance(a, nn.Module) and isinstance(b, nn.Module)):
        return None
    one, two = _matrices(a), _matrices(b)
    if {k: v.shape for k, v in one.items()} != {k: v.shape for k, v in two.items()} or len(one) < FEWEST:
        return None
    pairs = [(one[k].detach().flatten().cpu().double(), two[k].detach().flatten().cpu().double()) for k in one]
    pairs = [pair for pair in pairs if not torch.equal(*pair)]
    if not pairs:
        return 1.0, 0.0
    centred = [(x - x.mean(), y - y.mean()) for x, y in pairs]
    cosines = torch.stack([x @ y / (x.norm() * y.norm()) for x, y in centred])
    count = torch.tensor([float(len(x)) for x, _ in pairs])[cosines.isfinite()]
    known = cosines[cosines.isfinite()]
    return (float(known.median()), 1 / math.sqrt(float(count.median()))) if len(known) >= FEWEST else None


def _matrices(module: nn.Module) -> dict[str, Tensor]:
    """Return the weight matrices and kernels of a module by name."""
    found: dict[str, Tensor] = {}
    for prefix, part in module.named_modules():
        if not isinstance(part, nn.LayerNorm | nn.Embedding):
            own = part.named_parameters(recurse=False)
            found |= {f"{prefix}.{k}": p for k, p in own if p.ndim > 1 and p.numel() >= SMALL and p.is_floating_point()}
    return found


def shared_starts(networks: Sequence[NetworkAudit], groups: Mapping[str, str | int] | None) -> list[str]:
    """Return a sentence for each set of networks that share an initialisation and are not stated to be one group."""
    kin: dict[str, set[str]] = {n.name: {n.name} for n in networks}
    cosines: dict[tuple[str, str], float] = {}
    for a, b in itertools.combinations(networks, 2):
        found = weight_cosine(a.net.net, b.net.net)
        if found is not None and found[0] > max(SHARED, DOUBT * found[1]):
            cosines[a.name, b.name] = found[0]
            joined = kin[a.name] | kin[b.name]
            kin |= dict.fromkeys(joined, joined)
    sets = [tuple(n for n in kin if n in some) for some in {id(some): some for some in kin.values()}.values()]
    letter = {name: chr(ord("A") + k % 26) for k, some in enumerate(sets) for name in some}
    proposal, out = ",".join(letter[n.name] for n in networks), []
    for some in sets:
        own = [cosine for (a, _), cosine in cosines.items() if a in some]
        stated = groups is not None and len({groups[name] for name in some}) == 1
        if len(some) > 1 and not stated:
            out.append(text("starts", names=some, low=min(own), high=max(own), proposal=proposal))
    return out


def comparable(networks: Sequence[NetworkAudit], extract: Extractor) -> tuple[Tensor | None, Extractor, str]:
    """Return samples of the probability flow ``(M, n, *shape)``, the features in which to compare them, as for copies,
    and, without samples, why they cannot be compared."""
    samples = [n.samples["ode"] for n in networks]
    noise = [n.name for n, s in zip(networks, samples, strict=True) if not s.are_images]
    alike = extractor("standardised") if any(s.standardised for s in samples) else extract
    if noise:
        return None, alike, text("no_images", names=noise)
    x = torch.stack([s.images for s in samples])
    good = x.isfinite().flatten(2).all(2).all(0)
    few = int(good.sum()) < LEAST
    return (None if few else x[:, good]), alike, text("too_few", count=int(good.sum())) if few else ""


def across(
    networks: Sequence[NetworkAudit], data: Sequence[Empirical], extract: Extractor, members: Sequence[str]
) -> tuple[SameNoise | None, str]:
    """Compare samples of networks that differ in schedule, time input or range; ``data`` are in the units of each.
    Also return the sentence about it; ``members`` are those whose scores were compared."""
    first, pairs = networks[0].net, list(itertools.combinations([n.net for n in networks], 2))
    differ = {"schedule": any(not same_process(a.process, b.process) for a, b in pairs)}
    differ |= {
        "time input": any(a.time != b.time for a, b in pairs),
        "pixel range": len({n.net.range for n in networks}) > 1,
    }
    facts = {"names": [n.name for n in networks], "differ": [k for k, yes in differ.items() if yes], "members": members}
    if any(n.net.label != first.label for n in networks):
        return None, text("across", same=None, why="they are of different classes", **facts)
    x, alike, why = comparable(networks, extract)
    if x is None:
        return None, text("across", same=None, why=why, **facts)
    moved = [remapped(member, own.scale, data[0].scale) for member, own in zip(x, data, strict=True)]
    found = same_noise(torch.stack(moved), data[0], alike)
    return found, text("across", same=found, why="", **facts)
