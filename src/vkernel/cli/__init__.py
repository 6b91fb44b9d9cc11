"""The command line: ``vkernel profile``, ``audit``, ``study``, ``reproduce`` and ``explore``.

Input that cannot be used is refused with one sentence on standard error and exit code 2.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from vkernel.cli.audit import audit
from vkernel.cli.common import DATA, load_data, on_device, writable
from vkernel.cli.study import study
from vkernel.core.errors import InputError, require

__all__ = ["app", "main"]

app = typer.Typer(
    name="vkernel",
    help="What does a diffusion model learn from a finite data set?",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.command()
def profile(
    data: Annotated[str, typer.Argument(metavar="DATA", help=f"Training data: {DATA}")],
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
        typer.Option(help="auto (uint8 images to [-1, 1], else unchanged), none, or LOW,HIGH for stored integers."),
    ] = "auto",
    key: Annotated[str | None, typer.Option(help="The array, tensor or column to read, if there are several.")] = None,
    layout: Annotated[str | None, typer.Option(help="Layout of a picture that holds many images: sheet:32x32.")] = None,
    device: Annotated[str, typer.Option(help="The device for the computation: cpu, cuda, cuda:1, …")] = "cpu",
    memory: Annotated[
        float | None, typer.Option(help="Working memory in GB (default: a quarter of the free memory).")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of all random draws.")] = 0,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress and no table.")] = False,
) -> None:
    """Profile training data: at which noise is the target noisy, what will be copied, where would a model mix?"""
    from rich.console import Console

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
app.add_typer(study, name="study")


@app.command()
def reproduce(
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Folder for the figures and index.html.")] = Path("out"),
    seed: Annotated[int, typer.Option(help="Seed of all random draws.")] = 0,
    everything: Annotated[
        bool, typer.Option("--all", help="Add the shipped studies; they can be stopped and resumed by running again.")
    ] = False,
) -> None:
    """Make the figures of the paper and further ones, with a page that explains what each shows."""
    from vkernel.reproduce import run

    run(out, seed=seed, everything=everything)


@app.command()
def explore(
    port: Annotated[int, typer.Option(help="Port of the page; 0 takes any free one.")] = 5007,
    open_page: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in a browser.")] = True,
    address: Annotated[
        str,
        typer.Option(help="The address to listen on. Any but 127.0.0.1 admits other machines: there is no password."),
    ] = "127.0.0.1",
) -> None:
    """Drag training points in the browser and watch what a diffusion model would learn from them."""
    from vkernel.explore.serve import serve

    serve(port, open_page, address)


def _version(wanted: bool) -> None:
    if wanted:
        from vkernel.version import __version__

        typer.echo(f"vkernel {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
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
