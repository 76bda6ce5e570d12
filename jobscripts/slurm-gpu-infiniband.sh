#!/usr/bin/env bash
#SBATCH --job-name=hpcdist
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --gpus-per-node=4
#SBATCH --time=00:30:00
#SBATCH --output=%x-%j.out
#
# One rank per GPU, with InfiniBand, from the folder that contains jobscripts/:
#   sbatch jobscripts/slurm-gpu-infiniband.sh python train.py
# Tasks per node is the number of GPUs of a node.
set -euo pipefail
cores_per_rank=${SLURM_CPUS_PER_TASK:-1}
settings=env/${FABRIC:-infiniband}.sh
for folder in jobscripts . "$(dirname "$0")" ""; do
    if [[ -r $folder/$settings ]]; then break; fi
done
if [[ -z $folder ]]; then
    echo "slurm-gpu-infiniband.sh: $settings is neither in $PWD/jobscripts nor in $PWD. Copy the folder" \
        "jobscripts/env there as well, or submit from the folder that contains jobscripts/." >&2
    exit 1
fi
# shellcheck source=jobscripts/env/infiniband.sh
source "$folder/$settings"

mpi=pmix
version=$(mpirun --version 2>&1 || true) # a pipe into grep -q would end it early, a failure for pipefail
if grep -qi hydra <<<"$version"; then mpi=pmi2; fi

# Every rank sees all GPUs of its node, and takes the one of its local rank
# (torch.cuda.set_device(dist.get_node_local_rank())). Not --gpus-per-task: it hides the others, and
# then NCCL cannot reach them through the node's links.
exec srun --mpi="$mpi" --cpus-per-task="$cores_per_rank" --cpu-bind=cores \
    --kill-on-bad-exit=1 "$@"
