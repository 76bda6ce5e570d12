"""Training that goes on when ranks die: steps that all ranks commit, or all repeat.

    from hpcdist.elastic import State, elastic

    state = State(model=model, optimizer=optimizer)
    for step in elastic(state, 1000):
        with step:
            ...                      # forward, backward, optimizer.step()

See ``docs/surviving.md``. :class:`State` is what is committed and rolled back, :func:`elastic` the
loop.
"""

from __future__ import annotations

from hpcdist.elastic.loop import Step, elastic
from hpcdist.elastic.shards import StateLostError
from hpcdist.elastic.state import State
from hpcdist.groups.world import world

__all__ = ["State", "StateLostError", "Step", "elastic", "joining"]


def joining() -> bool:
    """Whether this process was a spare and has not got the state of its place yet.

    Between ``init_process_group`` and :meth:`State.resume`, or :func:`elastic`, other ranks answer
    no call of it: collectives, messages and new groups raise :class:`~hpcdist.DistError`. A
    program leaves them out then.

    Returns
    -------
    bool
        False on all ranks of a job without spares (``HPCDIST_SPARES``).

    Notes
    -----
    Local to this process. torch has no counterpart.
    """
    return world.joining is not None
