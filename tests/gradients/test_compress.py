"""Compressed sums: the same bytes on all ranks, within the error bound, in the stated bytes."""

from __future__ import annotations

import numpy as np
import pytest
from oracles.messages import MESSAGES, Call
from ranks import on_ranks, run_on

from hpctrain.collectives import ALLREDUCE, all_gather_bytes
from hpctrain.core.errors import UsageError
from hpctrain.gradients import arena as arenas
from hpctrain.gradients import compress
from hpctrain.gradients.buckets import cut_buckets
from hpctrain.gradients.compress import powersgd
from hpctrain.gradients.reducer import Reducer, WireOptions
from hpctrain.optim.absent import ABSENT, is_absent

SHAPES = {"conv": (3, 3, 4, 8), "bias": (8,), "small": (2, 2), "wide": (20, 31), "last": (5,)}
SIZE, VECTORS = 288 + 8 + 4 + 620 + 5, 8 + 5
METHODS = {
    "bf16": {"compression": "bf16"},
    "fp16": {"compression": "fp16"},
    "top-k": {"compression": "top-k", "compression_ratio": 0.1},
    "powersgd": {"compression": "powersgd", "compression_rank": 2},
}
OWES = ("top-k", "powersgd")
ROUNDOFF = {"bf16": 2.0**-8, "fp16": 2.0**-11}
PRECISION = {"float32": 2e-6, "float64": 1e-14}


class Side:
    """One rank's arena and reducer."""

    def __init__(self, world, method, dtype="float32", algorithm="ring", bucket_bytes=1600):
        options = WireOptions(**METHODS[method], algorithm=algorithm)
        self.world, self.arena = world, arenas.make_arena(SHAPES, dtype)
        grad = self.arena.grad
        self.compressor = compress.build(
            options, ALLREDUCE[algorithm], self.arena, world.size, world.memory.zeros_like, True
        )
        self.buckets = cut_buckets(self.arena.slots, grad.size, grad.itemsize, bucket_bytes)
        self.group = world.threads.group_for("compressed")
        self.reducer = Reducer(grad, self.buckets, self.group, self.compressor, True)

    def sum(self, gradients: dict) -> np.ndarray:
        """Return the sum that the reducer makes of this rank's gradients, by slots."""
        for slot in self.arena.slots:
            self.arena.views(self.arena.grad)[slot.name][...] = gradients[slot.name]
        for slot in reversed(self.arena.slots):
            self.reducer.mark_ready(slot.name)
        return self.flat(self.reducer.wait())

    def flat(self, plane: np.ndarray) -> np.ndarray:
        return np.concatenate([plane[s.offset : s.stop] for s in self.arena.slots])


def gradients(rank: int, step: int, scale: float = 1.0) -> dict:
    rng = np.random.default_rng([rank, step])
    return {name: scale * rng.standard_normal(shape) for name, shape in SHAPES.items()}


def flat(tensors: dict) -> np.ndarray:
    return np.concatenate([tensors[name].ravel() for name in SHAPES])


def everyones(world, step: int) -> np.ndarray:
    """Return the gradients of all ranks, a row each, in float64."""
    return np.array([flat(gradients(rank, step)) for rank in range(world.size)])


def alike(world, x: np.ndarray) -> bool:
    return len(set(all_gather_bytes(world.link, x.tobytes()))) == 1


@pytest.mark.parametrize(
    "algorithm", ["ring", "recursive-doubling", "double-tree", "direct", "hierarchical"]
)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("method", ROUNDOFF)
@on_ranks(2, 3, 5)
def test_sums_in_16_bits_are_within_their_bound(ranks, method, dtype, algorithm):
    def body(world):
        side = Side(world, method, dtype, algorithm)
        total = side.sum(gradients(world.rank, 0))
        rows, p, u = everyones(world, 0), world.size, ROUNDOFF[method]
        bound = p * u * (1 + u) ** p * abs(rows).sum(axis=0) * 1.01  # 1.01: float32 before
        assert (abs(total - rows.sum(axis=0)) <= bound).all()
        assert abs(total - rows.sum(axis=0)).max() > 0  # else nothing was rounded
        assert alike(world, total)
        side.reducer.close()

    ranks(body)


@pytest.mark.parametrize("dtype", PRECISION)
@pytest.mark.parametrize("method", OWES)
@on_ranks(2, 3, 5)
def test_what_is_not_sent_is_owed(ranks, method, dtype):
    """After each step: all sums so far and all residuals are all gradients so far."""

    def body(world):
        side, sums, arguments = Side(world, method, dtype), 0.0, 0.0
        for step in range(4):
            total = side.sum(gradients(world.rank, step))
            assert alike(world, total)
            sums, arguments = sums + total, arguments + everyones(world, step).sum(axis=0)
            owed = everyones_owed(side)
            assert 0.1 < abs(owed).max() < 40  # something is, and it does not grow without end
            assert abs(sums + owed - arguments).max() < PRECISION[dtype] * abs(arguments).max() * 10
        vectors = [s for s in side.arena.slots if len(s.shape) == 1]
        residual = side.compressor.local_state["residual"]
        assert not any(residual[s.offset : s.stop].any() for s in vectors)
        side.reducer.close()

    ranks(body)


