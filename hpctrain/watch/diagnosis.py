"""The state of a running, hung or dead job, from the records of its ranks.

alive      a heartbeat in the last 3 s, in the memory of this host
stopped    its process is there, without a heartbeat
dead       its process is not there, or its job has ended
closed     the record was closed: at the end of the run, or by an error that the rank reported
unknown    the records of its node lie in the memory of another host, or were lost with it
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.core.atomic import process_identity
from hpctrain.watch.layout import Call, Snapshot
from hpctrain.watch.node_file import Node, read_copy, read_memory, read_nodes

ALIVE, STOPPED, DEAD, CLOSED, UNKNOWN = "alive", "stopped", "dead", "closed", "unknown"
SILENT_S = 3.0  #: three heartbeats


@dataclass(frozen=True)
class RankState:
    """The state of a rank; its record as of the time `as_of_s`, None if it cannot be read."""

    rank: int
    node: str
    life: str
    as_of_s: float = 0.0
    record: Snapshot | None = None

    @property
    def step(self) -> int | None:
        """The step that it is in, or was in."""
        return None if self.record is None else self.record.step

    @property
    def waiting_calls(self) -> list[Call]:
        """The calls in which the rank waits, or waited when it died."""
        return self.record.waiting_calls if self.record else []

    @property
    def last_call(self) -> Call | None:
        """The longest call in which the rank waits, else its last call."""
        if self.waiting_calls:
            return min(self.waiting_calls, key=lambda call: call.start_s)
        return self.record.history[-1] if self.record and self.record.history else None


@dataclass(frozen=True)
class Diagnosis:
    """The ranks' states, and the conclusions that follow."""

    ranks: tuple[RankState, ...]
    unread_nodes: tuple[str, ...]  #: whose records lie neither here nor in the run's folder

    @property
    def behind(self) -> list[int]:
        """The ranks in the earliest step, unless all ranks are in the same step."""
        steps = {state.rank: state.step for state in self.ranks if state.step is not None}
        first_step = min(steps.values(), default=0)
        ranks_behind = [rank for rank, step in steps.items() if step == first_step]
        return ranks_behind if len(ranks_behind) < len(steps) else []

    @property
    def died_in_call(self) -> list[int]:
        """The dead ranks that were in an operation."""
        return [s.rank for s in self.ranks if s.life == DEAD and s.waiting_calls]

    @property
    def silent_first(self) -> list[int]:
        """The ranks whose last heartbeat is older than other heartbeats on their node."""
        heartbeats = [(s.node, s.rank, s.record.heartbeat) for s in self.ranks if s.record]
        latest_by_node: dict[str, float] = {}
        for node, _, heartbeat in heartbeats:
            latest_by_node[node] = max(heartbeat, latest_by_node.get(node, heartbeat))
        return [
            rank
            for node, rank, heartbeat in heartbeats
            if latest_by_node[node] - heartbeat > SILENT_S / 2
        ]

    @property
    def waited_for(self) -> list[int]:
        """The ranks that other ranks wait for, and that do not wait; empty if all ranks wait."""
        peers = {call.peer for state in self.ranks for call in state.waiting_calls}
        silent_ranks = self.silent_first  # such a rank may have been in a call, but ends no other's
        return [
            state.rank
            for state in self.ranks
            if (state.rank in peers or -1 in peers)
            and (not state.waiting_calls or state.life == STOPPED or state.rank in silent_ranks)
        ]


def diagnose(directory: Path, now_s: float, is_running: bool) -> Diagnosis:
    """Return the state of the job whose records belong to the folder `directory`.

    `is_running`: whether the job has not ended. Raises FileError if nodes.json is damaged.
    """
    ranks: list[RankState] = []
    unread_nodes = []
    for node in read_nodes(directory):
        in_memory = read_memory(node, history=True)
        records = in_memory or read_copy(directory, node, history=True) or []
        if in_memory is None and not node.copy(directory).exists():
            unread_nodes.append(node.name)
        ranks += _rank_states(node, records, now_s, in_memory is not None, is_running, unread_nodes)
    return Diagnosis(tuple(sorted(ranks, key=lambda state: state.rank)), tuple(unread_nodes))


def _rank_states(
    node: Node,
    records: Sequence[Snapshot],
    now_s: float,
    in_memory: bool,
    is_running: bool,
    unread_nodes: Sequence[str],
) -> list[RankState]:
    """Return the states of a node's ranks; a copy is as old as the latest heartbeat in it."""
    by_rank = {record.rank: record for record in records}
    copied_s = max((record.heartbeat for record in records), default=now_s)
    states = []
    for rank in node.ranks:
        if rank not in by_rank:
            life, as_of_s = UNKNOWN if node.name in unread_nodes else CLOSED, now_s
        elif in_memory:
            life = _judge_life(by_rank[rank], now_s)
            as_of_s = by_rank[rank].heartbeat if life == DEAD else now_s
        else:
            life, as_of_s = UNKNOWN if is_running else DEAD, copied_s
        states.append(RankState(rank, node.name, life, as_of_s, by_rank.get(rank)))
    return states


def _judge_life(record: Snapshot, now_s: float) -> str:
    """Return the state of a rank of this host.

    Heartbeat first: from outside of a container its process may not be visible.
    """
    if now_s - record.heartbeat < SILENT_S:
        return ALIVE
    return STOPPED if process_identity(record.pid) == record.process else DEAD
