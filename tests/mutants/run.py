"""Plant each error of a list in a checkout, and write which rows of `make test` fall.

    python tests/mutants/run.py --record RECORD --table tests/mutants/table.jsonl

RECORD is the folder that `make mutants` fills by record.py. A line of the table is written as its
mutant ends, and a mutant that has a line is not run again. Of the rows that execute the changed
line (processes: whose modules include its file) at most 40 are drawn by seed. A row that takes ten
times its usual time, or all memory, counts as a find. The checkout must be a clone made for this.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import coverage
import psutil
from plant import ROOT, Mutant

MOST_ROWS = 40
MOST_PROCESS_ROWS = 10  # of 40, where others execute the line: they take seconds each
SLOW = 10
FEW = 4
MOST_SLOW = 3  # after so many rows that hang the others of a mutant are not run
LEAST_S = 15.0  # rows of milliseconds vary by more than ten times
START_S = 60.0
LEAST_BYTES = 4 << 30  # of free memory: an error may ask for all of it
MARK = "HPCTRAIN_MUTANTS"  #: in the environment of all that a run starts
LOCAL = Path(__file__).parent
LAUNCHER = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMP_NUM_THREADS": "1",
}


@dataclass(frozen=True)
class Row:
    """A test, and the job that runs it."""

    python: str
    ranks: int
    node: str

    def __str__(self) -> str:
        mpi = self.python.split("/")[0].removeprefix(".venv-")
        return f"{mpi}-{self.ranks}:{self.node}"


@dataclass
class Record:
    """The rows of a run of `make test`: seconds, executed lines, and imports of their processes."""

    seconds: dict[Row, float] = field(default_factory=dict)
    lines: dict[str, dict[int, set[Row]]] = field(default_factory=dict)
    imports: dict[str, set[Row]] = field(default_factory=lambda: defaultdict(set))

    @classmethod
    def read(cls, folder: Path) -> Record:
        record = cls()
        for path in sorted(folder.glob("*.jsonl")):
            job, *rows = map(json.loads, path.read_text().splitlines())
            kind = {key: job[key] for key in ("python", "ranks")}
            if job["rank"] == 0:
                for row in rows:
                    if row["outcome"] == "passed":
                        record.seconds[Row(node=row["row"], **kind)] = row["seconds"]
            record._read_lines(path.with_suffix(".coverage"), kind)
        for path in folder.glob("*.imports"):
            node, *names = path.read_text().splitlines()
            row = Row(f"{path.name.rpartition('-')[0]}/bin/python", 1, node)
            for name in names:
                record.imports[name].add(row)
        return record

    def _read_lines(self, path: Path, kind: dict) -> None:
        data = coverage.CoverageData(str(path))
        data.read()
        for file in data.measured_files():
            name = "hpctrain/" + file.rpartition("/hpctrain/")[2]
            lines = self.lines.setdefault(name, {})
            for number, nodes in data.contexts_by_lineno(file).items():
                rows = {Row(node=node, **kind) for node in nodes if node}
                lines.setdefault(number, set()).update(rows & self.seconds.keys())

    def rows_of(self, mutant: Mutant, seed: int) -> list[Row]:
        """Draw rows that execute the mutant's line, and rows whose processes import its file.

        Where a check is missing, rows that execute its `raise` come first.
        """
        lines = self.lines.get(mutant.file, {})
        executing = lines.get(mutant.line, set()) or set().union(*lines.values())
        count = mutant.before.count("\n") if mutant.kind == "missing_check" else 0
        after = range(mutant.line + 1, mutant.line + 1 + count)
        raising = set().union(*(lines.get(line, set()) for line in after)) & executing
        module = mutant.file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        started = (self.imports.get(module, set()) & self.seconds.keys()) - executing
        rng = random.Random(f"{seed} {mutant.file} {mutant.line}")
        process_rows = MOST_PROCESS_ROWS if executing else MOST_ROWS
        drawn = _draw(rng, started, process_rows)
        drawn += _draw(rng, raising, MOST_ROWS - len(drawn))
        return _draw(rng, executing - raising, MOST_ROWS - len(drawn)) + drawn


def _draw(rng: random.Random, rows: set[Row], count: int) -> list[Row]:
    ordered = sorted(rows, key=str)
    return rng.sample(ordered, min(count, len(ordered)))


class Watch:
    """A plugin of pytest, as text: the begin and the outcome of each row, in a file."""

    SOURCE = """
import json, os
file = open(os.environ["WATCHED"], "a")
def write(*words): file.write(json.dumps(words) + "\\n"); file.flush()
def pytest_runtest_logstart(nodeid): write("begin", nodeid)
def pytest_runtest_logreport(report):
    if report.outcome == "failed": write("failed", report.nodeid)
