"""The warning about a nearly full /dev/shm before MPI starts."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from hpctrain.core.launchers import SINGLE_RANK, Launched
from hpctrain.transport.shared_memory import dev_shm

FIRST = Launched("hydra", 0, 4, 0, 2)
# who asks, bytes free -> whether it says something
ROOM = [
    (FIRST, 65536, True),
    (replace(FIRST, rank=1, local_rank=1), 0, False),
    (FIRST, dev_shm.MIN_BYTES, False),
    (SINGLE_RANK, 0, False),
]


@pytest.mark.parametrize("launched, free, says", ROOM)
def test_little_room_is_said_once_per_node(launched, free, says, monkeypatch, caplog):
    monkeypatch.setattr(dev_shm, "free_shm_bytes", lambda folder: free)
    monkeypatch.setattr(dev_shm.time, "sleep", lambda seconds: None)
    with caplog.at_level(logging.WARNING, "hpctrain"):
        dev_shm.warn_if_full(launched)
    assert ("64 KiB free in /dev/shm" in caplog.text) == says
    assert ("--shm-size" in caplog.text) == says


def test_no_dev_shm_is_said(tmp_path):
    assert "No such file" in dev_shm.shortage_warning(tmp_path / "none")
