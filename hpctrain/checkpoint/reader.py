"""Reading a checkpoint: ranks request ranges of arrays; the job reads each byte from disk once.

First each rank notes its requests, then all fetch. A bucket that several ranks request is read and
verified by the one of them that has read the fewest bytes, which sends it to the others. Four
ranks, parameters that all request, and an optimizer state in shards:

    buckets of the files      p0  p1  p2  p3  p4  p5  p6  p7     s0  s1  s2  s3
    read by rank               0   1   2   3   0   1   2   3      0   1   2   3
    round 0                   p0..p3: each reads one, writes it into its array, sends it on
    round 1                   p4..p7
    round 2                   s0..s3: nobody else requests them

Memory beside the arrays: two buckets, one read and one received. Within a round rank r sends to
r + 1, r + 2, ... while it receives from r - 1, r - 2, ...: each link carries one bucket at a time.

A fault does not stop the exchange, in which other ranks wait: it is raised afterwards. What was
written until then is overwritten when an older checkpoint is fetched in its place, and `then`, for
all that must change only once everything has arrived, is not called.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hpctrain.checkpoint.format import Manifest
from hpctrain.checkpoint.parts import Bucket, buckets_of, check_header, read_bucket
from hpctrain.collectives import all_gather_bytes
from hpctrain.core.errors import UsageError
from hpctrain.core.xp import copy, like
from hpctrain.transport.link import Link, Request


class Reader:
    """The arrays of a checkpoint, which can be requested by name and range."""

    def __init__(self, path: Path, manifest: Manifest):
        self.path, self.step = path, manifest.step
        self.about, self.state = manifest.about, manifest.state
        self.sizes = {name: flat.size for name, flat in manifest.arrays.items()}
        self.arrays: dict[str, np.ndarray] = {}  #: those requested whole, see `request_whole`
        self._manifest = manifest
        self._wanted: list[_Wanted] = []
        self._then: list[Callable[[], None]] = []

    def request(self, name: str, out: Any, offset: int = 0, turn: int = 0) -> None:
        """Request the elements of `name` from `offset` on, as many as flat `out` has.

        `fetch` writes them into `out`, an array of the host or of a device, in the dtype of `out`.
        Requests of turn 1, 2, ... are added to what the turns before have written.
        """
        if not 0 <= offset <= offset + out.size <= self.sizes[name]:
            raise UsageError(
                f"{self.path}: '{name}' has {self.sizes[name]} elements; expected {out.size} from "
                f"{offset} on"
            )
        if out.size:
            self._wanted.append(_Wanted(turn, name, offset, out))

    def request_whole(self, names: Iterable[str]) -> None:
        """Request whole arrays, in `arrays` after `fetch`."""
        for name in names:
            flat = self._manifest.arrays[name]
            self.arrays[name] = np.empty(flat.size, flat.dtype)
            self.request(name, self.arrays[name])

    def then(self, act: Callable[[], None]) -> None:
        """Call `act` once everything that any rank requested has arrived."""
        self._then.append(act)

    def fetch(self, link: Link) -> None:
        """Read what all ranks have requested; raise the first fault of this rank; collective."""
        exchange = _Exchange(self, link)
        for number in range(link.rank, len(self._manifest.parts), link.size):
            exchange.guarded(check_header, self.path, self._manifest.parts[number])
        wanted = _merged(self._wanted)
        spans = [json.loads(b) for b in all_gather_bytes(link, json.dumps(wanted).encode())]
        buckets = self._buckets()
        for turn in range(1 + max((span[0] for rank in spans for span in rank), default=0)):
            own = [w for w in self._wanted if w.turn == turn]
            of_ranks = [[span[1:] for span in rank if span[0] == turn] for rank in spans]
            exchange.run(_dealt(_tasks(buckets, of_ranks, own), link.size))
        if exchange.fault is not None:
            raise exchange.fault

    def finish(self) -> None:
        """Make the calls of `then`: all ranks have fetched without a fault."""
        for act in self._then:
            act()

    def _buckets(self) -> dict[str, list[Bucket]]:
        """Return the buckets of each array, in the order of its elements."""
        buckets: dict[str, list[Bucket]] = {name: [] for name in self.sizes}
        slot_edges = self._manifest.edges
        for part in self._manifest.parts:
            for bucket in buckets_of(part, self._manifest.arrays, slot_edges):
                buckets[bucket.array].append(bucket)
        return {name: sorted(unsorted, key=_start) for name, unsorted in buckets.items()}


class _Wanted(NamedTuple):
    """A request: elements from `start` on of an array, to be written into `out`."""

    turn: int
    array: str
    start: int
    out: Any

    def write(self, start: int, values: np.ndarray) -> None:
        """Write or add the `values` of the array from element `start` on, as far as requested."""
        begin = max(start, self.start)
        end = min(start + values.size, self.start + self.out.size)
        x, new = (
            self.out[begin - self.start : end - self.start],
            values[begin - start : end - start],
        )
        if self.turn:
            x += like(x, new)
        else:
            copy(x, new)


@dataclass
class _Task:
    """A bucket, the ranks that request elements of it, and the requests of this rank."""

    bucket: Bucket
    ranks: set[int] = field(default_factory=set)
    wanted: list[_Wanted] = field(default_factory=list)


class _Exchange:
    """The reads and messages of one rank."""

    def __init__(self, reader: Reader, link: Link):
        self.fault: Exception | None = None
        self._path, self._link = reader.path, link
        self._own, self._inbox = np.empty(0, np.uint8), np.empty(0, np.uint8)

    def guarded(self, act: Callable[..., Any], *arguments: Any) -> Any:
        """Return `act(*arguments)`; keep the first error instead of raising it."""
        try:
            return act(*arguments)
        except Exception as error:  # other ranks wait for this one in the exchange
            self.fault = self.fault or error
            return None

    def run(self, dealt: list[list[_Task]]) -> None:
        """Read and exchange the buckets of all ranks: `dealt[r]` are those that rank r reads."""
        rank, size = self._link.rank, self._link.size
        longest = max((t.bucket.nbytes for tasks in dealt for t in tasks), default=0)
        if longest > self._own.size:
            self._own = np.empty(longest, np.uint8)
            self._inbox = np.empty(longest if size > 1 else 0, np.uint8)
        for of_ranks in zip_longest(*dealt):
            own = of_ranks[rank]
            if own is not None:
                self._read(own)
            for distance in range(1, size):
                self._pass(own, (rank + distance) % size, of_ranks, (rank - distance) % size)

    def _read(self, task: _Task) -> None:
        if self.guarded(read_bucket, self._path, task.bucket, self._own) is None:
            self._own[: task.bucket.nbytes] = 0  # others get what harms nothing
        self._write(task, self._own)

    def _pass(
        self, own: _Task | None, to: int, of_ranks: tuple[_Task | None, ...], source: int
    ) -> None:
        """Send this rank's bucket to rank `to`, and receive that of rank `source`, if requested."""
        requests: list[Request] = []
        incoming = of_ranks[source]
        if incoming is not None and self._link.rank not in incoming.ranks:
            incoming = None
        if incoming is not None:
            requests.append(self._link.irecv(self._inbox[: incoming.bucket.nbytes], source))
        if own is not None and to in own.ranks:
            requests.append(self._link.isend(self._own[: own.bucket.nbytes], to))
        for request in requests:
            request.wait()
        if incoming is not None:
            self._write(incoming, self._inbox)

    def _write(self, task: _Task, data: np.ndarray) -> None:
        values = data[: task.bucket.nbytes].view(task.bucket.dtype)
        for wanted in task.wanted:
            self.guarded(wanted.write, task.bucket.start, values)


