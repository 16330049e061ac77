"""Training with compressed gradients: it converges, replicas stay equal, a stop loses nothing."""

from __future__ import annotations

from functools import partial
from unittest.mock import Mock

import numpy as np
import pytest
from ranks import on_ranks, run_on, run_on_gpus

from hpctrain import data, engines, nn, optim
from hpctrain.collectives import all_gather_bytes
from hpctrain.core.errors import TrainingError, UsageError
from hpctrain.core.run_files import run_folder
from hpctrain.engines.saved_state import SavedState
from hpctrain.training import recipe, runs
from hpctrain.training.trainer import Trainer

METHODS = {
    "bf16": {"compression": "bf16"},
    "fp16": {"compression": "fp16"},
    "top-k": {"compression": "top-k", "compression_ratio": 0.05},
    "powersgd": {"compression": "powersgd", "compression_rank": 2},
}
RESIDUAL = "compression.residual"
OWES = ("top-k", "powersgd")
OPTIMIZERS = {
    "sgd": optim.sgd(rate=0.05, momentum=0.9),
    "clipping": optim.sgd(rate=0.1, momentum=0.9, clip_norm=1.0),
    "adamw": optim.adamw(rate=0.005),
    "lars": optim.lars(rate=0.7, weight_decay=1e-4, trust=0.02),
    "lamb": optim.lamb(rate=0.02),
}
MODELS = {
    "mlp": nn.MlpOptions(widths=[64, 48, 10]),
    "resnet": nn.ResNetOptions(blocks=1, channels=[8, 16]),  # statistics over all ranks
}
ROWS = [(method, name, "mlp") for method in METHODS for name in OPTIMIZERS]
ROWS += [(method, "sgd", "resnet") for method in METHODS]


def digits() -> data.Dataset:
    train = data.DigitsOptions().load(0).train
    return data.Dataset(train.x[:301], train.y[:301])  # an uneven last batch


def trainer_of(world, method: str, optimizer=OPTIMIZERS["sgd"], model: str = "mlp") -> Trainer:
    engine = engines.AllReduce(**METHODS[method], bucket_bytes=4096)
    return Trainer(MODELS[model].build((8, 8), 10), optimizer, engine, world=world)


@pytest.mark.sample(3)
@pytest.mark.parametrize(("method", "optimizer", "model"), ROWS)
@on_ranks(3, mpi=(2,))
def test_every_optimizer_learns_from_compressed_gradients(ranks, method, optimizer, model):
    def body(world):
        trainer = trainer_of(world, method, OPTIMIZERS[optimizer], model)
        before = trainer.evaluate(digits())
        trainer.fit(digits(), epochs=8, batch=32)
        after = trainer.evaluate(digits())
        assert after["loss"] < before["loss"] / 2
        arena = trainer.replica.arena
        for plane in (arena.param, arena.buffer):
            assert len(set(all_gather_bytes(world.link, plane.tobytes()))) == 1
        trainer.close()

    ranks(body)


@pytest.mark.parametrize("method", METHODS)
def test_a_gradient_that_is_not_finite_reaches_no_parameters(method):
    """The loss of rank 1 is finite, its gradient is not."""

    def body(world):
        trainer = trainer_of(world, method)
        replica, gradient = trainer.engine.replica, trainer.engine.replica.gradient

        def spoilt(batch, scale, key, on_ready):
            def ready(name):
                if world.rank == 1 and key.step == 3:
                    replica.arena.views(replica.arena.grad)[name].flat[0] = np.inf
                on_ready(name)

            return gradient(batch, scale, key, ready)

        replica.gradient = spoilt
        states = []
        update = trainer.engine.update
        trainer.engine.update = lambda g: (update(g), states.append(replica.arena.param.copy()))
        with pytest.raises(
            TrainingError, match=r"gradient of '\S+' is not finite at step 3 on rank 1"
        ):
            trainer.fit(digits(), steps=10, batch=32)
        assert len(states) == 3
        assert (replica.arena.param == states[-1]).all()
        assert np.isfinite(replica.arena.param).all()

    run_on("threads", 3, body)


