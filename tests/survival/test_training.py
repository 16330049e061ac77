"""Training after the loss of ranks, which are threads: every engine, at many moments.

The parameters at the end are those of a run that nothing happened to, where the regime promises it:
with ordered sums for any ranks that are left; else for as many ranks, thanks to spares.
"""

from __future__ import annotations

import gc
import random
import shutil
import threading
import weakref
from functools import cache

import numpy as np
import pytest

import hpctrain as ht
from hpctrain.core.errors import RankKilled, RecoveryError, UsageError
from hpctrain.core.run_files import run_folder
from hpctrain.engines import replay
from hpctrain.engines.engine import AgreedCommit
from hpctrain.parallel import MeshOptions
from hpctrain.training.checkpointer import Checkpointer
from hpctrain.training.loop import Loop
from hpctrain.training.run_options import CheckpointOptions, ElasticOptions, FitOptions
from hpctrain.transport.threads.ranks import run_ranks
from hpctrain.world import over_threads

E = ht.engines
STEPS, INTERVAL = 12, 2
X = np.random.default_rng(0).standard_normal((100, 8)).astype(np.float32)
Y = X[:, :3].argmax(1)
#: engine: options, the least number of ranks, whether as many ranks end with the same bytes
ENGINES = {
    "ordered": (lambda: E.AllReduce(reduction="ordered"), 2, True),
    "fast": (E.AllReduce, 2, True),
    "buckets": (lambda: E.AllReduce(algorithm="ring", bucket_bytes=256, overlap="always"), 2, True),
    "shards": (lambda: E.AllReduce(shard_optimizer=True), 2, True),
    "ordered shards": (lambda: E.AllReduce(shard_optimizer=True, reduction="ordered"), 2, True),
    "shared": (lambda: E.AllReduce(share_parameters=True), 2, True),
    "priority": (
        lambda: E.AllReduce(priority=True, overlap="always", bucket_bytes=256), 2, True
    ),
    "top-k": (lambda: E.AllReduce(compression="top-k", compression_ratio=0.1), 2, True),
    "ps-sync": (E.PsSync, 2, True),
    "ps-sync, two servers": (lambda: E.PsSync(servers=2), 3, True),
    "ps-sync, colocated": (lambda: E.PsSync(servers=2, placement="colocated"), 2, True),
    "ps-async": (E.PsAsync, 2, False),
    "local-sgd": (lambda: E.LocalSgd(period=2), 2, True),
    "local-sgd, outer": (lambda: E.LocalSgd(period=3, outer="nesterov"), 2, True),
    "easgd": (E.Easgd, 2, False),
    "gossip": (E.Gossip, 2, False),
    "gossip, ring": (lambda: E.Gossip(graph="ring"), 2, True),
    "pipeline": (E.AllReduce, 4, True),
    "ordered pipeline": (lambda: E.AllReduce(reduction="ordered"), 4, True),
}  # fmt: skip


NEVER = 10**9  #: a call that no rank reaches; links then count their calls


def train(
    engine: str, ranks: int, spares: int = 0, kills=None, out=None, copies: int = 2, calls=None
) -> list:
    """Return the summaries of the ranks that are left.

    `calls`, a list, gets of each rank those of its links before `fit` and those after it.
    """
    model = [ht.nn.Linear(16), ht.nn.ReLU(), ht.nn.Linear(3)]
    mesh = MeshOptions(pipe=2 if "pipeline" in engine else 1)

    def body(link):
        world = over_threads(link, spares=spares)
        optimizer = ht.optim.adamw(rate=0.01)
        options = ENGINES[engine][0]()
        trainer = ht.Trainer(ht.nn.Model(model, 8), optimizer, options, world=world, mesh=mesh)
        before = link.hub.job.calls[link.rank]
        summary = trainer.fit(
            (X, Y),
            steps=STEPS,
            batch=30,
            out=out,
            evaluate=(X, Y),
            elastic=ElasticOptions(copy_steps=3, copies=copies),
            options=FitOptions(interval_steps=INTERVAL, evaluate_steps=4),
            checkpoints=CheckpointOptions(every_steps=4),
        )
        if calls is not None:
            calls.append((before, link.hub.job.calls[link.rank]))
        trainer.close()
        return summary

    results = run_ranks(ranks + spares, body, 20, kills)
    return [summary for summary in results if summary is not None]


