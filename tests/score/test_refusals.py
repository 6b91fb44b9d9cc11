"""What the exact score refuses, with a sentence."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from draws import gen, normal
from torch import Tensor
from torch.func import jacfwd, jacrev, vmap

import vkernel as vk
from vkernel.core.errors import InputError


def weights_of(n: int, seed: int) -> Tensor:
    return 0.1 + torch.rand(n, generator=gen(seed), dtype=torch.float64)


BAD_X = {
    "nan": torch.tensor([[0.0, math.nan, 0.0]]),
    "inf": torch.tensor([[0.0, math.inf, 0.0]]),
    "float16 inf": torch.tensor([[0.0, 1e6, 0.0]]).half(),
    "short": torch.zeros(4, 2),
    "scalar": torch.tensor(0.0),
    "transposed": torch.zeros(3, 4),
    "complex": torch.zeros(4, 3, dtype=torch.complex64),
    "numpy": np.zeros((4, 3)),
    "list": [[0.0, 0.0, 0.0]],
    "none": None,
}
BAD_T = {
    "below": 1e-5,
    "above": 1.5,
    "negative": -0.1,
    "nan": math.nan,
    "inf": math.inf,
    "one outside": torch.tensor([0.1, 0.2, 0.3, 2.0]),
    "too many": torch.full((5,), 0.1),
    "too deep": torch.full((4, 1), 0.1),
    "over coordinates": torch.full((4, 3), 0.1),
    "text": "soon",
    "none": None,
    "complex": 0.1 + 0j,
    "complex tensor": torch.tensor(0.1 + 0j),
    "requires grad": torch.tensor(0.1, requires_grad=True),
}


def calls(score):
    return {
        "score": score,
        "posterior": score.posterior,
        "covariance": score.covariance,
    }


@pytest.mark.filterwarnings("ignore:Casting complex")
@pytest.mark.parametrize("call", ["score", "posterior", "covariance"])
@pytest.mark.parametrize("bad", BAD_X)
def test_bad_x_is_refused_with_a_sentence(bad, call):
    score = vk.EmpiricalScore(normal(5, 3, seed=0), vk.VP())
    with pytest.raises(InputError, match=r"x .*\."):
        calls(score)[call](BAD_X[bad], 0.1)


@pytest.mark.filterwarnings("ignore:Casting complex")
@pytest.mark.parametrize("call", ["score", "posterior", "covariance"])
@pytest.mark.parametrize("bad", BAD_T)
def test_bad_t_is_refused_with_a_sentence(bad, call):
    score = vk.EmpiricalScore(normal(5, 3, seed=0), vk.VP())
    with pytest.raises(InputError, match=r"\bt\b|[Tt]ime"):
        calls(score)[call](torch.zeros(4, 3), BAD_T[bad])


def test_many_times_for_one_query_are_refused():
    score = vk.EmpiricalScore(normal(5, 3, seed=0), vk.VP())
    for x in (torch.zeros(1, 3), torch.zeros(1, 4, 3)):
        with pytest.raises(InputError, match="broadcast"):
            score(x, torch.full((5,) if x.ndim == 2 else (5, 4), 0.1))


@pytest.mark.parametrize("process", [None, "vp", vk.VP, 3, lambda t: t])
def test_what_is_no_process_is_refused(process):
    with pytest.raises(InputError, match="process"):
        vk.EmpiricalScore(torch.zeros(3, 2), process)


def test_a_frame_of_another_shape_is_refused():
    with pytest.raises(InputError, match="shape"):
        vk.EmpiricalScore(torch.zeros(3, 2), vk.Anisotropic(vk.VP(), torch.ones(3)))


def test_nan_under_transforms_is_refused_too():
    score = vk.EmpiricalScore(normal(5, 3, seed=0), vk.VP())
    x = torch.full((2, 3), math.nan)
    for f in (lambda: vmap(lambda q: score(q, 0.1))(x), lambda: jacrev(score)(x, 0.1), lambda: jacfwd(score)(x, 0.1)):
        with pytest.raises(InputError, match="NaN"):
            f()


@pytest.mark.parametrize(
    "process", [vk.VP(eps=0.0), vk.EDM(eps=0.0), vk.FlowMatching(eps=0.0)], ids=["vp", "edm", "flow"]
)
@pytest.mark.parametrize("d", [2, 40])
def test_no_noise_at_all_is_refused(process, d):
    """At t = 0 with S = 0 there is no density, no score: not NaN."""
    score = vk.EmpiricalScore(normal(5, d, seed=0), process)
    with pytest.raises(InputError, match="noise"):
        score(torch.zeros(2, d), 0.0)


@pytest.mark.parametrize("d", [2, 40])
@pytest.mark.parametrize(
    ("size", "dtype"), [(1e6, torch.float32), (1e12, torch.float32), (1e20, torch.float32), (1e200, torch.float64)]
)
def test_an_extreme_x_has_the_right_answer_or_a_sentence(size, dtype, d):
    """Far out one point holds all the weight, the one farthest in the direction of x."""
    points = normal(50, d, seed=0)
    score = vk.EmpiricalScore(points, vk.VP())
    x = torch.full((1, d), size, dtype=dtype)
    first = points.sum(-1).argmax()
    try:
        s, posterior = score(x, 0.1), score.posterior(x, 0.1)
    except InputError:
        return
    assert s.isfinite().all()
    torch.testing.assert_close(posterior.mean[0], points[first].to(dtype), rtol=1e-4, atol=1e-4)
    assert int(posterior.top(1)[1]) == int(first)
    assert float(posterior.cov.trace()) <= 1e-6


def test_noise_fraction_refuses():
    data = vk.data.hexagon()
    for bad in (0, 1, -5):
        with pytest.raises(InputError, match="queries"):
            vk.noise_fraction(data, vk.VP(), 0.1, queries=bad)
    with pytest.raises(InputError, match="process"):
        vk.noise_fraction(vk.EmpiricalScore(data, vk.VP()), vk.EDM(), 0.1)
    with pytest.raises(InputError, match="outside"):
        vk.noise_fraction(data, vk.VP(), 7.0)


def test_the_noise_fraction_of_a_set_with_a_far_outlier_is_not_an_artefact():
    """A grid too coarse for the noise must not be called exact: the outlier is one point of four, and far."""
    near = vk.Empirical(torch.tensor([0.0, 0.01, 1.0], dtype=torch.float64))
    for far in (-1e2, -3e3, 1e5):
        data = vk.Empirical(torch.tensor([far, 0.0, 0.01, 1.0], dtype=torch.float64))
        for sigma in (0.002, 0.004, 0.01):
            want = float(vk.noise_fraction(near, vk.EDM(), sigma)) * 3 / 4
            got = vk.noise_fraction(data, vk.EDM(), sigma, generator=0)
            assert abs(got.value - want) <= 4.5 * got.se + 1e-4 * want
