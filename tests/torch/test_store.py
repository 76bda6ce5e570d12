"""The same calls on torch's stores and on ours, and each used by the other."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import textwrap
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as c10d

import hpcdist
from hpcdist import DistStoreError, QueueEmptyError
from hpcdist.torch.store import from_torch, to_torch

pytestmark = [pytest.mark.local, pytest.mark.any_mpi]

TIMEOUT = timedelta(milliseconds=60)
KEY = bytes(range(32))


def pair(kind, folder):
    """A store of torch's and ours of the same kind."""
    if kind == "hash":
        made = c10d.HashStore(), hpcdist.HashStore()
    elif kind == "file":
        made = (
            c10d.FileStore(str(folder / "theirs"), 1),
            hpcdist.FileStore(folder / "ours", 1),
        )
    elif kind == "tcp":
        made = (
            c10d.TCPStore("127.0.0.1", 0, 1, True),
            hpcdist.TCPStore("127.0.0.1", 0, 1, True, auth_key=KEY),
        )
    else:
        made = (
            c10d.PrefixStore("p", c10d.HashStore()),
            hpcdist.PrefixStore("p", hpcdist.HashStore()),
        )
    for store in made:
        store.set_timeout(TIMEOUT)
    return made


#: Calls in order. An answer may be an exception, of which only that it came is compared.
CALLS = {
    "set, get": lambda s: (s.set("a", "1"), s.get("a")),
    "overwrite": lambda s: (s.set("a", "2"), s.set("a", "3"), s.get("a")),
    "empty value": lambda s: (s.set("e", ""), s.get("e")),
    "empty key": lambda s: (s.set("", "v"), s.get("")),
    "bytes": lambda s: (s.set("b", b"\x00\xff"), s.get("b")),
    "bytes as key": lambda s: (s.set(b"bk", "1"), s.get("bk")),
    "bytearray": lambda s: (s.set("ba", bytearray(b"1")), s.get("ba")),
    "unicode": lambda s: (s.set("ключ", "знач"), s.get("ключ")),
    "long": lambda s: (s.set("l", "x" * 100_000), s.get("l")),
    "int as value": lambda s: s.set("i", 5),
    "get, missing": lambda s: s.get("none"),
    "add": lambda s: (s.add("n", 5), s.add("n", -7), s.get("n")),
    "add 0": lambda s: (s.add("z", 0), s.get("z")),
    "add to text": lambda s: (s.set("m", "41"), s.add("m", 1)),
    "add to blank and text": lambda s: (s.set("m", " 41"), s.add("m", 1)),
    "add a bool": lambda s: s.add("bool", True),
    "add a float": lambda s: s.add("n", 1.5),
    "compare_set, missing and expected": lambda s: (s.compare_set("c", "x", "y"), s.check(["c"])),
    "compare_set, missing": lambda s: (s.compare_set("c", "", "1"), s.get("c")),
    "compare_set, empty expected": lambda s: (s.compare_set("c", "", "9"), s.get("c")),
    "compare_set, right": lambda s: (s.compare_set("c", "1", "2"), s.get("c")),
    "compare_set, wrong": lambda s: (s.compare_set("c", "1", "3"), s.get("c")),
    "check": lambda s: (s.check(["a"]), s.check(["a", "none"]), s.check([])),
    "wait": lambda s: (s.wait(["a", "e"]), s.wait([])),
    "wait, missing": lambda s: s.wait(["a", "none"]),
    "wait, missing, timeout": lambda s: s.wait(["none"], timedelta(milliseconds=20)),
    "wait for a str": lambda s: s.wait("a"),
    "append": lambda s: (s.append("w", "po"), s.append("w", "ta"), s.append("w", "to"), s.get("w")),
    "multi": lambda s: (s.multi_set(["x", "y"], ["1", "2"]), s.multi_get(["y", "x"])),
    "multi_get, missing": lambda s: s.multi_get(["x", "none"]),
    "multi_get of nothing": lambda s: s.multi_get([]),
    "delete": lambda s: (s.delete_key("a"), s.check(["a"])),
    "barrier of one": lambda s: (s.barrier("bar", 1), s.barrier("bar", 1)),
    "barrier, alone": lambda s: s.barrier("lonely", 2, TIMEOUT),
    "queue": lambda s: (s.queue_push("q", "1"), s.queue_push("q", b"2"), s.queue_len("q"),
                        s.check(["q"]), s.wait(["q"]), s.queue_pop("q"), s.queue_pop("q", False),
                        s.queue_len("q"), s.check(["q"])),
    "queue, empty": lambda s: s.queue_pop("q", False),
    "queue, empty, waiting": lambda s: s.queue_pop("q"),
    "queue and delete_key": lambda s: (s.queue_push("d", "1"), s.delete_key("d"), s.queue_len("d")),
    "queue and value": lambda s: (s.set("d", "v"), s.queue_pop("d"), s.get("d")),
    "timeout": lambda s: s.timeout,
    "has_extended_api": lambda s: s.has_extended_api(),
    "clone": lambda s: (s.clone().set("clone", "1"), s.get("clone")),
}  # fmt: skip

