"""The names of ``torch.distributed.algorithms.ddp_comm_hooks``."""

from hpcdist.parallel.comm_hooks.register import DDPCommHookType, register_ddp_comm_hook

__all__ = ["DDPCommHookType", "register_ddp_comm_hook"]
