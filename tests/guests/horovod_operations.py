"""Every operation on every dtype, against the closed form: `mpiexec -n P python SCRIPT`.

The operands of all ranks are known to each rank. Prints the number of comparisons on rank 0.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch

import hpctrain.horovod.torch as hvd

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
DTYPES = (*FLOATS, *INTEGERS)
SHAPES = ((), (1,), (7, 3), (2, 3, 4), (20_011,), (0, 3))  # the last but one is not fused


def operands(dtype: torch.dtype, shape: tuple[int, ...]) -> list[torch.Tensor]:
    """Return the operand of each rank: small integers, of which all sums and products are exact."""
    generator = torch.Generator().manual_seed(len(shape))
    size = hvd.size()
    return [torch.randint(0, 3, shape, generator=generator).to(dtype) for _ in range(size)]


def cases() -> Iterator[tuple[torch.dtype, list[torch.Tensor]]]:
    for dtype in DTYPES:
        for shape in SHAPES:
            yield dtype, operands(dtype, shape)


def mean_of(total: torch.Tensor) -> torch.Tensor:
    if total.is_floating_point():
        return (total.double() / hvd.size()).to(total.dtype)
    return total.div(hvd.size(), rounding_mode="trunc")


REDUCTIONS = {
    hvd.Sum: lambda x: x.sum(0).to(x.dtype),
    hvd.Average: lambda x: mean_of(x.sum(0).to(x.dtype)),
    hvd.Min: lambda x: x.amin(0),
    hvd.Max: lambda x: x.amax(0),
    hvd.Product: lambda x: x.prod(0).to(x.dtype),
}


class Comparisons:
    """Counts comparisons; each must hold."""

    count = 0

    def equal(self, actual: torch.Tensor, expected: torch.Tensor, subject: str) -> None:
        self.count += 1
        if not torch.equal(actual, expected):
            raise AssertionError(f"rank {hvd.rank()}: {subject}: {actual} instead of {expected}")

    def raises(self, kind: type[Exception], words: str, call, *args, **options) -> None:
        self.count += 1
        try:
            call(*args, **options)
        except kind as error:
            assert words in str(error), f"{error} without {words!r}"
        else:
            raise AssertionError(f"{call.__name__}{args} did not raise {kind.__name__}")


check = Comparisons()


def check_reductions() -> None:
    rank = hvd.rank()
    for op, expect in REDUCTIONS.items():
        for dtype, parts in cases():
            expected = expect(torch.stack(parts))
            subject = f"allreduce {op} of {dtype} {tuple(parts[0].shape)}"
            check.equal(hvd.allreduce(parts[rank], op=op), expected, subject)
            in_place = parts[rank].clone()
            assert hvd.allreduce_(in_place, op=op) is in_place
            check.equal(in_place, expected, f"{subject} in place")
    for dtype, parts in cases():
        if parts[0].dim() == 0:
            continue
        total = torch.stack(parts).sum(0).to(dtype)
        own = total.tensor_split(hvd.size())[rank]  # the first ranks get more rows
        check.equal(hvd.reducescatter(parts[rank], op=hvd.Sum), own, f"reducescatter of {dtype}")
        check.equal(hvd.reducescatter(parts[rank]), mean_of(own), f"mean of rows of {dtype}")


def check_scaled() -> None:
    parts = [torch.arange(5.0) * (r + 1) for r in range(hvd.size())]
    total, rank = torch.stack(parts).sum(0), hvd.rank()
    scaled = hvd.allreduce(parts[rank], op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0)
    check.equal(scaled, total * 2, "scaled sum")
    narrow = torch.tensor([200], dtype=torch.uint8)
    check.equal(hvd.allreduce(narrow), narrow, "a mean whose sum needs more bits")
    integers = hvd.allreduce(torch.tensor([3, -3]), op=hvd.Sum, prescale_factor=0.5)
    check.equal(integers, hvd.size() * torch.tensor([1, -1]), "integers scaled toward zero")
    mean = hvd.allreduce(parts[rank], prescale_factor=0.25, postscale_factor=4.0)
    check.equal(mean, total / hvd.size(), "predivided mean")


def check_movements() -> None:
    rank, size = hvd.rank(), hvd.size()
    for dtype in (*DTYPES, torch.bool):
        parts = [torch.full((r + 1, 2), r).to(dtype) for r in range(size)]
        check.equal(hvd.allgather(parts[rank]), torch.cat(parts), f"allgather of {dtype}")
        root = size - 1
        x = torch.full((3,), rank).to(dtype)
        check.equal(hvd.broadcast(x, root), torch.full((3,), root).to(dtype), "broadcast")
        check.equal(x, torch.full((3,), rank).to(dtype), "the operand of a broadcast")
        assert hvd.broadcast_(x, 0) is x
        check.equal(x, torch.full((3,), 0).to(dtype), "broadcast in place")
        rows = torch.arange(2 * size).reshape(-1, 1).to(dtype)
        received = torch.cat([rows[2 * rank : 2 * rank + 2]] * size)
        check.equal(hvd.alltoall(rows), received, f"alltoall of {dtype}")
    splits = torch.arange(size, dtype=torch.int32)  # r rows for rank r
    rows = torch.full((int(splits.sum()), 1), rank)
    received, counts = hvd.alltoall(rows, splits)
    expected = torch.arange(size).repeat_interleave(rank).reshape(-1, 1)
    check.equal(received, expected, "alltoall of splits")
    check.equal(counts, torch.full((size,), rank, dtype=torch.int32), "numbers of rows")


def check_layouts() -> None:
    """Tensors of other strides, parameters, groups, and a result that is asked for twice."""
    rank, size = hvd.rank(), hvd.size()
    x = torch.arange(12.0).reshape(3, 4).t()
    hvd.allreduce_(x, op=hvd.Sum)
    check.equal(x, torch.arange(12.0).reshape(3, 4).t() * size, "transposed, in place")
    parameter = torch.nn.Parameter(torch.full((4,), float(rank)))
    hvd.broadcast_(parameter, root_rank=size - 1)
    check.equal(parameter.detach(), torch.full((4,), size - 1.0), "a parameter")
    group = [torch.ones(3), torch.full((2, 2), 2.0)]
    for result, part in zip(hvd.grouped_allreduce(group, op=hvd.Sum), group, strict=True):
        check.equal(result, part * size, "grouped")
    hvd.grouped_allreduce_(group, op=hvd.Sum)
    check.equal(group[1], torch.full((2, 2), 2.0 * size), "grouped in place")
    gathered = hvd.grouped_allgather([torch.ones(rank + 1), torch.zeros(1)])
    check.equal(gathered[0], torch.ones(size * (size + 1) // 2), "grouped allgather")
    conjugate = torch.tensor([1 + 2j]).conj()
    check.equal(hvd.allgather(conjugate), conjugate.resolve_conj().repeat(size), "conjugate")
    with torch.inference_mode():
        handle = hvd.allreduce_async(torch.ones(2), op=hvd.Sum)
        check.equal(hvd.synchronize(handle), torch.full((2,), float(size)), "inference mode")
    # Whether messages come together or apart, all ranks fuse the same.
    names = ["empty", "big"]
    xs = [torch.ones(0), torch.ones(70_000)]
    if rank == 0:
        results = [hvd.allreduce(x, name=name) for x, name in zip(xs, names, strict=True)]
    else:
        handles = [hvd.allreduce_async(x, name=n) for x, n in zip(xs, names, strict=True)]
        results = [hvd.synchronize(handle) for handle in handles]
    check.equal(results[1], xs[1], "after an empty tensor")
    handle = hvd.allreduce_async(torch.ones(2), op=hvd.Sum)
    check.equal(hvd.synchronize(handle), torch.full((2,), float(size)), "asynchronous")
    assert hvd.synchronize(handle) is None
    assert hvd.poll(handle)


def check_gradients() -> None:
    rank, size = hvd.rank(), hvd.size()
    x = torch.ones(2 * size, 2, requires_grad=True)
    weights = torch.arange(2.0 * size).reshape(-1, 1)
    table = {
        "allreduce": (hvd.allreduce(x, op=hvd.Sum), weights * size),
        "mean": (hvd.allreduce(x), weights),
        "broadcast": (hvd.broadcast(x, 0), weights * (rank == 0)),
        "alltoall": (hvd.alltoall(x), torch.cat([weights[2 * rank : 2 * rank + 2]] * size)),
        "allgather": (hvd.allgather(x)[: 2 * size], weights * (rank == 0)),
    }
    scalar = torch.tensor(2.0, requires_grad=True)
    hvd.allgather(scalar).sum().backward()
    check.equal(scalar.grad, torch.tensor(1.0), "gradient of a gathered scalar")
    for name, (y, expected) in table.items():
        x.grad = None
        (y * weights).sum().backward()
        check.equal(x.grad, expected.expand(-1, 2), f"gradient of {name}")


def check_faults() -> None:
    rank, size = hvd.rank(), hvd.size()
    internal, last = hvd.HorovodInternalError, size - 1
    x, other = torch.ones(3), torch.ones(3 + (rank == last))
    check.raises(internal, f"rank {last}: allreduce", hvd.allreduce, other, name="shape")
    wrong = torch.ones(3, dtype=torch.float64 if rank == last else torch.float32)
    check.raises(internal, "float64 [3]", hvd.allreduce, wrong, name="dtype")
    op = hvd.Sum if rank == last else hvd.Max
    check.raises(internal, "allreduce max of", hvd.allreduce, x, name="op", op=op)
    check.raises(internal, "from rank 1", hvd.broadcast, x, min(rank, 1), "root")
    check.raises(internal, "differs between ranks", hvd.allgather, torch.ones(1, 1 + rank), "rows")
    handle = hvd.allreduce_async(x, name="twice")
    check.raises(ValueError, "is under way", hvd.allreduce_async, x, name="twice")
    check.equal(hvd.synchronize(handle), x, "the first of two")
    check.raises(ValueError, "not both", hvd.allreduce, x, average=True, op=hvd.Sum)
    check.raises(ValueError, "root_rank", hvd.broadcast, x, size)
    check.raises(ValueError, "seen torch.sparse_coo", hvd.allreduce, x.to_sparse())
    check.raises(ValueError, "add up to the 3 rows", hvd.alltoall, x, [5] + [0] * last)
    check.raises(ValueError, "first dimension", hvd.reducescatter, torch.tensor(1.0))
    check.raises(NotImplementedError, "hvd.Max", hvd.reducescatter, x, op=hvd.Max)
    sparse = torch.tensor([0, 3]).to_sparse()
    total = hvd.sparse_allreduce_async(sparse, "sparse", hvd.Sum)()
    check.equal(total.to_dense(), torch.tensor([0, 3 * size]), "a sparse sum of integers")
    check.raises(
        NotImplementedError, "hvd.Max of torch.int64", hvd.sparse_allreduce_async, sparse, "max",
        hvd.Max,
    )  # fmt: skip
    check.raises(ValueError, "has no mean", hvd.allreduce, torch.ones(2, dtype=torch.bool))
    check.raises(ValueError, "is registered already", hvd.add_process_set, list(range(size)))
    check.equal(hvd.allreduce(x), x, "a sum after faults")


def check_process_sets() -> None:
    """Two sets run at once; the ranks outside of a set are not asked."""
    rank, size = hvd.rank(), hvd.size()
    even = hvd.add_process_set([r for r in range(size) if r % 2 == 0])
    odd = hvd.add_process_set(hvd.ProcessSet([r for r in range(size) if r % 2]))
    own, foreign = (odd, even) if rank % 2 else (even, odd)
    assert own.included()
    assert foreign.rank() == -1
    total = hvd.allreduce(torch.tensor(rank + 1.0), op=hvd.Sum, process_set=own)
    check.equal(total, torch.tensor(sum(own.ranks) + own.size() + 0.0), "sum of a set")
    root = own.ranks[-1]
    x = hvd.broadcast(torch.tensor(float(rank)), root, process_set=own)
    check.equal(x, torch.tensor(float(root)), "broadcast in a set")
    check.raises(ValueError, "is not in", hvd.allreduce, x, process_set=foreign)
    if own.size() > 1:
        shape, words = torch.ones(1 + (rank == root)), f"rank {root}: allreduce"
        check.raises(hvd.HorovodInternalError, words, hvd.allreduce, shape, process_set=own)
    assert hvd.remove_process_set(even)
    assert hvd.remove_process_set(odd)
    assert not hvd.remove_process_set(odd)
    check.raises(ValueError, "not registered", hvd.allreduce, x, process_set=own)


def check_join() -> None:
    """Ranks with fewer batches take part with zeros."""
    rank, size = hvd.rank(), hvd.size()
    pending = hvd.allreduce_async(torch.ones(2), op=hvd.Sum, name="pending") if rank == 0 else None
    hvd.join()
    if pending is not None:
        check.equal(hvd.synchronize(pending), torch.ones(2), "a sum that only one rank submitted")
    for first in range(size):
        if rank != first:
            pair = hvd.grouped_allreduce([torch.ones(4), torch.ones(9)], op=hvd.Sum, name="sum")
            check.equal(pair[1], torch.full((9,), size - 1.0), "sum without a rank")
            words = f"rank {first} called join()"
            check.raises(hvd.HorovodInternalError, words, hvd.allgather, torch.ones(2))
            hvd.barrier()
        last = hvd.join()
        assert last != first or size == 1
        same = hvd.allgather(torch.tensor([last]))
        check.equal(same, same[:1].expand(size), "the rank that joined last")


def check_random_order(tensors: int, rounds: int) -> None:
    """Each rank submits the same names in an order of its own."""
    rank, size = hvd.rank(), hvd.size()
    order = random.Random(rank)
    names = list(range(tensors))
    for turn in range(rounds):
        order.shuffle(names)
        xs = {i: torch.full((1 + i % 7,), float(i + rank + turn)) for i in names}
        handles = {i: hvd.allreduce_async_(xs[i], name=f"t{i}", op=hvd.Sum) for i in names}
        order.shuffle(names)
        for i in names:
            hvd.synchronize(handles[i])
        expected = [size * (i + turn) + size * (size - 1) / 2 for i in range(tensors)]
        actual = [float(xs[i][-1]) for i in range(tensors)]
        assert actual == expected, f"round {turn}: {actual} instead of {expected}"
        check.count += tensors


def main() -> None:
    hvd.init()
    for function in (
        check_reductions, check_scaled, check_movements, check_layouts, check_gradients,
        check_join,
    ):  # fmt: skip
        function()
    if hvd.size() > 1:
        check_faults()
        check_process_sets()
    check_random_order(tensors=200, rounds=10)
    hvd.allreduce_async(torch.ones(3), name="never synchronized")
    hvd.shutdown()
    assert not hvd.is_initialized()
    hvd.init()
    check.equal(hvd.allreduce(torch.ones(1)), torch.ones(1), "after shutdown and init")
    if hvd.rank() == 0:
        print("comparisons:", check.count)


if __name__ == "__main__":
    main()
