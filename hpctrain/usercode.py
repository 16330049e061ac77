"""A user's own code, named `package.module:function` in a recipe."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from hpctrain import config
from hpctrain.errors import UsageError


def call(target: str, where: str, *args: Any, **arguments: Any) -> Any:
    """Return the function `target`, called; faults in finding or calling it are UsageErrors.

    `where` is the place that names it, such as "[data] kind". Errors inside the function pass.
    """
    function = find(target, where)
    try:
        inspect.signature(function).bind(*args, **arguments)
    except TypeError as error:
        raise UsageError(f"{where} '{target}': {error}; check the keys beside it") from None
    return function(*args, **arguments)


def is_target(table: Mapping[str, Any]) -> bool:
    """Return whether the table's `kind` names a user's function."""
    kind = table.get("kind")
    return isinstance(kind, str) and ":" in kind


def find(target: str, where: str) -> Callable[..., Any]:
    """Return the function that `target` names; raise UsageError with the nearest name."""
    module_name, _, name = target.partition(":")
    if not module_name or not name:
        raise UsageError(f"{where} '{target}': expected 'package.module:function'")
    module = _import(module_name, f"{where} '{target}'")
    functions = {n: seen for n, seen in vars(module).items() if inspect.isroutine(seen)}
    if name not in functions:
        hint = config.unknown(f"function in {module_name}:", name, functions)
        raise UsageError(f"{where} '{target}': {hint}")
    return functions[name]


def _import(name: str, where: str) -> ModuleType:
    # A console script does not see the modules that lie where it is started; `python -m` does.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(name)
    except ImportError as error:
        looked = f"looked in {os.getcwd()} and the installed packages"
        raise UsageError(f"{where}: {error}; {looked}") from error
