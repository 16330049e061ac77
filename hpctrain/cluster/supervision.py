"""The life of a launcher: its stop signals, its messages, and the end of its processes.

Open MPI's messages on the end of ranks are noise where the ranks have reported the cause:

    --------------------------------------------------------------------------
    prterun detected that one or more processes exited with non-zero status,
    ...
    --------------------------------------------------------------------------

They are held until the exit code of the job is known; all other output passes at once.
"""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread
from typing import BinaryIO

from hpctrain.cluster import guard
from hpctrain.cluster.rank_states import RankStates
from hpctrain.cluster.slurm.job_end import LauncherExit, print_message
from hpctrain.core import opening
from hpctrain.core.errors import StoppedError
from hpctrain.core.run_files import run_folder

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
#: (seconds, signal to all remaining processes) after the end of mpiexec or a second Ctrl-C.
_KILL_SCHEDULE = ((5.0, signal.SIGKILL), (5.5, signal.SIGKILL))
#: Open MPI's launcher says so when the daemon of a host dies, and then ends with 0.
_LOST_DAEMON = b"PRTE has lost communication with a remote daemon"
_STOP_S = 15.0  #: given to a launcher after each signal of `stop_launcher`
_OUTPUT_S = 5.0  #: the time given to the last output of a launcher that has ended
_RULE = b"-" * 74 + b"\n"
_HEADS = tuple(
    _RULE + line
    for line in (
        b"prterun detected that one or more processes exited with non-zero status",
        b"prterun has exited due to process rank",
        b"mpirun detected that one or more processes exited with non-zero status",
        b"mpirun has exited due to process rank",
        b"MPI_ABORT was invoked on rank",
    )
)
_MESSAGE = re.compile(rb"^(?:%s)[\s\S]*?\n%s" % (b"|".join(map(re.escape, _HEADS)), _RULE), re.M)
_MAX_BYTES = 4096  #: of a message


