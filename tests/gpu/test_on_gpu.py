"""A real GPU, where there is one: the tests of the stand-ins, with threads and MPI ranks.

    pytest tests/gpu      # about five minutes; one GPU is enough

Bodies and tables are those of the tests on stand-ins; what they count has no counterpart here.
Without a GPU all rows are skipped.
"""

from __future__ import annotations

import json
from importlib import util
from pathlib import Path

import numpy as np
import pytest
from cases import dtype_of
from jobs import sets
from ranks import run_on, run_on_gpus
from safetensors.numpy import load_file

from hpctrain.collectives import OPERATIONS, operation
from hpctrain.collectives.reductions import cuda_sum
from hpctrain.collectives.reductions.operations import operation_names, ufunc_of
from hpctrain.core.run_files import run_folder
from hpctrain.gradients.precision import make_replica

TESTS = Path(__file__).parents[1]


def devices() -> int:
    try:
        import cupy

        return int(cupy.cuda.runtime.getDeviceCount())
    except Exception:  # no CuPy, no driver, or none that fits
        return 0


pytestmark = [
    pytest.mark.skipif(not devices(), reason="no GPU here"),
    pytest.mark.timeout(200),
]


def of(path: str):
    """Return the test module at `path`: two of them may share a name."""
    spec = util.spec_from_file_location(path.replace("/", "_"), TESTS / f"{path}.py")
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MODELS, MIXED, OPTIMIZERS, ENGINES = map(
    of, ("nn/test_on_device", "gradients/test_mixed", "optim/test_on_device",
         "engines/test_on_device")
)  # fmt: skip


def away(result, expected) -> float:
    return float(np.linalg.norm(result - expected) / max(np.linalg.norm(expected), 1e-30))


@pytest.mark.parametrize("samples", [7, 0])
@pytest.mark.parametrize("name", MODELS.MODELS)
def test_gradients(name, samples):
    host, expected, order = MODELS.computed(name, False, samples)
    device, sums, ready = MODELS.computed(name, True, samples)
    assert ready == order and sums["accuracy"] == expected["accuracy"]
    assert away(sums["loss"].sum, expected["loss"].sum) <= 1e-5
    assert away(device.arena.grad.get(), host.arena.grad) <= 1e-4
    assert away(device.arena.buffer.get(), host.arena.buffer) <= 1e-5


@pytest.mark.parametrize("precision", ["tf32", "bf16", "fp16"])
@pytest.mark.parametrize("name", MIXED.MODELS)
def test_gradients_with_fewer_digits(name, precision):
    batch, expected = MIXED.batch(name), make_replica(MIXED.built(name), 3, "float32", False)
    result = make_replica(MIXED.built(name), 3, precision, True)
    reported = expected.gradient(batch, 1 / 6, MIXED.KEY, MIXED.nobody)
    sums = result.gradient(batch, 1 / 6, MIXED.KEY, MIXED.nobody)
    close = MIXED.CLOSE.get(precision, 0.005)
    assert away(sums["loss"].sum, reported["loss"].sum) <= close
    assert away(result.arena.grad.get(), expected.arena.grad) <= 6 * close
    again = make_replica(MIXED.built(name), 3, "float32", True)  # with all digits, as ever after
    again.gradient(batch, 1 / 6, MIXED.KEY, MIXED.nobody)
    assert away(again.arena.grad.get(), expected.arena.grad) <= 1e-4


def test_products_have_the_digits_of_the_precision():
    import cupy

    x = np.random.default_rng(0).standard_normal((512, 512)).astype(np.float32)
    target, expected, model = cupy.asarray(x), x.astype(np.float64) @ x, MIXED.built("mlp")
    for precision, minimum, maximum in (("float32", 0, 1e-5), ("tf32", 1e-5, 1e-2),
                                   ("float32", 0, 1e-5)):  # fmt: skip
        make_replica(model, 3, precision, True)
        if int(target.device.compute_capability) < 80:  # no TF32 there
            minimum = 0
        assert minimum <= away((target @ target).get(), expected) <= maximum, precision


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", OPTIMIZERS.OPTIMIZERS)
def test_optimizers(name, dtype):
    import cupy

    expected = OPTIMIZERS.updated(OPTIMIZERS.OPTIMIZERS[name], dtype)
    result = OPTIMIZERS.updated(OPTIMIZERS.OPTIMIZERS[name], dtype, cupy.asarray)
    close = 1e-5 if dtype == "float32" else 1e-13  # a kernel multiplies and adds in one
    for key in result.keys() - {"step"}:
        assert away(result[key].get(), expected[key]) <= close, key


DTYPES = ("float16", "bfloat16", "float32", "float64", "int32", "int64")


