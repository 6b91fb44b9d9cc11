"""The command line: ``vkernel profile``, ``audit``, ``study``, ``reproduce`` and ``explore``.

Input that cannot be used is refused with one sentence on standard error and exit code 2.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

import vkernel as vk
from vkernel.cli.audit import audit
from vkernel.cli.common import (
    Device,
    Html,
    Json,
    Key,
    Layout,
    Quiet,
    Scale,
    Seed,
    argument,
    load_data,
    on_device,
    option,
    writable,
    write,
)
from vkernel.cli.study import study
from vkernel.core.errors import InputError, require

app = typer.Typer(name="vkernel", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, option("shared.version")] = False) -> None:
    """What does a diffusion model learn from a finite data set?"""
    if version:
        typer.echo(f"vkernel {vk.__version__}")
        raise typer.Exit


@app.command()
def profile(
    data: Annotated[str, argument("profile.data")],
    process: Annotated[str, option("profile.process")] = "vp",
    json: Json = None,
    html: Html = None,
    queries: Annotated[int | None, option("profile.queries")] = None,
    top: Annotated[int, option("profile.top")] = 10,
    scale: Scale = "auto",
    key: Key = None,
    layout: Layout = None,
    device: Device = "cpu",
    memory: Annotated[float | None, option("profile.memory")] = None,
    seed: Seed = 0,
    quiet: Quiet = False,
) -> None:
    """Profile training data: at which noise is the target noisy, and which points and pairs does it concern?"""
    from vkernel.reports.profile import table

    parsed = vk.process.parse(process)
    writable(json, html)
    require(memory is None or memory > 0, f"--memory must be positive; got {memory}.")
    own = load_data(data, scale, key, layout).to(on_device(device))
    limit = None if memory is None else int(memory * 2**30)
    found = vk.profile(own, parsed, queries=queries, top=top, seed=seed, memory=limit, progress=not quiet)
    write(found, None if quiet else table(found), json, html)


app.command()(audit)


@app.command()
def reproduce(
    out: Annotated[Path, option("reproduce.out")] = Path("out"),
    seed: Seed = 0,
    everything: Annotated[bool, option("reproduce.everything")] = False,
    workers: Annotated[int | None, option("reproduce.workers")] = None,
) -> None:
    """Make the figures of the paper and further ones, a page that explains each, and a scorecard of the claims."""
    vk.reproduce.run(out, seed=seed, everything=everything, workers=workers or os.cpu_count() or 1)


@app.command()
def explore(
    port: Annotated[int, option("explore.port")] = 5007,
    open_page: Annotated[bool, option("explore.open_page")] = True,
    address: Annotated[str, option("explore.address")] = "127.0.0.1",
) -> None:
    """Drag training points in the browser and watch what a diffusion model would learn from them."""
    from vkernel.explore.serve import serve

    serve(port, open_page, address)


app.add_typer(study, name="study")


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
        if not error.format_message():  # the help was shown
            sys.exit(2)
        command = [part for part in sys.argv[1:2] if part in ("profile", "audit", "reproduce", "explore", "study")]
        _fail(f"{error.format_message()} See '{' '.join(['vkernel', *command, '--help'])}'.")
    if code == 130:  # typer returns this after an interrupt instead of raising
        _fail("stopped.", 130)
    sys.exit(code if isinstance(code, int) else 0)  # the code of a command that left early


def _fail(sentence: str, code: int = 2) -> NoReturn:
    print(f"vkernel: {' '.join(sentence.split())}", file=sys.stderr)
    sys.exit(code)
