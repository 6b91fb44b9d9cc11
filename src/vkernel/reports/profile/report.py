"""A profile told to people: sentences, a table for the terminal, and one self-contained page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from vkernel import plots
from vkernel.reports import html as pages
from vkernel.reports.html import Picture, picture

if TYPE_CHECKING:
    from rich.console import Group

    from vkernel.reports.profile import Profile

__all__ = ["page", "sentences", "table"]

SHOWN = 12  # groups of duplicates, and rows of a table, that a report shows


def sentences(p: Profile) -> list[str]:
    """What was found, in plain words."""
    points = f"{p.n:,} points in {p.d:,} dimensions"
    out = [f"{points}{_scale(p)}, under {p.process!r}."]
    if p.distinct < p.n:
        repeated = p.n - p.distinct
        out.append(
            f"{repeated:,} points are exact copies of others, in {len(p.duplicates):,} groups: they act as weights."
        )
    if p.near_duplicates:
        out.append(f"{len(p.near_duplicates):,} groups of points are closer to one another than chance explains.")
    peak = max(range(len(p.curves["t"])), key=lambda k: p.curves["noise_fraction"][k])
    rho, se, t = (p.curves[name][peak] for name in ("noise_fraction", "noise_fraction_se", "t"))
    if p.distinct == 1:
        out.append("There is one point: its target carries no noise, and a model can only copy it.")
    elif p.window is None:
        out.append(
            f"Noise never makes up 1 % of the training target: at most {100 * rho:.2g} ± {100 * se:.1g} %, "
            f"at t = {t:.3g}."
        )
    else:
        out.append(
            f"The training target carries noise for t between {p.window[0]:.3g} and {p.window[1]:.3g}; at t = {t:.3g}, "
            f"where it is noisiest, noise makes up {100 * rho:.2g} ± {100 * se:.1g} % of it."
        )
    if p.collapse_time is None:
        out.append("At no t does the point that made x hold half of the posterior: the data are denser than eps.")
    elif p.distinct > 1:
        out.append(
            f"Below t = {p.collapse_time:.3g} the exact score has chosen one training point (mean weight above ½), "
            "and from there on only copies it."
        )
    if p.intrinsic_dimension is not None:
        out.append(f"Near a point the data look {float(p.intrinsic_dimension):.1f}-dimensional.")
    if p.isolated and p.distinct > 1:
        who = p.isolated[0]
        out.append(
            f"Point {who['index']} is the most isolated: a sampler near it is committed to it from "
            f"t = {who['t']:.3g} on."
        )
    if p.boundary_pairs:
        pair = p.boundary_pairs[0]
        out.append(
            f"Points {pair['i']} and {pair['j']} carry the largest share of the target noise, "
            f"{100 * pair['share']:.2g} %: there a model would mix."
        )
    return out


def _scale(p: Profile) -> str:
    if p.scale is None:
        return ", values as they are"
    return f", stored integers mapped to [{p.scale[0]:g}, {p.scale[1]:g}]"


def table(p: Profile) -> Group:
    """For the terminal: the sentences, and the curves at about twelve levels."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    curve = Table(
        title=f"along t ({p.queries:,} queries per level; points: their effective number; entropy in nats)",
        title_justify="left",
    )
    for name in ("t", "noise fraction", "points", "mmse", "entropy", "own weight"):
        curve.add_column(name, justify="right", no_wrap=True)
    for row in _rows(p):
        curve.add_row(*row)
    lists = Table(title="copied first, and mixed first", title_justify="left")
    for name in ("isolated point", "from t", "boundary pair", "share of noise"):
        lists.add_column(name, justify="right")
    for k in range(max(len(p.isolated), len(p.boundary_pairs))):
        one = p.isolated[k] if k < len(p.isolated) else None
        two = p.boundary_pairs[k] if k < len(p.boundary_pairs) else None
        lists.add_row(
            "" if one is None else str(one["index"]),
            "" if one is None else f"{one['t']:.3g}",
            "" if two is None else f"{two['i']} – {two['j']}",
            "" if two is None else f"{100 * two['share']:.2g} ± {100 * (two['share_se'] or 0):.1g} %",
        )
    return Group(Text("\n".join(sentences(p))), curve, lists)


