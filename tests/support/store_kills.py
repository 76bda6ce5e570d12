"""Kill processes while they write to a FileStore, and see whether anything was lost."""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
from random import Random

import hpcdist


def value_of(key: str, size: int) -> bytes:
    """What a key has to hold."""
    return hashlib.shake_128(key.encode()).digest(size)


def _write(path: str, run: int, seed: int, report: int) -> None:
    """Body of a writer: tells each key as soon as its set has returned."""
    random = Random(seed)
    store = hpcdist.FileStore(path, timeout=10)
    number = 0
    while True:
        # now and then one so long that the kill comes in the middle
        size = 2_000_000 if number % 7 == 3 else random.randrange(300)
        key = f"{run}/{number}/{size}"
        store.set(key, value_of(key, size))
        os.write(report, key.encode() + b"\n")
        if number % 3 == 1:
            store.delete_key(key)
            os.write(report, b"-" + key.encode() + b"\n")
        number += 1


def kill_writers(path: str | os.PathLike[str], times: int, random: Random) -> dict[str, float]:
    """Start a writer, kill it at a random moment, and again.

    Returns
    -------
    dict
        ``kills``, ``acknowledged`` writes, those of them that are ``lost``, values that are
        ``wrong``, ``torn`` records found, and ``longest``: seconds that the store kept its reader
        waiting.
    """
    store = hpcdist.FileStore(path, timeout=10)
    told = {"kills": times, "acknowledged": 0, "lost": 0, "wrong": 0, "torn": 0, "longest": 0.0}
    for run in range(times):
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                _write(os.fspath(path), run, random.randrange(1 << 30), writing)
            except BaseException as error:
                print(f"a writer failed: {error!r}", file=sys.stderr)
            os._exit(1)
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            first = pipe.readline()  # it is under way
            time.sleep(random.random() * 0.02)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            lines = (first + pipe.read()).decode().split("\n")[:-1]
        began = time.monotonic()
        torn = os.path.getsize(path)
        there = set(store.list_keys())
        store.set("marker", str(run))  # cuts off what is torn
        told["torn"] += os.path.getsize(path) < torn
        told["longest"] = max(told["longest"], time.monotonic() - began)
        deleted = {line[1:] for line in lines if line.startswith("-")}
        written = [line for line in lines if not line.startswith("-")]
        told["acknowledged"] += len(lines)
        told["wrong"] += len(deleted & there)
        # of the last, deleting may have been under way
        told["lost"] += sum(key not in there for key in written[:-1] if key not in deleted)
        if written and int(written[-1].split("/")[1]) % 3 != 1 and written[-1] not in deleted:
            told["lost"] += written[-1] not in there
        for key in there:
            if key.startswith(f"{run}/"):
                told["wrong"] += store.get(key) != value_of(key, int(key.rpartition("/")[2]))
                store.delete_key(key)
        if os.path.getsize(path) > 20 << 20:
            # a new file: it only ever grows
            store.close()
            os.unlink(path)
            store = hpcdist.FileStore(path, timeout=10)
    store.close()
    return told
