"""``vkernel explore``."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["explore"]


def explore(
    port: Annotated[int, typer.Option(help="Port of the page; 0 takes any that is free.")] = 5007,
    open_page: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in a browser.")] = True,
    address: Annotated[
        str, typer.Option(help="Where to listen. Other than 127.0.0.1 lets other machines in: there is no password.")
    ] = "127.0.0.1",
) -> None:
    """Drag training points in the browser and watch what a diffusion model would learn from them."""
    from vkernel.explore.serve import serve

    serve(port, open_page, address)
