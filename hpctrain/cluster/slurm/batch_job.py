"""A batch job of Slurm that trains, from its batch host: `hpctrain launch --in-slurm`.

    start ranks --> wait, pass USR1 on --> read summary.json --> done
      ^                                         |       |
      +------- ranks lost: start again here ----+       +---> requeue

At USR1, --warn-s before the time is over or at a preemption, ranks save: as summary.json says, not
launchers' codes. Where only a container has hpctrain a copy of this runs: no imports, Python 3.8.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen, call, run

_EXIT_LOST, _EXIT_STOPPED, _EXIT_HUNG, _EXIT_NO_COMMAND = 1, 75, 86, 127
_QUERY_LIMIT_S, _RETRY_S, MOVE_LIMIT_S = 20, 30, 10
#: Slurm may warn up to a minute early; a part of a program that ran so long has made progress.
_EARLY_S, _LONG_S = 90, 60
_REPEAT_S = 3.0  #: the interval at which USR1 is repeated: srun drops it before its tasks begin
_PAUSE_S, _MAX_PAUSE_S, _MAX_REFUSALS = 1.0, 30.0, 5  #: of requests to requeue the job
#: States of nodes on which no rank can be started; * marks a node that does not respond.
_LOST_STATE = re.compile(r"(?:down|fail|error|unk|boot|powering_down).*|.*\*")
#: On each node: its ranks' last operations move into the folder of their run, for `hpctrain hang`.
MOVE_RECORDS = """for file in /dev/shm/"$0"-* "${TMPDIR:-/tmp}/$0"-*; do
    ! cp "$file" "$1/watch/node-${file##*-}" || rm -f "$file"
