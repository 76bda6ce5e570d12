"""Methods of torch's groups that hpcdist does not support: they raise a clear error."""

from __future__ import annotations

from typing import Any, NoReturn

__all__ = ["Refusals"]


def _refuse(what: str, instead: str) -> Any:
    def method(self: Any, *args: Any, **arguments: Any) -> NoReturn:
        raise NotImplementedError(f"groups of the backend 'hpcdist' {what}: {instead}")

    return method


_no_growth = _refuse(
    "do not grow",
    "start the job with all its ranks, and make groups of them by torch.distributed.new_group",
)
_no_change = _refuse(
    "cannot be reconfigured", "destroy the group and make another by torch.distributed.new_group"
)
_no_window = _refuse("have no windows", "use send and recv, or MPI's own windows through mpi4py")
_no_hook = _refuse(
    "call no hooks",
    "their operations do not pass through torch's dispatcher, so a hook would never run; "
    "torch.profiler and hpcdist.torch.dump_flight_recorder show the operations",
)


class Refusals:
    """The methods that a group refuses, under the names of all versions of torch.

    A base of `BridgeGroup`, in front of torch's own class. Without it torch 2.14 and newer would
    answer with errors about backends that a group written in Python does not have.
    """

    supports_reconfigure = False
    supports_window = False
    supports_completion_hooks = False

    merge_remote_group = mergeRemoteGroup = _no_growth
    reconfigure = get_reconfigure_handle = _no_change
    new_window = _no_window
    register_pre_hook = register_post_hook = _no_hook
    _register_on_completion_hook = _no_hook

    def unregister_pre_hook(self, hook_id: int) -> None:
        """Do nothing: no hook is registered."""

    unregister_post_hook = unregister_pre_hook
