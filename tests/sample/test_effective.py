"""The effective dynamics: white and quenched noise, and the semiclassical law, each by a second route."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats
from torch import Tensor

import vkernel as vk
from vkernel.core.covariance import Diagonal, Matrix
from vkernel.core.errors import InputError
from vkernel.kernels import FiniteRank, Function, Kernel, Naive
from vkernel.sample import effective_sde, pf_ode, semiclassical
from vkernel.sample.loop import Level, Problem
from vkernel.sample.sde import Learned
from vkernel.sample.semiclassical import _Chain

PROCESS = vk.VPSong(eps=0.01)
MIXTURE = vk.GaussianMixture(torch.tensor([[-1.0], [1.0]]), None, 0.1)
SCORE = MIXTURE.score(PROCESS)
W = 0.02 * torch.tensor([[1.0, 0.3], [0.3, 0.5]], dtype=torch.float64)


class Flat(Kernel):
    """White, the same everywhere."""

    white = True

    def __init__(self, variance: float, process: vk.Process) -> None:
        self.variance, self.process = variance, process

    def cov(self, x, t, x2=None, t2=None):
        return Diagonal(torch.full(x.shape, self.variance, dtype=torch.float64), tuple(x.shape[-1:]))

    def draw(self, members, generator=None):
        raise NotImplementedError


def basis(x: Tensor, t) -> Tensor:
    return torch.stack([torch.ones_like(x), torch.cos(2 * x) + torch.as_tensor(t).to(x)])


def function(x: Tensor, t: Tensor, x2: Tensor, t2: Tensor) -> Tensor:
    one, two = basis(x, t[..., None]), basis(x2, t2[..., None])
    return torch.einsum("f...a,fg,g...b->...ab", one, W, two)


FINITE, FUNCTION = FiniteRank(basis, W, PROCESS), Function(function, PROCESS)


def start(n: int, at: float | None = None) -> Tensor:
    return PROCESS.prior((n, 1), generator=0, dtype=torch.float64) if at is None else torch.full((n, 1), at).double()


# --- white ---------------------------------------------------------------------------------------------------------


# the score of one Gaussian of variance 1 at 0 under VP: s = -x
linear = vk.as_score(lambda x, t: -x, PROCESS)


def chain(kappa: float, steps: int, var: float) -> float:
    """The variance of x' = x + sqrt(dt) D sqrt(kappa) z, for beta = D and s = -x: no drift at all."""
    t = PROCESS.times(steps)
    return var + kappa * float(((t[:-1] - t[1:]) * PROCESS.D(t[:-1]) ** 2).sum())


def test_white_noise_on_a_linear_score_weak_order_one_and_the_chains_exact_variance():
    kappa, t = 0.05, torch.linspace(PROCESS.eps, PROCESS.T, 100001, dtype=torch.float64)
    exact = 1 + kappa * float(torch.trapezoid(PROCESS.D(t) ** 2, t))
    errors = [abs(chain(kappa, n, 1.0) - exact) for n in (50, 100, 200)]
    assert abs(math.log2(errors[0] / errors[2]) / 2 - 1) < 0.1
    x = effective_sde(
        Flat(kappa, PROCESS), start(20000), mean=linear, method="euler", spacing="uniform", steps=50, generator=1
    )
    assert abs(float(x.var()) / chain(kappa, 50, float(start(20000).var())) - 1) < 4 * math.sqrt(2 / len(x))


