"""The records of a node's ranks in one file of its memory, and their way to the run's folder.

    /dev/shm/hpctrain-watch-TOKEN-00002      of the node whose first rank is 2, mode 0600
    RUN/watch/nodes.json                     token, and per node: file, ranks
    RUN/watch/node-00002                     its copy, once the job hangs or has died
    RUN/watch/wanted                         a rank hangs: the other nodes copy theirs

A heartbeat must not cost a shared file system a write, so records lie in the memory of the node.
It outlives killed ranks, but not the node. /dev/shm is on every node of Linux and never on the
network, as $TMPDIR may be; that is taken where /dev/shm is full or missing. The token is random, so
that two jobs of a node do not meet.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import re
import stat
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from time import time as clock

from hpctrain.core import atomic, files, opening
from hpctrain.core.files import FileError, MissingError
from hpctrain.watch.layout import RECORD_BYTES, Snapshot, decode_node

LEVELS = 2  #: of a file in RUN/watch: neither it nor the folder may be a link
NODES, WANTED = "nodes.json", "wanted"
REPORT_NAME, FACTS_NAME = "hung-report.txt", "hung-report.json"  #: by the one rank that reports
_OF_A_HANG = (WANTED, REPORT_NAME, FACTS_NAME)  # of an earlier job it would silence this one
_PREFIX = "hpctrain-watch-"
_NAME = re.compile(_PREFIX + r"[0-9a-f]{32}-\d{5,}")
_NODES_BYTES, _FILE_BYTES = 64 * files.MIB, 1 << 30
_ABANDONED_S = 86400.0  #: a file without a heartbeat for a day belongs to no job


@dataclass(frozen=True)
class Node:
    """A node of a job: its name, the file of its records, the ranks in the order of their pages."""

    name: str
    file: str
    ranks: tuple[int, ...]

    def copy(self, directory: Path) -> Path:
        """Return the path of the copy of its records in the folder `directory`."""
        return copy_path(directory, self.ranks[0])


class NodeFile:
    """A mapped file of a node's records; each rank of the node writes one record."""

    def __init__(self, path: str, ranks: int) -> None:
        """Map the file; raise OSError."""
        self.path, self._size = path, ranks * RECORD_BYTES
        descriptor = opening.open_file(path, os.O_RDWR, own=True)
        try:
            self._map = mmap.mmap(descriptor, self._size)
        finally:
            os.close(descriptor)

    def pages(self, index: int) -> list[memoryview]:
        """Return the node's pages, the page of local rank `index` first."""
        all_pages = memoryview(self._map)
        offsets = range(0, self._size, RECORD_BYTES)
        pages = [all_pages[offset : offset + RECORD_BYTES] for offset in offsets]
        return [pages.pop(index), *pages]

    def remove_if_closed(self) -> None:
        """Remove the file if all ranks have closed their records."""
        if not any(decode_node(self._map[:])):
            self.remove()

    def remove(self) -> None:
        """Remove the file; its memory stays until the last rank ends."""
        with suppress(OSError):  # a read-only file system must not end the run
            os.unlink(self.path)


def copy_path(directory: Path, first_rank: int) -> Path:
    """Return the path of the copy of the records of the node whose first rank is `first_rank`."""
    return directory / f"node-{first_rank:05d}"


def create(token: str, first_rank: int, ranks: int) -> str:
    """Make the file of a node whose first rank is `first_rank`; return its path; raise OSError."""
    folders = ("/dev/shm", tempfile.gettempdir())
    for folder in folders:
        path = os.path.join(folder, f"{_PREFIX}{token}-{first_rank:05d}")
        with suppress(OSError):
            _allocate(path, ranks * RECORD_BYTES)
            _remove_abandoned(Path(folder))
            return path
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), " or ".join(folders))


def _allocate(path: str, nbytes: int) -> None:
    """Make a file of zeros; a full disk fails here, not as SIGBUS in a message."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
    descriptor = opening.open_file(path, flags, mode=0o600)
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError:
        os.unlink(path)
        raise
    finally:
        os.close(descriptor)


@cache  # once per process: a recovery waits for it
def _remove_abandoned(folder: Path) -> None:
    """Remove this user's files of jobs that were killed, and whose records nobody collected."""
    for path in folder.glob(f"{_PREFIX}*"):
        with suppress(OSError, ValueError):
            if _is_own(path) and clock() - _last_heartbeat(path) > _ABANDONED_S:
                path.unlink()


