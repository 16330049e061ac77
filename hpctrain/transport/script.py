"""The script of a rank, run in this process; an error on any rank ends the job."""

from __future__ import annotations

import os
import runpy
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType, TracebackType
from typing import NoReturn

from hpctrain.core.errors import HpctrainError, UsageError
from hpctrain.core.launchers import Launched
from hpctrain.core.printing import say
from hpctrain.transport import abort

OTHERS_S = 2.0  #: the time for all ranks to end with an error of their own


def run(help_text: str, prepare: Callable[[], Launched]) -> int:
    """Run this process's arguments, a SCRIPT, `-m MODULE` or `-c CODE`, as `python` does.

    `prepare` is called before and returns this rank. Returns an exit code after `help_text` or a
    wrong argument. An uncaught error is printed with the name of this rank, and ends the job.
    """
    words = sys.argv[1:]
    if not words or words[0] in ("-h", "--help"):
        say(help_text, end="", err=not words)
        return 0 if words else UsageError.exit_code
    try:
        _check(words)
        sys.excepthook = partial(_end_job, prepare())
    except UsageError as error:
        return abort.refuse(error, str(error))
    try:
        _run_as_main(words)
    except SystemExit as end:
        _leave(end)
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_globals.get("__name__") in (__name__, "runpy"):
            trace = trace.tb_next
        error.__traceback__ = trace  # from the first line of the script on
        _leave(_report(error))
    return 0


def _check(words: Sequence[str]) -> None:
    """Raise UsageError if there is no script that `words` name."""
    kind, *arguments = words
    if kind in ("-m", "-c"):
        if not arguments:
            raise UsageError(f"{kind} needs an argument: -m MODULE, or -c CODE")
    elif kind.startswith("-"):
        raise UsageError(f"unknown option {kind}: expected SCRIPT, -m MODULE, -c CODE or --help")
    elif not os.path.exists(kind):
        raise UsageError(f"no script '{kind}' in {os.getcwd()}")


def _run_as_main(words: Sequence[str]) -> None:
    """Run `words`; sys.argv and sys.path are what `python` gives a script."""
    kind, *arguments = words
    if kind == "-m":
        sys.argv[:] = arguments
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv[:] = [kind, *arguments[1:]]
        sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(arguments[0], "<string>", "exec"), sys.modules["__main__"].__dict__)
    else:
        sys.argv[:] = words
        if not getattr(sys.flags, "safe_path", False):
            # runpy puts a folder with a `__main__.py` first by itself.
            folder = [] if os.path.isdir(kind) else [os.path.dirname(os.path.realpath(kind))]
            sys.path[:1] = folder
        runpy.run_path(os.path.abspath(kind), run_name="__main__")


def _report(error: BaseException) -> SystemExit:
    """Call the exception hook; it returns only if the script has replaced it."""
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except SystemExit as end:
        return end
    except BaseException:
        traceback.print_exc()
    return SystemExit(1)


def _leave(end: SystemExit) -> NoReturn:
    """Exit with the code of `end`; end the job unless all ranks soon exit, if it is an error.

    The others may wait for this rank, which waits for them before MPI_Finalize.
    """
    code = end.code if isinstance(end.code, int) else int(end.code is not None)
    if code:
        timer = threading.Timer(OTHERS_S, abort.abort, [code])
        timer.daemon = True
        timer.start()
    raise end


def _end_job(
    job: Launched, kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> NoReturn:
    """Print the error of this rank and abort the job; an exception hook."""
    name = f"rank {job.rank} on {socket.gethostname()}"
    abort.report(error, name, job.rank, job.size)
    abort.abort(error.exit_code if isinstance(error, HpctrainError) else 1)
