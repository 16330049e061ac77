"""im2col on a device: the CUDA source, compiled for the host, against loops of NumPy."""

from __future__ import annotations

import numpy as np
import on_host
import pytest
from cases import dtype_of

from hpctrain import nn
from hpctrain.core import xp
from hpctrain.nn.cuda import im2col

#: images (n, h, w, c), kernel, stride, padding
CASES = [
    ((2, 6, 5, 1), 3, 1, 1),
    ((3, 7, 7, 8), 3, 2, 1),
    ((1, 4, 4, 16), 1, 2, 0),
    ((2, 5, 8, 3), 2, 2, 0),
    ((2, 9, 6, 4), 5, 3, 2),
    ((2, 3, 3, 2), 3, 1, 3),
    ((2, 8, 8, 24), 3, 2, 1),
]
DTYPES = ("float32", "float64", "float16", "bfloat16")


@pytest.fixture(params=[False, True], ids=["told in Python", "source"])
def compiled(request, gpu, monkeypatch):
    """Run kernels as the stand-in tells them, and their sources by the host's compiler."""
    if request.param:
        on_host.install(monkeypatch)


def drawn(shape, dtype: str) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(dtype_of(dtype))


def rows_of(x, kernel, stride, padding):
    """Return the windows of `x`, and (oh, ow)."""
    n, h, w, c = x.shape
    oh, ow = ((length + 2 * padding - kernel) // stride + 1 for length in (h, w))
    q = np.pad(x, ((0, 0), (padding, padding), (padding, padding), (0, 0)))
    rows = np.zeros((n, oh, ow, kernel, kernel, c), x.dtype)
    for oy, ox in np.ndindex(oh, ow):
        y, z = oy * stride, ox * stride
        rows[:, oy, ox] = q[:, y : y + kernel, z : z + kernel]
    return rows, (oh, ow)


def image_of(rows, shape, stride, padding):
    """Return what each pixel has sent, added in the order of the places of the kernel."""
    n, oh, ow, kernel, _, c = rows.shape
    wide = np.float32 if rows.itemsize == 2 else rows.dtype
    padded = np.zeros((n, shape[1] + 2 * padding, shape[2] + 2 * padding, c), wide)
    for i, j in np.ndindex(kernel, kernel):
        padded[:, i : i + stride * oh : stride, j : j + stride * ow : stride][:, :oh, :ow] += rows[
            :, :, :, i, j
        ].astype(wide)
    return padded[:, padding:, padding:][:, : shape[1], : shape[2]].astype(rows.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_windows_become_rows_and_come_back(compiled, dtype):
    import cupy

    for shape, kernel, stride, padding in CASES:
        x = drawn(shape, dtype)
        expected, size = rows_of(x, kernel, stride, padding)
        rows = im2col.image_to_columns(cupy.asarray(x), size, kernel, stride, padding)
        assert rows.shape == (expected.size // (kernel**2 * shape[3]), kernel**2 * shape[3])
        assert rows.get().tobytes() == expected.tobytes()
        arguments = drawn(expected.shape, dtype)
        flat = cupy.asarray(arguments.reshape(rows.shape))
        back = im2col.columns_to_image(flat, shape, size, kernel, stride, padding)
        reported = image_of(arguments, shape, stride, padding)
        assert back.get().tobytes() == reported.tobytes()


LAYERS = {
    "3x3": nn.Conv2d(16, 3, padding=1),
    "3x3, stride 2": nn.Conv2d(8, 3, stride=2, padding=1, bias=False),
    "1x1": nn.Conv2d(4, 1),
    "1x1, stride 2": nn.Conv2d(4, 1, stride=2, bias=False),
    "5x5": nn.Conv2d(3, 5),
}


@pytest.mark.parametrize("n", [3, 0])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_on_a_device(compiled, gpu, name, n):
    import cupy

    layer, shape = LAYERS[name], (9, 8, 4)
    x = drawn((n, *shape), "float32")
    p = {k: drawn(item.shape, "float32") for k, item in layer.parameters(shape).items()}
    reported = []
    for to in (np.asarray, cupy.asarray):
        local = {k: to(a) for k, a in p.items()}
        g = {k: to(np.empty_like(a)) for k, a in p.items()}
        gpu.counts.clear()
        y, saved = layer.forward(local, to(x), nn.Key(0, 0, 0))
        dx = layer.backward(local, g, saved, y + y, True)
        reported.append([xp.to_host(a) for a in (y, dx, *g.values())])
    # One to make rows, one to take them apart; nothing where a window is a pixel.
    assert gpu.counts["raw kernel"] == (0 if name == "1x1" or not n else 2)
    for result, expected in zip(reported[1], reported[0], strict=True):
        assert result.shape == expected.shape
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-4)
