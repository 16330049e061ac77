"""Gather the answers of all ranks; report a rank that gives none.

Rank 0 receives the answers one by one, so that its record in the watch names the rank it waits for.
Where all nodes share a folder, each rank keeps its record there, and the report names the silent
ranks and those that wait for them. Rank 0 then prints the result so far, and aborts the job.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain import abort
from hpctrain.core.errors import UsageError
from hpctrain.transport.link import Link
from hpctrain.watch import Watch, write_report
from hpctrain.world import World

SPEAK_FIRST_S = 3.0  # for rank 0, before another rank reports a hang
Tell = Callable[[str], None]  #: prints the report, on rank 0


def to_first(link: Link, answer: Any) -> list[Any]:
    """Return every rank's `answer`, which JSON can hold, on rank 0; nothing elsewhere."""
    payload = np.frombuffer(json.dumps(answer).encode(), np.uint8)
    if link.rank:
        link.isend(np.array([payload.size]), 0).wait()
        link.isend(payload, 0).wait()
        return []
    return [answer, *(_from(link, rank) for rank in range(1, link.size))]


def _from(link: Link, rank: int) -> Any:
    size = np.empty(1, np.int64)
    link.irecv(size, rank).wait()
    text = np.empty(int(size[0]), np.uint8)
    link.irecv(text, rank).wait()
    return json.loads(text.tobytes())


@contextmanager
def watched(world: World, folder: Path | None, limit_s: float, tell: Tell) -> Iterator[None]:
    """End the job when a rank keeps others waiting; with `folder`, name it; collective."""
    on_hang = partial(_hung, world.rank, folder, tell)
    with ExitStack() as stack:
        try:
            if folder is None:
                raise UsageError("no folder that all see")
            stack.enter_context(world.watched(folder, limit_s, on_hang))
        except UsageError:
            assert world.record is not None
            watch = Watch(world.record, None, limit_s, on_hang, first_step_factor=1)
            stack.callback(watch.stop)
        yield


def _hung(rank: int, folder: Path | None, tell: Tell, report: str) -> None:
    try:
        if rank == 0:
            tell(report)
        else:
            time.sleep(SPEAK_FIRST_S)
            if folder is None or write_report(folder / "watch", report):
                print(report, file=sys.stderr, flush=True)
    finally:
        abort.abort(1)
