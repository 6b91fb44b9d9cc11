r"""Random streams that do not depend on chunks, workers or order.

* :func:`stream` derives a generator from ``(seed, purpose, member)`` by a cryptographic hash; a member's draws depend
  on nothing else;
* :func:`normals` and :func:`uniforms` are *counter-based*: the number for ``(key, counter)`` is a hash of the two (the
  splitmix64 finaliser, Steele et al. 2014), so that the noise of a pair (query, training point) is the same whichever
  chunk, shard or device computes it.
"""

import hashlib
import math

import numpy as np
import torch
from torch import Tensor

from vkernel.core.checks import is_whole
from vkernel.core.errors import require
from vkernel.core.memory import check_memory

Generator = torch.Generator | int | None


def stream(seed: int, purpose: str, member: int = 0, device: torch.device | str = "cpu") -> torch.Generator:
    """Return the generator of ``(seed, purpose, member)``."""
    return torch.Generator(device).manual_seed(key(seed, purpose, member))


def key(seed: int, purpose: str, member: int = 0) -> int:
    """Return the 63-bit key of ``(seed, purpose, member)``: the root of a generator or of a counter-based stream."""
    seed = int(seed) if isinstance(seed, np.integer) else seed
    require(is_whole(seed), f"seed must be a whole number, not {seed!r}.")
    digest = hashlib.sha256(f"vkernel/{seed}/{purpose}/{int(member)}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def as_generator(generator: Generator, device: torch.device | str = "cpu") -> torch.Generator:
    """Return a generator as it is, a new one for an integer seed, and one with a fresh seed for ``None``."""
    if isinstance(generator, torch.Generator):
        return generator
    generator = int(generator) if isinstance(generator, np.integer) else generator
    good, fresh = generator is None or is_whole(generator), torch.Generator(device)
    require(good, f"generator must be a torch.Generator, an integer seed or None, not {generator!r}.")
    fits = generator is None or -(1 << 63) <= generator < 1 << 64
    require(fits, f"generator={generator} is too large a seed: seeds lie between -2^63 and 2^64 - 1.")
    return fresh.manual_seed(fresh.seed() if generator is None else generator)


def randn(shape: tuple[int, ...], generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Draw standard normals on the generator's device, then move them: one seed gives one result on every device."""
    check_memory(2 * math.prod(shape) * dtype.itemsize, f"A random draw of shape {tuple(shape)}", generator.device)
    return torch.randn(shape, generator=generator, device=generator.device, dtype=dtype).to(device)


def rand(shape: tuple[int, ...], generator: torch.Generator, device: torch.device | str = "cpu") -> Tensor:
    """Draw uniforms on [0, 1), float64, on the generator's device, then move them."""
    check_memory(16 * math.prod(shape), f"A random draw of shape {tuple(shape)}", generator.device)
    return torch.rand(shape, generator=generator, device=generator.device, dtype=torch.float64).to(device)


def quasi_normals(n: int, d: int, seed: int) -> Tensor:
    """Return ``n`` points ``(n, d)``, float64, that fill the standard normal law evenly. In one dimension these are the
    mid-quantiles, ascending; in up to 8, Sobol points scrambled by ``seed`` and mapped by the normal quantile; beyond,
    where such sequences gain nothing, independent draws from the stream of ``seed``."""
    if d > 8:
        return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    if d == 1:
        shares = (torch.arange(n, dtype=torch.float64)[:, None] + 0.5) / n
    else:  # Sobol numbers are multiples of 2^-30, from 0
        shares = torch.quasirandom.SobolEngine(d, scramble=True, seed=seed).draw(n, dtype=torch.float64) + 2.0**-31
    quantiles: Tensor = torch.special.ndtri(shares)
    return quantiles


def keys(shape: tuple[int, ...], generator: torch.Generator, device: torch.device | str = "cpu") -> Tensor:
    """Draw one 63-bit key for each element of ``shape``: the roots of counter-based streams."""
    high = torch.iinfo(torch.int64).max
    return torch.randint(0, high, shape, generator=generator, device=generator.device).to(device)


# splitmix64's constants as signed 64-bit integers (torch has no unsigned arithmetic; products wrap as wanted).
_GOLDEN, _MIX1, _MIX2 = (c - (1 << 64) for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def _shift(z: Tensor, bits: int) -> Tensor:
    """Shift a signed integer to the right logically, without copies of its sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def hashed(key: Tensor, counter: Tensor) -> Tensor:
    """Return 64 bits for each pair of the broadcast ``key`` and ``counter``."""
    z = key + (counter + 1) * _GOLDEN
    z = (z ^ _shift(z, 30)) * _MIX1
    z = (z ^ _shift(z, 27)) * _MIX2
    return z ^ _shift(z, 31)


def uniforms(key: Tensor, counter: Tensor) -> Tensor:
    """Return uniforms on (0, 1), float64, one for each pair of the broadcast ``key`` and ``counter``."""
    return (_shift(hashed(key, counter), 11).double() + 0.5) * 2.0**-53


def normals(key: Tensor, counter: Tensor) -> Tensor:
    """Return standard normals, float64, by Box and Muller's transform of two hashed uniforms."""
    radius = uniforms(key, 2 * counter).log().mul(-2).sqrt()
    return radius * torch.cos(2 * math.pi * uniforms(key, 2 * counter + 1))