def sets(method: str, steps: int) -> list[str]:
    keys = [f"wire.{key}={value}" for key, value in METHODS[method].items()]
    # A ring, for `auto` may sum in memory that ranks share, where no bytes are sent.
    return [f"run.steps={steps}", "run.epochs=", "wire.bucket_bytes=4096", "wire.algorithm=ring",
            *keys,
            "model.widths=[64,48,10]", "schedule.kind=constant",
            "schedule.warm_up_epochs="]  # fmt: skip


ON_THREADS = partial(run_on, "threads")


def trained(ranks: int, out, method: str, steps: int, *extra: str, on=ON_THREADS) -> dict:
    """Train to `steps` in folder `out`, going on where it is."""
    spec = recipe.load("digits", [*sets(method, steps), *extra])
    return on(ranks, lambda w: runs.train(spec, w, out, out.exists()))[0]


@pytest.mark.sample(1)
@pytest.mark.parametrize("method", METHODS)
def test_a_resumed_run_ends_with_the_same_bytes(tmp_path, method):
    complete = trained(3, tmp_path / "whole", method, 20)
    trained(3, tmp_path / "cut", method, 9)
    again = trained(3, tmp_path / "cut", method, 20)
    assert again["params_sha256"] == complete["params_sha256"]


@pytest.mark.sample(1)
@pytest.mark.parametrize("method", METHODS)
def test_a_resumed_run_on_a_device_ends_with_the_same_bytes(tmp_path, lazy_gpu, method):
    complete = trained(3, tmp_path / "whole", method, 20, on=run_on_gpus)
    trained(3, tmp_path / "cut", method, 9, on=run_on_gpus)
    again = trained(3, tmp_path / "cut", method, 20, on=run_on_gpus)
    assert again["params_sha256"] == complete["params_sha256"]
    assert lazy_gpu.counts["implicit"] == 0


@pytest.mark.parametrize("method", METHODS)
def test_a_gradient_that_is_not_finite_on_a_device_ends_the_run(lazy_gpu, method):
    def body(world):
        trainer = trainer_of(world, method)
        replica = trainer.engine.replica
        gradient = replica.gradient

        def spoilt(batch, scale, key, on_ready):
            def ready(name):
                if world.rank == 1 and key.step == 3:
                    replica.arena.grad[...] = np.inf
                on_ready(name)

            return gradient(batch, scale, key, ready)

        replica.gradient = spoilt
        with pytest.raises(
            TrainingError, match=r"gradient of '\S+' is not finite at step 3 on rank 1"
        ):
            trainer.fit(digits(), steps=10, batch=32)

    run_on_gpus(3, body)


@pytest.mark.parametrize("method", OWES)
def test_what_is_owed_matters_to_a_resumed_run(tmp_path, method, monkeypatch):
    """Otherwise the test above would see nothing."""
    complete = trained(3, tmp_path / "whole", method, 20)
    trained(3, tmp_path / "cut", method, 9)
    monkeypatch.setattr(
        "hpctrain.engines.synchronous.gradient_sums.CompressedSums.load", lambda *_: None
    )
    again = trained(3, tmp_path / "cut", method, 20)
    assert again["params_sha256"] != complete["params_sha256"]


CHANGES = [("top-k", 3, "top-k", 2), ("powersgd", 2, "powersgd", 4), ("top-k", 2, "powersgd", 3),
           ("powersgd", 3, "top-k", 3)]  # fmt: skip


@pytest.mark.parametrize(("first", "before", "then", "after"), CHANGES)
def test_all_ranks_together_owe_the_same_whatever_their_number(
    tmp_path, monkeypatch, first, before, then, after
):
    owed: dict[int, np.ndarray] = {}
    build = engines.AllReduce.build

    def spied(options, world, replica, optimizer):
        engine = build(options, world, replica, optimizer)
        load = engine.load

        def loaded(state):
            load(state)
            residual, total = engine._sums.compressor.local_state["residual"], state.sizes[RESIDUAL]
            saved.append(np.zeros(total, np.float32))
            state.request(RESIDUAL, saved[-1])
            state.on_arrival(lambda: owed.update({world.rank: residual.copy()}))

        engine.load = loaded
        return engine

    saved: list[np.ndarray] = []
    trained(before, tmp_path / "run", first, 5)
    monkeypatch.setattr(engines.AllReduce, "build", spied)
    trained(after, tmp_path / "run", then, 8)
    total = saved[0].reshape(before, -1).sum(axis=0)
    assert sorted(owed) == list(range(after))
    assert abs(total).max() > 0
    np.testing.assert_allclose(sum(owed.values()), total, rtol=1e-5, atol=1e-9)


