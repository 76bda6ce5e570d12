# shellcheck shell=bash
# Settings of a job on InfiniBand (also RoCE). A job script sources this once, before it starts ranks:
#     cores_per_rank=8; source jobscripts/env/infiniband.sh
# Settings of the caller are kept. Ends the job if the fabric is not usable: a job
# that falls back to TCP computes for hours before somebody notices.
sysfs=${SYSFS:-/sys} # another folder for tests
cores_per_rank=${cores_per_rank:-1}

# An active port must be there. Check: ibstat, or cat /sys/class/infiniband/*/ports/*/state
if ! grep -qs ACTIVE "$sysfs"/class/infiniband/*/ports/*/state; then
    echo "infiniband.sh: no active InfiniBand port on $(hostname). On another fabric use" \
        "FABRIC=ethernet; else ask for nodes that have one." >&2
    exit 1
fi

# --- locked memory ---
# The adapter reads and writes memory that the system must not move, so it is locked; under a limit
# the start fails, or large messages do. Batch systems have limits of their own: Slurm passes on
# those of the shell that submits (PropagateResourceLimitsExcept=MEMLOCK in slurm.conf ends that).
# Check inside the job: srun bash -c 'ulimit -l' says unlimited everywhere.
ulimit -l unlimited 2>/dev/null || true
if [[ $(ulimit -l) != unlimited ]]; then
    echo "infiniband.sh: ulimit -l is $(ulimit -l) kB on $(hostname), it should be unlimited" >&2
fi

# --- Open MPI ---
# UCX moves the data. Asking for it by name turns a silent fall-back to TCP into an error.
# Check: OMPI_MCA_pml_base_verbose=10 says which one was selected.
export OMPI_MCA_pml=${OMPI_MCA_pml:-ucx}
# One-sided operations over UCX as well.
export OMPI_MCA_osc=${OMPI_MCA_osc:-ucx}

# --- UCX (Open MPI, and MPICH built with it) ---
# UCX takes the adapter nearest to a rank's cores by itself, if the rank is bound (below). Name one
# only where that goes wrong: UCX_NET_DEVICES=mlx5_0:1. Check: ucx_info -d | grep Device, and
# UCX_LOG_LEVEL=info prints which device each connection uses.
# Large messages go over all adapters of a node unless told otherwise: with one for each rank the
# ranks would get into each other's way.
export UCX_MAX_RNDV_RAILS=${UCX_MAX_RNDV_RAILS:-1}
# Nothing else: UCX's defaults are good, and UCX_MEM_MMAP_HOOK_MODE=none gives wrong results with
# memory that is freed and mapped again.

# --- fork ---
# After a fork, parent and child share locked pages until one of them writes; the adapter may then
# read the wrong copy. These make libibverbs mark the pages. They help; they do not make forks safe:
# start DataLoader workers with multiprocessing_context="forkserver", before init_process_group.
export RDMAV_FORK_SAFE=${RDMAV_FORK_SAFE:-1} IBV_FORK_SAFE=${IBV_FORK_SAFE:-1}

# --- NCCL ---
# Its adapters: all that begin so, and no others (a node may have an Ethernet port called mlx5 too:
# then list them, NCCL_IB_HCA==mlx5_0,mlx5_1). Check: NCCL_DEBUG=INFO prints "NET/IB : Using".
export NCCL_IB_HCA=${NCCL_IB_HCA:-mlx5}
# GPU and adapter talk directly if they hang on the same PCIe bridge or CPU (PHB). Check:
# nvidia-smi topo -m, and NCCL_DEBUG=INFO prints "GDRDMA" behind a channel.
export NCCL_NET_GDR_LEVEL=${NCCL_NET_GDR_LEVEL:-PHB}
# For first contact NCCL needs an interface with an address. Not loopback, nor a container's bridge.
export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-^lo,docker,virbr}

# --- threads ---
# One core of each rank is left to hpcdist, which moves data while the program computes.
# Check: python -c 'import torch; print(torch.get_num_threads())' in a rank.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores_per_rank > 1 ? cores_per_rank - 1 : 1))}

# --- binding ---
# That the ranks keep to their cores is the launcher's job, so the job scripts have the options; this
# keeps OpenMP from binding its threads once more, all ranks' to the first cores.
# Check: srun bash -c 'taskset -cp $$' shows cores_per_rank cores, different for each rank.
export OMP_PROC_BIND=${OMP_PROC_BIND:-false}
