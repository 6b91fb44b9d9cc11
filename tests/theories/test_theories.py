"""Theories against sums over training points that are written out in NumPy, and their limits."""

import functools
import itertools

import numpy as np
import pytest
import torch

import vkernel as vk
from vkernel.theories import EquivariantLocal, Gaussian, Local, Nearest, PCALocal, Smoothed, Switch
from vkernel.theories.base import doubt

PROCESS = vk.VP()
TIMES = (0.02, 0.2, 0.9)


def images(n=7, shape=(2, 5, 6), seed=0):
    return torch.randn(n, *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def noisy(data, t, count=3, seed=1):
    g = torch.Generator().manual_seed(seed)
    chosen = torch.randint(len(data), (count,), generator=g)
    noise = torch.randn(count, *data.shape[1:], generator=g, dtype=torch.float64)
    return PROCESS.alpha(t) * data[chosen] + PROCESS.sigma(t) * noise


def levels(t):
    t = torch.tensor(t, dtype=torch.float64)
    return float(PROCESS.alpha(t)), float(PROCESS.sigma(t))


def softmax_mean(logits, values):
    weights = np.exp(logits - logits.max())
    return (weights[:, None] * values).sum(0) / weights.sum()


def windows(size, p, half, circular):
    offsets = range(-half, half + 1)
    return [(p + o) % size for o in offsets] if circular else [p + o for o in offsets if 0 <= p + o < size]


def brute_local(x, y, t, k, circular=False, equivariant=False, weights=None):
    """Every pixel, every training image, every place, one after the other."""
    alpha, sigma = levels(t)
    n, _, height, width = y.shape
    half, out = k // 2, np.empty_like(x)
    log_w = np.zeros(n) if weights is None else np.log(weights)

    def distances(place, size):
        return () if circular else (min(place, half), min(size - 1 - place, half))

    def patch(image, r, c):
        rows, columns = windows(height, r, half, circular), windows(width, c, half, circular)
        return image[:, rows][:, :, columns]

    places = list(itertools.product(range(height), range(width)))
    for r, c in places:
        kind = distances(r, height), distances(c, width)
        other = [(a, b) for a, b in places if (distances(a, height), distances(b, width)) == kind]
        for b in range(len(x)):
            logits, values = [], []
            for i, (a, d) in itertools.product(range(n), other if equivariant else [(r, c)]):
                gap = patch(x[b], r, c) - alpha * patch(y[i], a, d)
                logits.append(log_w[i] - (gap**2).sum() / (2 * sigma**2))
                values.append(y[i, :, a, d])
            out[b, :, r, c] = softmax_mean(np.array(logits), np.array(values))
    return out


def close(a, b, tol=1e-9):
    torch.testing.assert_close(torch.as_tensor(a), torch.as_tensor(b), rtol=tol, atol=tol)


@pytest.mark.parametrize("t", TIMES)
@pytest.mark.parametrize(("borders", "k"), [("zeros", 1), ("zeros", 3), ("zeros", 7), ("circular", 3), ("circular", 5)])
def test_local_theories_are_sums_over_patches(monkeypatch, t, borders, k):
    """Parts of the queries and of the training images do not matter."""
    for name, value in {"QUERIES": 7, "COORDINATES": 1000}.items():
        monkeypatch.setattr(f"vkernel.theories.patches.{name}", value)
    y = images()
    x, circular = noisy(y, t), borders == "circular"
    weights = torch.arange(1.0, 8.0, dtype=torch.float64) / 28
    for theory, equivariant in ((Local, False), (EquivariantLocal, True)):
        found = theory(vk.Empirical(y, weights), PROCESS, k, borders).denoise(x, t)
        close(found, brute_local(x.numpy(), y.numpy(), t, k, circular, equivariant, weights.numpy()), 1e-9)


@pytest.mark.parametrize("t", [0.005, *TIMES])
@pytest.mark.parametrize(("borders", "k"), [("zeros", 1), ("zeros", 3), ("zeros", 5), ("circular", 3), ("circular", 5)])
def test_blocks_of_float32_logits_are_sums_over_patches(monkeypatch, t, borders, k):
    """Small blocks: several parts of the training images and of the queries, and rows without weight in a block."""
    for name, value in {"QUERIES": 7, "LOGITS": 100}.items():
        monkeypatch.setattr(f"vkernel.theories.blocked.{name}", value)
    monkeypatch.setattr("vkernel.theories.equivariant.MANY", 0)
    y = images()
    x, weights = noisy(y, t).float(), torch.arange(1.0, 8.0, dtype=torch.float64) / 28
    found = EquivariantLocal(vk.Empirical(y, weights), PROCESS, k, borders).denoise(x, t).double()
    close(found, brute_local(x.double().numpy(), y.numpy(), t, k, borders == "circular", True, weights.numpy()), 5e-5)


def test_pixels_with_inaccurate_float32_logits_are_evaluated_in_float64(monkeypatch):
    monkeypatch.setattr("vkernel.theories.equivariant.MANY", 0)
    y = images(shape=(1, 5, 6)) / 3 + 1e3  # the logits of two values 1e3 ± 1 differ in digits that float32 has not
    y = torch.cat([y, torch.zeros(7, 1, 5, 6, dtype=torch.float64)])
    x = noisy(y[:7], 0.02).float()
    found = EquivariantLocal(y, PROCESS, 3).denoise(x, 0.02).double()
    close(found, brute_local(x.double().numpy(), y.numpy(), 0.02, 3, equivariant=True), 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sigma", [1e-6, 1e-4, 1e-2])
def test_equivariant_patches_at_very_low_noise(sigma, dtype):
    """Logits of 1e12, of which float32 loses the differences: one patch, or a few near duplicates, has all weight."""
    y = images(20, (2, 12, 18))
    y[1:4] = y[0] + 1e-4 * images(3, (2, 12, 18), 1)
    x = (y[:1] + sigma * images(1, (2, 12, 18), 2)).to(dtype)
    found = EquivariantLocal(y, vk.EDM(eps=1e-8), 3).denoise(x, sigma).double()
    exact = vk.EmpiricalScore(y[:4, :, 5:8, 5:8].flatten(1), vk.EDM(eps=1e-8))  # the patches around one pixel
    near = exact.denoise(x.double()[:, :, 5:8, 5:8].flatten(1), sigma).reshape(2, 3, 3)
    close(found[0, :, 6, 6], near[:, 1, 1], 1e-4 if dtype == torch.float32 else 1e-8)
    assert found.isfinite().all()


@pytest.mark.parametrize("t", TIMES)
def test_large_patches_are_the_exact_denoiser(t):
    y = images(shape=(5, 6))
    x = noisy(y, t)
    exact = vk.EmpiricalScore(y, PROCESS)
    close(Local(y, PROCESS, 11).denoise(x, t), exact.denoise(x, t))
    close(Local(y, PROCESS, 11)(x, t), exact(x, t), 1e-7)
    close(EquivariantLocal(y, PROCESS, 7).denoise(x, t), Local(y, PROCESS, 7).denoise(x, t))
    close(EquivariantLocal(y, PROCESS, 11).denoise(x, t), exact.denoise(x, t))
    close(PCALocal(y, PROCESS, 0).denoise(x, t), exact.denoise(x, t))
    close(Smoothed(y, PROCESS, 0).denoise(x, t), exact.denoise(x, t))
    close(Smoothed(y, PROCESS, 0, "draws", 2).denoise(x, t), exact.denoise(x, t))
    close(Nearest(y, PROCESS, 7).denoise(x, t), exact.denoise(x, t))


@pytest.mark.parametrize("t", TIMES)
def test_circular_patches_of_the_whole_image_are_all_shifts(t):
    y = images(4, (5, 5))
    x = noisy(y, t)
    shifts = torch.cat([y.roll(s, (1, 2)) for s in itertools.product(range(5), range(5))])
    found = EquivariantLocal(y, PROCESS, 5, "circular").denoise(x, t)
    close(found, vk.EmpiricalScore(shifts, PROCESS).denoise(x, t))


@pytest.mark.parametrize("t", TIMES)
@pytest.mark.parametrize("options", [
    {}, {"soft": True}, {"threshold": 0.4}, {"published": True, "threshold": 0.3}, {"published": True, "soft": True},
])  # fmt: skip
def test_pca_local_is_its_sum(t, options):
    y = images(6, (2, 3, 3))
    y[:, 0, 0, 0] = 0.5  # a constant pixel sees itself alone
    x, (alpha, sigma) = noisy(y, t), levels(t)
    flat = y.flatten(1).numpy()
    lam, u = np.linalg.eigh(np.cov(flat.T, bias=True))
    lam = np.where(lam > 1e-12, lam, 0)
    w = u @ np.diag(alpha**2 * lam / (alpha**2 * lam + sigma**2)) @ u.T
    own = np.diag(w).copy()
    live = own > 1e-12
    if options.get("published"):  # rows: the pixel estimated, columns: those seen
        m = w.T / np.where(own < 1e-6, 1, own)
        m = m if options.get("soft") else (np.abs(m) >= options["threshold"] * np.abs(m).max()).astype(float)
    else:
        m = np.minimum(1, np.where(live[:, None], np.abs(w) / np.where(live, own, 1)[:, None], 0))
        m = m if options.get("soft") else (m >= options.get("threshold", 0.02)).astype(float)
        np.fill_diagonal(m, 1)
    expected = np.empty((len(x), 18))
    for b, p in itertools.product(range(len(x)), range(18)):
        gap = (x[b].flatten().numpy() - alpha * flat) ** 2
        expected[b, p] = softmax_mean(-gap @ m[p] / (2 * sigma**2), flat[:, p : p + 1])[0]
    close(PCALocal(y, PROCESS, **options).denoise(x, t).flatten(1), expected, 1e-8)


def test_above_one_every_pixel_is_estimated_from_itself():
    y = images(5, (3, 4))
    x = noisy(y, 0.3)
    alone = vk.theories.PCALocal(y, PROCESS, 1.5).denoise(x, 0.3)
    for r, c in itertools.product(range(3), range(4)):
        pixel = vk.EmpiricalScore(y[:, r, c, None], PROCESS).denoise(x[:, r, c, None], 0.3)
        close(alone[:, r, c], pixel[:, 0])


@pytest.mark.parametrize("t", TIMES)
@pytest.mark.parametrize("n", [4, 40])
def test_gaussian_is_the_best_linear_denoiser(t, n):
    y = images(n, (9,))
    weights = torch.rand(n, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    x, (alpha, sigma) = noisy(y, t), levels(t)
    share = (weights / weights.sum()).numpy()
    mean = share @ y.numpy()
    cov = (y.numpy() - mean).T @ np.diag(share) @ (y.numpy() - mean)
    filter_ = alpha * cov @ np.linalg.inv(alpha**2 * cov + sigma**2 * np.eye(9))
    theory = Gaussian(vk.Empirical(y, weights), PROCESS)
    close(theory.denoise(x, t), mean + (x.numpy() - alpha * mean) @ filter_.T, 1e-8)
    law = torch.distributions.MultivariateNormal(
        torch.tensor(alpha * mean), torch.tensor(alpha**2 * cov + sigma**2 * np.eye(9))
    )
    x.requires_grad_()
    close(theory(x.detach(), t), torch.autograd.grad(law.log_prob(x).sum(), x)[0], 1e-7)


def test_rank_keeps_the_largest_variances():
    y = images(30, (6,)) * torch.tensor([5.0, 4, 3, 0.1, 0.1, 0.1])
    x = noisy(y, 0.3)
    two, all_of_them = Gaussian(y, PROCESS, rank=2), Gaussian(y, PROCESS)
    close(two.variances, all_of_them.variances[-2:])
    close(Gaussian(y[:4], PROCESS, rank=3).denoise(x, 0.3), Gaussian(y[:4], PROCESS).denoise(x, 0.3))
    plane = two.denoise(x, 0.3) - two.center
    assert torch.linalg.matrix_rank(plane) <= 2


def test_smoothed_is_the_score_of_the_density_with_a_bandwidth():
    y, h, t = images(12, (3,)), 0.4, 0.3
    x, (alpha, sigma) = noisy(y, t).requires_grad_(), levels(t)
    total = sigma**2 + (alpha * h) ** 2
    logp = torch.logsumexp(-(x[:, None] - alpha * y).square().sum(-1) / (2 * total), 1)
    close(Smoothed(y, PROCESS, h)(x.detach(), t), torch.autograd.grad(logp.sum(), x)[0])
    theory, exact = Smoothed(y, PROCESS, h, "draws", 5), vk.EmpiricalScore(y, PROCESS)
    expected = torch.stack([exact.denoise(x.detach() + h * u, t) for u in theory.draws]).mean(0)
    close(theory.denoise(x.detach(), t), expected)


def test_nearest_takes_the_nearest_not_the_heaviest():
    y = torch.tensor([[0.0], [1.0], [5.0]], dtype=torch.float64)
    data = vk.Empirical(y, torch.tensor([1e-12, 0.5, 0.5]))
    x = torch.tensor([[0.1]], dtype=torch.float64) * PROCESS.alpha(0.01)
    assert float(Nearest(data, PROCESS, 1).denoise(x, 0.01)) == 0.0
    (alpha, sigma), found = levels(0.5), Nearest(data, PROCESS, 2).denoise(x, 0.5)
    w = np.array([1e-12, 0.5]) * np.exp(-((float(x) - alpha * np.array([0.0, 1.0])) ** 2) / (2 * sigma**2))
    close(float(found), float(w[1] / w.sum()))


@pytest.mark.parametrize("make", [
    lambda y: Gaussian(y, PROCESS),
    lambda y: Smoothed(y, PROCESS, 0.3),
    lambda y: Smoothed(y, PROCESS, 0.3, "draws", 4),
    lambda y: Nearest(y, PROCESS, 3),
    lambda y: Local(y, PROCESS, 3),
    lambda y: EquivariantLocal(y, PROCESS, 3),
    lambda y: PCALocal(y, PROCESS),
])  # fmt: skip
def test_theories_are_scores(make):
    """Derivatives against differences, one result for all chunk sizes, one point, dtypes, one time for each image."""
    y = images(6, (4, 5))
    theory, x, t = make(y), noisy(y, 0.4, 4), 0.4
    v = torch.randn(x.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    step = 1e-5
    numeric = (theory.denoise(x + step * v, t) - theory.denoise(x - step * v, t)) / (2 * step)
    alpha, sigma = levels(t)
    close((theory.jvp(x, t, v) * sigma**2 + v) / alpha, numeric, 1e-5)
    there = x.clone().requires_grad_()
    backward = torch.autograd.grad((theory.denoise(there, t) * v).sum(), there)[0]
    slope = ((theory.denoise(x + step * x, t) - theory.denoise(x - step * x, t)) * v).sum()
    close((backward * x).sum(), slope / (2 * step), 1e-5)
    times = torch.tensor([0.1, 0.4, 0.4, 0.9], dtype=torch.float64)
    each = torch.stack([theory.denoise(a[None], float(s))[0] for a, s in zip(x, times, strict=True)])
    close(theory.denoise(x, times), each)
    small = make(y)
    small.memory = 4096
    close(small.denoise(x, times), each)
    assert theory.denoise(x.float(), t).dtype == torch.float32 == theory(x.float(), t).dtype
    one = make(y[:1]) if not isinstance(theory, Nearest) else Nearest(y[:1], PROCESS, 1)
    if not isinstance(theory, EquivariantLocal | Smoothed):
        close(one.denoise(x, t), y[:1].expand_as(x))
    sample = vk.sample.pf_ode(theory, x, steps=5)
    assert sample.shape == x.shape
    assert sample.isfinite().all()


@pytest.mark.parametrize("make", [
    lambda y: Smoothed(y, PROCESS, 0.3),
    lambda y: Smoothed(y, PROCESS, 0.3, "draws", 2),
    lambda y: EquivariantLocal(y, PROCESS, 3),
    lambda y: Local(y, PROCESS, 3),
    lambda y: PCALocal(y, PROCESS, soft=True),
])  # fmt: skip
def test_second_derivatives(make):
    y = images(5, (3, 4))
    theory, x, t, step = make(y), 0.3 * noisy(y, 0.2, 1)[0], 0.2, 1e-5
    pixel = lambda x: theory.denoise(x, t)[1, 2]  # noqa: E731
    slope = torch.func.grad(pixel)
    v = torch.randn(x.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    numeric = (slope(x + step * v) - slope(x - step * v)) / (2 * step)
    assert numeric.abs().max() > 1e-5
    close(torch.autograd.functional.vhp(pixel, x, v)[1], numeric, 1e-7)
    close(torch.func.jvp(slope, (x,), (v,))[1], numeric, 1e-7)
    close(torch.func.jacrev(lambda x: theory.denoise(x, t))(x)[1, 2], slope(x))
    close(torch.func.jacfwd(lambda x: theory.denoise(x, t))(x)[1, 2], slope(x))


def test_points_of_weight_zero_count_neither_as_neighbours_nor_as_a_limit():
    y, weights = images(6, (4, 5)), torch.tensor([1.0, 0, 2, 3, 0, 1])
    x, data, kept = (
        noisy(images(6, (4, 5)), 0.1),
        vk.Empirical(y, weights),
        vk.Empirical(y[weights > 0], weights[weights > 0]),
    )
    close(Nearest(data, PROCESS, 6).denoise(x, 0.1), vk.EmpiricalScore(data, PROCESS).denoise(x, 0.1))
    close(Nearest(data, PROCESS, 2).denoise(x, 0.1), Nearest(kept, PROCESS, 2).denoise(x, 0.1))
    close(Local(data, PROCESS, 3).denoise(x, 0.1), Local(kept, PROCESS, 3).denoise(x, 0.1))


def test_the_last_time_in_float32_is_accepted():
    process, y = vk.Cosine(), images(3, (4, 5))
    last = torch.tensor(process.T)
    assert float(last) > process.T
    close(Local(y, process, 3).denoise(y, last), Local(y, process, 3).denoise(y, process.T))


def test_switch_mixes_two_theories_and_samplers_stop_at_its_jump():
    y = images(6, (4, 5))
    above, below = Gaussian(y, PROCESS), vk.EmpiricalScore(y, PROCESS)
    x, seen = noisy(y, 0.5), []
    theory = Switch(above, below, at=1.0)
    t = float(PROCESS.time(torch.tensor(1.0, dtype=torch.float64)))
    close(theory.denoise(x, t + 0.01), above.denoise(x, t + 0.01))
    close(theory.denoise(x, t), below.denoise(x, t))
    vk.sample.pf_ode(theory, x, steps=4, callback=lambda k, time, _: seen.append(time))
    assert len(seen) == 6
    assert t in seen
    assert Switch(theory, Nearest(y, PROCESS), at=0.1).jumps == (
        float(PROCESS.time(torch.tensor(0.1, dtype=torch.float64))),
        t,
    )
    smooth = Switch(above, below, at=1.0, width=0.5)
    alpha, sigma = levels(0.3)
    w = 1 / (1 + (sigma / alpha) ** 2)
    close(smooth.denoise(x, 0.3), (1 - w) * above.denoise(x, 0.3) + w * below.denoise(x, 0.3))


def test_scales_by_noise_level_and_by_time():
    y = images(6, (5, 5))
    x = noisy(y, 0.5)
    table = Local(y, PROCESS, {0.1: 1, 10.0: 5})
    close(table.denoise(x, 0.01), Local(y, PROCESS, 1).denoise(x, 0.01))
    close(table.denoise(x, 0.9), Local(y, PROCESS, 5).denoise(x, 0.9))
    indices = vk.DDPM(torch.linspace(1e-4, 0.02, 50))
    sizes = [1 + 2 * (i % 4) for i in range(50)]
    by_index = Local(y, indices, lambda t: sizes[int(t)])
    assert [by_index.scale(float(indices.sigma(i) / indices.alpha(i))) for i in torch.arange(50.0).double()] == sizes
    by_time = Local(y, PROCESS, lambda t: 5 if t > 0.5 else 1)
    close(by_time.denoise(x, 0.6), Local(y, PROCESS, 5).denoise(x, 0.6))
    width = Smoothed(y, PROCESS, {0.1: 0.0, 10.0: 0.7})
    times = torch.tensor([0.01, 0.9, 0.01], dtype=torch.float64)
    each = [Smoothed(y, PROCESS, h).denoise(x[j], times[j]) for j, h in enumerate((0.0, 0.7, 0.0))]
    close(width.denoise(x, times), torch.stack(each))
    mask = PCALocal(y, PROCESS, {0.1: 0.0, 10.0: 1.5})
    each = [PCALocal(y, PROCESS, cut).denoise(x[j], times[j]) for j, cut in enumerate((0.0, 1.5, 0.0))]
    close(mask.denoise(x, times), torch.stack(each))


def test_anisotropic_noise_is_whitened():
    y = images(6, (3, 4))
    gamma = torch.linspace(0.5, 2, 12, dtype=torch.float64).reshape(3, 4)
    process = vk.Anisotropic(vk.VP(), gamma)
    x = noisy(y, 0.4)
    exact = vk.EmpiricalScore(y, process)
    for theory in (Local(y, process, 7), PCALocal(y, process, 0), Nearest(y, process, 6), Smoothed(y, process, 0)):
        close(theory.denoise(x, 0.4), exact.denoise(x, 0.4))
        close(theory(x, 0.4), exact(x, 0.4))
    alpha, sigma = levels(0.4)
    flat = y.flatten(1)
    cov = torch.cov(flat.T, correction=0)
    law = torch.distributions.MultivariateNormal(
        alpha * flat.mean(0), alpha**2 * cov + sigma**2 * torch.diag(gamma.flatten())
    )
    there = x.clone().requires_grad_()
    expected = torch.autograd.grad(law.log_prob(there.flatten(1)).sum(), there)[0]
    close(Gaussian(y, process)(x, 0.4), expected, 1e-7)


WIDTHS = functools.partial(Smoothed.fit, widths=(1.0, 0.25, 0.0))


@pytest.mark.parametrize(("make", "fit", "values"), [
    (lambda y, k: Local(y, PROCESS, k), Local.fit, (5, 3)),
    (lambda y, k: EquivariantLocal(y, PROCESS, k), EquivariantLocal.fit, (5, 3)),
    (lambda y, h: Smoothed(y, PROCESS, h), WIDTHS, (0.25, 1.0)),
    (lambda y, cut: PCALocal(y, PROCESS, cut), PCALocal.fit, (0.2, 0.5)),
])  # fmt: skip
def test_a_fit_finds_the_parameters_of_a_theory(make, fit, values):
    """The network is a theory whose parameters are known, in float32."""
    y, others, ratios, calls = images(6, (5, 5)), images(8, (5, 5), 5), (0.2, 5.0), []
    truth = make(y, dict(zip(ratios, values, strict=True)))
    network = vk.as_score(lambda x, t: calls.append(t) or truth(x, t).float().to(x), PROCESS, (5, 5))
    fitted = fit(network, y, others, levels=ratios)
    assert next(iter(fitted.options.values())) == dict(zip(ratios, values, strict=True))
    assert len(calls) == 2  # once at each level
    assert len(next(iter(fit(network, y, others, levels=3).options.values()))) == 3


def test_where_all_candidates_agree_a_fit_takes_the_smallest():
    y, others = images(1, (5, 5)), images(8, (5, 5), 5)
    table = Local.fit(vk.EmpiricalScore(y, PROCESS), y, others, scales=(5, 3)).k
    assert set(table.values()) == {3}


@pytest.mark.parametrize("make", [
    lambda y: Gaussian(y, PROCESS, rank=3),
    lambda y: Smoothed(y, PROCESS, {0.1: 0.0, 10.0: 0.7}),
    lambda y: Smoothed(y, PROCESS, 0.3, "draws", 4, torch.Generator().manual_seed(5)),
    lambda y: Nearest(y, PROCESS, 3),
    lambda y: Local(y, PROCESS, {0.1: 1, 10.0: 5}, "circular"),
    lambda y: EquivariantLocal(y, PROCESS, 3),
    lambda y: PCALocal(y, PROCESS, 0.4, published=True),
    lambda y: vk.EmpiricalScore(y, PROCESS),
    lambda y: Switch(Gaussian(y, PROCESS, 2), vk.EmpiricalScore(y, PROCESS), 1.0, 0.3),
])  # fmt: skip
def test_a_theory_on_other_data_is_the_theory_that_is_built_on_them(make):
    y, other = images(6, (5, 5)), images(5, (5, 5), 3)
    x = noisy(y, 0.4)
    made = make(y)
    made.memory = 1 << 20
    moved = made.on(vk.Empirical(other))
    assert type(moved) is type(made)
    close(moved.denoise(x, 0.4), make(other).denoise(x, 0.4))
    close(moved.on(y).denoise(x, 0.4), make(y).denoise(x, 0.4))
    assert isinstance(moved, Switch) or moved.memory == 1 << 20


GAUSSIAN = Gaussian(images(5, (3, 4)), PROCESS)


def test_equivariant_patches_under_noise_that_differs_between_channels():
    y = images(3, (2, 3, 4))
    x, root = noisy(y, 0.1), torch.tensor([0.5, 2.0], dtype=torch.float64)[:, None, None]
    process = vk.Anisotropic(PROCESS, root.square().expand(2, 3, 4))
    found = EquivariantLocal(y, process, 3).denoise(x, 0.1)
    white = brute_local((x / root).numpy(), (y / root).numpy(), 0.1, 3, equivariant=True)
    close(found, torch.as_tensor(white) * root, 1e-8)


MATRIX = vk.Anisotropic(vk.VP(), vk.core.covariance.Matrix(torch.eye(12).double() + 0.1, (3, 4)))


@pytest.mark.parametrize(("make", "words"), [
    (lambda: Local(torch.randn(5, 4), PROCESS, 3), "images"),
    (lambda: PCALocal(torch.randn(5, 4), PROCESS), "images"),
    (lambda: Local(images(5, (3, 4)), PROCESS, 4), "odd"),
    (lambda: Local(images(5, (3, 4)), PROCESS, 9), "at most 7"),
    (lambda: EquivariantLocal(images(5, (3, 4)), PROCESS, 5, "circular"), "at most 3"),
    (lambda: Local(images(5, (3, 4)), MATRIX, 3), "diagonal"),
    (lambda: EquivariantLocal(images(5, (3, 4)), vk.Anisotropic(PROCESS, torch.rand(3, 4) + 1), 3), "Γ varies"),
    (lambda: Nearest(images(5, (3, 4)), PROCESS, 6), "1 to 5"),
    (lambda: Smoothed(images(5, (3, 4)), PROCESS, -1), "h must be"),
    (lambda: Smoothed(images(5, (3, 4)), PROCESS, 1e200), "at most"),
    (lambda: Gaussian(images(5, (3, 4)), PROCESS, memory=0), "memory must be"),
    (lambda: Gaussian(images(5, (3, 4)), PROCESS, memory="1 GB"), "memory must be"),
    (lambda: Gaussian(images(5, (3, 4)), PROCESS, rank=0), "rank"),
    (lambda: Gaussian(images(5, (3, 4)), "vp"), "process"),
    (lambda: PCALocal(images(5, (3, 4)), PROCESS, -1), "threshold"),
    (lambda: PCALocal(images(5, (3, 4)), PROCESS, soft="yes"), "soft must be a bool"),
    (lambda: Local(images(5, (3, 4)), PROCESS, {}), "table"),
    (lambda: Local(images(5, (3, 4)), PROCESS, 3, "mirror"), "borders"),
    (lambda: Smoothed(images(5, (3, 4)), PROCESS, {0.1: -1}), "h must be"),
    (lambda: Local.fit(vk.EmpiricalScore(images(5, (3, 4)), PROCESS), images(5, (3, 4)), images(5, (4, 4))), "shape"),
    (lambda: Local.fit(vk.EmpiricalScore(images(5), PROCESS), images(5), images(5), scales=[2]), "odd"),
    (lambda: Local.fit(vk.EmpiricalScore(images(5), PROCESS), images(5), images(5), levels=[1e9]), "levels"),
    (lambda: Local.fit(len, images(5), images(5)), "Score"),
    (lambda: Switch(GAUSSIAN, vk.as_score(lambda x, t: -x, PROCESS, (3, 4)), 1.0).on(images(5, (3, 4))), "not built"),
    (lambda: Switch(Gaussian(images(5), PROCESS), Gaussian(images(5), vk.VE()), 1.0), "one process"),
    (lambda: Local(images(5, (3, 4)), PROCESS, 3).denoise(torch.full((1, 3, 4), torch.nan), 0.5), "NaN"),
    (lambda: Nearest(images(5, (3, 4)), PROCESS).denoise(images(1, (3, 4)) * 1e200, 0.5), "sigma away"),
    (lambda: Gaussian(images(5), PROCESS)(images(1), torch.tensor(0.5, requires_grad=True)), "not in t"),
])  # fmt: skip
def test_bad_input_gets_a_sentence(make, words):
    with pytest.raises(vk.InputError, match=words):
        make()


@pytest.mark.parametrize("sigma", [0.003, 0.1, 5.0])
@pytest.mark.parametrize(("borders", "k"), [("zeros", 3), ("zeros", 23), ("circular", 5)])
def test_local_in_float32_is_accurate_in_chunks_of_any_size(sigma, borders, k):
    """Offsets and close pairs of training images make logits of float32 products inexact; those are float64 then."""
    y = 0.3 * images(40, (2, 12, 11)) + 3
    y[20:] = y[:20] + 2 * sigma / k * images(20, (2, 12, 11), 4)
    data, process = vk.Empirical(y, torch.linspace(1, 2, 40)), vk.EDM()
    x = (y[15:21] + sigma * images(6, (2, 12, 11), 5)).float()
    expected = Local(data, process, k, borders).denoise(x.double(), sigma)
    if k < 23:
        with torch.no_grad():
            gap = (x.double()[:, None] - y).square().sum(2).reshape(-1, 1, 12, 11)
            mode = {"zeros": "constant", "circular": "circular"}[borders]
            box = torch.nn.functional.pad(gap, (k // 2,) * 4, mode=mode).unfold(2, k, 1).unfold(3, k, 1).sum((-1, -2))
            logit = data.weights.log()[:, None, None] - box.reshape(6, 40, 12, 11) / (2 * sigma**2)
            close(expected, torch.einsum("bihw,ichw->bchw", logit.softmax(1), y), 1e-7)
    for memory in (None, 1 << 15):
        found = Local(data, process, k, borders, memory=memory).denoise(x, sigma).double()
        assert (found - expected).flatten(1).norm(dim=1).max() < 1e-4 * data.spread


@pytest.mark.parametrize("sigma", [0.003, 0.1, 5.0])
@pytest.mark.parametrize("options", [
    {}, {"soft": True}, {"threshold": 0.6}, {"threshold": 0}, {"published": True, "soft": True},
])  # fmt: skip
def test_pca_local_in_float32_is_accurate_in_chunks_of_any_size(sigma, options):
    y = 0.3 * images(40, (2, 5, 6)).cumsum(-1) + 3
    y[20:] = y[:20] + sigma * images(20, (2, 5, 6), 4)
    data, process = vk.Empirical(y, torch.linspace(1, 2, 40)), vk.EDM()
    middle = (y[:3] + y[3:6]) / 2  # both ends are far away and alike, which float32 does not tell apart
    x = torch.cat([y[15:21] + sigma * images(6, (2, 5, 6), 5), middle]).float()
    theory = PCALocal(data, process, **options)
    mask = theory.mask(torch.tensor(1.0).double(), torch.tensor(sigma**2).double(), slice(0, 60))
    gap = (x.double()[:, None] - y).square().flatten(2)
    logit = data.weights.log()[:, None] - gap @ mask.mT / (2 * sigma**2)
    expected = torch.einsum("bip,ip->bp", logit.softmax(1), y.flatten(1))
    close(theory.denoise(x.double(), sigma).flatten(1), expected, 1e-7)
    for memory in (None, 1 << 15):
        found = PCALocal(data, process, **options, memory=memory).denoise(x, sigma).double().flatten(1)
        assert (found - expected).norm(dim=1).max() < 1e-4 * data.spread


def test_values_in_reduced_precision_are_in_doubt_beside_certain_weights():
    """One point has all weight, so that logits do not count; its value is rounded by a product in tf32."""
    value, one = torch.tensor([[3.0, 9.0]], dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    try:
        torch.set_float32_matmul_precision("high")
        assert float(doubt(value, one, 0.1 * one).sqrt()) >= 3 * 2.0**-11
    finally:
        torch.set_float32_matmul_precision("highest")
    assert float(doubt(value, one, 0.1 * one).sqrt()) < 1e-6
