"""Asked to stop, by whatever signal: a checkpoint at an agreed step, exit 75, and on from there."""

from __future__ import annotations

import signal

import pytest
from jobs import sets, trap

pytestmark = pytest.mark.processes

# Who gets the signal: a rank from its own model at step 7, mpiexec, or `hpctrain launch`, which
# hands on SIGTERM, SIGUSR1 and SIGHUP in the same way: tests/cluster/test_launch.py. And what the
# ranks get.
ASKED = {
    "SIGUSR1 to a rank": ("usr1", "SIGUSR1"),
    "SIGTERM to a rank": ("term", "SIGTERM"),
    "SIGUSR1 to mpiexec": ((signal.SIGUSR1, False), "SIGUSR1"),
    "Ctrl-C to launch": ((signal.SIGINT, True), "SIGUSR1"),
}
LONG = sets(run_epochs=5000, checkpoint_every_epochs="")


@pytest.mark.parametrize("asked", ASKED)
def test_a_stop(digits, asked):
    how, name = ASKED[asked]
    if isinstance(how, str):
        job = digits(*LONG, *trap(how, 1))
    else:
        number, launched = how
        job = digits(*LONG, launch=launched)
        job.reach(20)
        job.job.process.send_signal(number)
    ended = job.finish()
    assert ended.returncode == 75, ended.stderr
    summary = job.summary
    assert (summary["status"], summary["exit_code"]) == ("stopped", 75)
    assert job.steps == [summary["steps"]]
    said = f"stopped at step {summary['steps']} of 60000 by {name}; resume me"
    assert ended.stderr.count(said) == 1, ended.stderr
    assert summary["reason"] == said


def test_a_stopped_run_goes_on_to_the_same_end(digits, undisturbed):
    keys = sets(run_epochs=3)
    job = digits(*keys, *trap("term", 1))
    assert job.finish().returncode == 75
    (stopped,) = job.steps
    resumed = digits(*keys, *trap("none", 1), "--resume")
    ended = resumed.finish()
    assert ended.returncode == 0, ended.stderr
    assert f"resumed at step {stopped} of 36" in ended.stderr
    assert resumed.summary["params_sha256"] == undisturbed(*keys)["params_sha256"]
    assert resumed.summary["status"] == "done"
