"""Asynchronous operations of `torch.distributed` whose ranks go on, each with its closed form.

`mpiexec -n P python asynchronous.py MODE [NAME...]` prints a line per case on each rank. A case
that is not over within LIMIT_S ends the job, with the stacks of the rank. Busy processes fill the
cores meanwhile. Modes: of `MODES`.
"""

from __future__ import annotations

import faulthandler
import os
import subprocess
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

import hpctrain.torch.job
from hpctrain.core.errors import UsageError

LIMIT_S = 30.0
LENGTHS = (1, 7, 1000, 100_000)


def cores_full() -> None:
    """As many cores as ranks, or fewer: calls run in their callers' threads where they can."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])


def cores_spare() -> None:
    """A thread begins each asynchronous call, as where cores are free."""
    hpctrain.torch.job._threaded = True


MODES = {"full": cores_full, "spare": cores_spare}


def values(rank, length=4, shift=0):
    return torch.arange(length, dtype=torch.float64) % 97 + rank + shift


def total(size, length=4, shift=0):
    return sum(values(rank, length, shift) for rank in range(size))


def check(x, expected):
    assert torch.equal(x, expected.to(x.dtype)), (x, expected)


def send_after_all_reduce(rank, size):
    """Rank 0 begins and then sends; the others begin once they have received."""
    x, y = values(rank), torch.empty(3)
    if rank == 0:
        work = dist.all_reduce(x, async_op=True)
        for peer in range(1, size):
            dist.send(torch.full((3,), float(peer)), peer)
        work.wait()
    else:
        dist.recv(y, 0)
        dist.all_reduce(x)
        check(y, torch.full((3,), float(rank)))
    check(x, total(size))


def groups_in_opposite_order(rank, size):
    groups = [dist.new_group(), dist.new_group()]
    order = (0, 1) if rank % 2 else (1, 0)
    x = [values(rank, shift=i) for i in range(2)]
    works = {i: dist.all_reduce(x[i], group=groups[i], async_op=True) for i in order}
    for i in order:
        works[i].wait()
    for i in range(2):
        check(x[i], total(size, shift=i))
        dist.destroy_process_group(groups[i])


def second_call_synchronous(rank, size):
    groups = [dist.new_group(), dist.new_group()]
    first, second = (0, 1) if rank % 2 else (1, 0)
    x = [values(rank, shift=i) for i in range(2)]
    work = dist.all_reduce(x[first], group=groups[first], async_op=True)
    dist.all_reduce(x[second], group=groups[second])
    work.wait()
    for i in range(2):
        check(x[i], total(size, shift=i))
        dist.destroy_process_group(groups[i])


def many_outstanding(rank, size):
    tensors = [values(rank, LENGTHS[i % len(LENGTHS)], i) for i in range(32)]
    works = []
    for i, x in enumerate(tensors):
        if i % 20 == rank:
            time.sleep(0.02)
        works.append(dist.all_reduce(x, async_op=True))
    for work in works[::-1]:
        work.wait()
    for i, x in enumerate(tensors):
        check(x, total(size, len(x), i))


def mixed_with_messages(rank, size):
    """A ring of messages, each of which the next rank needs before it begins."""
    for turn in range(5):
        x, token = values(rank, 1000, turn), torch.tensor([turn])
        if rank:
            dist.recv(token, rank - 1)
        work = dist.all_reduce(x, async_op=True)
        long = torch.full((100_000,), float(turn))
        sent = dist.isend(token, (rank + 1) % size), dist.isend(long, (rank + 1) % size, tag=1)
        if not rank:
            dist.recv(token, size - 1)
        received = torch.empty(100_000)
        dist.recv(received, (rank - 1) % size, tag=1)
        for request in sent:
            request.wait()
        work.wait()
        check(x, total(size, 1000, turn))
        check(received, long)


def barrier_after(rank, size):
    x = [values(rank, length) for length in LENGTHS]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in x]
    dist.barrier()
    assert all(work.is_completed() for work in works)
    for tensor in x:
        check(tensor, total(size, len(tensor)))


def coalesced(rank, size):
    x, y = [values(rank, shift=i) for i in range(3)], torch.empty(1)
    if rank:
        dist.recv(y, rank - 1)
    with dist._coalescing_manager(async_ops=True) as manager:
        for tensor in x:
            dist.all_reduce(tensor)
    if rank + 1 < size:
        dist.send(torch.ones(1), rank + 1)
    manager.wait()
    for i, tensor in enumerate(x):
        check(tensor, total(size, shift=i))


def every_collective(rank, size):
    """Each is begun by one rank after the other: by each as soon as a message of the last comes."""
    x, rows = values(rank), torch.cat([values(rank, shift=r) for r in range(size)])
    gathered, listed = torch.empty(size * 4), [torch.empty(4, dtype=x.dtype) for _ in range(size)]
    reduced, root = x.clone(), values(0) if rank == 0 else torch.zeros(4, dtype=x.dtype)
    part, scattered, swapped = torch.empty_like(x), torch.empty_like(x), torch.empty_like(rows)
    calls = {
        "all_gather": lambda: dist.all_gather(listed, x, async_op=True),
        "single": lambda: dist.all_gather_into_tensor(gathered, x.float(), async_op=True),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, rows.clone(), async_op=True),
        "broadcast": lambda: dist.broadcast(root, 0, async_op=True),
        "reduce": lambda: dist.reduce(reduced, 0, async_op=True),
        "scatter": lambda: dist.scatter(
            scattered, list(rows.chunk(size)) if rank == 0 else None, async_op=True
        ),
        "all_to_all": lambda: dist.all_to_all_single(swapped, rows, async_op=True),
        "barrier": lambda: dist.barrier(async_op=True),
    }
    works = []
    for call in calls.values():
        if rank:
            dist.recv(torch.empty(1), rank - 1)
        works.append(call())
        if rank + 1 < size:
            dist.send(torch.ones(1), rank + 1)
    for work in works:
        work.wait()
    all_values = torch.cat([values(r) for r in range(size)])
    check(torch.cat(listed), all_values)
    check(gathered, all_values)
    check(part, total(size, shift=rank))
    check(root, values(0))
    check(reduced, total(size) if rank == 0 else x)
    check(scattered, values(0, shift=rank))
    check(swapped, torch.cat([values(r, shift=rank) for r in range(size)]))


def future_without_a_wait(rank, size):
    """The thread alone makes progress; callbacks begin more, in their order."""
    x, sums = values(rank), []

    def reduce_again(future):
        (reduced,) = future.value()
        dist.all_reduce(reduced)
        sums.append(reduced.clone())
        return reduced

    if rank == size - 1:
        time.sleep(0.2)
    work = dist.all_reduce(x, async_op=True)
    chained = work.get_future().then(reduce_again)
    z = values(rank, shift=5)
    other = dist.all_reduce(z, async_op=True)
    while not chained.done():
        time.sleep(0.001)
    other.wait()
    check(sums[0], size * total(size))
    check(z, total(size, shift=5))


def inference_mode(rank, size):
    with torch.inference_mode():
        x, rows = values(rank).clone(), [torch.empty(4, dtype=torch.float64) for _ in range(size)]
        if rank:
            dist.recv(torch.empty(1), rank - 1)
        work = dist.all_gather(rows, x, async_op=True)
        if rank + 1 < size:
            dist.send(torch.ones(1), rank + 1)
        while not work.is_completed():
            time.sleep(0.001)
        work.wait()
    check(torch.cat(rows), torch.cat([values(r) for r in range(size)]))


def wait_with_a_limit(rank, size):
    x = values(rank)
    if rank == 0:
        work = dist.all_reduce(x, async_op=True)
        try:
            work.wait(timedelta(seconds=0.05))
        except Exception as error:
            assert "not over within 0.05 s" in str(error)
        else:
            raise AssertionError("the wait ended before its limit")
        dist.send(torch.ones(1), 1)
        work.wait()
    else:
        if rank == 1:
            dist.recv(torch.empty(1), 0)
        dist.all_reduce(x)
    check(x, total(size))


def error_in_wait(rank, size):
    """Calls that differ raise in the waits of all ranks; the group goes on."""
    work = dist.all_reduce(torch.ones(3 + rank), async_op=True)
    try:
        work.wait()
    except UsageError as error:
        assert "torch.float32 3" in str(error)
    else:
        raise AssertionError("no error")
    assert work.exception() is not None
    assert not work.is_success()
    barrier_after(rank, size)


def destroyed_with_work(rank, size):
    group, x = dist.new_group(), values(rank)
    if rank:
        dist.recv(torch.empty(1), rank - 1)
    works = [dist.all_reduce(x, group=group, async_op=True) for _ in range(3)]
    if rank + 1 < size:
        dist.send(torch.ones(1), rank + 1)
    dist.destroy_process_group(group)
    assert all(work.is_completed() for work in works)
    check(x, total(size) * size**2)


CASES = [
    send_after_all_reduce, groups_in_opposite_order, second_call_synchronous, many_outstanding,
    mixed_with_messages, barrier_after, coalesced, every_collective, future_without_a_wait,
    inference_mode, wait_with_a_limit, error_in_wait, destroyed_with_work,
]  # fmt: skip


def main() -> None:
    mode, names = sys.argv[1], sys.argv[2:]
    MODES[mode]()
    torch.set_num_threads(1)
    dist.init_process_group("hpctrain", timeout=timedelta(seconds=LIMIT_S))
    rank, size = dist.get_rank(), dist.get_world_size()
    spin = f"import os\nwhile os.getppid() == {os.getpid()}: pass"  # also if this rank is killed
    command = [sys.executable, "-c", spin]
    burners = [subprocess.Popen(command) for _ in range(2 if rank == 0 else 0)]
    try:
        for case in CASES:
            if not names or case.__name__ in names:
                faulthandler.dump_traceback_later(LIMIT_S, exit=True)
                start_s = time.perf_counter()
                case(rank, size)
                print(f"{case.__name__}: {time.perf_counter() - start_s:.3f} s", flush=True)
                faulthandler.cancel_dump_traceback_later()
    finally:
        for burner in burners:
            burner.kill()
    dist.all_reduce(torch.ones(1), async_op=True)  # is nobody's wait, and ends before MPI


if __name__ == "__main__":
    main()
