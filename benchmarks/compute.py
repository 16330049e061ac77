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

from torch.nn import functional

from hpctrain import nn, optim
from hpctrain.engines import Flags, Task
from hpctrain.engines.single import Single
from hpctrain.gradients.replica import Batch, ModelReplica

LAYERS, WIDTH, HEADS, LENGTH = 4, 256, 8, 128
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
    text = draw.integers(0, 256, (16, LENGTH + 1))
    x, y = text[:, :-1].astype(np.uint8), np.ascontiguousarray(text[:, 1:])
    model = nn.TransformerOptions(layers=LAYERS, width=WIDTH, heads=HEADS)
    return ours(model, x, y), theirs(TorchTransformer(), x.astype(np.int64), y)


def resnet20() -> tuple[Step, Step]:
    x, y = images(64, (28, 28))
    return ours(nn.ResNetOptions(), x, y), theirs(torch_resnet20(), x[:, None], y)


CASES = {"mlp": mlp, "transformer": transformer, "resnet20": resnet20}


def images(n: int, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(0)
    return draw.standard_normal((n, *shape)).astype(np.float32), draw.integers(0, 10, n)


def ours(options_: Any, x: np.ndarray, y: np.ndarray) -> Step:
    model = options_.build(x.shape[1:], 10)
    engine = Single(ModelReplica(model, 0, "float32"), optim.sgd(1e-3, 0.9))
    batch, scale = Batch(x, y), 1 / (len(x) * model.targets)
    return lambda: engine.step(Task(batch, scale, nn.Key(0, 0, 0)), Flags())


def theirs(model: Any, x: np.ndarray, y: np.ndarray) -> Step:
    inputs, labels = torch.from_numpy(x), torch.from_numpy(y)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        logits = model(inputs)
        functional.cross_entropy(logits.flatten(0, -2), labels.flatten()).backward()
        optimizer.step()

    return step


class TorchBlock(torch.nn.Module):
    """The block of our transformer, with PyTorch's fused attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = torch.nn.LayerNorm(WIDTH), torch.nn.LayerNorm(WIDTH)
        self.qkv, self.out = torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.wide = torch.nn.Linear(WIDTH, 4 * WIDTH)
        self.narrow = torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        split = self.qkv(self.norm1(x)).view(*x.shape[:2], 3, HEADS, WIDTH // HEADS)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        wide = functional.gelu(self.wide(self.norm2(x)), approximate="tanh")
        return x + self.narrow(wide)


class TorchTransformer(torch.nn.Module):
    """Our transformer in PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(256, WIDTH)
        self.places = torch.nn.Parameter(torch.zeros(LENGTH, WIDTH))
        self.blocks = torch.nn.Sequential(*[TorchBlock() for _ in range(LAYERS)])
        self.norm = torch.nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.blocks(self.table(x) + self.places)) @ self.table.weight.T


class TorchResidual(torch.nn.Module):
    """The block of our ResNet."""

    def __init__(self, before: int, channels: int) -> None:
        super().__init__()
        self.stride, self.more = 1 + (channels != before), channels - before
        self.conv1 = torch.nn.Conv2d(before, channels, 3, self.stride, 1, bias=False)
        self.conv2 = torch.nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = torch.nn.BatchNorm2d(channels), torch.nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm2(self.conv2(functional.relu(self.norm1(self.conv1(x)))))
        if self.more:
            x = functional.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 0, self.more))
        return functional.relu(x + y)


def torch_resnet20() -> torch.nn.Module:
    layers = [torch.nn.Conv2d(1, 16, 3, 1, 1, bias=False), torch.nn.BatchNorm2d(16)]
    layers.append(torch.nn.ReLU())
    for before, channels in ((16, 16), (16, 32), (32, 64)):
        layers.append(TorchResidual(before, channels))
        layers += [TorchResidual(channels, channels) for _ in range(2)]
    return torch.nn.Sequential(
        *layers, torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(64, 10)
    )


if __name__ == "__main__":
    main()
