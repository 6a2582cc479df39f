"""One process at a time in a run's folder: a lock that the system lets go of when its holder ends, however it ends.

Knows nothing of what a run writes; `recipes/run.py` holds the lock as long as it trains.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from etude.errors import RecipeError

LOCK_FILE = ".lock"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold `folder`, which is made if need be and removed again if nothing was put into it.

    Windows and some network file systems have no such lock: there nothing is held.

    Raises:
        RecipeError: another process holds it.
    """
    if sys.platform == "win32":
        yield
        return
    import fcntl

    made = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / LOCK_FILE
    with path.open("a", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Its holder may have removed the file between our opening and locking it.
            free = path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat())
        except (BlockingIOError, FileNotFoundError):  # the second: it was removed between our two looks
            free = False
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
                raise
            free = True
        if not free:
            raise RecipeError(f"another process is training in {folder}; wait for it, or give this run another output")
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
            if made and folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()


@contextmanager
def locked_in_turn(folder: Path, timeout_s: float) -> Iterator[None]:
    """The same, waiting for its turn: for what takes a moment, such as adding to a store that several runs share.

    Raises:
        RecipeError: another process has held it all the time.
    """
    until = time.monotonic() + timeout_s
    with ExitStack() as stack:
        while True:
            try:
                stack.enter_context(locked(folder))
                break
            except RecipeError:
                if time.monotonic() > until:
                    raise RecipeError(
                        f"another process has been writing in {folder} for {timeout_s:.0f} s; wait for it, or name "
                        "another folder"
                    ) from None
                time.sleep(0.02)
        yield
