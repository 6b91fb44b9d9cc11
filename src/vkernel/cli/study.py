"""``vkernel study``: declared sweeps over ensembles."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

import vkernel as vk
from vkernel.cli.common import Command, Quiet, argument, option, show
from vkernel.cli.streams import say
from vkernel.core.errors import require
from vkernel.core.files import make_folder, write

Store = Annotated[Path, argument("study.folder")]
study = typer.Typer(help="Run declared sweeps over ensembles; a stopped run continues.", no_args_is_help=True)


@study.command("run")
def study_run(
    spec: Annotated[Path, argument("study.spec")],
    store: Annotated[Path, option("study.store")],
    runner: Annotated[str | None, option("study.runner")] = None,
    address: Annotated[str | None, option("study.address")] = None,
    large: Annotated[bool, option("study.large")] = False,
    only: Annotated[str, option("study.only")] = "",
    seed: Annotated[int | None, option("study.seed")] = None,
    quiet: Quiet = False,
) -> None:
    """Compute the missing part of a study. It can be stopped at any time; run it again to continue."""
    part = vk.study.parse_part(only)
    found = vk.study.run(spec, store, runner, address=address, large=large, only=part, seed=seed, progress=not quiet)
    if not quiet:
        show(vk.study.report.table(found))
    hint = f"; vkernel study report {store} decides the rules" if "level" in found.dims else ""
    say(f"results are in {store}{hint}")


@study.command("list")
def study_list() -> None:
    """List the studies that come with the package; study run takes their names, or their files."""
    for name, path in vk.study.shipped().items():
        say(f"{name}: {vk.study.read(path).question}")
        say(f"  {path}")


@study.command("status")
def study_status(store: Store) -> None:
    """Show how many members of each condition are computed."""
    found = vk.study.load(store)
    spec, done = vk.study.report.spec_of(found), found["done"].values
    conditions = list(spec.conditions())
    count = len(conditions) * spec.blocks
    say(f"{spec.title}: {int(done.sum())} of {count} blocks of {spec.block} members")
    for condition in conditions:
        made = sum(len(spec.members_of(b)) for b in range(spec.blocks) if done[(*condition.index, b)])
        say(f"  {condition}: {made} of {spec.members} members")


@study.command("show")
def study_show(store: Store) -> None:
    """Show means with standard errors, and the number that the study ends in."""
    show(vk.study.report.table(vk.study.load(store)))


@study.command("report")
def study_report(
    store: Store,
    out: Annotated[Path | None, option("study.answer")] = None,
    level: Annotated[float, option("study.level")] = 0.3,
    draws: Annotated[int, option("study.draws")] = 2000,
) -> None:
    """Decide the rules on target noise, for a study of networks such as images; --out adds figures and JSON.

    For a study of causes, such as images_causes, show the share of each in the variance over trainings."""
    from vkernel.reports import target_noise

    found = vk.study.load(store)
    if "cause" in found.dims:
        show(target_noise.causes_table(target_noise.causes(found, draws=draws)))
        return
    outcomes = target_noise.rules(found, draws=draws)
    if out is not None:
        _check_outside(out, store)
        numbers = target_noise.in_cells(target_noise.summary(found, draws=draws))
        folder = make_folder(out)
        answer = target_noise.answer(found, draws=draws)
        write(folder / "answer.json", json.dumps(answer, indent=1, ensure_ascii=False) + "\n")
        vk.plots.save(vk.plots.twin_curves(numbers, level), folder / "curves.png")
        vk.plots.save(vk.plots.twin_frontiers(numbers), folder / "frontiers.png")
        vk.plots.save(vk.plots.twin_variances(numbers), folder / "variances.png")
    show(target_noise.table(outcomes))
    if out is not None:
        say(f"wrote answer.json, curves.png, frontiers.png and variances.png to {out}")


def _check_outside(out: Path, store: Path) -> None:
    inside = store.resolve() in out.resolve().parents
    require(not inside, f"{out} lies in the store {store}, which holds results alone; give a file outside.")


@study.command("plot", cls=Command)
def study_plot(store: Store, out: Annotated[Path, option("study.figure")] = Path("study.png")) -> None:
    """Draw the figure that the study describes."""
    _check_outside(out, store)
    say(f"wrote {vk.plots.save(vk.study.report.figure(vk.study.load(store)), out)}")


@study.command("export", cls=Command)
def study_export(store: Store, out: Annotated[Path, option("study.export")]) -> None:
    """Write the results to a file for other programs."""
    _check_outside(out, store)
    say(f"wrote {vk.study.report.export(store, out)}")
