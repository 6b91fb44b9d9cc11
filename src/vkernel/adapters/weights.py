r"""Weight files, factories and betas: what is needed to rebuild a network.

A weight file is untrusted data. It is read by safetensors, or by torch with ``weights_only=True``, which builds
tensors, numbers and containers and nothing else: a pickle that would run code is refused before it does. Nested
dictionaries are flattened with dots (``{"ema": {"conv.weight": …}}`` holds ``ema.conv.weight``), so that ``strip``
selects one network of several. A factory is the user's code.

A stored buffer of a schedule is classified by its values: increasing values are :math:`\beta_t`; decreasing ones are
:math:`\bar\alpha_t = \prod (1-\beta_j)` if they end below ½ and :math:`1 - \beta_t` else.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vkernel.core.errors import InputError, require
from vkernel.process import DDPM, Process, parse

Weights = dict[str, Tensor]
_DEPTH = 8  # of nested dictionaries


def read_weights(path: str | os.PathLike[str]) -> Weights:
    """Read the tensors of a file by name."""
    path = Path(path).expanduser()
    require(path.exists(), f"There is no weight file {path}.")
    require(path.is_file(), f"{path} is a folder, not a weight file.")
    require(path.stat().st_size > 0, f"{path} is an empty file.")
    held = _read_safetensors(path) if path.suffix.lower() == ".safetensors" else _read_torch(path)
    require(isinstance(held, Mapping), f"{path} holds a {type(held).__name__}, not a state dict: tensors by name.")
    weights = dict(_flat(held))
    require(weights, f"{path} holds no tensors; a state dict is a dictionary of tensors by name.")
    return weights


def _read_safetensors(path: Path) -> Any:
    from safetensors.torch import load_file

    try:
        return load_file(str(path), device="cpu")
    except Exception as error:
        raise InputError(f"{path} cannot be read as safetensors, truncated or damaged: {reason(error)}.") from error


def _read_torch(path: Path) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise InputError(
            f"{path} cannot be read as plain tensors: it is damaged, or it holds Python objects, which could run code "
            "and are never loaded. Save the state dict alone, torch.save(net.state_dict(), path), or use safetensors."
        ) from error


def _flat(held: Mapping[Any, Any], prefix: str = "", depth: int = _DEPTH) -> Iterator[tuple[str, Tensor]]:
    for key, value in held.items():
        if isinstance(value, Tensor):
            yield f"{prefix}{key}", value.detach()
        elif isinstance(value, Mapping) and depth:
            yield from _flat(value, f"{prefix}{key}.", depth - 1)


def reason(error: Exception) -> str:
    """Return the first line of an error's message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def stripped(weights: Weights, strip: str, source: str) -> Weights:
    """Return the weights whose names begin with ``strip``, without that prefix."""
    if not strip:
        return weights
    kept = {key.removeprefix(strip): value for key, value in weights.items() if key.startswith(strip)}
    require(kept, f"No key of {source} begins with {strip!r}; it holds {_listed(weights)}.")
    return kept


def build(factory: str | Callable[[], nn.Module]) -> nn.Module:
    """Build a module with a factory."""
    make = named(factory) if isinstance(factory, str) else factory
    require(callable(make), f"The factory must be a function that returns a network; got {type(make).__name__}.")
    try:
        module = make()
    except Exception as error:
        raise InputError(f"The factory {factory!r} failed: {type(error).__name__}: {reason(error)}.") from error
    require(isinstance(module, nn.Module), f"The factory {factory!r} returned a {type(module).__name__}, not a Module.")
    return module


def named(text: str, what: str = "factory") -> Callable[..., Any]:
    """Import ``package.file:factory`` or ``path/to/file.py:factory``; this runs the user's file."""
    where, _, name = text.rpartition(":")
    require(where and name, f"A {what} is named package.file:{what} or path/to/file.py:{what}, not {text!r}.")
    try:
        module = _import_path(Path(where)) if where.endswith(".py") else importlib.import_module(where)
    except InputError:
        raise
    except Exception as error:
        raise InputError(
            f"{where} cannot be imported ({type(error).__name__}: {reason(error)}); a file outside the package path is "
            f"named path/to/file.py:{what}."
        ) from error
    require(hasattr(module, name), f"{where} has no {name!r}.")
    return getattr(module, name)


