"""Command lines of Python children, which import nothing from their current folder.

`python -m MODULE` puts the current folder first on sys.path: a `queue.py` there would replace the
standard library's, and any user who can write there could run code in every rank.
Since Python 3.11 `-P` leaves it out; before, a line of our own takes it out again.
"""

from __future__ import annotations

import sys

#: runpy warns of every module that its own package has imported before.
QUIET = ("-W", "ignore::RuntimeWarning:runpy")
# Nothing but sys, which is built in, is imported before the folder is gone.
WITHOUT_FOLDER = (
    "import sys; del sys.path[0], sys.argv[0]; import runpy; "
    "runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
)


def module_command(name: str, version: tuple[int, ...] = sys.version_info[:2]) -> list[str]:
    """Return the command that runs the module `name` in this Python, of this `version`."""
    if version >= (3, 11):
        return [sys.executable, *QUIET, "-P", "-m", name]
    return [sys.executable, *QUIET, "-c", WITHOUT_FOLDER, name]
