"""Benchmarks of collectives: rows, correctness, refusals, output."""

from __future__ import annotations

import json
from dataclasses import replace

import ml_dtypes  # noqa: F401  (bfloat16)
import numpy as np
import pytest
from ranks import on_ranks, run_on

from hpctrain.core.errors import UsageError
from hpctrain.tools.bench import base, collectives, sweep
from hpctrain.tools.bench.measured_collectives import COLLECTIVES, CollectiveCall

REQUESTED = {
    "sizes_text": "4B,1000B",
    "algorithms": "",
    "rivals_text": "",
    "dtype": "float32",
    "op": "sum",
    "buffers": "node",
    "iterations": 2,
    "warm_up": 0,
    "json": None,
    "plot": None,
}
# What design promises of each row of --json
COLUMNS = {"operation", "algorithm", "bytes", "ranks", "median_s", "p5_s", "p95_s", "p99_s",
           "algbw", "busbw", "correct", "cold_s", "share_of_floor", "floor_s", "calls",
           "rounds"}  # fmt: skip


def asked(operation="allreduce", **changes):
    names = ",".join(COLLECTIVES[operation].names)
    return collectives.parse_options(operation, **{**REQUESTED, "algorithms": names, **changes})


@on_ranks(1, 2, 3, mpi=(1, 2, 3))
@pytest.mark.parametrize("operation", COLLECTIVES)
def test_every_algorithm_is_right(ranks, operation):
    plan = asked(operation)
    if operation == "allreduce":  # null sends nothing
        plan = replace(plan, algorithms=[name for name in plan.algorithms if name != "null"])
    for groups in ranks(lambda world: list(sweep.run(world, plan, {}))):
        rows = [row for group in groups for row in group]
        assert [row["algorithm"] for row in groups[0]] == list(plan.algorithms)
        assert all(row.keys() >= COLUMNS for row in rows)
        assert [row for row in rows if not row["correct"]] == []
        assert {row["calls"] for row in rows} == {64}


ROWS = [(d, op) for d in ("float16", "bfloat16", "float64", "int32") for op in ("sum", "max")]
ROWS += [("bool", "sum"), ("uint8", "prod"), ("int64", "xor"), ("complex64", "prod")]


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype, op", ROWS)
def test_every_dtype_is_right(dtype, op):
    plan = asked(dtype=dtype, op=op, algorithms="ring,tree", buffers="private")
    for groups in run_on("threads", 4, lambda world: list(sweep.run(world, plan, {}))):
        assert all(row["correct"] for group in groups for row in group)


def _forgets_the_last(group, x, op):
    COLLECTIVES["allreduce"].algorithms["ring"](group, x[:-1], op)


def _turned(group, x, op):
    COLLECTIVES["allreduce"].algorithms["ring"](group, x, op)
    x[:] = np.roll(x, x.size // 2)


def _on_one_rank_only(group, x, op):
    saved = x.copy()
    COLLECTIVES["allreduce"].algorithms["ring"](group, x, op)
    if group.link.rank == 1:
        x[0] = saved[0]


def _a_bit_less(group, x, op):
    COLLECTIVES["allreduce"].algorithms["ring"](group, x, op)
    x *= np.float32(1 - 1e-5)


def _elsewhere_and_wrong(group, x, op):
    COLLECTIVES["allreduce"].algorithms["ring"](group, x, op)
    return np.zeros_like(x)


WRONG = [_forgets_the_last, _turned, _on_one_rank_only, _a_bit_less, _elsewhere_and_wrong]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda f: f.__name__)
def test_a_planted_error_is_seen(wrong):
    right = asked(algorithms="ring")
    plan = replace(
        right, collective=replace(right.collective, algorithms={"ring": wrong}), sizes=[1 << 20]
    )
    for groups in run_on("threads", 2, lambda world: list(sweep.run(world, plan, {}))):
        assert [row["correct"] for row in groups[0]] == [False]


@pytest.mark.parametrize("operation", COLLECTIVES)
def test_each_operation_sees_a_wrong_element(operation):
    collective = COLLECTIVES[operation]
    case = CollectiveCall(0, 2, 10, np.dtype("float64"), "sum")
    result = np.concatenate([p.expected[: p.stop - p.start] for p in collective.output(case)])
    if operation == "all-gather":  # its second part begins within the block
        result[5:] = collective.output(case)[1].expected[5:10]
    assert collective.is_correct(result, case)
    for place in range(result.size):
        wrong = result.copy()
        wrong[place] += 1e-6
        assert not collective.is_correct(wrong, case)
    assert not collective.is_correct(result[:-1], case)


def test_a_result_that_is_one_for_all_is_checked_and_named():
    def shared(group, x, op):
        COLLECTIVES["allreduce"].algorithms["ring"](group, x, op)
        return x.copy()

    right = asked(algorithms="ring")
    plan = replace(right, collective=replace(right.collective, algorithms={"ring": shared}))
    groups = run_on("threads", 2, lambda world: list(sweep.run(world, plan, {})))[0]
    assert [(row["correct"], row["result"]) for row in groups[0]] == [(True, "shared")]


