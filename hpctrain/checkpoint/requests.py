"""Requests of ranges of arrays: the common part of the readers of files and of memory.

First each rank notes its requests, then all fetch. Requests of turn 1, 2, ... are added to the
values of the turns before, so that a mean over workers needs no array beside its target.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from hpctrain.checkpoint.exchange import Exchange, RankSpans, Target
from hpctrain.collectives import all_gather_bytes
from hpctrain.core.errors import UsageError
from hpctrain.transport.link import Link


class ArrayFacts(NamedTuple):
    """The length and the dtype of a whole flat array."""

    size: int
    dtype: str


class Reader:
    """The arrays of a saved state, which can be requested by name and range."""

    def __init__(
        self, origin: str, step: int, about: dict[str, Any], facts: Mapping[str, ArrayFacts]
    ):
        """`origin` names the state in messages; `facts` describe its arrays."""
        self.origin, self.step, self.about = origin, step, about
        self.sizes = {name: array.size for name, array in facts.items()}
        self.arrays: dict[str, np.ndarray] = {}  #: those requested whole, see `request_whole`
        self._facts = facts
        self._targets: list[Target] = []
        self._arrival_calls: list[Callable[[], None]] = []

    def request(self, name: str, out: Any, offset: int = 0, turn: int = 0) -> None:
        """Request the elements of `name` from `offset` on, as many as flat `out` has.

        `fetch` writes them into `out`, an array of the host or of a device, in the dtype of `out`.
        Requests of turn 1, 2, ... are added to what the turns before have written.
        """
        if not 0 <= offset <= offset + out.size <= self.sizes[name]:
            raise UsageError(
                f"{self.origin}: '{name}' has {self.sizes[name]} elements; expected {out.size} "
                f"from {offset} on"
            )
        if out.size:
            self._targets.append(Target(turn, name, offset, out))

    def request_whole(self, names: Iterable[str]) -> None:
        """Request whole arrays, in `arrays` after `fetch`."""
        for name in names:
            self.arrays[name] = np.empty(*self._facts[name])
            self.request(name, self.arrays[name])

    def on_arrival(self, call: Callable[[], None]) -> None:
        """Register a `call` to make once everything that any rank requested has arrived."""
        self._arrival_calls.append(call)

    def fetch(self, link: Link) -> None:
        """Write what all ranks have requested; raise the first fault of this rank; collective."""
        exchange = self._make_exchange(link)
        for spans, own_targets in self._spans_by_turn(link):
            self._fetch_turn(exchange, spans, own_targets)
        if exchange.fault is not None:
            raise exchange.fault

    def finish(self) -> None:
        """Make the calls of `on_arrival`: all ranks have fetched without a fault."""
        for call in self._arrival_calls:
            call()

    def _make_exchange(self, link: Link) -> Exchange:
        raise NotImplementedError

    def _fetch_turn(
        self, exchange: Exchange, spans: list[RankSpans], own_targets: list[Target]
    ) -> None:
        """Fetch every rank's `spans`, and this rank's elements into `own_targets`."""
        raise NotImplementedError

    def _spans_by_turn(self, link: Link) -> Iterator[tuple[list[RankSpans], list[Target]]]:
        """Yield, turn by turn, the spans that each rank requests, and this rank's targets."""
        own_spans_json = json.dumps(_merge_requests(self._targets)).encode()
        spans = [json.loads(rank_spans) for rank_spans in all_gather_bytes(link, own_spans_json)]
        turns = {span[0] for rank_spans in spans for span in rank_spans}
        for turn in sorted(turns):
            own_targets = [target for target in self._targets if target.turn == turn]
            yield [[s[1:] for s in rank_spans if s[0] == turn] for rank_spans in spans], own_targets


def _merge_requests(targets: Iterable[Target]) -> list[list[Any]]:
    """Return the requests as [turn, array, start, stop], with neighbours joined."""
    spans: list[list[Any]] = []
    for turn, array, start, stop in sorted(target.span for target in targets):
        if spans and spans[-1][:2] == [turn, array] and start <= spans[-1][3]:
            spans[-1][3] = max(spans[-1][3], stop)
        else:
            spans.append([turn, array, start, stop])
    return spans
