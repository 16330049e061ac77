"""User functions that a recipe names, `package.module:function`: lookup, import and call.

Modules are imported as Python finds them, installed packages first, and then from the folder of the
recipe: that is appended to sys.path, so a `queue.py` beside the recipe breaks nothing. Functions of
the standard library, such as `os:system`, are no user functions and are refused.

A run's recipe.toml records in [code] the folder and the SHA-256 of each module's file, packages'
__init__.py included; see code_ownership.py. Modules in the folder are compiled from these files:
Python would run bytecode in __pycache__ in their place, which may be of other code.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import (
    BYTECODE_SUFFIXES,
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    ModuleSpec,
    PathFinder,
    SourcelessFileLoader,
)
from pathlib import Path
from types import ModuleType
from typing import Any

from hpctrain.core import config, files
from hpctrain.core.config.loaded_code import SourceLoader, hash_module
from hpctrain.core.errors import UsageError

STANDARD = sys.stdlib_module_names | {"__main__", "test"}
EXPECTED_FUNCTION = "expected a function of a module beside the recipe or of an installed package"


@config.options
class CodeOptions:
    """`[code]`: the folder of the modules that a recipe names, and the SHA-256 of their files."""

    folder: str = ""
    sha256: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.folder and not os.path.isabs(self.folder):
            seen_text = files.brief(self.folder)
            raise UsageError(f"[code] folder: expected an absolute path, seen {seen_text}")


@dataclass(frozen=True)
class Code:
    """The code that a recipe names: its folder, and its modules by the SHA-256 of their files."""

    folder: str
    exists: bool = False  #: whether the recipe names any
    sha256: Mapping[str, str] = field(default_factory=dict)  #: as they are now, where found
    recorded: Mapping[str, str] = field(default_factory=dict)  #: as recorded in the recipe's [code]

    def tables(self) -> dict[str, Any]:
        """Return the table [code] of a run's recipe.toml; no table if the recipe names no code."""
        if not self.exists:
            return {}
        return {"code": {"folder": os.path.abspath(self.folder), "sha256": dict(self.sha256)}}


def read(tables: Mapping[str, Any], callbacks: Sequence[str], folder: str) -> Code:
    """Return the code that a recipe's `tables` name, in `folder` unless [code] has another.

    Nothing is imported: a module that is not found has no hash, and is refused when it is called.
    Raises UsageError for modules of Python itself.
    """
    options = config.read(CodeOptions, tables["code"], "code")
    folder = options.folder or folder
    targets = [("[run] callbacks", target) for target in callbacks]
    tables_with_target = [name for name in ("data", "model") if is_target(tables[name])]
    targets += [(f"[{name}] kind", tables[name]["kind"]) for name in tables_with_target]
    if not targets:
        return Code(".")
    return Code(folder, exists=True, sha256=_hash_modules(targets, folder), recorded=options.sha256)


def call(target: str, place: str, folder: str, *args: Any, **arguments: Any) -> Any:
    """Return the result of function `target`; a fault in finding or calling it is a UsageError.

    `place` is the place that names it, such as "[data] kind". Errors inside the function pass.
    """
    return call_found(find(target, place, folder), target, place, *args, **arguments)


def call_found(
    function: Callable[..., Any], target: str, place: str, *args: Any, **arguments: Any
) -> Any:
    """Return the result of `function`, which `target` names; UsageError for wrong arguments."""
    signature = inspect.signature(function)
    try:
        signature.bind(*args, **arguments)
    except TypeError as error:
        hint = _unknown_key(signature, len(args), arguments) or f"{error}; check the keys beside it"
        raise UsageError(f"{place} '{target}': {hint}") from None
    return function(*args, **arguments)


def _unknown_key(signature: inspect.Signature, positional: int, keys: Iterable[str]) -> str:
    """Return the first of `keys` that is no parameter, with the nearest one; '' if all are.

    The first `positional` parameters have their values: no key stands for them.
    """
    parameters = list(signature.parameters.values())
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return ""
    parameter_names = [
        p.name
        for i, p in enumerate(parameters)
        if p.kind is p.KEYWORD_ONLY or (p.kind is p.POSITIONAL_OR_KEYWORD and i >= positional)
    ]
    unknown_keys = [key for key in keys if key not in signature.parameters]
    return (
        config.unknown("key", unknown_keys[0], parameter_names)
        if unknown_keys and parameter_names
        else ""
    )


def is_target(table: Mapping[str, Any]) -> bool:
    """Return whether the table's `kind` names a user's function."""
    kind = table.get("kind")
    return isinstance(kind, str) and ":" in kind


