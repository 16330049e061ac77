"""Claims: a training step on a GPU against one of PyTorch: MLP and transformer 1.5x, ResNet 3x.

    python benchmarks/gpu/steps.py [--rounds 10] [--sizes large|small]

Forward, backward and SGD with momentum, float32 on both sides without TF32, samples on the GPU
already. Both take their steps in turn in one process; the median of the paired ratios counts.
Beside them, as they are: our step in tf32 and bf16. Without PyTorch ours alone is timed, and the
claims are not measured.

    mlp          784-4096-4096-10, batch 2048        transformer  6 x 512, 8 heads, 256 bytes x 32
    resnet20     28 x 28 grey, batch 256
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))
from lib.common import RESULTS, machine_facts, median_ratio, summarize_times, time_interleaved
from lib.outcomes import print_claims, save_result

from hpctrain import nn, optim
from hpctrain.core import xp
from hpctrain.engines import Flags, Task
from hpctrain.engines.synchronous.single import SingleEngine
from hpctrain.gradients.precision import Precision, make_replica
from hpctrain.gradients.replica import Batch
from hpctrain.world import World, init

MAX_RATIO = {"mlp": 1.5, "transformer": 1.5, "resnet20": 3.0}
#: each timed before the next is made: the last replica tells how products are made, for all
OTHER_PRECISIONS: tuple[Precision, ...] = ("bf16", "tf32")
STEPS_PER_CALL = 5  # between two looks at the clock
Step = Callable[[], object]


class Sizes(NamedTuple):
    """How large the models and their batches are."""

    widths: list[int]
    vectors: int
    layers: int
    width: int
    heads: int
    length: int
    texts: int
    images: int


SIZES = {
    "large": Sizes([784, 4096, 4096, 10], 2048, 6, 512, 8, 256, 32, 256),
    "small": Sizes([784, 32, 10], 8, 1, 16, 2, 16, 2, 2),
}


class Case(NamedTuple):
    """Our model, its equal in PyTorch (made on call), and a batch of the host for each."""

    options: Any
    make_torch_model: Callable[[], Any]
    x: np.ndarray
    y: np.ndarray
    torch_x: np.ndarray


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--sizes", choices=list(SIZES), default="large")
    parser.add_argument("--json", type=Path, default=RESULTS / "gpu" / "steps.json")
    options_ = parser.parse_args()
    world, rows, claims = init("gpu"), [], {}
    about = {"machine": machine_facts(world), "device": world.device, "torch": torch_version()}
    for name, case in cases(SIZES[options_.sizes]):
        rows += measure_case(world, name, case, options_.rounds)
        claims = make_claims(rows, about["torch"])
        save_result(options_.json, about, claims, rows)  # now: what comes next may end the process
    sys.exit(not print_claims(claims))


def torch_version() -> str | None:
    """Return the version of a PyTorch that reaches this GPU, None if there is none."""
    if find_spec("torch") is None:
        return None
    import torch

    return str(torch.__version__) if torch.cuda.is_available() else None


def cases(sizes_: Sizes) -> Iterator[tuple[str, Case]]:
    """Yield all models."""
    rng = np.random.default_rng(0)

    def images(n: int, *shape: int) -> tuple[np.ndarray, np.ndarray]:
        return rng.standard_normal((n, *shape)).astype(np.float32), rng.integers(0, 10, n)

    x, y = images(sizes_.vectors, sizes_.widths[0])
    mlp = lambda: _torch_models().make_mlp(sizes_.widths)  # noqa: E731
    yield "mlp", Case(nn.MlpOptions(widths=sizes_.widths), mlp, x, y, x)
    text = rng.integers(0, 256, (sizes_.texts, sizes_.length + 1))
    x, y = text[:, :-1].astype(np.uint8), np.ascontiguousarray(text[:, 1:])
    options = nn.TransformerOptions(layers=sizes_.layers, width=sizes_.width, heads=sizes_.heads)
    sizes = (sizes_.layers, sizes_.width, sizes_.heads, sizes_.length)
    transformer = lambda: _torch_models().make_transformer(_torch_models().TransformerSizes(*sizes))  # noqa: E731
    yield "transformer", Case(options, transformer, x, y, x.astype(np.int64))
    x, y = images(sizes_.images, 28, 28)
    yield (
        "resnet20",
        Case(nn.ResNetOptions(), lambda: _torch_models().make_resnet20(), x, y, x[:, None]),
    )


def measure_case(world: World, name: str, case: Case, rounds: int) -> list[dict[str, Any]]:
    """Return a row for each contender."""
    steps = {"ours": make_own_steps(case, "float32")}
    if torch_version():
        steps["torch"] = make_torch_steps(case)
    seconds = time_interleaved(world.link, steps, rounds)
    for precision in OTHER_PRECISIONS if find_spec("ml_dtypes") else OTHER_PRECISIONS[1:]:
        seconds |= time_interleaved(
            world.link, {precision: make_own_steps(case, precision)}, rounds
        )
    rows = [{"what": name, "who": library,
             **summarize_times(np.divide(times, STEPS_PER_CALL).tolist())}
            for library, times in seconds.items()]  # fmt: skip
    if "torch" in seconds:
        rows[0] |= {"ratio": median_ratio(seconds["ours"], seconds["torch"])}
    return rows


def make_own_steps(case: Case, precision: Precision) -> Step:
    """Return what takes STEPS of our steps, and waits for the last."""
    model = case.options.build(case.x.shape[1:], 10)
    replica = make_replica(model, 0, precision, on_gpu=True)
    engine, param = SingleEngine(replica, optim.sgd(1e-3, 0.9)), replica.arena.param
    batch = Batch.of(*(xp.like(param, part, part.dtype) for part in (case.x, case.y)))
    task = Task(batch, 1 / (len(case.x) * model.targets), nn.Key(0, 0, 0))

    def steps() -> None:
        for _ in range(STEPS_PER_CALL):
            engine.step(task, Flags())
        xp.finish(param)

    return steps


def make_torch_steps(case: Case) -> Step:
    """Return what takes STEPS of PyTorch's steps, and waits for the last."""
    import torch

    torch.backends.cudnn.allow_tf32 = False  # as it is for products
    on_gpu = partial(torch.as_tensor, device="cuda")
    step = _torch_models().make_step(
        case.make_torch_model().to("cuda"), on_gpu(case.torch_x), on_gpu(case.y)
    )

    def steps() -> None:
        for _ in range(STEPS_PER_CALL):
            step()
        torch.cuda.synchronize()

    return steps


def _torch_models() -> Any:
    from lib import in_torch

    return in_torch


def make_claims(rows: list[dict[str, Any]], torch: str | None) -> dict[str, bool | None]:
    """Return what is claimed of each model that was timed."""
    reason = "no PyTorch with this GPU" if torch is None else ""
    return {
        f"{row['what']}: {row.get('ratio', 0):.2f} of PyTorch's step, <= {MAX_RATIO[row['what']]}"
        if "ratio" in row
        else f"{row['what']}: a step against PyTorch's, {reason}": (
            row["ratio"] <= MAX_RATIO[row["what"]] if "ratio" in row else None
        )
        for row in rows
        if row["who"] == "ours"
    }


if __name__ == "__main__":
    main()
