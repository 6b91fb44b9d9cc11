r"""Paths and their weights: the path integral of the effective dynamics, made of finite steps (docs/theory.md, §5).

A path is ``(steps + 1, *batch, d)`` at descending times, :math:`\Delta_k = t_k - t_{k+1} > 0`, and all is taken at the
pre-step point, that of larger t (Itô). Its residual :math:`R = \dot x + \beta x + D s_{avg}` is

.. math:: x_{k+1} = x_k + \Delta_k (\beta_k x_k + D_k s_{avg}(x_k, t_k)) - \Delta_k R_k .

The average over training of Martin, Siggia and Rose's :math:`\exp i\int p \cdot (\dot x + \beta x + D\hat s_\theta) dt`
has the cumulants :math:`M_1 = i \int p \cdot R\, dt` and :math:`M_2 = \iint p_t^T V p_{t'} dt\, dt'` .
The integral over p leaves the law of the residuals, with covariances *on the path*: independent :math:`R_k \sim N(0,
D\,\mathrm{Cov}_k D / \Delta_k)` for a white V; for a quenched V together :math:`N(0, V)`, :math:`V_{kl} = D_k
\mathrm{Cov}[\hat s(x_k,t_k), \hat s(x_l,t_l)] D_l`. The Jacobian from noise to path is the constant :math:`\prod_k
\Delta_k^d`. Hence

.. math:: -\log P = \tfrac12 R^T V^{-1} R + \tfrac12 \log\det V[path] + d \sum_k \log \Delta_k + \mathrm{const} ;

:func:`action` is the first term (Freidlin and Wentzell's), :func:`log_prob` all of it. Where V is singular a path whose
residual leaves its range is impossible, and the density is one in the coordinates that are left free: at each step,
those that the steps before do not fix. The PF-ODE, R = 0 (:func:`zero_action`), is the *mode* only if V does not depend
on the state, or as V → 0; for a white V the mode moves ever further as the step is refined. What has a limit is the
probability of a *bundle* of paths: the sum of ``log_prob(paths, …).exp()`` times the volume that each path represents.

``mean`` is the mean score (default ``V.mean``), and ``times`` are those of the path (default: even in log σ/α)."""

import itertools
import math
import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from vkernel.core.checks import check_real
from vkernel.core.errors import require
from vkernel.core.estimate import Estimate
from vkernel.sample.loop import Level, Problem, walk
from vkernel.sample.sde import VKernel, check_kernel, covariance
from vkernel.score.base import Score, check_score

Mean = Score | None
Times = Tensor | None
Grid = int | Tensor  # a number of steps, even in log σ/α, or descending times
Noise = Callable[[int, Tensor, Level, float], Tensor]
DENSE, ALONG = 64, 2048  # largest d, and largest steps × d of a quenched V, for which matrices are formed
WHITE, FACTORS, FUNCTION = 1e-6, 1e-10, 3e-5  # standard deviations that are zero beside the largest, by kind of V


class _Chain(NamedTuple):
    """A path with the process along it, in float64: dt and D ``(steps, 1, …, 1)``, R ``(steps, *batch, d)``."""

    x: Tensor
    t: list[float]
    dt: Tensor
    D: Tensor
    R: Tensor
    room: Tensor  # |R| up to which it is rounding, (steps, *batch)


def residual(path: Tensor, mean: Score, times: Times = None) -> Tensor:
    """Return R at the pre-step points, ``(steps, *batch, d)``: zero on the PF-ODE.

    >>> import torch, vkernel as vk
    >>> data, process = vk.data.toy("triple"), vk.VP()
    >>> score = vk.EmpiricalScore(data, process)
    >>> x_T = process.prior((5, 1), generator=0)
    >>> walk = vk.path.zero_action(score, x_T, 10)
    >>> bool(vk.path.residual(walk, score).abs().max() < 1e-2)
    True
    """
    return _chain(path, mean, None, times).R.to(path.dtype)


