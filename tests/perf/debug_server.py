#!/usr/bin/env python
"""What the debug server costs the ranks: all_reduce of 8 B while it is off, on, and under load.

    mpirun -n 2 python tests/perf/debug_server.py [--rounds 20] [--calls 200000]

One run: the server is stopped and continued (SIGSTOP, SIGCONT) in turn. Under load clients ask for
the state and the metrics once a second each, as --pages open pages and as many Prometheus would.
They use the same cores. Prints the median over the rounds of each round's median and 99th
percentile, in microseconds, and their ratio to the server being off.
"""

from __future__ import annotations

import argparse
import http.client
import os
import signal
import statistics
import subprocess
import sys
import time

import numpy as np

import hpcdist as dist
from hpcdist.debug import start_debug_server
from hpcdist.debug.server import start

TOKEN = "a-token-of-the-test"
NAMES = ("off", "on", "under load")


def client(port: int, path: str) -> None:
    """Ask once a second."""
    while True:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            connection.request("GET", path, headers={"Authorization": f"Bearer {TOKEN}"})
            connection.getresponse().read()
            connection.close()
        except (OSError, http.client.HTTPException):
            pass  # the server was stopped
        time.sleep(1.0)


def clients(port: int, pages: int) -> list[subprocess.Popen[bytes]]:
    return [
        subprocess.Popen([sys.executable, __file__, "--client", str(port), path])
        for path in ("/state", "/metrics") * pages
    ]


def measure(calls: int) -> tuple[float, float]:
    data, times = np.zeros(1), np.empty(calls)
    dist.barrier()
    for k in range(calls):
        before = time.perf_counter()
        dist.all_reduce(data)
        times[k] = time.perf_counter() - before
    return float(np.median(times)) * 1e6, float(np.percentile(times, 99)) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--calls", type=int, default=200000)
    parser.add_argument("--pages", type=int, default=1)
    parser.add_argument("--client", nargs=2)
    options = parser.parse_args()
    if options.client:
        os.nice(19)
        return client(int(options.client[0]), options.client[1])
    dist.init_process_group()
    rank = dist.get_rank()
    port = int(start_debug_server(0, TOKEN).split(":")[2].split("/")[0])
    asking = clients(port, options.pages) if rank == 0 else []
    pids = {"on": [start._process.pid] if start._process else [], "ask": [c.pid for c in asking]}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in NAMES}
    time.sleep(3)
    for _ in range(options.rounds):
        for name in NAMES:
            for which, on in (("on", name != "off"), ("ask", name == "under load")):
                for pid in pids[which]:
                    os.kill(pid, signal.SIGCONT if on else signal.SIGSTOP)
            time.sleep(1.0)
            found[name].append(measure(options.calls))
    for each in asking:
        each.kill()
    os.kill(pids["on"][0], signal.SIGCONT) if pids["on"] else None
    if rank == 0:
        off = [statistics.median(column) for column in zip(*found["off"], strict=True)]
        for name in NAMES:
            p50, p99 = (statistics.median(column) for column in zip(*found[name], strict=True))
            print(
                f"{name:>10}: median {p50:.2f} us ({p50 / off[0]:.3f} x), "
                f"p99 {p99:.2f} us ({p99 / off[1]:.3f} x)"
            )


if __name__ == "__main__":
    main()
