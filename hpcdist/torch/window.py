"""Windows of groups of stock torch.distributed."""

# the handles are torch's, which are not hpcdist's
# mypy: disable-error-code="override"

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import ReduceOp, Work

from hpcdist.groups.window import Window
from hpcdist.groups.window_options import PutOptions
from hpcdist.torch.arguments import op_of
from hpcdist.torch.work import BridgeWork, limit_of


class BridgeWindow(Window):
    """A :class:`hpcdist.Window` that takes torch's options, and returns torch's handles.

    Parameters
    ----------
    group : hpcdist.ProcessGroup
        The group; this process is a member.

    Notes
    -----
    Source: ``Window`` of torch 2.15, which has neither ``get`` nor ``accumulate``. This is no
    instance of it: torch's class has no constructor in Python.
    """

    # What they do and raise, the methods that they call say.

    def put(
        self,
        tensor: torch.Tensor,
        dst_rank: int,
        target_offset_nelems: int = 0,
        async_op: bool = False,
        opts: Any = None,
    ) -> Work:
        """Write a tensor into a rank's window memory."""
        return BridgeWork(
            super().put(tensor, dst_rank, target_offset_nelems, async_op, _plain(opts)), [tensor]
        )

    def get(
        self,
        tensor: torch.Tensor,
        src_rank: int,
        target_offset_nelems: int = 0,
        async_op: bool = False,
        opts: Any = None,
    ) -> Work:
        """Read from a rank's window memory into a tensor."""
        return BridgeWork(
            super().get(tensor, src_rank, target_offset_nelems, async_op, _plain(opts)), [tensor]
        )

    def accumulate(
        self,
        tensor: torch.Tensor,
        dst_rank: int,
        target_offset_nelems: int = 0,
        async_op: bool = False,
        op: Any = ReduceOp.SUM,
        opts: Any = None,
    ) -> Work:
        """Combine a tensor with a rank's window memory, in place there."""
        work = super().accumulate(
            tensor, dst_rank, target_offset_nelems, async_op, op_of(op), _plain(opts)
        )
        return BridgeWork(work, [tensor])

    def signal(self, peer_rank: int, async_op: bool = False, opts: Any = None) -> Work:
        """Signal a rank."""
        return BridgeWork(super().signal(peer_rank, async_op, _plain(opts)), [])

    def wait_signal(self, peer_rank: int, async_op: bool = False, opts: Any = None) -> Work:
        """Wait for one signal of a rank."""
        return BridgeWork(super().wait_signal(peer_rank, async_op, _plain(opts)), [])


def _plain(opts: Any) -> Any:
    """Return torch's options as hpcdist's: torch writes "no timeout" as a negative one."""
    if opts is None or isinstance(opts, PutOptions) or not hasattr(opts, "timeout"):
        return opts
    return PutOptions(limit_of(opts.timeout))
