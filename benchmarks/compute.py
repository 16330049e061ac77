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
from _common import interleaved, options, paired_ratio, spread, world_of, write

try:
    import torch
except ImportError:
    raise SystemExit(print("not measured: PyTorch is not installed")) from None

from _in_torch import Text, resnet20_of, step_of, transformer_of

from hpctrain import nn, optim
from hpctrain.engines import Flags, Task
from hpctrain.engines.synchronous.single import SingleEngine
from hpctrain.gradients.replica import Batch, ModelReplica

TEXT = Text(layers=4, width=256, heads=8, length=128)
LIMIT = {"mlp": 1.3, "transformer": 2.0, "resnet20": 4.0}
Step = Callable[[], object]


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--only", choices=list(LIMIT))
    arguments = parser.parse_args()
    world, rows = world_of(1), []
    torch.set_num_threads(1)
    for name in [arguments.only] if arguments.only else LIMIT:
        ours, theirs = CASES[name]()
        seconds = interleaved(world.link, {"ours": ours, "torch": theirs}, arguments.rounds)
        ratio = paired_ratio(seconds["ours"], seconds["torch"])
        for who, each in seconds.items():
            rows.append({"what": name, "who": who, **spread(each)})
        rows[-2] |= {"ratio": ratio, "limit": LIMIT[name]}
    pools = threadpoolctl.threadpool_info()
    kernels = sorted({str(pool.get("architecture")) for pool in pools if "openblas" in str(pool)})
    claims = {
        f"{row['what']} takes {row['ratio']:.2f} of PyTorch's step, <= {row['limit']}": (
            row["ratio"] <= row["limit"]
        )
        for row in rows
        if "ratio" in row
    }
    write(world, "compute", rows, claims, torch=torch.__version__, openblas_kernels=kernels)


def mlp() -> tuple[Step, Step]:
    x, y = images(128, (784,))
    layers = torch.nn.Sequential(
        torch.nn.Linear(784, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 1024), torch.nn.ReLU(),
        torch.nn.Linear(1024, 10),
    )  # fmt: skip
    return ours(nn.MlpOptions(widths=[784, 1024, 1024, 10]), x, y), theirs(layers, x, y)


def transformer() -> tuple[Step, Step]:
    draw = np.random.default_rng(0)
    text = draw.integers(0, 256, (16, TEXT.length + 1))
    x, y = text[:, :-1].astype(np.uint8), np.ascontiguousarray(text[:, 1:])
    model = nn.TransformerOptions(layers=TEXT.layers, width=TEXT.width, heads=TEXT.heads)
    return ours(model, x, y), theirs(transformer_of(TEXT), x.astype(np.int64), y)


def resnet20() -> tuple[Step, Step]:
    x, y = images(64, (28, 28))
    return ours(nn.ResNetOptions(), x, y), theirs(resnet20_of(), x[:, None], y)


CASES = {"mlp": mlp, "transformer": transformer, "resnet20": resnet20}


def images(n: int, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(0)
    return draw.standard_normal((n, *shape)).astype(np.float32), draw.integers(0, 10, n)


def ours(options_: Any, x: np.ndarray, y: np.ndarray) -> Step:
    model = options_.build(x.shape[1:], 10)
    engine = SingleEngine(ModelReplica(model, 0, "float32"), optim.sgd(1e-3, 0.9))
    batch, scale = Batch(x, y), 1 / (len(x) * model.targets)
    return lambda: engine.step(Task(batch, scale, nn.Key(0, 0, 0)), Flags())


def theirs(model: Any, x: np.ndarray, y: np.ndarray) -> Step:
    return step_of(model, torch.from_numpy(x), torch.from_numpy(y))


if __name__ == "__main__":
    main()
