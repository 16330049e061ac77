"""Every algorithm on arrays of GPUs: the bytes of NumPy's arrays, none of them through the host.
where none need go there. The stand-in for CuPy works only when somebody waits for it.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import fakes
import numpy as np
import pytest
from cases import DTYPES, OPERATIONS, length, vector
from ranks import STAGED, on_gpus, on_ranks, run_on

from hpctrain.collectives import ALLREDUCE, broadcast, node_buffers, operation
from hpctrain.collectives.all_gathers import (
    gather_by_allreduce,
    gather_by_broadcasts,
    gather_by_doubling,
)
from hpctrain.collectives.direct import (
    agree_on_arrays,
    all_gather,
    bind_direct,
    direct,
    direct_shared,
    reduce_scatter,
)
from hpctrain.collectives.ordered import SumTree, sum_blocks
from hpctrain.collectives.ring import plain_ring
from hpctrain.collectives.rooted import all_to_all, gather, scatter
from hpctrain.core.errors import GpuMemoryError, TransportError, UsageError
from hpctrain.transport.paths import Verdict
from hpctrain.transport.shared_memory import cuda_ipc
from hpctrain.transport.threads.ranks import run_ranks
from hpctrain.tuning import select
from hpctrain.world import World, over_threads
from hpctrain.world.calls import calls as user_calls

EVERY = {
    "auto": select.auto,
    "plain-ring": plain_ring,
    **{k: f for k, f in ALLREDUCE.items() if k != "null"},
}
SHORT, LONG = ("0", "1", "P-1", "P", "P+1"), ("40003", "300007")
POINTERS = Verdict("cuda-aware", "cuda-aware", "cuda-aware", "")


@contextmanager
def machine(**options):
    """Yield a machine on which threads may stand for processes."""
    with fakes.installed(lazy=True, ipc_within=True, **options) as result:
        cuda_ipc._warn_of_refusal.cache_clear()
        yield result


def here(x: np.ndarray):
    """Return `x` on the GPU, by work that is still waiting in the stream."""
    import cupy

    y = cupy.empty(x.shape, x.dtype)
    y.set(x)
    return y


def kept(world: World, x: np.ndarray):
    """Return `x` in memory of the GPU that neighbours see."""
    y = world.memory.zeros_like(here(x))
    y.set(x)
    return y


@pytest.mark.sample(4)
@on_ranks(1, 2, 3, 4, 5)
@pytest.mark.parametrize("name", EVERY)
def test_the_bytes_of_numpy(ranks, name, crossed):
    _must_have_the_bytes_of_numpy(ranks, name, STAGED, crossed)


@on_ranks(mpi=(1, 2, 3, 4, 5))  # threads have no MPI that could be given pointers
@pytest.mark.parametrize("name", EVERY)
def test_the_bytes_of_numpy_by_pointer(ranks, name, crossed):
    _must_have_the_bytes_of_numpy(ranks, name, POINTERS, crossed)


def _must_have_the_bytes_of_numpy(ranks, name, verdict, crossed):
    """All lengths, dtypes and operations; arrays that no neighbour sees."""
    rows = crossed(SHORT, DTYPES, [*OPERATIONS], begin=ranks.size + [*EVERY].index(name))
    rows += [(word, "float32", "sum") for word in LONG]
    with machine():

        def body(plain):
            world = on_gpus(plain, verdict=verdict)
            for word, dtype, op in rows:
                if name == "native" and world.transport == "mpi" and "16" in dtype:
                    continue  # MPI knows no 16-bit floats
                host = vector(world.rank, length(word, world.size), dtype).copy()
                x, method = here(host), operation(op, host.dtype)
                EVERY[name](world.main, x, method)
                EVERY[name](world.main, host, method)
                assert x.get().tobytes() == host.tobytes(), (word, dtype, op)

        ranks(body)


@on_ranks(2, 3, 5)
def test_other_collectives(ranks):
    with machine():

        def body(plain):
            world = on_gpus(plain)
            group, size, n = world.main, world.size, 40_000 * world.size

            def same(function, rows=n):
                host = vector(world.rank, rows, "float32").copy()
                x = here(host)
                results = function(x), function(host)
                for a, b in zip((x, results[0]), (host, results[1]), strict=True):
                    if b is not None:
                        np.testing.assert_array_equal(a.get(), b)

            same(lambda x: broadcast(group, x, size - 1))
            same(lambda x: gather(group, x))
            same(lambda x: scatter(group, x))
            same(lambda x: gather_by_doubling(group, x))
            same(lambda x: gather_by_broadcasts(group, x))
            same(lambda x: gather_by_allreduce(plain_ring)(group, x))
            own = SumTree(7, size).blocks_of(world.rank)
            same(lambda x: sum_blocks(group, [x * (block + 1) for block in own], 7))

            def exchanged(x):
                out = x * 0
                all_to_all(group, x, out)
                return out

            same(exchanged)

        ranks(body)


@on_ranks(1, 3)
def test_as_a_user_calls_them(ranks):
    """Arrays of any shape; what a call returns lies on the GPU, too."""
    with machine():

        def body(plain):
            world = on_gpus(plain)
            host = np.arange(12 * world.size, dtype=np.float32).reshape(world.size, 3, 4)
            host *= world.rank + 1
            calls = {
                "mean": lambda x: user_calls.allreduce(x, "mean", world=world),
                "unchecked": lambda x: user_calls.allreduce(x, world=world, check=False),
                "native": lambda x: user_calls.allreduce(x, "max", "native", world),
                "bound": lambda x: user_calls.bind(x, "sum", "native", world=world)(),
                "reduce": lambda x: user_calls.reduce(x, root=world.size - 1, world=world),
                "broadcast": lambda x: user_calls.broadcast(x, world=world),
                "reduce_scatter": lambda x: user_calls.reduce_scatter(x, world=world),
                "all_gather": lambda x: user_calls.all_gather(x, world),
                "gather": lambda x: user_calls.gather(x, 0, world),
                "scatter": lambda x: user_calls.scatter(x, 0, world),
                "all_to_all": lambda x: user_calls.all_to_all(x, world),
            }
            for name, call in calls.items():
                x, y = here(host), host.copy()
                result, reported = call(x), call(y)
                for a, b in ((x, y), (result, reported)):
                    assert b is None or a.get().tobytes() == b.tobytes(), name

        ranks(body)


def test_arrays_of_both_kinds_are_refused():
    with machine():

        def body(plain):
            world = on_gpus(plain)
            x = np.ones(4) if world.rank else here(np.ones(4))
            with pytest.raises(
                UsageError, match=r"rank 0 has allreduce sum auto of float64 \(4,\) of a GPU"
            ):
                user_calls.allreduce(x, world=world)

        run_on("threads", 2, body)


def in_parts(group, x, op):
    reduce_scatter(group, x, op)
    all_gather(group, x)
    return x


def in_place(group, x, op):
    direct(group, x, op)
    return x


CALLS = {
    "direct": in_place,
    "shared": direct_shared,
    "bound": lambda group, x, op: bind_direct(group, x, op)(),
    "bound, shared": lambda group, x, op: bind_direct(group, x, op, shared=True)(),
    "auto": lambda group, x, op: (select.auto(group, x, op), x)[1],
    "reduce-scatter, all-gather": in_parts,
}


@pytest.mark.sample(1)
@on_ranks(1, 2, 3, 5)
@pytest.mark.parametrize("gpus", ["00000", "01010"], ids=["one-gpu", "two-gpus"])
@pytest.mark.parametrize("call", CALLS)
def test_straight_out_of_neighbours_memory(ranks, call, gpus, crossed):
    """The same bytes as NumPy's, by one kernel a call, and not one byte through the host."""
    begin = ranks.size + [*CALLS].index(call) + len(set(gpus))
    rows = crossed(SHORT, DTYPES, [*OPERATIONS], begin=begin)
    rows += [(word, "float32", op) for word in LONG for op in OPERATIONS]
    with machine(devices=2) as result:

        def body(plain):
            world = on_gpus(plain, gpus=gpus[: plain.size])
            group, memory = world.main, {}
            for word, dtype, op in rows:
                n = length(word, world.size)
                reported = vector(world.rank, n, dtype).copy()
                if (word, dtype) not in memory:
                    memory[word, dtype] = kept(world, reported)
                x = memory[word, dtype]
                group.link.barrier()  # nobody writes what others still read
                x.set(reported)
                method = operation(op, reported.dtype)
                before = result.counts["raw kernel"]
                total = CALLS[call](group, x, method)
                ALLREDUCE["direct"](group, reported, method)
                assert total.get().tobytes() == reported.tobytes(), (word, dtype, op)
                if world.transport == "mpi" and world.size > 1 and n > 100:
                    assert result.counts["raw kernel"] == before + 1
            assert group.host_bytes == 0
            assert group.bytes_sent < 2**20  # what ranks agreed on while they made arrays

        ranks(body)
        assert result.counts["implicit"] == 0


