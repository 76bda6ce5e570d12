"""The one object with the groups of this process, and what takes the place of a missing group.

Operations do not check whether they may run. The default group's communicator is one attribute of
:data:`world`. Where there is no group to run on, a stand-in takes its place that raises (no default
group, destroyed group) or warns and returns None (this process is not in the group). So the usual
path of an operation has no branch for the unusual cases.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable
from typing import Any, NoReturn, cast
from weakref import WeakKeyDictionary

from hpcdist.backends.carrier import Carrier
from hpcdist.groups.members import Members

#: Why there is no default group.
NOT_INITIALIZED = (
    "the default process group does not exist: call hpcdist.init_process_group() first"
)


class Absent:
    """Stands for the communicator of a group that cannot be used; any use raises."""

    __slots__ = ("_why",)

    native = None

    def __init__(self, why: str) -> None:
        self._why = why

    def __getattr__(self, name: str) -> NoReturn:
        raise ValueError(self._why)


class Outside:
    """Stands for the communicator of a group that this process is not in."""

    native = None
    rank = size = local_rank = -1

    def __getattr__(self, operation: str) -> Callable[..., Any]:
        if operation.startswith("_"):
            raise AttributeError(operation)

        def warn(*args: Any, **kwargs: Any) -> int | None:
            # user -> public function -> here -> warn_outside
            warn_outside(operation, 4)
            return -1 if operation == "recv" else None

        return warn


def warn_outside(operation: str, stacklevel: int, does: str = "does nothing") -> None:
    """Warn at the line that called an operation of a group that this process is not in."""
    own = world.pg.rank() if world.pg is not None else -1
    warnings.warn(
        f"{operation} {does} on rank {own}, which is not in the given group",
        stacklevel=stacklevel,
    )


class _Nobody(Members):
    """No member, of a group elsewhere."""

    __slots__ = ()

    def place(self, rank: int | None, group_rank: int | None, what: str) -> int:
        """Accept any rank: the operation does not run."""
        return -1

    def peer(
        self, own: int, rank: int | None, group_rank: int | None, what: str, advice: str
    ) -> int:
        """Accept any rank."""
        return -1


class NonMember(int):
    """Returned in place of a group that this process is not in: torch's number, and a stand-in."""

    carrier = cast(Carrier, Outside())
    members: Members = _Nobody((), "")

    def __repr__(self) -> str:
        return "GroupMember.NON_GROUP_MEMBER"


OUTSIDE = NonMember(-100)


class _World:
    """The groups of this process.

    ``comm`` is the default group's communicator, or a stand-in that raises; ``pg`` the default
    group or None; ``groups`` all groups in order of creation, until the program drops them;
    ``device`` the index of the GPU that init_process_group was told, or None; ``held`` those that
    live until they are destroyed; ``dropped`` the communicators of the dropped ones that are not
    freed yet; ``counts`` how often groups of the same ranks were created; ``taken`` the highest
    number in the names of groups that a recovery has kept, by the text before it; ``kept`` the
    groups that wait after a recovery to be made again; ``rebuilding`` what makes them, or None;
    ``following`` the default group's former handle and size, and what its reconfiguration found,
    until what else keeps ranks has followed; ``renewal`` what a reconfiguration has made until the
    default group has adopted it: its communicator, whose places its ranks have, the ranks that
    died, the former spares among its ranks, whether all make their groups again; ``store`` the
    key-value store the processes met through, or None; ``spares`` how many spares the job began
    with; ``joining`` what this process, a former spare, has to catch up with before it can use the
    default group, or None.
    """

    __slots__ = (
        *("comm", "counts", "device", "dropped", "following", "groups", "held", "joining", "kept"),
        *("pg", "rebuilding", "renewal", "spares", "store", "taken"),
    )

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Forget all groups."""
        self.comm = cast(Carrier, Absent(NOT_INITIALIZED))
        # Any: ProcessGroup, which stands above this module
        self.pg: Any = None
        self.groups: WeakKeyDictionary[Any, None] = WeakKeyDictionary()
        self.held: set[Any] = set()
        self.dropped: deque[list[Any]] = deque()
        self.counts: dict[tuple[int, ...], int] = {}
        self.taken: dict[str, int] = {}
        # Any: Kept and Rebuilding, which stand above this module
        self.kept: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
        self.rebuilding: Any = None
        self.renewal: list[Any] = []
        self.following: tuple[Any, ...] = ()
        self.store: Any = None
        self.device: int | None = None
        self.spares = 0
        # Any: Joining, which stands above this module
        self.joining: Any = None

    def drop(self, comms: list[Any]) -> None:
        """Note the communicators of a group that the program has dropped; any thread may call."""
        self.dropped.append(comms)


#: The state of this process; there is one.
world = _World()
