"""`ht.launch`: a function on ranks of this machine, called from a notebook or a script.

    function, arguments  --->  FOLDER/call
    hpctrain launch -n RANKS -- python function_rank.py FOLDER
    results by rank, or one error  <---  FOLDER/result-00000 ..., FOLDER/error-00001

An object that a rank can import is sent by its module and name, any other, as a function of a
notebook's cell, by its code: cloudpickle does that.
"""

from __future__ import annotations

import codecs
import os
import pickle
import selectors
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar

from hpctrain.cluster.hosts import allocated_hosts
from hpctrain.cluster.supervision import stop_launcher
from hpctrain.core import atomic, files, launchers
from hpctrain.core.errors import HpctrainError, UsageError
from hpctrain.core.interpreter import module_command
from hpctrain.core.rank_marks import end_with_parent
from hpctrain.transport.placement.core_binding import without_limits

T = TypeVar("T")
CALL = "call"


class RankFailure(NamedTuple):
    """The error of a rank: when and where, its traceback, and the exception if it can be sent."""

    time_s: float
    place: str
    traceback: str
    error: bytes


class RankTracebackError(Exception):
    """The traceback of a rank, as the cause of the error that `launch` raises."""


def launch(function: Callable[..., T], ranks: int, *args: Any) -> list[T]:
    """Run `function(*args)` on `ranks` MPI ranks of this machine; return its results by rank.

    The ranks are new processes, started as by `hpctrain launch`: each may call `ht.init()`. Their
    output is shown meanwhile, in a notebook below the cell. An interrupt ends them. Raises the
    error of the first rank that fails, with its traceback as the cause, HpctrainError if a rank is
    lost, and UsageError in a rank of a job, and if the function, an argument or a result cannot be
    sent to another process.
    """
    launchers.must_not_be_rank(os.environ, "ht.launch starts ranks itself")
    if ranks < 1:
        raise UsageError(f"ht.launch: expected 1 rank or more, seen {ranks}")
    call = _dump_call(function, args)
    shared = "." if len(allocated_hosts(os.environ)) > 1 else None
    with tempfile.TemporaryDirectory(prefix=".hpctrain-launch-", dir=shared) as path:
        folder = Path(path).absolute()
        atomic.replace(folder / CALL, pickle.dumps((sys.path, call)))
        rank_command = [*module_command("hpctrain.cluster.function_rank"), str(folder)]
        code = _run([*module_command("hpctrain"), "launch", "-n", str(ranks), "--", *rank_command])
        if failures := [load(file) for file in folder.glob("error-*")]:
            _raise(min(failures))
        results = [result_path(folder, rank) for rank in range(ranks)]
        missing = [rank for rank, file in enumerate(results) if not file.exists()]
        if missing or code:
            lost = f"rank {missing[0]} gave no result" if missing else "a rank was lost"
            raise HpctrainError(f"ht.launch: {lost}: `hpctrain launch` ended with {code}")
        return [load(file) for file in results]


def result_path(folder: Path, rank: int) -> Path:
    """Return the file of the result of a rank."""
    return folder / f"result-{rank:05d}"


def load(path: Path) -> Any:
    """Return the object in a file that this user wrote."""
    with files.open_regular(path, own=True) as file:
        return pickle.load(file)


def dump(value: Any) -> bytes:
    """Return the pickle of `value`; objects of `__main__` are sent by their code.

    Raises UsageError without cloudpickle, and what pickle raises of an object that cannot be sent.
    """
    with suppress(pickle.PicklingError, AttributeError, TypeError):
        data = pickle.dumps(value)
        if b"__main__" not in data:
            return data
    try:
        import cloudpickle
    except ImportError:
        raise UsageError(
            "ht.launch sends functions of notebooks and scripts, and lambdas, by cloudpickle: pip "
            "install 'hpctrain[notebook]', or give a function of a module that ranks can import"
        ) from None
    return bytes(cloudpickle.dumps(value))


def _dump_call(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """Return the pickle of a call; raise UsageError that names what cannot be sent."""
    try:
        return dump((function, args))
    except UsageError:
        raise
    except Exception as fault:
        named = {f"the function {getattr(function, '__qualname__', function)}": function}
        named |= {f"argument {number}": value for number, value in enumerate(args, start=1)}
        for name, value in named.items():
            try:
                dump(value)
            except Exception as error:
                raise UsageError(
                    f"ht.launch: {name} cannot be sent to the ranks: {error}"
                ) from None
        raise UsageError(f"ht.launch: the call cannot be sent to the ranks: {fault}") from None


def _run(command: list[str]) -> int:
    """Run `command` to its end with its output where ours goes; return its exit code."""
    targets = (sys.stdout, sys.__stdout__), (sys.stderr, sys.__stderr__)
    for stream, _ in targets:
        stream.flush()
    # A notebook, or pytest, has streams of its own.
    pipes = [None if stream is own else subprocess.PIPE for stream, own in targets]
    with subprocess.Popen(
        command,
        env=without_limits(launchers.without_rank_variables(os.environ)),
        stdin=subprocess.DEVNULL,
        stdout=pipes[0],
        stderr=pipes[1],
        start_new_session=True,
        preexec_fn=end_with_parent,
    ) as process:
        try:
            _forward_output([(process.stdout, sys.stdout), (process.stderr, sys.stderr)])
            return process.wait()
        except BaseException:
            stop_launcher(process)
            raise


def _forward_output(pairs: list[tuple[IO[bytes] | None, IO[str]]]) -> None:
    """Write what each pipe holds to its stream until all have ended."""
    with selectors.DefaultSelector() as selector:
        for pipe, stream in pairs:
            if pipe is not None:
                decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
                selector.register(pipe, selectors.EVENT_READ, (stream, decoder))
        while selector.get_map():
            for key, _ in selector.select():
                data, (stream, decoder) = os.read(key.fd, 1 << 16), key.data
                stream.write(decoder.decode(data, final=not data))
                stream.flush()
                if not data:
                    selector.unregister(key.fileobj)


def _raise(failure: RankFailure) -> None:
    """Raise the error of a rank."""
    cause = RankTracebackError(f"on {failure.place}\n{failure.traceback}")
    try:
        error = pickle.loads(failure.error)
    except Exception:  # a class that is known to the rank alone, say
        error = HpctrainError(f"ht.launch: {failure.traceback.splitlines()[-1]}")
    raise error from cause
