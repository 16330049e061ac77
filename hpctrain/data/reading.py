"""Options of reading a training set: the order of its samples, the ranks that read, the memory.

A chunk is the part of a file that its library reads as a whole. Sets of files with chunks have
a property `chunk_rows`, the samples of a chunk; any other set is cut into chunks of 1 MiB.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import pydantic

from hpctrain.core import config, trees
from hpctrain.core.errors import UsageError
from hpctrain.data.dataset import DerivedSamples, Samples, Split

CHUNK_BYTES = 1 << 20  #: of a set without chunks of its own


@config.options
class ReadOptions:
    """Keys of `[data]` about reading; they do not change results, but `shuffle`.

    `reader`: "node", one rank of each node reads for all its ranks; "rank", each reads its own
    rows; "auto", the first for files with chunks. `read_ahead_bytes` bounds a node's memory for
    rows read ahead by "node". `shuffle`: see `hpctrain.data.sampler.order`.
    """

    reader: Literal["auto", "node", "rank"] = "auto"
    read_ahead_bytes: Annotated[int, pydantic.Field(ge=1)] = 256 << 20
    shuffle: Literal["samples", "chunks"] = "samples"


@dataclass(frozen=True, eq=False)
class ReadSamples(DerivedSamples):
    """`samples`, read in training as `reading` asks."""

    samples: Samples
    reading: ReadOptions

    def __post_init__(self) -> None:
        """Raise UsageError for samples with an order or a way of reading of their own."""
        if name := own_way_of(self.samples):
            raise UsageError(
                "ReadSamples: expected samples that the Trainer orders and reads, seen "
                f"{type(self.samples).__name__}, which has a method or property '{name}'"
            )

    def rows(self, indexes: np.ndarray, epoch: int = 0) -> tuple[Any, Any]:
        """Return arrays (x, y) of the samples at `indexes`."""
        return self.samples.rows(indexes, epoch)


def with_reading(split: Split, source: ReadOptions) -> Split:
    """Return `split` with the training set read as the options `source` of its data ask."""
    names = ReadOptions.__dataclass_fields__
    options = ReadOptions(**{name: getattr(source, name) for name in names})
    is_default = options == ReadOptions()
    return split if is_default else split._replace(train=ReadSamples(split.train, options))


def reading_of(samples: Samples) -> ReadOptions:
    """Return the options of reading `samples`."""
    part: object = samples
    while isinstance(part, DerivedSamples) and not isinstance(part, ReadSamples):
        part = part.samples
    return part.reading if isinstance(part, ReadSamples) else ReadOptions()


def own_way_of(samples: Samples) -> str:
    """Return the name by which samples order or read themselves; empty if they do not."""
    ways = ("order", "stream")
    return next((name for name in ways if getattr(samples, name, None) is not None), "")


def unwrap(samples: Samples) -> Samples:
    """Return the data set without changes of its samples, its length or its reading."""
    while isinstance(samples, DerivedSamples):
        samples = samples.samples
    return samples


def chunk_rows_of(samples: Samples) -> int | None:
    """Return the samples of a chunk of the files of `samples`; None without chunks."""
    return getattr(unwrap(samples), "chunk_rows", None)


def shuffled_rows_of(samples: Samples) -> int | None:
    """Return the samples of a chunk if their order is shuffled by chunks, else None."""
    if reading_of(samples).shuffle == "samples":
        return None
    if (rows := chunk_rows_of(samples)) is not None:
        return rows
    nbytes = sum(x.nbytes for _, x in trees.arrays(unwrap(samples).rows(np.arange(1))))
    return max(1, CHUNK_BYTES // max(nbytes, 1))
