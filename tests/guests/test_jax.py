"""Functions of JAX under every engine: results do not depend on the number of ranks."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="needs JAX: pip install 'hpctrain[jax]'")

from guests import jax_functions  # noqa: E402
from guests.jax_functions import loss, make_params, make_samples  # noqa: E402

import hpctrain as ht  # noqa: E402
from hpctrain.core.errors import UsageError  # noqa: E402
from hpctrain.core.xp import address_of  # noqa: E402
from hpctrain.transport.threads.ranks import run_ranks  # noqa: E402
from hpctrain.world import over_threads  # noqa: E402

HERE = Path(__file__).parent
EXAMPLE = HERE.parents[1] / "docs" / "examples" / "jax" / "mlp.py"
LIMIT = 1e-12


@pytest.fixture(scope="module")
def states(tmp_path_factory):
    return tmp_path_factory.mktemp("states")


@pytest.mark.timeout(200)
@pytest.mark.parametrize("ranks", [2, 3])
def test_each_engine_equals_a_single_rank(start, states, ranks):
    for count in (1, ranks):
        if not (states / f"{count}.npz").exists():
            completed = start(HERE / "jax_functions.py", states / f"{count}.npz", ranks=count)
            completed = completed.finish(100)
            assert completed.returncode == 0, completed.stderr
    single, several = (np.load(states / f"{count}.npz") for count in (1, ranks))
    differences = {name: abs(single[name] - several[name]).max() for name in single}
    assert differences.keys() == jax_functions.TABLE.keys()
    assert {name: d for name, d in differences.items() if not d <= LIMIT} == {}
    assert np.array_equal(single["ordered, dropout"], several["ordered, dropout"])
    assert not np.allclose(single["ordered, dropout"], single["allreduce"])
    leaves = jax.tree_util.tree_leaves(make_params())
    initial = np.concatenate([np.ravel(leaf) for leaf in leaves])
    assert abs(single["allreduce"] - initial).max() > 1e-3


def run_script(start, text, *words, ranks=2):
    env = {"PYTHONPATH": f"{HERE}:{HERE.parents[1]}"}
    completed = start("-c", text, *words, ranks=ranks, env=env).finish(100)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    return json.loads(completed.stdout.splitlines()[-1])


ENGINES = """
import json, sys, jax_functions as f, hpctrain as ht
world, losses = ht.init("cpu"), {}
for name in sys.argv[1:]:
    with f.make_trainer(name, precision="float32") as trainer:
        initial = trainer.evaluate(f.make_samples())["loss"]
        trainer.fit(f.make_samples(), steps=60, batch=24)
        losses[name] = initial, trainer.evaluate(f.make_samples())["loss"]
if world.rank == 0:
    print(json.dumps(losses))
"""


@pytest.mark.either
@pytest.mark.timeout(120)
def test_asynchronous_engines_learn(start):
    names = ["ps-async", "local-sgd", "easgd", "gossip"]
    losses = run_script(start, ENGINES, *names)
    assert list(losses) == names
    assert [name for name, (initial, final) in losses.items() if not final < 0.9 * initial] == []


RESUME = """
import json, pathlib, shutil, sys, jax, jax_functions as f, hpctrain as ht
jax.config.update("jax_enable_x64", True)
world, out = ht.init("cpu"), sys.argv[1]
engine, x = ht.engines.AllReduce(shard_optimizer=True), f.make_samples()[0]

def train(resume):
    with f.make_trainer(engine, f.loss_with_dropout, seed=2**40 + 1) as trainer:
        options = ht.CheckpointOptions(every_steps=10, every_epochs=None)
        trainer.fit(f.make_samples(), steps=20, batch=25, out=out, resume=resume,
                    checkpoints=options)
        return trainer.summary["params_sha256"], trainer.predict(x).tolist()

complete = train(False)
if world.rank == 0:
    (newest,) = pathlib.Path(out, "checkpoints").glob("*20*")
    shutil.rmtree(newest)
