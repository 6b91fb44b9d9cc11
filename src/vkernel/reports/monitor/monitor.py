r"""Watch a training run: is it learning, settled, or starting to memorise?

A monitor is called in a training loop. At most once in ``every`` steps, and within its ``budget`` of wall time, it
evaluates the network on fixed noised images and draws samples from fixed starts
(:mod:`~vkernel.reports.monitor.probe`), raises an alarm (:mod:`~vkernel.reports.monitor.alarm`), estimates when copies
appear (:mod:`~vkernel.reports.monitor.onset`) and writes a log (:mod:`~vkernel.reports.monitor.log`). The constructor
refuses what cannot be used; a call never raises and never changes the training
(:mod:`~vkernel.reports.monitor.unchanged`)."""

from __future__ import annotations

import bisect
import contextlib
import operator
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from vkernel.core.checks import check_whole, is_number
from vkernel.core.errors import InputError, require
from vkernel.core.files import write
from vkernel.core.progress import Progress
from vkernel.process import Process
from vkernel.process.base import check_process
from vkernel.reports.audit.decoder import Decoding, decoder as read_decoder
from vkernel.reports.monitor import board, pictures, sources
from vkernel.reports.monitor.alarm import SHIFT, Gap, Verdict, gaps, verdict
from vkernel.reports.monitor.budget import Budget
from vkernel.reports.monitor.conventions import Conventions, Forward, device_of
from vkernel.reports.monitor.log import Log, kept
from vkernel.reports.monitor.networks import averaged, modules_of
from vkernel.reports.monitor.probe import NUMBERS, Levels, Probe
from vkernel.reports.monitor.record import Drawn, Evaluation, setting
from vkernel.reports.monitor.report import Table, concerns, gist, numbers
from vkernel.reports.monitor.unchanged import random_states, synchronise, unchanged
from vkernel.score.wrapped import TimeInput

HALVINGS = 4  # of the batch, after memory ran out


