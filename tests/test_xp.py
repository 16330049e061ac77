"""Which library an array belongs to, with a stand-in for the one that needs a GPU."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np

from hpctrain.xp import namespace


class DeviceArray:
    """Stands for cupy.ndarray."""


def test_an_array_finds_its_library(monkeypatch):
    assert namespace(np.ones(1)) is np
    fake = SimpleNamespace(ndarray=DeviceArray)
    monkeypatch.setitem(sys.modules, "cupy", fake)
    assert namespace(DeviceArray()) is fake and namespace(np.ones(1)) is np
