"""The native module in the place of torch.distributed, for PyTorch's suite."""

from __future__ import annotations

from types import ModuleType
from typing import Any


class Dist(ModuleType):
    """hpcdist under torch.distributed's name, with the few private names that the suite uses."""

    def __init__(self) -> None:
        super().__init__("torch.distributed")
        from hpcdist.parallel.reducer.grad_bucket import GradBucket

        self.GradBucket = GradBucket

    def __getattr__(self, name: str) -> Any:
        import hpcdist

        return getattr(hpcdist, name)

    @staticmethod
    def _rank_not_in_group(group: Any) -> bool:
        import hpcdist

        return hpcdist.get_rank(group) < 0


class _Listed:
    """A Work whose future holds a list of tensors, as that of a method of c10d's groups does."""

    def __init__(self, work: Any, tensors: list[Any]) -> None:
        self._work, self._tensors = work, tensors

    def get_future(self) -> Any:
        return self._work.get_future().then(lambda _: self._tensors)


def _allreduce(group: Any, tensors: list[Any]) -> _Listed:
    import hpcdist

    return _Listed(hpcdist.all_reduce(tensors[0], group=group, async_op=True), tensors)


def furnish(suite: ModuleType, common: ModuleType) -> None:
    """Put hpcdist into the suite's modules, wherever it reaches for torch's."""
    import torch

    import hpcdist
    from hpcdist import ProcessGroup, data, parallel
    from hpcdist.groups.resolve import default_group
    from hpcdist.optim import post_local_sgd
    from hpcdist.parallel import averaging, comm_hooks

    dist = Dist()
    suite.dist = common.c10d = dist
    suite.get_world_size = dist.get_world_size
    suite._get_default_group = default_group
    ProcessGroup.allreduce = _allreduce
    ProcessGroup.monitored_barrier = hpcdist.monitored_barrier
    for place in (suite, torch.nn.parallel):
        place.DistributedDataParallel = parallel.DistributedDataParallel
    torch.nn.SyncBatchNorm = parallel.SyncBatchNorm
    suite.DistributedSampler = data.DistributedSampler
    suite.averagers = suite.hierarchicalSGD = suite.model_averaging_utils = averaging
    suite.post_localSGD_optimizer = post_local_sgd
    suite.default = suite.post_localSGD = suite.powerSGD = comm_hooks
    suite.quantization_hooks = comm_hooks
