"""Options that several commands share, and how commands read their data and write their results."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console, RenderableType
from typer import Argument, Option

import vkernel as vk
from vkernel.core.errors import InputError, require

if TYPE_CHECKING:
    import torch

    from vkernel.reports.audit import Audit

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
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        why = str(error).splitlines()[0].rstrip(".")
        raise InputError(f"The device {name!r} cannot be used here: {why}.") from None
    return device


def writable(*files: Path | None) -> None:
    """Check before a long computation that the files for its results can be written."""
    for target in filter(None, files):
        require(not target.is_dir(), f"{target} is a folder; give the name of a file to write.")
        parent = target.expanduser().absolute().parent
        require(not parent.exists() or parent.is_dir(), f"{parent} is a file; {target} cannot lie in it.")


def write(found: vk.Profile | Audit, table: RenderableType | None, json: Path | None, html: Path | None) -> None:
    """Print the table of a result, and write its files."""
    if table is not None:
        Console(soft_wrap=False).print(table)
    if json is not None:
        typer.echo(f"wrote {found.to_json(json)}")
    if html is not None:
        typer.echo(f"wrote {found.to_html(html)}")
