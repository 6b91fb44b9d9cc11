"""The V-kernel that an ensemble shows."""

from __future__ import annotations

import math

import pytest
import torch
from draws import normal
from trained import PROCESS, X, fitted, model, quietly

import vkernel as vk
from vkernel.kernels import Measured, ValidityWarning
from vkernel.sample import Scores, effective_sde, pf_ode, semiclassical
from vkernel.sample.sde import Learned
from vkernel.train.ensemble import Ensemble

# -------------------- measured


@pytest.fixture(scope="module")
def measured() -> Measured:
    return Measured(fitted(model(3, "x0"), members=40, draws=60))


def test_a_measured_kernel_is_the_ensembles_covariance(measured):
    ens = measured.scores
    s = ens(X, 0.2)[..., 0]
    torch.testing.assert_close(measured.cov(X, 0.2).trace(), s.var(0))
    there = ens(X.flip(0), 0.4)[..., 0]
    want = ((s - s.mean(0)) * (there - there.mean(0))).sum(0) / 39
    torch.testing.assert_close(measured.cov(X, 0.2, X.flip(0), 0.4).dense()[:, 0, 0], want)
    D = PROCESS.D(torch.tensor([0.2, 0.4], dtype=torch.float64))
    torch.testing.assert_close(measured(X, 0.2, X.flip(0), 0.4).dense()[:, 0, 0], D[0] * D[1] * want)
    torch.testing.assert_close(measured.mean(X, 0.2)[:, 0], s.mean(0))
    assert measured.valid
    assert "40 members" in measured.why


def general(kernel: Measured) -> Measured:
    """The same ensemble behind a model that is not known to be linear."""

    class Plain(vk.models.Model):
        def __init__(self, inner) -> None:
            self.inner, self.target, self.weight = inner, inner.target, inner.weight
            super().__post_init__()

        def fit(self, training, members, report):
            raise NotImplementedError

        def output(self, state, x, t, process):
            return self.inner.output(state, x, t, process)

    ens = kernel.scores
    return Measured(Ensemble(Plain(ens.model), ens.state, ens.process, ens.shape))


@pytest.mark.parametrize("t", [0.2, "many", "all"])
def test_the_fast_path_is_the_general_one(measured, t):
    x = X[:10].reshape(5, 2, 1) * torch.linspace(0.5, 1, 5, dtype=torch.float64)[:, None, None]
    when = {"many": torch.tensor([0.2, 0.5]), "all": torch.linspace(0.1, 0.9, 10).reshape(5, 2)}.get(t, t)
    one, two = (k.draw(5, 3)(x, when) for k in (measured, general(measured)))
    torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-7 * float(two.abs().max()))
    assert measured.draw(5, 3)(x.float(), when).dtype == torch.float32


@pytest.mark.parametrize("path", ["fast", "general"])
def test_measured_fields_have_the_measured_covariance(measured, path):
    kernel, M, x = measured if path == "fast" else general(measured), 3000, X[::8]
    v = kernel.draw(M, 5)(x.expand(M, *x.shape), 0.2)[..., 0]
    want = torch.cov(measured.scores(x, 0.2)[..., 0].mT)
    se = ((want.diagonal()[:, None] * want.diagonal() + want**2) / M).sqrt()
    assert ((v.mT @ v / M - want).abs() <= 5 * se).all()


