# --- from here on the same in every template: stop, requeue, report the real status --------------
# USR1 comes warn_s before the time is over, or where another job is to have the nodes. The ranks
# save a checkpoint at a step on which they agree, and summary.json says "stopped". How a launcher
# ends is not the truth: some end with 0 when a node dies.
# srun needs to be told to end when a rank has died, since 22.05 how many cores a task has, and not
# to keep from the ranks what was loaded here, where the job came without variables (--export).
export SLURM_KILL_BAD_EXIT=1 SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}"
unset SLURM_EXPORT_ENV SLURM_CLUSTERS # scontrol is to ask the cluster on which the job runs
# The last task of an array has the array's own number: requeued by it, all tasks would run again.
job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
job=${job:-$SLURM_JOB_ID}
out=$run
[ -z "$SLURM_ARRAY_JOB_ID" ] || out=${run%/*} # in which each task has its own
later="to go on submit again, with --out $out or that as run= in the script"
if ((${SLURM_RESTART_COUNT:-0} > max_restarts)); then # by Slurm itself, after a preemption, say
    echo "job $job: restarted $SLURM_RESTART_COUNT times, of $max_restarts: $later"
    exit 75
fi
mkdir -p "$run" || exit 1
rm -f "$run/.why" # of the part before

of_job() { SLURM_TIME_FORMAT=standard timeout 20 scontrol -o show job "$job" | tr ' ' '\n'; }

field() { sed -n "s/^$1=//p" | head -n 1; }

why() { # why USR1 has come
    local told ends
    told=$(of_job)
    ends=$(field EndTime <<<"$told")
    if [[ $(field PreemptTime <<<"$told") == [0-9]* ]]; then
        echo preempted
    elif [[ $ends == [0-9]*T* ]] && (($(date -d "$ends" +%s) - $(date +%s) < warn_s + 90)); then
        echo 'time limit' # Slurm may warn up to a minute early
    fi
} 2>/dev/null

stop() {
    asked=${asked:-$SECONDS}
    why >"$run/.why" # for the reason in summary.json
    [ -z "$pid" ] || remind
}

remind() { # ask until the ranks have ended: what comes before they have begun, srun throws away
    [ -z "$reminder" ] || return
    while kill -USR1 "$pid"; do sleep 3; done >/dev/null 2>&1 &
    reminder=$!
    disown "$reminder" # or the shell tells of its end
}

told() { # what summary.json says of $1, if it is of this part
    [ ! "$run/summary.json" -nt "$run/.began" ] ||
        sed -n "s/^  \"$1\": \"\{0,1\}\([^\",]*\).*/\1/p" "$run/summary.json"
}

again() { # put the job back into the queue, unless it was ended from outside: cancelled, say
    local restarts=${SLURM_RESTART_COUNT:-0} pause=1 refused=0 state
    local limit=$((${asked:-$SECONDS} + warn_s)) # Slurm answers late where many jobs end at once
    while state=$(of_job | field JobState); do
        if [ -n "$state" ] && [ "$state" != RUNNING ]; then
            echo "job $job: $1; Slurm says $state"
            exit 75
        elif ((restarts >= max_restarts)); then
            echo "job $job: $1; restarted $restarts times, which is enough: $later"
            exit 75
        elif [ -n "$state" ] && timeout 20 scontrol requeue "$job"; then
            echo "job $job: $1; back into the queue for restart $((restarts + 1)) of $max_restarts"
            exit 0
        fi
        [ -z "$state" ] || refused=$((refused + 1))
        ((refused < 5 && SECONDS + pause < limit)) || break
        sleep "$pause"
        pause=$((pause < 16 ? 2 * pause : 30))
    done
    [ -z "$state" ] || state='does not put it back into the queue'
    echo "job $job: $1; Slurm ${state:-does not answer}: $later"
    exit 75
}