def everyones_owed(side: Side) -> np.ndarray:
    """Return the sum of all ranks' residuals."""
    own = side.flat(side.compressor.local_state["residual"])
    rows = [np.frombuffer(b, own.dtype) for b in all_gather_bytes(side.world.link, own.tobytes())]
    return np.sum(rows, axis=0, dtype=np.float64)


@pytest.mark.parametrize("method", OWES)
@on_ranks(2, 3, mpi=(2,))
def test_a_matrix_without_a_gradient_on_any_rank_keeps_its_residual(ranks, method):
    """In step 1 no rank has one, in step 2 rank 0 alone."""

    def body(world):
        side, sums, arguments = Side(world, method, "float64"), 0.0, 0.0
        wide = side.arena.views(side.arena.grad)["wide"]
        residual = side.arena.views(side.compressor.local_state["residual"])["wide"]
        for step in range(5):
            rows = [gradients(rank, step) for rank in range(world.size)]
            for rank, row in enumerate(rows):
                if step == 1 or (step == 2 and rank):
                    row["wide"] = np.full(SHAPES["wide"], ABSENT)
            before = residual.copy()
            total = side.sum(rows[world.rank])
            assert alike(world, total)
            assert is_absent(wide.ravel()) == (step == 1)
            if step == 1:
                assert before.any() and np.array_equal(residual, before)
            sums, arguments = sums + total, arguments + sum(map(flat, rows))
            assert abs(sums + everyones_owed(side) - arguments).max() < 1e-12
        side.reducer.close()

    ranks(body)


def test_top_k_sends_the_largest_of_each_matrix():
    def body(world):
        side = Side(world, "top-k")
        own = gradients(world.rank, 0)
        side.sum(own)
        saved = side.arena.views(side.compressor.local_state["residual"])
        for name, count in {"conv": 29, "small": 1, "wide": 62}.items():  # a tenth, rounded up
            sent = saved[name] == 0
            assert sent.sum() == count
            assert abs(own[name][sent]).min() >= abs(own[name][~sent]).max()

    run_on("threads", 2, body)


@pytest.mark.parametrize(
    ("shape", "matrix"),
    [((20, 31), (20, 31)), ((3, 3, 16, 32), (144, 32)), ((3, 3, 4, 8), (9, 32)), ((5, 1), (5, 1))],
)
def test_tensors_are_folded_where_rows_and_columns_are_fewest(shape, matrix):
    assert powersgd.fold_shape(shape) == matrix


def test_powersgd_finds_a_matrix_of_its_rank():
    """The sum of two ranks' matrices of rank 1 has rank 2: nothing is lost, nothing is owed."""

    def body(world):
        side, rng = Side(world, "powersgd", "float64"), np.random.default_rng(world.rank)
        own = gradients(world.rank, 0)
        own["wide"] = np.outer(rng.standard_normal(20), rng.standard_normal(31))
        side.sum(own)
        assert abs(side.arena.views(side.compressor.local_state["residual"])["wide"]).max() < 1e-12
        assert abs(side.arena.views(side.compressor.local_state["residual"])["conv"]).max() > 0.1

    run_on("threads", 2, body)


def test_powersgd_improves_from_step_to_step():
    """The same matrix again and again: the warm start comes ever nearer to its best directions."""

    def body(world):
        side, own = Side(world, "powersgd", "float64"), gradients(world.rank, 0)
        rng = np.random.default_rng(7)
        own["wide"] = sum(
            s * np.outer(*(np.linalg.qr(rng.standard_normal((n, 1)))[0][:, 0] for n in (20, 31)))
            for s in (8, 4, 2, 1)
        )
        errors = []
        for _ in range(4):
            side.compressor.local_state["residual"][...] = 0
            side.sum(own)
            total = side.arena.views(side.arena.grad)["wide"]
            errors.append(np.linalg.norm(total - world.size * own["wide"]))
        best = world.size * np.linalg.svd(own["wide"])[1][2:]
        assert errors[0] > 1.1 * errors[-1]
        assert errors[-1] < 1.05 * np.linalg.norm(best)

    run_on("threads", 2, body)


@pytest.mark.parametrize("scale", [1e-30, 1e-9, 1.0, 1e9, 1e30])
def test_fp16_neither_overflows_nor_vanishes(scale):
    def body(world):
        side = Side(world, "fp16")
        total = side.sum(gradients(world.rank, 0, scale))
        assert side.compressor.sums_are_finite()
        expected = scale * everyones(world, 0).sum(axis=0)
        assert np.linalg.norm(total - expected) < 1e-3 * np.linalg.norm(expected)

    run_on("threads", 3, body)