def cumulants(
    path: Tensor, response: Tensor, V: VKernel, mean: Mean = None, times: Times = None
) -> tuple[Tensor, Tensor]:
    r"""Return M_1 and M_2, ``(*batch,)``, of a path and its ``response`` field p, ``(steps, *batch, d)``.

    :math:`M_1 = \sum_k \Delta_k p_k \cdot R_k`, the *real number that multiplies i*; :math:`M_2 = \sum_k \Delta_k p_k^T
    D\,\mathrm{Cov}\,D\, p_k` for a white V, :math:`\sum_{kl} \Delta_k \Delta_l p_k^T V_{kl}\, p_l` for a quenched one.

    >>> import torch, vkernel as vk
    >>> data, process = vk.data.toy("triple"), vk.VP()
    >>> score = vk.EmpiricalScore(data, process)
    >>> x_T = process.prior((5, 1), generator=0)
    >>> def basis(x, t):
    ...     return torch.ones_like(x)[None]
    >>> V = vk.kernels.FiniteRank(basis, torch.eye(1), process, mean=score)
    >>> walk = vk.path.zero_action(score, x_T, 10)
    >>> first, second = vk.path.cumulants(walk, torch.ones(10, 5, 1), V)
    >>> first.shape, second.shape
    (torch.Size([5]), torch.Size([5]))
    """
    c = _chain(path, mean, V, times)
    good = isinstance(response, Tensor) and response.shape == c.R.shape and bool(response.isfinite().all())
    require(good, f"The response field must be finite and have the shape of the residual, {tuple(c.R.shape)}.")
    p = response.detach().to(c.x)
    second = (_factors(c, V)[0].mT @ _rows(c.dt * p, V)[..., None]).square().sum((0, -2, -1) if V.white else (-2, -1))
    return (c.dt * p * c.R).sum((0, -1)).to(path.dtype), second.to(path.dtype)


def action(path: Tensor, V: VKernel, mean: Mean = None, times: Times = None) -> Tensor:
    r"""Return the quadratic (Freidlin–Wentzell) action :math:`\tfrac12 R^T V^+ R` of each path, ``(*batch,)``.
    White: :math:`\sum_k \tfrac12 \Delta_k R_k^T (D\,\mathrm{Cov}\,D)^+ R_k`. Quenched, with factors: the least
    :math:`\tfrac12 |w|^2` of unit normal weights w that make the path. +inf, and a warning, where no noise makes it.

    >>> import torch, vkernel as vk
    >>> data, process = vk.data.toy("triple"), vk.VP()
    >>> score = vk.EmpiricalScore(data, process)
    >>> x_T = process.prior((5, 1), generator=0)
    >>> def basis(x, t):
    ...     return torch.ones_like(x)[None]
    >>> V = vk.kernels.FiniteRank(basis, torch.eye(1), process, mean=score)
    >>> walk = vk.path.zero_action(score, x_T, 10)
    >>> vk.path.action(walk, V)
    tensor([0., 0., 0., 0., 0.])
    """
    return _weigh(_chain(path, mean, V, times), V)[0].to(path.dtype)


def log_prob(path: Tensor, V: VKernel, mean: Mean = None, times: Times = None) -> Tensor:
    r"""Return the log-density of each path given its first point, in :math:`x_1 \dots x_N`; ``(*batch,)``.
    :math:`-\tfrac12 R^T V^+ R - \tfrac12 \log\det(2\pi V) - d \sum_k \log \Delta_k`, V on the path; -inf, and a
    warning, off the support. A path that is certain (V = 0, R = 0) has 0.

    >>> import torch, vkernel as vk
    >>> data, process = vk.data.toy("triple"), vk.VP()
    >>> score = vk.EmpiricalScore(data, process)
    >>> x_T = process.prior((5, 1), generator=0)
    >>> V = vk.kernels.Naive(score, kappa=0.1)
    >>> path = vk.sample.effective_sde(V, x_T, steps=10, generator=0, save="path").path
    >>> vk.path.log_prob(path, V).shape
    torch.Size([5])
    """
    square, norm = _weigh(_chain(path, mean, V, times), V)
    return (norm - square).to(path.dtype)