ht.barrier()
resumed = train(True)
if world.rank == 0:
    model = ht.jax.Model(f.loss_with_dropout, f.make_params(), f.predict, ["accuracy"])
    trained = ht.load(out, model=model)
    print(json.dumps([complete, resumed, trained.predict(x).tolist()]))
"""


@pytest.mark.either
@pytest.mark.timeout(120)
def test_a_resumed_run_ends_with_the_bytes_of_a_whole_run(start, tmp_path):
    complete, resumed, loaded = run_script(start, RESUME, tmp_path / "run")
    assert resumed == complete
    assert loaded == complete[1]


TREE = """
import json, jax, jax.numpy as jnp, numpy as np, hpctrain as ht
world = ht.init("cpu")
r = world.rank
tree = {"a": jnp.full((3, 2), r + 1.0), "b": [jnp.arange(4) * r, jnp.ones((), jnp.bfloat16)],
        "c": (np.full(5, 0.1), 2.5, jnp.float32(r)), "d": jnp.zeros((0, 7))}
total = ht.jax.allreduce(tree)
errors = []
reduce = ht.jax.allreduce
calls = [lambda: jax.jit(reduce)(tree), lambda: reduce([1.0] * (2 + r)),
         lambda: reduce({"k": "text" if r else 1.0}), lambda: reduce(tree, "xor")]
for call in calls:
    try:
        call()
    except ValueError as error:
        errors.append(str(error))
errors = [errors, world.gather(str(len(errors)))]
mean = ht.jax.allreduce({}, "mean")
if r == 0:
    leaves = [[type(x).__module__.split(".")[0][:3], str(x.dtype), np.asarray(x, float).tolist()]
              for x in jax.tree_util.tree_leaves(total)]
    print(json.dumps([leaves, mean, errors]))