def _import_path(path: Path) -> Any:
    require(path.is_file(), f"There is no file {path}.")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise InputError(f"{path} is not a Python file.")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def fill(module: nn.Module, weights: Weights, source: str) -> nn.Module:
    """Load weights into the module; refuse other names or shapes than the module's, and values that are not finite."""
    own = {key: value for key, value in module.state_dict().items() if isinstance(value, Tensor)}
    missing, extra = [k for k in own if k not in weights], [k for k in weights if k not in own]
    other = [k for k in own if k in weights and own[k].shape != weights[k].shape]
    faults = []
    if missing:
        faults.append(f"it lacks {_listed(missing)}")
    if extra:
        faults.append(f"it has besides {_listed(extra)}")
    if other:
        faults.append("shapes differ: " + _listed(f"{k} is {_size(weights[k])}, not {_size(own[k])}" for k in other))
    prefix = _prefix(own, weights) if missing else None
    hint = f"; strip={prefix!r} (--strip {prefix}) would fit" if prefix else ""
    kind = type(module).__name__
    require(not faults, f"{source} is not a state dict of {kind}: {'; '.join(faults)}{hint}.")
    bad = [k for k in own if weights[k].is_floating_point() and not weights[k].isfinite().all()]
    require(not bad, f"{source} holds NaN or infinite weights: {_listed(bad)}.")
    module.load_state_dict(weights)
    return module


def _prefix(own: Iterable[str], weights: Weights) -> str | None:
    """Return the prefix of all of the module's names in the file, if there is one."""
    names = list(own)
    candidates = sorted({key.removesuffix(names[0]) for key in weights if key.endswith(names[0])}, key=len)
    return next((p for p in candidates if p and all(p + name in weights for name in names)), None)


def _size(a: Tensor) -> str:
    return "×".join(map(str, a.shape)) or "a number"


def _listed(names: Iterable[str], count: int = 4) -> str:
    names = list(names)
    return ", ".join(names[:count]) + (f" and {len(names) - count} more" if len(names) > count else "")


def read_process(betas: Any, weights: Weights, source: str) -> tuple[Process, str]:
    """Return the process that ``betas`` describes, and a sentence on what was assumed."""
    if isinstance(betas, Process):
        return betas, ""
    if not isinstance(betas, str):
        return DDPM(betas), ""
    kind, _, rest = betas.strip().partition(":")
    if kind == "key":
        require(rest in weights, f"{source} holds no buffer {rest!r}; it holds {_listed(_vectors(weights))}.")
        return from_buffer(weights[rest], rest)
    if kind in ("linear", "scaled_linear"):
        start, end, steps = _three(betas, rest)
        return (DDPM.linear if kind == "linear" else DDPM.scaled_linear)(start, end, steps), ""
    if kind == "cosine" and rest.isdecimal():
        return _cosine(int(rest)), ""
    return parse(betas), ""


def _vectors(weights: Weights) -> list[str]:
    """Return the names of vectors, the likely buffers of a schedule: the longest first."""
    return sorted((k for k, v in weights.items() if v.ndim == 1 and len(v) > 1), key=lambda k: -len(weights[k]))


def _three(text: str, rest: str) -> tuple[float, float, int]:
    try:
        start, end, steps = rest.split(":")
        return float(start), float(end), int(steps)
    except ValueError:
        raise InputError(f"betas are written linear:1e-4:.02:1000 (first, last, number), not {text!r}.") from None


def _cosine(steps: int) -> DDPM:
    """Nichol and Dhariwal's discrete betas, at most .999."""
    require(steps > 1, f"cosine:N needs at least 2 steps, not {steps}.")
    abar = [math.cos((i / steps + 0.008) / 1.008 * math.pi / 2) ** 2 for i in range(steps + 1)]
    return DDPM([min(1 - b / a, 0.999) for a, b in itertools.pairwise(abar)])


def from_buffer(values: Tensor, name: str) -> tuple[DDPM, str]:
    """Return the process of a stored schedule, and a sentence on how it was interpreted."""
    table = values.double().reshape(-1)
    inside = bool(table.isfinite().all()) and len(table) > 1 and bool(((table >= 0) & (table <= 1)).all())
    require(inside, f"The buffer {name!r} is no schedule: at least two numbers in [0, 1] are needed.")
    falling = bool((table.diff() < 0).all())
    if falling and table[-1] >= 0.5:
        return _after_first(1 - table), f"{name} falls to {table[-1]:.3g}: read as alphas, 1 - beta of each step."
    if not falling:
        return _after_first(table), f"{name} does not fall: read as betas."
    table = table[table > 0]
    steps = torch.cat([1 - table[:1], 1 - table[1:] / table[:-1]])
    return _after_first(steps), f"{name} falls to {table[-1]:.3g}: read as the cumulative product of 1 - beta."


def _after_first(betas: Tensor) -> DDPM:
    """Return the process; an index 0 without noise keeps its place and is excluded from the range of t."""
    if betas[0] > 0:
        return DDPM(betas)
    return DDPM(torch.cat([torch.full((1,), 1e-12, dtype=torch.float64), betas[1:]]), eps=1.0)
