"""What --set changes in the tables of a recipe: `TABLE.KEY=VALUE`, the value as TOML has it.

Of the same key the last setting counts. Some keys exclude each other, such as epochs and steps: to
set one takes away the other that stands in the file; two that are both set are refused later.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hpctrain import config, toml
from hpctrain.errors import UsageError
from hpctrain.files import brief

TABLES = ("run", "model", "data", "optimizer", "schedule", "engine", "wire", "checkpoint",
          "early_stop", "trace", "faults", "code")  # fmt: skip
BATCH_KEYS = ("batch", "batch_per_rank")
RIVALS = {
    "run": (("epochs", "steps"), ("evaluate_epochs", "evaluate_steps")),
    "optimizer": (BATCH_KEYS,),
}
Table = dict[str, Any]


def applied(tables: Table, settings: Iterable[str]) -> Table:
    """Return `tables`, which are written, changed by `settings`; an empty value removes its key.

    Raises UsageError for what is no setting, and where a table is none.
    """
    given = dict(_setting(one) for one in settings)
    for (table, key), value in given.items():
        _set(tables, table, key, value)
    for (table, key), value in given.items():
        for rival in _rivals(table, key) if value is not None else ():
            if given.get((table, rival)) is None:
                tables[table].pop(rival, None)
    return tables


def _setting(override: str) -> tuple[tuple[str, str], Any]:
    """Return table, key and value of `table.key=value`; None for a value that is empty."""
    path, equals, text = override.partition("=")
    table, dot, key = path.strip().partition(".")
    if not (equals and dot and key):
        raise UsageError(f"--set takes TABLE.KEY=VALUE, seen {brief(override)}")
    config.pick(dict.fromkeys(TABLES), table, "table")
    return (table, key), _value(text.strip(), f"--set {path.strip()}") if text.strip() else None


def _value(text: str, where: str) -> Any:
    """Return the TOML value that `text` is; what is none is a string as it stands."""
    try:
        tables = toml.parsed(f"value = {text}", where)
    except toml.SyntaxFault:
        return text
    return tables["value"] if len(tables) == 1 else text  # lines that go on with other keys


def _set(tables: Table, table: str, key: str, value: Any) -> None:
    """Set `key` of a table, or take it away if `value` is None; a table left empty goes with it."""
    entries = tables.setdefault(table, {})
    must_be_table(table, entries)
    if value is not None:
        entries[key] = value
    else:
        entries.pop(key, None)
        if not entries:
            del tables[table]


def _rivals(table: str, key: str) -> list[str]:
    """Return the keys of `table` that cannot stand beside `key`."""
    return [
        rival for pair in RIVALS.get(table, ()) if key in pair for rival in pair if rival != key
    ]


def must_be_table(name: str, table: Any) -> None:
    """Raise UsageError for a value that stands where a table of a recipe does."""
    if not isinstance(table, Mapping):
        raise UsageError(f"'{name}' is a table: write [{name}], seen {brief(table)}")