def check_halves(world, x, reported):
    """Reduce-scatter and all-gather `x` in uneven parts; compare with the host."""
    rank, op = world.rank, operation("sum", x.dtype)
    offsets = [0, *sorted(x.size * k // 7 for k in range(2, 1 + world.size)), x.size]
    x.set(reported)
    part = reduce_scatter(world.main, x, op, offsets)
    expected = reduce_scatter(world.main, reported.copy(), op, offsets)
    assert part.get().tobytes() == expected.tobytes()
    whole = np.zeros_like(reported)
    whole[offsets[rank] : offsets[rank + 1]] = expected
    x.set(whole)
    all_gather(world.main, x, offsets)
    all_gather(world.main, whole, offsets)
    assert x.get().tobytes() == whole.tobytes()


@on_ranks(4)
@pytest.mark.parametrize("elsewhere", ["one", "all"])
def test_arrays_that_no_neighbour_maps_are_copied_through_buffers(ranks, elsewhere):
    """In pieces of a buffer; no byte by way of the host."""
    buffer_bytes = 8 << 10
    with machine(), patch.object(node_buffers, "GPU_BUFFER_BYTES", buffer_bytes):

        def body(plain):
            world = on_gpus(plain)
            for n, dtype in ((5003, "float32"), (1, "int64"), (4096, "float16")):
                reported = vector(world.rank, n, dtype).copy()
                observed = kept(world, np.concatenate([reported, reported]))
                x = {0: here(reported), 1: observed[n:]}.get(world.rank, observed[:n])
                x = here(reported) if elsewhere == "all" else x
                for _ in range(2):
                    x.set(reported)
                    direct(world.main, x, operation("sum", x.dtype))
                    expected = reported.copy()
                    direct(world.main, expected, operation("sum", x.dtype))
                    assert x.get().tobytes() == expected.tobytes(), (n, dtype)
                check_halves(world, x, reported)
            assert world.main.host_bytes == 0 and world.main.bytes_sent < 2**20
            buffers = world.main.node_buffers
            assert buffers.gpu_buffers(np.dtype(np.uint8))[0].nbytes == buffer_bytes

        ranks(body)


def test_calls_in_several_streams_share_the_buffers():
    with machine():

        def body(plain):
            import cupy

            world = on_gpus(plain)
            arrays = [here(np.full(100, (world.rank + 1) * k, np.float32)) for k in (1, 10)]
            cupy.cuda.get_current_stream().synchronize()
            for x in arrays:
                with cupy.cuda.Stream(non_blocking=True):
                    direct(world.main, x, np.add)
            assert [set(x.get().tolist()) for x in arrays] == [{3.0}, {30.0}]

        run_on("threads", 2, body)


def test_a_rank_that_left_a_collective_is_noticed():
    """An error between two copies ends its call; its next call meets the others in this one."""
    with machine():

        def body(plain):
            world = on_gpus(plain)
            x = here(np.ones(100, np.float32))
            direct(world.main, x, np.add)
            if world.rank == 0:
                agree_on_arrays(world.main, world.main.node_buffers, x)
                assert not world.main.node_buffers.flags.agree(12345)
            else:
                with pytest.raises(TransportError, match="has left a collective"):
                    direct(world.main, x, np.add)

        run_on("threads", 2, body)


def test_without_room_for_buffers_arrays_go_through_the_host(caplog):
    with machine(memory_bytes=32 << 20):

        def body(plain):
            world = on_gpus(plain)
            x = here(np.full(5003, world.rank + 1, np.float32))
            direct(world.main, x, np.add)
            direct(world.main, x, np.add)
            assert (x.get() == 6).all() and world.main.host_bytes > 0

        with caplog.at_level(logging.WARNING):
            run_on("threads", 2, body)
    assert [r.getMessage().count("sent as messages") for r in caplog.records] == [1]


@on_ranks(3)
def test_lengths_that_differ_are_named(ranks):
    with machine():

        def body(plain):
            world = on_gpus(plain)
            x = kept(world, np.zeros(100, np.float32))
            with pytest.raises(UsageError, match=r"40 bytes of a GPU, but ranks 1, 2 have .* 80"):
                direct(world.main, x[: 10 if world.rank == 0 else 20], np.add)

        ranks(body)


@on_ranks(4, 5)
@pytest.mark.parametrize("verdict", [STAGED, POINTERS], ids=["staged", "cuda-aware"])
@pytest.mark.parametrize("observed", [True, False])
def test_hierarchical(ranks, verdict, observed):
    """Inside nodes straight out of memory, between them by messages, staged if need be."""
    with machine():

        def body(plain):
            world = on_gpus(plain, "aabbb"[: plain.size], verdict=verdict)
            for n in (5, 40_003, 300_007):
                reported = vector(world.rank, n, "float64").copy()
                x = kept(world, reported) if observed else here(reported)
                ALLREDUCE["hierarchical"](world.main, x, np.add)
                ALLREDUCE["hierarchical"](world.main, reported, np.add)
                assert x.get().tobytes() == reported.tobytes()
            by_pointer = verdict is POINTERS and world.transport == "mpi"
            if observed:
                assert world.main.node.endpoint.traffic.host_bytes == 0
            across = world.main.across.endpoint.traffic.host_bytes
            assert across == 0 if by_pointer or world.main.across.size < 2 else across > 0

        ranks(body)


STAGED_IF_LONG = replace(POINTERS, by_size={"across": ((0, "pointer"), (1 << 20, "staged"))})


@pytest.mark.parametrize(
    "verdict, segment_bytes",
    [(STAGED, 1 << 19), (STAGED_IF_LONG, 1 << 19), (POINTERS, 8 << 20)],
)
def test_segments_between_nodes_are_long_where_mpi_gets_pointers(verdict, segment_bytes):
    """Each costs the host two waits for its stream."""
    n = 2 * (16 << 20) // 8

    def body(plain):
        world, x = on_gpus(plain, nodes="ab", verdict=verdict), np.arange(n, dtype=np.int64)
        sent = []
        for group in (world.main, world.threads.group_for("wire")):
            before = group.link.endpoint.traffic.messages_sent
            ALLREDUCE["ring"](group, x, np.add)
            sent.append(group.link.endpoint.traffic.messages_sent - before)
        assert (x == 4 * np.arange(n)).all() and sent == 2 * [2 * (16 << 20) // segment_bytes]

    with machine():
        run_on("threads", 2, body)


@pytest.mark.parametrize("refused", [{"ipc": False}, {"peers": False, "devices": 2}])
def test_where_handles_are_refused_all_is_staged(refused, caplog):
    """Said once; the sums are right all the same."""
    with machine(**refused):

        def body(plain):
            import cupy

            with cupy.cuda.Device(plain.rank % 2 if "peers" in refused else 0):
                world = on_gpus(plain, gpus="010")
                reported = vector(world.rank, 5003, "float32").copy()
                for _ in range(2):
                    x, host = kept(world, reported), reported.copy()
                    assert world.memory.locate(x) is None
                    direct(world.main, x, np.add)
                    direct(world.main, host, np.add)
                    np.testing.assert_array_equal(x.get(), host)
                assert world.main.host_bytes > 0

        with caplog.at_level(logging.WARNING):
            run_on("threads", 3, body)
    assert [r.getMessage().count("CUDA IPC is refused") for r in caplog.records] == [1]


@on_ranks(3)
def test_memory_is_given_back_when_it_is_gone_everywhere(ranks):
    """Not before: a neighbour may still read it. Asking for the next array is the time to look."""
    with machine() as result:

        def body(plain):
            world, n = on_gpus(plain), 1 << 20
            shared = world.transport == "local"  # all ranks count in one machine
            first = kept(world, np.zeros(n, np.float32))
            full = result.used(0)
            if world.rank:
                del first
            second = kept(world, np.ones(n, np.float32))
            world.link.barrier()
            assert result.used(0) > full + 4 * n - 1
            first = None
            world.link.barrier()
            third = kept(world, np.ones(n, np.float32))
            direct(world.main, third, np.add)
            assert third.get()[0] == world.size and second.get()[0] == 1
            world.link.barrier()
            assert result.used(0) <= 2 * full + (shared * 64 << 10) and first is None

        ranks(body)


def test_out_of_memory_names_rank_and_bytes():
    with machine(memory_bytes=64 << 20):

        def body(plain):
            world = on_gpus(plain)
            if world.rank == 1:
                hold = here(np.zeros(32 << 20, np.uint8))
            world.link.barrier()
            with pytest.raises(
                GpuMemoryError, match=r"local rank 1: GPU 0 .* 35,651,584 bytes asked"
            ):
                world.memory.gpu.zeros(8 << 20, np.float32)
            return world.rank == 0 or hold.size

        run_on("threads", 2, body)


def _fail(pointer):
    raise fakes.CUDARuntimeError(719, "cudaErrorLaunchFailure: unspecified launch failure")


@pytest.mark.parametrize(
    "name, found",
    [
        ("_read_token", lambda pointer: b"another token..."),  # containers with alike numbers
        ("_read_token", _fail),
        ("_is_reachable", _fail),
    ],
)
def test_memory_behind_a_handle_that_is_not_the_neighbours_is_refused_by_all(name, found):
    with machine():

        def body(plain):
            world = on_gpus(plain)
            if world.rank == 1:
                setattr(world.memory.gpu, name, found)
            assert world.memory.locate(kept(world, np.zeros(10))) is None

        run_ranks(2, lambda link: body(over_threads(link)))
