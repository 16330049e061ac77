"""Behaviour of `ht.jax` on what users hand in: engines on 1, 2 and 3 ranks equal plain JAX in one
process, and a fault of one rank is an error on all. Ranks are threads."""

from __future__ import annotations

from functools import cache, partial

import numpy as np
import pytest
from ranks import run_on

jax = pytest.importorskip("jax", reason="needs JAX: pip install 'hpctrain[jax]'")
jnp = jax.numpy

from guests.jax_functions import deleted, set_x64  # noqa: E402

import hpctrain as ht  # noqa: E402
from hpctrain.core.errors import UsageError  # noqa: E402
from hpctrain.data import Sampler  # noqa: E402

pytestmark = pytest.mark.either
LIMIT, RATE, SEED = 1e-12, 0.1, 2**40 + 3
GENERATOR = np.random.default_rng(0)
X, Y = GENERATOR.normal(size=(23, 4)), GENERATOR.normal(size=23)
ENGINES = {
    "allreduce": (ht.engines.AllReduce(), 0.9),
    "ordered": (ht.engines.AllReduce(reduction="ordered", blocks=4), 0.9),
    "ps-sync": (ht.engines.PsSync(placement="colocated"), 0.9),
    "local-sgd": (ht.engines.LocalSgd(period=1), 0.0),
}


@pytest.fixture(autouse=True)
def x64():
    with set_x64(True):
        yield


def make_params():
    weight = np.random.default_rng(1).normal(size=(4, 3))
    return {"weight": jnp.asarray(weight), "out": np.ones(3), "scale": jnp.asarray(1.0)}


def outputs(params, x):
    return jnp.tanh(x @ params["weight"]) @ params["out"] * params["scale"]


def squares(params, x, y):
    return ((outputs(params, x) - y) ** 2).mean()


def of_dict(params, x, y):
    x_sum = x["real"] + x["byte"][:, None] + jnp.where(x["mask"], x["half"], 0).astype("float64")
    return ((outputs(params, x_sum) - jnp.where(~y["bit"], y["real"], 0)) ** 2).mean()


def of_none(params, x, y):
    assert y is None and x[1] is None
    return (outputs(params, x[0]) ** 2).mean()


def with_keys(params, x, y, keys):
    """Return a loss with dropout, a mask of its own for each sample."""
    if keys is None:  # in evaluation
        return squares(params, x, y)
    mask = jax.vmap(lambda key: jax.random.bernoulli(key, 0.5, x.shape[1:]))(keys)
    return squares(params, x * mask, y)


def with_key(params, x, y, key):
    if key is None:
        return squares(params, x, y)
    return squares(params, x * jax.random.bernoulli(key, 0.5, x.shape), y)


def plain_keys(step, n):
    """Return the keys of a batch as docs/jax.md says."""
    key = jax.random.key(SEED & 0xFFFFFFFF)
    for number in (SEED >> 32, step):
        key = jax.random.fold_in(key, number)
    return jax.vmap(partial(jax.random.fold_in, key))(jnp.arange(n))


MIXED = {
    "real": X, "half": X.astype("f2"), "mask": X > 0, "byte": np.arange(23, dtype="u1"),
}  # fmt: skip
STEPS, BATCH = 4, 6  # the last step has 5 samples
#: case -> (loss, samples, pieces of a share, batch)
CASES = {
    "arrays": (squares, (X, Y), 1, BATCH),
    "a dict of dtypes": (of_dict, (MIXED, {"bit": Y > 0, "real": Y}), 1, BATCH),
    "None and a list": (of_none, ([X, None], None), 1, BATCH),
    "a key for each sample": (with_keys, (X, Y), 1, BATCH),
    "micro-batches, some empty": (with_keys, (X, Y), 3, BATCH),
    "a key for each share": (with_key, (X, Y), 1, BATCH),
    "empty shares": (with_keys, (X, Y), 1, 11),  # the third step has 1 sample
}


