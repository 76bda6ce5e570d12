"""What torch's C++ does for functional collectives, and not for groups written in Python."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

from hpcdist.torch.compat import version

_NAME = "all_gather_into_tensor_out"
#: Keeps the registration; dropped, it would end.
_library: Any = None


def register() -> None:
    """Let ``torch.ops._c10d_functional.all_gather_into_tensor_out`` call the group's method.

    Once is enough. From torch 2.14 on it does so by itself.
    """
    global _library
    if _library is None and version() < (2, 14):
        _library = torch.library.Library("_c10d_functional", "IMPL")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the override of torch's kernel is intended
            _library.impl(_NAME, _all_gather, "CompositeExplicitAutograd", allow_override=True)


def keep_for_graphs(work: Any) -> None:
    """Let ``wait_tensor`` of an operation's tensors wait for it, where the program says so.

    It does under ``allow_inflight_collective_as_graph_input_ctx``: what begins outside of a
    compiled function is waited for inside.

    Parameters
    ----------
    work : BridgeWork
        Begun in this process.
    """
    if c10d._allow_inflight_collective_as_graph_input():
        for tensor in work.result():
            c10d._register_work(tensor, work)


def _all_gather(input: Any, group_size: int, group_name: str, *, out: Any) -> Any:
    """What torch's own kernel does, for groups of any backend."""
    group = c10d._resolve_process_group(group_name)  # type: ignore[arg-type]
    to, own = (torch.view_as_real(t) if t.is_complex() else t for t in (out, input))
    work = group._allgather_base(to, own, c10d.AllgatherOptions())
    c10d._register_work(out, work)
    return out
