"""A GPU out of memory on one rank: the error names rank and bytes, and no rank waits."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import fakes
import numpy as np
import pytest
from ranks import on_gpus, run_on

from hpctrain import data, engines, nn, optim
from hpctrain.core.errors import GpuMemoryError, HpctrainError, HungError
from hpctrain.core.run_files import run_folder
from hpctrain.core.xp import shortage
from hpctrain.training.trainer import Trainer

RANKS, SHORT = 3, 1


@dataclass(frozen=True)
class Trap:
    """A layer that passes samples through; calls `spring` in the `way` forward or back."""

    way: str
    spring: Callable[[], None]

    def output_shape(self, shape):
        return shape

    def parameters(self, shape):
        return {}

    def forward(self, p, x, key):
        if self.way == ("look" if key is None else "forward") and (key is None or key.step == 2):
            self.spring()
        return x, key

    def backward(self, p, g, saved, dy, want_dx):
        if self.way == "backward" and saved.step == 2:
            self.spring()
        return dy


class Springs:
    """An optimizer, or the options of an engine, that calls `spring` before it is made."""

    def __init__(self, own, spring):
        self._own, self._spring = own, spring

    def __getattr__(self, name):
        return getattr(self._own, name)

    def init(self, param):
        self._spring()
        return self._own.init(param)

    def build(self, *args):
        self._spring()
        return self._own.build(*args)


def train(world, location: str, spring: Callable[[], None], run) -> None:
    """Train a few steps; `spring` is called at the place that `where` names."""
    if location == "arena":
        spring()
    layers = {"a": nn.Linear(40), "trap": Trap(location, spring), "b": nn.Linear(3)}
    optimizer, engine = optim.sgd(0.1, 0.9), engines.AllReduce(algorithm="ring", overlap="always")
    if location == "neighbours":
        engine = Springs(engine, spring)
    x, y = np.ones((90, 8), np.float32), np.arange(90) % 3
    with Trainer(
        nn.Model(layers, (8,)),
        Springs(optimizer, spring) if location == "optimizer" else optimizer,
        Springs(engine, spring) if location == "staging" else engine,
        world=world,
    ) as trainer:
        trainer.fit(data.Dataset(x, y), steps=4, batch=30, evaluate=data.Dataset(x, y), out=run)


#: where memory ends on one rank -> whether training has begun, and there is a summary
PLACES = {
    "arena": False,
    "optimizer": False,
    "neighbours": False,
    "staging": None,  # where another thread of ours copies: some rank is first
    "forward": True,
    "backward": True,
    "look": True,
}
REQUESTED = (
    r"GPU 1 is out of memory \(([\d,]+) of ([\d,]+) bytes free now, .*\): ([\d,]+) bytes asked"
)


@pytest.mark.sample(4)
@pytest.mark.parametrize("location", PLACES)
def test_a_rank_that_is_short_ends_all(tmp_path, location):
    with fakes.installed(devices=RANKS, ipc_within=True) as machine:

        def spring() -> None:
            if location == "staging":
                machine.pinned_bytes = sum(machine.pinned.values())
            elif machine.device == SHORT:
                machine.limits[SHORT] = machine.used(SHORT) // 2

        errors: list[HpctrainError] = []

        def body(plain):
            import cupy

            cupy.cuda.Device(plain.rank).use()
            world = on_gpus(plain, gpus="012")
            try:
                train(world, location, spring, tmp_path / "run")
            except HpctrainError as error:
                errors.append(error)
                raise

        with pytest.raises(GpuMemoryError) as error:
            run_on("threads", RANKS, body)
        assert not [error for error in errors if isinstance(error, HungError)]
    message = str(error.value)
    if location == "staging":
        assert re.search(r"out of pinned host memory.*: [\d,]+ bytes asked.*ulimit -l", message)
    else:
        free, complete, requested = (
            int(n.replace(",", "")) for n in re.search(REQUESTED, message).groups()
        )
        assert (
            free < requested
            and free <= complete
            and "smaller batch or more [optimizer] micro" in message
        )
    summary = run_folder.read_summary(tmp_path / "run")
    if PLACES[location]:
        assert (summary["status"], summary["exit_code"]) == ("failed", 1)
        assert re.search(rf"rank {SHORT} on \S+, step \d: GpuMemoryError: GPU 1", summary["reason"])
    elif PLACES[location] is False:
        assert summary is None


def test_what_cuda_and_cublas_say(gpu):
    import cupy

    short = {
        "Out of memory allocating 4,096 bytes (allocated so far: 1 bytes).": ": 4,096 bytes asked",
        "cudaErrorMemoryAllocation: out of memory": "a number of bytes asked",
        "CUBLAS_STATUS_ALLOC_FAILED": "GPU 0 is out of memory",
        "CUDA_ERROR_OUT_OF_MEMORY: out of memory": "GPU 0 is out of memory",
    }
    for text, message in short.items():
        assert message in str(shortage(RuntimeError(text)))
    assert shortage(cupy.cuda.runtime.CUDARuntimeError(700, "cudaErrorIllegalAddress: ...")) is None
    assert shortage(ValueError("all is well")) is None


def test_memory_that_cupy_keeps_is_given_back_for_what_neighbours_see(monkeypatch):
    """What its pool holds of arrays that are gone is of use to nobody else."""
    with fakes.installed(ipc_within=True, memory_bytes=8 << 20):
        import cupy

        stored = [cupy.zeros(5 << 20, np.uint8)]
        pool = type(cupy.get_default_memory_pool())
        monkeypatch.setattr(pool, "free_all_blocks", lambda self: stored.clear())
        size = run_on(
            "threads", 1, lambda plain: on_gpus(plain).memory.gpu.zeros(1 << 20, "f4").size
        )
        assert size == [1 << 20] and not stored
