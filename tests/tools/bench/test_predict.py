"""`hpctrain bench predict`: its output, its inputs, its refusals."""

from __future__ import annotations

import json

import numpy as np
import pytest
from click.testing import CliRunner

from hpctrain import optim
from hpctrain.commands.bench_predict import bench_predict
from hpctrain.core.errors import UsageError
from hpctrain.engines import Task
from hpctrain.gradients.replica import Batch, ModelReplica
from hpctrain.nn import MODELS, Key
from hpctrain.tools.bench import units
from hpctrain.tools.bench.prediction import measurements, predict
from hpctrain.tools.bench.prediction.command import profile_step
from hpctrain.tuning.model import cost
from hpctrain.tuning.table import Fingerprint, Table, write_table

BIG = [1 << 16, 1 << 20, 1 << 24]


def run(*words: str):
    return CliRunner().invoke(bench_predict, words, catch_exceptions=True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--ranks 0", "expected 1 to 1048576 ranks"),
        ("--ranks 8:4", "expected 1 to 1048576 ranks"),
        ("--ranks 4,x", "expected 1 to 1048576 ranks"),
        ("--ranks 4 --algorithms rign", "did you mean 'ring'?"),
        ("--ranks 4 --link 400Gbut", "unknown unit 'Gbut'; did you mean 'Gbit'?"),
        ("--ranks 4 --link fast", "expected a speed such as 400Gbit or 50GB/s, seen 'fast'"),
        ("--ranks 4 --link 0Gbit", "--link: expected a speed"),
        ("--ranks 4 --latency 5", "--latency: expected a time such as 2us"),
        ("--ranks 4 --node-latency 5m", "unknown unit 'm'"),
        ("--ranks 4 --ranks-per-node 0", "--ranks-per-node: expected 1 or more"),
        ("--ranks 4 --cards 0", "--cards: expected 1 or more"),
        ("--ranks 4 --sizes 1Mob", "--sizes"),
        ("--ranks 4 --algorithms direct", "expected --ranks from 2 up to --ranks-per-node"),
        ("--ranks 4 --algorithms hierarchical", "works across nodes"),
        ("--ranks 4 --step 5,1MiB", "--step: expected a time"),
        ("--ranks 4 --step digit", "did you mean 'digits'?"),
        ("--ranks 4 --measured nowhere.json", "expected a file, seen nothing"),
        ("--ranks 4 --sizes 4B --json nowhere/x.json", "cannot be written"),
        ("--ranks 4 --sizes 4B --plot x.unknown", "cannot be written"),
    ],
)
def test_what_it_refuses(words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run(*words.split())
    assert isinstance(result.exception, UsageError) and message in str(result.exception)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"rows": [', "expected JSON"),
        ("[1, 2]", "expected a JSON object"),
        ('{"rows": []}', "machine: field required"),
        ('{"machine": {"hosts": 1}, "rows": [{"algorithm": "ring"}]}', "rows.0.operation"),
        ('{"fingerprint": {}, "schema": 99}', "its schema is 99"),
    ],
)
def test_files_that_are_no_measurement(text, message, tmp_path):
    file = tmp_path / "measured.json"
    file.write_text(text)
    with pytest.raises(UsageError, match=message):
        measurements.read_measurements(file)


def bench_json(tmp_path, hosts: int, ranks: int, rows: list):
    file = tmp_path / "bench.json"
    keys = ("operation", "algorithm", "bytes", "median_s")
    reported = [dict(zip(keys, row, strict=True), ranks=ranks, more=1) for row in rows]
    file.write_text(json.dumps({"machine": {"hosts": hosts, "cpu": "x"}, "rows": reported}))
    return file


MACHINE = cost.Machine(5e-6, 1e-9, 2e-10)
REDUCED = [
    ("allreduce", name, n, MACHINE.seconds(cost.ALLREDUCE[name](n, 4)))
    for name in ("ring", "tree", "recursive-doubling")
    for n in BIG
]


@pytest.mark.parametrize(("hosts", "fitted"), [(1, "inside"), (4, "between"), (2, None)])
def test_a_machine_is_fitted_where_one_kind_of_wire_was_used(tmp_path, hosts, fitted):
    result = measurements.read_measurements(bench_json(tmp_path, hosts, 4, REDUCED))
    reference = {"inside": result.inside, "between": result.between}
    assert [name for name, wire in reference.items() if wire] == [fitted] * bool(fitted)
    if fitted:
        wire = reference[fitted]
        assert (wire.latency, wire.seconds_per_byte, result.gamma) == pytest.approx(
            (5e-6, 1e-9, 2e-10)
        )


def test_messages_tell_the_wire(tmp_path):
    rows = [("p2p", "one-way", n, 1e-6 + n * 1e-9) for n in [4, *BIG]]
    rows += [("p2p", "ping-pong", n, 8e-6 + n * 1e-9) for n in [4, *BIG]]
    wire = measurements.read_measurements(bench_json(tmp_path, 2, 2, rows)).between
    assert (wire.latency + 2 * wire.overhead, wire.seconds_per_byte) == pytest.approx(
        (8e-6, 1e-9), rel=1e-3
    )


