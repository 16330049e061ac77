"""Damaged files of runs: the written content, a prefix of it, or one clear error.

Hundreds of cases of each kind always, 20,000 with --full: they tell time and memory with -s.
"""

from __future__ import annotations

import json
import os
import shutil

import numpy as np
import pytest

from fuzz import campaign, in_memory, mutated, mutated_json, torn, value_or_refusal
from hpctrain import checkpoint
from hpctrain.checkpoint import Piece, manifest
from hpctrain.core.errors import HpctrainError
from hpctrain.core.run_files import run_folder
from hpctrain.core.strict_json import to_json
from hpctrain.engines import replay
from hpctrain.engines.parameter_server.coordinator import Event
from hpctrain.engines.staleness import Staleness
from hpctrain.tools.report import page, record
from hpctrain.training import recipe, runs
from hpctrain.transport.threads.ranks import run_ranks
from hpctrain.world import over_threads

pytestmark = pytest.mark.timeout(1800)  # of 20,000 cases; each has a limit of its own


def counts(short, repeated=20_000):
    return pytest.mark.parametrize("count", [short, pytest.param(repeated, marks=pytest.mark.full)])


# --- checkpoints ---------------------------------------------------------------------------------

ABOUT = {
    "epoch": 2, "sample_index": 8, "batch": 4, "seed": 0, "world_size": 1, "recipe": "r",
    "updates_per_step": 1.0, "steps_redone": 0, "metrics": {"test_loss": 0.5}, "rows_due": [],
    "model": {"input_shape": [3], "outputs": 2}, "staleness": None,
    "keep_best": {"metric": "test_loss", "direction": "min"},
    "weights": {"param": {"w": {"shape": [5, 2], "offset": 0}, "b": {"shape": [], "offset": 16}}},
}  # fmt: skip


def arrays(step):
    return {"param": np.arange(32, dtype=np.float32) + step, "optimizer.step": np.array([step])}


def saved(run, step):
    pieces = [Piece(name, 0, len(x), x) for name, x in arrays(step).items()]
    about = {**ABOUT, "step": step, "sample_index": 8 if step == 10 else 4 * (step % 2)}
    return run_ranks(1, lambda link: checkpoint.save(run, step, pieces, about, link))[0]


def sealed(table):
    return json.dumps(
        {**table, "sha256": manifest._hash_table(json.loads(json.dumps(table)))}
    ).encode()


def forge_manifest(path, rng):
    table = json.loads((path / "manifest.json").read_text())
    del table["sha256"]
    changed = mutated_json(table, rng)
    data = sealed(changed) if isinstance(changed, dict) else json.dumps(changed).encode()
    (path / "manifest.json").write_bytes(data)


def lengthen_manifest(path, rng):
    """Repeat the entries of a table or a list, up to a thousand times, with a right hash."""
    table = json.loads((path / "manifest.json").read_text())
    del table["sha256"]
    key = rng.choice([key for key in table if isinstance(table[key], dict | list)])
    count = rng.choice((10, 100, 1000))
    if isinstance(table[key], list):
        table[key] *= count
    else:
        table[key] |= {f"{name}{i}": x for name, x in table[key].items() for i in range(count)}
    (path / "manifest.json").write_bytes(sealed(table))


def damage_file(path, rng):
    file = rng.choice(sorted(path.iterdir()))
    file.write_bytes(mutated(file.read_bytes(), rng))


def tear_file(path, rng):
    file = rng.choice(sorted(path.iterdir()))
    file.write_bytes(torn(file.read_bytes(), rng))


def odd_file(path, rng):
    odd_entry(rng.choice(sorted(path.iterdir())), rng)


def odd_entry(path, rng):
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    rng.choice(
        (
            lambda: os.mkfifo(path),
            lambda: path.symlink_to("gone"),
            lambda: path.symlink_to(path.name),
            lambda: path.symlink_to("/dev/zero"),
            lambda: path.symlink_to("/dev/null"),
            lambda: path.mkdir(),
            lambda: path.write_bytes(rng.randbytes(9)),
            lambda: None,
        )
    )()


DAMAGES = (forge_manifest, forge_manifest, forge_manifest, lengthen_manifest, damage_file,
           tear_file, odd_file, odd_entry)  # fmt: skip


def same_arrays(loaded, step):
    return loaded.step == step and all(
        loaded.arrays.keys() == arrays(step).keys()
        and loaded.arrays[name].dtype == x.dtype
        and loaded.arrays[name].tobytes() == x.tobytes()
        for name, x in arrays(step).items()
    )


