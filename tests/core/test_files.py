"""Reading of untrusted files: the whole content, or one error with the place of the fault."""

from __future__ import annotations

import json
import os
import socket

import pytest
from fuzz import campaign, in_memory, limited, mutated, torn, value_or_refusal

from hpctrain.core import atomic, files, opening
from hpctrain.core.errors import UsageError

FULL = pytest.mark.full


def fifo(path):
    os.mkfifo(path)


def listening(path):
    with socket.socket(socket.AF_UNIX) as local:
        local.bind(os.path.relpath(path))


def unreadable(path):
    path.write_text("{}")
    path.chmod(0)
    if os.access(path, os.R_OK):
        pytest.skip("root reads everything")


ODD_FILES = {
    "nothing": (lambda path: None, "expected a file, seen nothing"),
    "directory": (lambda path: path.mkdir(), "expected a regular file, seen a directory"),
    "FIFO": (fifo, "expected a regular file, seen a FIFO"),
    "socket": (listening, "expected a regular file, seen a socket"),
    "not readable": (unreadable, "cannot be read: Permission denied"),
    "a hole of a terabyte": (
        lambda path: (path.touch(), os.truncate(path, 1 << 40)),
        f"bytes, seen {1 << 40}",
    ),
    "not UTF-8": (lambda path: path.write_bytes(b"{\n\xff}"), ", line 2: expected UTF-8 text"),
    "empty": (lambda path: path.touch(), ", column 1: expected JSON"),
    "half": (lambda path: path.write_text('{"a":\n [1,'), ", line 2, column 5: expected JSON"),
    "deep": (lambda path: path.write_text("[" * 200_000), "seen too many levels"),
    "long integer": (lambda path: path.write_text("1" * 5000), "seen an integer of too many"),
    "half a character": (lambda path: path.write_text('{"a": "\\ud800"}'), "seen half of"),
    "an array": (lambda path: path.write_text("[1]"), "expected a JSON object, seen [1]"),
}


#: links: (what is made, what is said where the user named it, and below a run's folder)
ODD_LINKS = {
    "link to a FIFO": (
        lambda path: (fifo(path.with_name("fifo")), path.symlink_to("fifo")),
        "expected a regular file, seen a FIFO",
        "expected a regular file, seen a link to fifo",
    ),
    "link to zeros": (
        lambda path: path.symlink_to("/dev/zero"), "regular file, seen a device", "a link to /dev/z"
    ),
    "link to nowhere": (
        lambda path: path.symlink_to("gone"), "seen a link to gone, missing", "seen a link to gone"
    ),
    "loop": (
        lambda path: path.symlink_to(path.name), "Too many levels of sym", "seen a link to file"
    ),
    "link to a file": (
        lambda path: (path.with_name("target").write_text("x"), path.symlink_to("target")),
        "expected JSON", "seen a link to target",
    ),
}  # fmt: skip


@pytest.mark.parametrize("levels", [opening.NAMED, 1])
@pytest.mark.parametrize("make, named, below", ODD_LINKS.values(), ids=ODD_LINKS)
def test_links_are_followed_where_a_user_named_them(tmp_path, make, named, below, levels):
    make(tmp_path / "file")
    with limited(2), pytest.raises(files.FileError) as error:
        files.read_json_object(tmp_path / "file", files.MIB, levels)
    assert (below if levels else named) in str(error.value)


ACCESSES = {
    "append": lambda path, levels: files.append_lines(path, "{}\n", levels),
    "replace": lambda path, levels: atomic.replace(path, "", levels),
    "create": lambda path, levels: opening.create(path, levels).close(),
    "create a new one": lambda path, levels: opening.create(path, levels, exclusive=True).close(),
    "read": lambda path, levels: files.read_bytes(path, 9, levels),
    "remove": opening.remove,
    "sync": files.sync,
    "make a folder": opening.make_folder,
    "list": lambda path, levels: opening.names_in(path.parent, levels - 1),
    "sweep": lambda path, levels: atomic.sweep(path.parent, levels - 1),
}


