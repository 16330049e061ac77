"""Messages between stages at run time: stamped, and received in the order of their senders.

A message is one array of bytes, the tensor and then its stamp:

    | x[0] x[1] ......................... x[n-1] | pad to 8 | kind, stage, micro-batch |

A receiver posts its receives in the sender's order (messages.py) and compares each stamp, so that a
message out of place is an error in words, not a gradient of the wrong micro-batch. A tensor is
copied once, into the message; the receiver computes in the message's own memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from math import prod
from typing import get_args

import numpy as np

from hpctrain.core.errors import TransportError
from hpctrain.core.xp import Array, namespace, to_host
from hpctrain.parallel.schedules.messages import Arrivals, Kind, Message
from hpctrain.transport.link import Link, Request, wait_all

STAMP_BYTES = 8
KINDS: tuple[Kind, ...] = get_args(Kind)
POSTED_AHEAD = 2  #: receives per peer: a message may arrive while its receiver computes
Shape = tuple[int, ...]


def message_bytes(nbytes: int) -> int:
    """Return the length of a message with a tensor of `nbytes` bytes."""
    return -(-nbytes // STAMP_BYTES) * STAMP_BYTES + STAMP_BYTES


def stamp(message: Message) -> int:
    """Return the number that identifies a message of a step."""
    kind, stage, micro = message
    return (kind == KINDS[1]) << 62 | stage << 32 | micro


class StageLink:
    """The messages of a pass through the stages, as a rank sends and receives them."""

    def __init__(
        self,
        link: Link,
        arrivals: Arrivals,
        shape_of: Callable[[Message], Shape],
        like: Array,
    ):
        """Post the first receives; tensors have the dtype of `like`, and lie in its memory."""
        self._link, self._shape_of = link, shape_of
        self._xp, self._dtype = namespace(like), like.dtype
        self._expected_messages = {peer: deque(messages) for peer, messages in arrivals.items()}
        self._posted_receives: dict[int, deque[tuple[Message, Array, Array, Request]]] = {
            peer: deque() for peer in arrivals
        }
        self._arrived_tensors: dict[Message, Array] = {}
        self.sent_bytes = 0  #: with stamps
        #: sends, oldest first, with their memory, which the next one may take once they are over
        self._pending_sends: deque[tuple[Request, Array, Array]] = deque()
        for peer in arrivals:
            for _ in range(POSTED_AHEAD):
                self._post_receive(peer)

    def send(self, peer: int, message: Message, x: Array) -> None:
        """Start to send a copy of `x`."""
        buffer, tensor = self._reuse_buffer(x.shape) or self._allocate_buffer(x.shape)
        tensor[...] = x
        buffer[-1] = stamp(message)
        self.sent_bytes += buffer.nbytes
        self._pending_sends.append((self._link.isend(buffer, peer), buffer, tensor))

    def receive(self, peer: int, message: Message) -> Array:
        """Return the tensor of `message`; earlier messages are kept for later.

        Raises TransportError for an unexpected message.
        """
        while message not in self._arrived_tensors:
            expected_message, buffer, tensor, request = self._posted_receives[peer].popleft()
            request.wait()
            self._post_receive(peer)
            seen_stamp = int(to_host(buffer[-1:])[0])
            if seen_stamp != stamp(expected_message):
                kind, stage, micro = (
                    KINDS[seen_stamp >> 62],
                    seen_stamp >> 32 & 0x3FFFFFFF,
                    seen_stamp,
                )
                raise TransportError(
                    f"rank {self._link.rank} of the pipeline: expected the {expected_message} from "
                    f"rank {peer}, seen the {Message(kind, stage, micro & 0xFFFFFFFF)}; all ranks "
                    "must run the same schedule"
                )
            self._arrived_tensors[expected_message] = tensor
        return self._arrived_tensors.pop(message)

    def close(self) -> None:
        """Wait until all messages of this rank are sent."""
        wait_all([request for request, _, _ in self._pending_sends])

    def _post_receive(self, peer: int) -> None:
        if self._expected_messages[peer]:
            message = self._expected_messages[peer].popleft()
            buffer, tensor = self._allocate_buffer(self._shape_of(message))
            request = self._link.irecv(buffer, peer)
            self._posted_receives[peer].append((message, buffer, tensor, request))

    def _reuse_buffer(self, shape: Shape) -> tuple[Array, Array] | None:
        """Return the memory of the oldest send, if it is over and had a tensor of `shape`."""
        if (
            self._pending_sends
            and self._pending_sends[0][2].shape == shape
            and self._pending_sends[0][0].done()
        ):
            request, buffer, tensor = self._pending_sends.popleft()
            request.wait()
            return buffer, tensor
        return None

    def _allocate_buffer(self, shape: Shape) -> tuple[Array, Array]:
        """Return memory for a message, and its part that holds a tensor of `shape`."""
        count = prod(shape)
        nbytes = message_bytes(count * self._dtype.itemsize)
        buffer = self._xp.empty(nbytes // STAMP_BYTES, np.int64)
        return buffer, buffer.view(self._dtype)[:count].reshape(shape)