@counts(300)
def test_checkpoints(count):
    """The newest good checkpoint is used: the one before the damaged, if that is not still good."""
    with in_memory() as folder:
        good = folder / "good"
        for step in (10, 20):
            saved(good, step)
        assert checkpoint.verify(good / "checkpoints" / "step-00000020") is None

        def case(rng):
            run = shutil.copytree(good, folder / "run")
            try:
                look(run, rng)
            finally:
                shutil.rmtree(run)

        def look(run, rng):
            rng.choice(DAMAGES)(run / "checkpoints" / "step-00000020", rng)
            listed = {result.step: result.fault for result in checkpoint.listing(run)}
            loaded = run_ranks(1, lambda link: checkpoint.load(run, link))[0]
            assert same_arrays(loaded, 20) or same_arrays(loaded, 10)
            assert not listed[10]
            if loaded.step == 10:
                assert not os.path.lexists(run / "checkpoints" / "step-00000020") or (
                    loaded.set_aside and loaded.set_aside[0].startswith("step-00000020")
                )
            else:
                assert not listed[20]

        campaign("checkpoints", count, case)


@counts(40, 2000)
def test_resumed_from_forged_facts(count, monkeypatch):
    """Facts in a manifest that are wrong, with a right hash, lead to no other parameters."""
    with in_memory() as folder:
        spec = recipe.load("digits", ["run.steps=3", "run.interval_steps=1",
                                      "model.widths=[64, 10]", "run.device=cpu"])  # fmt: skip
        longer = recipe.load("digits", ["run.steps=5", "run.interval_steps=1",
                                        "model.widths=[64, 10]", "run.device=cpu"])  # fmt: skip
        split = spec.data.load(0)
        monkeypatch.setattr(type(spec.data), "load", lambda self, seed, finite: split)

        def train(spec, run, resume):
            return run_ranks(1, lambda link: runs.train(spec, over_threads(link), run, resume))[0]

        train(spec, folder / "good", False)
        expected = train(longer, shutil.copytree(folder / "good", folder / "whole"), True)

        def case(rng):
            run = shutil.copytree(folder / "good", folder / "run")
            try:
                (path,) = (run / "checkpoints").iterdir()
                table = json.loads((path / "manifest.json").read_text())
                del table["sha256"]
                about = {**table["about"], "rows_due": run_folder.rows(run)[-1:]}
                run_folder.cut_rows(run, 2)  # so that the row due is missing
                if rng.random() < 0.5:
                    about = mutated_json(about, rng, most=1)
                else:
                    about["rows_due"] = mutated_json(about["rows_due"], rng)
                (path / "manifest.json").write_bytes(sealed({**table, "about": about}))
                observed = value_or_refusal(lambda: train(longer, run, True), run)
                if not isinstance(observed, HpctrainError):
                    assert observed["params_sha256"] == expected["params_sha256"]
                    due = [row["step"] for row in about.get("rows_due") or ()]
                    steps = [row["step"] for row in run_folder.rows(run)]
                    assert steps == [1, 2, *(n for n in due if n > 2), 4, 5]
            finally:
                shutil.rmtree(run)

        campaign("forged facts", count, case)


# --- logs and summaries --------------------------------------------------------------------------

EVENT = [[0, 1], [[0, 1], 3, 0.5, [0, 1], False], [[0, 1, 3, 3], [1, 1, 3, 3]], 2]
STALENESS = {"histogram": {"0": 3, "2": 1}, "clock_gap_max": 1, "dropped": 0}
HEAD = {"run": {"engine": "ps-async", "seed": 0}, "about": {"cpu": "x"}}
INTERVALS = [
    {"start": n, "until": n + 1, "events": [EVENT] * n, "clocks": [n, n], "staleness": STALENESS}
    for n in range(5)
] + [{"start": 5, "until": 6, "turns": [-1, 0, 2, -3]}]  # fmt: skip


@counts(500)
def test_replay_logs(count):
    """A log has a checksum per line: it comes back as it was, cut at its end, or is refused."""
    complete = "".join(map(replay._encode_line, [HEAD, *INTERVALS])).encode()
    with in_memory() as run:
        path = replay.log_path(run, 0)
        path.parent.mkdir()

        def case(rng):
            path.write_bytes((torn if rng.random() < 0.3 else mutated)(complete, rng))
            observed = value_or_refusal(lambda: replay.read_log(run, 0, HEAD["run"]), path, run)
            if not isinstance(observed, HpctrainError):
                about, intervals = observed
                assert about in (HEAD["about"], {})
                assert without_repeats(intervals) == INTERVALS[: len(without_repeats(intervals))]

        campaign("replay logs", count, case)


def without_repeats(intervals):
    """Return the intervals in order, each once: to double or swap whole lines changes no line."""
    observed = []
    for item in sorted(intervals, key=lambda item: item["start"]):
        if not observed or observed[-1] != item:
            observed.append(item)
    return observed


