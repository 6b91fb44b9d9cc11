"""Free memory, and refusals of what would not fit into it.

Linux grants memory that does not exist and kills the process when it is used: a large size is therefore compared with
what is free *before* it is allocated, read or unpacked."""

import contextlib
import resource
from pathlib import Path

import torch

from vkernel.core.errors import require

CHECKED = 1 << 28  # bytes from which on a size is compared with the free memory: 256 MB
UNKNOWN = 4 << 30  # assumed free where the system does not say


def free_memory(device: torch.device | None = None) -> int:
    """Return the number of bytes that are free on ``device`` now; on the CPU also within the limits of a container
    (cgroup 2) and of the process (``ulimit -v``)."""
    if device is not None and device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    known = [1024 * value for value in _fields("/proc/meminfo", "MemAvailable:")] or [UNKNOWN]
    with contextlib.suppress(OSError, ValueError):  # the limit is "max" without one
        group = Path("/sys/fs/cgroup")
        used = int((group / "memory.current").read_text()) - sum(_fields(str(group / "memory.stat"), "inactive_file"))
        known.append(int((group / "memory.max").read_text()) - used)
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY:
        known.append(limit - 1024 * sum(_fields("/proc/self/status", "VmSize:")))
    return max(0, min(known))


def check_memory(size: int, what: str, device: torch.device | None = None) -> None:
    """Refuse ``what``, which takes ``size`` bytes, if these are not free."""
    if size > CHECKED:
        free = free_memory(device)
        require(size <= free, f"{what} needs {_gib(size)} GiB of memory; {_gib(free)} GiB are free.")


def _fields(path: str, name: str) -> list[int]:
    """Return the number after ``name`` in a file of the kernel, or nothing."""
    try:
        rows = (line.split() for line in Path(path).read_text().splitlines())
        return [int(row[1]) for row in rows if row and row[0] == name]
    except (OSError, ValueError, IndexError):
        return []


def _gib(size: int) -> str:
    return f"{min(size, 1 << 100) / 2**30:.3g}"