def test_strong_order_one_for_additive_noise_along_one_brownian_path():
    """The same noise, summed over coarser steps: the distance to the finest path halves with the step."""
    n, fine = 400, 1024
    noise = torch.randn(fine, n, 1, generator=torch.Generator().manual_seed(2), dtype=torch.float64) / math.sqrt(fine)

    class Given(Flat):
        """Draws what a Brownian path says, at the resolution that is asked for."""

        def __init__(self, steps: int) -> None:
            super().__init__(0.05, PROCESS)
            self.noise = iter(noise.reshape(steps, fine // steps, n, 1).sum(1) * math.sqrt(steps))

        def cov(self, x, t, x2=None, t2=None):
            out = super().cov(x, t)
            out.draw = lambda g=None: math.sqrt(self.variance) * next(self.noise)
            return out

    ends = {
        k: effective_sde(Given(k), start(n, 1.2), mean=SCORE, method="euler", spacing="uniform", steps=k)
        for k in (64, 128, 256, fine)
    }
    errors = [float((ends[k] - ends[fine]).square().mean().sqrt()) for k in (64, 128, 256)]
    assert 0.8 < math.log2(errors[0] / errors[2]) / 2 < 1.5


def test_one_white_step_on_images_has_the_right_mean_and_covariance():
    process, shape = vk.VP(), (1, 8, 8)
    data = torch.rand(6, *shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    score = vk.EmpiricalScore(data, process)
    kernel, n, kappa = Naive(score, 0.3), 4000, 0.3
    x = 0.1 * torch.randn(*shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    short = vk.VP(eps=0.8)
    near = vk.EmpiricalScore(data, short)
    got = effective_sde(
        Naive(near, kappa), x.expand(n, *shape), method="euler", spacing="uniform", steps=1, generator=5
    ).flatten(1)
    one = torch.tensor(1.0, dtype=torch.float64)
    beta, D = float(short.beta(one)), float(short.D(one))
    mean = (x + 0.2 * (beta * x + D * near(x, 1.0))).flatten()
    cov = 0.2 * D**2 * kappa * near.covariance(x, 1.0).dense()
    torch.testing.assert_close(cov, 0.2 * kernel(x, 1.0).dense(), rtol=1e-6, atol=1e-12)
    spread = got - mean
    assert (spread.mean(0).abs() <= 4.5 * (cov.diagonal() / n).sqrt()).all()
    sample = spread.mT @ spread / n
    se = ((cov.diagonal()[:, None] * cov.diagonal() + cov**2) / n).sqrt()
    assert ((sample - cov).abs() <= 5 * se).all()


def test_shapes_members_and_seeds():
    x = start(4)
    for kernel in (Flat(0.1, PROCESS), FINITE, FUNCTION):
        one = effective_sde(kernel, x, mean=SCORE, method="euler", spacing="uniform", steps=8, generator=1)
        many = effective_sde(kernel, x, mean=SCORE, method="euler", spacing="uniform", steps=8, members=3, generator=1)
        assert one.shape == x.shape
        assert many.shape == (3, *x.shape)
        assert torch.equal(
            one, effective_sde(kernel, x, mean=SCORE, method="euler", spacing="uniform", steps=8, generator=1)
        )
        assert not torch.equal(many[0], many[1])
        lone = effective_sde(kernel, x[0], mean=SCORE, method="euler", spacing="uniform", steps=8, generator=1)
        assert lone.shape == x[0].shape
        assert (
            effective_sde(kernel, x.float(), mean=SCORE, method="euler", spacing="uniform", steps=8, generator=1).dtype
            == torch.float32
        )


# --- quenched ------------------------------------------------------------------------------------------------------


def test_the_ensemble_law_is_that_of_drawn_models():
    n, steps = 6000, 40
    got = effective_sde(FINITE, start(n), mean=SCORE, method="euler", spacing="uniform", steps=steps, generator=6)[:, 0]
    w = torch.randn(n, 2, generator=torch.Generator().manual_seed(7), dtype=torch.float64) @ torch.linalg.cholesky(W).mT
    other = PROCESS.prior((n, 1), generator=8, dtype=torch.float64)
    direct = pf_ode(
        Learned(SCORE, lambda x, t: torch.einsum("nf,fna->na", w, basis(x, t))),
        other,
        method="euler",
        spacing="uniform",
        steps=steps,
    )
    assert stats.ks_2samp(got, direct[:, 0]).pvalue > 1e-3
    edges = torch.linspace(-2.5, 2.5, 26, dtype=torch.float64)
    a, b = (torch.histogram(v, edges)[0] for v in (got, direct[:, 0]))
    both = (a + b).clamp_min(1)
    assert float(((a - b) ** 2 / both).sum()) < stats.chi2.ppf(0.999, int((a + b > 0).sum()))


def test_conditioned_and_weight_drawn_fields_agree_in_law():
    n, steps, x = 3000, 30, start(3000, 0.7)
    one = effective_sde(FINITE, x, mean=SCORE, method="euler", spacing="uniform", steps=steps, generator=9)[:, 0]
    two = effective_sde(FUNCTION, x, mean=SCORE, method="euler", spacing="uniform", steps=steps, generator=10)[:, 0]
    assert stats.ks_2samp(one, two).pvalue > 1e-3
    assert abs(float(one.mean() - two.mean())) < 4 * float(one.std()) * math.sqrt(2 / n)
    assert abs(float(one.std() / two.std()) - 1) < 4 / math.sqrt(n)


def test_paths_that_share_a_field_are_sampled_jointly():
    x = torch.tensor([[0.7], [-0.4], [0.7]], dtype=torch.float64)
    n = 1500
    joint = {
        k: effective_sde(v, x, mean=SCORE, method="euler", spacing="uniform", steps=20, members=n, generator=11)[..., 0]
        for k, v in (("weights", FINITE), ("function", FUNCTION))
    }
    for ends in joint.values():
        assert (ends[:, 0] - ends[:, 2]).abs().max() < 1e-3
        assert ends[:, 0].std() > 0.03
    one, two = (torch.corrcoef(ends[:, :2].mT)[0, 1] for ends in joint.values())
    assert abs(float(torch.atanh(one) - torch.atanh(two))) < 4 * math.sqrt(2 / n)


def test_fresh_noise_at_every_step_is_the_wrong_answer_for_a_quenched_kernel():
    """The classic mistake: its variance vanishes with the step, that of trained models does not."""
    n, x = 3000, start(3000, 1.0)
    right, wrong = {}, {}
    for steps in (25, 100):
        right[steps] = float(
            effective_sde(FINITE, x, mean=SCORE, method="euler", spacing="uniform", steps=steps, generator=12).var()
        )
        g = torch.Generator().manual_seed(13)

        fresh = Learned(SCORE, lambda y, t, g=g: FINITE.cov(y, t).draw(g))
        wrong[steps] = float(pf_ode(fresh, x, method="euler", spacing="uniform", steps=steps).var())
    assert abs(right[25] / right[100] - 1) < 0.3
    assert wrong[25] < right[25] / 2
    assert wrong[100] < right[100] / 5
    assert wrong[100] < wrong[25] / 2
    assert n == len(x)


def test_quenched_dynamics_takes_the_better_methods():
    x = start(50)
    best = effective_sde(FINITE, x, mean=SCORE, spacing="uniform", method="dopri5", generator=14)
    errors = [
        float(
            (
                effective_sde(FINITE, x, mean=SCORE, spacing="uniform", steps=k, method="heun", generator=14) - best
            ).norm()
        )
        for k in (50, 200)
    ]
    assert 1.6 < math.log2(errors[0] / errors[1]) / 2 < 2.6


# --- semiclassical -------------------------------------------------------------------------------------------------


def scaled(kernel: str, size: float) -> Kernel:
    if kernel == "white":
        return Flat(size, PROCESS)
    if kernel == "weights":
        return FiniteRank(basis, size * W, PROCESS)
    return Function(lambda *a: size * function(*a), PROCESS)


@pytest.mark.parametrize("kernel", ["white", "weights", "function"])
def test_the_semiclassical_variance_is_that_of_a_simulation_away_from_boundaries(kernel):
    steps, V = 30, scaled(kernel, 1e-4)
    mean, cov = semiclassical(V, start(1, 1.2), mean=SCORE, spacing="uniform", steps=steps)
    n = 20000 if kernel != "function" else 4000
    x = effective_sde(V, start(n, 1.2), mean=SCORE, method="euler", spacing="uniform", steps=steps, generator=15)
    ratio = float(x.var()) / float(cov.dense())
    assert abs(ratio - 1) < (0.03 + (4 * math.sqrt(2 / n) if n < 20000 else 0.0))
    assert abs(float(x.mean() - mean)) < 0.1 * float(x.std())
    torch.testing.assert_close(mean, pf_ode(SCORE, start(1, 1.2), method="euler", spacing="uniform", steps=steps))


def test_the_function_route_is_the_factor_route():
    x = start(2, 0.6)
    one, two = (
        semiclassical(scaled(k, 1.0), x, mean=SCORE, spacing="uniform", steps=20)[1].dense()
        for k in ("weights", "function")
    )
    torch.testing.assert_close(one, two, rtol=1e-8, atol=1e-12)


def test_it_fails_on_the_boundary_and_says_nothing_about_two_modes():
    process = vk.VP(eps=0.05)
    score = vk.EmpiricalScore(torch.tensor([[-1.0], [1.0]], dtype=torch.float64), process)
    V, x = Naive(score, 0.05), torch.zeros(4000, 1, dtype=torch.float64)
    cov = semiclassical(V, x[:1], mean=score, spacing="uniform", steps=100)[1]
    ratio = float(
        effective_sde(V, x, mean=score, method="euler", spacing="uniform", steps=100, generator=16).var()
    ) / float(cov.dense())
    assert abs(ratio - 1) > 0.2


def test_a_step_of_the_linear_chain_is_the_derivative_of_a_step():
    data = torch.tensor([[-1.0, 0.0, 0.3], [1.0, 0.5, 0.0]], dtype=torch.float64)
    exact = vk.EmpiricalScore(data, PROCESS)
    plain = vk.as_score(exact, PROCESS, (3,))
    x = 0.3 * torch.ones(2, 3, dtype=torch.float64)
    v = torch.randn(2, 3, generator=torch.Generator().manual_seed(17), dtype=torch.float64)
    u = v.flip(0)
    for score in (exact, plain):
        frame = Problem(score, x, steps=10, spacing=None)
        part = _Chain(frame, [x] * 11)

        def step(y: Tensor, frame: Problem = frame, level: Level = frame.levels[6]) -> Tensor:
            return y + 0.099 * (level.beta * y + level.D * frame.s(y, level))

        want = (step(x + 1e-5 * v) - step(x - 1e-5 * v)) / 2e-5
        torch.testing.assert_close(part.push(6, v), want, rtol=1e-6, atol=1e-7)
        left, right = (part.push(6, v) * u).sum(-1), (part.push(6, u, transposed=True) * v).sum(-1)
        torch.testing.assert_close(left, right)


def test_nystrom_in_high_dimension_is_the_dense_answer():
    process = vk.VP(eps=0.2)
    data = torch.randn(5, 80, generator=torch.Generator().manual_seed(18), dtype=torch.float64)
    score = vk.EmpiricalScore(data, process)
    V, x, steps = Naive(score, 0.01), 0.5 * process.prior((2, 80), generator=19, dtype=torch.float64), 6
    mean, cov = semiclassical(V, x, mean=score, spacing="uniform", steps=steps)
    path = [*pf_ode(score, x, method="euler", spacing="uniform", steps=steps, save="path").path]
    dense = _Chain(Problem(score, x, steps=steps, spacing=None), path).dense(V).dense()
    torch.testing.assert_close(mean, path[-1])
    assert (cov.dense() - dense).norm() < 1e-6 * dense.norm()
    assert dense.norm() > 0


# --- refusals ------------------------------------------------------------------------------------------------------


class Odd(Flat):
    def __init__(self, answer) -> None:
        super().__init__(0.1, PROCESS)
        self.answer = answer

    def cov(self, x, t, x2=None, t2=None):
        return self.answer(x)


X = torch.zeros(3, 1, dtype=torch.float64)


@pytest.mark.parametrize("sampler", [effective_sde, semiclassical])
@pytest.mark.parametrize(
    ("arguments", "options", "says"),
    [
        ((None, X), {"mean": SCORE}, "V-kernel"),
        ((Flat(0.1, vk.VP()), X), {"mean": SCORE}, "another process"),
        ((FINITE, X), {"mean": vk.EmpiricalScore(X, vk.VP())}, "another process"),
        ((FINITE, X * math.nan), {"mean": SCORE}, "NaN"),
        ((FINITE, [0.0]), {"mean": SCORE}, "x_T"),
        ((FINITE, X), {"mean": SCORE, "steps": 0}, "steps"),
        ((FiniteRank(basis, torch.eye(3), PROCESS), X), {"mean": SCORE}, "basis"),
    ],
)
def test_bad_input_is_refused(sampler, arguments, options, says):
    with pytest.raises(InputError, match=says):
        sampler(*arguments, **options)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: effective_sde(FINITE, X, mean=SCORE, method="euler", spacing="uniform", members=0), "members"),
        (lambda: semiclassical(FINITE, X, mean=SCORE, spacing="uniform", rank=0), "rank"),
        (lambda: effective_sde(FINITE, X, mean=SCORE, spacing="uniform", method="rk4"), "method"),
        (
            lambda: effective_sde(Flat(-0.1, PROCESS), X, mean=SCORE, method="euler", spacing="uniform"),
            "not a covariance",
        ),
        (lambda: effective_sde(Odd(lambda x: None), X, mean=SCORE, method="euler", spacing="uniform"), "Covariance"),
        (
            lambda: effective_sde(
                Odd(lambda x: Diagonal(torch.ones(2, 1), (1,))), X, mean=SCORE, method="euler", spacing="uniform"
            ),
            "Covariance",
        ),
        (
            lambda: effective_sde(
                Odd(lambda x: Matrix(-torch.ones(3, 1, 1), (1,))), X, mean=SCORE, method="euler", spacing="uniform"
            ),
            "semidefinite",
        ),
        (
            lambda: effective_sde(
                Flat(1.0, PROCESS),
                X + 1,
                mean=vk.as_score(lambda x, t: x * 1e300, PROCESS),
                method="euler",
                spacing="uniform",
            ),
            "diverged",
        ),
        (
            lambda: semiclassical(FINITE, X + 1, mean=vk.as_score(lambda x, t: x * 1e300, PROCESS), spacing="uniform"),
            "diverged",
        ),
    ],
)
def test_more_bad_input_is_refused(call, says):
    with pytest.raises(InputError, match=says):
        call()
