"""Measure the key-value stores beside torch's.

A process of its own holds one server of hpcdist's TCPStore and one of torch's; every rank is a
client of both. The FileStores are in one folder, hpcdist's and torch's; on several nodes --folder
has to be on a file system that they share. In each round all of them have their turn:

  set   a value of --size bytes, over the same key (torch's TCPStore does not wait for the server)
  get   it again
  add   to a counter
  wait  for a key that is there

Every time is the median over the rounds of the slowest rank's. "torch/ours" is how many times as
long torch takes for the same operation on the same kind of store.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from hpcdist.errors import DistError
from hpcdist.store import FileStore, Store, TCPStore, new_key

from . import arguments, formats
from .job import MpiJob
from .measure import interleave

COLUMNS = (
    formats.Column("operation", "operation", "", 10),
    formats.Column("kind", "store", "", 12),
    formats.Column("size_bytes", "size", "B", 10),
    formats.Column("hpcdist_us", "hpcdist", "us", 10, ".1f"),
    formats.Column("torch_us", "torch", "us", 10, ".1f"),
    formats.Column("ratio", "torch/ours", "", 12, ".2f"),
    formats.Column("spread", "spread", "", 8, ".0%"),
    formats.Column("wrong", "#wrong", "", 8),
    formats.Column("rounds"),
)

_OPERATIONS = ("set", "get", "add", "wait")
#: For a rank to reach the servers, and for each operation.
_REACH = timedelta(seconds=60)

#: Both servers, until standard input ends. The key comes that way too: all can read arguments.
#: torch's listens on all addresses in any case.
_SERVERS = """
import sys
from hpcdist.store import TCPStore
ours = TCPStore(sys.argv[1], 0, is_master=True, auth_key=sys.stdin.readline().strip())
from torch.distributed import TCPStore as Theirs
theirs = Theirs("127.0.0.1", 0, None, True, wait_for_workers=False)
print(ours.port, theirs.port, flush=True)
sys.stdin.read()
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "-s", "--size", type=arguments.size, nargs="+", default=[64], metavar="B",
        help="bytes of the value (64)",
    )  # fmt: skip
    parser.add_argument(
        "--folder", metavar="PATH",
        help="where the FileStores are; hpcdist's waits for its disk (the folder for temporaries)",
    )  # fmt: skip
    arguments.add_measure(parser, rounds=30, warmup=3, calls=False)
    arguments.add_output(parser)


def run(options: argparse.Namespace) -> int:
    """Measure and print; return 1 if a value was wrong.

    Raises BenchError on all ranks if the servers do not start.
    """
    wrong = 0
    with MpiJob(options.quiet) as job, contextlib.ExitStack() as kept:
        folder, problem = "", None
        if job.first:  # the other nodes may not have the place
            try:
                folder = kept.enter_context(tempfile.TemporaryDirectory(dir=options.folder))
            except OSError as error:
                problem = f"cannot make a folder for the FileStores: {error}"
        job.require(problem)
        table = formats.Table(job, COLUMNS, options.format, options.output)
        table.begin(job.facts())
        servers = _Servers(job)
        try:
            stores = _open(job, servers, folder)
            for index, size in enumerate(options.size):
                job.progress(index, len(options.size), f"stores, {formats.short(size)}")
                table.section(f"values of {size} bytes, {job.size} clients")
                wrong += _rows(job, table, stores, size, options)
            # Nobody's file is deleted while another rank still reads it.
            job.barrier()
            del stores
        finally:
            servers.close()
        table.end()
    return 1 if wrong else 0


class _Servers:
    """The process with the two servers, started by rank 0.

    All ranks get its node's name, or loopback if they are all there, the ports and the key.
    """

    def __init__(self, job: MpiJob) -> None:
        self._process: subprocess.Popen[str] | None = None
        hosts = job.gather(socket.gethostname())
        alone = len(set(hosts)) == 1
        self.host = "127.0.0.1" if alone else hosts[0]
        key = new_key().hex()
        line, problem = "", None
        if job.first:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _SERVERS, "127.0.0.1" if alone else "0.0.0.0"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )  # fmt: skip
            assert self._process.stdin is not None and self._process.stdout is not None
            self._process.stdin.write(key + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
            if not line:
                problem = "the process with the servers ended before it said where they are"
        job.require(problem)
        self.key, line = job.gather([key, line])[0]
        self.ours, self.theirs = map(int, line.split())

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.communicate()


def _open(job: MpiJob, servers: _Servers, folder: str) -> dict[str, Any]:
    """Kind -> our store and torch's; those in files if all ranks have the folder.

    Raises BenchError on all ranks if one of them does not reach the servers.
    """
    import torch.distributed as c10d

    here, problem, tcp = socket.gethostname(), None, None
    try:
        ours: Store = TCPStore(servers.host, servers.ours, timeout=_REACH, auth_key=servers.key)
        tcp = ours, c10d.TCPStore(servers.host, servers.theirs, None, False, _REACH)
    except (DistError, RuntimeError) as error:
        problem = f"rank {job.rank} on {here} does not reach the servers: {error}"
    job.require(problem)
    folder = job.gather(folder)[0]
    lacks = None if os.path.isdir(folder) else f"{here} does not have rank 0's folder {folder}"
    lacks = job.problem(lacks)
    if lacks is not None:
        job.say(f"# no FileStore: {lacks}; name one that all nodes share with --folder")
        return {"TCPStore": tcp}
    file = (
        FileStore(os.path.join(folder, "ours"), job.size),
        c10d.FileStore(os.path.join(folder, "theirs"), job.size),
    )
    return {"TCPStore": tcp, "FileStore": file}


def _rows(
    job: MpiJob,
    table: formats.Table,
    stores: dict[str, tuple[Any, Any]],
    size: int,
    options: argparse.Namespace,
) -> int:
    """All operations with values of one size; returns how many answers were wrong."""
    value = os.urandom(size)
    key = f"key of {job.rank}"
    total = 0
    for kind, (ours, theirs) in stores.items():
        for store in (ours, theirs):
            store.set(key, value)
        for operation in _OPERATIONS:
            times = interleave(
                job,
                {
                    "ours": _batch(ours, operation, key, value),
                    "theirs": _batch(theirs, operation, key, value),
                },
                options.rounds,
                options.warmup,
            )
            mine, other = times["ours"].median, times["theirs"].median
            wrong = job.total((ours.get(key) != value) + (theirs.get(key) != value))
            total += wrong
            table.row(
                {
                    "operation": operation,
                    "kind": kind,
                    "size_bytes": size,
                    "hpcdist_us": mine * 1e6,
                    "torch_us": other * 1e6,
                    "ratio": other / mine,
                    "spread": times["ours"].spread,
                    "wrong": wrong,
                    "rounds": options.rounds,
                }
            )
    return total


def _batch(store: Any, operation: str, key: str, value: bytes) -> Callable[[int], None]:
    """A function that makes a number of calls."""
    call: Callable[[], Any] = {
        "set": lambda: store.set(key, value),
        "get": lambda: store.get(key),
        "add": lambda: store.add("counter of " + key, 1),
        "wait": lambda: store.wait([key]),
    }[operation]

    def run(calls: int) -> None:
        for _ in range(calls):
            call()

    return run
