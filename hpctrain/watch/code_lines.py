"""The line at which a thread is, in the user's code and in hpctrain."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

_PACKAGE = str(Path(__file__).parents[1]) + os.sep
# The entry names the call already; the useful line is that of its caller.
_LINK_FOLDERS = (_PACKAGE + "transport" + os.sep, _PACKAGE + "watch" + os.sep)
_LIBRARY_FOLDERS = (os.path.dirname(os.__file__) + os.sep, "<frozen")
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


def code_location(frame: FrameType | None) -> str:
    """Return the innermost line of `frame` in the user's code, and the one in hpctrain below it.

    As "train.py:9 main, ring.py:57 ring"; without any of the two, the innermost line of all.
    """
    if frame is None:
        return "(its main thread has ended)"
    own = _innermost(frame, _is_relevant)
    users = _innermost(own, _is_users)
    lines = dict.fromkeys(_describe_line(found) for found in (users, own) if found is not None)
    return ", ".join(lines) or _describe_line(frame)


def _innermost(frame: FrameType | None, is_wanted: Callable[[str], bool]) -> FrameType | None:
    while frame is not None and not is_wanted(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def _describe_line(frame: FrameType) -> str:
    code = frame.f_code
    return f"{os.path.basename(code.co_filename)}:{frame.f_lineno} {code.co_name}"


def _is_relevant(filename: str) -> bool:
    if filename.startswith(_PACKAGE):
        return not filename.startswith(_LINK_FOLDERS)
    return _is_users(filename)


def _is_users(filename: str) -> bool:
    is_library = filename.startswith((*_LIBRARY_FOLDERS, _PACKAGE, _SCRIPTS_FOLDER))
    return not is_library and f"-packages{os.sep}" not in filename
