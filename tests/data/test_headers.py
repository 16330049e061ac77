"""Headers of arrays: interpreter failures are not reported as faults of the file."""

from __future__ import annotations

import io

import numpy as np
import pytest

from hpctrain.core.errors import UsageError
from hpctrain.data import npy


@pytest.mark.parametrize("failures, read", [(3, True), (1000, False)])
def test_a_header_is_parsed_again(monkeypatch, failures, read):
    """CPython 3.11 raises this where two threads parse at once."""
    layout, parse = npy._FORMATS[(1, 0)]
    remaining = [failures]

    def now_and_then(file):
        remaining[0] -= 1
        if remaining[0] >= 0:
            raise SystemError("AST constructor recursion depth mismatch")
        return parse(file)

    monkeypatch.setitem(npy._FORMATS, (1, 0), (layout, now_and_then))
    file = io.BytesIO()
    np.save(file, np.ones((2, 3)))
    file.seek(0)
    if read:
        assert npy.read_header(file, "x", "y") == ((2, 3), False, np.dtype("f8"))
    else:
        with pytest.raises(UsageError, match="depth mismatch"):
            npy.read_header(file, "x", "y")
