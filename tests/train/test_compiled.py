"""Compiled losses: the same numbers, compiled once, and without a compiler the loss itself."""

from __future__ import annotations

import pytest
import torch

import vkernel as vk
from vkernel.core.errors import InputError
from vkernel.train.models.compiled import compiled, laid_out
from vkernel.train.objectives import J1, Training

TRAINING = Training(torch.rand(6, 1, 4, 4, dtype=torch.float64), vk.VP(), J1(), None)


def of_member(model, m, copies=None):
    state = model.initial(TRAINING, [0, 1])
    for name, copy in (copies or {}).items():
        copy.copy_(state[name])
    own = {name: p[m].requires_grad_() for name, p in {**state, **(copies or {})}.items()}
    return own, [a[m] for a in next(model.minibatches(TRAINING, [0, 1]))]


def test_a_compiled_loss_has_the_gradient_of_the_loss_for_every_member():
    """Captured whole (a break of the graph is an error), from copies of the filters with the channels last."""
    how = {"attention": (1,), "dropout": 0.2, "steps": 2, "batch": 8, "dtype": "float64"}
    model, twin = (vk.models.UNet((8, 16), **how, lr=lr) for lr in (1e-3, 1e-2))
    copies = laid_out(model.initial(TRAINING, [0, 1]), torch.float64)
    own, draws = of_member(model, 0, copies)
    assert all(p.is_contiguous(memory_format=torch.channels_last) for p in own.values() if p.ndim == 4)
    fast = compiled(model.loss, "unet", own, draws, backend="eager")
    assert fast != model.loss
    assert compiled(twin.loss, "unet", own, draws, backend="eager") is fast  # not compiled again
    own, draws = of_member(model, 1, copies)
    found = torch.autograd.grad(fast(own, *draws), list(own.values()))
    own, draws = of_member(model, 1)
    known = torch.autograd.grad(model.loss(own, *draws), list(own.values()))
    for a, b in zip(found, known, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_where_compiling_fails_the_loss_itself_is_used():
    def broken(graph, inputs):
        raise RuntimeError("no compiler")

    model = vk.models.MLP(4, 1, steps=1, batch=8)
    own, draws = of_member(model, 0)
    with pytest.warns(UserWarning, match="torch.compile fails here"):
        assert compiled(model.loss, "broken", own, draws, backend=broken) == model.loss
    assert compiled(model.loss, "broken", own, draws, backend=broken) == model.loss  # and not tried again


def test_compile_is_refused_where_it_is_no_choice():
    with pytest.raises(InputError, match="compile must be True, False or None"):
        vk.models.UNet(compile="always")
