"""Data sets, and the distribution of their samples to ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from hpctrain.core import config
from hpctrain.core.config import usercode
from hpctrain.core.lazy import LazyTable, lazy_names
from hpctrain.data.dataset import Dataset, Samples, Split, in_pieces
from hpctrain.data.derived import (
    SelectedSamples,
    checks_as_read,
    count_labels,
    has_known_targets,
    known_targets,
    resize_training_set,
)
from hpctrain.data.prefetch import Prefetch, batches_to_read_ahead
from hpctrain.data.reading import ReadOptions, ReadSamples, reading_of, unwrap
from hpctrain.data.sampler import EpochOrder, Sampler, dropped_batch, order, order_of, share

if TYPE_CHECKING:
    from hpctrain.data.digit_images import DigitsOptions, MnistOptions
    from hpctrain.data.formats.hugging_face import HuggingFaceSamples
    from hpctrain.data.formats.options import (
        Hdf5Options,
        HuggingFaceOptions,
        ParquetOptions,
        SafetensorsOptions,
        WebdatasetOptions,
        ZarrOptions,
    )
    from hpctrain.data.from_function import FunctionData
    from hpctrain.data.idx import IdxOptions
    from hpctrain.data.npy import NpyOptions, NpzOptions
    from hpctrain.data.text import TextOptions

__all__ = [
    "DATA",
    "FunctionData",
    "Dataset",
    "DigitsOptions",
    "EpochOrder",
    "Hdf5Options",
    "HuggingFaceOptions",
    "HuggingFaceSamples",
    "IdxOptions",
    "MnistOptions",
    "NpyOptions",
    "NpzOptions",
    "ParquetOptions",
    "Prefetch",
    "ReadOptions",
    "ReadSamples",
    "SafetensorsOptions",
    "Sampler",
    "Samples",
    "SelectedSamples",
    "Source",
    "Split",
    "TextOptions",
    "WebdatasetOptions",
    "ZarrOptions",
    "checks_as_read",
    "count_labels",
    "dropped_batch",
    "has_known_targets",
    "in_pieces",
    "known_targets",
    "order",
    "order_of",
    "path_keys",
    "read",
    "reading_of",
    "resize_training_set",
    "share",
    "unwrap",
    "batches_to_read_ahead",
]


class Source(Protocol):
    """The options of a data set, with the method that loads it."""

    def load(self, seed: int, finite: bool = True) -> Split:
        """Return the data set; raise UsageError if it cannot be read.

        `finite`: values that are not finite are an error, at once or when they are read.
        """


__getattr__ = lazy_names(
    __name__,
    {
        "DigitsOptions": "digit_images",
        "FunctionData": "from_function",
        "Hdf5Options": "formats.options",
        "HuggingFaceOptions": "formats.options",
        "HuggingFaceSamples": "formats.hugging_face",
        "IdxOptions": "idx",
        "MnistOptions": "digit_images",
        "NpyOptions": "npy",
        "NpzOptions": "npy",
        "ParquetOptions": "formats.options",
        "SafetensorsOptions": "formats.options",
        "TextOptions": "text",
        "WebdatasetOptions": "formats.options",
        "ZarrOptions": "formats.options",
    },
)
#: The options class of each data format and built-in data set, by the `kind` of a recipe.
DATA = LazyTable(
    __name__,
    {
        "digits": "DigitsOptions",
        "mnist": "MnistOptions",
        "idx": "IdxOptions",
        "npz": "NpzOptions",
        "npy": "NpyOptions",
        "text": "TextOptions",
        "hdf5": "Hdf5Options",
        "zarr": "ZarrOptions",
        "parquet": "ParquetOptions",
        "webdataset": "WebdatasetOptions",
        "safetensors": "SafetensorsOptions",
        "huggingface": "HuggingFaceOptions",
    },
)


def path_keys(tables: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the keys of a recipe's [data] that name files; none for a user's function."""
    table = tables.get("data")
    kind = table.get("kind") if isinstance(table, Mapping) else None
    if not isinstance(kind, str) or kind not in DATA:
        return ()
    return getattr(DATA[kind], "PATHS", ())


def read(table: Mapping[str, Any], folder: str = ".") -> Source:
    """Return the options of the recipe's table `[data]`; raise UsageError for unknown names.

    A `kind` with a colon names a user's function, in a module of `folder` or an installed one; the
    other keys are its arguments.
    """
    if usercode.is_target(table):
        from hpctrain.data.from_function import FunctionData

        arguments = {key: value for key, value in table.items() if key != "kind"}
        return FunctionData(target=table["kind"], arguments=arguments, folder=folder)
    return config.read_kind(DATA, table, "data")
