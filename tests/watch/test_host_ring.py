"""Dead hosts: the ring on a network that loses, repeats, reorders and forges datagrams."""

from __future__ import annotations

import hashlib
import random
import socket
from collections import defaultdict, deque
from dataclasses import dataclass, field

import pytest

from hpctrain.watch.liveness.channel import Channel, Endpoint, choose_addresses, host_addresses
from hpctrain.watch.liveness.datagrams import DATAGRAM_BYTES, Datagram, Kind, Sealer
from hpctrain.watch.liveness.host_ring import HostRing

KEY, LIMIT_S, LOOK_S = b"k" * 32, 2.0, 0.2


@dataclass
class Wires:
    """The network of a test: hosts that are off, links that are cut, and the share of losses."""

    dead: set[int] = field(default_factory=set)
    cut: set[frozenset[int]] = field(default_factory=set)
    losses: float = 0.0
    repeats: bool = False
    reorders: bool = False
    boxes: dict[int, deque[bytes]] = field(default_factory=lambda: defaultdict(deque))
    random: random.Random = field(default_factory=lambda: random.Random(5))
    sent: int = 0

    def joins(self, a: int, b: int) -> bool:
        return not {a, b} & self.dead and frozenset((a, b)) not in self.cut


@dataclass
class FakeConnection:
    wires: Wires
    ends: tuple[int, int]

    def has_answer(self) -> bool:
        return self.wires.joins(*self.ends)

    def close(self) -> None:
        pass


@dataclass
class FakeNetwork:
    wires: Wires
    host: int

    def send(self, raw: bytes, receiver: Endpoint) -> None:
        to = receiver.datagram_port
        self.wires.sent += 1
        if self.wires.joins(self.host, to) and self.wires.random.random() >= self.wires.losses:
            self.wires.boxes[to].extend([raw] * (2 if self.wires.repeats else 1))

    def receive(self):
        box = list(self.wires.boxes.pop(self.host, ()))
        if self.wires.reorders:
            self.wires.random.shuffle(box)
        yield from box

    def probe(self, receiver: Endpoint) -> FakeConnection:
        return FakeConnection(self.wires, (self.host, receiver.datagram_port))


class Ring:
    """Hosts that each run on a clock of their own, all advanced by a test."""

    def __init__(self, hosts: int, **wires):
        self.wires = Wires(**wires)
        self.dead: dict[int, list[int]] = {host: [] for host in range(hosts)}
        self.cut_off: list[int] = []
        self.paused: set[int] = set()
        self.now_s = 0.0
        self.times: dict[tuple[int, int], float] = {}
        endpoints = [Endpoint("", host, host) for host in range(hosts)]
        self.rings = [
            HostRing(
                FakeNetwork(self.wires, host),
                KEY,
                host,
                endpoints,
                lambda dead, host=host: self.note(host, dead),
                lambda host=host: self.cut_off.append(host),
            )
            for host in range(hosts)
        ]

    def note(self, host: int, dead: int) -> None:
        self.dead[host].append(dead)
        self.times[host, dead] = self.now_s

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds / LOOK_S)):
            self.now_s += LOOK_S
            for host, ring in enumerate(self.rings):
                if host not in self.wires.dead | self.paused | set(self.cut_off):
                    ring.advance(1000 * host + self.now_s, LIMIT_S)  # clocks differ


@pytest.mark.parametrize("hosts", [1, 2, 3, 5, 16])
@pytest.mark.parametrize("wires", [{}, {"losses": 0.3}, {"repeats": True}, {"reorders": True}])
def test_hosts_that_live_are_never_dead(hosts, wires):
    ring = Ring(hosts, **wires)
    ring.run(100)
    assert ring.cut_off == [] and not any(ring.dead.values())


@pytest.mark.parametrize("hosts", [3, 4, 7])
@pytest.mark.parametrize("losses", [0.0, 0.3])
def test_every_host_left_learns_of_a_death_once(hosts, losses):
    for victim in range(hosts):
        ring = Ring(hosts, losses=losses)
        ring.run(10)
        ring.wires.dead.add(victim)
        ring.run(20)
        left = set(range(hosts)) - {victim}
        assert [ring.dead[host] for host in left] == [[victim]] * len(left)
        assert ring.cut_off == []
        limits = 2.5 if losses == 0 else 6
        assert all(t - 10 <= limits * LIMIT_S + 2 * LOOK_S for t in ring.times.values())


def test_the_ring_closes_and_detects_the_next_death():
    ring = Ring(7)
    ring.run(5)
    for victims in ([3], [2, 4]):
        ring.wires.dead.update(victims)
        ring.run(30)
    assert {host: sorted(ring.dead[host]) for host in (0, 1, 5, 6)} == {
        key: [2, 3, 4] for key in (0, 1, 5, 6)
    }
    assert ring.cut_off == []


def test_neighbours_that_die_at_once_are_all_detected():
    ring = Ring(8)
    ring.run(5)
    ring.wires.dead.update((2, 3, 4))
    ring.run(30)
    assert all(sorted(ring.dead[host]) == [2, 3, 4] for host in (0, 1, 5, 6, 7))


