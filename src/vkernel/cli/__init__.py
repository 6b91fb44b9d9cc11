"""The command line: ``vkernel profile``, ``audit``, ``study``, ``reproduce`` and ``explore``.

Input that cannot be used is refused with one sentence on standard error and exit code 2.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from typer import Argument, Option

from vkernel.cli.audit import audit
from vkernel.cli.common import DATA, load_data, on_device, writable
from vkernel.core.errors import InputError, require

__all__ = ["app", "main"]

Json = Annotated[Path | None, Option(metavar="FILE", help="Write all numbers to FILE.")]
Html = Annotated[Path | None, Option(metavar="FILE", help="Write a self-contained page to FILE.")]
Seed = Annotated[int, Option(help="Seed of all random draws.")]
Quiet = Annotated[bool, Option("--quiet", "-q", help="Show neither progress nor a table.")]
Store = Annotated[Path, Argument(metavar="STORE", help="The folder that study run wrote.")]

app = typer.Typer(
    name="vkernel",
    help="What does a diffusion model learn from a finite data set?",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.command()
def profile(
    data: Annotated[str, Argument(metavar="DATA", help=f"Training data: {DATA}")],
    process: Annotated[
        str, Option(help="Forward process: vp, vpsong, ddpm, cosine, ve, edm, flow or toy; or vp:eps=1e-4.")
    ] = "vp",
    json: Json = None,
    html: Html = None,
    queries: Annotated[int | None, Option(help="Queries per noise level (default: 256 to 2048, by data size).")] = None,
    top: Annotated[int, Option(help="How many isolated points and boundary pairs to list.")] = 10,
    scale: Annotated[
        str, Option(help="auto (uint8 to [-1, 1], else unchanged), none, or LOW,HIGH for integers.")
    ] = "auto",
    key: Annotated[str | None, Option(help="The array, tensor or column to read, if there are several.")] = None,
    layout: Annotated[str | None, Option(help="Layout of a picture that holds many images: sheet:32x32.")] = None,
    device: Annotated[str, Option(help="The device for the computation: cpu, cuda, cuda:1, …")] = "cpu",
    memory: Annotated[
        float | None, Option(help="Working memory in GB (default: a quarter of the free memory).")
    ] = None,
    seed: Seed = 0,
    quiet: Quiet = False,
) -> None:
    """Profile training data: at which noise is the target noisy, what will be copied, where would a model mix?"""
    from vkernel.process import parse
    from vkernel.reports.profile import profile as run
    from vkernel.reports.profile.report import table

    parsed = parse(process)
    writable(json, html)
    require(memory is None or memory > 0, f"--memory must be positive; got {memory}.")
    found = run(
        load_data(data, scale, key, layout).to(on_device(device)),
        parsed,
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


app.command()(audit)


@app.command()
def reproduce(
    out: Annotated[Path, Option(metavar="FOLDER", help="Folder for the figures and index.html.")] = Path("out"),
    seed: Seed = 0,
    everything: Annotated[
        bool, Option("--all", help="Add the shipped studies; they can be stopped and resumed by running again.")
    ] = False,
) -> None:
    """Make the figures of the paper and further ones, with a page that explains what each shows."""
    from vkernel.reproduce import run

    run(out, seed=seed, everything=everything)


@app.command()
def explore(
    port: Annotated[int, Option(help="Port of the page; 0 takes any free one.")] = 5007,
    open_page: Annotated[bool, Option("--open/--no-open", help="Open the page in a browser.")] = True,
    address: Annotated[
        str,
        Option(help="The address to listen on. Any but 127.0.0.1 admits other machines: there is no password."),
    ] = "127.0.0.1",
) -> None:
    """Drag training points in the browser and watch what a diffusion model would learn from them."""
    from vkernel.explore.serve import serve

    serve(port, open_page, address)


study = typer.Typer(help="Run declared sweeps over ensembles; a stopped run continues.", no_args_is_help=True)


@study.command("run")
def study_run(
    spec: Annotated[Path, Argument(metavar="SPEC", help="The study: a TOML file, or a name that study list prints.")],
    store: Annotated[Path, Option(metavar="FOLDER", help="The folder for results; run again to continue.")],
    runner: Annotated[
        str, Option(help="inline (this process), threads (of this process), or ray (a cluster).")
    ] = "inline",
    address: Annotated[str | None, Option(help="The Ray cluster: auto, or HOST:PORT (default: this machine).")] = None,
    large: Annotated[bool, Option("--large", help="Use the larger sizes that the study gives.")] = False,
    quiet: Quiet = False,
) -> None:
    """Compute the missing part of a study. It can be stopped at any time; run it again to continue."""
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
def study_status(store: Store) -> None:
    """Show how many members of each condition are computed."""
    from vkernel.study import load, report

    found = load(store)
    spec, done = report.spec_of(found), found["done"].values
    typer.echo(f"{spec.title}: {int(done.sum())} of {done.size} blocks of {spec.block} members")
    for condition in spec.conditions():
        made = sum(len(spec.members_of(b)) for b in range(spec.blocks) if done[(*condition.index, b)])
        typer.echo(f"  {condition}: {made} of {spec.members} members")


@study.command("show")
def study_show(store: Store) -> None:
    """Show means with standard errors, and the number that the study ends in."""
    from vkernel.study import load, report

    Console(soft_wrap=False).print(report.table(load(store)))


@study.command("plot")
def study_plot(
    store: Store,
    out: Annotated[Path, Option(metavar="FILE", help="A .png, .svg or .pdf file.")] = Path("study.png"),
) -> None:
    """Draw the figure that the study describes."""
    from vkernel import plots
    from vkernel.study import load, report

    typer.echo(f"wrote {plots.save(report.figure(load(store)), out)}")


@study.command("export")
def study_export(
    store: Store,
    out: Annotated[Path, Option(metavar="FILE", help="A .nc file (NetCDF, all arrays) or .csv (numbers only).")],
) -> None:
    """Write the results to a file for other programs."""
    from vkernel.study import report

    typer.echo(f"wrote {report.export(store, out)}")


app.add_typer(study, name="study")


def _version(wanted: bool) -> None:
    if wanted:
        from vkernel.version import __version__

        typer.echo(f"vkernel {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def main() -> NoReturn:
    """Run the command line; an error of the user is one sentence and exit code 2."""
    try:
        code = app(standalone_mode=False)
    except InputError as error:
        _fail(str(error))
    except typer.Exit as leave:
        sys.exit(leave.exit_code)
    except (typer.Abort, KeyboardInterrupt):
        _fail("stopped.", 130)
    except MemoryError:
        _fail("Not enough memory; give a smaller --memory, or fewer --queries.")
    except OSError as error:
        _fail(f"{error.strerror or error}: {error.filename or ''}".rstrip(": ") + ".")
    except Exception as error:
        if not hasattr(error, "format_message"):  # ClickException of click, or of the copy that newer typers contain
            raise
        if len(sys.argv) == 1:  # the help was shown
            sys.exit(2)
        _fail(f"{error.format_message()} See 'vkernel --help'.")
    if code == 130:  # typer returns this after an interrupt instead of raising
        _fail("stopped.", 130)
    sys.exit(code if isinstance(code, int) else 0)  # the code of a command that left early


def _fail(sentence: str, code: int = 2) -> NoReturn:
    print(f"vkernel: {' '.join(sentence.split())}", file=sys.stderr)
    sys.exit(code)
