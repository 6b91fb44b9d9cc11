"""The command line: ``vkernel profile``, ``audit``, ``study``, ``reproduce`` and ``explore``.

Input that cannot be used is refused with one sentence on standard error and exit code 2.
"""

from __future__ import annotations

import dataclasses
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console, RenderableType
from typer import Argument, Option

from vkernel.core.errors import InputError, require

if TYPE_CHECKING:
    import torch

    from vkernel.adapters import Checkpoint
    from vkernel.data.empirical import Empirical
    from vkernel.reports.audit import Audit
    from vkernel.reports.profile import Profile

DATA = (
    ".npy, .npz, .csv, .tsv, .parquet, .safetensors, .pt, IDX (.gz), a folder of images or a saved Hugging Face data "
    "set; or toy:NAME (toy:digits, toy:hexagon, …)."
)
_network = partial(Option, rich_help_panel="Conventions of the network")
_data = partial(Option, rich_help_panel="Data")
_size = partial(Option, rich_help_panel="Size of the audit")
_output = partial(Option, rich_help_panel="Output")
Key = Annotated[str | None, _data(help="The array, tensor or column to read, if there are several.")]
Layout = Annotated[str | None, _data(help="Layout of a picture that holds many images: sheet:32x32.")]
Scale = Annotated[str, _data(help="auto (uint8 to [-1, 1], else unchanged), none, or LOW,HIGH for stored integers.")]
Json = Annotated[Path | None, _output(metavar="FILE", help="Write all numbers to FILE.")]
Html = Annotated[Path | None, _output(metavar="FILE", help="Write a self-contained page to FILE.")]
Quiet = Annotated[bool, _output("--quiet", "-q", help="Show neither progress nor a table.")]
Device = Annotated[str, Option(help="The device for the computation: cpu, cuda, cuda:1, …")]
Seed = Annotated[int, Option(help="Seed of all random draws.")]
Store = Annotated[Path, Argument(metavar="STORE", help="The folder that study run wrote.")]

