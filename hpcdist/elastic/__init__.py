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

__all__ = ["State", "StateLostError", "Step", "elastic"]
