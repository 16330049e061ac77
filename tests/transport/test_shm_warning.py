"""The warning about a nearly full /dev/shm before MPI starts."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from hpctrain.core.launchers import ALONE, Launched
from hpctrain.hardware import shm
from hpctrain.transport.placement import shm_warning

FIRST = Launched("hydra", 0, 4, 0, 2)
# who asks, bytes free -> whether it says something
ROOM = [
    (FIRST, 65536, True),
    (replace(FIRST, rank=1, local_rank=1), 0, False),
    (FIRST, shm.LEAST, False),
    (ALONE, 0, False),
]


@pytest.mark.parametrize("launched, free, says", ROOM)
def test_little_room_is_said_once_per_node(launched, free, says, monkeypatch, caplog):
    monkeypatch.setattr(shm, "free", lambda folder: free)
    monkeypatch.setattr(shm_warning.time, "sleep", lambda seconds: None)
    with caplog.at_level(logging.WARNING, "hpctrain"):
        shm_warning.warn(launched)
    assert ("64 KiB free in /dev/shm" in caplog.text) == says
    assert ("--shm-size" in caplog.text) == says


def test_no_dev_shm_is_said(tmp_path):
    assert "No such file" in shm.too_little(tmp_path / "none")
