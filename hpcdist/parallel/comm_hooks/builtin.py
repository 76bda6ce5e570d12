"""The two hooks that torch implements in C++, under torch's name for the choice."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

from hpcdist.parallel.comm_hooks.default import allreduce_hook, fp16_compress_hook


class BuiltinCommHookType(enum.Enum):
    """Hooks for ``DistributedDataParallel._register_builtin_comm_hook``.

    Parameters
    ----------
    value : int
        A member's number, as in torch.

    Notes
    -----
    Source: ``torch.distributed.BuiltinCommHookType``.
    """

    ALLREDUCE = 1
    FP16_COMPRESS = 2


def builtin(kind: Any) -> Callable[[Any, Any], Any]:
    """Return the hook of a member, also of torch's class."""
    name = getattr(kind, "name", None)
    if name not in BuiltinCommHookType.__members__:
        raise TypeError(f"comm_hook_type must be a BuiltinCommHookType, not {kind!r}")
    return allreduce_hook if name == "ALLREDUCE" else fp16_compress_hook
