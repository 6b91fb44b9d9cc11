"""Paths and their weights, each by a second route: torch.distributions, quadrature, simulation, known weights."""

import math
import warnings
from itertools import pairwise

import pytest
import torch

import vkernel as vk
from vkernel import kernels
from vkernel.core.covariance import Covariance, Matrix
from vkernel.core.errors import InputError
from vkernel.sample import path

pytestmark = pytest.mark.usefixtures("one_thread")

VP = vk.VP(eps=0.05)
SHORT = vk.VP(eps=0.1, T=0.3)
PAIR = torch.tensor([[-1.0], [1.0]], dtype=torch.float64)


def even(function):
    """A function of paths on times that are even in t, unless it is given others."""

    def call(x, *args, times=None, **named):
        process = (named["mean"] if "mean" in named else args[0]).process
        if times is None and isinstance(x, torch.Tensor) and len(x) > 1:
            times = process.times(len(x) - 1)
        return function(x, *args, times=times, **named)

    return call


action, log_prob, cumulants, residual = map(even, (path.action, path.log_prob, path.cumulants, path.residual))


def score_of(points: torch.Tensor, process: vk.VP = SHORT) -> vk.EmpiricalScore:
    return vk.EmpiricalScore(vk.Empirical(points.double()), process)


def simulate(V, x_T, samples, **options):
    """Paths of the effective dynamics by Euler's method, ``(steps + 1, samples, *x_T.shape)``."""
    return vk.sample.effective_sde(V, x_T, members=samples, method="euler", save="path", **options).path


class Constant(kernels.Kernel):
    """White, the same everywhere."""

    white = True

    def __init__(self, matrix: torch.Tensor, process: vk.VP) -> None:
        self.matrix, self.process = matrix, process

    def cov(self, x, t, x2=None, t2=None) -> Covariance:
        d = x.shape[-1]
        return Matrix(self.matrix.expand(*x.shape[:-1], d, d), (d,))

    def draw(self, members, generator=None):
        raise InputError("white")


def basis(x: torch.Tensor, t) -> torch.Tensor:
    """Three smooth modes of a field on the line, or of each coordinate."""
    t = torch.as_tensor(t, dtype=x.dtype).expand(x.shape[:-1])[..., None]
    return torch.stack([torch.ones_like(x) + 0 * t, torch.sin(2 * x) * (1 + t), torch.cos(3 * x - 5 * t)])


ROOT = torch.tensor([[0.3, 0.0, 0.0], [0.1, 0.4, 0.0], [0.0, -0.1, 0.2]], dtype=torch.float64)
RANK3 = kernels.FiniteRank(basis, ROOT @ ROOT.mT, SHORT)


def richer(x: torch.Tensor, t) -> torch.Tensor:
    """One more mode, quick in t, so that one step says little of the next."""
    u = torch.as_tensor(t, dtype=x.dtype).expand(x.shape[:-1])[..., None]
    return torch.cat([basis(x, t), torch.cos(3 * x + 14 * u)[None]])


RANK4 = kernels.FiniteRank(richer, torch.diag(torch.tensor([0.05, 0.1, 0.1, 0.1])), SHORT)


def as_function(kernel: kernels.FiniteRank) -> kernels.Function:
    return kernels.Function(lambda x, t, y, u: kernel.cov(x, t, y, u).dense(), kernel.process)


def made_by(weights: torch.Tensor, kernel: kernels.FiniteRank, s_avg, x_T: torch.Tensor, steps: int) -> torch.Tensor:
    """The path of the model with these unit weights, by the PF-ODE sampler."""

    def learned(x, t):
        return s_avg(x, t) + torch.tensordot(weights, kernel.factors(x, t), dims=1)

    return vk.sample.pf_ode(
        vk.as_score(learned, SHORT), x_T, method="euler", spacing="uniform", steps=steps, save="path"
    ).path


def test_residual_and_zero_action_are_the_samplers_path():
    score = score_of(torch.randn(5, 2, generator=torch.Generator().manual_seed(0)))
    x_T = SHORT.prior((4, 2), dtype=torch.float64, generator=1)
    for spacing in (None, "log"):
        ours = path.zero_action(score, x_T, 12, spacing=spacing)
        theirs = vk.sample.pf_ode(score, x_T, method="euler", steps=12, spacing=spacing, save="path")
        assert torch.allclose(ours, theirs.path, atol=1e-12)
        R = residual(ours, score, times=theirs.times)
        assert R.shape == (12, 4, 2)
        assert R.abs().max() < 1e-11
        V = kernels.Naive(score, 0.3)
        assert action(ours, V, mean=score, times=theirs.times).abs().max() < 1e-16


