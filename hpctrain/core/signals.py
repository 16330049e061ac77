"""A request to stop by a signal, served even while the main thread blocks in an MPI call.

Python runs its signal handlers between two byte codes of the main thread, and a blocking call has
none. So the C half of the handler writes the signal's number into a socket, and a thread reads it.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable
from typing import Any

from hpctrain.core.printing import printable

SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)
LAST_WORDS_S = 1.0  #: given to a process that ends at once, to print the path of its results
WITHOUT_SIGNAL = 1  #: the number of a request without a signal


class StopRequest:
    """Within `with StopRequest() as request`, SIGUSR1, SIGTERM and SIGINT set `request.requested`.

    `signal` is then the name of the first one, `number` its value in a vote. A second SIGINT ends
    the process with 130. Outside the main thread (ranks as threads) no signal is caught; `ask`
    works everywhere.
    """

    def __init__(self, last_words: Callable[[], str] = str) -> None:
        """`last_words()`: printed by that process before it ends."""
        self._last_words = last_words
        self.requested, self.signal, self.number = False, "", WITHOUT_SIGNAL
        self._interrupts = 0
        self._old_handlers: dict[signal.Signals, Any] = {}

    def ask(self, name: str = "ask", number: int = WITHOUT_SIGNAL) -> None:
        """Request a stop in the name of `name`; the first one counts."""
        if not self.requested:
            self.signal, self.number, self.requested = name, number, True

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._reading, self._writing = socket.socketpair()
            self._writing.setblocking(False)  # noqa: FBT003
            self._thread = threading.Thread(
                target=self._read_signals, name="hpctrain-stop", daemon=True
            )
            self._thread.start()
            # The socket before the handlers: a signal between the two would be lost.
            self._wakeup = signal.set_wakeup_fd(self._writing.fileno(), warn_on_full_buffer=False)
            self._old_handlers = {number: _replace_handler(number) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        if self._old_handlers:
            for number, handler in self._old_handlers.items():
                # None: it was not set from Python, so Python cannot restore it.
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
            signal.set_wakeup_fd(self._wakeup)
            self._old_handlers = {}
            self._writing.close()  # the thread reads to the end, then leaves
            self._thread.join(5.0)
            self._reading.close()

    def _read_signals(self) -> None:
        while numbers := self._reading.recv(64):
            for number in numbers:
                if number not in SIGNALS:
                    continue
                self.ask(signal.Signals(number).name, number)
                self._interrupts += number == signal.SIGINT
                if self._interrupts == 2:
                    threading.Timer(LAST_WORDS_S, os._exit, [130]).start()  # disks may not answer
                    # Past sys.stderr: the main thread may hold its lock.
                    os.write(2, b"interrupted\n")
                    os.write(2, printable(self._last_words()).encode())
                    os._exit(130)


def cause(number: int) -> str:
    """Return the end of a sentence about a stop: the signal that asked for it."""
    return "as asked" if number == WITHOUT_SIGNAL else f"by {signal.Signals(number).name}"


def _replace_handler(number: signal.Signals) -> Any:
    old_handler = signal.signal(number, lambda *_: None)  # the C half of the handler runs
    # Restart interrupted calls: not every C library expects its read to fail half-way.
    signal.siginterrupt(number, False)  # noqa: FBT003
    return old_handler
