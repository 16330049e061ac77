"""Recipes: refusals, `--set`, and a resolved recipe that repeats its run."""

from __future__ import annotations

import os
from importlib import resources

import pytest
from click.testing import CliRunner
from ranks import run_on

from hpctrain import world
from hpctrain.commands.train import train
from hpctrain.core.errors import UsageError
from hpctrain.training import recipe, runs

SMALL = ["model.widths=[64,16,10]", "run.epochs=1"]

# --set arguments -> what is said
REFUSED = {
    "unknown table": (["runn.epochs=3"], "unknown table 'runn'; did you mean 'run'?"),
    "unknown key": (["run.epoch=3"], "unknown key in [run]: 'epoch'; did you mean 'epochs'?"),
    "another's name": (
        ["optimizer.lr=0.1"],
        "unknown key in [optimizer]: 'lr'; did you mean 'rate'",
    ),
    "no key of two": (["optimizer.q=1"], "weight_decay, exempt_vectors, batch, batch_per_rank, "),
    "unknown kind": (["model.kind=mpl"], "unknown [model] kind 'mpl'; did you mean 'mlp'?"),
    "no kind": (["optimizer.kind="], "[optimizer] kind is missing; choose one of: sgd"),
    "key of another kind": (["data.path=a.npz"], "unknown key in [data]: 'path'"),
    "no value": (["run.epochs"], "--set takes TABLE.KEY=VALUE, seen 'run.epochs'"),
    "no key": (["run=3"], "--set takes TABLE.KEY=VALUE, seen 'run=3'"),
    "wrong type": (["run.epochs=many"], "[run] epochs: input should be a valid integer"),
    "none of two": (["run.epochs="], "[run] needs exactly one of epochs and steps"),
    "both of two": (["run.steps=3", "run.epochs=3"], "[run] needs exactly one of epochs and steps"),
    "both batches": (
        ["optimizer.batch_per_rank=3", "optimizer.batch=3"],
        "needs exactly one of batch and batch_per",
    ),
    "nesterov alone": (
        ["optimizer.nesterov=true", "optimizer.momentum=0"],
        "[optimizer] nesterov",
    ),
    "list of kinds": (["model.kind=[]"], "unknown [model] kind '[]'; choose one of: mlp"),
    "table of kinds": (["data.kind={}"], "unknown [data] kind '{}'; choose one of: digits"),
    "function in a list": (['data.kind=["a:b"]'], """unknown [data] kind "['a:b']"; choose"""),
    "function of a model in a list": (['model.kind=["a:b"]'], "unknown [model] kind"),
    "engine of several kinds": (["engine.kind=[1]"], "unknown [engine] kind"),
    "long integer": ([f"run.seed={'9' * 5000}"], "--set run.seed, line 1: expected integers of at"),
    "hexadecimal": ([f"run.seed=0x{'f' * 5000}"], "run.seed: expected an integer of at most 64 bi"),
    "deep lists": ([f"run.name={'[' * 5000}"], "--set run.name: expected at most 32 levels of tab"),
    "deep": ([f"run.name={'[' * 40}{']' * 40}"], "expected at most 32 levels of tables and lists"),
    "long key": ([f"run.name={{{'a.' * 5000}b = 1}}"], "expected at most 32 levels"),
    "seed": ([f"run.seed={1 << 64}"], "recipe: run.seed: expected an integer of at most 64 bits"),
    "negative seed": (["run.seed=-1"], "[run] seed: input should be greater than or equal to 0"),
    "endless warm-up": (["schedule.warm_up_epochs=inf"], "input should be a finite number"),
    "long warm-up": (["schedule.warm_up_epochs=1e308"], "should be less than or equal to 1000000"),
    "endless rate": (["optimizer.rate=1e400"], "[optimizer] rate: input should be a finite number"),
    "no rate": (["optimizer.rate=nan"], "[optimizer] rate: input should be a finite number"),
    "never": (
        ["schedule.kind=step", "schedule.warm_up_epochs=", "schedule.at_epochs=[inf]"],
        "[schedule] at_epochs.0: input should be a finite number",
    ),
    "NUL": (['run.name="a\\u0000b"'], "run.name: expected text without NUL, seen one after 1 ch"),
    "not UTF-8": (["run.name=\udcff"], "recipe: run.name: expected UTF-8 text, seen other bytes"),
    "key that is not UTF-8": (["run.\udcff=1"], "a key in [run]: expected UTF-8 text"),
    "two settings": (
        ["run.epochs=3\nseed = 4"],
        "epochs: input should be a valid integer, seen '3",
    ),
    "too many layers": (
        [
            "model.kind=transformer",
            "model.widths=",
            "model.layers=1000000000",
            "model.width=8",
            "model.heads=1",
        ],
        "less than or equal to 10000, seen",
    ),
    "many faults": ([f"model.widths={['x'] * 300}"], "[model] and 290 more"),
    "terminal's codes": (["run.\x1b[2J=1"], "unknown key in [run]: '\\x1b[2J'; choose one of"),
    "micro-batches": (["optimizer.micro_batches=3"], "a divisor of the batch of 128, seen 3"),
    "micro-batches per rank": (
        ["optimizer.batch=", "optimizer.batch_per_rank=10", "optimizer.micro_batches=4"],
        "a divisor of the batch of 10, seen 4",
    ),
    "unknown engine": (["engine.kind=allredce"], "unknown [engine] kind 'allredce'; did you mean"),
    "no batch": (["optimizer.batch=0"], "[optimizer] batch: input should be greater than or equal"),
    "no epochs": (["run.epochs=0"], "[run] epochs: input should be greater than or equal to 1"),
    "device": (["run.device=tpu"], "[run] device: input should be"),
    "algorithm": (["wire.algorithm=rign"], "unknown algorithm 'rign'; did you mean 'ring'?"),
    "misplaced": (["engine.algorithm=ring"], "[engine] algorithm: belongs in [wire]"),
    "key of another engine": (
        ["engine.staleness=2"],
        "[engine] staleness: belongs to ps-async, seen with allreduce; use --engine ps-async",
    ),
    "key of several engines": (
        ["engine.kind=local-sgd", "engine.servers=2"],
        "[engine] servers: belongs to ps-sync and ps-async and easgd",
    ),
    "key of no engine": (
        ["engine.kind=ps-async", "engine.stalenes=2"],
        "unknown key in [engine]: 'stalenes'; did you mean 'staleness'?",
    ),
    "staleness below none": (
        ["engine.kind=ps-async", "engine.staleness=-1"],
        "[engine] staleness: input should be greater than or equal to 0, seen -1",
    ),
    "no period": (
        ["engine.kind=local-sgd", "engine.period=0"],
        "[engine] period: input should be greater than or equal to 1, seen 0",
    ),
    "no servers": (
        ["engine.kind=ps-sync", "engine.servers=0"],
        "[engine] servers: input should be greater than or equal to 1, seen 0",
    ),
    "shards": (
        ["engine.shard_optimizer=true", "wire.algorithm=tree"],
        "[engine] shard_optimizer: ranks exchange ranges along a ring; expected [wire] algorithm",
    ),
    "shards that are shared": (
        ["engine.shard_optimizer=true", "engine.share_parameters=true"],
        "[engine] shard_optimizer: expected without share_parameters, seen both",
    ),
    "compressed and shared": (
        ["engine.share_parameters=true", "wire.compression=bf16"],
        "[engine] share_parameters: ranks exchange ranges of the gradient as it is",
    ),
    "priority without overlap": (
        ["wire.priority=true", "wire.overlap=never"],
        "[wire] priority: expected overlap = 'auto' or 'always' beside it, seen 'never'",
    ),
    "priority of shards": (
        ["wire.priority=true", "engine.shard_optimizer=true"],
        "[wire] priority: expected all parameters on each rank, updated bucket by bucket",
    ),
    "shared during backward": (
        ["engine.share_parameters=true", "wire.overlap=always"],
        "[engine] share_parameters: sums are made in the pass of the update",
    ),
    "priority of averages": (
        ["engine.kind=local-sgd", "wire.priority=true"],
        "[wire] priority: expected the engine 'allreduce', which sums a gradient in each step",
    ),
    "priority of servers": (
        ["engine.kind=ps-async", "wire.priority=true"],
        "each step; seen 'ps-async'; set priority = false",
    ),
    "no patience": (["early_stop.metric=test_loss"], "[early_stop] patience is missing"),
    "metric": (
        ["early_stop.patience=2", "early_stop.metric=loss"],
        "[early_stop] metric: unknown metric 'loss'; did you mean 'test_loss'?",
    ),
    "direction of early stop": (
        ["early_stop.patience=2", "early_stop.direction=up"],
        "[early_stop] direction: input should be 'min' or 'max', seen 'up'",
    ),
    "key of early stop": (["early_stop.patence=2"], "did you mean 'patience'?"),
    "both intervals": (
        ["run.evaluate_epochs=2", "run.evaluate_steps=5"],
        "[run] takes evaluate_epochs or evaluate_steps, not both",
    ),
    "callbacks": (["run.callbacks=mine:log"], "[run] callbacks: input should be a valid list"),
    "best of what": (
        ["checkpoint.keep_best=accuracy"],
        "[checkpoint] keep_best: unknown metric 'accuracy'; did you mean 'test_accuracy'?",
    ),
    "direction of nothing": (
        ["checkpoint.keep_best_direction=max"],
        "[checkpoint] keep_best_direction: expected the metric keep_best beside it, seen none",
    ),
    "loss": (["loss.kind=mean_square_error"], "did you mean 'mean_squared_error'?"),
    "fault": (["faults.slow=1"], "unknown key in [faults]: 'slow'; did you mean 'slow_rank'?"),
    "fast": (["faults.slow_factor=0.5"], "[faults] slow_factor: input should be greater than or"),
    "jitter": (["faults.jitter=-1"], "[faults] jitter: input should be greater than or equal to 0"),
    "init": (["model.init=3"], "[model] init: expected a path, seen 3"),
    "reduction": (
        ["wire.reduction=exact"],
        "[wire] reduction: input should be 'fast'",
    ),
    "blocks of no order": (["wire.blocks=4"], "[wire] blocks: expected reduction = 'ordered'"),
    "blocks of one": (
        ["engine.kind=single", "wire.blocks=4"],
        "[wire] blocks: expected reduction = 'ordered' beside it, seen 'fast'",
    ),
    "no blocks": (
        ["wire.reduction=ordered", "wire.blocks=0"],
        "[wire] blocks: input should be greater than or equal to 1, seen 0",
    ),
    "ordered by nothing": (
        ["wire.reduction=ordered", "wire.algorithm=null"],
        "reduction is 'ordered', whose chunks the algorithm cannot gather",
    ),
    "ordered and compressed": (
        ["wire.reduction=ordered", "wire.compression=bf16"],
        "adds exact gradients; expected compression = 'none' beside it, seen 'bf16'",
    ),
    "ordered and shared": (
        ["wire.reduction=ordered", "engine.share_parameters=true"],
        "[engine] share_parameters: ranks add what their neighbours have, in the order of ranks",
    ),
    "ordered servers": (
        ["wire.reduction=ordered", "engine.kind=ps-sync"],
        "[wire] reduction: expected the engine 'allreduce', which sums a gradient in each step",
    ),
    "ordered apart": (
        ["wire.reduction=ordered", "engine.kind=local-sgd"],
        "each step; seen 'local-sgd'; set reduction = \"fast\"",
    ),
    "bucket": (
        ["wire.bucket_bytes=0"],
        "[wire] bucket_bytes: value error, expected 'auto' or a number of bytes",
    ),
}


