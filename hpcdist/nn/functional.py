"""Collectives that autograd differentiates through.

The functions of ``hpcdist.collectives`` write into tensors that are given to them, and autograd
knows nothing of it. Those here return new tensors, and their backward passes gradients between
ranks. The loss is taken to be the sum of all ranks' losses: where one rank's input enters other
ranks' results, its gradient is the sum of what those ranks found.

Backward is a collective too. Each tensor must require a gradient on all ranks of the group or on
none, and all ranks must run backward through the same operations; a rank that does not is named
when the group's timeout is over.
"""

from __future__ import annotations

from hpcdist.nn._exchanges import (
    all_gather,
    all_gather_single,
    all_to_all,
    all_to_all_single,
    gather,
    scatter,
)
from hpcdist.nn._reductions import (
    all_reduce,
    broadcast,
    reduce,
    reduce_scatter,
    reduce_scatter_single,
)

__all__ = [
    "all_gather",
    "all_gather_single",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "scatter",
]
