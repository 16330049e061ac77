"""Prefetch changes only the time: order, number of reads, errors, end of the data."""

from __future__ import annotations

import threading
import time
from contextlib import closing

import pytest
from limits import clock

from hpctrain.core.errors import HpctrainError, UsageError
from hpctrain.data import Prefetch, prefetch

AHEAD = [0, 1, 2, 5]


def readers() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "hpctrain-reader"]


@pytest.fixture(autouse=True)
def nobody_reads_on():
    yield
    assert not readers()


def until(condition, timeout_s: float = 5.0) -> None:
    """Wait for what a thread is about to do."""
    end = clock() + timeout_s
    while not condition() and clock() < end:
        time.sleep(0.001)
    assert condition()


@pytest.mark.parametrize("ahead", AHEAD)
def test_each_step_is_read_once_and_in_order(ahead):
    read: list[int] = []
    with closing(
        Prefetch(lambda step: read.append(step) or step * 10, range(3, 40), ahead)
    ) as batches:
        assert [batches.next() for _ in range(37)] == [step * 10 for step in range(3, 40)]
        for _ in range(2):
            with pytest.raises(StopIteration):
                batches.next()
    assert read == list(range(3, 40))


@pytest.mark.parametrize("ahead", AHEAD)
def test_no_more_batches_are_made_than_allowed(ahead):
    read: list[int] = []
    with closing(Prefetch(lambda step: read.append(step) or step, range(100), ahead)) as batches:
        for used in range(6):
            until(lambda maximum=used + ahead: len(read) >= maximum)
            time.sleep(0.01)  # time to do wrong
            assert len(read) == used + ahead
            assert batches.next() == used
    assert len(read) <= 6 + ahead


@pytest.mark.parametrize("ahead", AHEAD)
def test_an_error_is_raised_where_its_batch_would_be_used(ahead):
    def read(step):
        if step == 4:
            raise UsageError("label 12 is out of range")
        return step

    with closing(Prefetch(read, range(9), ahead)) as batches:
        assert [batches.next() for _ in range(4)] == [0, 1, 2, 3]
        if ahead:
            until(lambda: not readers())
        with pytest.raises(UsageError, match="label 12"):
            batches.next()


def test_a_read_that_does_not_return_is_given_up(monkeypatch):
    monkeypatch.setattr(prefetch, "JOIN_TIMEOUT_S", 0.05)
    answer = threading.Event()
    with (
        pytest.raises(HpctrainError, match=r"within 0\.1 s; is the file system"),
        closing(Prefetch(lambda step: answer.wait(), range(9), 2, timeout_s=0.1)) as batches,
    ):
        batches.next()
    answer.set()
    until(lambda: not readers())


def test_an_end_in_the_middle_leaves_no_thread():
    with closing(Prefetch(lambda step: step, range(10**9), 3)) as batches:
        assert batches.next() == 0
    assert not readers()
