"""Argument checks: each returns the value it was given, or raises :class:`InputError` with a sentence.

The value comes first and its name second, as in ``check_whole(steps, "steps")``. :func:`takes` shows in a signature
the options that a function passes on."""

import functools
import inspect
import math
from collections.abc import Callable, Iterable
from typing import TypeGuard, TypeVar, cast

from torch import Tensor

from vkernel.core.errors import InputError, require

Kind = TypeVar("Kind")
Taking = TypeVar("Taking", bound=Callable[..., object])


def takes(source: Callable[..., object]) -> Callable[[Taking], Taking]:
    """Show, in place of a function's ``**options``, the keyword-only parameters of ``source``, and refuse others."""

    def show(function: Taking) -> Taking:
        own, more = (inspect.signature(f).parameters.values() for f in (function, source))
        shown = {p.name: p for p in own if p.kind is not p.VAR_KEYWORD}
        shown |= {p.name: p for p in more if p.kind is p.KEYWORD_ONLY}

        @functools.wraps(function)
        def checked(*args: object, **options: object) -> object:
            for name in options.keys() - shown.keys():
                known = ", ".join(shown)
                raise TypeError(f"{function.__name__}() got an unexpected option {name!r}; it takes {known}.")
            return function(*args, **options)

        vars(checked)["__signature__"] = inspect.signature(function).replace(parameters=list(shown.values()))
        return cast(Taking, checked)

    return show


def is_whole(value: object) -> TypeGuard[int]:
    """Whether ``value`` is an integer; booleans are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[float]:
    """Whether ``value`` is a finite real number; booleans are not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def check_whole(value: object, name: str, least: int = 1) -> int:
    """Return an integer of at least ``least``."""
    if is_whole(value) and value >= least:
        return value
    raise InputError(f"{name} must be a whole number, {least} or more, not {value!r}.")


def check_number(value: object, name: str, least: float = -math.inf) -> float:
    """Return a finite number of at least ``least``."""
    if is_number(value) and value >= least:
        return float(value)
    bound = f", {least:g} or more" if math.isfinite(least) else ""
    raise InputError(f"{name} must be a finite number{bound}, not {value!r}.")


def check_positive(value: object, name: str) -> float:
    """Return a finite number above zero."""
    if is_number(value) and value > 0:
        return float(value)
    raise InputError(f"{name} must be positive and finite, not {value!r}.")


def check_share(value: object, name: str) -> float:
    """Return a number strictly between 0 and 1."""
    if is_number(value) and 0 < value < 1:
        return float(value)
    raise InputError(f"{name} must be a number between 0 and 1, not {value!r}.")


def check_choice(value: str, name: str, choices: Iterable[str]) -> str:
    """Return ``value`` if it is one of ``choices``."""
    known = list(choices)
    require(value in known, f"{name} must be one of {', '.join(known)}, not {value!r}.")
    return value


def check_type(value: object, name: str, kind: type[Kind]) -> Kind:
    """Return ``value`` if it is an instance of ``kind``."""
    if isinstance(value, kind):
        return value
    article = "an" if kind.__name__[0] in "AEIOU" else "a"
    raise InputError(f"{name} must be {article} {kind.__name__}, not {type(value).__name__}.")


def check_shape(x: Tensor, name: str, shape: tuple[int, ...]) -> Tensor:
    """Return a tensor ``(*batch, *shape)``."""
    good = x.ndim >= len(shape) and tuple(x.shape[x.ndim - len(shape) :]) == shape
    require(good, f"{name} has shape {tuple(x.shape)}; it must end in the event shape {shape}.")
    return x
