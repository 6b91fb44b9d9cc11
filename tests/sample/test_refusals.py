"""What samplers refuse: scores whose results are not like x, and wrong options."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import vkernel as vk
from vkernel.core.errors import InputError


class Odd(vk.Score):
    """A score whose result is not like x."""

    process, shape = vk.VP(), (2,)

    def __init__(self, out: object) -> None:
        self.out = out

    def __call__(self, x: Tensor, t: float) -> Tensor:
        return self.out  # type: ignore[return-value]


@pytest.mark.parametrize("method", ["exponential", "multistep", "euler", "heun", "dopri5"])
@pytest.mark.parametrize("out", [torch.zeros(5, 1), None], ids=["too narrow", "nothing"])
def test_a_result_that_is_not_like_x_is_refused(method: str, out: object) -> None:
    with pytest.raises(InputError, match=r"returned (shape|NoneType).* it must return a tensor like x"):
        vk.sample.pf_ode(Odd(out), torch.zeros(5, 2), steps=4, method=method)
    with pytest.raises(InputError, match="it must return a tensor like x"):
        vk.sample.ancestral(Odd(out), torch.zeros(5, 2), steps=4)


def test_progress_is_a_truth_value_or_a_function() -> None:
    score = vk.EmpiricalScore(vk.data.toy("triple"), vk.VP())
    with pytest.raises(InputError, match="progress must be True, False or a function"):
        vk.sample.pf_ode(score, torch.zeros(5, 1), steps=4, progress="yes")


def test_a_method_that_a_white_kernel_ignores_is_checked() -> None:
    V = vk.kernels.Naive(vk.EmpiricalScore(vk.data.toy("triple"), vk.VP()), kappa=0.1)
    with pytest.raises(InputError, match="method must be one of"):
        vk.sample.effective_sde(V, torch.zeros(5, 1), steps=4, method="foo")


@pytest.mark.parametrize("white", [True, False])
def test_what_is_saved_may_be_an_iterator(white: bool) -> None:
    score = vk.EmpiricalScore(vk.data.toy("triple"), vk.VP())
    V = vk.kernels.FiniteRank(lambda x, t: x[None], torch.eye(1), score.process, score)
    kernel = vk.kernels.Naive(score, kappa=0.1) if white else V
    found = vk.sample.effective_sde(kernel, torch.zeros(5, 1), steps=4, save=iter(["path"]))
    assert found.path is not None
    assert found.path.shape == (5, 5, 1)


def test_an_unknown_option_is_named_with_the_function_that_was_called() -> None:
    score = vk.EmpiricalScore(vk.data.toy("triple"), vk.VP())
    with pytest.raises(TypeError, match=r"pf_ode\(\) got an unexpected option 'stepz'; it takes score, x_T, method"):
        vk.sample.pf_ode(score, torch.zeros(5, 1), stepz=4)  # type: ignore[call-overload]


def test_errors_of_predictions_have_the_dtype_of_x() -> None:
    V = vk.kernels.Naive(vk.EmpiricalScore(vk.data.toy("triple"), vk.VP()), kappa=0.1)
    error = V.error(torch.zeros(5, 1), 0.1)
    assert error.dtype == torch.float32
    assert error.tolist() == [0.0] * 5
