"""Reading a checkpoint: ranks request ranges of arrays; the job reads each byte from disk once.

Where several ranks request an extent, the rank that has read the fewest bytes reads and verifies
it, and sends it to the others; see exchange.py.

A fault does not stop the exchange: it is raised afterwards. The values written until then are
overwritten when an older checkpoint is fetched in its place. The calls of `on_arrival`, which
change what may change only then, are not made.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from functools import cached_property, partial
from pathlib import Path

import numpy as np

from hpctrain.checkpoint.exchange import Exchange, RankSpans, Read, Target, plan_reads, start_of
from hpctrain.checkpoint.format import Manifest
from hpctrain.checkpoint.parts import Extent, check_header, extents_in_part, read_extent
from hpctrain.checkpoint.requests import ArrayFacts, Reader
from hpctrain.collectives.group import Scratch
from hpctrain.transport.link import Link


class FileReader(Reader):
    """The arrays of a checkpoint on disk."""

    def __init__(self, path: Path, manifest: Manifest):
        facts = {n: ArrayFacts(flat.size, flat.dtype) for n, flat in manifest.arrays.items()}
        super().__init__(str(path), manifest.step, manifest.about, facts)
        self.state = manifest.state
        self._path, self._manifest = path, manifest

    def _make_exchange(self, link: Link) -> Exchange:
        exchange = _FileExchange(self._path, link)
        for number in range(link.rank, len(self._manifest.parts), link.size):
            exchange.run_guarded(check_header, self._path, self._manifest.parts[number])
        return exchange

    def _fetch_turn(
        self, exchange: Exchange, spans: list[RankSpans], own_targets: list[Target]
    ) -> None:
        exchange.run(_deal_reads(plan_reads(self._extents, spans, own_targets), exchange.link.size))

    @cached_property
    def _extents(self) -> dict[str, list[Extent]]:
        """Return the extents of each array, in the order of its elements."""
        extents: dict[str, list[Extent]] = {name: [] for name in self.sizes}
        slot_edges = self._manifest.edges
        for part in self._manifest.parts:
            for extent in extents_in_part(part, self._manifest.arrays, slot_edges):
                extents[extent.array].append(extent)
        return {
            name: sorted(array_extents, key=start_of) for name, array_extents in extents.items()
        }


class _FileExchange(Exchange):
    """An exchange of extents that are read from the files of a checkpoint."""

    def __init__(self, path: Path, link: Link):
        super().__init__(link, self._read)
        self._path = path
        self._send_buffer = partial(Scratch().host_buffer, dtype=np.dtype(np.uint8))

    def _read(self, extent: Extent) -> np.ndarray:
        data = self._send_buffer(extent.nbytes)
        if self.run_guarded(read_extent, self._path, extent, data) is None:
            data[:] = 0  # the other ranks receive zeros, which are never used
        return data


def _deal_reads(reads: Iterable[Read], size: int) -> list[list[Read]]:
    """Deal the reads to ranks: every extent is read by a rank that requests it."""
    reads_by_rank: list[list[Read]] = [[] for _ in range(size)]
    bytes_by_rank: dict[int, int] = defaultdict(int)
    for read in reads:
        rank = min(read.ranks, key=lambda r: (bytes_by_rank[r], r))
        bytes_by_rank[rank] += read.extent.nbytes
        reads_by_rank[rank].append(read)
    return reads_by_rank
