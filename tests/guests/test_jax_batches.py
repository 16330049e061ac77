"""Batches that JAX users hand in: pytrees and dtypes are kept, others are refused on all ranks."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np
import pytest
from ranks import run_on

jax = pytest.importorskip("jax", reason="needs JAX: pip install 'hpctrain[jax]'")
jnp = jax.numpy

from guests.jax_functions import deleted, donated, set_x64  # noqa: E402
from guests.test_attributes_jax import X, Y, train  # noqa: E402

import hpctrain as ht  # noqa: E402
from hpctrain.core.errors import UsageError  # noqa: E402

pytestmark = pytest.mark.either


def dtypes_loss(rows, params, x, y):
    rows.append({name: leaf.dtype.name for name, leaf in {**x, "y": y}.items()})
    return (params**2).sum()


class Pair(NamedTuple):
    left: object
    right: object


def tree_loss(params, x, y):
    """Return a loss of a list, a namedtuple, a dict with integer keys, and None."""
    first, pair, absent = x
    assert y is None and absent is None
    return ((first @ params - pair.left[3] * pair.right.sum(axis=-1)) ** 2).mean()


def test_batches_are_pytrees_with_lists_and_none():
    trees = [X, Pair({3: Y}, X), None], None
    expected = train(np.zeros(4), data=(X, Y * X.sum(axis=-1)), loss=squares)
    for ranks in (1, 3):
        trained = train(np.zeros(4), ranks, tree_loss, trees)
        np.testing.assert_allclose(trained, expected, rtol=1e-5)


def squares(params, x, y):
    return ((x @ params - y) ** 2).mean()


BAD_SAMPLES = {
    "deleted": (
        lambda: (deleted(), np.ones(3)),
        "fit: x: .* seen an array that was deleted or donated; pass",
    ),
    "donated": (lambda: ({"a": X, "b": donated()}, Y), r"fit: x\['b'\]: .* deleted or donated"),
    "nothing": (lambda: (None, Y), "fit: x holds no array"),
    "a number": (
        lambda: (X, {"weight": 2.0}),
        r"fit: y\['weight'\]: expected an array, seen float; write",
    ),
    "text": (
        lambda: (X, np.array(["a"] * 24)),
        "fit: y: expected an array of numbers or bools, .* <U1",
    ),
    "a key": (lambda: (X, jax.random.split(jax.random.key(0), 24)), "seen one of key<fry>"),
    "no rows": (
        lambda: (X, np.float32(1)),
        r"y has shape \(\); expected .* let the loss hold what is the",
    ),
    "lengths": (lambda: (X, [Y, Y[:3]]), r"x has 24 samples but y\[1\] has 3"),
    "keys": (
        lambda: ({1: X, "a": X}, Y),
        "fit: x: expected a pytree whose dicts have keys of a single type",
    ),
    "NaN": (lambda: (X, Y * np.nan), "y holds nan in sample 0"),
    "wide": (
        lambda: (np.arange(24) << 32, Y),
        "x: expected integers of 32 bits, .* jax_enable_x64, seen 0",
    ),
    "no pair": (lambda: X, "fit: expected a pair of arrays"),
}


@pytest.mark.parametrize("kind", BAD_SAMPLES)
def test_bad_batches_of_one_rank_are_one_error_on_all(kind):
    make, words = BAD_SAMPLES[kind]
    data = make()

    def body(world):
        trainer = ht.jax.Trainer(squares, np.zeros(4), "sgd", world=world)
        for call in (lambda d: trainer.fit(d, steps=1), trainer.evaluate):
            with pytest.raises(UsageError, match=words.replace("fit", "(fit|evaluate)")):
                call(data if world.rank else (X, Y))
        return True

    assert run_on("threads", 2, body) == [True, True]


def test_evaluation_takes_pytrees_of_the_same_structure():
    def body(world):
        trainer = ht.jax.Trainer(squares, np.zeros(4), "sgd", world=world)
        trainer.fit((X, Y), steps=1, evaluate=(jnp.asarray(X), Y))
        with pytest.raises(UsageError, match=r"evaluate: expected pytrees of .* such as before"):
            trainer.evaluate(([X], Y))

    run_on("threads", 2, body)


@pytest.mark.parametrize("x64", [False, True])
def test_batches_keep_their_dtypes(x64):
    rows = []
    x = {"f": X, "h": X.astype("f2"), "b": X > 0, "u": (X > 0).astype("u1"), "i": np.arange(24)}
    x["bf16"] = jnp.ones((24, 2), "bfloat16")
    with set_x64(x64):
        train(np.zeros(4), loss=partial(dtypes_loss, rows), data=(x, Y > 0))
    wide, narrow = {"f": "float64", "i": "int64"}, {"f": "float32", "i": "int32"}
    unchanged = {"h": "float16", "b": "bool", "u": "uint8", "bf16": "bfloat16", "y": "bool"}
    assert len(rows) > 0 and all(dtypes == (wide if x64 else narrow) | unchanged for dtypes in rows)
