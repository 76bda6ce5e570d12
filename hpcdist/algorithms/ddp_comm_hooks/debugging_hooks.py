"""The names of ``torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks``."""

from hpcdist.parallel.comm_hooks.default import noop_hook

__all__ = ["noop_hook"]
