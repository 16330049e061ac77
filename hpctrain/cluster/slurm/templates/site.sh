# The site: modules, launcher, network. Slurm runs a copy of this file, so it is looked for below
# the folder in which sbatch was called.
cd "${SLURM_SUBMIT_DIR:-.}" || exit 1
[ -f slurm/site.env ] ||
    echo "no slurm/site.env below $PWD, where sbatch was called: modules and MPI are those it finds"
# shellcheck source=/dev/null
if [ -f slurm/site.env ] && ! . slurm/site.env; then
    echo "slurm/site.env: its last command failed; where that is no fault, let it end with 'true'" >&2
    exit 1
fi
set +euC +o pipefail # it may have set them; below, commands may fail, and variables be missing
