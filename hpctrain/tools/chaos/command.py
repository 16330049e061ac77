"""`hpctrain chaos`: from the command line to cases that are run, shown and written."""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from hpctrain.core import launchers
from hpctrain.core.errors import UsageError
from hpctrain.tools.chaos import campaign as campaigns
from hpctrain.tools.chaos import jobs, results, runner, scope
from hpctrain.tools.chaos.case import Case, Table
from hpctrain.tools.chaos.draw import draw_case
from hpctrain.tools.chaos.runner import FAILED, PASSED

EXIT_CODE_FAILED = 1  #: the exit code of a campaign that saw a broken promise
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Request:
    """The command line of `hpctrain chaos`."""

    campaign: Path
    indexes: tuple[int, ...] = ()  #: of the cases to run; all if empty
    seed: int | None = None
    cases: int | None = None
    results: Path | None = None
    resume: bool = False
    failed: bool = False  #: only cases that failed, in a file of results
    lists: bool = False  #: print the cases instead of running them
    keep: bool = False
    work: Path | None = None
    workers: int = 1
    isolate: bool = True

    @property
    def results_file(self) -> Path:
        """The file of results: CAMPAIGN-results.jsonl here by default."""
        return self.results or Path(f"{self.campaign.stem}-results.jsonl")

    @property
    def is_lines(self) -> bool:
        """Whether the campaign is a file of lines, cases or results."""
        return self.campaign.suffix == ".jsonl"


def chaos(request: Request) -> int:
    """Run, or list, the cases of a campaign; return the exit code."""
    cases = choose_cases(request)
    old_results = results.read(request.campaign if request.is_lines else request.results_file)
    if request.lists:
        results.print_cases(cases, old_results)
        listed_results = [
            table for case in cases if (table := old_results.get((case.seed, case.index)))
        ]
        if listed_results:
            results.print_summary(listed_results)
        return (
            EXIT_CODE_FAILED if any(table["verdict"] == FAILED for table in listed_results) else 0
        )
    return _run_cases(request, cases)


def choose_cases(request: Request) -> list[Case]:
    """Return the requested cases of the campaign; raise UsageError for an unknown one."""
    if request.is_lines:
        cases = campaigns.read_lines(request.campaign)
        if request.failed:
            tables = results.read(request.campaign)
            failed_keys = {key for key, table in tables.items() if table["verdict"] == FAILED}
            cases = [case for case in cases if (case.seed, case.index) in failed_keys]
        return _pick_cases(cases, request.indexes)
    if request.failed:
        raise UsageError("--failed: expected a file of results, NAME.jsonl, in place of CAMPAIGN")
    options = {"seed": request.seed, "cases": request.cases}
    changes = {key: value for key, value in options.items() if value is not None}
    campaign = campaigns.load(request.campaign, changes)
    indexes = request.indexes or range(campaign.options.cases)
    return [draw_case(campaign, index) for index in indexes]


def _pick_cases(cases: list[Case], indexes: Sequence[int]) -> list[Case]:
    chosen_cases = [case for case in cases if not indexes or case.index in indexes]
    if missing_indexes := {*indexes} - {case.index for case in chosen_cases}:
        raise UsageError(f"--case {min(missing_indexes)}: the file has no such case")
    return chosen_cases


def _run_cases(request: Request, cases: list[Case]) -> int:
    reason = "`hpctrain chaos` starts ranks itself; call it directly"
    launchers.must_not_be_rank(os.environ, reason)
    jobs.must_start([case.launcher for case in cases])
    file = _begin_results(request)
    tables = results.read(file) if file else {}
    isolated = _is_isolated(request, cases)
    work = Path(request.work or tempfile.mkdtemp(prefix="hpctrain-chaos-")).absolute()
    work.mkdir(parents=True, exist_ok=True)
    run = partial(runner.run, work=work, isolated=isolated, keep=request.keep)
    waiting = results.remaining(cases, tables)
    with results.make_bar(request.campaign.stem, len(waiting)) as bar:
        for result in _case_results(waiting, work, request.workers, run, isolated=isolated):
            tables[result["case"]["seed"], result["case"]["index"]] = result
            results.show(bar, result)
            if file:
                results.append(file, result)
            if result["verdict"] == PASSED and not request.keep:
                shutil.rmtree(work / "case-{seed}-{index}".format_map(result["case"]))
    results.print_summary(list(tables.values()))
    return _finish_campaign(request, list(tables.values()), work)


def _begin_results(request: Request) -> Path | None:
    """Return the file of results, begun; None where single cases are repeated."""
    if request.results is None and (request.indexes or request.is_lines):
        return None
    file = request.results_file
    if file.exists() and not request.resume:
        raise UsageError(
            f"{file} has results of an earlier call: add --resume to run the cases that have not "
            "passed, or name another file by --results"
        )
    results.begin(file)
    return file


def _is_isolated(request: Request, cases: Sequence[Case]) -> bool:
    """Return whether cases get namespaces; ranks of `srun` are children of its daemons."""
    if not request.isolate or any(case.launcher == "srun" for case in cases):
        return False
    if reason := scope.unavailable():
        log.warning("%s: processes are known by a variable of their environment", reason)
    return not reason


def _case_results(
    cases: Sequence[Case], work: Path, workers: int, run: partial[None], *, isolated: bool
) -> Iterator[Table]:
    """Run cases, `workers` at a time; yield results in order of completion."""
    running_cases: dict[int, Case] = {}
    start = scope.isolated if isolated else scope.forked
    for case in cases:
        running_cases[start(partial(run, case))] = case
        if len(running_cases) == workers:
            yield _await_next(running_cases, work)
    while running_cases:
        yield _await_next(running_cases, work)


def _await_next(running_cases: dict[int, Case], work: Path) -> Table:
    pid, status = os.wait()
    while pid not in running_cases:  # of a process that is not a case's
        pid, status = os.wait()
    case = running_cases.pop(pid)
    file = runner.home_of(case, work) / runner.RESULT_FILE
    if status or not file.exists():
        problem = f"the campaign itself failed, status {status}"
        return {"case": asdict(case), "verdict": FAILED, "problems": [problem], "attempts": [],
                "mpi": jobs.mpi_name(), "seconds": 0.0}  # fmt: skip
    result: Table = json.loads(file.read_text())
    return result


def _finish_campaign(request: Request, tables: list[Table], work: Path) -> int:
    failed = any(table["verdict"] == FAILED for table in tables)
    if failed or request.keep:
        log.warning("folders of cases: %s", work)
    elif not request.work:
        shutil.rmtree(work)
    return EXIT_CODE_FAILED if failed else 0
