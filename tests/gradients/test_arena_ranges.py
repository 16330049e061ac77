"""Arenas that hold ranges of a model: the bytes of one arena, on every cut of the model.

That engines and checkpoints keep to this: tests/engines/test_arena_ranges.py.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from itertools import combinations, pairwise

import numpy as np
import pytest
from ranks import run_on

from hpctrain import optim
from hpctrain.collectives import Group, all_gather_bytes
from hpctrain.core.errors import UsageError
from hpctrain.engines import Times
from hpctrain.engines.synchronous.update import ShardedUpdate
from hpctrain.gradients import arena as arenas
from hpctrain.gradients import buckets
from hpctrain.optim.norms import ordered_rows, pieces
from hpctrain.optim.optimizer import BLOCK_ELEMENTS as BLOCK
from hpctrain.watch.trace import Trace

#: Tensors within a block, up to and over bounds of blocks, of more than a block, and of nothing
SHAPES = {"a": (300,), "b": (BLOCK // 2, 2), "c": (7,), "d": (3, 9), "empty": (0,), "e": (200, 201),
          "f": (BLOCK - 40_000 - 1_000,), "g": (), "h": (BLOCK + 77,), "i": (33, 2)}  # fmt: skip
NAMES = tuple(SHAPES)
STEPS = 2
METHODS = {
    "sgd": optim.sgd(0.1, 0.9, weight_decay=0.1, exempt_vectors=True, clip_norm=1.0),
    "adamw": optim.adamw(0.1, exempt_vectors=True, clip_norm=1.0),
    "lars": optim.lars(0.1, weight_decay=0.1, clip_norm=1.0),
    "lamb": optim.lamb(0.1, clip_norm=1.0),
}
Cut = tuple[tuple[str, ...], ...]  # the slots of each arena


def parts_of(bounds: tuple[int, ...]) -> Cut:
    edges = (0, *bounds, len(NAMES))
    return tuple(NAMES[a:b] for a, b in pairwise(edges))


def vee(parts: Cut) -> Cut:
    """Return the slots of ranks that hold two parts each: the first and the last, and so on."""
    half = len(parts) // 2
    return tuple(parts[i] + parts[-1 - i] for i in range(half))


#: every cut into two to four stages, and into two and three with two ranges each
CUTS = [parts_of(c) for n in (1, 2, 3) for c in combinations(range(1, len(NAMES)), n)]
VEES = [vee(parts_of(c)) for n in (3, 5) for c in combinations(range(1, len(NAMES)), n)]


@cache
def planes(dtype: str) -> list[np.ndarray]:
    """Return the parameters, and the gradient of each step, of the whole model."""
    arena, rng = arenas.make_arena(SHAPES, dtype), np.random.default_rng(0)
    rows = [np.zeros_like(arena.param) for _ in range(1 + STEPS)]
    for x in rows:
        for view in arena.views(x).values():
            view[...] = rng.standard_normal(view.shape)
    return rows


def copy_model(arena: arenas.Arena, plane: np.ndarray, model: np.ndarray) -> None:
    for offset, part in arena.spans(0, plane.size):
        plane[part] = model[offset : offset + part.stop - part.start]


def copy_back(arena: arenas.Arena, plane: np.ndarray, model: np.ndarray, count: np.ndarray) -> None:
    for offset, part in arena.spans(0, plane.size):
        elements = slice(offset, offset + part.stop - part.start)
        model[elements] = plane[part]
        count[elements] += 1


def gather_by_slot(link, cut: Cut, rows: np.ndarray, join=ordered_rows) -> np.ndarray:
    parts = [np.frombuffer(x) for x in all_gather_bytes(link, rows.tobytes())]
    whole = arenas.make_arena(SHAPES, "float32").slots if join is ordered_rows else ()
    return join([x.reshape(-1, rows.shape[1]) for x in parts], cut, whole)


def stage(link, cut: Cut, dtype: str, join=ordered_rows) -> arenas.Arena:
    """Return the arena of this rank of `link`, with the parameters of the model."""
    arena = arenas.make_arena(SHAPES, dtype, own=cut[link.rank])
    copy_model(arena, arena.param, planes(dtype)[0])
    return replace(arena, gather_rows=partial(gather_by_slot, link, cut, join=join))


def train(arena: arenas.Arena, method: str, dtype: str) -> list[np.ndarray]:
    """Return parameters and state after a few updates."""
    state = METHODS[method].init(arena.param)
    for gradient in planes(dtype)[1:]:
        copy_model(arena, arena.grad, gradient)
        METHODS[method].update(arena.grad, state, arena.param, arena.layout, arena.gather_rows)
    return [arena.param, *(x for name, x in state.items() if name != "step")]


@cache
def by_one_arena(method: str, dtype: str) -> list[bytes]:
    arena = arenas.make_arena(SHAPES, dtype)
    arena.param[...] = planes(dtype)[0]
    return [x.tobytes() for x in train(arena, method, dtype)]


def by_stages(cut: Cut, method: str, dtype: str, join=ordered_rows) -> list[bytes]:
    """Return the planes of the model after updates by the arenas of `cut`."""

    def rank(world):
        arena = stage(world.link, cut, dtype, join)
        return arena, train(arena, method, dtype)

    whole = [np.zeros_like(planes(dtype)[0]) for _ in by_one_arena(method, dtype)]
    counts = [np.zeros(x.size, int) for x in whole]
    for arena, own in run_on("threads", len(cut), rank):
        for x, model, count in zip(own, whole, counts, strict=True):
            copy_back(arena, x, model, count)
    assert all((count == 1).all() for count in counts)
    return [x.tobytes() for x in whole]


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("method", METHODS)
def test_stages_make_the_bytes_of_one_arena(method, dtype):
    for cut in CUTS[:9] + CUTS[9::3] + VEES[::7]:
        assert by_stages(cut, method, dtype) == by_one_arena(method, dtype), cut


@pytest.mark.parametrize("cut", [CUTS[3], CUTS[30], VEES[20]])
@pytest.mark.parametrize("method", ["lars", "lamb"])
def test_rows_in_the_order_of_ranks_are_noticed(method, cut):
    cut = cut[::-1]  # the last stage on rank 0

    def in_rank_order(parts, names, slots):
        return np.concatenate(parts)

    assert by_stages(cut, method, "float32") == by_one_arena(method, "float32")
    assert by_stages(cut, method, "float32", in_rank_order) != by_one_arena(method, "float32")


def test_a_range_elsewhere_in_its_block_is_noticed(monkeypatch):
    monkeypatch.setattr(arenas, "BLOCK_ELEMENTS", 16)  # ranges without the gaps in front
    with pytest.raises(ValueError, match="rows of each rank"):
        by_stages(parts_of((2,)), "lars", "float32")


def test_wrong_counts_of_rows_are_refused():
    slots = arenas.make_arena(SHAPES, "float32").slots
    rows = np.zeros((sum(1 for _ in pieces(planes("float32")[0].size, slots)), 1))
    with pytest.raises(ValueError, match="rows of each rank"):
        ordered_rows([rows[:1], rows[1:]], parts_of((2,)), slots)


def test_ranges_are_congruent_and_slots_lie_in_them():
    slots = arenas.make_arena(SHAPES, "float32").slots
    offsets = {slot.name: slot.offset for slot in slots}
    for cut in CUTS + VEES:
        for own in cut:
            arena = arenas.make_arena(SHAPES, "float32", own=own)
            assert tuple(slot.name for slot in arena.slots) == tuple(n for n in NAMES if n in own)
            assert [slot.name for slot in arena.layout] == list(NAMES)
            assert all((s.offset - offsets[s.name]) % BLOCK == 0 for s in arena.layout)
            ends = [0, *(held.stop for held in arena.ranges)]
            for end, held in zip(ends, arena.ranges, strict=False):
                assert 0 <= held.start - end < BLOCK
                assert (held.start - held.offset) % BLOCK == 0
            assert arena.param.size == ends[-1]
            assert arena.has_first_slot == ("a" in own)
        assert sum(arenas.make_arena(SHAPES, "f4", own=own).has_first_slot for own in cut) == 1


def test_the_whole_model_is_one_range_without_a_gap():
    for own in (None, NAMES):
        arena = arenas.make_arena(SHAPES, "float32", own=own)
        assert arena.share is None and arena.layout == arena.slots == arena.model_slots
        assert arena.ranges == ((0, 0, arena.param.size),)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("cut", [parts_of((3,)), parts_of((2, 8)), VEES[40]])
def test_shards_of_a_stage_make_the_bytes_of_one_arena(cut, method, ranks):
    """Ranks in a grid: stages that are cut into shards, so that rows are gathered twice."""

    def rank(world):
        pipe = world.link.split(world.rank % ranks, world.rank)
        data = world.link.split(world.rank // ranks, world.rank)
        arena = stage(pipe, cut, "float32")
        shards = sharded_update(data, arena, METHODS[method])
        for gradient in planes("float32")[1:]:
            copy_model(arena, arena.grad, gradient)
            shards(arena.grad)
        return arena

    model = np.zeros_like(planes("float32")[0])
    for arena in run_on("threads", ranks * len(cut), rank):
        copy_back(arena, arena.param, model, np.zeros(model.size, int))
        gaps = np.ones(arena.param.size, bool)
        for held in arena.ranges:
            gaps[held.start : held.stop] = False
        assert not arena.param[gaps].any()
    assert model.tobytes() == by_one_arena(method, "float32")[0]


def sharded_update(link, arena, optimizer) -> ShardedUpdate:
    return ShardedUpdate(Group(link), arena, optimizer, None, partial(Times().wait, Trace()))


def test_hashes_of_stages_make_the_hash_of_one_arena():
    whole = arenas.make_arena(SHAPES, "float32")
    whole.param[...] = planes("float32")[0]
    expected = arenas.params_sha256(whole)
    for cut in CUTS[::5] + VEES[::9]:
        sha256_by_name = {}
        for own in cut:
            arena = arenas.make_arena(SHAPES, "float32", own=own)
            copy_model(arena, arena.param, planes("float32")[0])
            sha256_by_name |= arenas.slot_hashes(arena)
        assert arenas.combine_slot_hashes(arena, sha256_by_name) == expected
    arena.param[arena.slots[0].offset] += 1
    changed = sha256_by_name | arenas.slot_hashes(arena)
    assert arenas.combine_slot_hashes(arena, changed) != expected


@pytest.mark.parametrize("bucket_bytes", [1, 100_000, 10**9])
def test_buckets_cover_the_plane_of_a_stage(bucket_bytes):
    for cut in CUTS[::5] + VEES[::9]:
        for own in cut:
            arena = arenas.make_arena(SHAPES, "float32", own=own)
            if not arena.param.size:
                continue
            cut_up = buckets.cut_buckets(arena.slots, arena.param.size, 4, bucket_bytes)
            assert [cut_up[0].stop, cut_up[-1].start] == [arena.param.size, 0]
            assert all(a.start == b.stop for a, b in pairwise(cut_up))
            assert set().union(*(bucket.names for bucket in cut_up)) == set(own)


def test_buffers_and_unknown_names_are_refused():
    with pytest.raises(UsageError, match=r"a model without buffers.* seen 'mean'"):
        arenas.make_arena(SHAPES, "float32", {"mean": (3,)}, own=["a"])
    with pytest.raises(ValueError, match="seen 'z'"):
        arenas.make_arena(SHAPES, "float32", own=["a", "z"])
