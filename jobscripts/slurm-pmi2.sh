#!/usr/bin/env bash
#SBATCH --job-name=hpcdist
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=00:30:00
#SBATCH --output=%x-%j.out
#
# MPICH or Intel MPI under srun: sbatch jobscripts/slurm-pmi2.sh python examples/train_digits.py
# With --mpi=none every rank would be a world of one; with pmix MPICH stops in MPI_Init.
set -euo pipefail
cores_per_rank=${SLURM_CPUS_PER_TASK:-1}
# shellcheck source=jobscripts/env/ethernet.sh
source "jobscripts/env/${FABRIC:-ethernet}.sh"

# Intel MPI speaks to Slurm through Slurm's own library, and does not look for it.
if [[ -n ${I_MPI_ROOT:-} && -z ${I_MPI_PMI_LIBRARY:-} ]]; then
    I_MPI_PMI_LIBRARY=$(ldconfig -p | awk '/libpmi2\.so\.0/ { print $NF; exit }')
    export I_MPI_PMI_LIBRARY
fi
exec srun --mpi=pmi2 --cpus-per-task="$cores_per_rank" --cpu-bind=cores --kill-on-bad-exit=1 "$@"
