"""CUDA sources as C++ of the host: one thread in place of many computes what all do together.

    kernels = on_host.compiled(folder, {"dropout_float32": ("dropout", source), ...})
    kernels["dropout_float32"](pointer, ctypes.c_longlong(7), ...)

A block of threads is one thread; where blocks differ in what they do, `at` moves that thread on.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from hpctrain import kernels

HOST = """
#include <cstring>
#define __global__
#define __device__ static inline
#define __shared__ static
#define __align__(n) alignas(n)
struct Place { int x, y; };
static Place blockIdx{0, 0}, threadIdx{0, 0}, blockDim{1, 1}, gridDim{1, 1};
extern "C" void grid(int x, int y) { gridDim = {x, y}; }
extern "C" void block(int x, int y) { blockIdx = {x, y}; }
static inline void __syncthreads() {}
template <class T> static inline T atomicAdd(T* at, T more) {
    T was = *at; *at += more; return was; }
static inline float __uint_as_float(unsigned x) { float y; memcpy(&y, &x, 4); return y; }
static inline unsigned __float_as_uint(float x) { unsigned y; memcpy(&y, &x, 4); return y; }
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


def compiled(folder: Path, sources: Mapping[str, tuple[str, str]]) -> ctypes.CDLL:
    """Return functions by name, each the kernel of a name in a source; skip where no g++ is."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    texts = [HOST]
    for name, (kernel, source) in sources.items():
        text = source.replace(kernels.KINDS["float16"][2], HALF)
        texts.append(f"namespace of_{name} {{ {text.replace(f' {kernel}(', f' {name}(')} }}")
    (folder / "kernels.cpp").write_text("\n".join(texts))
    command = [compiler, "-shared", "-fPIC", "-ffp-contract=off", "-O1", "-o", "kernels.so"]
    said = subprocess.run([*command, "kernels.cpp"], cwd=folder, capture_output=True, text=True)
    if "_Float16" in said.stderr:
        pytest.skip("needs a g++ that knows 16-bit floats")
    assert said.returncode == 0, said.stderr
    return ctypes.CDLL(str(folder / "kernels.so"))


def arguments(*args: object) -> list:
    """Return arrays and numbers of NumPy as a kernel takes them."""
    return [
        ctypes.c_void_p(x.ctypes.data)
        if isinstance(x, np.ndarray)
        else C_TYPES[x.dtype.str[1:]](x.item())
        for x in args
    ]