def test_a_measured_field_is_a_sum_of_deviations(measured):
    z = torch.randn(3, 40, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    s = measured.scores(X, 0.2)
    want = torch.einsum("km,mna->kna", z, s - s.mean(0)) / math.sqrt(39)
    got = measured.draw(3, 6)(X.expand(3, *X.shape), 0.2)
    torch.testing.assert_close(got, want, rtol=1e-7, atol=1e-7 * float(want.abs().max()))


def test_measured_kernels_drive_the_effective_dynamics(measured):
    x = PROCESS.prior((4, 1), generator=0, dtype=torch.float64)
    got = effective_sde(measured, x, method="euler", spacing="uniform", steps=8, members=3, generator=1)
    field = measured.draw(3, 1)
    want = pf_ode(
        Learned(measured.mean, field),
        x.expand(3, 4, 1).contiguous(),
        method="euler",
        spacing="uniform",
        steps=8,
    )
    torch.testing.assert_close(got, want)
    # a small V: the law of the ensemble's own samples, linearised about the mean weights
    W = measured.scores.state["weights"]
    small = Ensemble(measured.scores.model, {"weights": W.mean(0) + 1e-4 * (W - W.mean(0))}, PROCESS, (1,))
    mean, cov = semiclassical(Measured(small), x, spacing="uniform", steps=8)
    ends = small.sample(x_T=x, steps=8, method="euler", spacing="uniform")
    torch.testing.assert_close(mean, ends.mean(0), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(cov.trace(), ends.var(0)[:, 0], rtol=1e-2, atol=0.0)


def test_images_have_a_V_too():
    process, m = vk.VP(), vk.models.MLP(width=4, depth=1, steps=2, batch=4)
    ens = vk.train_ensemble(m, torch.rand(4, 1, 2, 3), process, members=20, draws=8)
    x = torch.randn(5, 1, 2, 3, dtype=torch.float64)
    t = torch.linspace(0.1, 0.9, 5, dtype=torch.float64)
    V = Measured(ens)(x, t)
    assert V.batch == (5,)
    torch.testing.assert_close(V.diag(), process.D(t)[:, None, None, None] ** 2 * ens(x, t).var(0))
    assert Measured(ens).draw(2, 0)(x.expand(2, *x.shape), 0.3).shape == (2, 5, 1, 2, 3)


def test_few_members_warn_and_dead_ones_do_not_count():
    ens = fitted(model(3), members=30, draws=60)
    with pytest.warns(ValidityWarning, match="at least 20"):
        assert not Measured(ens[:5]).valid
    W = ens.state["weights"].clone()
    W[[3, 4]] = math.nan
    kernel = Measured(Ensemble(ens.model, {"weights": W}, PROCESS, (1,)))
    assert kernel.members == 28
    keep = [k for k in range(30) if k not in (3, 4)]
    torch.testing.assert_close(kernel.cov(X, 0.2).trace(), ens(X, 0.2)[keep, :, 0].var(0))
    assert kernel.draw(2, 0)(X.expand(2, *X.shape), 0.2).isfinite().all()


def networks(count: int, groups: list[int] | None = None) -> vk.Checkpoints:
    """Scores of images that differ in their slope: what other people's networks look like from here."""
    slopes = normal(count, 1, 2, 3, seed=1)
    members = [vk.as_score(lambda x, t, a=a: -x + a.to(x) * x.square(), PROCESS, (1, 2, 3)) for a in slopes]
    return vk.Checkpoints(members, groups)


@pytest.mark.parametrize("groups", [None, [m // 3 for m in range(24)]], ids=["alone", "groups"])
def test_checkpoints_of_images_have_a_V(groups):
    nets = networks(24, groups)
    V = quietly(lambda: Measured(nets))
    x, M = normal(4, 1, 2, 3, seed=2), 4000
    torch.testing.assert_close(V.cov(x, 0.3).diag(), nets.cov(x, 0.3).diag())
    torch.testing.assert_close(V.factors(x, 0.3).square().sum(0), V.cov(x, 0.3).diag())
    values = V.draw(M, 3)(x.expand(M, *x.shape), 0.3)
    want = V.cov(x, 0.3).diag()
    assert ((values.square().mean(0) / want - 1).abs() < 5 * math.sqrt(2 / M)).all()
    if groups is None:  # the jackknife over members
        left = torch.stack([nets.select([k for k in range(24) if k != m]).cov(x, 0.3).trace() for m in range(24)])
        se = (23 / 24 * (left - left.mean(0)).square().sum(0)).sqrt()
        torch.testing.assert_close(V.error(x, 0.3), se / V.cov(x, 0.3).trace(), rtol=0.05, atol=0)
    else:  # eight units are too few
        torch.testing.assert_close(V.error(x, 0.3), torch.full((4,), math.sqrt(2 / 7), dtype=torch.float64))
        assert V.estimates(x, 0.3).shape == (8, 4)
    ends = effective_sde(V, x, steps=3, members=2, generator=4)
    assert ends.shape == (2, 4, 1, 2, 3)


def test_models_of_a_measured_kernel_are_scores(measured):
    found = measured.models(60, 5)
    assert isinstance(found, Scores)
    assert found(X, 0.2).shape == (60, *X.shape)
    torch.testing.assert_close(found[7](X, 0.2), found(X, 0.2)[7])
    torch.testing.assert_close(found[5:9].paired(X.expand(4, *X.shape), 0.2), found(X, 0.2)[5:9])
    own = torch.linspace(0.1, 0.9, len(X), dtype=torch.float64)
    torch.testing.assert_close(found[:2].paired(X.expand(2, *X.shape), own.expand(2, -1))[1], found[1](X, own))
    ratio = found.cov(X, 0.2).trace() / measured.cov(X, 0.2).trace()
    assert abs(float(ratio.mean()) - 1) < 0.35
    again = measured.models(60, 5)
    assert torch.equal(again(X, 0.2), found(X, 0.2))
    assert found.sample(2, steps=3).shape == (60, 2, 1)
