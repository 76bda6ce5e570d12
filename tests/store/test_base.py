"""What all stores have in common, and stores that a user builds from `Store`."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
from patience import at_most

import hpcdist
from hpcdist import DistStoreError, DistTimeoutError, QueueEmptyError
from hpcdist.errors import StoreTimeoutError

pytestmark = [pytest.mark.local, pytest.mark.any_mpi]

KEY = bytes(range(32))


class Minimal(hpcdist.Store):
    """A user's store: the five operations that are asked for, and nothing else."""

    def __init__(self):
        self.inner = hpcdist.HashStore()

    def set(self, key, value):
        self.inner.set(key, value)

    def get(self, key):
        self.inner.set_timeout(self.timeout)
        return self.inner.get(key)

    def add(self, key, value):
        return self.inner.add(key, value)

    def check(self, keys):
        return self.inner.check(keys)

    def delete_key(self, key):
        return self.inner.delete_key(key)


def tcp(**more):
    return hpcdist.TCPStore(
        "127.0.0.1", 0, None, True, timeout=timedelta(seconds=20), auth_key=KEY, **more
    )


MAKERS = {
    "hash": lambda folder: hpcdist.HashStore(),
    "file": lambda folder: hpcdist.FileStore(folder / "store"),
    "tcp": lambda folder: tcp(),
    "prefix of hash": lambda folder: hpcdist.PrefixStore("p", hpcdist.HashStore()),
    "prefix of tcp": lambda folder: hpcdist.PrefixStore("p", tcp()),
    "prefix of prefix of file": lambda folder: hpcdist.PrefixStore(
        "a", hpcdist.PrefixStore("b", hpcdist.FileStore(folder / "store"))
    ),
    "minimal": lambda folder: Minimal(),
}


@pytest.fixture(params=MAKERS)
def store(request):
    # in memory: a FileStore waits for its disk at each change
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        made = MAKERS[request.param](Path(folder))
        made.set_timeout(timedelta(seconds=20))
        made.full = request.param != "minimal"
        yield made


@pytest.fixture
def hasty(store):
    store.set_timeout(0.15)
    return store


def test_values(store, rng):
    for value in (b"", b"x", bytes(rng.integers(0, 256, 70_000, "u1")), "text", "текст"):
        store.set("key", value)
        assert store.get("key") == (value.encode() if isinstance(value, str) else value)
    store.set(b"bytes", bytearray(b"12"))
    assert store.get("bytes") == b"12"
    store.set("", "empty key")
    store.set("ключ/\n", "odd key")
    assert store.get("") == b"empty key" and store.get("ключ/\n") == b"odd key"


def test_counters(store):
    assert store.add("n", 3) == 3
    assert store.add("n", -5) == -2
    assert store.get("n") == b"-2"
    store.set("m", "41")
    assert store.add("m", 1) == 42
    assert store.add("flag", True) == 1
    assert store.add("zero", 0) == 0 and store.check(["zero"])


@pytest.mark.parametrize("text", ["x", "", "7x", "1.5", "0x10", "9" * 19, "+", "1" * 30])
def test_add_to_what_is_no_number(store, text):
    store.set("word", text)
    with pytest.raises(DistStoreError, match="the key .*word holds .* not a whole number"):
        store.add("word", 1)
    # the client lives, and the value is what it was
    assert store.get("word") == text.encode()
    assert store.add("other", 1) == 1


def test_add_never_wraps(store):
    assert store.add("top", 2**63 - 1) == 2**63 - 1
    with pytest.raises(DistStoreError, match="leaves 64 bits"):
        store.add("top", 1)
    assert store.get("top") == str(2**63 - 1).encode()
    with pytest.raises(ValueError, match="64 bits"):
        store.add("top", 2**63)


def test_compare_set(store):
    assert store.compare_set("k", "something", "1") == b"something"
    assert not store.check(["k"])
    assert store.compare_set("k", "", "1") == b"1"
    assert store.compare_set("k", "", "2") == b"1"
    assert store.compare_set("k", "0", "2") == b"1"
    assert store.compare_set("k", b"1", b"2") == b"2"
    assert store.get("k") == b"2"
    long = "x" * 9000
    assert store.compare_set("k", "2", long) == long.encode()


def test_deleting(store):
    store.set("k", "v")
    assert store.delete_key("k") is True
    assert store.delete_key("k") is False
    assert not store.check(["k"])


