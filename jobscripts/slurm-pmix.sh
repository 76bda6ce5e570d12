#!/usr/bin/env bash
#SBATCH --job-name=hpcdist
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=00:30:00
#SBATCH --output=%x-%j.out
#
# Open MPI under srun: sbatch jobscripts/slurm-pmix.sh python examples/train_digits.py
# Slurm must have the plugin (srun --mpi=list names pmix), and Open MPI 5 always speaks it. With
# --mpi=pmi2 or none every rank would be a world of one; hpcdist raises and names the right one.
set -euo pipefail
cores_per_rank=${SLURM_CPUS_PER_TASK:-1}
# shellcheck source=jobscripts/env/ethernet.sh
source "jobscripts/env/${FABRIC:-ethernet}.sh"
exec srun --mpi=pmix --cpus-per-task="$cores_per_rank" --cpu-bind=cores --kill-on-bad-exit=1 "$@"
