"""What JAX users hand in is used, refused by name or announced: each kind of leaf and argument."""

from __future__ import annotations

import inspect
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

from guests.jax_functions import deleted, donated, set_x64  # noqa: E402

import hpctrain as ht  # noqa: E402
from hpctrain.core.errors import UsageError  # noqa: E402

pytestmark = pytest.mark.either
GENERATOR = np.random.default_rng(0)
X, Y = GENERATOR.normal(size=(24, 4)), GENERATOR.normal(size=24)


@pytest.fixture(params=[False, True], ids=["32 bits", "64 bits"])
def x64(request):
    with set_x64(request.param):
        yield request.param


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

    first, *rest = run_on("threads", ranks, body)
    for tree in rest:
        jax.tree_util.tree_map(np.testing.assert_array_equal, first, tree)
    return first


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
        r"same dtype, float32 or float64, seen bfloat16 at '0'; convert .* or give precision=",
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
    "keys of two types": ({1: ONES, "a": ONES}, "dicts have keys of a single type, .*; rename"),
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
    dtypes = []

    def loss(params, x, y):
        dtypes.append((x.dtype, y.dtype))
        return sum_of_leaves(params, x, y)

    with set_x64(True):
        for precision in ("float32", "float64"):
            trained = train(tree, loss=loss, precision=precision)
            assert {leaf.dtype.name for leaf in jax.tree_util.tree_leaves(trained)} == {precision}
            assert {dtype.name for pair in dtypes for dtype in pair} == {precision}
            dtypes.clear()
        train({"a": np.float32(1)}, loss=loss)
        assert {dtype.name for pair in dtypes for dtype in pair} == {"float64"}  # as plain JAX


def make_and_fit(world, ranks=2, **arguments):
    arguments = {"loss": sum_of_leaves, "params": ONES, "optimizer": "sgd"} | arguments
    ht.jax.Trainer(**arguments, world=world).fit((X, Y), steps=1, batch=8)


def make_base_trainer(world):
    return ht.Trainer(ht.jax.Model(sum_of_leaves, ONES), "sgd", precision="float32", world=world)


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


@pytest.mark.parametrize("case", ANNOUNCED)
def test_casts_copies_and_keys_are_announced_once(case, caplog):
    call, words = ANNOUNCED[case]
    with set_x64(True), caplog.at_level(logging.WARNING, "hpctrain"):
        run_on("threads", 2, call)
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == (words is not None)
    assert words is None or re.search(words, texts[0])


USES = {**USED, **REFUSED, **ANNOUNCED}
DEVICES = "test_arrays_on_several_devices"
#: attribute of an array of JAX that a user chooses -> (column, the row that tests it)
CHOSEN = {
    "dtype": ("used", "NumPy float64"), "shape": ("used", "no elements"),
    "weak_type": ("announced", "a weakly typed leaf"), "is_deleted": ("refused", "deleted"),
    "committed": ("announced", DEVICES), "device": ("announced", DEVICES),
    "devices": ("announced", DEVICES), "platform": ("announced", DEVICES),
    "sharding": ("refused", DEVICES), "global_shards": ("refused", DEVICES),
    "addressable_shards": ("refused", DEVICES), "is_fully_addressable": ("refused", DEVICES),
    "is_fully_replicated": ("refused", DEVICES),
}  # fmt: skip
#: what follows from these and from the values: functions, sizes, memory of the process
DERIVED = """
    T addressable_data all any argmax argmin argpartition argsort astype at aval block_until_ready
    byteswap choose clip clone compress conj conjugate copy copy_to_host_async cumprod cumsum delete
    device_buffer device_buffers diagonal dot flat flatten format imag is_ready item itemsize mT max
    mean min nbytes ndim nonzero on_device_size_in_bytes prod ptp ravel real repeat reshape round
    searchsorted size sort squeeze std sum swapaxes take to_device tobytes tolist trace traceback
    transpose unsafe_buffer_pointer var view
"""
#: arguments that `ht.jax` has beside those of `ht.Trainer` -> where they are tested
ARGUMENTS = {
    "loss": "LOSSES", "params": "USED, REFUSED, ANNOUNCED", "optimizer": "OPTIMIZERS, RATES",
    "engine": "ENGINES", "predict": "ERRORS", "metrics": "ERRORS", "precision": "given, ERRORS",
    "world": "run_on", "options": "OF_TRAINER", "train": "BAD_SAMPLES, CASES", "x": "ERRORS",
    "evaluate": "structure", "samples": "structure", "tree": "BAD_TREES", "op": "TREE_ERRORS",
}  # fmt: skip
#: arguments of `ht.Trainer` that pass through `options`, each used as for any model
OF_TRAINER = """
    model optimizer engine seed precision world callbacks faults init mesh pipeline train epochs
    steps batch micro_batches evaluate out resume replay options checkpoints trace origin elastic
    metrics
"""


def find_uncovered(names, *tables):
    """Return public names that stand in no table."""
    covered = {n for table in tables for n in (table.split() if isinstance(table, str) else table)}
    return {name for name in names if not name.startswith("_")} - covered - {"self"}


def test_each_attribute_of_an_array_stands_in_a_column():
    names = {*dir(jax.Array), *dir(type(jnp.ones(1)))}
    assert find_uncovered(names, CHOSEN, DERIVED) == set()
    assert find_uncovered({*names, "planted"}, CHOSEN, DERIVED) == {"planted"}
    assert not CHOSEN.keys() & set(DERIVED.split())
    for column, row in CHOSEN.values():
        assert column in ("used", "refused", "announced") and (row in USES or row == DEVICES)


def test_each_argument_stands_in_a_column():
    calls = ht.jax.Trainer, ht.jax.Trainer.fit, ht.jax.Trainer.evaluate, ht.jax.Trainer.predict
    own = {name for call in (*calls, ht.jax.Model, ht.jax.allreduce)
           for name in inspect.signature(call).parameters}  # fmt: skip
    passed = {name for call in (ht.Trainer, ht.Trainer.fit)
              for name in inspect.signature(call).parameters}  # fmt: skip
    assert find_uncovered(own, ARGUMENTS) == find_uncovered(passed, OF_TRAINER) == set()
    assert find_uncovered({*own, "planted"}, ARGUMENTS) == {"planted"}


SHARDED = """
import jax, jax.numpy as jnp, numpy as np, hpctrain as ht
from hpctrain.core.errors import UsageError
world, devices = ht.init("cpu"), jax.devices()
mesh = jax.sharding.Mesh(devices, "d")
sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))
sharded, second = jax.device_put(jnp.ones(4), sharding), jax.device_put(jnp.ones(4), devices[1])
total = ht.jax.allreduce([sharded, second])
assert total[0].sharding == sharding and total[1].devices() == {devices[1]}
loss = lambda params, x, y: (params ** 2).mean() + 0 * x.mean()
try:
    ht.jax.Trainer(loss, sharded, "sgd")
except UsageError as error:
    print(error)
trainer = ht.jax.Trainer(loss, second, "sgd")
trainer.fit((np.ones((4, 1)), jax.device_put(jnp.ones(4), sharding)), steps=1)
"""


def test_arrays_on_several_devices(start):
    """Parameters are those of one device; collectives keep the layout; samples are copied."""
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    completed = start("-c", SHARDED, env=flags).finish(60)
    assert "seen an array on 2 devices at 'params'; a rank computes on one" in completed.stdout
    assert "params on cpu:1 are copied: a rank computes" in completed.stderr
    assert "Traceback" not in completed.stderr
