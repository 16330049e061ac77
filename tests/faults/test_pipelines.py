"""Stops and faults of one rank of a grid of pipelines, as processes; each ends all ranks alike."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest
from jobs import NEVER, command_that_resumes, sets
from ranks import run_on

from hpctrain.training import recipe, runs

pytestmark = [pytest.mark.processes, pytest.mark.either]

GRID = [
    *sets(mesh_pipe=2, optimizer_micro_batches=4, pipeline_schedule="zb-h1"),
    *sets(model_kind="traps:stages", run_steps=14, run_epochs="", checkpoint_every_epochs=""),
]
RANKS = 4


def trap(kind: str, rank: int, step: int = 7) -> list[str]:
    """Return arguments for a trap of faults/traps.py in each stage, sprung on `rank` at `step`."""
    return sets(model_trap=kind, model_rank=rank, model_step=step)


@pytest.fixture
def on_grid(digits):
    return lambda *args, **options: digits(*GRID, *args, ranks=RANKS, **options)


def rank_rows(*short: int):
    """Return rows of all ranks, of which those not in `short` run with --full."""
    return [pytest.param(r, marks=() if r in short else pytest.mark.full) for r in range(RANKS)]


@pytest.fixture
def whole(small, tmp_path, monkeypatch):
    """Train the same without a trap, on ranks that are threads; return the summary."""
    monkeypatch.syspath_prepend(Path(__file__).parent)
    spec = recipe.load("digits", [*small, *GRID, *trap("none", 0, NEVER)][1::2])
    body = partial(runs.train, spec, out=tmp_path / "whole", resume=False)
    return run_on("threads", RANKS, body)[0]


@pytest.mark.parametrize("rank", rank_rows(1))
def test_a_signal_to_one_rank_stops_all_at_one_step(on_grid, whole, rank):
    job = on_grid(*trap("usr1", rank))
    ended = job.finish()
    assert ended.returncode == 75, ended.stderr
    (step,) = job.steps
    assert 7 <= step < 14 and job.summary["steps"] == step
    message = f"stopped at step {step} of 14 by SIGUSR1; resume me"
    assert ended.stderr.count(message) == 1, ended.stderr
    assert command_that_resumes(ended.stderr)[-3:] == ["--out", str(job.out), "--resume"]
    resumed = on_grid(*trap("none", rank), "--resume")
    assert resumed.finish().returncode == 0
    assert resumed.summary["params_sha256"] == whole["params_sha256"]


@pytest.mark.parametrize("rank", rank_rows(3))
def test_a_stage_that_raises_ends_the_job(on_grid, rank):
    job = on_grid(*trap("raise", rank), *sets(checkpoint_every_steps=5))
    ended = job.finish()
    assert ended.returncode == 1, ended.stderr
    message = rf"\[rank {rank} on [^\]]+\] RuntimeError: the model broke"
    assert len(re.findall(message, ended.stderr)) == 1, ended.stderr
    assert (job.summary["status"], job.steps) == ("failed", [5])
    assert f"rank {rank}" in job.summary["reason"]


@pytest.mark.parametrize("rank", rank_rows(1))
def test_a_loss_that_is_not_finite_names_a_rank_of_the_replica(on_grid, rank):
    job = on_grid(*trap("diverge", rank))
    ended = job.finish()
    assert ended.returncode == 3, ended.stderr
    replica = rank // 2 * 2
    message = rf"the loss is not finite at step 7 on rank [{replica}{replica + 1}] \(\S+\); no rank"
    assert len(re.findall(message, ended.stderr)) == 1, ended.stderr


@pytest.mark.parametrize("kind", ["sleep", pytest.param("stop", marks=pytest.mark.full)])
@pytest.mark.parametrize("rank", rank_rows(2))
def test_a_hung_stage_is_named(on_grid, rank, kind):
    job = on_grid(*trap(kind, rank), *sets(run_timeout_s=1))
    ended = job.finish()
    assert ended.returncode == 86, ended.stderr
    assert ended.stderr.count("hung: a call has waited for longer than 1 s") == 1
    waits_for, rest = ended.stderr.split("the job waits for:")[1].split("these wait:")
    assert re.search(rf"rank {rank} on \S+ \(pid \d+\), step 7", waits_for), waits_for
    neighbour = rank ^ 1  # of the same replica: it waits on the link between stages
    line = rf"rank {neighbour} on .*, at stage_link.py.*: waiting; in wait for irecv .*stages"
    assert re.search(line, rest), rest
    assert (job.summary["status"], job.summary["exit_code"]) == ("hung", 86)
    assert f"rank {rank} on" in job.summary["reason"]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["mesh.pipe=3"], "expected a divisor of 4 ranks, seen 3"),
        (["pipeline.balance=[1, 5]"], "expected a layer with parameters of its own in each stage"),
    ],
)
def test_a_grid_that_does_not_fit_is_refused_in_one_voice(on_grid, settings, message):
    job = on_grid(*trap("none", 0), *[w for s in settings for w in ("--set", s)])
    ended = job.finish()
    assert ended.returncode == 2, ended.stderr
    assert ended.stderr.count(message) == ended.stderr.count("hpctrain: ") == 1, ended.stderr
    assert "Traceback" not in ended.stderr and not job.out.exists()


LARGE = """
import resource, sys
import numpy as np
import hpctrain as ht
from hpctrain.parallel import MeshOptions, PipelineOptions
world = ht.init()
with open("/proc/self/statm") as file:
    mapped = int(file.read().split()[0]) * resource.getpagesize()
limit = mapped + (int(sys.argv[1]) << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
model = ht.nn.MlpOptions(widths=[1024] * 33 + [10]).build((1024,), 10)
mesh = MeshOptions(pipe=world.size)
pipeline = PipelineOptions(balance="even") if world.size > 1 else PipelineOptions()
sgd = ht.optim.sgd(0.01, 0.9)
with ht.Trainer(model, sgd, world=world, mesh=mesh, pipeline=pipeline) as trainer:
    x, y = np.zeros((16, 1024), np.float32), np.arange(16) % 10
    summary = trainer.fit((x, y), steps=2, batch=16, micro_batches=4)
if world.rank == 0:
    print(summary["params_sha256"])
"""


@pytest.mark.full
def test_a_model_too_large_for_one_rank_trains_on_more(start):
    """34 million parameters: 134 MB per plane, of which there are three, and their gradients."""
    env = {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}

    def train(ranks: int, mib: int):
        return start("-c", LARGE, mib, ranks=ranks, env=env).finish(110)

    expected = train(1, 4096)
    assert expected.returncode == 0, expected.stderr
    alone = train(1, 470)
    assert alone.returncode != 0
    assert "memory" in alone.stderr.lower(), alone.stderr
    for ranks in (2, 4):
        ended = train(ranks, 470)
        assert (ended.returncode, ended.stdout) == (0, expected.stdout), ended.stderr
