"""One reader per node: the bytes of a run in which each rank reads, and what is read by whom."""

from __future__ import annotations

import re
import threading
from itertools import chain
from pathlib import Path
from time import sleep

import numpy as np
import pytest
from ranks import on_ranks

import hpctrain as ht
from hpctrain import data
from hpctrain.core.errors import BadDataError, HpctrainError, ReadError, UsageError
from hpctrain.core.run_files import run_folder
from hpctrain.data import Dataset, ReadOptions, ReadSamples, node_rows
from hpctrain.data.augment import AugmentedSamples
from hpctrain.data.derived import ResizedSamples
from hpctrain.data.sampler import WINDOW_CHUNKS, Sampler
from hpctrain.data.stored import StoredSamples
from hpctrain.training import node_reader
from hpctrain.training.run_options import CheckpointOptions, ElasticOptions, FitOptions
from hpctrain.transport.threads.ranks import run_ranks
from hpctrain.world import over_threads

E = ht.engines
N, BATCH, STEPS, ROWS = 103, 20, 14, 10  # samples, a step's, steps, a chunk's samples
X = np.random.default_rng(0).standard_normal((N, 2, 2)).astype(np.float32)
Y = np.arange(N) % 3
ENGINES = {
    "allreduce": E.AllReduce,
    "ps-sync": lambda: E.PsSync(servers=1),
    "blocks": lambda: E.AllReduce(reduction="ordered"),
    "pipeline": E.AllReduce,
}


def in_reader() -> bool:
    """Tell whether this is the thread that reads ahead."""
    return threading.current_thread().name == "hpctrain-reader"


class Chunked:
    """A set in a file with chunks, which takes note of what is read ahead."""

    source, sample_shape = "set.h5: x, y", (2, 2)

    def __init__(self, chunk_rows: int | None = ROWS):
        self.chunk_rows, self.reads = chunk_rows, list[np.ndarray]()

    def __len__(self) -> int:
        return N

    def rows(self, indexes, epoch=0):
        if in_reader():
            self.reads.append(indexes)
        return X[indexes], Y[indexes]


def mapped(folder: Path, **changes: float) -> StoredSamples:
    """Return mapped files of the samples; `changes`: values of samples, such as s17."""
    x = X.copy()
    for name, value in changes.items():
        x[int(name[1:]), 1, 0] = value
    np.save(folder / "x.npy", x)
    np.save(folder / "y.npy", Y)
    names = [str(folder / name) for name in ("x.npy", "y.npy")]
    return StoredSamples(*(np.load(name, "r") for name in names), 3, ", ".join(names))


SETS = {
    "mapped": mapped,
    "chunks": lambda folder: Chunked(),
    "augmented": lambda folder: AugmentedSamples(Chunked(), 5, 1, True),
    "longer": lambda folder: ResizedSamples(mapped(folder), N + 30),
}


def fitted(world, train, reader="node", shuffle="samples", engine="allreduce", **keys):
    """Return the hash of trained parameters; `keys`: for ReadOptions and for fit."""
    limits = {name: keys.pop(name) for name in ("read_ahead_bytes",) if name in keys}
    options = keys.pop("options", FitOptions(timeout_s=30.0))
    mesh = ht.parallel.MeshOptions(pipe=2) if engine == "pipeline" else ht.parallel.MeshOptions()
    layers = [ht.nn.Flatten(), ht.nn.Linear(8), ht.nn.ReLU(), ht.nn.Linear(3)]
    model = ht.nn.Model(layers, (2, 2))
    with ht.Trainer(
        model, ht.optim.sgd(0.1, 0.9), ENGINES[engine](), precision="float64", world=world,
        mesh=mesh,
    ) as trainer:  # fmt: skip
        reading = ReadOptions(reader=reader, shuffle=shuffle, **limits)
        trainer.fit(
            ReadSamples(train, reading), batch=BATCH, options=options, **{"steps": STEPS, **keys}
        )
        return trainer.summary["params_sha256"]


def fitted_alone(*args) -> str:
    return run_ranks(1, lambda link: fitted(over_threads(link), Chunked(), *args), 20)[0]


@pytest.mark.sample(3)
@pytest.mark.parametrize("shuffle", ["samples", "chunks"])
@pytest.mark.parametrize("kind", SETS)
@on_ranks(1, 2, 3, 4, 5)
def test_a_reader_per_node_changes_no_result(ranks, kind, shuffle, tmp_path):
    def body(world):
        folder = tmp_path / str(world.rank)
        folder.mkdir(parents=True, exist_ok=True)
        return [
            fitted(world, SETS[kind](folder), reader, shuffle, read_ahead_bytes=limit)
            for reader, limit in (("rank", 1), ("node", 1 << 20), ("node", 3000))
        ]

    for hashes in ranks(body):
        assert len(set(hashes)) == 1


