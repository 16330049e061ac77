"""Optimizers on a device: the updates of the host, in one kernel."""

from __future__ import annotations

import numpy as np
import pytest

from hpctrain import optim
from hpctrain.gradients.arena import lay_out
from hpctrain.optim import norms
from hpctrain.optim.optimizer import BLOCK_ELEMENTS, blocks

SHAPES = {"a": (3, 5), "b": (300, 300), "c": (9,), "d": (2, BLOCK_ELEMENTS), "e": (5, 1)}
OPTIMIZERS = {
    "sgd": optim.sgd(0.1),
    "sgd, decay": optim.sgd(0.1, weight_decay=0.1),
    "momentum": optim.sgd(0.1, 0.9, weight_decay=0.1),
    "nesterov": optim.sgd(0.1, 0.9, nesterov=True, weight_decay=0.1, exempt_vectors=True),
    "clipped": optim.sgd(0.1, 0.9, clip_norm=0.5),
    "adamw": optim.adamw(lambda step: 0.1 / (1 + step)),
    "adamw, exempt": optim.adamw(0.1, exempt_vectors=True, clip_norm=0.5),
    "lars": optim.lars(0.1, weight_decay=0.01),
    "lars, all": optim.lars(0.1, weight_decay=0.01, exempt_vectors=False, clip_norm=0.5),
    "lamb": optim.lamb(0.1),
    "lamb, all": optim.lamb(0.1, exempt_vectors=False, clip_norm=0.5),
}
#: Their norms come to the host, which decides by them: one small copy each time.
NORMS = {"clipped": 1, "adamw, exempt": 1, "lars": 1, "lars, all": 2, "lamb": 1, "lamb, all": 2}


def updated(optimizer, dtype, like=np.asarray):
    """Return the parameters and the state after three updates, gaps included."""
    slots, length = lay_out(SHAPES, np.dtype(dtype).itemsize)
    draw, inside = np.random.default_rng(0).standard_normal, np.zeros(length, dtype)
    for slot in slots:
        inside[slot.offset : slot.stop] = 1
    w = like(draw(length).astype(dtype) * inside)
    state = optimizer.init(w)
    for _ in range(3):
        g = like(draw(length).astype(dtype) * inside)
        optimizer.update(g, state, w, slots, lambda rows: rows)
    return {"param": w, **state}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_as_on_the_host(gpu, name, dtype):
    import cupy

    on_host = updated(OPTIMIZERS[name], dtype)
    gpu.counts.clear()
    result = updated(OPTIMIZERS[name], dtype, cupy.asarray)
    assert gpu.counts["fused"] >= 3 and gpu.counts["implicit"] == 0
    assert gpu.counts["D2H"] == 3 * NORMS.get(name, 0)
    assert result.keys() == on_host.keys() and result["step"][0] == 3
    for key in result.keys() - {"step"}:
        # Without norms the same numbers are computed; with them their sums are added otherwise.
        close = {"rtol": 1e-5, "atol": 1e-6} if name in NORMS else {"rtol": 0, "atol": 0}
        np.testing.assert_allclose(result[key].get(), on_host[key], **close)


def test_sums_depend_on_their_pieces_alone(gpu):
    import cupy

    x = np.random.default_rng(0).standard_normal(3 * BLOCK_ELEMENTS + 100).astype("float32")
    own = np.array([(s.start, s.stop) for s in blocks(x.size)])
    device = cupy.asarray(x)
    complete = norms.sum_squares_by_piece([device], own)
    apart = [norms.sum_squares_by_piece([device[i:j]], np.array([(0, j - i)]))[0] for i, j in own]
    assert complete.dtype == np.float64 and (complete == apart).all()
    np.testing.assert_allclose(complete, norms.sum_squares_by_piece([x], own), rtol=1e-13)
    assert norms.sum_squares_by_piece([device], own[:0]).shape == (0, 1)


def test_one_kernel_takes_a_whole_arena(gpu):
    import cupy

    optimizer, x = optim.sgd(0.1, 0.9), cupy.ones(3 * BLOCK_ELEMENTS, "float32")
    state = optimizer.init(x)
    gpu.counts.clear()
    optimizer.update(x, state, x, (), lambda rows: rows)
    assert dict(gpu.counts) == {"fused": 1}
