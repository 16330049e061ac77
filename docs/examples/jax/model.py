"""A classifier of JAX for recipes: `[model] kind = "model:make"`, as mlp.toml beside it has."""

import jax
import jax.numpy as jnp
import numpy as np

import hpctrain as ht


def make(input_shape, outputs, width=48):
    generator = np.random.default_rng(0)
    features = int(np.prod(input_shape))
    params = {
        "hidden": generator.normal(size=(features, width)) / features**0.5,
        "logits": np.zeros((width, outputs)),
    }

    def predict(params, x):
        return jax.nn.relu(x.reshape(len(x), -1) @ params["hidden"]) @ params["logits"]

    def loss(params, x, y):
        logits = predict(params, x)
        losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], axis=1)
        return losses.mean(), {"accuracy": (logits.argmax(axis=1) == y).mean()}

    return ht.jax.Model(loss, params, predict=predict, metrics=["accuracy"])
