"""torch.distributed, rebuilt MPI-first for HPC clusters.

``import hpcdist as dist`` gives the names, signatures and semantics of ``torch.distributed`` under
``mpirun`` and ``srun``, with no rebuild of torch. Importing it starts neither MPI nor torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpcdist import _loader

# before any native module: they link to the MPI library that mpi4py would load
_loader.preload()

from hpcdist import group  # noqa: E402
from hpcdist._engine import Work  # noqa: E402
from hpcdist._ops import ReduceOp  # noqa: E402
from hpcdist.backends.mpi import MPIOptions  # noqa: E402
from hpcdist.backends.nccl import NCCLOptions  # noqa: E402
from hpcdist.backends.registry import Backend, BackendConfig  # noqa: E402
from hpcdist.codec import CodecError, allow_pickle, register_object_type  # noqa: E402
from hpcdist.collectives.all_to_all import all_to_all, all_to_all_single  # noqa: E402
from hpcdist.collectives.barrier import barrier  # noqa: E402
from hpcdist.collectives.broadcast import broadcast  # noqa: E402
from hpcdist.collectives.coalescing import (  # noqa: E402, F401
    _coalescing_manager,
    _CoalescingManager,
)
from hpcdist.collectives.deprecated import _make_nccl_premul_sum, reduce_op  # noqa: E402, F401
from hpcdist.collectives.gather import (  # noqa: E402
    all_gather,
    all_gather_coalesced,
    all_gather_into_tensor,
    all_gather_single,
    gather,
    gather_into_tensor,
    gather_single,
)
from hpcdist.collectives.monitored_barrier import monitored_barrier  # noqa: E402
from hpcdist.collectives.objects import (  # noqa: E402
    all_gather_object,
    broadcast_object_list,
    gather_object,
    recv_object_list,
    scatter_object_list,
    send_object_list,
)
from hpcdist.collectives.p2p import P2POp, batch_isend_irecv, irecv, isend, recv, send  # noqa: E402
from hpcdist.collectives.reduce import (  # noqa: E402
    all_reduce,
    all_reduce_coalesced,
    reduce,
    reduce_scatter,
    reduce_scatter_single,
    reduce_scatter_tensor,
)
from hpcdist.collectives.scatter import scatter  # noqa: E402
from hpcdist.collectives.symmetric import empty, full, is_symmetric, zeros  # noqa: E402
from hpcdist.debug import (  # noqa: E402
    DebugLevel,
    breakpoint,
    get_debug_level,
    set_debug_level,
    set_debug_level_from_env,
)
from hpcdist.debug.profiling import record_comm  # noqa: E402
from hpcdist.debug.versions import show_versions  # noqa: E402
from hpcdist.errors import (  # noqa: E402
    DistBackendError,
    DistError,
    DistMismatchError,
    DistNaNError,
    DistNetworkError,
    DistStoreError,
    DistTimeoutError,
    QueueEmptyError,
    RankFailedError,
)
from hpcdist.groups.c10d import (  # noqa: E402
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)
from hpcdist.groups.new_group import new_group  # noqa: E402
from hpcdist.groups.queries import (  # noqa: E402
    get_backend,
    get_backend_config,
    get_backend_impl,
    get_default_backend_for_device,
    get_node_local_rank,
    get_pg_count,
    is_available,
    is_backend_available,
    is_gloo_available,
    is_mpi_available,
    is_nccl_available,
    is_torchelastic_launched,
    is_ucc_available,
    is_xccl_available,
    supports_complex,
)
from hpcdist.groups.shrink import shrink_group  # noqa: E402
from hpcdist.groups.state import (  # noqa: E402
    GroupMember,
    GroupName,
    ProcessGroup,
    get_global_rank,
    get_group_rank,
    get_process_group_ranks,
    get_rank,
    get_world_size,
    is_initialized,
)
from hpcdist.groups.subgroups import (  # noqa: E402
    new_subgroups,
    new_subgroups_by_enumeration,
    split_group,
)
from hpcdist.groups.timeouts import set_timeout  # noqa: E402
from hpcdist.groups.windows.options import (  # noqa: E402
    PutOptions,
    SignalOptions,
    WaitSignalOptions,
    WindowAccessType,
    WindowAttr,
)
from hpcdist.groups.windows.window import Window  # noqa: E402
from hpcdist.mesh.device_mesh import DeviceMesh  # noqa: E402
from hpcdist.mesh.init import init_device_mesh  # noqa: E402
from hpcdist.rendezvous import register_rendezvous_handler, rendezvous  # noqa: E402
from hpcdist.startup.destroy import destroy_process_group  # noqa: E402
from hpcdist.startup.init import init_process_group  # noqa: E402
from hpcdist.startup.spawn import spawn  # noqa: E402
from hpcdist.store import FileStore, HashStore, PrefixStore, Store, TCPStore  # noqa: E402

if TYPE_CHECKING:
    __version__: str
    from hpcdist.data import DistributedSampler
    from hpcdist.parallel import (
        BuiltinCommHookType,
        DistributedDataParallel,
        GradBucket,
        Logger,
        Reducer,  # noqa: F401
    )

__all__ = [
    "AllToAllOptions",
    "AllreduceCoalescedOptions",
    "AllreduceOptions",
    "Backend",
    "BackendConfig",
    "BarrierOptions",
    "BroadcastOptions",
    "BuiltinCommHookType",
    "CodecError",
    "DebugLevel",
    "DeviceMesh",
    "DistBackendError",
    "DistError",
    "DistMismatchError",
    "DistNaNError",
    "DistNetworkError",
    "DistStoreError",
    "DistTimeoutError",
    "DistributedDataParallel",
    "DistributedSampler",
    "FileStore",
    "GatherOptions",
    "GradBucket",
    "GroupMember",
    "GroupName",
    "HashStore",
    "Logger",
    "MPIOptions",
    "NCCLOptions",
    "P2POp",
    "PrefixStore",
    "ProcessGroup",
    "PutOptions",
    "QueueEmptyError",
    "RankFailedError",
    "ReduceOp",
    "ReduceOptions",
    "ReduceScatterOptions",
    "ScatterOptions",
    "SignalOptions",
    "Store",
    "TCPStore",
    "WaitSignalOptions",
    "Window",
    "WindowAccessType",
    "WindowAttr",
    "Work",
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_gather_single",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "allow_pickle",
    "barrier",
    "batch_isend_irecv",
    "breakpoint",
    "broadcast",
    "broadcast_object_list",
    "destroy_process_group",
    "empty",
    "full",
    "gather",
    "gather_into_tensor",
    "gather_object",
    "gather_single",
    "get_backend",
    "get_backend_config",
    "get_backend_impl",
    "get_debug_level",
    "get_default_backend_for_device",
    "get_global_rank",
    "get_group_rank",
    "get_node_local_rank",
    "get_pg_count",
    "get_process_group_ranks",
    "get_rank",
    "get_world_size",
    "group",
    "init_device_mesh",
    "init_process_group",
    "irecv",
    "is_available",
    "is_backend_available",
    "is_gloo_available",
    "is_initialized",
    "is_mpi_available",
    "is_nccl_available",
    "is_symmetric",
    "is_torchelastic_launched",
    "is_ucc_available",
    "is_xccl_available",
    "isend",
    "monitored_barrier",
    "new_group",
    "new_subgroups",
    "new_subgroups_by_enumeration",
    "record_comm",
    "recv",
    "recv_object_list",
    "reduce",
    "reduce_op",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "register_object_type",
    "register_rendezvous_handler",
    "rendezvous",
    "scatter",
    "scatter_object_list",
    "send",
    "send_object_list",
    "set_debug_level",
    "set_debug_level_from_env",
    "set_timeout",
    "show_versions",
    "shrink_group",
    "spawn",
    "split_group",
    "supports_complex",
    "zeros",
]

# These are classes derived from torch's: importing them imports torch.
_NEEDS_TORCH = {
    "DistributedDataParallel": "hpcdist.parallel",
    "DistributedSampler": "hpcdist.data",
    "GradBucket": "hpcdist.parallel",
    "BuiltinCommHookType": "hpcdist.parallel",
    "Logger": "hpcdist.parallel",
    "Reducer": "hpcdist.parallel",
}

# torch.distributed has these modules as attributes, without an import of their own.
_MODULES = ("algorithms", "device_mesh", "distributed_c10d", "nn", "optim")

# Hidden from type checkers: to them a module with __getattr__ has every name.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        from importlib import import_module

        if name in _MODULES:
            return import_module(f"hpcdist.{name}")
        if name in _NEEDS_TORCH:
            value = globals()[name] = getattr(import_module(_NEEDS_TORCH[name]), name)
            return value
        if name == "__version__":
            from hpcdist.debug.versions import version_of

            return version_of("hpcdist")
        raise AttributeError(f"module 'hpcdist' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
