"""The folder of a run: one job at a time, rows that survive a crash, a complete summary."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys

import pytest

from hpctrain.core.errors import UsageError
from hpctrain.core.run_files import folder_lock, run_folder


def claim(run, resume=False):
    with run_folder.claim(run, resume):
        return sorted(path.name for path in run.iterdir())


@pytest.mark.parametrize(
    "names, resume, reported",
    [
        ([], False, None),
        ([".lock"], False, None),  # of a job that was refused before it began
        (["a"], True, None),
        (["a"], False, "is in use: it holds a. Add --resume"),
        (["e", "d", "c", "b", "a"], False, "it holds a, b, c, d, .... Add"),
    ],
)
def test_who_may_write(tmp_path, names, resume, reported):
    for name in names:
        (tmp_path / name).touch()
    if reported is None:
        assert claim(tmp_path, resume) == sorted({*names, ".lock"})
        assert claim(tmp_path, True)  # the lock was given back
    else:
        with pytest.raises(UsageError) as error:
            claim(tmp_path, resume)
        assert reported in str(error.value)
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)


@pytest.mark.parametrize("resume", [False, True])
def test_a_file_is_no_folder(tmp_path, resume):
    (tmp_path / "file").touch()
    for run in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UsageError, match="cannot be written"):
            claim(run, resume)


HOLD = """
import os, sys, time
from pathlib import Path
from hpctrain.core.run_files import folder_lock, run_folder as rundir
with rundir.claim(Path(sys.argv[1]), True):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_second_job_is_refused_until_the_first_has_ended_however(tmp_path):
    held = subprocess.Popen([sys.executable, "-c", HOLD, tmp_path], stdout=subprocess.PIPE)
    assert held.stdout.readline() == b"held\n"
    with pytest.raises(UsageError, match=f"being written by process {held.pid} on"):
        claim(tmp_path, True)
    held.kill()
    held.communicate()
    assert claim(tmp_path, True) == [".lock"]


def test_where_there_are_no_locks_it_is_said(tmp_path, monkeypatch, caplog):
    def flock(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(folder_lock.fcntl, "flock", flock)
    assert claim(tmp_path) == [".lock"]
    assert "cannot be locked (Function not implemented)" in caplog.text


def test_begin_drops_the_old_summary_and_tells_where(tmp_path, monkeypatch):
    run = tmp_path / "run"
    run.mkdir()
    run_folder.write_summary(run, {"status": "stopped"})
    with open(os.memfd_create(run_folder.ANNOUNCE_FILE), "rb") as note:
        monkeypatch.setenv(run_folder.ANNOUNCE, f"/proc/{os.getpid()}/fd/{note.fileno()}")
        run_folder.begin(run)
        assert note.read() == str(run).encode()
    assert run_folder.read_summary(run) is None


@pytest.mark.parametrize("target", [True, False])
def test_where_launch_is_gone_nothing_is_announced(tmp_path, monkeypatch, target):
    file = tmp_path / "of another process"
    if target:
        file.write_text("its own")
    monkeypatch.setenv(run_folder.ANNOUNCE, str(file))
    run_folder.begin(tmp_path)
    assert (file.read_text() if target else file.exists()) == ("its own" if target else False)


@pytest.mark.parametrize(
    "step, saved, redone",
    [(0, [], 30), (10, [10], 20), (25, [10, 20], 5), (30, [10, 20, 30], 0), (35, [10, 20, 30], 0)],
)
def test_rows_after_the_resumed_step_go(tmp_path, step, saved, redone):
    for completed in (10, 20, 30):
        run_folder.append_row(tmp_path, {"step": completed})
    with open(tmp_path / run_folder.METRICS, "a") as file:
        file.write('{"step": 4')  # a crash cut it off
    assert run_folder.cut_rows(tmp_path, step) == redone
    assert run_folder.rows(tmp_path) == [{"step": completed} for completed in saved]
    run_folder.append_row(tmp_path, {"step": 99})
    assert run_folder.rows(tmp_path)[-1] == {"step": 99}


def test_rows_with_nan_of_an_older_version_are_read_after_they_were_cut(tmp_path):
    """What is kept is written anew, where NaN is null."""
    ranks = {name: [1.0, float("nan")] for name in ("compute_s", "wait_s", "wire_s")}
    rows = [{"step": step, "wall_s": float("nan"), "ranks": ranks} for step in (1, 2)]
    (tmp_path / run_folder.METRICS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    run_folder.go_back(tmp_path, 1, 0)
    (row,) = run_folder.rows(tmp_path)
    assert row["wall_s"] is None and row["ranks"]["compute_s"] == [1.0, None]


def test_rows_are_added_whole_or_not_at_all(tmp_path):
    run_folder.append_row(tmp_path, {"step": 1}, {"step": 2})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, ((tmp_path / run_folder.METRICS).stat().st_size + 5, hard)
    )
    try:
        with pytest.raises(OSError, match=r"No space|too large"):
            run_folder.append_row(tmp_path, {"step": 3})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    run_folder.append_row(tmp_path, {"step": 3}, {"step": 4})
    assert [row["step"] for row in run_folder.rows(tmp_path)] == [1, 2, 3, 4]


def test_a_folder_without_rows(tmp_path):
    assert run_folder.rows(tmp_path) == []
    assert run_folder.cut_rows(tmp_path, 5) == 0


def test_a_summary_is_whole_or_the_one_before(tmp_path, monkeypatch):
    run_folder.write_summary(tmp_path, {"status": "stopped"})

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        run_folder.write_summary(tmp_path, {"status": "done"})
    assert json.loads((tmp_path / run_folder.SUMMARY).read_text()) == {"status": "stopped"}


def test_a_changed_recipe_is_told(tmp_path, caplog):
    for text in ("a = 1\nb = 2\n", "a = 1\nb = 2\n", "a = 1\nb = 3\n"):
        run_folder.write_recipe(tmp_path, text)
    assert [r.getMessage() for r in caplog.records] == ["the recipe of this run changes: b = 3"]
    assert (tmp_path / run_folder.RECIPE).read_text() == "a = 1\nb = 3\n"


def test_default_folders_never_meet(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_folder.time, "strftime", lambda _: "now")
    observed = []
    for _ in range(3):
        observed.append(run_folder.default_path("digits"))
        observed[-1].mkdir(parents=True)
    assert [str(path) for path in observed] == [
        "runs/digits-now",
        "runs/digits-now-2",
        "runs/digits-now-3",
    ]
