"""Memory of this process: the allocator's on a GPU, the resident set's on Linux.

On the CPU there is no allocator statistic, so the high-water mark of the resident set (VmHWM) is
reset before and read after, and free heap is given back first; where the kernel does not allow the
reset, there is no peak (None) rather than a wrong one.
"""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

import torch

# Parameters of glibc's mallopt (malloc.h).
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4
_STATUS, _REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def _field(name: str) -> int:
    """A field of /proc/self/status in bytes."""
    for line in _STATUS.read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    return 0


def _trim() -> None:
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    except (OSError, AttributeError):  # musl and others: the heap stays as it is
        return


def keep_memory() -> None:
    """Let glibc keep what tensors free, as a GPU's caching allocator does.

    Its default maps every large tensor anew and returns it at once, so that each page of it faults
    again: of a 32K-token pack of the small GPT that took 29 to 62 us per token beside 95 us of
    computation, of a 1K-token pack nothing. With it the time of a pack is linear in its tokens.
    Another C library keeps its defaults.
    """
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return
    mallopt(_M_MMAP_MAX, 0)
    mallopt(_M_TRIM_THRESHOLD, -1)  # never
    mallopt(_M_TOP_PAD, 256 << 20)


def held_bytes(device: torch.device) -> dict[str, int]:
    """What is held now, by name: the allocator's numbers on a GPU, the resident set on a host."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return {
            "allocated": torch.cuda.memory_allocated(device),
            "reserved": torch.cuda.memory_reserved(device),
            "free": free,
            "total": total,
        }
    return {"resident": _field("VmRSS")} if _STATUS.exists() else {}


def give_back(device: torch.device) -> None:
    """Return what nothing holds any more, before another attempt."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    else:
        _trim()


def reset_peak(device: torch.device) -> bool:
    """Begin a new high-water mark of what this rank holds; False where that cannot be done."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return True
    try:
        _REFS.write_text("5")
    except OSError:
        return False
    return True


def peak_held(device: torch.device) -> int:
    """Most bytes held since `reset_peak`: the allocator's on a GPU, on Linux the resident set's,
    interpreter and libraries included."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return _field("VmHWM")


class PeakMemory:
    """Starts counting when made; `peak_bytes` is the rise above that moment."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.start: int | None = None
        cuda = device.type == "cuda"
        if not cuda:
            gc.collect()
            _trim()
        if reset_peak(device):
            self.start = torch.cuda.memory_allocated(device) if cuda else _field("VmRSS")

    def peak_bytes(self) -> int | None:
        return None if self.start is None else max(0, peak_held(self.device) - self.start)
