#!/usr/bin/env python
"""What the stores stand: many clients, garbage, a busy master, killed writers. Not a test.

    python tests/perf/stores.py              everything, about two minutes
    python tests/perf/stores.py garbage      one of: clients, garbage, busy, kills

Each part prints what it saw beside what it has to be, and the exit status is 1 if it is not. The
bounds are for a machine that does nothing else. tests/store/test_auth.py, test_tcp.py
and test_file.py hold the short forms.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import select
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from store_kills import kill_writers  # noqa: E402
from store_wire import Wire  # noqa: E402

from hpcdist.store import TCPStore, new_key  # noqa: E402

KEY = new_key()
fork = multiprocessing.get_context("fork")
failed = False


def report(what: str, value: float, unit: str, bound: float, least: bool = False) -> None:
    """Print a measurement beside its bound."""
    global failed
    good = value >= bound if least else value <= bound
    failed |= not good
    sign = ">=" if least else "<="
    print(f"  {what:<44}{value:>12,.2f} {unit:<4} {sign} {bound:>10,.0f}  {'' if good else 'NO'}")
    sys.stdout.flush()


class Server:
    """A process that holds a store, and may compute meanwhile."""

    def __init__(self, busy: bool = False, size: int | None = None) -> None:
        here, there = fork.Pipe()
        self.process = fork.Process(target=self._run, args=(there, busy, size), daemon=True)
        self.process.start()
        self.port = here.recv()
        self._pipe = here

    @staticmethod
    def _run(pipe, busy, size):
        store = TCPStore("127.0.0.1", 0, size, True, 60, wait_for_workers=False, auth_key=KEY)
        pipe.send(store.port)
        n = 0
        while busy:
            n += 1
        pipe.recv()

    def client(self, size: int | None = None) -> TCPStore:
        return TCPStore("127.0.0.1", self.port, size, False, 60, auth_key=KEY)

    def memory(self) -> int:
        """Bytes that the process has in memory."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return next(int(line.split()[1]) << 10 for line in text.splitlines() if "VmRSS" in line)

    def close(self) -> None:
        self.process.kill()
        self.process.join()


def each_get(store: TCPStore, going_on: Callable[[], bool], pause: float) -> np.ndarray:
    """Milliseconds of one get after the other, as long as something goes on."""
    times = []
    while going_on():
        began = time.perf_counter()
        if store.get("key") != b"value":
            sys.exit("a wrong value")
        times.append(time.perf_counter() - began)
        time.sleep(pause)
    return np.array(times) * 1e3


def clients(count: int = 2000) -> None:
    print(f"{count} clients with a key join, and are served")
    server = Server(size=count + 1)
    gate = fork.Barrier(3)
    done = fork.Barrier(3)

    def join(part: int) -> None:
        gate.wait()
        made = [server.client(count + 1) for _ in range(count // 2)]
        done.wait()
        for number, store in enumerate(made):
            store.set(f"{part}/{number}", str(number))
        made[0].wait([f"{p}/{n}" for p in range(2) for n in range(count // 2)])
        got = [store.get(f"{1 - part}/{number}") for number, store in enumerate(made)]
        done.wait()
        if got != [str(number).encode() for number in range(count // 2)]:
            os._exit(1)

    halves = [fork.Process(target=join, args=(part,)) for part in range(2)]
    for half in halves:
        half.start()
    gate.wait()
    began = time.monotonic()
    done.wait()
    report("all have joined", time.monotonic() - began, "s", 2)
    began = time.monotonic()
    done.wait()
    report("each has set a key and got another's", time.monotonic() - began, "s", 2)
    for half in halves:
        half.join()
    report("processes with a wrong value", sum(half.exitcode != 0 for half in halves), "", 0)
    server.close()


def throw(port: int, part: int, frames: int, sent) -> None:
    """Send that many pieces of noise, ten to a connection, and add them to a count."""
    dice = random.Random(part)
    noise = os.urandom(1 << 16)
    mine = 0
    while mine < frames:
        if dice.random() < 0.02:
            connection = Wire(port, KEY).socket  # knows the key, and talks nonsense
        else:
            connection = socket.create_connection(("127.0.0.1", port))
        try:
            for _ in range(10):
                at = dice.randrange(len(noise) - 500)
                connection.sendall(noise[at : at + dice.randrange(80, 500)])
                mine += 1
            while connection.recv(4096):
                pass
        except OSError:
            pass
        connection.close()
    with sent.get_lock():
        sent.value += mine


def crawl(port: int, slow: int, over: threading.Event) -> None:
    """Keep slow connections open, which send a byte each half second."""
    crawling: list[socket.socket] = []
    while not over.wait(0.5):
        closed = select.select(crawling, [], [], 0)[0]
        for each_one in closed:
            if not each_one.recv(4096):
                each_one.close()
                crawling.remove(each_one)
        while len(crawling) < slow:
            crawling.append(socket.create_connection(("127.0.0.1", port)))
        for each_one in crawling:
            try:
                each_one.send(b"h")
            except OSError:
                pass


def garbage(frames: int = 1_000_000, slow: int = 200) -> None:
    print(f"{frames:,} frames of garbage and {slow} slow connections")
    server = Server()
    store = server.client()
    store.set("key", "value")
    before = server.memory()
    sent = fork.Value("l", 0)

    over = threading.Event()

    crawler = threading.Thread(target=crawl, args=(server.port, slow, over))
    throwers = [
        fork.Process(target=throw, args=(server.port, part, frames // 2, sent)) for part in range(2)
    ]
    for thrower in throwers:
        thrower.start()
    crawler.start()
    began = time.monotonic()
    times = each_get(store, lambda: any(t.is_alive() for t in throwers), 0.001)
    seconds = time.monotonic() - began
    grown = (server.memory() - before) / 2**20
    over.set()
    crawler.join()
    report("frames sent", sent.value, "", frames, least=True)
    print(f"  in {seconds:.0f} s; {len(times)} gets meanwhile, median {np.median(times):.2f} ms")
    report("get, 99 of 100", float(np.percentile(times, 99)), "ms", 50)
    report("get, the longest", float(times.max()), "ms", 1000)
    report("the server's memory has grown by", grown, "MiB", 64)
    server.client().set("key", "value")
    server.close()


def busy(seconds: float = 10) -> None:
    print(f"a master that runs pure Python for {seconds:g} s")
    server = Server(busy=True)
    store = server.client()
    store.set("key", "value")
    end = time.monotonic() + seconds
    times = each_get(store, lambda: time.monotonic() < end, 0.0005)
    print(f"  {len(times)} gets, median {np.median(times):.3f} ms")
    report("get, 99 of 100", float(np.percentile(times, 99)), "ms", 2)
    server.close()


def kills(times: int = 1000) -> None:
    print(f"{times} writers of a FileStore are killed while they write")
    with tempfile.TemporaryDirectory() as folder:
        seen = kill_writers(Path(folder) / "store", times, random.Random())
    print(f"  {seen['acknowledged']:,.0f} acknowledged changes, {seen['torn']:,.0f} torn records")
    report("acknowledged changes that are lost", seen["lost"], "", 0)
    report("values that are wrong", seen["wrong"], "", 0)
    report("the longest wait of a reader", seen["longest"], "s", 5)


PARTS = {"clients": clients, "garbage": garbage, "busy": busy, "kills": kills}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", nargs="*", choices=[*PARTS, []], help="(all)")
    for name in parser.parse_args().part or PARTS:
        PARTS[name]()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
