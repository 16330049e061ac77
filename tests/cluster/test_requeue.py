"""The end of every template: requeue or not, for each way a job can end, on a simulated Slurm.

On a real one: test_on_slurm.py.
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass

import pytest

from hpctrain.cluster.slurm.render import Job, render

SRUN = """#!/bin/bash
# A rank that ends as a row of the table says; it began with what lies in runs/digits-7.
words="$*"
echo "${words%% hpctrain*} [$HPCTRAIN_RESTARTS]" >>starts
[ "$(wc -l <starts)" = 1 ] || SAYS=${THEN-$SAYS}
trap '[ $((deaf++)) -lt $DEAF ] || { [ -n "$TALKS" ] || exit 75; ASK=; }' USR1
sleep 0.01 # the time of a file is coarser than that of a clock
[ -z "$ASK" ] || kill -USR1 $PPID
for ((i = 0; i < 500; i++)); do [ -n "$ASK" ] || break; sleep 0.02; done
if [ -n "$SAVED" ]; then mkdir -p runs/digits-7/checkpoints/step-1; touch "$_"/manifest.json; fi
[ -z "$SAYS" ] || printf '{\\n  "status": "%s",\\n  "exit_code": %s,\\n  "reason": "why"\\n}\\n' \\
    $SAYS >runs/digits-7/summary.json
exit $CODE
"""
SCONTROL = """#!/bin/bash
# It does not answer the first $SILENT calls, and refuses the first $REFUSED requests.
if [ "$1" = -o ]; then
    echo >>calls
    [ "$(wc -l <calls)" -gt $SILENT ] || exit 1
    [ "$SLURM_TIME_FORMAT" != relative ] || END=00:00 # today
    echo "JobId=7 JobState=$STATE PreemptTime=None EndTime=$END"
    exit
fi
echo "$@" >>said
[ "$(wc -l <said)" -gt $REFUSED ]
"""
SINFO = """#!/bin/sh
echo "$STATES"
"""
SLEEP = """#!/bin/sh
case $1 in 0*) exec /bin/sleep $1 ;; *) exec /bin/sleep 0.01 ;; esac # pauses are not waited for
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
    again: int = 0  #: how often Slurm is asked to put it back into the queue
    saved: bool = False
    ask: bool = False  #: it gets USR1
    deaf: int = 0  #: how often the launcher does not hand it on
    talks: bool = False  #: it writes its summary nevertheless
    before: str = ""  #: the status in the summary of the part before
    tries: str = ""  #: how many parts before this one were lost and had saved nothing
    restarts: int = 0
    state: str = "RUNNING"  #: of the job, in Slurm's words
    refused: int = 0  #: how often it does not put the job back into the queue
    silent: int = 0  #: how often it does not answer
    warn_s: int = 120
    told: str = ""  #: what the job says at its end
    starts: int = 1  #: how often the ranks are started in its allocation


