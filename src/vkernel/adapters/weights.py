r"""Weight files and betas: what is needed, besides its code, to rebuild a network.

A weight file is untrusted data. It is read by safetensors, or by torch with ``weights_only=True``, which builds
tensors, numbers and containers and nothing else: a pickle that would run code is refused before it does. Nested
dictionaries are flattened with dots (``{"ema": {"conv.weight": …}}`` holds ``ema.conv.weight``), so that ``strip``
selects one network of several.

A stored buffer of a schedule is classified by its values: increasing values are :math:`\beta_t`; decreasing ones are
:math:`\bar\alpha_t = \prod (1-\beta_j)` if they end below ½ and :math:`1 - \beta_t` else."""

import itertools
import math
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from vkernel.core.checks import check_dense, check_real
from vkernel.core.errors import InputError, require
from vkernel.core.files import expand
from vkernel.process import DDPM, Process, parse

Weights = dict[str, Tensor]
Betas = str | Sequence[float] | Tensor | Process
LONGEST = 1 << 20  # steps of a schedule
_DEPTH = 8  # of nested dictionaries
_SHORTEST, _MOST = 10, 24  # numbers in a vector that may be a schedule; schedules
_PICKLED = (
    "plain tensors: it is damaged, or it holds Python objects, which could run code and are never loaded. "
    "Save the state dict alone, torch.save(net.state_dict(), path), or use safetensors"
)


def read_weights(path: str | os.PathLike[str]) -> Weights:
    """Read the tensors of a file by name."""
    path = expand(path)
    require(path.exists(), f"There is no weight file {path}.")
    require(path.is_file(), f"{path} is a folder, not a weight file.")
    require(path.stat().st_size > 0, f"{path} is an empty file.")
    safe = path.suffix.lower() == ".safetensors"
    try:
        with warnings.catch_warnings(action="ignore"):
            held = load_file(path) if safe else torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        fault = f"safetensors, truncated or damaged: {reason(error)}" if safe else _PICKLED
        raise InputError(f"{path} cannot be read as {fault}.") from error
    require(isinstance(held, Mapping), f"{path} holds a {type(held).__name__}, not a state dict: tensors by name.")
    weights = dict(_flat(held))
    require(weights, f"{path} holds no tensors; a state dict is a dictionary of tensors by name.")
    return weights


def _flat(held: Mapping[str, object], prefix: str = "", depth: int = _DEPTH) -> Iterator[tuple[str, Tensor]]:
    for key, value in held.items():
        if isinstance(value, Tensor):
            yield f"{prefix}{key}", value.detach()
        elif isinstance(value, Mapping) and depth:
            yield from _flat(value, f"{prefix}{key}.", depth - 1)


def reason(error: BaseException) -> str:
    """Return the first line of an error's message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def fill(module: nn.Module, weights: Weights, source: str, strip: str = "") -> nn.Module:
    """Load the weights whose names begin with ``strip``; refuse other names or shapes than the module's, and NaN."""
    kept = {key.removeprefix(strip): value for key, value in weights.items() if key.startswith(strip)}
    require(kept, f"No key of {source} begins with {strip!r}; it holds {_listed(weights)}.")
    for key, value in kept.items():
        check_dense(value, f"{key} in {source}")
    own = {key: value for key, value in module.state_dict().items() if isinstance(value, Tensor)}
    sizes = {k: ["×".join(map(str, a[k].shape)) or "a number" for a in (kept, own)] for k in own if k in kept}
    faults = {
        "it lacks ": [k for k in own if k not in kept],
        "it has besides ": [k for k in kept if k not in own],
        "shapes differ: ": [f"{k} is {given}, not {wanted}" for k, (given, wanted) in sizes.items() if given != wanted],
    }
    listed = "; ".join(fault + _listed(names) for fault, names in faults.items() if names)
    first = next(iter(own), "")
    prefixes = sorted((key.removesuffix(first) for key in kept if key.endswith(first) and key != first), key=len)
    prefix = next((p for p in prefixes if all(p + name in kept for name in own)), "") if faults["it lacks "] else ""
    hint = f"; strip={prefix!r} (--strip {prefix}) would fit" if prefix else ""
    require(not listed, f"{source} is not a state dict of {type(module).__name__}: {listed}{hint}.")
    kept = {key: _stored(value, own[key], f"{key} in {source}") for key, value in kept.items()}
    bad = [k for k in own if kept[k].is_floating_point() and not kept[k].isfinite().all()]
    require(not bad, f"{source} holds NaN or infinite weights: {_listed(bad)}.")
    module.load_state_dict(kept)
    return module


def _stored(value: Tensor, wanted: Tensor, name: str) -> Tensor:
    """Return a weight that can take the place of ``wanted``, in its type: a large float64 is no float32."""
    wrong = wanted.is_floating_point() and not value.is_floating_point()
    require(
        not wrong, f"{name} is stored as {str(value.dtype).removeprefix('torch.')}; the network needs floats there."
    )
    return value.to(wanted.dtype) if wanted.is_floating_point() else value


def _listed(names: Iterable[str], count: int = 4) -> str:
    names = list(names)
    return ", ".join(names[:count]) + (f" and {len(names) - count} more" if len(names) > count else "")