def test_a_table_of_the_loss_names_it_or_weights_of_classes():
    tables = recipe.read_tables("digits") | {"loss": {}}
    with pytest.raises(UsageError, match=r"\[loss\] kind is missing"):
        recipe.check(tables)
    for table in ({"kind": "cross_entropy"}, {"class_weights": "balanced"}):
        loss = recipe.check(tables | {"loss": table}).loss
        assert loss is not None and loss.kind == "cross_entropy"


@pytest.mark.parametrize("value", ["auc, top-5", '["auc", "top-5"]'])
def test_metrics_are_a_list_or_a_text_with_commas(value):
    assert recipe.load("digits", [f"run.metrics={value}"]).run.metrics == ["auc", "top-5"]


@pytest.mark.parametrize("wrong", REFUSED)
def test_refused(wrong):
    overrides, reported = REFUSED[wrong]
    with pytest.raises(UsageError) as error:
        recipe.load("digits", overrides)
    text = str(error.value)
    assert reported in text and "ArgsKwargs" not in text
    assert len(text) < 5000 and text.replace("\n", "").isprintable()


def text_of(name):
    return resources.files("hpctrain.training.recipes").joinpath(f"{name}.toml").read_text()


# A file's text -> what is said
FILES = {
    "not TOML": ("schema = ", "is not TOML"),
    "no schema": ("[run]\nname = 'a'\n", "a recipe begins with 'schema = 1'"),
    "newer schema": ("schema = 2\n", "a recipe begins with 'schema = 1'"),
    "empty table": (f"{text_of('digits')}\n[early_stop]\n", "[early_stop] patience is missing"),
    "no table": ("schema = 1\nrun = 3\n", "'run' is a table: write [run], seen 3"),
    "not text": (b"\xff\xfe", "expected UTF-8 text, seen byte 0xff"),
    "list of tables": ("schema = 1\n[[run]]\n", "'run' is a table: write [run], seen [{}]"),
    "deep": (f"schema = 1\na = {'[' * 5000}", "expected at most 32 levels"),
    "deep key": (f"schema = 1\n[run]\n{'a.' * 5000}b = 1", "line 3: expected at most 32 levels"),
    "deep table": (f"schema = 1\n[run.{'a.' * 5000}b]", "line 2: expected at most 32 levels"),
    "long integer": (f"schema = 1\n[run]\nseed = {'9' * 5000}", "line 3: expected integers of at"),
    "long file": (b"#" * (1 << 21), "expected at most 1048576 bytes, seen 2097152"),
}


