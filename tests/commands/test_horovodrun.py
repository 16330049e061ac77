"""`hpctrain-horovodrun`: each option of horovodrun is used, named as ignored, or refused."""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from click.testing import CliRunner

from hpctrain import cli
from hpctrain.cluster import launch, loss_policy
from hpctrain.core.errors import UsageError
from hpctrain.horovod.alias import SEARCH_PATH
from hpctrain.horovod.variables import USED as USED_VARIABLES
from hpctrain.tools.doctor import examine
from hpctrain.transport.gpu_probe import verdicts
from hpctrain.transport.gpu_probe.decision import ProbeResult
from hpctrain.transport.paths import STAGED_VERDICT

#: the options of horovodrun 0.28.1, with the values of some
OPTIONS = """
--disable-cache --start-timeout=9 --network-interfaces=eth0 --network-interface=eth0
--output-filename=o --ssh-port=22 -p=22 --ssh-identity-file=i -i=i --fusion-threshold-mb=1
--cycle-time-ms=0.5 --cache-capacity=0 --hierarchical-allreduce --no-hierarchical-allreduce
--hierarchical-allgather --no-hierarchical-allgather --torus-allreduce --no-torus-allreduce
--autotune --no-autotune --autotune-log-file=f --autotune-warmup-samples=3
--autotune-steps-per-sample=9 --autotune-bayes-opt-max-samples=9
--autotune-gaussian-process-noise=0.8 --min-np=1 --min-num-proc=1 --max-np=4 --max-num-proc=4
--slots-per-host=1 --elastic-timeout=600 --reset-limit=3 --timeline-filename=t.json
--timeline-mark-cycles --no-timeline-mark-cycles --no-stall-check --stall-check
--stall-check-warning-time-seconds=60 --stall-check-shutdown-time-seconds=0
--mpi-threads-disable --no-mpi-threads-disable --tcp --num-nccl-streams=1 --thread-affinity=0
--gloo-timeout-seconds=30 --log-level=INFO --log-with-timestamp --log-without-timestamp
-prefix-timestamp --prefix-output-with-timestamp --log-hide-timestamp --no-log-hide-timestamp
-H=localhost:4 --hosts=localhost:4 --gloo --mpi --verbose --host-discovery-script=s --jsrun
--mpi-args=-x --binding-args=b --config-file=f
"""
USED = {
    "--fusion-threshold-mb", "--min-np", "--min-num-proc", "-H", "--hosts", "--mpi", "--verbose",
    "--cycle-time-ms", "--timeline-filename", "--stall-check", "--no-stall-check",
    "--stall-check-warning-time-seconds", "--stall-check-shutdown-time-seconds",
}  # fmt: skip
REFUSED = {
    "--host-discovery-script", "--jsrun", "--mpi-args", "--binding-args", "--config-file"
}  # fmt: skip
#: a name in the line of ignored options, where it is another one than the user's
LONG = {"-p": "--ssh-port", "-i": "--ssh-identity-file", "--max-num-proc": "--max-np",
        "-prefix-timestamp": "--prefix-output-with-timestamp"}  # fmt: skip


@pytest.fixture
def run(monkeypatch):
    """Run horovodrun, and return its result and the call of launch_program."""
    for name in ("PYTHONPATH", "SLURM_JOB_NODELIST", *USED_VARIABLES):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    calls = []
    monkeypatch.setattr(launch, "launch_program", lambda *call: calls.append(call) or 5)

    def run(*words):
        result = CliRunner().invoke(cli.hpctrain, ["horovodrun", *words])
        return result, calls

    return run


@pytest.mark.parametrize("option", OPTIONS.split())
def test_each_option_of_horovodrun_is_used_named_or_refused(run, option):
    name, equals, value = option.partition("=")
    result, calls = run("-np", "2", *([name, value] if equals else [name]), "python", "x.py")
    if name in REFUSED:
        assert isinstance(result.exception, UsageError) and calls == []
        assert str(result.exception).startswith(f"{name} would change the job, and is refused: ")
        return
    assert (result.exit_code, len(calls)) == (5, 1), result.output
    ignored = f"hpctrain: ignored: {LONG.get(name, name)} ("
    assert result.stderr.startswith(ignored) is (name not in USED)


