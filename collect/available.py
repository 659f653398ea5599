"""What a machine has left for a run: memory, memory of a GPU, files.

In: a device, a folder. Out: numbers, or None where the system does not say. Cost: a few small files of the
system are read.
"""

import os
import sys
from pathlib import Path

import torch

UNKNOWN_MEMORY_BYTES = 4 * 2**30  # where the system does not say how much is available


def free_device_bytes(device: str | torch.device) -> int | None:
    """What torch may still take of a GPU; None on a CPU."""
    if torch.device(device).type != "cuda":
        return None
    # What torch has reserved and not given out is free to use again.
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


def free_files(folder: Path) -> int | None:
    """How many more files and folders the file system takes; None where it does not say."""
    if not hasattr(os, "statvfs"):
        return None
    found = os.statvfs(folder)
    return found.f_favail if found.f_files else None


def available_memory_bytes() -> int:
    """What this process may still take: the system's word and its control group's, whichever is less."""
    found = [*_meminfo(Path("/proc/meminfo")), *_control_group(Path("/sys/fs/cgroup"))]
    return min(found, default=UNKNOWN_MEMORY_BYTES)


def process_bytes() -> int:
    """Memory that this process holds now; where the system does not say, the most it ever held."""
    status = Path("/proc/self/statm")
    if status.is_file():
        return int(status.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    import resource  # not on Windows, where nothing here is known

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _meminfo(path: Path) -> list[int]:
    if not path.is_file():
        return []
    lines = (line.split() for line in path.read_text().splitlines())
    return [int(words[1]) * 1024 for words in lines if words[0] == "MemAvailable:"]


def _control_group(folder: Path) -> list[int]:
    limit, used = folder / "memory.max", folder / "memory.current"
    if not (limit.is_file() and used.is_file()) or limit.read_text().strip() == "max":
        return []
    return [max(int(limit.read_text()) - int(used.read_text()), 0)]
