"""Both Links through one test body: order, sizes, splits, and errors if ranks disagree."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from ranks import on_ranks, run_on

from hpctrain.core.errors import HungError, TransportError
from hpctrain.transport.pace import Pace
from hpctrain.transport.threads.ranks import run_ranks
from hpctrain.watch import WatchRecord


def numbers(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


@pytest.mark.parametrize("patient", [False, True])
@on_ranks(1, 2, 3, 4, 5)
def test_messages_arrive_in_order_whatever_is_awaited_first(ranks, patient):
    def body(world):
        link, size = world.link, world.size
        link.endpoint.waits.pace = Pace() if patient else None
        right, remaining = (link.rank + 1) % size, (link.rank - 1) % size
        first, second = numbers(0), numbers(0)
        receives = [link.irecv(first, remaining), link.irecv(second, remaining)]
        sends = [link.isend(numbers(10 + link.rank), right), link.isend(numbers(99), right)]
        for request in [*reversed(receives), *sends]:
            request.wait()
        assert (first[0], second[0]) == (10 + remaining, 99)

    ranks(body)


@on_ranks(2, 3, 4, 5)
def test_wait_any_returns_each_request_once(ranks):
    def body(world):
        link = world.link
        if link.rank:
            link.isend(numbers(link.rank), 0).wait()
            return
        boxes = {source: numbers(0) for source in range(1, link.size)}
        waiting = {source: link.irecv(box, source) for source, box in boxes.items()}
        while waiting:
            source = list(waiting)[link.wait_any(list(waiting.values()))]
            assert boxes[source][0] == source
            del waiting[source]

    ranks(body)


@on_ranks(mpi=(2,))
def test_wait_any_is_recorded_as_a_wait_for_all_ranks_without_a_size(ranks):
    def body(world):
        link = world.link
        link.endpoint.waits.entry = (record := WatchRecord(world.rank, world.size)).entry("main")
        request, send = link.irecv(numbers(0), 1 - link.rank), link.isend(numbers(1), 1 - link.rank)
        assert link.wait_any([request]) == 0
        send.wait()
        (snapshot,) = record.node_snapshots(history=True)
        waits = [call for call in snapshot.history if call.operation == "wait_any"]
        assert [(call.peer, call.nbytes) for call in waits] == [(-1, 0)]
        assert all(call.end_s is not None for call in snapshot.history)

    ranks(body)


@on_ranks(mpi=(2,))
@pytest.mark.parametrize(("survives", "piece_bytes"), [(True, 64), (False, 8)])
def test_an_all_reduce_of_mpi_with_losses_or_in_pieces_is_a_recorded_wait(
    ranks, monkeypatch, survives, piece_bytes
):
    def body(world):
        calls, x = world.link.endpoint.waits, numbers(1, 2)
        calls.entry = (record := WatchRecord(world.rank, world.size)).entry("main")
        monkeypatch.setattr(calls, "max_piece_bytes", piece_bytes)
        monkeypatch.setattr(calls.family, "survives", survives)
        world.link.endpoint.native.bind_allreduce(x, np.add)()
        assert x.tolist() == [2, 4]
        (snapshot,) = record.node_snapshots(history=True)
        waits = [(call.operation, call.peer, call.nbytes) for call in snapshot.history]
        assert waits == [("MPI_Allreduce", -1, 16)] * (16 // min(piece_bytes, 16))
        assert not snapshot.waiting_calls

    ranks(body)


@on_ranks(1, 2, 3, 4, 5)
def test_split_orders_by_key(ranks):
    def body(world):
        link = world.link
        half = link.split(link.rank % 2, -link.rank)
        total = numbers(link.rank)
        half.endpoint.native.bind_allreduce(total, np.add)()
        members = range(link.rank % 2, link.size, 2)
        assert (half.size, total[0]) == (len(members), sum(members))
        assert half.rank == sorted(members, reverse=True).index(link.rank)
        half.barrier()

    ranks(body)


@on_ranks(2)
@pytest.mark.parametrize("patient", [False, True])
@pytest.mark.parametrize("sent", [3, 5])
def test_another_size_than_expected_is_an_error_that_names_both(ranks, sent, patient):
    def body(world):
        link, other = world.link, 1 - world.rank
        link.endpoint.waits.pace = Pace() if patient else None
        if link.rank == 0:
            request = link.isend(np.zeros(sent, np.uint8), other)
            if world.transport == "mpi":
                request.wait()
            return
        with pytest.raises(TransportError, match=r"rank 1.*rank 0.* expected 4 bytes"):
            link.irecv(np.zeros(4, np.uint8), 0).wait()

    ranks(body)


@on_ranks(mpi=(2,))
@pytest.mark.parametrize("patient", [False, True])
def test_long_messages_travel_in_pieces(ranks, patient):
    def body(world):
        link, other = world.link, 1 - world.rank
        link.endpoint.waits.pace = Pace() if patient else None
        link.endpoint.waits.max_piece_bytes = 1024
        x = np.arange(1000, dtype=np.float64) + link.rank
        # Each direction its own length: one side runs out of pieces before the other.
        inbox = np.zeros(1000 if link.rank else 700)
        link.sendrecv(x[: 700 if link.rank else 1000], other, inbox, other)
        np.testing.assert_array_equal(inbox, (np.arange(1000) + other)[: inbox.size])
        total = x.copy()
        link.endpoint.native.bind_allreduce(total, np.add)()
        np.testing.assert_array_equal(total, 2 * np.arange(1000) + 1)
        request = link.isend(x, other)
        link.irecv(inbox := np.zeros(1000), other).wait()
        request.wait()
        np.testing.assert_array_equal(inbox, np.arange(1000) + other)

    ranks(body)


def test_a_silent_thread_rank_is_an_error_within_the_limit():
    def body(link):
        if link.rank == 0:
            link.irecv(np.zeros(4, np.uint8), 1).wait()

    with pytest.raises(HungError, match=r"rank 0: irecv of 4 bytes from rank 1: nothing for 0\.2"):
        run_ranks(2, body, timeout_s=0.2)


def test_a_thread_rank_that_fails_ends_the_waits_of_the_others():
    def body(world):
        if world.rank == 1:
            raise ZeroDivisionError("planted")
        world.link.split(0, 0).barrier()

    with pytest.raises(ZeroDivisionError, match="planted"):
        run_on("threads", 3, body)


def test_wait_any_while_others_send():
    """Many senders and one receiver of the first message, with frequent thread switches."""
    before, count = sys.getswitchinterval(), 300
    sys.setswitchinterval(1e-6)

    def body(world):
        link = world.link
        if link.rank:
            for n in range(count):
                link.isend(numbers(n), 0).wait()
            return
        boxes = {source: numbers(0) for source in range(1, link.size)}
        waiting = {source: (link.irecv(box, source), 0) for source, box in boxes.items()}
        while waiting:
            source = list(waiting)[link.wait_any([request for request, _ in waiting.values()])]
            _, n = waiting.pop(source)
            assert boxes[source][0] == n
            if n + 1 < count:
                waiting[source] = link.irecv(boxes[source], source), n + 1

    try:
        run_on("threads", 6, body)
    finally:
        sys.setswitchinterval(before)
