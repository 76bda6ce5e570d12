"""Which errors come from the death of a rank."""

from __future__ import annotations

from hpcdist import _engine
from hpcdist.elastic.shards import StateLostError
from hpcdist.errors import DistError, RankFailedError
from hpcdist.groups.world import world


def is_death(error: BaseException) -> bool:
    """Whether an error of a step comes from the death of a rank that the job survives."""
    if isinstance(error, StateLostError):
        return False
    if world.pg is None or not world.pg.supports_reconfigure:
        return False
    if isinstance(error, RankFailedError) and error.ranks:
        return True
    # torch's C++ keeps the text of an error, and not its type
    by_torch = type(error) is RuntimeError and RankFailedError.__name__ in str(error)
    return (by_torch or isinstance(error, DistError)) and _engine.is_broken(world.pg.carrier.native)
