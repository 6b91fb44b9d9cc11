r"""Ensembles of trained models: their mean, covariance and cumulants, and what they sample (docs/theory.md, §7).

An ensemble is M trainings of one model on one data set, which differ in the randomness of training alone. From its
members' scores follow

.. math:: s_{avg} = E_\theta\,\hat s, \qquad \mathrm{Cov}_\theta[\hat s(x,t), \hat s(x',t')], \qquad
          \bar q(x_\epsilon) = E_\theta\,q_\theta(x_\epsilon) ,

measured here, predicted in :mod:`vkernel.kernels`. Members depend on (seed, index) alone. A member whose weights are
not finite has *diverged*: it is counted and reported, stays in the ensemble, and takes part in no mean.
"""

from __future__ import annotations

import hashlib
import json
import operator
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vkernel import process
from vkernel.core.errors import InputError, require
from vkernel.core.files import write
from vkernel.core.progress import Progress
from vkernel.core.progress import progress as show_progress
from vkernel.data.empirical import Empirical
from vkernel.process import Process
from vkernel.sample.scores import Groups, Scores
from vkernel.score.base import Score, Time, wide_time
from vkernel.train import models
from vkernel.train import objectives as objective
from vkernel.train.models.base import Model, State
from vkernel.train.objectives import VARIES, Objective, Quantile, Training
from vkernel.version import __version__

__all__ = ["Ensemble", "Member", "load_ensemble", "train_ensemble"]


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
    times: str | Quantile = "uniform",
    dtype: torch.dtype | None = None,
    progress: Progress = False,
) -> Ensemble:
    """Train ``members`` models (a number, or the indices of some) on ``draws`` noised points each.

    ``objective`` is "J1", "J0" or ``vk.JK(K, kind)``; objectives share their inputs at equal ``seed``. ``vary`` names
    what differs between members: "inputs", "targets", "init", "order". ``draws=None`` means fresh draws at every
    step, for networks. ``times`` is the density of t. ``progress`` shows a bar,
    or is a function of the label and the finished share.
    """
    require(isinstance(model, Model), f"train_ensemble needs a model such as vk.models.Linear(…), not {model!r}.")
    data = data if isinstance(data, Empirical) else Empirical(data)
    try:
        indices = tuple(range(members)) if isinstance(members, int) else tuple(operator.index(m) for m in members)
    except TypeError:
        indices = ()
    good = len(indices) >= 1 and min(indices) >= 0 and len(set(indices)) == len(indices)
    require(good, f"members must be a number ≥ 1 or distinct indices ≥ 0; got {members!r}.")
    vary = (vary,) if isinstance(vary, str) else tuple(vary)
    goal = _parse(objective)
    training = Training(data, process, goal, draws, vary, seed, times, dtype or model.dtype)
    with show_progress(1.0, progress) as report:
        state = model.fit(training, indices, lambda share: report(f"{len(indices)} members, {goal!r}", share))
    info = {
        "members": list(indices),
        "draws": draws,
        "objective": goal.spec,
        "vary": list(vary),
        "seed": int(seed),
        "times": times if isinstance(times, str) else "function",
        "data": {"name": data.name, "n": data.n},
    }
    found = Ensemble(model, state, process, data.shape, info)
    if len(found.diverged):
        warnings.warn(found.report, stacklevel=2)
    return found


_parse = objective.parse


