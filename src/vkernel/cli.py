"""The command line: ``vkernel profile``, ``audit``, ``study``, ``reproduce`` and ``explore``.

Input that cannot be used is refused with one sentence on standard error and exit code 2.
"""

from __future__ import annotations

import os
import sys
import tomllib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console, RenderableType
from typer import Argument, Option

import vkernel as vk
from vkernel.core.errors import InputError, require

if TYPE_CHECKING:
    import torch

    from vkernel.reports.audit import Audit

TEXTS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf8"))


def option(where: str, kind: Callable[..., object] = Option) -> object:
    """Return the option (or argument) that cli.toml describes as ``where``, "command.name"."""
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
Store = Annotated[Path, argument("study.folder")]
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
    _write(found, None if quiet else table(found), json, html)


@app.command()
def audit(
    weights: Annotated[list[Path], argument("audit.weights")],
    data: Annotated[str | None, option("audit.data")] = None,
    test: Annotated[str | None, option("audit.test")] = None,
    module: Annotated[str | None, option("audit.module")] = None,
    predicts: Annotated[str, option("audit.predicts")] = "noise",
    time: Annotated[str, option("audit.time")] = "index",
    betas: Annotated[str, option("audit.betas")] = "linear:1e-4:.02:1000",
    range: Annotated[str, option("audit.range")] = "-1,1",
    strip: Annotated[str, option("audit.strip")] = "",
    labels: Annotated[Path | None, option("audit.labels")] = None,
    label: Annotated[int | None, option("audit.label")] = None,
    test_labels: Annotated[Path | None, option("audit.test_labels")] = None,
    latents: Annotated[str | None, option("audit.latents")] = None,
    scale: Scale = "auto",
    key: Key = None,
    layout: Layout = None,
    features: Annotated[str, option("audit.features")] = "pixels",
    threshold: Annotated[float, option("audit.threshold")] = 1 / 3,
    group: Annotated[str | None, option("audit.group")] = None,
    quick: Annotated[bool, option("audit.quick")] = False,
    full_sampler: Annotated[bool, option("audit.full_sampler")] = False,
    samples: Annotated[int | None, option("audit.samples")] = None,
    seed: Seed = 0,
    device: Device = "cpu",
    json: Json = None,
    html: Html = None,
    limit: Annotated[float | None, option("audit.fail_if_memorised")] = None,
    quiet: Quiet = False,
) -> None:
    """Audit checkpoints: copies of training images, membership, blind directions, and agreement of several runs.

    Unconditional networks, class-conditional ones (one class at a time) and networks in latent space (--latents).
    Guided sampling and text-conditional pipelines are not supported: they sample from no model's own score."""
    from vkernel.reports.audit import Sizes
    from vkernel.reports.audit.report import screen

    writable(json, html)
    require(0 <= (limit or 0) <= 1, f"--fail-if-memorised must be a share between 0 and 1; got {limit}.")
    require(data is not None or latents is not None, "Give the training set of the network: --data DATA.")
    require(data is None or latents is None, "--latents takes the place of --data; give one of them.")
    require(samples is None or samples >= 16, f"--samples must be 16 or more; got {samples}.")
    where = on_device(device)
    if latents is not None:
        require(range == "-1,1", "Latents are floats and are used as they are; --range does not apply.")
        scale = "none"
    own = _of_class(load_data(data or latents or "", scale, key, layout), labels, label, "training").to(where)
    held = None if test is None else load_data(test, scale, key, layout)
    held = None if held is None else _of_class(held, test_labels, label, "test").to(where)
    stated: dict[str, Any] = {"device": where, "shape": own.shape, "predicts": predicts, "time": time, "betas": betas}
    stated |= {"range": range, "strip": strip, "label": label}
    nets = [_read(path, module, stated) for path in weights]
    groups = None if group is None else [name.strip() for name in group.split(",")]
    sizes = Sizes.quick() if quick else Sizes()
    sizes = replace(sizes, samples=samples or sizes.samples, steps=None if full_sampler else sizes.steps)
    compared: dict[str, Any] = {"features": features, "threshold": threshold, "groups": groups}
    found = vk.audit(nets, own, test=held, **compared, sizes=sizes, seed=seed, progress=not quiet)
    _write(found, None if quiet else screen(found), json, html)
    most = found.memorised
    if limit is not None and most is not None and most.value > limit:
        share = f"{100 * most.value:.3g} % of the samples are copies, more than {100 * limit:.3g} %"
        typer.echo(f"vkernel: {share}.", err=True)
        raise typer.Exit(1)


