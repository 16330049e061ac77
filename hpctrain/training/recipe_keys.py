"""Every key of a recipe, with its value or its default."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from hpctrain.core.config import overrides
from hpctrain.gradients.reducer import WireOptions
from hpctrain.training.recipe import Recipe, Table


def list_all_keys(spec: Recipe) -> Table:
    """Return the tables of a recipe with every key that has a value, defaults included.

    Tables of a user's own functions have the keys that were given.
    """
    wire_keys = {option.name for option in fields(WireOptions)}
    tables = {"run": spec.run, "model": spec.model, "data": spec.data, "schedule": spec.schedule,
              "checkpoint": spec.checkpoint, "early_stop": spec.early_stop, "trace": spec.trace,
              "log": spec.log, "faults": spec.faults, "engine": spec.engine, "mesh": spec.mesh,
              "pipeline": spec.pipeline}  # fmt: skip
    values = {name: _options(part) for name, part in tables.items() if part is not None}
    values["optimizer"] = _options(spec.optimizer) | _options(spec.batch)
    values["wire"] = {key: values["engine"].pop(key) for key in wire_keys & values["engine"].keys()}
    defaults = {"engine": {"kind": "allreduce"}, "schedule": {"kind": "constant"}}
    recipe_tables = {**defaults, **spec.tables}
    function_tables = {n for n in ("model", "data") if ":" in spec.tables[n]["kind"]}
    table_names = [
        name for name in overrides.TABLES if name in values.keys() | recipe_tables.keys()
    ]
    return {"schema": 1} | {
        name: dict(recipe_tables.get(name, {}))
        | ({} if name in function_tables else values.get(name, {}))
        for name in table_names
    }


def _options(part: Any) -> Table:
    return {f.name: x for f in fields(part) if (x := getattr(part, f.name)) is not None}
