"""``vkernel profile``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vkernel.cli.common import DATA, load_data, on_device, writable
from vkernel.core.errors import require

__all__ = ["profile"]


def profile(
    data: Annotated[
        str,
        typer.Argument(
            metavar="DATA",
            help=f"Training data: {DATA}",
        ),
    ],
    process: Annotated[
        str,
        typer.Option(
            help="Forward process: vp, vpsong, ddpm, cosine, ve, edm, flow or toy, with options: vp:eps=1e-4."
        ),
    ] = "vp",
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write all numbers to FILE.")] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a self-contained page to FILE.")] = None,
    queries: Annotated[
        int | None, typer.Option(help="Queries per noise level (default: 256 to 2048, by the size of the data).")
    ] = None,
    top: Annotated[int, typer.Option(help="How many isolated points and boundary pairs to list.")] = 10,
    scale: Annotated[
        str,
        typer.Option(help="auto (uint8 images to [-1, 1], else as they are), none, or LOW,HIGH for stored integers."),
    ] = "auto",
    key: Annotated[
        str | None, typer.Option(help="Which array, tensor or column to read, where there are several.")
    ] = None,
    layout: Annotated[str | None, typer.Option(help="Layout of a picture that holds many images: sheet:32x32.")] = None,
    device: Annotated[str, typer.Option(help="Where to compute: cpu, cuda, cuda:1, …")] = "cpu",
    memory: Annotated[
        float | None, typer.Option(help="Working memory in GB (default: a quarter of what is free).")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of all draws.")] = 0,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress, no table.")] = False,
) -> None:
    """Profile training data: when is the target noisy, what will be copied, where would a model mix?"""
    from rich.console import Console

    from vkernel.process import parse
    from vkernel.reports.profile import profile as run
    from vkernel.reports.profile.report import table

    law = parse(process)
    writable(json, html)
    require(memory is None or memory > 0, f"--memory must be positive; got {memory}.")
    found = run(
        load_data(data, scale, key, layout).to(on_device(device)),
        law,
        queries=queries,
        top=top,
        seed=seed,
        memory=None if memory is None else int(memory * 2**30),
        progress=not quiet,
    )
    if not quiet:
        Console(soft_wrap=False).print(table(found))
    if json is not None:
        typer.echo(f"wrote {found.to_json(json)}")
    if html is not None:
        typer.echo(f"wrote {found.to_html(html)}")
