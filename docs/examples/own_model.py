"""Train a model with a layer of our own: on which arm of a spiral does a point lie?

Run it alone, or on four ranks with `mpirun -n 4 python own_model.py`
(Open MPI on fewer cores: `mpirun --oversubscribe -n 4 ...`).
"""

from dataclasses import dataclass

import numpy as np

import hpctrain as ht


@dataclass(frozen=True)
class Tanh:
    """y = tanh(x), without parameters; see `hpctrain.nn.Layer` for the four functions."""

    def output_shape(self, shape):
        return shape

    def parameters(self, shape):
        return {}

    def forward(self, p, x, key):
        y = np.tanh(x)
        return y, y  # the output, and what `backward` will be given as `saved`

    def backward(self, p, g, saved, dy, want_dx):
        return dy * (1 - saved**2)


def spirals(points, seed):
    """Return a Dataset: x (points, 2), y (points,) in 0 .. 2; the same on every rank."""
    random = np.random.default_rng(seed)
    y = random.integers(3, size=points)
    radius = random.uniform(0.1, 1.0, points)
    angle = 4 * radius + 2 * np.pi / 3 * y + random.normal(0, 0.1, points)
    return ht.data.Dataset(np.stack([radius * np.cos(angle), radius * np.sin(angle)], 1), y)


world = ht.init()
layers = {"hidden1": ht.nn.Linear(32), "tanh1": Tanh(), "hidden2": ht.nn.Linear(32),
          "tanh2": Tanh(), "out": ht.nn.Linear(3)}  # fmt: skip
model = ht.nn.Model(layers, input_shape=(2,))
trainer = ht.Trainer(model, ht.optim.sgd(rate=0.1, momentum=0.9))
summary = trainer.fit(spirals(3000, seed=0), epochs=30, batch=100, evaluate=spirals(600, seed=1))
trainer.close()
if world.rank == 0:
    print(f"{world.size} ranks: test accuracy {summary['test_accuracy']:.3f}")
assert summary["test_accuracy"] > 0.95