@pytest.mark.parametrize("engine", ENGINES)
def test_a_reader_serves_each_engine_whose_workers_keep_step(engine):
    def body(link):
        world = over_threads(link, "aabb")
        return [fitted(world, Chunked(), reader, "chunks", engine) for reader in ("rank", "node")]

    for hashes in run_ranks(4, body, 20):
        assert len(set(hashes)) == 1


@pytest.mark.parametrize("hosts", ["aaa", "aab", "abc", "abab"])
def test_nodes_read_disjoint_rows_and_other_ranks_none(hosts):
    sets = [Chunked() for _ in hosts]

    def body(link):
        fitted(over_threads(link, hosts), sets[link.rank], steps=None, epochs=1)

    run_ranks(len(hosts), body, 20)
    readers = [hosts.index(host) for host in dict.fromkeys(hosts)]
    assert [bool(x.reads) for x in sets] == [rank in readers for rank in range(len(hosts))]
    read = chain(*(indexes.tolist() for x in sets for indexes in x.reads))
    assert sorted(read) == [*range(N)]


def test_no_other_thread_reads_beside_the_reader(monkeypatch):
    events = list[str]()

    class Targets(Chunked):
        def rows(self, indexes, epoch=0):
            events.extend(["row"] * (not in_reader()))
            return X[indexes], Y[indexes, None].astype(np.float32)

    def opened(*args, reader=node_reader.NodeReader):
        events.append("reader")
        return reader(*args)

    monkeypatch.setattr(node_reader, "NodeReader", opened)

    def body(link):
        model = ht.nn.Model([ht.nn.Flatten(), ht.nn.Linear(1)], (2, 2), loss="mean_squared_error")
        with ht.Trainer(model, "sgd", world=over_threads(link)) as trainer:
            train = ReadSamples(Targets(), ReadOptions(reader="node"))
            trainer.fit(train, batch=BATCH, steps=2)

    run_ranks(1, body, 20)
    assert events.index("reader") == len(events) - 1 > 0


