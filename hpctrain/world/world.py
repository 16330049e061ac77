"""The World that `init()` returns: ranks, hosts, device, links, node memory, the watch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing

from hpctrain import collectives
from hpctrain.collectives import Group, group_over_nodes
from hpctrain.core.errors import HpctrainError, LostRankError, RankKilled, UsageError
from hpctrain.transport import abort
from hpctrain.transport.device import gpus
from hpctrain.transport.link import Link
from hpctrain.transport.paths import STAGED_VERDICT, Verdict
from hpctrain.transport.placement.check import RankBinding
from hpctrain.transport.shared_memory.cuda_ipc import shared_gpu_memory
from hpctrain.transport.shared_memory.host import NodeMemory
from hpctrain.tuning.gpu_layout import GpuLayout
from hpctrain.tuning.select import add_choices
from hpctrain.watch import WatchRecord
from hpctrain.watch.trace import Trace
from hpctrain.world.agreement import AgreeingRanks
from hpctrain.world.grid import Grid
from hpctrain.world.job import Job


@dataclass(repr=False)
class World(AgreeingRanks):
    """A group of ranks that work together, as one member sees the group."""

    concurrent: bool = True  #: whether several threads may communicate at once
    transport: str = "local"
    job_size: int = 1  #: number of processes that end with this one
    record: WatchRecord | None = None  #: of the link operations that wait; None among threads
    gpu: gpus.Gpu | None = None  #: the one this rank computes on; None: on its cores
    verdict: Verdict = STAGED_VERDICT  #: the path of GPU memory between ranks
    bindings: tuple[RankBinding, ...] = ()  #: of each rank at the start; none among threads
    trace: Trace = field(default_factory=Trace)  #: of the spans of all threads
    on_failure: Callable[[BaseException], Any] | None = None  #: records why this rank ends
    purpose_links: dict[str, list[Link]] = field(default_factory=dict)  #: of other threads
    parent: World | None = None  #: the World that this sub-world was split from
    sub_worlds: list[World] = field(default_factory=list)
    grid: Grid | None = None  #: if these are the ranks of a mesh with the same layers
    #: Whether engines are built only to load a state: then their parameters may be any.
    restores: bool = False
    on_regroup: Callable[[], None] | None = None  #: called after a loss, see world/survive.py
    job: Job | None = None  #: set if the ranks survive the loss of other ranks
    main: Group = field(init=False)  #: all ranks, for the main thread; its scratch is kept
    memory: NodeMemory = field(init=False)  #: memory shared by the ranks of this node

    def __post_init__(self) -> None:
        """Split the ranks by node, share memory, and fix the choices of `auto`; collective."""
        self.main = group_over_nodes(self.link, self.hosts)
        gather = partial(collectives.all_gather_bytes, self.node)
        self.memory = NodeMemory(self.node, gather)
        node_gpus = [place.gpu for place in self.places if place.node == self.host]
        self.memory.gpu = shared_gpu_memory(self.node, gather, node_gpus)
        spins = self.transport == "mpi"  # threads of one process must yield to each other
        main = replace(self.main, memory=self.memory, spins=spins)
        self.main = add_choices(main, self.transport == "mpi", self.gpus)

    @property
    def rank(self) -> int:
        return self.job.number if self.job is not None and self.is_spare else self.link.rank

    @property
    def size(self) -> int:
        return len(self.job.members) if self.job is not None and self.is_spare else self.link.size

    @property
    def survives(self) -> bool:
        """Whether these ranks go on after they lose other ranks, see world/survive.py."""
        return self.job is not None and self.link.endpoint.survivors.survives

    @property
    def is_spare(self) -> bool:
        """Whether this rank sleeps until it takes the place of a lost one.

        Then `rank` is its number in the job, above the World's ranks, and `link` has it alone.
        """
        return self.job is not None and self.job.is_spare

    @property
    def reports(self) -> bool:
        """Whether this rank reports errors that all ranks raise: the first surviving rank does."""
        return (self.rank if self.job is None else self.job.link.rank) == 0

    @property
    def node(self) -> Link:
        """The main thread's link to the ranks of this node."""
        assert self.main.node is not None  # made by `group_over_nodes`
        return self.main.node

    @property
    def across(self) -> Link:
        """The main thread's link to the ranks with the same local rank on the other nodes."""
        assert self.main.across is not None
        return self.main.across

    @property
    def host(self) -> str:
        return self.places[self.link.rank].node

    @property
    def local_rank(self) -> int:
        """The index of this rank on its node."""
        return self.node.rank

    @property
    def device(self) -> str:
        """The device of this rank: "cpu", or "gpu N, UUID" with CUDA's number on this node."""
        return "cpu" if self.gpu is None else str(self.gpu)

    @property
    def gpus(self) -> GpuLayout | None:
        """The GPU of each rank, for `auto`; None unless each rank has one."""
        if self.gpu is None or not all(place.gpu for place in self.places):
            return None
        shares = self.memory.gpu is not None and self.memory.gpu.shares
        return GpuLayout(gpus.product_name(self.gpu.ordinal), self.places, self.verdict, shares)

    @property
    def voters(self) -> Group:
        """The ranks that agree on each step: this World, or all ranks of its mesh."""
        return self.main if self.grid is None else self.grid.everyone

    def __repr__(self) -> str:
        return (
            f"World(rank {self.rank} of {self.size} on {self.host}, local rank {self.local_rank}, "
            f"device {self.device}, transport {self.transport})"
        )

    def barrier(self) -> None:
        """Wait until every rank has called this; collective."""
        self.link.barrier()

    def zeros(self, length: int, dtype: np.typing.DTypeLike = np.float32) -> np.ndarray:
        """Return zeros (length,) in memory shared by the node's ranks: sums over them are fastest.

        Collective: all ranks call with the same length, in the same order. Without node memory the
        array is private to this rank.
        """
        return self.memory.zeros(length, dtype)

    def over(self, link: Link) -> World:
        """Return the World of the ranks of `link`, a subset of this World; collective over it."""
        texts = collectives.all_gather_bytes(link, str(self.rank).encode())
        ranks = [int(text) for text in texts]
        world = replace(
            self,
            link=link,
            places=tuple(self.places[rank] for rank in ranks),
            bindings=tuple(self.bindings[rank] for rank in ranks if self.bindings),
            trace=Trace(),
            on_failure=None,
            purpose_links={},
            parent=self,
            sub_worlds=[],
            grid=None,
            job=None,
        )
        self.sub_worlds.append(world)
        return world

    def split(self, color: int, key: int | None = None) -> World:
        """Return the World of the ranks that give the same `color`; all ranks must call.

        Its ranks are ordered by `key`, by default by their rank here. Sub-worlds train different
        models at once: `Trainer(..., world=world.split(world.rank % 2))`. An uncaught error on a
        rank of a sub-world ends the whole job.
        """
        return self.over(self.link.split(color, self.rank if key is None else key))

    def subset(self, ranks: Sequence[int], tag: int = 0) -> World:
        """Return the World of `ranks`, in this order; only they must call, with equal arguments.

        Calls that may be under way at once in several threads need different tags. Raises
        UsageError if `ranks` are not different ranks, with this one among them.
        """
        if self.rank not in ranks or sorted({*ranks} & {*range(self.size)}) != sorted(ranks):
            raise UsageError(
                f"subset takes different ranks of 0 to {self.size - 1}, and is called by these "
                f"alone; rank {self.rank} called it with {list(ranks)}"
            )
        return self.over(self.link.create_group(tuple(ranks), tag))

    def group_for(self, purpose: str, alone: bool = False) -> Group:
        """Create a group of this World's ranks for another thread; collective.

        `alone`: no other thread computes while this one communicates, so it may spin.
        """
        group = group_over_nodes(self.link.split(0, self.rank), self.hosts)
        self.register(purpose, *group.links)
        spins = alone and self.main.spins
        return replace(group, memory=self.memory, choices=self.main.choices, spins=spins)

    def link_for(self, purpose: str, color: int = 0) -> Link:
        """Return another link, to all ranks that give the same `color`; all ranks must call."""
        return self.register(purpose, self.link.split(color, self.rank))[0]

    def view_for(self, purpose: str, link: Link) -> Link:
        """Return a view of `link` for a second thread: one thread sends, the other receives."""
        return self.register(purpose, link.endpoint.view())[0]

    def fail(self, error: BaseException) -> None:
        """End the job because of an error in a thread other than the main thread.

        Not if a rank was lost: the main thread then gets that error, too.
        """
        if self.survives and isinstance(error, LostRankError | RankKilled):
            return
        try:
            if self.on_failure is not None:
                self.on_failure(error)
        finally:
            if not self.link.endpoint.waits.interrupt_others():
                self.abort(error)

    def abort(self, error: BaseException) -> None:
        """Print this rank's error, and abort the job: the other ranks wait for this one."""
        if self.parent is not None:
            return self.parent.abort(error)
        abort.report(error, f"rank {self.rank} on {self.host}", self.rank, self.size)
        if self.job_size > 1:
            abort.abort(error.exit_code if isinstance(error, HpctrainError) else 1)

    def register(self, purpose: str, *links: Link) -> list[Link]:
        """Return `links` of another thread, whose waiting calls are recorded from now on."""
        self.purpose_links[purpose] = list(links)
        if self.record is not None:
            for link in links:
                link.endpoint.waits.entry = self.record.entry(purpose)
        return self.purpose_links[purpose]

    def record_in(self, record: WatchRecord) -> None:
        """Let every thread's links record the calls that wait in `record`."""
        self.record = record.replacing(self.record)
        for thread, links in {"main": self.main.links, **self.purpose_links}.items():
            for link in links:
                link.endpoint.waits.entry = record.entry(thread)
        for world in self.sub_worlds:
            world.record_in(record)
