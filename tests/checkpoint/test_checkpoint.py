"""Checkpoints: only complete ones are used, whatever fails during or after the write."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from fuzz import limited

from hpctrain import checkpoint
from hpctrain.checkpoint import Piece, manifest, parts
from hpctrain.checkpoint.about import find_fault
from hpctrain.checkpoint.format import DamagedError
from hpctrain.core.errors import SaveError, UsageError
from hpctrain.transport.threads.ranks import run_ranks

ABOUT = {"epoch": 2, "sample": 640, "versions": {"numpy": "2"}, "rate": 0.1}


def arrays(step: int) -> dict[str, np.ndarray]:
    """Return a state that depends on `step`; not every rank has a piece of every array."""
    rng = np.random.default_rng(step)
    return {
        "param": rng.normal(size=10007).astype(np.float32),
        "optimizer.m@half": rng.normal(size=17),
        "optimizer.step": np.array([step], np.int64),
        "none": np.empty(0, np.float16),
        "mask": rng.random(5) < 0.5,
    }


def pieces(state: dict[str, np.ndarray], rank: int, size: int) -> list[Piece]:
    created = []
    for name, x in state.items():
        first, end = (len(x) * r // size for r in (rank, rank + 1))
        created.append(Piece(name, first, len(x), x[first:end]))
    return created


def save(run: Path, step: int, size: int = 1, keep: int | None = None, about=ABOUT) -> Path:
    def rank(link):
        own = pieces(arrays(step), link.rank, link.size)
        return checkpoint.save(run, step, own, about, link, keep)

    (path,) = set(run_ranks(size, rank))
    return path


def load(run: Path, size: int = 1) -> list[checkpoint.Loaded | None]:
    return run_ranks(size, lambda link: checkpoint.load(run, link))


def assert_holds(loaded: checkpoint.Loaded | None, step: int) -> None:
    assert loaded is not None and loaded.step == step
    expected = arrays(step)
    assert loaded.arrays.keys() == expected.keys()
    for name, x in expected.items():
        assert loaded.arrays[name].dtype == x.dtype
        assert loaded.arrays[name].tobytes() == x.tobytes()


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def names_in(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


@pytest.mark.parametrize("readers", [1, 2, 3])
@pytest.mark.parametrize("writers", [1, 2, 3, 5])
def test_any_number_of_ranks_loads_what_any_other_saved(tmp_path, writers, readers):
    assert save(tmp_path, 1200, writers) == tmp_path / "checkpoints" / "step-00001200"
    for loaded in load(tmp_path, readers):
        assert_holds(loaded, 1200)
        assert loaded.about == ABOUT and loaded.set_aside == []
    parts = sorted((tmp_path / "checkpoints" / "step-00001200").glob("part-*.safetensors"))
    assert [part.name for part in parts] == [f"part-{r:05d}.safetensors" for r in range(writers)]


def test_nothing_was_ever_written(tmp_path):
    assert load(tmp_path, 2) == [None, None]
    assert load(tmp_path / "no run") == [None]
    (tmp_path / "checkpoints" / ".step-00000001.partial").mkdir(parents=True)
    assert load(tmp_path) == [None]  # what was never committed does not count


def test_manifest_tells_what_was_saved(tmp_path):
    path = save(tmp_path, 7, size=2)
    table = json.loads((path / "manifest.json").read_text())
    assert table["format"] == 2 and table["step"] == 7 and table["about"] == ABOUT
    assert table["arrays"]["param"] == {"size": 10007, "dtype": "float32"}
    keys = set()
    for part, file in zip(table["parts"], sorted(path.glob("part-*")), strict=True):
        data, tensors = file.read_bytes(), safetensors.numpy.load_file(file)
        assert (part["file"], part["size_bytes"]) == (file.name, len(data))
        assert sha256(data[: part["header_bytes"]]) == part["header_sha256"]
        for piece in part["pieces"]:
            x = tensors.pop(f"{piece['array']}@{piece['offset']}")
            assert data[piece["begin"] :][: x.nbytes] == x.tobytes()
            assert [sha256(x.tobytes())] == piece["sha256"] and len(x) == piece["length"]
            keys.add(f"{piece['array']}@{piece['offset']}")
        assert not tensors
    assert keys >= {"param@0", "param@5003", "optimizer.m@half@0", "optimizer.m@half@8"}


def test_prunes_to_the_newest_and_sweeps_what_a_killed_job_left(tmp_path):
    remaining = tmp_path / "checkpoints" / ".step-00000009.partial"
    remaining.mkdir(parents=True)
    (remaining / "part-00000.safetensors").write_bytes(b"half")
    for step in (1, 2, 3, 4):
        save(tmp_path, step, size=2, keep=2)
    assert names(tmp_path) == ["step-00000003", "step-00000004"]


def test_pruning_spares_what_was_just_saved(tmp_path):
    save(tmp_path, 300)
    save(tmp_path, 200)  # as after going back from a checkpoint that could not be read
    save(tmp_path, 250, keep=1)
    assert names(tmp_path) == ["step-00000250", "step-00000300"]


def test_the_same_step_again_is_a_newer_revision(tmp_path):
    old = [save(tmp_path, 5), save(tmp_path, 5, size=2), save(tmp_path, 5)]
    assert [path.name for path in old] == ["step-00000005", "step-00000005.2", "step-00000005.3"]
    shutil.rmtree(old[0])
    assert save(tmp_path, 5, keep=1).name == "step-00000005.4"
    (loaded,) = load(tmp_path)
    assert_holds(loaded, 5)
    assert names(tmp_path) == ["step-00000005.4"]


def test_keep_nothing_is_refused(tmp_path):
    with pytest.raises(UsageError, match="keep is 0; expected at least 1"):
        save(tmp_path, 1, keep=0)


# --- damage afterwards ---------------------------------------------------------------------------


def truncate(path: Path) -> None:
    part = path / "part-00001.safetensors"
    os.truncate(part, part.stat().st_size - 1)


def flip(path: Path, name: str = "part-00001.safetensors", at: int = -3) -> None:
    data = bytearray((path / name).read_bytes())
    data[at] ^= 1
    (path / name).write_bytes(data)


def rewrite(path: Path, change: Callable[[dict], object]) -> None:
    """Change the manifest and seal it anew, as only a bug or a forger does."""
    table = json.loads((path / "manifest.json").read_text())
    del table["sha256"]
    change(table)
    (path / "manifest.json").write_text(
        json.dumps({**table, "sha256": manifest._hash_table(table)})
    )


def second_of(table: dict, array: str = "param") -> dict:
    """Return the entry of the piece of `array` in the second part."""
    (piece,) = (piece for piece in table["parts"][1]["pieces"] if piece["array"] == array)
    return piece


def forged(array: str = "param", **changed: object) -> Callable[[Path], None]:
    """Return what changes the entry of a piece in the second part."""
    return lambda path: rewrite(path, lambda table: second_of(table, array).update(changed))


def forge_part(**changed: object) -> Callable[[Path], None]:
    """Return what changes the entry of the second part."""
    return lambda path: rewrite(path, lambda table: table["parts"][1].update(changed))


def drop_last_piece(path: Path) -> None:
    """Let the second part end before its last piece, in the file too."""

    def change(table):
        part = table["parts"][1]
        part["size_bytes"] = part["pieces"].pop()["begin"]
        os.truncate(path / part["file"], part["size_bytes"])

    rewrite(path, change)


def set_text(path: Path, text: str) -> None:
    (path / "manifest.json").write_text(text)


def replace_text(path: Path, old: str, new: str) -> None:
    text = (path / "manifest.json").read_text()
    assert old in text
    set_text(path, text.replace(old, new))


def second_begin(path: Path) -> int:
    """Return the first byte behind the header of the second part."""
    return json.loads((path / "manifest.json").read_text())["parts"][1]["header_bytes"]


DAMAGE = {
    "part truncated": (truncate, "bytes; expected"),
    "part empty": (lambda p: os.truncate(p / "part-00000.safetensors", 0), "has 0 bytes"),
    "last byte flipped": (lambda p: flip(p, at=-1), "of 'mask' do not have"),
    "first byte flipped": (lambda p: flip(p, at=second_begin(p)), "of 'optimizer.m@half' do not"),
    "parameter flipped": (lambda p: flip(p, at=-1000), "of 'param' do not have the SHA-256"),
    "header byte flipped": (lambda p: flip(p, at=20), "its header has another SHA-256"),
    "header length flipped": (lambda p: flip(p, at=0), "its header has another SHA-256"),
    "unit's hash altered": (forged(sha256=["0" * 64]), "of 'param' do not have the SHA-256"),
    "unit's hash missing": (forged(sha256=[]), "has 0 hashes; expected 1"),
    "unit's hash no hash": (forged(sha256=["0" * 63]), "cannot be understood"),
    "header's hash altered": (forge_part(header_sha256="0" * 64), "its header has another"),
    "part's size altered": (forge_part(size_bytes=7), "has 7 bytes; expected"),
    "part elsewhere": (forge_part(file="../part-00000.safetensors"), "cannot be understood"),
    "part twice": (forge_part(file="part-00000.safetensors"), "two parts have one name"),
    "part missing": (lambda p: (p / "part-00000.safetensors").unlink(), "is missing"),
    "manifest altered": (lambda p: replace_text(p, '"epoch": 2', '"epoch": 3'), "was altered"),
    "hash altered": (lambda p: flip(p, "manifest.json", -5), "was altered"),
    "manifest missing": (lambda p: (p / "manifest.json").unlink(), "is missing"),
    "manifest garbage": (lambda p: set_text(p, "{]"), "cannot be understood"),
    "manifest not text": (
        lambda p: (p / "manifest.json").write_bytes(b"\xff\x00\xfe"),
        "cannot be understood",
    ),
    "manifest empty": (lambda p: set_text(p, ""), "cannot be understood"),
    "manifest deep": (lambda p: set_text(p, "[" * 200_000), "cannot be understood"),
    "manifest a list": (lambda p: set_text(p, "[1]"), "cannot be understood"),
    "manifest of nothing": (lambda p: rewrite(p, dict.clear), "cannot be understood"),
    "of another step": (lambda p: rewrite(p, lambda t: t.update(step=7)), "that of step 7"),
    "unknown dtype": (
        lambda p: rewrite(p, lambda t: t["arrays"]["param"].update(dtype="object")),
        "cannot be understood",
    ),
    "negative size": (
        lambda p: rewrite(p, lambda t: t["arrays"]["param"].update(size=-1)),
        "cannot be understood",
    ),
    "array larger": (
        lambda p: rewrite(p, lambda t: t["arrays"]["param"].update(size=10008)),
        "10007 of 10008",
    ),
    "array unknown": (lambda p: rewrite(p, lambda t: t["arrays"].pop("mask")), "does not fit"),
    "array of another dtype": (
        lambda p: rewrite(p, lambda t: t["arrays"]["param"].update(dtype="float64")),
        "begins at byte",
    ),
    "parts fewer": (lambda p: rewrite(p, lambda t: t["parts"].pop()), "of 10007 elements"),
    "pieces overlap": (forged(offset=5002), "overlap at element 5002"),
    "pieces leave a gap": (forged("optimizer.m@half", offset=7), "overlap at element 7"),
    "piece missing": (drop_last_piece, "pieces of 'mask' have 2 of 5"),
    "piece too far": (forged(offset=5004), "does not fit"),
    "piece before the start": (forged(offset=-997), "cannot be understood"),
    "piece too long": (forged(length=5005), "does not fit"),
    "piece elsewhere": (forged(begin=8), "begins at byte 8; expected"),
    "piece of nothing": (forged(length=0), "cannot be understood"),
}


@pytest.mark.sample(12)
@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_is_used(tmp_path, name, caplog):
    damage, reason = DAMAGE[name]
    save(tmp_path, 1100, size=2)
    path = save(tmp_path, 1200, size=2)
    assert checkpoint.verify(path) is None
    damage(path)
    assert reason in checkpoint.verify(path)
    with caplog.at_level(logging.WARNING):
        ranks = load(tmp_path, 3)
    for loaded in ranks:
        assert_holds(loaded, 1100)
        (said,) = loaded.set_aside
        assert said.startswith("step-00001200 is damaged") and reason in said
    assert names(tmp_path) == ["bad-step-00001200", "step-00001100"]
    (record,) = caplog.records  # said once, not by every rank
    assert "step-00001200 is damaged" in record.message and "step-00001100" in record.message
    caplog.clear()
    assert_holds(load(tmp_path)[0], 1100)
    assert not caplog.records


def test_none_left_is_refused_now_and_later(tmp_path):
    for step in (1, 2):
        truncate(save(tmp_path, step, size=2))
    for _ in range(2):
        with pytest.raises(UsageError, match=r"no checkpoint in .* can be used") as caught:
            load(tmp_path, 2)
        assert "step-00000002" in str(caught.value) and "step-00000001" in str(caught.value)
    assert names(tmp_path) == ["bad-step-00000001", "bad-step-00000002"]


def test_bad_ones_of_one_step_are_all_kept(tmp_path):
    save(tmp_path, 1)
    for _ in range(3):
        flip(save(tmp_path, 2), "part-00000.safetensors")
        assert_holds(load(tmp_path)[0], 1)
    expected = ["bad-step-00000002", "bad-step-00000002.2", "bad-step-00000002.3", "step-00000001"]
    assert names(tmp_path) == expected


@pytest.mark.parametrize(
    ("number", "remedy"),
    [(1, "use it with the hpctrain that wrote it"), (3, "install a newer hpctrain")],
)
def test_another_format_is_left_alone_with_one_line_that_says_what_to_do(tmp_path, number, remedy):
    save(tmp_path, 1)
    path = save(tmp_path, 2)
    rewrite(path, lambda table: table.update(format=number, parts=[{"sha256": "", "size": 1}]))
    assert_holds(load(tmp_path)[0], 1)
    assert path.is_dir()
    assert checkpoint.verify(path).startswith(f"{path} has format {number}, expected 2; {remedy}")
    assert "\n" not in checkpoint.verify(path)


@pytest.mark.parametrize("error", [OSError, DamagedError])
def test_all_ranks_go_back_when_one_cannot_read_and_nothing_is_renamed(
    tmp_path, monkeypatch, error
):
    save(tmp_path, 1, size=2)
    save(tmp_path, 2, size=2)
    genuine = parts.read_range

    local = threading.local()

    def read_range(file, begin, out):
        if local.rank == 2 and "step-00000002" in str(file):
            raise error("it is altered") if error is DamagedError else OSError(5, "no", str(file))
        return genuine(file, begin, out)

    def rank(link):
        local.rank = link.rank
        return checkpoint.load(tmp_path, link)

    monkeypatch.setattr(parts, "read_range", read_range)
    for loaded in run_ranks(3, rank):
        assert_holds(loaded, 1)
        assert "cannot be read (rank 2 on " in loaded.set_aside[0]
    assert names(tmp_path) == ["step-00000001", "step-00000002"]


def test_a_run_that_cannot_be_written_is_read(tmp_path, monkeypatch):
    save(tmp_path, 1)
    truncate(save(tmp_path, 2, size=2))

    def refuse(*_):
        raise PermissionError(30, "Read-only file system")

    monkeypatch.setattr(os, "rename", refuse)
    assert_holds(load(tmp_path)[0], 1)


def test_listing(tmp_path):
    assert checkpoint.listing(tmp_path) == []
    save(tmp_path, 1, size=2)
    set_text(save(tmp_path, 2), "garbage")
    flip(save(tmp_path, 3, size=2))
    shutil.move(tmp_path / "checkpoints" / "step-00000002", tmp_path / "checkpoints" / "notes")
    (tmp_path / "checkpoints" / "step-00000004").write_text("a file")
    load(tmp_path)
    set_text(save(tmp_path, 9), "garbage")
    observed = [(f.path.name, f.step, f.about, f.set_aside) for f in checkpoint.listing(tmp_path)]
    assert observed == [
        ("step-00000001", 1, ABOUT, False),
        ("bad-step-00000003", 3, ABOUT, True),
        ("step-00000004", 4, None, False),
        ("step-00000009", 9, None, False),
    ]
    first = checkpoint.listing(tmp_path)[0]
    assert first.size_bytes == sum(file.stat().st_size for file in first.path.iterdir())


def link_to_nowhere(path: Path) -> None:
    path.symlink_to("not-mounted")


def endless_manifest(path: Path) -> None:
    path.mkdir()
    (path / "manifest.json").symlink_to("/dev/zero")


def waiting_manifest(path: Path) -> None:
    path.mkdir()
    os.mkfifo(path / "manifest.json")


def waiting_part(path: Path) -> None:
    shutil.copytree(path.with_name("step-00000020"), path)
    rewrite(path, lambda table: table.update(step=30))
    (path / "part-00000.safetensors").unlink()
    os.mkfifo(path / "part-00000.safetensors")


def lost_part(path: Path) -> None:
    shutil.copytree(path.with_name("step-00000020"), path)
    rewrite(path, lambda table: table.update(step=30))
    (path / "part-00000.safetensors").unlink()
    (path / "part-00000.safetensors").symlink_to("gone")


ODD = {
    "link to nowhere": (link_to_nowhere, "seen a link to not-mounted"),
    "loop": (lambda path: path.symlink_to(path.name), "seen a link to step-"),
    "file": (lambda path: path.write_text("x"), "Not a directory"),
    "FIFO": (os.mkfifo, "Not a directory"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "seen a link to /dev/zero"),
    "endless manifest": (endless_manifest, "expected a regular file, seen a link"),
    "waiting manifest": (waiting_manifest, "expected a regular file, seen a FIFO"),
    "waiting part": (waiting_part, "expected a regular file, seen a FIFO"),
    "lost part": (lost_part, "seen a link to gone"),
}


@pytest.mark.parametrize("name", ODD)
def test_an_odd_entry_is_listed_with_its_reason_and_the_one_before_is_used(tmp_path, name):
    make, reason = ODD[name]
    save(tmp_path, 10)
    save(tmp_path, 20)
    odd = tmp_path / "checkpoints" / "step-00000030"
    make(odd)
    with limited(5):
        assert [result.step for result in checkpoint.listing(tmp_path)] == [10, 20, 30]
        for loaded in load(tmp_path, 2):
            assert_holds(loaded, 20)
            assert reason in loaded.set_aside[0]
        assert reason in checkpoint.verify(odd)
        assert os.path.lexists(odd)  # it may be whole once its file system is mounted
        for step in (31, 32, 33):
            save(tmp_path, step, keep=2)
    steps = [result.step for result in checkpoint.listing(tmp_path) if not result.fault]
    assert steps == [32, 33]  # whatever is odd takes no place


def test_only_odd_entries_are_refused(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    link_to_nowhere(tmp_path / "checkpoints" / "step-00000030")
    with pytest.raises(UsageError, match=r"no checkpoint in .* seen a link to not-mounted"):
        load(tmp_path, 2)


@pytest.mark.parametrize("make", [link_to_nowhere, ODD["loop"][0], ODD["file"][0], os.mkfifo])
def test_checkpoints_out_of_reach_are_not_none_yet(tmp_path, make):
    make(tmp_path / "checkpoints")
    for act in (lambda: load(tmp_path, 2), lambda: checkpoint.listing(tmp_path)):
        with pytest.raises(UsageError, match="expected a folder of checkpoints, seen"):
            act()
    with pytest.raises(SaveError):
        save(tmp_path, 1)
    assert names_in(tmp_path) == ["checkpoints"]


@pytest.mark.parametrize("remaining", [link_to_nowhere, ODD["loop"][0], os.mkfifo, ODD["file"][0]])
def test_what_lies_where_a_partial_one_would_is_removed(tmp_path, remaining):
    (tmp_path / "checkpoints").mkdir()
    remaining(tmp_path / "checkpoints" / ".step-00000007.partial")
    save(tmp_path, 8)
    assert names(tmp_path) == ["step-00000008"]


#: Entries of `about` that no run writes: name -> (value, what is said)
FORGED = {
    "step": (11, "'about.step': expected 10, seen 11"),
    "world_size": (0, "'about.world_size': input should be greater than or equal to 1, seen 0"),
    "batch": ("8", "'about.batch': input should be a valid integer, seen '8'"),
    "seed": (-1, "greater than or equal to 0, seen -1"),
    "updates_per_step": (0, "greater than 0, seen 0"),
    "staleness": ({"histogram": {"-1": 1}, "clock_gap_max": None, "dropped": 0}, "histogram"),
    "open_row": ({"since_step": 10, "sums": {"loss": [1.0, 1]}}, "expected less than 10, seen 10"),
    "metrics": ({"loss": 1.0}, "'about.metrics.loss"),
    "keep_best": ({"metric": "loss", "direction": "min"}, "'about.keep_best.metric'"),
    "model": ({"input_shape": [0], "outputs": 2}, "'about.model.input_shape'"),
    "sample_index": (9, "sample 9 of epoch 2 cannot be that of step 10"),
    "epoch": (3, "sample 8 of epoch 3 cannot be that of step 10"),
    "weights": ({"param": {"w": {"shape": [2**40], "offset": 0}}}, "reach beyond the array"),
}
HONEST = {
    "step": 10, "epoch": 2, "sample_index": 8, "batch": 4, "seed": 0, "world_size": 2,
    "updates_per_step": 1.0, "open_row": {"since_step": 9, "sums": {"loss": [1.0, 1.0]}},
    "weights": {"param": {"w": {"shape": [10], "offset": 0}, "b": {"shape": [], "offset": 16}}},
}  # fmt: skip


def nested(levels):
    return [nested(levels - 1)] if levels else [3]


@pytest.mark.parametrize(
    ("shape", "is_valid"),
    [([3], True), ({"a": [8, 8], "b": [[1], {"c": [2]}]}, True), (nested(30), True),
     (nested(40), False), (nested(900), False), ([[3], 4], False), ({}, False), ([True], False)],
)  # fmt: skip
def test_shapes_of_samples_in_a_manifest(shape, is_valid):
    fault = find_fault({"model": {"input_shape": shape, "outputs": 2}}, 0, {})
    assert ("'about.model.input_shape'" in fault) != is_valid


@pytest.mark.parametrize("name", FORGED)
def test_facts_that_no_run_wrote_are_damage_whatever_their_hash(tmp_path, name):
    value, reported = FORGED[name]
    path = save(tmp_path, 10, size=2, about=HONEST)
    assert checkpoint.verify(path) is None
    rewrite(path, lambda table: table.update(about={**HONEST, name: value}))
    assert reported in checkpoint.verify(path)


def test_places_overlap(tmp_path):
    path = save(tmp_path, 10, size=2)
    places = {"w": {"shape": [10], "offset": 0}, "b": {"shape": [2], "offset": 9}}
    rewrite(path, lambda table: table.update(about={"weights": {"param": places}}))
    assert "'about.weights.param': tensors overlap" in checkpoint.verify(path)


def test_no_memory_is_taken_for_arrays_that_parts_cannot_hold(tmp_path):
    path = save(tmp_path, 10)
    rewrite(path, lambda table: table["arrays"]["param"].update(size=2**50))
    assert f"pieces of 'param' have 10007 of {2**50} elements" in checkpoint.verify(path)


# --- trouble while saving ------------------------------------------------------------------------

WRONG_PIECES = {
    "gap": ([Piece("a", 1, 3, np.zeros(2))], "'a' leave a gap at element 0"),
    "short": ([Piece("a", 0, 3, np.zeros(2))], "2 of 3"),
    "overlap": ([Piece("a", 0, 2, np.zeros(2)), Piece("a", 0, 2, np.ones(2))], "overlap"),
    "sizes": ([Piece("a", 0, 1, np.zeros(1)), Piece("a", 1, 2, np.ones(1))], "pieces of 'a' are"),
    "dtypes": (
        [Piece("a", 0, 2, np.zeros(1)), Piece("a", 1, 2, np.ones(1, np.float32))],
        "pieces of 'a' are of",
    ),
    "not flat": ([Piece("a", 0, 2, np.zeros((2, 1)))], "expected it flat"),
    "dtype": ([Piece("a", 0, 1, np.zeros(1, np.complex128))], "complex128"),
}


@pytest.mark.parametrize("name", WRONG_PIECES)
def test_pieces_that_make_up_no_array_are_not_saved(tmp_path, name):
    own, message = WRONG_PIECES[name]
    save(tmp_path, 1)

    def rank(link):
        with pytest.raises(SaveError, match=message):
            checkpoint.save(tmp_path, 2, own if link.rank == 1 else [], ABOUT, link)

    run_ranks(2, rank)
    assert names(tmp_path) == ["step-00000001"]


def test_about_that_is_not_json_is_not_saved(tmp_path):
    with pytest.raises(SaveError, match=r"TypeError: .* not JSON serializable"):
        run_ranks(1, lambda link: checkpoint.save(tmp_path, 1, [], {"x": object()}, link))
    assert names(tmp_path) == []


def test_about_is_read_as_json_makes_it(tmp_path):
    about = {"by_rank": {10: 1, 9: 2}, "pair": (1, 2), "loss": float("inf")}
    run_ranks(1, lambda link: checkpoint.save(tmp_path, 1, [], about, link))
    (loaded,) = load(tmp_path)
    assert loaded.about == {"by_rank": {"10": 1, "9": 2}, "pair": [1, 2], "loss": float("inf")}


def test_bytes_that_change_on_their_way_to_the_disk_are_never_committed(tmp_path, monkeypatch):
    save(tmp_path, 1, size=3, keep=1)
    genuine = os.write

    def write(handle, data):
        if "part-00001" in os.readlink(f"/proc/self/fd/{handle}"):
            data = bytes(data[:-1]) + bytes([data[-1] ^ 1])
        return genuine(handle, data)

    monkeypatch.setattr(os, "write", write)
    with pytest.raises(SaveError, match=r"rank 0 on .*part-00001.safetensors was altered"):
        save(tmp_path, 2, size=3, keep=1)
    assert names(tmp_path) == ["step-00000001"]


def test_all_is_on_the_disk_before_the_name_and_the_name_before_the_return(tmp_path, monkeypatch):
    synced: list[int] = []
    genuine_sync, genuine_rename = os.fsync, os.rename

    def fsync(handle):
        synced.append(os.fstat(handle).st_ino)
        genuine_sync(handle)

    def rename(old, new):
        inside = {path.stat().st_ino for path in (old, *Path(old).iterdir())}
        assert len(inside) == 5 and inside <= set(synced)
        synced.clear()
        genuine_rename(old, new)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    path = save(tmp_path, 1, size=3)
    assert synced == [path.parent.stat().st_ino]


FULL = """
import resource, signal, sys
import numpy as np
from hpctrain import checkpoint
from hpctrain.core.errors import SaveError
from hpctrain.transport.threads.ranks import run_ranks

