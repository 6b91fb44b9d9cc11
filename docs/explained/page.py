"""Write the tables and the figure of docs/explained.md from the results: ``python docs/explained/page.py``.

The page has each table between two comments; a test compares it with :func:`tables`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import xarray

from vkernel import plots
from vkernel.core.files import write

HERE = Path(__file__).parent
PAGE = HERE.parent / "explained.md"
CASES = {
    "U-Net": {f"unet_{n}": f"n = {n:,}" for n in (128, 1024, 60_000)},
    "MLP": {f"mlp_{n}": f"n = {n:,}" for n in (128, 1024, 60_000)},
    "MNIST": {"mnist_unet": "U", "mnist_cnn": "C"},
}
CHOSEN = "unet_1024"  # of which all numbers are shown
THEORIES = {"gaussian": "Gaussian", "exact": "exact", "smoothed": "smoothed", "local": "LS", "equivariant": "ELS"}
THEORIES |= {"pca": "PCA"}


class Result:
    """The numbers of one explanation, of its first network; ``self[table, name]`` is an array."""

    def __init__(self, path: Path) -> None:
        self.held = json.loads(path.read_text())
        self.theories = self.held["denoising"]["theory"]["values"]

    def __getitem__(self, key: tuple[str, str]) -> np.ndarray:
        return np.array(self.held[key[0]][key[1]]["values"][0], dtype=float)

    def interval(self, table: str, name: str, *at: int) -> str:
        value, low, high = (self[table, name + end][at] for end in ("", "_low", "_high"))
        return f"{value:.2f} ({low:.2f} to {high:.2f})"

    def level(self, k: int) -> str:
        """Return the best theory on held-out images at one noise level, its gain, and the ceiling."""
        network = self.held["denoising"]["network"]["values"][0]
        best, well = self.held["best"][network][k], self.held["well"][network][k]
        ceiling = self["denoising", "ceiling"][-1, k]
        of = "" if np.isnan(ceiling) else f", ceiling {ceiling:.2f}"
        if best is None:
            linear = self["denoising", "r2"][self.theories.index("gaussian"), -1, k]
            return f"none (Gaussian R² {linear:.2f}{of})"
        found = self.interval("denoising", "gain", self.theories.index(best), -1, k)
        name = f"**{THEORIES[best]}**" if well else THEORIES[best]
        return f"{name} {found}{of}"


def row(*cells: str) -> str:
    """Return a line of a table in Markdown."""
    return f"| {' | '.join(cells)} |"


def head(*cells: str) -> list[str]:
    """Return the first two lines of a table."""
    return [row(*cells), row(*["---"] * len(cells))]


def tables(folder: Path = HERE / "results") -> dict[str, str]:
    """Return the tables in Markdown by name."""
    results = {case: Result(folder / f"{case}.json") for cases in CASES.values() for case in cases}
    return {
        "levels": "\n".join(levels(name, cases, results) for name, cases in CASES.items()),
        "gains": gains(results[CHOSEN]),
        "samples": samples(results),
        "faults": faults(Result(folder / "faults.json")),
    }


def levels(name: str, cases: dict[str, str], results: dict[str, Result]) -> str:
    """The best theory by noise level."""
    ratios = [f"{r:.2g}" for r in results[next(iter(cases))]["denoising", "ratio"]]
    lines = head(f"{name}, σ/α =", *ratios)
    for case, title in cases.items():
        lines.append(row(title, *(results[case].level(k) for k in range(len(ratios)))))
    return "\n".join([*lines, ""])


def gains(r: Result) -> str:
    """The gains of all theories of one network, on training and on held-out images."""
    lines = head("σ/α", *(THEORIES[name] for name in r.theories if name != "gaussian"), "ceiling")
    for k, ratio in enumerate(r["denoising", "ratio"]):
        pairs = [
            pair for name, pair in zip(r.theories, r["denoising", "gain"][:, :, k], strict=True) if name != "gaussian"
        ]
        lines.append(row(f"{ratio:.2g}", *(f"{a:.2f} / {b:.2f}" for a, b in [*pairs, r["denoising", "ceiling"][:, k]])))
    return "\n".join([*lines, ""])


def samples(results: dict[str, Result]) -> str:
    """The likeness of samples from the same noise."""
    lines = head("", *THEORIES.values(), "ceiling", "other noise")
    for name, cases in CASES.items():
        for case, title in cases.items():
            r = results[case]
            cells = [r.interval("samples", "r2", i) for i in range(len(r.theories))]
            ceiling, floor = r["samples", "ceiling"], np.median(r["samples", "permuted"])
            lines.append(
                row(f"{name}, {title}", *cells, "–" if np.isnan(ceiling) else f"{ceiling:.2f}", f"{floor:.2f}")
            )
    return "\n".join([*lines, ""])


def faults(r: Result) -> str:
    """What the samples of each theory get wrong, and what they cost."""
    lines = head("", "training images", "copies", "Fréchet distance", "kernel distance", "seconds a sample")
    for i, name in enumerate(r.theories):
        measured = [r.interval("samples", key, i) for key in ("copies", "frechet", "kernel")]
        points, seconds = r["denoising", "points"][i], r["samples", "seconds"][i]
        lines.append(row(THEORIES[name], f"{points:,.0f}", *measured, f"{seconds:.2g}"))
    own = [r.interval("samples", key) for key in ("own_copies", "own_frechet", "own_kernel")]
    return "\n".join([*lines, row("the network", "–", *own, f"{float(r['samples', 'own_seconds']):.2g}"), ""])


def figure(name: str, folder: Path = HERE / "results") -> Path:
    """Draw the gains of the first network of a result, beside ceiling and floors."""
    held = json.loads((folder / f"{name}.json").read_text())["denoising"]
    columns = {
        key: (one["dimensions"], np.array(one["values"], dtype=kind(one["values"]))) for key, one in held.items()
    }
    found = xarray.Dataset(columns).set_coords(["ratio"]).isel(network=[0])
    return plots.save(plots.explanation(found, THEORIES), folder / f"{name}.png", dpi=90)


def kind(values: list[object]) -> type | None:
    """Return float for numbers, among which ``None`` is NaN."""
    while isinstance(values, list):
        values = values[0]
    return None if isinstance(values, str) else float


def block(name: str) -> re.Pattern[str]:
    """Return the pattern of the text between the comments of a table."""
    return re.compile(rf"(?<=<!-- {name} -->\n).*?(?=<!-- end of {name} -->)", re.DOTALL)


def main() -> None:
    text = PAGE.read_text()
    for name, table in tables().items():
        text = block(name).sub(lambda _, table=table: table, text)
    write(PAGE, text)
    figure(CHOSEN)


if __name__ == "__main__":
    main()
