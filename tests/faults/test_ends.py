"""The end of a job by the moment of a loss, the lost ranks, the manner, and the launcher.

The code of `hpctrain launch` is never 0 unless a run, or the program, said so; every job ends, and
nothing of it is left. `make test` runs each value once, `pytest` all pairs, `--full` all rows.
Ranks of `srun` are on two nodes of a Slurm of this machine.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from itertools import product
from pathlib import Path
from types import MappingProxyType

import pytest
from jobs import MARK
from limits import clock
from processes import Job

from hpctrain.cluster import launch
from hpctrain.core.run_files import run_folder

pytestmark = pytest.mark.processes
HOOKS = Path(__file__).with_name("ends")
MOMENTS = ("exec", "init", "begun", "step", "end", "after")
WHO = {"one": "1", "first": "0", "some": "1,2", "all": "0,1,2", "launcher": ""}
HOW = ("KILL", "TERM", "SEGV", "STOP", "exit")
SIGNALS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM)
STARTED = {
    "launch": ("launch", "-n", 3),
    "elastic": ("launch", "-n", 3, "--elastic"),
    "restarts": ("launch", "-n", 3, "--max-restarts", 1),
    "both": ("launch", "-n", 3, "--elastic", "--max-restarts", 1),
    "script": ("launch", "-n", 3, "--elastic"),
    "mpiexec": (),
    "srun": (),
}
PLAIN = ("mpiexec", "srun")  #: without a launcher of ours
#: of a program that a signal ended, by Open MPI and by MPICH
SIGNALLED = {code + number for number in SIGNALS for code in (0, 128)}
LIMIT_S = 60.0  #: of an end, from the loss
KEYS = (
    "run.epochs=", "run.steps=8", "run.interval_steps=1", "model.widths=[64,4,10]",
    'run.callbacks=[{kind="sitecustomize:Callback", ranks="all"}]',
)  # fmt: skip
TRAIN = ("train", "digits", *(word for key in KEYS for word in ("--set", key)))


def is_possible(moment: str, who: str, how: str, started: str) -> bool:
    """Return whether a row is a loss that somebody can end."""
    if who == "launcher":  # ranks of a plain one may outlive its SIGKILL, of mpiexec its SIGTERM
        return (how == "KILL" and started not in PLAIN) or (how == "TERM" and started != "mpiexec")
    if how == "STOP":  # a job that is stopped as a whole goes on later; after its end nobody waits
        return who != "all" and moment not in ("end", "after")
    return True


def codes(moment: str, who: str, how: str, started: str) -> set[int] | None:
    """Return the possible exit codes of a job; None for any code but 0."""
    if started in PLAIN:
        is_done = moment in ("end", "after") or (how == "exit" and who == "all")
        is_vague = started == "mpiexec" and how in ("TERM", "exit")
        return set(range(256)) if is_done or is_vague else None
    if who == "launcher":
        return {-9} if how == "KILL" else {0, 75, 143}
    if moment == "after":  # the run is done; a program is not, for its launcher
        return {0} if started != "script" else set(range(256))
    if moment == "end":  # whether the run was done by then
        return {0, 1, 75, *SIGNALLED}
    has_no_mpi = moment == "exec" or (moment == "init" and started in ("launch", "restarts"))
    if how == "exit" and who == "all" and has_no_mpi:
        return {0, 1}  # a plain mpiexec takes the 0 of a process for the word of the program
    if started in ("restarts", "both"):
        return {0, 75} if how == "TERM" else {0, 1, 86} if how == "STOP" else {0}
    if moment == "step" and how == "TERM" and started != "script":
        return {75}
    if moment == "step" and started == "elastic" and who != "all":
        return {0}
    if how in ("STOP", "exit") and started != "script":
        return {1, 86}
    return {1} if started != "script" else None


def rows(starts: Collection[str]) -> list:
    """Return all possible rows; those without a new pair of values are marked `full`."""
    result, pairs = [], set()
    table = [row for row in product(MOMENTS, WHO, HOW, starts) if is_possible(*row)]
    table.sort(key=lambda row: sum(map(ord, "".join(row))) * 7919 % 1009)  # in no order
    for row in table:
        own = {(i, j, row[i], row[j]) for i in range(4) for j in range(i)}
        marks = () if own - pairs else pytest.mark.full
        pairs |= own
        result.append(pytest.param(*row, marks=marks))
    return result


@pytest.mark.timeout(900)  # a campaign: beside the first ring for --full alone
@pytest.mark.sample(6)
@pytest.mark.parametrize(("moment", "who", "how", "started"), rows([*STARTED][:-1]))
def test_every_job_ends_and_says_how(start, mark, tmp_path, moment, who, how, started):
    must_end(start, mark, tmp_path, moment, who, how, started)


@pytest.mark.timeout(900)
@pytest.mark.sample(3)
@pytest.mark.either  # in `make test`, for time
@pytest.mark.parametrize(("moment", "who", "how", "started"), rows(["srun"]))
def test_every_step_of_slurm_ends(slurm, start, mark, tmp_path, moment, who, how, started):
    with_srun = partial(start, launcher=(*slurm.srun.split(), "--nodes=2"))
    must_end(with_srun, mark, tmp_path, moment, who, how, started, slurm.environ)


def must_end(
    start: Callable[..., Job],
    mark: str,
    tmp_path: Path,
    moment: str,
    who: str,
    how: str,
    started: str,
    environ: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Start a job, let ranks be lost, and check its end."""
    words = STARTED[started]
    if "--elastic" in words and not launch.find_mpi().ulfm:
        words = tuple(word for word in words if word != "--elastic")
        started = {"elastic": "launch", "both": "restarts"}.get(started, started)
    seen, out = tmp_path / "seen", tmp_path / "run"
    seen.mkdir()
    own = {**environ, MARK: mark, "ENDS": f"{moment} {how} {WHO[who]}", "ENDS_SEEN": str(seen)}
    own["PYTHONPATH"] = str(HOOKS)
    # In an elastic job the others are to notice a stopped rank, before the watch ends the job.
    train = (*TRAIN, "--set", f"run.timeout_s={60 if '--elastic' in words else 4}")
    if started == "script":
        script = tmp_path / "script.py"
        script.write_text("import sitecustomize\nsitecustomize.program()\n")
        job = start("-m", "hpctrain", *words, "--", sys.executable, script, env=own)
    elif started in PLAIN:
        job = start("-m", "hpctrain", *train, "--out", out, ranks=3, env=own)
    else:
        job = start("-m", "hpctrain", *words, *train, "--out", out, env=own)
    if who == "launcher":
        deadline = clock() + LIMIT_S
        while len([*seen.iterdir()]) < 3 and job.process.poll() is None and clock() < deadline:
            time.sleep(0.02)
        job.process.send_signal(signal.Signals[f"SIG{how}"])
    ended = job.finish(2 * LIMIT_S)
    allowed = codes(moment, who, how, started)
    assert ended.returncode in allowed if allowed is not None else ended.returncode != 0, ended
    summary = run_folder.read_summary(out) if out.is_dir() else None
    if started in ("launch", "elastic") and summary is not None and who != "launcher":
        assert summary["exit_code"] == ended.returncode or moment in ("end", "after"), ended
    if ended.returncode not in (0, -9):
        assert ended.stderr + ended.stdout, ended  # of mpiexec
    assert "\x1e" not in ended.stderr + ended.stdout