ELASTIC = loss_policy.LossPolicy(elastic=True, min_ranks=2)
COMMAND = ("python", "x.py", "-np", "--gloo")
#: options, ranks, policy, variables
MAPPED = [
    ("-np 4", 4, loss_policy.LossPolicy(), {}),
    ("--num-proc=4 --mpi", 4, loss_policy.LossPolicy(), {}),
    ("-np 4 --min-np 2", 4, ELASTIC, {}),
    ("-np 4 --min-num-proc 2 -H localhost:2,127.0.0.1:2", 4, ELASTIC, {}),
    ("-np 3 --fusion-threshold-mb 32", 3, loss_policy.LossPolicy(),
     {"FUSION_THRESHOLD": str(32 << 20)}),
    ("-np 3 --fusion-threshold-mb 0", 3, loss_policy.LossPolicy(), {"FUSION_THRESHOLD": "0"}),
    ("-np 3 --cycle-time-ms 0.5 --timeline-filename t.json", 3, loss_policy.LossPolicy(),
     {"CYCLE_TIME": "0.5", "TIMELINE": "t.json"}),
    ("-np 3 --no-stall-check", 3, loss_policy.LossPolicy(), {"STALL_CHECK_DISABLE": "1"}),
    ("-np 3 --stall-check --stall-check-warning-time-seconds 9 "
     "--stall-check-shutdown-time-seconds 0", 3, loss_policy.LossPolicy(),
     {"STALL_CHECK_DISABLE": "0", "STALL_CHECK_TIME_SECONDS": "9",
      "STALL_SHUTDOWN_TIME_SECONDS": "0"}),
]  # fmt: skip


@pytest.mark.parametrize(("options", "ranks", "policy", "variables"), MAPPED)
def test_options_of_the_job(run, monkeypatch, options, ranks, policy, variables):
    monkeypatch.setenv("PYTHONPATH", "/mine")
    result, calls = run(*options.split(), *COMMAND)
    assert calls == [(ranks, COMMAND, policy)]
    observed = {name: os.environ[name] for name in USED_VARIABLES if name in os.environ}
    assert observed == {f"HOROVOD_{name}": value for name, value in variables.items()}
    assert os.environ["PYTHONPATH"] == f"{SEARCH_PATH}{os.pathsep}/mine"
    assert (result.exit_code, result.output) == (5, "")


def test_ignored_options_are_one_line_by_reason(run):
    words = ["--disable-cache", "--gloo", "--cache-capacity", "0", "--autotune"]
    result, _ = run("-np", "2", *words, "-p", "22", "python", "x.py")
    line = result.stderr.removesuffix("\n")
    assert "\n" not in line
    assert "--disable-cache, --cache-capacity (nothing is cached" in line
    assert "--autotune (the all-reduce is chosen by size" in line and "--ssh-port (no ssh" in line
    assert line.endswith("--gloo (messages are MPI's)")


def test_verbose_prints_a_command_that_does_the_same(run):
    result, _ = run("-np", "2", "--min-np", "1", "--fusion-threshold-mb", "1", "--verbose", "sh")
    assert result.stderr == (
        f"hpctrain: env PYTHONPATH={SEARCH_PATH} HOROVOD_FUSION_THRESHOLD=1048576 hpctrain launch "
        "-n 2 --elastic --min-ranks 1 -- sh\n"
    )


