"""A network of JAX on MPI ranks: mpirun -n 4 python mlp.py, srun python mlp.py, python mlp.py."""

import jax
import jax.numpy as jnp
import numpy as np

import hpctrain as ht

world = ht.init("cpu")  # first: then XLA computes on the cores of this rank
generator = np.random.default_rng(0)
x = generator.normal(size=(1024, 20))
y = (x[:, :2].sum(1) > 0).astype(int)
params = {"hidden": generator.normal(size=(20, 64)) / 4, "logits": np.zeros((64, 2))}


def predict(params, x):
    return jax.nn.relu(x @ params["hidden"]) @ params["logits"]


def loss(params, x, y):
    logits = predict(params, x)
    losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], axis=1)
    return losses.mean(), {"accuracy": (logits.argmax(axis=1) == y).mean()}


options = {"predict": predict, "metrics": ["accuracy"]}
with ht.jax.Trainer(loss, params, ht.optim.adamw(rate=1e-2), "allreduce", **options) as trainer:
    trainer.fit((x, y), epochs=5, batch=128)
    accuracy = trainer.evaluate((x, y))["accuracy"]
if world.rank == 0:
    print(f"{world.size} ranks: accuracy {accuracy:.3f}")
