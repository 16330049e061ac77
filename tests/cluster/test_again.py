"""What the end of every template makes of how a job ended: a table, with a Slurm that is made up.

On a real one: test_on_slurm.py.
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass

import pytest

from hpctrain.cluster.slurm import Job, render

SRUN = """#!/bin/bash
# A rank that ends as a row of the table says; it began with what lies in runs/digits-7.
trap '[ $((deaf++)) -lt $DEAF ] || { kill $!; exit 75; }' USR1
sleep 0.01 # the time of a file is coarser than that of a clock
[ -z "$ASK" ] || { sleep 9 & kill -USR1 $PPID; until wait; do :; done; }
if [ -n "$SAVED" ]; then mkdir -p runs/digits-7/checkpoints/step-1; touch "$_"/manifest.json; fi
[ -z "$SAYS" ] || printf '{\\n  "status": "%s",\\n  "exit_code": %s,\\n  "reason": "why"\\n}\\n' \\
    $SAYS >runs/digits-7/summary.json
exit $CODE
"""
SCONTROL = """#!/bin/bash
if [ "$1" = -o ]; then echo "JobId=7 JobState=$STATE PreemptTime=None EndTime=$END"; exit; fi
echo "$@" >>said
exit $REFUSED
"""
AGAIN = "requeue 7\n"
LATER = "to go on submit again, with --out runs/digits-7 or that as run= in the script"
FAR, SOON = "2099-01-01T00:00:00", "2020-01-01T00:00:00"


@dataclass(frozen=True)
class Part:
    """How one part of a job goes, and what is to come of it."""

    says: str = ""  #: status and exit code in summary.json; empty: it writes none
    code: int = 0  #: of the launcher
    ends: int = 0  #: the script's exit code
    again: bool = False
    saved: bool = False
    ask: bool = False  #: it gets USR1
    deaf: int = 0  #: how often the launcher does not hand it on
    before: str = ""  #: the status in the summary of the part before
    tries: str = ""  #: how many parts before this one were lost and had saved nothing
    restarts: int = 0
    state: str = "RUNNING"  #: of the job, in Slurm's words
    refused: int = 0  #: how scontrol ends
    told: str = ""  #: what the job says at its end


TABLE = {
    "done": Part("done 0"),
    "done, whatever the launcher says": Part("done 0", code=137),
    "stopped": Part("stopped 75", code=75, again=True, told="for restart 1 of 20"),
    "stopped, whatever the launcher says": Part("stopped 75", code=0, again=True),
    "stopped at the cap": Part("stopped 75", ends=75, restarts=20, told=f"is enough: {LATER}"),
    "stopped below the cap": Part("stopped 75", again=True, restarts=19),
    "requeued by Slurm beyond the cap": Part(
        "done 0", ends=75, restarts=21, told=f"restarted 21 times, of 20: {LATER}"
    ),
    "lost at the cap": Part(code=9, ends=75, restarts=20, told=f"is enough: {LATER}"),
    "cancelled": Part("stopped 75", ends=75, state="CANCELLED", told="why; Slurm says CANCELLED"),
    "requeued by an administrator": Part("stopped 75", ends=75, state="PENDING"),
    "cannot be requeued": Part(
        "stopped 75", ends=75, again=True, refused=1, told=f"back into the queue: {LATER}"
    ),
    "killed before training": Part(ask=True, again=True),
    "asked before there are ranks": Part("done 0", ask=True, deaf=1, again=True),
    "not finite": Part("failed 3", code=3, ends=3),
    "not finite, saved": Part("failed 3", code=3, ends=3, saved=True),
    "refused": Part(code=2, ends=2),
    "refused, after a part that stopped": Part(code=2, ends=2, before="stopped 75"),
    "refused, after one that was done": Part(code=2, ends=2, before="done 0"),
    "killed, nothing saved": Part(code=9, again=True),
    "killed twice, nothing saved": Part(code=143, again=True, tries="1"),
    "killed three times, nothing saved": Part(code=143, ends=143, tries="2"),
    "lost, said to be fine": Part(code=0, ends=1),
    "lost, said to be fine, saved": Part(code=0, again=True, saved=True),
    "lost, saved": Part(code=14, again=True, saved=True, tries="9"),
    "MPI does not start": Part(code=15, again=True),
    "no such command": Part(code=127, ends=127),
    "a bug before training": Part(code=1, ends=1),
    "a bug, nothing saved": Part("failed 1", code=1, ends=1),
    "lost and told, saved": Part("failed 1", code=1, again=True, saved=True),
    "hung, saved": Part("hung 86", code=86, again=True, saved=True),
    "hung, nothing saved": Part("hung 86", code=86, ends=86),
}


def run(folder, part: Part, **more: str) -> subprocess.CompletedProcess[str]:
    for name, text in {"srun": SRUN, "scontrol": SCONTROL, "job.sh": render(Job(nodes=4))}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    (folder / "runs/digits-7").mkdir(parents=True)
    if part.tries:
        (folder / "runs/digits-7/.tries").write_text(part.tries)
    if part.before:
        said = '{{\n  "status": "{}",\n  "exit_code": {}\n}}\n'.format(*part.before.split())
        (folder / "runs/digits-7/summary.json").write_text(said)
    environ = {
        "PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "7",
        "SLURM_SUBMIT_DIR": str(folder), "SLURM_RESTART_COUNT": str(part.restarts),
        "SAYS": part.says, "CODE": str(part.code), "SAVED": "1" * part.saved,
        "ASK": "1" * part.ask, "DEAF": str(part.deaf), "STATE": part.state,
        "REFUSED": str(part.refused), "END": FAR,
    }  # fmt: skip
    return subprocess.run(
        ["bash", "job.sh"], cwd=folder, env=environ | more, capture_output=True, text=True,
        timeout=60,
    )  # fmt: skip


@pytest.mark.parametrize("case", TABLE)
def test_what_comes_of_a_part(case, tmp_path):
    part = TABLE[case]
    done = run(tmp_path, part)
    assert (done.returncode, done.stderr) == (part.ends, "")
    assert part.told in done.stdout
    said = tmp_path / "said"
    assert (said.read_text() if said.exists() else "") == AGAIN * part.again


def test_a_task_of_an_array_is_put_back_alone(tmp_path):
    """The number of the last task is that of the array: all tasks would run again."""
    array = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2"}
    run(tmp_path, Part("stopped 75"), **array)
    assert (tmp_path / "said").read_text() == "requeue 7_2\n"


@pytest.mark.parametrize("end, why", [(SOON, "time limit\n"), (FAR, ""), ("Unknown", "")])
def test_why_a_stop_was_asked_for(end, why, tmp_path):
    run(tmp_path, Part(ask=True), END=end)
    assert (tmp_path / "runs/digits-7/.why").read_text() == why
