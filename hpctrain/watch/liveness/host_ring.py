"""Heartbeats around a ring of hosts: a host sends to its successor, and observes its predecessor.

    h0 --> h1 --> h2 --> h3 --> h0      a datagram every tenth of the limit

h1 is silent for half of the limit. Then h2

    1. connects to the kernel of h1; an answer shows that the host lives
    2. asks h3 to do the same, then h0: one broken link is no dead host
           "it answers me"       h1 lives
           "it does not"         h1 is dead; h2 announces it to all
           no answer at all      h2 itself is cut off from the others

The surviving hosts close the ring. A part with at most half the hosts is cut off, too: the other
part may go on without it, and two halves must not both. Cost: 57 bytes to one host every tenth of
the limit; a death is announced after about twice the limit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from hpctrain.watch.liveness.channel import Endpoint
from hpctrain.watch.liveness.datagrams import Datagram, Kind, Sealer

DATAGRAMS_PER_LIMIT = 10
MAX_ASKERS = 3  #: hosts that may confirm a host's silence
LAST_COPIES = 3  #: of an announcement that may be the last one


class Connection(Protocol):
    """A connection under way to the kernel of a host."""

    def has_answer(self) -> bool: ...
    def close(self) -> None: ...


class Network(Protocol):
    """The sockets of this host, see `Channel`."""

    def send(self, raw: bytes, receiver: Endpoint) -> None: ...
    def receive(self) -> Iterator[bytes]: ...
    def probe(self, receiver: Endpoint) -> Connection: ...


@dataclass
class _Trial:
    """The attempts to reach a silent host: first our own, then other hosts' in turn."""

    connection: Connection
    since_s: float
    askers: list[int] = field(default_factory=list)
    is_own: bool = True


@dataclass
class _Request:
    """A question of another host, until the kernel of `subject` has answered or was silent."""

    connection: Connection
    since_s: float


