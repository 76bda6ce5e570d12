#!/usr/bin/env bash
#SBATCH --job-name=hpcdist
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=00:30:00
#SBATCH --output=%x-%j.out
#
# Ranks on CPUs under Slurm:   sbatch jobscripts/slurm.sh python examples/train_digits.py
# Change the lines above to suit the machine: nodes times tasks is the number of ranks, and tasks
# times cpus should fill a node.
set -euo pipefail

# Which of srun's plugins starts MPI depends on the MPI: pmix for Open MPI, pmi2 for MPICH and Intel
# MPI. With the wrong one every rank is alone; hpcdist notices and says so. `srun --mpi=list` shows
# what there is.
mpi=${MPI_PLUGIN:-pmix}

# One core of each rank is left to hpcdist, which moves data while the program computes.
export OMP_NUM_THREADS=$((SLURM_CPUS_PER_TASK > 1 ? SLURM_CPUS_PER_TASK - 1 : 1))

# Open MPI: UCX moves data over InfiniBand; asking for it turns a silent fall-back to TCP into an
# error. Further settings of UCX only after measuring: its defaults are good.
if [[ $mpi == pmix && -d /sys/class/infiniband ]]; then
    export OMPI_MCA_pml=ucx
fi

# --cpus-per-task is said again: since Slurm 22.05 srun does not take it from sbatch, and each rank
# would get one core. --kill-on-bad-exit: a rank that fails ends the step.
exec srun --mpi="$mpi" --cpus-per-task="$SLURM_CPUS_PER_TASK" --cpu-bind=cores \
    --kill-on-bad-exit=1 "$@"
