"""Theories wherever scores are used: samplers, Scores, comparisons, audits, one class."""

import gc
import weakref

import pytest
import torch

import vkernel as vk
from vkernel.reports.audit.conventions import check
from vkernel.reports.audit.denoising import NoisyBatch, as_network
from vkernel.reports.audit.schedule import schedule
from vkernel.theories import NAMES, Gaussian, Local, Nearest, PCALocal, Smoothed, Switch

PROCESS = vk.VP()
POINTS = torch.tensor([[-1.0], [0.0], [1.0]], dtype=torch.float64)


def test_the_flow_of_the_gaussian_theory_has_the_density_of_a_gaussian():
    theory, x_T = Gaussian(POINTS, PROCESS), torch.linspace(-2, 2, 3, dtype=torch.float64)[:, None]
    found = vk.sample.pf_ode(theory, x_T, steps=30, method="heun", save=("logp",), generator=0)
    alpha, sigma = (float(a(torch.tensor(PROCESS.eps).double())) for a in (PROCESS.alpha, PROCESS.sigma))
    law = torch.distributions.Normal(0.0, (alpha**2 * POINTS.var(correction=0) + sigma**2).sqrt())
    torch.testing.assert_close(found.logp, law.log_prob(found.x[:, 0]), atol=5e-3, rtol=0)


def test_samplers_take_theories():
    x_T = PROCESS.prior((5, 1), generator=0, dtype=torch.float64)
    model = vk.models.Linear(vk.train.features.grid("gaussian", 4, 1, -1.5, 1.5, PROCESS), "x0", 0.1)
    V = vk.kernels.Linear(model, POINTS, PROCESS, 64, sets=16)
    above = Gaussian(POINTS, PROCESS)
    for theory in (above, Smoothed(POINTS, PROCESS, 0.3), Switch(above, Nearest(POINTS, PROCESS, 2), 1.0)):
        assert vk.sample.reverse_sde(theory, x_T, steps=4, generator=0).isfinite().all()
        assert vk.sample.effective_sde(V, x_T, mean=theory, steps=4, generator=0).isfinite().all()
        with pytest.raises(vk.InputError, match="EmpiricalScore"):
            vk.sample.naive(theory, x_T, kappa=1.0, steps=4)


def test_theories_are_members_of_scores_and_are_compared():
    theories = [Gaussian(POINTS, PROCESS), Smoothed(POINTS, PROCESS, 0.3), Nearest(POINTS, PROCESS, 2)]
    members, x, t = vk.Checkpoints(theories), torch.linspace(-1.5, 1.5, 7, dtype=torch.float64)[:, None], [0.1, 0.6]
    each = torch.stack([theory(x, 0.1) for theory in theories])
    torch.testing.assert_close(members.mean(x, 0.1), each.mean(0))
    found = vk.compare(members, theories[0], x, t, laws=False)
    bias = ((each.mean(0) - each[0]).square() - each.var(0) / 3).sum(-1)
    torch.testing.assert_close(torch.as_tensor(found.distance.sel(t=0.1).values), bias)
    same = vk.compare(vk.Checkpoints([theories[1]] * 3), theories[1], x, t, laws=False)
    assert abs(float(same.mean_error_pooled)) < 1e-12
    with pytest.raises(vk.InputError, match=r"scores\.mean_score"):
        vk.compare(members, members, x, t)


@pytest.mark.parametrize("make", [Gaussian, lambda y, p: Local(y, p, 3), PCALocal, lambda y, p: Nearest(y, p, 2)])
def test_a_class_is_its_images(make):
    """A theory of one class is that of all images with weights zero for the others."""
    g = torch.Generator().manual_seed(0)
    y, labels = torch.randn(12, 4, 4, generator=g, dtype=torch.float64), torch.arange(12) % 3
    data, x = vk.Empirical(y), torch.randn(2, 4, 4, generator=g, dtype=torch.float64)
    for c in range(3):
        one = make(data, PROCESS).on(data.subset((labels == c).nonzero().flatten()))
        weighted = make(vk.Empirical(y, (labels == c).double()), PROCESS)
        torch.testing.assert_close(one.denoise(x, 0.3), weighted.denoise(x, 0.3))


def test_the_times_of_a_theory_are_not_doubted():
    """A kernel density smooths so much that it denoises better with smaller times, at which it is nearly exact."""
    data = vk.Empirical(vk.data.toy("digits")[:32])
    theory = Smoothed(data, PROCESS, 0.3)
    found = check(theory, data, levels=3, images=4)
    assert found.fits
    assert not any(found.schedule.moved)
    batch = NoisyBatch.of(as_network(theory, data), data, 3, 4, torch.Generator().manual_seed(0))
    assert any(schedule(as_network(theory, data), batch).moved)


@pytest.mark.parametrize("kind", ["gaussian", "smoothed", "nearest", "local", "equivariant", "pca"])
def test_a_theory_is_freed_with_its_copies_of_the_data(kind):
    """Without a garbage collection, for which the memory of a GPU may be too small."""
    given = {"smoothed": {"h": 0.1}, "local": {"k": 3}, "equivariant": {"k": 3}}.get(kind, {})
    theory = NAMES[kind](torch.rand(9, 6, 6), PROCESS, **given)
    theory.denoise(torch.rand(2, 6, 6), 0.3)
    left = weakref.ref(theory)
    gc.disable()
    try:
        del theory
        assert left() is None
    finally:
        gc.enable()
