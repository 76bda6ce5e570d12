#!/usr/bin/env bash
#SBATCH --job-name=hpcdist
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=00:30:00
#SBATCH --output=%x-%j.out
#
# Ranks inside an Apptainer image, started by the srun outside of it:
#   IMAGE=train.sif sbatch jobscripts/slurm-apptainer.sh python train.py
# The image has hpcdist and an MPI of its own: Open MPI with a PMIx, or MPICH (PLUGIN=pmi2). Only
# the launcher is outside, so only their protocol must match, not their versions.
set -euo pipefail
: "${IMAGE:?which image? IMAGE=train.sif sbatch ...}"
cores_per_rank=${SLURM_CPUS_PER_TASK:-1}
settings=env/${FABRIC:-infiniband}.sh
for folder in jobscripts . "$(dirname "$0")" ""; do
    if [[ -r $folder/$settings ]]; then break; fi
done
if [[ -z $folder ]]; then
    echo "slurm-apptainer.sh: $settings is neither in $PWD/jobscripts nor in $PWD. Copy the folder" \
        "jobscripts/env there as well, or submit from the folder that contains jobscripts/." >&2
    exit 1
fi
# shellcheck source=jobscripts/env/infiniband.sh
source "$folder/$settings"

# The working folder and Slurm's own (PMIx keeps its sockets there) must be visible inside. /dev/shm
# is the node's, which the ranks of a node share: no --contain. --nv brings the GPU's driver in.
binds="$PWD,${SLURM_TMPDIR:-/tmp}"
gpu=()
if [[ -n ${SLURM_GPUS_ON_NODE:-} ]]; then gpu=(--nv); fi
exec srun --mpi="${PLUGIN:-pmix}" --cpus-per-task="$cores_per_rank" --cpu-bind=cores \
    --kill-on-bad-exit=1 apptainer exec --bind "$binds" "${gpu[@]}" "$IMAGE" "$@"