def zero_action(score: Score, x_T: Tensor, steps: Grid, spacing: str | None = "log") -> Tensor:
    """Return the PF-ODE path of ``score`` by Euler's method, ``(steps + 1, *batch, d)``: its quadratic action is 0.

    >>> import torch, vkernel as vk
    >>> data, process = vk.data.toy("triple"), vk.VP()
    >>> score = vk.EmpiricalScore(data, process)
    >>> x_T = process.prior((5, 1), generator=0)
    >>> vk.path.zero_action(score, x_T, 10).shape
    torch.Size([11, 5, 1])
    """
    problem = _problem(check_score(score, "A path"), x_T, steps, spacing)
    return _walk(problem, problem.x_T.detach().double(), lambda k, x, here, dt: 0 * x).to(problem.dtype)


def probability(event: Callable[[Tensor], Tensor], paths: Tensor) -> Estimate:
    """Estimate the probability of an event from sampled paths, with Wilson's interval.
    ``event`` takes ``paths (steps + 1, samples, *batch, d)``, those of ``effective_sde(V, x_T, members=samples,
    method="euler", save="path")``, and returns booleans ``(samples, *batch)``.

    >>> import torch, vkernel as vk
    >>> data, process = vk.data.toy("triple"), vk.VP()
    >>> score = vk.EmpiricalScore(data, process)
    >>> x_T = process.prior((5, 1), generator=0)
    >>> V = vk.kernels.Naive(score, kappa=0.1)
    >>> paths = vk.sample.effective_sde(V, x_T, members=20, steps=10, generator=0, save="path").path
    >>> vk.path.probability(lambda p: p[-1, ..., 0] > 0.5, paths).value.shape
    torch.Size([5])
    """
    hit = event(paths)
    good = isinstance(hit, Tensor) and hit.dtype == torch.bool and hit.shape == paths.shape[1:-1]
    require(good, f"The event must return booleans of shape {tuple(paths.shape[1:-1])}.")
    return Estimate.of_share(hit.sum(0), paths.shape[1])


def most_probable(
    V: VKernel, x_T: Tensor, *, steps: Grid, mean: Mean = None, x_end: Tensor | None = None, spacing: str | None = "log"
) -> Tensor:
    r"""Return the mode of the chain from ``x_T`` (to ``x_end``, if given), ``(steps + 1, *batch, d)``, for small d.

    White: a local search (L-BFGS on -log_prob, central differences) from the path of least action, in the normals that
    make a path; the answer belongs to its step, as a warning says. Quenched: the mode *in the coordinates of the
    field*, where the density is normal: with a free end the mean field, so :func:`zero_action`; to ``x_end`` the least
    :math:`\tfrac12|w|^2` that ends there, by Newton's iteration from weights to the end (for a V with factors).

    >>> import torch, vkernel as vk
    >>> data, process = vk.data.toy("triple"), vk.VP()
    >>> score = vk.EmpiricalScore(data, process)
    >>> x_T = process.prior((5, 1), generator=0)
    >>> def basis(x, t):
    ...     return torch.ones_like(x)[None]
    >>> V = vk.kernels.FiniteRank(basis, torch.eye(1), process, mean=score)
    >>> vk.path.most_probable(V, x_T, steps=10).shape  # a free end: the path of zero action
    torch.Size([11, 5, 1])
    """
    problem = _problem(check_kernel(V, mean), x_T, steps, spacing)
    start, dt = problem.x_T.detach().double(), -problem.times.diff()
    d = start.shape[-1]
    require(d <= DENSE, f"most_probable forms matrices: it needs d ≤ {DENSE}; here d = {d}.")
    good = x_end is None or (x_end.shape == start.shape and bool(x_end.isfinite().all()))
    require(good, f"x_end must be finite and have the shape of x_T, {tuple(start.shape)}.")
    goal = None if x_end is None else x_end.detach().double()
    if not V.white and goal is None:
        return zero_action(problem.score, x_T, problem.times)
    first = V.factors(start, problem.levels[0].t)
    require(V.white or first is not None, "A quenched mode with a given end needs a V with factors (FiniteRank).")

    def paths_of(z: Tensor) -> tuple[Tensor, Tensor]:
        """Return the paths that noise ``z (many, *batch, n)`` makes, and -log_prob where a white V makes them."""
        z = torch.nn.functional.pad(z, (0, count - z.shape[-1]))
        cost = 0.5 * z.square().sum(-1)

        def noise(k: int, x: Tensor, here: Level, dt: float) -> Tensor:
            nonlocal cost
            if not V.white:
                factors = V.factors(x, here.t)
                assert factors is not None
                return dt * here.D * (z.movedim(-1, 0)[..., None] * factors).sum(0)
            values, vectors = _spectrum(dt * here.D**2 * covariance(V, x, here.t).dense())
            cost = cost + 0.5 * torch.where(values > 0, 2 * math.pi * values, 1.0).log().sum(-1)
            return (vectors @ (values.sqrt()[..., None] * (vectors.mT @ z[..., k * d : (k + 1) * d, None]))).squeeze(-1)

        return _walk(problem, start.expand(*z.shape[:-1], d), noise), cost

    def minus_log_prob(z: Tensor) -> Tensor:
        path, cost = paths_of(z)
        if goal is None:
            return cost
        path[-1] = goal  # the last step is fixed, whatever z is
        square, norm = _weigh(_chain(path, problem.score, V, problem.times), V)
        return square - norm

    count = len(dt) * d if V.white or first is None else len(first)
    z = start.new_zeros(*start.shape[:-1], count)
    if goal is not None:
        z = _reach(lambda z: paths_of(z)[0][-1], z, goal)
    if V.white:
        step = f"{float(dt.max()):.3g} ({len(dt)} steps): it has no limit as the step goes to 0."
        warnings.warn(f"The most probable path of a white V belongs to its step, here {step}", stacklevel=2)
        z = _descend(minus_log_prob, z if goal is None else z[..., :-d])
    path = paths_of(z[None])[0][:, 0]
    if goal is not None:
        path[-1] = goal
    return path.to(problem.dtype)


