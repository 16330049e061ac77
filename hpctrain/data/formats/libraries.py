"""The libraries that read files of each format, and their errors in our own words."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from hpctrain.core.errors import HpctrainError, UsageError
from hpctrain.core.files import brief


def load_library(module: str, extra: str) -> Any:
    """Import a library; raise UsageError with the extra that installs it."""
    try:
        return import_module(module)
    except ImportError as error:
        raise UsageError(
            f"[data] kind = '{extra}' needs the package {module.partition('.')[0]}: "
            f"pip install 'hpctrain[{extra}]'; seen: {error}"
        ) from None


@contextmanager
def faults_of(
    place: str, expectation: str, remedy: str = "copy it again", error_class: Any = UsageError
) -> Iterator[None]:
    """Raise `error_class` for any error of a library, which damaged bytes may cause.

    Libraries do not document these errors: even KeyError, TypeError and MemoryError occur.
    """
    try:
        yield
    except HpctrainError:
        raise
    except Exception as error:
        raise error_class(
            f"{place}: expected {expectation}, seen: {describe(error)}; {remedy}"
        ) from None


def describe(error: BaseException) -> str:
    """Return the first line of an error's text, or its class, for a message."""
    lines = str(error).strip().splitlines()
    return brief(lines[0], 200).strip("'\"") if lines else type(error).__name__
