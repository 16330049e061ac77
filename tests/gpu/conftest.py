"""A process begins to use its GPU before the guard of leftovers looks: CUDA keeps descriptors."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session", autouse=True)
def _gpu_in_use() -> None:
    try:
        import cupy

        device_count = cupy.cuda.runtime.getDeviceCount()
    except Exception:  # no CuPy, no driver, or none that fits
        return
    if device_count:
        x = cupy.ones((2, 2))
        cupy.cuda.alloc_pinned_memory(1)
        with cupy.cuda.Stream():
            (x @ x + 1).get()