def _around(z: Tensor, h: float) -> Tensor:
    """Return z, then z with h added to each coordinate, then subtracted, along a new first axis."""
    eye = h * torch.eye(z.shape[-1], dtype=z.dtype, device=z.device).reshape(-1, *(1,) * (z.ndim - 1), z.shape[-1])
    return torch.cat([z[None], z + eye, z - eye])


def _descend(cost: Callable[[Tensor], Tensor], z: Tensor, h: float = 1e-5) -> Tensor:
    """Minimise by L-BFGS the sum over the batch, with central differences along each coordinate."""
    if z.numel() == 0:
        return z
    z = z.clone()
    method = torch.optim.LBFGS([z], 1, 200, tolerance_grad=1e-5, tolerance_change=1e-14, line_search_fn="strong_wolfe")

    def closure() -> float:
        values = cost(_around(z, h))
        require(bool(values.isfinite().all()), "The search for the most probable path left the support of V.")
        z.grad = (values[1:].unflatten(0, (2, -1)).diff(dim=0)[0] / (-2 * h)).movedim(0, -1).contiguous()
        return float(values[0].sum())

    method.step(closure)
    closure()
    slope = float(torch.as_tensor(z.grad).abs().max())
    if slope > 1e-4:
        warnings.warn(f"No mode was found: the gradient of -log_prob is still {slope:.2g}.", stacklevel=3)
    return z.detach()


def _reach(end: Callable[[Tensor], Tensor], z: Tensor, goal: Tensor, h: float = 1e-6) -> Tensor:
    """Return the least |z| with ``end(z) = goal``, by steps J^+ (goal - end(z) + J z), halved until nearer."""
    small = 1e-9 * (1 + goal.norm(dim=-1))
    for _ in range(40):
        now, up, down = torch.split(end(_around(z, h)), [1, z.shape[-1], z.shape[-1]])
        J, miss = ((up - down) / (2 * h)).movedim(0, -1), goal - now[0]
        step = (torch.linalg.pinv(J, rtol=1e-9) @ (miss[..., None] + J @ z[..., None])).squeeze(-1) - z
        for _ in range(12):
            left = (goal - end((z + step)[None])[0]).norm(dim=-1)
            worse = (left > 0.9 * miss.norm(dim=-1)) & (left > small)
            step = torch.where(worse[..., None], step / 2, step)
            if not bool(worse.any()):
                break
        z = z + step
        if bool((left <= small).all()) and float(step.abs().max()) < 1e-7 * (1 + float(z.abs().max())):
            return z
    good, missed = bool((left <= small).all()), float(left.max())
    require(good, f"No noise of V was found that ends at x_end; missed by {missed:.2g}.")
    warnings.warn("A path to x_end was found, but perhaps not the one of least action.", stacklevel=3)
    return z


