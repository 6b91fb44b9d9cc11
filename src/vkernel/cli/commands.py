"""The commands, and the sentences for errors of the user."""

from __future__ import annotations

import os
import re
import sys
import warnings
from pathlib import Path
from typing import Annotated

import typer

import vkernel as vk
from vkernel.cli.audit import audit
from vkernel.cli.common import (
    Command,
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
    write,
)
from vkernel.cli.monitor import monitor
from vkernel.cli.streams import fail, say, warn
from vkernel.cli.study import study
from vkernel.core.errors import InputError, require

FULL = re.compile(
    "can.?.?t allocate|out of memory|not enough memory|bad_alloc|size calculation overflow", re.IGNORECASE
)
TRIED = re.compile(r"allocate (\d[\d.]* *\w+)")
LESS = "give less data, or smaller sizes, --memory or --batch among them where a command has them"

app = typer.Typer(name="vkernel", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, option("shared.version")] = False) -> None:
    """What does a diffusion model learn from a finite data set?"""
    if version:
        say(f"vkernel {vk.__version__}")
        raise typer.Exit


@app.command(cls=Command)
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
    sensible = memory is None or 2**-10 <= memory <= 2**20
    require(sensible, f"--memory must be a number of GiB, 0.001 or more; got {memory}.")
    own = load_data(data, scale, key, layout).to(on_device(device))
    limit = None if memory is None else int(memory * 2**30)
    found = vk.profile(own, parsed, queries=queries, top=top, seed=seed, memory=limit, progress=not quiet)
    write(found, None if quiet else table(found), json, html)


app.command(cls=Command)(audit)
app.command(cls=Command)(monitor)


@app.command()
def reproduce(
    folder: Annotated[Path, option("reproduce.folder")] = Path("out"),
    seed: Seed = 0,
    everything: Annotated[bool, option("reproduce.everything")] = False,
    workers: Annotated[int | None, option("reproduce.workers")] = None,
) -> None:
    """Make the figures of the paper and further ones, a page that explains each, and a scorecard of the claims."""
    import vkernel.plots  # noqa: F401  (refuses settings of matplotlib that cannot be read)

    vk.reproduce.run(folder, seed=seed, everything=everything, workers=workers or os.cpu_count() or 1)


@app.command()
def explore(
    port: Annotated[int, option("explore.port")] = 5007,
    open_page: Annotated[bool, option("explore.open_page")] = True,
    address: Annotated[str, option("explore.address")] = "127.0.0.1",
) -> None:
    """Drag training points in the browser and watch what a diffusion model would learn from them."""
    import vkernel.plots  # noqa: F401
    from vkernel.explore.serve import serve

    serve(port, open_page, address)


app.add_typer(study, name="study")


def run() -> int:
    """Run a command and return its exit code; an error of the user is one sentence and 2, a warning one line."""
    try:
        with warnings.catch_warnings():
            warnings.showwarning = warn
            code = app(standalone_mode=False)
    except typer.Exit as leave:
        return leave.exit_code
    except typer.Abort:
        code = 130
    except BrokenPipeError:
        return 141  # as if the signal had ended it
    except Exception as error:
        sentence = _sentence(error)
        if sentence is None:
            raise
        return fail(sentence) if sentence else 2  # without one the help was shown
    if code == 130:  # typer returns this after an interrupt instead of raising
        return fail("stopped.", 130)
    return code if isinstance(code, int) else 0  # the code of a command that left early


def _sentence(error: Exception) -> str | None:
    """Return the sentence for an error of the user or of the machine; ``None`` for one of the package."""
    if isinstance(error, InputError):
        return str(error)
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and FULL.search(str(error))):
        size = TRIED.search(str(error))
        tried = f" to allocate {size[1]}" if size else ""
        return f"Not enough memory{tried}; {LESS}."
    if isinstance(error, UnicodeEncodeError) and not error.object.isascii():
        return f"The name {error.object} cannot be used here: {error.reason}. Rename the file, or link to it."
    if isinstance(error, OSError):
        return f"{error.strerror or error}: {error.filename or ''}".rstrip(": ") + "."
    if not hasattr(error, "format_message"):  # ClickException of click, or of the copy that newer typers contain
        return None
    command = [
        part for part in sys.argv[1:2] if part in ("profile", "audit", "monitor", "reproduce", "explore", "study")
    ]
    words = error.format_message().rstrip(".")
    return words and f"{words}. See '{' '.join(['vkernel', *command, '--help'])}'."
