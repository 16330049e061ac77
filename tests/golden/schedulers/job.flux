#!/bin/bash
# Train with an MPI rank per GPU or per group of cores, as a job of Flux (not run on a real one):
#   flux batch < FILE
# The job submits the next one with the lines below: change them, rather than to give options.
# flux: --job-name=it_s
# flux: --nodes=2
# flux: --nslots=8
# flux: --cores-per-slot=8
# flux: --gpus-per-slot=1
# flux: --time-limit=95400s
# flux: --bank=m1
# flux: --queue=debug
# flux: --exclusive
asked=0
trap '[ "$asked" = 2 ] || asked=1' USR1 # also while the site is set up
trap asked=2 TERM                       # nothing follows

# The site: modules, Python, launcher, network.
if [ -f flux/site.env ] && ! . flux/site.env; then
    echo "flux/site.env: its last command failed; where that is no fault, let it end with 'true'" >&2
    exit 1
fi
set +euC +o pipefail # it may have set them

# What is trained; results in runs/, as `hpctrain train --out` makes them.
run=runs/it_s-$FLUX_ENCLOSING_ID
train=(hpctrain train 'my runs/it'"'"'s.toml' --set run.epochs=3)

# Start the ranks, let them save before the time is over, submit the next job.
trap '' USR1 TERM # until hpctrain handles them
exec hpctrain launch --in-flux --asked="$asked" --script="$0" --nodes=2 \
    --ranks-per-node=4 --cores=8 --gpus=4 \
    --time-s=95400 --warn-s=120 --max-restarts=20 --relaunches=3 \
    --out="$run" -- "${train[@]}"
