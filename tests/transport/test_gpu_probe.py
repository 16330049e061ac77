"""The GPU probe: verdicts of simulated trials as tables; trials as real small jobs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, replace

import cupy_package
import pytest
from processes import BIN, LAUNCHER
from ranks import on_ranks

from hpctrain.core.errors import UsageError
from hpctrain.core.interpreter import module_command
from hpctrain.hardware.gdr import GdrState
from hpctrain.transport.device import gpus
from hpctrain.transport.gpu_probe import child as probe_child
from hpctrain.transport.gpu_probe import decision, jobs, mpi_claims, probe_process, verdicts
from hpctrain.transport.gpu_probe.jobs import ProbeTrial
from hpctrain.transport.gpu_probe.mpi_claims import MpiClaims
from hpctrain.transport.paths import STAGED_VERDICT, Verdict

PLAIN = MpiClaims("Open MPI", query_cuda=False, libraries=("/x/libucp.so.0",))
WORKS = ProbeTrial(True, True, 100.0, 50.0, replace(PLAIN, query_cuda=True))
CRASHED = ProbeTrial(True, False, 100.0, None, PLAIN, "a crash (segmentation fault)")
NO_IPC = replace(WORKS, ipc=False)
#: (bytes, seconds staged, seconds by pointer): pointers pay from some 8 KiB on, or never do.
TIMED = replace(WORKS, sizes=((1024, 1e-5, 2e-5), (65536, 4e-5, 2e-5), (1 << 20, 4e-4, 2e-4)))
SLOW = replace(WORKS, sizes=((1024, 1e-5, 2e-5), (65536, 2e-5, 3e-5)))
FAST = replace(WORKS, sizes=((1024, 1e-5, 0.99e-5), (65536, 2e-5, 2.01e-5)))
CLOSED = replace(CRASHED, ipc=False, ipc_fault="cudaErrorInvalidValue")
NEVER = ProbeTrial(ended="exit code 1, no slots")
ADAPTER = GdrState("dmabuf", available=True)
NO_GDR = GdrState("no nvidia_peermem", "modprobe nvidia-peermem", available=False)

# trials, adapter -> paths, a word of the reason, a word of the remedy
VERDICTS = {
    "all well": ({"same_gpu": WORKS, "same_node": WORKS, "across": WORKS}, ADAPTER,
                 ("cuda-aware", "cuda-aware", "gdr"), "across 50.0 GB/s", ""),
    "no GDR": ({"same_gpu": WORKS, "across": WORKS}, NO_GDR,
               ("cuda-aware", "ipc", "cuda-aware"), "no nvidia_peermem", "modprobe"),
    "MPI without CUDA": ({"same_gpu": CRASHED, "same_node": CRASHED}, NO_GDR,
                         ("ipc", "ipc", "staged"), "segmentation fault", "docs/gpus.md"),
    "not even IPC": ({"same_gpu": CLOSED, "same_node": CLOSED}, NO_GDR,
                     ("staged", "staged", "staged"), "CUDA IPC: cudaErrorInvalidValue", "docs"),
    "pointers but no IPC": ({"same_gpu": NO_IPC}, NO_GDR,
                            ("cuda-aware", "ipc", "staged"), "arrived", ""),
    "a cure": ({"same_gpu": replace(CRASHED, cure="UCX_MEMTYPE_CACHE=n")}, NO_GDR,
               ("ipc", "ipc", "staged"), "cache of memory types", "export UCX_MEMTYPE_CACHE=n"),
    "no job": ({"same_gpu": NEVER}, NO_GDR, ("ipc", "ipc", "staged"), "no slots", "doctor"),
}  # fmt: skip


@pytest.mark.parametrize("case", VERDICTS)
def test_judged(case):
    by_class, adapter, ways, word, remedy = VERDICTS[case]
    result = decision.decide_verdict(by_class, adapter, {})
    assert (result.verdict.same_gpu, result.verdict.same_node, result.verdict.across) == ways
    assert word in result.verdict.reason
    assert remedy in result.remedy
    assert verdicts.result_from_json(json.dumps(asdict(result))) == result


UCX = replace(PLAIN, libraries=("/x/libucp.so.0", "/x/libuct_cuda.so.0"))
#: the trial as it is, and with UCX_MEMTYPE_CACHE=n; variables -> the cure, how many trials
CURES = {
    "helps": (replace(CRASHED, claims=UCX), WORKS, {}, "UCX_MEMTYPE_CACHE=n", 2),
    "does not help": (replace(CRASHED, claims=UCX), CRASHED, {}, "", 2),
    "is there": (replace(CRASHED, claims=UCX), WORKS, {"UCX_MEMTYPE_CACHE": "n"}, "", 1),
    "no CUDA in UCX": (CRASHED, WORKS, {}, "", 1),
    "pointers work": (replace(WORKS, claims=UCX), WORKS, {}, "", 1),
    "no job": (NEVER, WORKS, {}, "", 1),
}


@pytest.mark.parametrize("case", CURES)
def test_a_trial_is_repeated_without_the_cache_of_memory_types(monkeypatch, case):
    first, second, environ, cure, count = CURES[case]
    trials = [first, second]
    monkeypatch.setattr(jobs, "run_trial", lambda command, environ: trials.pop(0))
    assert jobs.run_trial_and_cure([], environ) == replace(first, cure=cure)
    assert len(trials) == 2 - count


STAGED_ONLY = replace(CRASHED, staged=((1024, 3e-5), (65536, 5e-5)))
#: trial -> seconds by which `auto` reckons
SECONDS = {
    "the faster way": (TIMED, ((1024, 1e-5), (65536, 2e-5), (1 << 20, 2e-4))),
    "no pointers": (STAGED_ONLY, STAGED_ONLY.staged),
    "an older hpctrain's": (WORKS, None),
}


@pytest.mark.parametrize("case", SECONDS)
def test_what_messages_take(case):
    trial, seconds = SECONDS[case]
    result = decision.decide_verdict({"same_gpu": trial}, ADAPTER, {})
    assert result.verdict.seconds == ({} if seconds is None else {"same_gpu": seconds})
    assert result.verdict.mapped_gb_s == {"same_gpu": 100.0}
    assert verdicts.result_from_json(json.dumps(asdict(result))) == result


#: trial of each class -> from which lengths on which way, and what the reason tells
BY_SIZE = {
    "crossing": ({"same_gpu": TIMED}, {"same_gpu": ((0, "staged"), (8192, "pointer"))},
                 "same gpu by size: staged, from 8,192 bytes on pointer"),
    "never": ({"across": SLOW}, {"across": ((0, "staged"),)}, "across by size: staged"),
    "always": ({"across": FAST}, {}, "arrived"),
    "not timed": ({"same_gpu": WORKS}, {}, "arrived"),
    "no pointers": ({"same_gpu": replace(CRASHED, sizes=TIMED.sizes)}, {}, "a crash"),
}  # fmt: skip


@pytest.mark.parametrize("case", BY_SIZE)
def test_judged_by_size(case):
    by_class, by_size, words = BY_SIZE[case]
    result = decision.decide_verdict(by_class, ADAPTER, {})
    assert result.verdict.by_size == by_size and words in result.verdict.reason
    assert verdicts.result_from_json(json.dumps(asdict(result))) == result


def test_what_a_user_asks_for_holds_at_every_length():
    verdict = decision.decide_verdict({"same_gpu": TIMED, "across": TIMED}, ADAPTER, {}).verdict
    assert set(verdict.by_size) == {"same_gpu", "across"}
    result = decision.ProbeResult(verdict, trials=dict.fromkeys(jobs.PAIR_CLASSES, TIMED))
    across, all_of = (
        verdicts.apply_override(f"{c}cuda-aware", result).verdict for c in ("across=", "")
    )
    assert (set(across.by_size), all_of.by_size) == ({"same_gpu"}, {})


CRAY = MpiClaims("Cray MPICH", True, True)
MPICH = MpiClaims("MPICH", False, False, "mpi,system")
# claims, environment -> words of reason and remedy
FAULTS = {
    "Cray, switched off": (CRAY, {}, "MPICH_GPU_SUPPORT_ENABLED=1", "export MPICH_GPU_SUPPORT"),
    "Cray without its layer": (CRAY, {"MPICH_GPU_SUPPORT_ENABLED": "1"}, "libmpi_gtl_cuda",
                               "craype-accel"),
    "MVAPICH2": (MpiClaims("MVAPICH2"), {"MV2_USE_CUDA": "0"}, "MV2_USE_CUDA=1", "export MV2"),
    "Intel": (MpiClaims("Intel MPI"), {}, "I_MPI_OFFLOAD=1", "export I_MPI_OFFLOAD=1"),
    "ParaStation": (replace(MPICH, libraries=("/x/libpscom.so.2",)), {}, "PSP_CUDA=1",
                    "export PSP_CUDA=1"),
    "MPICH": (MPICH, {}, "built without CUDA", "--with-cuda"),
    "MPICH with another UCX": (replace(MPICH, libraries=("/x/libuct_cuda.so.0",)), {},
                               "a way of its own", "MPIR_CVAR_NOLOCAL=1"),
    "MPICH, variable": (MPICH, {"MPIR_CVAR_ENABLE_GPU": "0"}, "MPIR_CVAR_ENABLE_GPU=0", "unset"),
    "UCX_TLS": (PLAIN, {"UCX_TLS": "rc,sm,self"}, "UCX_TLS=rc,sm,self leaves out",
                "UCX_TLS=rc,sm,self,cuda_copy,cuda_ipc"),
    "UCX without CUDA": (PLAIN, {}, "no CUDA transports, and Open MPI itself", "docs/gpus.md"),
    "half of it": (replace(PLAIN, query_cuda=True), {"UCX_TLS": "all"}, "no CUDA transports",
                   "UCX"),
    "no UCX at all": (replace(PLAIN, libraries=()), {}, "built without CUDA", "OMPI_MCA_pml=ucx"),
    "all there": (MpiClaims("Open MPI", True), {}, "reports support of", "tell the site"),
}  # fmt: skip


@pytest.mark.parametrize("case", FAULTS)
def test_fault(case):
    of, environ, reason, remedy = FAULTS[case]
    fault = mpi_claims.find_fault(of, environ)
    assert reason in fault.reason
    assert remedy in fault.remedy


MAPS = """\
7f00-7f01 r-xp 00000000 00:1f 42   /opt/lib/libuct_cuda.so.0.0.0
7f00-7f01 r-xp 00000000 00:1f 42   /opt/my lib/libucp.so.0
7f00-7f01 r-xp 00000000 00:1f 42   /opt/lib/libmpi.so.40
7f00-7f01 rw-p 00000000 00:00 0
"""


def test_libraries_of_interest():
    libraries = mpi_claims.gpu_libraries(MAPS.splitlines())
    assert libraries == ("/opt/lib/libuct_cuda.so.0.0.0", "/opt/my lib/libucp.so.0")
    assert MpiClaims("Open MPI", libraries=libraries).has_library("libuct_cuda")


OPEN = json.dumps({"stage": "started", "claims": asdict(PLAIN), "hosts": ["a", "a"]})
IPC = json.dumps({"stage": "ipc", "correct": True, "gb_s": 3.0, "reason": ""})
WRONG = json.dumps(
    {"stage": "pointer", "correct": False, "gb_s": 9.0, "reason": "other bytes arrived"}
)
# lines, exit code, stderr -> the trial
ENDS = {
    "signal": ([OPEN, IPC], -11, "", CRASHED),
    "launcher's code": ([OPEN, "noise", IPC], 139, "Signal: Segmentation fault (11)", CRASHED),
    "hydra's code": ([OPEN, IPC], 11, "", CRASHED),
    "wrong bytes": ([OPEN, IPC, WRONG], 0, "", replace(CRASHED, ended="other bytes arrived")),
    "hangs": ([OPEN, IPC], jobs.TIMEOUT_CODE, "",
              replace(CRASHED, ended="still running after 60 s")),
    "never": (["{}", "[1]"], 1, "no slots", NEVER),
}  # fmt: skip


@pytest.mark.parametrize("case", ENDS)
def test_understood(case):
    lines, code, errors, expected = ENDS[case]
    result = jobs.parse_trial("\n".join(lines), code, errors)
    assert result == replace(expected, ipc_gb_s=3.0 if expected.ipc else None)


def test_lengths_that_were_timed():
    right = json.dumps({"stage": "pointer", "correct": True, "gb_s": 9.0, "reason": ""})
    staged = json.dumps({"stage": "staged", "seconds": STAGED_ONLY.staged})
    sizes = json.dumps({"stage": "sizes", "seconds": TIMED.sizes})
    result = jobs.parse_trial("\n".join([OPEN, staged, right, sizes]), 0, "")
    assert (result.staged, result.sizes) == (STAGED_ONLY.staged, TIMED.sizes)
    lost = jobs.parse_trial("\n".join([OPEN, right]), 139, "")  # it crashed in between
    assert lost.pointer and lost.sizes == ()


# vendor, GPUs, nodes, environment with srun or not -> classes and words of each command
JOBS = {
    "one GPU": ("MPICH", 1, 1, False, {"same_gpu": "mpiexec -n 2 * 0,0"}),
    "two": ("Open MPI", 2, 1, False, {
        "same_gpu": "mpiexec --bind-to none --oversubscribe -n 2 * 0,0",
        "same_node": "mpiexec --bind-to none --oversubscribe -n 2 * 0,1"}),
    "two nodes, no srun": ("MPICH", 1, 2, False, {"same_gpu": "mpiexec -n 2 * 0,0"}),
    "two nodes": ("MPICH", 1, 2, True, {
        "same_gpu": "srun --overlap --kill-on-bad-exit=1 --input=none -N 1 -n 2 --mpi=pmi2 * 0,0",
        "across": "srun --overlap --kill-on-bad-exit=1 --input=none -N 2 --ntasks-per-node=1 -n 2 "
                  "--mpi=pmi2 * 0,0"}),
}  # fmt: skip


@pytest.mark.parametrize("case", JOBS)
def test_jobs(case, tmp_path):
    vendor, count, nodes, slurm, expected = JOBS[case]
    environ = {"PATH": str(tmp_path), **({"SLURM_JOB_ID": "7"} if slurm else {})}
    (tmp_path / "srun").touch(0o755)
    commands = jobs.trial_commands("mpiexec", vendor, count, nodes, environ)
    child = " ".join(module_command("hpctrain.transport.gpu_probe.child"))
    assert {name: " ".join(line) for name, line in commands.items()} == {
        name: line.replace("*", child) for name, line in expected.items()
    }


def test_jobs_obey_slurms_own_choice_and_need_a_launcher(tmp_path):
    (tmp_path / "srun").touch(0o755)
    environ = {"PATH": str(tmp_path), "SLURM_JOB_ID": "7", "SLURM_MPI_TYPE": "cray_shasta"}
    assert not any(
        "--mpi" in w for w in jobs.trial_commands(None, "MPICH", 1, 1, environ)["same_gpu"]
    )
    assert jobs.trial_commands(None, "MPICH", 1, 1, {"PATH": str(tmp_path)}) == {}


OVERRIDES = {
    "staged": Verdict("staged", "staged", "staged", "HPCTRAIN_GPU_PATH=staged"),
    "ipc": Verdict("ipc", "ipc", "staged", "HPCTRAIN_GPU_PATH=ipc"),
    "same_node=cuda-aware, across=gdr": Verdict(
        "ipc", "cuda-aware", "gdr", "HPCTRAIN_GPU_PATH=same_node=cuda-aware, across=gdr"
    ),
}


@pytest.mark.parametrize("override", OVERRIDES)
def test_overridden(override):
    remembered = decision.ProbeResult(
        STAGED_VERDICT, trials=dict.fromkeys(jobs.PAIR_CLASSES, WORKS)
    )
    assert verdicts.apply_override(override, remembered).verdict == OVERRIDES[override]


SURE, UNSURE = replace(PLAIN, query_gpu=True), PLAIN
# remembered trials, what the MPI says in the rank -> the classes that get pointers when asked for
BELIEVED = {
    "no trial": ({}, None, ()),
    "no trial, says no": ({}, UNSURE, ()),
    "no trial, is sure": ({}, SURE, jobs.PAIR_CLASSES),
    "one worked, is sure": ({"same_gpu": WORKS}, None, jobs.PAIR_CLASSES),
    "one worked, says no": ({"same_gpu": replace(WORKS, claims=PLAIN)}, SURE, ("same_gpu",)),
    "crashed": ({"same_gpu": CRASHED}, SURE, ()),
    "crashed, though sure": ({"same_gpu": replace(CRASHED, claims=SURE)}, SURE, ()),
    "one crashed": ({"same_gpu": WORKS, "across": CRASHED}, SURE, ("same_gpu",)),
}


@pytest.mark.parametrize("case", BELIEVED)
def test_who_asks_for_pointers_needs_a_trial_or_an_mpi_that_is_sure(case, monkeypatch):
    by_class, says, expected = BELIEVED[case]
    monkeypatch.setattr(verdicts, "_claims_of_running_mpi", lambda: says)
    result = verdicts.apply_override(
        "cuda-aware", decision.ProbeResult(STAGED_VERDICT, trials=by_class)
    )
    ways = {name: getattr(result.verdict, name) for name in jobs.PAIR_CLASSES}
    assert ways == {n: "cuda-aware" if n in expected else "staged" for n in jobs.PAIR_CLASSES}
    assert result.unproven == tuple(name for name in jobs.PAIR_CLASSES if name not in expected)
    assert ("refused for" in result.verdict.reason, "doctor" in result.remedy) == (
        bool(result.unproven),
    ) * 2


@on_ranks(1, mpi=(1,))
def test_what_an_mpi_says_in_a_rank(ranks):
    """None of these was built for CUDA; among threads none was started."""
    for answer in ranks(lambda world: (verdicts._claims_of_running_mpi(), world.transport)):
        assert answer[0] is None or not answer[0].reports_cuda
        assert answer[1] == "local" or answer[0] is not None


def test_a_trial_asks_for_threads_as_a_run_does(monkeypatch):
    levels = []
    monkeypatch.setattr(probe_child.resource, "setrlimit", lambda *_: None)
    monkeypatch.setattr(probe_child, "_use_gpu", lambda ordinal: None)
    monkeypatch.setattr(probe_child.sys, "argv", ["trial", "0,0"])
    monkeypatch.setattr(
        probe_child.MPI, "Init_thread", lambda level: levels.append(level) or sys.exit()
    )
    with pytest.raises(SystemExit):
        probe_child.main()
    assert levels == [probe_child.MPI.THREAD_MULTIPLE]


#: A launcher whose rank is in a group of its own: it ends that one if it is asked to.
LAUNCHER_OF_ONE = """
import signal, subprocess, sys
rank = subprocess.Popen(["sleep", "100"], start_new_session=True)
signal.signal(signal.SIGTERM, lambda *_: (rank.kill(), rank.wait(), sys.exit("ended")))
print('{"stage": "started", "hosts": []}', flush=True)
open(sys.argv[1], "w").write(str(rank.pid))
signal.pause()
"""


def alive(pid):
    return os.path.exists(f"/proc/{pid}")


def interrupted(monkeypatch, note, error):
    """Let the first wait for a process end with `error`, once something is written in `note`."""
    real, first = subprocess.Popen.communicate, iter([True])

    def communicate(process, **limit):
        if next(first, False):
            while not (note.exists() and note.read_text()) and process.poll() is None:
                time.sleep(0.01)
            raise error
        return real(process, **limit)

    monkeypatch.setattr(subprocess.Popen, "communicate", communicate)


@pytest.mark.parametrize("ended_by", ["the limit", "us"])
def test_no_rank_of_a_trial_outlives_it(monkeypatch, tmp_path, ended_by):
    """Also where this process is ended, as by `hpctrain launch` at its time limit."""
    note = tmp_path / "pid"
    error = SystemExit() if ended_by == "us" else subprocess.TimeoutExpired("trial", 1)
    interrupted(monkeypatch, note, error)
    line = [sys.executable, "-c", LAUNCHER_OF_ONE, str(note)]
    if ended_by == "us":
        with pytest.raises(SystemExit):
            jobs.run_trial(line, os.environ)
    else:
        result = jobs.run_trial(line, os.environ)
        assert (result.pointer, result.ended) == (False, "still running after 60 s")
    assert not alive(int(note.read_text()))


CHILD = """
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: (open({!r}, "w"), sys.exit()))
open({!r}, "w").write("up")
signal.pause()
"""


def test_launch_ends_trials_that_take_too_long(monkeypatch, tmp_path, caplog):
    up, ended = tmp_path / "up", tmp_path / "ended"
    python, script = tmp_path / "python", tmp_path / "child.py"
    script.write_text(CHILD.format(str(ended), str(up)))
    # `#!` takes no path with a blank, as that of a checkout may be.
    python.write_text(f"#!/bin/sh\nexec '{sys.executable}' '{script}'\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    interrupted(monkeypatch, up, subprocess.TimeoutExpired("child", 1))
    assert probe_process.run_probe() == "" and ended.exists()
    assert "did not end within 240 s" in caplog.text


@pytest.mark.parametrize("override", ["rdma", "across=ipc", "everywhere=gdr", "across=", "a=b=c"])
def test_an_override_that_makes_no_sense(override):
    with pytest.raises(UsageError, match="expected one of gdr, cuda-aware, ipc, staged"):
        verdicts.apply_override(override, decision.ProbeResult(STAGED_VERDICT))


def test_what_a_verdict_depends_on(tmp_path):
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/os-release").write_text("NAME=one")
    base = {"XDG_CACHE_HOME": str(tmp_path)}
    file = verdicts.cache_file(base, tmp_path)
    assert file.is_relative_to(tmp_path)
    assert verdicts.cache_file({**base, "OMPI_COMM_WORLD_RANK": "3", "HOME": "x"}, tmp_path) == file
    assert verdicts.cache_file({**base, "UCX_TLS": "all"}, tmp_path) != file
    (tmp_path / "etc/os-release").write_text("NAME=other")
    assert verdicts.cache_file(base, tmp_path) != file


def test_what_cannot_be_remembered_is_said(tmp_path, capfd):
    (tmp_path / "cache").write_text("not a folder")
    verdicts._write_cache(tmp_path / "cache" / "one.json", decision.ProbeResult(STAGED_VERDICT))
    errors = capfd.readouterr().err
    assert f"cannot be cached in {tmp_path / 'cache'} (" in errors
    assert "set XDG_CACHE_HOME to a folder" in errors


# ---- real jobs, over a made-up CuPy ----


@pytest.fixture
def machine(tmp_path):
    """Return the environment of a machine with made-up GPUs and a cache of its own."""
    folder = cupy_package.install(tmp_path / "site")
    path = f"{folder}:{os.environ.get('PYTHONPATH', '')}"
    cache = tmp_path / "cache"
    return {**os.environ, **LAUNCHER, "PYTHONPATH": path, "XDG_CACHE_HOME": str(cache)}


def find(environ, *arguments, notice=""):
    line = [sys.executable, "-m", "hpctrain.transport.gpu_probe.verdicts", *arguments]
    process = subprocess.run(line, env=environ, capture_output=True, text=True, timeout=100)
    assert process.returncode == 0 and notice in process.stderr, process.stderr
    return verdicts.result_from_json(process.stdout)


REFERENCE = """
import json, os
from dataclasses import asdict
from hpctrain.transport.gpu_probe import verdicts
print(json.dumps(asdict(verdicts.cached_result(os.environ))))
"""


@pytest.mark.full
@pytest.mark.processes
def test_an_mpi_that_takes_these_pointers(machine):
    result = find(machine, notice="probing the path of GPU memory, once (same gpu, same node)")
    assert (result.verdict.same_gpu, result.verdict.same_node) == ("cuda-aware", "cuda-aware")
    assert result.verdict.across == "staged"
    assert all(
        outcome.ipc and outcome.ipc_gb_s and outcome.pointer_gb_s
        for outcome in result.trials.values()
    )
    for outcome in result.trials.values():
        assert len(outcome.sizes) >= 4 and all(min(size) > 0 for size in outcome.sizes)
        assert [n for n, _ in outcome.staged] == [n for n, *_ in outcome.sizes]
    # A rank, with all its launcher's variables, finds what was remembered.
    line = [BIN / "mpiexec", "-n", "1", sys.executable, "-c", REFERENCE]
    rank = subprocess.run(line, env=machine, capture_output=True, text=True, timeout=100)
    assert verdicts.result_from_json(rank.stdout) == result
    by_pointer = {**machine, "HPCTRAIN_GPU_PATH": "same_gpu=cuda-aware"}
    rank = subprocess.run(line, env=by_pointer, capture_output=True, text=True, timeout=100)
    assert verdicts.result_from_json(rank.stdout).verdict.same_gpu == "cuda-aware"
    # and what is remembered is not tried again
    broken = {**machine, "FAKE_CRASH": "1"}
    assert find(broken) == result


@pytest.mark.processes
@pytest.mark.either
def test_an_mpi_that_crashes_on_a_device_pointer(machine):
    result = find({**machine, "FAKE_CRASH": "1", "FAKE_GPUS": "1"}, "--again")
    assert (result.verdict.same_gpu, result.verdict.same_node) == ("ipc", "ipc")
    trial = result.trials["same_gpu"]
    assert trial.ipc and trial.pointer is False and trial.claims.reports_cuda is False
    assert len(trial.staged) >= 4 and result.verdict.seconds["same_gpu"] == trial.staged
    assert trial.sizes == () and result.verdict.by_size == {}
    assert "segmentation fault" in result.verdict.reason
    assert "built without CUDA" in result.verdict.reason


@pytest.mark.processes
@pytest.mark.either
def test_a_container_that_opens_no_handles(machine):
    result = find({**machine, "FAKE_CRASH": "1", "FAKE_IPC": "refused", "FAKE_GPUS": "1"})
    assert result.verdict.same_gpu == "staged"
    assert "CUDA IPC: cudaErrorNotSupported" in result.verdict.reason


@pytest.mark.processes
@pytest.mark.either
def test_without_a_gpu_nothing_is_tried(tmp_path):
    if gpus.driver_cuda_version():
        pytest.skip("this machine has a GPU")
    result = find({**os.environ, "XDG_CACHE_HOME": str(tmp_path)})
    assert result.trials == {}
    assert "CuPy" in result.verdict.reason or "no NVIDIA driver" in result.verdict.reason
    assert not (tmp_path / "hpctrain").exists()
