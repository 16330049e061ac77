"""`hpctrain.core.xp`: the same functions on arrays of NumPy and of CuPy."""

from __future__ import annotations

import sys
import threading

import numpy as np
import pytest

from hpctrain.core import xp
from hpctrain.core.errors import UsageError

HOST = np.arange(6, dtype=np.float32)


def on(kind: str, values: np.ndarray = HOST):
    """Return `values` on the host or on the device."""
    return values.copy() if kind == "host" else sys.modules["cupy"].asarray(values)


@pytest.fixture(params=["host", "device"])
def kind(request, gpu):
    return request.param


def test_an_array_finds_its_library(gpu):
    assert xp.namespace(HOST) is np and not xp.on_device(HOST)
    assert xp.namespace(on("device")) is sys.modules["cupy"] and xp.on_device(on("device"))


def test_to_the_host_and_back(kind, gpu):
    x = on(kind)
    host = xp.to_host(x)
    assert type(host) is np.ndarray and (host == HOST).all() and (host is x) == (kind == "host")
    inbox = np.empty_like(HOST)
    assert xp.to_host(x, out=inbox) is inbox and (inbox == HOST).all()
    y = xp.like(x, HOST, np.float64)
    assert type(y) is type(x) and y.dtype == np.float64 and (xp.to_host(y) == HOST).all()
    assert xp.like(x, x) is x
    xp.copy(x, HOST + 1)
    xp.copy(inbox, x)
    assert (inbox == HOST + 1).all()
    assert gpu.counts["implicit"] == 0 and gpu.counts["D2H"] == (4 if kind == "device" else 0)


def test_addresses(kind):
    x = on(kind)
    assert xp.address_of(x[2:]) - xp.address_of(x) == 8


def twice_and_more(xp, y, x, factor):
    x += factor
    xp.multiply(x, 2, out=y)


def test_one_kernel_on_a_device(kind, gpu):
    y, x = on(kind), on(kind)
    for _ in range(2):
        xp.fused(twice_and_more, x)(y, x, 1.0)
    assert (xp.to_host(y) == 2 * (HOST + 2)).all()
    assert gpu.counts["fused"] == (2 if kind == "device" else 0)


def test_streams_of_threads_wait_for_events(lazy_gpu):
    x = on("device")
    x += 1
    ready, observed = xp.event(x), []

    def body():
        with xp.own_stream(x):
            xp.wait_for(ready)
            y = x * 2
            xp.finish(y)
            observed.append(y._host.copy())  # as it lies in memory, with no further wait

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert (observed[0] == 2 * (HOST + 1)).all()
    assert lazy_gpu.counts["stream sync"] == 1 and not lazy_gpu.counts["device sync"]


def test_the_host_has_no_streams():
    assert xp.event(HOST) is None
    xp.wait_for(None)
    with xp.own_stream(HOST):
        xp.finish(HOST)


def test_numbers_come_while_the_device_goes_on(lazy_gpu):
    x = on("device")
    x += 1
    arrived = xp.fetch(x)
    x += 1
    assert (arrived() == HOST + 1).all() and lazy_gpu.counts["event sync"] == 1
    assert not lazy_gpu.counts["stream sync"] and not lazy_gpu.counts["pageable"]
    assert (xp.fetch(HOST)() == HOST).all()


def test_the_fewer_bytes_travel(gpu):
    sent = (np.zeros(100, np.uint8), np.zeros(100, np.float64))
    for values, nbytes in zip(sent, (100, 400), strict=True):
        gpu.counts.clear()
        assert xp.like(on("device"), values).dtype == np.float32
        assert gpu.counts["H2D bytes"] == HOST.nbytes + nbytes


def test_zeros_of_the_device(gpu):
    x = xp.zeros(3, np.float32)
    assert xp.on_device(x) and (xp.to_host(x) == 0).all()


def test_memory_and_stream_of_another_library(gpu):
    """An alias has the same memory, and work in its stream is in the order of that stream."""
    import cupy

    x = cupy.arange(6, dtype=np.float32)
    alias = xp.array_at(x.data.ptr, x.nbytes, np.dtype(np.float32), 0)
    stream = cupy.cuda.Stream(non_blocking=True)
    before = cupy.cuda.get_current_stream()
    before.synchronize()
    with xp.foreign_stream(stream.ptr, 0):
        assert cupy.cuda.get_current_stream() is stream
        alias += 1
        stream.synchronize()
    assert cupy.cuda.get_current_stream() is before
    assert (xp.to_host(x) == np.arange(1, 7)).all()


def test_memory_of_another_library_needs_cupy(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(UsageError, match="need CuPy: pip install hpctrain"):
        xp.array_at(0, 4, np.dtype(np.float32), 0)
