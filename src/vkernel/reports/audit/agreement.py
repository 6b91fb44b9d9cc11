r"""Would another run of the same training have answered the same? And do runs differ where the theory says?

At a place (x, t), M checkpoints have the scores :math:`\hat s_m` with mean :math:`s_{avg}` and unbiased covariance V
(:mod:`vkernel.adapters.checkpoints`); the training set has the score s and the target covariance C. In units of
predicted noise, per coordinate,

.. math:: \mathrm{variance} = \frac{\sigma^2}{d} \operatorname{tr} V, \quad
          \mathrm{bias} = \frac{\sigma^2}{d} \big(|s_{avg} - s|^2 - \operatorname{tr} \mathrm{Cov}\,s_{avg}\big), \quad
          \mathrm{target} = \frac{\sigma^2}{d} \operatorname{tr} C ,

without bias, all three: how much runs disagree, how far they err together, how noisy their targets are. Places are
noised training images (``data``); the middle between an image and the nearest other one, with the same noise
(``between``), where C is large; and states of the PF-ODE of :math:`s_{avg}` from the prior (``path``).

``rank`` is Spearman's correlation of tr V with tr C over places of a kind at one level. Its interval is Fisher's z with
the variance :math:`(1 + \rho^2/2)/(n-3)` of Bonett and Wright (2000): over 2,000 draws of normal pairs, n = 20, 50,
128 and correlations 0 to .9, it held the truth in 95 to 96 % of cases, Fisher's own 91 to 96 %, a bootstrap of places
93 to 97 % (of 400) at 400 times the price. ``rank_coordinates`` is the same over the pixels of one image,
between the diagonals of V and C, averaged over images: pixels of an image are not independent, images are.
Pixels at the border are quiet in every image, and that alone correlates. ``rank_specific`` takes away what the V of one
image shares with the C of *another*, :math:`\mathrm{mean}\,\rho_{ii} - \mathrm{mean}_{i \ne j}\,\rho_{ij}`, with the
error of this U-statistic; 0 means that V knows nothing of the image itself. More than 0 is no proof that C is the
cause: strokes and edges of the image may raise both.

**Read with care.** Errors and intervals (95 %) are over places and hold for *these* members; ``rank_without`` and
``variance_members`` leave out a member (or a group) at a time. A rank says *where*, not *how much*: ``V_over_C`` is
:math:`\operatorname{E\,tr} V/\operatorname{E\,tr} C`, with Fieller's interval. Theory gives trained models a V that is
C (and the misfit) smeared by the model's kernel (§8.2), not C(x,t) itself: of that a correlation is a first test. C
underflows beside a training image; such places have no rank. Below float32's resolution no network has felt C: levels
with a smaller mean ``target`` count in no verdict. Verdicts are corrected over levels and places by Holm's method.

``same_noise`` asks the same of samples (Kadkhodaie et al. 2024, Zhang et al. 2024): those of two runs from the same
:math:`x_T`, are they nearer to each other than those from different ones?
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vkernel.adapters.checkpoints import Checkpoints
from vkernel.core import rng
from vkernel.core.errors import require
from vkernel.core.estimate import Estimate, student_quantile
from vkernel.core.progress import Reporter
from vkernel.data.empirical import Empirical
from vkernel.metrics.neighbours import distinct, nearest
from vkernel.reports.audit.levels import ENDS, Noised, chosen, coordinates, opened, times_of, whole
from vkernel.reports.audit.same_noise import SameNoise, same_noise
from vkernel.score.empirical import EmpiricalScore
from vkernel.train.ensemble import kurtosis, skewness

if TYPE_CHECKING:
    import xarray

__all__ = ["PLACES", "Agreement", "SameNoise", "agreement", "same_noise"]

PLACES = ("data", "between", "path")
FELT = torch.finfo(torch.float32).eps  # of the target: less noise than a network in float32 can feel
FEWEST = 10  # places of a rank correlation
CHANCE = 0.05
_TINY = 1e-280  # traces below have lost digits to underflow
_UNKNOWN = Estimate(math.nan, math.nan, math.nan, math.nan)
_MEANS = {
    "variance": "squared disagreement per coordinate of predicted noise, over members",
    "bias": "squared common error per coordinate of predicted noise, less what chance adds",
    "target": "variance per coordinate of the targets of predicted noise",
    "V_over_bias": "variance over bias",
    "V_over_C": "tr V over tr C",
    "rank": "Spearman's correlation of tr V with tr C over places",
    "rank_coordinates": "Spearman's correlation of V with C over the coordinates of an image",
    "rank_specific": "the same, less that of V with the C of other images",
    "skewness": "skewness over members, mean over coordinates",
    "kurtosis": "excess kurtosis over members, mean over coordinates",
    "between_groups": "share of the variance between groups",
    "within_groups": "share of the variance within groups",
}
_CONTRAST = "variance between over variance on data, geometric mean over images"


@dataclass(frozen=True)
class Agreement:
    """What :func:`agreement` found.

    ``dataset`` runs along ``place`` and ``t``; ``follows[place, t]`` says whether V follows C there beyond doubt, for
    the levels where C can be felt; ``same`` is what samples from the same noise say, if there were any.
    """

    dataset: xarray.Dataset
    follows: dict[tuple[str, float], bool]
    words: list[str]
    same: SameNoise | None = None


def agreement(
    nets: Checkpoints,
    data: Empirical,
    *,
    times: Any = None,
    images: int = 96,
    samples: Tensor | None = None,
    seed: int = 0,
    draws: int = 1,
    batch: int = 128,
    exact: EmpiricalScore | None = None,
    step: Reporter | None = None,
) -> Agreement:
    """How much the members disagree at each noise level, and whether they do where C is large.

    ``data`` is what they were trained on, in their pixel units. ``images`` places of each kind; noise is drawn
    ``draws`` times for each image (a path has one), and averaged over before anything else. ``samples (M, n,
    *shape)``, each member's from the same n starts, are handed to ``same_noise``. ``exact`` is the ideal
    score, if it was made already; ``step`` is told of each of 3 × levels units of work.
    """
    import xarray

    require(isinstance(nets, Checkpoints), f"agreement needs Checkpoints([…]), not {type(nets).__name__}.")
    process, data, _ = opened(nets, data, None)
    require(nets.shape in (None, data.shape), f"The data have shape {data.shape}, the checkpoints take {nets.shape}.")
    whole(images=(images, FEWEST), draws=(draws, 1), batch=(batch, 1))
    t, exact = times_of(nets, data, times), exact or EmpiricalScore(data, process)
    same = None if samples is None else same_noise(samples, data)
    require(samples is None or len(samples) == len(nets), f"There must be samples of each of {len(nets)} members.")
    found: dict[str, list[Level]] = {place: [] for place in PLACES}
    told: dict[str, list[dict[str, Estimate]]] = {place: [] for place in PLACES}
    for place, level, parts in _places(nets, data, t, images, draws, seed, batch):
        measured = _level(nets, exact, parts, t[level])
        told[place].insert(0 if place == "path" else level, _summary(measured))  # a path begins with much noise
        kept = {name: measured[name].mean(0) for name in measured if name not in ("rank_V", "rank_C")}
        found[place].insert(0 if place == "path" else level, kept)
        if step is not None:
            step(f"{place}, t = {float(t[level]):.4g}")
    columns: dict[str, Any] = {}
    for name in (name for name in _MEANS if name in told["data"][0]):
        columns |= _along(("place", "t"), name, _MEANS[name], [[e[name] for e in row] for row in told.values()])
    pairs = zip(found["between"], found["data"], strict=True)
    logs = [(between["variance"] / on["variance"]).log() for between, on in pairs]
    columns |= _along(("t",), "contrast", _CONTRAST, [[_grown(_mean(log)) for log in logs]])
    columns |= _members(found)
    attrs = {"members": len(nets), "trainings": nets.design.units, "names": ", ".join(nets.names), "seed": seed}
    attrs |= {"images": len(logs[0]), "draws": draws, "n": data.n, "d": data.d}
    dataset = xarray.Dataset(columns, {**coordinates(process, t), "place": list(PLACES)}, attrs)
    label = {"long_name": "V follows C (1), opposes it (-1), or neither is beyond doubt (0)", "units": "1"}
    dataset["verdict"] = (("place", "t"), _verdicts(dataset), label)
    verdicts = {(str(p), float(u)): float(dataset.verdict.sel(place=p, t=u)) for p in PLACES for u in dataset.t.values}
    follows = {key: verdict > 0 for key, verdict in verdicts.items() if not math.isnan(verdict)}
    return Agreement(dataset, follows, _words(dataset, follows, same), same)


# --- places ---------------------------------------------------------------------------------------------------------

Level = dict[str, Tensor]  # what was measured at one level: (draws, places), …
Parts = Iterator[tuple[int, Tensor]]  # (draw, x)


def _places(
    nets: Checkpoints, data: Empirical, t: Tensor, images: int, draws: int, seed: int, batch: int
) -> Iterator[tuple[str, int, Parts]]:
    """Place, level, and the queries there by chunks."""
    g = rng.stream(seed, "audit of agreement")
    x0 = data.images(chosen(data, images, g)).to(data.dtype)
    keys = rng.keys((len(t), draws, len(x0)), g, data.device)
    for place, centres in (("data", x0), ("between", (x0 + _neighbours(x0, data)) / 2)):
        noised = Noised(nets.process, t, centres, keys)
        for level in range(len(t)):
            yield place, level, ((draw, x) for draw, _, x, _ in noised.parts(level, batch))
    g = rng.stream(seed, "audit of agreement, path")
    start = nets.process.prior((images, *data.shape), device=data.device, dtype=data.dtype, generator=g)
    for level, state in zip(reversed(range(len(t))), nets.path(start, t), strict=True):
        yield "path", level, ((0, x) for x in state.split(batch))


def _neighbours(x0: Tensor, data: Empirical) -> Tensor:
    """The nearest other training image of each, like x0."""
    others = distinct(data)
    distance, index = nearest(x0.flatten(1), others, 2)
    away = distance[:, 1:].isfinite().all() and (distance[:, 1:] > 0).all()
    require(bool(away) and distance.shape[1] > 1, "All training images are equal; there is no place between them.")
    return others.images(index[:, 1]).to(x0)


def _level(nets: Checkpoints, exact: EmpiricalScore, parts: Parts, t: Tensor) -> Level:
    rows: dict[int, list[Level]] = {}
    for draw, x in parts:
        rows.setdefault(draw, []).append(_measure(nets, exact, x, t))
    return {
        name: torch.stack([torch.cat([part[name] for part in row]) for row in rows.values()]) for name in rows[0][0]
    }


def _measure(nets: Checkpoints, exact: EmpiricalScore, x: Tensor, t: Tensor) -> Level:
    """Everything at the places ``x (B, *shape)``, with B in front."""
    with torch.no_grad():
        s = nets(x, t).to(x.device, torch.float64).flatten(2)
    bad = (~s.isfinite()).flatten(1).any(1).nonzero().flatten().tolist()
    require(not bad, f"{nets.names[bad[0]] if bad else ''} returned NaN or infinite values at t = {float(t):g}.")
    ideal, cov = exact.with_covariance(x.double(), t)
    design, scale = nets.design, float(nets.process.sigma(t)) ** 2 / s.shape[-1]
    v, c = design.factors(s).square().sum(0), cov.diag().flatten(1)
    bias = (s.mean(0) - ideal.flatten(1)).square() - design.of_mean(s)
    found = {"variance": scale * v.sum(1), "bias": scale * bias.sum(1), "target": scale * c.sum(1)}
    found |= {"rank_V": _ranks(v), "rank_C": _ranks(torch.where(c.sum(1, keepdim=True) > _TINY, c, 0.0))}
    if len(s) >= 4 and not design.grouped:
        found |= {"skewness": skewness(s).mean(1), "kurtosis": kurtosis(s).mean(1)}
    if design.grouped:
        found["between_groups"], found["within_groups"] = (scale * part.sum(1) for part in design.split(s))
    if kept := design.without():
        left = [design.keep(some).factors(s[some]).square().sum((0, 2)) for some in kept]
        found["without"] = scale * torch.stack(left, 1)
    return found


# --- statistics -----------------------------------------------------------------------------------------------------


def _summary(level: Level) -> dict[str, Estimate]:
    each = {name: value.mean(0) for name, value in level.items() if value.ndim == 2}
    found = {name: _mean(value) for name, value in each.items() if name not in ("between_groups", "within_groups")}
    found |= {"V_over_bias": ratio(each["variance"], each["bias"]), "V_over_C": ratio(each["variance"], each["target"])}
    found["rank"] = rank(each["variance"], each["target"])
    found["rank_coordinates"], found["rank_specific"] = within(level["rank_V"], level["rank_C"])
    shares = [name for name in ("between_groups", "within_groups") if name in each]
    return found | {name: ratio(each[name], each["variance"], -math.inf) for name in shares}


def _ranks(a: Tensor) -> Tensor:
    """Ranks along the last axis (ties share theirs), centred and of norm 1, in float32; NaN where all are equal."""
    from scipy.stats import rankdata

    ranks = torch.from_numpy(rankdata(a.detach().cpu().numpy(), axis=-1)).to(a.device)
    centred = ranks - ranks.mean(-1, keepdim=True)
    return (centred / centred.norm(dim=-1, keepdim=True)).float()


def rank(a: Tensor, b: Tensor) -> Estimate:
    """Spearman's correlation of ``a`` with ``b (n,)`` where b has not underflowed; Bonett and Wright's interval."""
    kept = b > _TINY
    n = int(kept.sum())
    rho = float((_ranks(a[kept]).double() * _ranks(b[kept]).double()).sum()) if n >= FEWEST else math.nan
    if math.isnan(rho):
        return _UNKNOWN
    most = 1 - 6 / (n**3 - n)  # half of what one exchange of neighbours would change: 1 is not certainty
    middle = math.atanh(max(-most, min(most, rho)))
    spread = math.sqrt((1 + rho**2 / 2) / (n - 3))
    half = student_quantile(10**9) * spread
    return Estimate(rho, (1 - math.tanh(middle) ** 2) * spread, math.tanh(middle - half), math.tanh(middle + half))


def within(v: Tensor, c: Tensor) -> tuple[Estimate, Estimate]:
    """Mean correlation of ranks ``(draws, n, d)`` of the same image, and that less the one of different images."""
    known = ~(v.isnan().any(-1) | c.isnan().any(-1)).any(0)
    n = int(known.sum())
    if n < 3:
        return _UNKNOWN, _UNKNOWN
    rho = torch.einsum("kid,kjd->ij", v[:, known].double(), c[:, known].double()) / len(v)
    own = rho.diagonal()
    across, along = ((rho.sum(axis) - own) / (n - 1) for axis in (0, 1))
    return _mean(own), _mean(own - across - along + across.mean())  # Hájek's projection of the U-statistic


def ratio(a: Tensor, b: Tensor, least: float = 0.0) -> Estimate:
    """The mean of ``a`` over that of ``b (n,)`` with Fieller's interval, cut at ``least``; NaN where b underflows."""
    size, other = float(b.abs().max()), float(a.abs().max())
    if not size > _TINY or not other > 0:
        return Estimate.exact(0.0) if size > _TINY else _UNKNOWN
    a, b, n = a / other, b / size, len(a)
    ((aa, ab), (_, bb)), unit = torch.cov(torch.stack([a, b])).div(n).tolist(), other / size
    top, bottom, square = float(a.mean()), float(b.mean()), student_quantile(n - 1) ** 2
    value = top / bottom if bottom > 0 else math.inf
    p, q, r = bottom**2 - square * bb, top * bottom - square * ab, top**2 - square * aa
    root = math.sqrt(max(q * q - p * r, 0.0))
    if p > 0 and bottom > 0:
        low, high = (q - root) / p, (q + root) / p
        se = math.sqrt(max(aa - 2 * value * ab + value**2 * bb, 0.0)) / bottom
    else:  # the denominator may be zero: no upper end
        ends = sorted(((q - root) / p, (q + root) / p)) if p < 0 else (0.0, 0.0)
        low, high, se = (ends[1] if ends[0] < 0 < ends[1] else least), math.inf, math.inf
    return Estimate(value * unit, se * unit, max(low * unit, least), high * unit)


