"""One build at a time in a source tree, from its first file to the finished wheel."""

from __future__ import annotations

import fcntl
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

#: Beside what builds share: Python files, objects and modules to be packed.
LOCK = Path("build", "lock")

_held = False


@contextmanager
def one_build() -> Iterator[None]:
    """Context manager: other builds of this source tree wait until it ends.

    Two builds at once would mix: one removes the modules that the other is about to pack. A build
    that has the lock may ask for it again.
    """
    global _held
    if _held:
        yield
        return
    LOCK.parent.mkdir(parents=True, exist_ok=True)
    with open(LOCK, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("hpcdist: waits for another build in this folder", file=sys.stderr, flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        _held = True
        try:
            yield
        finally:
            _held = False