@cache
def train_plainly(case, momentum):
    """Return the parameters of a loop in plain JAX over the same batches."""
    loss, samples, _, batch = CASES[case]
    params, sampler = make_params(), Sampler(len(X), batch, SEED)
    gradient = jax.jit(jax.grad(loss))
    velocity = jax.tree_util.tree_map(jnp.zeros_like, params)
    for step in range(STEPS):
        rows = sampler.batch_indexes(step)
        x, y = jax.tree_util.tree_map(lambda leaf, rows=rows: leaf[rows], samples)
        keys = {"keys": plain_keys(step, len(rows))} if loss is with_keys else {}
        gradients = gradient(params, x, y, **keys)
        velocity = jax.tree_util.tree_map(lambda v, g: momentum * v + g, velocity, gradients)
        params = jax.tree_util.tree_map(lambda p, v: p - RATE * v, params, velocity)
    return params


def train(world, case, engine, momentum):
    loss, samples, pieces, batch = CASES[case]
    optimizer, options = ht.optim.sgd(RATE, momentum), {"seed": SEED, "world": world}
    with ht.jax.Trainer(loss, make_params(), optimizer, engine, **options) as trainer:
        trainer.fit(samples, steps=STEPS, batch=batch, micro_batches=pieces)
    return trainer.params


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.full), 3])
@pytest.mark.parametrize("case", [case for case in CASES if case != "a key for each share"])
def test_engines_equal_plain_jax(case, ranks):
    plain = {momentum: train_plainly(case, momentum) for momentum in (0.0, 0.9)}
    for name, (engine, momentum) in ENGINES.items():
        results = run_on("threads", ranks, lambda w, e=engine, m=momentum: train(w, case, e, m))
        for params in results:
            for leaf, expected in zip(
                *map(jax.tree_util.tree_leaves, (params, plain[momentum])), strict=True
            ):
                assert leaf.dtype == np.float64
                np.testing.assert_allclose(leaf, expected, atol=LIMIT, rtol=LIMIT, err_msg=name)


def test_a_key_of_a_share_is_another_on_each_rank():
    """This is what the announcement says; and masks by sample are not without effect."""
    case = "a key for each share"
    single, pair = (
        run_on("threads", n, lambda w: train(w, case, "allreduce", 0.9)) for n in (1, 2)
    )
    assert abs(single[0]["weight"] - pair[0]["weight"]).max() > 1e-3
    plain, masked = (train_plainly(case, 0.9) for case in ("arrays", "a key for each sample"))
    assert abs(plain["weight"] - masked["weight"]).max() > 1e-3


def test_parameters_may_be_deleted_or_donated_after_the_trainer_is_made():
    initial, expected = make_params(), train_plainly("arrays", 0.9)

    def body(world):
        params = {"weight": jnp.array(initial["weight"]), "out": np.ones(3), "scale": jnp.ones(())}
        model = ht.jax.Model(squares, params)
        trainer = ht.jax.Trainer(squares, params, ht.optim.sgd(RATE, 0.9), seed=SEED, world=world)
        params["weight"].delete()
        jax.jit(lambda x: x + 1, donate_argnums=0)(params["scale"])
        trainer.fit((X, Y), steps=STEPS, batch=BATCH)
        ht.Trainer(model, "sgd", precision="float64", world=world)
        return trainer.params

    for params in run_on("threads", 2, body):
        np.testing.assert_allclose(params["weight"], expected["weight"], atol=LIMIT)


LOSSES = {
    "no parameters": (lambda params: 0.0, r"seen one of \(params\) \(too many positional"),
    "another name": (lambda params, x, y, rng: 0.0, "expected a function loss.*named key or keys"),
}


@pytest.mark.parametrize("kind", LOSSES)
def test_a_loss_with_other_parameters_is_refused(kind):
    loss, words = LOSSES[kind]
    with pytest.raises(UsageError, match=words):
        ht.jax.Model(loss, make_params())


def test_a_key_that_is_bound_stays():
    loss = partial(with_keys, keys=plain_keys(0, 8))
    assert not ht.jax.Model(loss, make_params()).loss.takes_keys


class GradientTransformation(tuple):
    """Stands for an optimizer of Optax: two functions, and no rate."""

    init = staticmethod(lambda params: ())
    update = staticmethod(lambda updates, state, params=None: (updates, state))