#: lines of a file of hosts, the hosts of the Slurm job, part of the error
HOSTS = {
    "here": ("localhost slots=2\n", [], ""),
    "by name": (f"{socket.gethostname()} slots=2\n\n", [], ""),
    "of Slurm": ("n1 slots=1\nn2 slots=1\n", ["n1", "n2"], ""),
    "here, in Slurm": ("localhost slots=2\n", [socket.gethostname()], ""),
    "few": ("localhost slots=1\n", [], "-np 2: the hosts localhost:1 have 1 slot"),
    "others": ("n1 slots=2\n", [], "mpirun -n 2 --host n1:2 python -m hpctrain.horovod SCRIPT"),
    "here, of two": ("localhost slots=2\n", ["n1", "n2"], "on every host of a Slurm job"),
    "no slots": ("localhost\n", [], "expected HOST:SLOTS,..., or lines HOST slots=SLOTS"),
}


@pytest.mark.parametrize("case", HOSTS)
def test_hosts_are_the_hosts_of_launch(run, monkeypatch, tmp_path, case):
    from hpctrain.cluster import hosts

    content, allocated, fault = HOSTS[case]
    monkeypatch.setattr(hosts, "allocated_hosts", lambda _: [hosts.Host(n, 1) for n in allocated])
    file = tmp_path / "hosts"
    file.write_text(content)
    result, calls = run("-np", "2", "-hostfile", str(file), "python", "x.py")
    assert fault in str(result.exception) and len(calls) == (not fault)


#: words, part of the error
WRONG = [
    ("python x.py", "the number of ranks is missing"),
    ("-np 2", "the command is missing"),
    ("-np 2 --min-np 3 python x.py", "--min-np: expected 1 to 2, the ranks of -np, seen 3"),
    ("-np 2 --fusion-threshold-mb -1 python x.py", "Invalid value for '--fusion-threshold-mb'"),
    ("-np 2 --nccl python x.py", "No such option '--nccl'"),
]


@pytest.mark.parametrize(("words", "message"), WRONG)
def test_wrong_options_are_refused(run, words, message):
    result, calls = run(*words.split())
    assert result.exit_code != 0 and calls == []
    assert message in f"{result.output}{result.exception}"


def test_two_lists_of_hosts_are_refused(run, tmp_path):
    file = tmp_path / "hosts"
    file.write_text("localhost slots=2")
    result, _ = run("-np", "2", "-H", "localhost:2", "--hostfile", str(file), "python", "x.py")
    assert "leave one out" in str(result.exception)


@pytest.mark.parametrize(("torch", "path"), [("2.13.0", "staged"), (None, "cuda-aware")])
def test_the_build_is_a_table_as_of_horovod(run, monkeypatch, torch, path):
    mpi = launch.MpiInstallation("Open MPI", "5.0.8", "libmpi.so", None)
    verdict = replace(STAGED_VERDICT, same_node=path, reason="they arrived")
    monkeypatch.setattr(examine, "torch_version", lambda: torch)
    monkeypatch.setattr(launch, "find_mpi", lambda: mpi)
    monkeypatch.setattr(verdicts, "cached_result", lambda _: ProbeResult(verdict))
    result, calls = run("--check-build")
    assert (result.exit_code, calls) == (0, [])
    lines = result.stdout.splitlines()
    assert ("    [X] PyTorch: 2.13.0" in lines) is bool(torch)
    arrived = "    [X] MPI on GPU memory (CUDA-aware): they arrived"
    assert (arrived in lines) is (path == "cuda-aware")
    assert {"    [ ] TensorFlow", "    [ ] NCCL", "    [ ] Gloo"} <= {*lines}
    assert lines.count("    [X] MPI: Open MPI 5.0.8, libmpi.so") == 2


@pytest.mark.processes
@pytest.mark.either
def test_the_program_runs_a_script_that_imports_horovod(start, tmp_path):
    """Without PyTorch: a process of the script, too, finds the package."""
    code = "import horovod; print(horovod.__name__, horovod.__version__)"
    script = tmp_path / "script.py"
    script.write_text(f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}])")
    assert [point.value for point in entry_points(name="hpctrain-horovodrun")]
    program = Path(sys.executable).with_name("hpctrain-horovodrun")
    completed = start(program, "-np", "2", sys.executable, script).finish()
    assert completed.returncode == 0, completed.stderr
    assert completed.stdout.split() == ["hpctrain.horovod", "0.28.1"] * 2
