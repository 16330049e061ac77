"""Transfers that the wire makes by itself, and the protocols of transfers and of their link."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from hpctrain.core.thresholds import Thresholds
from hpctrain.core.xp import Array
from hpctrain.transport.device.staging import Posted
from hpctrain.transport.paths import Path


class PostedMessage(Posted, Protocol):
    """A message posted to the wire."""

    def wait(self) -> None:
        """Return once it is complete; raise TransportError if the sizes differ."""


class TransferLink(Protocol):
    """The part of a link that queues use."""

    rank: int
    size: int
    unqueued_type: type | None
    host_bytes: int
    paths: tuple[Path, ...]
    by_size: tuple[Thresholds, ...]
    queues: Any  #: TransferQueues, made on first use

    def count(self, nbytes: int) -> None: ...

    def message(self, x: Array) -> Any: ...

    def post_send(self, message: Any, to: int) -> PostedMessage: ...

    def post_receive(self, message: Any, source: int) -> PostedMessage: ...

    def wait_for(
        self, ready: Callable[[], bool], call: bytes, peer: int = -1, nbytes: int = 0
    ) -> None: ...


class Transfer(Protocol):
    """An entry of a queue."""

    @property
    def posted(self) -> bool: ...

    @property
    def done(self) -> bool: ...

    def advance(self, may_post: bool) -> int: ...

    def finish(self) -> None: ...


class DirectTransfer:
    """Messages that the wire takes as they are, in pieces that are posted together."""

    def __init__(self, x: Array, posts: Sequence[Callable[[], PostedMessage]]):
        """Send or fill `x` by `posts`; holds a reference to `x`, since MPI has its address only."""
        self._x, self._posts, self.posted = x, posts, False
        self._under_way: deque[PostedMessage] = deque()

    @property
    def done(self) -> bool:
        """Whether all pieces are complete."""
        return self.posted and not self._under_way

    def advance(self, may_post: bool) -> int:
        """Return the number of steps done; `may_post`: the messages may be posted."""
        steps = 0
        if may_post and not self.posted:
            self._under_way.extend(post() for post in self._posts)
            self.posted, steps = True, 1
        while self._under_way and self._under_way[0].done():
            self._under_way.popleft()
            steps += 1
        return steps

    def wait(self) -> None:
        """Wait by the wire's own blocking call, where nothing else is under way."""
        while self._under_way:
            self._under_way.popleft().wait()

    def finish(self) -> None:
        """Do nothing: host memory, and device memory that MPI writes, can be read now."""
