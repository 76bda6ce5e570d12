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
# shellcheck source=jobscripts/env/infiniband.sh
source "jobscripts/env/${FABRIC:-infiniband}.sh"

mpi=pmix
version=$(mpirun --version 2>&1 || true) # a pipe into grep -q would end it early, a failure for pipefail
if grep -qi hydra <<<"$version"; then mpi=pmi2; fi

# Every rank sees all GPUs of its node, and takes the one of its local rank
# (torch.cuda.set_device(dist.get_node_local_rank())). Not --gpus-per-task: it hides the others, and
# then NCCL cannot reach them through the node's links.
exec srun --mpi="$mpi" --cpus-per-task="$cores_per_rank" --cpu-bind=cores \
    --kill-on-bad-exit=1 "$@"
