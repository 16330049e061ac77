"""A World: ranks, hosts, device, links, node memory; and the Membership that renews it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import numpy as np
import numpy.typing

from hpctrain import collectives
from hpctrain.collectives import Group, group_over_nodes
from hpctrain.core.errors import HpctrainError, LostRankError, RankKilled, UsageError
from hpctrain.transport import abort
from hpctrain.transport.device import gpus
from hpctrain.transport.link import Link
from hpctrain.transport.paths import STAGED_VERDICT, RankPlace, Verdict
from hpctrain.transport.placement.check import RankBinding
from hpctrain.transport.shared_memory.cuda_ipc import shared_gpu_memory
from hpctrain.transport.shared_memory.host import NodeMemory
from hpctrain.tuning.gpu_layout import GpuLayout
from hpctrain.tuning.select import add_choices
from hpctrain.watch.trace import Trace
from hpctrain.world.agreement import AgreeingRanks
from hpctrain.world.calls.bound_calls import forget_calls
from hpctrain.world.grid import Grid
from hpctrain.world.job import Job
from hpctrain.world.rank_threads import RankThreads

MADE_TOGETHER: Any = None  #: the ranks make this field together when they make their World


@dataclass(frozen=True, repr=False, eq=False)
class World(AgreeingRanks):
    """A group of ranks that work together, as one member sees the group; it never changes."""

    concurrent: bool = True  #: whether several threads may communicate at once
    transport: str = "local"
    job_size: int = 1  #: number of processes that end with this one
    gpu: gpus.Gpu | None = None  #: the one this rank computes on; None: on its cores
    verdict: Verdict = STAGED_VERDICT  #: the path of GPU memory between ranks
    bindings: tuple[RankBinding, ...] = ()  #: of each rank at the start; none among threads
    trace: Trace = field(default_factory=Trace)  #: of every thread's spans
    parent: World | None = None  #: the World that this sub-world was split from
    grid: Grid | None = None  #: if these are the ranks of a mesh with the same layers
    source: int | None = 0  #: the rank whose parameters engines begin with; None: they load a state
    membership: Membership | None = None  #: this rank's, if ranks survive losses
    main: Group = MADE_TOGETHER  #: all ranks, for the main thread; its scratch is kept
    voters: Group = MADE_TOGETHER  #: the ranks that agree on each step: `main`, or a whole mesh
    memory: NodeMemory = MADE_TOGETHER  #: memory shared by the ranks of this node
    gpus: GpuLayout | None = MADE_TOGETHER  #: of each rank, for `auto`; None unless each has one
    threads: RankThreads = MADE_TOGETHER  #: the links of this rank's threads

    def __post_init__(self) -> None:
        """Split the ranks by node, share memory, and fix the choices of `auto`; collective.

        A changed copy, by `replace`, has the same objects.
        """
        if self.main is not MADE_TOGETHER:
            return
        main = group_over_nodes(self.link, self.hosts)
        assert main.node is not None
        gather = partial(collectives.all_gather_bytes, main.node)
        memory = NodeMemory(main.node, gather)
        node_gpus = [place.gpu for place in self.places if place.node == self.host]
        memory.gpu = shared_gpu_memory(main.node, gather, node_gpus)
        gpu_layout = None
        if self.gpu is not None and all(place.gpu for place in self.places):
            shares, name = memory.gpu is not None and memory.gpu.shares, self.gpu.ordinal
            gpu_layout = GpuLayout(gpus.product_name(name), self.places, self.verdict, shares)
        spins = self.transport == "mpi"  # threads of one process must yield to each other
        main = add_choices(replace(main, memory=memory, spins=spins), spins, gpu_layout)
        earlier_record = self.threads.record if self.threads is not MADE_TOGETHER else None
        threads = RankThreads(main, self.hosts, earlier_record)
        vars(self).update(main=main, voters=main, memory=memory, gpus=gpu_layout, threads=threads)

    @property
    def rank(self) -> int:
        return self.link.rank

    @property
    def size(self) -> int:
        return self.link.size

    @property
    def job(self) -> Job | None:
        """The ranks that are left, and spares, if the ranks go on after they lose other ranks."""
        return None if self.membership is None else self.membership.job

    @property
    def is_spare(self) -> bool:
        """Whether this rank sleeps alone in this World until it takes the place of a lost one."""
        return self.job is not None and self.job.is_spare

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

    def _over(self, link: Link) -> World:
        """Return the World of the ranks of `link`, a subset of this World; collective over it."""
        texts = collectives.all_gather_bytes(link, str(self.rank).encode())
        ranks = [int(text) for text in texts]
        world = replace(
            self,
            link=link,
            places=tuple(self.places[rank] for rank in ranks),
            bindings=tuple(self.bindings[rank] for rank in ranks if self.bindings),
            trace=Trace(),
            parent=self,
            grid=None,
            membership=None,
            main=MADE_TOGETHER,
        )
        self.threads.sub_worlds.append(world.threads)
        return world

    def split(self, color: int, key: int | None = None) -> World:
        """Return the World of the ranks that give the same `color`; all ranks must call.

        Its ranks are ordered by `key`, by default by their rank here. Sub-worlds train different
        models at once: `Trainer(..., world=world.split(world.rank % 2))`. An uncaught error on a
        rank of a sub-world ends the whole job.
        """
        return self._over(self.link.split(color, self.rank if key is None else key))

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
        return self._over(self.link.create_group(tuple(ranks), tag))

    def fail(self, error: BaseException) -> None:
        """End the job because of an error in a thread other than the main thread.

        Not if a rank was lost: the main thread then gets that error, too.
        """
        if self.job is not None and isinstance(error, LostRankError | RankKilled):
            return
        try:
            if self.threads.on_failure is not None:
                self.threads.on_failure(error)
        finally:
            if not self.link.endpoint.waits.interrupt_others():
                self.abort(error)

    def abort(self, error: BaseException) -> None:
        """Print this rank's error, and abort the job: the other ranks wait for this one."""
        if self.parent is not None:
            return self.parent.abort(error)
        ranks = self.membership or self
        abort.report(error, f"rank {ranks.rank} on {self.host}", ranks.rank, ranks.size)
        if self.job_size > 1:
            abort.abort(error.exit_code if isinstance(error, HpctrainError) else 1)


