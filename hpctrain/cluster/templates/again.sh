# --- from here on the same in every template: stop in time, come back, end with the truth ---------
# USR1 comes before the time is over: the ranks save a checkpoint at a step on which they agree, and
# summary.json says "stopped". How a launcher ends is not the truth: some end with 0 when a node dies.
# srun needs to be told to end when a rank has died, and since 22.05 how many cores a task has.
export SLURM_KILL_BAD_EXIT=1 SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}"

status() { sed -n 's/^  "status": "\(.*\)",*$/\1/p' "$run/summary.json" 2>/dev/null; }

pid=
trap '[ -z "$pid" ] || kill -USR1 "$pid"' USR1
"${launch[@]}" "${train[@]}" --out "$run" --resume &
pid=$!
wait "$pid"
code=$?
while [ "$code" -gt 128 ] && kill -0 "$pid" 2>/dev/null; do # a signal ends wait early
    wait "$pid"
    code=$?
done

case "$(status)" in
done) exit 0 ;;
stopped)
    if [ "${SLURM_RESTART_COUNT:-0}" -lt "$max_restarts" ]; then
        echo "stopped after a checkpoint: job $SLURM_JOB_ID is put back into the queue"
        scontrol requeue "$SLURM_JOB_ID" && exit 0
    fi
    echo "stopped after a checkpoint and ${SLURM_RESTART_COUNT:-0} restarts: submit again to go on"
    exit 75
    ;;
*) exit $((code ? code : 1)) ;;
esac
