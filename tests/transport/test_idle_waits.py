"""Waits beside a computing thread: few polls, and an end soon after the message."""

from __future__ import annotations

import pytest

from hpctrain.transport import pace

MS = 1e-3


class Clock:
    """Time that passes in sleep alone; a piece that is complete at `ready`."""

    def __init__(self):
        self.now = self.ready = 0.0
        self.naps, self.looks = [], 0

    def perf_counter(self):
        return self.now

    def sleep(self, seconds):
        self.naps.append(seconds)
        self.now += seconds

    def is_complete(self):
        self.looks += 1
        return self.now >= self.ready

    def naps_of(self, patience, takes):
        self.naps, self.ready = [], self.now + takes
        patience.until(self.is_complete)
        return self.naps


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(pace, "time", clock)
    return clock


def test_the_first_nap_is_a_quarter_of_the_last_wait(clock):
    patience = pace.Pace()
    first = clock.naps_of(patience, 2 * MS)
    assert first == pytest.approx([0.05 * MS, 0.1 * MS, 0.2 * MS, 0.4 * MS, 0.8 * MS, MS])
    assert clock.naps_of(patience, 2 * MS) == pytest.approx([sum(first) / 4, MS, MS])
    assert clock.naps_of(patience, 0.0) == []


def test_after_a_nap_it_looks_several_times(clock):
    """A poll moves no more than a library takes from the kernel at once."""
    naps = clock.naps_of(pace.Pace(), 2 * MS)
    assert clock.looks == len(naps) * pace.Pace.polls + 1


@pytest.mark.parametrize("last, nap", [(1000 * MS, MS), (0.01 * MS, 0.05 * MS)])
def test_no_nap_is_longer_or_shorter_than_these(clock, last, nap):
    patience = pace.Pace()
    clock.naps_of(patience, last)
    assert clock.naps_of(patience, 0.01 * MS) == pytest.approx([nap])
