"""One array of parameters per node: each rank sums and updates its part in a single pass.

Gradients and the array of parameters lie in memory shared by the ranks of a node. On a node of
three ranks, `g` the gradient of a rank's share, `G` the sum, `w` old and `W` new parameters:

    rank   gradients    block by block: sum and update    the array of all three
     0     g g g        G . .  ->  W . .                  W W W
     1     g g g        . G .  ->  . W .
     2     g g g        . . G  ->  . . W

A block of sums is still in the cache when the optimizer reads it, and is stored nowhere. A node
reads (P + 1) n bytes and the optimizer's state from memory, and writes n bytes and the state: once,
where P replicas read and write it P times. Nothing is gathered and nothing is written back.

Several nodes: parts are summed in the node, then over the nodes by the ranks that have the same
local rank, and each node makes the same update of the same bytes. There are as many parts as the
smallest node has ranks; further ranks of larger nodes wait. Norms need all sums before the first
update: there gradients are summed first, then updated. Parts begin at blocks of the optimizer, so
that the update does not depend on the number of ranks.

Three synchronizations order all reads and writes: the ranks' vote after backward (all gradients are
complete), a barrier of the node after the update (all parameters are), and the next vote.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from hpctrain.checkpoint import Piece
from hpctrain.collectives import AllReduceFunction, Group
from hpctrain.collectives.chunks import bounds
from hpctrain.core.errors import UsageError
from hpctrain.engines.engine import Times
from hpctrain.engines.saved_state import SavedState, range_pieces, request_range
from hpctrain.engines.synchronous.update import PartwiseUpdate, Update, gather_rows_timed
from hpctrain.gradients.arena import shift_slots
from hpctrain.gradients.replica import Replica
from hpctrain.optim import Optimizer
from hpctrain.optim.optimizer import BLOCK_ELEMENTS
from hpctrain.world import World

#: Elements summed and updated at once: with their state they stay in the second-level cache.
PASS_ELEMENTS = 32_768


class NodeSharedUpdate(Update):
    """Sums gradients and updates the parameters shared by the ranks of a node."""

    def __init__(
        self,
        world: World,
        replica: Replica,
        optimizer: Optimizer,
        allreduce: AllReduceFunction,
        times: Times,
    ):
        """Move the parameters, equal on all ranks, to memory shared by the ranks of a node.

        `allreduce` sums over nodes. Collective; raises UsageError, on all ranks, if memory cannot
        be shared.
        """
        group = world.main
        self._node, self._across = world.node, Group(world.across, group.scratch)
        self._link, self._allreduce, self._optimizer = group.link, allreduce, optimizer
        self._times, self._wait = times, partial(times.wait, world.trace)
        is_alone, param = world.node.size == 1, replica.arena.param
        shared_param = None if is_alone else world.memory.common_zeros(param.size, param.dtype)
        world.on_all_ranks(
            lambda: _check_shared(is_alone or shared_param is not None, param.nbytes)
        )
        if shared_param is not None:
            replica.move(param=shared_param)
        self._arena = arena = replica.arena
        rank, parts = self._node.rank, min(map(len, group.nodes))
        offsets = bounds(arena.param.size, parts, BLOCK_ELEMENTS)
        # Ranks beyond `parts`, as some nodes have, get an empty range.
        self._own = own = slice(*offsets[rank : rank + 2]) if rank < parts else slice(0, 0)
        self._param, self._slots = arena.param[own], shift_slots(own.start, arena.layout)
        self.state = optimizer.init(self._param)
        grads = [x[own] for x in world.memory.neighbours(arena.grad) or [arena.grad]]
        block_slices = _blocks_of_range(self._param.size)
        self._blocks = [[x[range_slice] for x in grads] for range_slice in block_slices]
        self._block_update = PartwiseUpdate(
            optimizer, self.state, self._param, self._slots, block_slices
        )
        self._sum = np.empty(min(PASS_ELEMENTS, self._param.size), self._param.dtype)
        buffers = group.node_buffers
        self._node_barrier = self._node.barrier if buffers is None else buffers.flags.exchange
        self._single_pass = world.across.size == 1 and not optimizer.needs_norms

    @property
    def wire_s(self) -> float:
        """The time of sums across nodes since the start."""
        return self._times.wire_s

    def mark_ready(self, name: str) -> None:
        """Do nothing: gradients are summed after backward."""

    def wait(self) -> np.ndarray:
        """Return this rank's own gradient: the update forms the sum."""
        return self._arena.grad

    def __call__(self, gradient: np.ndarray) -> None:
        """Update with every rank's gradient; the gradients are complete after the vote."""
        if not self._single_pass:
            return self._sum_then_update(gradient[self._own])
        for number in range(len(self._blocks)):  # while a block is in the cache; sums are not kept
            self._block_update(number, self._sum_block(number))
        self._block_update.count()

    def release(self) -> None:
        """Wait until all ranks of the node have updated and have read all gradients."""
        with self._wait("wait for parameters"):
            self._node_barrier()

    def pieces(self) -> list[Piece]:
        """Return this rank's part of the state; each node saves an equal part of a range."""
        across_link = self._across.link
        offsets = bounds(self._param.size, across_link.size, BLOCK_ELEMENTS)
        range_slice = slice(offsets[across_link.rank], offsets[across_link.rank + 1])
        return range_pieces(self._arena, self.state, self._own.start, range_slice, self._link)

    def load(self, saved: SavedState) -> None:
        """Request the parameters, as all ranks of the node do, and this rank's optimizer state."""
        request_range(self._arena, self.state, self._own, saved)

    def close(self) -> None:
        """Do nothing: there are no threads."""

    def _sum_block(self, number: int) -> np.ndarray:
        """Return the sum of a block over the node, in a buffer that the next call overwrites."""
        first, *other_grads = self._blocks[number]
        total = self._sum[: first.size]
        if not other_grads:
            total[...] = first
            return total
        np.add(first, other_grads[0], out=total)
        for grad in other_grads[1:]:
            total += grad
        return total

    def _sum_then_update(self, total: np.ndarray) -> None:
        """Sum `total`, this rank's range of its gradient, over all ranks; update with the sum."""
        for number, range_slice in enumerate(_blocks_of_range(total.size)):
            total[range_slice] = self._sum_block(number)
        if self._across.link.size > 1 and total.size:
            with self._wait("sum across nodes", on_wire=True, bytes=total.nbytes):
                self._allreduce(self._across, total, np.add)
        gather = partial(gather_rows_timed, self._node, self._arena, self._wait)
        self._optimizer.update(total, self.state, self._param, self._slots, gather)


def _check_shared(is_shared: bool, nbytes: int) -> None:
    if not is_shared:
        raise UsageError(
            f"[engine] share_parameters: expected {nbytes} bytes of memory that all ranks of this "
            "node see, seen none: neither memfd_create, /dev/shm nor MPI gives it; free memory "
            "there, or train without share_parameters"
        )


def _blocks_of_range(size: int) -> list[slice]:
    return [slice(i, min(i + PASS_ELEMENTS, size)) for i in range(0, size, PASS_ELEMENTS)]
