"""Copies of a state in the memory of ranks: survivors that hold each piece give all its bytes."""

from __future__ import annotations

import tracemalloc
from itertools import combinations

import numpy as np
import pytest
from ranks import on_ranks, run_on_gpus

from hpctrain.checkpoint import (
    MemoryCopies,
    MemoryReader,
    Piece,
    live_state,
    memory,
    memory_reader,
    newest_whole,
)
from hpctrain.checkpoint.memory_reader import Holding
from hpctrain.checkpoint.requests import ArrayFacts
from hpctrain.collectives.chunks import bounds
from hpctrain.core.errors import LostRankError, RecoveryError, UsageError
from hpctrain.transport.threads.ranks import run_ranks

SIZE = 300_007
ABOUT = {"step": 7, "weights": {"param": {}}}
TABLE_BYTES = 8_000  # of the messages of a rank beside the arrays


def arrays(step: int, size: int) -> dict[str, np.ndarray]:
    """Return a plane, counts, and arrays that single ranks own."""
    rng = np.random.default_rng(step)
    own = {f"worker.{rank}.x": rng.normal(size=100 + rank) for rank in range(size)}
    return {"param": rng.normal(size=SIZE).astype("f4"), "step": np.array([step]), **own}


def pieces_of(state: dict[str, np.ndarray], rank: int, size: int) -> list[Piece]:
    start, stop = bounds(SIZE, size)[rank:][:2]
    whole = [f"worker.{rank}.x", *(["step"] if rank == 0 else [])]
    return [
        Piece("param", start, SIZE, state["param"][start:stop]),
        *(Piece(name, 0, state[name].size, state[name]) for name in whole),
    ]


def write(copies: MemoryCopies, step: int, link, hosts=None, commit=True) -> None:
    own = pieces_of(arrays(step, link.size), link.rank, link.size)
    about = {**ABOUT, "step": step}
    copies.write(step, own, about, link, hosts or ["a"] * link.size)
    for piece in own:
        piece.array[...] = 0  # the training goes on
    if commit:
        copies.commit()


def fetch_all(reader: MemoryReader, link) -> dict[str, np.ndarray]:
    reader.request_whole(reader.sizes)
    reader.fetch(link)
    reader.finish()
    return reader.arrays


def assert_state(reader: MemoryReader | None, link, step: int, size: int) -> None:
    assert reader is not None and reader.step == step and reader.about["step"] == step
    expected, arrived = arrays(step, size), fetch_all(reader, link)
    assert arrived.keys() == expected.keys()
    for name, x in expected.items():
        assert arrived[name].dtype == x.dtype and np.array_equal(arrived[name], x), name


HOSTS = {"one host": "aaaa", "two hosts": "aabb", "in turn": "abab", "uneven": "abbb"}


@pytest.mark.sample(1)
@pytest.mark.parametrize("hosts", HOSTS.values(), ids=HOSTS)
@pytest.mark.parametrize("copies", [1, 2])
@on_ranks(4, mpi=(4,))
def test_any_survivors_that_hold_each_piece_give_the_state(ranks, hosts, copies):
    """Lost ranks are replaced by ranks without copies, or by none."""

    def body(world):
        link, own = world.link, MemoryCopies(copies)
        for step in (6, 7):
            write(own, step, link, hosts)
        holders = memory.partners(hosts, copies)
        for count in range(5):
            for lost in combinations(range(4), count):
                whole = all({r, *holders[r]} - {*lost} for r in range(4))
                reader = (MemoryCopies() if link.rank in lost else own).reader(link)
                if whole:
                    assert_state(reader, link, 7, 4)
                assert whole == (reader is not None)
                part = link.split(int(link.rank in lost), -link.rank)
                if whole and link.rank not in lost:
                    assert_state(own.reader(part), part, 7, 4)
                part.endpoint.free()

    ranks(body)


