"""Communication on the host before NCCL is up: over MPI if it runs, else over the store."""

from __future__ import annotations

import struct
import time
import zlib
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from hpcdist import _engine, _nccl_loader
from hpcdist.backends.base import BackendOptions
from hpcdist.errors import (
    DistBackendError,
    DistMismatchError,
    DistStoreError,
    DistTimeoutError,
)
from hpcdist.launchers.pmi.server import node_of_this_process

_UNIQUE = 128
#: Tag of the messages between two ranks that make a communicator of their own.
_TAG = 1023
_TURN = 0.02


class Channel(Protocol):
    """Interface: the exchanges on the host that a group over NCCL needs."""

    rank: int
    size: int

    def agree(
        self, number: int, unique: bytes, limit: float, roots: Sequence[int] = (0,)
    ) -> list[bytes]:
        """Send some ranks' identities to all, after all have compared their versions of NCCL."""

    def all_ready(self, key: str, ready: bool, limit: float) -> bool:
        """Return whether all ranks are ready for a common step."""

    def agree_with(self, peer: int, number: int, unique: bytes, limit: float) -> bytes:
        """Exchange an identity between two ranks: the lower one's.

        After a timeout the call may be made again, with the same number and identity.
        """

    def node_ranks(self, limit: float) -> tuple[int, ...]:
        """Return the ranks on this rank's node."""

    def free(self) -> None:
        """Free the channel's resources."""


def _own(unique: bytes) -> bytes:
    return struct.pack("<q", _nccl_loader.load().version) + unique.ljust(_UNIQUE, b"\0")


def _compare(
    parts: Sequence[bytes], ranks: Sequence[int], roots: Sequence[int] = (0,)
) -> list[bytes]:
    """Return the identities that some ranks made; raises the same error on all ranks."""
    versions = [struct.unpack_from("<q", part)[0] for part in parts]
    if len(set(versions)) == 1:
        return [bytes(parts[root][8 : 8 + _UNIQUE]) for root in roots]
    usual = max(set(versions), key=lambda each: (versions.count(each), each))
    odd = [
        f"rank {rank} has {_nccl_loader.version_text(version)}"
        for rank, version in zip(ranks, versions, strict=True)
        if version != usual
    ]
    rest = "the other" if len(ranks) == 2 else "the others"
    raise DistMismatchError(
        f"all ranks must run the same NCCL: {', '.join(odd[:8])}, {rest} "
        f"{_nccl_loader.version_text(usual)}. Install one version everywhere, or point "
        "HPCDIST_NCCL_LIBRARY to the same file"
    )


class MpiChannel:
    """Over a communicator of the MPI engine.

    Parameters
    ----------
    comm : hpcdist._engine.Comm
        Of the same ranks, in the same order.
    owned : bool
        Whether it is freed with the channel.
    """

    def __init__(self, comm: Any, owned: bool) -> None:
        self.comm = comm
        self.rank: int = comm.rank
        self.size: int = comm.size
        self._owned = owned
        #: Rank -> what was begun with it by a call that has failed: see `agree_with`.
        self._begun: dict[int, tuple[Any, Any, Any, Any]] = {}

    def agree(
        self, number: int, unique: bytes, limit: float, roots: Sequence[int] = (0,)
    ) -> list[bytes]:
        """Send some ranks' identities to all."""
        own = np.frombuffer(_own(unique), np.uint8)
        parts = np.empty((self.size, own.size), np.uint8)
        self.comm.all_gather_into_tensor(parts, own.copy(), api="NCCL init", extra=number)
        return _compare([part.tobytes() for part in parts], range(self.size), roots)

    def all_ready(self, key: str, ready: bool, limit: float) -> bool:
        """Return whether all ranks are ready for a common step."""
        flags = np.empty(self.size, np.int64)
        own = np.array([ready], np.int64)
        self.comm.all_gather_into_tensor(flags, own, api=f"NCCL {key}")
        return bool(flags.all())

    def agree_with(self, peer: int, number: int, unique: bytes, limit: float) -> bytes:
        """Send the lower rank's identity to the other."""
        begun = self._begun.get(peer)
        if begun is None:
            own = np.frombuffer(_own(unique), np.uint8).copy()
            other, sent = np.empty_like(own), self.comm.isend(own, peer, _TAG)
        else:  # the other rank gets what an earlier call has sent
            own, sent, other, arrives = begun
        if begun is None or not arrives.is_success():
            arrives = self.comm.irecv(other, peer, _TAG)
        self._begun[peer] = own, sent, other, arrives
        try:
            sent.wait(limit)
            arrives.wait(limit)
        except BaseException:
            arrives.cancel()  # it must not take another message; if it has its own, that is kept
            raise
        del self._begun[peer]
        parts = [own.tobytes(), other.tobytes()]
        ranks = [self.rank, peer]
        if peer < self.rank:
            parts.reverse()
            ranks.reverse()
        return _compare(parts, ranks)[0]

    def node_ranks(self, limit: float) -> tuple[int, ...]:
        """Return the ranks on this rank's node, as MPI knows them."""
        return tuple(self.comm.node_ranks)

    def compare(self, api: str, facts: tuple[Any, ...]) -> None:
        """Compare what the ranks call: a mismatch or a missing rank raises."""
        number = zlib.crc32(repr((api, facts)).encode()) >> 1
        self.comm.all_gather_into_tensor(
            np.empty(self.size, np.int64), np.array([number]), api=api, extra=number
        )

    def subgroup(self, options: BackendOptions) -> MpiChannel:
        """The channel of a group of some of its ranks."""
        made = self.comm.create_group(
            list(options.parent_ranks),
            options.group_id,
            options.timeout.total_seconds(),
        )
        return MpiChannel(made, True)

    def free(self) -> None:
        """Free the communicator, if it is the channel's own."""
        if self._owned:
            self.comm.free()


