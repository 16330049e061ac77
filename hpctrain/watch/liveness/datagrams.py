"""Sealed datagrams between hosts: a few numbers and an HMAC-SHA256 over them.

    | magic 4 | kind 1 | sender 4 | receiver 4 | subject 4 | sequence 8 | HMAC 32 |    57 bytes

The key is new in each job, and after each loss another is derived from it. A host accepts only
sequence numbers above the last of the same sender, so a repeated or late datagram is ignored. The
receiver is part of the seal: a datagram to one host is nothing to another.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import struct
from collections import Counter
from typing import NamedTuple

KEY_BYTES = 32
_MAGIC = b"hpb1"
_FORMAT = struct.Struct("!4sBiiiQ")
_SEAL_BYTES = hashlib.sha256().digest_size
DATAGRAM_BYTES = _FORMAT.size + _SEAL_BYTES


class Kind(enum.IntEnum):
    """The meaning of a datagram; `subject` is the host that it is about."""

    HEARTBEAT = 0
    QUESTION = 1  #: does the subject answer you?
    ANSWERS = 2  #: it does
    SILENT = 3  #: it does not
    DEAD = 4  #: the subject is dead


class Datagram(NamedTuple):
    """A datagram whose seal was verified; hosts are numbered by their order in the job."""

    kind: Kind
    sender: int
    subject: int


class Sealer:
    """The datagrams of a host: the sequence numbers that it sends, and that it has received."""

    def __init__(self, key: bytes, host: int) -> None:
        if len(key) != KEY_BYTES:
            raise ValueError(f"the key of heartbeats has {KEY_BYTES} bytes, got {len(key)}")
        self._key, self._host, self._sequence = key, host, 0
        self._last_sequences: dict[int, int] = {}
        self.ignored: Counter[str] = Counter()  #: datagrams by the reason why they were ignored

    def seal(self, kind: Kind, receiver: int, subject: int) -> bytes:
        """Return the next datagram to `receiver`."""
        self._sequence += 1
        body = _FORMAT.pack(_MAGIC, kind, self._host, receiver, subject, self._sequence)
        return body + self._seal_of(body)

    def open(self, raw: bytes) -> Datagram | None:
        """Return the datagram in `raw`; None if it is to be ignored, which is counted."""
        if reason := self._reason_to_ignore(raw):
            self.ignored[reason] += 1
            return None
        _, kind, sender, _, subject, sequence = _FORMAT.unpack_from(raw)
        self._last_sequences[sender] = sequence
        return Datagram(Kind(kind), sender, subject)

    def _reason_to_ignore(self, raw: bytes) -> str:
        if len(raw) != DATAGRAM_BYTES:
            return "malformed"
        body, seal = raw[: _FORMAT.size], raw[_FORMAT.size :]
        if not hmac.compare_digest(seal, self._seal_of(body)):
            return "forged"
        _, _, sender, receiver, _, sequence = _FORMAT.unpack(body)
        if receiver != self._host:
            return "for another host"
        return "replayed or late" if sequence <= self._last_sequences.get(sender, 0) else ""

    def _seal_of(self, body: bytes) -> bytes:
        return hmac.digest(self._key, body, "sha256")
