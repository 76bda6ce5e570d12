"""TCPStores for tests: masters and clients with one key, and servers in another process."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from contextlib import contextmanager, suppress

import hpcdist

KEY = bytes(range(32))


def master(host="127.0.0.1", port=0, size=None, **more):
    more = {"timeout": 20, "auth_key": KEY, **more}
    return hpcdist.TCPStore(host, port, size, True, **more)


def client(store, **more):
    more = {"timeout": 20, "auth_key": KEY, **more}
    return hpcdist.TCPStore(store.host, store.port, None, False, **more)


def stats(store):
    return store._peer.server.stats()


def states(pid):
    """What the threads of a process are doing: T is stopped."""
    found = set()
    for task in os.listdir(f"/proc/{pid}/task"):
        with suppress(OSError), open(f"/proc/{pid}/task/{task}/stat") as file:  # it may end
            found.add(file.read().rpartition(")")[2].split()[0])
    return found


def until(question, seconds=10.0):
    end = time.monotonic() + seconds
    while not question():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.01)


@contextmanager
def program(text, *arguments, **env):
    """A Python process; its lines come from .stdout."""
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(text), *map(str, arguments)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "HPCDIST_STORE_KEY": KEY.hex(), **env},
    )  # fmt: skip
    try:
        yield child
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
        child.stdin.close()


SERVER = """
    import sys, hpcdist
    store = hpcdist.TCPStore("127.0.0.1", 0, None, True, timeout=30)
    store.set("here", "1")
    print(store.port, flush=True)
    sys.stdin.read()
"""


@contextmanager
def remote():
    """A server in another process, and a client of it here."""
    with program(SERVER) as child:
        port = int(child.stdout.readline())
        yield child, hpcdist.TCPStore("127.0.0.1", port, timeout=20, auth_key=KEY)
