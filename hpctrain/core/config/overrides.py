"""Changes of a recipe's tables, by --set or by a file that extends another.

`--set TABLE.KEY=VALUE` has its value in TOML. The last setting of a key counts. Some keys exclude
each other, such as epochs and steps: to set one removes the other from the table below it; two that
are both set are refused later.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hpctrain.core import config
from hpctrain.core.config import toml
from hpctrain.core.errors import UsageError
from hpctrain.core.files import brief

TABLES = ("run", "model", "loss", "data", "optimizer", "schedule", "engine", "wire", "mesh",
          "pipeline", "elastic", "checkpoint", "early_stop", "trace", "log", "faults",
          "code")  # fmt: skip
BATCH_KEYS = ("batch", "batch_per_rank")
RIVALS = {
    "run": (("epochs", "steps"), ("evaluate_epochs", "evaluate_steps")),
    "optimizer": (BATCH_KEYS,),
}
Table = dict[str, Any]


def apply(tables: Table, settings: Iterable[str]) -> Table:
    """Change `tables` by `settings` and return them; an empty value removes its key.

    Raises UsageError for an invalid setting, and if a table has another type.
    """
    values = dict(_parse_setting(setting) for setting in settings)
    for (table, key), value in values.items():
        entries = tables.setdefault(table, {})
        must_be_table(table, entries)
        if value is not None:
            entries[key] = value
        else:
            entries.pop(key, None)
            if not entries:
                del tables[table]
    for (table, key), value in values.items():
        for rival in _rival_keys(table, key) if value is not None else ():
            if values.get((table, rival)) is None:
                tables[table].pop(rival, None)
    return tables


def merge(base: Table, changes: Table) -> Table:
    """Return the tables of `base` as changed by a recipe that extends it.

    Tables merge key by key; a table with another `kind` replaces its namesake in `base`.
    """
    merged = {**base, **changes}
    for name in base.keys() & changes.keys():
        old_table, new_table = base[name], changes[name]
        if not isinstance(old_table, Mapping) or not isinstance(new_table, Mapping):
            continue  # refused later, unless it is `schema`
        if new_table.get("kind", old_table.get("kind")) == old_table.get("kind"):
            excluded_keys = {rival for key in new_table for rival in _rival_keys(name, key)}
            merged[name] = {
                key: x for key, x in old_table.items() if key not in excluded_keys
            } | dict(new_table)
    return merged


def _parse_setting(override: str) -> tuple[tuple[str, str], Any]:
    """Return table, key and value of `table.key=value`; None for a value that is empty."""
    path, equals, text = override.partition("=")
    table, dot, key = path.strip().partition(".")
    if not (equals and dot and key):
        raise UsageError(f"--set takes TABLE.KEY=VALUE, seen {brief(override)}")
    config.pick(dict.fromkeys(TABLES), table, "table")
    return (table, key), _parse_value(
        text.strip(), f"--set {path.strip()}"
    ) if text.strip() else None


def _parse_value(text: str, place: str) -> Any:
    """Return `text` as a TOML value; text that is no TOML is a string as it is."""
    try:
        tables = toml.parse(f"value = {text}", place)
    except toml.TomlSyntaxError:
        return text
    return tables["value"] if len(tables) == 1 else text  # further lines with other keys


def _rival_keys(table: str, key: str) -> list[str]:
    """Return the keys of `table` that cannot stand beside `key`."""
    return [
        rival for pair in RIVALS.get(table, ()) if key in pair for rival in pair if rival != key
    ]


def must_be_table(name: str, table: Any) -> None:
    """Raise UsageError for a value in place of a recipe's table."""
    if not isinstance(table, Mapping):
        raise UsageError(f"'{name}' is a table: write [{name}], seen {brief(table)}")