@pytest.mark.parametrize("size", [1, 3])
def test_a_chunk_is_read_once_per_fill(size, monkeypatch):
    monkeypatch.setattr(node_rows, "PIECE_BYTES", 1)  # of rows: pieces are single chunks
    sets = [Chunked() for _ in range(size)]

    def body(link):
        fitted(over_threads(link), sets[link.rank], shuffle="chunks", epochs=2, steps=None)

    run_ranks(size, body, 20)
    chunks = [{*(indexes // ROWS)} for indexes in sets[0].reads]
    assert chunks == [{chunk} for chunk in range(11)] * 2  # one fill in each of two epochs
    assert all((np.diff(indexes) > 0).all() for indexes in sets[0].reads)


@pytest.mark.parametrize(("limit", "chunk_rows"), [(1500, 10), (1500, None), (9000, 10)])
def test_memory_is_bounded(limit, chunk_rows, monkeypatch):
    """Counted: what the ranks share, and the longest piece."""
    monkeypatch.setattr(node_rows, "PIECE_BYTES", 240)
    allocated, train = list[int](), Chunked(chunk_rows)
    allocate = node_reader._allocate

    def note(world, nbytes):
        allocated.append(nbytes)
        return allocate(world, nbytes)

    monkeypatch.setattr(node_reader, "_allocate", note)
    body = lambda link: fitted(over_threads(link), train, read_ahead_bytes=limit)  # noqa: E731
    run_ranks(2, body, 20)
    fixed = 5 * 64  # a counter per rank and three more
    assert fixed + limit // 3 < allocated[0] <= fixed + limit
    assert max(map(len, train.reads)) <= 240 // 24


class Broken(Chunked):
    """A set that cannot be read at sample 31."""

    def rows(self, indexes, epoch=0):
        if 31 in indexes and in_reader():
            raise OSError(5, "Input/output error")
        return super().rows(indexes, epoch)


class Uneven(Chunked):
    """A set with a sample of another form."""

    def rows(self, indexes, epoch=0):
        x, y = super().rows(indexes, epoch)
        return (x[:, :1] if 31 in indexes and in_reader() else x), y


FAULTS = {
    "a value": (lambda folder: mapped(folder, s31=np.nan), BadDataError,
                r"x\.npy, \S+y\.npy: x holds nan in sample 31, at \(1, 0\)"),
    "the system": (lambda folder: Broken(), ReadError,
                   r"set\.h5: x, y: sample 31 could not be read: OSError: \[Errno 5\] Input/out"),
    "the form": (lambda folder: Uneven(), ReadError,
                 r"set\.h5: x, y: expected \d+ rows like those of sample 0 .*; \[data\] reader = "),
}  # fmt: skip


FAILURES = [
    *[(fault, "allreduce", "node", "aab") for fault in FAULTS],
    *[("a value", engine, "node", "aabb") for engine in ENGINES],
    *[("a value", engine, "rank", "aabb") for engine in ("allreduce", "ps-sync")],
]


@pytest.mark.parametrize(("fault", "engine", "reader", "hosts"), FAILURES)
def test_a_reader_that_fails_names_the_sample_on_each_rank_of_each_node(
    fault, engine, reader, hosts, tmp_path
):
    make, kind, message = FAULTS[fault]
    errors: dict[int, BaseException] = {}
    sets = [make(tmp_path) for _ in hosts]
    out = tmp_path / "run"

    def body(link):
        keys = {"engine": engine, "steps": None, "epochs": 1, "out": out}
        try:
            fitted(over_threads(link, hosts), sets[link.rank], reader, **keys)
        except HpctrainError as error:
            errors[link.rank] = error
            raise

    with pytest.raises(kind):
        run_ranks(len(hosts), body, 20)
    assert {type(errors[rank]) for rank in range(len(hosts))} == {kind}
    (text,) = {str(error) for error in errors.values()}
    assert re.match(rf"rank \d on [ab]: .*{message}", text)
    summary = run_folder.read_summary(out)
    assert (summary["status"], summary["reason"]) == ("failed", text)
    assert summary["exit_code"] == kind.exit_code
    assert 0 <= summary["steps"] < 6


def test_a_read_that_hangs_is_named_within_the_limit(monkeypatch):
    monkeypatch.setattr(node_reader, "JOIN_TIMEOUT_S", 0.05)
    answer = threading.Event()

    class Hanging(Chunked):
        def rows(self, indexes, epoch=0):
            if in_reader():
                answer.wait()
            return super().rows(indexes, epoch)

    def body(link):
        fitted(over_threads(link), Hanging(), options=FitOptions(timeout_s=0.2))

    with pytest.raises(
        HpctrainError, match=r"within 0\.2 s by rank 0 on \S+, which reads set\.h5: x, y for its no"
    ):
        run_ranks(2, body, 20)
    answer.set()


def test_each_piece_restarts_the_limit_of_a_wait(monkeypatch):
    """By a clock that a read of a piece puts forward: a fill takes more than the limit."""
    clock = [0.0]

    class Slow(Chunked):
        def rows(self, indexes, epoch=0):
            if in_reader():
                sleep(0.003)  # the main thread waits
                clock[0] += 20.0
            return super().rows(indexes, epoch)

    monkeypatch.setattr(node_rows, "PIECE_BYTES", 1)
    monkeypatch.setattr(node_reader, "perf_counter", lambda: clock[0])
    run_ranks(1, lambda link: fitted(over_threads(link), Slow(), shuffle="chunks"), 20)
    assert clock[0] > 10 * 20.0


REFUSALS = {
    "ps-async": ({"engine": E.PsAsync()}, "expected 'rank' with engine 'ps-async', whose"),
    "easgd": ({"engine": E.Easgd()}, "expected 'rank' with engine 'easgd', whose"),
    "late workers": ({"engine": E.PsSync(backup_workers=1)}, "with engine 'ps-sync', whose work"),
    "local-sgd": ({"engine": E.LocalSgd()}, "expected 'rank' with engine 'local-sgd', whose"),
    "gossip": ({"engine": E.Gossip(graph="ring")}, "expected 'rank' with engine 'gossip', whose"),
    "prefetch": ({"options": FitOptions(prefetch=2)}, r"beside \[run\] prefetch, .*seen 'node'"),
    "a large step": ({"bytes": 400}, r"read_ahead_bytes: expected \d+ or more, .*, seen 400"),
}  # fmt: skip


@pytest.mark.parametrize("wish", ["node", "auto"])
@pytest.mark.parametrize("refusal", REFUSALS)
def test_a_reader_that_cannot_be_is_refused_if_it_was_asked_for(refusal, wish, monkeypatch):
    keys, message = REFUSALS[refusal]
    train = Chunked()

    def body(link):
        world = over_threads(link)
        reading = ReadOptions(reader=wish, read_ahead_bytes=keys.get("bytes", 1 << 20))
        model = ht.nn.Model([ht.nn.Flatten(), ht.nn.Linear(3)], (2, 2))
        engine = keys.get("engine", E.AllReduce())
        with ht.Trainer(model, "sgd", engine, world=world) as trainer:
            options = keys.get("options", FitOptions())
            trainer.fit(ReadSamples(train, reading), batch=BATCH, steps=2, options=options)

    if wish == "auto":
        monkeypatch.setattr(node_reader, "NodeReader", None)  # each rank reads
        run_ranks(3, body, 20)
        return
    with pytest.raises(UsageError, match=message):
        run_ranks(3, body, 20)


def test_a_rank_without_a_layout_leaves_its_node_without_a_reader(monkeypatch):
    sets = [Chunked(), Chunked()]

    def choose(samples, *args, choose=node_reader.choose_layout):
        if data.unwrap(samples) is sets[1]:
            raise UsageError("set.h5: not there")
        return choose(samples, *args)

    monkeypatch.setattr(node_reader, "choose_layout", choose)
    run_ranks(2, lambda link: fitted(over_threads(link), sets[link.rank], "auto"), 5)
    assert all(x.reads for x in sets)  # each its own rows


def test_ranks_that_read_otherwise_are_an_error_on_all():
    def body(world):
        with pytest.raises(UsageError, match="the plan of a training"):
            fitted(world, Chunked(), reader="node" if world.rank else "rank")

    run_ranks(2, lambda link: body(over_threads(link)), 5)


def test_samples_in_memory_need_no_reader(caplog):
    run_ranks(2, lambda link: fitted(over_threads(link), Dataset(X, Y)), 20)
    messages = [x.message for x in caplog.records if "lie in memory" in x.message]
    assert messages == ["[data] reader = 'node' is not used: the training samples lie in memory"]


@pytest.mark.parametrize(("reader", "is_used"), [("rank", False), ("auto", False), ("node", True)])
def test_a_limit_without_effect_is_announced_once(caplog, reader, is_used):
    body = lambda link: fitted(  # noqa: E731
        over_threads(link), Chunked(None), reader, read_ahead_bytes=9000
    )
    run_ranks(2, body, 20)
    assert caplog.text.count("read_ahead_bytes is not used: each rank") == (not is_used)


@pytest.mark.parametrize("name", ["order", "stream"])
def test_samples_with_an_order_or_a_stream_take_no_options_of_reading(name):
    train = Chunked()
    setattr(train, name, lambda: None)
    with pytest.raises(UsageError, match=f"seen Chunked, which has .* '{name}'"):
        ReadSamples(train, ReadOptions())


@pytest.mark.parametrize("shuffle", ["samples", "chunks"])
@pytest.mark.parametrize("ranks_and_readers", [(2, "node", 3, "node"), (3, "rank", 1, "node")])
def test_a_run_goes_on_in_mid_epoch_on_other_ranks(ranks_and_readers, shuffle, tmp_path):
    first_ranks, first_reader, ranks, reader = ranks_and_readers

    def train(size, reader, out, **keys):
        keys |= {"engine": "blocks", "out": out, "read_ahead_bytes": 6000}
        body = lambda link: fitted(over_threads(link), Chunked(), reader, shuffle, **keys)  # noqa: E731
        return set(run_ranks(size, body, 20))

    whole = train(1, "rank", tmp_path / "whole")
    train(first_ranks, first_reader, tmp_path / "parts", steps=8)  # of epochs of 6 steps
    assert train(ranks, reader, tmp_path / "parts", resume=True) == whole
    shuffle = {"samples": "chunks", "chunks": "samples"}[shuffle]
    with pytest.raises(UsageError, match=r"shuffle: expected '.*, with which this run began, seen"):
        train(ranks, reader, tmp_path / "parts", resume=True)


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("part", [0.3, 0.6, 0.9])
def test_a_lost_rank_leaves_another_reader(victim, part):
    """Also a lost reader: sums are ordered, so that any ranks end with the same bytes."""
    keys = {
        "engine": "blocks", "shuffle": "chunks", "read_ahead_bytes": 2500,
        "elastic": ElasticOptions(), "checkpoints": CheckpointOptions(every_steps=5),
    }  # fmt: skip
    whole = fitted_alone("rank", "chunks", "blocks")
    calls: list[tuple[int, int]] = []

    def body(link):
        world, job = over_threads(link), link.hub.job
        begin = job.calls[link.rank]
        result = fitted(world, Chunked(), **keys)
        calls.append((begin, job.calls[link.rank]))
        return result

    run_ranks(3, body, 20, kills={victim: 10**9})
    begin, end = max(x for x, _ in calls), min(x for _, x in calls)
    results = run_ranks(3, body, 20, kills={victim: round(begin + part * (end - begin))})
    assert [x for i, x in enumerate(results) if i != victim] == [whole] * 2


def test_windows_of_chunks_are_used_up_in_order():
    sampler = Sampler.of(ReadSamples(Chunked(2), ReadOptions(shuffle="chunks")), BATCH, 3)
    order = np.concatenate([sampler.batch_indexes(step) for step in range(sampler.steps_per_epoch)])
    assert sorted(order) == list(range(N))
    length = 2 * WINDOW_CHUNKS
    windows = [{i // 2 for i in order[start : start + length]} for start in range(0, N, length)]
    assert max(map(len, windows)) <= WINDOW_CHUNKS + 1  # the last chunk of 103 samples is short
    assert not np.array_equal(order, data.order(3, 0, N))
