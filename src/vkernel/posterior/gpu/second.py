r"""Second moments on a GPU: traces, products of covariances with vectors, and sums over weights (theory, §2.5).

They take the stages of :mod:`vkernel.posterior.gpu`. Candidates of the sparse stage are evaluated in float64 about the
heaviest one. In the dense stages the points that are heavy, relative to the weight of all points but the heaviest, are
taken out and evaluated likewise; the others have, about the centre c of the data and with weights :math:`e_i`,

.. math:: \sum e_i |y_i - c|^2, \qquad \sum e_i p_i, \qquad \sum e_i p_i (y_i - c), \qquad p_i = v \cdot (y_i - c),

from which follow the moments of this part, :math:`\langle |y-c|^2 \rangle - |\langle y \rangle - c|^2` and
:math:`\langle p\, (y-c) \rangle - \langle p \rangle (\langle y \rangle - c)`; the two parts merge as everywhere
(2.10). A part whose spread is less than ``TIGHT`` of its distance from c takes the reference path. The products
:math:`p_i` and :math:`e_i p_i` are sums of fp16 numbers, like logits and weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vkernel.posterior.gpu import chosen, filled, rest
from vkernel.posterior.gpu.batches import Batch, How
from vkernel.posterior.gpu.fp16 import FULL, STAGES, TINY, WIDE
from vkernel.posterior.weights import TIGHT, Moments, Queries, Want, merge, reduce

if TYPE_CHECKING:
    from vkernel.posterior.gpu import GPUPath, Screened


@dataclass
class Sparse:
    """The first step has all moments of the sparse stage, and the stage of all queries."""

    seen: Screened
    moments: Moments

    @property
    def numbers(self) -> Tensor:
        return self.seen.stage.numbers


@dataclass
class Summed:
    """The second step has all moments of the queries up to its stage, and which queries, of how many, are left to the
    reference path."""

    moments: Moments
    reference: Tensor
    left: Tensor


def second_moments(path: GPUPath, batch: Batch, want: Want, product: bool) -> Moments:
    """Return all moments but the diagonal of the covariance; ``product``: with the product with the batch's vector."""
    queries, vector = batch.queries, batch.vector if product else None
    kind, size = "product" if product else "second", len(queries)
    steps = partial(sparse, path, queries, vector), partial(dense, path, queries, vector)
    first, second, how, numbers = batch.take(kind, *steps, lambda numbers: always(chosen(size, numbers)))
    found = first if second is None else second
    out = Moments.empty(queries.x, want, vector)
    out.put(slice(None), found.moments)
    for mask, apart in rest(first.seen.stage, how, numbers, None if second is None else second.reference):
        rows = mask.nonzero().squeeze(-1)
        again = rows[filled(len(rows), rows.device)] if apart else rows
        along = None if vector is None else vector[again]
        if apart:
            part = path.moments(queries[again], want, along).take(slice(len(rows)))
        else:
            part = reduce(path.dense.weights(queries[rows], lent=True), queries.x[rows], want, along)
        out.put(rows, part)
    return out


def always(how: How | None) -> How | None:
    """Return the same stage, with points taken out."""
    return None if how is None else (how[0], True)


def sparse(path: GPUPath, queries: Queries, vector: Tensor | None) -> Sparse:
    """Take stage 1 for all queries."""
    seen, steps = path.screen(queries, True), path.steps
    exact = steps.exact(queries, path.fp16, seen.stage.count, seen.index)
    return Sparse(seen, steps.moments(path.fp16, seen.stage.count, seen.index, exact, vector))


def dense(path: GPUPath, queries: Queries, vector: Tensor | None, found: Sparse, how: How) -> Summed:
    """Take a dense stage for all queries; heavy points are always taken out."""
    k, seen, steps, points = how[0], found.seen, path.steps, path.fp16
    stage, loss = STAGES[k], path.loss(len(queries), k)
    points.refine(seen.logits, stage)
    logits = replace(seen.logits, gain=seen.logits.gain * (1 + loss.logits))
    seen, wanted = replace(seen, logits=logits), seen.stage.between(1, k + 1)
    listed, index = path.heavy(seen, k)
    exact = steps.exact(queries, points, listed.count, index, logits)
    heavy = steps.moments(points, listed.count, index, exact, vector)
    reference = seen.stage.between(4, 4) | (wanted & (listed.count > index.shape[1]))
    shift = torch.minimum(seen.first + logits.delta.float(), listed.threshold)

    along, size = None, torch.ones_like(queries.var)
    if vector is not None:
        size, one = torch.linalg.vector_norm(vector, dim=1).clamp_min(TINY), torch.ones_like(queries.var)
        bound = max(points.radius**2, TINY)  # of p, for vectors as long as the radius
        along = steps.split(Queries(points.center + vector * (points.radius / size)[:, None], one, bound * one), points)
        points.refine(along, stage)
        along = replace(along, gain=along.gain * (1 + loss.logits))
    weights, parts = steps.weights(logits, shift, stage.planes, True, along)
    sums = parts.sum(2, dtype=WIDE)
    total = sums[0].clamp_min(TINY)
    scale, share = points.unit * (1 + loss.means) / total, torch.ones_like(total)
    some, zero = torch.ones_like(wanted), torch.zeros_like(queries.x)

    def summed(planes: Tensor) -> Tensor:  # Σ e (y - c) / Σ e
        return steps.finish(points, points.sums(planes, stage), scale, share, some, zero, zero) - points.center

    away, square, mass = summed(weights[: stage.planes]), 2 * sums[1] / total, total / FULL
    trace = square - away.square().sum(1)
    log_z = shift - logits.norm.square() / (2 * queries.var) + mass.log()
    log_z = log_z if path.points.weighted else log_z + path.points.log_w[0]
    out = Moments(log_z, points.center + away, trace.clamp_min(0.0))
    out.square, out.entropy = sums[2] / mass / mass, mass.log() - sums[3] / mass
    if vector is not None:
        product = summed(weights[stage.planes :]) - (sums[4] / total)[:, None] * away
        out.vector, out.product = vector, product * (points.radius * size)[:, None]
    part = torch.sigmoid(out.log_z - heavy.log_z)  # what cancels in this part counts by its share
    out, sparse_ones = merge(heavy, out), found.moments.present()
    reference = reference | (wanted & ~(out.trace >= TIGHT * part * (square + away.square().sum(1))))
    moments = Moments(**{name: _where(wanted, a, sparse_ones[name]) for name, a in out.present().items()})
    return Summed(moments, reference, reference.sum())


def _where(mask: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch.where(mask if a.ndim == 1 else mask[:, None], a, b)
