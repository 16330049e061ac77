"""A World goes on with the ranks that are left after a loss."""

from __future__ import annotations

from dataclasses import replace

from hpctrain.core.errors import LostRankError
from hpctrain.world.world import MADE_TOGETHER, World


def survive(world: World) -> None:
    """Rebuild `world` from the surviving ranks after a LostRankError; collective over them.

    Afterwards `world` has the surviving ranks: rank, size and links are new, and older engines and
    sub-worlds must not be used any more. A sleeping spare keeps its World. Raises LostRankError if
    another rank is lost meanwhile: then call again.
    """
    assert world.job is not None
    world.job.link.endpoint.survivors.revoke()
    world.link.endpoint.survivors.dissolve()
    link = world.job.regroup()
    try:
        if link is not None:
            members = replace(
                world,
                link=link,
                places=world.job.of_peers(world.job.places),
                bindings=world.job.of_peers(world.job.bindings),
                main=MADE_TOGETHER,
            )
            members.threads.record = world.threads.record
            vars(world).update(vars(members))
        world.job.on_regroup()
    except LostRankError:
        if link is not None:
            link.endpoint.survivors.dissolve()
        raise