@pytest.mark.parametrize("link", [(0, 1), (2, 3), (0, 3)])
def test_a_broken_link_is_no_dead_host(link):
    ring = Ring(4)
    ring.run(5)
    ring.wires.cut.add(frozenset(link))
    ring.run(300)
    assert ring.cut_off == [] and not any(ring.dead.values())
    ring.wires.cut.clear()
    ring.run(5)
    ring.wires.dead.add(1)
    ring.run(200)
    assert all(ring.dead[host] == [1] for host in (0, 2, 3))


def test_a_host_whose_kernel_answers_is_not_dead():
    ring = Ring(4)
    ring.run(5)
    ring.paused.add(1)  # it computes with the interpreter's lock, or is stopped
    ring.run(1000)
    assert ring.cut_off == [] and not any(ring.dead.values())
    assert ring.rings[2]._pause > 100  # it is left alone for longer and longer
    ring.paused.clear()
    ring.run(2)
    assert ring.rings[2]._pause == 1


@pytest.mark.parametrize("hosts", [3, 4, 6])
def test_a_host_that_reaches_no_other_ends_itself(hosts):
    ring = Ring(hosts)
    ring.run(5)
    ring.wires.cut |= {frozenset((1, other)) for other in range(hosts) if other != 1}
    ring.run(40)
    assert ring.cut_off == [1]
    assert all(ring.dead[host] == [1] for host in range(hosts) if host != 1)


def test_of_two_hosts_neither_goes_on_alone():
    ring = Ring(2)
    ring.run(5)
    ring.wires.cut.add(frozenset((0, 1)))
    ring.run(40)
    assert sorted(ring.cut_off) == [0, 1]


@pytest.mark.parametrize(
    "hosts, alive", [(4, set()), (5, {2, 3, 4}), (6, set()), (7, {3, 4, 5, 6})]
)
def test_of_two_halves_only_a_majority_goes_on(hosts, alive):
    ring = Ring(hosts)
    ring.run(5)
    half = hosts // 2
    ring.wires.cut |= {frozenset((a, b)) for a in range(half) for b in range(half, hosts)}
    ring.run(100)
    assert set(range(hosts)) - set(ring.cut_off) == alive


def test_a_host_called_dead_ends_itself_when_the_network_is_back():
    ring = Ring(4)
    ring.run(5)
    ring.wires.cut |= {frozenset((1, other)) for other in (0, 2, 3)}
    ring.run(5)
    assert ring.dead[2] == [1] and ring.cut_off == []
    ring.wires.cut.clear()
    ring.run(2)
    assert ring.cut_off == [1]


def test_a_host_that_slept_does_not_judge_by_its_sleep():
    ring = Ring(3)
    ring.run(5)
    ring.rings[1].restart(1000 + ring.now_s)
    ring.wires.losses = 1.0
    ring.run(LIMIT_S / 2)
    assert ring.rings[1]._trial is None


def test_a_host_that_was_never_heard_is_not_judged():
    ring = Ring(3)
    ring.wires.losses = 1.0  # UDP is filtered, and TCP too
    ring.wires.cut |= {frozenset((0, 1)), frozenset((0, 2)), frozenset((1, 2))}
    ring.run(100)
    assert ring.cut_off == [] and not any(ring.dead.values())
    assert not any(each.was_heard for each in ring.rings)


@pytest.mark.parametrize("hosts", [4, 64])
def test_a_host_sends_one_datagram_per_tenth_of_the_limit(hosts):
    ring = Ring(hosts)
    ring.run(10 * LIMIT_S)
    assert ring.wires.sent <= hosts * 10 * 10 + hosts


# Datagrams


def open_all(raws: list[bytes], host: int = 1, key: bytes = KEY):
    sealer = Sealer(key, host)
    return [sealer.open(raw) for raw in raws], dict(sealer.ignored)


def test_a_datagram_arrives():
    raw = Sealer(KEY, 0).seal(Kind.QUESTION, 1, 2)
    assert len(raw) == DATAGRAM_BYTES
    assert open_all([raw]) == ([Datagram(Kind.QUESTION, 0, 2)], {})


def test_each_bit_is_sealed():
    raw = Sealer(KEY, 0).seal(Kind.DEAD, 1, 2)
    changed = [
        raw[:place] + bytes([raw[place] ^ 1 << bit]) + raw[place + 1 :]
        for place in range(len(raw))
        for bit in range(8)
    ]
    datagrams, ignored = open_all(changed)
    assert not any(datagrams) and ignored == {"forged": 8 * DATAGRAM_BYTES}


def test_other_keys_and_lengths_are_ignored():
    raw = Sealer(b"x" * 32, 0).seal(Kind.DEAD, 1, 2)
    good = Sealer(KEY, 0).seal(Kind.DEAD, 1, 2)
    plain = good[:-32] + hashlib.sha256(good[:-32]).digest()
    raws = [raw, plain, b"", good[:-1], good + b"\0", bytes(57), random.Random(1).randbytes(57)]
    datagrams, ignored = open_all(raws)
    assert not any(datagrams) and ignored == {"forged": 4, "malformed": 3}


