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
settings=env/${FABRIC:-ethernet}.sh
for folder in jobscripts . "$(dirname "$0")" ""; do
    if [[ -r $folder/$settings ]]; then break; fi
done
if [[ -z $folder ]]; then
    echo "slurm-pmix.sh: $settings is neither in $PWD/jobscripts nor in $PWD. Copy the folder" \
        "jobscripts/env there as well, or submit from the folder that contains jobscripts/." >&2
    exit 1
fi
# shellcheck source=jobscripts/env/ethernet.sh
source "$folder/$settings"
exec srun --mpi=pmix --cpus-per-task="$cores_per_rank" --cpu-bind=cores --kill-on-bad-exit=1 "$@"
