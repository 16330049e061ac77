"""Printed text: escape sequences that recipes, hosts and files hold are shown, not obeyed.

All output of the package goes through `say`, the console of fitted_table.py, or a `LogFormat`.
"""

from __future__ import annotations

import logging
import re
import sys

_UNUSUAL = re.compile(r"[^\n -~]")


def printable(text: str) -> str:
    """Return `text` with control characters escaped, except line feeds."""
    return _UNUSUAL.sub(lambda c: c[0] if c[0].isprintable() else repr(c[0])[1:-1], text)


def say(text: object = "", *, err: bool = False, end: str = "\n", tabs: bool = False) -> None:
    """Write `text`, printable, and `end` to stdout or stderr at once; keep `tabs`, of a file."""
    stream = sys.stderr if err else sys.stdout
    if stream is not None:  # a caller has closed it
        parts = str(text).split("\t") if tabs else [str(text)]
        stream.write("\t".join(map(printable, parts)) + end)
        stream.flush()


class LogFormat(logging.Formatter):
    """A format of logs in which records are printable."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the lines of a record."""
        return printable(super().format(record))
