"""Ordered sums in training: the same bits of parameters and losses on any number of ranks."""

from __future__ import annotations

import json
from functools import cache

import numpy as np
import pytest
from ranks import on_ranks, run_on
from tables import rows_of

from hpctrain import data, engines, nn, optim
from hpctrain.collectives import ALLREDUCE, ordered
from hpctrain.collectives.ordered import SumTree
from hpctrain.core.errors import HpctrainError, UsageError
from hpctrain.engines.synchronous import update
from hpctrain.gradients.arena import params_sha256
from hpctrain.gradients.blocks import BlockReplica
from hpctrain.gradients.replica import Batch, ModelReplica
from hpctrain.training import recipe, runs
from hpctrain.training.callbacks import EarlyStop
from hpctrain.training.run_options import FitOptions
from hpctrain.training.trainer import Trainer
from hpctrain.tuning import select

STEPS, SAMPLES, BATCH, BLOCKS = 10, 151, 37, 9  # the last batch has 3 samples: 6 blocks are empty

MODELS = {
    "mlp": (nn.MlpOptions(widths=[64, 24, 10]), (8, 8), 10),
    "cnn": (nn.CnnOptions(channels=[4], hidden=16), (8, 8), 10),
    "transformer": (
        nn.TransformerOptions(layers=1, width=16, heads=2, dropout=0.1),  # masks go with samples
        (12,),
        None,
    ),
}
OPTIMIZERS = {
    "mlp": optim.sgd(0.1, 0.9, clip_norm=0.5),
    "cnn": optim.lamb(0.01),
    "transformer": optim.adamw(0.01, clip_norm=0.5),
}
#: What must not matter. A word that is no algorithm's: in shards, or in pieces of a block.
WAYS = [name for name in select.ALGORITHM_NAMES if name not in ("null", "nccl")]


@cache
def samples(model: str) -> tuple[data.Dataset, data.Dataset]:
    """Return training and test samples."""
    if model == "transformer":
        text = np.frombuffer(b"ring ring, tree; a ring of trees? " * 8, np.uint8)
        windows = np.lib.stride_tricks.sliding_window_view(text, 13)
        x, y = windows[:, :-1], windows[:, 1:]
    else:
        split = data.DigitsOptions().load(0)
        x, y = split.train.x, split.train.y
    train, test = slice(SAMPLES), slice(SAMPLES, 210)
    return data.Dataset(x[train], y[train]), data.Dataset(x[test], y[test])


def engine(way: str, **extra):
    if way == "single":
        return engines.Single(reduction="ordered", blocks=BLOCKS)
    if way == "shards":
        extra, way = {"shard_optimizer": True, **extra}, "auto"
    options = {"reduction": "ordered", "blocks": BLOCKS, "bucket_bytes": 1024, **extra}
    return engines.AllReduce(algorithm=way, **options)


def trained(world, model: str, way: str, **extra) -> tuple:
    """Return all that must be alike."""
    options, shape, classes = MODELS[model]
    built = options.build(shape, classes)
    trainer = Trainer(built, OPTIMIZERS[model], engine(way, **extra), world=world)
    train, test = samples(model)
    summary = trainer.fit(
        train,
        steps=STEPS,
        batch=BATCH,
        evaluate=test,
        options=FitOptions(evaluate_steps=5, interval_steps=5),
    )
    metrics = trainer.evaluate(train)
    trainer.close()
    observed = ("params_sha256", "train_loss", "test_loss", "test_accuracy")
    return (*(summary[key] for key in observed), *metrics.values())


@cache
def alone(model: str) -> tuple:
    return run_on("threads", 1, lambda w: trained(w, model, "single"))[0]


@pytest.mark.sample(3)
@on_ranks(1, 2, 3, 4, 5, 8, mpi=(1, 2, 3, 4))
@pytest.mark.parametrize("model", MODELS)
def test_one_rank_or_many(ranks, model):
    assert set(ranks(trained, model, "auto")) <= {alone(model)}


@pytest.mark.sample(2)
@on_ranks(2, 4, mpi=(4,))
@pytest.mark.parametrize("way", [*WAYS, "shards"])
def test_any_algorithm(ranks, monkeypatch, way):
    monkeypatch.setattr(update, "BLOCK_ELEMENTS", 512)  # or this small model would be one shard
    assert set(ranks(trained, "mlp", way)) <= {alone("mlp")}


