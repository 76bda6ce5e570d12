"""The names of ``torch.distributed.algorithms.ddp_comm_hooks.quantization_hooks``."""

from hpcdist.parallel.comm_hooks.quantization import (
    quantization_perchannel_hook,
    quantization_pertensor_hook,
)

__all__ = ["quantization_perchannel_hook", "quantization_pertensor_hook"]