class Ensemble(Scores):
    """M trained members of one model; ``info`` records how they were trained."""

    shape: tuple[int, ...]

    def __init__(
        self, model: Model, state: State, process: Process, shape: tuple[int, ...], info: dict[str, Any] | None = None
    ) -> None:
        good = len(state) > 0 and all(a.ndim > 0 and len(a) > 0 for a in state.values())
        require(good, "An ensemble needs a state: named tensors whose first axis is the member.")
        sizes = sorted({len(a) for a in state.values()})
        require(len(sizes) == 1, f"The tensors of a state hold different numbers of members: {sizes}.")
        self.model, self.state, self.process, self.shape = model, state, process, tuple(shape)
        self.info, self.groups = info or {}, Groups.of(None, sizes[0])
        finite = torch.stack([a.isfinite().flatten(1).all(1) for a in state.values()]).all(0)
        self.diverged: list[int] = (~finite).nonzero().flatten().tolist()
        healthy = state if not self.diverged else {k: a[finite] for k, a in state.items()}
        self._mean_state = {k: a.mean(0, keepdim=True) for k, a in healthy.items()} if model.linear else {}

    def __len__(self) -> int:
        return len(next(iter(self.state.values())))

    @property
    def dtype(self) -> torch.dtype:
        return next(iter(self.state.values())).dtype

    @property
    def device(self) -> torch.device:
        return next(iter(self.state.values())).device

    @property
    def indices(self) -> Sequence[int]:
        members: Sequence[int] = self.info.get("members", range(len(self)))
        return members

    def __repr__(self) -> str:
        lost = f", {len(self.diverged)} diverged" if self.diverged else ""
        goal = self.info.get("objective", {})
        return f"Ensemble({len(self)} members{lost}, {self.model!r}, objective={goal.get('kind')}, {self.process!r})"

    def member(self, index: int) -> Member:
        return Member(self, index)

    def select(self, indices: Sequence[int]) -> Ensemble:
        info, which = dict(self.info), list(indices)
        if "members" in info:
            info["members"] = [info["members"][k] for k in which]
        return Ensemble(self.model, {k: a[which] for k, a in self.state.items()}, self.process, self.shape, info)

    def __call__(self, x: Tensor, t: Time) -> Tensor:
        return self.evaluate(self.state, x, t)

    def evaluate(self, state: State, x: Tensor, t: Time) -> Tensor:
        """Return the scores of a state of the model at the same points, ``(members of state, *batch, *shape)``."""
        x, batch = self._check(x)
        when = self._time(t, batch).reshape(1, -1)
        wide = _accumulated(x)
        out = self.model.score(state, wide.reshape(1, -1, *self.shape), when.to(wide.dtype), self.process)
        return out.reshape(len(out), *batch, *self.shape).to(x.dtype)

    def paired(self, x: Tensor, t: Time) -> Tensor:
        x, batch = self._check(x)
        good = len(batch) >= 1 and batch[0] == len(self)
        require(
            good, f"paired needs x ({len(self)}, *batch, *shape), one set of points per member; got {tuple(x.shape)}."
        )
        own = isinstance(t, Tensor) and t.ndim >= len(batch)  # times of each member, or the same for all
        when = self._time(t, batch if own else batch[1:]).reshape(len(self) if own else 1, -1)
        wide = _accumulated(x)
        out = self.model.score(self.state, wide.reshape(len(self), -1, *self.shape), when.to(wide.dtype), self.process)
        return out.reshape(x.shape).to(x.dtype)

    def mean(self, x: Tensor, t: Time) -> Tensor:
        """Return s_avg, the mean score of the finite members, like x."""
        if not self.model.linear:
            return super().mean(x, t)
        require(len(self.diverged) < len(self), self.report)
        return self.evaluate(self._mean_state, x, t)[0]  # the score of the mean weights

    def combine(self, weights: Tensor) -> Callable[[Tensor, Time], Tensor]:
        if not self.model.linear:
            return super().combine(weights)
        mixed = {k: torch.tensordot(weights.to(a), a, dims=1) for k, a in self.state.items()}
        count, d = len(weights), self.shape[-1]

        def field(x: Tensor, t: Time) -> Tensor:
            good = isinstance(x, Tensor) and x.ndim >= 2 and len(x) == count
            require(good, f"A field of {count} members takes x ({count}, *batch, *shape); got {tuple(x.shape)}.")
            one = not isinstance(t, Tensor) or t.ndim == 0
            when = self._time(t, tuple(x.shape[1:-1]) if one else tuple(x.shape[:-1])).to(x)
            when = when.reshape(1, 1) if one else when.reshape(count, -1)
            f = self.model.output(mixed, x.reshape(count, -1, d), when, self.process)
            return (self.model.parametrisation.slope(when, self.process)[..., None] * f).reshape(x.shape)

        return field

    def _check(self, x: Tensor) -> tuple[Tensor, tuple[int, ...]]:
        require(isinstance(x, Tensor), f"x must be a torch tensor, not {type(x).__name__}.")
        k = len(self.shape)
        good = x.ndim >= k and tuple(x.shape[x.ndim - k :]) == self.shape
        require(good, f"x has shape {tuple(x.shape)}; it must end in the event shape {self.shape}.")
        x = x if x.is_floating_point() else x.to(torch.get_default_dtype())
        return x, tuple(x.shape[: x.ndim - k])

    def _time(self, t: Time, batch: tuple[int, ...]) -> Tensor:
        wide = self.process.check(wide_time(t, self.device))
        if wide.ndim == 0:
            return wide.reshape((1,) * max(len(batch), 1))
        try:
            return wide.expand(batch)
        except RuntimeError:
            raise InputError(f"t has shape {tuple(wide.shape)}, which does not broadcast to {batch}.") from None

    # Files

    def save(self, path: Path | str) -> Path:
        """Write ``state.safetensors`` and ``ensemble.json`` into the folder ``path``, each whole or not at all."""
        from safetensors.torch import save

        path = Path(path)
        content = save({k: a.detach().cpu().contiguous() for k, a in self.state.items()})
        about = {
            "vkernel": __version__,
            "model": self.model.spec,
            "process": process.spec(self.process),
            "shape": list(self.shape),
            "info": self.info,
            "sha256": hashlib.sha256(content).hexdigest(),  # the two files belong together
        }
        write(path / "state.safetensors", content)
        return write(path / "ensemble.json", json.dumps(about, indent=1)).parent


