"""Functions of JAX under engines: the parameters after a few steps.

`mpiexec -n P python jax_functions.py FILE.npz [NAME...]` trains each row of TABLE and writes the
final parameters, float64, of rank 0. tests/guests/test_jax.py compares them with those of one rank.
"""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import numpy as np

import hpctrain as ht

STEPS, BATCH, CLASSES, WIDTH = 5, 25, 4, 6


def make_samples():
    generator = np.random.default_rng(0)
    x = {"left": generator.normal(size=(96, WIDTH)), "right": generator.integers(3, size=(96, 1))}
    return x, generator.integers(CLASSES, size=96)


def make_params():
    generator = np.random.default_rng(1)

    def layer(inputs, outputs):
        weight = jnp.asarray(generator.normal(size=(inputs, outputs)) / inputs**0.5)
        return {"weight": weight, "bias": np.zeros(outputs)}

    table = jnp.asarray(generator.normal(size=(3, WIDTH)))
    return {"layers": (layer(WIDTH, 8), layer(8, CLASSES)), "table": table, "scale": np.ones(())}


def predict(params, x):
    first, second = params["layers"]
    hidden = x["left"] + params["scale"] * params["table"][x["right"][:, 0]]
    hidden = jnp.tanh(hidden @ first["weight"] + first["bias"])
    return hidden @ second["weight"] + second["bias"]


def loss(params, x, y):
    logits = predict(params, x)
    right = (logits.argmax(axis=1) == y).mean()
    losses = jax.nn.logsumexp(logits, axis=1) - jnp.take_along_axis(logits, y[:, None], 1)[:, 0]
    return losses.mean(), {"accuracy": right}


def loss_with_dropout(params, x, y, key):
    if key is not None:
        x = {**x, "left": x["left"] * jax.random.bernoulli(key, 0.7, x["left"].shape)}
    return loss(params, x, y)


def loss_with_keys(params, x, y, keys):
    if keys is not None:
        mask = jax.vmap(lambda key: jax.random.bernoulli(key, 0.7, (WIDTH,)))(keys)
        x = {**x, "left": x["left"] * mask}
    return loss(params, x, y)


class set_x64:
    """Sets 64 bits for all threads: ranks are threads."""

    def __init__(self, value):
        self.value, self.before = value, jax.config.jax_enable_x64

    def __enter__(self):
        jax.config.update("jax_enable_x64", self.value)

    def __exit__(self, *_):
        jax.config.update("jax_enable_x64", self.before)


def deleted():
    x = jnp.ones(3)
    x.delete()
    return x


def donated():
    x = jnp.ones(3)
    jax.jit(lambda x: x + 1, donate_argnums=0)(x)
    return x


def make_trainer(engine="allreduce", loss=loss, **options):
    optimizer = ht.optim.sgd(rate=0.1, momentum=0.9)
    options = {"predict": predict, "metrics": ["accuracy"], "precision": "float64", **options}
    return ht.jax.Trainer(loss, make_params(), optimizer, engine, **options)


def train(engine="allreduce", loss=loss, **options):
    with make_trainer(engine, loss) as trainer:
        trainer.fit(make_samples(), steps=STEPS, batch=BATCH, **options)
    return trainer.params


#: name: how to train; results do not depend on the number of ranks
TABLE = {
    "allreduce": train,
    "priority": lambda: train(ht.engines.AllReduce(priority=True)),
    "sharded optimizer": lambda: train(ht.engines.AllReduce(shard_optimizer=True)),
    "shared parameters": lambda: train(ht.engines.AllReduce(share_parameters=True)),
    "ps-sync": lambda: train(ht.engines.PsSync(placement="colocated")),
    "micro-batches, some empty": lambda: train(micro_batches=13),
    "a key for each sample": lambda: train(loss=loss_with_keys, micro_batches=2),
    "ordered, dropout": lambda: train(
        ht.engines.AllReduce(reduction="ordered", blocks=4), loss=loss_with_dropout
    ),
}


def main():
    jax.config.update("jax_enable_x64", True)
    file, *names = sys.argv[1:]
    world = ht.init("cpu")
    results = {}
    for name in names or TABLE:
        params = TABLE[name]()
        leaves = [np.ravel(leaf) for leaf in jax.tree_util.tree_leaves(params)]
        results[name] = np.concatenate(leaves)
    if world.rank == 0:
        np.savez(file, **results)


if __name__ == "__main__":
    main()
