"""The code that modules of a recipe run: loaded from its source, and hashed as it runs."""

from __future__ import annotations

import hashlib
import inspect
import os
import sys
from collections.abc import Mapping
from importlib.machinery import SourceFileLoader, SourcelessFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from hpctrain.core import files
from hpctrain.core.errors import UsageError
from hpctrain.core.opening import NAMED

MODULE_BYTES = 1 << 30  #: of a module's file at most; extensions are large


class SourceLoader(SourceFileLoader):
    """The loader of a module from its source, without its bytecode."""

    def path_stats(self, path: Any) -> Mapping[str, Any]:
        """Raise OSError: without the time of a source, Python neither reads nor writes bytecode."""
        raise OSError

    def source_to_code(self, data: Any, path: Any) -> Any:  # type: ignore[override]
        """Compile the source, and keep its SHA-256: the file may be changed later."""
        self.sha256 = hashlib.sha256(data).hexdigest()
        return super().source_to_code(data, path)


def hash_module(name: str, file: Path) -> str:
    """Return the SHA-256 of the source that runs as module `name` in this process, else of `file`.

    Raises UsageError for a module that the program has imported by itself, and that runs other code
    than its file holds.
    """
    module = sys.modules.get(name)
    spec = getattr(module, "__spec__", None)
    loader = spec.loader if spec and spec.origin == str(file) else None
    if isinstance(loader, SourceLoader):
        return loader.sha256
    data = files.read_bytes(file, MODULE_BYTES, NAMED)
    if module and type(loader) is SourceFileLoader and not _runs_source(module, loader, data):
        raise UsageError(
            f"module {name} runs other code than its file {file}, which was changed after the "
            "import or replaced by bytecode: start the program again, without __pycache__"
        )
    return hashlib.sha256(data).hexdigest()


def _runs_source(module: ModuleType, loader: SourceFileLoader, source: bytes) -> bool:
    """Return whether a module that Python's own `loader` imported runs `source`.

    Python does not keep a module's statements: its functions are compared, and the bytecode of the
    whole module where Python writes such a file.
    """
    try:
        codes = [loader.source_to_code(source, loader.path)]
    except (SyntaxError, ValueError):
        return False
    for code in codes:
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    running_codes = {code for code in _function_codes(module) if code.co_filename == loader.path}
    return running_codes.issubset(codes) and _written_code(loader.name, module) in (None, codes[0])


def _function_codes(module: ModuleType) -> list[CodeType]:
    """Return the code of the functions and methods in a module."""
    classes = [value for value in vars(module).values() if inspect.isclass(value)]
    values = [value for owner in (module, *classes) for value in vars(owner).values()]
    functions = (inspect.unwrap(getattr(value, "__func__", value)) for value in values)
    return [function.__code__ for function in functions if inspect.isfunction(function)]


def _written_code(name: str, module: ModuleType) -> CodeType | None:
    """Return the bytecode that Python has written of a module; None if it may not, or has not."""
    path = getattr(module, "__cached__", None) or ""
    if sys.dont_write_bytecode or not os.access(os.path.dirname(path), os.W_OK):
        return None
    try:
        return SourcelessFileLoader(name, path).get_code(name)
    except (ImportError, EOFError, ValueError, OSError):  # none, or of another Python
        return None
