"""The connection between MPI and its process manager in the same process, while MPI starts."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hpcdist import _environment

from .protocol import Manager, mapping

# Seconds between two checks of the deadline and the peers.
_TICK = 0.2


def node_of_this_process() -> str:
    """Return a name of the memory that this process can share; the same in all processes of a node.

    Two containers of one machine have separate ``/dev/shm`` folders and count as two nodes, because
    MPI could not share memory between them.

    Returns
    -------
    str
        Of the machine's boot, its name, and the device of ``/dev/shm``.
    """
    boot = ""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    memory = 0
    with contextlib.suppress(OSError):
        memory = os.stat("/dev/shm").st_dev
    return f"{boot}/{socket.gethostname()}/{memory}"


def pid_space() -> int:
    """Return the namespace of this process's process ids; 0 if unknown."""
    with contextlib.suppress(OSError):
        return os.stat("/proc/self/ns/pid").st_ino
    return 0


class _PeerGone(Exception):
    """A peer died, or the time is over; the text names the peer."""


class Server:
    """The process manager of this process: a thread that answers MPI from a store.

    Use it around the start of MPI::

        with Server(store, rank, size, peers, name, seconds) as server:
            with server.environment():
                ...  # MPI_Init
        descriptor = server.detach()

    MPI_Init cannot be interrupted: if a peer dies in it, or time is over, the thread says so on
    standard error and ends the process.

    Parameters
    ----------
    store : object
        Key-value store of the job; only this one start of MPI may use these keys (prefix it).
    rank : int
        This process's rank.
    size : int
        Number of processes.
    peers : sequence of mapping
        For each rank ``node`` (as :func:`node_of_this_process` has it), ``pid``, ``pids`` (the
        namespace of the process id) and ``host``.
    name : str
        The job's name, unique among the jobs of these machines.
    seconds : float
        How long the start may take.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        peers: Sequence[Mapping[str, Any]],
        name: str,
        seconds: float,
    ) -> None:
        self.store = store
        self.rank = rank
        self.size = size
        self.peers = peers
        self.seconds = seconds
        self._end = time.monotonic() + seconds
        self._round = 0
        self._manager = Manager(size, name, mapping([peer["node"] for peer in peers]), self)
        self._ours, self._theirs = socket.socketpair()
        self._stop = threading.Event()
        self._died: dict[int, int] = {}  # descriptor of a local peer -> its rank
        self._what = "the start of MPI"
        self._thread = threading.Thread(target=self._run, name="hpcdist-pmi", daemon=True)

    # --- its life ----------------------------------------------------------------------------

    def __enter__(self) -> Server:
        here = self.peers[self.rank]
        for rank, peer in enumerate(self.peers):
            near = peer["node"] == here["node"] and peer["pids"] == here["pids"] != 0
            if rank == self.rank or not near or not hasattr(os, "pidfd_open"):
                continue
            try:
                self._died[os.pidfd_open(peer["pid"])] = rank
            except ProcessLookupError:
                self._give_up(self._gone(rank))
            except OSError:
                continue  # no pidfds on this system: only the time limit ends the wait
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        # The thread wakes at least every tick; the store's time limit is a further bound.
        self._thread.join(10 * _TICK)
        for descriptor in self._died:
            os.close(descriptor)
        self._died = {}

    @contextlib.contextmanager
    def environment(self) -> Iterator[None]:
        """Lead MPI to the connection by environment variables; restore them afterwards."""
        changed = {
            "PMI_FD": str(self._theirs.fileno()),
            "PMI_RANK": str(self.rank),
            "PMI_SIZE": str(self.size),
            # With it Intel MPI would speak the protocol of Slurm's library, which is another.
            "I_MPI_PMI_LIBRARY": None,
            # In a Slurm job it would take the places of Slurm's tasks for those of the ranks.
            "I_MPI_NODEMAP_ALGORITHM": "pmi_process_mapping",
        }
        with _environment.variables(changed):
            yield

    def detach(self) -> int:
        """Give up the manager's end of the connection; both ends stay open until the process ends.

        Returns
        -------
        int
            Its descriptor.
        """
        self._theirs.detach()
        return self._ours.detach()

    # --- the job's key-value space --------------------------------------------------------------

    def put(self, key: str, value: str) -> None:
        """Store a value."""
        self.store.set(f"kvs/{key}", value)

    def get(self, key: str) -> str | None:
        """Return a value."""
        key = f"kvs/{key}"
        return self.store.get(key).decode() if self.store.check([key]) else None

    def barrier(self) -> None:
        """Wait for all ranks; end the process if one does not call."""
        self._round += 1
        name = f"barrier/{self._round}"
        self.store.set(f"{name}/{self.rank}", b"1")
        if self.store.add(f"{name}/count", 1) == self.size:
            self.store.set(f"{name}/all", b"1")
        pause = 0.001
        while not self.store.check([f"{name}/all"]):
            self._look(f"barrier {self._round} of MPI's start")
            self._stop.wait(pause)
            if self._stop.is_set():
                raise _PeerGone("the start of MPI was given up on this rank")
            pause = min(2 * pause, 0.05)

    # --- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._serve()
        except _PeerGone as error:
            if not self._stop.is_set():
                self._give_up(str(error))
        except Exception as error:  # of the store: most likely its server has ended
            if not self._stop.is_set():
                self._give_up(
                    f"the store by which the processes meet failed while MPI started: "
                    f"{type(error).__name__}: {error}"
                )

    def _serve(self) -> None:
        buffer = b""
        asked = select.poll()  # select() takes no descriptor above 1023
        asked.register(self._ours, select.POLLIN)
        while not self._stop.is_set():
            self._look("the start of MPI")
            if not asked.poll(1000 * _TICK):
                continue
            data = self._ours.recv(65536)
            if not data:
                return
            *lines, buffer = (buffer + data).split(b"\n")
            for line in lines:
                reply = self._manager.answer(line.decode("latin-1"))
                if reply is not None:
                    self._ours.sendall(reply.encode("latin-1"))
            if self._manager.done:
                return

    def _look(self, what: str) -> None:
        """Raise if a peer of this node has died or the time is over."""
        if self._died:
            gone = select.poll()
            for descriptor in self._died:
                gone.register(descriptor, select.POLLIN)
            for descriptor, _ in gone.poll(0):
                raise _PeerGone(self._gone(self._died[descriptor]))
        if time.monotonic() > self._end:
            raise _PeerGone(f"{what} took longer than {self.seconds:g} s; {self._missing()}")

    def _missing(self) -> str:
        if not self._round:
            return "MPI itself did not return"
        name = f"barrier/{self._round}"
        missing = [r for r in range(self.size) if not self.store.check([f"{name}/{r}"])]
        names = ", ".join(f"{r} on {self.peers[r]['host']}" for r in missing[:16])
        more = f" and {len(missing) - 16} more" if len(missing) > 16 else ""
        return f"missing: rank {names}{more}" if missing else "all ranks were there"

    def _gone(self, rank: int) -> str:
        peer = self.peers[rank]
        return f"rank {rank} (pid {peer['pid']} on {peer['host']}) died while MPI started"

    def _give_up(self, why: str) -> None:
        """MPI_Init cannot be left: say why, and end the process."""
        sys.stderr.write(f"[hpcdist rank {self.rank} of {self.size}] {why}: ending this process\n")
        sys.stderr.flush()
        os._exit(71)  # EX_OSERR, as the engine's watchdog has it
