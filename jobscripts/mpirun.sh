#!/usr/bin/env bash
# Start a program on one node, or on the nodes of a host file, with mpirun; cores are shared out
# between the ranks. Settings come from the environment:
#
#   jobscripts/mpirun.sh python examples/train_digits.py
#   HOSTS=hosts.txt RANKS_PER_NODE=4 CORES_PER_RANK=8 jobscripts/mpirun.sh python train.py
#
# HOSTS            a file with one host name per line; without it, this node only
# RANKS_PER_NODE   default 2
# CORES_PER_RANK   default: the node's cores divided by RANKS_PER_NODE
set -euo pipefail

ranks_per_node=${RANKS_PER_NODE:-2}
cores=$(nproc)
cores_per_rank=${CORES_PER_RANK:-$((cores > ranks_per_node ? cores / ranks_per_node : 1))}
nodes=1
if [[ -n ${HOSTS:-} ]]; then
    nodes=$(grep -cvE '^[[:space:]]*(#|$)' "$HOSTS")
fi
ranks=$((nodes * ranks_per_node))

# One core of each rank is left to hpcdist, which moves data while the program computes.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores_per_rank > 1 ? cores_per_rank - 1 : 1))}

# InfiniBand wants memory that the system may not move; too little of it makes the start fail.
if [[ $(ulimit -l) != unlimited && -d /sys/class/infiniband ]]; then
    echo "mpirun.sh: ulimit -l is $(ulimit -l) kB; ask for unlimited locked memory" >&2
fi

if mpirun --version 2>&1 | grep -qi hydra; then
    # MPICH and its relatives pass the whole environment on.
    arguments=(-n "$ranks" -ppn "$ranks_per_node" -bind-to "core:$cores_per_rank")
    [[ -z ${HOSTS:-} ]] || arguments+=(-f "$HOSTS")
else
    # Without these, Open MPI gives a rank one core if there are two ranks, and none of its own if
    # there are more.
    arguments=(-n "$ranks" --map-by "ppr:$ranks_per_node:node:PE=$cores_per_rank" --bind-to core)
    arguments+=(-x OMP_NUM_THREADS)
    # UCX moves data over InfiniBand; asking for it here turns a silent fall-back to TCP into an
    # error. Where there is no such device Open MPI chooses for itself.
    [[ ! -d /sys/class/infiniband ]] || arguments+=(--mca pml ucx)
    [[ -z ${HOSTS:-} ]] || arguments+=(--hostfile "$HOSTS")
fi
exec mpirun "${arguments[@]}" "$@"
