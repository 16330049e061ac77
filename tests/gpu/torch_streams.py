"""Operations of tensors on a GPU under streams that are late, on ranks of MPI.

`mpiexec -n P python torch_streams.py [NAME...]` ends with an error if a rank reads what no
collective has written. Every body delays the stream that writes, so that what nothing orders is
read too early.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager

import torch
import torch.distributed as dist

import hpctrain as ht

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # a CPU tries the script alone
LENGTHS = (1, 1001, 1 << 20, (1 << 24) + 1)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8)


@contextmanager
def late_stream():
    """Work in a stream of its own, after the current one and about ten milliseconds more."""
    if DEVICE == "cpu":
        yield
        return
    before, stream = torch.cuda.current_stream(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        stream.wait_stream(before)
        torch.cuda._sleep(20_000_000)  # cycles
        yield


def wait_for_gpu() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def own_values(length: int, dtype: torch.dtype = torch.float32, rank: int | None = None):
    """Return 0 to 6 by turns, plus the rank: exact in each dtype, summed over up to 16 ranks."""
    rank = dist.get_rank() if rank is None else rank
    return (torch.arange(length, device=DEVICE) % 7 + rank).to(dtype)


def total(length: int, dtype: torch.dtype = torch.float32, factor: int = 1):
    base = torch.arange(length, device=DEVICE) % 7
    size = dist.get_world_size()
    return ((base * size + size * (size - 1) // 2) * factor).to(dtype)


def check(seen, expected, *what) -> None:
    torch.testing.assert_close(seen, expected, rtol=0, atol=0, msg=lambda text: f"{what}: {text}")


def sums() -> None:
    """All-reduce every length and dtype in a late stream; read in another."""
    for dtype in DTYPES:
        for length in LENGTHS:
            x = torch.zeros(length, dtype=dtype, device=DEVICE)
            with late_stream():
                x.copy_(own_values(length, dtype))
                work = dist.all_reduce(x, async_op=True)
            with late_stream():
                work.wait()
                seen = x.clone()
            wait_for_gpu()
            check(seen, total(length, dtype), dtype, length)


def many_at_once() -> None:
    """Sums in flight together share the scratch memory of their group."""
    for _ in range(3):
        tensors, works = [], []
        for length in LENGTHS[:3] * 4:
            with late_stream():
                tensors.append(own_values(length))
                works.append(dist.all_reduce(tensors[-1], async_op=True))
        for work in works:
            work.wait()
        for x in tensors:
            check(x, total(len(x)), len(x))


def strided() -> None:
    """A column of a matrix is summed; its neighbours stay."""
    whole = torch.zeros(1001, 3, device=DEVICE)
    with late_stream():
        whole[:, 1] = own_values(1001)
        x = whole[:, 1]
        work = dist.all_reduce(x, async_op=True)
    work.wait()
    check(whole[:, 1], total(1001))
    check(whole[:, 0], torch.zeros(1001, device=DEVICE))


def movement() -> None:
    """Broadcast, gathers, scatters and exchanges move what the late stream has written."""
    rank, size, n = dist.get_rank(), dist.get_world_size(), 3000
    for dtype in (torch.float32, torch.bfloat16, torch.bool):
        rows = torch.stack([own_values(n, dtype, r) for r in range(size)])
        x, root = torch.zeros(n, dtype=dtype, device=DEVICE), size - 1
        with late_stream():
            x.copy_(own_values(n, dtype))
            gathered = torch.zeros_like(rows)
            dist.all_gather_into_tensor(gathered.view(-1), x)
            listed = [torch.zeros_like(x) for _ in range(size)]
            dist.all_gather(listed, x)
            to_root = [torch.zeros_like(x) for _ in range(size)] if rank == root else None
            dist.gather(x, to_root, dst=root)
            part = torch.zeros_like(x)
            dist.scatter(part, list(rows) if rank == root else None, src=root)
            exchanged = torch.zeros(n // size * size, dtype=dtype, device=DEVICE)
            dist.all_to_all_single(exchanged, x[: n // size * size].contiguous())
            sent = x.clone()
            dist.broadcast(sent, src=root)
        wait_for_gpu()
        check(gathered, rows, dtype)
        check(torch.stack(listed), rows, dtype)
        if to_root is not None:
            check(torch.stack(to_root), rows, dtype)
        check(part, rows[rank], dtype)
        check(sent, rows[root], dtype)
        k = n // size
        check(exchanged, torch.cat([row[rank * k : rank * k + k] for row in rows]), dtype)


def scattered_sums() -> None:
    """Reduce-scatter, and reduce to a root."""
    rank, size, n = dist.get_rank(), dist.get_world_size(), 1 << 18
    part = torch.zeros(n, device=DEVICE)
    with late_stream():
        x = own_values(n * size)
        dist.reduce_scatter_tensor(part, x)
        y = own_values(n)
        dist.reduce(y, dst=0)
    wait_for_gpu()
    check(part, total(n * size)[rank * n : (rank + 1) * n])
    if rank == 0:
        check(y, total(n))


def messages() -> None:
    """Sends and receives, alone and in a batch, of columns too, to the next rank."""
    rank, size, n = dist.get_rank(), dist.get_world_size(), 100_000
    after, before = (rank + 1) % size, (rank - 1) % size
    whole = torch.zeros(n, 2, device=DEVICE)
    with late_stream():
        x = own_values(n)
        for y in (torch.zeros(n, device=DEVICE), whole[:, 1]):
            operations = [dist.P2POp(dist.isend, x, after), dist.P2POp(dist.irecv, y, before)]
            for work in dist.batch_isend_irecv(operations):
                work.wait()
            check(y, own_values(n, rank=before))
        if rank % 2 == 0 and size % 2 == 0:
            dist.send(x, after)
            dist.recv(y, after)
        elif size % 2 == 0:
            dist.recv(y, before)
            dist.send(x, before)


def dropped_tensors() -> None:
    """Memory of tensors that are gone is used again: none is kept alive by its group."""
    if DEVICE == "cpu":
        return
    dist.all_reduce(own_values(1 << 20))
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for i in range(50):
        dist.all_reduce(own_values((1 << 20) + i))
    torch.cuda.synchronize()
    kept = torch.cuda.memory_allocated() - before
    assert kept < 8 << 20, f"{kept >> 20} MiB of 50 tensors of 4 MiB are kept"


def overlap() -> None:
    """Kernels that the caller queues after a collective are not awaited by it."""
    if DEVICE == "cpu":
        return
    side, x = torch.cuda.Stream(), own_values(1000)
    for seconds in (0.0, 0.0, 2.0):  # to load a kernel, and to allocate, may wait for all others
        x.copy_(own_values(1000))
        torch.cuda.synchronize()
        work = dist.all_reduce(x, async_op=True)
        torch.cuda._sleep(int(2e9 * seconds))  # cycles
        done = torch.cuda.current_stream().record_event()
        with torch.cuda.stream(side):
            work.wait()
            seen = x.cpu()
        assert not seconds or not done.query(), "the collective has waited for later kernels"
        check(seen, total(1000).cpu())


def sync_in_streams() -> None:
    """`ht.torch.sync`: a loop under a late stream trains as one process on the whole batch."""
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        model = torch.nn.Linear(64, 3).to(DEVICE, dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        ht.torch.sync(model, optimizer)
        size = dist.get_world_size()
        mean = sum(4.0 * (1 + rank) for rank in range(size)) / size
        for _ in range(3):
            x = torch.full((4, 64), 1.0 + dist.get_rank(), device=DEVICE, dtype=dtype)
            with late_stream():
                optimizer.zero_grad()
                model(x).sum().backward()
                check(model.weight.grad, torch.full_like(model.weight, mean), dtype)
                optimizer.step()


def user_calls() -> None:
    """`ht.torch.allreduce` and `broadcast` in late streams."""
    for length in LENGTHS:
        with late_stream():
            x = own_values(length)
            ht.torch.allreduce(x)
            check(x, total(length), length)


BODIES = {
    "sums": sums,
    "many at once": many_at_once,
    "strided": strided,
    "movement": movement,
    "scattered sums": scattered_sums,
    "messages": messages,
    "dropped tensors": dropped_tensors,
    "overlap": overlap,
    "sync": sync_in_streams,
    "user calls": user_calls,
}


def main() -> None:
    if DEVICE == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group("hpctrain")
    for name in sys.argv[1:] or BODIES:
        BODIES[name]()
        if dist.get_rank() == 0:
            print(f"{name}: right", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
