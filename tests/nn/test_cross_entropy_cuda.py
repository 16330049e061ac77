"""Cross-entropy on a device: the CUDA source, compiled for the host, against NumPy."""

from __future__ import annotations

import numpy as np
import on_host
import pytest

from hpctrain import nn
from hpctrain.core.errors import UsageError
from hpctrain.nn.losses import wait_for_sums

CLOSE = {"float32": 1e-6, "float64": 1e-14}
#: rows, classes; a row of one class, of more than threads, more rows than blocks, none
SHAPES = [(5, 3), (7, 1), (4, 700), (5000, 2), (2, 3, 40), (0, 4)]


@pytest.fixture(params=[False, True], ids=["told in Python", "source"])
def compiled(request, gpu, monkeypatch):
    """Run the kernel as the stand-in tells it, and its source by the host's compiler."""
    if request.param:
        on_host.install(monkeypatch)


@pytest.mark.parametrize("scale", [None, 0.25])
@pytest.mark.parametrize("dtype", CLOSE)
def test_it_is_that_of_the_host(compiled, gpu, dtype, scale):
    import cupy

    generator = np.random.default_rng(0)
    for *shape, classes in SHAPES:
        z = (30 * generator.standard_normal((*shape, classes))).astype(dtype)
        z[..., -1] = z[..., 0]  # of equal ones the first is the answer
        labels = generator.integers(classes, size=shape).astype(np.uint16)
        expected, slope = nn.cross_entropy(z.astype("f8"), labels, scale)
        gpu.counts.clear()
        coming, dz = nn.cross_entropy(cupy.asarray(z), cupy.asarray(labels), scale)
        assert gpu.counts["raw kernel"] == bool(labels.size)
        sums = wait_for_sums(coming)
        assert sums["accuracy"] == expected["accuracy"]
        loss = expected["loss"].sum
        assert sums["loss"].sum == pytest.approx(loss, rel=CLOSE[dtype], abs=1e-12)
        assert (dz is None) == (scale is None)
        if scale is not None:
            assert (dz.shape, dz.dtype) == (z.shape, z.dtype)
            np.testing.assert_allclose(dz.get(), slope, rtol=0, atol=CLOSE[dtype])


@pytest.mark.parametrize("label", [-1, 3, 1 << 40])
def test_a_label_that_is_none_is_refused(compiled, label):
    import cupy

    z, labels = cupy.asarray(np.ones((2, 3))), cupy.asarray(np.array([0, label]))
    coming, dz = nn.cross_entropy(z, labels, 1.0)
    assert dz.shape == (2, 3)
    with pytest.raises(UsageError, match=f"label {label} is out of range; expected .* 0 .. 2"):
        wait_for_sums(coming)


def test_not_a_number_stays_none(compiled):
    import cupy

    z = cupy.asarray(np.array([[0.0, np.nan], [1.0, 2.0]]))
    coming, _ = nn.cross_entropy(z, cupy.asarray(np.array([0, 1])), 1.0)
    assert np.isnan(wait_for_sums(coming)["loss"].sum)
