"""Products of matrices: the setting of TF32, which changes no result here; cuBLAS by address."""

from __future__ import annotations

import ctypes
import os
from types import ModuleType

import ml_dtypes
import numpy as np

from fakes import races
from fakes.machine import CUDARuntimeError, machine
from fakes.streams import get_current_stream

COMPUTE_TYPE_DEFAULT, COMPUTE_TYPE_TF32 = 1, 7


def get_compute_type(dtype) -> int:
    """Return what products of `dtype` are made of; the first call looks at CUPY_TF32."""
    kinds, key = machine().compute_types, _key(dtype)
    if key not in kinds:
        allowed = key == "f" and int(os.getenv("CUPY_TF32", "0")) > 0
        set_compute_type(dtype, COMPUTE_TYPE_TF32 if allowed else COMPUTE_TYPE_DEFAULT)
    return kinds[key]


def set_compute_type(dtype, compute_type) -> None:
    if compute_type == COMPUTE_TYPE_TF32:
        machine().must_have_devices()  # CuPy asks for its compute capability
    elif compute_type != COMPUTE_TYPE_DEFAULT:
        raise ValueError(f"Unknown compute type: {compute_type}")
    machine().compute_types[_key(dtype)] = compute_type


def _key(dtype) -> str:
    char = np.dtype(dtype).char
    if char not in "efFdD":
        raise TypeError(f"dtype is not supported: {dtype}")
    return char.lower()


#: cudaDataType -> dtype
DTYPES = {0: np.float32, 1: np.float64, 2: np.float16, 14: ml_dtypes.bfloat16}
CUBLAS_COMPUTE_32F, CUBLAS_COMPUTE_64F, CUBLAS_COMPUTE_32F_FAST_TF32 = 68, 70, 77
CUBLAS_GEMM_DEFAULT = -1


def gemmStridedBatchedEx(
    handle, transa, transb, m, n, k, alpha, a, a_type, lda, a_stride, b, b_type, ldb, b_stride,
    beta, c, c_type, ldc, c_stride, count, compute_type, algorithm,
) -> None:  # fmt: skip
    """C = alpha op(A) op(B) + beta C, of matrices stored by columns, as cuBLAS defines it.

    Done at once, after the work of the stream: nothing else keeps the memory until later.
    """
    real = {68: np.float32, 70: np.float64, 77: np.float32}[compute_type]
    if (a_type != b_type) or (compute_type == 70) != (a_type == 1) or c_type not in (a_type, 0):
        raise CUDARuntimeError(15, "CUBLAS_STATUS_NOT_SUPPORTED")
    stream = get_current_stream()
    spans = [
        (address, (count * stride) * np.dtype(DTYPES[kind]).itemsize)
        for address, kind, stride in (
            (a, a_type, a_stride), (b, b_type, b_stride), (c, c_type, c_stride)
        )
    ]  # fmt: skip
    races.note(stream, "product", spans[:2], spans[2:])
    stream.run()
    x = _by_columns(a, a_type, (k, m) if transa else (m, k), lda, a_stride, count)
    y = _by_columns(b, b_type, (n, k) if transb else (k, n), ldb, b_stride, count)
    z = _by_columns(c, c_type, (m, n), ldc, c_stride, count)
    x, y = (w.swapaxes(1, 2) if t else w for w, t in ((x, transa), (y, transb)))
    factors = (ctypes.c_double if real is np.float64 else ctypes.c_float).from_address
    total = factors(alpha).value * (x.astype(real) @ y.astype(real))
    if factors(beta).value:
        total += factors(beta).value * z.astype(real)
    z[...] = total.astype(z.dtype)


def _by_columns(address, kind, shape, ld, stride, count) -> np.ndarray:
    """Return the matrices (count, *shape) of which each column is `ld` elements after the last."""
    if machine().region(address) is None or ld < shape[0]:
        raise CUDARuntimeError(7, "CUBLAS_STATUS_INVALID_VALUE")
    dtype = np.dtype(DTYPES[kind])
    span = ((count - 1) * stride + (shape[1] - 1) * ld + shape[0]) * dtype.itemsize
    raw = (ctypes.c_char * span).from_address(machine().host(address))
    strides = np.array([stride, 1, ld]) * dtype.itemsize
    return np.ndarray((count, *shape), dtype, raw, strides=tuple(strides.tolist()))


def cublas() -> ModuleType:
    """Return cupy.cuda.cublas, with what is used of it."""
    result = ModuleType("cupy.cuda.cublas")
    for name in (
        "gemmStridedBatchedEx", "CUBLAS_COMPUTE_32F", "CUBLAS_COMPUTE_64F",
        "CUBLAS_COMPUTE_32F_FAST_TF32", "CUBLAS_GEMM_DEFAULT",
    ):  # fmt: skip
        setattr(result, name, globals()[name])
    return result


def module() -> ModuleType:
    """Return cupy._core, with what is used of it."""
    core, result = ModuleType("cupy._core"), ModuleType("cupy._core._routines_linalg")
    for name in ("COMPUTE_TYPE_DEFAULT", "COMPUTE_TYPE_TF32", "get_compute_type",
                 "set_compute_type"):  # fmt: skip
        setattr(result, name, globals()[name])
    core._routines_linalg = result
    return core