"""

TREE_ERRORS = [
    "leaf ['a'] is an array traced by JAX; call it between functions of jax.jit",
    "rank 1 has ht.jax.allreduce sum of [0] float64 (); [1] float64 (); [2] float64 ()",
    "rank 1: ht.jax.allreduce: expected arrays or numbers, leaf ['k'] is str; leave it out",
    "op 'xor' is not defined for float32",
]


@pytest.mark.either
@pytest.mark.timeout(60)
def test_a_tree_is_reduced_with_its_dtypes(start):
    leaves, mean, (errors, counts) = run_script(start, TREE)
    assert leaves == [
        ["jax", "float32", [[3.0, 3.0]] * 3], ["jax", "int32", [0, 1, 2, 3]],
        ["jax", "bfloat16", 2.0], ["num", "float64", [0.2] * 5], ["num", "float64", 5.0],
        ["jax", "float32", 1.0], ["jax", "float32", []],
    ]  # fmt: skip
    assert mean == {} and counts == ["4", "4"]
    for words, error in zip(TREE_ERRORS, errors, strict=True):
        assert words in error


def make_trainer(world, **options):
    options = {"loss": loss, "params": make_params(), "metrics": ["accuracy"]} | options
    return ht.jax.Trainer(optimizer="sgd", world=world, **options)


def fit(world, **options):
    make_trainer(world, **options).fit(make_samples(), steps=1, batch=4)


ERRORS = {
    "64 bits": (
        lambda world: make_trainer(world, precision="float64"),
        r"float64 needs 64 bits in JAX, seen jax_enable_x64 = False; call jax.config.update",
    ),
    "16 bits": (
        lambda world: make_trainer(world, precision="bf16"),
        r"expected float32 or float64 with a function of JAX, seen 'bf16'",
    ),
    "integers": (
        lambda world: make_trainer(world, params={"a": np.ones(2), "b": (np.arange(2),)}),
        r"expected floating-point arrays, seen an array of int64 at 'b.0'; keep what is not",
    ),
    "a number": (lambda world: make_trainer(world, params=[1.0]), r"seen float at '0'"),
    "no leaves": (lambda world: make_trainer(world, params={}), r"seen a dict without leaves"),
    "names": (
        lambda world: make_trainer(world, params={"a.b": np.ones(2), "a": {"b": np.ones(2)}}),
        r"seen two with the name 'a.b'; rename a key",
    ),
    "no function": (lambda world: make_trainer(world, loss="mse"), r"loss: .* seen str"),
    "predict": (
        lambda world: make_trainer(world).predict(make_samples()[0]),
        r"predict: .* seen none; give predict=lambda params, x",
    ),
    "metric names": (
        lambda world: make_trainer(world, metrics=["loss"]),
        r"metrics: expected names such as .*, without 'loss'",
    ),
    "unnamed metrics": (
        lambda world: fit(world, metrics=()),
        r"expected a scalar, seen a tuple; .* metrics=\('accuracy',\)",
    ),
    "other metrics": (
        lambda world: fit(world, metrics=["f9"]),
        r"with the metrics \['f9'\], seen a pair with \['accuracy'\]",
    ),
    "no metrics": (
        lambda world: fit(world, loss=lambda params, x, y: loss(params, x, y)[0]),
        r"with the metrics \['accuracy'\], seen a \w+Tracer",
    ),
    "a vector": (
        lambda world: fit(world, loss=lambda params, x, y: params["table"], metrics=()),
        r"loss: expected a floating-point scalar, .* seen shape \(3, 6\) of float32",
    ),
}


@pytest.mark.either
@pytest.mark.parametrize("case", ERRORS)
def test_bad_input_is_refused(case):
    call, words = ERRORS[case]
    with pytest.raises(UsageError, match=words):
        run_ranks(1, lambda link: call(over_threads(link)))


def test_parameters_are_named_by_their_paths_shared_and_not_changed():
    params = make_params()
    before = jax.tree_util.tree_map(np.array, params)
    model = ht.jax.Model(loss, params, metrics="accuracy")
    assert "layers.1.weight" in model.leaves and "scale" in model.leaves
    assert repr(model) == "function loss of JAX, 111 parameters"

    def train(link):
        with ht.jax.Trainer(loss, params, "sgd", metrics="accuracy", world=over_threads(link)) as t:
            t.fit(make_samples(), steps=2, batch=8)
            final = t.params
            for x in t.replica.arena.views(t.replica.arena.param).values():
                assert jax.numpy.from_dlpack(x).unsafe_buffer_pointer() == address_of(x)
        return jax.tree_util.tree_map(np.array_equal, final, t.params)

    for equal in run_ranks(2, train):
        assert all(jax.tree_util.tree_leaves(equal))
    assert all(jax.tree_util.tree_leaves(jax.tree_util.tree_map(np.array_equal, params, before)))


def test_without_jax_the_error_names_the_extra(start):
    text = 'import sys; sys.modules["jax"] = None; import hpctrain as ht; ht.jax.Trainer'
    completed = start("-c", text).finish()
    assert "UsageError: ht.jax needs JAX: pip install 'hpctrain[jax]'; seen: " in completed.stderr


@pytest.mark.either
@pytest.mark.parametrize("ranks", [None, 2])
def test_the_script_of_the_page_learns(start, ranks):
    completed = start(EXAMPLE, ranks=ranks).finish(timeout=60)
    assert completed.returncode == 0, completed.stderr
    (count, accuracy) = re.findall(r"(\d) ranks: accuracy (0\.\d+)", completed.stdout)[0]
    assert int(count) == (ranks or 1)
    assert float(accuracy) > 0.95


@pytest.mark.either
@pytest.mark.timeout(100)
def test_a_recipe_names_a_function_that_returns_a_model(hpctrain, tmp_path):
    run = tmp_path / "run"
    completed = hpctrain("launch", "-n", 2, "train", "mlp.toml", "--out", run, cwd=EXAMPLE.parent)
    assert completed.returncode == 0, completed.stderr
    accuracy = json.loads((run / "summary.json").read_text())["test_accuracy"]
    assert accuracy > 0.95
    completed = hpctrain("evaluate", run, "--trust", cwd=EXAMPLE.parent)
    assert completed.returncode == 0, completed.stderr
    assert json.loads(completed.stdout)["test_accuracy"] == pytest.approx(accuracy)