@pytest.mark.parametrize(
    "dtype, op",
    [(d, op) for d in DTYPES for op in operation_names(dtype_of(d)) if op in OPERATIONS],
)
def test_sums_have_the_bytes_of_the_host(dtype, op):
    import cupy

    draw, method = np.random.default_rng(0), operation(op, dtype_of(dtype))
    for n, skip in ((1, 0), (1000, 0), (1001, 1), (1 << 20, 0)):
        arrays = [(draw.standard_normal(n + skip) * 100).astype(dtype_of(dtype)) for _ in range(3)]
        reported = arrays[0][skip:].copy()
        for other in arrays[1:]:
            method(reported, other[skip:], out=reported)
        target = [cupy.asarray(x)[skip:] for x in arrays]
        cuda_sum.combine(target, ufunc_of(method), target)
        assert all((x.get().view(np.uint8) == reported.view(np.uint8)).all() for x in target), (
            n,
            skip,
        )


@pytest.mark.parametrize("name", ENGINES.ENGINES)
def test_engines_on_threads(name):
    expected = run_on("threads", 3, lambda w: ENGINES.trained(w, ENGINES.ENGINES[name])[0])
    result = run_on_gpus(3, lambda w: ENGINES.trained(w, ENGINES.ENGINES[name])[0])
    for item, other in zip(result, expected, strict=True):
        assert away(item, other) <= 1e-4


@pytest.mark.parametrize("name", ENGINES.FREE)
def test_engines_on_threads_that_wait_for_nobody(name):
    result = run_on_gpus(3, lambda w: ENGINES.trained(w, ENGINES.FREE[name])[1])
    assert np.isfinite(result[0]["train_loss"])


# From here on real ranks of MPI, two of them on a GPU where there is one.
STEPS, TRAIN = 12, ("-q", "train", "digits", "--device")
#: what is set -> how near the parameters are to those of one rank on the CPU; None: not alike.
#: In all they move by 0.06.
RUNS = {
    **{f"algorithm {name}": ({"wire_algorithm": name}, 1e-4) for name in (
        "auto", "direct", "ring", "tree", "double-tree", "recursive-doubling",
        "halving-doubling", "hierarchical", "native")},
    "overlap": ({"wire_overlap": "always", "wire_bucket_bytes": 20_000}, 1e-4),
    "priority": ({"wire_overlap": "always", "wire_bucket_bytes": 20_000,
                  "wire_priority": "true"}, 1e-4),
    "ordered": ({"wire_reduction": "ordered"}, 1e-4),
    "shards": ({"engine_shard_optimizer": "true"}, 1e-4),
    "ps-sync": ({"engine_kind": "ps-sync"}, 1e-4),
    "ps-async": ({"engine_kind": "ps-async"}, None),
    "local-sgd": ({"engine_kind": "local-sgd"}, None),
    "easgd": ({"engine_kind": "easgd"}, None),
    "gossip": ({"engine_kind": "gossip"}, None),
    "dropout": ({"model_dropout": 0.2}, 1e-4),
    "bf16": ({"run_precision": "bf16"}, 0.01),
    "fp16": ({"run_precision": "fp16"}, 0.003),
    "tf32": ({"run_precision": "tf32"}, 0.003),
    "float64": ({"run_precision": "float64"}, 1e-10),
    "top-k": ({"wire_compression": "top-k"}, None),
    "powersgd": ({"wire_compression": "powersgd"}, None),
}  # fmt: skip
#: what is set for the one rank on the CPU, too
ALIKE = ("model_dropout",)


def trained(
    hpctrain, out: Path, device: str, ranks: int | None, steps: int, keys, *extra, train=TRAIN
):
    """Train `digits`; return the parameters and the summary."""
    words = sets(**{"run_epochs": "", "run_steps": steps, **keys})
    completed = hpctrain(*train, device, *words, "--out", out, *extra, ranks=ranks, timeout=100)
    assert completed.returncode == 0, completed.stderr
    file = out / f"weights-{steps}.safetensors"
    assert hpctrain("checkpoint", "export", out, "--output", file).returncode == 0
    tensors = load_file(file)
    result = np.concatenate([tensors[name].ravel() for name in sorted(tensors)])
    return result, run_folder.read_summary(out)


@pytest.mark.processes
@pytest.mark.parametrize("name", RUNS)
def test_ranks_train(hpctrain, tmp_path, name):
    keys, close = RUNS[name]
    result, summary = trained(hpctrain, tmp_path / "gpu", "gpu", 2, STEPS, keys)
    assert np.isfinite(result).all() and summary["status"] == "done"
    if close is not None:
        exact = "float64" if keys.get("run_precision") == "float64" else "float32"
        alike = {key: value for key, value in keys.items() if key in ALIKE}
        item = {"engine_kind": "single", "run_precision": exact, **alike}
        expected, _ = trained(hpctrain, tmp_path / "cpu", "cpu", None, STEPS, item)
        assert away(result, expected) <= close