def test_many_at_once(store):
    store.multi_set(["a", "b", "c"], ["1", b"2", "x" * 5000])
    assert store.multi_get(["c", "a", "b"]) == [b"x" * 5000, b"1", b"2"]
    assert store.multi_get([]) == []
    store.multi_set([], [])
    assert store.check([]) and store.check(["a", "c"]) and not store.check(["a", "d"])
    store.wait([])
    store.wait(["a", "b"])
    with pytest.raises(ValueError, match="2 keys and 1 values"):
        store.multi_set(["a", "b"], ["1"])


def test_append(store):
    for piece in ("po", "ta", "to"):
        store.append("word", piece)
    assert store.get("word") == b"potato"
    store.append("word", b"!" * 10_000)
    assert store.get("word") == b"potato" + b"!" * 10_000


def test_queues(store):
    for value in ("one", b"two", "3" * 8000):
        store.queue_push("q", value)
    assert store.queue_len("q") == 3 and store.queue_len("nothing") == 0
    assert store.queue_pop("q") == b"one"
    assert store.queue_pop("q", block=False) == b"two"
    assert store.queue_pop("q") == b"3" * 8000
    with pytest.raises(QueueEmptyError, match="q is empty"):
        store.queue_pop("q", False)
    if store.full:
        store.queue_push("q", "x")
        store.wait(["q"])
        assert store.check(["q"]) and store.delete_key("q") is False and store.queue_len("q") == 1
        store.set("q", "a value of that name")
        assert store.get("q") == b"a value of that name" and store.queue_pop("q") == b"x"


def test_keys(store):
    if not store.full:
        with pytest.raises(NotImplementedError, match=r"Minimal has no list_keys\(\)"):
            store.num_keys()
        return
    assert store.num_keys() == 0 and store.list_keys() == []
    store.multi_set(["b", "a"], ["1", "2"])
    store.add("c", 1)
    store.queue_push("queue", "x")
    store.barrier("barrier", 1)
    assert store.num_keys() == 3 and store.list_keys() == ["a", "b", "c"]
    assert [store.get(key) for key in store.list_keys()] == [b"2", b"1", b"1"]


# --- waiting -----------------------------------------------------------------------------------


def later(seconds, call):
    timer = threading.Timer(seconds, call)
    timer.start()
    return timer


@pytest.mark.parametrize("how", ["get", "wait", "multi_get", "queue_pop"])
def test_what_comes_later_is_waited_for(store, how):
    if how == "queue_pop":
        timer = later(0.1, lambda: store.queue_push("k", "v"))
        assert store.queue_pop("k") == b"v"
    else:
        timer = later(0.1, lambda: store.set("k", "v"))
        got = getattr(store, how)("k" if how == "get" else ["k"])
        assert got == {"get": b"v", "wait": None, "multi_get": [b"v"]}[how]
    timer.join()


@pytest.mark.parametrize("how", ["get", "wait", "multi_get", "queue_pop"])
def test_what_does_not_come_is_named(hasty, how):
    hasty.set("here", "1")
    arguments = {"get": "gone", "queue_pop": "gone"}.get(how, ["here", "gone", "off"])
    began = time.monotonic()
    with pytest.raises(DistStoreError, match=r"timeout after 150ms, keys: .*gone") as caught:
        getattr(hasty, how)(arguments)
    assert 0.14 < time.monotonic() - began < at_most(0.65)
    assert isinstance(caught.value, DistTimeoutError) and isinstance(caught.value, TimeoutError)
    if isinstance(arguments, list):
        assert "off" in str(caught.value) and "here" not in str(caught.value)


def test_timeouts(store):
    for timeout in (timedelta(0), 0.08, timedelta(milliseconds=90)):
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        began = time.monotonic()
        with pytest.raises(StoreTimeoutError):
            store.wait(["nothing"], timeout)
        assert seconds - 0.01 < time.monotonic() - began < at_most(seconds + 0.5)
    store.set_timeout(timedelta(seconds=7))
    assert store.timeout == timedelta(seconds=7)
    for wrong in (timedelta(seconds=-1), -1, float("inf"), float("nan")):
        with pytest.raises(ValueError):
            store.set_timeout(wrong)
    with pytest.raises(TypeError):
        store.set_timeout("1")