def test_blocks_change_bits_and_nothing_else():
    """Otherwise all above would be equal for another reason than the tree."""
    extra = {"reduction": "ordered", "blocks": 4}
    four, fast = (
        run_on("threads", 1, lambda w, item=item: trained(w, "mlp", "auto", **item))[0]
        for item in (extra, {"reduction": "fast", "blocks": None})
    )
    assert len({four[0], fast[0], alone("mlp")[0]}) == 3
    assert four[1:3] == pytest.approx(alone("mlp")[1:3], rel=1e-4)
    assert fast[1:3] == pytest.approx(alone("mlp")[1:3], rel=1e-4)


def added_as_they_come(monkeypatch):
    """Each rank adds all its blocks before anything travels."""

    def join(self, subtotals, subtotal, add):
        if subtotals:
            remaining = subtotals.pop()
            x = add(remaining.x, subtotal.x)
            subtotal = subtotal._replace(start=remaining.start, x=x)
        subtotals.append(subtotal)

    monkeypatch.setattr(SumTree, "append_subtotal", join)


def added_in_the_order_of_ranks(monkeypatch):
    """The nodes are right, but their sum is that of a ring."""

    def reduce_scatter(group, tree, own, x, op, offsets=None):
        for item in own[:-1]:
            op(x, item, out=x)
        ALLREDUCE["ring"](group, x, op)

    monkeypatch.setattr(ordered, "reduce_scatter", reduce_scatter)


def cut_by_ranks(monkeypatch):
    """Blocks of one size on each rank, of another on the next number of ranks."""
    share = data.sampler.share
    monkeypatch.setattr(
        "hpctrain.training.tasks.share", lambda i, r, size, blocks=0: share(i, r, size)
    )


PLANTED = {
    added_as_they_come: (2, 4),
    added_in_the_order_of_ranks: (2, 4),
    cut_by_ranks: (2,),
}


@pytest.mark.parametrize(
    "plant, size", [(plant, size) for plant, sizes in PLANTED.items() for size in sizes]
)
def test_a_planted_error_is_seen(monkeypatch, plant, size):
    reported = alone("mlp")
    plant(monkeypatch)
    try:
        assert run_on("threads", size, lambda w: trained(w, "mlp", "auto"))[0][0] != reported[0]
    except HpctrainError as error:
        assert "seen a share of" in str(error)  # the cut is not what the blocks expect


ALGORITHMS = ("ring", "tree", "halving-doubling", "direct", "auto")


@cache
def digits(size: int, algorithm: str) -> tuple[str, float, float]:
    """Return what two epochs of the recipe `digits` end with."""
    sets = ["run.epochs=2", "wire.reduction=ordered", f"wire.algorithm={algorithm}"]
    spec = recipe.load("digits", sets)
    summary = run_on("threads", size, lambda w: runs.train(spec, w, None, False))[0]
    return tuple(summary[key] for key in ("params_sha256", "train_loss", "test_loss"))


@pytest.mark.sample(2)
@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_digits(tmp_path, monkeypatch, algorithm, size):
    monkeypatch.chdir(tmp_path)  # the runs name their folders themselves
    assert digits(size, algorithm) == digits(1, "ring")


ON_PROCESSES = ((1, "engine.kind=single"), (2, "wire.algorithm=tree"))


@pytest.mark.processes
@pytest.mark.either
@pytest.mark.parametrize("size, way", rows_of(ON_PROCESSES, ON_PROCESSES[1]))
def test_digits_by_the_command_line(hpctrain, tmp_path, monkeypatch, size, way):
    """Processes of this environment's MPI, each on all cores: see core_binding.py."""
    out, sets = tmp_path / "run", ["run.epochs=2", "wire.reduction=ordered", way]
    words = [word for item in sets for word in ("--set", item)]
    no_number_of_threads = {"OMP_NUM_THREADS": ""}
    hpctrain(
        "train", "digits", *words, "--out", out, ranks=size if size > 1 else None,
        env=no_number_of_threads,
    )  # fmt: skip
    summary = json.loads((out / "summary.json").read_text())
    monkeypatch.chdir(tmp_path)
    observed = tuple(summary[key] for key in ("params_sha256", "train_loss", "test_loss"))
    assert (summary["threads"], observed) == (1, digits(1, "ring"))


