"""A profile as sentences, as a table for the terminal, and as one self-contained page."""

from __future__ import annotations

from collections.abc import Callable
from itertools import zip_longest
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Group

    from vkernel.reports.profile import Profile

SHOWN = 12  # groups of duplicates, and rows of a table, that a report shows


def sentences(p: Profile) -> list[str]:
    """Return the findings in words."""
    scale = ", values as they are"
    if p.scale is not None:
        scale = f", stored integers mapped to [{p.scale[0]:g}, {p.scale[1]:g}]"
    out = [f"{p.n:,} points in {p.d:,} dimensions{scale}, under {p.process!r}."]
    if p.distinct < p.n:
        groups = f"in {len(p.duplicates):,} groups: they act as weights."
        out.append(f"{p.n - p.distinct:,} points are exact copies of others, {groups}")
    if p.near_duplicates:
        out.append(f"{len(p.near_duplicates):,} groups of points are closer to one another than chance explains.")
    peak = max(p.levels, key=lambda level: level.noise_fraction.value)
    rho = f"{100 * peak.noise_fraction.value:.2g} ± {100 * peak.noise_fraction.se:.1g} %"
    if p.distinct == 1:
        out.append("There is one point: its target carries no noise, and a model can only copy it.")
    elif p.window is None:
        out.append(f"Noise never makes up 1 % of the training target: at most {rho}, at t = {peak.t:.3g}.")
    else:
        out.append(
            f"The training target carries noise for t between {p.window[0]:.3g} and {p.window[1]:.3g}; the noise "
            f"fraction is largest at t = {peak.t:.3g}, where noise makes up {rho} of the target."
        )
    if p.collapse_time is None:
        out.append("At no t does the point that made x hold half of the posterior: the data are denser than eps.")
    elif p.distinct > 1:
        out.append(
            f"Below t = {p.collapse_time:.3g} the exact score has chosen one training point (mean weight above ½), "
            "and a sampler that follows it copies this point."
        )
    if p.intrinsic_dimension is not None:
        out.append(f"Near a point the data look {p.intrinsic_dimension.value:.1f}-dimensional.")
    if p.isolated and p.distinct > 1:
        who, when = p.isolated[0].index, f"{p.isolated[0].t:.3g}"
        out.append(f"Point {who} is the most isolated: a sampler near it is committed to it from t = {when} on.")
    if p.boundary_pairs:
        pair = p.boundary_pairs[0]
        out.append(
            f"Points {pair.i} and {pair.j} carry the largest share of the target noise, {100 * pair.share:.2g} %: "
            "between them a model has most freedom to interpolate."
        )
    return out


def table(p: Profile) -> Group:
    """Return the sentences, the curves at about twelve levels, and the points and pairs at risk, for the terminal."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    title = f"along t ({p.queries:,} queries per level; points: their effective number; entropy in nats)"
    curve = Table(title=title, title_justify="left")
    for name in ("t", "noise fraction", "points", "mmse", "entropy", "own weight"):
        curve.add_column(name, justify="right", no_wrap=True)
    for row in _rows(p):
        curve.add_row(*row)
    risks = Table(title="points and pairs at risk", title_justify="left")
    for name in ("isolated point", "from t", "boundary pair", "share of noise"):
        risks.add_column(name, justify="right")
    points = [(str(one.index), f"{one.t:.3g}") for one in p.isolated]
    pairs = [(f"{q.i} – {q.j}", f"{100 * q.share:.2g} ± {100 * q.share_se:.1g} %") for q in p.boundary_pairs]
    for left, right in zip_longest(points, pairs, fillvalue=("", "")):
        risks.add_row(*left, *right)
    return Group(Text("\n".join(sentences(p))), curve, risks)


def _rows(p: Profile) -> list[list[str]]:
    """Return about a dozen levels, evenly spaced, as cells of a table."""
    last = len(p.levels) - 1
    rows = []
    for k in sorted({round(k * last / (SHOWN - 1)) for k in range(SHOWN)}):
        level = p.levels[k]
        rho = level.noise_fraction
        cells = [f"{e.value:.3g}" for e in (level.ess, level.mmse, level.entropy, level.own_weight)]
        rows.append([f"{level.t:.3g}", f"{rho.value:.2g} ± {rho.se:.1g}" if rho.value > 1e-6 else "< 1e-6", *cells])
    return rows


def page(p: Profile) -> str:
    """Return the HTML report; titles and captions of its figures stand in ``templates/profile.html``."""
    from vkernel.reports import html

    title = f"Profile of {p.data.name}" if p.data.name else "Profile of a training set"
    figures = {name: html.picture(draw) for name, draw in _figures(p).items()}
    return html.page(
        "profile.html", title=title, p=p, sentences=sentences(p), rows=_rows(p), figures=figures, shown=SHOWN
    )


def _figures(p: Profile) -> dict[str, Callable[[], Figure]]:
    """Return the functions that draw the figures of the page, by name."""
    from vkernel import plots

    names = ("t", "noise_fraction", "noise_fraction_se", "ess", "mmse", "entropy")
    t, rho, rho_se, ess, mmse, entropy = (p.curves[name] for name in names)
    found: dict[str, Callable[[], Figure]] = {
        "curves": lambda: plots.noise_profile(t, rho, rho_se, ess, mmse, entropy, p.collapse_time, p.window, p.distinct)
    }
    if len(p.neighbour_distances):
        found["neighbours"] = lambda: plots.distances(p.neighbour_distances)
    if p.data.shape == (2,):
        found["plane"] = lambda: _plane(p)
    if not (len(p.data.shape) == 2 or (len(p.data.shape) == 3 and p.data.shape[0] in (1, 3))):
        return found

    def images(indices: list[int]) -> Tensor:
        return p.data[torch.tensor(indices)].float()

    def pairs(rows: list[tuple[int, int, str]]) -> Callable[[], Figure]:
        one, two, titles = zip(*rows, strict=True)
        return lambda: plots.pairs(images(list(one)), images(list(two)), titles)

    groups = [*p.duplicates, *(group.indices for group in p.near_duplicates)]
    if groups:
        found["duplicates"] = pairs([(g[0], g[1], f"{g[0]} · {g[1]}") for g in groups[:SHOWN]])
    if p.isolated:
        titles = [f"{one.index}\nt = {one.t:.3g}" for one in p.isolated]
        found["isolated"] = lambda: plots.image_row(images([one.index for one in p.isolated]), titles)
    if p.boundary_pairs:
        found["pairs"] = pairs([(q.i, q.j, f"{q.i} · {q.j}\n{100 * q.share:.2g} %") for q in p.boundary_pairs])
    return found


def _plane(p: Profile) -> Figure:
    """Draw at most about 5,000 points of the plane, those at risk among them."""
    from vkernel import plots

    risk = [one.index for one in p.isolated] + [k for q in p.boundary_pairs for k in (q.i, q.j)]
    keep = torch.cat([torch.arange(0, p.n, max(1, p.n // 5000)), torch.tensor(risk, dtype=torch.long)]).unique()
    place = {int(i): k for k, i in enumerate(keep)}
    pairs = [[place[q.i], place[q.j]] for q in p.boundary_pairs]
    return plots.scatter_pairs(p.data.take(keep), [place[one.index] for one in p.isolated], pairs)
