"""The same surroundings for all tests, whoever starts them; imported first, for this effect.

A test of a terminal, a locale or a time zone sets its own.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

VARIABLES = {
    "TERM": "xterm",
    "TZ": "UTC",
    # A folder without tables of `hpctrain tune`, which would decide what `auto` chooses.
    "HPCTRAIN_TUNING": str(Path(__file__).parent),
}
#: Widths, colors and languages of tables and messages. With CI or BUILD_NUMBER pytest compares two
#: long arrays of bytes line by line, for minutes. With PYTHONUNBUFFERED ranks write their lines in
#: pieces, which mix in the output of the launcher.
ABSENT = (
    "BUILD_NUMBER", "CI", "PYTHONUNBUFFERED", "COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR",
    "CLICOLOR_FORCE", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "PY_COLORS", "LANG", "LANGUAGE",
    "LC_ALL", "LC_CTYPE", "LC_MESSAGES", "LC_NUMERIC", "LC_TIME",
)  # fmt: skip

os.environ.update(VARIABLES)
for name in ABSENT:
    os.environ.pop(name, None)
time.tzset()
os.umask(0o022)
# Who starts the tests in the background has SIGINT ignored, and so would all processes that they
# start, which then live until SIGKILL.
signal.signal(signal.SIGINT, signal.default_int_handler)
