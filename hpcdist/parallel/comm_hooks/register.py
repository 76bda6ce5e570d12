"""Hooks by name."""

from __future__ import annotations

import enum
from typing import Any

from hpcdist.parallel.comm_hooks import default, powersgd, quantization
from hpcdist.parallel.comm_hooks.powersgd_state import PowerSGDState


class DDPCommHookType(enum.Enum):
    """The hooks that need no more than a group.

    Notes
    -----
    The names ending in RANK2 use approximations of rank 2. Source:
    ``torch.distributed.algorithms.ddp_comm_hooks.DDPCommHookType``.
    """

    ALLREDUCE = "allreduce"
    FP16_COMPRESS = "fp16_compress"
    BF16_COMPRESS = "bf16_compress"
    QUANTIZE_PER_TENSOR = "quantize_per_tensor"
    QUANTIZE_PER_CHANNEL = "quantize_per_channel"
    POWER_SGD = "power_sgd"
    POWER_SGD_RANK2 = "power_sgd_rank2"
    BATCHED_POWER_SGD = "batched_power_sgd"
    BATCHED_POWER_SGD_RANK2 = "batched_power_sgd_rank2"
    NOOP = "noop"


_HOOKS: dict[DDPCommHookType, tuple[default.Hook, int | None]] = {
    DDPCommHookType.ALLREDUCE: (default.allreduce_hook, None),
    DDPCommHookType.FP16_COMPRESS: (default.fp16_compress_hook, None),
    DDPCommHookType.BF16_COMPRESS: (default.bf16_compress_hook, None),
    DDPCommHookType.QUANTIZE_PER_TENSOR: (quantization.quantization_pertensor_hook, None),
    DDPCommHookType.QUANTIZE_PER_CHANNEL: (quantization.quantization_perchannel_hook, None),
    DDPCommHookType.POWER_SGD: (powersgd.powerSGD_hook, 1),
    DDPCommHookType.POWER_SGD_RANK2: (powersgd.powerSGD_hook, 2),
    DDPCommHookType.BATCHED_POWER_SGD: (powersgd.batched_powerSGD_hook, 1),
    DDPCommHookType.BATCHED_POWER_SGD_RANK2: (powersgd.batched_powerSGD_hook, 2),
    DDPCommHookType.NOOP: (default.noop_hook, None),
}


def register_ddp_comm_hook(
    comm_hook_type: DDPCommHookType | str, model: Any, state: Any = None
) -> None:
    """Register one of hpcdist's hooks with a DDP model.

    All ranks must register the same hook.

    Parameters
    ----------
    comm_hook_type : DDPCommHookType or str
        Which; a member, or its value.
    model : DistributedDataParallel
        Before its first backward pass.
    state : ProcessGroup, optional
        Between whose ranks. None means the default group.

    Raises
    ------
    ValueError
        If there is no such hook.

    Notes
    -----
    Source: ``torch.distributed.algorithms.ddp_comm_hooks.register_ddp_comm_hook``.
    """
    hook, rank = _HOOKS[DDPCommHookType(comm_hook_type)]
    if rank is not None:
        state = PowerSGDState(state, matrix_approximation_rank=rank)
    model.register_comm_hook(state, hook)
