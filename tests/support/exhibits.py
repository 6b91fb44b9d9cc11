"""Exhibits made at a small size, what every exhibit must have, and the definition of tr C."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from vkernel import reproduce
from vkernel.reproduce.exhibit import Exhibit, Page, Part, Picture, Run


@dataclass
class Made:
    """Exhibits by their names, their arrays, and the progress that each reported."""

    out: Path
    exhibits: dict[str, Exhibit] = field(default_factory=dict)
    arrays: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)
    totals: dict[str, float] = field(default_factory=dict)


def make(out: Path, seed: int) -> Made:
    """Make the page quickly, without CIFAR."""
    made = Made(out)

    def recorded(part: Part) -> Part:
        def make(run: Run) -> Exhibit:
            steps: list[float] = []
            exhibit = part.make(replace(run, step=steps.append))
            made.exhibits[exhibit.name], made.totals[exhibit.name] = exhibit, sum(steps)
            with np.load(out / exhibit.data) as saved:
                made.arrays[exhibit.name] = dict(saved)
            return exhibit

        return replace(part, make=make)

    parts = [recorded(part) for part in reproduce.exhibits()]
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("VKERNEL_DATA", raising=False)
        patch.setattr(reproduce, "exhibits", lambda: parts)
        assert reproduce.run(out, seed=seed, quick=True) == (out / "index.html").resolve()
    return made


def check(made: Made) -> None:
    """Files, captions, tables and numbers of every exhibit are complete, and all of its progress is reported."""
    for name, exhibit in made.exhibits.items():
        assert made.totals[name] == pytest.approx(1)
        for key, array in made.arrays[name].items():
            assert array.dtype.kind in "US" or np.isfinite(array).all(), (name, key)
        for picture in exhibit.pictures:
            assert len(picture.alt) > 80
            assert picture.caption
            for suffix in (".png", "-dark.png", ".svg"):
                assert (made.out / f"{picture.stem}{suffix}").stat().st_size > 1000
        for table in exhibit.tables:
            assert table.rows
            assert all(len(row) == len(table.head) for row in table.rows)
        assert not {"nan", "none", "inf"} & set(words(exhibit).lower().split())


def words(exhibit: Exhibit) -> str:
    """Everything that an exhibit says, with plain spaces."""
    found = exhibit.finding.words if exhibit.finding else ()
    captions = [c for p in exhibit.pictures for c in (p.alt, *p.caption)]
    return " ".join([*exhibit.opening, *found, *captions, *exhibit.closing, exhibit.sizes]).replace("\u00a0", " ")


def without_pictures(patch: pytest.MonkeyPatch) -> None:
    """Draw nothing, for tests of numbers alone."""

    def picture(page: Page, stem: str, *given: object, **how: object) -> None:
        page.pictures.append(Picture(stem, "", (), 1, 1))

    patch.setattr(Page, "picture", picture)


def says(name: str, key: str, **values: object) -> str:
    """The text of an exhibit for given values, with plain spaces."""
    found = Page(Run(Path(), 0, True, print), name, values)(key)
    return (found if isinstance(found, str) else " ".join(found)).replace("\u00a0", " ")


def brute_force(y: np.ndarray, x: np.ndarray, alpha: float, var: float) -> tuple[float, float]:
    """tr C and |s|² at one place from the definition: every proxy score, its weight, their mean and covariance."""
    proxy = (alpha * y - x) / var
    logit = -0.5 * var * (proxy**2).sum(-1)
    weight = np.exp(logit - logit.max())
    weight /= weight.sum()
    mean = weight @ proxy
    return float(np.trace((weight[:, None] * (proxy - mean)).T @ (proxy - mean))), float(mean @ mean)
