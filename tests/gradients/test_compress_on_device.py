"""Compressed sums of arrays on a device: the bytes of the host, by our own kernels."""

from __future__ import annotations

import fakes
import ml_dtypes
import numpy as np
import on_host
import pytest
from ranks import run_on, run_on_gpus

from hpctrain.collectives import ALLREDUCE
from hpctrain.collectives.reductions import bfloat16
from hpctrain.core import xp
from hpctrain.gradients import arena as arenas
from hpctrain.gradients import compress
from hpctrain.gradients.buckets import cut_buckets
from hpctrain.gradients.compress.orthonormal import Orthonormalizer
from hpctrain.gradients.compress.top_k_cuda import LargestSelector
from hpctrain.gradients.reducer import Reducer, WireOptions
from hpctrain.optim.absent import ABSENT

SHAPES = {"conv": (3, 3, 4, 8), "bias": (8,), "small": (2, 2), "wide": (20, 31), "last": (5,)}
METHODS = {
    "bf16": {"compression": "bf16"},
    "fp16": {"compression": "fp16"},
    "top-k": {"compression": "top-k", "compression_ratio": 0.1},
    "powersgd": {"compression": "powersgd", "compression_rank": 2},
}
#: PowerSGD's products and reflections are made by others; and `direct` adds vectors by messages on
#: a device, where they lie in no memory that neighbours see.
ALIKE = {"top-k direct", "powersgd direct", "powersgd ring", "powersgd recursive-doubling"}


@pytest.fixture
def sources(monkeypatch):
    """Let the sources of all kernels run, by the host's compiler."""
    on_host.install(monkeypatch)


class Side:
    """One rank's arena and reducer, where the rank computes."""

    def __init__(self, world, method, dtype, algorithm):
        options = WireOptions(**METHODS[method], algorithm=algorithm)
        zeros = {} if world.gpu is None else {"zeros": xp.zeros}
        self.arena = arenas.make_arena(SHAPES, dtype, **zeros)
        grad = world.memory.zeros_like(self.arena.grad)
        self.arena = arenas.Arena(self.arena.slots, self.arena.param, grad)
        self.compressor = compress.build(
            options, ALLREDUCE[algorithm], self.arena, world.size, world.memory.zeros_like, True
        )
        buckets = cut_buckets(self.arena.slots, grad.size, grad.itemsize, 1600)
        self.group = world.threads.group_for("compressed")
        self.reducer = Reducer(grad, buckets, self.group, self.compressor, True)

    def sum(self, rank: int, step: int, spoil: float | None = None) -> np.ndarray:
        """Return the sums of made-up gradients, and what is owed.

        In step 1 no rank has a gradient of "wide", in step 2 rank 1 has none of "conv".
        """
        rng = np.random.default_rng([rank, step])
        for slot in self.arena.slots:
            g = rng.standard_normal(slot.shape) * 10.0 ** rng.integers(-3, 3)
            if spoil is not None and rank == 1 and slot.name == "conv":
                g.flat[3] = spoil
            if (slot.name, step) == ("wide", 1) or (slot.name, step, rank) == ("conv", 2, 1):
                g[...] = ABSENT
            xp.copy(self.arena.views(self.arena.grad)[slot.name], g.astype(self.arena.grad.dtype))
        for slot in reversed(self.arena.slots):
            self.reducer.mark_ready(slot.name)
        result = xp.to_host(self.reducer.wait()).copy()
        owed = [xp.to_host(x).copy() for x in self.compressor.local_state.values()]
        return np.concatenate([result, *owed])


def summed(world, method, dtype, algorithm, spoil=None):
    side = Side(world, method, dtype, algorithm)
    result = [side.sum(world.rank, step, spoil) for step in range(3)]
    moved = side.group.host_bytes
    side.reducer.close()
    return np.array(result), side.compressor.sums_are_finite(), moved


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("algorithm", ["ring", "recursive-doubling", "direct"])
@pytest.mark.parametrize("method", METHODS)
def test_sums_are_those_of_the_host(sources, method, algorithm, dtype):
    expected = run_on("threads", 3, lambda w: summed(w, method, dtype, algorithm))
    with fakes.installed(lazy=True, ipc_within=algorithm == "direct") as machine:
        result = run_on_gpus(3, lambda w: summed(w, method, dtype, algorithm))
    if algorithm == "direct" and method == "bf16":
        assert [host_bytes for _, _, host_bytes in result] == [0] * 3
    assert machine.counts["implicit"] == 0 and machine.counts["raw kernel"] > 0
    for (item, finite, _), (reported, _, _) in zip(result, expected, strict=True):
        assert finite and item.dtype == reported.dtype
        if f"{method} {algorithm}" in ALIKE:
            np.testing.assert_allclose(item, reported, rtol=0, atol=1e-5 * abs(reported).max())
        else:
            assert item.tobytes() == reported.tobytes()


@pytest.mark.sample(1)
@pytest.mark.parametrize("value", [np.nan, -np.inf])
@pytest.mark.parametrize("method", METHODS)
def test_all_ranks_see_what_is_not_finite_on_one(lazy_gpu, sources, method, value):
    result = run_on_gpus(3, lambda w: summed(w, method, "float32", "ring", value))
    assert [finite for _, finite, _ in result] == [False] * 3


