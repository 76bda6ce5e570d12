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
settings=env/${FABRIC:-infiniband}.sh
for folder in jobscripts . "$(dirname "$0")" ""; do
    if [[ -r $folder/$settings ]]; then break; fi
done
if [[ -z $folder ]]; then
    echo "flux.sh: $settings is neither in $PWD/jobscripts nor in $PWD. Copy the folder" \
        "jobscripts/env there as well, or submit from the folder that contains jobscripts/." >&2
    exit 1
fi
# shellcheck source=jobscripts/env/infiniband.sh
source "$folder/$settings"

exec flux run -n "${RANKS:-8}" -c "$cores_per_rank" "$@"