class StoreChannel:
    """Over a key-value store.

    Parameters
    ----------
    store : object
        An :class:`hpcdist.Store`, or one of torch's; its keys are this group's alone.
    rank, size : int
        This rank's place.
    """

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._store = store
        self.rank = rank
        self.size = size
        self._node = node_of_this_process().encode()
        self._here: tuple[int, ...] = ()
        store.set(f"nccl/node/{rank}", self._node)  # for ranks that ask

    def node_ranks(self, limit: float) -> tuple[int, ...]:
        """Return the ranks on this rank's node; the first call waits until all have the group."""
        if not self._here:
            nodes = self._exchange("nccl/node", range(self.size), self._node, limit)
            self._here = tuple(rank for rank, node in enumerate(nodes) if node == self._node)
        return self._here

    def _exchange(self, key: str, ranks: Sequence[int], own: bytes, limit: float) -> list[bytes]:
        """Return the values of all ranks; the error names the missing ones."""
        end = time.monotonic() + limit
        keys = [f"{key}/{rank}" for rank in ranks]
        self._store.set(f"{key}/{self.rank}", own)
        while True:
            missing = [rank for rank, each in zip(ranks, keys, strict=True) if not self._has(each)]
            if not missing:
                return [bytes(self._store.get(each)) for each in keys]
            if time.monotonic() > end:
                named = ", ".join(map(str, missing[:8]))
                raise DistTimeoutError(
                    f"rank {self.rank} waited {limit:g} s to make a communicator of NCCL, and rank "
                    f"{named} did not arrive: it has not called the same operation, or died"
                )
            time.sleep(_TURN)

    def _has(self, key: str) -> bool:
        try:
            return bool(self._store.check([key]))
        except (DistStoreError, RuntimeError) as error:
            raise DistBackendError(
                f"the store that the ranks met through does not answer rank {self.rank}: {error}"
            ) from error

    def agree(
        self, number: int, unique: bytes, limit: float, roots: Sequence[int] = (0,)
    ) -> list[bytes]:
        """Send some ranks' identities to all."""
        ranks = range(self.size)
        parts = self._exchange(f"nccl/{number}", ranks, _own(unique), limit)
        return _compare(parts, ranks, roots)

    def all_ready(self, key: str, ready: bool, limit: float) -> bool:
        """Return whether all ranks are ready for a common step."""
        flags = self._exchange(f"nccl/{key}", range(self.size), b"01"[ready : ready + 1], limit)
        return b"0" not in flags

    def agree_with(self, peer: int, number: int, unique: bytes, limit: float) -> bytes:
        """Send the lower rank's identity to the other."""
        pair = sorted((self.rank, peer))
        key = f"nccl/pair/{pair[0]}-{pair[1]}/{number}"
        return _compare(self._exchange(key, pair, _own(unique), limit), pair)[0]

    def free(self) -> None:
        """Nothing: the store is the job's."""


def create(options: BackendOptions) -> Channel:
    """Make the channel of a group.

    Raises
    ------
    DistBackendError
        If there is neither MPI nor a store.
    """
    if options.host is not None and options.host.native is not None:
        return MpiChannel(options.host.native, False)
    parent = getattr(options.parent, "channel", None)
    if isinstance(parent, MpiChannel):
        return parent.subgroup(options)
    if options.parent is None and options.global_ranks_in_group:
        raise DistBackendError(
            f"the group {options.group_id!r} cannot use NCCL, because the group it is made from "
            "does not: pass backend='cpu:mpi,cuda:nccl' to init_process_group"
        )
    if options.store is not None and options.group_rank >= 0:
        return StoreChannel(options.store, options.group_rank, options.group_size)
    if options.parent is None and _engine.mpi_state() == "up":
        seconds = options.timeout.total_seconds()
        return MpiChannel(_engine.Comm.world(f"{options.group_id}.nccl", seconds, 1), True)
    raise DistBackendError(
        f"the group {options.group_id!r} over NCCL has no way to meet: give init_process_group a "
        "store or an init_method, or start the processes with mpirun or torchrun"
    )
