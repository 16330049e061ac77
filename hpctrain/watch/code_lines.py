"""The line at which a thread is, in the user's code and in hpctrain."""

from __future__ import annotations

import faulthandler
import gc
import os
import re
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import NamedTuple

_PACKAGE = str(Path(__file__).parents[1]) + os.sep
# The entry names the call already; the useful line is its caller's.
_LINK_FOLDERS = (_PACKAGE + "transport" + os.sep, _PACKAGE + "watch" + os.sep)
_LIBRARY_FOLDERS = (os.path.dirname(os.__file__) + os.sep, "<frozen")
#: a line of faulthandler, and what it writes for characters that are not ASCII
_LINE = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)')
_ESCAPED = re.compile(r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8}))")
_SCRIPTS_FOLDER = os.path.dirname(sys.executable) + os.sep  # of entry points, such as `hpctrain`


def frame_of_each_thread() -> dict[int, FrameType]:
    """Return the frame in which each thread is.

    CPython 3.11 before 3.11.9 holds a lock meanwhile that threads take to begin and to end, and
    may collect garbage: finalizers let another thread run, which may then wait for that lock, and
    does so with the interpreter's own (gh-106883). So nothing is collected now.
    """
    gc_enabled = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        if gc_enabled:
            gc.enable()


def code_location(thread: int) -> str:
    """Return a thread's innermost line in the user's code, and the line in hpctrain below it.

    As "train.py:9 main, ring.py:57 ring"; without either, the innermost line of the stack.
    """
    try:
        stack = _stack_of(thread)
    except OSError as error:  # no descriptor is free: the heartbeat goes on
        return f"(unknown: {error.strerror})"
    if not stack:
        exists = thread in {other.ident for other in threading.enumerate()}
        return "(one of over 100 threads)" if exists else "(its main thread has ended)"
    own = next((i for i, line in enumerate(stack) if _is_relevant(line.file)), len(stack))
    user_line = next((line for line in stack[own:] if _is_users(line.file)), None)
    lines = dict.fromkeys(filter(None, (user_line, *stack[own : own + 1])))
    return ", ".join(map(str, lines)) or str(stack[0])


class _Line(NamedTuple):
    file: str
    number: str
    function: str

    def __str__(self) -> str:
        return f"{os.path.basename(self.file)}:{self.number} {self.function}"


def _stack_of(thread: int) -> list[_Line]:
    """Return the lines at which a thread is, the innermost first; none if it has ended.

    Of over 100 threads the oldest have none either. The interpreter writes the lines without
    making frame objects: CPython 3.11 may crash where a thread goes back through the frames of
    a running thread (gh-111363). Raises OSError if there is no descriptor for them.
    """
    with open(os.memfd_create("stacks"), "w+b", 0) as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        stacks = file.read().decode("ascii")
    stack = stacks.partition(f"hread 0x{thread:016x}")[2].partition("\n\n")[0]
    text = _ESCAPED.sub(lambda match: chr(int(match[match.lastindex], 16)), stack)
    return [_Line(*groups) for groups in _LINE.findall(text)]


def _is_relevant(filename: str) -> bool:
    if filename.startswith(_PACKAGE):
        return not filename.startswith(_LINK_FOLDERS)
    return _is_users(filename)


def _is_users(filename: str) -> bool:
    is_library = filename.startswith((*_LIBRARY_FOLDERS, _PACKAGE, _SCRIPTS_FOLDER))
    return not is_library and f"-packages{os.sep}" not in filename
