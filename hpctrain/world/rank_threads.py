"""What the threads of a rank share in its World: their links, and the record of their waits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from hpctrain.collectives import Group, group_over_nodes
from hpctrain.transport.link import Link
from hpctrain.watch import WatchRecord


class RankThreads:
    """The links of a rank's threads in a World, and in the sub-worlds of this one."""

    def __init__(self, main: Group, hosts: Sequence[str], record: WatchRecord | None):
        """`main`: the ranks of the World, for the main thread; `hosts`: the node of each."""
        self._main, self._hosts = main, hosts
        self.links: dict[str, list[Link]] = {}  #: of the threads other than the main one
        self.record = record  #: of the link operations that wait; None among threads
        self.on_failure: Callable[[BaseException], Any] | None = None  #: records why the rank ends
        self.sub_worlds: list[RankThreads] = []

    def group_for(self, purpose: str, alone: bool = False) -> Group:
        """Create a group of this World's ranks for another thread; collective.

        `alone`: no other thread computes while this one communicates, so it may spin.
        """
        main = self._main
        group = group_over_nodes(main.link.split(0, main.link.rank), self._hosts)
        self.register(purpose, *group.links)
        spins = alone and main.spins
        return replace(group, memory=main.memory, choices=main.choices, spins=spins)

    def link_for(self, purpose: str, color: int = 0) -> Link:
        """Return another link, to all ranks that give the same `color`; all ranks must call."""
        link = self._main.link
        return self.register(purpose, link.split(color, link.rank))[0]

    def view_for(self, purpose: str, link: Link) -> Link:
        """Return a view of `link` for a second thread: one thread sends, the other receives."""
        return self.register(purpose, link.endpoint.view())[0]

    def register(self, purpose: str, *links: Link) -> list[Link]:
        """Return `links` of another thread, whose waiting calls are recorded from now on."""
        self.links[purpose] = list(links)
        if self.record is not None:
            for link in links:
                link.endpoint.waits.entry = self.record.entry(purpose)
        return self.links[purpose]

    def record_in(self, record: WatchRecord) -> None:
        """Let every thread's links record the calls that wait in `record`."""
        self.record = record.replacing(self.record)
        for thread, links in {"main": self._main.links, **self.links}.items():
            for link in links:
                link.endpoint.waits.entry = record.entry(thread)
        for threads in self.sub_worlds:
            threads.record_in(record)