#: Where we differ on purpose: (kind, call) -> ours. docs/stores.md has them all.
ON_PURPOSE = {
    # torch's FileStore has no queues
    ("file", "queue"): (None, None, 2, True, None, b"1", b"2", 0, False),
    ("file", "queue and delete_key"): (None, False, 1),
    ("file", "queue and value"): (None, b"1", b"v"),
    ("file", "has_extended_api"): True,
}

SLOW = ("wait, missing", "wait, missing, timeout", "multi_get, missing", "barrier, alone")


def answer(store, call):
    try:
        return call(store)
    except Exception as error:
        return error


@pytest.fixture
def folder():
    with tempfile.TemporaryDirectory(dir="/dev/shm") as made:
        yield Path(made)


@pytest.mark.parametrize("kind", ["hash", "file", "tcp", "prefix"])
def test_side_by_side(kind, folder):
    theirs, ours = pair(kind, folder)
    different = []
    for name, call in CALLS.items():
        if kind == "file" and name in SLOW:
            continue  # torch's FileStore takes a second for each; ours is in store/test_base.py
        their, our = answer(theirs, call), answer(ours, call)
        if (kind, name) in ON_PURPOSE:
            same = our == ON_PURPOSE[kind, name]
        elif isinstance(their, Exception):
            same = isinstance(our, Exception)
            if isinstance(their, (c10d.DistStoreError, c10d.QueueEmptyError)):
                same = isinstance(our, DistStoreError)
            if isinstance(their, c10d.QueueEmptyError):
                same = isinstance(our, QueueEmptyError)
            if isinstance(their, TypeError):
                same = isinstance(our, TypeError)
        else:
            same = type(their) is type(our) and their == our
        if not same:
            different.append(f"{name}: torch {their!r}, ours {our!r}")
    assert not different, "\n".join(different)


def test_what_differs_on_purpose(folder):
    """Each line of the table in docs/stores.md that one process can show: torch, then ours."""
    theirs, ours = pair("tcp", folder)
    assert (theirs.num_keys(), ours.num_keys()) == (1, 0)
    for store in (theirs, ours):
        store.set("seven", "7x")
        store.queue_push("q", "v")
    assert theirs.add("seven", 1) == 8
    with pytest.raises(DistStoreError, match="not a whole number"):
        ours.add("seven", 1)
    assert theirs.get("q") == b""  # a queue is no value
    with pytest.raises(DistStoreError, match="timeout"):
        ours.get("q")
    for store in (theirs, ours):
        with pytest.raises(Exception, match="timeout"):
            store.barrier("b", 2)
    theirs.barrier("b", 2)  # the first caller is counted for ever
    with pytest.raises(DistStoreError, match="1/2 arrived"):
        ours.barrier("b", 2)
    for store in (theirs, ours):
        store.add("top", 2**63 - 1)
    assert theirs.add("top", 1) == -(2**63)
    with pytest.raises(DistStoreError, match="64 bits"):
        ours.add("top", 1)
    theirs, ours = pair("prefix", folder)
    for store in (theirs, ours):
        store.underlying_store.set("outside", "1")
        store.set("inside", "1")
    assert theirs.num_keys() == 2 and ours.num_keys() == 1
    assert ours.list_keys() == ["inside"]
    theirs, ours = pair("file", folder)
    assert theirs.delete_key("never there") is True and ours.delete_key("never there") is False


@pytest.mark.parametrize("kind", ["hash", "file", "tcp", "prefix"])
def test_torch_s_stores_seen_as_ours(kind, folder):
    theirs, _ = pair(kind, folder)
    store = from_torch(theirs)
    assert isinstance(store, hpcdist.Store) and to_torch(store) is theirs
    store.set_timeout(0.05)
    assert store.timeout == timedelta(seconds=0.05) == theirs.timeout
    store.set("k", "v")
    assert store.get("k") == b"v" == theirs.get("k")
    assert store.add("n", 2) == 2 and store.check(["k", "n"])
    assert store.compare_set("k", "v", "w") == b"w"
    store.multi_set([], [])
    if kind != "file":
        store.queue_push("q", "1")
        assert store.queue_len("q") == 1 and store.queue_pop("q") == b"1"
        with pytest.raises(QueueEmptyError):
            store.queue_pop("q", False)
        with pytest.raises(hpcdist.DistTimeoutError, match="torch's"):
            store.wait(["none"])
    inner = hpcdist.PrefixStore("in", store)
    inner.set("k", "deep")
    assert theirs.get("in/k") == b"deep"
    assert store.clone().get("k") == b"w"