collect() { # the last operations of all ranks, from the memory of their nodes into the run's folder
    local token names count
    token=$(sed -n 's/.*"token": "\([0-9a-f]*\)".*/\1/p' "$run/watch/nodes.json")
    names=$(remaining) # a lost node would not answer
    count=$(tr , '\n' <<<"$names" | grep -c .)
    ((count > 0)) || names=$SLURM_JOB_NODELIST count=$SLURM_JOB_NUM_NODES
    # shellcheck disable=SC2016
    [ -z "$token" ] || timeout 10 srun --overlap --nodelist="$names" -N "$count" -n "$count" \
        --ntasks-per-node=1 bash -c '
        for file in /dev/shm/"$0"-* "${TMPDIR:-/tmp}/$0"-*; do
            ! cp "$file" "$1/watch/node-${file##*-}" || rm -f "$file"
        done' "hpctrain-watch-$token" "$run"
} >/dev/null 2>&1

remaining() { # the nodes of this job on which Slurm can start ranks, with commas
    sinfo --noheader --Node --nodes="$SLURM_JOB_NODELIST" --format='%N %T' 2>/dev/null | sort -u |
        sed -nE '/ (down|fail|error|unk|boot|powering_down)|\*$/!s/ .*//p' | paste -sd,
}

place() { # leave the lost nodes out; fail where fewer ranks than min_ranks would remain
    local names count ranks
    names=$(remaining)
    count=$(tr , '\n' <<<"$names" | grep -c .)
    ((count > 0 && count < SLURM_JOB_NUM_NODES)) || return 0 # all, or Slurm does not answer
    ranks=$((count * ${SLURM_NTASKS_PER_NODE:-1}))
    [[ ${srun[0]} == *srun ]] && ((${min_ranks:-0} > 0 && ranks >= min_ranks)) || return 1
    launch=("${srun[0]}" --nodelist="$names" --nodes="$count" -n "$ranks" "${srun[@]:1}")
}

relaunch() { # start the ranks again in this allocation, unless the job is to end
    # After two starts in a row that saved nothing the job is to have other nodes.
    [ -z "$asked" ] && ((relaunches < max_relaunches && tries < 2)) || return 1
    [ "$(of_job | field JobState)" = RUNNING ] && place || return 1
    # The step of a lost node may never end for Slurm: do not wait for its cores.
    export SLURM_OVERLAP=1 HPCTRAIN_RESTARTS=$((++relaunches))
    echo "job $job: $1; started again here, $relaunches of $max_relaunches: ${launch[*]}"
}

pid='' reminder='' relaunches=0 srun=("${launch[@]}")
trap stop USR1
trap : TERM # Slurm ends the job, and lets the ranks save (KillWait): do not leave before them
while :; do
    echo "$job" >"$run/.began" # what is newer was written by this part of the run, of this job
    "${launch[@]}" "${train[@]}" --out "$run" --resume &
    pid=$!
    [ -z "$asked" ] || stop
    while wait "$pid"; code=$?; kill -0 "$pid" 2>/dev/null; do :; done # a signal ends wait early
    pid=''
    [ -z "$reminder" ] || kill "$reminder" 2>/dev/null

    [ ! -e "$run/watch/nodes.json" ] || collect # `hpctrain hang` shows them
    case "$(told status)" in
    done) exit 0 ;;
    stopped) again "$(told reason)" ;;
    esac
    # USR1 ends a rank that has not begun; others may tell of its loss (1), not of other faults.
    case "$asked/$(told exit_code)" in
    [0-9]*/ | [0-9]*/1) again 'asked to stop, and the ranks ended before they could' ;;
    esac
    # Ranks may be lost with their node, a bug comes again at once: a part that has saved something
    # is worth another. So are two in a row whose ranks never started (MPI did not start, say), but
    # not where hpctrain itself (1, 2, 3), or the shell for want of it (127), gave the code.
    tries=0
    if ! find "$run/checkpoints" -newer "$run/.began" -name manifest.json 2>/dev/null | grep -q .; then
        tries=$(($(cat "$run/.tries" 2>/dev/null) + 1))
    fi
    echo "$tries" >"$run/.tries"
    case "$(told exit_code)/$code/$tries" in
    /[0-3]/[1-9]* | /127/[1-9]*) break ;;
    1/*/0 | 86/*/0 | /*/[0-2])
        relaunch 'ranks were lost, or hung' || again 'ranks were lost, or hung'
        ;;
    *) break ;;
    esac
done
exit $((code ? code : 1))