@pytest.fixture(scope="module")
def undisturbed():
    """Return a function of engine and ranks: the hash of a training that nothing happens to."""
    return cache(lambda engine, ranks: train(engine, ranks)[0]["params_sha256"])


@pytest.fixture(scope="module")
def moment(tmp_path_factory):
    """Return a function of engine, ranks and a part of 1: a call of links during `fit`."""

    @cache
    def bounds(engine: str, ranks: int) -> tuple[int, int]:
        calls: list[tuple[int, int]] = []
        train(engine, ranks, 0, {0: NEVER}, tmp_path_factory.mktemp("run"), calls=calls)
        return max(before for before, _ in calls), min(after for _, after in calls)

    def find(engine: str, ranks: int, part: float) -> int:
        before, after = bounds(engine, ranks)
        return round(before + part * (after - before))

    return find


def rows_cover_each_step_once(folder) -> bool:
    edges = [(row["step"] - row["steps"], row["step"]) for row in run_folder.rows(folder)]
    return [start for start, _ in edges] == [0, *(stop for _, stop in edges[:-1])] and (
        edges[-1][1] == STEPS
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", [0, 1, pytest.param(2, marks=pytest.mark.full)])
@pytest.mark.parametrize("engine", ENGINES)
def test_training_survives(engine, seed, tmp_path, undisturbed, moment):
    _, least, same_with_as_many = ENGINES[engine]
    draw = random.Random(f"{engine} {seed}")
    ranks, spares = max(least, 3 + least % 2), seed % 2
    victims = draw.sample(range(ranks), 1 + (seed > 1))
    first = moment(engine, ranks, draw.uniform(0.2, 0.95))
    kills = {victim: first + draw.randint(0, 40) for victim in victims}
    out = tmp_path / "run"
    try:
        summaries = train(engine, ranks, spares, kills, out)
    except RecoveryError as error:
        assert "start the job again" in str(error)
        assert spares < len(victims)
        return
    assert len({summary["params_sha256"] for summary in summaries}) == 1
    summary = summaries[0]
    assert (summary["status"], summary["steps"]) == ("done", STEPS)
    assert rows_cover_each_step_once(out)
    losses = [sorted(recovery["ranks"]) for recovery in summary["recoveries"]]
    assert [sorted(r["ranks"]) for r in run_folder.read_summary(out)["recoveries"]] == losses
    if "ordered" in engine or (same_with_as_many and summary["world_size"] == ranks):
        assert summary["params_sha256"] == undisturbed(engine, ranks)


def test_after_the_loss_of_a_host_a_checkpoint_is_saved_at_once(tmp_path):
    """MPI's launcher may end the job at any time then."""

    def body(link):
        model = ht.nn.Model([ht.nn.Linear(3)], 8)
        trainer = ht.Trainer(model, "sgd", world=over_threads(link, "aab"))
        trainer.fit((X, Y), steps=STEPS, batch=30, out=tmp_path)

    steps = []
    for kills in ({1: 250}, {2: 250}):
        run_ranks(3, body, 20.0, kills)
        steps.append([int(path.name[5:]) for path in tmp_path.glob("checkpoints/step-*")])
        shutil.rmtree(tmp_path)
    assert steps[0] == [STEPS] and len(steps[1]) == 2 and 0 < min(steps[1]) < STEPS


def test_a_loss_interrupts_the_checkpoint_after_that_of_a_host(monkeypatch, tmp_path):
    """A spare that joins then must know that the checkpoint is still due, as the others do."""
    save = Checkpointer.save

    def killed_at_first(self, step, *arguments, **options):
        if self._world.membership.job.number == 1 and step < STEPS:
            raise RankKilled
        return save(self, step, *arguments, **options)

    monkeypatch.setattr(Checkpointer, "save", killed_at_first)

    def body(link):
        model = ht.nn.Model([ht.nn.Linear(3)], 8)
        trainer = ht.Trainer(model, "sgd", world=over_threads(link, "aabaa", spares=2))
        return trainer.fit((X, Y), steps=STEPS, batch=30, out=tmp_path)["steps"]

    assert run_ranks(5, body, 20.0, {2: 250}) == [STEPS, None, None, STEPS, STEPS]
    assert len(list(tmp_path.glob("checkpoints/step-*"))) == 2


@pytest.mark.sample(3)
@pytest.mark.parametrize("calls", range(0, 96, 4))
def test_a_loss_around_the_first_step_is_survived(calls, tmp_path, undisturbed, moment):
    """Some ranks may have begun to train, and others not."""
    summaries = train("ordered", 4, 0, {3: moment("ordered", 4, 0.0) + calls}, tmp_path)
    assert [(s["status"], s["steps"]) for s in summaries] == [("done", STEPS)] * 3
    assert {s["params_sha256"] for s in summaries} == {undisturbed("ordered", 4)}
    assert rows_cover_each_step_once(tmp_path)


def test_losses_are_recorded(moment, tmp_path):
    """The rank, the step and the spare of each; rows of metrics name the ranks."""
    summary = train("ordered", 3, 1, {1: moment("ordered", 3, 0.5)}, tmp_path)[0]
    (recovery,) = summary["recoveries"]
    assert (recovery["ranks"], recovery["spares"], recovery["steps_redone"]) == ([1], [3], 0)
    assert 0 < recovery["step"] < STEPS
    assert 0 < recovery["lost_s"] == summary["lost_s"] < summary["wall_s"]
    assert summary["ettr"] == pytest.approx(1 - summary["lost_s"] / summary["wall_s"])
    assert summary["spares_used"] == 1
    assert [row["lost_ranks"] for row in run_folder.rows(tmp_path) if "lost_ranks" in row] == [[1]]


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("engine", ["gossip", "ps-async"])
def test_a_run_that_lost_ranks_has_no_replay(engine, victim, moment, tmp_path):
    train(engine, 3, 0, {victim: moment(engine, 3, 0.5)}, tmp_path)

    def is_refused(rank):
        try:
            replay.read_log(tmp_path, rank, {})
        except UsageError as error:
            return f"that run lost ranks ({victim})" in str(error)

    assert any(map(is_refused, range(3)))


def test_a_state_without_a_copy_ends_the_job(monkeypatch, moment):
    """Planted: copies that no other rank holds; there is no checkpoint either."""
    monkeypatch.setattr("hpctrain.checkpoint.memory._source_ranks", lambda *_: [])
    monkeypatch.setattr("hpctrain.checkpoint.memory.partners", lambda hosts, _: [[]] * len(hosts))
    outcomes = set()
    for victim in range(3):  # the state of the optimizer is one block, which one rank has
        try:
            train("shards", 3, 0, {victim: moment("shards", 3, 0.5)}, copies=1)
        except RecoveryError as error:
            outcomes.add(str(error))
    assert any("of which no copy is left" in outcome for outcome in outcomes), outcomes


def test_a_state_that_lacks_an_array_is_noticed(monkeypatch, moment, undisturbed):
    """Planted: survivors forget the moments of the optimizer."""
    pieces_of = AgreedCommit.pieces

    def forgetful(commit: AgreedCommit) -> list:
        pieces = pieces_of(commit)
        return [p._replace(array=p.array * (not p.name.startswith("optimizer."))) for p in pieces]

    monkeypatch.setattr(AgreedCommit, "pieces", forgetful)
    summary = train("ordered", 3, 0, {1: moment("ordered", 3, 0.5)})[0]
    assert summary["params_sha256"] != undisturbed("ordered", 3)


@pytest.mark.parametrize("victim", [0, 1])
def test_too_few_ranks_end_the_job(victim, tmp_path):
    summaries: list = []
    with pytest.raises(RecoveryError, match="1 rank left, but training needs 2"):
        summaries += _train_with_min_ranks(tmp_path, 2, victim)
    summary = run_folder.read_summary(tmp_path)
    assert (summary["status"], summary["exit_code"]) == ("failed", 1)
    assert "training needs 2" in summary["reason"]


def _train_with_min_ranks(out, min_ranks: int, victim: int) -> list:
    def body(link):
        world = over_threads(link)
        model = ht.nn.Model([ht.nn.Linear(3)], 8)
        with ht.Trainer(model, ht.optim.sgd(rate=0.1), "allreduce", world=world) as trainer:
            elastic = ElasticOptions(min_ranks=min_ranks)
            return trainer.fit((X, Y), steps=200, batch=30, out=out, elastic=elastic)

    return run_ranks(2, body, 20, kills={victim: 900})


class Sum:
    """A callback that sums the steps of rows, and saves the sum."""

    def __init__(self):
        self.sum, self.begins, self.rows = 0, [], []

    def on_begin(self, run):
        self.sum = run.state or 0
        self.begins.append((run.world.rank, [row["step"] for row in run.rows], run.state))

    def on_row(self, row):
        self.sum += row["step"]
        self.rows.append((row["step"], self.sum))
        return "enough" if row["step"] >= 10 else None

    def save_state(self):
        return self.sum


A_STEPS = 5


@pytest.fixture
def train_both(monkeypatch):
    """Return a function that trains b, then a, whose rank 0 is lost in a method of Loop, if given.

    A spare takes its place. The function returns what `use` returns on each rank that is left.
    """

    def run(method, use, pipe=1, init=None):
        ranks = 3 if pipe == 1 else 2
        if method is not None:
            original = getattr(Loop, method)

            def lose(loop, *arguments):
                is_first = loop._world.membership.job.number == 0
                if is_first and loop._segment.total_steps == A_STEPS:
                    raise RankKilled
                return original(loop, *arguments)

            monkeypatch.setattr(Loop, method, lose)

        def body(link):
            world = over_threads(link, spares=1)
            options = {"world": world, "mesh": MeshOptions(pipe=pipe), "init": init}
            a, b = (ht.Trainer(model_of_layers(), ht.optim.sgd(rate=0.1), **options) for _ in "ab")
            if init is None:
                b.fit((X, Y), steps=4, batch=30)
            trained = a.fit((X, Y), steps=A_STEPS, batch=30)
            return use(trained, b) if world.rank < world.size else None

        results = run_ranks(ranks + 1, body, 20, {0: NEVER})
        return [result for result in results if result is not None]

    return run


def model_of_layers():
    return ht.nn.Model([ht.nn.Linear(16), ht.nn.ReLU(), ht.nn.Linear(3)], 8)


def hash_of_a(trained, b):
    return trained["params_sha256"]


def hash_of_b(trained, b):
    return b.fit((X, Y), steps=4, batch=30)["params_sha256"]


@pytest.mark.parametrize("pipe", [1, 2])
def test_initial_weights_outlive_a_loss_before_the_first_step(pipe, train_both, tmp_path):
    def save(link):
        trainer = ht.Trainer(model_of_layers(), "sgd", seed=1, world=over_threads(link))
        trainer.fit((X, Y), steps=1, batch=30, out=tmp_path / "run")

    run_ranks(1, save, 20)
    expected = train_both(None, hash_of_a, pipe, tmp_path / "run")
    assert train_both("begin", hash_of_a, pipe, tmp_path / "run") == expected


def evaluation_of_b(trained, b):
    return b.evaluate((X, Y))


def prediction_of_b(trained, b):
    return b.predict(X[:2]).tolist()


def closed_b(trained, b):
    b.close()
    return "closed"


@pytest.mark.parametrize("pipe", [1, 2])
def test_a_trainer_closes_after_a_loss_in_the_fit_of_another(pipe, train_both):
    assert {*train_both("_end_interval", closed_b, pipe)} == {"closed"}


@pytest.mark.parametrize("use", [hash_of_b, evaluation_of_b, prediction_of_b])
def test_a_trained_model_outlives_a_loss_in_the_fit_of_another(use, train_both, caplog):
    expected = train_both(None, use)
    assert "begins anew" not in caplog.text
    assert train_both("_end_interval", use) == expected
    assert caplog.text.count("the state of the optimizer after an earlier fit is lost") == 1


@pytest.mark.parametrize("use", [hash_of_b, evaluation_of_b, prediction_of_b])
def test_trained_layers_lost_in_the_fit_of_another_are_an_error(use, train_both):
    with pytest.raises(RecoveryError, match=r"start the job again, with fit.*resume=True"):
        train_both("_end_interval", use, pipe=2)


def train_with(callbacks, victim, spares, out, kills):
    """Return the summaries of the ranks that are left, with `callbacks` of each rank."""

    def body(link):
        world = over_threads(link, spares=spares)
        model = ht.nn.Model([ht.nn.Linear(3)], 8)
        trainer = ht.Trainer(model, "sgd", world=world, callbacks=callbacks(link.rank))
        options = FitOptions(interval_steps=INTERVAL)
        summary = trainer.fit((X, Y), steps=STEPS, batch=30, out=out, options=options)
        trainer.close()
        return summary

    results = run_ranks(3 + spares, body, 20, {victim: kills})
    return [summary for summary in results if summary is not None]


@pytest.mark.sample(4)
@pytest.mark.parametrize("part", [0.3, 0.5, 0.7])
@pytest.mark.parametrize("spares", [0, 1])
@pytest.mark.parametrize("victim", [0, 1])
def test_callbacks_of_the_first_rank_go_on(victim, spares, part, moment, tmp_path):
    made = []
    first = ht.callbacks.FirstRank(lambda: made.append(Sum()) or made[-1])
    call = moment("fast", 3, part)
    summaries = train_with(lambda rank: [first], victim, spares, tmp_path / "run", call)
    assert {(s["reason"], s["steps"]) for s in summaries} == {("enough", 10)}
    assert [rank for callback in made for rank, _, _ in callback.begins] == [0] * (
        1 + len(summaries[0]["recoveries"])
    )
    rows = [row for callback in made for row in callback.rows]
    assert {*rows} == {(2, 2), (4, 6), (6, 12), (8, 20), (10, 30)}
    steps, state = made[-1].begins[-1][1:]
    assert (state or 0) == sum(steps)


@pytest.mark.parametrize("victim", [0, 1])
def test_callbacks_of_lost_ranks_alone_are_announced(victim, moment, tmp_path, caplog):
    call = moment("fast", 3, 0.5)
    train_with(lambda rank: [Sum()] if rank == 0 else [], victim, 0, tmp_path / "run", call)
    assert ("callback Sum was on lost ranks alone" in caplog.text) == (victim == 0)


@pytest.mark.sample(2)
@pytest.mark.parametrize("calls_before_end", range(1, 13, 2))
@pytest.mark.parametrize("has_folder", [True, False])
def test_a_loss_at_the_end_loses_no_step(
    has_folder, calls_before_end, tmp_path, undisturbed, moment
):
    """After an earlier loss, too: then the state of that one must not be taken again."""
    calls: list[tuple[int, int]] = []
    first = {2: moment("ordered", 4, 0.3)}
    out = [tmp_path / name if has_folder else None for name in ("first", "second")]
    train("ordered", 4, 0, first, out[0], calls=calls)
    last = min(after for _, after in calls)
    summaries = train("ordered", 4, 0, {**first, 1: last - calls_before_end}, out[1])
    assert {s["params_sha256"] for s in summaries} == {undisturbed("ordered", 4)}
    assert {(s["status"], s["steps"]) for s in summaries} == {("done", STEPS)}
    assert all(recovery["steps_redone"] == 0 for s in summaries for recovery in s["recoveries"])
    assert not has_folder or rows_cover_each_step_once(out[1])


@pytest.mark.parametrize("victim", [2, 3])
def test_a_spare_that_is_lost_changes_nothing(victim, tmp_path, undisturbed):
    """It counts its looks as calls: it is killed in its sleep."""
    summaries = train("ordered", 2, 2, {victim: 5}, tmp_path)
    assert len(summaries) == 3
    assert {s["params_sha256"] for s in summaries} == {undisturbed("ordered", 2)}
    assert run_folder.read_summary(tmp_path)["status"] == "done"


@pytest.mark.sample(3)
@pytest.mark.parametrize("engine", ENGINES)
def test_nothing_of_an_engine_outlives_a_loss(engine, monkeypatch, moment):
    """Else its memory and descriptors would stay until a collector of garbage runs."""
    alive, engines = [], {}  # engines by the thread of their rank
    build, run = ht.Trainer._build_engine, Loop._train

    def build_engine(trainer, *restores):
        build(trainer, *restores)
        engines.setdefault(threading.get_ident(), []).append(weakref.ref(trainer.engine))

    def train_part(loop, work):
        run(loop, work)
        alive.extend(ref() for ref in engines[threading.get_ident()][:-1])

    monkeypatch.setattr(ht.Trainer, "_build_engine", build_engine)
    monkeypatch.setattr(Loop, "_train", train_part)
    gc.disable()
    try:
        train(engine, 4, 0, {3: moment(engine, 4, 0.5)})
    finally:
        gc.enable()
    assert alive and not any(alive)