@pytest.mark.parametrize("kind", ["hash", "file", "tcp", "prefix"])
def test_ours_seen_as_torch_s(kind, folder):
    _, ours = pair(kind, folder)
    store = to_torch(ours)
    assert isinstance(store, c10d.Store) and from_torch(store) is ours
    prefixed = c10d.PrefixStore("t", store)  # C++ calls Python
    prefixed.set("k", b"\x00\xff")
    assert prefixed.get("k") == b"\x00\xff" == ours.get("t/k")
    assert prefixed.add("n", 3) == 3 and prefixed.check(["k"]) and not prefixed.check(["none"])
    prefixed.wait(["k"], timedelta(seconds=1))
    assert prefixed.compare_set("k", b"\x00\xff", "w") == b"w"
    assert prefixed.delete_key("k")
    prefixed.append("a", "x")
    prefixed.multi_set(["x", "y"], ["1", "2"])
    assert prefixed.multi_get(["x", "y"]) == [b"1", b"2"]
    assert prefixed.num_keys() == store.num_keys() == 4
    store.queue_push("q", "1")
    assert store.queue_len("q") == 1 and store.queue_pop("q") == b"1"
    with pytest.raises(DistStoreError, match="timeout"):
        prefixed.wait(["none"], timedelta(milliseconds=20))


def test_a_timeout_set_through_a_prefix_store_of_torch(folder):
    """C++ sets it in its own part of the store."""
    _, ours = pair("hash", folder)
    ours.set_timeout(timedelta.max)
    store = to_torch(ours)
    prefixed = c10d.PrefixStore("t", store)
    assert store.timeout == ours.timeout > timedelta(days=1000)
    store.set_timeout(timedelta(seconds=8))
    assert prefixed.timeout == ours.timeout == timedelta(seconds=8)
    prefixed.set_timeout(timedelta(milliseconds=70))
    for call in (lambda: prefixed.get("none"), lambda: prefixed.wait(["none"])):
        with pytest.raises(DistStoreError, match="timeout after 70ms"):
            call()
    assert store.timeout == ours.timeout == timedelta(milliseconds=70)
    ours.set_timeout(timedelta(milliseconds=30))  # on our side
    with pytest.raises(DistStoreError, match="timeout after 30ms"):
        prefixed.get("none")


def test_wrong_stores_are_refused():
    with pytest.raises(TypeError, match="hpcdist store"):
        to_torch(c10d.HashStore())
    with pytest.raises(TypeError, match="torch store"):
        from_torch(hpcdist.HashStore())


GLOO = """
    import sys, torch, torch.distributed as c10d, hpcdist
    from hpcdist.torch.store import to_torch
    rank, port = int(sys.argv[1]), int(sys.argv[2])
    store = hpcdist.TCPStore("127.0.0.1", port, None, rank == 0, timeout=40)
    if rank == 0:
        print(store.port, flush=True)
    c10d.init_process_group("gloo", store=to_torch(store), rank=rank, world_size=2)
    x = torch.full((3,), rank + 1.0)
    c10d.all_reduce(x)
    c10d.new_group([0, 1])
    c10d.barrier()
    assert x.tolist() == [3.0, 3.0, 3.0]
    c10d.destroy_process_group()
    store.barrier("end", 2)
"""


def test_gloo_over_our_store(monkeypatch):
    """torch.distributed starts, and makes groups, through a TCPStore of ours."""
    monkeypatch.setenv("HPCDIST_STORE_KEY", KEY.hex())
    program = textwrap.dedent(GLOO)
    first = subprocess.Popen(
        [sys.executable, "-c", program, "0", "0"], stdout=subprocess.PIPE, text=True
    )
    try:
        port = first.stdout.readline().strip()
        second = subprocess.run([sys.executable, "-c", program, "1", port], timeout=50)
        assert second.returncode == 0
        assert first.wait(20) == 0
    finally:
        first.kill()
        first.wait()
        first.stdout.close()


def test_a_roll_call_over_torchs_store_logs_nothing():
    """Its C++ logged two lines for each wait of a second."""
    program = """
import torch.distributed as td
from hpcdist import DistTimeoutError
from hpcdist.startup import steps
from hpcdist.torch.store import from_torch
from datetime import timedelta
tcp = td.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
store = from_torch(td.PrefixStore("x", tcp))
try:
    steps.meet(store, 0, 2, timedelta(seconds=1.5), "here", "")
except DistTimeoutError:
    print("late")
"""
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "late\n" and "waitForInput" not in done.stderr, done.stderr
