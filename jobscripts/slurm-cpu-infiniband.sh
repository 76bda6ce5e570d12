#!/usr/bin/env bash
#SBATCH --job-name=hpcdist
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=00:30:00
#SBATCH --output=%x-%j.out
#
# Ranks on CPUs with InfiniBand, from the folder that contains jobscripts/:
#   sbatch jobscripts/slurm-cpu-infiniband.sh python examples/train_digits.py
# Nodes times tasks is the number of ranks; tasks times cpus should fill a node. One rank for each
# NUMA domain (lscpu shows them) is a good start.
set -euo pipefail
cores_per_rank=${SLURM_CPUS_PER_TASK:-1}
settings=env/${FABRIC:-infiniband}.sh
for folder in jobscripts . "$(dirname "$0")" ""; do
    if [[ -r $folder/$settings ]]; then break; fi
done
if [[ -z $folder ]]; then
    echo "slurm-cpu-infiniband.sh: $settings is neither in $PWD/jobscripts nor in $PWD. Copy the folder" \
        "jobscripts/env there as well, or submit from the folder that contains jobscripts/." >&2
    exit 1
fi
# shellcheck source=jobscripts/env/infiniband.sh
source "$folder/$settings"

# The plugin must be the MPI's: with the wrong one every rank is alone, and hpcdist raises an error.
mpi=pmix
version=$(mpirun --version 2>&1 || true) # a pipe into grep -q would end it early, a failure for pipefail
if grep -qi hydra <<<"$version"; then mpi=pmi2; fi

# --cpus-per-task is repeated: since Slurm 22.05 srun does not take it from sbatch, and each rank
# would get one core. --kill-on-bad-exit: a rank that dies ends the step, also where nobody is left
# on its node who could notice.
exec srun --mpi="$mpi" --cpus-per-task="$cores_per_rank" --cpu-bind=cores \
    --distribution=block:block --kill-on-bad-exit=1 "$@"
