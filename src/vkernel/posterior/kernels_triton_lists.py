"""The steps of :mod:`~vkernel.posterior.kernels_torch` that go over lists of points, each in one kernel."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,import-not-found,import-untyped,untyped-decorator"

from __future__ import annotations

import contextlib
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from vkernel.posterior import kernels_torch
from vkernel.posterior.kernels_torch import LIGHTEST, WIDE, Logits, Stored
from vkernel.posterior.pieces import Queries

__all__ = ["exact", "mean", "on", "strike"]

SLOTS, COORDINATES = 2, 512  # pairs and coordinates that are read at once
PROGRAMS = 32768  # enough to fill a card, and to share long lists of a few queries


@triton.jit
def _values(values, table, first, place, good, TABLE: tl.constexpr):
    """Stored values in float64."""
    v = tl.load(values + place, mask=good, other=0)
    if TABLE:
        v = tl.load(table + (v.to(tl.int32) - first), mask=good, other=0.0)
    return v.to(tl.float64)


@triton.jit
def _exact(x, alpha, var, log_w, values, table, first, stride, d, counts, index, out, cap, TABLE: tl.constexpr,
           SLOTS: tl.constexpr, COORDINATES: tl.constexpr):  # fmt: skip
    q = tl.program_id(0).to(tl.int64)
    count = tl.load(counts + q)
    count = tl.where(count <= cap, count, 0)
    a = tl.load(alpha + q)
    twice = 2 * tl.load(var + q)
    for s in range(tl.program_id(1) * SLOTS, count, tl.num_programs(1) * SLOTS):
        slot = s + tl.arange(0, SLOTS)
        held = slot < count
        i = tl.load(index + q * cap + slot, mask=held, other=0).to(tl.int64)
        square = tl.zeros((SLOTS, COORDINATES), tl.float64)
        for k in range(0, d, COORDINATES):
            col = k + tl.arange(0, COORDINATES)
            good = held[:, None] & (col < d)[None, :]
            y = _values(values, table, first, i[:, None] * stride + col[None, :], good, TABLE)
            gap = tl.load(x + q * d + col, mask=col < d, other=0.0)[None, :] - a * y
            square += tl.where(good, gap * gap, 0.0)
        logit = tl.load(log_w + i, mask=held, other=0.0) - tl.sum(square, 1) / twice
        tl.store(out + q * cap + slot, logit, mask=held)


@triton.jit
def _mean(values, table, first, stride, d, counts, index, logit, log_z, out, cap, TABLE: tl.constexpr,
          LOT: tl.constexpr, SLOTS: tl.constexpr, COORDINATES: tl.constexpr, LIGHTEST: tl.constexpr,
          NONE: tl.constexpr):  # fmt: skip
    q = tl.program_id(0).to(tl.int64)
    count = tl.load(counts + q)
    count = tl.where(count <= cap, count, 0)
    col = tl.program_id(1) * COORDINATES + tl.arange(0, COORDINATES)
    if count == 0:
        tl.store(out + q * d + col, tl.zeros((COORDINATES,), tl.float64), mask=col < d)
        tl.store(log_z + q, -float("inf"))
    else:
        top = tl.max(tl.load(logit + q * cap + tl.arange(0, SLOTS), mask=tl.arange(0, SLOTS) < count, other=NONE), 0)
        total = top - top
        for s in range(0, count, LOT):
            slot = s + tl.arange(0, LOT)
            lot = tl.load(logit + q * cap + slot, mask=slot < count, other=NONE)
            new = tl.maximum(top, tl.max(lot, 0))
            total = total * tl.exp(top - new) + tl.sum(tl.exp(lot - new), 0)
            top = new
        sums = tl.zeros((SLOTS, COORDINATES), tl.float64)
        for s in range(0, count, SLOTS):
            slot = s + tl.arange(0, SLOTS)
            some = tl.load(logit + q * cap + slot, mask=slot < count, other=-float("inf")) - top
            if tl.max(some, 0) > -LIGHTEST:
                heavy = some > -LIGHTEST
                i = tl.load(index + q * cap + slot, mask=heavy, other=0).to(tl.int64)
                good = heavy[:, None] & (col < d)[None, :]
                y = _values(values, table, first, i[:, None] * stride + col[None, :], good, TABLE)
                sums += tl.where(good, tl.exp(some)[:, None] * y, 0.0)
        tl.store(out + q * d + col, tl.sum(sums, 0) / total, mask=col < d)
        tl.store(log_z + q, top + tl.log(total))


@triton.jit
def _strike(planes, counts, index, columns, cap, CAP: tl.constexpr):
    q = tl.program_id(0).to(tl.int64)
    count = tl.load(counts + q)
    slot = tl.arange(0, CAP)
    held = (slot < count) & (count <= cap)
    i = tl.load(index + q * cap + slot, mask=held, other=0).to(tl.int64)
    tl.store(planes + q * columns + i, tl.full((CAP,), -float("inf"), tl.float32), mask=held)


def on(a: Tensor) -> Any:
    """Kernels start on the device that is current: make it that of ``a``."""
    return torch.cuda.device(a.device) if a.is_cuda else contextlib.nullcontext()


def exact(queries: Queries, points: Stored, count: Tensor, index: Tensor) -> Tensor:
    if points.values is None:
        return kernels_torch.exact(queries, points, count, index)
    x, cap = queries.x.contiguous(), index.shape[1]
    out = torch.empty(index.shape, dtype=WIDE, device=x.device)
    grid = len(x), max(1, min(triton.cdiv(cap, SLOTS), PROGRAMS // len(x)))
    table = x if points.table is None else points.table
    with on(x):
        _exact[grid](
            x, queries.alpha.contiguous(), queries.var.contiguous(), points.log_w, points.values, table, points.first,
            points.values.stride(0), x.shape[1], count, index, out, cap, TABLE=points.table is not None, SLOTS=SLOTS,
            COORDINATES=COORDINATES, num_warps=4,
        )  # fmt: skip
    return out


def mean(points: Stored, count: Tensor, index: Tensor, logit: Tensor) -> tuple[Tensor, Tensor]:
    if points.values is None:
        return kernels_torch.mean(points, count, index, logit)
    d, cap = points.data.d, index.shape[1]
    out = torch.empty((len(count), d), dtype=WIDE, device=logit.device)
    log_z = torch.empty(len(count), dtype=WIDE, device=logit.device)
    table = logit if points.table is None else points.table
    with on(out):
        _mean[(len(count), triton.cdiv(d, COORDINATES))](
            points.values, table, points.first, points.values.stride(0), d, count, index, logit, log_z, out, cap,
            TABLE=points.table is not None, LOT=128, SLOTS=SLOTS, COORDINATES=COORDINATES, LIGHTEST=LIGHTEST,
            NONE=-1e300, num_warps=4,
        )  # fmt: skip
    return log_z, out


def strike(logits: Logits, count: Tensor, index: Tensor) -> None:
    cap = index.shape[1]
    with on(count):
        _strike[(len(count),)](
            logits.planes, count, index, logits.planes.shape[2], cap, CAP=triton.next_power_of_2(cap), num_warps=4
        )
