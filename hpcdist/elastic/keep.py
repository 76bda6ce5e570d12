"""Commits that outlive the job: the ranks write, find and read them together."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from hpcdist import codec, log
from hpcdist.elastic.exchange import gathered, swap
from hpcdist.elastic.memory import DamagedError, Head, Memory, shape
from hpcdist.errors import DistError
from hpcdist.groups.world import world
from hpcdist.launchers.pmi.server import node_of_this_process
from hpcdist.parallel.host import on_cpu

_log = log.get_logger("elastic")
#: Number of a commit, nonce, step, size: what the files of one commit have in common.
_Id = tuple[int, str, int, int]


@dataclass
class Found:
    """What a rank gets of a commit.

    Attributes
    ----------
    step : int
        Steps committed.
    size : int
        Ranks that committed.
    own : Any
        What one of them had: the one of this rank's number, if there was one.
    shards : dict
        By rank, what others had that this rank has read; together the ranks have all.
    same : bool
        Whether every rank has exactly its own shards.
    """

    step: int
    size: int
    own: Any
    shards: dict[int, Any]
    same: bool


class Keeper:
    """Writes and finds commits in the nodes' memory; all ranks must call its methods.

    Parameters
    ----------
    job : str
        Name of the job.
    state : int
        Which State of the program it keeps: it finds that one's commits only.
    agree : callable
        Takes a flag, and returns whether all ranks gave a true one.
    is_death : callable
        Whether the job survives an error, because it comes from the death of a rank.
    """

    def __init__(
        self,
        job: str,
        state: int,
        agree: Callable[[bool], bool],
        is_death: Callable[[BaseException], bool],
    ) -> None:
        self._state, self._agree, self._is_death = state, agree, is_death
        self._memory: Memory | None = None
        self._serial = 0
        self._nonce = ""
        self._warned = False
        self._nodes: list[str] = []
        self._generation = -1
        try:
            self._memory = Memory(job)
        except OSError as error:
            self._warn(f"this rank keeps no commit in the node's memory: {error}")

    @property
    def progress(self) -> tuple[int, str]:
        """What a rank that joins the others must know to keep commits with them."""
        return self._serial, self._nonce

    def follow(self, progress: tuple[int, str]) -> None:
        """Go on with the commits of the others, whose :attr:`progress` this is; local."""
        self._serial, self._nonce = progress

    def close(self) -> None:
        """End; local to this process."""
        if self._memory is not None:
            self._memory.close()

    # -- places ----------------------------------------------------------------------------------

    def _meet(self) -> None:
        """Exchange which rank is on which node, once per membership of the default group."""
        assert world.pg is not None
        if self._generation == world.pg.members.generation:
            return
        folder = self._memory.folder if self._memory is not None else ""
        here = (f"{node_of_this_process()} {folder}", secrets.token_hex(8))
        everyone = gathered(here)
        self._nodes = [node for node, _ in everyone]
        self._nonce = self._nonce or everyone[0][1]
        self._generation = world.pg.members.generation

    def _on(self, node: str) -> list[int]:
        return [rank for rank, at in enumerate(self._nodes) if at == node]

    def _neighbour(self, rank: int) -> int | None:
        """The rank of the next node that gets a copy; None where there is one node only."""
        nodes = list(dict.fromkeys(self._nodes))
        if len(nodes) == 1:
            return None
        node = self._nodes[rank]
        there = self._on(nodes[(nodes.index(node) + 1) % len(nodes)])
        return there[self._on(node).index(rank) % len(there)]

    # -- writing ---------------------------------------------------------------------------------

    def keep(self, step: int, own: Any, shards: Any) -> bool:
        """Write a commit into the nodes' memory; the one before stays.

        Parameters
        ----------
        step : int
            Steps committed.
        own, shards : object
            This rank's state: what any rank could use, and what only this one has.

        Returns
        -------
        bool
            Whether all ranks have written. If not, the commit before is still there.
        """
        try:
            self._meet()
            # gathered, for a rank that has died has no say in what is agreed, nor a file
            well = all(gathered(self._write(step, own, shards)))
        except DistError as error:
            if not self._is_death(error):
                raise
            well = False
        # Each rank comes here once per commit, whatever failed.
        if not self._agree(well):
            return False
        self._serial, self._warned = self._serial + 1, False
        rank, size = world.comm.rank, world.comm.size
        mine = self._on(self._nodes[rank])
        if self._memory is not None and rank == mine[0]:
            here = {r for r in range(size) if r in mine or self._neighbour(r) in mine}
            slot = f"{self._state}.{self._serial % 2}."
            self._memory.clean(slot, [f"{slot}{r}" for r in here])
        return True

    def _write(self, step: int, own: Any, shards: Any) -> bool:
        """Write this rank's file, and the copies of others'."""
        rank, size = world.comm.rank, world.comm.size
        blobs = [codec.encode(on_cpu(own)), codec.encode(on_cpu(shards))]
        head = Head(self._serial + 1, self._nonce, step, size, rank, self._state)
        pieces: list[bytes | bytearray] = [shape(head, blobs), *blobs]
        well = self._put(head.name, pieces, step)
        to = self._neighbour(rank)
        if to is not None:
            held = [source for source in range(size) if self._neighbour(source) == rank]
            whole = torch.frombuffer(bytearray(b"".join(pieces)), dtype=torch.uint8)
            for source, packed in swap(whole, to, held).items():
                name = replace(head, rank=source).name
                well &= self._put(name, [packed.numpy().data], step)
        return well

    def _put(self, name: str, pieces: Sequence[Any], step: int) -> bool:
        if self._memory is None:
            return False
        try:
            self._memory.write(name, pieces)
        except OSError as error:
            self._warn(
                f"the commit of step {step} is not kept in the node's memory, the one before still "
                f"is: {error}. Free /dev/shm, mount it larger, or give State a folder on disk"
            )
            return False
        return True

    def _warn(self, text: str) -> None:
        """Once, until a commit was kept again."""
        if not self._warned:
            self._warned = True
            _log.warning("%s", text)

    # -- reading ---------------------------------------------------------------------------------

    def find(self) -> Found | None:
        """Read the newest commit that is complete and undamaged; None if there is none.

        Raises
        ------
        ValueError
            The ranks did not resume the same State.
        """
        self._generation = -1
        self._meet()
        states = gathered(self._state)
        if len(set(states)) > 1:
            raise ValueError(
                "all ranks must resume the same States in the same order; before this one the "
                f"ranks, from 0 on, have resumed {', '.join(map(str, states))}"
            )
        rank = world.comm.rank
        first = self._on(self._nodes[rank])[0] == rank
        heads: list[Head] = []
        if self._memory is not None and first:
            self._memory.clean()
            heads = [head for head in self._memory.heads() if head.state == self._state]
        holders: dict[_Id, dict[int, list[str]]] = {}
        for reader, lines in enumerate(gathered([_line(head) for head in heads])):
            for serial, nonce, step, size, old in lines:
                files = holders.setdefault((serial, nonce, step, size), {})
                files.setdefault(old, []).append(self._nodes[reader])
        for commit in sorted(holders, reverse=True):
            found = self._read(commit, holders[commit])
            if found is not None:
                self._serial = commit[0]
                return found
        return None

    def _read(self, commit: _Id, files: dict[int, list[str]]) -> Found | None:
        """Read one commit, unless a file of it is nowhere whole."""
        size = commit[3]
        while all(files.get(old) for old in range(size)):
            readers = [self._reader(old, files[old]) for old in range(size)]
            payloads, bad = self._try(commit, readers, files)
            damaged = {each for some in gathered(bad) for each in some}
            if not damaged:
                return self._share(commit, readers, files, payloads)
            for old, node in damaged:
                files[old].remove(node)
        return None

    def _reader(self, old: int, nodes: Sequence[str]) -> int:
        """The rank that reads a file: the one of that number, if it can."""
        if old < len(self._nodes) and self._nodes[old] in nodes:
            return old
        there = self._on(nodes[0])
        return there[old % len(there)]

    def _try(
        self, commit: _Id, readers: Sequence[int], files: dict[int, list[str]]
    ) -> tuple[dict[int, list[bytearray]], list[tuple[int, str]]]:
        """Read what this rank needs and its node has; also return which files are damaged."""
        rank = world.comm.rank
        here, needed = self._nodes[rank], rank % commit[3]
        wanted = {old for old, reader in enumerate(readers) if reader == rank}
        if here in files[needed]:
            wanted.add(needed)
        payloads, bad = {}, []
        for old in sorted(wanted):
            assert self._memory is not None
            try:
                payloads[old] = self._memory.read(Head(*commit, old, self._state))
            except (OSError, DamagedError) as error:
                bad.append((old, here))
                _log.warning(
                    "the commit of step %d of rank %d in %s is not used: %s",
                    commit[2], old, self._memory.folder, error,
                )  # fmt: skip
        return payloads, bad

    def _share(
        self,
        commit: _Id,
        readers: Sequence[int],
        files: dict[int, list[str]],
        payloads: dict[int, list[bytearray]],
    ) -> Found:
        """Give each rank what its own node does not have, from the reader."""
        _, _, step, size = commit
        rank, ranks = world.comm.rank, world.comm.size
        own: Any = payloads[rank % size][0] if rank % size in payloads else None
        for other in range(ranks):
            old, reader = other % size, readers[other % size]
            if reader == other or self._nodes[other] in files[old]:
                continue
            if rank == reader:
                swap(torch.frombuffer(payloads[old][0], dtype=torch.uint8), other, [])
            elif rank == other:
                own = swap(None, None, [reader])[reader].numpy()
        return Found(
            step,
            size,
            codec.decode(own),
            {old: codec.decode(payloads[old][1]) for old in payloads if readers[old] == rank},
            size == ranks and all(reader == old for old, reader in enumerate(readers)),
        )


def _line(head: Head) -> tuple[int, str, int, int, int]:
    return head.serial, head.nonce, head.step, head.size, head.rank