@pytest.mark.parametrize("wrong", FILES)
def test_refused_files(tmp_path, wrong):
    text, reported = FILES[wrong]
    file = tmp_path / "a.toml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UsageError) as error:
        recipe.load(str(file))
    assert reported in str(error.value)


@pytest.mark.parametrize("setting", ["run.epochs=3", "run.epochs="])
@pytest.mark.parametrize("text", ["run = 3", "[[run]]", "run = []"])
def test_set_in_what_is_no_table(text, setting, tmp_path):
    (tmp_path / "a.toml").write_text(f"schema = 1\n{text}\n")
    with pytest.raises(UsageError, match=r"'run' is a table: write \[run\], seen"):
        recipe.load(str(tmp_path / "a.toml"), [setting])


def test_missing_files(tmp_path):
    with pytest.raises(UsageError, match="expected a file, seen nothing"):
        recipe.load(str(tmp_path / "a.toml"))
    with pytest.raises(UsageError, match="seen a directory"):
        recipe.load(f"{tmp_path}/")
    os.mkfifo(tmp_path / "fifo.toml")
    with pytest.raises(UsageError, match="expected a regular file, seen a FIFO"):
        recipe.load(str(tmp_path / "fifo.toml"))


# A --set argument -> the entry of the tables, and its value (None: it is not there)
SETS = [
    ("run.epochs=3", "run", "epochs", 3),
    ("optimizer.rate = 1e-2", "optimizer", "rate", 0.01),
    ("model.widths=[64, 10]", "model", "widths", [64, 10]),
    ("wire.algorithm=ring", "wire", "algorithm", "ring"),
    ('run.name="my run"', "run", "name", "my run"),
    ("run.name=my run", "run", "name", "my run"),
    ("run.name=a=b", "run", "name", "a=b"),
    ("optimizer.momentum=", "optimizer", "momentum", None),
    ("checkpoint.every_steps=5", "checkpoint", "every_steps", 5),
]