def _weigh(c: _Chain, V: VKernel) -> tuple[Tensor, Tensor]:
    """Return ½ R^T V^+ R, +inf where R leaves the range of V, and the log-density at R = 0; both ``(*batch,)``."""
    A, floor = _factors(c, V)
    U, scale, _ = torch.linalg.svd(A, full_matrices=False)
    R, top = _rows(c.R, V), scale.amax(-1)
    keep = scale > floor * top[..., None]
    inside = (U.mT @ R[..., None]).squeeze(-1) * keep
    square = 0.5 * (inside / torch.where(keep, scale, 1.0)).square().sum(-1)
    room = (c.room if V.white else c.room.norm(dim=0)) + 10 * floor * math.sqrt(R.shape[-1]) * top
    off = (R - (U @ inside[..., None]).squeeze(-1)).norm(dim=-1) > room
    norm = _log_volume(A.unflatten(-2, (-1, c.x.shape[-1])), [c.dt] if V.white else list(c.dt), floor * top)
    if V.white:  # the steps are independent
        square, off, norm = square.sum(0), off.any(0), norm.sum(0)
    if bool(off.any()):
        many = f"{int(off.sum())} of {off.numel()} paths leave the support of V"
        warnings.warn(f"{many}: no noise makes them (action +inf, log-density -inf).", stacklevel=3)
    return square.masked_fill(off, math.inf), norm


def _log_volume(A: Tensor, dts: list[Tensor], floor: Tensor) -> Tensor:
    """Return the log-density of the path at R = 0: at each step, in the directions that earlier steps leave free."""
    out, F = A.new_zeros(A.shape[:-3]), A.shape[-1]
    seen = A.new_zeros(*A.shape[:-3], F, F)  # the projector on the weights that are fixed
    for k, dt in enumerate(dts):
        rest = A[..., k, :, :] - A[..., k, :, :] @ seen
        _, scale, v = torch.linalg.svd(rest - rest @ seen, full_matrices=False)
        keep = scale > floor[..., None]
        out = out - torch.where(keep, (math.sqrt(2 * math.pi) * dt * scale).log(), 0.0).sum(-1)
        v = v - v @ seen  # once more: a small rest has a rough direction
        v = keep[..., None] * v / v.norm(dim=-1, keepdim=True).clamp_min(1e-300)
        seen = seen + v.mT @ v
    return out


def _rows(a: Tensor, V: VKernel) -> Tensor:
    """Return ``(steps, *batch, d)`` for a white V (its steps are independent), ``(*batch, steps·d)`` otherwise."""
    return a if V.white else a.movedim(0, -2).flatten(-2)


def _factors(c: _Chain, V: VKernel) -> tuple[Tensor, float]:
    """Return A with A A^T = Cov[R], and what is zero beside its largest singular value; rows as in :func:`_rows`."""
    x, D, (n, *_, d) = c.x[:-1], c.D, c.R.shape
    if V.white:
        require(d <= DENSE, f"The inverse of a white V is a matrix: it needs d ≤ {DENSE}; here d = {d}.")
        covs = [covariance(V, y, t).dense() for y, t in zip(x, c.t, strict=True)]
        values, vectors = _spectrum(torch.stack(covs) * (D**2 / c.dt)[..., None])
        return vectors * values.sqrt()[..., None, :], WHITE
    require(n * d <= ALONG, f"A quenched V along the path needs steps·d ≤ {ALONG}; here it is {n * d}.")
    rows = [V.factors(y, t) for y, t in zip(x, c.t, strict=True)]
    finite = [row for row in rows if row is not None]
    if len(finite) == len(rows):
        return (D * torch.stack(finite, 1).double()).movedim((0, 1), (-1, -3)).flatten(-3, -2), FACTORS
    t = torch.tensor(c.t, dtype=x.dtype, device=x.device).reshape(-1, *(1,) * (x.ndim - 2))
    there = x[None].expand(n, *x.shape)
    k = V.cov(x[:, None].expand_as(there), t[:, None], there, t[None]).dense()
    k = k.double() * (D[:, None] * D[None])[..., None]
    values, vectors = _spectrum(k.movedim((0, 1), (-4, -2)).flatten(-2).flatten(-3, -2))
    return vectors * values.sqrt()[..., None, :], FUNCTION


