"""The ranks of a process group, and their links.

Waits poll for a moment and then nap, since ranks of users' programs share cores with their data
loaders.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from zlib import crc32

from hpctrain.collectives import Group
from hpctrain.collectives.dispatch import Choice, Choices
from hpctrain.collectives.native import native
from hpctrain.torch.begun import share_begun
from hpctrain.torch.job import end_after_loss
from hpctrain.torch.progress import Progress
from hpctrain.transport.mpi.calls import calls_of
from hpctrain.transport.mpi.tagged import TaggedMessages
from hpctrain.transport.pace import SPIN_S
from hpctrain.world import World

_MAX_GROUP_TAG = 16_383  # two tags for each group, below the 32,767 that every MPI has


class Communicator:
    """One rank's view of a process group."""

    def __init__(self, job: World, ranks: Sequence[int], name: str, limit_s: float, threaded: bool):
        """Make the links of `ranks` of `job`; collective over these.

        `limit_s`: of a wait for other ranks. `threaded`: whether a thread begins asynchronous
        collectives at once, since it has a core or several nodes take their time.
        """
        assert job.threads.record is not None  # ranks are processes
        self._job, self.ranks, self.limit_s = job, tuple(ranks), limit_s
        self.trace = job.trace
        self._tag = 2 * (crc32(name.encode()) % _MAX_GROUP_TAG)
        self._threaded = threaded and len(self.ranks) > 1
        link = job.link.create_group(self.ranks, self._tag)
        self.messages = TaggedMessages(link, partial(end_after_loss, job))
        self.entry = job.threads.record.entry("torch")
        self.world = make_world(job, self.ranks, self._tag + 1, self._threaded)
        self.group = self.world.main
        self.progress = Progress(
            self.world,
            job.threads.record,
            limit_s,
            partial(end_after_loss, job),
            begun=None if threaded else share_begun(self.world),
            has_thread=job.concurrent and len(self.ranks) > 1,
            trace=job.trace,
        )
        self.set_limit(limit_s)

    def set_limit(self, limit_s: float) -> None:
        """Let waits for other ranks that begin from now on end after `limit_s`."""
        self.limit_s = self.progress.limit_s = limit_s
        nap_while_waiting(self.group, limit_s, self._threaded)

    def close(self) -> None:
        """Finish what is under way and free the links; all ranks of the group must call."""
        self.progress.close()
        self._job.threads.sub_worlds.remove(self.world.threads)
        self.group.free()
        self.messages.free()


def make_world(job: World, ranks: Sequence[int], tag: int, threaded: bool) -> World:
    """Return the World of `ranks` of `job`, for waits with naps; collective over them."""
    world = job.subset(ranks, tag)
    main = replace(world.main, choices=_without_native(world.main.choices))
    if threaded:  # polls would hold the interpreter's lock
        main = replace(main, spins=False)
    return replace(world, main=main)


def nap_while_waiting(group: Group, limit_s: float, threaded: bool) -> None:
    """Let the waits of `group` nap after a moment, and end after `limit_s`."""
    spin_s = 0.0 if threaded else SPIN_S  # polls of a thread would disturb compute
    for link in group.links:
        calls_of(link).nap_after(spin_s, limit_s)


def _without_native(choices: Choices | None) -> Choices | None:
    """Return `choices` without MPI's own all-reduce, which waits without a nap."""
    if choices is None:
        return None

    def replaced(choice: Choice) -> Choice:
        default, in_memory = (
            choice.non_mpi if function is native else function
            for function in (choice.default, choice.in_node_memory)
        )
        return Choice(default, in_memory, choice.non_mpi)

    return replace(choices, choices=tuple(map(replaced, choices.choices)))