@pytest.mark.parametrize("arguments, table, key, value", SETS)
def test_set(arguments, table, key, value):
    assert recipe.load("digits", [arguments]).tables[table].get(key) == value


def test_a_table_without_its_last_key_is_gone():
    chosen = recipe.load("digits", ["early_stop.patience=3", "early_stop.patience="])
    assert chosen == recipe.load("digits")


def test_the_last_set_counts():
    assert recipe.load("digits", ["run.epochs=3", "run.epochs=4"]).run.epochs == 4


# What is set -> keys of the recipe that are gone, and others that stay
RIVALS = [
    (["run.steps=3"], {"epochs"}, {"steps"}),
    (["run.epochs=3"], set(), {"epochs"}),
    (["run.steps=3", "run.steps="], set(), {"epochs"}),
    (["run.steps=3", "run.epochs=", "run.name=a"], {"epochs"}, {"steps"}),
    (["optimizer.batch_per_rank=8"], {"batch"}, {"batch_per_rank"}),
    (["optimizer.batch_per_rank=8", "optimizer.base_batch=8"], {"batch"}, {"base_batch"}),
    (["run.evaluate_steps=5"], {"evaluate_epochs"}, {"epochs", "evaluate_steps"}),
]


@pytest.mark.parametrize("arguments, gone, target", RIVALS)
def test_what_is_set_takes_its_rival_away(arguments, gone, target, tmp_path):
    path = tmp_path / "a.toml"
    path.write_text(recipe.load("digits", ["run.evaluate_epochs=2"]).toml())
    spec = recipe.load(str(path), arguments)
    keys = spec.tables["run"].keys() | spec.tables["optimizer"].keys()
    assert not keys & gone and target <= keys


