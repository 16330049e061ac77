"""PyTorch's own tests of a backend, on ranks of MPI: `mpiexec -n 3 python pytorch_suite.py OUT`.

The tests (`DistributedTest._DistTestBase`, in PyTorch's wheel) start their own processes and read
the backend's name from the environment. Here each rank makes the test case and calls the body of
each method. Bodies that ask for the name see "gloo", the backend whose tests run on CPUs; the
groups are ours. Rank r writes its results to OUT/rank-r.jsonl. Given names of tests it runs these.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import traceback
import unittest
from datetime import timedelta
from pathlib import Path

BACKEND = os.environ.get("SUITE_BACKEND", "hpctrain")
os.environ["BACKEND"] = "gloo"
# Of the tests that make their groups anew; a file for each job.
JOB = os.environ.get("PMIX_NAMESPACE", os.environ.get("PMI_ID", "")) + str(os.getppid())
os.environ["INIT_METHOD"] = f"file://{tempfile.gettempdir()}/suite-init-{JOB}"

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from hpctrain.world import current_world  # noqa: E402

LIMIT_S = 60.0


def load_cases(rank: int, size: int, temporary: str) -> type:
    """Return the class of the tests, whose module reads the environment; models are made here."""
    torch.manual_seed(1234)
    os.environ.update(WORLD_SIZE=str(size), TEMP_DIR=temporary, RANK=str(rank))
    from torch.testing._internal.distributed import distributed_test

    class Suite(distributed_test.DistributedTest._DistTestBase, distributed_test.TestDistBackend):
        """The tests, each run in the calling process."""

    # The suite's barrier counts files, which earlier tests have left.
    Suite._barrier = lambda self, *_, **__: current_world().barrier()
    for folder in ("barrier", "test_dir", "init_dir"):
        Path(temporary, folder).mkdir(exist_ok=True)
    return Suite


def run_case(suite: type, name: str, rank: int, temporary: str) -> tuple[str, str]:
    """Return (outcome, text) of one test: passed, skipped or failed."""
    torch.manual_seed(1234)
    case = suite(name)
    case.rank, case.file_name = rank, str(Path(temporary, f"file-{name}"))
    case._barrier()
    try:
        getattr(case, name)()
    except (unittest.SkipTest, SystemExit) as error:
        return "skipped", str(error)
    except Exception as error:
        return "failed", "".join(traceback.format_exception(error))[-2000:]
    finally:
        case._barrier()
    return "passed", ""


def read_outcomes(folder: Path) -> dict[str, str]:
    """Return the outcome of each test: failed if it failed on any rank, else that of rank 0."""
    outcomes: dict[str, str] = {}
    for path in sorted(folder.glob("rank-*.jsonl")):
        for line in map(json.loads, path.read_text().splitlines()):
            if line["outcome"] == "failed" or outcomes.get(line["test"], "started") == "started":
                outcomes[line["test"]] = line["outcome"]
    return outcomes


def main() -> None:
    out, names = Path(sys.argv[1]), sys.argv[2:]
    for variable in ("RANK", "WORLD_SIZE"):
        os.environ.pop(variable, None)
    dist.init_process_group(BACKEND, timeout=timedelta(seconds=LIMIT_S))
    rank, size = dist.get_rank(), dist.get_world_size()
    folder = [tempfile.mkdtemp(prefix="suite-") if rank == 0 else ""]
    dist.broadcast_object_list(folder)
    dist.destroy_process_group()
    suite = load_cases(rank, size, folder[0])
    make_group = dist.new_group
    dist.new_group = lambda *args, **options: make_group(
        *args, **{key: value for key, value in options.items() if key != "backend"}
    )
    with open(out / f"rank-{rank}.jsonl", "a") as results:
        for name in names or sorted(n for n in dir(suite) if n.startswith("test_")):
            for variable in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
                os.environ.pop(variable, None)
            print(json.dumps({"test": name, "outcome": "started"}), file=results, flush=True)
            dist.init_process_group(BACKEND, timeout=timedelta(seconds=LIMIT_S))
            os.environ.update(WORLD_SIZE=str(size), RANK=str(rank))
            outcome, text = run_case(suite, name, rank, folder[0])
            line = {"test": name, "outcome": outcome, "text": text}
            print(json.dumps(line), file=results, flush=True)
            if dist.is_initialized():
                dist.destroy_process_group()
    current_world().barrier()
    if rank == 0:
        shutil.rmtree(folder[0])
        Path(os.environ["INIT_METHOD"].removeprefix("file://")).unlink(missing_ok=True)


if __name__ == "__main__":
    main()
