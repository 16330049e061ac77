"""The sockets of a host: datagrams to other hosts, and whether the kernel of a host answers at all.

A host that sends no heartbeat may be alive: its process computes in C with the interpreter's lock,
or is stopped together with its job. So each host also listens on a TCP port. Its kernel completes a
connection, or refuses it, whatever the process does; a host that is off or cut from the network
does neither.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import re
import select
import socket
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hpctrain.watch.liveness.datagrams import DATAGRAM_BYTES

_BACKLOG = 128  #: connections that the kernel completes while nothing accepts them
_MOST_DATAGRAMS = 64  #: read at once: a flood must not keep the thread
_SIOCGIFADDR = 0x8915
#: Interfaces of a cluster's fast network: of HPE Slingshot, and of IP over InfiniBand.
_FAST_INTERFACE = re.compile(r"(hsn|ib)\w*")
_PENDING = (errno.EINPROGRESS, errno.EALREADY, errno.EWOULDBLOCK)


class Endpoint(NamedTuple):
    """An address of a host, with the ports of its datagrams and of its probes."""

    address: str
    datagram_port: int
    probe_port: int


class Channel:
    """Sockets bound to one address of this host; no call waits."""

    def __init__(self, address: str) -> None:
        """Raises OSError if no socket can be bound to `address`."""
        family = _family(address)
        self._datagrams = socket.socket(family, socket.SOCK_DGRAM)
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        for bound in (self._datagrams, self._listener):
            bound.bind((address, 0))
            bound.settimeout(0)
        self._listener.listen(_BACKLOG)
        ports = (bound.getsockname()[1] for bound in (self._datagrams, self._listener))
        self.endpoint = Endpoint(address, *ports)

    def send(self, raw: bytes, receiver: Endpoint) -> None:
        """Send a datagram; it is dropped if it cannot be sent."""
        with contextlib.suppress(OSError):
            self._datagrams.sendto(raw, (receiver.address, receiver.datagram_port))

    def receive(self) -> Iterator[bytes]:
        """Yield the datagrams that have arrived, from whomever."""
        for _ in range(_MOST_DATAGRAMS):
            try:
                yield self._datagrams.recv(DATAGRAM_BYTES + 1)
            except BlockingIOError:
                break
            except OSError:  # the error of an earlier `send`
                continue
        with contextlib.suppress(OSError):
            for _ in range(_MOST_DATAGRAMS):
                self._listener.accept()[0].close()

    def probe(self, receiver: Endpoint) -> Probe:
        """Return a connection under way to the kernel of another host."""
        return Probe(self.endpoint.address, receiver)

    def close(self) -> None:
        """Close the sockets."""
        self._datagrams.close()
        self._listener.close()


class Probe:
    """A connection to the kernel of a host, which answers it without its processes."""

    def __init__(self, address: str, receiver: Endpoint) -> None:
        self._socket = socket.socket(_family(receiver.address), socket.SOCK_STREAM)
        self._socket.settimeout(0)
        self._error = 0
        try:
            self._socket.bind((address, 0))
            self._error = self._socket.connect_ex((receiver.address, receiver.probe_port))
        except OSError as error:
            self._error = error.errno or errno.ENETUNREACH

    def has_answer(self) -> bool:
        """Return whether the kernel of the host has answered, be it with a refusal."""
        if self._error in _PENDING:
            ready = select.poll()  # select() takes no descriptor above 1,023
            ready.register(self._socket, select.POLLOUT)
            if not ready.poll(0):
                return False
            self._error = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        return self._error in (0, errno.ECONNREFUSED)

    def close(self) -> None:
        self._socket.close()


def host_addresses() -> list[str]:
    """Return this host's addresses, first from its name, without loopback and link-local ones.

    IPv4 before IPv6.
    """
    name_addresses = [str(entry[4][0]) for entry in _resolve(socket.gethostname())]
    interfaces = [address for _, name in socket.if_nameindex() for address in _ipv4_of(name)]
    addresses = dict.fromkeys([*name_addresses, *interfaces, *_ipv6_addresses()])
    usable_addresses = [
        a for a in addresses if not a.startswith(("127.", "169.254.", "::1", "fe80:"))
    ]
    return sorted(usable_addresses, key=_family)


def fast_interfaces() -> list[str]:
    """Return the interfaces of the fast network that have an IPv4 address, in order of names."""
    names = sorted(name for _, name in socket.if_nameindex())
    return [name for name in names if _FAST_INTERFACE.fullmatch(name) and _ipv4_of(name)]


def fast_addresses() -> list[str]:
    """Return this host's IPv4 addresses in the fast network.

    The host's name may lead to a slow network, of the administrators of a cluster, or to none.
    """
    return [address for name in fast_interfaces() for address in _ipv4_of(name)]


def choose_addresses(addresses: Sequence[Sequence[str]]) -> list[str]:
    """Choose an address per host, of a kind that every host has; return [] if no kind fits.

    All are IPv4, or all IPv6. Addresses that several hosts have, such as addresses of bridges
    between containers, lead to no other host.
    """
    for family in (socket.AF_INET, socket.AF_INET6):
        all_addresses = [address for host in addresses for address in dict.fromkeys(host)]
        own_addresses = [
            [a for a in host if _family(a) == family and all_addresses.count(a) == 1]
            for host in addresses
        ]
        if all(own_addresses):
            return [host[0] for host in own_addresses]
    return []


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _resolve(name: str) -> Sequence[tuple[Any, ...]]:
    try:
        return socket.getaddrinfo(name, None, type=socket.SOCK_DGRAM)
    except OSError:  # a host without an entry of its own name
        return []


def _ipv4_of(interface: str) -> list[str]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("256s", interface.encode())
        try:
            answer = fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, request)
        except OSError:  # it has no IPv4 address
            return []
    return [socket.inet_ntoa(answer[20:24])]


def _ipv6_addresses(table: Path = Path("/proc/net/if_inet6")) -> list[str]:
    try:
        rows = table.read_text().split("\n")
    except OSError:
        return []
    packed = [bytes.fromhex(row[:32]) for row in rows if row]
    return [socket.inet_ntop(socket.AF_INET6, address) for address in packed]
