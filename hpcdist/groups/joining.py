"""A former spare, between the moment in which it takes a dead rank's number and its first commit.

The other ranks wait for it in the recovery of their State, and make no other call. So what this
process calls meanwhile would never end, or meet a call of the recovery.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, cast
from weakref import WeakSet

from hpcdist.backends.carrier import Carrier
from hpcdist.errors import DistError
from hpcdist.groups.kept import keep_all
from hpcdist.groups.members import Members
from hpcdist.groups.world import world

#: Called with the name of an operation, where it is refused else: what is to be called in its
#: place, or None.
answers: list[Callable[[str], Callable[..., Any] | None]] = []


class Joining:
    """Stands for the communicator of a group meanwhile: it answers, and moves no data.

    Parameters
    ----------
    real : Carrier
        The communicator of the default group.
    rank, size : int
        Of this process in the group, and of the group.
    places : sequence of int
        By rank of the default group, the number of the rank in the world in which this process
        makes its groups.
    rebuilds : bool
        Whether the other ranks make their groups again, so that this one may make its own now.

    Attributes
    ----------
    number : int
        Of this process in that world.
    deferred : WeakSet
        Models and optimizers that were made without the other ranks: they get their values with
        the commit, which must contain them.
    """

    native = None

    def __init__(
        self, real: Carrier, rank: int, size: int, places: Sequence[int], rebuilds: bool = False
    ) -> None:
        self._real = real
        self.number = self.rank = rank
        self.size = size
        self.places, self.rebuilds = places, rebuilds
        self.timeout = real.timeout
        self.deferred: WeakSet[Any] = WeakSet()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        found = getattr(self._real, name)
        if not callable(found):
            return found
        answered = next(filter(None, (answer(name) for answer in answers)), None)
        return answered or _refusal(name, self.number)

    @property
    def node_ranks(self) -> tuple[int, ...]:
        """Ranks on this node."""
        return tuple(self.places[rank] for rank in self._real.node_ranks)

    def finished(self, outputs: list[Any]) -> Any:
        """Return the handle of an operation that is done."""
        native: Any = self._real.native  # only such a job has spares
        return native.finished(outputs)

    def barrier(self, async_op: bool = False, **about: Any) -> None:
        """Return: the other ranks are at no barrier of the program."""
        if async_op:
            _refusal("barrier(async_op=True)", self.number)()

    def refuse(self, *args: Any, **about: Any) -> None:
        """Send nothing: no other rank is in a call of the program."""


def _refusal(call: str, rank: int, hint: str = "") -> Callable[..., Any]:
    def refused(*args: Any, **about: Any) -> Any:
        name = about.get("api") or call
        raise DistError(
            f"{name}: this process was a spare and has taken the place of rank {rank}, but has not "
            "got its state yet. The other ranks wait for its State and make no other call, so none "
            "can be answered before State.resume() or hpcdist.elastic.elastic(). Call it after "
            "that, or leave it out while hpcdist.elastic.joining()" + hint
        )

    return refused


def begin(pg: Any, places: Sequence[int], size: int, rebuilds: bool) -> None:
    """Close the default group, which this process has just got, until it has joined the others.

    Parameters
    ----------
    pg : ProcessGroup
        The default group.
    places : sequence of int
        By rank, whose place it has in the world before the last recovery.
    size : int
        Of that world.
    rebuilds : bool
        Whether all ranks make their groups again. A program makes its groups in the world that it
        began with, so while it joins, this process has its rank in that one.
    """
    real = pg.carrier
    if rebuilds:
        pg.members = Members(tuple(range(size)), pg.members.name, pg.members.generation)
        world.joining = Joining(real, places[real.rank], size, places, True)
    else:
        world.joining = Joining(real, real.rank, real.size, range(real.size))
    pg.carrier = world.comm = cast(Carrier, world.joining)


def is_closed(pg: Any) -> bool:
    """Whether a group is one of a process that is still to join the others."""
    return pg is not None and isinstance(pg.carrier, Joining)


def refuse(pg: Any, call: str, hint: str = "") -> None:
    """Raise DistError where the other ranks make no such call."""
    if is_closed(pg):
        _refusal(call, pg.carrier.number, hint)()


def refuse_by_hand() -> None:
    """Raise ValueError in a job with spares: a former spare waits for the others' State."""
    refuse(world.pg, "reconfigure")
    if world.spares:
        raise ValueError(
            "a job with spares (HPCDIST_SPARES) recovers in its State: use "
            "hpcdist.elastic.elastic(), or call commit(yes=False) of the State on all ranks that "
            "live"
        )


def defers(pg: Any, thing: Any) -> bool:
    """Whether a model or an optimizer is made without the other ranks, which have theirs.

    It gets its values with the commit; :attr:`Joining.deferred` then contains it.
    """
    if not is_closed(pg):
        return False
    world.joining.deferred.add(thing)
    return True


@contextmanager
def opened() -> Iterator[None]:
    """Open the default group while this process joins the others; it stays open if it has joined.

    Its other groups have the numbers of the new world from then on, and wait to be made. The
    generations of all groups differ from here on, as those of the other ranks do: models and
    samplers that follow a recovery make the same calls everywhere.
    """
    pg, stood = world.pg, world.joining
    generation = pg.members.generation + 1
    made = pg.hooks.carry(pg._backends)
    made.timeout = stood.timeout
    for group, kept in world.kept.items():
        if is_closed(group):
            kept.timeout = group.carrier.timeout
    pg.members = Members(tuple(range(made.size)), pg.members.name, generation)
    pg.carrier = world.comm = made
    old: list[Any] = []  # of groups that were made in an attempt to join which has failed
    keep_all(pg, stood.places, old)
    for backend in dict.fromkeys(old):
        with suppress(DistError):
            backend.free(0.0)
    try:
        yield
    finally:
        if world.joining is not None:
            real = pg.carrier
            world.joining = Joining(real, real.rank, real.size, range(real.size), stood.rebuilds)
            world.joining.deferred = stood.deferred
            pg.carrier = world.comm = cast(Carrier, world.joining)


def joined() -> None:
    """This process has joined the others: it is a rank like any other."""
    world.joining = None
