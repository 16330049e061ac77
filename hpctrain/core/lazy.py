"""Names of a package that are imported on first use (PEP 562), and tables of such names."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any


class LazyTable(Mapping[str, Any]):
    """Attributes of a package under the names that users type, each imported when it is read."""

    def __init__(self, package: str, attributes: Mapping[str, str]):
        """`attributes`: the name that users type -> the attribute of `package`."""
        self._package, self._attributes = package, attributes

    def __getitem__(self, name: str) -> Any:
        return getattr(sys.modules[self._package], self._attributes[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._attributes)

    def __len__(self) -> int:
        return len(self._attributes)


def lazy_names(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the `__getattr__` of `package` for names in its `modules`: name -> module."""

    def load(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(f"{package}.{modules[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    return load