REFUSED = {
    "algorithm": ({"algorithms": "rin"}, "unknown algorithm 'rin'; did you mean 'ring'?"),
    "rival": ({"rivals_text": "horovd"}, "unknown rival 'horovd'; did you mean 'horovod'?"),
    "dtype": ({"dtype": "float"}, "unknown dtype 'float'; did you mean"),
    "op": ({"op": "mean"}, "unknown op 'mean'"),
    "buffers": ({"buffers": "nod"}, "unknown --buffers 'nod'; did you mean 'node'?"),
    "iterations": ({"iterations": 0}, "--iterations: expected at least 1, seen 0"),
    "warm-up": ({"warm_up": -1}, "--warm-up: expected at least 0, seen -1"),
    "nobody": ({"algorithms": " "}, "--algorithms: choose some of auto, auto-unchecked, ring"),
    "sizes": ({"sizes_text": "4Q"}, "--sizes: expected sizes such as"),
}


@pytest.mark.parametrize("wrong", REFUSED)
def test_refused(wrong):
    changes, message = REFUSED[wrong]
    with pytest.raises(UsageError) as error:
        asked(**changes)
    assert message in str(error.value)


def test_a_plot_has_a_known_suffix(tmp_path):
    with pytest.raises(UsageError, match=r"\.png or \.svg, seen"):
        asked(plot=tmp_path / "a.jpg")


def test_what_cannot_be_written_is_said_before_anything_is_measured(tmp_path):
    (tmp_path / "file").touch()
    expected = asked(json=tmp_path / "file" / "out.json")
    with pytest.raises(UsageError, match="cannot be written"):
        run_on("threads", 2, lambda world: collectives.run(world, expected))


def test_buffers_that_do_not_fit_are_refused_before_they_are_made(monkeypatch):
    available_bytes = 2 * base.OWN_BUFFERS * 1024
    monkeypatch.setattr(base, "available_bytes", lambda root: available_bytes)
    requested = asked(algorithms="ring", sizes_text="1KiB,2KiB")
    with pytest.raises(UsageError, match=r"2 KiB needs .* in each of 2 ranks"):
        run_on("threads", 2, lambda world: collectives.run(world, requested))


def test_rivals_do_not_join_threads(capsys):
    expected = asked(rivals_text="gloo,horovod", algorithms="ring", sizes_text="8B")
    for rows in run_on("threads", 2, lambda world: collectives.run(world, expected)):
        assert [row["algorithm"] for row in rows] == ["ring"]
    text = capsys.readouterr().out
    assert text.count("# gloo: skipped: ranks are threads") == 1  # one voice
    assert text.count("ring") == 1


@pytest.mark.processes
@pytest.mark.either
def test_the_command(hpctrain, tmp_path):
    pytest.importorskip("matplotlib")
    flags = ["--sizes", "4B:1KiB*16", "--algorithms", "auto,native", "--iterations", "3"]
    ended = hpctrain("bench", "allreduce", *flags, "--rivals", "horovod,gloo",
                     "--json", str(tmp_path / "a.json"), "--plot", str(tmp_path / "a.svg"),
                     ranks=2)  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    saved = json.loads((tmp_path / "a.json").read_text())
    names = {"auto", "native"} | {n for n, text in saved["rivals"].items() if "skipped" not in text}
    assert set(saved["rivals"]) == {"horovod", "gloo"}
    assert {(row["algorithm"], row["bytes"]) for row in saved["rows"]} == {
        (name, size) for name in names for size in (4, 64, 1024)
    }
    assert all(row.keys() >= COLUMNS and row["correct"] for row in saved["rows"])
    assert saved["machine"]["mpi"] and saved["buffers"].startswith("node")
    assert "\r" not in ended.stdout and ended.stdout.count("busbw") == 1
    assert (tmp_path / "a.svg").read_text().startswith("<?xml")


@pytest.mark.processes
@pytest.mark.either
def test_too_much_is_refused_with_one_voice(hpctrain):
    ended = hpctrain("bench", "allreduce", "--sizes", "1000000GiB", ranks=2)
    assert ended.returncode == 2
    assert ended.stderr.count("1000000 GiB needs") == 1, ended.stderr


@pytest.mark.parametrize(
    ("spreads", "expected"), [([0.1, 0.1, 0.1], None), ([0.1, 0.1, 0.9, 0.4], 0.9)]
)
def test_times_of_a_busy_machine_are_said_to_be_noisy(spreads, expected, capsys):
    rows = [{"spread": spread} for spread in spreads]
    assert run_on("threads", 1, lambda world: base.find_noise(world, rows)) == [expected]
    assert ("noisy: the quartiles of repeats differ by 90%" in capsys.readouterr().out) == bool(
        expected
    )
