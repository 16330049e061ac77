"""Ranks that are threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from hpctrain.core.errors import RankKilled
from hpctrain.transport.threads.hub import Hub, Job
from hpctrain.transport.threads.link import LocalLink

T = TypeVar("T")
GRACE_S = 0.5  # between the first rank that fails and the end of the others' waits


def run_ranks(
    size: int,
    function: Callable[[LocalLink], T],
    timeout_s: float = 60.0,
    kills: dict[int, int] | None = None,
) -> list[T]:
    """Run `function(link)` as `size` ranks, each a thread; return the results in rank order.

    The error of the first rank that raises is raised here. The other ranks have GRACE_S to end by
    themselves, since ranks may agree to fail together; then their waits are ended. `kills`: ranks
    that are killed in their n-th call of a link, {rank: n}; their result is None.
    """
    job = Job(kills)
    hub = Hub(range(size), timeout_s, job)
    results: list[Any] = [None] * size
    outcomes: SimpleQueue[BaseException | None] = SimpleQueue()

    def run_rank(rank: int) -> None:
        try:
            results[rank] = function(LocalLink(hub, rank))
            outcomes.put(None)
        except RankKilled:
            outcomes.put(None)
        except BaseException as error:  # raised again below
            outcomes.put(error)
        if job.survives:  # those that are left must not wait for this one
            job.kill(rank)

    for rank in range(size):
        threading.Thread(target=run_rank, args=(rank,), daemon=True).start()
    try:
        error = _first_error(outcomes, hub)
    except BaseException:  # a signal; the ranks must not wait until their time limit
        hub.fail()
        raise
    if error is not None:
        raise error
    return results


def _first_error(outcomes: SimpleQueue[BaseException | None], hub: Hub) -> BaseException | None:
    """Wait for all ranks; return the error of the first that failed, or None."""
    first_error = None
    for _ in hub.members:
        try:
            error = outcomes.get(timeout=None if first_error is None else GRACE_S)
        except Empty:
            hub.fail()
            error = outcomes.get()
        first_error = first_error or error
    return first_error