def test_a_checkpoint_goes_on_with_any_number_of_ranks(tmp_path):
    def fit(world, steps, out, resume=False):
        options, shape, classes = MODELS["mlp"]
        built = options.build(shape, classes)
        trainer = Trainer(built, OPTIMIZERS["mlp"], engine("auto"), world=world)
        train, _ = samples("mlp")
        trainer.fit(train, steps=steps, batch=BATCH, out=out, resume=resume)
        trainer.close()
        return params_sha256(trainer.replica.arena)

    complete = run_on("threads", 3, lambda w: fit(w, 9, tmp_path / "whole"))[0]
    run_on("threads", 4, lambda w: fit(w, 3, tmp_path / "parts"))
    run_on("threads", 1, lambda w: fit(w, 7, tmp_path / "parts", True))
    assert run_on("threads", 2, lambda w: fit(w, 9, tmp_path / "parts", True)) == [complete] * 2


def test_early_stop_at_the_same_step():
    """A loss that differed in its last bit would be an improvement on some numbers of ranks."""

    def fit(world):
        options, shape, classes = MODELS["mlp"]
        built = options.build(shape, classes)
        trainer = Trainer(
            built, optim.sgd(2.0), engine("auto"), world=world, callbacks=[EarlyStop(patience=2)]
        )
        train, test = samples("mlp")
        summary = trainer.fit(
            train,
            steps=60,
            batch=BATCH,
            evaluate=test,
            options=FitOptions(evaluate_steps=1, interval_steps=1),
        )
        trainer.close()
        return summary["steps"], summary["reason"], summary["params_sha256"]

    (reported,) = run_on("threads", 1, fit)
    assert reported[0] < 60
    for size in (2, 5):
        assert set(run_on("threads", size, fit)) == {reported}


def test_micro_batches_cut_blocks():
    """Pieces of a block are alike on any number of ranks too, and other sums than the block's."""

    def fit(world):
        options, shape, classes = MODELS["mlp"]
        trainer = Trainer(
            options.build(shape, classes), OPTIMIZERS["mlp"], engine("auto"), world=world
        )
        trainer.fit(samples("mlp")[0], steps=5, batch=36, micro_batches=2)
        trainer.close()
        return params_sha256(trainer.replica.arena)

    assert len({run_on("threads", size, fit)[0] for size in (1, 2, 3)}) == 1


@pytest.mark.parametrize("blocks, maximum", [(1, 0), (2, 1), (8, 3), (64, 6), (13, 3)])
def test_planes_that_are_kept(blocks, maximum):
    """One rank keeps log2 B sums at most beside the gradient, whatever B."""
    options, shape, classes = MODELS["mlp"]
    replica = BlockReplica(
        ModelReplica(options.build(shape, classes), 0, "float32"), SumTree(blocks, 1), 0
    )
    train, _ = samples("mlp")
    key = nn.Key(0, 0, 0, samples=len(train))
    for _ in range(2):
        replica.gradient(Batch.of(train.x, train.y), 1.0, key, lambda name: None)
    assert len(replica._planes) == maximum


REFUSED = {
    "fewer blocks than ranks": (
        MODELS["mlp"],
        {"blocks": 3},
        {},
        "blocks is 3, but 4 ranks were started",
    ),
    "batch norm": (
        (nn.ResNetOptions(blocks=1, channels=[8]), (8, 8), 10),
        {},
        {},
        "the model normalizes over the batch",
    ),
    "small batch": (
        MODELS["mlp"],
        {},
        {"batch": BLOCKS - 1},
        "8 samples per batch for 9 blocks of an ordered sum: each needs at least one; set",
    ),
}


@pytest.mark.parametrize("wrong", REFUSED)
def test_refused(wrong):
    (options, shape, classes), extra, fit, reported = REFUSED[wrong]

    def body(world):
        built = options.build(shape, classes)
        with pytest.raises(UsageError, match=reported):
            Trainer(built, optim.sgd(0.1), engine("auto", **extra), world=world).fit(
                samples("mlp")[0], steps=1, **fit
            )

    run_on("threads", 4, body)


def test_a_layer_that_sums_over_ranks_is_refused():
    replica = ModelReplica(nn.MlpOptions(widths=[64, 10]).build((8, 8), 10), 0, "float32")
    gradient = replica.gradient

    def summing(batch, scale, key, on_ready):
        key.sum_over_ranks(np.zeros(1))
        return gradient(batch, scale, key, on_ready)

    replica.gradient = summing
    train, _ = samples("mlp")
    with pytest.raises(UsageError, match="a layer sums over ranks"):
        BlockReplica(replica, SumTree(2, 1), 0).gradient(
            Batch.of(train.x, train.y), 1.0, nn.Key(0, 0, 0, samples=len(train)), lambda name: None
        )