def test_replayed_late_and_misdirected_datagrams_are_ignored():
    sender, other = Sealer(KEY, 0), Sealer(KEY, 3)
    first, second, third = (sender.seal(Kind.HEARTBEAT, 1, 0) for _ in range(3))
    raws = [first, first, third, second, third, other.seal(Kind.HEARTBEAT, 1, 3)]
    datagrams, ignored = open_all([*raws, sender.seal(Kind.HEARTBEAT, 2, 0)])
    assert [d is not None for d in datagrams] == [True, False, True, False, False, True, False]
    assert ignored == {"replayed or late": 3, "for another host": 1}


def test_a_short_key_is_refused():
    with pytest.raises(ValueError, match="32 bytes, got 5"):
        Sealer(b"short", 0)


def test_replays_do_not_keep_a_dead_host_alive():
    ring = Ring(3)
    recorded: list[bytes] = []
    receive = FakeNetwork.receive

    class Recorder(FakeNetwork):
        def receive(self):
            fresh = list(receive(self))
            recorded.extend(fresh)
            yield from [*fresh, *recorded, b"noise", bytes(57)]

    ring.rings[1]._network = Recorder(ring.wires, 1)
    ring.run(5)
    ring.wires.dead.add(0)
    ring.run(20)
    assert ring.dead[1] == [0]
    assert ring.rings[1].sealer.ignored["replayed or late"] > 100


# Sockets


FAMILIES = [
    "127.0.0.1",
    pytest.param(
        "::1", marks=pytest.mark.skipif(not socket.has_ipv6, reason="Python without IPv6")
    ),
]


@pytest.fixture
def channels(request):
    try:
        channels = [Channel(request.param) for _ in range(3)]
    except OSError as error:
        pytest.skip(f"{request.param}: {error}")
    yield channels
    for channel in channels:
        channel.close()


def arrivals(channel: Channel, limit_s: float = 60.0) -> list[bytes]:
    import time

    deadline, raws = time.monotonic() + limit_s, []
    while not raws and time.monotonic() < deadline:
        raws = list(channel.receive())
    return raws


@pytest.mark.parametrize("channels", FAMILIES, indirect=True)
def test_datagrams_over_loopback(channels):
    a, b, _ = channels
    assert list(a.receive()) == []
    b.send(b"hello", a.endpoint)
    assert arrivals(a) == [b"hello"]
    b.send(b"x" * 1000, a.endpoint)
    assert arrivals(a) == [b"x" * (DATAGRAM_BYTES + 1)]  # malformed, and cut


@pytest.mark.parametrize("channels", FAMILIES, indirect=True)
def test_a_flood_does_not_keep_the_thread(channels):
    a, b, _ = channels
    for _ in range(200):
        b.send(b"x" * 57, a.endpoint)
    assert len(list(a.receive())) <= 64


@pytest.mark.parametrize("channels", FAMILIES, indirect=True)
def test_a_kernel_answers_for_a_process_that_does_not(channels):
    a, b, c = channels
    for receiver in (b.endpoint, c.endpoint._replace(probe_port=1)):  # accepted, refused
        probe = a.probe(receiver)
        assert any(probe.has_answer() for _ in range(100_000))
        probe.close()


def test_no_answer_from_an_address_without_a_host():
    channel = Channel("127.0.0.1")
    probe = channel.probe(Endpoint("203.0.113.1", 9, 9))  # no route from the loopback address
    assert not any(probe.has_answer() for _ in range(100))
    probe.close()
    channel.close()


def test_a_ring_over_loopback():
    channels = [Channel("127.0.0.1") for _ in range(3)]
    endpoints, dead = [channel.endpoint for channel in channels], []
    rings = [
        HostRing(channel, KEY, host, endpoints, dead.append, lambda: dead.append(-1))
        for host, channel in enumerate(channels)
    ]
    for step in range(100):
        for ring in rings:
            ring.advance(step * 0.01, 0.2)
    assert dead == [] and all(ring.was_heard for ring in rings)
    assert not any(ring.sealer.ignored for ring in rings)
    for channel in channels:
        channel.close()


def test_addresses():
    for address in host_addresses():
        assert not address.startswith(("127.", "::1", "fe80:"))


@pytest.mark.parametrize(
    "addresses, chosen",
    [
        ([["10.0.0.1", "172.17.0.1"], ["172.17.0.1", "10.0.0.2"]], ["10.0.0.1", "10.0.0.2"]),
        ([["10.0.0.1", "fd00::1"], ["fd00::2"]], ["fd00::1", "fd00::2"]),
        ([["10.0.0.1"], ["fd00::2"]], []),
        ([["10.0.0.1"], ["10.0.0.1"]], []),
        ([["10.0.0.1"], []], []),
    ],
)
def test_each_host_has_an_address_of_its_own(addresses, chosen):
    assert choose_addresses(addresses) == chosen
