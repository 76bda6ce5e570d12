#!/usr/bin/env bash
#BSUB -J hpcdist
#BSUB -nnodes 2
#BSUB -W 00:30
#
# Ranks on CPUs under LSF with jsrun, from the folder that contains jobscripts/:
#   bsub <jobscripts/lsf.sh                                 trains the digits
#   PROGRAM="python train.py" RANKS=8 CORES_PER_RANK=8 bsub <jobscripts/lsf.sh
# bsub reads the lines above from its input. Of a script that is its argument it ignores them, unless
# the site has set LSB_BSUB_PARSE_SCRIPT.
set -euo pipefail
read -r -a program <<<"${PROGRAM:-python examples/train_digits.py}"

cores_per_rank=${CORES_PER_RANK:-8}
settings=env/${FABRIC:-infiniband}.sh
for folder in jobscripts . "$(dirname "$0")" ""; do
    if [[ -r $folder/$settings ]]; then break; fi
done
if [[ -z $folder ]]; then
    echo "lsf.sh: $settings is neither in $PWD/jobscripts nor in $PWD. Copy the folder" \
        "jobscripts/env there as well, or submit from the folder that contains jobscripts/." >&2
    exit 1
fi
# shellcheck source=jobscripts/env/infiniband.sh
source "$folder/$settings"

# A resource set of jsrun has one rank (-a 1) and its cores.
exec jsrun -n "${RANKS:-8}" -a 1 -c "$cores_per_rank" -bind "packed:$cores_per_rank" \
    "${program[@]}"
