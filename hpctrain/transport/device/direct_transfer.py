"""Transfers without staging: the pieces of an array are posted together."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from hpctrain.core.xp import Array
from hpctrain.transport.link import Request


class DirectTransfer:
    """A transfer without staging: its pieces are posted together."""

    def __init__(self, x: Array, post_calls: Sequence[Callable[[], Request]]):
        """Send or fill `x` by `post_calls`; holds `x`, since MPI has only its address."""
        self._x, self._post_calls, self.is_posted = x, post_calls, False
        self._pending_messages: deque[Request] = deque()

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