def test_one_step_is_a_normal_density():
    score = score_of(torch.tensor([[-1.0, 0.0], [1.0, 0.2], [0.3, 1.0]]))
    V = kernels.Naive(score, 0.2)
    times = SHORT.times(1)
    dt = float(times[0] - times[1])
    x = torch.randn(2, 6, 2, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    beta, D = float(SHORT.beta(times[0])), float(SHORT.D(times[0]))
    mean = x[0] + dt * (beta * x[0] + D * score(x[0], SHORT.T))
    cov = dt * 0.2 * D**2 * score.covariance(x[0], SHORT.T).dense()
    law = torch.distributions.MultivariateNormal(mean, cov)
    assert torch.allclose(log_prob(x, V, mean=score), law.log_prob(x[1]), rtol=1e-9)
    quadratic = action(x, V, mean=score)
    norm = law.log_prob(mean)
    assert torch.allclose(norm - quadratic, law.log_prob(x[1]), rtol=1e-9)
    # white noise of strength kappa: the action goes as 1/kappa; float32 in, float32 out
    assert torch.allclose(action(x, kernels.Naive(score, 0.8), mean=score), quadratic / 4)
    single = log_prob(x.float(), V, mean=score)
    assert single.dtype == torch.float32
    assert torch.allclose(single.double(), law.log_prob(x[1]), rtol=1e-4)


def test_a_chain_is_the_product_of_its_steps():
    score = score_of(PAIR)
    V = kernels.Naive(score, 0.2)
    times = SHORT.times(4, "log")
    x = 0.5 * torch.randn(5, 3, 1, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    whole = log_prob(x, V, mean=score, times=times)
    pieces = sum(log_prob(x[k : k + 2], V, mean=score, times=times[k : k + 2]) for k in range(4))
    assert torch.allclose(whole, pieces, rtol=1e-10)


def grid_of_paths(start: float, low: float, high: float, n: int) -> tuple[torch.Tensor, float]:
    """All 2-step paths in 1-D on a grid of midpoints, ``(3, n², 1)``, and the volume of a cell."""
    edge = (high - low) / n
    axis = low + edge * (torch.arange(n, dtype=torch.float64) + 0.5)
    one, two = (a.reshape(-1) for a in torch.meshgrid(axis, axis, indexing="ij"))
    return torch.stack([torch.full_like(one, start), one, two])[..., None], edge**2


@pytest.mark.parametrize("kind", ["white", "finite rank", "function"])
def test_density_integrates_to_one_and_agrees_with_simulation(kind):
    score = score_of(PAIR)
    V = {"white": kernels.Naive(score, 0.03), "finite rank": RANK4, "function": as_function(RANK4)}[kind]
    paths, cell = grid_of_paths(0.4, -1.2, 2.4, 240)
    density = log_prob(paths, V, mean=score).exp() * cell
    assert float(density.sum()) == pytest.approx(1, abs=1e-3)
    # a bundle: paths that turn: up at first, and down again
    simulated = simulate(
        V, torch.tensor([0.4]).double(), mean=score, spacing="uniform", steps=2, samples=10_000, generator=5
    )
    middle, end = simulated[1].median(), simulated[2].median()
    turns = lambda p: ((p[1] > middle) & (p[2] < end)).squeeze(-1)  # noqa: E731
    exact = float(density[turns(paths)].sum())
    seen = path.probability(
        turns,
        simulate(V, torch.tensor([0.4]).double(), mean=score, spacing="uniform", steps=2, samples=10_000, generator=6),
    )
    assert seen.low < seen.value < seen.high
    assert abs(seen.value - exact) < 4 * seen.se + 3e-3  # the grid's edge cells
    edges = torch.linspace(-1, 2, 7, dtype=torch.float64)
    for low, high in pairwise(edges.tolist()):
        share = float(((simulated[2] > low) & (simulated[2] < high)).double().mean())
        exact = float(density[((paths[2] > low) & (paths[2] < high)).squeeze(-1)].sum())
        assert abs(share - exact) < 4 * math.sqrt(max(share, 1e-4) / 10_000) + 3e-3
    part = paths[:, ::997]
    shares = log_prob(part, V, mean=score).softmax(0)
    assert torch.allclose(shares, density[::997] / density[::997].sum())


def test_rank_one_field_has_a_density_in_what_is_free():
    """One weight, two steps: x_1 is free and fixes x_2; the density over x_1 is that of the weight."""
    score, one = score_of(PAIR), kernels.FiniteRank(lambda x, t: (1 + x**2)[None], torch.eye(1), SHORT)
    w = torch.linspace(-6, 6, 1201, dtype=torch.float64)
    start = torch.full((1201, 1), 0.4, dtype=torch.float64)
    paths = made_by(torch.ones(1).double(), kernels.FiniteRank(lambda x, t: (w[:, None] * (1 + x**2))[None],
                    torch.eye(1), SHORT), score, start, 2)  # fmt: skip
    log = log_prob(paths, one, mean=score)
    slope = torch.gradient(paths[1, :, 0], spacing=(w,))[0].abs()
    assert torch.allclose(log.exp() * slope, torch.distributions.Normal(0.0, 1.0).log_prob(w).exp(), atol=1e-9)
    assert torch.allclose(action(paths, one, mean=score), w**2 / 2, atol=1e-9)
    paths[2] += 0.01
    with pytest.warns(UserWarning, match="1201 of 1201 paths leave the support"):
        assert bool((log_prob(paths, one, mean=score) == -math.inf).all())


def test_off_the_span_of_the_data_nothing_has_weight():
    line = torch.tensor([[-1.0, -0.5], [1.0, 0.5], [0.4, 0.2]])
    score = score_of(line)
    V = kernels.Naive(score, 0.3)
    x_T = torch.tensor([[0.3, 0.9], [0.2, -0.4]], dtype=torch.float64)
    inside = simulate(V, x_T, mean=score, spacing="uniform", steps=5, samples=3, generator=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        log = log_prob(inside, V, mean=score)
        assert bool(log.isfinite().all())
        assert bool((action(inside, V, mean=score) > 0).all())
    # second route: coordinates along and across the line; across it is deterministic
    along = line.double() @ (torch.tensor([2.0, 1.0], dtype=torch.float64) / 5**0.5)
    flat = score_of(along[:, None])
    projected = inside @ (torch.tensor([2.0, 1.0], dtype=torch.float64) / 5**0.5)
    assert torch.allclose(log, log_prob(projected[..., None], kernels.Naive(flat, 0.3), mean=flat), atol=1e-6)
    outside = inside.clone()
    outside[3, 0] += torch.tensor([-0.01, 0.02], dtype=torch.float64)
    with pytest.warns(UserWarning, match="2 of 6 paths leave"):
        log = log_prob(outside, V, mean=score)
    assert bool((log[0] == -math.inf).all() and log[1:].isfinite().all())
    with pytest.warns(UserWarning, match="leave"):
        assert bool((action(outside, V, mean=score)[0] == math.inf).all())
    # kappa = 0: the PF-ODE path is certain, all else impossible
    sure = path.zero_action(score, x_T, 5, spacing="uniform")
    assert torch.equal(log_prob(sure, kernels.Naive(score, 0.0), mean=score), torch.zeros(2).double())
    with pytest.warns(UserWarning, match="leave"):
        assert log_prob(inside[:, 0], kernels.Naive(score, 0), mean=score).max() == -math.inf


@pytest.mark.parametrize("d", [1, 2])
def test_action_of_a_known_model_is_half_its_squared_weights(d):
    score = score_of(torch.randn(4, d, generator=torch.Generator().manual_seed(2)))
    x_T = SHORT.prior((5, d), dtype=torch.float64, generator=1)
    w = torch.tensor([0.7, -1.2, 0.5], dtype=torch.float64)
    made = made_by(w, RANK3, score, x_T, 12)
    weight = action(made, RANK3, mean=score)
    assert torch.allclose(weight, (w @ w / 2).expand(5), rtol=1e-5)
    short = made[:3]  # two steps, fewer residuals than weights in 1-D: the least weights are smaller
    times = SHORT.times(12)[:3]
    assert bool((action(short, RANK3, mean=score, times=times) <= weight * (1 + 1e-6)).all())
    with pytest.warns(UserWarning, match="5 of 5 paths leave"):
        assert action(made + 0.05 * torch.rand_like(made), RANK3, mean=score).min() == math.inf


def test_a_kernel_given_as_a_function_says_the_same():
    score, V = score_of(PAIR), as_function(RANK3)
    x = 0.3 + 0.3 * torch.randn(3, 4, 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    p = torch.randn(2, 4, 1, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    assert torch.allclose(action(x, V, mean=score), action(x, RANK3, mean=score), rtol=1e-6)
    assert torch.allclose(log_prob(x, V, mean=score), log_prob(x, RANK3, mean=score), rtol=1e-6)
    for a, b in zip(*(cumulants(x, p, k, mean=score) for k in (V, RANK3)), strict=True):
        assert torch.allclose(a, b, rtol=1e-9)
    # against the joint normal law of the residuals, times the constant Jacobian
    times, R = SHORT.times(2), residual(x, score).squeeze(-1).mT
    cov = torch.stack([torch.stack([RANK3.cov(x[k], times[k], x[j], times[j]).dense()[:, 0, 0]
                                    * SHORT.D(times[k]) * SHORT.D(times[j]) for j in range(2)], -1)
                       for k in range(2)], -1)  # fmt: skip
    law = torch.distributions.MultivariateNormal(torch.zeros(2).double(), cov)
    expected = law.log_prob(R) - (-times.diff()).log().sum()
    assert torch.allclose(log_prob(x, RANK3, mean=score), expected, rtol=1e-8)


@pytest.mark.parametrize("white", [True, False])
def test_cumulants_are_those_of_the_noise(white):
    """E exp(i Σ Δ p·ξ) over noise along a fixed path is exp(-M2/2); M1 is linear in p and vanishes on the PF-ODE."""
    score = score_of(torch.tensor([[-1.0, 0.0], [1.0, 0.2], [0.3, 1.0]]))
    V = kernels.Naive(score, 0.5) if white else RANK3
    x = path.zero_action(score, torch.tensor([0.4, -0.2]).double(), 6, spacing="uniform")
    p = 3 * torch.randn(6, 2, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    M1, M2 = cumulants(x, p, V, mean=score)
    assert abs(float(M1)) < 1e-12
    times, n = SHORT.times(6), 20_000
    dt, D = -times.diff(), SHORT.D(times)
    phase = torch.zeros(n, dtype=torch.float64)
    source = torch.Generator().manual_seed(4)
    field = None if white else V.draw(n, 4)
    for k in range(6):
        here = x[k].expand(n, 2)
        xi = V.cov(here, times[k]).draw(source) / dt[k].sqrt() if white else field(here, float(times[k]))
        phase += dt[k] * D[k] * (xi @ p[k])
    values = torch.cos(phase)
    assert 0.2 < float(M2) < 8
    assert abs(float(values.mean()) - math.exp(-0.5 * float(M2))) < 4 * float(values.std()) / n**0.5
    assert float(phase.var()) == pytest.approx(float(M2), rel=0.06)
    other = x + 0.1 * torch.rand(x.shape, generator=source, dtype=torch.float64)
    M1 = cumulants(other, p, V, mean=score)[0]
    R = residual(other, score)
    assert float(M1) == pytest.approx(sum(float(dt[k] * (p[k] @ R[k])) for k in range(6)))
    # the Gaussian integral over p: max over p of -(i p)·R … leaves the action, M1 - M2/2 at p = V^-1 R (white)
    if white:
        best = torch.stack([torch.linalg.solve(D[k] ** 2 * V.cov(other[k], times[k]).dense(), R[k]) for k in range(6)])
        M1, M2 = cumulants(other, best, V, mean=score)
        assert float(M1 - M2 / 2) == pytest.approx(float(action(other, V, mean=score)))


def mode(*args, **kwargs) -> torch.Tensor:
    with pytest.warns(UserWarning, match="no limit as the step goes to 0"):
        return path.most_probable(*args, **kwargs)


def test_the_mode_moves_towards_low_V_and_has_no_limit():
    """The theory's example: {-1, 1}, kappa .01; PF-ODE ends at .317 … .327, mode at .320 … .390 (10 … 80 steps)."""
    process = vk.VP(eps=0.2, T=0.6)
    score = score_of(PAIR, process)
    V = kernels.Naive(score, 0.01)
    x_T = torch.tensor([0.3], dtype=torch.float64)
    shift, ends = [], []
    for steps in (10, 20, 40):
        flow = path.zero_action(score, x_T, steps, spacing="uniform")
        best = mode(V, x_T, mean=score, spacing="uniform", steps=steps)
        assert log_prob(best, V, mean=score) > log_prob(flow, V, mean=score)
        for k in range(5):  # a mode: every small change of the path is less probable
            change = 1e-3 * torch.randn(flow.shape, generator=torch.Generator().manual_seed(k), dtype=torch.float64)
            change[0] = 0
            assert log_prob(best + change, V, mean=score) < log_prob(best, V, mean=score)
        shift.append(float(best[-1] - flow[-1]))
        ends.append(float(best[-1]))
    assert 0 < shift[0] < shift[1] < shift[2]
    assert ends == pytest.approx([0.320, 0.332, 0.351], abs=1e-3)
    # as V → 0 at a fixed step, the mode is the PF-ODE path
    small = mode(kernels.Naive(score, 1e-5), x_T, mean=score, spacing="uniform", steps=10)
    assert float((small - path.zero_action(score, x_T, 10, spacing="uniform")).abs().max()) < 0.01 * shift[0]


def test_the_mode_is_the_pf_ode_where_V_is_the_same_everywhere():
    score = score_of(torch.tensor([[-1.0, 0.0], [1.0, 0.2], [0.3, 1.0]]))
    V = Constant(torch.tensor([[0.5, 0.1], [0.1, 0.2]], dtype=torch.float64), SHORT)
    x_T = torch.tensor([[0.4, 0.1], [-0.3, 0.2]], dtype=torch.float64)
    flow = path.zero_action(score, x_T, 5, spacing="uniform")
    assert torch.allclose(mode(V, x_T, mean=score, spacing="uniform", steps=5), flow, atol=1e-6)
    # with a given end it is the path of least action to that end: no admissible change lowers the action
    goal = flow[-1] + torch.tensor([0.2, -0.1], dtype=torch.float64)
    best = mode(V, x_T, mean=score, spacing="uniform", steps=5, x_end=goal)
    assert torch.equal(best[-1], goal)
    least = action(best, V, mean=score)
    for k in range(10):
        change = 1e-2 * torch.randn(flow.shape, generator=torch.Generator().manual_seed(k), dtype=torch.float64)
        change[0] = change[-1] = 0
        assert bool((action(best + change, V, mean=score) > least).all())


def test_the_mode_to_an_end_beats_its_neighbours():
    score = score_of(PAIR)
    V, x_T = kernels.Naive(score, 0.05), torch.tensor([[0.4], [-0.2]], dtype=torch.float64)
    best = mode(V, x_T, mean=score, spacing="uniform", steps=6, x_end=torch.full_like(x_T, 0.6))
    assert best[-1].tolist() == [[0.6], [0.6]]
    for k in range(10):
        change = 1e-3 * torch.randn(best.shape, generator=torch.Generator().manual_seed(k), dtype=torch.float64)
        change[0] = change[-1] = 0
        assert bool((log_prob(best + change, V, mean=score) < log_prob(best, V, mean=score)).all())
    assert torch.equal(
        mode(V, x_T, mean=score, spacing="uniform", steps=1, x_end=x_T + 0.1), torch.stack([x_T, x_T + 0.1])
    )


def test_quenched_modes_are_modes_of_the_weights():
    score = score_of(PAIR)
    x_T = torch.tensor([[0.4], [-0.3]], dtype=torch.float64)
    flow = path.zero_action(score, x_T, 8, spacing="uniform")
    for V in (RANK3, as_function(RANK3)):
        assert torch.equal(path.most_probable(V, x_T, mean=score, spacing="uniform", steps=8), flow)
    goal = flow[-1] + 0.05
    best = path.most_probable(RANK3, x_T, mean=score, spacing="uniform", steps=8, x_end=goal)
    assert torch.equal(best[-1], goal)
    least = action(best, RANK3, mean=score)
    assert bool((least < 50).all() and (least > 0).all())
    # brute force: of many models that end near there, none has smaller weights than the least action allows
    w = 2 * torch.randn(3, 40_000, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = x_T[0].expand(40_000, 1)
    times = SHORT.times(8)
    for k in range(8):
        s = score(x, times[k]) + (w * RANK3.factors(x, times[k])).sum(0)
        x = x + (times[k] - times[k + 1]) * (SHORT.beta(times[k]) * x + SHORT.D(times[k]) * s)
    near = ((x - goal[0]).abs() < 2e-3).squeeze(-1)
    found = (w.square().sum(0) / 2).squeeze(-1)[near].min()
    assert int(near.sum()) > 50
    assert float(least[0]) * 0.9 < float(found) < float(least[0]) * 3 + 0.2
    with pytest.raises(InputError, match="V with factors"):
        path.most_probable(as_function(RANK3), x_T, mean=score, spacing="uniform", steps=8, x_end=goal)
    one = kernels.FiniteRank(
        lambda x, t: torch.ones_like(x)[None] * torch.tensor([1.0, 0.0]).double(), torch.eye(1), SHORT
    )
    plane = score_of(torch.tensor([[-1.0, 0.0], [1.0, 0.2], [0.3, 1.0]]))
    with pytest.raises(InputError, match="No noise of V was found"):
        path.most_probable(
            one, torch.zeros(2).double(), mean=plane, spacing="uniform", steps=3, x_end=torch.ones(2).double()
        )


def test_wilson_interval_and_batches():
    score = score_of(PAIR)
    V = kernels.Naive(score, 0.1)
    x_T = torch.tensor([[0.4], [-0.3]], dtype=torch.float64)
    never = path.probability(
        lambda p: p[-1, ..., 0] > 50, simulate(V, x_T, mean=score, steps=3, samples=100, generator=0)
    )
    assert never.value.tolist() == [0, 0]
    assert never.low.max() < 1e-15
    assert torch.allclose(never.high, torch.full((2,), 0.037, dtype=torch.float64), atol=1e-4)  # z²/(n + z²)
    x = 0.3 * torch.randn(4, 2, 3, 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for kernel in (V, RANK3, as_function(RANK3)):
        whole = action(x, kernel, mean=score)
        assert whole.shape == (2, 3)
        assert torch.allclose(whole[1, 2], action(x[:, 1, 2], kernel, mean=score), rtol=1e-6)


def test_what_cannot_be_a_path_is_refused():
    score = score_of(PAIR)
    V, x = kernels.Naive(score, 0.1), torch.zeros(4, 1, dtype=torch.float64)
    for times, match in (
        (SHORT.times(5), "has 4 times"),
        (SHORT.times(3).flip(0), "descend"),
        (torch.tensor([0.9, 0.8, 0.7, 0.6]), "outside"),
    ):
        with pytest.raises(InputError, match=match):
            action(x, V, mean=score, times=times)
    with pytest.raises(InputError, match="another process"):
        log_prob(x, kernels.Naive(score_of(PAIR, VP), 0.1), mean=score)
    with pytest.raises(InputError, match="needs a Score"):
        path.residual(x, lambda x, t: x)
    with pytest.raises(InputError, match="NaN"):
        action(x * math.nan, V, mean=score)
    for bad in (x[:1], x[:, 0], None):
        with pytest.raises(InputError, match=r"A path"):
            action(bad, V, mean=score)
    for refuse in (path.action, lambda x, V: simulate(V, x[0], steps=2, samples=2)):
        with pytest.raises(InputError, match="V-kernel, such as"):
            refuse(x, 3)
    images = vk.EmpiricalScore(torch.zeros(2, 3, 3, dtype=torch.float64), SHORT)
    with pytest.raises(InputError, match="flatten"):
        residual(torch.zeros(3, 3, 3, dtype=torch.float64), images)
    with pytest.raises(InputError, match="shape of the residual"):
        cumulants(x, x, V, mean=score)
    wide = torch.zeros(3, 65, dtype=torch.float64)
    with pytest.raises(InputError, match="d ≤ 64"):
        log_prob(wide, Constant(torch.eye(65).double(), SHORT), mean=vk.as_score(lambda x, t: -x, SHORT))
    with pytest.raises(InputError, match="not positive semidefinite"):
        action(x, Constant(-torch.eye(1).double(), SHORT), mean=score)
    with pytest.raises(InputError, match="event must return"):
        path.probability(lambda p: p, simulate(V, x[0], mean=score, steps=2, samples=3))
    with pytest.raises(InputError, match="shape of x_T"):
        path.most_probable(V, x[0], mean=score, spacing="uniform", steps=2, x_end=x)
    with pytest.raises(InputError, match="steps must be"):
        path.zero_action(score, x[0], 0, spacing="uniform")
