"""A network of JAX on MPI ranks: mpirun -n 4 python mlp.py, srun python mlp.py, python mlp.py."""

import jax
import jax.numpy as jnp
import numpy as np

import hpctrain as ht

world = ht.init("cpu")  # first: then XLA computes on the cores of this rank
x = np.random.default_rng(0).normal(size=(1024, 20))
y = (x[:, :2].sum(1) > 0).astype(int)
first, second = jax.random.split(jax.random.key(0))
params = {
    "hidden": {"weight": jax.random.normal(first, (20, 64)) * 0.3, "bias": jnp.zeros(64)},
    "logits": {"weight": jax.random.normal(second, (64, 2)) * 0.2, "bias": jnp.zeros(2)},
}


def predict(params, x):
    hidden = jax.nn.relu(x @ params["hidden"]["weight"] + params["hidden"]["bias"])
    return hidden @ params["logits"]["weight"] + params["logits"]["bias"]


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
