"""The settings of NCCL and of CUDA tensors over MPI; config.py has the others."""

from __future__ import annotations

from hpcdist._option import Option

DEVICE_OPTIONS = (
    Option(
        "nccl_library",
        "str",
        "",
        "Path of the libnccl.so.2 to use. Unset: one that is loaded already, else that of an "
        "installed wheel nvidia-nccl-*, else the system's.",
    ),
    Option(
        "nccl_blocking",
        "bool",
        True,
        "Make communicators of NCCL that block while they start an operation. 0 makes them return "
        "before that, at the price of a thread of NCCL for each operation.",
    ),
    Option(
        "nccl_blocking_wait",
        "bool",
        False,
        "Let synchronous operations over NCCL, and wait() of asynchronous ones, wait on the host "
        "until they are done, and raise there. By default they wait on the stream, and an error is "
        "raised by the next operation. Read when a group is made.",
        aliases=("TORCH_NCCL_BLOCKING_WAIT",),
    ),
    Option(
        "nccl_split",
        "bool",
        True,
        "Make the communicators of groups that divide another one by ncclCommSplit. 0 makes each "
        "of them separately, at its first operation. Give it to all ranks.",
    ),
    Option(
        "nccl_ranks_per_root",
        "int",
        128,
        "Ranks of a new communicator that meet at one of them, with NCCL 2.23 and newer: larger "
        "groups get several such meeting points. Give it to all ranks.",
        minimum=1,
        maximum=10**9,
        aliases=("TORCH_NCCL_RANKS_PER_ROOT",),
    ),
    Option(
        "nccl_high_priority",
        "bool",
        True,
        "Run asynchronous operations over NCCL on a stream of high priority.",
        aliases=("TORCH_NCCL_HIGH_PRIORITY",),
    ),
    Option(
        "nccl_check",
        "bool",
        False,
        "Compare over MPI, before each collective of NCCL, what the ranks called, as groups over "
        "MPI do. Needs a group with both: cpu:mpi,cuda:nccl.",
    ),
    Option(
        "cuda_aware",
        "choice",
        "auto",
        "Whether MPI is given the addresses of CUDA tensors: 'yes', 'no', or 'auto', as the "
        "library says (MPIX_Query_cuda_support, MPIX_GPU_query_support, mpi_memory_alloc_kinds, or "
        "Cray's MPICH_GPU_SUPPORT_ENABLED=1); one that says nothing is given none. Give it to all "
        "ranks.",
        choices=("auto", "yes", "no"),
    ),
    Option(
        "cuda_chunk",
        "bytes",
        4 << 20,
        "Bytes of one of the pinned buffers through which CUDA tensors go over MPI; four for each "
        "stream that is used. Give it to all ranks.",
        minimum=1024,
        maximum=1 << 40,
    ),
)
