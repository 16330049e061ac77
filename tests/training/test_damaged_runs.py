"""Runs with damaged, odd or unwritable files: refused before training, or repaired."""

from __future__ import annotations

import errno
import json
import os
import shutil

import pytest
from fuzz import limited
from ranks import run_on

from hpctrain import checkpoint
from hpctrain.checkpoint import manifest
from hpctrain.checkpoint.about import CheckpointFacts
from hpctrain.cli import _guarded
from hpctrain.core import atomic, files
from hpctrain.core.errors import SaveError, UsageError
from hpctrain.core.run_files import folder_lock, run_folder
from hpctrain.training import recipe, runs

SMALL = ["model.widths=[64, 10]", "run.interval_steps=1", "run.device=cpu", "checkpoint.keep=9",
         "checkpoint.every_steps=1"]  # fmt: skip


def train(run, steps, resume=False, size=2):
    spec = recipe.load("digits", [f"run.steps={steps}", *SMALL])
    return run_on("threads", size, lambda world: runs.train(spec, world, run, resume))[0]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a run of three steps, and the parameters after five."""
    run = tmp_path_factory.mktemp("runs") / "run"
    train(run, 3)
    complete = train(shutil.copytree(run, run.with_name("whole")), 5, resume=True)
    return run, complete["params_sha256"]


def fifo(path):
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def link(target):
    def make(path):
        path.unlink(missing_ok=True)
        path.symlink_to(target)

    return make


def text(content):
    return lambda path: path.write_bytes(content)


def elsewhere(path):
    shutil.move(path, path.with_name("elsewhere"))
    path.symlink_to("not-mounted")


def file_instead(path):
    shutil.rmtree(path)
    path.write_text("")


REFUSED = {
    "metrics a FIFO": ("metrics.jsonl", fifo, "expected a regular file, seen a FIFO"),
    "metrics endless": (
        "metrics.jsonl",
        link("/dev/zero"),
        "seen a link to /dev/zero",
    ),
    "metrics not text": ("metrics.jsonl", text(b"\xff\n"), ", line 1: expected UTF-8"),
    "a row a number": ("metrics.jsonl", text(b'{"step": 1}\n3\n'), ", line 2: expected a JSON"),
    "a row without step": ("metrics.jsonl", text(b'{"loss": 1}\n'), ", line 1: 'step': field"),
    "damage in the middle": ("metrics.jsonl", text(b'{"st\n{"step": 2}\n'), ", line 1, column 2"),
    "redone no number": (".redone", text(b"x"), "expected a number of steps, seen 'x'; remove"),
    "redone a FIFO": (".redone", fifo, "expected a regular file, seen a FIFO"),
    "summary damaged": ("summary.json", text(b"{"), "column 2: expected JSON"),
    "summary a FIFO": ("summary.json", fifo, "expected a regular file, seen a FIFO"),
    "summary of another": ("summary.json", text(b'{"status": 1}'), "'status': input should be"),
    "recipe a FIFO": ("recipe.toml", fifo, "expected a regular file, seen a FIFO"),
    "lock a link": (".lock", link("victim"), "regular file, seen a link to victim"),
    "lock a FIFO": (".lock", fifo, "regular file, seen a FIFO"),
    "checkpoints elsewhere": ("checkpoints", elsewhere, "seen a link to not-mounted"),
    "checkpoints a file": ("checkpoints", file_instead, "expected a folder of checkpoints"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_is_refused_and_nothing_is_replaced(tmp_path, trained, name):
    file, make, reported = REFUSED[name]
    run = shutil.copytree(trained[0], tmp_path / "run")
    (run / "victim").write_text("precious")
    make(run / file)
    before = {path: path.read_bytes() for path in run.iterdir() if path.is_file()}
    with limited(20), pytest.raises(UsageError) as error:
        train(run, 5, resume=True)
    assert str(run) in str(error.value) and reported in str(error.value)
    for path, content in before.items():
        assert path.name == ".lock" or path.read_bytes() == content


TORN = {
    "half a row": lambda data: data + b'{"step": 4, "tr',
    "half of the last": lambda data: data[:-20],
    "zeros": lambda data: data + bytes(100),
}


@pytest.mark.parametrize("name", TORN)
def test_half_a_last_row_is_cut_and_said_once(tmp_path, trained, caplog, name):
    run = shutil.copytree(trained[0], tmp_path / "run")
    metrics = run / run_folder.METRICS
    metrics.write_bytes(TORN[name](metrics.read_bytes()))
    assert train(run, 5, resume=True)["params_sha256"] == trained[1]
    steps = [row["step"] for row in run_folder.rows(run)]
    assert steps == ([1, 2, 4, 5] if name == "half of the last" else [1, 2, 3, 4, 5])
    message = [record.message for record in caplog.records if "half a line" in record.message]
    assert message == [f"{metrics} ended in half a line, which is dropped"]


def failing(monkeypatch, module, name, file, times=10**6):
    """Let a function that writes `file` fail so often."""
    genuine, remaining = getattr(module, name), [times]

    def write(path, *args):
        if os.path.basename(path) == file and remaining[0]:
            remaining[0] -= 1
            raise OSError(errno.EIO, "Input/output error", str(path))
        return genuine(path, *args)

    monkeypatch.setattr(module, name, write)


@pytest.mark.parametrize("file", [run_folder.RECIPE])
def test_a_disk_that_fails_at_the_beginning_is_refused(tmp_path, monkeypatch, file):
    failing(monkeypatch, atomic, "replace", file)
    with pytest.raises(UsageError, match=r"recipe.toml cannot be written: Input/output error"):
        train(tmp_path / "run", 2)


def test_the_last_row_is_tried_again(tmp_path, monkeypatch):
    failing(monkeypatch, files, "append_lines", run_folder.METRICS, times=1)
    assert train(tmp_path / "run", 1)["status"] == "done"
    assert [row["step"] for row in run_folder.rows(tmp_path / "run")] == [1]


def test_rows_that_cannot_be_written_are_in_the_checkpoint(tmp_path, trained):
    run = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        failing(patch, files, "append_lines", run_folder.METRICS)
        with pytest.raises(SaveError, match=r"metrics.jsonl lacks the rows of steps 1, 2, 3: "):
            train(run, 3)
    assert run_folder.read_summary(run)["status"] == "failed"
    assert run_folder.read_summary(run)["exit_code"] == 1
    assert not (run / run_folder.METRICS).exists()
    assert train(run, 3, resume=True)["status"] == "done"
    assert [row["step"] for row in run_folder.rows(run)] == [1, 2, 3]
    assert train(run, 5, resume=True)["params_sha256"] == trained[1]
    assert [row["step"] for row in run_folder.rows(run)] == [1, 2, 3, 4, 5]


def test_a_summary_that_cannot_be_written_is_no_success(tmp_path, monkeypatch, caplog):
    failing(monkeypatch, atomic, "replace", run_folder.SUMMARY)
    with pytest.raises(SaveError, match=r"summary.json cannot be written: Input/output error"):
        train(tmp_path / "run", 2)
    assert not (tmp_path / "run" / run_folder.SUMMARY).exists()
    assert "summary.json cannot be written" in caplog.text


def test_a_folder_is_swept_of_what_killed_writers_left(tmp_path, trained):
    run = shutil.copytree(trained[0], tmp_path / "run")
    local, dead = os.uname().nodename, 2**22 + 1  # beyond the largest number of a process
    own = atomic.write_aside(run / "recipe.toml", "")
    earlier = own.name.replace(f".{os.getpid()}-", f".{os.getpid()}-1")  # of a process before us
    old, new = run / f".summary.json.{dead}-1.1@another", own
    gone = [run / f".recipe.toml.{dead}-1.1@{local}",
            run / "replay" / f".a.jsonl.{dead}-1.7@{local}", run / earlier]  # fmt: skip
    stay = [new, run / f".metrics.jsonl.{dead}-1.1@another", run / ".notes.1.2"]
    for path in (old, *gone, *stay):
        path.parent.mkdir(exist_ok=True)
        path.write_text("x")
    os.utime(old, (1, 1))
    with run_folder.claim(run, resume=True):
        pass
    assert not any(path.exists() for path in (old, *gone))
    assert all(path.exists() for path in stay)


def test_what_a_killed_writer_left_does_not_make_a_folder_used(tmp_path):
    (tmp_path / f".recipe.toml.{2**22 + 1}-1.1@{os.uname().nodename}").write_text("x")
    with run_folder.claim(tmp_path, resume=False):
        assert sorted(os.listdir(tmp_path)) == [".lock"]


def test_a_zombie_writes_no_more(tmp_path):
    writer = os.fork()
    if writer == 0:
        atomic.write_aside(tmp_path / "recipe.toml", "")
        os._exit(0)
    try:
        os.waitid(os.P_PID, writer, os.WEXITED | os.WNOWAIT)  # it has ended, and is not reaped
        assert [atomic.is_left(path) for path in tmp_path.iterdir()] == [True]
    finally:
        os.waitpid(writer, 0)


def test_a_lock_is_no_other_name_of_a_file(tmp_path):
    (tmp_path / "victim").write_text("precious")
    run = tmp_path / "run"
    run.mkdir()
    os.link(tmp_path / "victim", run / folder_lock.LOCK)
    with (
        pytest.raises(UsageError, match="expected a file with a single name"),
        run_folder.claim(run, True),
    ):
        pass
    assert (tmp_path / "victim").read_text() == "precious"


@pytest.mark.parametrize("name", ["../../x", "a/b", "\x1b[31mred", "a\nb", "", ".x", "x" * 101])
def test_names_that_are_no_names_of_folders(name):
    with pytest.raises(UsageError) as error:
        recipe.load("digits", [f"run.name={json.dumps(name)}"])
    assert "[run] name" in str(error.value) and str(error.value).isprintable()


@pytest.mark.parametrize("broken", ["metrics.jsonl", "summary.json", "recipe.toml"])
def test_commands_on_a_damaged_run_end_with_2(tmp_path, trained, monkeypatch, capfd, broken):
    run = shutil.copytree(trained[0], tmp_path / "run")
    fifo(run / broken)
    monkeypatch.setattr("sys.argv", ["hpctrain", "report", str(run)])
    with limited(20):
        assert _guarded() == 2
    message = capfd.readouterr().err
    assert str(run / broken) in message and "seen a FIFO" in message and "Traceback" not in message


def test_whatever_a_run_keeps_in_a_checkpoint_has_a_type(trained):
    for result in checkpoint.listing(trained[0]):
        assert result.about.keys() <= CheckpointFacts.model_fields.keys()


def test_a_forged_checkpoint_of_another_model_is_refused(tmp_path, trained):
    run = shutil.copytree(trained[0], tmp_path / "run")
    for result in checkpoint.listing(run):
        table = json.loads((result.path / "manifest.json").read_text())
        del table["sha256"]
        places = table["about"]["weights"]["param"]
        names = sorted(places)
        places[f"{names[0]}x"] = places.pop(names[0])
        (result.path / "manifest.json").write_text(
            json.dumps({**table, "sha256": manifest._hash_table(table)})
        )
    with pytest.raises(UsageError, match=r"does not fit the recipe: 'about.weights'"):
        train(run, 5, resume=True)
