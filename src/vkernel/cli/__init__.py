"""The command line: ``vkernel profile``, ``audit``, ``study``, ``reproduce`` and ``explore``.

One file a command. What cannot be used is refused with one sentence on standard error and exit code 2.
"""

from __future__ import annotations

import sys
from typing import Annotated, NoReturn

import typer

from vkernel.cli.audit import audit
from vkernel.cli.explore import explore
from vkernel.cli.profile import profile
from vkernel.cli.reproduce import reproduce
from vkernel.cli.study import study
from vkernel.core.errors import InputError

__all__ = ["app", "main"]

app = typer.Typer(
    name="vkernel",
    help="What does a diffusion model really learn from a finite data set?",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        from vkernel.version import __version__

        typer.echo(f"vkernel {__version__}")
        raise typer.Exit


for command in (profile, audit, reproduce, explore):
    app.command()(command)
app.add_typer(study, name="study")


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    pass


def main() -> NoReturn:
    """Entry point: errors that are the user's to mend are one sentence, exit code 2."""
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
    except Exception as error:
        if hasattr(error, "format_message"):  # a wrong option or argument, in click's own words
            if len(sys.argv) == 1:  # the help was shown
                sys.exit(2)
            _fail(f"{error.format_message()} See 'vkernel --help'.")
        if isinstance(error, OSError):
            _fail(f"{error.strerror or error}: {error.filename or ''}".rstrip(": ") + ".")
        raise
    if code == 130:  # typer's word for an interrupt, which it does not pass on
        _fail("stopped.", 130)
    sys.exit(code if isinstance(code, int) else 0)  # what a command left with, if it left early


def _fail(sentence: str, code: int = 2) -> NoReturn:
    print(f"vkernel: {' '.join(sentence.split())}", file=sys.stderr)
    sys.exit(code)
