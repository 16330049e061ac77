"""The records of other nodes, for the report of a hung job, by way of the run's folder.

    hung rank          writes RUN/watch/wanted, waits for the copies of all nodes
    each other node    looks for `wanted` every 2 s; copies its records to RUN/watch/node-RRRRR

A node without a waiting rank must answer, too: it is the node that blocks the job. So a rank of
each node, the first that has a heartbeat, lists one folder of the shared file system every 2 s.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from time import time as clock

from hpctrain.core import opening
from hpctrain.core.files import FileError
from hpctrain.watch.layout import Call, Snapshot
from hpctrain.watch.node_file import LEVELS, WANTED, Node, read_copy, read_nodes, write_copy
from hpctrain.watch.record import WatchRecord

_LOOK_S = 2.0  #: between two looks for `wanted`
ARRIVAL_S = 10.0  #: in which the copies of all nodes should have come
_SILENT_S = 3.0  #: a rank without a heartbeat for so long does not speak for its node


class NodeExchange:
    """One rank's side of the exchange."""

    def __init__(self, record: WatchRecord, directory: Path) -> None:
        self._record, self._directory = record, directory
        self._is_alone = record.node_size == record.size  # then there is nobody to ask
        self._looked_s, self._has_answered = time.monotonic(), False

    def answer(self) -> None:
        """Copy this node's records if another node wants them, and this rank speaks for its own."""
        if self._is_alone or self._has_answered or time.monotonic() - self._looked_s < _LOOK_S:
            return
        self._looked_s = time.monotonic()
        with suppress(OSError):
            # Listed, not looked up: NFS may remember for a minute that there is no such file.
            if WANTED in opening.names_in(self._directory) and self._record.speaks_for_node(
                _SILENT_S
            ):
                self.write_own()

    def write_own(self) -> None:
        """Move this node's records into the run's folder; not if that is full or lost.

        The ranks go on to write into the memory of the file, which has no name any more.
        """
        self._has_answered = True
        self._record.write_heartbeat()
        with suppress(OSError):
            for node in self._nodes(own=True):
                write_copy(self._directory, node, self._record.node_bytes())
                os.unlink(node.file)

    def collect(self, timeout_s: float) -> tuple[list[Snapshot], dict[str, tuple[int, ...]]]:
        """Return the ranks' records, and the ranks of each node whose records do not arrive."""
        self.write_own()
        own_snapshots = self._record.node_snapshots(history=True)
        if self._is_alone:
            return own_snapshots, {}
        with suppress(OSError):
            opening.create(self._directory / WANTED, LEVELS).close()
        nodes, deadline = self._nodes(own=False), time.monotonic() + max(ARRIVAL_S, timeout_s / 10)
        copies = {node: _read_snapshots(self._directory, node) for node in nodes}
        while not all(copies.values()) and time.monotonic() < deadline:
            time.sleep(0.1)
            self._record.write_heartbeat()
            copies |= {
                n: _read_snapshots(self._directory, n) for n, read in copies.items() if not read
            }
        arrived_snapshots = [snapshot for snapshots in copies.values() for snapshot in snapshots]
        lost_nodes = {node.name: node.ranks for node, read in copies.items() if not read}
        own_snapshots = self._record.node_snapshots(history=True)
        return sorted([*own_snapshots, *arrived_snapshots], key=lambda s: s.rank), lost_nodes

    def _nodes(self, own: bool) -> list[Node]:
        """Return our own node or the other nodes; [] if the list of nodes cannot be read."""
        with suppress(FileError):
            nodes = read_nodes(self._directory)
            return [node for node in nodes if (self._record.rank in node.ranks) == own]
        return []


def _read_snapshots(directory: Path, node: Node) -> list[Snapshot]:
    """Return the records of another node, with times shifted to the clock of this node.

    A rank of that node has just written its heartbeat: the latest one is the time of the copy.
    """
    with suppress(FileError, OSError, ValueError):
        snapshots = read_copy(directory, node, history=True)
        shift_s = clock() - max((s.heartbeat for s in snapshots), default=0.0)
        return [_shift_times(snapshot, shift_s) for snapshot in snapshots]
    return []


def _shift_times(snapshot: Snapshot, shift_s: float) -> Snapshot:
    def shift(calls: Sequence[Call]) -> tuple[Call, ...]:
        return tuple(
            replace(c, start_s=c.start_s + shift_s, end_s=c.end_s and c.end_s + shift_s)
            for c in calls
        )

    return replace(
        snapshot,
        heartbeat=snapshot.heartbeat + shift_s,
        calls=shift(snapshot.calls),
        history=shift(snapshot.history),
    )
