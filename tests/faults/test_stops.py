"""Stop requests by any signal: a checkpoint at an agreed step, exit code 75, and a resume."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest
from jobs import MARK, command_that_resumes, sets, trap
from processes import BIN, LAUNCHER

pytestmark = [pytest.mark.processes, pytest.mark.either]

# Who gets the signal: a rank from its own model at step 7, mpiexec, or `hpctrain launch`, which
# hands on SIGTERM, SIGUSR1 and SIGHUP in the same way: tests/cluster/test_launch.py. And what the
# run reports.
REQUESTED = {
    "SIGUSR1 to a rank": ("usr1", "by SIGUSR1"),
    "SIGTERM to a rank": ("term", "by SIGTERM"),
    "SIGUSR1 to mpiexec": ((signal.SIGUSR1, False), "by SIGUSR1"),
    "Ctrl-C to launch": ((signal.SIGINT, True), "on request (Ctrl-C)"),
}
LONG = sets(run_epochs=5000, checkpoint_every_epochs="")


@pytest.fixture
def run_line(mark, tmp_path):
    """Run a command line in the folder of the test, as a user would who copies it."""
    own = {MARK: mark, "OMP_NUM_THREADS": "1", "PATH": f"{BIN}:{os.environ['PATH']}"}
    return lambda words: subprocess.run(
        words, env={**os.environ, **LAUNCHER, **own}, cwd=tmp_path,
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip


@pytest.mark.sample(2)
@pytest.mark.parametrize("requested", REQUESTED)
def test_a_stop(digits, requested):
    method, cause = REQUESTED[requested]
    if isinstance(method, str):
        job = digits(*LONG, *trap(method, 1))
    else:
        number, launched = method
        job = digits(*LONG, launch=launched)
        job.reach(20)
        job.job.process.send_signal(number)
    ended = job.finish()
    assert ended.returncode == 75, ended.stderr
    summary = job.summary
    assert (summary["status"], summary["exit_code"]) == ("stopped", 75)
    assert job.steps == [summary["steps"]]
    message = f"stopped at step {summary['steps']} of 60000 {cause}; resume me"
    assert ended.stderr.count(message) == 1, ended.stderr
    assert summary["reason"] == message
    assert f"hpctrain: results: {job.out}\n" in ended.stderr
    command = command_that_resumes(ended.stderr)
    assert ("launch" in command) == (not isinstance(method, str) and method[1])
    assert command[-3:] == ["--out", str(job.out), "--resume"]


def test_a_stopped_run_goes_on_to_the_same_end(digits, undisturbed, run_line):
    keys = sets(run_epochs=3)
    job = digits(*keys, *trap("term", 1))
    stopped = job.finish()
    assert stopped.returncode == 75
    (step,) = job.steps
    # What was told to resume it does: the trap at step 7 lies behind.
    ended = run_line(command_that_resumes(stopped.stderr))
    assert ended.returncode == 0, ended.stderr
    assert f"resumed at step {step} of 36" in ended.stderr
    assert f"results: {job.out}\n" in ended.stderr  # whole, on a line of its own
    assert job.summary["params_sha256"] == undisturbed(*keys)["params_sha256"]
    assert job.summary["status"] == "done"
