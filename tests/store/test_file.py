"""FileStore: killed writers, full disks, held locks, files left by others."""

from __future__ import annotations

import fcntl
import logging
import multiprocessing
import os
import resource
import shutil
import signal
import struct
import subprocess
import sys
import textwrap
import threading
import time

import pytest
from patience import at_most

import hpcdist
from hpcdist import DistStoreError
from hpcdist.errors import StoreTimeoutError
from hpcdist.store import _journal as journal
from hpcdist.store import _locks as locks

pytestmark = [pytest.mark.local, pytest.mark.any_mpi]


def run(text, *arguments, **more):
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text), *map(str, arguments)],
        capture_output=True, text=True, timeout=60, **more,
    )  # fmt: skip


def orphan(path, size=-1, **keys):
    """A store whose only member was killed."""
    text = f"""
        import os, signal, hpcdist
        store = hpcdist.FileStore({str(path)!r}, {size})
        store.multi_set({list(keys)!r}, {list(keys.values())!r})
        os.kill(os.getpid(), signal.SIGKILL)
    """
    assert run(text).returncode == -signal.SIGKILL


# --- the file itself ---------------------------------------------------------------------------


def test_it_is_for_its_owner_alone(folder):
    old = os.umask(0)
    try:
        store = hpcdist.FileStore(folder / "f")
    finally:
        os.umask(old)
    assert (folder / "f").stat().st_mode & 0o777 == 0o600
    assert store.path == str(folder / "f")


def test_a_missing_folder_is_an_error_at_once(folder):
    began = time.monotonic()
    with pytest.raises(DistStoreError, match="its folder .*/none does not exist"):
        hpcdist.FileStore(folder / "none" / "f", 2)
    assert time.monotonic() - began < at_most(1)


@pytest.mark.parametrize("given", ["", "a\0b", b"a", None, 5])
def test_a_name_that_is_none(given):
    with pytest.raises((TypeError, ValueError), match="^file_name "):
        hpcdist.FileStore(given)


def test_files_that_are_not_safe(folder):
    (folder / "target").touch(0o600)
    (folder / "link").symlink_to("target")
    with pytest.raises(DistStoreError, match="symbolic link"):
        hpcdist.FileStore(folder / "link")
    (folder / "open").touch()
    (folder / "open").chmod(0o644)
    with pytest.raises(DistStoreError, match="mode is 0644"):
        hpcdist.FileStore(folder / "open")
    os.mkfifo(folder / "pipe", 0o600)
    with pytest.raises(DistStoreError, match="not a regular file"):
        hpcdist.FileStore(folder / "pipe")
    (folder / "text").write_text("somebody's notes")
    (folder / "text").chmod(0o600)
    with pytest.raises(DistStoreError, match="not an hpcdist store file"):
        hpcdist.FileStore(folder / "text")
    assert (folder / "text").read_text() == "somebody's notes"


def test_a_file_of_somebody_else(folder, monkeypatch):
    (folder / "f").touch(0o600)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(DistStoreError, match="belongs to user"):
        hpcdist.FileStore(folder / "f")


# --- coming and going --------------------------------------------------------------------------


def test_the_last_to_leave_deletes_the_file(folder):
    one = hpcdist.FileStore(folder / "f", 2)
    one.set("k", "v")
    two = hpcdist.FileStore(folder / "f", 2)
    assert two.get("k") == b"v"
    twin = one.clone()
    del one
    assert two.get("k") == b"v" == twin.get("k") and (folder / "f").exists()
    del twin
    two.close()
    assert not (folder / "f").exists()
    with pytest.raises(DistStoreError, match="closed"):
        two.get("k")


def test_a_process_may_open_its_store_again(folder):
    one = hpcdist.FileStore(folder / "f", 1)
    one.set("k", "v")
    again = hpcdist.FileStore(folder / "f", 1, timeout=5)
    assert again.get("k") == b"v" and again.add("n", 1) == 1
    one.close()
    assert again.get("n") == b"1" and (folder / "f").exists()
    again.close()
    assert not (folder / "f").exists()


def test_without_a_fixed_size_the_keys_stay(folder):
    for turn in range(3):
        store = hpcdist.FileStore(folder / "f")
        assert store.add("n", 1) == turn + 1
        store.close()


@pytest.mark.parametrize("size", [-1, 1, 2])
def test_a_stale_file_is_begun_anew(folder, caplog, size):
    """Its members died without leaving it: their addresses must not be found."""
    orphan(folder / "f", size, address="old")
    with caplog.at_level(logging.WARNING, "hpcdist.store"):
        store = hpcdist.FileStore(folder / "f", size, timeout=0.1)
    assert "left over" in caplog.text and "gone without leaving" in caplog.text
    assert store.num_keys() == 0
    with pytest.raises(StoreTimeoutError):
        store.get("address")


