#!/usr/bin/env bash
#BSUB -J hpcdist
#BSUB -nnodes 2
#BSUB -W 00:30
#
# Ranks on CPUs under LSF with jsrun:
#   bsub jobscripts/lsf.sh                                  trains the digits
#   PROGRAM="python train.py" RANKS=8 CORES_PER_RANK=8 bsub jobscripts/lsf.sh
set -euo pipefail
read -r -a program <<<"${PROGRAM:-python examples/train_digits.py}"

cores_per_rank=${CORES_PER_RANK:-8}
# One core of each rank is left to hpcdist, which moves data while the program computes.
export OMP_NUM_THREADS=$((cores_per_rank > 1 ? cores_per_rank - 1 : 1))

# A resource set of jsrun holds one rank (-a 1) and its cores.
exec jsrun -n "${RANKS:-8}" -a 1 -c "$cores_per_rank" -bind "packed:$cores_per_rank" \
    "${program[@]}"
