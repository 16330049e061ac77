"""What a rank asks for: an operation by its name, with all that ranks must agree on.

Ranks tell each other requests as JSON the first time, and by a number from then on.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator
from typing import NamedTuple

MAX_NUMBERED = 4096  #: requests that have a number
UNNAMED = ".noname."  #: before the number of an operation without a name
ANY = -1  #: a first dimension that may differ between ranks
ALLREDUCE, ALLGATHER, BROADCAST, ALLTOALL = "allreduce", "allgather", "broadcast", "alltoall"
REDUCESCATTER, BARRIER, JOIN, SET = "reducescatter", "barrier", "join", "process set"
SHUTDOWN = "shutdown"


class Request(NamedTuple):
    """An operation on one or several tensors."""

    name: str
    kind: str
    dtype: str = ""
    shapes: tuple[tuple[int, ...], ...] = ()
    op: str = ""
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = 0
    device: str = "cpu"

    def __str__(self) -> str:
        parts = [self.kind]
        if self.op:
            parts.append(self.op.lower())
        if self.dtype:
            shapes = ", ".join(str(list(shape)).replace("-1", "any") for shape in self.shapes)
            parts.append(f"of {self.dtype} {shapes} on {self.device}")
        elif self.shapes:
            parts.append(f"of ranks {list(self.shapes[0])}")
        if self.kind == BROADCAST:
            parts.append(f"from rank {self.root}")
        if (self.prescale, self.postscale) != (1.0, 1.0):
            parts.append(f"scaled by {self.prescale:g} before and {self.postscale:g} after")
        return " ".join(parts)


LEAVE = Request(SHUTDOWN, SHUTDOWN)


class Decision(NamedTuple):
    """What all ranks do with a request: they run it, or raise `error`."""

    request: Request
    error: str = ""
    last_joined: int = -1  #: the rank that called `join` last, or `shutdown`


def is_unnamed(name: str) -> bool:
    """Return whether `name` was made for one call."""
    return UNNAMED in name and name.rpartition(UNNAMED)[2].isdecimal()


class Codec:
    """Messages of requests and decisions.

    All ranks number the requests that succeed, in the order of the decisions, so that a message
    names a request that was decided on before by its number.
    """

    def __init__(self) -> None:
        self._requests: list[Request] = []
        self._numbers: dict[Request, int] = {}

    def add(self, decision: Decision) -> None:
        """Number the request of a decision; the same on all ranks."""
        request = decision.request
        is_numbered = request in self._numbers or len(self._requests) == MAX_NUMBERED
        if not (is_numbered or decision.error or is_unnamed(request.name)):
            self._numbers[request] = len(self._requests)
            self._requests.append(request)

    def encode(self, decisions: Iterable[Decision]) -> bytes:
        """Return the message of `decisions`; a submitted request is one without an error."""
        numbers, others = [], []
        for decision in decisions:
            number = self._numbers.get(decision.request, -1)
            if decision.error or decision.last_joined >= 0 or number < 0:
                number = -1
                others.append(decision)
            numbers.append(number)
        head = struct.pack(f"<{len(numbers) + 1}i", len(numbers), *numbers)
        return head + json.dumps(others).encode() if others else head

    def decode(self, message: bytes) -> Iterator[Decision]:
        """Yield the decisions of a message."""
        (count,) = struct.unpack_from("<i", message)
        rest = message[4 + 4 * count :]
        others = iter(json.loads(rest) if rest else ())
        for number in struct.unpack_from(f"<{count}i", message, 4):
            if number >= 0:
                yield Decision(self._requests[number])
            else:
                (name, kind, dtype, shapes, *fields), error, last_joined = next(others)
                request = Request(name, kind, dtype, tuple(map(tuple, shapes)), *fields)
                yield Decision(request, error, last_joined)
