"""Every operation on every dtype, against the closed form: `mpiexec -n P python reductions.py`.

The operands of all ranks are known to each rank. Prints the number of comparisons on rank 0.
"""

from __future__ import annotations

import os
import warnings

import torch
import torch.distributed as dist

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
OPERATIONS = {
    "SUM": (lambda a, b: a + b, (*FLOATS, *INTEGERS, torch.complex64, torch.complex128)),
    "PRODUCT": (lambda a, b: a * b, (*FLOATS, *INTEGERS)),
    "MIN": (torch.minimum, (*FLOATS, *INTEGERS)),
    "MAX": (torch.maximum, (*FLOATS, *INTEGERS)),
    "BAND": (torch.bitwise_and, (*INTEGERS, torch.bool)),
    "BOR": (torch.bitwise_or, (*INTEGERS, torch.bool)),
    "BXOR": (torch.bitwise_xor, (*INTEGERS, torch.bool)),
    "AVG": (lambda a, b: a + b, (*FLOATS, torch.int32)),
}
LENGTHS = (1, 1000, 70_000)  # of a few bytes, copied through a buffer, and longer than one


def operands(dtype: torch.dtype, length: int) -> list[torch.Tensor]:
    """Return the operand of each rank: small integers, of which all sums and products are exact."""
    generator = torch.Generator().manual_seed(length)
    size = dist.get_world_size()
    return [torch.randint(0, 3, (length,), generator=generator).to(dtype) for _ in range(size)]


def expected(name: str, parts: list[torch.Tensor]) -> torch.Tensor:
    function = OPERATIONS[name][0]
    total = parts[0]
    for part in parts[1:]:
        total = function(total, part)
    if name != "AVG":
        return total
    if total.dtype.is_floating_point:
        return (total.double() / len(parts)).to(total.dtype)
    return torch.div(total, len(parts), rounding_mode="trunc")


def check(name: str, actual: torch.Tensor, reference: torch.Tensor) -> int:
    if not torch.equal(actual, reference):
        raise AssertionError(f"{name} of {actual.dtype} {tuple(actual.shape)} differs")
    return 1


def check_reductions() -> int:
    rank, size, count = dist.get_rank(), dist.get_world_size(), 0
    for name, (_, dtypes) in OPERATIONS.items():
        op = getattr(dist.ReduceOp, name)
        for dtype in dtypes:
            for length in LENGTHS:
                parts = operands(dtype, length)
                reference = expected(name, parts)
                x = parts[rank].clone()
                dist.all_reduce(x, op)
                count += check(f"all_reduce {name}", x, reference)
                x = parts[rank].clone()
                dist.all_reduce(x, op, async_op=True).wait()
                count += check(f"asynchronous all_reduce {name}", x, reference)
                if dtype.is_complex:
                    continue
                x = parts[rank].clone()
                dist.reduce(x, size - 1, op)
                count += check(f"reduce {name}", x, reference if rank == size - 1 else parts[rank])
                row = torch.empty_like(parts[rank])
                dist.reduce_scatter_tensor(row, parts[rank].repeat(size), op)
                count += check(f"reduce_scatter {name}", row, reference)
    return count


def check_layouts() -> int:
    """Transposed and strided tensors, coalesced calls, uneven parts, any source."""
    rank, size = dist.get_rank(), dist.get_world_size()
    total = float(sum(range(size)))
    transposed = torch.full((3, 5), float(rank)).t()
    strided = torch.full((6, 4), float(rank))[::2, 1:3]
    for x in (transposed, strided):
        dist.all_reduce(x)
        check("all_reduce of a view", x.contiguous(), torch.full(x.shape, total))
        x.fill_(rank)
        dist.broadcast(x, size - 1)
        check("broadcast of a view", x.contiguous(), torch.full(x.shape, float(size - 1)))
    tensors = [torch.full((n,), float(rank)) for n in (2, 3)]
    dist.all_reduce_coalesced(tensors)
    for x in tensors:
        check("all_reduce coalesced", x, torch.full_like(x, total))
    rows = [torch.empty(r + 1) for r in range(size)]
    dist.all_gather(rows, torch.full((rank + 1,), float(rank)))
    for r, row in enumerate(rows):
        check("all_gather of uneven lengths", row, torch.full((r + 1,), float(r)))
    sent = torch.full((sum(range(size)),), float(rank))
    received = torch.empty(rank * size)
    dist.all_to_all_single(received, sent, [rank] * size, list(range(size)))
    sources = torch.arange(size).repeat_interleave(rank).float()
    check("uneven all_to_all", received, sources)
    if rank == 0:
        ranks = {dist.recv(torch.empty(1), tag=7) for _ in range(size - 1)}
        assert ranks == set(range(1, size)), ranks
    else:
        dist.send(torch.full((1,), float(rank)), 0, tag=7)
    half = dist.ReduceOp.AVG if size == 1 else dist.ReduceOp.SUM
    x = torch.full((2,), 2.0, requires_grad=True)
    dist.all_reduce(x.detach(), half)
    check("all_reduce of a leaf", x.detach(), torch.full((2,), 2.0 * size))
    return 1


