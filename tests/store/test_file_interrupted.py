"""FileStore where a call ends by an exception: of a signal handler, of the disk, of its timeout."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import contextmanager

import pytest
from breaking import interrupting
from patience import at_most

import hpcdist
from hpcdist import DistStoreError
from hpcdist.errors import StoreTimeoutError
from hpcdist.store import _files as files
from hpcdist.store import _locks as locks

pytestmark = [pytest.mark.local, pytest.mark.any_mpi]


@pytest.fixture
def pair(folder):
    """Two members, the second of which waits for at most a second."""
    one = hpcdist.FileStore(folder / "f", timeout=20)
    two = hpcdist.FileStore(folder / "f", timeout=1)
    yield one, two
    one.close()
    two.close()


def agree(*stores):
    """Check that all stores, and a new one, see the same contents; return the keys."""
    fresh = hpcdist.FileStore(stores[0].path, timeout=5)
    held = [{key: each.get(key) for key in each.list_keys()} for each in (fresh, *stores)]
    fresh.close()
    assert all(each == held[0] for each in held), held
    return held[0]


# --- exceptions while a record is written ------------------------------------------------------

RAISED = [
    (KeyboardInterrupt(), KeyboardInterrupt, None),
    (TimeoutError("of a handler"), TimeoutError, "of a handler"),
    (OSError(errno.EIO, "Input/output error"), DistStoreError, "cannot be written: Input/output"),
]


@pytest.mark.parametrize(("raised", "kind", "text"), RAISED)
def test_what_others_have_read_is_not_taken_back(pair, monkeypatch, raised, kind, text):
    one, two = pair
    sync = os.fdatasync

    def stopped(fd):
        sync(fd)
        assert two.check(["k"])
        raise raised

    monkeypatch.setattr(os, "fdatasync", stopped)
    with pytest.raises(kind, match=text):
        one.set("k", "1")
    monkeypatch.undo()
    assert one.check(["k"]) and two.check(["k"])
    one.set("a-longer-key", "2" * 40)
    assert two.get("a-longer-key") == b"2" * 40
    two.set("z", "3")
    assert one.add("n", 1) == 1 and two.add("n", 1) == 2
    assert sorted(agree(one, two)) == ["a-longer-key", "k", "n", "z"]


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize(("raised", "kind", "text"), RAISED)
def test_a_write_that_is_cut_short(pair, monkeypatch, share, raised, kind, text):
    """Half a record is cut off; a whole one counts, for all."""
    one, two = pair
    one.set("before", "v" * 30)
    write = files.write_all

    def short(fd, data, offset):
        write(fd, data[: int(share * len(data))], offset)
        two.check(["k"])
        raise raised

    monkeypatch.setattr(files, "write_all", short)
    with pytest.raises(kind, match=text):
        one.set("k", "x" * 200)
    monkeypatch.undo()
    two.set("after", "w")
    one.set("k2", "y")
    assert sorted(agree(one, two)) == ["after", "before", *(["k"] if share == 1 else []), "k2"]


def test_over_nfs_it_is_taken_back(pair, monkeypatch):
    """There readers have the lock, so that nobody has read it; the disk may not have it."""
    one, two = pair
    one._file._always_lock = two._file._always_lock = True

    def full(fd):
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(os, "fdatasync", full)
    with pytest.raises(DistStoreError, match="quota"):
        one.set("k", "1")
    monkeypatch.undo()
    two.set("l", "2")
    assert sorted(agree(one, two)) == ["l"]


def test_signals_at_any_moment(pair):
    """Two writers that are interrupted all the time, and a reader, hold the same at the end."""
    one, two = pair
    seen = threading.Event()

    def read():
        while not seen.is_set():
            two.list_keys()

    def append():
        one.append("log", "x" * (begun % 50 + 1))

    reader = threading.Thread(target=read)
    reader.start()
    begun = broken = 0
    end = time.monotonic() + 1
    try:
        with interrupting() as interrupted:
            while time.monotonic() < end:
                begun += 1
                broken += interrupted(append, 1e-5 * (begun % 40 + 1)) is not None
    finally:
        seen.set()
        reader.join()
    one.append("log", "end")
    assert agree(one, two)["log"].endswith(b"end")
    assert begun > 20 and broken > 0


# --- barriers ----------------------------------------------------------------------------------


def test_a_caller_that_could_not_leave_does_not_count(pair, monkeypatch):
    """Its lock was held, here for longer than it waits: the next round is not one too short."""
    one, two = pair
    holder = os.open(one.path, os.O_RDWR)
    monkeypatch.setattr("hpcdist.store.file._LEAVING", 0.1, raising=False)

    def hold():
        time.sleep(0.1)
        assert locks.try_lock(holder, locks.MAIN)

    thread = threading.Thread(target=hold)
    thread.start()
    with pytest.raises(StoreTimeoutError, match="barrier.*leaving it failed"):
        two.barrier("b", 2, 0.3)
    thread.join()
    locks.unlock(holder, locks.MAIN)
    with pytest.raises(StoreTimeoutError, match="1/2 arrived"):
        one.barrier("b", 2, 0.2)
    both = threading.Thread(target=one.barrier, args=("b", 2))
    both.start()
    two.barrier("b", 2, 10)
    both.join()
    os.close(holder)


def test_a_caller_that_could_not_leave_leaves_later(pair, monkeypatch):
    one, two = pair
    monkeypatch.setattr("hpcdist.store.file._LEAVING", 0.1, raising=False)
    holder = os.open(one.path, os.O_RDWR)

    def interrupt(*_):
        assert locks.try_lock(holder, locks.MAIN)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            two.barrier("b", 2, 100)
    finally:
        signal.signal(signal.SIGALRM, before)
    os.close(holder)
    two.set("k", "v")  # says that it has left, too
    with pytest.raises(StoreTimeoutError, match="1/2 arrived"):
        one.barrier("b", 2, 0.2)


@pytest.mark.parametrize("raised", [KeyboardInterrupt, OSError(errno.EIO, "Input/output error")])
def test_an_exception_while_a_caller_arrives(pair, monkeypatch, raised):
    one, two = pair
    sync, left = os.fdatasync, [1]

    def stopped(fd):
        sync(fd)
        left[0] -= 1
        if left[0] == 0:
            raise raised

    monkeypatch.setattr(os, "fdatasync", stopped)
    with pytest.raises((KeyboardInterrupt, DistStoreError), match="^$|Input/output"):
        two.barrier("b", 2, 10)
    with pytest.raises(StoreTimeoutError, match="1/2 arrived"):
        one.barrier("b", 2, 0.2)


def test_a_caller_that_was_killed_in_a_barrier(pair):
    """It counts until its time is over."""
    one, two = pair
    text = """
        import sys, hpcdist
        store = hpcdist.FileStore(sys.argv[1])
        print("here", flush=True)
        store.barrier("b", 2, 0.5)
    """
    command = [sys.executable, "-c", textwrap.dedent(text), one.path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "here\n"
        end = time.monotonic() + 20
        while not one._look(lambda table: table.callers("b")) and time.monotonic() < end:
            time.sleep(0.002)
        other.kill()
    time.sleep(0.5)
    with pytest.raises(StoreTimeoutError, match="1/2 arrived"):
        two.barrier("b", 2, 0.2)
    with pytest.raises(StoreTimeoutError, match="1/3 arrived"):  # and its size is no matter
        two.barrier("b", 3, 0.2)


def test_a_stopped_caller_that_was_dropped_does_not_pass(pair, monkeypatch):
    """Others took it out, and then filled the round without it."""
    one, two = pair
    until = hpcdist.FileStore._until
    third = hpcdist.FileStore(one.path)

    def late(self, missing, what, deadline):
        if self is two:
            time.sleep(0.5)
            other = threading.Thread(target=third.barrier, args=("b", 2, 10))
            other.start()
            one.barrier("b", 2, 10)
            other.join()
        until(self, missing, what, deadline)

    monkeypatch.setattr(hpcdist.FileStore, "_until", late)
    with pytest.raises(StoreTimeoutError, match="barrier"):
        two.barrier("b", 2, 0.2)
    third.close()


# --- waiting for another thread ----------------------------------------------------------------


@contextmanager
def a_writer_that_waits(store):
    """Another thread of this process is in ``set``; another process has the file's lock."""
    holder = os.open(store.path, os.O_RDWR)
    assert locks.try_lock(holder, locks.MAIN)
    thread = threading.Thread(target=store.set, args=("a", "1"))
    thread.start()
    try:
        time.sleep(0.1)
        yield
    finally:
        os.close(holder)
        thread.join()


def test_readers_do_not_wait_for_a_writer_that_waits(pair):
    store, _ = pair
    store.set("k", "v")
    began = time.monotonic()
    with a_writer_that_waits(store):
        assert store.check(["k"]) and store.get("k") == b"v" and store.num_keys() == 1
        with pytest.raises(StoreTimeoutError, match="keys: a"):
            store.wait(["a"], 0.3)
        assert time.monotonic() - began < at_most(2)
    assert store.get("a") == b"1"


def test_readers_do_not_wait_for_a_write_beyond_their_timeout(pair, monkeypatch):
    """A disk that does not answer."""
    store, _ = pair
    sync, go = os.fdatasync, threading.Event()
    monkeypatch.setattr(os, "fdatasync", lambda fd: (go.wait(20), sync(fd)))
    thread = threading.Thread(target=store.set, args=("a", "1"))
    thread.start()
    try:
        time.sleep(0.1)
        began = time.monotonic()
        with pytest.raises(StoreTimeoutError, match="another thread of this process"):
            store.wait(["k"], 0.2)
        assert time.monotonic() - began < at_most(1.5)
    finally:
        go.set()
        thread.join()
    assert store.get("a") == b"1"
