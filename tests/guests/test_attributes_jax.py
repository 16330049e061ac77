"""What JAX users hand in is used, refused by name or announced: each kind of leaf and argument."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest
from ranks import run_on

jax = pytest.importorskip("jax", reason="needs JAX: pip install 'hpctrain[jax]'")
jnp = jax.numpy

import hpctrain as ht  # noqa: E402
from hpctrain.core.errors import UsageError  # noqa: E402

pytestmark = pytest.mark.either
GENERATOR = np.random.default_rng(0)
X, Y = GENERATOR.normal(size=(24, 4)), GENERATOR.normal(size=24)


@pytest.fixture(params=[False, True], ids=["32 bits", "64 bits"])
def x64(request):
    with set_x64(request.param):
        yield request.param


class set_x64:
    """Sets 64 bits for all threads: ranks are threads."""

    def __init__(self, value):
        self.value, self.before = value, jax.config.jax_enable_x64

    def __enter__(self):
        jax.config.update("jax_enable_x64", self.value)

    def __exit__(self, *_):
        jax.config.update("jax_enable_x64", self.before)


class Layer(NamedTuple):
    weight: object
    bias: object


@partial(jax.tree_util.register_dataclass, data_fields=["weight"], meta_fields=["power"])
@dataclass
class Power:
    weight: object
    power: int


def sum_of_leaves(params, x, y):
    """Return a loss that moves each leaf."""
    total = sum((leaf.astype(x.dtype) ** 2).sum() for leaf in jax.tree_util.tree_leaves(params))
    return ((x.sum(axis=-1) - y) ** 2).mean() * 0 + total


def train(params, ranks=1, loss=sum_of_leaves, data=(X, Y), **options):
    """Return the pytree after two steps on rank 0; equal bytes on all ranks are asserted."""

    def body(world):
        with ht.jax.Trainer(loss, params, "sgd", world=world, **options) as trainer:
            trainer.fit(data, steps=2, batch=8)
        return trainer.params

    first, *others = run_on("threads", ranks, body)
    for other in others:
        jax.tree_util.tree_map(np.testing.assert_array_equal, first, other)
    return first


def deleted():
    x = jnp.ones(3)
    x.delete()
    return x


def donated():
    x = jnp.ones(3)
    jax.jit(lambda x: x + 1, donate_argnums=0)(x)
    return x


ONES = np.ones(3)
#: kind of pytree -> (the tree, dtype with 32 bits, dtype with 64 bits)
USED = {
    "NumPy float64": (lambda: {"a": ONES}, "float32", "float64"),
    "NumPy float32": (lambda: {"a": ONES.astype("f4")}, "float32", "float32"),
    "other byte order": (lambda: {"a": ONES.astype(">f4")}, "float32", "float32"),
    "JAX, NumPy's default beside it": (lambda: (jnp.ones(3), ONES), "float32", "float64"),
    "a scalar of NumPy": (lambda: {"a": np.float32(1)}, "float32", "float32"),
    "weak": (lambda: {"a": jnp.asarray(1.0)}, "float32", "float64"),
    "weak beside strong": (lambda: [jnp.asarray(1.0), np.float32(1)], "float32", "float32"),
    "None and empty": (
        lambda: {"a": ONES, "b": None, "c": {}, "d": [(), []]}, "float32", "float64",
    ),
    "no elements": (lambda: {"a": np.zeros((0, 7)), "b": ONES}, "float32", "float64"),
    "integer keys": (lambda: {1: ONES, 20: {3: ONES}}, "float32", "float64"),
    "odd keys": (lambda: {"a.b": ONES, "": {"/": ONES}, "c": ONES}, "float32", "float64"),
    "namedtuple": (lambda: Layer(ONES, (ONES,)), "float32", "float64"),
    "dataclass, static field": (lambda: Power(ONES, 3), "float32", "float64"),
    "an array alone": (lambda: ONES, "float32", "float64"),
}  # fmt: skip


@pytest.mark.parametrize("kind", USED)
def test_trees_keep_their_structure_and_dtype(kind, x64):
    make, *dtypes = USED[kind]
    params = make()
    trained = train(params)
    assert jax.tree_util.tree_structure(trained) == jax.tree_util.tree_structure(params)
    for leaf, initial in zip(*map(jax.tree_util.tree_leaves, (trained, params)), strict=True):
        assert leaf.dtype == dtypes[x64] and leaf.shape == np.shape(initial)
        factor = np.asarray(1 - 2 * 0.01, leaf.dtype) ** 2
        np.testing.assert_allclose(leaf, factor * np.asarray(initial), rtol=1e-6)


REFUSED = {
    "integers": ([np.arange(3)], r"an array of int64 at '0'; keep what is not trained outside"),
    "bools": ([np.ones(3, bool)], "an array of bool at '0'"),
    "complex": ([np.ones(3, complex)], "an array of complex128 at '0'"),
    "long double": ([np.ones(3, np.longdouble)], r"an array of \w+ at '0'"),
    "a key": ([jax.random.key(0)], r"an array of key<fry> at '0'"),
    "bfloat16": (
        [jnp.ones(3, "bfloat16")],
        r"one dtype, float32 or float64, seen bfloat16 at '0'; convert .* or give precision=",
    ),
    "float16": ([ONES.astype("f2")], "seen float16 at '0'; convert"),
    "mixed": ({"a": jnp.ones(3, "bfloat16"), "b": ONES},
        r"seen bfloat16 at 'a' and float\d\d at 'b'; convert"),
    "a number": ({"a": 1.5}, r"seen float at 'a'; write jnp.asarray\(x\)"),
    "text": (["a"], "seen str at '0'; keep what is not trained"),
    "a function": ({"f": jnp.tanh}, r"seen \w+ at 'f'; keep what is not trained"),
    "a shape": ([jax.ShapeDtypeStruct((3,), "float32")], "seen ShapeDtypeStruct at '0'"),
    "a mask": ([np.ma.masked_array(ONES)], "seen a MaskedArray at '0'; use its method filled"),
    "objects": ([np.array([None])], "an array of object at '0'"),
    "equal names": ({"a.b": ONES, "a": {"b": ONES}}, "two with the name 'a.b'; rename a key"),
    "keys of two types": ({1: ONES, "a": ONES}, "dicts have keys of one type, .*; rename a key"),
    "nothing": (None, "seen a NoneType without leaves"),
    "deleted": (deleted, "an array that was deleted or donated at 'params'; pass the result"),
    "donated": (donated, "an array that was deleted or donated at 'params'; pass the result"),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_other_trees_are_refused_on_all_ranks_by_name(kind):
    """One rank has the tree; a rank without it ends with the same error, and none waits."""
    params, words = REFUSED[kind]
    bad = params() if callable(params) else params

    def body(world):
        with pytest.raises(UsageError, match=words):
            ht.jax.Trainer(sum_of_leaves, bad if world.rank else ONES, "sgd", world=world)
        return True

    assert run_on("threads", 2, body) == [True, True]


def test_a_precision_that_is_given_is_that_of_all_leaves_and_samples():
    tree = {"a": jnp.ones(3, "bfloat16"), "b": ONES, "c": jnp.asarray(1.0)}
    seen = []

    def loss(params, x, y):
        seen.append((x.dtype, y.dtype))
        return sum_of_leaves(params, x, y)

    with set_x64(True):
        for precision in ("float32", "float64"):
            trained = train(tree, loss=loss, precision=precision)
            assert {leaf.dtype.name for leaf in jax.tree_util.tree_leaves(trained)} == {precision}
            assert {dtype.name for pair in seen for dtype in pair} == {precision}
            seen.clear()
        train({"a": np.float32(1)}, loss=loss)
        assert {dtype.name for pair in seen for dtype in pair} == {"float64"}  # as plain JAX


def make_and_fit(world, ranks=2, **arguments):
    arguments = {"loss": sum_of_leaves, "params": ONES, "optimizer": "sgd"} | arguments
    ht.jax.Trainer(**arguments, world=world).fit((X, Y), steps=1, batch=8)


def make_base_trainer(world):
    return ht.Trainer(ht.jax.Model(sum_of_leaves, ONES), "sgd", world=world)


def keyed(params, x, y, key):
    return sum_of_leaves(params, x, y)


#: announced once, by rank 0: what -> (call, words)
ANNOUNCED = {
    "a dtype changed by the run's precision": (
        make_base_trainer, "trained and returned in float32, the precision of the run; seen float64"
    ),
    "a weakly typed leaf": (
        lambda world: make_and_fit(world, params=[jnp.asarray(1.0), ONES]),
        r"weakly typed leaves \('0'\) become arrays of float64",
    ),
    "numbers that depend on the ranks": (
        lambda world: make_and_fit(world, loss=keyed), "a parameter `keys`, one for each sample"
    ),
    "nothing": (make_and_fit, None),
}  # fmt: skip


@pytest.mark.parametrize("what", ANNOUNCED)
def test_what_a_user_might_not_expect_is_announced_once(what, caplog):
    call, words = ANNOUNCED[what]
    with set_x64(True), caplog.at_level(logging.WARNING, "hpctrain"):
        run_on("threads", 2, call)
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == (words is not None)
    assert words is None or re.search(words, texts[0])


def dtypes_loss(seen, params, x, y):
    seen.append({name: leaf.dtype.name for name, leaf in {**x, "y": y}.items()})
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
        "fit: x: expected a pytree whose dicts have keys of one type",
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


def test_batches_keep_their_dtypes(x64):
    seen = []
    x = {"f": X, "h": X.astype("f2"), "b": X > 0, "u": (X > 0).astype("u1"), "i": np.arange(24)}
    x["bf16"] = jnp.ones((24, 2), "bfloat16")
    train(np.zeros(4), loss=partial(dtypes_loss, seen), data=(x, Y > 0))
    wide, narrow = {"f": "float64", "i": "int64"}, {"f": "float32", "i": "int32"}
    others = {"h": "float16", "b": "bool", "u": "uint8", "bf16": "bfloat16", "y": "bool"}
    assert len(seen) > 0 and all(dtypes == (wide if x64 else narrow) | others for dtypes in seen)
