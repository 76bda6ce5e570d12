#!/usr/bin/env bash
#FLUX: --job-name=hpcdist
#FLUX: -N 2
#FLUX: -n 8
#FLUX: -c 8
#FLUX: -t 30m
#
# Ranks on CPUs under Flux, from the folder that contains jobscripts/:
#   flux batch jobscripts/flux.sh python examples/train_digits.py
# The lines above are nodes, ranks and cores per rank; RANKS and CORES_PER_RANK say it to the ranks.
set -euo pipefail

cores_per_rank=${CORES_PER_RANK:-8}
# shellcheck source=jobscripts/env/infiniband.sh
source "jobscripts/env/${FABRIC:-infiniband}.sh"

exec flux run -n "${RANKS:-8}" -c "$cores_per_rank" "$@"
