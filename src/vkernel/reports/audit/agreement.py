r"""Would another run of the same training have learned the same, and do runs differ where the theory predicts?

At a place (x, t), M runs have the scores :math:`\hat s_m` with mean :math:`s_{avg}` and unbiased covariance V
(:mod:`vkernel.sample.scores`); the training set has the score s and the target covariance C. In units of predicted
noise, per coordinate,

.. math:: \mathrm{variance} = \frac{\sigma^2}{d} \operatorname{tr} V, \quad
          \mathrm{bias} = \frac{\sigma^2}{d} \big(|s_{avg} - s|^2 - \operatorname{tr} \mathrm{Cov}\,s_{avg}\big), \quad
          \mathrm{target} = \frac{\sigma^2}{d} \operatorname{tr} C

are unbiased: the disagreement of runs, their common error, the noise of their targets. Places are noisy training images
(``data``); the middle between an image and the nearest other one, with the same noise (``between``), where C is large;
and states of the PF-ODE of :math:`s_{avg}` from the prior (``path``).

``rank`` is Spearman's correlation of tr V with tr C over places of a kind at one level; ``rank_coordinates`` the same
over the pixels of one image, between the diagonals of V and C, averaged over images, which are independent as pixels
are not. Pixels at the border are quiet in every image, which correlates V with C as well: ``rank_specific`` subtracts
the correlation of the V of one image with the C of *another* (:func:`vkernel.core.estimate.matched_correlation`); 0
means that V knows nothing of the image itself. More than 0 is no proof that C is the cause: strokes and edges of the
image may raise both.

Errors and intervals (95 %) are over places and hold for *these* members; ``rank_without`` and ``variance_members``
leave out a member (or a group) at a time. ``V_over_C`` is :math:`\operatorname{E\,tr} V/\operatorname{E\,tr} C`, with
Fieller's interval. Theory gives trained models a V that is C (and the misfit) smeared by the model's kernel (§8.2), not
C(x,t) itself: of that a correlation is a first test. C underflows beside a training image; such places have no rank.
Networks in float32 cannot respond to a C below its resolution: levels with a smaller mean ``target`` have no verdict.
Verdicts are corrected over levels and places by Holm's method.

**Samples** (:func:`same_noise`; Kadkhodaie et al. 2024, Zhang et al. 2024). With :math:`x^a_i` the sample of member a
from the i-th of n starts, :math:`\mathrm{ratio} = \mathrm{mean}_i\, |x^a_i - x^b_i| \,/\, \mathrm{mean}_{i \ne j}\,
|x^a_i - x^b_j|` is 0 for members whose samples from equal noise are equal, 1 for members that share only the law.
Samples whose brightness drifts differ mostly in it, from start to start more than from member to member: they are
compared without brightness and contrast, in the features ``standardised``."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vkernel.adapters.checkpoints import Checkpoints
from vkernel.core import estimate, rng
from vkernel.core.errors import require
from vkernel.core.estimate import TINY, Estimate, fieller_ratio, jackknife, spearman, stacked
from vkernel.core.progress import Progress, progress as report_progress
from vkernel.core.variance import kurtosis, skewness
from vkernel.data.empirical import Empirical
from vkernel.metrics import distinct, nearest
from vkernel.metrics.features import Features, extractor
from vkernel.reports.audit.levels import NoisyImages, audit_times, check_inputs, coordinates, mean_of_finite, variables
from vkernel.sample import Scores, pf_ode
from vkernel.score.empirical import EmpiricalScore

if TYPE_CHECKING:
    import xarray

PLACES = ("data", "between", "path")
RESOLVED = torch.finfo(torch.float32).eps  # of the target: networks in float32 cannot respond to less noise
FEWEST = 10  # places of a rank correlation
STRIDE = 0.3  # the longest step of a path in log(sigma/alpha)
ROWS = 256  # samples compared at once
Level = dict[str, Tensor]  # the quantities at one level: (draws, places), …


@dataclass(frozen=True)
class Agreement:
    """Curves along ``place`` and ``t``, whether V follows C there beyond doubt (where C is resolved), and samples."""

    dataset: xarray.Dataset
    follows: dict[tuple[str, float], bool]
    same: SameNoise | None = None


def agreement(
    scores: Scores,
    data: Empirical,
    *,
    times: Sequence[float] | Tensor | None = None,
    images: int = 96,
    samples: Tensor | None = None,
    features: Features = "pixels",
    seed: int = 0,
    draws: int = 1,
    batch: int = 128,
    exact: EmpiricalScore | None = None,
    progress: Progress = False,
) -> Agreement:
    """Measure how much the members disagree at each noise level, and whether they do where C is large.

    ``data`` is the training set, in their pixel units, and ``exact`` its score; ``images`` the places of each kind;
    ``draws`` those of noise for each image, averaged over first; ``samples`` those for :func:`same_noise`, compared in
    ``features``."""
    import xarray

    kind = type(scores).__name__
    require(isinstance(scores, Scores), f"Agreement needs Scores, such as Checkpoints([…]), not {kind}.")
    process, data, _ = check_inputs(scores, data, least=FEWEST, images=images, draws=draws, batch=batch)
    fits = scores.shape in (None, data.shape)
    require(fits, f"The data have shape {data.shape}, the checkpoints take {scores.shape}.")
    t, exact = audit_times(scores, data, times), exact or EmpiricalScore(data, process)
    same = None if samples is None else same_noise(samples, data, features)
    require(samples is None or len(samples) == len(scores), f"There must be samples of each of {len(scores)} members.")
    found: dict[str, list[Level]] = {place: [] for place in PLACES}
    summaries: list[dict[str, Estimate]] = []
    with report_progress(3 * len(t), progress) as step:
        for place, level, parts in _places(scores, data, t, images, draws, seed, batch):
            rows: dict[int, list[Level]] = {}
            for draw, x in parts:
                rows.setdefault(draw, []).append(_measure(scores, exact, x, t[level]))
            by_draw = [{name: torch.cat([part[name] for part in row]) for name in row[0]} for row in rows.values()]
            measured = {name: torch.stack([row[name] for row in by_draw]) for name in by_draw[0]}
            summaries.append(_summary(measured))
            found[place].append({k: v.mean(0) for k, v in measured.items() if k not in ("rank_V", "rank_C")})
            step(f"{place}, t = {float(t[level]):.4g}")
    tables = {name: stacked([s[name] for s in summaries], (len(PLACES), len(t))) for name in summaries[0]}
    pairs = zip(found["between"], found["data"], strict=True)
    contrast = [mean_of_finite((between["variance"] / on["variance"]).log()).exp() for between, on in pairs]
    columns = variables(tables, "place", "t") | variables({"contrast": stacked(contrast)}, "t") | _without_one(found)
    attrs = {"members": len(scores), "trainings": scores.groups.units, "names": ", ".join(_names(scores)), "seed": seed}
    attrs |= {"images": len(found["data"][0]["variance"]), "draws": draws, "n": data.n, "d": data.d}
    curves = xarray.Dataset(columns, {**coordinates(process, t), "place": list(PLACES)}, attrs)
    label = {"long_name": "V follows C (1), opposes it (-1), or neither is beyond doubt (0)", "units": "1"}
    verdicts = _verdicts(curves)
    curves["verdict"] = (("place", "t"), verdicts, label)
    cells = zip(itertools.product(PLACES, t.tolist()), itertools.chain(*verdicts), strict=True)
    return Agreement(curves, {at: verdict > 0 for at, verdict in cells if not math.isnan(verdict)}, same)


def _names(scores: Scores) -> list[str]:
    return scores.names if isinstance(scores, Checkpoints) else [f"member {m}" for m in range(len(scores))]


def _places(
    scores: Scores, data: Empirical, t: Tensor, images: int, draws: int, seed: int, batch: int
) -> Iterator[tuple[str, int, Iterator[tuple[int, Tensor]]]]:
    """Yield place, level, and chunks (draw, x) of the points there."""
    g = rng.stream(seed, "audit of agreement")
    x0 = data[data.choose(images, g)].to(data.dtype)
    keys, others = rng.keys((len(t), draws, len(x0)), g, data.device), distinct(data)
    distance, index = nearest(x0.flatten(1), others, 2)
    apart = distance.shape[1] > 1 and bool((distance[:, 1].isfinite() & (distance[:, 1] > 0)).all())
    require(apart, "All training images are equal; there is no place between them.")
    for place, centres in (("data", x0), ("between", (x0 + others[index[:, 1]].to(x0)) / 2)):
        noisy = NoisyImages(scores.process, t, centres, keys)
        for level in range(len(t)):
            yield place, level, ((draw, x) for draw, _, x, _ in noisy.parts(level, batch))
    g = rng.stream(seed, "audit of agreement, path")
    x_T = scores.process.prior((images, *data.shape), device=data.device, dtype=data.dtype, generator=g)
    for level, state in enumerate(mean_path(scores, x_T, t)):
        yield "path", level, ((0, x) for x in state.split(batch))


def mean_path(scores: Scores, x_T: Tensor, times: Tensor) -> list[Tensor]:
    """Return states of the PF-ODE of the mean score at the ascending ``times``, each like ``x_T``."""
    process = scores.process
    on_grid = scores.at if isinstance(scores, Checkpoints) else lambda t: t
    ends = on_grid(torch.cat([torch.tensor([process.T], dtype=torch.float64), times.flip(0)]))
    between = [torch.empty(0, dtype=torch.float64)]
    for first, last in itertools.pairwise(process.sigma(ends) / process.alpha(ends)):
        count = max(1, math.ceil(float((first / last).log()) / STRIDE))
        between.append(torch.linspace(float(first.log()), float(last.log()), count + 1, dtype=torch.float64)[1:-1])
    inner = on_grid(process.time(torch.cat(between).exp()))
    steps, wanted = torch.cat([ends, inner]).unique().flip(0), set(times.tolist())
    kept: dict[float, Tensor] = {float(ends[0]): x_T}

    def keep(_: int, t: float, x: Tensor) -> None:
        if t in wanted:
            kept[t] = x

    if len(steps) > 1:
        with torch.no_grad():
            pf_ode(scores.mean_score, x_T, steps=steps, method="exponential", callback=keep)
    return [kept[t] for t in times.tolist()]


def _measure(scores: Scores, exact: EmpiricalScore, x: Tensor, t: Tensor) -> Level:
    """Return all quantities at the places ``x (B, *shape)``, with B in front."""
    with torch.no_grad():
        s = scores(x, t).to(x.device, torch.float64).flatten(2)
    for name, member in zip(_names(scores), s, strict=True):
        require(bool(member.isfinite().all()), f"{name} returned NaN or infinite values at t = {float(t):g}.")
    ideal, cov = exact.with_covariance(x.double(), t)
    groups, scale = scores.groups, float(scores.process.sigma(t)) ** 2 / s.shape[-1]
    v, c = groups.factors(s).square().sum(0), cov.diag().flatten(1)
    bias = (s.mean(0) - ideal.flatten(1)).square() - groups.of_mean(s)
    found = {"variance": scale * v.sum(1), "bias": scale * bias.sum(1), "target": scale * c.sum(1)}
    found["rank_V"] = estimate.centred_ranks(v)
    found["rank_C"] = estimate.centred_ranks(torch.where(c.sum(1, keepdim=True) > TINY, c, 0.0))
    if len(s) >= 4 and not groups.grouped:
        found |= {"skewness": skewness(s).mean(1), "kurtosis": kurtosis(s).mean(1)}
    if groups.grouped:
        found["between_groups"], found["within_groups"] = (scale * part.sum(1) for part in groups.split(s))
    if kept := groups.without():
        found["without"] = scale * torch.stack([groups.keep(k).factors(s[k]).square().sum((0, 2)) for k in kept], 1)
    return found


def _summary(level: Level) -> dict[str, Estimate]:
    """Return estimates of the quantities at one level, over places."""
    each = {name: value.mean(0) for name, value in level.items() if value.ndim == 2}
    shares = [name for name in ("between_groups", "within_groups") if name in each]
    found = {name: mean_of_finite(value) for name, value in each.items() if name not in shares}
    found["V_over_bias"] = fieller_ratio(each["variance"], each["bias"])
    found["V_over_C"] = fieller_ratio(each["variance"], each["target"])
    found["rank"] = spearman(each["variance"], each["target"], FEWEST)
    found["rank_coordinates"], found["rank_specific"] = estimate.matched_correlation(level["rank_V"], level["rank_C"])
    return found | {name: fieller_ratio(each[name], each["variance"], -math.inf) for name in shares}


def _without_one(found: dict[str, list[Level]]) -> dict[str, Any]:
    """Return the jackknife error of the variance over members (or groups), and the ranks without each."""
    if "without" not in found["data"][0]:
        return {}
    rows = [found[place] for place in PLACES]
    means = torch.stack([torch.stack([level["without"].mean(0) for level in row]) for row in rows])
    ranks = [[[spearman(v, at["target"], FEWEST).value for v in at["without"].T] for at in row] for row in rows]
    words = "standard error over members of the variance (jackknife)", "rank without one member, or one group"
    error, rank = ({"long_name": about, "units": "1"} for about in words)
    errors = ("place", "t"), estimate.jackknife_se(means, -1).cpu().numpy(), error
    return {"variance_members": errors, "rank_without": (("place", "t", "unit"), ranks, rank)}


def _verdicts(ds: xarray.Dataset) -> list[list[float]]:
    """Return 1 where V follows C, -1 where it opposes, 0 where neither is beyond doubt, NaN where C is not resolved."""
    low, high = (torch.from_numpy(ds[f"rank_{end}"].values).atanh() for end in ("low", "high"))
    z = estimate.Z95 * (low + high) / (high - low)
    z[torch.from_numpy((ds.target <= RESOLVED).values)] = math.nan
    return (0 * z + z.sign().where(estimate.holm(torch.special.erfc(z.abs() / math.sqrt(2))), 0 * z)).tolist()


@dataclass(frozen=True)
class SameNoise:
    """The result of :func:`same_noise`: ``ratio`` and ``correlation`` over all pairs of members, ratios ``by_pair``."""

    ratio: Estimate
    correlation: Estimate
    nearest: Estimate  # the share of starts for which all members' samples have the same nearest training image
    by_pair: dict[tuple[int, int], Estimate]
    members: int
    n: int
    features: str = "pixels"


def same_noise(samples: Tensor, data: Empirical, features: Features = "pixels") -> SameNoise:
    """Compare samples of members from the same noise: ``samples (M, n, *shape)``, ``[:, i]`` from the i-th start.

    ``data`` is the training set in the same units. Distances are between ``features``
    (:func:`~vkernel.metrics.features.extractor`), correlations over them, less each member's mean sample. Errors are
    over starts: jackknifed for ratios, Student's for correlations, Wilson's for the share."""
    require(isinstance(samples, Tensor), f"samples must be a tensor (M, n, *shape), not {type(samples).__name__}.")
    shape = tuple(samples.shape[2:]) or (1,)
    require(samples.ndim >= 2 and shape == data.shape, f"Samples are of shape {shape}, the data of {data.shape}.")
    m, n = samples.shape[:2]
    require(m >= 2 and n >= 3, f"Two members and three starts are needed; got {m} and {n}.")
    finite = bool(samples.isfinite().all())
    require(finite, "Samples hold NaN or infinite values: a member diverged; leave it out.")
    extract, images = extractor(features).fit(data), samples.detach().to(data.device).reshape(m, n, *shape)
    x = torch.stack([extract.over(member).double() for member in images])
    pairs = list(itertools.combinations(range(m), 2))
    ratios = torch.stack([_ratios(x[a], x[b]) for a, b in pairs])  # whole, then without each start
    centred = x - x.mean(1, keepdim=True)
    unit = centred / centred.norm(dim=2, keepdim=True)
    mean: Estimate = Estimate.of_mean(torch.stack([(unit[a] * unit[b]).sum(1) for a, b in pairs]).mean(0))
    correlation: Estimate = Estimate.of_error(mean.value, mean.se, n - 1, -1.0, 1.0)
    points = distinct(data if extract.plain else extract.over(data))
    index = torch.stack([nearest(member, points, 1)[1][:, 0] for member in x])
    share: Estimate = Estimate.of_share((index == index[0]).all(0).sum(), n)
    ratio, *each = (jackknife(r[0], r[1:], low=0.0) for r in (ratios.mean(0), *ratios))
    return SameNoise(ratio, correlation, share, dict(zip(pairs, each, strict=True)), m, n, extract.name)


def _ratios(a: Tensor, b: Tensor) -> Tensor:
    """Return the ratio of distances for samples ``(n, d)``, and n more, each without one start."""
    n, own = len(a), (a - b).norm(dim=1)
    across, along = torch.zeros_like(own), torch.zeros_like(own)
    for rows in torch.arange(n, device=a.device).split(ROWS):
        distance = torch.cdist(a[rows], b)
        distance[torch.arange(len(rows)), rows] = 0
        across[rows] += distance.sum(1)
        along += distance.sum(0)
    less = (own.sum() - own) / (n - 1), (across.sum() - across - along) / ((n - 1) * (n - 2))
    return torch.cat([(own.mean() / (across.sum() / (n * (n - 1)))).reshape(1), less[0] / less[1]])
