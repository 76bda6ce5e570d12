"""Ways to move DDP's gradients other than a plain average.

Each is a function for ``DistributedDataParallel.register_comm_hook(state, hook)``.
"""

from __future__ import annotations

from hpcdist.parallel.comm_hooks.default import (
    allreduce_hook,
    bf16_compress_hook,
    bf16_compress_wrapper,
    fp16_compress_hook,
    fp16_compress_wrapper,
    noop_hook,
)
from hpcdist.parallel.comm_hooks.optimizer import (
    OptimizerHookState,
    OptimizerInBackward,
    hook_then_optimizer,
    optimizer_in_backward_hook,
)
from hpcdist.parallel.comm_hooks.post_local_sgd import PostLocalSGDState, post_localSGD_hook
from hpcdist.parallel.comm_hooks.powersgd import batched_powerSGD_hook, powerSGD_hook
from hpcdist.parallel.comm_hooks.powersgd_state import PowerSGDState
from hpcdist.parallel.comm_hooks.quantization import (
    quantization_perchannel_hook,
    quantization_pertensor_hook,
)
from hpcdist.parallel.comm_hooks.register import DDPCommHookType, register_ddp_comm_hook
from hpcdist.parallel.comm_hooks.zero import (
    hook_with_zero_step,
    hook_with_zero_step_interleaved,
)

__all__ = [
    "DDPCommHookType",
    "OptimizerHookState",
    "OptimizerInBackward",
    "PostLocalSGDState",
    "PowerSGDState",
    "allreduce_hook",
    "batched_powerSGD_hook",
    "bf16_compress_hook",
    "bf16_compress_wrapper",
    "fp16_compress_hook",
    "fp16_compress_wrapper",
    "hook_then_optimizer",
    "hook_with_zero_step",
    "hook_with_zero_step_interleaved",
    "noop_hook",
    "optimizer_in_backward_hook",
    "post_localSGD_hook",
    "powerSGD_hook",
    "quantization_perchannel_hook",
    "quantization_pertensor_hook",
    "register_ddp_comm_hook",
]
