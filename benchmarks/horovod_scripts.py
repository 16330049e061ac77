"""Claims: a script of Horovod is not slower on hpctrain.horovod than on Horovod itself.

    benchmarks/install_horovod.sh ENVIRONMENT          builds Horovod there
    python benchmarks/horovod_scripts.py --horovod ENVIRONMENT [--ranks 2] [--rounds 5]

The same script runs with both in turns, each time in a job of its own under the mpiexec of its
environment; figures are medians over all rounds. A named all-reduce of 4 bytes takes at most 60 us;
a step of an MLP of 10.5 M parameters at batch 32 at most Horovod's time, one over 300 tensors of
1,000 elements at most 0.8 of it; ranks without operations use at most 0.5 % of a core. Needs
PyTorch and Open MPI in this environment.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter, process_time, sleep
from typing import Any

import torch
from lib.common import make_parser, save_result
from torch import nn

from hpctrain.transport.machine import facts

LIBRARIES = {"hpctrain": "hpctrain.horovod.torch", "horovod": "horovod.torch"}
CALLS, STEPS, IDLE_S = 2000, 30, 5.0
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def main() -> None:
    parser = make_parser(__doc__)
    parser.set_defaults(rounds=5)
    parser.add_argument("--horovod", type=Path, required=True, metavar="ENVIRONMENT")
    parser.add_argument("--rank-of", choices=LIBRARIES, help="measure, as a rank of a job")
    arguments = parser.parse_args()
    if arguments.rank_of:
        measure(import_module(LIBRARIES[arguments.rank_of]))
        return
    bins = {"hpctrain": Path(sys.executable).parent, "horovod": arguments.horovod / "bin"}
    seen: dict[tuple[str, str], list[float]] = {}
    for _ in range(arguments.rounds):
        for library, folder in bins.items():
            for figure, value in run_job(folder, library, arguments).items():
                seen.setdefault((library, figure), []).append(value)
    rows = [
        {"library": library, "figure": figure, "median": median(values), "low": min(values),
         "high": max(values)}
        for (library, figure), values in seen.items()
    ]  # fmt: skip
    about = {"machine": facts([os.uname().nodename], "mpi"), "torch": torch.__version__}
    save_result(f"horovod-scripts-{arguments.ranks}-ranks", about, rows, claims(seen))


def run_job(folder: Path, library: str, arguments: Any) -> dict[str, float]:
    """Return the figures of a job with one library."""
    words = [
        str(folder / "mpiexec"), "-n", str(arguments.ranks), str(folder / "python"), __file__,
        "--horovod", str(arguments.horovod), "--rank-of", library,
    ]  # fmt: skip
    environ = {**os.environ, **AS_ROOT, "OMP_NUM_THREADS": "1"}
    if library == "horovod":  # this environment's hpctrain, for the parser and the machine's facts
        environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(words, env=environ, stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def measure(hvd: Any) -> None:
    """Print the medians of this job on rank 0."""
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x, layers = torch.ones(1), (1024, 2048, 2048, 2048, 10)  # 10.5 M parameters
    mlp = nn.Sequential(*(nn.Linear(*shape) for shape in pairwise(layers)))
    batch, weights = torch.randn(32, layers[0]), torch.randn(1000)
    many = nn.ParameterList(nn.Parameter(torch.randn(1000)) for _ in range(300))
    figures = {
        "all-reduce us": 1e6 * median(times(lambda: hvd.allreduce(x, name="x"), CALLS)),
        "MLP ms": 1e3 * median(step_times(hvd, mlp, lambda: mlp(batch).square().mean())),
        "300 tensors ms": 1e3
        * median(step_times(hvd, many, lambda: sum((p * weights).sum() for p in many))),
    }
    hvd.barrier()
    start_s = process_time()
    sleep(IDLE_S)
    figures["idle %"] = 100 * (process_time() - start_s) / IDLE_S
    if hvd.rank() == 0:
        print(json.dumps(figures), flush=True)
    hvd.shutdown()


def times(call: Callable[[], object], count: int) -> list[float]:
    """Return the seconds of `count` calls, after some that are not counted."""
    seconds = []
    for _ in range(count + count // 10 + 1):
        start_s = perf_counter()
        call()
        seconds.append(perf_counter() - start_s)
    return seconds[-count:]


def step_times(hvd: Any, module: nn.Module, loss: Callable[[], Any]) -> list[float]:
    """Return the seconds of steps of SGD with `hvd.DistributedOptimizer`."""
    hvd.broadcast_parameters(module.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(module.parameters(), lr=1e-4), named_parameters=module.named_parameters()
    )

    def step() -> None:
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()

    return times(step, STEPS)


def claims(seen: dict[tuple[str, str], list[float]]) -> dict[str, bool]:
    """Return what the module's docstring says, and whether it holds."""
    ours, theirs = (
        {figure: median(values) for (library, figure), values in seen.items() if library == name}
        for name in LIBRARIES
    )
    return {
        "a named all-reduce of 4 bytes takes at most 60 us": ours["all-reduce us"] <= 60,
        "a step of the MLP takes at most Horovod's time": ours["MLP ms"] <= theirs["MLP ms"],
        "a step over 300 tensors takes at most 0.8 of it": ours["300 tensors ms"]
        <= 0.8 * theirs["300 tensors ms"],
        "idle ranks use at most 0.5 % of a core": ours["idle %"] <= 0.5,
    }


if __name__ == "__main__":
    main()
