"""Processes on stand-ins for GPUs: complete runs, and faults during them."""

from __future__ import annotations

import re
from functools import partial

import pytest
from jobs import EVERY, MARK, NEVER, memory_files, on_fakes, sets, trap, wait_until_removed
from ranks import run_on
from tables import rows_of

from hpctrain.cluster import launch
from hpctrain.core.run_files import run_folder
from hpctrain.training import recipe, runs

pytestmark = pytest.mark.processes

SAVES = sets(checkpoint_every_steps=5, checkpoint_every_epochs="")
PLAIN = [*sets(run_epochs=1), *trap("none", 0, NEVER)]
# Ranks, options of the machine, arguments -> a word of what is said
RUNS = {
    "one process": (None, {}, [], ""),
    "allreduce": (2, {"hidden": True}, [], "auto (direct-shared)"),
    "no handles": (2, {"ipc": False, "hidden": True}, [], "CUDA IPC is refused between the ranks"),
    "ps-sync": (2, {"hidden": True}, ["--engine", "ps-sync"], "ps-sync on 2 ranks"),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", rows_of(RUNS, "allreduce"))
def test_a_run_ends_where_cores_end(digits, undisturbed, kind):
    """All of MPI's memory is the host's: a pointer of the stand-in's would crash it."""
    ranks, machine, args, message = RUNS[kind]
    job = digits(*PLAIN, *args, ranks=ranks, gpus=machine)
    ended = job.finish()
    assert ended.returncode == 0, ended.stderr
    summary = job.summary
    assert ended.stderr.count(message) == 1 or not message, ended.stderr
    engine = sets(engine_kind=args[1]) if args else []
    expected = undisturbed(*PLAIN, *engine, ranks=ranks or 1)
    assert summary["params_sha256"] == expected["params_sha256"]
    assert (summary["gpus"], expected["gpus"]) == (["GPU-number-0"], [])
    way = "staged" if kind == "no handles" else "ipc"
    assert (summary["gpu_paths"]["same_gpu"], expected["gpu_paths"]) == (way, None)
    for reported in REPORTED:
        assert ended.stderr.count(reported) == (ranks == 2), ended.stderr


#: What a run says once where more than one rank has a GPU, and nobody has tried the ways
REPORTED = (
    "run `hpctrain doctor` once, in a job on such nodes",
    "GPU memory between ranks: same gpu ipc; no trial was made",
    "GPUs shared: 2 ranks on 1, up to 2 each",
)
REST = """
import json, sys
import fakes
holds = fakes.installed(hidden=True)
holds.__enter__()
from hpctrain.training import recipe, runs
from hpctrain import world
for number, engine in enumerate(sys.argv[1].split()):
    spec = recipe.load("digits", [f"engine.kind={engine}", "run.device=gpu", *sys.argv[2:]])
    runs.train(spec, world.init("gpu"), Path(f"run-{number}"), False)
"""
#: Engines -> whether they repeat: with one worker they do
ENGINES = {"local-sgd": True, "ps-async": True, "easgd": True, "gossip": False}


@pytest.mark.either
def test_the_other_engines(start, mark, small, tmp_path):
    """One job trains them, one after the other."""
    keys = [*small, *sets(run_epochs=1)][1::2]
    code = f"from pathlib import Path{REST}"
    env = {MARK: mark, **on_fakes()}
    ended = start("-c", code, " ".join(ENGINES), *keys, ranks=2, env=env).finish()
    assert ended.returncode == 0, ended.stderr
    for number, (engine, repeats) in enumerate(ENGINES.items()):
        summary = run_folder.read_summary(tmp_path / f"run-{number}")
        assert (summary["status"], summary["gpus"]) == ("done", ["GPU-number-0"]), engine
        spec = recipe.load("digits", [f"engine.kind={engine}", *keys])
        body = partial(runs.train, spec, out=tmp_path / engine, resume=False)
        expected = run_on("threads", 2, body)[0]["params_sha256"] if repeats else ""
        assert not repeats or expected == summary["params_sha256"], engine


# What is asked of the machine -> what is said
NO_GPU = {
    "no driver": ({"devices": None}, "no GPU: this machine has no NVIDIA driver"),
    "none visible": ({"devices": 0}, "CUDA finds no GPU (cudaErrorNoDevice"),
    "an older driver": (
        {"driver": 12040},
        "uninstall cupy-cuda13x; pip install 'hpctrain[cuda12x]'",
    ),
    "no CuPy": ({"cupy": None, "driver": 12040}, "needs CuPy: pip install 'hpctrain[cuda12x]'"),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("lacking", NO_GPU)
@pytest.mark.either
def test_no_gpu(begin, lacking):
    machine, message = NO_GPU[lacking]
    ranks = 2 if lacking == "an older driver" else None
    job = begin("digits", ranks=ranks, gpus=machine)
    ended = job.finish()
    assert (ended.returncode, "Traceback" in ended.stderr) == (2, False), ended.stderr
    assert ended.stderr.count(message) == 1 and ended.stderr.count("hpctrain: ") == 1, ended.stderr
    assert not job.out.exists()


# Which rank is short of memory, from which step on
SHORT = {"in a step": (1, 7), "on all ranks": (EVERY, 7), "before the first": (1, -1)}


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "moment", [pytest.param(k, marks=[pytest.mark.full] * (k == "before the first")) for k in SHORT]
)
@pytest.mark.either
def test_out_of_memory(digits, moment):
    rank, step = SHORT[moment]
    job = digits(*SAVES, *trap("short", rank, step), gpus={})
    ended = job.finish()
    assert ended.returncode == 1, ended.stderr
    (message,) = re.findall(
        r"hpctrain: rank (\d) on \S+: (GPU 0 is out of memory .*)", ended.stderr
    )
    assert re.search(
        r"\([\d,]+ of [\d,]+ bytes free now, .*\): [\d,]+ bytes asked. Take a", message[1]
    )
    assert rank == EVERY or message[0] == str(rank)
    assert "Traceback" not in ended.stderr
    if step < 0:
        assert not job.out.exists()
    else:
        assert (job.summary["status"], job.steps) == ("failed", [5])
        assert job.summary["reason"].startswith(f"rank {message[0]} on ")
        assert message[1] in job.summary["reason"]


SUMS = """
import os, signal, sys
from pathlib import Path
import numpy as np
import fakes
holds = fakes.installed(hidden=True)
holds.__enter__()
import cupy
import hpctrain as ht
from hpctrain.collectives.direct import direct

from hpctrain.world import watched
world = ht.init("gpu")
x = world.memory.zeros_like(cupy.zeros(100_000))
with watched(world, Path(sys.argv[2]), timeout_s=1):
    for step in range(3):
        world.threads.record.step = step  # the limit does not hold in the first
        x.fill(1)
        direct(world.main, x, np.add)
        assert (x.get() == world.size).all() and world.main.host_bytes == 0
        print(f"step {step}\\n", end="", flush=True)
        if world.rank == 1 and step == 1:
            os.kill(os.getpid(), getattr(signal, sys.argv[1]))
print("never comes here")
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize("number", ["SIGKILL", "SIGSTOP"])
def test_a_rank_whose_memory_neighbours_map_is_lost(start, mark, tmp_path, number):
    """They end by their launcher or, where that lets them live, by the watch, which names it."""
    before = memory_files()
    left_alone = number == "SIGKILL" and launch.find_mpi().vendor == "Open MPI"
    flags = ["--enable-recovery"] * left_alone  # MPICH's ends neighbours sooner or later anyway
    env = {MARK: mark, **on_fakes()}
    job = start("-c", SUMS, number, tmp_path / "run", ranks=3, env=env, flags=flags)
    ended = job.finish()
    assert ended.returncode != 0
    assert ended.stdout.count("step 1") == 3
    assert "step 2" not in ended.stdout and "never comes here" not in ended.stdout
    if left_alone or number == "SIGSTOP":
        reported = ended.stderr.split("the job waits for:")[1].split("these wait:")[0]
        assert "rank 1 on" in reported
    wait_until_removed(memory_files() - before)


CALLS = """
import sys
import numpy as np
import fakes
holds = fakes.installed(devices=2, hidden=True, lazy=True)
machine = holds.__enter__()
import cupy
import hpctrain as ht
from hpctrain.world.calls import calls as arrays
from hpctrain.collectives import ALLREDUCE
from hpctrain.core.errors import UsageError

world = ht.init(sys.argv[1])
mine, size = world.rank, world.size
calls = {
    **{name: lambda x, name=name: ht.allreduce(x, algorithm=name)
       for name in ("auto", *ALLREDUCE) if name not in ("null", "nccl")},
    "mean": lambda x: ht.allreduce(x, "mean"),
    "unchecked": lambda x: ht.allreduce(x, check=False),
    "bound": lambda x: (arrays.bind(x)(), None)[1],
    "reduce": ht.reduce,
    "broadcast": lambda x: ht.broadcast(x, root=size - 1),
    "reduce_scatter": ht.reduce_scatter,
    "all_gather": ht.all_gather,
    "gather": ht.gather,
    "scatter": ht.scatter,
    "all_to_all": ht.all_to_all,
}
host = (np.arange(400 * 1000 * size, dtype=np.float32) % 1000 + mine).reshape(size, -1)
for name, call in calls.items():
    for n in (3, host.shape[1]):
        y = np.ascontiguousarray(host[:, :n])
        x = cupy.asarray(y)
        for a, b in zip((x, call(x)), (y, call(y))):
            assert (a is None) == (b is None), name
            assert b is None or a.get().tobytes() == b.tobytes(), name
assert machine.counts["implicit"] == 0

def refused(call, *words):
    try:
        call()
    except UsageError as error:
        assert [word for word in words if word not in str(error)] == [], error
    else:
        raise AssertionError(words)

wrong = [rank for rank, own in enumerate(world.gather(str(world.gpu))) if "gpu 1" not in own]
named = [f"rank {rank}: " for rank in wrong] if len(wrong) < size else [""]
says = [f"{who}expected an array on the GPU of its rank, 0, and that one current, seen one on GPU 1"
        for who in named]
assert wrong
with cupy.cuda.Device(1):
    x = cupy.ones(5)
    if world.gpu:
        refused(lambda: ht.broadcast(x), *(f"{one}, GPU 1 being current" for one in says))
refused(lambda: ht.allreduce(x), *says, "ht.init()")
if world.gpu is None:  # there all ranks raise
    refused(lambda: ht.allreduce(x, check=False), "GPU of its rank, 0, and", "seen one on GPU 1")
world.link.barrier()
print("all right")
"""


PLACES = (("gpu", ""), ("gpu", "cuda-aware"), ("cpu", ""))  #: device, HPCTRAIN_GPU_PATH


@pytest.mark.sample(1)
@pytest.mark.parametrize("device, path", rows_of(PLACES, ("gpu", "")))
def test_arrays_of_gpus_given_to_an_mpi_that_knows_none(start, mark, device, path):
    """They are staged; those that lie on another GPU than their rank's are named on all ranks."""
    env = {MARK: mark, "HPCTRAIN_GPU_PATH": path, **on_fakes()}
    ended = start("-c", CALLS, device, ranks=3, env=env).finish()
    assert (ended.returncode, ended.stdout.count("all right")) == (0, 3), ended.stderr


BELIEVED = """
from hpctrain.transport.gpu_probe import verdicts
way = verdicts.Verdict("cuda-aware", "cuda-aware", "staged", "so it was told")
verdicts.cached_result = lambda environ: verdicts.ProbeResult(way)
"""


def test_such_an_mpi_crashes_on_their_pointers(start, mark):
    """Otherwise the test above would show nothing."""
    code = CALLS.replace("world = ", f"{BELIEVED}world = ", 1)
    ended = start("-c", code, "gpu", ranks=2, env={MARK: mark, **on_fakes()}).finish()
    assert ended.returncode != 0 and "all right" not in ended.stdout
    assert "UsageError" not in ended.stderr and "AssertionError" not in ended.stderr
