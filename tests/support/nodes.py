"""Nodes that are not there: namespaces with a network, host name, /dev/shm and /etc/hosts.

To MPI they are machines that only TCP connects, through a veth pair. Needs root, and iproute2 and
util-linux. The namespaces belong to processes that end with the one that made them, however it
ends, so nothing is left behind.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

HOSTS = ("node-a", "node-b")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
LINK = "link0"
#: For a Python on the node, because few versions of ip have a word for it: sets how long a packet
#: of a link may be, by RTM_NEWLINK with IFLA_GSO_MAX_SIZE, IFLA_GRO_MAX_SIZE and both for IPv4.
PACKETS = """
import socket, struct, sys
link, size = socket.if_nametoindex(sys.argv[1]), int(sys.argv[2])
body = struct.pack("BxHiII", 0, 0, link, 0, 0)
body += b"".join(struct.pack("HHI", 8, kind, size) for kind in (41, 58, 63, 64))
kernel = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
kernel.send(struct.pack("IHHII", 16 + len(body), 16, 5, 1, 0) + body)
sys.exit(struct.unpack_from("i", kernel.recv(4096), 16)[0] != 0)
"""
NEEDED = ("ip", "tc", "unshare", "nsenter", "taskset", "mount", "hostname", "timeout")


def missing() -> str:
    """Return what is missing for such nodes here, "" if nothing is."""
    if os.getuid() != 0:
        return "nodes in namespaces need root"
    absent = [name for name in NEEDED if not shutil.which(name)]
    if absent:
        return f"nodes in namespaces need {', '.join(absent)}"
    link = "ip link add v0 type veth peer name v1 && tc qdisc add dev v0 root pfifo limit 0"
    made = subprocess.run(
        ["unshare", "--net", "--uts", "--ipc", "--mount", "sh", "-c", link],
        capture_output=True,
        text=True,
        timeout=60,
    )
    return f"no nodes in namespaces: {made.stderr.strip()}" if made.returncode else ""


def hosts_file(folder: Path) -> Path:
    """Write what becomes /etc/hosts on the nodes."""
    hosts = folder / "hosts"
    pairs = zip(("127.0.0.1", *ADDRESSES), ("localhost", *HOSTS), strict=True)
    hosts.write_text("".join(f"{address} {host}\n" for address, host in pairs))
    return hosts


def die_with_parent() -> None:
    """Between fork and exec: the kernel ends this process when its parent has gone."""
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def is_mpich(mpirun: str) -> bool:
    """Whether mpirun is MPICH's."""
    done = subprocess.run([mpirun, "--version"], capture_output=True, text=True, timeout=60)
    return "HYDRA" in (done.stdout + done.stderr).upper()