def _spectrum(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues, zero where they are rounding, and eigenvectors."""
    values, vectors = torch.linalg.eigh((matrix + matrix.mT).double() / 2)
    top, low = values.abs().amax(-1, keepdim=True), float(values.min())
    require(bool((values >= -1e-7 * top).all()), f"V is not positive semidefinite: it has the eigenvalue {low:.3g}.")
    return torch.where(values > WHITE**2 * top, values, 0.0), vectors


def _problem(score: Score, x_T: Tensor, steps: Grid, spacing: str | None) -> Problem:
    """Return the problem of a path from ``x_T``; its process must be isotropic and its events vectors."""
    require(score.process.base is score.process, "Paths are weighed for isotropic processes; whiten the data first.")
    vectors = score.shape is None or len(score.shape) == 1
    require(vectors, "Paths are of vectors, (steps + 1, *batch, d): flatten the data's events first.")
    return Problem(score, x_T, steps=steps, spacing=spacing)


def _walk(problem: Problem, x: Tensor, noise: Noise) -> Tensor:
    """Return the chain from ``x``; ``noise(k, x, here, dt)`` is added to the drift of step k."""
    count = itertools.count()

    def step(x: Tensor, here: Level, there: Level) -> Tensor:
        x = problem.euler(x, here, there).detach() + noise(next(count), x, here, here.t - there.t)
        require(bool(x.isfinite().all()), "The path diverged: NaN or infinite values. Take more steps, or log spacing.")
        return x

    return torch.stack([x for _, x in walk(x, problem.levels, step)])


def _chain(path: Tensor, mean: Mean, V: VKernel | None, times: Times) -> _Chain:
    """Return a checked path and its residual."""
    score = check_score(mean, "A path") if V is None else check_kernel(V, mean)
    good = check_real(path, "A path").ndim >= 2 and path.shape[0] >= 2 and path.is_floating_point()
    require(good, "A path is a tensor of real numbers, (steps + 1, *batch, d), of at least one step.")
    require(bool(path.isfinite().all()), "The path holds NaN or infinite values.")
    x = path.detach().double()
    problem = _problem(score, x[0], len(x) - 1 if times is None else times, "log")
    require(len(problem.times) == len(x), f"A path of {len(x) - 1} steps has {len(x)} times; got {len(problem.times)}.")
    levels = problem.levels[:-1]
    columns = (-problem.times.diff(), [at.D for at in levels], [at.sigma**2 for at in levels])
    dt, D, S = (torch.as_tensor(a, dtype=x.dtype, device=x.device).reshape(-1, *(1,) * (x.ndim - 1)) for a in columns)
    drift = torch.stack([at.beta * y + at.D * problem.s(y, at).detach() for y, at in zip(x, levels, strict=False)])
    far, rate = x.norm(dim=-1), (D / S)[..., 0]  # the score rounds as x/S does
    size = (far[1:] + far[:-1]) / dt[..., 0] + rate * far[:-1] + drift.norm(dim=-1)
    room = (1e-8 if path.dtype == torch.float64 else 1e-4) * size
    R = drift - x.diff(dim=0) / dt
    rounding = 8 * torch.finfo(path.dtype).eps * size  # a residual of this size is zero; a small V would amplify it
    R = R * (R.norm(dim=-1) > rounding)[..., None]
    return _Chain(x, [at.t for at in levels], dt, D, R, room)
