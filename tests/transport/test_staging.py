"""Arrays of a GPU on the wire, with a stand-in for CuPy that computes only in waits.

A copy or a message that comes too early finds what was there before, and the test fails.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import fakes
import numpy as np
import pytest
from fakes.races import RaceError
from ranks import on_ranks, run_on

from hpctrain.core.errors import TransportError, UsageError
from hpctrain.transport.device import transfers
from hpctrain.transport.device.staging import (
    MAX_BUFFERS,
    StagedReceive,
    StagedSend,
    Staging,
    cut_segments,
    segment_bytes,
)
from hpctrain.transport.gpu_probe import child

KIB, MIB = 1 << 10, 1 << 20
LENGTHS = (0, 1, 5, 300 * KIB - 3, MIB + 7)  # bytes; the last two are staged in 2 and 5 segments


def values(rank: int, n: int) -> np.ndarray:
    return ((np.arange(n) * 7 + rank * 13) % 251).astype(np.uint8)


def computed(rank: int, n: int):
    """Return `values` on the device, as the result of work that waits in the stream."""
    import cupy

    x = cupy.asarray(values(rank, n))
    x += 1
    x -= 1
    return x


def empty(n: int):
    import cupy

    return cupy.empty(n, np.uint8)


def use(world, path: str) -> None:
    world.link.endpoint.traffic.set_paths([path] * world.size)


@pytest.mark.parametrize(
    "n", [0, 1, 256 * KIB, 256 * KIB + 1, MIB, 64 * MIB, 100 * MIB, 2**31 + 16]
)
def test_segments_cover_a_message(n):
    cuts = list(cut_segments(n))
    assert cuts[0].start == 0 and sum(s.nbytes for s in cuts) == n
    assert all(a.start + a.nbytes == b.start for a, b in pairwise(cuts))
    step = segment_bytes(n)
    assert {s.nbytes for s in cuts[:-1]} <= {step} and 0 <= cuts[-1].nbytes <= step
    assert 256 * KIB <= step <= 4 * MIB and step & (step - 1) == 0


@on_ranks(1, 2, 3, 5)
@pytest.mark.parametrize("path", ["", "staged", "cuda-aware"])
def test_round_the_ring(ranks, lazy_gpu, path):
    """Every length, by every call, behind and before work of the current stream."""

    def body(world):
        link, size = world.link, world.size
        if path:
            use(world, path)
        remaining, right = (link.rank - 1) % size, (link.rank + 1) % size
        for n in LENGTHS:
            x, inbox = computed(world.rank, n), empty(n)
            link.sendrecv(x, right, inbox, remaining)
            total = inbox + x  # uint8: modulo 256
            x.fill(0)  # nobody reads it any more
            expected = values(remaining, n) + values(world.rank, n)
            np.testing.assert_array_equal(total.get(), expected)
            np.testing.assert_array_equal(inbox.get(), values(remaining, n))
        by_pointer = path == "cuda-aware" and world.transport == "mpi"
        assert (link.endpoint.traffic.host_bytes == 0) == by_pointer
        assert link.endpoint.traffic.host_bytes in (0, 2 * sum(LENGTHS))
        assert link.endpoint.traffic.bytes_sent >= sum(LENGTHS)

    ranks(body)


@on_ranks(2)
@pytest.mark.parametrize("path", ["staged", "cuda-aware"])
@pytest.mark.parametrize("on_gpu", [0, 1])
def test_one_side_in_host_memory(ranks, lazy_gpu, path, on_gpu):
    """As with a server on the CPU: both sides cut a message alike."""

    def body(world):
        use(world, path)
        other, gpu = 1 - world.rank, world.rank == on_gpu
        for n in LENGTHS:
            x = computed(world.rank, n) if gpu else values(world.rank, n)
            inbox = empty(n) if gpu else np.empty(n, np.uint8)
            world.link.sendrecv(x, other, inbox, other)
            np.testing.assert_array_equal(inbox.get() if gpu else inbox, values(other, n))

    ranks(body)


BY_SIZE = ((0, "staged"), (100, "pointer"), (300 * KIB, "staged"))
#: bytes of a message -> whether it is staged
WAYS = {5: True, 99: True, 100: False, 300 * KIB - 3: False, 300 * KIB: True, MIB + 7: True}


@on_ranks(2, mpi=(2,))
@pytest.mark.parametrize("on_gpus", [(0, 1), (0,), (1,)])
def test_the_way_depends_on_the_length(ranks, lazy_gpu, on_gpus):
    """Both sides know it, wherever their arrays lie, and so do links that are split off."""

    def body(world):
        world.link.endpoint.traffic.set_paths(["cuda-aware"] * 2, [BY_SIZE] * 2)
        link, other = world.link.split(0, -world.rank), 1 - world.rank
        on_gpu = world.rank in on_gpus
        to = 1 - link.rank
        for n, staged in WAYS.items():
            x = computed(world.rank, n) if on_gpu else values(world.rank, n)
            inbox = empty(n) if on_gpu else np.empty(n, np.uint8)
            before = link.endpoint.traffic.host_bytes
            link.sendrecv(x, to, inbox, to)
            actual = inbox.get() if on_gpu else inbox
            np.testing.assert_array_equal(actual, values(other, n))
            copied = 2 * n if on_gpu and (staged or world.transport == "local") else 0
            assert link.endpoint.traffic.host_bytes - before == copied, n

    ranks(body)


@on_ranks(2, mpi=(2,))
def test_a_trial_times_both_ways(ranks, lazy_gpu):
    """By an MPI that takes pointers every other message is staged, and counted."""
    import cupy

    sizes = (1000, 300 * KIB)

    def body(world):
        rows = child.time_messages(world.link, cupy, ["staged", "cuda-aware"], sizes)
        assert [n for n, *_ in rows] == list(sizes) and all(min(row) > 0 for row in rows)
        staged = 2 * sum(sizes) * child.ROUNDS  # one there, one back
        assert world.link.endpoint.traffic.host_bytes == staged * (
            1 if world.transport == "mpi" else 2
        )

    ranks(body)


@on_ranks(2, 3)
@pytest.mark.parametrize("path", ["staged", "cuda-aware"])
def test_messages_keep_their_order(ranks, lazy_gpu, path):
    """A header in host memory does not overtake the array before it, and no wait is needed between.

    All is sent before anything is awaited, on two links whose waits move each other on.
    """

    def body(world):
        use(world, path)
        first, second = world.link, world.link.split(0, world.rank)
        remaining, right = (world.rank - 1) % world.size, (world.rank + 1) % world.size
        sends, n = [], LENGTHS[-1]
        for i in range(3):
            sends.append(first.isend(computed(world.rank + i, n), right))
            sends.append(first.isend(np.array([i, world.rank]), right))
            sends.append(second.isend(computed(world.rank + i, n), right))
        inboxes = [[empty(n), np.zeros(2, int), empty(n)] for _ in range(3)]
        receives = []
        for big, header, other in inboxes:
            receives += [second.irecv(other, remaining), first.irecv(big, remaining)]
            receives.append(first.irecv(header, remaining))
        for request in (*reversed(receives), *reversed(sends)):
            request.wait()
        for i, (big, header, other) in enumerate(inboxes):
            assert header.tolist() == [i, remaining]
            np.testing.assert_array_equal(big.get(), values(remaining + i, n))
            np.testing.assert_array_equal(other.get(), values(remaining + i, n))

    ranks(body)


@on_ranks(3)
def test_wait_any_of_arrays_of_a_gpu(ranks, lazy_gpu):
    def body(world):
        link, n = world.link, LENGTHS[-1]
        if world.rank:
            link.isend(computed(world.rank, n), 0).wait()
            return
        boxes = {source: empty(n) for source in (1, 2)}
        waiting = {source: link.irecv(box, source) for source, box in boxes.items()}
        while waiting:
            source = list(waiting)[link.wait_any(list(waiting.values()))]
            np.testing.assert_array_equal(boxes[source].get(), values(source, n))
            del waiting[source]

    ranks(body)


@on_ranks(2)
def test_a_barrier_lets_what_is_under_way_go_on(ranks, lazy_gpu):
    """Rank 0 goes into the barrier before its array has left; rank 1 wants it first."""

    def body(world):
        use(world, "staged")
        link, n = world.link, LENGTHS[-1]
        if world.rank == 0:
            send = link.isend(computed(0, n), 1)
            if world.transport == "local":
                send.wait()  # the barrier of threads is none of the wire's
            link.barrier()
            send.wait()
        else:
            inbox = empty(n)
            link.irecv(inbox, 0).wait()
            np.testing.assert_array_equal(inbox.get(), values(0, n))
            link.barrier()

    ranks(body)


@on_ranks(2)
@pytest.mark.parametrize("path", ["staged", "cuda-aware"])
def test_another_size_than_expected_is_an_error(ranks, lazy_gpu, path):
    def body(world):
        use(world, path)
        if world.rank == 0:
            sent = world.link.isend(computed(0, 3), 1)
            if world.transport == "mpi":
                sent.wait()
            for _ in range(9):  # among threads it is never done: the other side refuses it
                transfers.advance_thread_transfers()
            return
        with pytest.raises(TransportError, match="expected 4 bytes"):
            world.link.irecv(empty(4), 0).wait()

    ranks(body)


def test_what_the_link_refuses():
    import fakes

    def body(world):
        with fakes.installed(devices=2):
            import cupy

            with cupy.cuda.Device(1):
                x = cupy.zeros(8, np.float32)
            with pytest.raises(UsageError, match="this rank's GPU 0, seen one on GPU 1"):
                world.link.isend(x, 0)
            with pytest.raises(UsageError, match="expected a contiguous array"):
                world.link.irecv(cupy.zeros(8)[::2], 0)
            with pytest.raises(UsageError, match="of NumPy or CuPy, seen list"):
                world.link.isend([1, 2], 0)

    run_on("threads", 1, body)


def test_a_thread_gives_its_buffers_back_once_they_are_copied(lazy_gpu):
    """A receive has ended before its last copy has, and CuPy gives the buffer to others."""
    inboxes = [empty(LENGTHS[2]) for _ in range(2)]

    def body(world):
        if world.rank == 0:
            world.link.isend(computed(0, LENGTHS[2]), 1).wait()
        else:
            world.link.irecv(inboxes[1], 0).wait()

    run_on("threads", 2, body)
    lazy_gpu.drop_gone()
    assert not lazy_gpu.races.errors


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("forgotten", ["copy_to_host", "copy_to_device", "make_stream_wait"])
def test_a_forgotten_event_is_seen(monkeypatch, forgotten, lazy):
    """Without one of the three orderings a rank may read stale data, if not on each schedule."""
    complete = getattr(Staging, forgotten)

    def without(self, *args):
        if forgotten == "make_stream_wait":
            return None
        return complete(self, *args[:-1], self._cuda.Event())

    monkeypatch.setattr(Staging, forgotten, without)

    def body(world):
        import cupy

        n = LENGTHS[-1]
        with cupy.cuda.Stream(non_blocking=True):  # or ranks would run each other's work
            if world.rank == 0:
                world.link.isend(computed(0, n), 1).wait()
                return True
            inbox = empty(n)
            inbox.fill(1)  # must be over before it is filled from the wire
            world.link.irecv(inbox, 0).wait()
            return np.array_equal((inbox + 0).get(), values(0, n))

    with pytest.raises(RaceError), fakes.installed(lazy=lazy):
        run_on("threads", 2, body)


@dataclass
class ByHand:
    """A wire whose messages complete up to the number `through`."""

    log: list = field(default_factory=list)
    through: int = 0

    def post(self, slot: np.ndarray):
        number = sum(event == "wire" for event, _ in self.log)
        self.log.append(("wire", number))
        return Message(self, number)


@dataclass
class Message:
    wire: ByHand
    number: int

    def done(self) -> bool:
        return self.number < self.wire.through


def logged(monkeypatch, wire: ByHand) -> None:
    for name in ("copy_to_host", "copy_to_device"):
        complete = getattr(Staging, name)

        def noted(self, *args, name=name, complete=complete):
            number = sum(event == name for event, _ in wire.log)
            wire.log.append((name, number))
            return complete(self, *args)

        monkeypatch.setattr(Staging, name, noted)


@pytest.mark.parametrize("transfer", [StagedSend, StagedReceive])
def test_copies_and_wire_overlap(lazy_gpu, monkeypatch, transfer):
    """While segment k is on the wire, k + 1 is copied; never are more than BUFFERS between."""
    wire, n = ByHand(), 8 * MIB
    logged(monkeypatch, wire)
    moving = transfer(computed(0, n), wire.post)
    count = len(list(cut_segments(n)))
    for k in range(count):
        for _ in range(50):  # all that can be done before segment k is through
            moving.advance(True)
        counts = dict.fromkeys(["wire", "copy_to_host", "copy_to_device"], 0)
        for event, number in wire.log:
            counts[event] = number + 1
        ahead = min(count, k + MAX_BUFFERS)
        assert counts["wire"] == ahead  # k .. k + BUFFERS - 1 are with the wire
        if transfer is StagedSend:
            assert counts["copy_to_host"] == ahead
        else:
            assert counts["copy_to_device"] == k
        wire.through = k + 1
        assert not moving.done
    moving.advance(True)
    assert moving.done
    moving.finish()
    assert lazy_gpu.counts["pageable"] == 0
    assert lazy_gpu.counts["device sync"] == 0


def test_a_transfer_whose_turn_has_not_come_is_copied_only(lazy_gpu):
    wire = ByHand()
    sending = StagedSend(computed(0, MIB), wire.post)
    for _ in range(50):
        sending.advance(False)
    assert wire.log == [] and lazy_gpu.counts["D2H"] == MAX_BUFFERS
    for _ in range(50):
        sending.advance(True)
    assert len(wire.log) == MAX_BUFFERS


def test_slots_are_used_again(lazy_gpu):
    """After the first messages no pinned memory is asked for: that would stop the device."""

    def body(world):
        other = 1 - world.rank
        held = []
        for _ in range(4):
            x, inbox = computed(world.rank, 4 * MIB), empty(4 * MIB)
            world.link.sendrecv(x, other, inbox, other)
            inbox.get()
            held.append(len(lazy_gpu.pinned))
            world.link.barrier()
        return held

    for held in run_on("threads", 2, body):
        assert held[-1] == held[1] > 0
