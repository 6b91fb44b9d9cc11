"""``vkernel audit``."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vkernel.cli.common import DATA, load_data, on_device, writable
from vkernel.core.errors import require

if TYPE_CHECKING:
    import torch

    from vkernel.adapters import Checkpoint
    from vkernel.data.empirical import Empirical

__all__ = ["audit"]

_network = partial(typer.Option, rich_help_panel="Conventions of the network")
_data = partial(typer.Option, rich_help_panel="Data")
_size = partial(typer.Option, rich_help_panel="Size of the audit")
_output = partial(typer.Option, rich_help_panel="Output")


def audit(
    weights: Annotated[
        list[Path],
        typer.Argument(
            metavar="WEIGHTS…",
            help="Weight files (.safetensors, or .pt with a state dict) of one architecture, or diffusers folders.",
        ),
    ],
    data: Annotated[
        str | None, _data(metavar="DATA", help=f"The training set of the network: {DATA}", show_default=False)
    ] = None,
    test: Annotated[
        str | None, _data(metavar="DATA", help="Images of the same law that it was not trained on.")
    ] = None,
    module: Annotated[
        str | None,
        _network(
            metavar="FACTORY",
            help="Your code that builds the network: package.file:factory or path/to/file.py:factory. Importing it "
            "runs it; nothing in a weight file is run. Not needed for diffusers folders.",
        ),
    ] = None,
    predicts: Annotated[
        str, _network("--predicts", "--prediction", help="The prediction: noise, x0, v, flow, edm or score.")
    ] = "noise",
    time: Annotated[
        str,
        _network(
            help="The time input: index, fraction (fraction:N), sigma, c_noise, reversed or t; index:N in continuous t."
        ),
    ] = "index",
    betas: Annotated[
        str,
        _network(
            help="The process: linear:FIRST:LAST:STEPS, scaled_linear:…, cosine:STEPS, key:NAME (a buffer in the file) "
            "or a process by name: edm, flow, vp, …"
        ),
    ] = "linear:1e-4:.02:1000",
    range: Annotated[str, _network(metavar="LOW,HIGH", help="The range of its pixels.")] = "-1,1",
    strip: Annotated[str, _network(metavar="PREFIX", help="The prefix of the network's keys in the file.")] = "",
    labels: Annotated[
        Path | None, _data(metavar="FILE", help="Classes of the training images, for class-conditional networks.")
    ] = None,
    label: Annotated[int | None, _network(help="The class to audit.")] = None,
    test_labels: Annotated[Path | None, _data(metavar="FILE", help="Classes of the test images.")] = None,
    latents: Annotated[
        str | None,
        _data(
            metavar="FILE",
            help="For latent models, instead of --data: the encoded training images, as floats. The audit is then of "
            "latents, and --test must hold latents too.",
        ),
    ] = None,
    scale: Annotated[str, _data(help="How data are read: auto, none, or LOW,HIGH for stored integers.")] = "auto",
    key: Annotated[str | None, _data(help="The array or column of the data files to read.")] = None,
    layout: Annotated[str | None, _data(help="Layout of a picture that holds many images: sheet:32x32.")] = None,
    features: Annotated[
        str,
        _size(help="Features in which samples are compared: pixels, standardised, pca:K, or your file.py:function."),
    ] = "pixels",
    threshold: Annotated[float, _size(help="The largest ratio of nearest to second nearest distance of a copy.")] = 1
    / 3,
    group: Annotated[
        str | None,
        _size(metavar="A,A,B,…", help="The group of each file: files that share an initialisation, say, have one."),
    ] = None,
    quick: Annotated[bool, _size("--quick", help="A first look: fewer images, levels and samples.")] = False,
    full_sampler: Annotated[
        bool, _size("--full-sampler", help="Take all steps of the model's own sampler, not 50.")
    ] = False,
    samples: Annotated[int | None, _size(help="Samples of each sampler (default: 256; 64 with --quick).")] = None,
    seed: Annotated[int, _size(help="Seed of all draws.")] = 0,
    device: Annotated[str, _size(help="The device for the computation: cpu, cuda, cuda:1, …")] = "cpu",
    json: Annotated[Path | None, _output(metavar="FILE", help="Write all numbers to FILE.")] = None,
    html: Annotated[Path | None, _output(metavar="FILE", help="Write a self-contained page to FILE.")] = None,
    fail_if_memorised: Annotated[
        float | None,
        _output(
            metavar="FRACTION",
            help="Exit with 1 if a larger share of the samples are copies; otherwise the exit code is 0 whatever is "
            "found.",
        ),
    ] = None,
    quiet: Annotated[bool, _output("--quiet", "-q", help="Show no progress and no table.")] = False,
) -> None:
    """Audit checkpoints: copies of training images, membership, blind directions, and agreement of several runs.

    Unconditional networks, class-conditional ones (one class at a time) and networks in latent space (--latents).
    Guided sampling and text-conditional pipelines are not supported: they sample from no model's own score.
    """
    from rich.console import Console

    from vkernel.reports.audit import Sizes
    from vkernel.reports.audit import audit as run
    from vkernel.reports.audit.report import screen

    writable(json, html)
    good = fail_if_memorised is None or 0 <= fail_if_memorised <= 1
    require(good, f"--fail-if-memorised must be a share between 0 and 1; got {fail_if_memorised}.")
    require(data is not None or latents is not None, "Give the training set of the network: --data DATA.")
    require(data is None or latents is None, "--latents takes the place of --data; give one of them.")
    require(samples is None or samples >= 16, f"--samples must be 16 or more; got {samples}.")
    where = on_device(device)
    if latents is not None:
        require(range == "-1,1", "Latents are floats and are used as they are; --range does not apply.")
        scale = "none"
    own = _of_class(load_data(data or latents or "", scale, key, layout), labels, label, "training")
    held = None if test is None else _of_class(load_data(test, scale, key, layout), test_labels, label, "test")
    stated = {"predicts": predicts, "time": time, "betas": betas, "range": range, "strip": strip, "label": label}
    sizes = Sizes.quick() if quick else Sizes()
    found = run(
        [_read(path, module, own.shape, where, stated) for path in weights],
        own.to(where),
        test=None if held is None else held.to(where),
        features=features,
        threshold=threshold,
        groups=None if group is None else [name.strip() for name in group.split(",")],
        sizes=dataclasses.replace(sizes, samples=samples or sizes.samples, steps=None if full_sampler else sizes.steps),
        seed=seed,
        progress=not quiet,
    )
    if not quiet:
        Console(soft_wrap=False).print(screen(found))
    if json is not None:
        typer.echo(f"wrote {found.to_json(json)}")
    if html is not None:
        typer.echo(f"wrote {found.to_html(html)}")
    most = found.memorised
    if fail_if_memorised is not None and most is not None and most.value > fail_if_memorised:
        share, limit = 100 * most.value, 100 * fail_if_memorised
        typer.echo(f"vkernel: {share:.3g} % of the samples are copies, more than {limit:.3g} %.", err=True)
        raise typer.Exit(1)


def _read(
    path: Path, module: str | None, shape: tuple[int, ...], device: torch.device, stated: dict[str, Any]
) -> Checkpoint:
    from vkernel.adapters import Checkpoint

    require(path.exists(), f"There is no file or folder {path}; weights are read from this machine, never downloaded.")
    if path.is_dir():
        require(module is None, f"{path} is a folder, read as a diffusers model; --module is for weight files.")
        return Checkpoint.from_diffusers(path, device=device, label=stated["label"])
    require(
        module is not None,
        f"{path} holds numbers alone: give the code that builds its network, --module package.file:factory or "
        "path/to/file.py:factory.",
    )
    return Checkpoint.from_weights(path, module or "", device=device, shape=shape, **stated)


def _of_class(data: Empirical, labels: Path | None, label: int | None, kind: str) -> Empirical:
    """The images of one class, if labels are given."""
    if labels is None:
        option = "--labels" if kind == "training" else "--test-labels"
        require(label is None, f"--label audits one class: give {option}, the classes of all {kind} images.")
        return data
    import torch

    held = load_data(str(labels), "none")
    numbers = held.take(torch.arange(held.n)).flatten().double()
    require(held.n == data.n and held.d == 1, f"{labels} holds {held.n:,} × {held.d} labels for {data.n:,} images.")
    classes = sorted({int(c) for c in numbers.tolist()})
    shown = ", ".join(map(str, classes[:12])) + (", …" if len(classes) > 12 else "")
    require(label is not None, f"An audit is of one class at a time: give --label, one of {shown}.")
    which = torch.nonzero(numbers.eq(label or 0)).flatten()
    require(len(which) > 0, f"No {kind} image is of class {label}; there are {shown}.")
    return data.subset(which)
