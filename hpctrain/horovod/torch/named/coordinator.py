"""The first rank of a process set decides which operations run, and in which order.

    rank 1   submits b, a  ---->  rank 0   has a, b   ---->  all ranks: run b, a
    rank 2   submits a, b  ---->           a and b are
                                           everywhere

Ranks submit operations in any order; all run them in the order of the decisions.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

from hpctrain.core.names import counted
from hpctrain.horovod.torch.named.requests import (
    ALLREDUCE,
    BARRIER,
    JOIN,
    LEAVE,
    SHUTDOWN,
    Decision,
    Request,
)

_WITH_JOINED = (ALLREDUCE, BARRIER)  #: what ranks that have joined take part in


class Submitted:
    """A request by name, of the ranks that have submitted it."""

    def __init__(self) -> None:
        self.requests: dict[int, Request] = {}
        self.start_s, self.is_reported = time.monotonic(), False


class Coordinator:
    """The submitted requests of all ranks; it sends no messages."""

    def __init__(self, ranks: Sequence[int]):
        """`ranks`: the global rank of each rank of the process set, for messages."""
        self._ranks, self._size = tuple(ranks), len(ranks)
        self._submitted: dict[str, Submitted] = {}
        self._joined: list[int] = []
        self._leaving: dict[int, int] = {}  # how often each rank has asked to leave
        self._decisions: list[Decision] = []

    def submit(self, rank: int, request: Request) -> None:
        """Note that `rank` has submitted `request`.

        A rank that leaves takes part in what it has submitted. Once there is nothing else, or
        something that it will never submit, or if it asks again, all ranks shut down.
        """
        if request.kind == JOIN:
            self._join(rank, request)
        elif request.kind == SHUTDOWN:
            self._leaving[rank] = self._leaving.get(rank, 0) + 1
        else:
            submitted = self._submitted.setdefault(request.name, Submitted())
            submitted.requests[rank] = request
            self._decide(request.name, submitted)
        for leaving, calls in self._leaving.items():
            own = [leaving in submitted.requests for submitted in self._submitted.values()]
            if calls > 1 or not own or not all(own):
                self._decisions.append(Decision(LEAVE, last_joined=leaving))

    def take_decisions(self) -> list[Decision]:
        """Return the decisions since the last call."""
        decisions, self._decisions = self._decisions, []
        return decisions

    def _join(self, rank: int, request: Request) -> None:
        self._joined.append(rank)
        for name, submitted in list(self._submitted.items()):
            self._decide(name, submitted)
        if len(self._joined) == self._size:
            self._joined = []
            self._decisions.append(Decision(request, last_joined=rank))

    def _decide(self, name: str, submitted: Submitted) -> None:
        """Decide on a request once all ranks have submitted it, or have joined."""
        requests = submitted.requests
        if len(requests) + len(self._joined) < self._size:
            return
        if len({*requests, *self._joined}) < self._size:
            return
        del self._submitted[name]
        first = next(iter(requests.values()))
        error = ""
        if any(request != first for request in requests.values()):
            error = f"'{name}' differs between ranks: {self._describe_differences(requests)}"
        elif self._joined and first.kind not in _WITH_JOINED:
            error = (
                f"{first.kind} '{name}': {self._name(self._joined)} called join(), after which "
                "others can only call allreduce and barrier"
            )
        self._decisions.append(Decision(first, error))

    def find_late(self, limit_s: float) -> Iterator[str]:
        """Yield a line on each request that some ranks have not submitted for `limit_s`, once."""
        now_s = time.monotonic()
        for submitted in self._submitted.values():
            if not submitted.is_reported and now_s - submitted.start_s > limit_s:
                submitted.is_reported = True
                yield self._describe(submitted, now_s)

    def give_up(self, limit_s: float) -> None:
        """Decide that requests fail which some ranks have not submitted for `limit_s`."""
        now_s = time.monotonic()
        for name, submitted in list(self._submitted.items()):
            if now_s - submitted.start_s > limit_s:
                del self._submitted[name]
                first = next(iter(submitted.requests.values()))
                self._decisions.append(Decision(first, self._describe(submitted, now_s)))

    def _describe(self, submitted: Submitted, now_s: float) -> str:
        request = next(iter(submitted.requests.values()))
        missing = self._missing(submitted.requests)
        return (
            f"{request.kind} '{request.name}': submitted by "
            f"{counted(len(submitted.requests), 'rank')} {now_s - submitted.start_s:.0f} s ago, "
            f"not by {self._name(missing)}"
        )

    def _describe_differences(self, requests: Mapping[int, Request]) -> str:
        """Return the requests of the ranks, those that are alike together."""
        alike: dict[str, list[int]] = {}
        for rank, request in sorted(requests.items()):
            alike.setdefault(str(request), []).append(rank)
        return "; ".join(f"{self._name(ranks)}: {text}" for text, ranks in alike.items())

    def _name(self, ranks: Sequence[int]) -> str:
        """Return "rank 3", or "ranks 0, 1, 2 and 5 more", by their global numbers."""
        shown = ", ".join(str(self._ranks[rank]) for rank in ranks[:8])
        more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
        return f"{counted(len(ranks), 'rank').split()[-1]} {shown}{more}"

    def _missing(self, ranks: Iterable[int]) -> list[int]:
        return sorted({*range(self._size)} - {*ranks} - {*self._joined})