def check_works() -> int:
    """Handles of operations: waits, results, futures, batches."""
    rank, size = dist.get_rank(), dist.get_world_size()
    total = float(sum(range(size)))
    x = torch.full((3,), float(rank))
    work = dist.all_reduce(x, async_op=True)
    assert work.wait() and work.is_completed() and work.is_success() and work.exception() is None
    work.synchronize()
    assert work.result()[0] is x and work.get_future().wait()[0] is x
    check("all_reduce", x, torch.full((3,), total))
    future = dist.group.WORLD.allreduce([torch.full((2,), float(rank))]).get_future()
    doubled = future.then(lambda f: f.value()[0] * 2).wait()
    check("a future's value", doubled, torch.full((2,), 2 * total))
    y = torch.full((2,), 1.0)
    first = dist.all_reduce(torch.full((1000,), float(rank)), async_op=True).get_future()
    chained = first.then(lambda _: dist.all_reduce(y, async_op=True).get_future().wait()[0])
    check("an all_reduce of a callback", chained.wait(), torch.full((2,), float(size)))
    inbox, outbox = torch.empty(2), torch.full((2,), float(rank))
    right, left = (rank + 1) % size, (rank - 1) % size
    works = [dist.irecv(inbox, left), dist.isend(outbox, right)]
    for work in works:
        work.synchronize()
        assert work.is_completed() and work.is_success()
    assert works[0].result()[0] is inbox and works[0].get_future().wait()[0] is inbox
    check("irecv", inbox, torch.full((2,), float(left)))
    strided = torch.empty(4)[::2]
    requests = dist.batch_isend_irecv(
        [dist.P2POp(dist.irecv, strided, left), dist.P2POp(dist.isend, outbox, right)]
    )
    for request in requests:
        request.wait()
    check("a batch of messages", strided.contiguous(), torch.full((2,), float(left)))
    tensors = [torch.full((n,), float(rank)) for n in (1, 4)]
    with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as batch:
        for tensor in tensors:
            dist.all_reduce(tensor)
    batch.wait()
    for tensor in tensors:
        check("a coalesced all_reduce", tensor, torch.full_like(tensor, total))
    scaled = torch.full((2,), float(rank))
    dist.all_reduce(scaled, dist._make_nccl_premul_sum(3.0))
    check("a premultiplied sum", scaled, torch.full((2,), 3 * total))
    rows = [torch.empty(2) for _ in range(size)]
    outputs, sources = [torch.empty(size * 2)], [torch.full((2,), float(rank))]
    with dist._coalescing_manager(device=torch.device("cpu")):
        dist.all_gather_into_tensor(outputs[0], sources[0])
    check("a coalesced all_gather", outputs[0], torch.arange(size).repeat_interleave(2).float())
    output = torch.empty(2)
    with dist._coalescing_manager(device=torch.device("cpu")):
        dist.reduce_scatter_tensor(output, torch.full((2 * size,), float(rank)))
    check("a coalesced reduce_scatter", output, torch.full((2,), total))
    dist.reduce_scatter(output, [torch.full((2,), float(rank + r)) for r in range(size)])
    check("reduce_scatter of a list", output, torch.full((2,), total + size * rank))
    dist.all_to_all(rows, [torch.full((2,), 10.0 * rank + r) for r in range(size)])
    for r, row in enumerate(rows):
        check("all_to_all of lists", row, torch.full((2,), 10.0 * r + rank))
    return 1


def check_order() -> int:
    """With HPCTRAIN_REDUCTION=ordered a sum is that of a binary tree over ranks, bit by bit."""
    rank, size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(5)
    parts = [torch.randn(5000, generator=generator) * 10.0**i for i in range(size)]
    level = list(parts)
    while len(level) > 1:
        pairs = [sum(level[i : i + 2][1:], level[i]) for i in range(0, len(level), 2)]
        level = pairs
    x = parts[rank].clone()
    dist.all_reduce(x)
    return check("ordered sum", x, level[0])


def check_overflow() -> int:
    """A sum that overflows is infinite, without a warning of NumPy."""
    x = torch.full((4,), 3e38)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dist.all_reduce(x)
    return check("a sum that overflows", x, torch.full((4,), torch.inf))


def main() -> None:
    dist.init_process_group("hpctrain")
    count = check_reductions() + check_layouts() + check_works() + check_overflow()
    if os.environ.get("HPCTRAIN_REDUCTION") == "ordered":
        count += check_order()
    if dist.get_rank() == 0:
        print("compared", count)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