class Membership:
    """A rank's place in a job that survives lost ranks, and its World, a new one after each loss.

    `init` returns it in such a job: it has every attribute of the present World. A spare sleeps in
    a World of its own; `rank` is then its number in the job, above the World's ranks.
    """

    __class__ = World  # type: ignore[assignment]  # to isinstance it is one, for users' scripts

    def __init__(self, job: Job, **facts: Any):
        """Make the first World, with `facts`; collective over the job."""
        self.job = job
        self.on_renewal: Callable[[], None] = lambda: None  #: called on each rank of the job
        self.world = World(job.group(job.peers), job.of_peers(job.places), membership=self, **facts)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "world":  # of a copy under way, which has no World yet
            raise AttributeError(name)
        return getattr(self.world, name)

    def __repr__(self) -> str:
        return repr(self.world)

    @property
    def rank(self) -> int:
        return self.job.number if self.job.is_spare else self.world.rank

    @property
    def size(self) -> int:
        return len(self.job.members)

    def require(self, min_ranks: int, unit: int) -> None:
        """End the job at a loss that leaves fewer ranks; `unit` ranks hold a replica together."""
        self.job = replace(self.job, min_ranks=max(self.job.min_ranks, min_ranks), unit=unit)

    def __iter__(self) -> Iterator[World]:
        """Yield the World, and a new one each time that the caller comes back after a loss."""
        yield self.world
        while True:
            with suppress(LostRankError):
                self.renew()
                yield self.world

    def renew(self) -> None:
        """Make the World of the ranks that are left after a LostRankError; collective over them.

        Engines and sub-worlds of the earlier one must not be used any more. A sleeping spare keeps
        its World. Raises LostRankError if another rank is lost meanwhile, then call again, and
        RecoveryError if too few are left.
        """
        forget_calls()  # they use the earlier links
        self.job.link.endpoint.survivors.revoke()
        self.world.link.endpoint.survivors.dissolve()
        self.job = job = self.job.without_lost()
        link = job.link_members()
        try:
            if link is not None:
                places = job.of_peers(job.places)
                self.world = replace(
                    self.world, link=link, places=places, bindings=(), main=MADE_TOGETHER
                )
            self.on_renewal()
        except LostRankError:
            if link is not None:
                link.endpoint.survivors.dissolve()
            raise


def make_world(link: Link, places: tuple[RankPlace, ...], job: Job | None, **facts: Any) -> World:
    """Return the World of the ranks of `link`, or the Membership of this rank in `job`; collective.

    A Membership serves as a World: it has every attribute of the present one.
    """
    return World(link, places, **facts) if job is None else cast(World, Membership(job, **facts))