OPTIMIZERS = {
    "Optax": (GradientTransformation(), "seen GradientTransformation; Optax's optimizers do not"),
    "a schedule": (lambda step: 0.1, r"seen function; a schedule is a rate: ht.optim.adamw\(rate="),
    "a class": (ht.optim.SgdOptions, "optimizer: expected one such as ht.optim"),
    "a name": ("adam", "unknown optimizer 'adam'"),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_other_optimizers_are_refused_by_name(kind):
    optimizer, words = OPTIMIZERS[kind]

    def body(world):
        with pytest.raises(UsageError, match=words):
            ht.jax.Trainer(squares, make_params(), optimizer if world.rank else "sgd", world=world)

    run_on("threads", 2, body)
    model = ht.nn.Model([ht.nn.Linear(1)], input_shape=4)
    with pytest.raises(UsageError, match="optimizer"):
        run_on("threads", 1, lambda world: ht.Trainer(model, optimizer, world=world))


RATES = {
    "an array of JAX": lambda: jnp.asarray(RATE),
    "a schedule that returns arrays": lambda: lambda step: jnp.where(step >= 0, RATE, jnp.nan),
    "compiled": lambda: jax.jit(lambda step: RATE + 0 * step),
}


@pytest.mark.parametrize("kind", RATES)
def test_rates_of_jax_are_used(kind, tmp_path):
    def body(world):
        optimizer = ht.optim.sgd(RATES[kind](), 0.9)
        with ht.jax.Trainer(squares, make_params(), optimizer, seed=SEED, world=world) as trainer:
            trainer.fit((X, Y), steps=STEPS, batch=BATCH, out=tmp_path / "run")
        return trainer.params

    expected = train_plainly("arrays", 0.9)
    for params in run_on("threads", 2, body):
        np.testing.assert_allclose(params["weight"], expected["weight"], atol=1e-7)


BAD_TREES = {
    "deleted": (lambda: {"a": ones(), "b": deleted()},
                r"rank 1: .*leaf \['b'\] is an array that was deleted or donated; pass the result"),
    "a mask": (lambda: {"a": np.ma.masked_array(np.ones(3)), "b": ones()}, "is a MaskedArray; use"),
    "text": (lambda: {"a": ones(), "b": "text"}, r"leaf \['b'\] is str; leave it out"),
    "a key": (lambda: {"a": jax.random.key(0), "b": ones()}, "is an array of key<fry>; leave it"),
    "keys": (lambda: {1: ones(), "b": ones()}, "rank 1: ht.jax.allreduce: .* sorting pytree"),
    "another tree": (lambda: {"a": ones()}, "must be the same on all ranks"),
    "another dtype": (lambda: {"a": ones(), "b": ones().astype("f4")}, "the same on all ranks"),
    "weak": (lambda: {"a": ones(), "b": jnp.full(3, 1.0)}, None),
}  # fmt: skip


def ones():
    return jnp.ones(3)


@pytest.mark.parametrize("kind", BAD_TREES)
def test_a_bad_tree_of_one_rank_is_one_error_on_all(kind):
    make, words = BAD_TREES[kind]

    def body(world):
        tree = make() if world.rank == 1 else {"a": ones(), "b": ones()}
        if words is None:
            total = ht.jax.allreduce(tree, world=world)
        else:
            with pytest.raises(UsageError, match=words):
                ht.jax.allreduce(tree, world=world)
            total = ht.jax.allreduce({"a": ones()}, world=world)  # none is left waiting
        return np.asarray(total["a"]).tolist()

    assert run_on("threads", 3, body) == [[3.0] * 3] * 3


def test_reduced_leaves_keep_weak_types_and_devices():
    tree = {
        "weak": jnp.asarray(1.5), "strong": jnp.ones(()), "weak array": jnp.full(3, 1.0),
        "committed": jax.device_put(jnp.ones(2), jax.devices()[0]), "none": None, "number": 1,
    }  # fmt: skip

    def body(world):
        return ht.jax.allreduce(tree, world=world)

    for total in run_on("threads", 2, body):
        assert total["none"] is None and total["number"] == 2
        for name in ("weak", "strong", "weak array", "committed"):
            leaf, initial = total[name], tree[name]
            assert (leaf.weak_type, leaf.dtype) == (initial.weak_type, initial.dtype)
            assert (leaf.committed, leaf.sharding) == (initial.committed, initial.sharding)
            np.testing.assert_array_equal(leaf, 2 * initial)