class Node:
    """A node: namespaces that live as long as a process of ours that sleeps in them."""

    def __init__(self, index: int, hosts: Path) -> None:
        inside = (
            f"hostname {HOSTS[index]} && mount --bind {shlex.quote(str(hosts))} /etc/hosts && "
            "mount -t tmpfs tmpfs /dev/shm && mount -t sysfs sysfs /sys && "  # UCX looks there
            "echo ready && exec sleep infinity"
        )
        self.keeper = subprocess.Popen(
            ["unshare", "--net", "--uts", "--ipc", "--mount", "sh", "-c", inside],
            preexec_fn=die_with_parent,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )
        if self.keeper.stdout.readline() != "ready\n":
            sys.exit("the namespaces cannot be made (see above); is this root?")
        self.enter = ["nsenter", "-t", str(self.keeper.pid), "-n", "-u", "-i", "-m", "--wd=."]
        self.network = os.readlink(f"/proc/{self.keeper.pid}/ns/net")

    def run(self, *command: str) -> None:
        """Run a command on the node, which must succeed."""
        subprocess.run([*self.enter, *command], check=True)

    def processes(self) -> list[int]:
        """Return what runs on the node, the keeper not counted."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and os.readlink(entry / "ns/net") == self.network:
                    found.append(int(entry.name))
            except OSError:  # ended meanwhile
                pass
        return [pid for pid in found if pid != self.keeper.pid]

    def end(self) -> None:
        """End what still runs on the node, and the node with it."""
        for _ in range(20):
            left = self.processes()
            for pid in left:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            if not left:
                break
            time.sleep(0.05)
        self.keeper.kill()
        self.keeper.wait()


def connect(nodes: list[Node], rate: float, congestion: str, packet: int) -> None:
    """Lay the link: a veth pair, each end with a filter on what it sends, half the rate."""
    first, second = (str(node.keeper.pid) for node in nodes)
    ends = ["type", "veth", "peer", "name", LINK, "netns", second]
    subprocess.run(["ip", "link", "add", LINK, "netns", first, *ends], check=True)
    for node, address in zip(nodes, ADDRESSES, strict=True):
        node.run("ip", "link", "set", "lo", "up")
        node.run("ip", "addr", "add", f"{address}/24", "dev", LINK)
        node.run("ip", "link", "set", LINK, "up")
        node.run("sh", "-c", f"echo {congestion} > /proc/sys/net/ipv4/tcp_congestion_control")
        long = [*node.enter, sys.executable, "-c", PACKETS, LINK, str(packet << 10)]
        if packet != 64 and subprocess.run(long).returncode:
            print("this kernel has packets of 64 KiB only", file=sys.stderr)
        limit = ["tbf", "rate", f"{rate * 500:.0f}mbit", "burst", "1mb", "latency", "50ms"]
        node.run("tc", "qdisc", "add", "dev", LINK, "root", *limit)
    for node in nodes:
        # the kernel takes a moment to call a link running, and UCX uses none that is not
        state = f"until grep -q up /sys/class/net/{LINK}/operstate; do sleep 0.02; done"
        node.run("timeout", "10", "sh", "-c", state)


def remote_shell(folder: Path, nodes: list[Node], cores: list[str]) -> Path:
    """Write the script that mpirun starts things with: HOST COMMAND..., as ssh takes them."""
    cases = "\n".join(
        f'    {host}) exec {shlex.join(node.enter)} taskset -c {core} sh -c "$*" ;;'
        for host, node, core in zip(HOSTS, nodes, cores, strict=True)
    )
    script = folder / "rsh"
    script.write_text(
        "#!/bin/sh\n"
        "while :; do case $1 in -*) shift ;; *) break ;; esac; done\n"
        f"host=$1; shift\ncase $host in\n{cases}\n"
        '    *) echo "no node $host" >&2; exit 1 ;;\nesac\n'
    )
    script.chmod(0o755)
    return script


def command_line(
    mpirun: str, shell: Path, ranks: int, program: list[str], ft: bool = False
) -> list[str]:
    """Return the mpirun command that starts the ranks over the link.

    With `ft` the job goes on without a rank that dies, with Open MPI.
    """
    python = [sys.executable, *program]
    if is_mpich(mpirun):
        hosts = ",".join(f"{host}:{ranks}" for host in HOSTS)
        launcher = ["-launcher", "ssh", "-launcher-exec", str(shell), "-iface", LINK]
        return [mpirun, *launcher, "-hosts", hosts, "-n", str(2 * ranks), *python]
    hosts = ",".join(f"{host}:{ranks}" for host in HOSTS)
    mca = {
        "plm": "ssh",
        "plm_ssh_agent": str(shell),
        "prte_if_include": LINK,
        "pml": "ob1",
        "btl": "tcp,self,sm",
        "btl_tcp_if_include": LINK,
    }
    options = [word for name, value in mca.items() for word in ("--mca", name, value)]
    options += ["--with-ft", "ulfm", "-x", "HPCDIST_FT"] if ft else []
    return [mpirun, *options, "--host", hosts, "-n", str(2 * ranks), "--bind-to", "none", *python]


def environment(mpirun: str) -> dict[str, str]:
    """Return what the ranks need to know: TCP over the link, and that root is meant."""
    own = {
        "OMP_NUM_THREADS": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "FI_PROVIDER": "tcp",
        "FI_TCP_IFACE": LINK,
        "UCX_TLS": "tcp,self,sm",
        "UCX_NET_DEVICES": LINK,
        "GLOO_SOCKET_IFNAME": LINK,
    }
    return {**os.environ, **own}
