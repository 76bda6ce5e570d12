"""Which parts of a State differ between the ranks, where these have groups of their own.

In a job with spares whose groups are made again, ranks may train different models: two halves of
the job, or the stages of a pipeline. Then no rank that lives need have what a dead one had. So a
commit copies those parts to the next ranks, as it does random numbers.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch.nn.parallel import DistributedDataParallel as StockParallel

from hpcdist.elastic.parts import Part
from hpcdist.elastic.shards import Shards
from hpcdist.groups.world import world
from hpcdist.parallel.ddp.module import DistributedDataParallel


def names_of(parts: Mapping[str, Part | Shards]) -> frozenset[str]:
    """Return the names of the parts of which each rank alone has its copy, as far as it knows.

    All but models in DistributedDataParallel over the default group, whose ranks have the same, and
    the optimizers of such models alone. So it is with a ZeroRedundancyOptimizer over the default
    group; of each its shards have copies of their own.
    """
    same: set[int] = set()
    found = []
    for name, part in parts.items():
        if isinstance(part, Shards):
            if not part.of_world:
                found.append(name)
        elif any(map(is_parallel, part.modules())) and part.group() is world.pg:
            same.update(map(id, part.tensors()))
        elif not part.stepped():
            found.append(name)
    for name, part in parts.items():
        if not isinstance(part, Shards) and not same.issuperset(map(id, part.stepped())):
            found.append(name)
    return frozenset(found)


def is_parallel(module: object) -> bool:
    """Whether it is a DistributedDataParallel, hpcdist's or torch's."""
    return isinstance(module, (DistributedDataParallel, StockParallel))
