"""Ordered sums: the bits of one tree, for any distribution of blocks and any algorithm."""

from __future__ import annotations

import numpy as np
import pytest
from cases import kept, length
from oracles.messages import MESSAGES, Call
from ranks import THREAD_RANKS, on_ranks, run_on

from hpctrain.collectives import all_gathers, ordered
from hpctrain.collectives.ordered import Subtotal, SumTree, make_in_place_add
from hpctrain.core.errors import UsageError
from hpctrain.transport.threads.ranks import run_ranks
from hpctrain.tuning.select import ALGORITHM_NAMES, find_all_gather
from hpctrain.world import over_threads

OWN = [name for name in ALGORITHM_NAMES if name not in ("null", "nccl")]
GATHERS = {name: find_all_gather(name) for name in OWN}
LENGTHS = ("0", "1", "P-1", "P", "P+1", "10007")
BLOCKS = ("P", "P+1", "8", "12", "13", "32")  # as many as ranks, and more than are needed


def counts(size: int) -> list[int]:
    """Return numbers of blocks that `size` ranks can hold."""
    return sorted({n for word in BLOCKS if (n := length(word, size)) >= size})


@kept
def drawn(block: int, n: int, dtype: str) -> np.ndarray:
    """Return numbers of very different sizes, so that any other order gives other bits."""
    draw = np.random.default_rng(block)
    return (draw.standard_normal(n) * 10.0 ** draw.integers(-6, 6, n)).astype(dtype)


def partial_of(block: int, n: int, dtype: str) -> np.ndarray:
    """Return what is summed of `block`, an array to work in."""
    return drawn(block, n, dtype).copy()


def by_hand(first: int, last: int, leaf) -> np.ndarray:
    """Return the sum of the blocks `first` .. `last` - 1 from the root of the tree down."""
    if last - first == 1:
        return leaf(first)
    half = 1 << (last - first - 1).bit_length() - 1  # the largest power of two below their number
    return by_hand(first, first + half, leaf) + by_hand(first + half, last, leaf)


@kept
def told(blocks: int, n: int, dtype: str) -> bytes:
    """Return the bits that every rank must find."""
    return by_hand(0, blocks, lambda block: drawn(block, n, dtype)).tobytes()


def summed(world, blocks: int, n: int, dtype: str, gather) -> bytes:
    group = world.main
    own = [
        partial_of(block, n, dtype) for block in SumTree(blocks, world.size).blocks_of(world.rank)
    ]
    return ordered.sum_blocks(group, own, blocks, gather).tobytes()


@on_ranks(*THREAD_RANKS)
@pytest.mark.parametrize("name", GATHERS)
def test_the_bits_of_the_tree(ranks, name):
    """For every number of ranks, of blocks and every length: so P and algorithm change no bit.

    What is gathered does not depend on the number of blocks: all of them meet `auto` only.
    """

    def body(world):
        for dtype in ("float32", "float64"):
            for blocks in counts(world.size) if name == "auto" else counts(world.size)[-2:]:
                for word in LENGTHS:
                    n = length(word, world.size)
                    result = summed(world, blocks, n, dtype, GATHERS[name])
                    assert result == told(blocks, n, dtype), (blocks, n)

    ranks(body)


@pytest.mark.sample(7)
@on_ranks(*THREAD_RANKS)
def test_a_long_vector_travels_in_segments(ranks, monkeypatch):
    monkeypatch.setattr(ordered, "SCRATCH_BYTES", 4096)

    def body(world):
        for blocks in counts(world.size):
            result = summed(world, blocks, 5000, "float64", all_gathers.gather_by_doubling)
            assert result == told(blocks, 5000, "float64")
            assert world.size == 1 or world.link.endpoint.traffic.messages_sent > world.size

    ranks(body)


@on_ranks(1, 2, 3, 4, 8)
@pytest.mark.parametrize("n", [1, 5, 1000, 200_003])
def test_neighbours_memory_is_read(ranks, n):
    """The same bits, and where each rank holds one subtotal not a byte is sent."""

    def body(world):
        group, size = world.main, world.size
        for blocks in counts(size):
            tree, x = SumTree(blocks, size), world.memory.zeros(n, np.float32)
            own = [partial_of(block, n, "float32") for block in tree.blocks_of(world.rank)]
            subtotals: list[Subtotal] = []
            for block, item in zip(tree.blocks_of(world.rank), own, strict=True):
                tree.append_subtotal(
                    subtotals, Subtotal(block, block + 1, item), make_in_place_add(np.add)
                )
            x[...] = subtotals[-1].x
            own = [item.x for item in subtotals[:-1]] + [x]
            assert size == 1 or group.node_buffers is not None  # made now: its links send a little
            before = group.bytes_sent
            ordered.reduce_scatter_in_memory(group, tree, own, x, np.add)
            all_gathers.gather_through_memory(group, x)
            assert x.tobytes() == told(blocks, n, "float32"), blocks
            if n >= 1000:
                one_each = max(map(len, tree.local_subtotals)) == 1
                assert (group.bytes_sent == before) == (one_each or size == 1)

    ranks(body)


