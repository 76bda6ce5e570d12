#!/usr/bin/env bash
#PBS -N hpcdist
#PBS -l select=2:ncpus=32:mpiprocs=4:ompthreads=7
#PBS -l walltime=00:30:00
#PBS -j oe
#
# Ranks on CPUs under PBS, from the folder that contains jobscripts/:
#   qsub -v PROGRAM="python examples/train_digits.py" jobscripts/pbs.sh
# In the select line: nodes, cores of a node, ranks per node, and threads per rank. Threads are one
# fewer than a rank's cores (32 / 4 - 1): hpcdist moves data on the last one.
set -euo pipefail
cd "$PBS_O_WORKDIR"
read -r -a program <<<"${PROGRAM:-python examples/train_digits.py}"

# PBS lists a node once for each of its ranks.
ranks=$(wc -l <"$PBS_NODEFILE")
nodes=$(sort -u "$PBS_NODEFILE" | wc -l)
ranks_per_node=$((ranks / nodes))
cores_per_rank=$((${OMP_NUM_THREADS:-7} + 1)) # PBS sets it from ompthreads
settings=env/${FABRIC:-infiniband}.sh
for folder in jobscripts . "$(dirname "$0")" ""; do
    if [[ -r $folder/$settings ]]; then break; fi
done
if [[ -z $folder ]]; then
    echo "pbs.sh: $settings is neither in $PWD/jobscripts nor in $PWD. Copy the folder" \
        "jobscripts/env there as well, or submit from the folder that contains jobscripts/." >&2
    exit 1
fi
# shellcheck source=jobscripts/env/infiniband.sh
source "$folder/$settings"

options=$(mpiexec --help 2>&1 || true) # a pipe into grep -q would end it early, a failure for pipefail
if grep -q -- --cpu-bind <<<"$options"; then
    # PALS, on Cray EX: --depth is what a rank has to itself.
    exec mpiexec -n "$ranks" --ppn "$ranks_per_node" --depth "$cores_per_rank" \
        --cpu-bind depth "${program[@]}"
fi
# Elsewhere the MPI's own mpirun, with the nodes that PBS gave.
hosts=$(mktemp)
trap 'rm -f "$hosts"' EXIT
sort -u "$PBS_NODEFILE" >"$hosts"
HOSTS="$hosts" RANKS_PER_NODE="$ranks_per_node" CORES_PER_RANK="$cores_per_rank" \
    bash "$folder/mpirun.sh" "${program[@]}"