app = typer.Typer(
    name="vkernel",
    help="What does a diffusion model learn from a finite data set?",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.command()
def profile(
    data: Annotated[str, Argument(metavar="DATA", help=f"Training data: {DATA}")],
    process: Annotated[
        str, Option(help="Forward process: vp, vpsong, ddpm, cosine, ve, edm, flow or toy; or vp:eps=1e-4.")
    ] = "vp",
    json: Json = None,
    html: Html = None,
    queries: Annotated[int | None, Option(help="Queries per noise level (default: 256 to 2048, by data size).")] = None,
    top: Annotated[int, Option(help="How many isolated points and boundary pairs to list.")] = 10,
    scale: Scale = "auto",
    key: Key = None,
    layout: Layout = None,
    device: Device = "cpu",
    memory: Annotated[float | None, Option(help="Working memory in GB (default: a quarter of what is free).")] = None,
    seed: Seed = 0,
    quiet: Quiet = False,
) -> None:
    """Profile training data: at which noise is the target noisy, what will be copied, where would a model mix?"""
    from vkernel.process import parse
    from vkernel.reports.profile import profile as run
    from vkernel.reports.profile.report import table

    parsed = parse(process)
    writable(json, html)
    require(memory is None or memory > 0, f"--memory must be positive; got {memory}.")
    found = run(
        load_data(data, scale, key, layout).to(on_device(device)),
        parsed,
        queries=queries,
        top=top,
        seed=seed,
        memory=None if memory is None else int(memory * 2**30),
        progress=not quiet,
    )
    _write(found, None if quiet else table(found), json, html)


@app.command()
def audit(
    weights: Annotated[
        list[Path],
        Argument(
            metavar="WEIGHTS…", help="Weight files (.safetensors, .pt) of one architecture, or diffusers folders."
        ),
    ],
    data: Annotated[
        str | None, _data(metavar="DATA", help=f"The training set of the network: {DATA}", show_default=False)
    ] = None,
    test: Annotated[str | None, _data(metavar="DATA", help="Images of the same law, not used in training.")] = None,
    module: Annotated[
        str | None,
        _network(
            metavar="FACTORY",
            help="Your code that builds the network: package.file:factory or path/to/file.py:factory. Importing it "
            "runs it; nothing in a weight file is run. Not needed for diffusers folders.",
        ),
    ] = None,
    predicts: Annotated[
        str, _network("--predicts", "--prediction", help="The prediction: noise, x0, v, flow, edm or score.")
    ] = "noise",
    time: Annotated[
        str,
        _network(
            help="Time input: index, fraction (fraction:N), sigma, c_noise, reversed, t; in continuous t index:N."
        ),
    ] = "index",
    betas: Annotated[
        str,
        _network(
            help="The process: linear:FIRST:LAST:STEPS, scaled_linear:…, cosine:STEPS, key:NAME (a buffer in the file) "
            "or a process by name: edm, flow, vp, …"
        ),
    ] = "linear:1e-4:.02:1000",
    range: Annotated[str, _network(metavar="LOW,HIGH", help="The range of its pixels.")] = "-1,1",
    strip: Annotated[str, _network(metavar="PREFIX", help="The prefix of the network's keys in the file.")] = "",
    labels: Annotated[
        Path | None, _data(metavar="FILE", help="Classes of the training images, for class-conditional networks.")
    ] = None,
    label: Annotated[int | None, _network(help="The class to audit.")] = None,
    test_labels: Annotated[Path | None, _data(metavar="FILE", help="Classes of the test images.")] = None,
    latents: Annotated[
        str | None,
        _data(
            metavar="FILE", help="For latent models, instead of --data: the encoded training images; --test likewise."
        ),
    ] = None,
    scale: Scale = "auto",
    key: Key = None,
    layout: Layout = None,
    features: Annotated[
        str, _size(help="Features in which samples are compared: pixels, standardised, pca:K, or file.py:function.")
    ] = "pixels",
    threshold: Annotated[float, _size(help="Largest ratio of nearest to second nearest distance of a copy.")] = 1 / 3,
    group: Annotated[
        str | None, _size(metavar="A,A,B,…", help="Group of each file: files that share an initialisation have one.")
    ] = None,
    quick: Annotated[bool, _size("--quick", help="A first look: fewer images, levels and samples.")] = False,
    full_sampler: Annotated[bool, _size("--full-sampler", help="Take all steps of the sampler, not 50.")] = False,
    samples: Annotated[int | None, _size(help="Samples of each sampler (default: 256; 64 with --quick).")] = None,
    seed: Seed = 0,
    device: Device = "cpu",
    json: Json = None,
    html: Html = None,
    fail_if_memorised: Annotated[
        float | None,
        _output(metavar="FRACTION", help="Exit with 1 if a larger share of the samples are copies; else with 0."),
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Audit checkpoints: copies of training images, membership, blind directions, and agreement of several runs.

    Unconditional networks, class-conditional ones (one class at a time) and networks in latent space (--latents).
    Guided sampling and text-conditional pipelines are not supported: they sample from no model's own score.
    """
    from vkernel.reports.audit import Sizes
    from vkernel.reports.audit import audit as run
    from vkernel.reports.audit.report import screen

    writable(json, html)
    good = fail_if_memorised is None or 0 <= fail_if_memorised <= 1
    require(good, f"--fail-if-memorised must be a share between 0 and 1; got {fail_if_memorised}.")
    require(data is not None or latents is not None, "Give the training set of the network: --data DATA.")
    require(data is None or latents is None, "--latents takes the place of --data; give one of them.")
    require(samples is None or samples >= 16, f"--samples must be 16 or more; got {samples}.")
    where = on_device(device)
    if latents is not None:
        require(range == "-1,1", "Latents are floats and are used as they are; --range does not apply.")
        scale = "none"
    own = _of_class(load_data(data or latents or "", scale, key, layout), labels, label, "training")
    held = None if test is None else _of_class(load_data(test, scale, key, layout), test_labels, label, "test")
    stated = {"predicts": predicts, "time": time, "betas": betas, "range": range, "strip": strip, "label": label}
    sizes = Sizes.quick() if quick else Sizes()
    found = run(
        [_read(path, module, own.shape, where, stated) for path in weights],
        own.to(where),
        test=None if held is None else held.to(where),
        features=features,
        threshold=threshold,
        groups=None if group is None else [name.strip() for name in group.split(",")],
        sizes=dataclasses.replace(sizes, samples=samples or sizes.samples, steps=None if full_sampler else sizes.steps),
        seed=seed,
        progress=not quiet,
    )
    _write(found, None if quiet else screen(found), json, html)
    most = found.memorised
    if fail_if_memorised is not None and most is not None and most.value > fail_if_memorised:
        share, limit = 100 * most.value, 100 * fail_if_memorised
        typer.echo(f"vkernel: {share:.3g} % of the samples are copies, more than {limit:.3g} %.", err=True)
        raise typer.Exit(1)


def _read(
    path: Path, module: str | None, shape: tuple[int, ...], device: torch.device, stated: dict[str, Any]
) -> Checkpoint:
    from vkernel.adapters import Checkpoint

    require(path.exists(), f"There is no file or folder {path}; weights are read from this machine, never downloaded.")
    if path.is_dir():
        require(module is None, f"{path} is a folder, read as a diffusers model; --module is for weight files.")
        return Checkpoint.from_diffusers(path, device=device, label=stated["label"])
    code = "--module package.file:factory or path/to/file.py:factory"
    require(module is not None, f"{path} holds numbers alone: give the code that builds its network, {code}.")
    return Checkpoint.from_weights(path, module or "", device=device, shape=shape, **stated)


def _of_class(data: Empirical, labels: Path | None, label: int | None, kind: str) -> Empirical:
    """The images of one class, if labels are given."""
    if labels is None:
        option = "--labels" if kind == "training" else "--test-labels"
        require(label is None, f"--label audits one class: give {option}, the classes of all {kind} images.")
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
    out: Annotated[Path, Option(metavar="FOLDER", help="Folder for the figures and index.html.")] = Path("out"),
    seed: Seed = 0,
    everything: Annotated[
        bool, Option("--all", help="Add the shipped studies; they can be stopped and resumed by running again.")
    ] = False,
) -> None:
    """Make the figures of the paper and further ones, with a page that explains what each shows."""
    from vkernel.reproduce import run

    run(out, seed=seed, everything=everything)


@app.command()
def explore(
    port: Annotated[int, Option(help="Port of the page; 0 takes any free one.")] = 5007,
    open_page: Annotated[bool, Option("--open/--no-open", help="Open the page in a browser.")] = True,
    address: Annotated[
        str, Option(help="Address to listen on. Any but 127.0.0.1 admits other machines: there is no password.")
    ] = "127.0.0.1",
) -> None:
    """Drag training points in the browser and watch what a diffusion model would learn from them."""
    from vkernel.explore.serve import serve

    serve(port, open_page, address)


study = typer.Typer(help="Run declared sweeps over ensembles; a stopped run continues.", no_args_is_help=True)


@study.command("run")
def study_run(
    spec: Annotated[Path, Argument(metavar="SPEC", help="The study: a TOML file, or a name that study list prints.")],
    store: Annotated[Path, Option(metavar="FOLDER", help="The folder for results; run again to continue.")],
    runner: Annotated[str, Option(help="inline (this process), threads (of it), or ray (a cluster).")] = "inline",
    address: Annotated[str | None, Option(help="The Ray cluster: auto, or HOST:PORT (default: this machine).")] = None,
    large: Annotated[bool, Option("--large", help="Use the larger sizes that the study gives.")] = False,
    quiet: Quiet = False,
) -> None:
    """Compute the missing part of a study. It can be stopped at any time; run it again to continue."""
    from vkernel.study import report, run

    found = run(spec, store, runner, address=address, large=large, progress=not quiet)
    if not quiet:
        Console(soft_wrap=False).print(report.table(found))
    typer.echo(f"results are in {store}")


@study.command("list")
def study_list() -> None:
    """List the studies that come with the package; study run takes their names, or their files."""
    from vkernel.study import read
    from vkernel.study.shipped import studies

    for name, path in studies().items():
        typer.echo(f"{name}: {read(path).question}\n  {path}")


@study.command("status")
def study_status(store: Store) -> None:
    """Show how many members of each condition are computed."""
    from vkernel.study import load, report

    found = load(store)
    spec, done = report.spec_of(found), found["done"].values
    typer.echo(f"{spec.title}: {int(done.sum())} of {done.size} blocks of {spec.block} members")
    for condition in spec.conditions():
        made = sum(len(spec.members_of(b)) for b in range(spec.blocks) if done[(*condition.index, b)])
        typer.echo(f"  {condition}: {made} of {spec.members} members")


@study.command("show")
def study_show(store: Store) -> None:
    """Show means with standard errors, and the number that the study ends in."""
    from vkernel.study import load, report

    Console(soft_wrap=False).print(report.table(load(store)))


@study.command("plot")
def study_plot(
    store: Store,
    out: Annotated[Path, Option(metavar="FILE", help="A .png, .svg or .pdf file.")] = Path("study.png"),
) -> None:
    """Draw the figure that the study describes."""
    from vkernel import plots
    from vkernel.study import load, report

    typer.echo(f"wrote {plots.save(report.figure(load(store)), out)}")


@study.command("export")
def study_export(
    store: Store,
    out: Annotated[Path, Option(metavar="FILE", help="A .nc file (NetCDF, all arrays) or .csv (numbers only).")],
) -> None:
    """Write the results to a file for other programs."""
    from vkernel.study import report

    typer.echo(f"wrote {report.export(store, out)}")


app.add_typer(study, name="study")


def _write(found: Profile | Audit, table: RenderableType | None, json: Path | None, html: Path | None) -> None:
    """Print the table of a result, and write its files."""
    if table is not None:
        Console(soft_wrap=False).print(table)
    if json is not None:
        typer.echo(f"wrote {found.to_json(json)}")
    if html is not None:
        typer.echo(f"wrote {found.to_html(html)}")


def load_data(data: str, scale: str = "auto", key: str | None = None, layout: str | None = None) -> Empirical:
    """Load the data that an argument names."""
    from vkernel.data import toy
    from vkernel.data.loaders import load

    if data.startswith("toy:"):
        return toy(data.removeprefix("toy:"))
    return load(data, scale=scale, key=key, layout=layout)


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


def _version(wanted: bool) -> None:
    if wanted:
        from vkernel.version import __version__

        typer.echo(f"vkernel {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


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
        if len(sys.argv) == 1:  # the help was shown
            sys.exit(2)
        _fail(f"{error.format_message()} See 'vkernel --help'.")
    if code == 130:  # typer returns this after an interrupt instead of raising
        _fail("stopped.", 130)
    sys.exit(code if isinstance(code, int) else 0)  # the code of a command that left early


def _fail(sentence: str, code: int = 2) -> NoReturn:
    print(f"vkernel: {' '.join(sentence.split())}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
