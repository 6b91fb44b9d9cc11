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
import math
import operator
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vkernel import process
from vkernel.core import rng
from vkernel.core.covariance import Covariance, Cross, Factored
from vkernel.core.errors import InputError, require
from vkernel.core.estimate import Estimate, student_quantile
from vkernel.core.files import write
from vkernel.core.progress import progress
from vkernel.data.empirical import Empirical
from vkernel.process import Process
from vkernel.sample.loop import Frame
from vkernel.sample.ode import march
from vkernel.score.conversions import wide_time
from vkernel.train import models
from vkernel.train import objectives as objective
from vkernel.train.models.base import Model, State
from vkernel.train.objectives import VARIES, Objective, Quantile, Training
from vkernel.version import __version__

__all__ = ["Cumulants", "Ensemble", "Member", "cumulants", "kurtosis", "load_ensemble", "skewness", "train_ensemble"]

Time = float | Tensor
CHUNK = 1 << 22  # numbers of a sample taken at once


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
    show: bool = True,
) -> Ensemble:
    """Train ``members`` models (a number, or the indices of some) on ``draws`` noised points each.

    ``objective`` is "J1", "J0" or ``vk.JK(K, kind)``; objectives share their inputs at equal ``seed``. ``vary`` names
    what differs between members: "inputs", "targets", "init", "order". ``draws=None`` means fresh draws at every
    step, for networks. ``times`` is the density of t. Long training shows a bar unless ``show`` is false.
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
    with progress(1.0, show) as tell:
        state = model.fit(training, indices, lambda share: tell(f"{len(indices)} members, {goal!r}", share))
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


@dataclass(frozen=True)
class Cumulants:
    r"""Standardised third and fourth cumulants over members, with jackknife errors; zero for a Gaussian.

    ``skewness`` and ``kurtosis`` (excess) are like x. ``joint_skewness`` and ``joint_kurtosis`` are for the leading
    principal components, over members, of the scores at *all* queries together, ``(components,)``; ``shares`` are the
    parts of the total variance that these carry.
    """

    skewness: Estimate
    kurtosis: Estimate
    joint_skewness: Estimate
    joint_kurtosis: Estimate
    shares: Tensor


class Ensemble:
    """M trained members of one model; ``info`` says how they were trained."""

    def __init__(
        self, model: Model, state: State, process: Process, shape: tuple[int, ...], info: dict[str, Any] | None = None
    ) -> None:
        good = len(state) > 0 and all(a.ndim > 0 and len(a) > 0 for a in state.values())
        require(good, "An ensemble needs a state: named tensors whose first axis is the member.")
        sizes = sorted({len(a) for a in state.values()})
        require(len(sizes) == 1, f"The tensors of a state hold different numbers of members: {sizes}.")
        self.model, self.state, self.process, self.shape = model, state, process, tuple(shape)
        self.info = info or {}
        finite = torch.stack([a.isfinite().flatten(1).all(1) for a in state.values()]).all(0)
        self.diverged: list[int] = (~finite).nonzero().flatten().tolist()
        self._healthy = state if not self.diverged else {k: a[finite] for k, a in state.items()}
        self._alive = finite
        self._mean_state = {k: a.mean(0, keepdim=True) for k, a in self._healthy.items()} if model.linear else {}

    def __len__(self) -> int:
        return len(next(iter(self.state.values())))

    @property
    def dtype(self) -> torch.dtype:
        return next(iter(self.state.values())).dtype

    @property
    def device(self) -> torch.device:
        return next(iter(self.state.values())).device

    @property
    def report(self) -> str:
        """How many members diverged, in words."""
        if not self.diverged:
            return f"All {len(self)} members are finite."
        return (
            f"{len(self.diverged)} of {len(self)} members diverged (indices {self.diverged[:8]}"
            f"{', …' if len(self.diverged) > 8 else ''}): they take part in no mean. Try a smaller learning rate."
        )

    def __repr__(self) -> str:
        lost = f", {len(self.diverged)} diverged" if self.diverged else ""
        goal = self.info.get("objective", {})
        return f"Ensemble({len(self)} members{lost}, {self.model!r}, objective={goal.get('kind')}, {self.process!r})"

    def __getitem__(self, m: int | slice) -> Member | Ensemble:
        if isinstance(m, slice):
            which = list(range(len(self)))[m]
            info = dict(self.info)
            if "members" in info:
                info["members"] = [info["members"][k] for k in which]
            return Ensemble(self.model, {k: a[which] for k, a in self.state.items()}, self.process, self.shape, info)
        require(hasattr(m, "__index__"), f"An ensemble takes a member's number or a slice, not {m!r}.")
        m = operator.index(m)
        if not -len(self) <= m < len(self):
            raise IndexError(f"There are {len(self)} members; {m} is not among them.")
        return Member(self, m % len(self))

    # Scores

    def __call__(self, x: Tensor, t: Time) -> Tensor:
        """The scores of all members at the same places, ``(M, *batch, *shape)`` for ``x (*batch, *shape)``."""
        return self._shared(self.state, x, t)

    def paired(self, x: Tensor, t: Time) -> Tensor:
        """Each member's score at its own places: ``x (M, *batch, *shape)``, t a scalar or one per place."""
        return self._paired(self.state, x, t)

    def _shared(self, state: State, x: Tensor, t: Time) -> Tensor:
        x, batch = self._door(x)
        when = self._time(t, batch).reshape(1, -1)
        wide = _accumulated(x)
        out = self.model.score(state, wide.reshape(1, -1, *self.shape), when.to(wide.dtype), self.process)
        return out.reshape(len(out), *batch, *self.shape).to(x.dtype)

    def _paired(self, state: State, x: Tensor, t: Time) -> Tensor:
        x, batch = self._door(x)
        count = len(next(iter(state.values())))
        good = len(batch) >= 1 and batch[0] == count
        require(good, f"paired needs x ({count}, *batch, *shape), one set of places per member; got {tuple(x.shape)}.")
        own = _ndim(t) >= len(batch)  # times of each member, or the same for all
        when = self._time(t, batch if own else batch[1:]).reshape(count if own else 1, -1)
        wide = _accumulated(x)
        out = self.model.score(state, wide.reshape(count, -1, *self.shape), when.to(wide.dtype), self.process)
        return out.reshape(x.shape).to(x.dtype)

    def _door(self, x: Tensor) -> tuple[Tensor, tuple[int, ...]]:
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

    # Moments over members

    def mean(self, x: Tensor, t: Time) -> Tensor:
        """s_avg, like x: the mean score of the members that are finite."""
        if self.model.linear:  # the score of the mean weights
            require(len(self.diverged) < len(self), self.report)
            return self._shared(self._mean_state, x, t)[0]
        return self._scores(x, t).mean(0)

    def cov(self, x: Tensor, t: Time, x2: Tensor | None = None, t2: Time | None = None) -> Covariance:
        """Cov over members of the score at (x, t), or between there and (x2, t2), paired over the batch."""
        left = self.deviations(x, t)
        if x2 is None:
            require(t2 is None, "Give x2 with t2: the covariance is between two places and times.")
            return Factored(left, self.shape)
        right = self.deviations(x2, t if t2 is None else t2)
        k = len(self.shape)
        flat = [a.flatten(a.ndim - k).movedim(0, -1) for a in (left, right)]
        return Cross(flat[0] @ flat[1].mT, self.shape)

    def deviations(self, x: Tensor, t: Time) -> Tensor:
        r""":math:`(\hat s_m - s_{avg})/\sqrt{M - 1}`, ``(M, *batch, *shape)``: factors of the covariance."""
        s = self._scores(x, t)
        require(len(s) >= 2, f"A covariance over members needs two finite members; there are {len(s)}.")
        return (s - s.mean(0)) / math.sqrt(len(s) - 1)

    def _scores(self, x: Tensor, t: Time) -> Tensor:
        require(len(self.diverged) < len(self), self.report)
        return self._shared(self._healthy, x, t)

    def cumulants(self, x: Tensor, t: Time, components: int = 3) -> Cumulants:
        """Is the law of the score over members Gaussian here? Third and fourth cumulants, with errors."""
        return cumulants(self._scores(x, t), components)

    # Samples

    def start(self, n: int, seed: int = 0, *, shared: bool = True) -> Tensor:
        """x_T from the prior: ``(n, *shape)``, the same for all members, or ``(M, n, *shape)``."""
        good = isinstance(n, int) and not isinstance(n, bool) and n >= 1
        require(good, f"The number of samples must be ≥ 1; got {n!r}.")

        def draw(member: int) -> Tensor:
            source = rng.stream(seed, "ensemble/x_T", member)
            return self.process.prior((n, *self.shape), device=self.device, dtype=self.dtype, generator=source)

        if shared:
            return draw(0)
        return torch.stack([draw(m) for m in self.info.get("members", range(len(self)))])

    def sample(
        self,
        n: int | None = None,
        *,
        steps: int = 100,
        method: str = "euler",
        spacing: str | None = None,
        seed: int = 0,
        x_T: Tensor | None = None,
        shared: bool = True,
        show: bool = True,
    ) -> Tensor:
        """``(M, n, *shape)``: samples of every member by the PF-ODE, from ``x_T`` or from :meth:`start`.

        Members that diverged, in training or on the way, are NaN, with a warning that counts them.
        """
        require((n is None) != (x_T is None), "Give either n, the number of samples of each member, or x_T.")
        require(len(self.diverged) < len(self), self.report)
        if x_T is None:
            assert n is not None
            x_T = self.start(n, seed, shared=shared)
        x_T, batch = self._door(x_T)
        require(1 <= len(batch) <= 2, f"x_T must be (n, *shape) or (M, n, *shape); got {tuple(x_T.shape)}.")
        good = len(batch) == 1 or batch[0] == len(self)
        require(good, f"x_T has {batch[0]} members; the ensemble has {len(self)}.")
        out = torch.full((len(self), *x_T.shape[-1 - len(self.shape) :]), torch.nan, dtype=x_T.dtype, device=x_T.device)
        alive = self._alive.nonzero().flatten().to(x_T.device)
        # an adaptive method shares its steps within a block: one member each, or members would depend on each other
        at_once = 1 if method == "dopri5" else max(1, CHUNK // max(1, math.prod(out.shape[1:])))
        with progress(len(alive), show) as tell:
            for which in alive.split(at_once):
                out[which] = self._march(which, x_T, steps, method, spacing)
                tell("sampling", len(which))
        lost = int((~out[alive].flatten(1).isfinite().all(1)).sum())
        out[~out.flatten(1).isfinite().all(1)] = torch.nan
        if lost or self.diverged:
            warnings.warn(
                f"{len(self.diverged)} of {len(self)} members diverged in training, {lost} while sampling: their "
                "samples are NaN. More steps, or method='exponential' with spacing='log', may help the latter.",
                stacklevel=2,
            )
        return out

    def _march(self, which: Tensor, x_T: Tensor, steps: int, method: str, spacing: str | None) -> Tensor:
        state = {k: a[which.to(a.device)] for k, a in self.state.items()}
        x = x_T[which] if x_T.ndim == 2 + len(self.shape) else x_T.expand(len(which), *x_T.shape)
        frame = Frame(lambda y, t: self._paired(state, y, t), self.process, x, steps, spacing)
        try:
            return march(frame, method).to(x_T.dtype)
        except AssertionError:  # torchdiffeq's way to say that the adaptive step went to zero
            return torch.full_like(x, torch.nan)

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


class Member:
    """One member: a score like any other."""

    def __init__(self, ensemble: Ensemble, index: int) -> None:
        self.process, self.shape, self.index, self._ensemble = ensemble.process, ensemble.shape, index, ensemble
        self._state = {k: a[index : index + 1] for k, a in ensemble.state.items()}

    def __call__(self, x: Tensor, t: Time) -> Tensor:
        return self._ensemble._shared(self._state, x, t)[0]

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
    require(good, f"{path / 'ensemble.json'} does not describe an ensemble: its info or its shape is amiss.")
    good = about.get("sha256") in (None, hashlib.sha256(raw).hexdigest())
    require(good, f"The two files in {path} do not belong together: was saving interrupted? Save the ensemble again.")
    return found


def cumulants(s: Tensor, components: int = 3) -> Cumulants:
    """Third and fourth cumulants over the first axis of ``s (M, …)``, one score for each member, with errors."""
    s = s.double()
    require(len(s) >= 5, f"Fourth cumulants with their errors need five finite members; there are {len(s)}.")
    centred = (s - s.mean(0)).reshape(len(s), -1)
    left, values, _ = torch.linalg.svd(centred, full_matrices=False)
    count = min(components, len(values))
    joint = left[:, :count]
    return Cumulants(
        _jackknifed(skewness, s),
        _jackknifed(kurtosis, s),
        _jackknifed(skewness, joint),
        _jackknifed(kurtosis, joint),
        (values.square() / values.square().sum().clamp_min(1e-300))[:count],
    )


def _ndim(t: Time) -> int:
    return t.ndim if isinstance(t, Tensor) else 0


def _accumulated(x: Tensor) -> Tensor:
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def skewness(s: Tensor) -> Tensor:
    """Fisher's G1 over the first axis; 0 where nothing varies."""
    n, c = len(s), s - s.mean(0)
    m2, m3 = c.square().mean(0), c.pow(3).mean(0)
    return math.sqrt(n * (n - 1)) / (n - 2) * torch.where(m2 > 0, m3 / m2.pow(1.5), 0.0)


def kurtosis(s: Tensor) -> Tensor:
    """Fisher's G2, the excess, over the first axis; 0 where nothing varies."""
    n, c = len(s), s - s.mean(0)
    m2, m4 = c.square().mean(0), c.pow(4).mean(0)
    excess = (n - 1) / ((n - 2) * (n - 3)) * ((n + 1) * (m4 / m2.square() - 3) + 6)
    return torch.where(m2 > 0, excess, 0.0)


def _jackknifed(statistic: Any, s: Tensor) -> Estimate:
    """A statistic over the first axis, with the error of leaving one out."""
    n = len(s)
    value = statistic(s)
    without = torch.stack([statistic(torch.cat([s[:k], s[k + 1 :]])) for k in range(n)])
    se = ((n - 1) / n * (without - without.mean(0)).square().sum(0)).sqrt()
    half = student_quantile(n - 1) * se
    return Estimate(value, se, value - half, value + half)