@pytest.mark.parametrize("copies", [1, 2, 3, 9])
@pytest.mark.parametrize("hosts", ["a", "aa", "ab", "aaabbb", "abcabc", "abbb", "abbcccdddd"])
def test_copies_are_on_other_hosts_as_long_as_there_are_any(hosts, copies):
    for rank, own in enumerate(memory.partners(hosts, copies)):
        assert rank not in own and len(own) == len({*own}) == min(copies, len(hosts) - 1)
        others = len(hosts) - hosts.count(hosts[rank])
        on_others = [hosts[r] for r in own if hosts[r] != hosts[rank]]
        assert len(on_others) == min(copies, others)
        assert len({*on_others}) == min(len(own), len({*hosts}) - 1)
    if len({hosts.count(host) for host in hosts}) == 1:
        loads = [r for own in memory.partners(hosts, copies) for r in own]
        assert len({loads.count(r) for r in range(len(hosts))}) == 1


@on_ranks(2, 4, mpi=(4,))
def test_no_more_bytes_travel_than_are_needed(ranks):
    def body(world):
        link, own = world.link, MemoryCopies()
        before = link.endpoint.traffic.bytes_sent
        write(own, 3, link)
        nbytes = sum(
            piece.array.nbytes for piece in pieces_of(arrays(3, link.size), link.rank, link.size)
        )
        assert nbytes <= link.endpoint.traffic.bytes_sent - before <= nbytes + TABLE_BYTES
        held = {"param": np.zeros(SIZE, "?")}
        for piece in own.committed.pieces:
            held.setdefault(piece.name, np.zeros(piece.size, "?"))
            held[piece.name][piece.offset :][: piece.array.size] = True
        reader = own.reader(link)
        before = link.endpoint.traffic.bytes_sent
        fetch_all(reader, link)
        lacking = sum(
            (reader.sizes[name] - held.get(name, np.zeros(0)).sum()) * x.itemsize
            for name, x in reader.arrays.items()
        )
        needed = sum(map(int, world.gather(str(int(lacking)))))
        sent = sum(map(int, world.gather(str(link.endpoint.traffic.bytes_sent - before))))
        assert needed <= sent <= needed + TABLE_BYTES * link.size

    ranks(body)


@on_ranks(4, 7, mpi=(4,))
def test_what_all_hold_is_sent_evenly_and_left_where_it_is(ranks, monkeypatch):
    """The last rank has just joined; the others request what they hold, in its own place."""
    monkeypatch.setattr(memory_reader, "SEGMENT_BYTES", 10_000)

    def body(world):
        link, x = world.link, arrays(5, 1)["param"]
        fresh = link.rank == link.size - 1
        out = np.zeros(SIZE, "f4") if fresh else x
        if not fresh:
            x.flags.writeable = False
        states = [] if fresh else [live_state(5, [Piece("param", 0, SIZE, x)], ABOUT)]
        reader = newest_whole(link, states)
        assert reader.step == 5 and reader.about == ABOUT
        reader.request("param", out)
        before = link.endpoint.traffic.bytes_sent
        reader.fetch(link)
        assert np.array_equal(out, arrays(5, 1)["param"])
        share = x.nbytes / (link.size - 1) if not fresh else 0
        assert abs(link.endpoint.traffic.bytes_sent - before - share) < 10_000 + 2_000

    ranks(body)


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@on_ranks(1, 3, mpi=(4,))
def test_turns_are_added_and_calls_wait_for_the_end(ranks, dtype):
    def body(world):
        link, calls = world.link, []
        x = np.arange(10.0)
        own = [Piece("x", 0, 10, x)] if link.rank == 0 else []
        reader = newest_whole(link, [live_state(1, own, {})])
        out = np.full(4, 9, dtype)
        for turn, offset in enumerate((1, 3, 6)):
            reader.request("x", out, offset, turn)
        reader.on_arrival(lambda: calls.append(out.tolist()))
        reader.fetch(link)
        assert calls == []
        reader.finish()
        assert calls == [[10, 13, 16, 19]]
        with pytest.raises(UsageError, match="'x' has 10 elements; expected 4 from 7 on"):
            reader.request("x", out, 7)

    ranks(body)


@on_ranks(3, mpi=(4,))
def test_a_rank_sends_less_of_what_others_hold_if_it_alone_holds_more(ranks):
    """Ranks 0 and 1 hold array a, rank 0 alone holds b; the last rank requests both."""

    def body(world):
        link, x = world.link, np.arange(40_000.0)
        own = [Piece(name, 0, x.size, x) for name in {0: "ab", 1: "a"}.get(link.rank, "")]
        reader = newest_whole(link, [live_state(1, own, {})])
        if link.rank == link.size - 1:
            reader.request_whole("ab")
        before = link.endpoint.traffic.bytes_sent
        reader.fetch(link)
        sent = link.endpoint.traffic.bytes_sent - before
        assert abs(sent - x.nbytes * (link.rank < 2)) < 1_000

    ranks(body)


