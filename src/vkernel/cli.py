"""The command line: ``vkernel profile``, ``vkernel study`` and ``vkernel reproduce``.

What cannot be used is refused with one sentence on standard error and exit code 2.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from vkernel.errors import InputError, require

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


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    pass


@app.command()
def profile(
    data: Annotated[
        str,
        typer.Argument(
            metavar="DATA",
            help="Training data: .npy, .npz, .csv, .tsv, .parquet, .safetensors, .pt, IDX (.gz), a folder of images or "
            "a saved Hugging Face data set; or toy:NAME (toy:digits, toy:hexagon, …).",
        ),
    ],
    process: Annotated[
        str,
        typer.Option(
            help="Forward process: vp, vpsong, ddpm, cosine, ve, edm, flow or toy, with options: vp:eps=1e-4."
        ),
    ] = "vp",
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write all numbers to FILE.")] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a self-contained page to FILE.")] = None,
    queries: Annotated[
        int | None, typer.Option(help="Queries per noise level (default: 256 to 2048, by the size of the data).")
    ] = None,
    top: Annotated[int, typer.Option(help="How many isolated points and boundary pairs to list.")] = 10,
    scale: Annotated[
        str,
        typer.Option(help="auto (uint8 images to [-1, 1], else as they are), none, or LOW,HIGH for stored integers."),
    ] = "auto",
    key: Annotated[
        str | None, typer.Option(help="Which array, tensor or column to read, where there are several.")
    ] = None,
    layout: Annotated[str | None, typer.Option(help="Layout of a picture that holds many images: sheet:32x32.")] = None,
    device: Annotated[str, typer.Option(help="Where to compute: cpu, cuda, cuda:1, …")] = "cpu",
    memory: Annotated[
        float | None, typer.Option(help="Working memory in GB (default: a quarter of what is free).")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of all draws.")] = 0,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress, no table.")] = False,
) -> None:
    """Profile training data: when is the target noisy, what will be copied, where would a model mix?"""
    from rich.console import Console

    from vkernel.process import parse
    from vkernel.profiling import profile as run
    from vkernel.profiling.report import table

    law = parse(process)
    for target in (json, html):
        require(target is None or not target.is_dir(), f"{target} is a folder; give the name of a file to write.")
    require(memory is None or memory > 0, f"--memory must be positive; got {memory}.")
    found = run(
        _load(data, scale, key, layout).to(_device(device)),
        law,
        queries=queries,
        top=top,
        seed=seed,
        memory=None if memory is None else int(memory * 2**30),
        progress=not quiet,
    )
    if not quiet:
        Console(soft_wrap=False).print(table(found))
    if json is not None:
        typer.echo(f"wrote {found.to_json(json)}")
    if html is not None:
        typer.echo(f"wrote {found.to_html(html)}")


def _load(data: str, scale: str, key: str | None, layout: str | None) -> Any:
    from vkernel.data import toy
    from vkernel.loaders import load

    if data.startswith("toy:"):
        return toy(data.removeprefix("toy:"))
    return load(data, scale=scale, key=key, layout=layout)


def _device(name: str) -> Any:
    import torch

    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise InputError(f"The device {name!r} cannot be used here: {str(error).splitlines()[0]}") from None
    return device


@app.command()
def reproduce(
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where the figures and index.html go.")] = Path("out"),
    seed: Annotated[int, typer.Option(help="Seed of all draws.")] = 0,
    everything: Annotated[
        bool, typer.Option("--all", help="Add the shipped studies; stop it whenever you like, run again to go on.")
    ] = False,
) -> None:
    """Make the figures of the paper, and what the paper could not draw, with a page that says what each shows."""
    from vkernel.reproduce import run

    run(out, seed=seed, everything=everything)


study = typer.Typer(help="Declared sweeps over ensembles, which survive being killed.", no_args_is_help=True)
app.add_typer(study, name="study")
StoreArgument = Annotated[Path, typer.Argument(metavar="STORE", help="The folder that study run wrote.")]


@study.command("run")
def study_run(
    spec: Annotated[Path, typer.Argument(metavar="SPEC", help="The study: a TOML file, or a name of study list.")],
    store: Annotated[Path, typer.Option(metavar="FOLDER", help="Where results go; run again to go on.")],
    runner: Annotated[str, typer.Option(help="inline (this process), or ray (a cluster).")] = "inline",
    address: Annotated[
        str | None, typer.Option(help="The Ray cluster: auto, or HOST:PORT (default: this machine).")
    ] = None,
    large: Annotated[bool, typer.Option("--large", help="Take the larger size that the study names.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress, no table.")] = False,
) -> None:
    """Compute what is missing of a study. Stop it whenever you like: run again to go on."""
    from rich.console import Console

    from vkernel.study import report, run

    found = run(spec, store, runner, address=address, large=large, show=not quiet)
    if not quiet:
        Console(soft_wrap=False).print(report.table(found))
    typer.echo(f"results are in {store}")


@study.command("list")
def study_list() -> None:
    """The studies that come with the package; study run takes their names, or their files."""
    from vkernel.study import read
    from vkernel.study.shipped import studies

    for name, path in studies().items():
        typer.echo(f"{name}: {read(path).question}\n  {path}")


@study.command("status")
def study_status(store: StoreArgument) -> None:
    """How much of a study is computed, condition by condition."""
    from vkernel.study import load, report

    found = load(store)
    spec, done = report.spec_of(found), found["done"].values
    typer.echo(f"{spec.title}: {int(done.sum())} of {done.size} blocks of {spec.block} members")
    for condition in spec.conditions():
        made = sum(len(spec.members_of(b)) for b in range(spec.blocks) if done[(*condition.index, b)])
        typer.echo(f"  {condition}: {made} of {spec.members} members")


@study.command("show")
def study_show(store: StoreArgument) -> None:
    """Means with standard errors, and the number that the study ends in."""
    from rich.console import Console

    from vkernel.study import load, report

    Console(soft_wrap=False).print(report.table(load(store)))


@study.command("plot")
def study_plot(
    store: StoreArgument,
    out: Annotated[Path, typer.Option(metavar="FILE", help="A .png, .svg or .pdf file.")] = Path("study.png"),
) -> None:
    """Draw the figure that the study asks for."""
    from vkernel import plots
    from vkernel.study import load, report

    typer.echo(f"wrote {plots.save(report.figure(load(store)), out)}")


@study.command("export")
def study_export(
    store: StoreArgument,
    out: Annotated[Path, typer.Option(metavar="FILE", help="A .nc file (NetCDF: everything) or .csv (numbers alone).")],
) -> None:
    """Write the results for other programs."""
    from vkernel.study.export import export

    typer.echo(f"wrote {export(store, out)}")


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
    sys.exit(0)


def _fail(sentence: str, code: int = 2) -> NoReturn:
    print(f"vkernel: {' '.join(sentence.split())}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