def _last_heartbeat(path: Path) -> float:
    """Return the latest heartbeat in a file, or the time at which it was made."""
    records = files.read_bytes(path, _FILE_BYTES, own=True)
    heartbeats = [snapshot.heartbeat for snapshot in decode_node(records)]
    return max([path.stat().st_ctime, *heartbeats])


def _is_own(path: Path) -> bool:
    """Return whether `path` is a regular file that this user made as a file of records."""
    status = path.lstat()
    is_regular = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
    return is_regular and bool(_NAME.fullmatch(path.name))


def publish(directory: Path, token: str, nodes: Sequence[Node]) -> None:
    """Write where the records of a job lie, and remove earlier jobs' records; raise OSError."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    opening.make_folder(directory)
    for name in opening.names_in(directory):
        if "node-" in name or name in _OF_A_HANG:
            opening.remove(directory / name, LEVELS)
    table = {"schema": 1, "token": token, "nodes": [asdict(node) for node in nodes]}
    # Renamed, but not synced: a recovery waits for it, and after a crash of the node it is useless.
    temporary_file = directory / f".{NODES}"
    opening.remove(temporary_file, LEVELS)
    with opening.create(temporary_file, LEVELS, exclusive=True) as file:
        file.write(json.dumps(table).encode() + b"\n")
    opening.rename(temporary_file, NODES, LEVELS)


def read_nodes(directory: Path) -> list[Node]:
    """Return the nodes of the job whose records belong to `directory`; none if it ended well.

    Raises FileError if the file is damaged.
    """
    path = directory / NODES
    try:
        table = files.read_json_object(path, _NODES_BYTES, LEVELS)
        return [
            Node(str(node["name"]), str(node["file"]), tuple(map(int, node["ranks"])))
            for node in table["nodes"]
            if node["ranks"]
        ]
    except MissingError:
        return []
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, FileError):
            raise
        raise FileError(f"{path}: expected the nodes of a job, seen {error!r}") from None


def write_copy(directory: Path, node: Node, records: bytes) -> None:
    """Write the records of a node into the folder of the run; raise OSError."""
    atomic.replace(node.copy(directory), records, LEVELS)


def collect(directory: Path) -> list[str]:
    """Move the files of this host into `directory`; return the nodes whose records lie nowhere.

    Raises OSError if a copy cannot be written.
    """
    missing_nodes = []
    for node in read_nodes(directory):
        path = Path(node.file)
        with suppress(FileNotFoundError):
            if _is_own(path):
                write_copy(directory, node, files.read_bytes(path, _FILE_BYTES, own=True))
                path.unlink(missing_ok=True)
        if not node.copy(directory).exists():
            missing_nodes.append(node.name)
    return missing_nodes


def remove_earlier(directory: Path) -> None:
    """Remove the files that an earlier, killed job of the same run left on this host."""
    with suppress(FileError):
        for node in read_nodes(directory):
            with suppress(OSError):
                if _is_own(Path(node.file)):
                    os.unlink(node.file)


def read_node(directory: Path, node: Node, history: bool = False) -> list[Snapshot]:
    """Return the records of a node, from its memory if this is its host, else from their copy.

    None if they lie on another host, or were lost with their node.
    """
    in_memory = read_memory(node, history)
    return read_copy(directory, node, history) if in_memory is None else in_memory


def read_memory(node: Node, history: bool = False) -> list[Snapshot] | None:
    """Return the records of a node from memory; None if another host's memory holds them."""
    with suppress(MissingError, FileNotFoundError):
        if _is_own(Path(node.file)):
            return list(decode_node(files.read_bytes(node.file, _FILE_BYTES, own=True), history))
    return None


def read_copy(directory: Path, node: Node, history: bool = False) -> list[Snapshot]:
    """Return the records of a node from their copy in `directory`; none if there is no copy."""
    try:
        records = files.read_bytes(node.copy(directory), _FILE_BYTES, LEVELS)
        return list(decode_node(records, history))
    except MissingError:
        return []


def read_records(directory: Path, history: bool = False) -> dict[int, Snapshot]:
    """Return the records that this host can read, by rank."""
    nodes = read_nodes(directory)
    snapshots = (s for node in nodes for s in read_node(directory, node, history))
    return {snapshot.rank: snapshot for snapshot in snapshots}
