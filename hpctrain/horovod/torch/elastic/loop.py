"""A function of the user's is called again, from its last commit, after a loss of ranks.

    rank 0    sync  train ... commit ... | error   renew, restore   on_reset  sync  train ...
    rank 1    sync  train ... commit ..X |
    rank 2    sync  train ... commit ... | error   renew, restore   on_reset  sync  train ...

Every operation fails after a loss, on every rank. `renew`: the ranks that are left get new numbers
and new engines. At the end ranks wait for each other: if one was lost meanwhile, all begin again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from hpctrain.core.errors import LostRankError
from hpctrain.core.printing import say
from hpctrain.horovod.torch import job
from hpctrain.horovod.torch import process_sets as sets
from hpctrain.horovod.torch.named.entries import HorovodInternalError
from hpctrain.torch.job import go_on_after_loss


class HostsUpdatedInterrupt(RuntimeError):  # noqa: N818  (Horovod's name)
    """Hosts were added or removed; hpctrain adds none to a running job, and never raises it.

    Where a script raises it on all ranks, `run` calls its function again, without `restore`.
    """

    def __init__(self, skip_sync: bool = False):
        super().__init__("hosts were updated")
        self.skip_sync = skip_sync  #: whether every rank has the same state


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return `func` as a function that is called again after each loss of ranks; a decorator.

    Its first argument is a `State`, which is synchronized before each call, and restored to the
    last commit after a loss. Then `rank()` and `size()` are new, the callbacks of the state are
    called, and process sets must be added again. It returns once all ranks have returned.

    Needs `hpctrain launch --elastic` (Open MPI 5 with ULFM) and `hvd.init()` without `comm`; else a
    loss ends the job, as it does before and after the function, and with fewer ranks than
    `--min-ranks`. An error that no lost rank has caused is raised: a second try would meet it, too.
    """

    @wraps(func)
    def call(state: Any, *args: Any, **kwargs: Any) -> Any:
        present = job.state()
        present.is_elastic, is_first, syncs = present.world.job is not None, True, True
        try:
            while True:
                try:
                    if not is_first:
                        state.on_reset()
                    if syncs:
                        state.sync()
                    result = func(state, *args, **kwargs)
                    if present.is_elastic:
                        present.world.link.endpoint.survivors.agree()
                    return result
                except HostsUpdatedInterrupt as interrupt:
                    syncs = not interrupt.skip_sync
                except (HorovodInternalError, LostRankError) as error:
                    if not isinstance(error, LostRankError) and not job.has_lost():
                        raise
                    go_on_after_loss(present.world, job.close_engines, _renew, "hvd.elastic.run")
                    state.restore()
                    syncs = True
                is_first = False
        finally:
            present.is_elastic = False

    return call


def _renew() -> None:
    """Make what the ranks that are left need; collective over them."""
    if sets.forget() and job.rank() == 0:
        say(
            "hpctrain.horovod: after a loss of ranks process sets are not registered any more: "
            "add them in the function of hvd.elastic.run, or in a reset callback",
            err=True,
        )
    job.add_engine(0, range(job.size()))
    sets.set_up(())
    job.renew()
