"""The check of PyTorch: its build, and the backends that scripts can name."""

from __future__ import annotations

import pytest

from hpctrain.tools.doctor.examine import check_torch

#: version, entry points, environment, GPU: verdict and words
ROWS = {
    "cpu": ("2.13.0+cpu", ["hpctrain"], {}, False, "ok", "for CPUs; backends hpctrain, gloo"),
    "cuda": ("2.13.0", ["hpctrain"], {}, True, "ok", "with CUDA; backends hpctrain, gloo, nccl"),
    "cuda, no GPU": ("2.13.0", ["hpctrain"], {}, False, "ok", "backends hpctrain, gloo"),
    "switched off": ("2.13.0", ["hpctrain"], {"HPCTRAIN_TORCH": "0"}, False, "note", "gloo alone"),
    "no autoload": (
        "2.13.0",
        ["hpctrain"],
        {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        False,
        "note",
        "TORCH_DEVICE_BACKEND_AUTOLOAD=0",
    ),
    "no entry point": ("2.13.0+cpu", [], {}, False, "note", "no entry point of hpctrain"),
}


@pytest.mark.parametrize("row", ROWS)
def test_the_backends_of_a_build(row):
    version, names, environ, has_gpu, verdict, words = ROWS[row]
    check = check_torch(version, names, environ, has_gpu)
    assert check.verdict == verdict
    assert words in check.seen
    assert bool(check.remedy) == (verdict != "ok")