def save(step):
    def rank(link):
        x = np.full(40_000 if link.rank == 1 else 10, step, np.float32)
        try:
            piece = checkpoint.Piece(f"of {link.rank}", 0, len(x), x)
            checkpoint.save(sys.argv[1], step, [piece], {}, link, keep=1)
        except SaveError as error:
            return str(error)
    return run_ranks(3, rank)

assert save(1) == [None] * 3
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
said = save(2)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
assert said[0] == said[1] == said[2], said
print(said[0])
"""


def test_a_disk_that_takes_no_more_leaves_the_old_one_good(tmp_path):
    command = [sys.executable, "-c", FULL, str(tmp_path)]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert completed.returncode == 0, completed.stderr
    assert f"rank 1 on {os.uname().nodename}: " in completed.stdout
    assert "File too large" in completed.stdout and "part-00001.safetensors" in completed.stdout
    assert f"still good: {tmp_path / 'checkpoints' / 'step-00000001'}" in completed.stdout
    assert names(tmp_path) == ["step-00000001"]
    assert checkpoint.verify(tmp_path / "checkpoints" / "step-00000001") is None


CALLS = (
    "open",
    "write",
    "preadv",
    "fsync",
    "close",
    "mkdir",
    "rename",
    "unlink",
    "rmdir",
    "scandir",
)


class Killed(BaseException):
    """What ends a process between two calls of the operating system."""


class Calls:
    """Raises `error` at the `last` call of the operating system, and at all calls after it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, last: int, error: BaseException) -> None:
        self.made, self.last, self.error = 0, last, error
        for name in CALLS:
            monkeypatch.setattr(os, name, self._watched(getattr(os, name)))

    def _watched(self, call: Callable) -> Callable:
        def watched(*args, **options):
            self.made += 1
            if self._fails():
                if call.__name__ == "close":  # the kernel closes it in any case
                    call(*args)
                raise self.error
            return call(*args, **options)

        return watched

    def _fails(self) -> bool:
        # A killed process makes no more calls; a disk may fail once.
        dead = isinstance(self.error, Killed)
        return self.made >= self.last if dead else self.made == self.last