@counts(500)
def test_forged_replay_logs(count):
    """What has a right checksum, or none, has the types that engines need."""
    with in_memory() as run:
        path = replay.log_path(run, 0)
        path.parent.mkdir()

        def case(rng):
            lines = [HEAD, *INTERVALS]
            at = rng.randrange(len(lines))
            lines[at] = mutated_json(lines[at], rng)
            line = (
                replay._encode_line if rng.random() < 0.5 else lambda item: json.dumps(item) + "\n"
            )
            texts = (
                line(item) if isinstance(item, dict) else json.dumps(item) + "\n" for item in lines
            )
            path.write_text("".join(texts))
            observed = value_or_refusal(lambda: replay.read_log(run, 0, HEAD["run"]), path, run)
            if not isinstance(observed, HpctrainError):
                for item in observed[1]:
                    assert item["start"] <= item["until"]
                    assert all(map(Event.from_json, item.get("events") or ()))
                    assert item.get("turns") is not None or Staleness.from_json(item["staleness"])

        campaign("forged replay logs", count, case)


ROWS = [
    {"step": n, "steps": 1, "since_step": 0, "epoch": 1, "samples": 4 * n, "train_loss": 1 / n,
     "train_accuracy": 0.5, "test_loss": None, "test_accuracy": None, "rate": 0.1, "wall_s": n / 2,
     "samples_per_s": 8.0, "compute_s": n / 4, "wait_s": n / 8, "wire_s": n / 8,
     "ranks": {"compute_s": [1.0, 2.0], "wait_s": [0.5, 0.5], "wire_s": [0.5, 0.5]},
     "staleness_histogram": {"0": n}, "idle_fraction": [0.1, 0.2]}
    for n in range(1, 7)
]  # fmt: skip
SUMMARY = {
    "status": "done", "exit_code": 0, "reason": None, "recipe": "r", "engine": "single",
    "world_size": 2, "hosts": ["a"], "epochs": 1.5, "steps": 6, "wall_s": 3.0,
    "train_loss": 0.1, "versions": {"numpy": "2"}, "staleness_histogram": {"0": 6}, "seed": 0,
}  # fmt: skip


def typed(row):
    return isinstance(row["step"], int) and isinstance(row.get("train_loss"), float | int | None)


@counts(500)
def test_rows(count):
    """Torn rows are a prefix; after `go_back` the file holds the rows up to its step, and grows."""
    complete = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
    with in_memory() as run:
        path = run / run_folder.METRICS

        def case(rng):
            (run / run_folder.REDONE).unlink(missing_ok=True)
            kind = rng.choice(("torn", "bytes", "JSON", "redone"))
            rows = mutated_json(ROWS, rng) if kind == "JSON" else ROWS
            text = "".join(
                json.dumps(row) + "\n" for row in (rows if isinstance(rows, list) else ())
            )
            data = {"torn": torn, "bytes": mutated}.get(kind, lambda data, rng: text.encode())
            path.write_bytes(data(complete, rng))
            if kind == "redone":
                (run / run_folder.REDONE).write_bytes(mutated(b"4\n", rng))
            observed = value_or_refusal(lambda: run_folder.rows(run), path)
            gone = value_or_refusal(
                lambda: run_folder.go_back(run, 3, 0), path, run / run_folder.REDONE
            )
            if isinstance(observed, HpctrainError):
                assert isinstance(gone, HpctrainError)
                return
            assert all(map(typed, observed))
            assert kind != "torn" or observed == ROWS[: len(observed)]
            if not isinstance(gone, HpctrainError):
                stored = [row for row in observed if row["step"] <= 3]
                assert same(run_folder.rows(run), stored)
                run_folder.append_row(run, {"step": 9})
                assert same(run_folder.rows(run), [*stored, {"step": 9}])

        campaign("rows", count, case)


def same(a, b):
    """Return whether two values are the same JSON: NaN is equal to NaN, and to its null."""
    return to_json(a) == to_json(b)


@counts(500)
def test_summaries(count):
    """A summary has the types that pages and tables show, or is refused; a page can be made."""
    text = json.dumps(SUMMARY, indent=2).encode()
    with in_memory() as run:
        path = run / run_folder.SUMMARY

        def case(rng):
            if rng.random() < 0.5:
                path.write_bytes(mutated(text, rng))
            else:
                path.write_text(json.dumps(mutated_json(SUMMARY, rng)))
            observed = value_or_refusal(lambda: run_folder.read_summary(run), path)
            if isinstance(observed, HpctrainError):
                return
            assert isinstance(observed["status"], str)
            created = page.page(record.read(run), {})
            assert "</html>" in created and created.encode()

        campaign("summaries", count, case)
