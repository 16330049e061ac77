#!/usr/bin/env bash
# Answer what a machine with one GPU can answer, without a package index.
#
#     make first-day-wheels                    where there is an index: fills .first-day
#     bash benchmarks/gpu/first_day.sh PART... on the machine with the GPU, beside .first-day
#
#     PART correct     kernels, engines, ranks that share the GPU, tensors of PyTorch         2 minutes
#          pointers    the same ranks with a UCX to which MPI gives device pointers  at most 10
#          fast        training, messages, sums and the optimizer, one after another  at most 8
#          sanitized   kernels under compute-sanitizer                                at most 3
#
#     Without a PART it makes the environment alone.
#
# The environment sees the machine's packages (CuPy, perhaps PyTorch) and takes what is missing from
# the wheels. A step that fails, or exceeds its limit, leaves the others. $OUT, .first-day/out by
# default, gets verdicts, a log for each step, and PART.tar.gz with all of it.
set -u
cd "$(dirname "$0")/../.." || exit 2
root=$(realpath -m "${OUT:-.first-day/out}")
bin=$PWD/.first-day/environment/bin
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMP_NUM_THREADS=1
export PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe HPCTRAIN_OLD_TORCH=1

# step NAME LIMIT_S QUESTION COMMAND...: run the command and write its verdict.
step() {
    local name=$1 limit=$2 question=$3 begin=$SECONDS code answer
    shift 3
    timeout --kill-after=5 "$limit" "$@" >"$out/$name.log" 2>&1 </dev/null
    code=$?
    case $code in
        0) answer="yes: $(tail -n 1 "$out/$name.log" | cut -c 1-80)" ;;
        124) answer="not over within $limit s" ;;
        137) answer="killed, or not over within $limit s" ;;
        *) answer="NO, exit code $code: $(tail -n 1 "$out/$name.log" | cut -c 1-120)" ;;
    esac
    printf '%4d s  %s: %s\n' $((SECONDS - begin)) "$question" "$answer" | tee -a "$out/verdicts.txt"
}
# tests NAME LIMIT_S PROCESSES QUESTION WORDS...: run tests, in several processes where xdist is.
tests() {
    local spread=()
    "$bin/python" -c 'import xdist' >/dev/null 2>&1 && spread=(-n "$3")
    step "$1" "$2" "$4" "$bin/python" -m pytest -q -p no:cacheprovider --durations 5 \
        "${spread[@]}" "${@:5}"
}
measure() {
    step "$1" "$2" "$3" "$bin/python" benchmarks/gpu/run_all.py --out "$out" --only "$4"
}

correct() {
    # Side by side there are more ranks than cores: whoever waits lets others compute.
    export OMPI_MCA_mpi_yield_when_idle=1
    step doctor 80 "doctor finds nothing to mend" "$bin/hpctrain" doctor --json "$out/doctor.json"
    tests kernels 250 3 "every kernel compiles and computes" tests/gpu/test_on_cupy.py &
    tests threads 250 3 "kernels, sums and engines have the host's results" \
        tests/gpu/test_on_gpu.py -m 'not processes' &
    tests ranks 250 4 "ranks that share the GPU train as one rank" \
        tests/gpu/test_on_gpu.py -m processes -k 'not suffice' &
    tests torch 250 3 "tensors of PyTorch are read after they were written" \
        tests/gpu/test_torch_on_gpu.py &
    wait
    tests memory 90 1 "a GPU that is full is named" tests/gpu/test_on_gpu.py -k suffice
}
pointers() {
    export LD_LIBRARY_PATH=$PWD/.first-day/ucx/libucx/lib:${LD_LIBRARY_PATH:-} OMPI_MCA_pml=ucx
    step doctor 90 "MPI takes device pointers" "$bin/hpctrain" doctor --json "$out/doctor.json"
    tests ranks 200 4 "ranks that share the GPU train as one rank" tests/gpu/test_on_gpu.py \
        -m processes -k 'algorithm or overlap or ps or shards or neighbours or path or loop'
    tests torch 120 3 "tensors of PyTorch are read after they were written" \
        tests/gpu/test_torch_on_gpu.py -k 'late or ddp or shards'
    measure rates 150 "messages have the expected rates" allreduce-2-ranks,paths,tensors,p2p
}
fast() {
    measure training 240 "training equals a CPU's, and has PyTorch's speed" steps,equal,precision
    measure rates 240 "messages, sums and the optimizer have the expected rates" \
        optimizer,allreduce-2-ranks,allreduce-4-ranks,paths,tensors,p2p
}
sanitized() {
    local tool
    for tool in memcheck racecheck; do
        step $tool 90 "$tool of compute-sanitizer finds nothing" compute-sanitizer --tool $tool \
            --error-exitcode 9 "$bin/python" -m pytest -q -p no:cacheprovider \
            tests/gpu/test_on_cupy.py -k 'host or lapack'
    done
}

for part in "$@"; do
    if [[ ! $part =~ ^(correct|pointers|fast|sanitized)$ ]]; then
        echo "expected parts of correct, pointers, fast, sanitized; seen '$part'" >&2
        exit 2
    fi
done
if [ ! -x "$bin/hpctrain" ]; then
    out=$root/environment && rm -rf "$out" && mkdir -p "$out" || exit 2
    step environment 40 "an environment beside the machine's packages" \
        python3 -m venv --without-pip .first-day/environment
    for path in .first-day/environment/lib/python*/site-packages; do  # python3 may be one of a venv
        python3 -c 'import site; print(*site.getsitepackages(), sep="\n")' >"$path/machine.pth"
        # CuPy looks for CUDA's libraries in the environment alone.
        while read -r folder; do
            [ ! -d "$folder/nvidia" ] || ln -sfn "$folder/nvidia" "$path/nvidia"
        done <"$path/machine.pth"
    done
    # mpi4py finds an MPI in its own environment: the machine's mpi4py would not.
    step install 60 "hpctrain from the wheels" python3 -m pip --python "$bin/python" install \
        --no-index --no-deps --ignore-installed .first-day/wheels/*.whl
fi
if ! "$bin/python" -c 'from hpctrain.transport.device.gpus import visible_gpus; visible_gpus("gpu")'; then
    echo "no GPU is found by CuPy, or $root/environment/install.log tells why: nothing was asked" >&2
    exit 2
fi
export PATH=$bin:$PATH
for part in "$@"; do
    out=$root/$part && rm -rf "$out" && mkdir -p "$out" || exit 2
    ($part)  # what a part exports ends with it
    tar -C "$root" -czf "$root/$part.tar.gz" "$part"
done
