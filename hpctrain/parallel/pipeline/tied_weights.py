"""Parameters that stages share: the owner sends values before a pass, and receives gradients.

    stage 0, owner     table --values------> stage S-1: a copy, outside of the arena
                       table <--gradients--- stage S-1: the sum over the micro-batches of the step

One message each way per step and use: 2n bytes; none between stages of a rank. The owner adds the
sums in the order of backward, last layer first, as one rank does. The copies have no state of an
optimizer, and cannot drift.
"""

from __future__ import annotations

from collections.abc import Mapping

from hpctrain import nn
from hpctrain.core.xp import Array, namespace
from hpctrain.nn.part import GradientSums
from hpctrain.parallel.pipeline.stages import StagePlan
from hpctrain.transport.link import Link, Request, wait_all


class TiedWeights:
    """The parameters that stages of a pipeline share, as a rank sees them."""

    def __init__(self, link: Link, plan: StagePlan, model: nn.Model, like: Array):
        """Allocate this rank's copies, in the memory of `like`."""
        self._link, self._placement = link, plan.placement
        self._tensors = tuple(plan.shared_tensors(model))
        #: copies of the parameters of other ranks
        self.copies = {
            name: namespace(like).empty(model.parameters[name].shape, like.dtype)
            for name, owner, uses in self._tensors
            if link.rank in self._user_ranks(owner, uses)
        }
        self._pending_sends: list[Request] = []

    def update_copies(self, params: Mapping[str, Array]) -> None:
        """Send the values of owned parameters, and receive `copies`."""
        for name, owner, uses in self._tensors:
            if self._placement[owner] == self._link.rank:
                for user in self._user_ranks(owner, uses):
                    self._send_values(params[name], user)
        for name, owner, _ in self._tensors:
            if name in self.copies:
                self._link.irecv(self.copies[name], self._placement[owner]).wait()

    def reduce(self, sums: Mapping[int, GradientSums], params: Mapping[str, Array]) -> None:
        """Send this rank's sums of gradients to the owners of the parameters, which add them."""
        own_totals = {(layer, name): x for s in sums.values() for layer, name, x in s.totals()}
        for name, owner, uses in self._tensors:
            totals = []
            for layer, stage in uses:
                if owner not in sums:
                    if stage in sums:
                        self._send_values(own_totals[layer, name], self._placement[owner])
                elif stage in sums:
                    totals.append((layer, own_totals[layer, name]))
                else:
                    total = namespace(params[name]).empty_like(params[name])
                    self._link.irecv(total, self._placement[stage]).wait()
                    totals.append((layer, total))
            if owner in sums:
                sums[owner].finish(name, totals)

    def wait(self) -> None:
        """Wait until all values of this rank are sent: they may be overwritten then."""
        wait_all(self._pending_sends)
        self._pending_sends = []

    def _send_values(self, x: Array, rank: int) -> None:
        self._pending_sends.append(self._link.isend(x, rank))

    def _user_ranks(self, owner: int, uses: tuple[tuple[int, int], ...]) -> list[int]:
        """Return the ranks that need a copy, ascending."""
        return sorted({self._placement[stage] for _, stage in uses} - {self._placement[owner]})