def _mean(values: Tensor) -> Estimate:
    """The mean of what is finite."""
    kept = values[values.isfinite()]
    return Estimate.of_mean(kept.double()) if len(kept) > 1 else _UNKNOWN


def _grown(log: Estimate) -> Estimate:
    """exp of an estimate."""
    value = math.exp(log.value)
    return Estimate(value, value * log.se, math.exp(log.low), math.exp(log.high))


def _along(dims: tuple[str, ...], name: str, words: str, table: list[list[Estimate]]) -> dict[str, Any]:
    found = {}
    for part, start in ENDS.items():
        values = [[getattr(e, part) for e in row] for row in table]
        label = {"long_name": start + words, "units": "1"}
        found[name if part == "value" else f"{name}_{part}"] = (dims, values if len(dims) > 1 else values[0], label)
    return found


def _members(found: dict[str, list[Level]]) -> dict[str, Any]:
    """What leaving out each member (or group) does: the jackknife error of the variance, and the ranks."""
    if "without" not in found["data"][0]:
        return {}
    means = torch.stack([torch.stack([level["without"].mean(0) for level in row]) for row in found.values()])
    n = means.shape[-1]
    error = ((n - 1) / n * (means - means.mean(-1, keepdim=True)).square().sum(-1)).sqrt()
    ranks = [[[rank(v, level["target"]).value for v in level["without"].T] for level in row] for row in found.values()]
    words = {"long_name": "standard error over members of the variance (jackknife)", "units": "1"}
    about = {"long_name": "rank without one member, or one group", "units": "1"}
    return {
        "variance_members": (("place", "t"), error.tolist(), words),
        "rank_without": (("place", "t", "unit"), ranks, about),
    }


