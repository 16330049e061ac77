"""Transfers without staging, and the protocols of transfers and of the link below them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from hpctrain.core.thresholds import Thresholds
from hpctrain.core.xp import Array
from hpctrain.transport.device.staging import PostedBuffer
from hpctrain.transport.paths import Path


class PostedMessage(PostedBuffer, Protocol):
    """A message posted to the wire."""

    def wait(self) -> None:
        """Return once the message is complete; raise TransportError if the sizes differ."""


class TransferLink(Protocol):
    """The part of a link that its transfer queues use."""

    rank: int
    size: int
    unqueued_type: type | None
    host_bytes: int
    paths: tuple[Path, ...]
    path_thresholds: tuple[Thresholds, ...]
    queues: Any  #: TransferQueues, made on first use

    def count_message(self, nbytes: int) -> None: ...

    def message(self, x: Array) -> Any: ...

    def post_send(self, message: Any, dest: int) -> PostedMessage: ...

    def post_receive(self, message: Any, source: int) -> PostedMessage: ...

    def wait_for(
        self, condition: Callable[[], bool], call: bytes, peer: int = -1, nbytes: int = 0
    ) -> None: ...


class Transfer(Protocol):
    """A transfer in a queue."""

    @property
    def is_posted(self) -> bool: ...

    @property
    def done(self) -> bool: ...

    def advance(self, may_post: bool) -> int: ...

    def finish(self) -> None: ...


class DirectTransfer:
    """A transfer without staging: its pieces are posted together."""

    def __init__(self, x: Array, post_calls: Sequence[Callable[[], PostedMessage]]):
        """Send or fill `x` by `post_calls`; holds `x`, since MPI has only its address."""
        self._x, self._post_calls, self.is_posted = x, post_calls, False
        self._pending_messages: deque[PostedMessage] = deque()

    @property
    def done(self) -> bool:
        """Whether all pieces are complete."""
        return self.is_posted and not self._pending_messages

    def advance(self, may_post: bool) -> int:
        """Return the number of steps done; `may_post`: the pieces may be posted."""
        steps = 0
        if may_post and not self.is_posted:
            self._pending_messages.extend(post() for post in self._post_calls)
            self.is_posted, steps = True, 1
        while self._pending_messages and self._pending_messages[0].done():
            self._pending_messages.popleft()
            steps += 1
        return steps

    def wait(self) -> None:
        """Wait by MPI's own blocking call; only where no other transfer is under way."""
        while self._pending_messages:
            self._pending_messages.popleft().wait()

    def finish(self) -> None:
        """Do nothing: the memory can be read once the messages are complete."""