def pytest_runtest_logfinish(nodeid): write("end", nodeid)
"""


def falling(
    tree: Path, rows: Iterable[Row], seconds: dict[Row, float], folder: Path
) -> dict[Row, str]:
    """Run rows, a process of pytest per job; return those that fail, hang or are slow, and how."""
    result: dict[Row, str] = {}
    jobs: dict[tuple[str, int], list[Row]] = defaultdict(list)
    for row in rows:
        jobs[row.python, row.ranks].append(row)
    for job in jobs.values():
        remaining = job
        while remaining and list(result.values()).count("slow") < MOST_SLOW:
            fell, remaining = _run(tree, remaining, seconds, folder)
            result |= fell
    return result


def _run(
    tree: Path, rows: list[Row], seconds: dict[Row, float], folder: Path
) -> tuple[dict[Row, str], list[Row]]:
    """Run rows of one job until they end, or one takes too long; return the fallen and the rest."""
    python, ranks = rows[0].python, rows[0].ranks
    log = folder / "watched.jsonl"
    log.unlink(missing_ok=True)
    (folder / "mutants_watch.py").write_text(Watch.SOURCE)
    environment = {**os.environ, **LAUNCHER, MARK: str(folder), "WATCHED": str(log)}
    environment |= {"PRTE_MCA_prte_tmpdir_base": str(folder), "PYTHONPATH": str(folder)}
    command = [str(tree / python), "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["-p", "mutants_watch", *(["-x"] if ranks > 1 else [])]
    if ranks > 1:
        # Only rank 0 is watched; a rank that fails alone ends the job.
        only_first = (
            'r=${OMPI_COMM_WORLD_RANK:-$PMI_RANK}; [ "$r" = 0 ] || WATCHED=/dev/null; exec "$@"'
        )
        launcher = [str(tree / python.replace("/python", "/mpiexec")), "-n", str(ranks)]
        command = [*launcher, "sh", "-c", only_first, "sh", *command, "--with-mpi"]
    command += [row.node for row in rows]
    by_node = {row.node: row for row in rows}
    with open(folder / "output.txt", "w") as output:
        process = subprocess.Popen(
            command, cwd=tree, env=environment, stdin=subprocess.DEVNULL, stdout=output,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    how = _wait(process, log, by_node, seconds)
    events = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    ended = {node for what, node in events if what == "end"}
    begun = {node for what, node in events if what == "begin"}
    failed = {node for what, node in events if what == "failed"}
    if not begun:  # the package cannot be imported, or the job not started
        return dict.fromkeys(rows, "not begun"), []
    open_ = (
        begun - ended - failed
    )  # on MPI also the row whose failure on another rank ended the job
    fell = {row: "failed" for row in rows if row.node in failed}
    fell |= {row: how or "job ended" for row in rows if row.node in open_}
    return fell, [row for row in rows if row.node not in begun]


def _wait(process: subprocess.Popen, log: Path, rows: dict[str, Row], seconds: dict) -> str:
    """Wait for the end; kill a job whose row takes ten times its time or all memory; say which."""
    since, node, size = time.monotonic(), None, -1
    while process.poll() is None:
        time.sleep(0.05)
        if log.exists() and log.stat().st_size != size:
            size, since = log.stat().st_size, time.monotonic()
            lines = log.read_text().splitlines()
            node = json.loads(lines[-1])[1] if lines and lines[-1].endswith("]") else node
        if psutil.virtual_memory().available < LEAST_BYTES:
            _kill(process, log.parent)
            return "memory"
        usual = seconds.get(rows.get(node), 0.0) if node else 0.0
        limit = max(SLOW * usual, LEAST_S) + (0 if node else START_S)
        if time.monotonic() - since > limit:
            _kill(process, log.parent)
            return "slow"
    _kill(process, log.parent)
    return ""


def _kill(process: subprocess.Popen, folder: Path) -> None:
    """End a job and what it started, which may have sessions of their own."""
    mark = f"{MARK}={folder}\0".encode()
    for entry in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark in entry.read_bytes():
                os.kill(int(entry.parent.name), signal.SIGKILL)
        except OSError:
            continue  # it has ended, or is another user's
    process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tree", type=Path, default=ROOT, help="the clone to plant errors in")
    parser.add_argument("--record", type=Path, required=True)
    parser.add_argument("--list", type=Path, default=LOCAL / "mutants.jsonl")
    parser.add_argument("--table", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=34)
    parser.add_argument("--limit-s", type=float, default=7200)
    options = parser.parse_args()
    began = time.monotonic()
    record = Record.read(options.record)
    folder = options.record / "run"
    folder.mkdir(exist_ok=True)
    finished = set()
    if options.table.exists():
        finished = {json.loads(line)["mutant"] for line in options.table.read_text().splitlines()}
    mutants = [Mutant(**json.loads(line)) for line in options.list.read_text().splitlines()]
    for number, mutant in enumerate(mutants):
        if number in finished or time.monotonic() - began > options.limit_s:
            continue
        start, rows = time.monotonic(), record.rows_of(mutant, options.seed)
        try:
            restore = mutant.apply(options.tree)
        except LookupError as error:
            print(f"{number}: left out: {error}")
            continue
        try:
            fell = falling(options.tree, rows, record.seconds, folder)
        finally:
            restore()
        if 0 < len(fell) <= FEW:  # do they fall without the error, too?
            for row in falling(options.tree, fell, record.seconds, folder):
                del fell[row]
        line = {
            "mutant": number, "kind": mutant.kind, "file": mutant.file, "line": mutant.line,
            "rows": len(rows), "fell": {str(row): how for row, how in fell.items()},
            "seconds": round(time.monotonic() - start, 1),
        }  # fmt: skip
        with open(options.table, "a") as table:
            table.write(json.dumps(line) + "\n")
        print(f"{number}: {mutant.kind} in {mutant.file}:{mutant.line}: "
              f"{len(fell)} of {len(rows)} rows fall, {line['seconds']} s", flush=True)  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
