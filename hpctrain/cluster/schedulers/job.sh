#!/bin/bash
# Train with an MPI rank per GPU or per group of cores, as a job of {{ title }}:
#   {{ submit }} < FILE
# The job submits the next one with the lines below: change them, rather than to give options.
{{ directives }}
asked=0
trap '[ "$asked" = 2 ] || asked=1' USR1 # also while the site is set up
trap asked=2 TERM                       # nothing follows

{{ folder }}
{{ site }}
set +euC +o pipefail # it may have set them

{{ path }}

# {{ about }}
run={{ run }}
train=({{ train }})

# Start the ranks, let them save before the time is over, submit the next job.
trap '' USR1 TERM # until hpctrain handles them
exec hpctrain launch {{ in_job }} --asked="$asked" --script="$0" --nodes={{ nodes }} \
    {{ numbers }} \
    --out="$run" -- "${train[@]}"
