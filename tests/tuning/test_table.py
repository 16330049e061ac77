"""The tuning table on disk: taken where it fits, told and left alone where it does not."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import asdict, replace

import numpy as np
import pytest
from ranks import on_ranks, run_on

from hpctrain.core.errors import UsageError
from hpctrain.cost_model.cost import Machine
from hpctrain.tuning import select, table
from hpctrain.tuning.choose import AlgorithmTime

RANKS = 3


def made(world, name: str = "tree") -> table.Table:
    """Return a table that fits `world` and makes `auto` take `name`."""
    here = table.fingerprint(world.main, mpi=world.transport == "mpi")
    rows = [AlgorithmTime(name, False, 4, 1e-6), AlgorithmTime("native", False, 4, 1e-3)]
    return table.Table(here, rows, [(1 << 20, 1e-9)], Machine())


def written(found: table.Table) -> str:
    return json.dumps(asdict(found))


def told(world) -> str:
    """Return what `auto` takes in a world made anew, on the same link."""
    group = select.with_choices(world.main, mpi=world.transport == "mpi")
    return select.name_of(select.auto, group, np.zeros(100, np.float32))


# What stands in the file, from a table that would fit -> what the warning says.
BAD = {
    "empty": (lambda found: "", "damaged"),
    "cut": (lambda found: written(found)[:-9], "damaged"),
    "no table": (lambda found: "[1, 2]", "damaged"),
    "not text": (lambda found: b"\xff\xfe\x00".decode("latin1"), "damaged"),
    "nested": (lambda found: "[" * 100_000, "damaged"),
    "schema": (lambda found: written(replace(found, schema=0)), "schema is 0"),
    "no schema": (lambda found: "{}", "schema is None"),
    "no rows": (lambda found: '{"schema": 1}', "damaged: fingerprint"),
    "negative": (lambda found: written(found).replace("1e-06", "-1.0", 1), "seconds"),
    "not a number": (lambda found: written(found).replace("1e-06", "NaN", 1), "damaged"),
    "a word": (lambda found: written(found).replace("1e-06", '"fast"', 1), "damaged"),
    "algorithms": (lambda found: written(replace(found, algorithms="old")), "other algorithms"),
    "endless": (
        lambda found: written(replace(found, node=Machine(alpha=1e400))),
        "node.alpha: expected sec",
    ),
    "before": (
        lambda found: written(replace(found, node=Machine(beta=-1.0))),
        "node.beta: expected sec",
    ),
    "terminal's codes": (lambda found: changed(found, cpu="\x1b[2J" * 999), "cpu is '\\x1b[2J"),
    "long": (lambda found: '{"schema": ' + "9" * 5000 + "}", "damaged"),
    "cpu": (lambda found: changed(found, cpu="abacus"), "cpu is 'abacus'"),
    "cores": (lambda found: changed(found, cores=10_000), "cores is 10000"),
    "pinned": (lambda found: changed(found, cores_per_rank=10_000), "cores_per_rank"),
    "mpi": (lambda found: changed(found, mpi="LAM 7"), "mpi is 'LAM 7'"),
    "ranks": (lambda found: changed(found, layout="2 ranks on 1 node: 0 1"), "layout is '2 ranks"),
}


def changed(found: table.Table, **facts) -> str:
    return written(replace(found, fingerprint=replace(found.fingerprint, **facts)))


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
            monkeypatch.setenv(table.FILE, str(path))
            path.write_text(write(made(world)), encoding="latin1")
        world.link.barrier()
        found = told(world)
        world.link.barrier()
        return usual, found, world.rank

    with caplog.at_level(logging.WARNING):
        results = ranks(body)
    assert all(usual == found != "tree" for usual, found, _ in results)
    words = [r.message for r in caplog.records if r.name == table.__name__]
    expected = 1 if any(rank == 0 for *_, rank in results) else 0
    assert len(words) == expected and all(says in word and "tune" in word for word in words)


@pytest.mark.parametrize("where", ["file", "folder", "cache", "missing"])
def test_where_tables_lie(where, tmp_path, monkeypatch, caplog):
    """HPCTRAIN_TUNING names a file or a folder; else it is the cache of the user."""
    found = run_on("threads", RANKS, made)[0]
    usual = run_on("threads", RANKS, told)[0]
    folder = tmp_path / "hpctrain" / "tuning" if where == "cache" else tmp_path
    path = folder / ("table.json" if where == "file" else found.fingerprint.file)
    if where == "cache":
        monkeypatch.delenv(table.FILE)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    else:
        monkeypatch.setenv(table.FILE, str(folder if where == "folder" else path))
    if where != "missing":
        table.write(found, path)
    taken = usual if where == "missing" else "tree"
    assert set(run_on("threads", RANKS, told)) == {taken} != {usual, "tree"}
    assert ("expected a file, seen nothing" in caplog.text) == (where == "missing")


@on_ranks(RANKS, mpi=(RANKS,))
def test_where_ranks_have_different_tables_that_of_rank_0_is_taken(ranks, monkeypatch):
    def body(world):
        tables = {rank: made(world, "tree" if rank else "ring") for rank in range(RANKS)}
        monkeypatch.setattr(table, "of_group", lambda group, mpi, gpus: tables[group.link.rank])
        world.link.barrier()
        return told(world)

    assert set(ranks(body)) <= {"ring"}  # none where this process only looks on


def test_a_table_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    found = run_on("threads", 2, made)[0]
    path = tmp_path / "new" / "table.json"
    table.write(found, path)
    assert table.read(path) == found

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(UsageError, match="No space left"):
        table.write(replace(found, date="2000-01-01"), path)
    assert table.read(path) == found and os.listdir(path.parent) == [path.name]


def test_layouts_that_differ_have_names_that_differ():
    layouts = [
        [[0, 1, 2, 3]],
        [[0, 1], [2, 3]],
        [[0, 2], [1, 3]],
        [[0, 1, 2], [3]],
        [list(range(64)), list(range(64, 128))],
        [list(range(0, 128, 2)), list(range(1, 128, 2))],
    ]
    names = {table.layout(nodes) for nodes in layouts}
    assert len(names) == len(layouts) and max(map(len, names)) < 80
