"""`hpctrain launch --in-slurm`: requeue or not, for each way a job can end, on a simulated Slurm.

On a real one: test_on_slurm.py.
"""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from scripts import SENT, STORM, fake, fake_hpctrain, run_script

from hpctrain.cluster.slurm.render import Job, render
from hpctrain.core.run_files import run_folder

SRUN = """#!/bin/bash
# A rank that ends as a row of the table says; it began with what lies in runs/digits-7.
words="$*"
echo "${words%% hpctrain*} [$HPCTRAIN_RESTARTS]" >>starts
[ "$(wc -l <starts)" = 1 ] || SAYS=${THEN-$SAYS}
trap '[ $((deaf++)) -lt $DEAF ] || { [ -n "$TALKS" ] || exit 75; ASK=; }' USR1
sleep 0.01 # the time of a file is coarser than that of a clock
[ "$ASK" != 1 ] || kill -USR1 $PPID
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
    echo "JobId=7 JobState=$STATE PreemptTime=${PREEMPT:-None} StartTime=2026-01-02 EndTime=$END"
    exit
fi
echo "$@" >>said
[ "$(wc -l <said)" -gt $REFUSED ]
"""
SINFO = """#!/bin/sh
echo "$STATES"
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
    program: bool = False  #: of a user, without a recipe
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
    "Slurm answers later": Part("stopped 75", again=1, silent=2),
    "Slurm does not answer": Part(
        "stopped 75", ends=75, silent=10**6, warn_s=2, told=f"why; Slurm does not answer: {LATER}"
    ),
    "asked, and Slurm answers later": Part("stopped 75", again=1, ask=True, talks=True, silent=4),
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
    "a program that is done": Part(program=True),
    "a program that saves and asks for another part": Part(
        code=75, again=1, told="on request (of itself); back into the queue", program=True
    ),
    "a program that saves when it is asked": Part(
        code=75, again=1, ask=True, told="on request (", program=True
    ),
    "a program that USR1 ends": Part(
        code=138, again=1, ask=True, talks=True, told="asked to stop, and the ranks", program=True
    ),
    "a program that USR1 does not end": Part(
        code=138, again=1, ask=True, deaf=10**6, warn_s=2, told="asked to stop, and", program=True
    ),
    "a program with a bug": Part(code=1, ends=1, program=True),
    "a killed program": Part(code=137, again=1, starts=2, program=True),
    "a program with a run of its own": Part("stopped 75", code=143, again=1, program=True),
}


def run(
    folder, part: Part, min_ranks: int | None = None, **extra: str
) -> subprocess.CompletedProcess[str]:
    resources = {"nodes": 4, "tasks_per_node": 2, "warn_s": part.warn_s, "min_ranks": min_ranks}
    job = Job(program=("sh", "x.sh") if part.program else (), name="digits", **resources)
    for name, text in {"srun": SRUN, "scontrol": SCONTROL, "sinfo": SINFO}.items():
        fake(folder, name, text)
    fake_hpctrain(folder)
    (folder / "runs/digits-7").mkdir(parents=True)
    if part.tries:
        (folder / "runs/digits-7/.tries").write_text(part.tries)
    if part.before:
        message = '{{\n  "status": "{}",\n  "exit_code": {}\n}}\n'.format(*part.before.split())
        (folder / "runs/digits-7/summary.json").write_text(message)
    environ = {
        "SLURM_RESTART_COUNT": str(part.restarts),
        "SAYS": part.says, "CODE": str(part.code), "SAVED": "1" * part.saved,
        "ASK": "1" * part.ask, "DEAF": str(part.deaf), "TALKS": "1" * part.talks,
        "STATE": part.state, "REFUSED": str(part.refused), "SILENT": str(part.silent), "END": FAR,
    }  # fmt: skip
    return run_script(folder, render(job), **environ | extra)


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
    ("n1 down*\nn2 down*\nn3 down*\nn4 down*", 2, None),
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


@pytest.mark.parametrize("ask", [False, True])
def test_the_summary_of_a_program(ask, tmp_path):
    code = 75 if ask else 0
    run(tmp_path, Part(code=code, ask=ask, program=True))
    reason = "on request (by SIGUSR1)" if ask else None
    status = "stopped" if ask else "done"
    assert run_folder.read_summary(tmp_path / "runs/digits-7") == {
        "status": status, "exit_code": code, "reason": reason
    }  # fmt: skip


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


OVER, PREEMPTED = {"END": SOON}, {"END": FAR, "PREEMPT": "2026-01-03"}
# what the site does, what Slurm says -> the reason to stop; None: nobody was asked to
ANNOUNCED = {
    "a reason of the part before": ("echo old >runs/digits-7/.why", {}, None),
    "USR1 before there are ranks": ("kill -USR1 $$", {"END": FAR}, ""),
    "USR1 for the time limit, before there are ranks": ("kill -USR1 $$", OVER, "time limit\n"),
    "a time limit that nobody has heard of": (":", OVER, "time limit\n"),
    "a preemption that nobody has heard of": (":", PREEMPTED, "preempted\n"),
    "a preemption of the part before": (":", PREEMPTED | {"PREEMPT": "2026-01-01"}, None),
}


@pytest.mark.parametrize("case", ANNOUNCED)
def test_what_was_announced_before_its_handler_stood(case, tmp_path):
    line, slurm, reason = ANNOUNCED[case]
    site(tmp_path, line)
    waits = {"ASK": "later"} if reason is not None else {}  # for USR1
    completed = run(tmp_path, Part(), **slurm | waits)
    stored = tmp_path / "runs/digits-7/.why"
    assert (stored.read_text() if stored.exists() else None) == reason
    assert ("asked to stop, and the ranks ended" in completed.stdout) == (reason is not None)


def test_a_time_limit_is_due_without_a_signal(tmp_path):
    """It may have been lost, or Slurm looks too late."""
    end = datetime.now() + timedelta(seconds=122)
    run(tmp_path, Part(), ASK="later", END=f"{end:%Y-%m-%dT%H:%M:%S}")
    assert (tmp_path / "runs/digits-7/.why").read_text() == "time limit\n"


def test_a_storm_of_signals_ends_no_job(tmp_path):
    """Neither in the script, nor until hpctrain handles them, nor in what it asks Slurm."""
    site(tmp_path, STORM)
    completed = run(tmp_path, Part("stopped 75", 75, ask=True, talks=True), ASK="later")
    assert (completed.returncode, completed.stderr) == (0, "")
    assert (tmp_path / "said").read_text() == AGAIN


# what a rank does in the folder of its run -> what becomes of the job
HOSTILE = {
    """printf '{"status": "stopped", "reason": "\\\\u001b[2J"}' >summary.json""": "Slurm says DONE",
    "mkfifo summary.json; exit 9": "ranks were lost, or hung; Slurm says DONE",
}


@pytest.mark.parametrize("line", HOSTILE, ids=["escape", "fifo"])
def test_files_of_a_run_reach_no_terminal_and_hang_nobody(line, tmp_path):
    fake(tmp_path, "srun", f"sleep 0.01; cd runs/digits-7; {line}")
    fake(tmp_path, "scontrol", "echo JobState=DONE")
    fake_hpctrain(tmp_path)
    completed = run_script(tmp_path, render(Job()))
    assert completed.returncode == 75 and HOSTILE[line] in completed.stdout
    assert "\x1b" not in completed.stdout


@pytest.mark.parametrize("place", ["slurm", "runs/digits-7"])
def test_a_container_needs_no_hpctrain_beside_it(place, tmp_path):
    """But the file that is sent along with the job, and any Python."""
    for name, text in {"srun": SRUN, "scontrol": SCONTROL}.items():
        fake(tmp_path, name, text)
    (tmp_path / place).mkdir(parents=True)
    shutil.copy(SENT, tmp_path / place)
    text = render(Job(out="runs/digits-7"), folder=Path(place))
    container = "srun --mpi=pmix apptainer exec x.sif"
    environ = {"SAYS": "stopped 75", "STATE": "RUNNING", "END": FAR, "SILENT": "0", "REFUSED": "0"}
    environ |= {"HPCTRAIN_LAUNCHER": container, "PATH": f"{tmp_path}/bin:/usr/bin:/bin"}
    completed = run_script(tmp_path, text, **environ)
    assert (completed.returncode, completed.stderr) == (0, "")
    assert (tmp_path / "said").read_text() == AGAIN
    assert (tmp_path / "starts").read_text().startswith(container.removeprefix("srun "))


def test_the_file_that_is_sent_needs_python_alone():
    tree = ast.parse(SENT.read_text(), feature_version=(3, 8))
    imports = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = {getattr(node, "module", None) or node.names[0].name for node in imports}
    assert len(imports) > 5 and names <= sys.stdlib_module_names


@pytest.mark.parametrize("words, reported", [
    (["--out=run", "--", "true"], "expected a job of Slurm, seen no SLURM_JOB_ID"),
    (["--out=run"], "expected the command of a rank after `--`"),
    (["--", "true"], "the following arguments are required: --out"),
    (["--out=run", "--warn=1", "--", "true"], "unrecognized arguments: --warn=1"),
])  # fmt: skip
def test_refused(words, reported, tmp_path):
    command = [sys.executable, "-m", "hpctrain", "launch", "--in-slurm", *words]
    completed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert completed.returncode == 2 and reported in completed.stderr
    assert not list(tmp_path.iterdir())
