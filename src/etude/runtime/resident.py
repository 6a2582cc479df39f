"""What this process takes of the machine's memory, what it took at most, and what there is for it.

Linux says it in /proc, and lets a process forget its peak, so that the peak of one piece of work can be had. Elsewhere
the peak is that of the whole process so far. A card's memory is counted by torch instead. Knows no model.
"""

from __future__ import annotations

import ctypes
import gc
import os
import re
import resource
import sys
from pathlib import Path

_SELF = Path("/proc/self")
_LIMITS = (  # of a container: the most it may take, and what it takes
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"), Path("/sys/fs/cgroup/memory/memory.usage_in_bytes")),
)


def resident_bytes() -> int:
    """Bytes of memory this process has now; where that cannot be asked, its peak."""
    return _status("VmRSS") or _peak_of_process()


def peak_bytes() -> int:
    """The most it had since `restart_peak`, or since it began."""
    return _status("VmHWM") or _peak_of_process()


def restart_peak() -> bool:
    """Count the peak from now on, what was freed given back first; False where a process cannot."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    try:
        (_SELF / "clear_refs").write_text("5", encoding="ascii")  # proc(5): reset the peak resident set size
    except OSError:
        return False
    return True


def room_bytes() -> int:
    """The most this process could have: what it has, and what the machine, or its container, has left."""
    own = resident_bytes()
    found = re.search(r"^MemAvailable:\s+(\d+) kB", _text(Path("/proc/meminfo")), flags=re.MULTILINE)
    rooms = [own + 1024 * int(found[1])] if found else [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for most, taken in _LIMITS:
        limit, used = _text(most).strip(), _text(taken).strip()
        if limit.isdecimal() and used.isdecimal():
            rooms.append(own + int(limit) - int(used))
    return min(rooms)


def _status(name: str) -> int:
    """One line of /proc/self/status in bytes; 0 where there is none."""
    found = re.search(rf"^{name}:\s+(\d+) kB", _text(_SELF / "status"), flags=re.MULTILINE)
    return 1024 * int(found[1]) if found else 0


def _peak_of_process() -> int:
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage(2): bytes there, kilobytes elsewhere
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except OSError:
        return ""
