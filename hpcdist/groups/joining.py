"""A former spare, between the moment in which it takes a dead rank's number and its first commit.

The other ranks wait for it in the recovery of their State, and make no other call. So what this
process calls in the default group meanwhile would never end, or meet a call of the recovery.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast
from weakref import WeakSet

from hpcdist.backends.carrier import Carrier
from hpcdist.errors import DistError
from hpcdist.groups.world import world

#: Called with the name of an operation, where it is refused else: what is to be called in its
#: place, or None.
answers: list[Callable[[str], Callable[..., Any] | None]] = []


class Joining:
    """Stands for the communicator of the default group meanwhile: it answers, and moves no data.

    Parameters
    ----------
    real : Carrier
        The communicator.

    Attributes
    ----------
    deferred : WeakSet
        Models and optimizers that were made without the other ranks: they get their values with
        the commit, which must contain them.
    """

    native = None

    def __init__(self, real: Carrier) -> None:
        self._real = real
        self.deferred: WeakSet[Any] = WeakSet()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        found = getattr(self._real, name)
        if not callable(found):
            return found
        answered = next(filter(None, (answer(name) for answer in answers)), None)
        return answered or _refusal(name, self._real.rank)

    def finished(self, outputs: list[Any]) -> Any:
        """Return the handle of an operation that is done."""
        native: Any = self._real.native  # only such a job has spares
        return native.finished(outputs)

    def barrier(self, async_op: bool = False, **about: Any) -> None:
        """Return: the other ranks are at no barrier of the program."""
        if async_op:
            _refusal("barrier(async_op=True)", self._real.rank)()

    def refuse(self, *args: Any, **about: Any) -> None:
        """Send nothing: no other rank is in a call of the program."""


def _refusal(call: str, rank: int) -> Callable[..., Any]:
    def refused(*args: Any, **about: Any) -> Any:
        name = about.get("api") or call
        raise DistError(
            f"{name}: this process was a spare and has taken the place of rank {rank}, but has not "
            "got its state yet. The other ranks wait for its State and make no other call, so none "
            "can be answered before State.resume() or hpcdist.elastic.elastic(). Call it after "
            "that, or leave it out while hpcdist.elastic.joining()"
        )

    return refused


def begin(pg: Any) -> None:
    """Close the default group, which this process has just got, until it has joined the others."""
    world.joining = Joining(pg.carrier)
    pg.carrier = world.comm = cast(Carrier, world.joining)


def is_closed(pg: Any) -> bool:
    """Whether a group is the default group of a process that is still to join the others."""
    return world.joining is not None and pg is not None and pg.carrier is world.joining


def refuse(pg: Any, call: str) -> None:
    """Raise DistError where the other ranks make no such call."""
    if is_closed(pg):
        _refusal(call, pg.carrier.rank)()


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

    The generation of the group differs from here on, as that of the other ranks does: models and
    samplers that follow a recovery make the same calls everywhere.
    """
    pg = world.pg
    pg.members = replace(pg.members, generation=pg.members.generation + 1)
    pg.carrier = world.comm = pg.hooks.carry(pg._backends)
    try:
        yield
    finally:
        if world.joining is not None:
            deferred = world.joining.deferred
            world.joining = Joining(pg.carrier)
            world.joining.deferred = deferred
            pg.carrier = world.comm = cast(Carrier, world.joining)


def joined() -> None:
    """This process has joined the others: it is a rank like any other."""
    world.joining = None
