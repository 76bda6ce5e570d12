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
settings=env/${FABRIC:-ethernet}.sh
for folder in jobscripts . "$(dirname "$0")" ""; do
    if [[ -r $folder/$settings ]]; then break; fi
done
if [[ -z $folder ]]; then
    echo "slurm-pmi2.sh: $settings is neither in $PWD/jobscripts nor in $PWD. Copy the folder" \
        "jobscripts/env there as well, or submit from the folder that contains jobscripts/." >&2
    exit 1
fi
# shellcheck source=jobscripts/env/ethernet.sh
source "$folder/$settings"

# Intel MPI speaks to Slurm through Slurm's own library, and does not look for it.
if [[ -n ${I_MPI_ROOT:-} && -z ${I_MPI_PMI_LIBRARY:-} ]]; then
    I_MPI_PMI_LIBRARY=$(ldconfig -p | awk '/libpmi2\.so\.0/ { print $NF; exit }')
    export I_MPI_PMI_LIBRARY
fi
exec srun --mpi=pmi2 --cpus-per-task="$cores_per_rank" --cpu-bind=cores --kill-on-bad-exit=1 "$@"
