"""The names of ``torch.distributed.algorithms.ddp_comm_hooks.optimizer_overlap_hooks``."""

from hpcdist.parallel.comm_hooks.optimizer import OptimizerHookState as _OptimizerHookState
from hpcdist.parallel.comm_hooks.optimizer import hook_then_optimizer as _hook_then_optimizer

__all__ = ["_OptimizerHookState", "_hook_then_optimizer"]
