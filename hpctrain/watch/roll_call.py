"""The last sentence of a hang's report: where ranks wait, and which rank the bug is on.

    3 of 4 ranks wait at sendrecv (train.py:9 main); rank 1 is where the bug is (stopped or dead)

A rank is blamed if the call of a waiting rank names it as peer, or involves all ranks. Records do
not hold the members of a group, so other ranks that do not wait are named without blame.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from hpctrain.core.names import counted, format_ranks
from hpctrain.watch.layout import Snapshot

NO_RECORD = "no record"  #: the state of a rank whose record was lost, or never made
MAX_PLACES, MAX_RANKS = 3, 32


def make_roll_call(waiting: Sequence[Snapshot], blocking: Mapping[int, str], size: int) -> str:
    """Return the sentence on a job of `size` ranks.

    `blocking`: ranks that do not wait, and their states in words.
    """
    if not waiting:
        return f"0 of {counted(size, 'rank')} wait; where the bug is cannot be known"
    places = _group_by_place(waiting)
    peers = {call.peer for snapshot in waiting for call in snapshot.waiting_calls}
    blamed = {rank: state for rank, state in blocking.items() if {rank, -1} & peers}
    others = [rank for rank in blocking if rank not in blamed]
    sentence = f"{_describe_places(places, size)}; {_blame(blamed, len(places))}"
    if others:
        sentence += f"; {_ranks_text(others)} {'do' if len(others) > 1 else 'does'} not wait either"
    return sentence


def _group_by_place(waiting: Sequence[Snapshot]) -> list[tuple[str, list[int]]]:
    """Return each operation and line with the ranks that wait there, the most ranks first.

    The line is the user's: ranks in one collective wait for different messages.
    """
    places: dict[str, list[Snapshot]] = defaultdict(list)
    for snapshot in waiting:
        places[snapshot.line.partition(",")[0]].append(snapshot)
    groups = [
        (f"{_operation(snapshots[0])} ({line})", [snapshot.rank for snapshot in snapshots])
        for line, snapshots in places.items()
    ]
    return sorted(groups, key=lambda group: -len(group[1]))


def _operation(snapshot: Snapshot) -> str:
    return min(snapshot.waiting_calls, key=lambda call: call.start_s).operation


def _describe_places(places: Sequence[tuple[str, list[int]]], size: int) -> str:
    (place, ranks), *rest = places
    text = f"{len(ranks)} of {counted(size, 'rank')} {'wait' if len(ranks) > 1 else 'waits'}"
    text += f" at {place}"
    for place, ranks in rest[: MAX_PLACES - 1]:
        text += f", {_ranks_text(ranks)} at {place}"
    return text + f", others at {len(places) - MAX_PLACES} more" * (len(places) > MAX_PLACES)


def _blame(blamed: Mapping[int, str], place_count: int) -> str:
    if not blamed:
        cause = "the calls differ" if place_count > 1 else "compare peers, lengths and the network"
        return f"which rank the bug is on cannot be known: {cause}"
    ranks, states = sorted(blamed), ", ".join(dict.fromkeys(blamed.values()))
    if NO_RECORD in blamed.values():
        return f"where the bug is cannot be known: see {_ranks_text(ranks)} ({states})"
    verb = "are" if len(ranks) > 1 else "is"
    return f"{_ranks_text(ranks)} {verb} where the bug is ({states})"


def _ranks_text(ranks: Sequence[int]) -> str:
    more = len(ranks) - MAX_RANKS
    return format_ranks(sorted(ranks)[:MAX_RANKS]) + f" and {more} more" * (more > 0)
