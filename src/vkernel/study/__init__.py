"""Studies: declared sweeps over ensembles, which survive being killed and move to a cluster as they are.

A study is a file (:mod:`vkernel.study.spec`); its results are labelled arrays in a Zarr store
(:mod:`vkernel.study.store`), computed in blocks of members (:mod:`vkernel.study.work`), one after the other or on a Ray
cluster (:mod:`vkernel.study.runners`). What a block holds depends on the study and the block's index alone: not on
order, workers or interruptions.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vkernel.core.errors import require
from vkernel.study import runners
from vkernel.study.live import Table
from vkernel.study.spec import Spec, read
from vkernel.study.store import Store, load
from vkernel.study.work import prepare

if TYPE_CHECKING:
    import xarray

__all__ = ["Spec", "load", "read", "run"]


def run(
    spec: str | Path | dict[str, Any] | Spec,
    store: str | Path,
    runner: str = "inline",
    *,
    address: str | None = None,
    large: bool = False,
    show: bool = True,
) -> xarray.Dataset:
    """Compute what is missing of a study in ``store``, and return all of it.

    ``spec`` is a TOML file or a dictionary. ``runner`` is "inline" or "ray"; ``address`` is that of a Ray cluster
    ("auto", or HOST:PORT; default: a cluster on this machine). Stop it whenever you like: run again to go on.
    """
    found = read(spec, large=large)
    require(runner in runners.RUNNERS, f"runner must be one of {', '.join(runners.RUNNERS)}; got {runner!r}.")
    require(address is None or runner == "ray", "An address is for the runner 'ray'.")
    prepare(found)
    with Store.open(store, found) as opened:
        missing = opened.missing()
        made = contextlib.closing(runners.RUNNERS[runner](found, missing, address))
        with Table(found, opened.done, show=show) as table, made as results:
            for condition, block, values in results:
                opened.write(condition, block, values)
                table.advance(condition, block)
        return opened.dataset()
