"""Planted races, each with a clean twin: bodies of tests that look for them.

`x` are ROWS zeros of the device, and all work is over when a body begins.
"""

from __future__ import annotations

import ctypes
import threading

import numpy as np

from hpctrain.transport.threads.ranks import run_ranks

ROWS = 1000


def between_streams(cupy, x, clean):
    """An event between two streams."""
    a, b = two_streams(cupy)
    with a:
        x += 1
        written = a.record()
    if clean:
        b.wait_event(written)
    with b:
        x * 2


def write_after_read(cupy, x, clean):
    """An event between a reader and what writes next."""
    a, b = two_streams(cupy)
    with a:
        x * 2
    if clean:
        b.wait_event(a.record())
    with b:
        x += 1


def buckets_in_a_page(cupy, x, clean):
    """Two streams in one page: neighbours, or overlapping by an element."""
    a, b = two_streams(cupy)
    with a:
        x[:100] += 1
    with b:
        x[100 if clean else 99 : 200] += 1


def sent_before_it_was_copied(cupy, x, clean):
    """A wait between a copy to pinned memory and the send of it."""
    host = _pinned(cupy)
    stream = cupy.cuda.get_current_stream()
    x.get(out=host, blocking=False)
    if clean:
        stream.synchronize()
    _exchange(host, np.empty(ROWS))


def pointer_sent_before_it_was_computed(cupy, x, clean):
    """A wait for a kernel before MPI gets the pointer of what it writes."""
    with cupy.cuda.Stream(non_blocking=True) as stream:
        x += 1
        if clean:
            stream.synchronize()
        _exchange(by_pointer(x), np.empty(ROWS))


def kernel_reads_what_is_received_again(cupy, x, clean):
    """A wait between a copy out of an inbox and the next receive into it."""
    inbox = _pinned(cupy)
    _exchange(np.ones(ROWS), inbox)
    x.set(inbox)
    if clean:
        cupy.cuda.get_current_stream().record().synchronize()
    _exchange(np.ones(ROWS), inbox)


def read_before_it_arrived(cupy, x, clean):
    """A wait for a receive before a copy reads its buffer."""
    inbox = _pinned(cupy)

    def rank(link):
        if link.rank:
            return link.isend(np.ones(ROWS), 0).wait()
        request = link.irecv(inbox, 1)
        if clean:
            request.wait()
        with cupy.cuda.Stream(non_blocking=True) as stream:
            x.set(inbox)
            stream.synchronize()
        return request.wait()

    run_ranks(2, rank)


def filled_before_it_was_sent(cupy, x, clean):
    """A wait for a send before a copy fills its buffer again."""
    host = _pinned(cupy)

    def rank(link):
        if link.rank:
            return link.irecv(np.empty(ROWS), 0).wait()
        request = link.isend(host, 1)
        if clean:
            request.wait()
        with cupy.cuda.Stream(non_blocking=True) as stream:
            x.get(out=host, blocking=False)
            stream.synchronize()
        return request.wait()

    run_ranks(2, rank)


def freed_before_it_was_read(cupy, x, clean):
    """A wait for a reader before memory goes back to the pool, for the stream it came from."""
    a, b = two_streams(cupy)
    with a:
        y = x * 2
        b.wait_event(a.record())
    with b:
        y * 2
    if clean:
        a.wait_event(b.record())
    del y
    with a:
        cupy.zeros(ROWS)


def pinned_freed_before_it_was_read(cupy, x, clean):
    """A wait for a copy out of pinned memory before that goes back."""
    host = _pinned(cupy)
    x.set(host)
    if clean:
        cupy.cuda.get_current_stream().synchronize()
    del host


def between_threads(cupy, x, clean):
    """A wait for the stream of a thread before another thread hears of it."""
    is_written = threading.Event()

    def rank(link):
        with cupy.cuda.Stream(non_blocking=True) as stream:
            if link.rank == 0:
                x.fill(1)
                if clean:
                    stream.synchronize()
                is_written.set()
            else:
                is_written.wait()
                x.get()

    run_ranks(2, rank)


def between_ranks(cupy, x, clean):
    """A message between what a rank writes, and a neighbour that reads it."""
    turn = threading.Lock()  # it orders the ranks in time, and carries no clock
    turn.acquire()

    def rank(link):
        with cupy.cuda.Stream(non_blocking=True) as stream:
            if link.rank == 0:
                x.fill(1)
                stream.synchronize()
                turn.release()
            if clean:
                (link.irecv(np.empty(1), 0) if link.rank else link.isend(np.empty(1), 1)).wait()
            if link.rank == 1:
                turn.acquire()
                x.get()

    run_ranks(2, rank)


FREED = "memory is given back"
#: What races -> the two accesses
PLANTED = {
    between_streams: ("iadd writes", "mul reads"),
    write_after_read: ("mul reads", "iadd writes"),
    buckets_in_a_page: ("ndarray.__setitem__ writes", "iadd writes"),
    sent_before_it_was_copied: ("get writes", "send to rank 0 reads"),
    pointer_sent_before_it_was_computed: ("iadd writes", "send to rank 0 reads"),
    kernel_reads_what_is_received_again: ("set reads", "receive from rank 1 writes"),
    read_before_it_arrived: ("receive from rank 1 writes", "set reads"),
    filled_before_it_was_sent: ("send to rank 1 reads", "get writes"),
    freed_before_it_was_read: (FREED, "mul reads"),
    pinned_freed_before_it_was_read: (FREED, "set reads"),
    between_threads: ("ndarray.fill writes", "get reads"),
    between_ranks: ("ndarray.fill writes", "get reads"),
}


def two_streams(cupy):
    return [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]


def _pinned(cupy):
    return np.frombuffer(cupy.cuda.alloc_pinned_memory(8 * ROWS), np.float64, ROWS)


def by_pointer(x):
    """Return what MPI takes an array of the device for."""
    raw = (ctypes.c_char * x.nbytes).from_address(x.data.ptr)
    return np.frombuffer(raw, x.dtype)


def _exchange(sent, inbox):
    """Send from one rank to another, from threads that know what this one knows."""
    import cupy

    def rank(link):
        cupy.cuda.Device().use()
        (link.isend(sent, 0) if link.rank else link.irecv(inbox, 1)).wait()

    run_ranks(2, rank)
