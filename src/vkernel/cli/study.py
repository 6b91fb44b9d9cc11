"""``vkernel study``: run, list, status, show, plot and export."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["study"]

study = typer.Typer(help="Run declared sweeps over ensembles; a stopped run continues.", no_args_is_help=True)
StoreArgument = Annotated[Path, typer.Argument(metavar="STORE", help="The folder that study run wrote.")]


@study.command("run")
def study_run(
    spec: Annotated[
        Path, typer.Argument(metavar="SPEC", help="The study: a TOML file, or a name that study list prints.")
    ],
    store: Annotated[Path, typer.Option(metavar="FOLDER", help="The folder for results; run again to continue.")],
    runner: Annotated[str, typer.Option(help="inline (this process), threads (of this process), or ray (a cluster).")] = "inline",
    address: Annotated[
        str | None, typer.Option(help="The Ray cluster: auto, or HOST:PORT (default: this machine).")
    ] = None,
    large: Annotated[bool, typer.Option("--large", help="Use the larger values in the study's [large] table.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show neither progress nor the table.")] = False,
) -> None:
    """Compute the missing part of a study. It can be stopped at any time; run it again to continue."""
    from rich.console import Console

    from vkernel.study import report, run

    found = run(spec, store, runner, address=address, large=large, progress=not quiet)
    if not quiet:
        Console(soft_wrap=False).print(report.table(found))
    typer.echo(f"results are in {store}")


@study.command("list")
def study_list() -> None:
    """List the studies that come with the package; study run takes their names, or their files."""
    from vkernel.study import read
    from vkernel.study.shipped import studies

    for name, path in studies().items():
        typer.echo(f"{name}: {read(path).question}\n  {path}")


@study.command("status")
def study_status(store: StoreArgument) -> None:
    """Show how many members of each condition are computed."""
    from vkernel.study import load, report

    found = load(store)
    spec, done = report.spec_of(found), found["done"].values
    typer.echo(f"{spec.title}: {int(done.sum())} of {done.size} blocks of {spec.block} members")
    for condition in spec.conditions():
        made = sum(len(spec.members_of(b)) for b in range(spec.blocks) if done[(*condition.index, b)])
        typer.echo(f"  {condition}: {made} of {spec.members} members")


@study.command("show")
def study_show(store: StoreArgument) -> None:
    """Show means with standard errors, and the number that the study ends in."""
    from rich.console import Console

    from vkernel.study import load, report

    Console(soft_wrap=False).print(report.table(load(store)))


@study.command("plot")
def study_plot(
    store: StoreArgument,
    out: Annotated[Path, typer.Option(metavar="FILE", help="A .png, .svg or .pdf file.")] = Path("study.png"),
) -> None:
    """Draw the figure that the study's [figure] table describes."""
    from vkernel import plots
    from vkernel.study import load, report

    typer.echo(f"wrote {plots.save(report.figure(load(store)), out)}")


@study.command("export")
def study_export(
    store: StoreArgument,
    out: Annotated[Path, typer.Option(metavar="FILE", help="A .nc file (NetCDF, all arrays) or .csv (numbers only).")],
) -> None:
    """Write the results to a file for other programs."""
    from vkernel.study import report

    typer.echo(f"wrote {report.export(store, out)}")
