"""The tuning table on disk: used if it fits, otherwise reported and left alone."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import asdict, replace

import numpy as np
import pytest
from ranks import on_ranks, run_on

from hpctrain.core.errors import UsageError
from hpctrain.tuning import select, table
from hpctrain.tuning.choose import AlgorithmTime
from hpctrain.tuning.model.cost import Machine

RANKS = 3


def made(world, name: str = "tree") -> table.Table:
    """Return a table that fits `world` and makes `auto` take `name`."""
    local = table.make_fingerprint(world.main, mpi=world.transport == "mpi")
    rows = [AlgorithmTime(name, False, 4, 1e-6), AlgorithmTime("native", False, 4, 1e-3)]
    return table.Table(local, rows, [(1 << 20, 1e-9)], Machine())


def written(result: table.Table) -> str:
    return json.dumps(asdict(result))


def told(world) -> str:
    """Return what `auto` takes in a world made anew, on the same link."""
    group = select.add_choices(world.main, mpi=world.transport == "mpi")
    return select.algorithm_name(select.auto, group, np.zeros(100, np.float32))


# What stands in the file, from a table that would fit -> what the warning says.
BAD = {
    "empty": (lambda result: "", "damaged"),
    "cut": (lambda result: written(result)[:-9], "damaged"),
    "no table": (lambda result: "[1, 2]", "damaged"),
    "not text": (lambda result: b"\xff\xfe\x00".decode("latin1"), "damaged"),
    "nested": (lambda result: "[" * 100_000, "damaged"),
    "schema": (lambda result: written(replace(result, schema=0)), "schema is 0"),
    "no schema": (lambda result: "{}", "schema is None"),
    "no rows": (lambda result: '{"schema": 1}', "damaged: fingerprint"),
    "negative": (lambda result: written(result).replace("1e-06", "-1.0", 1), "seconds"),
    "not a number": (lambda result: written(result).replace("1e-06", "NaN", 1), "damaged"),
    "a word": (lambda result: written(result).replace("1e-06", '"fast"', 1), "damaged"),
    "algorithms": (lambda result: written(replace(result, algorithms="old")), "other algorithms"),
    "endless": (
        lambda result: written(replace(result, node=Machine(alpha=1e400))),
        "node.alpha: expected sec",
    ),
    "before": (
        lambda result: written(replace(result, node=Machine(beta=-1.0))),
        "node.beta: expected sec",
    ),
    "terminal's codes": (lambda result: changed(result, cpu="\x1b[2J" * 999), "cpu is '\\x1b[2J"),
    "long": (lambda result: '{"schema": ' + "9" * 5000 + "}", "damaged"),
    "cpu": (lambda result: changed(result, cpu="abacus"), "cpu is 'abacus'"),
    "cores": (lambda result: changed(result, cores=10_000), "cores is 10000"),
    "pinned": (lambda result: changed(result, cores_per_rank=10_000), "cores_per_rank"),
    "mpi": (lambda result: changed(result, mpi="LAM 7"), "mpi is 'LAM 7'"),
    "ranks": (
        lambda result: changed(result, layout="2 ranks on 1 node: 0 1"),
        "layout is '2 ranks",
    ),
}


def changed(result: table.Table, **facts) -> str:
    return written(replace(result, fingerprint=replace(result.fingerprint, **facts)))


@on_ranks(RANKS, mpi=(RANKS,))
@pytest.mark.parametrize("case", BAD)
def test_a_table_that_does_not_fit_is_ignored_with_a_word(
    ranks, case, tmp_path, monkeypatch, caplog
):
    """The same is taken as without a table, on all ranks, and rank 0 says why."""
    write, says = BAD[case]
    path = tmp_path / "table.json"

    def body(world):
        usual = told(world)
        if world.rank == 0:
            monkeypatch.setenv(table.FILE_VARIABLE, str(path))
            path.write_text(write(made(world)), encoding="latin1")
        world.link.barrier()
        result = told(world)
        world.link.barrier()
        return usual, result, world.rank

    with caplog.at_level(logging.WARNING):
        results = ranks(body)
    assert all(usual == result != "tree" for usual, result, _ in results)
    words = [r.message for r in caplog.records if r.name == table.__name__]
    expected = 1 if any(rank == 0 for *_, rank in results) else 0
    assert len(words) == expected and all(says in word and "tune" in word for word in words)


@pytest.mark.parametrize("location", ["file", "folder", "cache", "missing"])
def test_where_tables_lie(location, tmp_path, monkeypatch, caplog):
    """HPCTRAIN_TUNING names a file or a folder; else it is the cache of the user."""
    result = run_on("threads", RANKS, made)[0]
    usual = run_on("threads", RANKS, told)[0]
    folder = tmp_path / "hpctrain" / "tuning" if location == "cache" else tmp_path
    path = folder / ("table.json" if location == "file" else result.fingerprint.file_name)
    if location == "cache":
        monkeypatch.delenv(table.FILE_VARIABLE)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    else:
        monkeypatch.setenv(table.FILE_VARIABLE, str(folder if location == "folder" else path))
    if location != "missing":
        table.write_table(result, path)
    chosen = usual if location == "missing" else "tree"
    assert set(run_on("threads", RANKS, told)) == {chosen} != {usual, "tree"}
    assert ("expected a file, seen nothing" in caplog.text) == (location == "missing")


@on_ranks(RANKS, mpi=(RANKS,))
def test_where_ranks_have_different_tables_that_of_rank_0_is_taken(ranks, monkeypatch):
    def body(world):
        tables = {rank: made(world, "tree" if rank else "ring") for rank in range(RANKS)}
        monkeypatch.setattr(table, "find_table", lambda group, mpi, gpus: tables[group.link.rank])
        world.link.barrier()
        return told(world)

    assert set(ranks(body)) <= {"ring"}  # none where this process only looks on


def test_a_table_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    result = run_on("threads", 2, made)[0]
    path = tmp_path / "new" / "table.json"
    table.write_table(result, path)
    assert table.read_table(path) == result

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(UsageError, match="No space left"):
        table.write_table(replace(result, date="2000-01-01"), path)
    assert table.read_table(path) == result and os.listdir(path.parent) == [path.name]


def test_layouts_that_differ_have_names_that_differ():
    layouts = [
        [[0, 1, 2, 3]],
        [[0, 1], [2, 3]],
        [[0, 2], [1, 3]],
        [[0, 1, 2], [3]],
        [list(range(64)), list(range(64, 128))],
        [list(range(0, 128, 2)), list(range(1, 128, 2))],
    ]
    names = {table.describe_layout(nodes) for nodes in layouts}
    assert len(names) == len(layouts) and max(map(len, names)) < 80
