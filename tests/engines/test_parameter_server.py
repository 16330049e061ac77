"""Parameter servers: equal to one rank if synchronous, else equal to their equations.

An asynchronous run leaves a log of what happened in which order. A simulation in NumPy, which
knows the papers' equations and the log but no ranks, links or shards, must come to the same
parameters.
"""

from __future__ import annotations

import json
from functools import cache

import numpy as np
import pytest
from ranks import on_ranks, run_on

from hpctrain import data, engines, nn, optim
from hpctrain.core.errors import TrainingError, UsageError
from hpctrain.core.run_files import run_folder
from hpctrain.data import Sampler, share
from hpctrain.engines import Flags, PsAsync, PsSync, Task
from hpctrain.engines.parameter_server import shard
from hpctrain.engines.parameter_server.coordinator import Event
from hpctrain.engines.parameter_server.shard import GradientAction
from hpctrain.gradients.replica import Batch, ModelReplica
from hpctrain.training.faults import FaultsOptions
from hpctrain.training.run_options import CheckpointOptions, FitOptions, TraceOptions
from hpctrain.training.trainer import Trainer

STEPS, SAMPLES, BATCH = 30, 151, 37  # the last batch of an epoch has 3 samples: fewer than workers
MODELS = {
    "mlp": nn.MlpOptions(widths=[64, 24, 10]),
    "resnet": nn.ResNetOptions(blocks=1, channels=[8, 16]),  # statistics over all workers
    "six blocks": nn.MlpOptions(widths=[64, 1024, 256, 10]),
}
#: Regimes in which all workers take each step together; on P ranks.
TOGETHER = {
    "1 server": lambda p: PsSync(),
    "2 servers": lambda p: PsSync(servers=min(2, p - 1)),
    "3 servers": lambda p: PsSync(servers=min(3, p - 1)),
    "1 colocated": lambda p: PsSync(placement="colocated"),
    "3 colocated": lambda p: PsSync(servers=min(3, p), placement="colocated"),
    "staleness 0": lambda p: PsAsync(staleness=0, servers=min(2, p - 1)),
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Cut finely, or these small models would be one shard and one slice."""
    monkeypatch.setattr(shard, "BLOCK_ELEMENTS", 512)
    monkeypatch.setattr(shard, "SEGMENT_BYTES", 4096)


@cache
def digits() -> data.Dataset:
    train = data.DigitsOptions().load(0).train
    return data.Dataset(train.x[:SAMPLES], train.y[:SAMPLES])


def trainer_of(world, engine, model="mlp", optimizer=None, faults=None, precision="float64"):
    return Trainer(
        MODELS[model].build((8, 8), 10),
        optimizer or optim.sgd(0.1, 0.9),
        engine,
        precision=precision,
        world=world,
        faults=faults or FaultsOptions(),
    )


def trained(world, engine, *args, **fit):
    """Return what a worker has in the end, None on a server."""
    trainer = trainer_of(world, engine, *args)
    summary = trainer.fit(digits(), **{"steps": STEPS, "batch": BATCH, **fit})
    trainer.close()
    arena = trainer.replica.arena
    end = np.concatenate([arena.param, arena.buffer])
    return None if trainer.engine.worker is None else (end, summary, trainer.engine)


def workers(results) -> list:
    return [item for item in results if item is not None]


@cache
def one_rank(model: str) -> tuple[np.ndarray, np.ndarray]:
    """Return what one rank begins and ends with."""
    arena = ModelReplica(MODELS[model].build((8, 8), 10), 0, np.float64).arena
    begin = np.concatenate([arena.param, arena.buffer])
    return begin, run_on("threads", 1, lambda w: trained(w, engines.Single(), model)[0])[0]


@pytest.mark.sample(3)
@pytest.mark.parametrize("model", ["mlp", "resnet"])
@pytest.mark.parametrize("regime", TOGETHER)
@on_ranks(2, 3, 4, 5, mpi=(2, 4))
def test_together_equals_one_rank(ranks, regime, model):
    begin, end = one_rank(model)
    result = ranks(lambda world: trained(world, TOGETHER[regime](world.size), model))
    for w, _, _ in workers(result):
        assert np.linalg.norm(w - end) <= 1e-10 * np.linalg.norm(end - begin)


NORMS = {
    "clipping": optim.sgd(0.1, 0.9, clip_norm=0.1),
    "adamw": optim.adamw(0.01, exempt_vectors=True),
    "lars": optim.lars(1.0, weight_decay=0.1, clip_norm=0.1),
    "lamb": optim.lamb(0.01, clip_norm=0.1),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("optimizer", NORMS)
def test_any_number_of_servers_gives_the_same_bytes(monkeypatch, optimizer):
    monkeypatch.undo()  # norms are added by whole blocks of the optimizers
    small = data.Dataset(digits().x[:50], digits().y[:50])

    def params(world, servers, placement):
        engine = PsSync(servers=servers, placement=placement)
        trainer = trainer_of(world, engine, "six blocks", NORMS[optimizer], precision="float32")
        trainer.fit(small, steps=3, batch=20)
        trainer.close()
        return trainer.engine.worker is not None and trainer.replica.arena.param.tobytes()

    ways = [(4, 1, "dedicated"), (5, 2, "dedicated"), (6, 3, "dedicated"), (3, 3, "colocated")]
    result = [
        [w for w in run_on("threads", ranks, lambda w, way=way: params(w, *way)) if w]
        for ranks, *way in ways
    ]
    assert {len(item) for item in result} == {3}  # as many workers: the sum is the same
    assert len({w for item in result for w in item}) == 1


def test_each_worker_sends_its_gradient_and_servers_the_parameters():
    def sent(world):
        trainer = trainer_of(world, PsSync(servers=2))
        engine = trainer.engine
        before = engine.bytes_sent
        trainer.fit(digits(), steps=4, batch=BATCH, options=FitOptions(interval_steps=4))
        trainer.close()
        return engine.bytes_sent - before, trainer.replica.arena.param.nbytes

    result = run_on("threads", 5, sent)
    n = result[0][1]
    small = 8000  # reports, answers, sums of metrics
    for bytes_sent, _ in result[:3]:
        assert 4 * n <= bytes_sent <= 4 * n + small
    assert 4 * 3 * n <= sum(bytes_sent for bytes_sent, _ in result[3:]) <= 4 * 3 * n + 2 * small


# What follows is asynchronous.

JITTER = FaultsOptions(step_ms=0.5, jitter=1.0)
REGIMES = {
    "free": PsAsync(rate_rule="none"),
    "by staleness": PsAsync(servers=2),
    "bounded": PsAsync(staleness=1, placement="colocated", servers=2),
    "softsync": PsAsync(softsync=1, rate_rule="none"),
    "compensated": PsAsync(delay_compensation=0.5),
    "seldom": PsAsync(push_every=2, pull_every=4),
    "backup": PsSync(backup_workers=1),
}
RATE = 0.05


def logged(world, engine, out, replay=None, steps=12):
    """Train with `out` as the folder; return (parameters, summary, engine) of workers."""
    return trained(
        world, engine, "mlp", optim.sgd(RATE), JITTER,
        out=out, replay=replay, steps=steps, options=FitOptions(interval_steps=5),
    )  # fmt: skip


@pytest.mark.parametrize("regime", REGIMES)
def test_an_asynchronous_run_follows_the_equations(tmp_path, regime):
    engine = REGIMES[regime]
    result = workers(run_on("threads", 4, lambda w: logged(w, engine, tmp_path / "run")))
    expected = simulated(engine, tmp_path / "run", len(result))
    for w, _, _ in result:
        np.testing.assert_allclose(w, expected, rtol=0, atol=1e-12)


def simulated(engine, run, size: int) -> np.ndarray:
    """Return the parameters to which the equations lead, in the order that the log of `run` has."""
    (log,) = (run / "replay").iterdir()
    intervals = [json.loads(line) for line in log.read_text().splitlines()[1:]]
    replica = ModelReplica(MODELS["mlp"].build((8, 8), 10), 0, np.float64)
    sampler = Sampler(SAMPLES, BATCH, 0)
    w = replica.arena.param.copy()
    remote, then, added = [w.copy() for _ in range(size)], [w.copy() for _ in range(size)], 0
    steps, waiting = [0] * size, [None] * size
    push_every = getattr(engine, "push_every", 1)

    def gradient(worker, step, at):
        indexes = sampler.batch_indexes(step)
        _, own = share(indexes, worker, size)
        of = len(indexes) if isinstance(engine, PsSync) else len(own)
        replica.arena.param[:] = at
        batch = Batch.of(*digits().rows(own))
        key = nn.Key(0, step, 0)
        replica.gradient(batch, 1 / max(of, 1), key, lambda name: None)
        return replica.arena.grad.copy()

    for interval in intervals:
        for event in map(Event.from_json, interval["events"]):
            order = event.order
            total = sum(waiting[worker] for worker in order.pushing_workers)
            if (
                order.action in (GradientAction.ADD, GradientAction.UPDATE)
                and order.pushing_workers
            ):
                if getattr(engine, "delay_compensation", 0):
                    g = total
                    total = g + engine.delay_compensation * g * g * (
                        w - then[order.pushing_workers[0]]
                    )
                added = added + order.factor * total
            if order.action == GradientAction.UPDATE:
                w, added = w - RATE * added, 0
            for worker in order.pulling_workers:
                remote[worker], then[worker] = w.copy(), w.copy()
            for worker, go, step, _ in event.replies:
                if not go:
                    continue
                x, steps[worker], waiting[worker] = remote[worker], step, 0
                for item in range(step, step + push_every):
                    g = gradient(worker, item, x)
                    waiting[worker] = waiting[worker] + g
                    if getattr(engine, "pull_every", 1) > 1:
                        x = x - RATE * g
                remote[worker] = x
    return w


def test_factors_follow_the_rule(tmp_path):
    """The simulation takes factors from the log; here they are held to 1 / staleness."""
    workers(run_on("threads", 4, lambda w: logged(w, PsAsync(), tmp_path / "run")))
    version, pulled = 0, [0] * 3
    for line in (tmp_path / "run/replay/rank-00003.jsonl").read_text().splitlines()[1:]:
        for event in map(Event.from_json, json.loads(line)["events"]):
            for worker in event.order.pushing_workers:
                assert event.order.factor == 1 / max(version - pulled[worker], 1)
                version += 1
            for worker in event.order.pulling_workers:
                pulled[worker] = version
    assert version >= 3 * 12


def test_a_dedicated_server_returns_the_hash_of_what_was_trained(tmp_path):
    """As the summary has it, though its own replica stays as it was."""

    def body(world):
        trainer = trainer_of(world, PsSync())
        summary = trainer.fit(digits(), steps=STEPS, batch=BATCH, out=tmp_path / "run")
        trainer.close()
        return trainer.engine.worker is None, summary["params_sha256"]

    result = run_on("threads", 4, body)
    written = json.loads((tmp_path / "run/summary.json").read_text())["params_sha256"]
    assert sum(serves for serves, _ in result) == 1
    assert {reported for _, reported in result} == {written}


@pytest.mark.sample(1)
@pytest.mark.parametrize("regime", REGIMES)
def test_a_replay_ends_with_the_same_bytes(tmp_path, regime):
    engine = REGIMES[regime]
    first = workers(run_on("threads", 4, lambda w: logged(w, engine, tmp_path / "run")))
    for i in range(3):
        again = workers(
            run_on(
                "threads", 4, lambda w, i=i: logged(w, engine, tmp_path / f"{i}", tmp_path / "run")
            )
        )
        assert again[0][1]["params_sha256"] == first[0][1]["params_sha256"]
        assert again[0][1]["staleness_histogram"] == first[0][1]["staleness_histogram"]


@pytest.mark.sample(1)
@pytest.mark.parametrize("bound", [1, 3, 10])
def test_the_clock_gap_reaches_its_bound_and_no_more(bound):
    slow = FaultsOptions(slow_rank=1, slow_factor=20, step_ms=0.5)
    engine = PsAsync(staleness=bound)
    result = run_on("threads", 4, lambda w: trained(w, engine, "mlp", optim.sgd(0.01), slow))
    assert workers(result)[0][1]["clock_gap_max"] == bound


def test_without_a_bound_the_gap_grows():
    slow = FaultsOptions(slow_rank=1, slow_factor=40, step_ms=0.5)
    result = run_on("threads", 4, lambda w: trained(w, PsAsync(), "mlp", optim.sgd(0.01), slow))
    assert workers(result)[0][1]["clock_gap_max"] > 10


def test_backup_workers_wait_for_nobody_and_drop_what_is_late():
    slow = FaultsOptions(slow_rank=1, slow_factor=10, step_ms=1)
    engine = PsSync(backup_workers=1)
    result = run_on("threads", 4, lambda w: trained(w, engine, "mlp", optim.sgd(0.05), slow))
    _, summary, _ = workers(result)[0]
    assert summary["dropped_gradients"] >= 1
    assert summary["steps"] == STEPS


class Script:
    """Work for an engine, outside of any trainer: one rank says `flags` when asked a tenth time."""

    max_drops = 0

    def __init__(self, flags=None):
        self.said, self.count = flags, 0

    def task(self, step):
        x, y = digits().rows(np.arange(4))
        return Task(Batch.of(x, y), 1 / 4, nn.Key(0, step, 0))

    def record(self, step, sums):
        pass

    def flags(self):
        self.count += 1
        return self.said if self.said and self.count >= 10 else Flags()


ENDS = {
    "sync": PsSync(servers=2),
    "backup": PsSync(backup_workers=2),
    "async": PsAsync(),
    "bounded": PsAsync(staleness=1, placement="colocated"),
}


@pytest.mark.parametrize("subject", ["a worker", "the first server"])
@pytest.mark.parametrize("regime", ENDS)
@on_ranks(4, mpi=(4,))
def test_a_request_to_stop_reaches_everybody(ranks, regime, subject):
    roles = ENDS[regime].roles(4)
    requested = roles.workers[1] if subject == "a worker" else roles.servers[0]

    def stopped(world):
        trainer = trainer_of(world, ENDS[regime])
        script = Script(Flags(stop=1) if world.rank == requested else None)
        result = trainer.engine.train(script, 0, 500)
        trainer.close()
        return result

    if not (result := ranks(stopped)):
        return  # a rank that looks on
    assert len(set(result)) == 1
    step, flags = result[0]
    assert 0 < step < 500
    assert flags.stop


@pytest.mark.parametrize("regime", ENDS)
def test_a_gradient_that_is_not_finite_reaches_nobody(monkeypatch, regime):
    good = ModelReplica.gradient
    bad = range(3, STEPS if regime == "backup" else 4)  # there that of one step may come too late

    def gradient(self, batch, scale, key, on_ready):
        sums = good(self, batch, scale, key, on_ready)
        if key.step in bad and key.first == 0:  # worker 0
            self.arena.grad[:] = np.nan
            return sums | {"loss": nn.Total(float("nan"), 1)}
        return sums

    monkeypatch.setattr(ModelReplica, "gradient", gradient)

    def train(world):
        trainer = trainer_of(world, ENDS[regime], faults=FaultsOptions(step_ms=0.2))
        with pytest.raises(TrainingError, match=r"not finite at step \d+ on rank 0"):
            trainer.fit(digits(), steps=STEPS, batch=BATCH)
        return np.isfinite(trainer.replica.arena.param).all()

    assert all(run_on("threads", 4, train))


CHANGES = {
    "to all-reduce": (PsSync(servers=2), engines.AllReduce()),
    "from all-reduce": (engines.AllReduce(), PsSync(servers=2)),
    "more servers": (PsSync(), PsSync(servers=3, placement="colocated")),
    "itself": (PsSync(placement="colocated"), PsSync(placement="colocated")),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("change", CHANGES)
def test_a_run_goes_on_in_another_regime(tmp_path, change):
    before, after = CHANGES[change]
    half = {"out": tmp_path / "run", "checkpoints": CheckpointOptions(every_steps=STEPS // 2)}
    run_on("threads", 4, lambda w: trained(w, before, steps=STEPS // 2, **half))
    result = run_on("threads", 4, lambda w: trained(w, after, resume=True, **half))
    begin, end = one_rank("mlp")
    for w, _, _ in workers(result):
        assert np.linalg.norm(w - end) <= 1e-10 * np.linalg.norm(end - begin)


def test_an_asynchronous_run_goes_on(tmp_path):
    """Clocks and counts go on; its log, cut and extended, still replays the whole run."""
    run, engine = tmp_path / "run", PsAsync()
    item = {"out": run, "steps": 10, "options": FitOptions(interval_steps=5)}
    run_on("threads", 4, lambda w: trained(w, engine, "mlp", optim.sgd(RATE), JITTER, **item))
    two = {**item, "steps": 20, "resume": True}
    result = workers(
        run_on("threads", 4, lambda w: trained(w, engine, "mlp", optim.sgd(RATE), JITTER, **two))
    )
    again = {"steps": 20, "options": FitOptions(interval_steps=5), "replay": run}
    repeated = workers(
        run_on("threads", 4, lambda w: trained(w, engine, "mlp", optim.sgd(RATE), **again))
    )
    assert result[0][0].tobytes() == repeated[0][0].tobytes()
    reported = run_folder.read_summary(run)
    assert sum(json.loads(json.dumps(reported["staleness_histogram"])).values()) == 3 * 20


REFUSED = {
    "no worker left": (PsSync(servers=4), "needs at least 5 ranks, seen 4; start"),
    "more servers than ranks": (PsSync(servers=5, placement="colocated"), "at least 5 ranks"),
    "all are backups": (PsSync(backup_workers=3), "backup_workers is 3 of 3 workers"),
    "pull between pushes": (PsAsync(push_every=2, pull_every=3), "a multiple of push_every"),
    "softsync": (PsAsync(softsync=4), "at most the 3 workers, seen 4"),
    "0 is synchronous": (PsAsync(staleness=0, push_every=2, pull_every=2), "mean nothing"),
}


@pytest.mark.parametrize("wrong", REFUSED)
def test_what_does_not_fit_is_refused(wrong):
    engine, reason = REFUSED[wrong]

    def build(world):
        with pytest.raises(UsageError, match=reason):
            trainer_of(world, engine)
        return True

    assert run_on("threads", 4, build) == [True] * 4


def test_what_always_does_the_same_is_not_replayed(tmp_path):
    def train(world):
        with pytest.raises(UsageError, match="is deterministic by itself"):
            trained(world, PsSync(), replay=tmp_path)
        return True

    assert run_on("threads", 2, train) == [True] * 2


def test_a_log_of_other_intervals_is_refused(tmp_path):
    run_on("threads", 3, lambda w: logged(w, PsAsync(), tmp_path / "run"))
    with pytest.raises(UsageError, match="interval_steps was 5, now 7"):
        run_on(
            "threads", 3,
            lambda w: trained(w, PsAsync(), replay=tmp_path / "run", steps=12,
                              options=FitOptions(interval_steps=7)),
        )  # fmt: skip


@pytest.mark.parametrize("placement", ["dedicated", "colocated"])
def test_spans_add_up_to_the_times(tmp_path, placement):
    fit = {"out": tmp_path / "run", "trace": TraceOptions(enabled=True)}

    def train(world):
        trainer = trainer_of(world, PsAsync(placement=placement, staleness=2))
        trainer.fit(digits(), steps=10, batch=BATCH, **fit)
        spans, times = world.trace.spans(), vars(trainer.engine.times)
        return [
            (times[f"{kind}_s"], sum(s.stop - s.start for s in spans if s.category == kind))
            for kind in ("compute", "wait")
        ], {s.name for s in spans}

    result = run_on("threads", 4, train)
    for pairs, _ in result[:3]:
        for reported, spans in pairs:
            assert spans == pytest.approx(reported, rel=0.01, abs=1e-4)
    assert {"forward, backward", "push, pull"} <= result[0][1]
    assert "serve" in result[-1][1]


def test_clocks_of_other_workers_mean_nothing(tmp_path):
    """A run goes on with fewer workers, and from a regime that has no clocks."""
    half = {"out": tmp_path / "run", "steps": 10, "options": FitOptions(interval_steps=5)}
    run_on("threads", 4, lambda w: trained(w, PsAsync(), **half))
    rest = {**half, "steps": 15, "resume": True}
    result = run_on("threads", 3, lambda w: trained(w, PsAsync(), **rest))
    counted = workers(result)[0][1]["staleness_histogram"]
    assert sum(counted.values()) == 3 * 10 + 2 * 5