def test_residuals_of_another_model_are_refused():
    def body(world):
        with trainer_of(world, "top-k") as trainer:
            sizes = {piece.name: piece.size for piece in trainer.engine.state()}
            sizes[RESIDUAL] += 1
            with pytest.raises(UsageError, match=rf"residuals of .* seen {sizes[RESIDUAL]} in all"):
                trainer.engine.load(SavedState(Mock(sizes=sizes)))

    run_on("threads", 2, body)


@pytest.mark.parametrize("ranks", [2, 1])
def test_a_run_goes_on_without_compression_and_says_what_is_dropped(tmp_path, caplog, ranks):
    trained(2, tmp_path / "run", "top-k", 5)
    plain = ["wire.compression=none", "wire.compression_ratio="]
    assert trained(ranks, tmp_path / "run", "top-k", 8, *plain)["steps"] == 8
    assert "kept back before the checkpoint are dropped" in caplog.text
    assert trained(2, tmp_path / "run", "top-k", 11)["steps"] == 11  # and begins to owe again


def test_savings_are_in_the_summary(tmp_path):
    """Of a model of matrices: what docs/compression.md says, but for votes and evaluations."""

    def sent(name, *extra):
        """Return the bytes of four steps, without those at the start."""
        method = name if name in METHODS else "bf16"
        runs = (trained(2, tmp_path / f"{name}-{n}", method, n, *extra) for n in (2, 6))
        first, second = (run["bytes_sent_per_rank"] for run in runs)
        return second - first

    plain = sent("none", "wire.compression=none")
    part = {method: sent(method) / plain for method in METHODS}
    assert part["bf16"] == pytest.approx(0.5, abs=0.02)
    assert part["fp16"] == pytest.approx(0.5, abs=0.02)
    assert part["top-k"] == pytest.approx(0.05 * 2, abs=0.05)
    assert part["powersgd"] == pytest.approx(2 * (64 + 48 + 48 + 10) / (64 * 48 + 480), abs=0.05)


REFUSED = [
    ("engine.kind=single", "engine 'allreduce'.*seen 'single'"),
    ("engine.kind=ps-sync", "engine 'allreduce'.*seen 'ps-sync'"),
    ("engine.kind=ps-async", "engine 'allreduce'.*seen 'ps-async'"),
    ("engine.kind=local-sgd", "engine 'allreduce'.*seen 'local-sgd'"),
    ("engine.kind=easgd", "engine 'allreduce'.*seen 'easgd'"),
    ("engine.kind=gossip", "engine 'allreduce'.*seen 'gossip'"),
    ("engine.shard_optimizer=true", "shard_optimizer.*expected .* none, seen bf16"),
    ("engine.share_parameters=true", "share_parameters.*expected .* none, seen bf16"),
    ("wire.algorithm=null", "supports 'bf16', seen 'null'"),
    ("wire.algorithm=native", "supports 'bf16', seen 'native'"),
    ("wire.compression_rank=3", "expected compression = 'powersgd' beside it, seen 'bf16'"),
    ("wire.compression=top_k", "compression"),
]


@pytest.mark.parametrize(("change", "fault"), REFUSED)
def test_a_recipe_is_refused(change, fault):
    with pytest.raises(UsageError, match=fault):
        recipe.load("digits", ["wire.compression=bf16", change])


def test_local_sgd_of_a_script_is_refused_too():
    with pytest.raises(ValueError, match="seen 'local-sgd'"):
        engines.LocalSgd(compression="fp16")


def test_a_ratio_too_large_is_refused_by_all_ranks(tmp_path):
    spec = recipe.load("digits", ["wire.compression=top-k", "wire.compression_ratio=0.4"])

    def body(world):
        with pytest.raises(UsageError, match=r"expected less than 1/3, seen 0\.4"):
            runs.train(spec, world, tmp_path / "run", False)

    run_on("threads", 3, body)
    assert run_folder.read_summary(tmp_path / "run") is None