class Monitor:
    """Watch a training run; call it in the loop as ``monitor(step, network)``.

    Args:
        data: the training images as the network sees them: an ``Empirical``, an array or tensor, a torch ``Dataset``
            without random augmentation, or a path that ``vk.load`` reads. For a latent network: the latents.
        process: the forward process of the training.
        test: held-out images of the same kind, a random split that is not trained on. They are needed.
        predicts, time, range, sigma_data, dtype: the conventions of the network, as of ``vk.as_score``. ``time=None``
            is "index" for DDPM, else "t". Stored integers are mapped to ``range``; floats must lie in it.
        every: the least number of steps between evaluations.
        budget: the largest share of the wall time that evaluations take.
        log: a folder for the log, pictures and TensorBoard files; a run that was stopped continues there.
        labels, test_labels: classes of the images, for a class-conditional network ``network(x, time, labels)``; with
            ``labels=True`` those that torch Datasets return.
        images, levels: the number of images of each set and noise levels (their number, or values of σ/α).
        samples, sampler_steps: the number of samples (0: none), and the steps of the sampler.
        decoder: a function from latents to images, for pictures.
        forward: a function ``forward(network, x, time, labels)`` for networks that are called in another way.
        batch: the largest number of images in one call of the network (default: 2¹⁸ numbers).
        seed: that of the monitor's own random numbers.
        progress: ``True`` prints a line for each evaluation, ``False`` none; a function receives the line and the share
            of the wall time that was spent.

    ``records`` are the evaluations so far, ``verdict`` what they show; ``evaluate`` measures at once, whatever the
    budget; ``close`` (or ``with``) marks the end of the run in the log.

    >>> import torch, vkernel as vk
    >>> images = torch.randn(300, 2, generator=torch.Generator().manual_seed(0))
    >>> monitor = vk.Monitor(images[:200], vk.VP(), test=images[200:], every=100, progress=False)
    >>> record = monitor(0, lambda x, t: x)  # the first call evaluates
    >>> monitor(1, lambda x, t: x)  # between evaluations: None, at once
    >>> monitor.verdict.state
    'learning'
    """

    def __init__(
        self,
        data: sources.Source,
        process: Process,
        test: sources.Source | None = None,
        predicts: str = "noise",
        time: TimeInput | None = None,
        range: tuple[float, float] | str | None = None,
        every: int = 1000,
        budget: float = 0.02,
        log: str | Path | None = None,
        *,
        labels: sources.Labels = None,
        test_labels: sources.Labels = None,
        images: int = 256,
        samples: int = 128,
        levels: Levels = None,
        sampler_steps: int = 18,
        sigma_data: float = 0.5,
        dtype: torch.dtype | None = None,
        decoder: Decoding | None = None,
        forward: Forward | None = None,
        batch: int | None = None,
        seed: int = 0,
        progress: Progress = True,
    ) -> None:
        check_process(process, "A monitor")
        conventions = Conventions.of(process, predicts, time, range, sigma_data, dtype, forward)
        check_whole(images, "images", 2)
        check_whole(samples, "samples", 0)
        check_whole(sampler_steps, "sampler_steps")
        good = is_number(budget) and 0 < budget <= 1
        require(good, f"budget is a share of the wall time, above 0 and at most 1, such as .02; got {budget!r}.")
        self.budget = Budget(float(budget), check_whole(every, "every"))
        good = progress in (True, False) or callable(progress)
        require(good, f"progress must be True, False or a function of a line and a share; got {progress!r}.")
        if test is None:
            raise sources.no_split()
        self.records: tuple[Evaluation, ...] = ()
        self.verdict: Verdict | None = None
        self._gaps: list[Gap] = []
        self._warned: set[str] = set()
        self._last_step: int | None = None
        self._silent = _other_rank()
        self._table = Table(progress)
        self._log: Log | None = None
        self._board: board.Board | None = None
        if self._silent:  # rank 0 evaluates
            return
        with random_states(), torch.no_grad():
            self._prepare(
                data, test, conventions, labels, test_labels, decoder, seed, images, samples, levels, sampler_steps
            )
        self._numbers = NUMBERS if batch is None else check_whole(batch, "batch") * self.probe.d
        evaluations = sum(map(len, self.probe.sets.values())) * len(self.probe.t)
        self.budget.guess = samples * (sampler_steps + 1) / evaluations, self.probe.search
        if log is not None:
            self._open(log)
        gist(self.verdict, self.setting)  # imports what sentences need, which is no cost of an evaluation

    def _prepare(
        self,
        data: sources.Source,
        test: sources.Source,
        conventions: Conventions,
        labels: sources.Labels,
        test_labels: sources.Labels,
        decoder: Decoding | None,
        seed: int,
        images: int,
        samples: int,
        levels: Levels,
        steps: int,
    ) -> None:
        """Read the images, and fix what is measured."""
        train, classes = sources.read(data, "training", labels)
        held, other = sources.read(test, "held-out", labels if labels is True else test_labels)
        given = classes is None or other is not None
        require(given, "Give test_labels, the classes of the held-out images, as well.")
        network = conventions.score(lambda x, t: x)
        train, own = sources.check_sets(train, held, network)
        if own.n != held.n:
            require(other is None, "Some held-out images are training images; remove them, with their labels.")
        self.conventions = conventions.on(train.shape)
        self.decoder = None if decoder is None else read_decoder(decoder)
        sizes: dict[str, Any] = {"images": images, "samples": samples, "levels": levels, "steps": steps, "seed": seed}
        sizes |= {"labels": classes, "test_labels": other}
        self.probe = Probe(train, own, conventions.process, **sizes, at=network.at)
        self._limits = conventions.range or sources.extremes(train)
        when = conventions.time if isinstance(conventions.time, str) else "a function of t"
        marks = sources.fingerprint(train), sources.fingerprint(own)
        self.setting = setting(self.probe, conventions.predicts, when, conventions.range, marks)
        if self.setting.shift < SHIFT:
            warnings.warn(concerns("shift", setting=self.setting), stacklevel=4)

    def _open(self, log: str | Path) -> None:
        """Make or continue the log."""
        self._log = Log(log, self.setting)
        run = self._log.run
        self.records = run.records
        if run.records:
            self.setting = run.setting  # with the numbers that the curves were computed with
            self.verdict = verdict(self.records, self.setting)
            self.budget.resume(run.wall, run.spent, [r.cost for r in run.records])
        if not board.load():
            self._table.note("TensorBoard files are not written: pip install 'vkernel[monitor]'.")

    def __call__(self, step: int, network: object, ema: object = None) -> Evaluation | None:
        """Evaluate the network if it is time; return the numbers, or ``None`` between evaluations.

        ``step`` counts steps of training. ``ema`` are averaged weights, which are evaluated instead of the network's: a
        module, a mapping from names to tensors, or an object like diffusers' ``EMAModel``."""
        if self._silent or _other_rank():
            return None
        with self._caught("the evaluation"):
            number = _step(step)
            self._went_back(number)
            before = bisect.bisect_right(self.records, number, key=lambda record: record.step)
            last = self.records[before - 1].step if before else None
            due = self.budget.due(number, last, self.probe.count > 0)
            if due.errors:
                return self._evaluate(number, network, ema, due.samples)
        return None

    def evaluate(self, step: int, network: object, ema: object = None) -> Evaluation | None:
        """Evaluate the network now, samples included, whatever the budget; ``None`` if that failed, with a warning."""
        if self._silent or _other_rank():
            return None
        with self._caught("the evaluation"):
            self.budget.wall()
            return self._evaluate(_step(step), network, ema, self.probe.count > 0)
        return None

    def close(self) -> None:
        """Write the end of the run to the log."""
        with self._caught("closing the log"):
            if self._log is not None and not _other_rank():
                self._log.end(self.budget.wall())
            if self._board is not None:
                self._board.close()
                self._board = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        if self._silent:
            return "Monitor(on another rank than 0: it does nothing)"
        return f"Monitor({len(self.records)} evaluations, {gist(self.verdict, self.setting)})"

    def _evaluate(self, step: int, network: object, ema: object, draw: bool) -> Evaluation:
        """Measure, and report what was measured."""
        clock = self.budget.clock
        with averaged(network, ema) as module:
            device = device_of(module)
            synchronise(device)  # steps of training that a GPU has yet to take are no cost of the monitor
            start = clock()
            with unchanged(modules_of(network, ema, module), device):
                errors = self._halving(lambda numbers: self.probe.errors(self._model(module), device, numbers))
                synchronise(device)
                middle, drawn, picture = clock(), None, None
                if draw and errors.finite:
                    drawn, picture = self._draw(module, device, step)
                synchronise(device)
        now = clock()
        cost = (middle - start, now - middle) if drawn is not None else (now - start, 0.0)
        self.budget.spend(*cost)
        times = self.budget.wall(), sum(self.budget.spent)
        record = Evaluation.of(step, errors, drawn, "network" if ema is None else "ema", *times, cost)
        changed = self.records and self.records[-1].weights != record.weights
        self.records = tuple(kept(list(self.records), record))
        before = [g for g in self._gaps if g.step < step]
        self._gaps = gaps(self.records, before)
        self.verdict = verdict(self.records, self.setting, self._gaps)
        self._report(record, self.verdict, picture, bool(changed))
        self.budget.spend(clock() - now, 0.0, note=False)
        if len(self.records) == 1:
            self._table.note(concerns("next", budget=self.budget))
        return record

    def _model(self, module: Callable[..., object]) -> Callable[[Tensor | None], Any]:
        return lambda labels: self.conventions.score(module, labels)

    def _halving(self, measure: Callable[[int], Any]) -> Any:
        """Measure; where memory runs out, with smaller batches, which are kept."""
        for _ in range(HALVINGS):
            try:
                return measure(self._numbers)
            except (torch.OutOfMemoryError, InputError) as error:
                if "out of memory" not in str(error):
                    raise
            self._numbers = max(1, self._numbers // 2)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        return measure(self._numbers)

    def _draw(self, module: Callable[..., object], device: torch.device, step: int) -> tuple[Drawn, np.ndarray | None]:
        """Draw samples and compare them with the training set; return the closest as a picture too."""
        samples = self._halving(lambda numbers: self.probe.samples(self._model(module), device, numbers))
        ratio, index = self.probe.nearest(samples, device)
        order = ratio.nan_to_num(nan=2.0).argsort(stable=True)[: pictures.SHOWN]
        closest, picture, name = order[index[order] >= 0], None, ""
        if len(closest):
            nearest = self.probe.data[index[closest]].cpu()
            with self._caught("making a picture of the closest samples"):  # a decoder may fail
                picture = pictures.closest(samples[closest], nearest, self._limits, self.decoder)
        if picture is not None and self._log is not None:
            name = f"closest-{step:09d}.png"
            with self._caught("writing a picture"):
                write(self._log.folder / name, pictures.png(picture))
        return Drawn(ratio, index, name), picture

    def _report(self, record: Evaluation, found: Verdict, picture: np.ndarray | None, changed: bool) -> None:
        """Write the log, TensorBoard's files and a line of the table; warn of what is wrong, once."""
        if self._log is not None:
            with self._caught("writing the log"):
                self._log.add(record, numbers(found))
            if board.load():
                with self._caught("writing TensorBoard files"):
                    if self._board is None:
                        self._board = board.Board(self._log.folder, self.setting, record.step)
                    self._board.add(record, found, picture)
        self._table.add(record, found, self.setting)
        reasons = {
            "nan": not record.finite,
            "better": bool(found.better),
            "misfit": found.misfit,
            "weak": found.weak,
            "weights": changed,
            "memorising": found.state == "memorising",
        }
        for reason in (name for name, holds in reasons.items() if holds):
            self._warn(reason, concerns(reason, verdict=found, record=record, setting=self.setting))

    def _went_back(self, step: int) -> None:
        last, self._last_step = self._last_step, step
        if last is not None and step < last and self.records and step < self.records[-1].step:
            self._warn("back", concerns("back", step=step, last=last))

    @contextlib.contextmanager
    def _caught(self, what: str) -> Iterator[None]:
        """Turn whatever fails during training into a warning, once for each kind of failure."""
        try:
            yield
        except Exception as error:
            why = " ".join(str(error).split()) or type(error).__name__
            why = why if isinstance(error, InputError) else f"{type(error).__name__}: {why}"
            self._warn(f"{what}, {type(error).__name__}", f"{what} failed, and training goes on: {why:.500}")

    def _warn(self, kind: str, sentence: str) -> None:
        """Warn, once for each kind; a filter that makes warnings errors does not stop the training."""
        if kind in self._warned:
            return
        self._warned.add(kind)
        try:
            warnings.warn(f"vk.Monitor: {sentence}", stacklevel=5)
        except Warning:
            self._table.note(sentence)


def _step(step: Any) -> int:
    """Return the step as a number; those of numpy and torch too."""
    try:
        number = operator.index(step)
    except TypeError:
        raise InputError(f"step must be a whole number, the count of training steps; got {step!r:.80}.") from None
    require(number >= 0, f"step must be 0 or more, not {number}.")
    return number


def _other_rank() -> bool:
    """Whether this is another process of a distributed training than the first; before the group of processes is made,
    by the variables that torchrun, accelerate and Lightning set."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank() != 0
    names = ("RANK",) if "RANK" in os.environ else ("NODE_RANK", "LOCAL_RANK")
    several = os.environ.get("WORLD_SIZE", "1") not in ("", "0", "1")
    return several and any(os.environ.get(name, "0") not in ("", "0") for name in names)


__all__ = ["Monitor"]