def count_calls(run: Path) -> int:
    with pytest.MonkeyPatch.context() as patch:
        calls = Calls(patch, sys.maxsize, Killed())
        save(run, 3, keep=2)
    return calls.made


def attempt(run: Path, last: int, error: BaseException) -> BaseException | None:
    with pytest.MonkeyPatch.context() as patch:
        Calls(patch, last, error)
        try:
            save(run, 3, keep=2)
        except (Killed, SaveError) as observed:
            return observed
    return None


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "error", [Killed(), OSError(28, "No space left on device")], ids=["killed", "disk full"]
)
def test_an_end_between_any_two_calls_leaves_a_whole_checkpoint(tmp_path, error):
    base = tmp_path / "base"
    for step in (1, 2):
        save(base, step)
    total = count_calls(Path(shutil.copytree(base, tmp_path / "count")))
    assert total > 20  # or the calls were not seen
    steps = []
    for last in range(1, total + 1):
        run = Path(shutil.copytree(base, tmp_path / f"run-{last}"))
        observed = attempt(run, last, error)
        (loaded,) = load(run)
        assert_holds(loaded, loaded.step)
        assert loaded.set_aside == [], last  # no broken one was ever chosen
        assert not any(checkpoint.verify(result.path) for result in checkpoint.listing(run))
        if observed is None:
            assert loaded.step == 3  # whoever was told that it is saved finds it
        if isinstance(observed, SaveError):
            assert "still good: " in str(observed)
        steps.append(loaded.step)
        assert_holds(after(run), 4)
        shutil.rmtree(run)
    assert set(steps) == {2, 3}
    if isinstance(error, Killed):
        assert steps == sorted(steps)  # the old one up to one call, the new one from there


def after(run: Path) -> checkpoint.Loaded | None:
    """Return what is loaded after the next save, which also sweeps what was left."""
    save(run, 4, keep=2)
    assert not [name for name in names(run) if name.startswith((".", "bad"))]
    return load(run)[0]
