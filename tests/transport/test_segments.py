"""Shared memory that MPI leaves behind: listed per rank, removed after the job.

That real libraries leave nothing where ranks or launch are killed, tests/campaign looks at.
"""

from __future__ import annotations

import ast
import mmap
import os
import tempfile
from pathlib import Path

import pytest

from hpctrain.cluster import guard
from hpctrain.core import launchers
from hpctrain.transport.mpi import segments

BYTES = mmap.PAGESIZE


@pytest.fixture
def segment():
    """A file of shared memory that this process has mapped."""
    number, path = tempfile.mkstemp(prefix="hpctrain-test-", dir=segments.SHM_FOLDER)
    os.truncate(number, BYTES)
    with mmap.mmap(number, BYTES):
        os.close(number)
        yield Path(path)
    Path(path).unlink(missing_ok=True)


@pytest.fixture
def listing(monkeypatch):
    """The list in the memory of launch, here of this process."""
    number = os.memfd_create(launchers.SEGMENTS)
    monkeypatch.setenv(launchers.SEGMENTS, f"/proc/{os.getpid()}/fd/{number}")
    yield number
    os.close(number)


def test_a_segment_is_listed_and_removed(segment, listing):
    segments.announce_segments()
    segments.announce_segments()  # each rank does
    assert segment.exists()
    guard.remove_segments(listing)
    assert not segment.exists()


def test_of_another_rank_that_has_ended_no_segment_is_missed(segment, listing):
    segments.announce_segments()
    segment.unlink()  # as its library does it
    guard.remove_segments(listing)
    assert list(segments.mapped_segments()) == []


def test_another_file_of_that_name_stays(segment, listing):
    segments.announce_segments()
    segment.rename(segment.with_suffix(".gone"))
    segment.touch()
    guard.remove_segments(listing)
    assert segment.exists()
    segment.with_suffix(".gone").unlink()


@pytest.mark.parametrize("exists", [True, False])
def test_nothing_is_written_to_a_file_of_another_process(segment, tmp_path, monkeypatch, exists):
    file = tmp_path / "file"
    if exists:
        file.touch()
    monkeypatch.setenv(launchers.SEGMENTS, str(file))
    segments.announce_segments()
    assert exists == file.exists() and not (exists and file.read_text())


@pytest.mark.processes
def test_a_rank_without_a_launcher_leaves_no_segment(start):
    """MPI_Finalize of Open MPI 5.0 leaves it where no launcher cleans up."""
    program = (
        "import hpctrain as ht; from hpctrain.transport.mpi import segments; ht.init(); "
        "print('mapped', [path for _, path in segments.mapped_segments()])"
    )
    ended = start("-c", program).finish()
    assert ended.returncode == 0
    paths = ast.literal_eval(ended.stdout.partition("mapped ")[2])
    assert [path for path in paths if Path(path).exists()] == []
