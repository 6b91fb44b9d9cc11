"""The theories that networks are compared with: by name, as they are, or as functions of data and process.

A name builds the theory in the network's pixel units and under its process; k of ``local`` and ``equivariant``, h of
``smoothed`` and the threshold of ``pca`` are fitted to the network. On a CPU theories of pixels are built from a
part of the training images: their cost is in proportion to n times the pairs of pixels that are compared."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from vkernel.core.checks import check_choice
from vkernel.core.errors import InputError, require
from vkernel.data import Empirical
from vkernel.process import Process
from vkernel.reports.audit.levels import same_process
from vkernel.reports.audit.networks import numbered
from vkernel.reports.explain.images import Split
from vkernel.sample import Scores
from vkernel.score import DataScore, EmpiricalScore, Score, Wrapped
from vkernel.score.base import check_score
from vkernel.theories import EquivariantLocal, Gaussian, Local, Nearest, PCALocal, Smoothed, Switch, Theory
from vkernel.theories.local import Patched

Factory = Callable[[Empirical, Process], Score]
Given = str | Score | Scores | Factory
Theories = Given | Sequence[Given] | Mapping[str, Given] | None
BUILT: dict[str, Factory] = {"gaussian": Gaussian, "exact": EmpiricalScore, "nearest": Nearest}
FITTED: dict[str, type[Smoothed | Patched | PCALocal]] = {
    "smoothed": Smoothed,
    "local": Local,
    "equivariant": EquivariantLocal,
    "pca": PCALocal,
}
DEFAULT = ("gaussian", "exact", "smoothed", "local", "equivariant", "pca")
SHOWN = ("k", "h", "threshold", "rank")  # parameters that are reported
BUDGET, QUICK = 1 << 29, 1 << 27  # training images × pairs of pixels, on a CPU
SAME_PLACE = 256  # pairs for each pixel, where patches are compared at one place only


def named(theories: Theories) -> dict[str, Given]:
    """Return theories by name, the default ones for ``None``."""
    listed: list[Given]
    if isinstance(theories, Mapping):
        given = dict(theories)
    else:
        if theories is None:
            listed = list(DEFAULT)
        elif isinstance(theories, Sequence) and not isinstance(theories, str):
            listed = list(theories)
        else:
            listed = [theories]
        given = dict(zip(numbered([_name(one) for one in listed]), listed, strict=True))
    require(given, "There is no theory to compare networks with.")
    for name, one in given.items():
        if isinstance(one, str):
            check_choice(one, "A theory", (*BUILT, *FITTED))
        good = isinstance(one, str | Score | Scores) or callable(one)
        require(
            good, f"The theory {name!r} must be a name, a Score, or a function (data, process) of one; got {one!r}."
        )
    return given


def _name(given: Given) -> str:
    if isinstance(given, functools.partial):
        return f"{_name(given.func)}({', '.join(f'{name}={value}' for name, value in given.keywords.items())})"
    if isinstance(given, str | Wrapped):
        return given if isinstance(given, str) else given.name
    return given.__name__ if inspect.isclass(given) or inspect.isroutine(given) else type(given).__name__


@dataclass(frozen=True)
class Candidate:
    """A theory for one network: its score (several, of ``Scores``), and the same theory on held-out images."""

    members: tuple[Score, ...]
    elsewhere: Score | None = None

    @property
    def about(self) -> str:
        """The parameters, such as "k = 3 … 15"."""
        score = self.members[0]
        given = score.options if isinstance(score, Theory) else {}
        return ", ".join(f"{name} = {_range(given[name])}" for name in SHOWN if given.get(name) is not None)


def _range(value: object) -> str:
    if callable(value):
        return "a function of t"
    ends = [
        f"{v:.3g}" for v in ((min(value.values()), max(value.values())) if isinstance(value, Mapping) else (value,))
    ]
    return " … ".join(dict.fromkeys(ends))


def coordinates(theories: Mapping[str, Candidate]) -> dict[str, object]:
    """Return names, numbers of images and parameters of theories as coordinates of a Dataset."""
    each = theories.values()
    found = {"points": [points(one.members[0]) for one in each], "about": [one.about for one in each]}
    found["points_elsewhere"] = [points(one.elsewhere) for one in each]
    return {"theory": list(theories)} | {name: ("theory", values) for name, values in found.items()}


def points(score: Score | None) -> int:
    """Return the number of training images of a theory, 0 if it has none."""
    if isinstance(score, Switch):
        return max(points(score.above), points(score.below))
    return score.data.n if isinstance(score, Theory | EmpiricalScore) else 0


@dataclass(frozen=True)
class Builder:
    """Builds theories for networks of one process and pixel range, at the noise levels ``ratios``; ``train`` training
    images for theories of pixels (``None``: what is affordable)."""

    process: Process
    split: Split
    ratios: list[float]
    train: int | None
    quick: bool
    seed: int

    @functools.cached_property
    def gaussian(self) -> Gaussian:
        """The theory that gains are relative to."""
        return Gaussian(self.split.data, self.process)

    def of(self, given: Given, name: str, nets: Sequence[Wrapped]) -> list[Candidate]:
        """Return a theory for each network, the same one unless it is fitted."""
        if isinstance(given, str) and given in FITTED:
            return [self.fitted(FITTED[given], net) for net in nets]
        return [self.built(given, name)] * len(nets)

    def fitted(self, kind: type[Smoothed | Patched | PCALocal], network: Score) -> Candidate:
        """Return a theory with parameters fitted to a network."""
        require(len(self.split.fit) > 0, f"There are too few images to fit {kind.__name__} on some of them.")
        data = self.split.first(self.limit(kind))
        return self.with_elsewhere(kind.fit(network, data, self.split.fit, levels=self.ratios, seed=self.seed))

    def built(self, given: Given, name: str) -> Candidate:
        """Return a theory that does not depend on the network."""
        if isinstance(given, Scores):
            members = (given.member(m) for m in range(len(given)) if m not in given.diverged)
            return Candidate(tuple(self.checked(member, name) for member in members))
        if isinstance(given, Score):
            return self.with_elsewhere(self.checked(given, name))
        if given == "gaussian":
            return self.with_elsewhere(self.gaussian)
        factory = BUILT[given] if isinstance(given, str) else given
        kind = factory if isinstance(factory, type) else Score
        score = self.checked(factory(self.split.first(self.limit(kind)), self.process), name)
        count = self.limit(type(score))
        if isinstance(score, Theory) and count < points(score):  # its kind is known only now
            score = score.on(self.split.first(count))
        return self.with_elsewhere(score)

    def checked(self, given: object, name: str) -> Score:
        """Return a score of this process and shape."""
        score, shape = check_score(given, f"The theory {name!r}"), self.split.data.shape
        hint = "Give a function (data, process) of it, such as a class of vk.theories"
        good = same_process(score.process, self.process)
        require(good, f"The theory {name!r} has the process {score.process!r}, a network {self.process!r}. {hint}.")
        require(score.shape in (None, shape), f"The theory {name!r} is of shape {score.shape}, the data of {shape}.")
        return score

    def limit(self, kind: type[Score]) -> int:
        """Return how many training images a kind of theory is built from."""
        data = self.split.data
        if not issubclass(kind, Patched | PCALocal) or (self.train is None and data.device.type != "cpu"):
            return data.n
        pixels = math.prod(data.shape[-2:])
        pairs = pixels * (SAME_PLACE if issubclass(kind, Local) else pixels)
        return self.train or (QUICK if self.quick else BUDGET) // pairs

    def with_elsewhere(self, score: Score) -> Candidate:
        """Add the same theory on as many held-out images, if it is built on data."""
        with contextlib.suppress(InputError):  # k neighbours among fewer points, or a switch to a network
            if isinstance(score, DataScore) and (held := self.split.elsewhere(points(score))) is not None:
                return Candidate((score,), score.on(held))
        return Candidate((score,))
