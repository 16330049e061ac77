"""Names of a package that are imported on first use (PEP 562), and tables of such names."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from types import ModuleType
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
            raise NoAttributeError(package, name)
        value = getattr(import_module(f"{package}.{modules[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    return load


class NoAttributeError(AttributeError):
    """An unknown attribute of a package; its text suggests the most similar public name.

    The text is made when it is read: Python raises and drops this error in `from hpctrain import
    config`, before it imports the module.
    """

    def __init__(self, package: str, name: str):
        super().__init__(package, name)

    def __str__(self) -> str:
        """Return the message; the name may lie in a module of the package, as `nn.Linear`."""
        from difflib import get_close_matches

        package, name = self.args
        paths = {path: path for path in sys.modules[package].__all__}
        for module_name in list(paths):
            module = getattr(sys.modules[package], module_name)
            if isinstance(module, ModuleType):
                paths |= {
                    inner: f"{module_name}.{inner}" for inner in getattr(module, "__all__", [])
                }
        match = get_close_matches(name, paths, n=1)
        suggestion = f"; did you mean '{paths[match[0]]}'?" if match else ""
        return f"module {package!r} has no attribute {name!r}{suggestion}"
