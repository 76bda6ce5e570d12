"""The names of ``torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook``."""

from hpcdist.parallel.comm_hooks.powersgd import batched_powerSGD_hook, powerSGD_hook
from hpcdist.parallel.comm_hooks.powersgd_state import PowerSGDState

__all__ = ["PowerSGDState", "batched_powerSGD_hook", "powerSGD_hook"]
