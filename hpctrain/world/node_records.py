"""The records of a World's ranks for the time of a run: made together, removed at a clean end."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from hpctrain.collectives import all_gather_bytes
from hpctrain.collectives.tree import broadcast_bytes
from hpctrain.core import opening
from hpctrain.core.errors import AGREED_ERRORS, LostRankError, UsageError
from hpctrain.transport import abort
from hpctrain.transport.mpi import segments
from hpctrain.watch import HungReport, Watch, WatchRecord, node_file
from hpctrain.watch.node_exchange import NodeExchange
from hpctrain.watch.node_file import Node, NodeFile
from hpctrain.world.world import World

Report = Callable[[HungReport], None]  #: called with the report that names the ranks of a hung job


@contextmanager
def watched(
    world: World, run: Path, timeout_s: float, on_hang: Report | None = None
) -> Iterator[None]:
    """Record this rank's state in memory of its node; when it hangs, end the job.

    `on_hang`, called on every rank, replaces that for jobs without training steps, and so without a
    longer limit for the first.
    """
    if world.threads.record is None:
        yield
        return
    directory, previous_record = run / "watch", world.threads.record
    with _recorded(world, directory) as record:
        report = on_hang or partial(abort.report_hang, world.rank, run)
        watch = Watch(record, directory, timeout_s, report, 1 if on_hang else 10)
        world.threads.record_in(record)
        try:
            yield
        finally:
            watch.stop()
            world.threads.record_in(previous_record)


@contextmanager
def _recorded(world: World, directory: Path) -> Iterator[WatchRecord]:
    """Yield this rank's record, in a file that the ranks of its node share; collective.

    `directory`: of the run, in which all ranks find the files of all nodes. If this rank alone ends
    with an error, it moves the records of its node there: the launcher kills the others.
    """
    token = world.from_first(lambda: uuid.uuid4().hex)
    nodes = _make_files(world, directory, token)

    def publish_and_open() -> tuple[NodeFile, WatchRecord]:
        if world.rank == 0:
            with _no_space(directory):
                node_file.publish(directory, token, list(nodes.values()))
        node = nodes[world.host]
        with _no_space(Path(node.file)):
            file = NodeFile(node.file, len(node.ranks))
        own_pages = file.pages(node.ranks.index(world.rank))
        return file, WatchRecord(world.rank, world.size, own_pages)

    # All are open before one is closed: the file is removed when none is open.
    file, record = world.on_all_ranks(publish_and_open)
    try:
        yield record
    except AGREED_ERRORS:
        _remove(world, directory, file, record)
        raise
    except LostRankError:  # the survivors go on at once, with new records
        _remove(world, directory, file, record)
        file.remove()
        raise
    except BaseException:
        NodeExchange(record, directory).write_own()
        raise
    _remove(world, directory, file, record)


def _remove(world: World, directory: Path, file: NodeFile, record: WatchRecord) -> None:
    record.close()
    file.remove_if_closed()
    if world.rank == 0:
        with suppress(OSError):
            opening.remove(directory / node_file.NODES, node_file.LEVELS)


def _make_files(world: World, directory: Path, token: str) -> dict[str, Node]:
    """Create one file per node on the node's first rank; return the nodes (collective)."""
    created_files: list[str] = []

    def create() -> str:
        if world.local_rank != 0:
            return ""
        node_file.remove_earlier(directory)
        with _no_space(directory):
            path = node_file.create(token, world.rank, world.node.size)
        created_files.append(path)
        segments.announce_record(path, node_file.copy_path(directory, world.rank))
        return path

    try:
        own_path = os.fsencode(world.on_all_ranks(create))
        paths = [os.fsdecode(path) for path in all_gather_bytes(world.across, own_path)]
        # The first rank of a node has the paths of all nodes.
        paths = json.loads(broadcast_bytes(world.node, json.dumps(paths).encode()))
    except LostRankError:
        for path in created_files:
            os.unlink(path)
        raise
    hosts = dict.fromkeys(world.hosts)
    return {
        host: Node(host, path, members)
        for host, path, members in zip(hosts, paths, world.main.nodes, strict=True)
    }


@contextmanager
def _no_space(path: Path) -> Iterator[None]:
    """Turn OSErrors into UsageError."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"nothing can be written in {path}: {error.strerror}") from None
