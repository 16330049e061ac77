"""Open MPI's messages on the end of ranks, which are noise where the ranks have reported the cause.

    --------------------------------------------------------------------------
    prterun detected that one or more processes exited with non-zero status,
    ...
    --------------------------------------------------------------------------

They are held until the exit code of the job is known; all other output passes at once.
"""

from __future__ import annotations

import re

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
