#!/usr/bin/env bash
# Start a program on one node, or on the nodes of a host file, with mpirun; cores are shared out
# between the ranks. Settings come from the environment:
#
#   jobscripts/mpirun.sh python examples/train_digits.py
#   HOSTS=hosts.txt RANKS_PER_NODE=4 CORES_PER_RANK=8 jobscripts/mpirun.sh python train.py
#
# HOSTS            a file with one host name per line; without it, this node only
# RANKS_PER_NODE   default 2
# CORES_PER_RANK   physical ones, not hardware threads; default: the node's, as many as Open MPI
#                  takes for its slots, divided by RANKS_PER_NODE
# FABRIC           infiniband or ethernet; default: infiniband where a port is active
set -euo pipefail

ranks_per_node=${RANKS_PER_NODE:-2}
# A core counts once for all of its hardware threads, where this shell may use one of them. nproc
# counts the threads, and believes OMP_NUM_THREADS.
allowed=$(sed -n 's/^Cpus_allowed_list:[[:space:]]*//p' /proc/self/status)
threads=0
siblings=()
for range in ${allowed//,/ }; do
    for ((cpu = ${range%-*}; cpu <= ${range#*-}; cpu++)); do
        threads=$((threads + 1))
        topology=/sys/devices/system/cpu/cpu$cpu/topology
        read -r same 2>/dev/null <"$topology/thread_siblings_list" || same=$cpu
        siblings+=("$same")
    done
done
cores=$(printf '%s\n' "${siblings[@]}" | sort -u | wc -l)
cores_per_rank=${CORES_PER_RANK:-$((cores > ranks_per_node ? cores / ranks_per_node : 1))}
nodes=1
if [[ -n ${HOSTS:-} ]]; then
    nodes=$(grep -cvE '^[[:space:]]*(#|$)' "$HOSTS")
fi
ranks=$((nodes * ranks_per_node))

here=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
fabric=ethernet
if grep -qs ACTIVE /sys/class/infiniband/*/ports/*/state; then fabric=infiniband; fi
settings=$here/env/${FABRIC:-$fabric}.sh
if [[ ! -r $settings ]]; then
    echo "mpirun.sh: there is no $settings: copy the folder jobscripts/env beside this script" >&2
    exit 1
fi
# shellcheck source=jobscripts/env/infiniband.sh
source "$settings"

# Not by a pipe into grep -q, which ends it early: with pipefail that counts as a failure.
version=$(mpirun --version 2>&1 || true)
if grep -qi hydra <<<"$version"; then
    # MPICH and its relatives pass the whole environment on.
    arguments=(-n "$ranks" -ppn "$ranks_per_node" -bind-to "core:$cores_per_rank")
    [[ -z ${HOSTS:-} ]] || arguments+=(-f "$HOSTS")
elif grep -q 'Intel(R) MPI' <<<"$version"; then
    # The same, but Intel MPI binds by a variable, to hardware threads. Check: I_MPI_DEBUG=4 prints
    # those of each rank.
    export I_MPI_PIN_DOMAIN=${I_MPI_PIN_DOMAIN:-$((cores_per_rank * threads / cores)):compact}
    arguments=(-n "$ranks" -ppn "$ranks_per_node")
    [[ -z ${HOSTS:-} ]] || arguments+=(-f "$HOSTS")
else
    # Without these, Open MPI gives a rank one core if there are two ranks, and none of its own if
    # there are more.
    arguments=(-n "$ranks" --map-by "ppr:$ranks_per_node:node:PE=$cores_per_rank" --bind-to core)
    # Open MPI passes on its own settings only; the others must be named.
    sent='^((OMP|UCX|NCCL|RDMAV|IBV|HPCDIST|TORCH)_|PYTHONPATH$)'
    for name in $(compgen -e | grep -E "$sent" | sort); do
        [[ $name == HPCDIST_STORE_KEY ]] || arguments+=(-x "$name")
    done
    [[ -z ${HOSTS:-} ]] || arguments+=(--hostfile "$HOSTS")
fi
exec mpirun "${arguments[@]}" "$@"