def find(target: str, place: str, folder: str, classes: bool = False) -> Callable[..., Any]:
    """Return the function that `target` names, of a module in `folder` or an installed package.

    With `classes` the target may also be a class. Raises UsageError, with the nearest name, if it
    is missing or belongs to Python itself.
    """
    location, (module_name, function_name) = (
        _place_text(place, target),
        _split_target(target, place),
    )
    _must_be_users(module_name, location, folder)
    module = _import_module(module_name, location, folder)
    functions = {
        name: value
        for name, value in vars(module).items()
        if inspect.isroutine(value) or (classes and inspect.isclass(value))
    }
    if function_name not in functions:
        hint = config.unknown(f"function in {module_name}:", function_name, functions)
        raise UsageError(f"{location}: {hint}")
    function = functions[function_name]
    owner = getattr(function, "__self__", None)
    name = owner.__name__ if isinstance(owner, ModuleType) else type(owner).__module__
    # The module that defines it, also if another one re-exports it.
    origin = getattr(function, "__module__", None) or name
    if _is_standard(origin):
        raise UsageError(
            f"{location}: {EXPECTED_FUNCTION}, seen one of Python's own module {origin}"
        )
    return function


def sources(name: str, folder: str) -> dict[str, Path]:
    """Return the files that importing `name` would execute, by module: packages come first.

    Empty if there is no such module.
    """
    if not _is_name(name) or _is_standard(name):
        return {}
    top, *submodules = name.split(".")
    installed_spec, own_spec = _installed_spec(top), _recipe_spec(top, folder)
    # Python imports a folder without __init__.py only as the last choice.
    takes_installed = installed_spec and (
        installed_spec.origin or not (own_spec and own_spec.origin)
    )
    specs = [installed_spec if takes_installed else own_spec]
    for part in submodules:
        if specs[-1] is None or (folders := specs[-1].submodule_search_locations) is None:
            return {}
        specs += [PathFinder.find_spec(f"{specs[-1].name}.{part}", folders)]
    if specs[-1] is None:
        return {}
    return {s.name: Path(s.origin) for s in specs if s and s.has_location and s.origin}


def _hash_modules(targets: Sequence[tuple[str, str]], folder: str) -> dict[str, str]:
    """Return the SHA-256 of the file of each module that (place, target)s name."""
    hashes: dict[str, str] = {}
    for place, target in targets:
        name = _split_target(target, place)[0]
        _must_be_users(name, _place_text(place, target), folder)
        hashes |= {name: hash_module(name, file) for name, file in sources(name, folder).items()}
    return hashes


def _place_text(place: str, target: str) -> str:
    return f"{place} {files.brief(target)}"


def _split_target(target: str, place: str) -> tuple[str, str]:
    module, _, function = target.partition(":")
    if not _is_name(module) or not function.isidentifier():
        raise UsageError(f"{_place_text(place, target)}: expected 'package.module:function'")
    return module, function


def _is_name(module: str) -> bool:
    return all(part.isidentifier() for part in module.split("."))


def _is_standard(module: str) -> bool:
    return module.partition(".")[0] in STANDARD


def _must_be_users(name: str, location: str, folder: str) -> None:
    """Raise UsageError if Python would import its own module or another package's."""
    top = name.partition(".")[0]
    recipe_module = _recipe_spec(top, folder)
    own_path = recipe_module.origin if recipe_module else None
    rename_text = f"; rename {own_path}" if own_path else ""
    if _is_standard(name):
        raise UsageError(
            f"{location}: {EXPECTED_FUNCTION}, seen Python's own module {top}{rename_text}"
        )
    installed = _installed_spec(top)  # not before: a finder of Python's own would run code
    origin = installed.origin if installed else None
    if own_path and origin and os.path.realpath(own_path) != os.path.realpath(origin):
        raise UsageError(f"{location}: Python takes {origin} for {top}{rename_text}")


def _recipe_spec(top: str, folder: str) -> ModuleSpec | None:
    path = os.path.abspath(folder)
    _load_from_source(path)
    return PathFinder.find_spec(top, [path])


class _SourceFinder(FileFinder):
    """The finder of the modules in a folder, and in the packages there, for `SourceLoader`."""

    def find_spec(self, fullname: str, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = super().find_spec(fullname, target)
        for path in (spec and spec.submodule_search_locations) or ():
            _load_from_source(path)
        return spec


def _load_from_source(folder: str) -> None:
    """Make Python import the modules in `folder` from their source."""
    if not isinstance(sys.path_importer_cache.get(folder), _SourceFinder):
        sys.path_importer_cache[folder] = _SourceFinder(
            folder,
            (ExtensionFileLoader, EXTENSION_SUFFIXES),
            (SourceLoader, SOURCE_SUFFIXES),
            (SourcelessFileLoader, BYTECODE_SUFFIXES),
        )


def _installed_spec(top: str) -> ModuleSpec | None:
    """Return the spec of module `top` that Python finds before the recipe's folder."""
    try:
        return importlib.util.find_spec(top)
    except ValueError:  # a module that was made by hand
        return None


def _import_module(name: str, location: str, folder: str) -> ModuleType:
    folder = os.path.abspath(folder)
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        return importlib.import_module(name)
    except ImportError as error:
        places_text = f"looked in {folder} and the installed packages"
        raise UsageError(f"{location}: {error}; {places_text}") from error
