"""im2col and col2im on a GPU: one kernel copies windows to rows, one sums rows into images.

    columns   out[n, oy, ox, i, j, c] = x[n, oy s + i - q, ox s + j - q, c], 0 beyond the border
    image     dx[n, y, x, c] = sum of rows[n, (y + q - i) / s, (x + q - j) / s, i, j, c]
                               over all i, j for which both quotients are indices of a window

s is the stride, q the padding. There is no padded copy of an image. Each pixel of dx adds the
gradients of its windows in the same order as the host, and is written once. A thread moves 16 bytes
at once if the number of channels allows it.

Cost: kernel^2 / stride^2 times the image is written or read, and the image once.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from hpctrain.core.kernels import PACK_BYTES, launch, written
from hpctrain.core.xp import Array, namespace

SOURCE = """
struct alignas(WIDTH * sizeof(T)) Some { T at[WIDTH]; };  // channels, counted by so many
typedef INDEX Index;
#define SHAPE int h, int w, int channels, int oh, int ow, int kernel, int stride, int padding

extern "C" __global__
void columns(Some* out, const Some* x, SHAPE, long long count) {
    long long first = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    for (long long at = first; at < count; at += (long long)gridDim.x * blockDim.x) {
        Index rest = at, c = rest % channels; rest /= channels;
        int j = rest % kernel; rest /= kernel;
        int i = rest % kernel; rest /= kernel;
        int ox = rest % ow; rest /= ow;
        int oy = rest % oh; rest /= oh;
        int row = oy * stride + i - padding, column = ox * stride + j - padding;
        Some value = {};
        if (row >= 0 && row < h && column >= 0 && column < w)
            value = x[((rest * h + row) * w + column) * channels + c];
        out[at] = value;
    }
}

extern "C" __global__
void image(Some* dx, const Some* rows, SHAPE, long long count) {
    long long first = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    for (long long at = first; at < count; at += (long long)gridDim.x * blockDim.x) {
        Index rest = at, c = rest % channels; rest /= channels;
        int x = rest % w + padding; rest /= w;
        int y = rest % h + padding; rest /= h;
        REAL sum[WIDTH] = {};
        for (int i = 0; i < kernel; i++) {
            int oy = (y - i) / stride;
            if (y < i || oy * stride != y - i || oy >= oh) continue;
            for (int j = 0; j < kernel; j++) {
                int ox = (x - j) / stride;
                if (x < j || ox * stride != x - j || ox >= ow) continue;
                Index row = (rest * oh + oy) * ow + ox;
                Some part = rows[((row * kernel + i) * kernel + j) * channels + c];
                #pragma unroll
                for (int k = 0; k < WIDTH; k++) sum[k] += wide(part.at[k]);
            }
        }
        Some value;
        #pragma unroll
        for (int k = 0; k < WIDTH; k++) value.at[k] = narrow(sum[k]);
        dx[at] = value;
    }
}
"""


@cache
def cuda_source(dtype: str, width: int, use_64_bits: bool) -> str:
    """Return the CUDA source for `width` channels at once, with indices of 32 or 64 bits."""
    index = "unsigned long long" if use_64_bits else "unsigned"
    return written(SOURCE.replace("WIDTH", str(width)).replace("INDEX", index), dtype)


def image_to_columns(
    x: Array, output_size: tuple[int, int], kernel: int, stride: int, padding: int
) -> Array:
    """Return the windows of images `x` (n, h, w, c), rows (n * oh * ow, kernel * kernel * c).

    `output_size` is (oh, ow).
    """
    x = namespace(x).ascontiguousarray(x)
    n, _, _, c = x.shape
    out = namespace(x).empty((n * output_size[0] * output_size[1], kernel * kernel * c), x.dtype)
    _launch_kernel("columns", out, x, x.shape, (*output_size, kernel, stride, padding))
    return out


def columns_to_image(
    rows: Array, shape: tuple[int, ...], output_size: tuple[int, int], kernel: int, stride: int,
    padding: int,
) -> Array:  # fmt: skip
    """Return images of `shape` (n, h, w, c): each pixel is the sum of its copies in `rows`."""
    dx = namespace(rows).empty(shape, rows.dtype)
    _launch_kernel("image", dx, rows, shape, (*output_size, kernel, stride, padding))
    return dx


def _launch_kernel(
    name: str, out: Array, values: Array, shape: tuple[int, ...], window_args: tuple[int, ...]
) -> None:
    if not out.size:
        return
    _, h, w, c = shape
    width = PACK_BYTES // out.itemsize
    if c % width or any(array.data.ptr % PACK_BYTES for array in (out, values)):
        width = 1
    count = out.size // width
    shape_args = [np.int32(n) for n in (h, w, c // width, *window_args)]
    code = cuda_source(out.dtype.name, width, max(out.size, values.size) >> 31 > 0)
    launch(out, code, name, count, (out, values, *shape_args, np.int64(count)))