class HostRing:
    """One host of the ring. Times are seconds that this process was awake."""

    def __init__(
        self,
        network: Network,
        key: bytes,
        host: int,
        endpoints: Sequence[Endpoint],
        on_dead: Callable[[int], None],
        on_cut_off: Callable[[], None],
    ) -> None:
        """`endpoints`: one per host; `host`: the index of this host.

        `on_dead(host)` is called on each host left, once, and `on_cut_off()` once where this host,
        or its half of the ring, must not go on.
        """
        self.sealer = Sealer(key, host)
        self._network, self._endpoints, self._host = network, tuple(endpoints), host
        self._on_dead, self._on_cut_off = on_dead, on_cut_off
        self._alive = set(range(len(self._endpoints)))
        self._announced: dict[int, float] = {}  #: dead hosts, and until when we announce them
        self._heard_s, self._sent_s = float("nan"), float("-inf")
        #: whether a datagram of the previous host has ever arrived
        self.was_heard, self._is_cut_off = False, False
        self._pause = 1.0  #: grows while the kernel of a silent host answers
        self._trial: _Trial | None = None
        self._requests: dict[tuple[int, int], _Request] = {}

    @property
    def previous(self) -> int:
        """The host that this one observes."""
        return self._neighbour(-1)

    def restart(self, now_s: float) -> None:
        """Begin the silence anew: this process was itself stopped, perhaps with its job."""
        self._heard_s = now_s
        self._end_trial()
        for key in list(self._requests):
            self._requests.pop(key).connection.close()

    def advance(self, now_s: float, limit_s: float) -> None:
        """Send, receive and judge what is due; to be called several times per tenth of a limit."""
        if self._is_cut_off or len(self._endpoints) == 1:
            return
        if self._heard_s != self._heard_s:  # the first call
            self._heard_s = now_s
        if now_s - self._sent_s >= limit_s / DATAGRAMS_PER_LIMIT:
            self._sent_s = now_s
            self._send_datagram(Kind.HEARTBEAT, self._neighbour(1), self._host)
            for dead_host in [host for host, until_s in self._announced.items() if now_s < until_s]:
                self._announce_death(dead_host)  # again, since datagrams get lost
            if self._trial is not None and not self._trial.is_own:
                self._send_datagram(Kind.QUESTION, self._trial.askers[0], self.previous)
        for raw in self._network.receive():
            datagram = self.sealer.open(raw)
            if datagram is not None:
                self._handle_datagram(datagram, now_s, limit_s)
        self._answer_requests(now_s, limit_s)
        if self.was_heard:
            self._judge_previous(now_s, limit_s)

    def _neighbour(self, direction: int) -> int:
        count = len(self._endpoints)
        places = [(self._host + direction * i) % count for i in range(1, count + 1)]
        return next(place for place in places if place in self._alive)

    def _send_datagram(self, kind: Kind, receiver: int, subject: int) -> None:
        self._network.send(self.sealer.seal(kind, receiver, subject), self._endpoints[receiver])

    def _announce_death(self, dead_host: int) -> None:
        for receiver in range(len(self._endpoints)):
            if receiver != self._host:
                self._send_datagram(Kind.DEAD, receiver, dead_host)

    def _handle_datagram(self, datagram: Datagram, now_s: float, limit_s: float) -> None:
        sender, subject = datagram.sender, datagram.subject
        if datagram.kind is Kind.HEARTBEAT and sender == self.previous:
            self._note_sign_of_life(now_s, pause=1.0)
        elif datagram.kind is Kind.QUESTION and subject in self._alive:
            if (sender, subject) not in self._requests:  # a question is repeated until its answer
                connection = self._network.probe(self._endpoints[subject])
                self._requests[sender, subject] = _Request(connection, now_s)
        elif datagram.kind is Kind.DEAD:
            self._remove_host(subject, now_s)
        elif self._awaits_answer(sender, subject):
            if datagram.kind is Kind.ANSWERS:
                self._note_sign_of_life(now_s, pause=2 * self._pause)
            elif datagram.kind is Kind.SILENT:
                self._announced[subject] = now_s + limit_s
                for _ in range(LAST_COPIES):  # this death may cut us off, with all on our side
                    self._announce_death(subject)
                self._remove_host(subject, now_s)

    def _awaits_answer(self, sender: int, subject: int) -> bool:
        trial = self._trial
        is_open = trial is not None and not trial.is_own and sender == trial.askers[0]
        return is_open and subject == self.previous

    def _answer_requests(self, now_s: float, limit_s: float) -> None:
        for (sender, subject), request in list(self._requests.items()):
            has_answer = request.connection.has_answer()
            if has_answer or now_s - request.since_s > limit_s / 2:
                self._send_datagram(Kind.ANSWERS if has_answer else Kind.SILENT, sender, subject)
                self._requests.pop((sender, subject)).connection.close()

    def _judge_previous(self, now_s: float, limit_s: float) -> None:
        trial = self._trial
        if trial is None:
            if now_s - self._heard_s > self._pause * limit_s / 2:
                connection = self._network.probe(self._endpoints[self.previous])
                count = len(self._endpoints)
                hosts = [(self._host + i) % count for i in range(1, count)]
                askers = [h for h in hosts if h in self._alive and h != self.previous]
                self._trial = _Trial(connection, now_s, askers[:MAX_ASKERS])
        elif trial.is_own and trial.connection.has_answer():
            self._note_sign_of_life(now_s, pause=2 * self._pause)
        elif now_s - trial.since_s > limit_s / 2 * (1 if trial.is_own else 2):
            if not trial.is_own:
                trial.askers.pop(0)
            trial.is_own, trial.since_s = False, now_s
            if not trial.askers:
                self._cut_off()

    def _note_sign_of_life(self, now_s: float, pause: float) -> None:
        self._heard_s, self._pause, self.was_heard = now_s, pause, True
        self._end_trial()

    def _remove_host(self, subject: int, now_s: float) -> None:
        if subject == self._host:
            self._cut_off()
        elif subject in self._alive:
            was_previous = subject == self.previous
            self._alive.discard(subject)
            if was_previous:
                self._note_sign_of_life(now_s, pause=1.0)
            self._on_dead(subject)
            if 2 * len(self._alive) <= len(self._endpoints):
                self._cut_off()

    def _cut_off(self) -> None:
        if not self._is_cut_off:
            self._is_cut_off = True
            self._on_cut_off()

    def _end_trial(self) -> None:
        if self._trial is not None:
            self._trial.connection.close()
            self._trial = None