def test_a_tuning_table_tells_both_wires(tmp_path):
    fingerprint = Fingerprint("cpu", 2, 2, "MPI", "4 ranks on 2 nodes: 0 1, 2 3")
    other = cost.Machine(1e-6, 1e-10, 3e-11)
    write_table(Table(fingerprint, [], [], other, MACHINE), tmp_path / "table.json")
    result = measurements.read_measurements(tmp_path / "table.json")
    assert (result.hosts, result.gamma) == (2, 3e-11)
    assert (result.inside.latency, result.between.seconds_per_byte) == (1e-6, 1e-9)


def test_measured_rows_stand_beside_predictions_and_flags_go_first(tmp_path):
    file, out = bench_json(tmp_path, 4, 4, REDUCED), tmp_path / "out.json"
    words = ["--measured", str(file), "--ranks", "4,64", "--sizes", "1MiB", "--json", str(out)]
    printed = run(*words, "--algorithms", "ring,tree").output
    rows = json.loads(out.read_text())["rows"]
    observed = [row for row in rows if row["kind"] == "measured"]
    assert len(observed) == len(REDUCED)
    for (
        row
    ) in observed:  # the file's machine is the model's own; chunks of the ring travel as a stream
        assert abs(row["error"]) < 0.3 and "measured_s" in row
    at_4 = {r["algorithm"]: r["predicted_s"] for r in rows if r["kind"] != "measured"}
    assert "predicted: all-reduce on 64 ranks, 64 nodes" in printed and "measured, and" in printed
    run(*words, "--link", "1Mbit")
    slow = json.loads(out.read_text())["rows"][-1]["predicted_s"]
    assert slow > 50 * at_4["tree"]


@pytest.mark.parametrize("mode", ["weak", "strong"])
def test_steps_are_predicted(tmp_path, mode):
    out, plot = tmp_path / "out.json", tmp_path / "plot.png"
    words = "--ranks 1,16 --ranks-per-node 4 --sizes 1MiB --algorithms ring,hierarchical"
    step = ["--step", "64ms,8MiB", "--bucket", "1MiB", "--mode", mode]
    result = run(*words.split(), *step, "--json", str(out), "--plot", str(plot))
    assert result.exception is None and "predicted: a step" in result.output
    rows = [row for row in json.loads(out.read_text())["rows"] if row["operation"] == "step"]
    assert [(row["ranks"], row["algorithm"]) for row in rows] == [
        (1, "ring"), (16, "ring"), (16, "hierarchical")
    ]  # fmt: skip
    assert rows[1]["compute_s"] == pytest.approx(64e-3 / (16 if mode == "strong" else 1))
    assert all(row["predicted_s"] >= row["compute_s"] + row["exposed_s"] - 1e-12 for row in rows)
    assert rows[1]["without_overlap_s"] > rows[1]["predicted_s"]
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_a_recipe_is_measured_here(tmp_path):
    out = tmp_path / "out.json"
    run("--ranks", "2", "--sizes", "4B", "--step", "digits", "--json", str(out))
    row = json.loads(out.read_text())["rows"][-1]
    assert row["bytes"] > 100_000 and row["compute_s"] > 0


def test_a_profile_tells_when_each_bucket_is_full():
    model = MODELS["mlp"](widths=[64, 256, 256, 10]).build(None, None)
    replica = ModelReplica(model, 0, np.float32)
    task = Task(Batch.of(np.ones((8, 64), np.float32), np.zeros(8, np.int64)), 1.0, Key(0, 0, 0))
    step = profile_step(replica, optim.sgd(rate=0.1), task, 100_000, rounds=3, warm_up=1)
    assert sum(step.buckets) == replica.arena.grad.nbytes and len(step.buckets) == 2
    assert 0 < step.full_times[0] <= step.full_times[1] < step.compute


@pytest.mark.parametrize(
    ("text", "result"),
    [("400Gbit", 50e9), ("2.5gbit/s", 312.5e6), ("50GB/s", 50e9), ("1 Tbit", 125e9)],
)
def test_speeds(text, result):
    assert units.parse_speed(text, "--link") == result


def test_ranks_of_a_node_share_its_memory_when_they_add():
    wire = predict.make_wire(1e9, 4e-6)
    assert wire.latency + 2 * wire.overhead == 4e-6
    assert predict.make_cluster(wire, wire, 30e9, 10, 1).gamma == pytest.approx(1e-9)


@pytest.mark.parametrize("seconds, text", [
    (9.996e-4, "1 ms"), (9.994e-4, "999 us"), (0.9999, "1 s"), (4.04e-3, "4.04 ms"),
    (5e-8, "0.05 us"), (83.0, "83 s"),
])  # fmt: skip
def test_times_have_the_unit_of_what_is_shown(seconds, text):
    assert predict.format_time(seconds) == text
