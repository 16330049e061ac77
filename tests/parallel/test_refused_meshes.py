"""Recipes whose mesh, model and engine do not fit: one UsageError on all ranks, before training."""

from __future__ import annotations

import numpy as np
import pytest
from ranks import run_on

from hpctrain import nn, optim
from hpctrain.core.errors import UsageError
from hpctrain.engines import AllReduce
from hpctrain.parallel import MeshOptions, PipelineOptions
from hpctrain.training import recipe, runs, trainer
from hpctrain.training.faults import FaultsOptions
from hpctrain.training.trainer import Trainer

PIPE = ["mesh.pipe=2", "optimizer.micro_batches=2"]
#: settings of the recipe, ranks, what the refusal says
REFUSED = {
    "more stages than layers": (
        ["mesh.pipe=8", "optimizer.micro_batches=8"], 8,
        r"\[mesh\] pipe: expected at most 3 stages, one per layer with parameters, seen 8; start "
        "fewer ranks along pipe",
    ),
    "no divisor": (["mesh.pipe=3", "optimizer.micro_batches=4"], 4,
                   "expected a divisor of 4 ranks, seen 3; start 3 or 6 ranks, or set pipe = "
                   "2 or 4"),
    "tensor": (["mesh.tensor=2"], 2, r"\[mesh\] tensor: expected 1, seen 2"),
    "sequence": (["mesh.sequence=2"], 2, r"\[mesh\] sequence: expected 1, seen 2"),
    "expert": (["mesh.expert=2"], 2, r"\[mesh\] expert: expected 1, seen 2"),
    "no such axis": (["mesh.pip=2"], 2, "pip.*did you mean 'pipe'"),
    "priority": ([*PIPE, "wire.priority=true"], 2, "expected priority = False, seen True"),
    "compression": ([*PIPE, "wire.compression=top-k", "wire.compression_ratio=0.1"], 2,
                    "expected compression = 'none', seen 'top-k'"),
    "one array per node": ([*PIPE, "engine.share_parameters=true"], 2,
                           "expected share_parameters = False, seen True"),
    "nodes apart": ([*PIPE, "engine.kind=local-sgd", "engine.apart=nodes"], 2,
                    "expected apart = 'ranks', seen 'nodes'"),
    "bf16": ([*PIPE, "run.precision=bf16"], 2, "expected precision float32, .* seen bf16"),
    "faults": ([*PIPE, "faults.slow_rank=1", "faults.slow_factor=2"], 2, r"expected no \[faults\]"),
    "unknown schedule": ([*PIPE, "pipeline.schedule=zb-h2"], 2, "did you mean 'zb-h1'"),
    "micro-batches of interleaved": (
        ["mesh.pipe=2", "optimizer.micro_batches=3", "pipeline.schedule=interleaved",
         "model.widths=[64, 9, 9, 9, 10]", "optimizer.batch=12"], 2,
        "expected a multiple of 2 ranks as micro-batches, seen 3; take 2 or 4",
    ),
    "stages per rank": ([*PIPE, "pipeline.stages_per_rank=2"], 2, "seen 2; take 1, or interleaved"),
    "pipeline without mesh": (["pipeline.schedule=gpipe"], 2,
                              r"\[pipeline\]: expected \[mesh\] pipe of 2 or more beside it"),
    "balance, numbers": ([*PIPE, "pipeline.balance=[2, 3, 2]"], 2,
                         "expected the layers of 2 stages, seen 3 numbers"),
    "balance, sum": ([*PIPE, "pipeline.balance=[2, 3]"], 2,
                     "2 numbers from 1 up that add up to 8 layers, seen 2, 3, which add up to 5"),
    "balance, no parameters": ([*PIPE, "pipeline.balance=[1, 7]"], 2,
                               "a layer with parameters of its own in each stage, seen flatten in"),
    "balance, no such cut": ([*PIPE, "pipeline.balance=evn"], 2, "balance"),
    "more ranks than samples of a step": (["mesh.pipe=2", "optimizer.batch=1"], 4,
                                          "1 samples? per batch for 2 workers"),
}  # fmt: skip


def refuse(name: str, settings, ranks: int, message: str, out) -> None:
    """Check that all ranks refuse the recipe in the same words, and leave no folder."""

    def body(world):
        with pytest.raises(UsageError, match=message) as error:
            runs.train(recipe.load(name, settings), world, out, False)
        return str(error.value)

    assert len({*run_on("threads", ranks, body)}) == 1
    assert not out.exists()


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused(case, tmp_path):
    refuse("digits", *REFUSED[case], tmp_path / "run")