class Member(Score):
    """One member of an ensemble, as a score."""

    def __init__(self, ensemble: Ensemble, index: int) -> None:
        self.process, self.shape, self.index, self._ensemble = ensemble.process, ensemble.shape, index, ensemble
        self._state = {k: a[index : index + 1] for k, a in ensemble.state.items()}

    def __call__(self, x: Tensor, t: Time) -> Tensor:
        return self._ensemble.evaluate(self._state, x, t)[0]

    def __repr__(self) -> str:
        return f"member {self.index} of {self._ensemble!r}"


def load_ensemble(path: Path | str, device: torch.device | str = "cpu") -> Ensemble:
    """An ensemble that :meth:`Ensemble.save` wrote; nothing in the files is executed."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    path = Path(path)
    try:
        about = json.loads((path / "ensemble.json").read_text())
        raw = (path / "state.safetensors").read_bytes()
    except OSError as error:
        raise InputError(f"There is no ensemble in {path}: {error.strerror or error}.") from None
    except ValueError as error:
        raise InputError(f"{path / 'ensemble.json'} is not JSON: {error}.") from None
    try:
        state = {k: a.to(device) for k, a in load(raw).items()}
        model = models.from_spec(about["model"])
        found = Ensemble(model, state, process.from_spec(about["process"]), tuple(about["shape"]), about["info"])
    except SafetensorError as error:
        raise InputError(f"{path / 'state.safetensors'} is damaged: {error}.") from None
    except InputError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError, RuntimeError) as error:
        raise InputError(f"{path / 'ensemble.json'} does not describe an ensemble: {error!r}.") from None
    good = isinstance(found.info, dict) and all(isinstance(k, int) for k in found.shape)
    require(good, f"{path / 'ensemble.json'} does not describe an ensemble: its info or its shape is invalid.")
    good = about.get("sha256") in (None, hashlib.sha256(raw).hexdigest())
    require(good, f"The two files in {path} do not belong together: was saving interrupted? Save the ensemble again.")
    return found


def _accumulated(x: Tensor) -> Tensor:
    return x if x.dtype in (torch.float32, torch.float64) else x.float()
