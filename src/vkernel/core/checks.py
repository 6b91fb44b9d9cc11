"""Argument checks: each returns the value it was given, or raises :class:`InputError` with a sentence.

The value comes first and its name second, as in ``check_whole(steps, "steps")``. Checks of tensors look at their
metadata alone and cost microseconds. :func:`takes` shows in a signature the options that a function passes on."""

import functools
import inspect
import math
import warnings
from collections.abc import Callable, Iterable
from typing import TypeGuard, TypeVar, cast

import numpy as np
import torch
from torch import Tensor
from torch.masked import MaskedTensor

from vkernel.core.errors import InputError, require

_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64)
REAL = frozenset(_FLOATS + _INTEGERS)
_KINDS = {"U": "text", "S": "bytes", "O": "Python objects", "M": "dates", "m": "differences of dates", "V": "records"}
_KINDS |= {"b": "True and False", "c": "complex ones"}
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
    """Return an integer of at least ``least``; those of numpy become Python's."""
    value = int(value) if isinstance(value, np.integer) else value
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


def check_dense(x: object, name: str) -> Tensor:
    """Return a tensor that holds its values, in order: not sparse, nested, masked, quantised or meta."""
    if not isinstance(x, Tensor):
        raise InputError(f"{name} must be a torch tensor, not {type(x).__name__}.")
    fault = ""
    if x.is_nested:
        fault = "a nested tensor; pad it, or give one event at a time"
    elif x.layout is not torch.strided:
        fault = f"a sparse one ({str(x.layout).removeprefix('torch.')}); call .to_dense() first"
    elif x.is_quantized:
        fault = "a quantised one; call .dequantize() first"
    elif isinstance(x, MaskedTensor):
        fault = "a masked one; fill it, or leave masked events out"
    elif x.is_meta:
        fault = "one on the device 'meta', which holds no values"
    if fault:
        raise InputError(f"{name} must be a dense tensor of numbers, not {fault}.")
    return x


def check_real(x: object, name: str) -> Tensor:
    """Return a dense tensor of real numbers: integers, or floats of 16 bits or more."""
    x = check_dense(x, name)
    if x.dtype in REAL:
        return x
    kind = "complex ones" if x.is_complex() else "True and False" if x.dtype == torch.bool else str(x.dtype)
    raise InputError(f"{name} must be real numbers, not {kind.removeprefix('torch.')}.")


def check_array(values: object, name: str) -> np.ndarray:
    """Return real numbers as an array; masked ones are refused, and what forms no array."""
    require(not np.ma.is_masked(values), f"{name} is a masked array; fill it, or leave masked entries out.")
    try:
        array = np.asarray(values)
    except Exception as error:  # whatever the conversion of a foreign type raises
        kind = type(values).__name__
        raise InputError(f"{name} must be one array of numbers; this {kind} forms none.") from error
    single = array.dtype.kind == "O" and array.ndim == 0
    kind = type(values).__name__ if single else _KINDS.get(array.dtype.kind, array.dtype.name)
    require(array.dtype.kind in "iuf", f"{name} must be real numbers, not {kind}.")
    return array


def as_tensor(values: object, name: str) -> Tensor:
    """Return real numbers as a tensor: a tensor as it is, an array in the machine's byte order, at most 64 bits."""
    return check_real(values, name) if isinstance(values, Tensor) else from_array(check_array(values, name))


def from_array(array: np.ndarray) -> Tensor:
    """Return an array of real numbers as a tensor, shared where torch can."""
    long_double = array.dtype.kind == "f" and array.dtype.itemsize > 8
    kind = np.dtype(np.float64) if long_double else array.dtype.newbyteorder("=")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable.*")  # nothing here writes
        return torch.from_numpy(np.ascontiguousarray(array, dtype=kind).reshape(array.shape))


def check_shape(x: Tensor, name: str, shape: tuple[int, ...]) -> Tensor:
    """Return a tensor ``(*batch, *shape)``."""
    good = x.ndim >= len(shape) and tuple(x.shape[x.ndim - len(shape) :]) == shape
    require(good, f"{name} has shape {tuple(x.shape)}; it must end in the event shape {shape}.")
    return x
