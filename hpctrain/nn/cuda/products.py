"""Products of batches of matrices by cuBLAS, of transposed ones and of 16 bits, without copies.

CuPy's own product of batches copies what is transposed, takes 32 bits or more, and never has TF32.
cuBLAS stores matrices by columns: what it sees of C = A B in our memory is CT = BT AT.
"""

from __future__ import annotations

from math import prod

import numpy as np

from hpctrain.core.xp import Array, namespace

#: Values of cudaDataType.
CUDA_TYPES = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 14}
#: One and zero, in the dtype of the sums.
FACTORS = {kind: (np.ones(1, kind), np.zeros(1, kind)) for kind in ("float32", "float64")}


def multiply(
    a: Array, b: Array, out: Array, *, transpose_a: bool = False, transpose_b: bool = False
) -> None:
    """Write the products of `a` (..., m, k) and `b` (..., k, n) into `out` (..., m, n).

    A transposed one is stored as (..., k, m) or (..., n, k). All arrays are contiguous, and all
    leading axes equal. `a` and `b` have one dtype; of 16 bits, `out` may have float32. Sums are
    made in float64 for float64, else in float32; float32 may be multiplied as TF32, see
    `allow_tf32`. Asynchronous, in the current stream.
    """
    *batch, m, n = out.shape
    k = a.shape[-2 if transpose_a else -1]
    if not out.size:
        return
    xp = namespace(a)
    cublas, wide = xp.cuda.cublas, "float64" if a.dtype == np.float64 else "float32"
    compute_type = cublas.CUBLAS_COMPUTE_64F if wide == "float64" else cublas.CUBLAS_COMPUTE_32F
    settings = xp._core._routines_linalg  # see `allow_tf32`
    allows_tf32 = settings.get_compute_type(np.float32) == settings.COMPUTE_TYPE_TF32
    if a.dtype == np.float32 and allows_tf32:
        compute_type = cublas.CUBLAS_COMPUTE_32F_FAST_TF32
    one, zero = (factor.ctypes.data for factor in FACTORS[wide])
    cublas.gemmStridedBatchedEx(
        xp.cuda.device.get_cublas_handle(), int(transpose_b), int(transpose_a), n, m, k,
        one, *_matrices(b), *_matrices(a), zero, *_matrices(out),
        prod(batch), compute_type, cublas.CUBLAS_GEMM_DEFAULT,
    )  # fmt: skip


def _matrices(x: Array) -> tuple[int, int, int, int]:
    """Return address and type of matrices, and the elements of a row and of a matrix."""
    rows, columns = x.shape[-2:]
    return x.data.ptr, CUDA_TYPES[x.dtype.name], columns, rows * columns
