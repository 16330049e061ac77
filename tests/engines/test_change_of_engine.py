"""A run resumes with any other engine: with its parameters and the optimizer's state."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from ranks import run_on
from regimes import REGIMES, digits

from hpctrain import checkpoint, nn, optim
from hpctrain.checkpoint import Piece
from hpctrain.core.errors import UsageError
from hpctrain.engines.saved_state import SavedState
from hpctrain.training import weights
from hpctrain.training.trainer import Trainer
from hpctrain.transport.threads.ranks import run_ranks

STEPS, SGD = 7, optim.sgd(0.05, 0.9)


def trained(regime, out, optimizer=SGD, steps=STEPS, resume=False):
    """Return the summary of a run in `out`, or of what becomes of it when resumed."""

    def train(world):
        model = nn.MlpOptions(widths=[64, 16, 10]).build((8, 8), 10)
        trainer = Trainer(model, optimizer, REGIMES[regime], world=world)
        summary = trainer.fit(digits(), steps=steps, batch=64, out=out, resume=resume)
        trainer.close()
        return summary

    return run_on("threads", 1 if regime == "single" else 4, train)[0]


@pytest.mark.sample(1)
@pytest.mark.parametrize("before", REGIMES)
def test_every_regime_takes_over(tmp_path, before):
    first = trained(before, tmp_path / before)
    loaded = weights.checkpoint_of(tmp_path / before)
    assert loaded.params_sha256 == first["params_sha256"]  # by the manifest alone
    for after in REGIMES:
        shutil.copytree(tmp_path / before, tmp_path / f"to-{after}")
        again = trained(after, tmp_path / f"to-{after}", resume=True)
        assert again["params_sha256"] == first["params_sha256"], after
        on = trained(after, tmp_path / f"to-{after}", steps=2 * STEPS, resume=True)
        assert on["train_loss"] < first["train_loss"], after


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize(("ratio", "count"), [(1.0, 10), (3.0, 30)])
def test_what_only_workers_have_is_averaged_and_counts_are_converted(tmp_path, size, ratio, count):
    apart = {f"worker.{i}.optimizer.momentum": np.full(3, i, np.float32) for i in range(11)}
    steps = {f"worker.{i}.optimizer.step": np.array([2 * i]) for i in range(11)}
    own = {"param": np.zeros(3), "worker.0.param": np.ones(3)}
    pieces = [Piece(name, 0, x.size, x) for name, x in {**apart, **steps, **own}.items()]
    run_ranks(1, lambda link: checkpoint.save(tmp_path, 1, pieces, {}, link))

    def rank(link):
        momentum, step, param = np.ones(3, np.float32), np.ones(1, np.int64), np.ones(3)

        def request(reader):
            saved = SavedState(reader, ratio)
            assert saved.workers == 11
            assert saved.own_name("optimizer.step", 10, 11) == "worker.10.optimizer.step"
            assert saved.own_name("optimizer.step", 1, 2) == "optimizer.step"
            for name, x in (("momentum", momentum), ("step", step)):
                saved.request(f"optimizer.{name}", x)
            saved.request("param", param)

        checkpoint.load(tmp_path, link, request=request)
        return momentum.tolist(), step.tolist(), param.tolist()

    assert run_ranks(size, rank) == [([5.0] * 3, [count], [0.0] * 3)] * size


@pytest.mark.sample(3)
@pytest.mark.parametrize("after", REGIMES)
def test_another_optimizer_does_not_take_over(tmp_path, after):
    trained("allreduce", tmp_path / "run")
    with pytest.raises(UsageError, match="the checkpoint does not fit the recipe"):
        trained(after, tmp_path / "run", optim.adamw(0.01), resume=True)