@on_ranks(*THREAD_RANKS)
def test_bytes_and_messages(ranks):
    """As many as the closed form says, whatever the number of blocks; few where P is 2, 4, 8."""

    def body(world):
        link, size = world.link, world.size
        for blocks in counts(size):
            tree = SumTree(blocks, size)
            for n in (0, 1, size + 1, 300_007):
                x = np.zeros(n)
                own = [x.copy() for _ in tree.local_subtotals[world.rank]]
                before = link.endpoint.traffic.bytes_sent, link.endpoint.traffic.messages_sent
                ordered.reduce_scatter(world.main, tree, own, x, np.add)
                sent = (
                    link.endpoint.traffic.bytes_sent - before[0],
                    link.endpoint.traffic.messages_sent - before[1],
                )
                call = Call(n, x.itemsize, size, world.rank, blocks=blocks)
                told = MESSAGES["ordered-reduce-scatter"](call)
                assert sent == (sum(told) * x.itemsize, len(told)), (blocks, n)

    ranks(body)


@pytest.mark.parametrize("blocks", range(1, 40))
def test_subtotals_that_a_rank_holds(blocks):
    """One where all is a power of two; else no more than the docs say, and all blocks, once."""
    for size in range(1, blocks + 1):
        held = SumTree(blocks, size).local_subtotals
        assert [
            b for subset in held for item in subset for b in range(item.start, item.stop)
        ] == list(range(blocks))
        maximum = max(map(len, held))
        assert maximum <= 2 * np.log2(blocks / size) + 2
        if not blocks & (blocks - 1) and not size & (size - 1):
            assert maximum == 1


def in_the_order_of_ranks(self, subtotals: list[Subtotal], subtotal: Subtotal, add) -> None:
    """What a sum would be that each rank makes of its own blocks first."""
    if subtotals:
        remaining = subtotals.pop()
        subtotal = Subtotal(remaining.start, subtotal.stop, add(remaining.x, subtotal.x))
    subtotals.append(subtotal)


def test_a_planted_error_is_seen(monkeypatch):
    monkeypatch.setattr(SumTree, "append_subtotal", in_the_order_of_ranks)
    for size in (1, 2, 4):
        result = run_on("threads", size, lambda w: summed(w, 8, 1000, "float32", GATHERS["ring"]))
        assert all(item != told(8, 1000, "float32") for item in result)


def test_refused():
    with pytest.raises(UsageError, match=r"blocks is 3, but 4 ranks .* set blocks to 4 or more"):
        SumTree(3, 4)
    with pytest.raises(UsageError, match=r"whose chunks the algorithm cannot gather: .* seen null"):
        find_all_gather("null")
    with pytest.raises(UsageError, match="did you mean 'ring'"):
        find_all_gather("rign")


@on_ranks(2, 3, 4)
@pytest.mark.parametrize("name", OWN)
def test_gathered_bits_are_those_of_the_owner(ranks, name):
    """Also of numbers that an addition of zero would change."""

    def body(world):
        for dtype, kind in (("float16", "u2"), ("float32", "u4"), ("float64", "u8")):
            told = np.frombuffer(np.random.default_rng(0).bytes(808), kind).copy()
            told[::7] = 1 << 8 * told.itemsize - 1  # -0.0
            x, size = told.copy().view(dtype), world.size
            at = [x.size * r // size for r in range(size + 1)]
            own = slice(at[world.rank], at[world.rank + 1])
            local = x[own].copy()
            x.view(told.dtype)[...] = 12345
            x[own] = local
            GATHERS[name](world.main, x)
            assert x.tobytes() == told.tobytes(), dtype

    ranks(body)


def test_direct_is_for_one_node():
    def body(link):
        world = over_threads(link, ("a", "b"))
        with pytest.raises(UsageError, match="algorithm direct works inside one node, seen 2"):
            GATHERS["direct"](world.main, np.zeros(8))

    run_ranks(2, body)
