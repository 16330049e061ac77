"""The stand-in for CuPy: it refuses what CuPy refuses, and detects its classes of errors."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import fakes


@pytest.fixture
def cupy(gpu):
    import cupy

    return cupy


@pytest.fixture
def lazy(lazy_gpu):
    import cupy

    return cupy


@pytest.fixture
def late():
    """Yield CuPy on a machine whose work is as late as can be, and which looks for no races."""
    with fakes.installed(lazy=True, races=False, seed=None):
        import cupy

        yield cupy


def seen(x) -> np.ndarray:
    """Return what whoever has nothing but the address finds there."""
    raw = (ctypes.c_char * x.nbytes).from_address(x.data.ptr)
    return np.frombuffer(raw, x.dtype).reshape(x.shape).copy()


HOST = np.arange(12, dtype=np.float32).reshape(3, 4)
SAME = {  # the same bytes as NumPy
    "operators": lambda xp, x: (x * 2 + x.T.reshape(3, 4)) / 3,
    "in place": lambda xp, x: xp.multiply(x, x, out=x),
    "sums": lambda xp, x: x.sum(axis=0) @ x.T,
    "rows": lambda xp, x: x[xp.arange(3), xp.arange(3) % 2],
    "masks": lambda xp, x: x[x > 3],
    "reduceat": lambda xp, x: xp.add.reduceat(x, xp.asarray([0, 2]), axis=0),
    "windows": lambda xp, x: xp.lib.stride_tricks.as_strided(x, (2, 2), x.strides).reshape(4),
    "einsum": lambda xp, x: xp.einsum("ij,ij->i", x, x),
    "numpy's own ufuncs": lambda xp, x: np.add(x, x, out=x),
    "numbers": lambda xp, x: np.float32(2) * x + True,
}


@pytest.mark.parametrize("name", SAME)
@pytest.mark.parametrize("mode", ["cupy", "lazy"])
def test_computes_what_numpy_computes(request, mode, name):
    xp = request.getfixturevalue(mode)
    result = SAME[name](xp, xp.asarray(HOST))
    assert type(result) is xp.ndarray
    expected = SAME[name](np, HOST.copy())
    assert result.dtype == expected.dtype and (result.get() == expected).all()


IMPLICIT = {
    "array": np.asarray,
    "float": lambda x: float(x[0, 0]),
    "bool": lambda x: bool(x[0, 0]),
    "int": lambda x: int(x[0, 0]),
    "index": lambda x: [1, 2][x[0, 0]],
    "list": lambda x: x.tolist(),
    "numbers": lambda x: list(x[0]),
    "item": lambda x: x[0, 0].item(),
}


@pytest.mark.parametrize("name", IMPLICIT)
def test_host_access_must_be_asked_for(gpu, cupy, name):
    with pytest.raises(fakes.ImplicitHostAccess):
        IMPLICIT[name](cupy.asarray(HOST))
    assert gpu.counts["implicit"] == 1 and not gpu.counts["D2H"]


@pytest.mark.parametrize(
    "mix",
    [
        lambda xp, x: x + HOST,
        lambda xp, x: HOST + x,
        lambda xp, x: xp.add(x, x, out=HOST),
        lambda xp, x: np.add(HOST, 1, out=x),
        lambda xp, x: xp.sum(HOST),
        lambda xp, x: x.__setitem__(..., HOST),
    ],
)
def test_arrays_of_the_host_are_refused(cupy, mix):
    with pytest.raises(TypeError):
        mix(cupy, cupy.asarray(HOST))


def test_copies_and_waits_are_counted(gpu, cupy):
    x = cupy.asarray(HOST)
    x.get()
    cupy.cuda.get_current_stream().synchronize()
    assert gpu.counts == {"H2D": 1, "H2D bytes": 48, "D2H": 1, "D2H bytes": 48, "pageable": 1,
                          "stream sync": 2}  # fmt: skip


def test_work_waits_for_its_stream(late):
    x = late.asarray(HOST)
    late.cuda.get_current_stream().synchronize()
    x += 1
    assert (seen(x) == HOST).all()  # what a send before the sync would take
    late.cuda.get_current_stream().synchronize()
    assert (seen(x) == HOST + 1).all()


def test_streams_wait_for_events_alone(late):
    x = late.zeros(3)
    late.cuda.Device().synchronize()
    item, other = (late.cuda.Stream(non_blocking=True) for _ in range(2))
    with item:
        x += 1
        event = item.record()
        x += 1
    with other:
        y = x * 1
    other.synchronize()
    assert (seen(y) == 0).all()  # nobody had told it to wait
    other.wait_event(event)
    with other:
        y = x * 1
    other.synchronize()
    assert (seen(y) == 1).all() and not item.done  # and what came behind the event still waits
    item.synchronize()
    assert (seen(x) == 2).all()


def test_the_null_stream_waits_for_blocking_streams(lazy):
    x = lazy.zeros(3)
    with lazy.cuda.Stream():
        x += 1
    y = x + 1
    lazy.cuda.Stream.null.synchronize()
    assert (seen(y) == 2).all()


def test_threads_begin_on_device_0():
    with fakes.installed(devices=2, peers=False):
        import cupy

        cupy.cuda.Device(1).use()
        x, result = cupy.ones(3), []

        def body():
            try:
                result.append(x + 1)
            except ValueError as error:
                result.append(str(error))

        thread = threading.Thread(target=body)
        thread.start()
        thread.join()
        assert "array device = 1 while current = 0" in result[0]
        assert (x + 1).device.id == 1


def test_copies_by_address(gpu, cupy):
    run = cupy.cuda.runtime
    pinned = cupy.cuda.alloc_pinned_memory(48)
    host = np.frombuffer(pinned, np.float32, 12).reshape(3, 4)
    host[...] = HOST
    address, stream = run.malloc(48), cupy.cuda.Stream()
    run.memcpyAsync(address, pinned.ptr, 48, run.memcpyHostToDevice, stream.ptr)
    memory = cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(address, 48, None), 0)
    x = cupy.ndarray((3, 4), np.float32, memory)
    assert (x.get() == HOST).all() and gpu.counts["pageable"] == 1  # of get, not of memcpyAsync
    with pytest.raises(fakes.CUDARuntimeError):
        run.memcpyAsync(pinned.ptr, address, 48, run.memcpyHostToDevice, 0)
    run.free(address)
    assert gpu.used(0) == 0


def test_memory_ends():
    with fakes.installed(memory_bytes=1000):
        import cupy

        with pytest.raises(cupy.cuda.memory.OutOfMemoryError, match="allocating 4,000 bytes"):
            cupy.zeros(1000, np.float32)
        with pytest.raises(cupy.cuda.runtime.CUDARuntimeError, match="cudaErrorMemoryAllocation"):
            cupy.cuda.runtime.malloc(4000)
    with fakes.installed(pinned_bytes=1000):
        import cupy

        saved = cupy.cuda.alloc_pinned_memory(600)
        with pytest.raises(cupy.cuda.runtime.CUDARuntimeError, match="cudaErrorMemoryAllocation"):
            cupy.cuda.alloc_pinned_memory(600)
        del saved
        assert cupy.cuda.alloc_pinned_memory(600)


def test_hidden_pointers_lead_nowhere_else():
    with fakes.installed(hidden=True):
        import cupy

        x, n = cupy.asarray(HOST), HOST.nbytes
        destination = cupy.cuda.runtime.malloc(n)
        cupy.cuda.runtime.memcpy(
            destination, x[1:].data.ptr, n - 16, cupy.cuda.runtime.memcpyDefault
        )
        memory = cupy.cuda.UnownedMemory(destination, n, None)
        y = cupy.ndarray((2, 4), np.float32, cupy.cuda.MemoryPointer(memory, 0))
        assert ((y + 1).get() == HOST[1:] + 1).all()
        lines = Path("/proc/self/maps").read_text().splitlines()
        maps = [line.split()[0].split("-") for line in lines]
        for pointer in (x.data.ptr, destination):
            assert not any(int(a, 16) <= pointer < int(b, 16) for a, b in maps)


READ = """
import fakes, sys
with fakes.installed():
    import cupy
    address = cupy.cuda.runtime.ipcOpenMemHandle(bytes.fromhex(sys.argv[1]))
    memory = cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(address, 24, None), 0)
    x = cupy.ndarray(3, float, memory)
    x += 1
"""


def test_another_process_opens_memory(gpu, cupy):
    address = cupy.cuda.runtime.malloc(24)
    x = cupy.ndarray(3, float, cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(address, 24, 0), 0))
    x[...] = cupy.arange(3.0)
    handle = cupy.cuda.runtime.ipcGetMemHandle(x[1:].data.ptr)
    path = os.pathsep.join(["tests", os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", READ, handle.hex()]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, check=True, timeout=30)
    assert (x.get() == [1, 2, 3]).all()
    with pytest.raises(fakes.CUDARuntimeError, match="invalid device context"):
        cupy.cuda.runtime.ipcOpenMemHandle(handle)


@pytest.mark.parametrize("devices", [0, None])
def test_no_gpu(devices):
    with fakes.installed(devices=devices):
        import cupy

        with pytest.raises(cupy.cuda.runtime.CUDARuntimeError):
            cupy.cuda.runtime.getDeviceCount()


def test_dlpack_names_the_device(cupy):
    x = cupy.asarray(HOST)
    assert x.__dlpack_device__() == (2, 0) and x.__dlpack__() is not None
    interface = x.__cuda_array_interface__
    assert interface["shape"] == (3, 4) and interface["data"][0] == x.data.ptr
