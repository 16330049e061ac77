"""CUDA sources compiled as C++ for the host: a few threads compute the result of a whole grid.

    kernels = on_host.compiled(folder, [("float32", source), ...])
    kernels["dropout_float32"](*on_host.arguments(y, x, np.int64(7), ...))

Called so, one thread does all of it. After `on_host.install(monkeypatch)` what the product launches
runs in blocks, one after the other, of threads that run at once and wait for each other where the
source says so: a wait that is missing is seen, though not each time.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import product
from pathlib import Path
from threading import Lock

import numpy as np
import pytest
from fakes import functions
from fakes.kernels import written
from fakes.machine import machine
from fakes.work import write

from hpctrain.core import kernels

HOST = """
#include <cmath>
#include <cstring>
#include <pthread.h>
#define __global__
#define __device__ static inline
#define __shared__ static
#define __align__(n) alignas(n)
struct Place { int x, y; };
static thread_local Place blockIdx{0, 0}, threadIdx{0, 0};
static Place blockDim{1, 1}, gridDim{1, 1};
static pthread_barrier_t all;
extern "C" void begin(int threads, int blocks) {
    blockDim = {threads, 1}; gridDim = {blocks, 1};
    pthread_barrier_init(&all, nullptr, threads); }
extern "C" void here(int thread, int block, int row) {
    threadIdx = {thread, 0}; blockIdx = {block, row}; }
static inline void __syncthreads() { if (blockDim.x > 1) pthread_barrier_wait(&all); }
template <class T> static inline T atomicAdd(T* at, T more) {
    return __atomic_fetch_add(at, more, __ATOMIC_RELAXED); }
template <class T> static inline T atomicMin(T* at, T other) {
    T seen = __atomic_load_n(at, __ATOMIC_RELAXED);
    while (other < seen && !__atomic_compare_exchange_n(at, &seen, other, true, __ATOMIC_RELAXED,
                                                        __ATOMIC_RELAXED)) {}
    return seen; }
static inline float __uint_as_float(unsigned x) { float y; memcpy(&y, &x, 4); return y; }
static inline unsigned __float_as_uint(float x) { unsigned y; memcpy(&y, &x, 4); return y; }
#define ROUNDED(type, letter) \\
    static inline type __##letter##add_rn(type x, type y) { return x + y; } \\
    static inline type __##letter##sub_rn(type x, type y) { return x - y; } \\
    static inline type __##letter##mul_rn(type x, type y) { return x * y; }
ROUNDED(float, f)
ROUNDED(double, d)
static inline unsigned long long __umul64hi(unsigned long long x, unsigned long long y) {
    return (unsigned __int128)x * y >> 64; }
"""
HALF = """
static inline float wide(unsigned short x) { _Float16 y; memcpy(&y, &x, 2); return y; }
static inline unsigned short narrow(float x) { _Float16 y = x; unsigned short z;
    memcpy(&z, &y, 2); return z; }
"""
C_TYPES = {"f4": ctypes.c_float, "f8": ctypes.c_double, "i4": ctypes.c_int, "i8": ctypes.c_longlong,
           "u8": ctypes.c_ulonglong}  # fmt: skip


def compiled(folder: Path, sources: Iterable[tuple[str, str]]) -> ctypes.CDLL:
    """Return the kernels of sources, named "kernel_suffix" by the suffix beside; skip without g++.

    No two of one suffix have a kernel of the same name.
    """
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    texts = [HOST]
    for number, (suffix, source) in enumerate(sources):
        text = source.replace(kernels.KINDS["float16"][2], HALF)
        text = re.sub(r'(extern "C" __global__\s+void \w+)', rf"\1_{suffix}", text)
        texts.append(f"namespace number_{number} {{ {text} }}")
    (folder / "kernels.cpp").write_text("\n".join(texts))
    command = [
        compiler,
        "-shared",
        "-fPIC",
        "-ffp-contract=off",
        "-O1",
        "-pthread",
        "-o",
        "kernels.so",
    ]
    message = subprocess.run([*command, "kernels.cpp"], cwd=folder, capture_output=True, text=True)
    if "_Float16" in message.stderr:
        pytest.skip("needs a g++ that knows 16-bit floats")
    assert message.returncode == 0, message.stderr
    return ctypes.CDLL(str(folder / "kernels.so"))


@cache
def _alone(source: str) -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as folder:
        return compiled(Path(folder), [("alone", source)])


THREADS, BLOCKS = 4, 2  #: of a block, and at most so many blocks, whatever was asked for
_one_at_a_time = Lock()  # of ranks that are threads


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(THREADS, "kernels")


class RawKernel:
    """cupy.RawKernel for arrays of the stand-in: the source itself, in few threads."""

    def __init__(self, code, name):
        self._library = _alone(code)
        self._kernel = self._library[f"{name}_alone"]
        self._name, self._written = name, written(code, name)

    def __call__(self, grid, block, args):
        machine().count("raw kernel")

        def run(*hosts):
            self._run(grid, hosts)

        run.__qualname__ = self._name
        write(run, *args, written=self._written)

    def _run(self, grid, hosts) -> None:
        blocks, args = min(grid[0], BLOCKS), arguments(*hosts)

        def thread(number: int, block: int, row: int) -> None:
            self._library.here(number, block, row)
            self._kernel(*args)

        with _one_at_a_time:
            self._library.begin(THREADS, blocks)
            for block, row in product(range(blocks), range(grid[1])):
                at = [block] * THREADS, [row] * THREADS
                list(_pool().map(thread, range(THREADS), *at))


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all that is launched run as its source says; skip where that cannot be compiled."""
    _alone(kernels.written("", "float16"))
    monkeypatch.setattr(functions, "RawKernel", RawKernel)


def arguments(*args: object) -> list:
    """Return arrays and numbers of NumPy as a kernel takes them."""
    return [
        ctypes.c_void_p(x.ctypes.data)
        if isinstance(x, np.ndarray)
        else C_TYPES[x.dtype.str[1:]](x.item())
        for x in args
    ]