@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize("access", ACCESSES)
def test_no_folder_below_a_run_leads_out_of_it(tmp_path, access, depth):
    outside = tmp_path / "outside"
    (outside / "inner").mkdir(parents=True)
    for folder in (outside, outside / "inner"):
        (folder / "file").write_text("mine")
        (folder / ".file.json.1-1.1").write_text("of a writer that has ended")
        os.utime(folder / ".file.json.1-1.1", (0, 0))
    before = sorted((path, path.stat().st_mtime_ns) for path in outside.rglob("*"))
    (tmp_path / "run").mkdir()
    (tmp_path / "run/a").symlink_to(outside)
    path = tmp_path / "run/a" / "file" if depth == 2 else tmp_path / "run/a/inner/file"
    if access == "sweep":
        ACCESSES[access](path, depth)
    else:
        with pytest.raises((OSError, files.FileError), match="expected a folder, seen a link to"):
            ACCESSES[access](path, depth)
    assert sorted((path, path.stat().st_mtime_ns) for path in outside.rglob("*")) == before


def of_another(path, monkeypatch):
    path.write_text("x")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)


def of_two_names(path, monkeypatch):
    path.write_text("x")
    os.link(path, path.with_name("another"))


@pytest.mark.parametrize("make, flags, reason", [
    (of_another, os.O_RDONLY, "expected a file of yours, seen a file of user"),
    (of_two_names, os.O_RDWR, "expected a file with a single name, seen a hard link"),
])  # fmt: skip
def test_files_of_others_are_not_opened(tmp_path, monkeypatch, make, flags, reason):
    make(tmp_path / "file", monkeypatch)
    with pytest.raises(OSError, match=reason):
        opening.open_file(tmp_path / "file", flags, own=True)


@pytest.mark.parametrize("make, reported", ODD_FILES.values(), ids=ODD_FILES)
def test_an_odd_file_is_refused_at_once(tmp_path, monkeypatch, make, reported):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "file"
    make(path)
    with limited(2), pytest.raises(files.FileError) as error:
        files.read_json_object(path, files.MIB)
    assert str(path) in str(error.value) and reported in str(error.value)
    assert isinstance(error.value, files.MissingError) == (
        reported == "expected a file, seen nothing"
    )
    assert isinstance(error.value, UsageError)


def test_nul_in_a_name(tmp_path):
    with pytest.raises(files.FileError, match=r"a\\0b cannot be read"):
        files.read_bytes(tmp_path / "a\0b", 1)


@pytest.mark.parametrize("size, fits", [(0, True), (9, True), (10, True), (11, False)])
def test_a_limit_counts_bytes(tmp_path, size, fits):
    (tmp_path / "file").write_bytes(b"x" * size)
    if fits:
        assert files.read_bytes(tmp_path / "file", 10) == b"x" * size
    else:
        with pytest.raises(files.FileError, match="at most 10 bytes, seen 11"):
            files.read_bytes(tmp_path / "file", 10)


def test_files_without_a_size_are_read_and_limited():
    assert b"MemTotal" in files.read_bytes("/proc/meminfo", files.MIB)
    with pytest.raises(files.FileError, match="at most 10 bytes"):
        files.read_bytes("/proc/meminfo", 10)


def with_step(entry):
    """Return the entry if it has a step."""
    if not isinstance(entry.get("step"), int):
        raise ValueError(f"'step': expected an integer, seen {entry.get('step')}")
    return entry


@pytest.mark.parametrize(
    "text, steps, torn_bytes",
    [
        (b"", [], 0),
        (b'{"step": 1}\n{"step": 2}\n', [1, 2], 0),
        (b'{"step": 1}\n{"step": 2}', [1, 2], 0),  # by hand, or all but the last byte was written
        (b'{"step": 1}\n{"st', [1], 4),
        (b'{"step": 1}\n\0\0\0\0', [1], 4),  # power was lost: the length came to the disk first
        (b'{"step": 1}\n3', [1], 1),
        (b'{"step', [], 6),
    ],
)
def test_half_a_last_line_does_not_count(tmp_path, text, steps, torn_bytes):
    (tmp_path / "log").write_bytes(text)
    log = files.read_log(tmp_path / "log", with_step)
    assert ([entry["step"] for entry in log.entries], log.torn_bytes) == (steps, torn_bytes)


