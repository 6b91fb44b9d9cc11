r"""Ensembles of trained models, and the sources of their variance (docs/theory.md, §7).

An ensemble is M trainings of one model on one data set, which differ in the randomness of training alone. Its moments
over members are those of :class:`~vkernel.sample.scores.Scores`; :mod:`vkernel.kernels` predicts them. A member whose
weights are not finite has *diverged*: it stays in the ensemble and takes part in no mean.

**Sources of variance.** Training is random in four nested ways: initialisation, inputs (t and x), the noise of their
targets, the order of batches. By the law of total variance the variance of the score is a sum of four terms, each the
mean variance over one factor given those outside it. A balanced nested design measures them without bias
(:func:`~vkernel.core.variance.variance_components`). Errors are jackknifed over the outermost groups. The term of the
inputs contains the misfit, the variance that training on noiseless targets (J0) leaves."""

from __future__ import annotations

import hashlib
import json
import math
import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import vkernel.process as processes
from vkernel.core.checks import check_real, check_shape, is_whole
from vkernel.core.errors import InputError, require
from vkernel.core.estimate import Estimate, jackknife, leave_one_out
from vkernel.core.files import expand, write
from vkernel.core.memory import check_memory
from vkernel.core.progress import Progress, progress as show_progress
from vkernel.core.variance import Groups, variance_components
from vkernel.data.empirical import Array, Empirical
from vkernel.process import Process
from vkernel.sample.scores import Scores
from vkernel.score.base import Score, Time, wide_time
from vkernel.train import models
from vkernel.train.models.base import Model, State
from vkernel.train.objectives import VARIES, Objective, Times, Training, parse
from vkernel.version import __version__

INDEX = 40  # bytes of a member's index
RECORDED = ("steps", "update_norm", "gradient_norm")  # entries of info that a training with snapshots adds
Info = dict[str, object]  # how an ensemble was trained: members, draws, objective, vary, seed, times, data


def train_ensemble(
    model: Model,
    data: Empirical | Tensor,
    process: Process,
    *,
    members: int | Sequence[int] = 100,
    draws: int | None = None,
    objective: str | Objective = "J1",
    vary: Sequence[str] = VARIES,
    seed: int = 0,
    times: Times | None = None,
    labels: Array | None = None,
    flips: bool = False,
    snapshots: Sequence[int] = (),
    checkpoint: str | Path | None = None,
    dtype: torch.dtype | None = None,
    progress: Progress = False,
) -> Ensemble:
    """Train several models that differ in the randomness of training alone.

    ``members`` is their number, or the indices of some; a member depends on (seed, index) alone. ``draws`` is the
    number of noised points of each, ``None`` for fresh draws at every step of a network. ``objective`` is "J1", "J0",
    ``vk.JC(c)`` or ``vk.JK(K, kind)``; all use the same inputs at equal ``seed``. ``vary`` names what differs between
    members: "inputs", "targets", "init", "order". ``times`` is the density of t: "uniform", "log" (in log sigma/alpha),
    ("lognormal", mean, std) of sigma/alpha or a quantile function u -> t; by default the model's (``defaults``).
    ``labels (n,)`` are the labels of the points for a U-Net with ``classes``, which learns the law of each class
    (:meth:`Ensemble.given`). ``flips=True`` adds the mirror image of every image to the data.
    ``snapshots`` are steps of a network's training after which the ensemble is kept too, in ``.snapshots`` of the
    result; ``.info["steps"]`` then holds these steps and the last one, and ``.info["update_norm"]`` and
    ``["gradient_norm"]``, ``(members, steps)``, the mean norms of a step's update and gradient since the one before.
    ``checkpoint`` is a folder in which the training of networks is kept, at snapshots and every minute: a training that
    was killed and is started again with the same arguments continues there, with the same result. It is refused if it
    is of another training, and never removed. ``dtype`` is that of linear and lazy models; a network has its own.

    >>> import torch, vkernel as vk
    >>> data, process = vk.data.toy("triple"), vk.VP()
    >>> model = vk.models.Linear(vk.features.grid("gaussian", 4, process=process), target="x0")
    >>> noisy = vk.train_ensemble(model, data, process, members=8, draws=32, objective="J1")
    >>> exact = vk.train_ensemble(model, data, process, members=8, draws=32, objective="J0")
    >>> x = torch.tensor([[0.5]])
    >>> float(noisy.cov(x, 0.1).trace()) > float(exact.cov(x, 0.1).trace())
    True
    """
    return train_ensembles(
        model,
        data,
        process,
        [objective],
        members=members,
        draws=draws,
        vary=vary,
        seed=seed,
        times=times,
        labels=labels,
        flips=flips,
        snapshots=snapshots,
        checkpoint=checkpoint,
        dtype=dtype,
        progress=progress,
    )[0]


