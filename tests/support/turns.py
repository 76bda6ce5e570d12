"""One terminal for several writers side by side."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable


class Turns:
    """Standard output: the first one that has begun writes, the text of the others waits."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._texts: dict[str, list[bytes]] = {}  # in the order of their starts

    def open(self, name: str) -> None:
        with self._lock:
            self._texts[name] = []

    def write(self, name: str, text: bytes) -> None:
        with self._lock:
            if name == next(iter(self._texts), None):
                sys.stdout.buffer.write(text)
                sys.stdout.buffer.flush()
            elif name in self._texts:  # else what it left behind writes
                self._texts[name].append(text)

    def close(self, running: Iterable[str]) -> None:
        """Forget the first ones that have ended, and write what waited for that."""
        names = set(running)
        with self._lock:
            while self._texts and next(iter(self._texts)) not in names:
                del self._texts[next(iter(self._texts))]
                waiting = next(iter(self._texts.values()), [])
                sys.stdout.buffer.write(b"".join(waiting))
                sys.stdout.buffer.flush()
                waiting.clear()
