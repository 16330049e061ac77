"""Norms over shards: the same bytes for one shard or several."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from ranks import run_on

from hpctrain import optim
from hpctrain.collectives import all_gather_bytes
from hpctrain.collectives.chunks import bounds
from hpctrain.gradients.arena import lay_out
from hpctrain.optim import norms
from hpctrain.optim.optimizer import BLOCK_ELEMENTS

#: Tensors within a block, over bounds of blocks, and over whole blocks; most leave a gap behind.
SHAPES = {
    "a": (3, 5),
    "b": (300, 300),
    "c": (9,),
    "d": (BLOCK_ELEMENTS + 77,),
    "e": (7, 40_001),
    "f": (),
}
STEPS = 3
METHODS = {
    "clipping": optim.sgd(0.1, 0.9, weight_decay=0.1, exempt_vectors=True, clip_norm=1.0),
    "adamw": optim.adamw(0.1, exempt_vectors=True, clip_norm=1.0),
    "lars": optim.lars(0.1, weight_decay=0.1, clip_norm=1.0),
    "lars, all": optim.lars(0.1, exempt_vectors=False),
    "lamb": optim.lamb(0.1, clip_norm=1.0),
    "lamb, all": optim.lamb(0.1, exempt_vectors=False),
}


@cache
def problem(dtype: str):
    """Return slots, start and gradients, with zero gaps."""
    slots, length = lay_out(SHAPES, np.dtype(dtype).itemsize)
    rows, rng = np.zeros((1 + STEPS, length), dtype), np.random.default_rng(0)
    for slot in slots:
        rows[:, slot.offset : slot.stop] = rng.standard_normal((1 + STEPS, slot.size))
    return slots, rows[0], rows[1:]


def trained(world, method: str, dtype: str) -> np.ndarray:
    """Return this rank's shard of the parameters after a few updates."""
    slots, w, grads = problem(dtype)
    cut = bounds(w.size, world.size, BLOCK_ELEMENTS)
    own = slice(cut[world.rank], cut[world.rank + 1])
    local = [replace(slot, offset=slot.offset - own.start) for slot in slots]
    w, optimizer = w[own].copy(), METHODS[method]
    state = optimizer.init(w)
    for g in grads:
        optimizer.update(g[own], state, w, local, total_over(world))
    return w


def total_over(world):
    """Return a `total` that hands the rows of all shards to everybody."""

    def total(rows):
        everyones = all_gather_bytes(world.link, rows.tobytes())
        return np.frombuffer(b"".join(everyones)).reshape(-1, rows.shape[1])

    return total


@pytest.mark.parametrize("size", [2, 3, 5, 9])  # 7 blocks: of nine shards some are empty
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("method", METHODS)
def test_shards_make_the_bytes_of_the_whole(method, dtype, size):
    (complete,) = run_on("threads", 1, lambda world: trained(world, method, dtype))
    shards = run_on("threads", size, lambda world: trained(world, method, dtype))
    assert len(complete) > 6 * BLOCK_ELEMENTS and not np.array_equal(complete, problem(dtype)[1])
    assert np.concatenate(shards).tobytes() == complete.tobytes()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_norms_are_those_of_the_tensors(dtype):
    slots, w, _ = problem(dtype)
    scratch = norms.make_scratch(w)
    rows = [[norms.sum_squares(w[at], scratch)] for _, at in norms.pieces(w.size, slots)]
    sums = norms.sum_by_slot(np.array(rows), slots)[:, 0]
    expected = [(w[s.offset : s.stop].astype("f8") ** 2).sum() for s in slots]
    np.testing.assert_allclose(sums, expected, rtol=1e-13)


def test_pieces_cover_each_tensor_and_no_gap():
    slots, w, _ = problem("float32")
    observed = np.zeros(w.size, int)
    for i, at in norms.pieces(w.size, slots):
        observed[at] += 1
        assert (
            at.start // BLOCK_ELEMENTS == (at.stop - 1) // BLOCK_ELEMENTS
            and slots[i].offset <= at.start
        )
    inside = np.zeros(w.size, int)
    for slot in slots:
        inside[slot.offset : slot.stop] = 1
    assert np.array_equal(observed, inside) and inside.sum() < w.size


def test_squares_of_float32_do_not_overflow():
    x = np.full(10, 1e30, "float32")
    assert norms.sum_squares(x, norms.make_scratch(x)) == pytest.approx(1e61)
