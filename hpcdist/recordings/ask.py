"""Ask live processes for the stacks of their threads."""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Iterable

#: In the head of the file: the question, up to which it is answered, whether native stacks as well.
_ASK, _ANSWERED, _NATIVE = 140, 144, 148


def ask(
    paths: Iterable[str | os.PathLike[str]], patience: float = 2.0, native: bool = True
) -> None:
    """Have processes write their stacks into their files, and wait for it.

    Their watchdogs do it; the threads that hang need not help.

    Parameters
    ----------
    paths : iterable of path-like
        The files of live processes of this user. One that cannot be written to is left out.
    patience : float
        Seconds to wait for all of them. A process that does not answer, for instance because it is
        stopped, keeps its earlier stacks.
    native : bool
        Also for the main thread's native stack, which interrupts it for some microseconds.
    """
    waiting = []
    for path in paths:
        try:
            with open(path, "r+b") as file:
                head = mmap.mmap(file.fileno(), 4096)
        except (OSError, ValueError):
            continue
        if native:
            struct.pack_into("<I", head, _NATIVE, 1)
        question = (_word(head, _ANSWERED) + 1) % 2**32
        struct.pack_into("<I", head, _ASK, question)
        waiting.append((head, question))
    until = time.monotonic() + patience
    while time.monotonic() < until and any(_word(h, _ANSWERED) != q for h, q in waiting):
        time.sleep(0.02)
    for head, _ in waiting:
        head.close()


def _word(head: mmap.mmap, at: int) -> int:
    number: int = struct.unpack_from("<I", head, at)[0]
    return number