TABLE = {
    "done": Part("done 0"),
    "done, whatever the launcher says": Part("done 0", code=137),
    "stopped": Part("stopped 75", code=75, again=1, told="for restart 1 of 20"),
    "stopped, whatever the launcher says": Part("stopped 75", code=0, again=1),
    "stopped at the cap": Part("stopped 75", ends=75, restarts=20, told=f"is enough: {LATER}"),
    "stopped below the cap": Part("stopped 75", again=1, restarts=19),
    "requeued by Slurm beyond the cap": Part(
        "done 0", ends=75, restarts=21, told=f"restarted 21 times, of 20: {LATER}"
    ),
    "lost at the cap": Part(code=9, ends=75, restarts=20, told=f"is enough: {LATER}", starts=2),
    "cancelled": Part("stopped 75", ends=75, state="CANCELLED", told="why; Slurm says CANCELLED"),
    "requeued by an administrator": Part("stopped 75", ends=75, state="PENDING"),
    "cannot be requeued": Part(
        "stopped 75", ends=75, again=5, refused=9, told=f"back into the queue: {LATER}"
    ),
    "can be requeued later": Part("stopped 75", again=2, refused=1),
    "Slurm answers later": Part("stopped 75", again=1, silent=1),
    "Slurm does not answer": Part(
        "stopped 75", ends=75, silent=10**6, warn_s=2, told=f"why; Slurm does not answer: {LATER}"
    ),
    "asked, and Slurm answers later": Part("stopped 75", again=1, ask=True, talks=True, silent=3),
    "killed before training": Part(ask=True, again=1, told="asked to stop, and the ranks ended"),
    "killed before training, told by another rank": Part(
        "failed 1", code=1, ask=True, talks=True, again=1
    ),
    "not finite when it was asked": Part("failed 3", code=3, ends=3, ask=True, talks=True),
    "hung when it was asked": Part("hung 86", code=86, ends=86, ask=True, talks=True),
    "asked before there are ranks": Part("done 0", ask=True, deaf=1, again=1),
    "not finite": Part("failed 3", code=3, ends=3),
    "not finite, saved": Part("failed 3", code=3, ends=3, saved=True),
    "refused": Part(code=2, ends=2),
    "refused, after a part that stopped": Part(code=2, ends=2, before="stopped 75"),
    "refused, after one that was done": Part(code=2, ends=2, before="done 0"),
    "killed, nothing saved": Part(code=9, again=1, starts=2),
    "killed twice, nothing saved": Part(code=143, again=1, tries="1"),
    "killed three times, nothing saved": Part(code=143, ends=143, tries="2"),
    "lost, said to be fine": Part(code=0, ends=1),
    "lost, said to be fine, saved": Part(code=0, again=1, saved=True, starts=4),
    "lost, saved": Part(code=14, again=1, saved=True, tries="9", starts=4),
    "lost, saved, while the job ends": Part(code=14, ends=75, saved=True, state="COMPLETING"),
    "MPI does not start": Part(code=15, again=1, starts=2),
    "no such command": Part(code=127, ends=127),
    "a bug before training": Part(code=1, ends=1),
    "a bug, nothing saved": Part("failed 1", code=1, ends=1),
    "lost and told, saved": Part("failed 1", code=1, again=1, saved=True, starts=4),
    "hung, saved": Part("hung 86", code=86, again=1, saved=True, starts=4),
    "hung, nothing saved": Part("hung 86", code=86, ends=86),
}


def run(
    folder, part: Part, min_ranks: int | None = None, **extra: str
) -> subprocess.CompletedProcess[str]:
    files = {"srun": SRUN, "scontrol": SCONTROL, "sinfo": SINFO, "sleep": SLEEP}
    files["job.sh"] = render(
        Job(nodes=4, tasks_per_node=2, warn_s=part.warn_s, min_ranks=min_ranks)
    )
    for name, text in files.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    (folder / "runs/digits-7").mkdir(parents=True)
    if part.tries:
        (folder / "runs/digits-7/.tries").write_text(part.tries)
    if part.before:
        message = '{{\n  "status": "{}",\n  "exit_code": {}\n}}\n'.format(*part.before.split())
        (folder / "runs/digits-7/summary.json").write_text(message)
    environ = {
        "PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "7",
        "SLURM_SUBMIT_DIR": str(folder), "SLURM_RESTART_COUNT": str(part.restarts),
        "SAYS": part.says, "CODE": str(part.code), "SAVED": "1" * part.saved,
        "ASK": "1" * part.ask, "DEAF": str(part.deaf), "TALKS": "1" * part.talks,
        "STATE": part.state, "REFUSED": str(part.refused), "SILENT": str(part.silent), "END": FAR,
    }  # fmt: skip
    return subprocess.run(
        ["bash", "job.sh"], cwd=folder, env=environ | extra, capture_output=True, text=True,
        timeout=100,
    )  # fmt: skip


@pytest.mark.sample(15)
@pytest.mark.parametrize("case", TABLE)
def test_what_comes_of_a_part(case, tmp_path):
    assert "no slurm/site.env below" in must_come(TABLE[case], tmp_path)