@pytest.mark.parametrize(
    "line, reported",
    [
        (b'{"st', "column 2: expected JSON"),
        (b"", "column 1: expected JSON"),
        (b"3", "expected a JSON object, seen 3"),
        (b"{}", "'step': expected an integer, seen None"),
        (b'{"step": 3}\xff', "expected UTF-8 text, seen byte 0xff"),
        (b'{"step": 3}{"step": 4}', "column 12: expected JSON (extra data)"),
    ],
)
def test_any_other_line_is_damage_and_has_its_number(tmp_path, line, reported):
    (tmp_path / "log").write_bytes(b'{"step": 1}\n' + line + b'\n{"step": 5}\n')
    with pytest.raises(files.FileError) as error:
        files.read_log(tmp_path / "log", with_step)
    assert f"{tmp_path / 'log'}, line 2" in str(error.value) and reported in str(error.value)


def test_a_line_has_a_limit(tmp_path):
    (tmp_path / "log").write_bytes(b'{"step": 1}\n' * 100)
    assert len(files.read_log(tmp_path / "log", with_step, 12).entries) == 100
    with pytest.raises(files.FileError, match="lines of at most 11 bytes"):
        files.read_log(tmp_path / "log", with_step, 11)


@pytest.mark.parametrize("count", [500, pytest.param(20_000, marks=FULL)])
def test_damaged_logs(count):
    """A torn log is a prefix of what was written; a damaged one is that, changed, or refused."""

    def case(rng):
        steps = [{"step": n, "loss": rng.random(), "x": "é"} for n in range(rng.randint(0, 6))]
        complete = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in steps).encode()
        cut = rng.random() < 0.5
        path.write_bytes(torn(complete, rng) if cut else mutated(complete, rng))
        log = value_or_refusal(lambda: files.read_log(path, with_step), path)
        if cut:
            lines, rest = path.read_bytes().rpartition(b"\n")[::2]
            ended = len(lines.splitlines())
            assert log.entries in (steps[:ended], steps[: ended + 1])
            assert log.torn_bytes == (len(rest) if len(log.entries) == ended else 0)
        elif not isinstance(log, files.FileError):
            assert all(isinstance(row["step"], int) for row in log.entries)

    with in_memory() as folder:
        path = folder / "log"
        campaign("damaged logs", count, case)


def test_a_file_is_on_the_disk_whole_before_it_gets_its_name(tmp_path, monkeypatch):
    synced: list[int] = []

    def fsync(handle):
        assert list(tmp_path.glob("[!.]*")) == []
        synced.append(os.fstat(handle).st_size)

    monkeypatch.setattr(os, "fsync", fsync)
    atomic.replace(tmp_path / "file", "x" * 10)
    assert synced == [10] and (tmp_path / "file").read_text() == "x" * 10


def test_the_lines_of_a_log_are_synced_by_its_name(tmp_path, monkeypatch):
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(os.fstat(handle).st_ino))
    files.append_lines(tmp_path / "log.jsonl", '{"step": 1}\n')
    files.sync(tmp_path / "log.jsonl")
    assert synced == [(tmp_path / "log.jsonl").stat().st_ino]


def test_a_whole_last_line_without_its_end_is_kept(tmp_path):
    log = tmp_path / "log.jsonl"
    log.write_text('{"step": 1}\n{"step": 2}')
    files.append_lines(log, '{"step": 3}\n')
    assert files.read_log(log, dict).entries == [{"step": 1}, {"step": 2}, {"step": 3}]
    log.write_text('{"step": 1}\n{"step": 2')
    files.append_lines(log, '{"step": 3}\n')
    assert files.read_log(log, dict).entries == [{"step": 1}, {"step": 3}]
