"""Claims: one thread of ours against one of PyTorch, per step: MLP 1.3x, transformer 2x, ResNet 4x.

    python benchmarks/compute.py [--rounds 20] [--only mlp]

A step is forward, backward and SGD with momentum, in float32. Both sides take their steps in
turn in one process, and the median of the paired ratios counts. Needs PyTorch, which nothing else
of ours does: `pip install torch` into an environment of its own.

    mlp          784-1024-1024-10, batch 128
    transformer  4 layers, width 256, 8 heads, 128 bytes, batch 16
    resnet20     28 x 28 grey, batch 64
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"
# Some sites pin OpenBLAS to an old kind of CPU. It would be pinned alone: PyTorch brings its own.
os.environ.pop("OPENBLAS_CORETYPE", None)

from collections.abc import Callable
from typing import Any

import numpy as np
import threadpoolctl
from lib.common import (
    make_parser,
    median_ratio,
    report_result,
    start_world,
    summarize_times,
    time_interleaved,
)

try:
    import torch
except ImportError:
    raise SystemExit(print("not measured: PyTorch is not installed")) from None

from lib.in_torch import TransformerSizes, make_resnet20, make_step, make_transformer

from hpctrain import nn, optim
from hpctrain.engines import Flags, Task
from hpctrain.engines.synchronous.single import SingleEngine
from hpctrain.gradients.replica import Batch, ModelReplica

TRANSFORMER_SIZES = TransformerSizes(layers=4, width=256, heads=8, length=128)
MAX_RATIO = {"mlp": 1.3, "transformer": 2.0, "resnet20": 4.0}
Step = Callable[[], object]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--only", choices=list(MAX_RATIO))
    arguments = parser.parse_args()
    world, rows = start_world(1), []
    torch.set_num_threads(1)
    for name in [arguments.only] if arguments.only else MAX_RATIO:
        ours, theirs = CASES[name]()
        seconds = time_interleaved(world.link, {"ours": ours, "torch": theirs}, arguments.rounds)
        ratio = median_ratio(seconds["ours"], seconds["torch"])
        for library, times in seconds.items():
            rows.append({"what": name, "who": library, **summarize_times(times)})
        rows[-2] |= {"ratio": ratio, "limit": MAX_RATIO[name]}
    thread_pools = threadpoolctl.threadpool_info()
    kernels = sorted(
        {str(pool.get("architecture")) for pool in thread_pools if "openblas" in str(pool)}
    )
    claims = {
        f"{row['what']} takes {row['ratio']:.2f} of PyTorch's step, <= {row['limit']}": (
            row["ratio"] <= row["limit"]
        )
        for row in rows
        if "ratio" in row
    }
    report_result(world, "compute", rows, claims, torch=torch.__version__, openblas_kernels=kernels)


def mlp() -> tuple[Step, Step]:
    x, y = random_images(128, (784,))
    network = torch.nn.Sequential(
        torch.nn.Linear(784, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 1024), torch.nn.ReLU(),
        torch.nn.Linear(1024, 10),
    )  # fmt: skip
    return make_own_step(nn.MlpOptions(widths=[784, 1024, 1024, 10]), x, y), make_torch_step(
        network, x, y
    )


def transformer() -> tuple[Step, Step]:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 256, (16, TRANSFORMER_SIZES.length + 1))
    x, y = tokens[:, :-1].astype(np.uint8), np.ascontiguousarray(tokens[:, 1:])
    model = nn.TransformerOptions(
        layers=TRANSFORMER_SIZES.layers,
        width=TRANSFORMER_SIZES.width,
        heads=TRANSFORMER_SIZES.heads,
    )
    return make_own_step(model, x, y), make_torch_step(
        make_transformer(TRANSFORMER_SIZES), x.astype(np.int64), y
    )


def resnet20() -> tuple[Step, Step]:
    x, y = random_images(64, (28, 28))
    return make_own_step(nn.ResNetOptions(), x, y), make_torch_step(make_resnet20(), x[:, None], y)


CASES = {"mlp": mlp, "transformer": transformer, "resnet20": resnet20}


def random_images(n: int, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.standard_normal((n, *shape)).astype(np.float32), rng.integers(0, 10, n)


def make_own_step(model_options: Any, x: np.ndarray, y: np.ndarray) -> Step:
    model = model_options.build(x.shape[1:], 10)
    engine = SingleEngine(ModelReplica(model, 0, "float32"), optim.sgd(1e-3, 0.9))
    batch, scale = Batch.of(x, y), 1 / (len(x) * model.targets)
    return lambda: engine.step(Task(batch, scale, nn.Key(0, 0, 0)), Flags())


def make_torch_step(model: Any, x: np.ndarray, y: np.ndarray) -> Step:
    return make_step(model, torch.from_numpy(x), torch.from_numpy(y))


if __name__ == "__main__":
    main()