def must_come(part: Part, folder) -> str:
    """Assert that of `part` comes what its row says, and return all that it said."""
    completed = run(folder, part)
    assert (completed.returncode, completed.stderr) == (part.ends, "")
    assert part.told in completed.stdout
    message, starts = folder / "said", folder / "starts"
    assert (message.read_text() if message.exists() else "") == AGAIN * part.again
    assert not starts.exists() or len(starts.read_text().splitlines()) == part.starts
    return completed.stdout


UP, ALL = "n1 allocated\nn2 allocated", "--kill-on-bad-exit=1"
LEFT = "--nodelist=n1,n2,n3 --nodes=3 -n 6 --kill-on-bad-exit=1"
# states of the nodes after a loss, --min-ranks -> the words of the next start; None: requeued
STATES = [
    (f"{UP}\nn3 mixed\nn4 draining", None, ALL),  # the rank alone was lost
    ("", None, ALL),  # Slurm does not answer
    (f"{UP}\nn3 allocated\nn4 down*", None, None),
    (f"{UP}\nn3 allocated\nn4 down*", 6, LEFT),
    (f"{UP}\nn1 allocated\nn3 allocated\nn4 allocated*", 6, LEFT),  # in two partitions
    (f"{UP}\nn3 failing\nn4 down*", 6, None),
    (f"{UP}\nn3 powering_down\nn4 boot", 4, "--nodelist=n1,n2 --nodes=2 -n 4 " + ALL),
]


@pytest.mark.parametrize("states, min_ranks, words", STATES)
def test_ranks_are_started_again_on_the_nodes_that_are_left(states, min_ranks, words, tmp_path):
    sizes = {"SLURM_JOB_NUM_NODES": "4", "SLURM_NTASKS_PER_NODE": "2", "SLURM_JOB_NODELIST": "n"}
    part = Part(code=9, saved=True)
    run(tmp_path, part, min_ranks, STATES=states, THEN="done 0", **sizes)
    expected = [f"{ALL} []"] + [f"{words} [1]"] * (words is not None)
    assert (tmp_path / "starts").read_text().splitlines() == expected
    assert (tmp_path / "said").exists() is (words is None)


def site(folder, text: str) -> None:
    """Give the job a slurm/site.env."""
    (folder / "slurm").mkdir()
    (folder / "slurm/site.env").write_text(text)


def test_a_task_of_an_array_is_put_back_alone(tmp_path):
    """The number of the last task is that of the array: all tasks would run again."""
    array = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2"}
    run(tmp_path, Part("stopped 75"), **array)
    assert (tmp_path / "said").read_text() == "requeue 7_2\n"


@pytest.mark.parametrize("case", ["done", "killed before training", "killed, nothing saved",
                                  "lost, saved", "Slurm does not answer"])  # fmt: skip
def test_options_of_the_shell_that_a_site_sets(case, tmp_path):
    site(tmp_path, "set -euCo pipefail\n")
    assert "no slurm/site.env" not in must_come(TABLE[case], tmp_path)


def test_an_exported_word_stops_nobody(tmp_path):
    assert run(tmp_path, Part("done 0"), asked="1").returncode == 0
    assert not (tmp_path / "said").exists()


ENDS = {
    SOON: "time limit\n",
    FAR: "",
    "Unknown": "",
    "": "",
    "00:00": "",  # a day is missing
}


@pytest.mark.parametrize("end", ENDS)
def test_why_a_stop_was_asked_for(end, tmp_path):
    run(tmp_path, Part(ask=True), END=end, SLURM_TIME_FORMAT="relative" if end == FAR else "")
    assert (tmp_path / "runs/digits-7/.why").read_text() == ENDS[end]


@pytest.mark.parametrize("line, reason", [
    ("echo old >runs/digits-7/.why", None), ("kill -USR1 $$", "time limit\n"),
])  # fmt: skip
def test_a_reason_is_that_of_this_part(line, reason, tmp_path):
    """Also where USR1 came before there were ranks."""
    site(tmp_path, line)
    run(tmp_path, Part(), END=SOON)
    stored = tmp_path / "runs/digits-7/.why"
    assert (stored.read_text() if stored.exists() else None) == reason
