"""Studies: declared sweeps over ensembles, which survive being killed and run unchanged on a cluster.

A study is a file (:mod:`vkernel.study.spec`); its results are labelled arrays in a Zarr store
(:mod:`vkernel.study.store`), computed in blocks of members (:mod:`vkernel.study.work`), one after the other or on a Ray
cluster (:mod:`vkernel.study.runners`). The contents of a block depend on the study and the block's index alone: not on
order, workers or interruptions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from vkernel.core.checks import check_choice
from vkernel.core.errors import require
from vkernel.core.progress import Progress
from vkernel.study.runners import RUNNERS, LiveTable
from vkernel.study.spec import Spec, read
from vkernel.study.store import Store, load
from vkernel.study.work import prepare

if TYPE_CHECKING:
    import xarray

__all__ = ["Spec", "load", "read", "run"]


def run(
    spec: str | Path | Mapping[str, object] | Spec,
    store: str | Path,
    runner: str = "inline",
    *,
    address: str | None = None,
    large: bool = False,
    progress: Progress = True,
) -> xarray.Dataset:
    """Compute the missing blocks of a study in ``store``, and return all of its results.

    Args:
        spec: a TOML file, the name of a shipped study, or a dictionary.
        store: a folder; it is made if it is not there. A run that was stopped goes on where it was.
        runner: "inline", "threads" or "ray".
        address: of a Ray cluster, "auto" or HOST:PORT; by default a cluster on this machine.
        large: take the values of the study's ``[large]`` table.
        progress: ``True`` shows a live table, ``False`` nothing; a callable receives each condition and the share of
            all blocks that are done.
    """
    study = read(spec, large=large)
    check_choice(runner, "runner", RUNNERS)
    require(address is None or runner == "ray", "An address is for the runner 'ray'.")
    prepare(study)
    with Store.open(store, study) as opened:
        results = contextlib.closing(RUNNERS[runner](study, opened.missing(), address))
        with LiveTable(study, opened.done, progress) as table, results as blocks:
            for condition, block, values in blocks:
                opened.write(condition, block, values)
                table.advance(condition, block)
        return opened.dataset()
