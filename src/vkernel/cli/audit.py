"""``vkernel audit``."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vkernel.cli.common import DATA, load_data, on_device, writable
from vkernel.core.errors import require

if TYPE_CHECKING:
    from vkernel.data.empirical import Empirical
    from vkernel.reports.audit import Checkpoint

__all__ = ["audit"]

READING, SAMPLING, WRITING = "How the network is read", "How much is done", "What is written"


def audit(
    weights: Annotated[
        list[Path],
        typer.Argument(
            metavar="WEIGHTS…",
            help="Weight files (.safetensors, or .pt with a state dict) of one architecture, or diffusers folders.",
        ),
    ],
    data: Annotated[
        str | None, typer.Option(metavar="DATA", help=f"What the network was trained on: {DATA}", show_default=False)
    ] = None,
    test: Annotated[
        str | None, typer.Option(metavar="DATA", help="Images of the same kind that it was not trained on.")
    ] = None,
    module: Annotated[
        str | None,
        typer.Option(
            metavar="FACTORY",
            help="Your code that builds the network: package.file:factory or path/to/file.py:factory. It is imported, "
            "and so runs; nothing in a weight file does. Not needed for diffusers folders.",
            rich_help_panel=READING,
        ),
    ] = None,
    prediction: Annotated[
        str, typer.Option(help="What it predicts: noise, x0, v, flow or score.", rich_help_panel=READING)
    ] = "noise",
    time: Annotated[
        str,
        typer.Option(
            help="What it is told: index, fraction (fraction:N), sigma or reversed; index:N in continuous time.",
            rich_help_panel=READING,
        ),
    ] = "index",
    betas: Annotated[
        str,
        typer.Option(
            help="Its process: linear:FIRST:LAST:STEPS, scaled_linear:…, cosine:STEPS, key:NAME (a buffer in the file) "
            "or a process by name: edm, flow, vp, …",
            rich_help_panel=READING,
        ),
    ] = "linear:1e-4:.02:1000",
    range: Annotated[
        str, typer.Option(metavar="LOW,HIGH", help="The range of its pixels.", rich_help_panel=READING)
    ] = "-1,1",
    strip: Annotated[
        str, typer.Option(metavar="PREFIX", help="Keys of the network begin with this.", rich_help_panel=READING)
    ] = "",
    labels: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Classes of the training images, for class-conditional networks.",
            rich_help_panel=READING,
        ),
    ] = None,
    label: Annotated[int | None, typer.Option(help="The class to audit.", rich_help_panel=READING)] = None,
    test_labels: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Classes of the test images.", rich_help_panel=READING)
    ] = None,
    latents: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="For latent models, instead of --data: the encoded training images, as floats. The audit is then of "
            "latents, and --test must hold latents too.",
            rich_help_panel=READING,
        ),
    ] = None,
    scale: Annotated[
        str,
        typer.Option(help="How data are read: auto, none, or LOW,HIGH for stored integers.", rich_help_panel=READING),
    ] = "auto",
    key: Annotated[
        str | None, typer.Option(help="Which array or column of the data files to read.", rich_help_panel=READING)
    ] = None,
    layout: Annotated[
        str | None,
        typer.Option(help="Layout of a picture that holds many images: sheet:32x32.", rich_help_panel=READING),
    ] = None,
    features: Annotated[
        str,
        typer.Option(
            help="In what samples are compared with data: pixels, standardised, pca:K, or your file.py:function.",
            rich_help_panel=SAMPLING,
        ),
    ] = "pixels",
    threshold: Annotated[
        float, typer.Option(help="A copy's nearest distance, over the second nearest.", rich_help_panel=SAMPLING)
    ] = 1 / 3,
    group: Annotated[
        str | None,
        typer.Option(
            metavar="A,A,B,…",
            help="For each file the group that it shares something with, such as an initialisation.",
            rich_help_panel=SAMPLING,
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A first look: fewer images, levels and samples.", rich_help_panel=SAMPLING)
    ] = False,
    full_sampler: Annotated[
        bool,
        typer.Option(
            "--full-sampler", help="Take all steps of the model's own sampler, not 50.", rich_help_panel=SAMPLING
        ),
    ] = False,
    samples: Annotated[
        int | None,
        typer.Option(help="Samples of each sampler (default: 256; 64 with --quick).", rich_help_panel=SAMPLING),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of all draws.", rich_help_panel=SAMPLING)] = 0,
    device: Annotated[
        str, typer.Option(help="Where to compute: cpu, cuda, cuda:1, …", rich_help_panel=SAMPLING)
    ] = "cpu",
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write all numbers to FILE.", rich_help_panel=WRITING)
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a self-contained page to FILE.", rich_help_panel=WRITING),
    ] = None,
    fail_if_memorised: Annotated[
        float | None,
        typer.Option(
            metavar="FRACTION",
            help="Exit with 1 if a larger share of the samples are copies; otherwise the exit code is 0 whatever was "
            "found.",
            rich_help_panel=WRITING,
        ),
    ] = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="No progress, no table.", rich_help_panel=WRITING)
    ] = False,
) -> None:
    """Audit checkpoints: are samples copies, what is remembered, what is not seen, and would another run agree?

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
    require(data is not None or latents is not None, "Give what the network was trained on: --data DATA.")
    require(data is None or latents is None, "--latents takes the place of --data; give one of them.")
    where = on_device(device)
    if latents is not None:
        require(str(range) == "-1,1", "Latents are floats and are used as they are; --range does not apply.")
        scale = "none"
    own = load_data(data or latents or "", scale, key, layout)
    held = None if test is None else load_data(test, scale, key, layout)
    own, held = _of_class(own, labels, label, "training"), held and _of_class(held, test_labels, label, "test")
    stated = {"prediction": prediction, "time": time, "betas": betas, "range": range, "strip": strip, "label": label}
    nets = [_read(path, module, own, where, stated) for path in weights]
    sizes = Sizes.quick() if quick else Sizes()
    if samples is not None:
        require(samples >= 16, f"--samples must be 16 or more; got {samples}.")
        sizes = dataclasses.replace(sizes, samples=samples)
    if full_sampler:
        sizes = dataclasses.replace(sizes, steps=None)
    found = run(
        nets,
        own.to(where),
        test=None if held is None else held.to(where),
        features=features,
        threshold=threshold,
        groups=None if group is None else [name.strip() for name in group.split(",")],
        sizes=sizes,
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
        typer.echo(
            f"vkernel: {100 * most.value:.3g} % of the samples are copies, more than {100 * fail_if_memorised:.3g} %.",
            err=True,
        )
        raise typer.Exit(1)


def _read(path: Path, module: str | None, data: Empirical, device: Any, stated: dict[str, Any]) -> Checkpoint:
    from vkernel.reports.audit import Checkpoint

    require(path.exists(), f"There is no file or folder {path}; weights are read from this machine, never downloaded.")
    if path.is_dir():
        require(module is None, f"{path} is a folder, read as a diffusers model; --module is for weight files.")
        return Checkpoint.from_diffusers(path, device=device, label=stated["label"])
    require(
        module is not None,
        f"{path} holds numbers alone: give the code that builds its network, --module package.file:factory or "
        "path/to/file.py:factory.",
    )
    assert module is not None
    return Checkpoint.from_weights(path, module, device=device, shape=data.shape, **stated)


def _of_class(data: Empirical, labels: Path | None, label: int | None, kind: str) -> Empirical:
    """The images of one class, if labels are given."""
    option = "--labels" if kind == "training" else "--test-labels"
    if labels is None:
        require(
            label is None,
            f"--label audits one class, whose {kind} images must be known: give {option}, the classes of all.",
        )
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