def _rows(p: Profile) -> list[list[str]]:
    """About a dozen levels, evenly spaced; standard errors where they say something."""
    count = len(p.curves["t"])
    chosen = sorted({round(k * (count - 1) / (SHOWN - 1)) for k in range(SHOWN)})
    rows = []
    for k in chosen:
        at = {name: values[k] for name, values in p.curves.items()}
        rho = f"{at['noise_fraction']:.2g} ± {at['noise_fraction_se']:.1g}" if at["noise_fraction"] > 1e-6 else "< 1e-6"
        rows.append([f"{at['t']:.3g}", rho, *(f"{at[name]:.3g}" for name in ("ess", "mmse", "entropy", "own_weight"))])
    return rows


def page(p: Profile) -> str:
    """The HTML report."""
    return pages.page(
        "profile.html",
        title=f"Profile of {p.data.name}" if p.data.name else "Profile of a training set",
        p=p,
        sentences=sentences(p),
        header=["t", "noise fraction", "effective points", "mmse", "entropy", "own weight"],
        rows=_rows(p),
        figures=_figures(p),
        shown=SHOWN,
    )


def _figures(p: Profile) -> list[Picture]:
    c = p.curves
    figures = [
        picture(
            "Along t",
            "Noise fraction ρ (95 % band), effective number of training points, error of the ideal denoiser and "
            "entropy of the posterior, against the time of the process. Shaded: the window in which the target is "
            "noisy. Dashed: the collapse time.",
            lambda: plots.noise_profile(
                c["t"],
                c["noise_fraction"],
                c["noise_fraction_se"],
                c["ess"],
                c["mmse"],
                c["entropy"],
                collapse_time=p.collapse_time,
                window=p.window,
                points=p.distinct,
            ),
        )
    ]
    if len(p.neighbour_distances):
        figures.append(
            picture(
                "Nearest neighbours",
                "How far each point is from its nearest other point: near copies left, isolated points right.",
                lambda: plots.distances(p.neighbour_distances),
            )
        )
    if p.d == 2 and len(p.data.shape) == 1:
        figures.append(_plane(p))
    if _is_image(p.data.shape):
        figures.extend(_pictures(p))
    return figures


def _plane(p: Profile) -> Picture:
    keep = torch.arange(p.n) if p.n <= 5000 else torch.arange(0, p.n, p.n // 5000)
    extra = [one["index"] for one in p.isolated] + [pair[k] for pair in p.boundary_pairs for k in "ij"]
    keep = torch.unique(torch.cat([keep, torch.tensor(extra, dtype=torch.long)]))
    place = {int(i): k for k, i in enumerate(keep)}
    return picture(
        "The points",
        "Ringed: the points most at risk of being copied. Joined: the pairs that carry most of the target noise, "
        "between which a model would place probability.",
        lambda: plots.scatter_pairs(
            p.data.take(keep),
            [place[one["index"]] for one in p.isolated],
            [[place[pair["i"]], place[pair["j"]]] for pair in p.boundary_pairs],
        ),
    )


def _is_image(shape: tuple[int, ...]) -> bool:
    return len(shape) == 2 or (len(shape) == 3 and shape[0] in (1, 3))


def _pictures(p: Profile) -> list[Picture]:
    out = []
    groups = [g[:2] for g in p.duplicates] + [g["indices"][:2] for g in p.near_duplicates]
    groups = groups[:SHOWN]

    def show(indices: list[int]) -> Any:
        return p.data.images(torch.tensor(indices)).float()

    if groups:
        titles = [f"{a} · {b}" for a, b in groups]
        out.append(
            picture(
                "Duplicates",
                "Exact copies first, then pairs that are closer than chance explains (one pair of each group).",
                lambda: plots.pairs(show([g[0] for g in groups]), show([g[1] for g in groups]), titles),
            )
        )
    if p.isolated:
        titles = [f"{one['index']}\nt = {one['t']:.3g}" for one in p.isolated]
        out.append(
            picture(
                "Most at risk of being copied",
                "The points that collapse earliest on the way down from noise, with their index and the time from "
                "which a sampler near them is committed.",
                lambda: plots.image_row(show([one["index"] for one in p.isolated]), titles),
            )
        )
    if p.boundary_pairs:
        pairs = p.boundary_pairs
        titles = [f"{q['i']} · {q['j']}\n{100 * q['share']:.2g} %" for q in pairs]
        out.append(
            picture(
                "Between which probability would move",
                "The pairs with the largest share of the target noise over the window.",
                lambda: plots.pairs(show([q["i"] for q in pairs]), show([q["j"] for q in pairs]), titles),
            )
        )
    return out