@pytest.mark.parametrize(
    "change, ranks, batch",
    [([], 4, 128), (["optimizer.batch=", "optimizer.batch_per_rank=32"], 3, 96)],
)
def test_batch(change, ranks, batch):
    assert recipe.load("digits", change).batch.size(ranks) == batch


@pytest.mark.parametrize(
    "timeout_s, expected", [(4, 60), (20, 200), (60, 300), (300, 300), (900, 900)]
)
def test_the_limit_of_a_run_gives_the_limit_before_it(timeout_s, expected, monkeypatch):
    limits = []

    def init(device: str, timeout_s: float = 0.0) -> None:
        limits.append(timeout_s)
        raise UsageError("only the limit counts")

    monkeypatch.setattr(world, "init", init)
    CliRunner().invoke(train, ["digits", "--set", f"run.timeout_s={timeout_s}"])
    assert limits == [expected]


@pytest.mark.parametrize("name", recipe.built_in())
def test_built_in_recipes_are_read_back_as_they_were_written(name, tmp_path):
    first = recipe.load(name)
    (tmp_path / "again.toml").write_text(first.toml())
    again = recipe.load(str(tmp_path / "again.toml"))
    assert again.sha256 == first.sha256
    assert again == first or first.code.exists  # the second has the hashes of the first's code


@pytest.mark.parametrize("change", [[], ["optimizer.rate=0.05", "schedule.kind=constant",
                                         "schedule.warm_up_epochs="]])  # fmt: skip
def test_the_resolved_recipe_repeats_the_run(tmp_path, change):
    def train(spec, out):
        summary = run_on("threads", 2, lambda w: runs.train(spec, w, tmp_path / out, False))[0]
        return summary["params_sha256"]

    first = train(recipe.load("digits", [*SMALL, *change]), "first")
    again = train(recipe.load(str(tmp_path / "first" / "recipe.toml")), "again")
    other = train(recipe.load("digits", [*SMALL, *change, "run.seed=1"]), "other")
    assert first == again != other