def _tasks(
    buckets: Mapping[str, list[Bucket]], spans: list[list[list[Any]]], own: Iterable[_Wanted]
) -> Iterator[_Task]:
    """Yield the tasks of all ranks for their `spans`, array by array; `own`: of this rank."""
    tasks = {name: [_Task(bucket) for bucket in ordered] for name, ordered in buckets.items()}
    for rank, of_rank in enumerate(spans):
        for name, start, stop in of_rank:
            for number in _over(buckets[name], start, stop):
                tasks[name][number].ranks.add(rank)
    for wanted in own:
        name, stop = wanted.array, wanted.start + wanted.out.size
        for number in _over(buckets[name], wanted.start, stop):
            tasks[name][number].wanted.append(wanted)
    return (task for name in tasks for task in tasks[name] if task.ranks)


def _over(buckets: Sequence[Bucket], start: int, stop: int) -> range:
    """Return the numbers of the buckets that have any of elements `start` .. `stop`."""
    return range(
        bisect_right(buckets, start, key=_start) - 1, bisect_left(buckets, stop, key=_start)
    )


def _start(bucket: Bucket) -> int:
    return bucket.start


def _merged(wanted: Iterable[_Wanted]) -> list[list[Any]]:
    """Return the requests as [turn, array, start, stop], with neighbours joined."""
    spans: list[list[Any]] = []
    for w in sorted((w.turn, w.array, w.start, w.start + w.out.size) for w in wanted):
        if spans and spans[-1][:2] == list(w[:2]) and w[2] <= spans[-1][3]:
            spans[-1][3] = max(spans[-1][3], w[3])
        else:
            spans.append(list(w))
    return spans


def _dealt(tasks: Iterable[_Task], size: int) -> list[list[_Task]]:
    """Return the tasks that each rank reads: each is read by a rank that requests it."""
    dealt: list[list[_Task]] = [[] for _ in range(size)]
    loads: dict[int, int] = defaultdict(int)
    for task in tasks:
        rank = min(task.ranks, key=lambda r: (loads[r], r))
        loads[rank] += task.bucket.nbytes
        dealt[rank].append(task)
    return dealt