def test_many_missing_keys_are_counted(hasty):
    with pytest.raises(StoreTimeoutError, match="and 92 more"):
        hasty.wait([f"key{i}" for i in range(100)])


def test_wrong_types(store):
    for call in (
        lambda: store.set("k", 5),
        lambda: store.set(5, "v"),
        lambda: store.add("k", 1.5),
        lambda: store.wait("k"),
        lambda: store.multi_get("k"),
        lambda: store.check("k"),
        lambda: store.multi_set(["k"], "v"),
        lambda: store.queue_push("q", None),
    ):
        with pytest.raises(TypeError):
            call()
    assert not store.check(["k"])


# --- threads and copies ------------------------------------------------------------------------


def in_threads(count, call):
    errors = []

    def run(number):
        try:
            call(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert not errors, errors


def test_threads_share_one_object(store):
    """A thread that waits does not keep the others from what it waits for."""
    names = [f"t{i}" for i in range(4)]
    got = []

    def work(number):
        store.set(f"t{number}", str(number))
        store.wait(names)
        for _ in range(5):
            store.add("count", 1)
            store.append("log", "x")
        store.queue_push("q", str(number))
        got.append(store.queue_pop("q"))

    in_threads(4, work)
    assert store.get("count") == b"20" and store.get("log") == b"x" * 20
    assert sorted(got) == [b"0", b"1", b"2", b"3"]


def test_barrier(store):
    passed = []

    def work(number):
        for turn in range(3):
            store.barrier("b", 3)
            passed.append(turn)

    in_threads(3, work)
    assert sorted(passed) == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    with pytest.raises(ValueError, match="at least 1"):
        store.barrier("b", 0)


def test_a_barrier_is_left_by_those_whose_time_is_over(store):
    if not store.full:
        return
    with pytest.raises(StoreTimeoutError, match="barrier timeout.*1/2 arrived"):
        store.barrier("b", 2, timedelta(milliseconds=100))
    # torch lets the next caller through alone
    with pytest.raises(StoreTimeoutError, match="1/2 arrived"):
        store.barrier("b", 2, 0.1)

    def wait() -> None:
        while True:
            try:
                return store.barrier("b", 2)
            except DistStoreError as error:
                if "said 3" not in str(error):  # the other was in it first
                    raise

    waiting = threading.Thread(target=wait)
    waiting.start()
    while True:
        try:
            store.barrier("b", 3, 0.01)
        except StoreTimeoutError:
            continue  # the other is not in it yet
        except DistStoreError as error:
            assert "world_size=3" in str(error) and "said 2" in str(error)
            break
    store.barrier("b", 2)
    waiting.join()


def test_clones(store):
    if not store.full:
        with pytest.raises(NotImplementedError):
            store.clone()
        return
    twin = store.clone()
    assert type(twin) is type(store)
    twin.set("k", "v")
    assert store.get("k") == b"v" and store.has_extended_api()


def test_prefixes():
    base = tcp()
    one, two = hpcdist.PrefixStore("one", base), hpcdist.PrefixStore("two", base)
    one.set("k", "1")
    two.set("k", "2")
    two.set("l", "3")
    base.set("onetwo", "4")
    assert base.list_keys() == ["one/k", "onetwo", "two/k", "two/l"]
    assert one.list_keys() == ["k"] and one.num_keys() == 1 and two.num_keys() == 2
    inner = hpcdist.PrefixStore("in", one)
    inner.set("k", "5")
    assert base.get("one/in/k") == b"5" and inner.list_keys() == ["k"] and inner.num_keys() == 1
    assert inner.underlying_store is one and inner._underlying_non_prefix_store is base
    one.set_timeout(timedelta(seconds=3))
    assert base.timeout == timedelta(seconds=3) == inner.timeout
    with pytest.raises(TypeError, match="from_torch"):
        hpcdist.PrefixStore("x", object())


def test_a_hash_store_does_not_cross_a_fork():
    store = hpcdist.HashStore()
    pid = os.fork()
    if pid == 0:
        try:
            store.set("k", "v")
            os._exit(1)
        except DistStoreError:
            os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


def test_a_lock_that_nobody_gives_back_is_named():
    store = Minimal()
    store.set_timeout(0.1)
    store.add("k/lock", 1)
    with pytest.raises(StoreTimeoutError, match="keys: k/lock .*killed while it did"):
        store.append("k", "x")