# --- verdicts -------------------------------------------------------------------------------------------------------


def _verdicts(ds: xarray.Dataset) -> list[list[float]]:
    """1 where V follows C, -1 where it opposes, 0 where neither is beyond doubt (Holm), NaN where C is not felt."""
    ends = torch.stack([torch.from_numpy(ds[f"rank_{end}"].values) for end in ("low", "high")]).atanh()
    z = student_quantile(10**9) * (ends[0] + ends[1]) / (ends[1] - ends[0])  # of the interval
    z[torch.from_numpy((ds.target <= FELT).values)] = math.nan
    chance, count, verdict = torch.special.erfc(z.abs() / math.sqrt(2)), int((~z.isnan()).sum()), 0 * z
    for k, place in enumerate(chance.flatten().argsort()[:count]):  # NaN come last
        if float(chance.flatten()[place]) * (count - k) > CHANCE:
            break
        verdict.view(-1)[place] = z.flatten()[place].sign()
    return verdict.tolist()


def _words(ds: xarray.Dataset, follows: dict[tuple[str, float], bool], same: SameNoise | None) -> list[str]:
    who = f"{ds.members} checkpoints" + (f" in {ds.trainings} groups" if ds.trainings < ds.members else "")
    on, levels = ds.sel(place="data"), ds.sizes["t"]
    ends = " and ".join(f"{_told(on, 'V_over_bias', k)} at t = {float(on.t[k]):.3g}" for k in (0, levels - 1))
    words = [f"On noised training images the variance of {who} is {ends} times their common squared error."]
    counts = ", ".join(f"{place} {_count(follows, place)}" for place in PLACES)
    felt, against = ds.where(ds.verdict.notnull()), int((ds.verdict < 0).sum())
    if not follows:
        words.append("C is nowhere as large as float32 can feel: at these levels theory has nothing to say about V.")
    else:
        words += [
            f"Over places V follows C beyond doubt at {sum(follows.values())} of {len(follows)} levels where C can be "
            f"felt (5 %, corrected by Holm): {counts}; it opposes C at {against}. Ranks correlate by "
            f"{_range(felt, 'rank')}.",
            f"Over the pixels of an image V correlates with C by {_range(felt, 'rank_coordinates')}; less what it has "
            f"in common with the C of other images, by {_range(felt, 'rank_specific')}, positive at "
            f"{int((felt.rank_specific_low > 0).sum())} of {int(felt.rank_specific.notnull().sum())} (each by its own "
            "95 % interval).",
            f"There tr V is {_range(felt, 'V_over_C')} times tr C.",
        ]
    more, less = int((ds.contrast_low > 1).sum()), int((ds.contrast_high < 1).sum())
    words.append(
        f"Between neighbouring images V is {_range(ds, 'contrast')} times as large as on them: larger beyond doubt at "
        f"{more}, smaller at {less} of {levels} levels (each by its own 95 % interval)."
    )
    if "rank_without" in ds and follows:
        lost = felt.rank_without
        words.append(
            f"Without one or another training these ranks lie within {float(lost.min()):.2f} … {float(lost.max()):.2f}."
        )
    if "kurtosis" in ds:
        few = f"; of {ds.members} numbers these say little" if ds.members < 10 else ""
        words.append(
            f"Skewness over members is {_range(ds, 'skewness')}, excess kurtosis {_range(ds, 'kurtosis')}{few}."
        )
    else:
        words.append("Skewness and kurtosis over members need four independent ones or more.")
    if "between_groups" in ds:
        words.append(
            f"Of the variance, {_range(ds, 'between_groups')} lies between groups; errors count {ds.trainings} groups."
        )
    words.append(
        f"All intervals are over places, for these {ds.members} checkpoints: other trainings could differ by more."
    )
    return words + ([] if same is None else [same.words])


def _told(ds: xarray.Dataset, name: str, k: int) -> str:
    value, low, high = (float(ds[name + end][k]) for end in ("", "_low", "_high"))
    return f"{value:.2g} [{low:.2g}, {high:.2g}]"


def _count(follows: dict[tuple[str, float], bool], place: str) -> str:
    own = [found for (where, _), found in follows.items() if where == place]
    return f"{sum(own)} of {len(own)}"


def _range(ds: xarray.Dataset, name: str) -> str:
    return f"{float(ds[name].min()):.2g} … {float(ds[name].max()):.2g}"
