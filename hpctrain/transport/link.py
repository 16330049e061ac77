"""The interface of every transport: one rank's view of the ranks it can send to.

A Link belongs to one thread; another thread gets its own by `split`. Arrays are contiguous, of
NumPy or CuPy (device/transfers.py), and travel as bytes. There is no receive from any source: its
order could not be replayed, and a dead peer would leave it pending. Every receive checks the number
of bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from hpctrain.core.thresholds import Thresholds
from hpctrain.transport.pace import Pace
from hpctrain.transport.paths import Path
from hpctrain.watch import Entry


class Request(Protocol):
    """A transfer under way; its array must not be touched before `wait` returns."""

    def wait(self) -> None:
        """Return when the transfer is done; raise TransportError if the sizes differ."""

    def done(self) -> bool:
        """Return whether `wait` would return at once."""


def wait_all(requests: Iterable[Request]) -> None:
    """Wait for each of `requests`."""
    for request in requests:
        request.wait()


class NativeCall(NamedTuple):
    """A bare call of the library, and the array that holds its result."""

    call: Callable[[], Any]
    result: np.ndarray


class NativeCollectives(Protocol):
    """The library's own collectives on the ranks of a link, for comparison with ours."""

    def bind_allreduce(self, x: np.ndarray, op: Any) -> Callable[[], Any]:
        """Return a call that reduces flat `x` in place."""

    def bind(self, collective: str, x: np.ndarray, op: Any) -> NativeCall:
        """Return a call of `collective` on flat `x`, in place, unknown to the watch.

        "allreduce", and "allreduce plain" with no explicit datatype; "reduce-scatter" and
        "all-gather" of equal chunks; "broadcast" from rank 0.
        """


class Survivors(Protocol):
    """The ranks of a link that are left after a loss: how they agree and go on.

    Every other call of the link raises LostRankError if a lost rank keeps it from completing.
    Whoever raises it first has revoked all links of the family, so that no rank waits for this one.
    """

    @property
    def survives(self) -> bool:
        """Whether survivors of a lost rank can go on: the calls below then do what they say."""

    def agree(self) -> None:
        """Return on all ranks that are left, or raise LostRankError on all; collective.

        Revoking ends no agreement: it waits until every rank has agreed, dissolved or died.
        """

    def dissolve(self) -> None:
        """Make the pending or next agreement of the other ranks fail; join no agreement after it.

        Does nothing if an agreement has failed: each rank takes part in each agreement once.
        """

    def revoke(self) -> None:
        """End every rank's waits on this link, and on all links split from the same root."""

    def lost_ranks(self) -> list[int]:
        """Return the ranks of this link that this rank knows to be lost; others may know more."""

    def shrink(self) -> tuple[Link, list[int]]:
        """Return the link of the ranks that are left, in order, and these ranks; the same on all.

        All ranks that are left must call.
        """


class Waits(Protocol):
    """The waits of a link: their pace, their record in the watch, and their end."""

    #: of waits for messages, to leave the core to threads that compute; None: MPI polls
    pace: Pace | None
    entry: Entry  #: the watch's, in which waiting calls are recorded

    def wait_for(
        self, condition: Callable[[], bool], call: bytes, peer: int = -1, nbytes: int = 0
    ) -> None:
        """Return once `condition()` holds; it reads shared memory that another rank writes.

        The watch's record names `call`, its `nbytes`, and the `peer`, -1 for all ranks.
        """

    def interrupt_others(self) -> bool:
        """If all ranks are threads of this process, end their waits; return whether they are."""


@dataclass
class Traffic:
    """The messages of a link: their number and bytes, and the paths of GPU memory."""

    bytes_sent: int = 0  #: payload bytes this rank has sent on this link
    messages_sent: int = 0
    host_bytes: int = 0  #: bytes of GPU arrays, copied to or from the host for messages
    paths: tuple[Path, ...] = ()  #: path of GPU memory to each rank; empty without GPUs
    #: to each rank: the sizes from which messages are staged, or sent by pointer
    path_thresholds: tuple[Thresholds, ...] = ()
    unqueued_type: type | None = np.ndarray  #: of arrays that need no queue; None: all need one

    def set_paths(self, paths: Sequence[Path], path_thresholds: Sequence[Thresholds] = ()) -> None:
        """Give GPU arrays to MPI only if `paths`, one per rank, allow it; all must call.

        `path_thresholds`, also one per rank, restricts the paths to some message sizes; () to none.
        Links that are split from this one inherit both.
        """
        self.paths, self.unqueued_type = tuple(paths), None
        self.path_thresholds = tuple(path_thresholds) or ((),) * len(self.paths)

    def count(self, nbytes: int) -> None:
        """Count a message of `nbytes`."""
        self.bytes_sent += nbytes
        self.messages_sent += 1


@dataclass(frozen=True)
class Endpoint:
    """A rank's end of a link: what the runtime does with it beside the messages of algorithms."""

    survivors: Survivors
    waits: Waits
    traffic: Traffic
    native: NativeCollectives  #: the library's own collectives on these ranks
    #: window(n) -> every rank's zeroed uint8 array, ours with n bytes; collective on one node
    window: Callable[[int], Sequence[np.ndarray]]
    #: the link for a second thread: of the two, one may only send, one only receive
    view: Callable[[], Link]
    #: frees the link's resources; all its ranks must call, and none may use it after
    free: Callable[[], None]


class Link(Protocol):
    """Links `rank` to `size` ranks that can send to each other."""

    rank: int
    size: int

    @property
    def endpoint(self) -> Endpoint:
        """This rank's end of the link, for the runtime around the algorithms."""

    def isend(self, x: np.ndarray, dest: int) -> Request:
        """Start to send `x` to rank `dest`."""

    def irecv(self, x: np.ndarray, source: int) -> Request:
        """Start to fill `x` from rank `source`."""

    def sendrecv(self, x: np.ndarray, dest: int, inbox: np.ndarray, source: int) -> None:
        """Send `x` and fill `inbox`, both at once."""

    def wait_any(self, requests: Sequence[Any]) -> int:
        """Return the index of one finished request of this link; it needs no further `wait`."""

    def split(self, color: int, key: int) -> Link:
        """Return the link of the ranks of the same `color`, ordered by `key`; all must call."""

    def create_group(self, ranks: Sequence[int], tag: int = 0) -> Link:
        """Return the link of `ranks` of this link, in this order; these alone must call.

        Calls that may be under way at once, as in two threads, need different tags.
        """

    def barrier(self) -> None:
        """Return once every rank has called."""