done"""
#: `size` follows the launcher's first word; `asked`: USR1 has come; `program`: it is no recipe.
_OPTIONS: dict[str, int | str] = {"max-restarts": 20, "relaunches": 3, "min-ranks": 0, "asked": 0,
                                  "warn-s": 120, "program": 0, "nodes": "", "size": ""}  # fmt: skip


def main(words: list[str], job: type[BatchJob] | None = None) -> int:
    """Run a job; return its exit code: 0 done or requeued, 75 to be submitted again."""
    job, end = job or BatchJob, [*words, "--"].index("--")
    parser = argparse.ArgumentParser(prog=f"hpctrain launch --in-{job.name}", allow_abbrev=False)
    for name, default in job.defaults.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    parser.add_argument("--out", required=True, metavar="DIR")
    options = parser.parse_args(words[:end])
    if not words[end + 1 :]:
        parser.error("expected the command of a rank after `--`")
    if job.variable not in os.environ:
        parser.error(f"expected a job of {job.title}, seen no {job.variable}: use `launch -n N`")
    try:
        return job(options, words[end + 1 :]).run()
    except OSError as error:
        print(f"{error.filename or options.out}: {error.strerror}", file=sys.stderr)
        return _EXIT_NO_COMMAND if isinstance(error, FileNotFoundError) else 1
    finally:  # at its end Python takes its handlers away, and USR1 would end this process
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)


class BatchJob:
    """A job on its batch host: its ranks, its signals, its restarts; other schedulers derive."""

    name, title, variable, defaults = "slurm", "Slurm", "SLURM_JOB_ID", _OPTIONS

    def __init__(self, options: argparse.Namespace, command: list[str]) -> None:
        self.options, self.folder, self.id = options, Path(options.out), os.environ[self.variable]
        self._nodes, self._restarts, self._relaunches = "", 0, 0
        self._later = "to go on submit again, with --out {} or that as run= in the script"
        self._process: Popen[bytes] | None = None
        self._asked_s = time.monotonic() if options.asked else None
        self._is_stopping, self._next_query_s, self._why = False, 0.0, "of itself"
        self._numbers = {name: int(x) for name, x in os.environ.items() if x.isdecimal()}
        self._srun = self._launcher = self._prepare()
        self._later = self._later.format(self.folder)
        self._command = [*command, *["--out", options.out, "--resume"] * (not options.program)]
        os.environ["HPCTRAIN_RUN"] = str(self.folder.absolute())

    def _prepare(self) -> list[str]:
        """Read what the scheduler says of the job; return the words that start the ranks."""
        # srun has to be told to end when a rank has died, and since 22.05 each task's cores.
        cores = os.environ.get("SLURM_CPUS_PER_TASK", "1")
        os.environ.update(SLURM_KILL_BAD_EXIT="1", SRUN_CPUS_PER_TASK=cores)
        # srun would keep from the ranks what was loaded here, scontrol ask another cluster.
        for name in ("SLURM_EXPORT_ENV", "SLURM_CLUSTERS"):
            os.environ.pop(name, None)
        # The last task of an array has the id of the array: requeued by it, all tasks would run.
        if array := os.environ.get("SLURM_ARRAY_JOB_ID"):  # each task has its own folder
            self.id = f"{array}_{os.environ.get('SLURM_ARRAY_TASK_ID')}"
            self._later = self._later.format(self.folder.parent)
        self._nodes = os.environ.get("SLURM_JOB_NODELIST", "")
        self._restarts = self._numbers.get("SLURM_RESTART_COUNT", 0)
        words = os.environ.get("HPCTRAIN_LAUNCHER", "").split() or ["srun", "--kill-on-bad-exit=1"]
        nodes = [f"--nodes={n}" for n in [self.options.nodes] if n and words[0].endswith("srun")]
        return [words[0], *self.options.size.split(), *nodes, *words[1:]]

    def run(self) -> int:
        """Start the ranks, again after a loss, until the job ends; return its exit code."""
        if self._restarts > (most := self.options.max_restarts):  # as by a preemption
            return self._print_line(f"restarted {self._restarts} times, of {most}: {self._later}")
        signal.signal(signal.SIGALRM, lambda *_: self._stop_if_due())
        signal.signal(signal.SIGUSR1, lambda *_: self._stop_ranks())
        # Slurm ends the job, and lets the ranks save (KillWait): do not leave before them.
        signal.signal(signal.SIGTERM, lambda *_: None)
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / ".why").unlink(missing_ok=True)  # of the part before
        while True:
            code = self._run_ranks()
            self._collect_records()
            summary = self._read_summary(code)
            status, run_code = summary.get("status"), summary.get("exit_code")
            if status == "done":
                return 0
            if status == "stopped":
                return self._requeue(str(summary.get("reason")).partition("\n")[0])
            # USR1 ends a rank that has not begun; others may tell of its loss, not of other faults.
            if self._asked_s is not None and run_code in (None, _EXIT_LOST):
                return self._requeue("asked to stop, and the ranks ended before they could")
            futile_parts = self._count_futile_parts()
            if not _is_loss(run_code, code, futile_parts):
                return code or 1
            # After two starts in a row that saved nothing the job is to have other nodes.
            if futile_parts > 1 or not self._relaunch():
                return self._requeue("ranks were lost, or hung")

    def _run_ranks(self) -> int:
        """Run the ranks from their start to their end; return their launcher's exit code."""
        (self.folder / ".began").write_text(f"{self.id}\n")  # newer files are of this part
        self._process = Popen([*self._launcher, *self._command], stdin=DEVNULL)
        # Until its handler stood USR1 was ignored: Slurm tells whether it has come.
        self._stop_ranks() if self._asked_s else self._stop_if_due()
        signal.setitimer(signal.ITIMER_REAL, _REPEAT_S, _REPEAT_S)
        code = self._process.wait()
        signal.setitimer(signal.ITIMER_REAL, 0)
        self._process, self._is_stopping = None, False
        return code if code >= 0 else 128 - code

    def _stop_ranks(self, end: tuple[bool, float | None] | None = None) -> None:
        """Leave the reason that `end` gives, and pass USR1 on to the ranks, repeatedly from now."""
        self._asked_s = time.monotonic() if self._asked_s is None else self._asked_s
        if self._process and not self._is_stopping:
            self._is_stopping = True
            is_preempted, rest_s = end or self._query_end()
            is_due = rest_s is not None and rest_s < _EARLY_S
            self._why = "preempted" if is_preempted else "time limit" * is_due
            with suppress(OSError):
                (self.folder / ".why").write_text(f"{self._why}\n" * bool(self._why))
            self._process.send_signal(signal.SIGUSR1)

    def _stop_if_due(self) -> None:
        """Repeat USR1, or stop if Slurm has announced the end of the job."""
        if self._process and self._is_stopping:  # MPICH keeps USR1 from a program without a handler
            last_s = (self._asked_s or 0.0) + 0.8 * self.options.warn_s
            is_deaf = self.options.program and time.monotonic() > last_s
            self._process.send_signal(signal.SIGTERM if is_deaf else signal.SIGUSR1)
        elif self._process and time.monotonic() >= self._next_query_s:
            self._next_query_s = float("inf")  # alarms do not wait for the answer
            is_preempted, rest_s = self._query_end()
            self._next_query_s = time.monotonic() + (_RETRY_S if rest_s is None else rest_s)
            if is_preempted or (rest_s is not None and rest_s <= 0):
                self._stop_ranks((is_preempted, rest_s))

    def _query_end(self) -> tuple[bool, float | None]:
        """Return whether the job is preempted, and the seconds to USR1, None without an answer."""
        facts = self._query()
        preempted, start, end = (facts.get(f"{n}Time", "") for n in ("Preempt", "Start", "End"))
        is_preempted = preempted[:1].isdigit() and preempted >= start  # not an earlier part
        try:  # of two hours of one name, when clocks are put back, the later one
            end_s = datetime.fromisoformat(end).replace(fold=1).timestamp()
        except ValueError:  # no limit
            end_s = float("inf")
        return is_preempted, end_s - time.time() - self.options.warn_s if facts else None

    def _query(self) -> dict[str, str]:
        """Return the fields that Slurm's controller shows of the job; empty without an answer."""
        text = output("scontrol", "-o", "show", "job", self.id, SLURM_TIME_FORMAT="standard")
        # Of a heterogeneous job the first line, of one name the first value counts.
        return dict(reversed(re.findall(r"(\w+)=(\S*)", text.partition("\n")[0])))

    def _read_summary(self, code: int) -> dict[str, object]:
        """Return the summary of this part; a program without one gets that of its exit code."""
        path, status = self.folder / "summary.json", {0: "done", _EXIT_STOPPED: "stopped"}.get(code)
        summary = _read_table(path) if self._is_of_this_part(path) else {}
        if self.options.program and status and not summary:
            reason = f"on request ({self._why or 'by SIGUSR1'})" if code else None
            summary = {"status": status, "exit_code": code, "reason": reason}
            (partial := path.with_suffix(".partial")).write_text(json.dumps(summary))
            partial.replace(path)
        return summary

    def _is_of_this_part(self, path: Path) -> bool:
        with suppress(FileNotFoundError):
            return path.stat().st_mtime_ns > (self.folder / ".began").stat().st_mtime_ns
        return False

    def _count_futile_parts(self) -> int:
        """Count the parts in a row, up to this one and over requeues, that saved nothing."""
        path, begin_s = self.folder / ".tries", (self.folder / ".began").stat().st_mtime
        is_long = self.options.program and time.time() > begin_s + _LONG_S
        saved = map(self._is_of_this_part, self.folder.glob("checkpoints/*/manifest.json"))
        earlier = path.read_text().strip() if path.is_file() else ""
        count = 0 if is_long or any(saved) else 1 + int(earlier if earlier.isdigit() else 0)
        path.write_text(f"{count}\n")
        return count

    def _relaunch(self) -> bool:
        """Prepare another start on the remaining nodes; return whether there is one."""
        most = self.options.relaunches
        if self._asked_s or self._relaunches >= most or self._query().get("JobState") != "RUNNING":
            return False
        names = remaining_nodes(self._nodes)
        if names is not None and len(names) < self._numbers.get("SLURM_JOB_NUM_NODES", 1):
            srun, *srun_options = self._srun
            ranks = len(names) * self._numbers.get("SLURM_NTASKS_PER_NODE", 1)
            if not srun.endswith("srun") or not 0 < self.options.min_ranks <= ranks:
                return False
            nodes = [f"--nodelist={','.join(names)}", f"--nodes={len(names)}", "-n", str(ranks)]
            self._launcher = [srun, *nodes, *srun_options]
        self._relaunches += 1
        # The step of a lost node may never end for Slurm: do not wait for its cores.
        os.environ.update(SLURM_OVERLAP="1", HPCTRAIN_RESTARTS=str(self._relaunches))
        start = f"{self._relaunches} of {most}: {' '.join(self._launcher)}"
        self._print_line(f"ranks were lost, or hung; started again here, {start}")
        return True

    def _requeue(self, cause: str) -> int:
        """Put the job back into the queue, unless it was ended from outside: cancelled, say."""
        limit_s = self.options.warn_s + (self._asked_s or time.monotonic())
        max_restarts, pause_s, refusal_count = self.options.max_restarts, _PAUSE_S, 0
        while True:
            state = self._query().get("JobState", "")
            if state not in ("", "RUNNING"):
                return self._print_line(f"{cause}; {self.title} says {state}")
            if self._restarts >= max_restarts:
                count = f"restarted {self._restarts} times, which is enough"
                return self._print_line(f"{cause}; {count}: {self._later}")
            if state and (success := self._request_requeue()):
                restart = f"for restart {self._restarts + 1} of {max_restarts}"
                return self._print_line(f"{cause}; {success} {restart}", 0)
            refusal_count += bool(state)
            if refusal_count >= _MAX_REFUSALS or time.monotonic() + pause_s >= limit_s:
                answer_text = "does not put it back into the queue" if state else "does not answer"
                return self._print_line(f"{cause}; {self.title} {answer_text}: {self._later}")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)

    def _request_requeue(self) -> str:
        """Ask for another run of the job; return what was done, empty after a refusal."""
        requeue = ["timeout", str(_QUERY_LIMIT_S), "scontrol", "requeue", self.id]
        return "" if call(requeue) else "back into the queue"

    def _print_line(self, message: str, code: int = _EXIT_STOPPED) -> int:
        print(f"job {self.id}: {message if message.isprintable() else ascii(message)}", flush=True)
        return code

    def _collect_records(self) -> None:
        """Let each node move the records of its ranks."""
        table = _read_table(self.folder / "watch/nodes.json")
        if "token" in table:
            nodes = remaining_nodes(self._nodes) or []  # a lost node would not answer
            count = len(nodes) or self._numbers.get("SLURM_JOB_NUM_NODES", 1)
            srun = f"srun --overlap --nodelist={','.join(nodes) or self._nodes} --nodes={count}"
            srun += f" --ntasks={count} --ntasks-per-node=1 bash -c"
            words = [MOVE_RECORDS, f"hpctrain-watch-{table['token']}", str(self.folder)]
            output(*srun.split(), *words, limit_s=MOVE_LIMIT_S)