def read_process(betas: Betas, weights: Weights, source: str) -> tuple[Process, str]:
    """Return the process that ``betas`` describes, and a sentence on what was assumed."""
    if not isinstance(betas, str):
        return betas if isinstance(betas, Process) else DDPM(betas), ""
    kind, _, rest = betas.strip().partition(":")
    if kind == "key":
        vectors = sorted((k for k, v in weights.items() if v.ndim == 1 and len(v) > 1), key=lambda k: -len(weights[k]))
        require(rest in weights, f"{source} holds no buffer {rest!r}; it holds {_listed(vectors)}.")
        return from_buffer(weights[rest], rest)
    if kind in ("linear", "scaled_linear"):
        try:
            start, end, steps = rest.split(":")
            given = float(start), float(end), int(steps)
        except ValueError:
            raise InputError(f"betas are written linear:1e-4:.02:1000 (first, last, number), not {betas!r}.") from None
        return (DDPM.linear if kind == "linear" else DDPM.scaled_linear)(*given), ""
    if kind == "cosine" and rest.isdecimal() and len(rest) < 20:  # Nichol and Dhariwal's discrete betas, at most .999
        count = int(rest)
        require(1 < count <= LONGEST, f"cosine:N needs 2 to {LONGEST:,} steps, not {count}.")
        abar = [math.cos((i / count + 0.008) / 1.008 * math.pi / 2) ** 2 for i in range(count + 1)]
        return DDPM([min(1 - b / a, 0.999) for a, b in itertools.pairwise(abar)]), ""
    return parse(betas), ""


def from_buffer(values: Tensor, name: str) -> tuple[DDPM, str]:
    """Return the process of a stored schedule, and a sentence on how it was interpreted."""
    small = check_real(values, f"The buffer {name!r}").numel() <= LONGEST
    require(small, f"The buffer {name!r} is no schedule: it holds {values.numel():,} numbers.")
    table = values.double().reshape(-1)
    inside = bool(table.isfinite().all()) and len(table) > 1 and bool(((table >= 0) & (table <= 1)).all())
    require(inside, f"The buffer {name!r} is no schedule: at least two numbers in [0, 1] are needed.")
    if not bool((table.diff() < 0).all()):
        betas, read = table, "does not fall: read as betas"
    elif table[-1] >= 0.5:
        betas, read = 1 - table, f"falls to {table[-1]:.3g}: read as alphas, 1 - beta of each step"
    else:
        table = table[table > 0]
        betas = torch.cat([1 - table[:1], 1 - table[1:] / table[:-1]])
        read = f"falls to {table[-1]:.3g}: read as the cumulative product of 1 - beta"
    if betas[0] > 0:
        return DDPM(betas), f"{name} {read}."
    # an index 0 without noise keeps its place and is excluded from the range of t
    return DDPM(torch.cat([betas.new_full((1,), 1e-12), betas[1:]]), eps=1.0), f"{name} {read}."


def schedules(weights: Weights) -> tuple[tuple[str, DDPM], ...]:
    r"""Return the schedules that a file may hold, by name: monotone vectors, in every reading that makes a schedule.

    A vector b may be :math:`\bar\alpha` itself, :math:`1 - \bar\alpha`, their roots, the betas or 1 - beta,
    :math:`\sigma/\alpha`, its inverse, or the logarithm of :math:`\alpha^2/\sigma^2`. Those that fall from above ½ to
    below it are schedules; of equal ones the first is kept."""
    found: dict[str, Tensor] = {}
    for key, held in sorted(
        weights.items(), key=lambda item: "sqrt" in item[0]
    ):  # tables themselves before their roots
        if held.ndim != 1 or len(held) < _SHORTEST or not held.is_floating_point() or not bool(held.isfinite().all()):
            continue
        b = held.double()
        steps = b.diff()
        if not bool((steps >= 0).all() | (steps <= 0).all()) or steps.sum() == 0:
            continue
        readings = {"": b, " as 1 - abar": 1 - b, " as the root of abar": b * b, " as the root of 1 - abar": 1 - b * b}
        readings |= {" as betas": (1 - b).cumprod(0), " as 1 - beta": b.cumprod(0)}
        readings |= {" as sigma/alpha": 1 / (1 + b * b), " as alpha/sigma": b * b / (1 + b * b)}
        readings |= {" as the log of alpha²/sigma²": b.sigmoid()}
        for name, abar in readings.items():
            abar = abar if abar[0] > abar[-1] else abar.flip(0)
            abar = abar[(abar > 0) & (abar <= 1)].clamp_max(1 - 1e-12)  # a first index without noise keeps its place
            falls = len(abar) >= _SHORTEST and bool((abar.diff() < 0).all()) and bool(abar[0] > 0.5 > abar[-1])
            known = any(len(a) == len(abar) and torch.allclose(a, abar, 1e-3, 1e-6) for a in found.values())
            if falls and not known:
                found[f"key:{key}{name}"] = abar
    return tuple((name, DDPM.from_alphas_cumprod(abar)) for name, abar in list(found.items())[:_MOST])