EDGES = [0, 1, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0x7F7FFFFF,
         0x3F808000, 0x3F818000, 0x3F808001, 0x00008000]  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_bfloat16_rounds_to_nearest_ties_to_even(lazy_gpu, sources, dtype):
    """The bits are those of integers' arithmetic: half of the last place is added, ties to even."""
    import cupy

    bits = np.random.default_rng(0).integers(0, 1 << 32, 1000, np.uint32)
    bits = np.concatenate([bits, np.array(EDGES, np.uint32)])
    with np.errstate(invalid="ignore"):
        x = bits.view(np.float32).astype(dtype)
    expected = (bits + 0x7FFF + (bits >> 16 & 1) >> 16).astype(np.uint16)
    for make in (np.asarray, cupy.asarray):
        small, wide = (make(np.empty(x.size, d)) for d in (ml_dtypes.bfloat16, dtype))
        with np.errstate(invalid="ignore"):
            bfloat16.round_to_bfloat16(make(x), small)
        bfloat16.widen_bfloat16(small, wide)
        small, wide = map(xp.to_host, (small, wide))
        numbers = ~np.isnan(x)
        assert (small.view(np.uint16) == expected)[numbers].all()
        assert (np.isnan(wide) == ~numbers).all()
        assert (wide == (expected.astype(np.uint32) << 16).view(np.float32))[numbers].all()


def drawn(name: str, n: int, dtype: str) -> np.ndarray:
    x = np.random.default_rng(n).standard_normal(n).astype(dtype)
    spoilt = x.copy()
    spoilt[::7], spoilt[3::11] = np.nan, -np.inf
    tiny = x * np.finfo(dtype).smallest_subnormal * 1000
    short = np.round(x * 2)  # equal ones by the dozen
    return {"normal": x, "spoilt": spoilt, "tiny": tiny, "few": short, "none": x * 0}[name]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", ["normal", "spoilt", "tiny", "few", "none"])
def test_the_k_largest_are_taken_and_of_equal_ones_the_first(request, gpu, name, dtype, compiled):
    import cupy

    if compiled:
        request.getfixturevalue("sources")
    matrices, bucket = [(16, 300, 17), (320, 1, 1), (400, 5000, 4999), (5400, 70, 1)], 16
    plane, x = drawn(name, 6000, dtype), drawn("normal", 5984, dtype)
    if name == "none":
        x[...] = 0
    residual = cupy.asarray(plane)
    count = sum(k for _, _, k in matrices)
    location, values = cupy.zeros(count, np.uint32), cupy.zeros(count, dtype)
    owed = plane.copy()
    LargestSelector(residual, bucket, matrices)(cupy.asarray(x), location, values)
    first = 0
    for start, size, k in matrices:
        own = owed[start : start + size]
        own += x[start - bucket : start - bucket + size]
        bits = abs(own).view(f"u{own.itemsize}")
        largest = np.sort(np.argsort(~bits, kind="stable")[:k])
        chosen = slice(first, first + k)
        order = np.argsort(location.get()[chosen])
        assert (location.get()[chosen][order] == largest + start - bucket).all()
        np.testing.assert_array_equal(values.get()[chosen][order], own[largest])
        own[largest], first = 0, first + k
    np.testing.assert_array_equal(residual.get(), owed)


MATRICES = {
    "random": lambda rng, n, r: rng.standard_normal((n, r)),
    "of little rank": lambda rng, n, r: rng.standard_normal((n, 1)) @ np.ones((1, r)),
    "zeros": lambda rng, n, r: np.zeros((n, r)),
    "a column of zeros": lambda rng, n, r: rng.standard_normal((n, r)) * (np.arange(r) != 1),
    "huge": lambda rng, n, r: rng.standard_normal((n, r)) * 1e30,
    "tiny": lambda rng, n, r: rng.standard_normal((n, r)) * 1e-30,
}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", MATRICES)
def test_columns_become_orthonormal(gpu, sources, name, dtype):
    """As LAPACK makes them, signs included; if they depend on each other, at least orthonormal."""
    import cupy

    rng, rank, rows = np.random.default_rng(0), 4, [4, 5, 300]
    x = np.concatenate([MATRICES[name](rng, n, rank).ravel() for n in rows]).astype(dtype)
    result = cupy.asarray(x)
    Orthonormalizer(result, rank, rows)(result)
    expected, close = x.copy(), 1e-5 if dtype == "float32" else 1e-13
    Orthonormalizer(expected, rank, rows)(expected)
    start = 0
    for n in rows:
        a = result.get()[start : start + n * rank].reshape(n, rank)
        np.testing.assert_allclose(a.T @ a, np.eye(rank), atol=close)
        if name != "of little rank":
            np.testing.assert_allclose(a, expected[start:][: n * rank].reshape(n, rank), atol=close)
        start += n * rank


def test_columns_that_are_not_numbers_stay_so(gpu, sources):
    import cupy

    x = np.ones((5, 2), "float32")
    x[3, 0] = np.nan
    result = cupy.asarray(x.ravel())
    Orthonormalizer(result, 2, [5])(result)
    assert np.isnan(result.get()).any()
