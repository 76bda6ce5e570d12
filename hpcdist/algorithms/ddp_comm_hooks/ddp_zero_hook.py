"""The names of ``torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook``."""

from hpcdist.parallel.comm_hooks.zero import hook_with_zero_step, hook_with_zero_step_interleaved

__all__ = ["hook_with_zero_step", "hook_with_zero_step_interleaved"]
