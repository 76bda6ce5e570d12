"""Two nodes for one job after another, whose link can be cut."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from jobs import find_mpirun
from nodes import LINK, Node, connect, environment, hosts_file, remote_shell

RATE = 8.0  # Gbit/s
DAEMON = re.compile(r"prted|orted|hydra_pmi_proxy")


def gone(pid: int) -> bool:
    """Whether a process has ended; a zombie has."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state == "Z"


def until(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait for a condition; whether it came."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return condition()


class Pair:
    """Two nodes with a link, for one job after another."""

    def __init__(self, folder: Path, nodes: list[Node]) -> None:
        self.nodes = nodes
        self.mpirun = find_mpirun()
        self.env = {**environment(self.mpirun), "PYTHONUNBUFFERED": "1"}
        cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
        connect(nodes, RATE, "reno", 64)
        self.shell = remote_shell(folder, nodes, [cores, cores])

    def shape(self, *qdisc: str) -> None:
        for node in self.nodes:
            node.run("tc", "qdisc", "replace", "dev", LINK, "root", *qdisc)

    def slow(self) -> None:
        self.shape("tbf", "rate", "400mbit", "burst", "256kb", "latency", "200ms")

    def cut(self) -> None:
        """Let every packet vanish, as when a switch dies: no reset, no loss of carrier."""
        self.shape("pfifo", "limit", "0")

    def down(self) -> None:
        """Pull the plug on the second node."""
        self.nodes[1].run("ip", "link", "set", LINK, "down")

    def restore(self) -> None:
        self.nodes[1].run("ip", "link", "set", LINK, "up")
        self.shape("tbf", "rate", f"{RATE * 500:.0f}mbit", "burst", "1mb", "latency", "50ms")

    def running(self) -> dict[int, str]:
        """What runs on the nodes, zombies not counted."""
        found = {}
        for node in self.nodes:
            for pid in node.processes():
                with contextlib.suppress(OSError):
                    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                    if not gone(pid):
                        found[pid] = b" ".join(words).decode(errors="replace")
        return found

    def daemon(self, index: int) -> int:
        """The launcher's daemon on a node."""
        for pid in self.nodes[index].processes():
            with contextlib.suppress(OSError):
                if DAEMON.search(Path(f"/proc/{pid}/comm").read_text()):
                    return pid
        raise AssertionError(f"no daemon on node {index}: {self.running()}")

    def recordings(self) -> str:
        """What the flight recorders say of the job's ranks."""
        found = ""
        for node in self.nodes:
            folder = f"/dev/shm/hpcdist.{os.getuid()}"
            command = [*node.enter, sys.executable, "-m", "hpcdist", "analyze", folder]
            found += subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
        return found

    def shared_memory(self) -> list[str]:
        """Files there, the flight recorders' folder not counted: it is for after the job."""
        return [
            name
            for node in self.nodes
            for name in os.listdir(Path("/proc", str(node.keeper.pid), "root", "dev", "shm"))
            if name != f"hpcdist.{os.getuid()}"
        ]

    def clean(self) -> None:
        """End what a failed case left."""
        self.restore()
        for pid in self.running():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        until(lambda: not self.running(), 5)
        for node in self.nodes:
            node.run("sh", "-c", "rm -rf /dev/shm/*")


@contextlib.contextmanager
def pair() -> Iterator[Pair]:
    """Two nodes that end with this block."""
    nodes: list[Node] = []
    with tempfile.TemporaryDirectory(prefix="hpcdist-nodes.") as name:
        folder = Path(name)
        hosts = hosts_file(folder)
        try:
            nodes += [Node(0, hosts)]
            nodes += [Node(1, hosts)]
            yield Pair(folder, nodes)
        finally:
            for node in nodes:
                node.end()
