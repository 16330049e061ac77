"""The command line of campaigns, in the environment of the MPI that is to be tested:

    PYTHONPATH=tests .venv-openmpi/bin/python -m campaign run --seed 15 --cases 0:60 --results FILE
    PYTHONPATH=tests .venv-openmpi/bin/python -m campaign run --seed 15 --cases 7 --keep
    PYTHONPATH=tests .venv-openmpi/bin/python -m campaign run --from FILE --failed
    PYTHONPATH=tests .venv-openmpi/bin/python -m campaign show FILE

Cases that passed, as FILE tells, are not run again; of a case its last result counts. The work
folder keeps what failed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from campaign import attempt, isolation, runner
from campaign.case import Case, dump, generate, read
from hpctrain import machine


def main() -> int:
    """Run or show a campaign; return 1 if a case failed."""
    parser = argparse.ArgumentParser(prog="campaign", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    run = commands.add_parser("run", help="run cases")
    run.add_argument("--seed", type=int, default=0)
    run.add_argument("--cases", type=_span, default=range(10), metavar="FIRST:END")
    run.add_argument("--from", dest="file", type=Path, metavar="FILE", help="cases of a file")
    run.add_argument("--failed", action="store_true", help="of them those that failed")
    run.add_argument("--workers", type=int, default=2)
    run.add_argument("--results", type=Path, metavar="FILE", help="append lines of JSON")
    run.add_argument("--work", type=Path, help="a folder for what jobs write")
    run.add_argument("--keep", action="store_true", help="keep the folders of all cases")
    run.set_defaults(act=_run)
    show = commands.add_parser("show", help="count verdicts")
    show.add_argument("results", type=Path, nargs="+")
    show.set_defaults(act=_show)
    options = parser.parse_args()
    code: int = options.act(options)
    return code


def _span(text: str) -> range:
    first, colon, end = text.partition(":")
    return range(int(first), int(end) if colon else int(first) + 1)


def _run(options: argparse.Namespace) -> int:
    if reason := isolation.unavailable():
        print(reason, file=sys.stderr)
        return 2
    work = Path(options.work or tempfile.mkdtemp(prefix="campaign-")).absolute()
    work.mkdir(parents=True, exist_ok=True)
    if options.results and not options.results.exists():
        _append(options.results, {"campaign": _facts()})
    failed = 0
    for result in _results(_chosen(options), work, options.workers):
        failed += result["verdict"] != "passed"
        _tell(result)
        if options.results:
            _append(options.results, result)
        if result["verdict"] == "passed" and not options.keep:
            shutil.rmtree(work / f"case-{result['case']['seed']}-{result['case']['index']}")
    if failed or options.keep:
        print(f"see {work}")
    elif not options.work:
        shutil.rmtree(work)
    return 1 if failed else 0


def _facts() -> dict[str, Any]:
    mpi = f"{attempt.mpi()} {metadata.version(attempt.mpi())}"
    return {"mpi": mpi, "python": sys.version.split()[0], "cpu": machine.cpu(),
            "cores": os.cpu_count(), "versions": machine.versions()}  # fmt: skip


def _append(path: Path, table: dict[str, Any]) -> None:
    with open(path, "a") as file:
        file.write(json.dumps(table) + "\n")


def _chosen(options: argparse.Namespace) -> list[Case]:
    if options.file:
        tables = _tables(options.file)
        lost = [t for t in tables if not options.failed or t.get("verdict") == "failed"]
        return [read(json.dumps(table)) for table in lost]
    reference = _tables(options.results) if options.results else []
    passed = {
        (t["case"]["seed"], t["case"]["index"]) for t in reference if t["verdict"] == "passed"
    }
    return [generate(options.seed, i) for i in options.cases if (options.seed, i) not in passed]


def _tables(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file of cases or results, the last one of each case."""
    tables = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    of_cases = [table for table in tables if "campaign" not in table]
    keys = [((case := t.get("case", t))["seed"], case["index"]) for t in of_cases]
    return list(dict(zip(keys, of_cases, strict=True)).values())


def _results(cases: Iterable[Case], work: Path, workers: int) -> Iterator[dict[str, Any]]:
    """Run cases, `workers` side by side; yield their results as they come."""
    running: dict[int, Case] = {}
    for case in cases:
        running[isolation.isolated(partial(runner.run, case, work))] = case
        if len(running) == workers:
            yield _next_of(running, work)
    while running:
        yield _next_of(running, work)


def _next_of(running: dict[int, Case], work: Path) -> dict[str, Any]:
    pid, status = os.wait()
    case = running.pop(pid)
    note = runner.home_of(case, work) / "result.json"
    if status or not note.exists():
        problem = f"the campaign itself failed, status {status}"
        return {"case": dump(case), "verdict": "failed", "problems": [problem], "attempts": [],
                "mpi": attempt.mpi(), "seconds": 0.0}  # fmt: skip
    result: dict[str, Any] = json.loads(note.read_text())
    return result


def _tell(result: dict[str, Any]) -> None:
    case, codes = result["case"], [item["code"] for item in result["attempts"]]
    faults = " + ".join(_words(fault) for fault in case["faults"])
    line = f"{case['seed']}/{case['index']} {result['mpi']} {case['engine']} x{case['ranks']}"
    print(f"{line} {case['launcher']}: {faults} -> {codes} {result['seconds']:.1f} s", flush=True)
    for problem in result["problems"]:
        print(f"    FAILED {problem}", flush=True)


def _words(fault: dict[str, Any]) -> str:
    return " ".join(str(value) for key, value in fault.items() if key != "kind")


def _show(options: argparse.Namespace) -> int:
    results = [table for path in options.results for table in _tables(path)]
    for title, key in (("engine", _engine), ("fault", _kinds), ("problem", _problems)):
        counts = Counter((k, r["verdict"]) for r in results for k in key(r))
        print(f"\n{title}")
        for name in sorted({k for k, _ in counts}):
            print(f"  {counts[name, 'passed']:5} passed {counts[name, 'failed']:4} failed  {name}")
    fired = sum(any(item["fired"] for item in r["attempts"]) for r in results)
    failed = sum(r["verdict"] == "failed" for r in results)
    print(f"\n{len(results)} cases, {fired} of them hit by a fault, {failed} failed")
    return 1 if failed else 0


def _engine(result: dict[str, Any]) -> list[str]:
    return [f"{result['mpi']} {result['case']['engine']}"]


def _kinds(result: dict[str, Any]) -> list[str]:
    names = []
    for fault in result["case"]["faults"]:
        if fault["kind"] == "signal":
            target = "the launcher" if fault["target"] < 0 else "a rank"
            names.append(f"{fault['signal']} to {target}")
        else:
            names.append(f"{fault['kind']} {fault.get('operation', '')} {fault.get('effect', '')}")
    return names


def _problems(result: dict[str, Any]) -> list[str]:
    return [problem[:70] for problem in result["problems"]]


if __name__ == "__main__":
    sys.exit(main())
