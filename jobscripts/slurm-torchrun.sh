#!/usr/bin/env bash
#SBATCH --job-name=hpcdist
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --time=00:30:00
#SBATCH --output=%x-%j.out
#
# torchrun under srun, one agent for each node:
#   RANKS_PER_NODE=4 sbatch jobscripts/slurm-torchrun.sh train.py
# For programs that expect torchrun, with backend nccl, or with MPICH. srun alone does without its
# port and its agents, and Open MPI's ranks cannot be started so: take slurm-pmix.sh there.
set -euo pipefail
ranks_per_node=${RANKS_PER_NODE:-4}
cores_per_rank=$((SLURM_CPUS_PER_TASK / ranks_per_node))
settings=env/${FABRIC:-ethernet}.sh
for folder in jobscripts . "$(dirname "$0")" ""; do
    if [[ -r $folder/$settings ]]; then break; fi
done
if [[ -z $folder ]]; then
    echo "slurm-torchrun.sh: $settings is neither in $PWD/jobscripts nor in $PWD. Copy the folder" \
        "jobscripts/env there as well, or submit from the folder that contains jobscripts/." >&2
    exit 1
fi
# shellcheck source=jobscripts/env/ethernet.sh
source "$folder/$settings"

# All agents meet at the first node. The port is the job's own, for jobs that share a node.
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 10000))
exec srun --mpi=none --ntasks-per-node=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" \
    --kill-on-bad-exit=1 torchrun --nnodes="$SLURM_JOB_NUM_NODES" \
    --nproc-per-node="$ranks_per_node" --rdzv-id="$SLURM_JOB_ID" --rdzv-backend=c10d \
    --rdzv-endpoint="$first:$port" "$@"
