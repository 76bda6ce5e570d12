#!/usr/bin/env python
"""Run an MPI program on two nodes that are not there: network namespaces with a slow link between.

    sudo python tests/perf/netns.py                               the overlap table
    sudo python tests/perf/netns.py -- train.py --epochs 1        any program, one rank a node
    sudo python tests/perf/netns.py --rate 8 --cores 2 -- -m hpcdist bench all_reduce

Each node is a network, host name and mount namespace of its own, with /dev/shm and /etc/hosts of
its own: to MPI two machines that only TCP connects. The link is a veth pair with a token bucket
filter at both ends. Its rate, 4 Gbit/s, is that of both directions together, half for each: an
all_reduce of 25 MiB on two ranks, which moves 25 MiB each way, takes 105 ms at least. Each rank is
bound to as many cores as --cores says: with one, the default, computation, communication and the
kernel's part of TCP share it. So does what stands for the wire: the filter's timer for each packet
costs a core what an adapter does in hardware. Packets are of 256 KiB therefore, if the kernel has
such (Linux 6.3); --packet 64 makes them the usual. mpirun runs on the first node, and reaches the
second through a remote shell that only changes namespaces. Open MPI and MPICH.

Needs root, and iproute2 and util-linux. The namespaces belong to processes that end with this one,
however it ends, so nothing is left behind.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from nodes import (  # noqa: E402
    Node,
    command_line,
    connect,
    die_with_parent,
    environment,
    hosts_file,
    missing,
    remote_shell,
)

OVERLAP = ["-m", "hpcdist", "bench", "overlap"]


def find_mpirun(given: str | None) -> str:
    """Return the given mpirun, the one beside this Python, or that on PATH."""
    beside = Path(sys.executable).parent / "mpirun"
    found = given or (str(beside) if beside.exists() else shutil.which("mpirun"))
    if not found:
        sys.exit("netns.py: no mpirun beside this Python and none on PATH: pass --mpi PATH")
    return found


def cores_of(count: int) -> list[str]:
    """Return the cores of each node, as taskset takes them."""
    there = sorted(os.sched_getaffinity(0))
    if len(there) < 2 * count:
        sys.exit(f"netns.py: two nodes of {count} cores need {2 * count}; there are {len(there)}")
    return [",".join(map(str, there[i * count : (i + 1) * count])) for i in range(2)]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mpi", metavar="MPIRUN", help="(beside this Python, or on PATH)")
    parser.add_argument(
        "--rate", type=float, default=4, help="of the link, Gbit/s in both directions together (4)"
    )
    parser.add_argument(
        "--congestion",
        default="reno",
        choices=("reno", "cubic", "bbr"),
        help="control of TCP (reno): acknowledgements start what is sent, as with cubic, that most "
        "machines run but a namespace may not always choose; bbr takes a timer for its pace",
    )
    parser.add_argument(
        "--packet", type=int, default=256, metavar="KIB", help="longest packet, 64 to 256 KiB (256)"
    )
    parser.add_argument("--cores", type=int, default=1, help="of each node (1)")
    parser.add_argument("--ranks", type=int, default=1, help="on each node (1)")
    parser.add_argument("program", nargs="*", help="for Python: a file or -m module, arguments")
    options = parser.parse_args()
    if min(options.cores, options.ranks) < 1 or not options.rate >= 0.002:
        parser.error("--cores, --ranks and --rate take positive numbers")
    if not 64 <= options.packet <= 256:
        parser.error(f"--packet {options.packet}: packets are of 64 to 256 KiB")
    if lacking := missing():
        sys.exit(f"netns.py: {lacking}")
    mpirun = find_mpirun(options.mpi)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    nodes: list[Node] = []
    with tempfile.TemporaryDirectory(prefix="hpcdist-netns.") as name:
        try:
            folder = Path(name)
            hosts = hosts_file(folder)
            cores = cores_of(options.cores)
            nodes += [Node(0, hosts)]
            nodes += [Node(1, hosts)]
            connect(nodes, options.rate, options.congestion, options.packet)
            shell = remote_shell(folder, nodes, cores)
            command = command_line(mpirun, shell, options.ranks, options.program or OVERLAP)
            job = subprocess.Popen(
                [*nodes[0].enter, "taskset", "-c", cores[0], *command],
                env=environment(mpirun),
                stdin=subprocess.DEVNULL,
                preexec_fn=die_with_parent,
            )
            return job.wait()
        finally:
            for node in nodes:
                node.end()


if __name__ == "__main__":
    sys.exit(main())