def test_an_engine_of_one_rank_is_refused(tmp_path):
    message = "expected an engine of several ranks, such as allreduce, seen Single"
    settings = [*PIPE, "engine.kind=single", "wire.algorithm="]
    refuse("digits", settings, 2, message, tmp_path / "run")


@pytest.mark.parametrize("engine", ["ps-sync", "ps-async", "easgd", "gossip"])
def test_a_single_row_is_no_worker_and_its_server(engine, tmp_path):
    settings = [*PIPE, f"engine.kind={engine}", "wire.algorithm="]
    message = r"needs at least 2 (ranks, seen 1|workers, .* but 1 rank was started)"
    refuse("digits", settings, 2, message, tmp_path / "run")


def test_statistics_over_the_batch_are_refused(tmp_path):
    message = r"the model normalizes over the batch \(BatchNorm\).* use LayerNorm"
    settings = ["mesh.pipe=2", "model.kind=resnet20", "model.widths=", "model.blocks=1"]
    refuse("digits", [*settings, "model.channels=[4, 6]"], 2, message, tmp_path / "run")


class Module:
    """A model of another framework, as far as the check looks at it."""


def test_models_of_other_frameworks_are_refused(monkeypatch):
    monkeypatch.setattr(trainer, "as_model", lambda model: model)

    def body(world):
        with pytest.raises(UsageError, match=r"expected an ht\.nn\.Model, seen Module; for"):
            Trainer(Module(), optim.sgd(0.1), world=world, mesh=MeshOptions(pipe=2))

    run_on("threads", 2, body)


#: arguments of a Trainer with two stages, what the refusal says
ARGUMENTS = {
    "engine": ({"engine": AllReduce(priority=True)}, "expected priority = False, seen True"),
    "precision": ({"precision": "bf16"}, "expected precision float32, .* seen bf16"),
    "faults": ({"faults": FaultsOptions(slow_rank=1, slow_factor=2)}, r"expected no \[faults\]"),
    "no mesh": ({"mesh": MeshOptions(), "pipeline": PipelineOptions(schedule="gpipe")},
                r"\[pipeline\]: expected \[mesh\] pipe of 2 or more beside it"),
}  # fmt: skip


@pytest.mark.parametrize("case", ARGUMENTS)
def test_a_script_is_refused_as_a_recipe_is(case):
    arguments, message = ARGUMENTS[case]

    def body(world):
        model = nn.MlpOptions(widths=[64, 8, 10]).build((8, 8), 10)
        with pytest.raises(UsageError, match=message):
            Trainer(
                model, optim.sgd(0.1), world=world, **{"mesh": MeshOptions(pipe=2), **arguments}
            )

    run_on("threads", 2, body)


@pytest.mark.parametrize("faulty_rank", [0, 1])
@pytest.mark.parametrize("balance", ["measured", "even"])
def test_a_fault_of_one_rank_is_named_on_all_before_layers_are_measured(faulty_rank, balance):
    def body(world):
        widths = [64, 10] if world.rank == faulty_rank else [64, 8, 10]
        with pytest.raises(UsageError, match=f"^rank {faulty_rank} on .*: .* at most 1 stages"):
            Trainer(
                nn.MlpOptions(widths=widths).build((8, 8), 10), optim.sgd(0.1), world=world,
                mesh=MeshOptions(pipe=2), pipeline=PipelineOptions(balance=balance),
            )  # fmt: skip

    run_on("threads", 2, body)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_fewer_micro_batches_than_stages_are_allowed(micro_batches):
    settings = ["mesh.pipe=4", f"optimizer.micro_batches={micro_batches}", "run.epochs=",
                "run.steps=2", "model.widths=[64, 9, 9, 9, 10]"]  # fmt: skip
    summaries = run_on("threads", 4, lambda w: trained(w, settings))
    assert len({summary["params_sha256"] for summary in summaries}) == 1


def trained(world, settings):
    with runs.prepare(recipe.load("digits", settings), world) as job:
        return job.fit()


def test_samples_that_do_not_fit_the_loss_are_refused_on_all_ranks():
    def body(world):
        model = nn.MlpOptions(widths=[64, 8, 10]).build((8, 8), 10)
        mesh, pipeline = MeshOptions(pipe=2), PipelineOptions(balance="even")
        made = Trainer(model, optim.sgd(0.1), world=world, mesh=mesh, pipeline=pipeline)
        with pytest.raises(UsageError, match="label 11"):
            made.fit((np.ones((4, 8, 8)), np.array([0, 1, 11, 2])), steps=1, batch=4)
        made.close()

    run_on("threads", 2, body)