def _read(path: Path, module: str | None, stated: dict[str, Any]) -> vk.Score:
    require(path.exists(), f"There is no file or folder {path}; weights are read from this machine, never downloaded.")
    if path.is_dir():
        require(module is None, f"{path} is a folder, read as a diffusers model; --module is for weight files.")
        return vk.Checkpoint.from_diffusers(path, device=stated["device"], label=stated["label"])
    code = "--module package.file:factory or path/to/file.py:factory"
    require(module is not None, f"{path} holds numbers alone: give the code that builds its network, {code}.")
    return vk.Checkpoint.from_weights(path, module or "", **stated)


def _of_class(data: vk.Empirical, labels: Path | None, label: int | None, kind: str) -> vk.Empirical:
    """Return the images of one class, if labels are given."""
    if labels is None:
        flag = "--labels" if kind == "training" else "--test-labels"
        require(label is None, f"--label audits one class: give {flag}, the classes of all {kind} images.")
        return data
    import torch

    held = load_data(str(labels), "none")
    numbers = held.take(torch.arange(held.n)).flatten().double()
    require(held.n == data.n and held.d == 1, f"{labels} holds {held.n:,} × {held.d} labels for {data.n:,} images.")
    classes = sorted({int(c) for c in numbers.tolist()})
    shown = ", ".join(map(str, classes[:12])) + (", …" if len(classes) > 12 else "")
    require(label is not None, f"An audit is of one class at a time: give --label, one of {shown}.")
    which = torch.nonzero(numbers.eq(label or 0)).flatten()
    require(len(which) > 0, f"No {kind} image is of class {label}; there are {shown}.")
    return data.subset(which)


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


study = typer.Typer(help="Run declared sweeps over ensembles; a stopped run continues.", no_args_is_help=True)


@study.command("run")
def study_run(
    spec: Annotated[Path, argument("study.spec")],
    store: Annotated[Path, option("study.store")],
    runner: Annotated[str, option("study.runner")] = "inline",
    address: Annotated[str | None, option("study.address")] = None,
    large: Annotated[bool, option("study.large")] = False,
    quiet: Quiet = False,
) -> None:
    """Compute the missing part of a study. It can be stopped at any time; run it again to continue."""
    found = vk.study.run(spec, store, runner, address=address, large=large, progress=not quiet)
    if not quiet:
        Console(soft_wrap=False).print(vk.study.report.table(found))
    typer.echo(f"results are in {store}")


@study.command("list")
def study_list() -> None:
    """List the studies that come with the package; study run takes their names, or their files."""
    for name, path in vk.study.shipped().items():
        typer.echo(f"{name}: {vk.study.read(path).question}\n  {path}")


@study.command("status")
def study_status(store: Store) -> None:
    """Show how many members of each condition are computed."""
    found = vk.study.load(store)
    spec, done = vk.study.report.spec_of(found), found["done"].values
    typer.echo(f"{spec.title}: {int(done.sum())} of {done.size} blocks of {spec.block} members")
    for condition in spec.conditions():
        made = sum(len(spec.members_of(b)) for b in range(spec.blocks) if done[(*condition.index, b)])
        typer.echo(f"  {condition}: {made} of {spec.members} members")


@study.command("show")
def study_show(store: Store) -> None:
    """Show means with standard errors, and the number that the study ends in."""
    Console(soft_wrap=False).print(vk.study.report.table(vk.study.load(store)))


@study.command("plot")
def study_plot(store: Store, out: Annotated[Path, option("study.figure")] = Path("study.png")) -> None:
    """Draw the figure that the study describes."""
    typer.echo(f"wrote {vk.plots.save(vk.study.report.figure(vk.study.load(store)), out)}")


@study.command("export")
def study_export(store: Store, out: Annotated[Path, option("study.export")]) -> None:
    """Write the results to a file for other programs."""
    typer.echo(f"wrote {vk.study.report.export(store, out)}")


app.add_typer(study, name="study")


def _write(found: vk.Profile | Audit, table: RenderableType | None, json: Path | None, html: Path | None) -> None:
    """Print the table of a result, and write its files."""
    if table is not None:
        Console(soft_wrap=False).print(table)
    if json is not None:
        typer.echo(f"wrote {found.to_json(json)}")
    if html is not None:
        typer.echo(f"wrote {found.to_html(html)}")


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


if __name__ == "__main__":
    main()
