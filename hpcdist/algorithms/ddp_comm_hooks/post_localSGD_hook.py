"""The names of ``torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook``."""

from hpcdist.parallel.comm_hooks.post_local_sgd import PostLocalSGDState, post_localSGD_hook

__all__ = ["PostLocalSGDState", "post_localSGD_hook"]
