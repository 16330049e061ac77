"""Tuning tables, studies and measurements with random faults: refused, or as written."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path

import pytest

from fuzz import Generator, campaign, in_memory, mutated, mutated_json, value_or_refusal
from hpctrain.collectives import ALLREDUCE
from hpctrain.core.errors import HpctrainError
from hpctrain.tools.bench.prediction import measurements
from hpctrain.tools.scaling.study import Study, StudyFolder
from hpctrain.tools.scaling.trial_recipe import Size
from hpctrain.tuning import choose, table
from hpctrain.tuning.model.cost import Machine


def tables_case(rng: Generator, folder: Path) -> None:
    path, names = folder / "t.json", [name for name in ALLREDUCE if name != "null"]
    local = table.Fingerprint("cpu", 8, 2, "Open MPI 5.0.8", "4 ranks on 2 nodes: 0 1, 2 3")
    rows = [
        choose.AlgorithmTime(
            rng.choice(names), rng.random() < 0.5, 4 << i, rng.random() + 1e-9, 0.1
        )
        for i in range(rng.randint(1, 6))
    ]
    created = table.Table(local, rows, [(1 << 20, 1e-9)], Machine(), None, 0.5)
    value = asdict(created)
    kind = rng.choice(("whole", "values", "values", "bytes"))
    if kind == "values":
        value = mutated_json(value, rng)
    content = json.dumps(value, indent=1).encode()
    path.write_bytes(mutated(content, rng) if kind == "bytes" else content)
    result = value_or_refusal(
        lambda: table.read_table(path), "damaged", "schema", path, exit_code=1
    )
    if isinstance(result, HpctrainError):
        assert kind != "whole", result
        value_or_refusal(lambda: table.newest_file(1))  # which looks at all, good or bad
        return
    assert kind != "whole" or result == created
    table.write_table(result, path)
    assert table.read_table(path) == result
    picks = choose.make_choices(table.plan_from_table(result)).choices
    assert {item for choice in picks for item in choice} <= set(ALLREDUCE.values())


def studies_case(rng: Generator, folder: Path) -> None:
    sizes = tuple(Size(1 << i, 1) for i in range(rng.randint(1, 4)))
    created = Study("a", "strong", "local", None, sizes, 3, {"run": {"steps": 3}}, 128, 4096, {},
                 2, 8, 30)  # fmt: skip
    home = StudyFolder(folder)
    home.save(created)
    path, kind = folder / "study.json", rng.choice(("whole", "values", "values", "bytes"))
    content = path.read_bytes()
    if kind == "values":
        content = json.dumps(mutated_json(json.loads(content), rng)).encode()
    path.write_bytes(mutated(content, rng) if kind == "bytes" else content)
    result = value_or_refusal(home.load, path)
    if isinstance(result, HpctrainError):
        assert kind != "whole", result
        return
    assert kind != "whole" or result == created
    home.save(result)
    assert repr(home.load()) == repr(result)  # by repr: a machine may have nan among its facts
    assert len(result.trials) == result.repeats * len(result.sizes)
    assert all(result.share(size) >= 1 for size in result.sizes)


def measured_case(rng: Generator, folder: Path) -> None:
    """What a benchmark measured, or a tuning table, for predictions."""
    path = folder / "m.json"
    rows = [
        {"operation": "allreduce", "algorithm": name, "bytes": 4 << 4 * i, "ranks": 4,
         "median_s": 1e-6 * 4**i, "p5_s": None} for i in range(4) for name in ("ring", "tree")
    ]  # fmt: skip
    value = {"machine": {"hosts": rng.choice((1, 4))}, "rows": rows}
    kind = rng.choice(("whole", "values", "values", "bytes"))
    if kind == "values":
        value = mutated_json(value, rng)
    content = json.dumps(value).encode()
    path.write_bytes(mutated(content, rng) if kind == "bytes" else content)
    result = value_or_refusal(lambda: measurements.read_measurements(path), path)
    if isinstance(result, HpctrainError):
        assert kind != "whole", result
        return
    assert kind != "whole" or [asdict(row) for row in result.rows] == [
        {key: row[key] for key in asdict(result.rows[0])} for row in rows
    ]


CASES = [tables_case, studies_case, measured_case]


@pytest.mark.parametrize(
    "count", [200, pytest.param(20_000, marks=[pytest.mark.full, pytest.mark.timeout(3600)])]
)
@pytest.mark.parametrize("case", CASES)
def test_tables(case, count, monkeypatch):
    with in_memory() as folder:
        monkeypatch.setenv(table.FILE_VARIABLE, str(folder))
        campaign(case.__name__, count, partial(case, folder=folder))
