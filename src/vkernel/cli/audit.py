"""``vkernel audit``: examine checkpoints of other people's networks."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import vkernel as vk
from vkernel.cli.common import (
    Device,
    Html,
    Json,
    Key,
    Layout,
    Quiet,
    Scale,
    Seed,
    argument,
    load_data,
    on_device,
    option,
    write,
)
from vkernel.cli.streams import fail
from vkernel.core.errors import require
from vkernel.core.files import expand

if TYPE_CHECKING:
    import torch

    from vkernel.reports.audit import Audit

DTYPES = ("float32", "bf16", "fp16")
NETWORK = {"module", "predicts", "time", "betas", "range", "strip", "group", "quick", "full_sampler", "steps", "batch"}
NETWORK |= {"dtype", "resume", "condition", "condition_name", "also", "explain", "theories"}
SAVED = {"samples_range", "samples_key"}


def audit(
    context: typer.Context,
    weights: Annotated[list[Path] | None, argument("audit.weights")] = None,
    data: Annotated[str | None, option("audit.data")] = None,
    test: Annotated[str | None, option("audit.test")] = None,
    also: Annotated[list[str] | None, option("audit.also")] = None,
    module: Annotated[str | None, option("audit.module")] = None,
    predicts: Annotated[str, option("audit.predicts")] = "noise",
    time: Annotated[str, option("audit.time")] = "index",
    betas: Annotated[str, option("audit.betas")] = "linear:1e-4:.02:1000",
    range: Annotated[str, option("audit.range")] = "-1,1",
    data_range: Annotated[str | None, option("audit.data_range")] = None,
    strip: Annotated[str, option("audit.strip")] = "",
    labels: Annotated[Path | None, option("audit.labels")] = None,
    label: Annotated[int | None, option("audit.label")] = None,
    test_labels: Annotated[Path | None, option("audit.test_labels")] = None,
    condition: Annotated[Path | None, option("audit.condition")] = None,
    condition_name: Annotated[str, option("audit.condition_name")] = "encoder_hidden_states",
    latents: Annotated[str | None, option("audit.latents")] = None,
    from_samples: Annotated[str | None, option("audit.from_samples")] = None,
    samples_range: Annotated[str | None, option("audit.samples_range")] = None,
    samples_key: Annotated[str | None, option("audit.samples_key")] = None,
    decoder: Annotated[str | None, option("audit.decoder")] = None,
    scale: Scale = "auto",
    key: Key = None,
    layout: Layout = None,
    features: Annotated[str, option("audit.features")] = "pixels",
    threshold: Annotated[float, option("audit.threshold")] = 1 / 3,
    augment: Annotated[str | None, option("audit.augment")] = None,
    group: Annotated[str | None, option("audit.group")] = None,
    quick: Annotated[bool, option("audit.quick")] = False,
    full_sampler: Annotated[bool, option("audit.full_sampler")] = False,
    samples: Annotated[int | None, option("audit.samples")] = None,
    steps: Annotated[int | None, option("audit.steps")] = None,
    batch: Annotated[int | None, option("audit.batch")] = None,
    dtype: Annotated[str, option("audit.dtype")] = "float32",
    resume: Annotated[Path | None, option("audit.resume")] = None,
    explain: Annotated[bool, option("audit.explain")] = False,
    theories: Annotated[str | None, option("audit.theories")] = None,
    seed: Seed = 0,
    device: Device = "cpu",
    json: Json = None,
    html: Html = None,
    limit: Annotated[float | None, option("audit.fail_if_memorised")] = None,
    quiet: Quiet = False,
) -> None:
    """Audit checkpoints: copies of training images, membership, blind directions, and agreement of several runs; or
    samples that another program saved (--from-samples), without a network.

    Networks may be unconditional, class-conditional (--labels: every class;
    --label: one), in latent space (--latents), or text-conditional
    (--condition: embeddings of prompts). Guided sampling is not supported:
    audit its samples with --from-samples."""  # short lines: they are not filled again
    import torch

    from vkernel.core.checks import check_choice
    from vkernel.reports.audit import Sizes, decoder as as_decoder
    from vkernel.reports.audit.report import screen
    from vkernel.reports.audit.saved import check_apart
    from vkernel.reports.explain.candidates import named as check_theories
    from vkernel.score.wrapped import interval

    require(0 <= (limit or 0) <= 1, f"--fail-if-memorised must be a share between 0 and 1; got {limit}.")
    _check_subjects(context, weights, from_samples)
    require(data is not None or latents is not None, "Give the training set: --data DATA.")
    require(data is None or latents is None, "--latents takes the place of --data; give one of them.")
    require(samples is None or samples >= 16, f"--samples must be 16 or more; got {samples}.")
    require(steps is None or not full_sampler, "--full-sampler takes all steps; give it or --steps.")
    for flag, number in {"--steps": steps, "--batch": batch}.items():
        require(number is None or number >= 1, f"{flag} must be 1 or more; got {number}.")
    check_choice(dtype, "--dtype", DTYPES)
    require(theories is None or explain, "--theories names the theories of --explain; give both.")
    names = None if theories is None else [name.strip() for name in theories.split(",")]
    check_theories(names)  # before the work
    single = labels is None or label is not None
    require(single or not explain, "--explain examines one class at a time: give --label, the class.")
    if from_samples is not None:
        check_apart(from_samples, data or latents or "")
    where = on_device(device)
    if latents is not None:
        require(range == "-1,1", "Latents are floats and are used as they are; --range does not apply.")
        scale = "none"
    own, classes = _of_class(load_data(data or latents or "", scale, key, layout), labels, label, "training")
    held, theirs = None if test is None else load_data(test, scale, key, layout), None
    if held is not None:
        require(labels is None or test_labels is not None, "Give --test-labels, the classes of the test images.")
        held, theirs = _of_class(held, test_labels if labels is not None else None, label, "test")
        held = held.to(where)
    own = own.to(where)
    if data_range is not None:
        own, held = _mapped(own, data_range, range), None if held is None else _mapped(held, data_range, range)
    label = (
        int(classes.nan_to_num().min()) if label is None and classes is not None else label
    )  # the first; vk.audit takes each
    decode = None if decoder is None else as_decoder(decoder, where)
    if decode is not None:
        decode(own[:1])  # it fails before the work, not after
    stated: dict[str, Any] = {"device": where, "predicts": predicts, "time": time, "betas": betas}
    stated |= {"range": range, "strip": strip, "label": label, "condition_name": condition_name}
    stated |= {"condition": None if condition is None else load_data(str(condition), "none")[:]}
    nets = [_read(path, module, stated) for path in weights or ()]
    groups = None if group is None else [name.strip() for name in group.split(",")]
    sizes = Sizes.quick() if quick else Sizes()
    sizes = replace(sizes, samples=samples or sizes.samples, steps=None if full_sampler else steps or sizes.steps)
    compared: dict[str, Any] = {"features": features, "threshold": threshold, "augment": augment, "seed": seed}
    saved = None
    if from_samples is not None:
        ends = None if samples_range is None else interval(samples_range)
        given: dict[str, Any] = {"range": ends, "key": samples_key, "count": samples, "progress": not quiet}
        saved = vk.audit_samples(from_samples, own, held, **compared, **given)
    if nets or saved is None:
        compared |= {"batch": batch, "resume": resume, "groups": groups, "sizes": sizes}
        compared |= {"labels": classes, "test_labels": theirs}
        compared |= {"also": {name: load_data(name, scale, key, layout).to(where) for name in also or ()}}
        compared |= {"dtype": {"bf16": torch.bfloat16, "fp16": torch.float16}.get(dtype)}
        found = vk.audit(nets, own, test=held, **compared, progress=not quiet)
        found = found if saved is None else found.beside(saved)
    else:
        found = saved
    if explain:
        how: dict[str, Any] = {"samples": samples, "steps": steps, "quick": quick, "seed": seed}
        found = _explained(found, names, **how, progress=not quiet)
    command = shlex.join(["vkernel", *sys.argv[1:]]).encode(errors="replace").decode()
    found = replace(found, command=command, decoder=decode)
    write(found, None if quiet else screen(found), json, html)
    if limit is not None:
        raise typer.Exit(_memorised(found, limit))


def _explained(found: Audit, theories: list[str] | None, **how: Any) -> Audit:
    """Return the audit with the theories that explain those of its networks that denoise as stated."""
    from vkernel.reports.explain.report import text

    good = [n for n in found.networks if n.can_be_read]
    left = [n.name for n in found.networks if n not in good]
    notes = (*found.notes, *([text("left_out", names=left)] if left else []))
    if not good:
        return replace(found, notes=notes)
    explanation = vk.explain([n.net for n in good], theories, found.data, found.test, **how)
    return replace(found, notes=notes, explanation=explanation, seconds=found.seconds + explanation.seconds)


def _memorised(found: Audit, limit: float) -> int:
    """Report whether the share of copies exceeds the limit: 0 no, 1 yes for a network, 2 if it cannot be told of one.

    The measured share is compared, not an end of its interval: the same samples always give the same answer."""
    most, open_ = found.memorised, found.unanswered
    if most is not None and most.value > limit:
        return fail(f"{100 * most.value:.3g} % of the samples are copies, more than {100 * limit:.3g} %.", 1)
    if open_ or most is None:
        name = next(iter(open_), "the network")
        why = open_.get(name, "it was not sampled.")
        return fail(f"Whether {name} copies its training images cannot be told: {why}", 2)
    return 0


def _check_subjects(context: typer.Context, weights: list[Path] | None, from_samples: str | None) -> None:
    """Refuse a command without a subject, and options that describe a network or samples where there are none."""
    require(weights or from_samples, "Give WEIGHTS, files or diffusers folders, or saved samples: --from-samples DIR.")
    sources = {p: context.get_parameter_source(p.name or "") for p in context.command.params}
    given = [p for p, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
    for missing, names, what in ((not weights, NETWORK, "a network"), (not from_samples, SAVED, "saved samples")):
        flag = next((p.opts[0] for p in given if missing and p.name in names), None)
        require(flag is None, f"{flag} describes {what}, and none is given.")


def _read(path: Path, module: str | None, stated: dict[str, Any]) -> vk.Score:
    path = expand(path)
    require(path.exists(), f"There is no file or folder {path}; weights are read from this machine, never downloaded.")
    if path.is_dir():
        require(module is None, f"{path} is a folder, read as a diffusers model; --module is for weight files.")
        return vk.Checkpoint.from_diffusers(path, **{key: stated[key] for key in ("device", "label", "condition")})
    code = "--module package.file:factory or path/to/file.py:factory"
    require(module is not None, f"{path} holds numbers alone: give the code that builds its network, {code}.")
    return vk.Checkpoint.from_weights(path, module or "", **stated)


def _of_class(
    data: vk.Empirical, labels: Path | None, label: int | None, kind: str
) -> tuple[vk.Empirical, torch.Tensor | None]:
    """Return the images of one class; or, if labels are given and no label, all images with the class of each."""
    if labels is None:
        flag = "--labels" if kind == "training" else "--test-labels"
        require(label is None, f"--label audits one class: give {flag}, the classes of all {kind} images.")
        return data, None
    import torch

    held = load_data(str(labels), "none")
    numbers = held.take(torch.arange(held.n)).flatten().double()
    require(held.n == data.n and held.d == 1, f"{labels} holds {held.n:,} × {held.d} labels for {data.n:,} images.")
    if label is None:
        return data, numbers
    classes = sorted({int(c) for c in numbers.tolist()})
    shown = ", ".join(map(str, classes[:12])) + (", …" if len(classes) > 12 else "")
    which = torch.nonzero(numbers.eq(label)).flatten()
    require(len(which) > 0, f"No {kind} image is of class {label}; there are {shown}.")
    return data.subset(which), None


def _mapped(data: vk.Empirical, given: str, range: str) -> vk.Empirical:
    """Return data that are stored as floats in the range ``given``, in that of the network."""
    from vkernel.score.wrapped import interval, remapped

    stored = f"these are {data.stored}, which is mapped from its whole range to --range by itself"
    require("float" in data.stored, f"--data-range is for data that are stored as floats; {stored}.")
    return vk.Empirical(remapped(data[:], interval(given), interval(range)), data.weights, name=data.name)