def test_a_file_of_another_job(folder, monkeypatch):
    store = hpcdist.FileStore(folder / "f", job_id="first")
    store.set("address", "old")
    with pytest.raises(DistStoreError, match="another job uses it"):
        hpcdist.FileStore(folder / "f", job_id="second")
    store.close()
    assert hpcdist.FileStore(folder / "f", job_id="second").num_keys() == 0
    for name in ("HPCDIST_STORE_KEY", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID"):
        assert journal.job_digest(None, {name: "1"}) != journal.job_digest(None, {name: "2"})
    assert journal.job_digest(None, {"TORCHELASTIC_RUN_ID": "none"}) == bytes(16)


def test_a_job_waits_until_the_one_before_has_gone(folder):
    """Processes that end slowly are not taken for this job's."""
    code = f"""
        import sys, hpcdist
        old = [hpcdist.FileStore({str(folder / "f")!r}, 2) for _ in range(2)]
        old[0].set("address", "old")
        for each in old:
            print("here", flush=True)
            sys.stdin.readline()
            each.close()
        print("gone", flush=True)
        sys.stdin.readline()
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        try:
            for _ in range(2):
                assert other.stdout.readline() == "here\n"
                began = time.monotonic()
                with pytest.raises(StoreTimeoutError, match=f"2 members have .*:{other.pid}"):
                    hpcdist.FileStore(folder / "f", 2, timeout=0.2)
                assert 0.15 < time.monotonic() - began < at_most(0.7)
                other.stdin.write("\n")
                other.stdin.flush()
            assert other.stdout.readline() == "gone\n"
        finally:
            other.stdin.close()
    assert hpcdist.FileStore(folder / "f", 2, timeout=0.1).num_keys() == 0


def test_members_that_disagree(folder):
    store = hpcdist.FileStore(folder / "f", 3)
    with pytest.raises(DistStoreError, match="says world_size=2, .*said 3"):
        hpcdist.FileStore(folder / "f", 2)
    store.set("k", "v")
    with pytest.raises(ValueError, match="cannot be 0"):
        hpcdist.FileStore(folder / "f", 0)


def test_a_file_that_was_taken_over(folder):
    """Locks can be lost over NFS: then another job may have begun the file anew."""
    store = hpcdist.FileStore(folder / "f", timeout=1)
    locks.unlock(store._file._fd, locks.ALIVE)
    other = hpcdist.FileStore(folder / "f", timeout=1)
    other.set("k", "new")
    with pytest.raises(DistStoreError, match="another job emptied the file"):
        store.set("k", "old")
    assert other.get("k") == b"new"


def test_leaving_a_file_that_was_taken_over(folder):
    """What the other job wrote stays."""
    store = hpcdist.FileStore(folder / "f", timeout=1)
    locks.unlock(store._file._fd, locks.ALIVE)
    other = hpcdist.FileStore(folder / "f", timeout=1)
    other.set("k", "new")
    store.close()
    third = hpcdist.FileStore(folder / "f", timeout=1)
    assert third.get("k") == b"new" == other.get("k")


def test_two_threads_leave_at_once(folder):
    store = hpcdist.FileStore(folder / "store", 2)
    other = hpcdist.FileStore(folder / "store", 2)
    file, errors = store._file, []
    gate = threading.Barrier(4)

    def leave():
        gate.wait()
        try:
            file.leave()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=leave) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert errors == []
    assert file.mutex.acquire(timeout=1)
    file.mutex.release()
    with pytest.raises(DistStoreError, match="it is closed"):
        store.get("key")
    other.close()
    assert not (folder / "store").exists()


def test_an_exception_of_a_handler_while_it_is_left(folder, monkeypatch):
    store = hpcdist.FileStore(folder / "store", 2)
    file = store._file

    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(file, "_read_all", interrupted)
    with pytest.raises(KeyboardInterrupt):
        file.leave()
    assert file._fd < 0  # its lock would say that this member lives
    assert file.mutex.acquire(timeout=1)
    file.mutex.release()


def test_a_child_of_fork(folder):
    store = hpcdist.FileStore(folder / "f", timeout=5)
    store.set("k", "v")
    pid = os.fork()
    if pid == 0:
        try:
            store.get("k")
            os._exit(1)
        except DistStoreError as error:
            again = hpcdist.FileStore(folder / "f", timeout=5)
            good = "open FileStore" in str(error) and again.get("k") == b"v"
            os._exit(7 if good else 2)
        except BaseException:
            os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert store.get("k") == b"v"
    del store
    # the child's copy did not leave in the parent's name, and holds no lock
    assert hpcdist.FileStore(folder / "f", timeout=5).list_keys() in (["k"], [])


# --- a full disk, a held lock ------------------------------------------------------------------


FULL = """
    import sys, time, hpcdist
    from hpcdist import DistStoreError
    store = hpcdist.FileStore(sys.argv[1] + "/f", timeout=5)
    stored = []
    began = time.monotonic()
    try:
        for i in range(10_000):
            store.set(f"k{i}", bytes(5000))
            stored.append(f"k{i}")
    except DistStoreError as error:
        assert "cannot be written" in str(error), error
    else:
        raise SystemExit("it never got full")
    assert time.monotonic() - began < 5
    again = hpcdist.FileStore(sys.argv[1] + "/f", timeout=5)
    assert again.list_keys() == sorted(stored) and len(stored) > 5
    assert all(again.get(key) == bytes(5000) for key in stored)
    try:
        again.add("big", 1)
    except DistStoreError:
        pass
    print("good")
"""


def test_a_full_disk(folder):
    """A tmpfs of 256 KiB in a mount namespace of its own."""
    place = folder / "small"
    place.mkdir()
    own = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    mount = f'mount -t tmpfs -o size=256k none {place} && exec "$@"'
    done = subprocess.run(
        ["unshare", *own, "--mount", "sh", "-c", mount, "sh", sys.executable, "-c",
         textwrap.dedent(FULL), str(place)],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.stdout == "good\n", done.stderr


def test_a_file_that_may_not_grow(folder):
    """The same where a limit of the process is the reason."""

    def limit():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))

    done = run(FULL, folder, preexec_fn=limit)
    assert done.stdout == "good\n", done.stderr


def test_the_limit(folder, monkeypatch):
    monkeypatch.setenv("HPCDIST_STORE_LIMIT", "64k")
    store = hpcdist.FileStore(folder / "f")
    store.set("k", b"x" * 60_000)
    with pytest.raises(DistStoreError, match="HPCDIST_STORE_LIMIT"):
        store.set("l", b"x" * 10_000)
    assert store.list_keys() == ["k"]


def test_a_held_lock(folder):
    store = hpcdist.FileStore(folder / "f", timeout=0.3)
    store.set("k", "v")
    with open(folder / "f", "r+b") as file:
        own = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, locks.MAIN, 1, 0)
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, own)
        for call in (
            lambda: store.set("k", "w"),
            lambda: store.add("n", 1),
            lambda: hpcdist.FileStore(folder / "f", timeout=0.3),
        ):
            began = time.monotonic()
            with pytest.raises(StoreTimeoutError, match="lock was not free within 300ms"):
                call()
            assert 0.28 < time.monotonic() - began < at_most(0.8)
        assert store.get("k") == b"v"  # reading needs no lock on a local disk
        began = time.monotonic()
    store.set("k", "w")
    assert store.get("k") == b"w"


def test_reading_over_nfs_takes_the_lock(folder):
    store = hpcdist.FileStore(folder / "f", timeout=0.2)
    store.set("k", "v")
    store._file._always_lock = True
    assert store.get("k") == b"v" and store.num_keys() == 1
    holder = os.open(folder / "f", os.O_RDWR)
    assert locks.try_lock(holder, locks.MAIN)
    with pytest.raises(StoreTimeoutError, match="lock"):
        store.get("k")
    os.close(holder)
    assert store.get("k") == b"v"


# --- several processes -------------------------------------------------------------------------


def _member(path, number, size):
    store = hpcdist.FileStore(path, size, timeout=30)
    for _ in range(20):
        store.add("n", 1)
        store.append("log", "x")
    store.queue_push("q", str(number))
    store.barrier("all", size)
    assert store.get("n") == b"%d" % (20 * size)
    assert store.get("log") == b"x" * (20 * size)
    assert store.queue_pop("q").isdigit()
    store.barrier("end", size)


def test_processes_share_it(folder):
    size = 4
    context = multiprocessing.get_context("fork")
    members = [
        context.Process(target=_member, args=(folder / "f", number, size)) for number in range(size)
    ]
    for member in members:
        member.start()
    for member in members:
        member.join(40)
    assert [member.exitcode for member in members] == [0] * size
    shutil.rmtree(folder / "f", ignore_errors=True)


def test_a_signal_handler_in_an_operation(folder):
    """It is refused while the file is half read; nothing is counted twice or lost."""
    store, done, refused = hpcdist.FileStore(str(folder / "store"), 1), [], []

    def count(*_):
        try:
            store.add("handled", 1)
        except DistStoreError as error:
            refused.append(str(error))
        else:
            done.append(1)

    before = signal.signal(signal.SIGALRM, count)
    signal.setitimer(signal.ITIMER_REAL, 2e-4, 2e-4)
    try:
        for turn in range(1000):
            assert store.add("counted", 1) == turn + 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert store.add("handled", 0) == len(done)
    assert refused and all("signal handler" in text for text in refused), len(done)
    store.close()