def _is_loss(run_code: object, launcher_code: int, futile_parts: int) -> bool:
    """Return whether a failed part is worth another: its ranks may be lost; a bug comes again."""
    if run_code is not None:
        return run_code in (_EXIT_LOST, _EXIT_HUNG) and not futile_parts
    # Two in a row may fail to start; 1 to 3 are codes of hpctrain, 127 of the launcher without it.
    return futile_parts <= 2 * (launcher_code not in (0, 1, 2, 3, _EXIT_NO_COMMAND))


def remaining_nodes(names: str) -> list[str] | None:
    """Return the nodes of a node list that are not lost; None if Slurm does not answer."""
    query = ("sinfo", "--noheader", "--Node", f"--nodes={names}", "--format=%N %T")
    states = re.findall(r"^(\S+) (\S+)$", output(*query) if names else "", re.M)
    # A node in two partitions has two lines.
    return sorted({n for n, s in states if not _LOST_STATE.fullmatch(s)}) if states else None


def output(*command: str, limit_s: int = _QUERY_LIMIT_S, **variables: str) -> str:
    """Return the output of a command; empty if it fails. After `limit_s` it is terminated."""
    command, environ = ("timeout", str(limit_s), *command), {**os.environ, **variables}
    process = run(command, env=environ, stdin=DEVNULL, stdout=PIPE, stderr=DEVNULL)
    return process.stdout.decode(errors="replace")


def _read_table(path: Path) -> dict[str, object]:
    with suppress(OSError, ValueError, TypeError):
        return dict(json.loads(path.read_text())) if path.is_file() else {}  # a FIFO never ends
    return {}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
