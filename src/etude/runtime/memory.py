"""Memory that a process keeps instead of giving it back.

A step of training frees its largest tensors and asks for the same sizes again in the next step. glibc returns blocks
of 32 MiB and more to the system at once, and the system clears every page of them when it hands them out again: 600 MiB
take 0.18 s to fill, and 0.02 s if they were kept (`benchmarks/cpu_paths.py`). The command line therefore asks glibc to
keep what was freed. A library has no business changing that for a whole process, so `etude.train` does not.
"""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # mallopt(3)
_MOST = 2**31 - 1  # what an int holds: 2 GiB


def keep_freed_memory() -> bool:
    """Have malloc keep up to 2 GiB of what this process frees; False where malloc is not glibc's, and nothing changes.

    The peak stays what it was: what is kept is used again before the process asks for more.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(mallopt(option, _MOST) for option in (_MMAP_THRESHOLD, _TRIM_THRESHOLD))
