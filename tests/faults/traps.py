"""A model that fails on one rank at one step: user code, named in recipes as traps:model."""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from dataclasses import dataclass

import hpctrain as ht
from hpctrain import nn
from hpctrain.core.errors import UsageError

EVERY = -1


def model(input_shape, classes, widths, trap, rank, step):
    """Return an MLP with a trap as its first layer; one of step -1 springs here."""
    layer = Trap(trap, rank, step)
    layer.look(-1)
    layers = {"trap": layer, "flatten": nn.Flatten()}
    for i, outputs in enumerate(widths[1:]):
        layers |= {f"linear{i}": nn.Linear(outputs), f"relu{i}": nn.ReLU()}
        if i == 0:
            layers["way back"] = WayBack(trap, rank, step)
    return nn.Model(layers, input_shape)


def stages(input_shape, classes, widths, trap, rank, step):
    """Return an MLP with a trap behind each of its linear layers, so that every stage has some."""
    layers = {"flatten": nn.Flatten()}
    for i, outputs in enumerate(widths[1:]):
        layers |= {f"linear{i}": nn.Linear(outputs), f"trap{i}": Trap(trap, rank, step)}
        layers |= {f"relu{i}": nn.ReLU()} if i < len(widths) - 2 else {}
    return nn.Model(layers, input_shape)


@dataclass(frozen=True)
class Trap:
    """Pass samples through; at `step`, spring on `rank`."""

    kind: str
    rank: int
    step: int

    def output_shape(self, shape):
        return shape

    def parameters(self, shape):
        return {}

    def forward(self, p, x, key):
        factor = self.look(key.step) if key is not None else None
        return (x if factor is None else x * factor), None

    def backward(self, p, g, saved, dy, want_dx):
        return dy

    def look(self, step):
        if step == self.step and self.rank in (EVERY, ht.init().rank):
            return SPRING[self.kind]()
        return None


@dataclass(frozen=True)
class WayBack(Trap):
    """Spring on the way back alone: the loss is what it was, the gradients below are not."""

    def forward(self, p, x, key):
        return x, None if key is None else key.step

    def backward(self, p, g, saved, dy, want_dx):
        local = (self.kind, saved) == ("spoil", self.step) and self.rank == ht.init().rank
        return dy * float("inf") if local else dy


def broken(row):
    """Look at a row, a callback; go wrong on rank 1."""
    if ht.init().rank == 1:
        raise RuntimeError("the callback broke")


def raises(error):
    raise error


def send(number):
    return lambda: os.kill(os.getpid(), number)


def full():
    """Let no file of this process grow beyond 8 KiB from now on: writing more fails."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 13, 1 << 13))


def short():
    """Let the stand-in for our GPU have no more memory than is used, from now on."""
    import fakes

    gpu = fakes.machine_now()
    gpu.memory_bytes = gpu.used(gpu.device) // 2


SPRING = {
    "short": short,
    "raise": lambda: raises(RuntimeError("the model broke")),
    "refuse": lambda: raises(UsageError("seen on one rank only")),
    "leave": lambda: sys.exit(0),
    "kill": send(signal.SIGKILL),
    "stop": send(signal.SIGSTOP),
    "usr1": send(signal.SIGUSR1),
    "term": send(signal.SIGTERM),
    "spoil": lambda: None,  # see WayBack
    "diverge": lambda: float("nan"),
    "full": full,
    "sleep": lambda: time.sleep(600),
    "none": lambda: None,
}
