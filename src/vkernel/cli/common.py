"""Options that several commands share, and how commands read their data and write their results."""

from __future__ import annotations

import io
import re
import sys
import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Console, Group, RenderableType
from rich.measure import Measurement
from rich.segment import Segment, Segments
from rich.table import Table
from typer import Argument, Context, Option
from typer.core import TyperCommand

import vkernel as vk
from vkernel.cli.streams import put, say
from vkernel.core.errors import InputError, shown
from vkernel.core.files import check_outputs, stream_to

if TYPE_CHECKING:
    import torch

    from vkernel.reports.audit import Audit
    from vkernel.reports.monitor.result import RunReport

TEXTS = tomllib.loads(Path(__file__).with_name("options.toml").read_text(encoding="utf8"))


def option(where: str, kind: Callable[..., object] = Option) -> object:
    """Return the option (or argument) that options.toml describes as ``where``, "command.name"."""
    command, name = where.split(".")
    given = dict(TEXTS[command][name])
    text = given.pop("help").replace("{formats}", TEXTS["formats"])
    return kind(*given.pop("flags", ()), help=text, rich_help_panel=given.pop("panel", None), **given)


argument = partial(option, kind=Argument)
Key = Annotated[str | None, option("shared.key")]
Layout = Annotated[str | None, option("shared.layout")]
Scale = Annotated[str, option("shared.scale")]
OUTPUTS = ("json", "html", "out")
Json = Annotated[Path | None, option("shared.json")]
Html = Annotated[Path | None, option("shared.html")]
Quiet = Annotated[bool, option("shared.quiet")]
Device = Annotated[str, option("shared.device")]
Seed = Annotated[int, option("shared.seed")]


def load_data(data: str, scale: str = "auto", key: str | None = None, layout: str | None = None) -> vk.Empirical:
    """Load the data that an argument names."""
    name = data.removeprefix("toy:")
    return vk.load(data, scale=scale, key=key, layout=layout) if name == data else vk.data.toy(name)


def on_device(name: str) -> torch.device:
    """Return the device of that name, if it can be used."""
    import torch

    try:
        device = torch.device(name)
        torch.ones(1, device=device).item()  # the device "meta" holds no values
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        why = str(error).splitlines()[0].rstrip(".")
        raise InputError(f"The device {name!r} cannot be used here: {why}.") from None
    return device


class Command(TyperCommand):
    """A command that begins with a check of the files that it will write, against all others that its options name."""

    def invoke(self, ctx: Context) -> object:  # type: ignore[override]  # typer has its own class of contexts
        """Check the outputs and run the command."""
        try:
            Path.cwd()
        except OSError as error:  # MKL would stop the process
            raise InputError(f"The working folder cannot be used: {error.strerror}.") from None
        outputs = {f"--{name}": value for name, value in ctx.params.items() if name in OUTPUTS}
        given = [value for name, value in ctx.params.items() if name not in OUTPUTS]
        values = [one for value in given for one in (value if isinstance(value, list | tuple) else [value])]
        texts = [str(value) for value in values if isinstance(value, str | Path)]
        check_outputs(
            outputs, {file for text in texts for part in (text, *re.split("[,@]", text)) for file in _files(part)}
        )
        if outputs.get("--html") is not None:
            import vkernel.plots  # noqa: F401  (what prevents its import should not come after the computation)
        return super().invoke(ctx)


def _files(text: str) -> set[str]:
    """Return the names of files that a text may hold: itself, the file of file.py:name, that of package.module:name."""
    first, colon, _ = text.partition(":")
    module = first.replace(".", "/") + ".py" if colon else ""
    return {text, first, module, text.rpartition(":")[0]} - {""}


def show(table: RenderableType) -> None:
    """Print a table, wider than the terminal if its words need that: rich would cut them. Texts are no markup."""
    page = io.TextIOWrapper(io.BytesIO(), sys.stdout.encoding, errors=sys.stdout.errors)
    terminal = sys.stdout.isatty() or None
    console = Console(file=page, force_terminal=terminal, markup=False, emoji=False, highlight=False)
    for part in table.renderables if isinstance(table, Group) else [table]:
        for column in part.columns if isinstance(part, Table) else ():
            column.overflow = "fold"
    need = Measurement.get(console, console.options.update(width=10_000), table).minimum
    console.width = max(console.width, need)
    lines = console.render_lines(table, pad=False, new_lines=True)
    texts = [Segment(s.text if s.text == "\n" else shown(s.text), s.style) for line in lines for s in line]
    console.print(Segments(texts), end="", crop=False)
    page.seek(0)
    put(page.read())


def write(
    found: vk.Profile | Audit | RunReport, table: RenderableType | None, json: Path | None, html: Path | None
) -> None:
    """Write the files of a result, then print its table; a file that cannot be written prevents neither."""
    failed: list[InputError] = []
    wrote = []
    for save, path in ((found.to_json, json), (found.to_html, html)):
        try:
            wrote += [] if path is None else [save(path)]
        except InputError as error:
            failed.append(error)
    if table is not None:
        show(table)
    for path in wrote:
        if path.is_file() and stream_to(path.stat()) is None:  # a pipe or a redirected stream holds the result alone
            say(f"wrote {path}")
    if failed:
        raise failed[0]