class Supervisor:
    """A launcher under supervision; its own session, so that Ctrl-C reaches only us.

    Stop signals are forwarded as SIGUSR1: every launcher passes it to its ranks, and it kills no
    launcher. The run learns their name by a note in its folder.
    """

    def __init__(
        self, announced_folder: Callable[[], bytes], ranks: RankStates | None = None
    ) -> None:
        """`announced_folder()`: the folder of the latest run, empty before one began.

        `ranks`: the states of ranks that mark their output.
        """
        self._announced_folder, self._ranks = announced_folder, ranks
        self._signals: list[int] = []
        self._messages = MessageFilter()
        self._has_lost_daemon = False

    def run(self, command: Sequence[str], environ: Mapping[str, str]) -> LauncherExit:
        """Run the launcher until all processes of its job have ended."""
        with catch_stop_signals() as read_signals:
            process = subprocess.Popen(
                command,
                env=environ,
                stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
            assert process.stderr is not None
            reader = Thread(target=self._forward_stderr, args=[process.stderr], daemon=True)
            reader.start()
            fault = ""
            while process.poll() is None and not self._is_interrupted_twice and not fault:
                for number in read_signals():
                    self._forward_signal(process, number)
                if fault := self._ranks.find_fault() if self._ranks else "":
                    print_message(fault)
                    process.send_signal(signal.SIGTERM)
            guard.end_job(environ[guard.JOB_VARIABLE], _KILL_SCHEDULE)
            reader.join(_OUTPUT_S)
        code, reason = process.wait() or int(self._has_lost_daemon), ""
        if self._ranks is not None and not self._is_interrupted_twice:
            code, reason = self._ranks.exit_code(code, was_ended=bool(fault))
        if reason and not self._signals:
            print_message(reason)
        return LauncherExit(code, tuple(self._signals))

    def finish(self, is_reported: bool) -> None:
        """Print the launcher's messages on the end of its ranks unless the ranks reported it."""
        if not is_reported:
            _write(self._messages.held)

    @property
    def _is_interrupted_twice(self) -> bool:
        return self._signals.count(signal.SIGINT) > 1

    def _forward_signal(self, process: subprocess.Popen[bytes], number: int) -> None:
        if not self._signals:
            announced_folder = self._announced_folder()
            name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
            run = Path(os.fsdecode(announced_folder))
            if announced_folder and not run_folder.stop_reason(run):
                with suppress(OSError), opening.create(run / run_folder.STOP_REASON) as file:
                    file.write(f"{name}\n".encode())
        self._signals.append(number)
        process.send_signal(signal.SIGTERM if self._is_interrupted_twice else signal.SIGUSR1)

    def _forward_stderr(self, stderr: BinaryIO) -> None:
        tail = b""
        while data := os.read(stderr.fileno(), 1 << 16):
            self._has_lost_daemon |= _LOST_DAEMON in tail + data
            tail = data[-len(_LOST_DAEMON) :]
            data = self._ranks.feed(data) if self._ranks else data
            _write(self._messages.feed(data))
        _write(self._messages.feed(self._ranks.end() if self._ranks else b""))
        _write(self._messages.end())


class MessageFilter:
    """The output of a launcher; its messages on the end of ranks are kept in `held`."""

    def __init__(self) -> None:
        self.held = b""
        self._pending = b""  # perhaps the beginning of a message

    def feed(self, data: bytes) -> bytes:
        """Return the output that can be printed once `data` has arrived."""
        data = self._pending + data
        self.held += b"".join(_MESSAGE.findall(data))
        data = _MESSAGE.sub(b"", data)
        starts = (match.start() for match in re.finditer(rb"^-", data, re.M))
        end = next((i for i in starts if _may_begin_message(data[i:])), len(data))
        self._pending = data[end:]
        return data[:end]

    def end(self) -> bytes:
        """Return the remaining output."""
        return self._pending


def _may_begin_message(data: bytes) -> bool:
    return len(data) <= _MAX_BYTES and any(
        data.startswith(head) or head.startswith(data) for head in _HEADS
    )


def _write(data: bytes) -> None:
    with suppress(OSError):  # nobody reads it: the job goes on
        sys.stderr.flush()
        while data:
            data = data[os.write(2, data) :]


@contextmanager
def catch_stop_signals() -> Iterator[Callable[[], list[int]]]:
    """Yield a function that waits up to a second and returns the stop signals received meanwhile.

    Signals come through a pipe, so that one delivered to another thread, as of BLAS, wakes us too.
    """
    # Under nohup SIGHUP must stay ignored.
    caught_signals = [
        number
        for number in STOP_SIGNALS
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN
    ]
    read_fd, write_fd = os.pipe()
    os.set_blocking(write_fd, False)
    previous_handlers = {
        number: signal.signal(number, lambda *_: None)
        for number in (*caught_signals, signal.SIGCHLD)
    }
    previous_wakeup_fd = signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)

    def read_signals() -> list[int]:
        readable = select.select([read_fd], [], [], 1.0)[0]
        signal_numbers = os.read(read_fd, 64) if readable else b""
        return [number for number in signal_numbers if number in caught_signals]

    try:
        yield read_signals
    finally:
        signal.set_wakeup_fd(previous_wakeup_fd)
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)
        os.close(read_fd)
        os.close(write_fd)


@contextmanager
def raise_on_signal() -> Iterator[None]:
    """Turn a stop signal into StoppedError while there is no job to which it could be forwarded."""

    def raise_stopped(number: int, _: object) -> None:
        raise StoppedError(f"stopped by {signal.Signals(number).name} while no rank ran")

    # Ctrl-C raises KeyboardInterrupt already; under nohup SIGHUP must stay ignored.
    signals = [number for number in STOP_SIGNALS if number != signal.SIGINT]
    caught_signals = [number for number in signals if signal.getsignal(number) != signal.SIG_IGN]
    previous_handlers = {number: signal.signal(number, raise_stopped) for number in caught_signals}
    try:
        yield
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)


def stop_launcher(process: subprocess.Popen[bytes]) -> None:
    """Send SIGINT twice to a `hpctrain launch`, as two Ctrl-Cs do: the second kills the ranks."""
    for number in (signal.SIGINT, signal.SIGINT, signal.SIGKILL):
        process.send_signal(number)
        with suppress(subprocess.TimeoutExpired, KeyboardInterrupt):  # which asks for the next one
            process.wait(_STOP_S)
            return