@pytest.mark.parametrize("method", METHODS)
def test_sums_of_nothing_are_nothing(method):
    """Gradients of zero, as of an empty share: no division by them, then on as before."""

    def body(world):
        side = Side(world, method)
        assert not side.sum(gradients(world.rank, 0, 0.0)).any()
        assert side.sum(gradients(world.rank, 1)).any()
        assert side.compressor.sums_are_finite()

    run_on("threads", 3, body)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["conv", "last"])
@pytest.mark.parametrize("method", METHODS)
def test_all_ranks_see_what_is_not_finite_on_one(method, name, value):
    def body(world):
        side, own = Side(world, method), gradients(world.rank, 0)
        if world.rank == 1:
            own[name].flat[3] = value
        side.sum(own)
        assert not side.compressor.sums_are_finite()

    run_on("threads", 3, body)


@pytest.mark.parametrize("method", METHODS)
def test_buckets_change_the_messages_alone(method):
    def body(world):
        sides = [Side(world, method, "float64", bucket_bytes=n) for n in (1, 1600, 10**9)]
        assert [len(side.buckets) for side in sides] == [5, 2, 1]
        for step in range(3):
            sums = [side.sum(gradients(world.rank, step)) for side in sides]
            u = ROUNDOFF.get(method, 1e-15)  # 16 bits are rounded in another order
            assert max(abs(total - sums[0]).max() for total in sums) < 20 * u

    run_on("threads", 3, body)


def wire(itemsize: int, ranks: int, rank: int, length: int, name: str = "ring") -> int:
    return itemsize * sum(MESSAGES[name](Call(length, itemsize, ranks, rank)))


def expected_bytes(method: str, p: int, rank: int, plane: int, itemsize: int) -> int:
    """Return what `rank` sends for one bucket that is the whole plane: docs/compression.md."""
    pairs = 29 + 1 + 62
    largest = wire(8, p, rank, 1, "recursive-doubling")
    thin = {"conv": (9, 32), "wide": (20, 31)}  # small: 4 numbers either way, so it travels whole
    tall, rows = (2 * sum(shape[i] for shape in thin.values()) for i in (0, 1))
    return {
        "bf16": wire(2, p, rank, plane),
        "fp16": wire(2, p, rank, plane) + largest,
        "top-k": wire(itemsize, p, rank, VECTORS) + (p - 1) * pairs * (4 + itemsize),
        "powersgd": wire(itemsize, p, rank, VECTORS + 4 + tall) + wire(itemsize, p, rank, rows),
    }[method]


@pytest.mark.parametrize("dtype", PRECISION)
@pytest.mark.parametrize("method", METHODS)
@on_ranks(2, 3, 5)
def test_as_many_bytes_as_the_closed_form_says(ranks, method, dtype):
    def body(world):
        side = Side(world, method, dtype, bucket_bytes=10**9)
        before = side.group.bytes_sent
        side.sum(gradients(world.rank, 0))
        sent = side.group.bytes_sent - before
        plane, itemsize = side.arena.grad.size, side.arena.grad.itemsize
        assert sent == expected_bytes(method, world.size, world.rank, plane, itemsize)
        assert sent < 0.8 * wire(itemsize, world.size, world.rank, plane)
        side.reducer.close()

    ranks(body)


REFUSED = [
    ({"compression": "bf16", "compression_ratio": 0.1}, "expected compression = 'top-k'"),
    ({"compression": "top-k", "compression_rank": 2}, "expected compression = 'powersgd'"),
    ({"compression_rank": 2}, "seen 'none'"),
    ({"compression": "fp8"}, "compression"),
    ({"compression": "top-k", "compression_ratio": 1.0}, "compression_ratio"),
    ({"compression": "powersgd", "compression_rank": 0}, "compression_rank"),
    *((METHODS[m] | {"algorithm": "null"}, f"supports '{m}', seen 'null'") for m in METHODS),
    *((METHODS[m] | {"algorithm": "native"}, f"supports '{m}', seen 'native'") for m in ROUNDOFF),
    *((METHODS[m] | {"algorithm": "nccl"}, f"supports '{m}', seen 'nccl'") for m in ROUNDOFF),
]


@pytest.mark.parametrize(("keys", "fault"), REFUSED)
def test_what_does_not_go_together_is_refused(keys, fault):
    with pytest.raises(ValueError, match=fault):
        WireOptions(**keys)


@pytest.mark.parametrize("method", OWES)
def test_native_carries_what_is_summed_as_it_is(method):
    WireOptions(**METHODS[method], algorithm="native")


def test_a_ratio_that_sends_more_than_the_gradient_is_refused():
    options = WireOptions(compression="top-k", compression_ratio=0.1)
    arena = arenas.make_arena(SHAPES, "float32")
    compress.build(options, ALLREDUCE["ring"], arena, 9, np.zeros_like)
    with pytest.raises(UsageError, match=r"expected less than 1/10, seen 0.1"):
        compress.build(options, ALLREDUCE["ring"], arena, 10, np.zeros_like)
