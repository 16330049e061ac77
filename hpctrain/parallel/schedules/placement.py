"""Placements of stages on ranks, as `placement[stage] -> rank`; three ranks:

straight   rank 0 1 2          stage 0 1 2          one stage per rank
looped     rank 0 1 2 0 1 2    stage 0 1 2 3 4 5    the last rank sends to the first
vee        rank 0 1 2 2 1 0    stage 0 1 2 3 4 5    two stages per rank; rank 0 has both ends
"""

from __future__ import annotations

Placement = tuple[int, ...]


class Placed:
    """Stages on ranks: stage s is computed by rank `placement[s]`."""

    placement: Placement

    @property
    def stages(self) -> int:
        """The number of stages, S."""
        return len(self.placement)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages of `rank`, in the order of the forward pass."""
        return tuple(stage for stage, owner in enumerate(self.placement) if owner == rank)


def straight(ranks: int) -> Placement:
    """Return the placement of stage s on rank s."""
    return tuple(range(ranks))


def looped(ranks: int, stages_per_rank: int) -> Placement:
    """Return the placement of stage s on rank s modulo P."""
    return tuple(range(ranks)) * stages_per_rank


def vee(ranks: int) -> Placement:
    """Return the placement of P stages down the ranks and of P up again."""
    return (*range(ranks), *reversed(range(ranks)))
