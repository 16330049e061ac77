#!/bin/bash
# Try things out on a node of your own, for a while:
#   . slurm/site.env && bash slurm/interactive.sh [COMMAND ...]
# With a COMMAND every rank runs it, as in `bash slurm/interactive.sh hpctrain doctor --job`; else
# there is a shell, in which `srun --kill-on-bad-exit=1 hpctrain train digits` starts ranks.

{{ site }}

for name in "${!SBATCH_@}"; do # salloc reads SALLOC_* where sbatch reads SBATCH_*
    export "SALLOC_${name#SBATCH_}=${!name}"
done
export SLURM_KILL_BAD_EXIT=1 SRUN_CPUS_PER_TASK={{ cpus_per_task }}
options=(
{{ options }}
)
if [ $# -eq 0 ]; then exec salloc "${options[@]}"; fi
read -ra launch <<<"${HPCTRAIN_LAUNCHER:-srun --kill-on-bad-exit=1}"
exec salloc "${options[@]}" "${launch[@]}" "$@"