def train_ensembles(
    model: Model,
    data: Empirical | Tensor,
    process: Process,
    objectives: Sequence[str | Objective],
    *,
    members: int | Sequence[int] = 100,
    draws: int | None = None,
    vary: Sequence[str] = VARIES,
    seed: int = 0,
    times: Times | None = None,
    labels: Array | None = None,
    flips: bool = False,
    snapshots: Sequence[int] = (),
    checkpoint: str | Path | None = None,
    dtype: torch.dtype | None = None,
    progress: Progress = False,
) -> list[Ensemble]:
    """Train one ensemble for each objective, all on the same inputs, in one run; options as of ``vk.train_ensemble``.

    Members of equal index are twins: they share initial parameters, inputs and the order of batches. Inputs and exact
    moments are computed once. On a GPU the networks of all objectives are trained side by side. The result is that of
    separate runs, bit for bit on a CPU and to rounding on a GPU.

    >>> import torch, vkernel as vk
    >>> data, process = vk.data.toy("triple"), vk.VP()
    >>> model = vk.models.Linear(vk.features.grid("gaussian", 4, process=process), target="x0")
    >>> exact, noisy = vk.train_ensembles(model, data, process, ["J0", vk.JC(3)], members=2, draws=32)
    >>> exact.info["objective"], noisy.info["objective"]
    ({'kind': 'J0'}, {'kind': 'JC', 'c': 3.0})
    """
    require(isinstance(model, Model), f"train_ensemble needs a model such as vk.models.Linear(…), not {model!r}.")
    good = isinstance(objectives, Sequence) and not isinstance(objectives, str) and len(objectives) > 0
    require(good, f"objectives must be a list of one objective or more; got {objectives!r:.80}.")
    goals = [parse(objective) for objective in objectives]
    times = model.defaults(process)[1] if times is None else times
    dtype = dtype or model.state_dtype
    training = Training(data, process, goals[0], draws, vary, seed, times, dtype, labels=labels, flips=flips)
    model.check_labels(training.labels)
    if isinstance(members, int):
        least = members * (INDEX + training.data.d * training.dtype.itemsize)  # a weight for each coordinate at least
        check_memory(len(goals) * least, f"An ensemble of {members:,} members", training.data.device)
    try:
        indices = tuple(range(members)) if isinstance(members, int) else tuple(operator.index(m) for m in members)
    except TypeError:
        indices = ()
    good = len(indices) >= 1 and min(indices) >= 0 and len(set(indices)) == len(indices)
    require(good, f"members must be a number ≥ 1 or distinct indices ≥ 0; got {members!r}.")
    with show_progress(1.0, progress) as report:
        label = f"{len(indices)} members, {', '.join(map(repr, goals))}"
        trained = model.train(training, goals, indices, partial(report, label), snapshots, checkpoint)
    about: Info = {"members": list(indices), "draws": draws, "vary": list(training.vary), "seed": int(seed)}
    about["times"] = training.density
    about["data"] = {"name": training.data.name, "n": training.data.n // (1 + flips), "flips": flips}
    if training.labels is not None:
        about["labels"] = sorted(training.classes)
    ensembles, shape = [], training.data.shape
    for goal, found in zip(goals, trained, strict=True):
        info = about | {"objective": goal.spec}
        kept = {step: Ensemble(model, state, process, shape, info) for step, state in found.snapshots.items()}
        ensembles.append(Ensemble(model, found.state, process, shape, info | found.info, kept))
        if ensembles[-1].diverged:
            warnings.warn(ensembles[-1].report, stacklevel=2 if len(goals) > 1 else 3)
    return ensembles


class Ensemble(Scores):
    """M trained members of one model; ``state`` holds their weights, ``info`` records how they were trained.
    ``snapshots`` are the same members after fewer steps, by the number of steps done.

    >>> import torch, vkernel as vk
    >>> data, process = vk.data.toy("triple"), vk.VP()
    >>> model = vk.models.Linear(vk.features.grid("gaussian", 4, process=process), target="x0")
    >>> ens = vk.train_ensemble(model, data, process, members=4, draws=32)
    >>> x = torch.zeros(5, 1)
    >>> ens(x, 0.5).shape  # (M, *batch, *shape)
    torch.Size([4, 5, 1])
    >>> ens.sample(3, steps=10).shape
    torch.Size([4, 3, 1])
    """

    shape: tuple[int, ...]

    def __init__(
        self,
        model: Model,
        state: State,
        process: Process,
        shape: tuple[int, ...],
        info: Info | None = None,
        snapshots: Mapping[int, Ensemble] | None = None,
    ) -> None:
        good = len(state) > 0 and all(a.ndim > 0 and len(a) > 0 for a in state.values())
        require(good, "An ensemble needs a state: named tensors whose first axis is the member.")
        sizes, first = sorted({len(a) for a in state.values()}), next(iter(state.values()))
        require(len(sizes) == 1, f"The tensors of a state hold different numbers of members: {sizes}.")
        self.model, self.state, self.process, self.shape = model, state, process, tuple(shape)
        self.info, self.dtype, self.device = info or {}, first.dtype, first.device
        self.snapshots = dict(snapshots or {})
        self.groups = Groups.of(None, len(first))
        self._seen: tuple[tuple[int, int], ...] = ()
        self._diverged: list[int] = []

    @property
    def diverged(self) -> list[int]:  # type: ignore[override]
        """The members whose weights are not finite; looked for again whenever a tensor of the state has changed."""
        seen = tuple((id(a), 0 if a.is_inference() else a._version) for a in self.state.values())
        if seen != self._seen:
            finite = torch.stack([a.isfinite().flatten(1).all(1) for a in self.state.values()]).all(0)
            self._seen, self._diverged = seen, (~finite).nonzero().flatten().tolist()
            vars(self).pop("_mean_state", None)  # that of the weights before
        return self._diverged

    def __len__(self) -> int:
        return len(self.groups.labels)

    @property
    def indices(self) -> Sequence[int]:
        found = self.info.get("members")
        return found if isinstance(found, list) else range(len(self))

    def __repr__(self) -> str:
        lost = f", {len(self.diverged)} diverged" if self.diverged else ""
        goal = self.info.get("objective")
        kind = goal.get("kind") if isinstance(goal, dict) else None
        return f"Ensemble({len(self)} members{lost}, {self.model!r}, objective={kind}, {self.process!r})"

    def member(self, index: int) -> Member:
        return Member(self, index)

    def select(self, indices: Sequence[int]) -> Ensemble:
        info, which = dict(self.info), list(indices)
        for name in ("members", *RECORDED[1:]):
            each = info.get(name)
            if isinstance(each, list):
                info[name] = [each[k] for k in which]
        kept = {step: found.select(which) for step, found in self.snapshots.items()}
        return Ensemble(self.model, {k: a[which] for k, a in self.state.items()}, self.process, self.shape, info, kept)

    def given(self, label: int) -> Ensemble:
        """Return the members of a class-conditional ensemble as scores of the class ``label``."""
        model, known = self.model.given(label), self.info.get("labels")
        good = not isinstance(known, list) or model.label in known
        require(good, f"No training image had the label {label}, so its score was not learned; labels: {known}.")
        kept = {step: found.given(label) for step, found in self.snapshots.items()}
        return Ensemble(model, self.state, self.process, self.shape, self.info, kept)

    def __call__(self, x: Tensor, t: Time) -> Tensor:
        self._warn()
        return self.evaluate(self.state, x, t)

    def paired(self, x: Tensor, t: Time) -> Tensor:
        self._warn()
        good = check_real(x, "x").ndim > len(self.shape) and len(x) == len(self)
        require(good, f"paired needs x ({len(self)}, *batch, *shape), one set of points per member.")
        return self.evaluate(self.state, x, t, paired=True)

    def evaluate(self, state: State, x: Tensor, t: Time, *, paired: bool = False, affine: bool = True) -> Tensor:
        """Return the scores of a state, ``(members of state, *batch, *shape)``; with ``paired`` x has this shape too.
        Without ``affine``, only the part of the score that is linear in the model's output is returned."""
        x = check_shape(check_real(x, "x"), "x", self.shape)
        x = x if x.is_floating_point() else x.to(torch.get_default_dtype())
        batch, rows = tuple(x.shape[: x.ndim - len(self.shape)]), len(x) if paired else 1
        own = isinstance(t, Tensor) and t.ndim >= len(batch)  # times of each member, or the same for all
        when = self.process.check(wide_time(t, self.device))
        if when.ndim:
            try:
                when = when.expand(batch if own or not paired else batch[1:])
            except RuntimeError:
                raise InputError(f"t has shape {tuple(when.shape)}, which does not broadcast to {batch}.") from None
        wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
        points, when = wide.reshape(rows, -1, *self.shape), when.reshape(rows if paired and own else 1, -1).to(wide)
        out = self.model.score(state, points, when, self.process, affine)
        return out.reshape(x.shape if paired else (len(out), *x.shape)).to(x.dtype)

    def _warn(self) -> None:
        if self.diverged:
            warnings.warn(f"{self.report} Their scores are NaN.", stacklevel=3)

    @cached_property
    def _mean_state(self) -> State:
        return {k: a.mean(0, keepdim=True) for k, a in self.finite.state.items()}

    def mean(self, x: Tensor, t: Time) -> Tensor:
        """Return s_avg, the mean score of the finite members, like x."""
        if not self.model.linear:
            return super().mean(x, t)
        require(len(self.diverged) < len(self), self.report)
        return self.evaluate(self._mean_state, x, t)[0]  # the score of the mean weights

    def combine(self, weights: Tensor) -> Callable[[Tensor, Time], Tensor]:
        if not self.model.linear:
            return super().combine(weights)
        self._check_weights(weights)
        return self.field({k: torch.tensordot(weights.to(a), a, dims=1) for k, a in self.state.items()})

    def field(self, state: State) -> Callable[[Tensor, Time], Tensor]:
        """Return the part of the score that is linear in the output of a state, each member at its own points."""
        count = len(next(iter(state.values())))

        def field(x: Tensor, t: Time) -> Tensor:
            good = check_real(x, "x").ndim >= 2 and len(x) == count
            require(good, f"A field of {count} members takes x ({count}, *batch, *shape).")
            return self.evaluate(state, x, t, paired=True, affine=False)

        return field

    def save(self, path: Path | str) -> Path:
        """Write ``state.safetensors`` and ``ensemble.json`` into the folder ``path``, each whole or not at all.
        A snapshot after k steps goes into its subfolder ``step-k``, unless it is the ensemble itself."""
        self._save(expand(path))
        return expand(path)

    def _save(self, path: Path) -> str:
        """Save and return the hash of the weights."""
        from safetensors.torch import save

        content = save({k: a.detach().cpu().contiguous() for k, a in self.state.items()})
        about: dict[str, object] = {"vkernel": __version__, "shape": list(self.shape), "info": self.info}
        about |= {"model": self.model.spec, "process": processes.spec(self.process)}
        about["sha256"] = digest = hashlib.sha256(content).hexdigest()  # the files belong together
        same = {step: all(found.state[k] is a for k, a in self.state.items()) for step, found in self.snapshots.items()}
        kept = {k: digest if same[k] else found._save(path / f"step-{k}") for k, found in self.snapshots.items()}
        about |= {"snapshots": kept} if kept else {}
        write(path / "state.safetensors", content)
        write(path / "ensemble.json", json.dumps(about, indent=1))
        return digest


class Member(Score):
    """One member of an ensemble, as a score."""

    def __init__(self, ensemble: Ensemble, index: int) -> None:
        self.process, self.shape, self.index, self.ensemble = ensemble.process, ensemble.shape, index, ensemble
        self.state = {k: a[index : index + 1] for k, a in ensemble.state.items()}

    def __call__(self, x: Tensor, t: Time) -> Tensor:
        lost = self.index in self.ensemble.diverged
        require(not lost, f"Member {self.index} diverged: its weights are not finite, and it has no score.")
        return self.ensemble.evaluate(self.state, x, t)[0]

    def __repr__(self) -> str:
        return f"member {self.index} of {self.ensemble!r}"


def load_ensemble(path: Path | str, device: torch.device | str = "cpu") -> Ensemble:
    """Load an ensemble that :meth:`Ensemble.save` wrote; nothing in the files is executed.

    >>> import torch, vkernel as vk
    >>> data, process = vk.data.toy("triple"), vk.VP()
    >>> model = vk.models.Linear(vk.features.grid("gaussian", 4, process=process), target="x0")
    >>> import os, tempfile
    >>> folder = os.path.join(tempfile.mkdtemp(), "ens")
    >>> ens = vk.train_ensemble(model, data, process, members=2, draws=16)
    >>> _ = ens.save(folder)
    >>> len(vk.load_ensemble(folder))
    2
    """
    folder = expand(path)
    found, about = _load(folder, device)
    kept = about.get("snapshots", {})
    good = isinstance(kept, dict) and all(step.isdecimal() for step in kept)
    require(good, f"{folder / 'ensemble.json'} does not describe an ensemble: its snapshots are invalid.")
    for step, digest in kept.items():
        if digest == about.get("sha256"):
            own = {k: v for k, v in found.info.items() if k not in RECORDED}
            one = Ensemble(found.model, found.state, found.process, found.shape, own)
        else:
            one, inner = _load(folder / f"step-{step}", device)
            good = inner.get("sha256") == digest
            require(good, f"The snapshot after {step} steps in {path} is of another training; save the ensemble again.")
        found.snapshots[int(step)] = one
    return found


def _load(folder: Path, device: torch.device | str) -> tuple[Ensemble, dict[str, Any]]:
    """Return the ensemble of one folder, without snapshots, and its description."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    path, description, weights = folder, folder / "ensemble.json", folder / "state.safetensors"
    try:
        about, raw = json.loads(description.read_text(encoding="utf8")), weights.read_bytes()
    except OSError as error:
        raise InputError(f"There is no ensemble in {path}: {error.strerror or error}.") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{description} is not JSON: {error}.") from None
    try:
        # 0.1 called the time embedding of a U-Net's block "told"
        state = {k.replace(".told.", ".embed."): a.to(device) for k, a in load(raw).items()}
        model, process = models.from_spec(about["model"]), processes.from_spec(about["process"])
        if not isinstance(model, Model):
            raise TypeError(f"{model!r} is no model")
        shape = about["shape"]
        if not (isinstance(shape, list) and shape and all(is_whole(k) and k > 0 for k in shape)):
            raise TypeError(f"{shape!r:.60} is no shape of an event")
        found = Ensemble(model, state, process, tuple(shape), about["info"])
        if not all(a.is_floating_point() for a in state.values()):
            raise TypeError("its weights are no floats")
        conditional = model.classes is not None and model.label is None
        at = Ensemble(model.given(0), state, process, found.shape) if conditional else found
        with torch.no_grad():  # the first member at one point: whether model and weights fit together
            one = at.evaluate({k: a[:1] for k, a in state.items()}, torch.zeros(1, *shape, device=device), process.T)
        if not (one.isfinite().all() or found.diverged):
            raise ValueError("its scores are not finite")
    except SafetensorError as error:
        raise InputError(f"{weights} is damaged: {error}.") from None
    except InputError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError, RuntimeError) as error:
        raise InputError(f"{description} does not describe an ensemble: {error!r}.") from None
    good = isinstance(found.info, dict) and all(isinstance(k, int) for k in found.shape)
    require(good, f"{description} does not describe an ensemble: its info or shape is invalid.")
    good = about.get("sha256") in (None, hashlib.sha256(raw).hexdigest())
    require(good, f"The two files in {path} do not belong together: was saving interrupted? Save the ensemble again.")
    return found, about


@dataclass(frozen=True)
class VarianceSplit:
    """Variances of the score, summed over coordinates, by source: ``names``, outermost first.
    ``variance`` and ``share`` are estimates of shape ``(names, *batch)``; ``pooled`` shares, ``(names,)``, are of the
    variance summed over all queries. A variance can come out negative by chance where it is near zero."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    variance: Estimate[Tensor]
    share: Estimate[Tensor]
    pooled: Estimate[Tensor]

    def __str__(self) -> str:
        shares = zip(self.names, self.pooled.value.tolist(), self.pooled.se.tolist(), strict=True)
        rows = [f"{name:8} {100 * value:6.1f} % ± {100 * se:.1f}" for name, value, se in shares]
        return "\n".join(["shares of the variance of the learned score", *rows])


def variance_split(
    model: Model,
    data: Empirical | Tensor,
    process: Process,
    x: Tensor,
    t: Time,
    members: Sequence[int] = (8, 8),
    seed: int = 0,
    *,
    draws: int | None = None,
    objective: str | Objective = "J1",
    times: Times | None = None,
    progress: Progress = False,
) -> VarianceSplit:
    """Split the variance of the score at ``x (*batch, *shape)``, ``t`` into its sources.
    ``members`` are the sizes of the nested design, outermost factor of ``model.randomness`` first; the others get 2.

    >>> import torch, vkernel as vk
    >>> data, process = vk.data.toy("triple"), vk.VP()
    >>> model = vk.models.Linear(vk.features.grid("gaussian", 4, process=process), target="x0")
    >>> x = torch.zeros(3, 1)
    >>> split = vk.variance_split(model, data, process, x, 0.1, members=(3, 2), draws=32)
    >>> split.names
    ('inputs', 'targets')
    """
    require(isinstance(model, Model), f"variance_split needs a model such as vk.models.Linear(…), not {model!r}.")
    require(isinstance(members, Sequence), f"members gives one size for each source; got {members!r}.")
    names = tuple(n for n in model.randomness if n != "order" or draws is not None or model.dropout)
    sizes = (tuple(int(n) for n in members) + (2,) * len(names))[: len(names)]
    good = len(members) <= len(names) and min(sizes) >= 2 and sizes[0] >= 3
    wanted = f"the sizes of {', '.join(names)}, outermost first: the first at least 3, the others at least 2"
    require(good, f"members gives {wanted}; got {tuple(members)}.")
    count = math.prod(sizes)
    # a factor's stream is its index together with those outside it: nested, not crossed
    design = {name: [m // math.prod(sizes[k + 1 :]) for m in range(count)] for k, name in enumerate(names)}
    times = model.defaults(process)[1] if times is None else times
    training = Training(data, process, objective, draws, VARIES, seed, times, model.state_dtype, design)
    model.check_labels(None)
    shape = training.data.shape
    x = check_shape(check_real(x, "x"), "x", shape)
    process.check(wide_time(t, training.data.device))
    with show_progress(1.0, progress) as report:
        state = model.fit(training, range(count), partial(report, "nested design"))
    ensemble = Ensemble(model, state, process, shape)
    require(not ensemble.diverged, f"A nested design must be whole. {ensemble.report}")
    values = ensemble(x, t).double().reshape(*sizes, *x.shape[: x.ndim - len(shape)], -1)
    components = partial(variance_components, levels=len(sizes))
    full, without = components(values), leave_one_out(components, values)
    pooled, pooled_without = (a.reshape(-1, len(names), math.prod(a.shape[2:])).sum(-1) for a in (full[None], without))
    share: Estimate[Tensor] = jackknife(full / full.sum(0), without / without.sum(1, keepdim=True))
    pooled_without = pooled_without / pooled_without.sum(1, keepdim=True)
    whole: Estimate[Tensor] = jackknife(pooled[0] / pooled.sum(), pooled_without)
    return VarianceSplit(names, sizes, jackknife(full, without), share, whole)
