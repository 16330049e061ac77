"""Comparison of a module that a program has imported by itself with the source in its file."""

from __future__ import annotations

import inspect
import os
import sys
from importlib.machinery import SourceFileLoader, SourcelessFileLoader
from types import CodeType, ModuleType


def runs_source(module: ModuleType, loader: SourceFileLoader, source: bytes) -> bool:
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
    running = {code for code in _function_codes(module) if code.co_filename == loader.path}
    return running.issubset(codes) and _written_code(loader.name, module) in (None, codes[0])


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