def test_a_state_with_a_gap_is_not_whole():
    def rank(link, last):
        x = np.arange(10.0)
        start, stop = ((0, 5), (last, 10))[link.rank]
        reader = newest_whole(link, [live_state(1, [Piece("x", start, 10, x[start:stop])], {})])
        assert (reader is not None) == (last == 5)

    for last in (5, 6):
        run_ranks(2, lambda link, last=last: rank(link, last))


def test_a_run_that_went_back_writes_the_newest_state():
    def rank(link):
        own = MemoryCopies()
        for step in (5, 3):
            write(own, step, link)
            assert_state(own.reader(link), link, step, 3)

    run_ranks(3, rank)


@pytest.mark.parametrize("seed", range(20))
def test_any_ranges_from_any_holders(monkeypatch, seed):
    rng = np.random.default_rng(seed)
    monkeypatch.setattr(memory_reader, "SEGMENT_BYTES", int(rng.choice([1, 100, 1 << 22])))
    size, length = int(rng.integers(1, 7)), int(rng.integers(1, 300))
    x = rng.integers(0, 1 << 30, length)
    spans = [np.sort(rng.integers(0, length + 1, (rng.integers(0, 5), 2))) for _ in range(size)]
    spans[rng.integers(size)] = np.vstack([[[0, length // 2], [length // 2, length]]])
    requests = [np.sort(rng.integers(0, length + 1, (rng.integers(0, 4), 2))) for _ in range(size)]

    def rank(link):
        own = [Piece("x", int(a), length, x[a:b].copy()) for a, b in spans[link.rank]]
        reader = newest_whole(link, [live_state(1, own, {})] if own else [])
        outs = [np.zeros(b - a, rng.choice(["i8", "f8"])) for a, b in requests[link.rank]]
        for (a, _), out in zip(requests[link.rank], outs, strict=True):
            reader.request("x", out, int(a))
        reader.fetch(link)
        for (a, b), out in zip(requests[link.rank], outs, strict=True):
            assert np.array_equal(out, x[a:b])

    run_ranks(size, rank, timeout_s=10)


@on_ranks(1, 4, mpi=(4,))
def test_a_range_that_no_rank_holds_is_an_error_on_all(ranks):
    def body(world):
        link, out = world.link, np.zeros(10)
        holdings = {"x": [Holding(link.size - 1, 0, 6), Holding(0, 8, 10)]}
        own = [Piece("x", 0, 10, np.ones(6))] if link.rank == link.size - 1 else []
        own += [Piece("x", 8, 10, np.ones(2))] if link.rank == 0 else []
        for first, count in ((0, 10), (7, 1)):
            reader = MemoryReader(1, {}, {"x": ArrayFacts(10, "float64")}, holdings, own)
            if link.rank == 0:
                reader.request("x", out[:count], first)
            lost = (6, 7) if first == 0 else (7, 7)
            text = "no rank holds elements {} to {} of 'x', which rank 0 requests".format(*lost)
            with pytest.raises(RecoveryError, match=text):
                reader.fetch(link)
        link.barrier()

    ranks(body)


@on_ranks(4, mpi=(4,))
def test_the_newest_state_that_is_whole_counts(ranks):
    """Rank 3 was lost before all had committed: rank 0 has, the others have not."""

    def body(world):
        link, own = world.link, MemoryCopies()
        assert own.reader(link) is None and own.committed is None
        write(own, 1, link)
        write(own, 9, link, commit=link.rank == 0)
        live = link.split(int(link.rank == 3), link.rank)
        if link.rank != 3:
            assert own.committed.step == (9 if link.rank == 0 else 1)
            assert_state(own.reader(live), live, 1, 4)
            write(own, 2, live)  # an older step, yet the newer state
            assert_state(own.reader(live), live, 2, 3)
        live.endpoint.free()

    ranks(body)


class BrokenLink:
    """A link whose transfers raise LostRankError from the `count`th on."""

    def __init__(self, link, count: int) -> None:
        self._link, self._left = link, count

    def __getattr__(self, name):
        return getattr(self._link, name)

    def irecv(self, x, source):
        return self._count(self._link.irecv, x, source)

    def isend(self, x, dest):
        return self._count(self._link.isend, x, dest)

    def sendrecv(self, x, dest, inbox, source):
        return self._count(self._link.sendrecv, x, dest, inbox, source)

    def _count(self, call, *arguments):
        self._left -= 1
        if self._left < 0:
            raise LostRankError("rank 3 was lost")
        return call(*arguments)


@pytest.mark.sample(4)
@pytest.mark.parametrize("count", range(8))
def test_an_interrupted_write_leaves_the_committed_version(count):
    """Rank 3 dies in a write, the others in the transfer `count`; they write again, without it."""
    own = [MemoryCopies() for _ in range(4)]
    run_ranks(4, lambda link: write(own[link.rank], 1, link))
    run_ranks(4, lambda link: write(own[link.rank], 2, link))
    completed = []

    def interrupted(link):
        try:
            write(own[link.rank], 3, BrokenLink(link, count), commit=False)
            completed.append(link.rank)
        except LostRankError:
            pass

    run_ranks(4, interrupted)
    buffers = [copies._spare_buffer for copies in own] if count in (4, 5) else []
    assert not any(buffer.size for buffer in buffers)  # late messages may change the old ones
    assert len(completed) == (0 if count < 6 else 4)

    def recovered(link):
        copies = own[link.rank]
        assert_state(copies.reader(link), link, 2, 4)
        with pytest.raises(UsageError, match="copies that were not written"):
            MemoryCopies().commit()
        write(copies, 4, link)
        assert_state(copies.reader(link), link, 4, 3)

    run_ranks(3, recovered)


def test_buffers_are_reused():
    own, addresses = [MemoryCopies() for _ in range(3)], [[] for _ in range(3)]

    def rank(link):
        state = arrays(1, link.size)
        pieces = pieces_of(state, link.rank, link.size)
        for step in range(8):
            if step == 3 and link.rank == 0:
                tracemalloc.start()
            link.barrier()
            own[link.rank].write(step, pieces, ABOUT, link, "abc")
            own[link.rank].commit()
            committed = own[link.rank].committed
            addresses[link.rank].append([p.array.ctypes.data for p in committed.pieces])
        link.barrier()

    run_ranks(3, rank)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < SIZE  # bytes; the arrays have four times as many
    for rows in addresses:
        assert rows[0] != rows[1] and rows[2:] == rows[:2] * 3


def test_ranks_that_write_different_states_are_named():
    def rank(link, about):
        step = 2 if link.rank == 2 and not about else 1
        own = {"about": link.rank == 1 and about}
        with pytest.raises(UsageError, match=f"rank {1 if about else 2} writes copies of step"):
            MemoryCopies().write(step, [], own, link, "aaa")
        with pytest.raises(UsageError, match="expected the hosts of 3 ranks, seen 2"):
            MemoryCopies().write(1, [], {}, link, "aa")

    for about in (False, True):
        run_ranks(3, lambda link, about=about: rank(link, about))


def test_arrays_of_devices(gpu):
    """Copies lie in pinned memory; live arrays are sent from a device, and received on one."""
    import cupy

    def body(world):
        link, own = world.link, MemoryCopies()
        state = arrays(4, link.size)
        on_device = {name: cupy.asarray(x) for name, x in state.items()}
        pieces = pieces_of(on_device, link.rank, link.size)
        own.write(4, pieces, ABOUT, link, "aaa")
        own.commit()
        live = live_state(4, [Piece(n, 0, x.size, x) for n, x in on_device.items()], ABOUT)
        for states in (own._versions, [live] if link.rank == 1 else []):
            reader = newest_whole(link, states)
            outs = {
                n: (cupy if link.rank == 2 else np).zeros(x.size, x.dtype) for n, x in state.items()
            }
            for name, out in outs.items():
                reader.request(name, out)
            reader.fetch(link)
            for name, out in outs.items():
                host = out.get() if link.rank == 2 else out
                assert np.array_equal(host, state[name]), name
        return True

    assert run_on_gpus(3, body) == [True] * 3
