"""Stores: what torch's own tests of them look at, over torch's and over hpcdist's."""

from __future__ import annotations

import os
import threading
from datetime import timedelta
from typing import Any

from worlds import SOON, Case, World, error_of, suite

CASES: dict[str, Case] = {}
case = suite(CASES)

LONG = timedelta(seconds=60)


def each_kind(world: World) -> dict[str, Any]:
    """One store of every kind, for this rank alone."""
    dist = world.dist
    path = os.path.join(world.folder, f"file{world.rank}")
    return {
        "hash": dist.HashStore(),
        "file": dist.FileStore(path, 1),
        "prefix": dist.PrefixStore("one", dist.HashStore()),
        "nested": dist.PrefixStore("two", dist.PrefixStore("one", dist.HashStore())),
        "tcp": dist.TCPStore("127.0.0.1", 0, 1, True, LONG),
    }


@case()
def values(world: World) -> Any:
    found = {}
    for kind, store in each_kind(world).items():
        store.set("a", "1")
        store.set("a", "2")
        store.set("empty", "")
        store.set("bytes", bytes(range(256)))
        store.set("long", "x" * 100_000)
        names = ("a", "empty", "bytes")
        found[kind] = [*(store.get(name) for name in names), len(store.get("long"))]
    return found


@case()
def counters(world: World) -> Any:
    found = {}
    for kind, store in each_kind(world).items():
        sums = [store.add("n", 3), store.add("n", -5), store.add("m", 1 << 40)]
        store.set("text", "7")
        found[kind] = [*sums, store.add("text", 1), store.get("n"), store.get("text")]
    return found


@case()
def compare_and_set(world: World) -> Any:
    found = {}
    for kind, store in each_kind(world).items():
        found[kind] = [
            store.compare_set("k", "wrong", "new"),
            store.compare_set("k", "", "first"),
            store.compare_set("k", "other", "second"),
            store.compare_set("k", "first", "second"),
            store.get("k"),
        ]
    return found


@case()
def deleting_counting_checking(world: World) -> Any:
    found = {}
    for kind, store in each_kind(world).items():
        before = store.num_keys()
        for name in ("a", "b", "c"):
            store.set(name, name)
        steps = [store.num_keys() - before, store.check(["a", "b"]), store.check(["a", "none"])]
        steps += [store.delete_key("b")]
        steps += [kind != "file" and store.delete_key("b")]  # True in torch's FileStore, each time
        steps += [store.num_keys() - before]
        steps += [store.check(["b"])]
        found[kind] = steps
    return found


@case()
def extended(world: World) -> Any:
    found = {}
    for kind, store in each_kind(world).items():
        if not store.has_extended_api() or kind == "file":
            continue
        store.append("list", "one")
        store.append("list", "two")
        store.multi_set(["x", "y"], ["1", "2"])
        found[kind] = [store.get("list"), store.multi_get(["y", "x", "list"])]
    return {kind: found[kind] for kind in ("hash", "prefix", "tcp")}


@case()
def queues(world: World) -> Any:
    found = {}
    for kind in ("hash", "tcp"):
        store = each_kind(world)[kind]
        store.queue_push("q", "1")
        store.queue_push("q", "2")
        steps = [store.queue_len("q"), store.queue_pop("q"), store.queue_pop("q")]
        found[kind] = [*steps, store.queue_len("q"), store.queue_len("none")]
    return found


@case()
def a_wait_that_is_over(world: World) -> Any:
    found = {}
    for kind, store in each_kind(world).items():
        store.set_timeout(SOON)
        known = (world.dist.DistStoreError, RuntimeError)
        waited = error_of(lambda store=store: store.wait(["none"], SOON), *known)
        got = error_of(lambda store=store: store.get("none"), *known)
        # torch's FileStore and HashStore raise RuntimeError; hpcdist's DistStoreError is one
        found[kind] = ["no error" not in (waited, got), kind != "tcp" or waited == got]
    return found


@case()
def a_get_waits_for_the_key(world: World) -> Any:
    found = {}
    for kind, store in each_kind(world).items():
        second = store.clone() if kind == "tcp" else store
        later = threading.Timer(0.1, second.set, ("late", "value"))
        later.start()
        found[kind] = store.get("late")
        later.join()
    return found


@case()
def prefixes(world: World) -> Any:
    dist = world.dist
    inner = dist.HashStore()
    one, two = dist.PrefixStore("one", inner), dist.PrefixStore("two", inner)
    deep = dist.PrefixStore("in", one)
    one.set("k", "1")
    two.set("k", "2")
    deep.set("k", "3")
    keys = [inner.get(name) for name in ("one/k", "two/k", "one/in/k")]
    # num_keys is left out: torch counts the keys of the store inside, hpcdist those of the prefix
    return [one.get("k"), two.get("k"), deep.get("k"), *keys, one.check(["x"])]


@case(least=2)
def between_ranks(world: World) -> Any:
    """A TCPStore that all ranks use: every rank's key, one counter, one winner, and its end."""
    port: list[Any] = [None]
    mine = None
    if world.rank == 0:
        mine = world.dist.TCPStore("127.0.0.1", 0, None, True, LONG, wait_for_workers=False)
        port = [mine.port]
    world.dist.broadcast_object_list(port, 0)
    store = mine or world.dist.TCPStore("127.0.0.1", port[0], None, False, LONG)
    store.set(f"rank {world.rank}", str(world.rank))
    store.add("count", world.rank)
    won = store.compare_set("first", "", str(world.rank)) == str(world.rank).encode()
    store.wait([f"rank {rank}" for rank in range(world.size)], LONG)
    world.dist.barrier()
    wins: list[Any] = [None] * world.size
    world.dist.all_gather_object(wins, won)
    found = [store.get(f"rank {rank}") for rank in range(world.size)]
    found += [store.get("count"), sum(wins)]
    world.dist.barrier()
    return found


@case(least=2)
def a_file_between_ranks(world: World) -> Any:
    store = world.dist.FileStore(os.path.join(world.folder, "shared"), world.size)
    store.set(f"rank {world.rank}", str(world.rank))
    store.wait([f"rank {rank}" for rank in range(world.size)], LONG)
    total = store.add("count", 1)
    world.dist.barrier()
    found = [store.get(f"rank {rank}") for rank in range(world.size)]
    world.dist.barrier()
    return [*found, store.get("count"), 1 <= total <= world.size]