@pytest.mark.processes
def test_training_goes_on_and_is_evaluated(hpctrain, tmp_path):
    keys = {"checkpoint_every_steps": STEPS // 2}
    complete, summary = trained(hpctrain, tmp_path / "whole", "gpu", 2, STEPS, keys)
    trained(hpctrain, tmp_path / "two", "gpu", 2, STEPS // 2, keys)
    result, _ = trained(hpctrain, tmp_path / "two", "gpu", 1, STEPS, keys, "--resume")
    assert away(result, complete) <= 1e-4
    completed = hpctrain("evaluate", tmp_path / "whole")
    assert completed.returncode == 0 and f"{summary['test_accuracy']:.3f}"[:4] in completed.stdout


NEIGHBOURS = """
import numpy as np, hpctrain
from hpctrain.core import xp
from hpctrain.collectives.direct import direct, direct_shared
world = hpctrain.init("gpu")
for n in (1, 1000, 1 << 20):
    for call in (direct, direct_shared):
        x = world.memory.gpu.zeros(n, np.float32)
        assert world.memory.locate(x) is not None, "no handle opens"
        x[...] = xp.like(x, np.arange(n) % 7 + world.rank)
        told = call(world.main, x, np.add)
        seen = xp.to_host(x if told is None else told)
        assert (seen == (np.arange(n) % 7) * world.size + sum(range(world.size))).all(), (n, call)
        del x, told
assert world.main.host_bytes == 0, world.main.host_bytes
y = xp.like(world.memory.gpu.zeros(1, np.float32), np.full(5000, world.rank, np.float32))
for algorithm in ("auto", "ring", "direct", "tree"):
    hpctrain.allreduce(y, "max", algorithm)
    assert float(y.max().get()) == world.size - 1
"""


@pytest.mark.processes
def test_memory_of_neighbours(start):
    """Sums through CUDA IPC, not a byte by way of the host; arrays of a user's own."""
    completed = start("-c", NEIGHBOURS, ranks=2).finish(60)
    assert completed.returncode == 0, completed.stderr


@pytest.mark.processes
def test_messages_arrive_on_each_path(hpctrain, tmp_path):
    file = tmp_path / "p2p.json"
    words = ("--sizes", "4B,1MiB,8MiB", "--iterations", "3", "--json", file)
    completed = hpctrain("bench", "p2p", "--device", "gpu", *words, ranks=2)
    assert completed.returncode == 0, completed.stderr
    rows = json.loads(file.read_text())["rows"]
    assert all(row["correct"] for row in rows) and {"staged", "ipc"} <= {r["path"] for r in rows}


@pytest.mark.processes
def test_memory_that_does_not_suffice(hpctrain, tmp_path):
    import cupy

    kept = cupy.cuda.alloc(cupy.cuda.runtime.memGetInfo()[0] - (3 << 30))
    wide = 1 << 14  # two planes of 1 GiB on each of two ranks
    keys = sets(model_widths=f"[64,{wide},{wide},10]", run_steps=1, run_epochs="")
    completed = hpctrain(*TRAIN, "gpu", *keys, "--out", tmp_path / "run", ranks=2, timeout=150)
    del kept
    assert completed.returncode != 0 and "out of memory" in completed.stderr.lower()


def cuda_of_pytorch() -> bool:
    """Return whether PyTorch is installed and computes on a GPU here."""
    return util.find_spec("torch") is not None and __import__("torch").cuda.is_available()


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["allreduce", "ps-sync", "local-sgd"])
def test_modules_of_pytorch_train(hpctrain, tmp_path, kind):
    if not cuda_of_pytorch():
        pytest.skip("no PyTorch with CUDA here")
    train = ("train", "cnn-torch", "--device")
    keys = {"model_dropout": 0.0, "optimizer_kind": "sgd", "engine_kind": kind}
    result, _ = trained(hpctrain, tmp_path / "gpu", "gpu", 2, STEPS, keys, train=train)
    assert np.isfinite(result).all()
    if kind != "local-sgd":
        item = keys | {"engine_kind": "single"}
        expected, _ = trained(hpctrain, tmp_path / "cpu", "cpu", None, STEPS, item, train=train)
        assert away(result, expected) <= 1e-3


SYNC = """
import torch, hpctrain as ht
world = ht.init("gpu")
torch.manual_seed(0)
model = torch.nn.Linear(64, 3).to(f"cuda:{world.gpu.ordinal}")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
ht.torch.sync(model, optimizer)
x = torch.full((4, 64), 1.0 + world.rank, device=model.weight.device)
model(x).sum().backward()
mean = sum(4.0 * (1 + rank) for rank in range(world.size)) / world.size
assert torch.allclose(model.weight.grad, torch.full_like(model.weight, mean))
optimizer.step()
"""


@pytest.mark.processes
def test_gradients_of_a_loop_in_pytorch(start):
    if not cuda_of_pytorch():
        pytest.skip("no PyTorch with CUDA here")
    done = start("-c", SYNC, ranks=2).finish(timeout=100)
    assert done.returncode == 0, done.stderr
