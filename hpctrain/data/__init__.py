"""Data sets, and the assignment of their samples to ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from hpctrain import config
from hpctrain.config import usercode
from hpctrain.data.dataset import Dataset, Samples, Split, in_pieces
from hpctrain.data.digits import DigitsOptions
from hpctrain.data.from_function import FunctionData
from hpctrain.data.idx import IdxOptions
from hpctrain.data.mnist import MnistOptions
from hpctrain.data.npy import NpyOptions
from hpctrain.data.npz import NpzOptions
from hpctrain.data.prefetch import Prefetch, worth_reading_ahead
from hpctrain.data.resized import resized
from hpctrain.data.sampler import Sampler, order, share
from hpctrain.data.text import TextOptions

__all__ = [
    "DATA",
    "FunctionData",
    "Dataset",
    "DigitsOptions",
    "IdxOptions",
    "MnistOptions",
    "NpyOptions",
    "NpzOptions",
    "Prefetch",
    "Sampler",
    "Samples",
    "Source",
    "Split",
    "TextOptions",
    "in_pieces",
    "order",
    "read",
    "resized",
    "share",
    "worth_reading_ahead",
]


class Source(Protocol):
    """Options of a data set, which load it."""

    def load(self, seed: int) -> Split:
        """Return the data set; raise UsageError if it cannot be read."""


DATA: dict[str, type[Source]] = {
    "digits": DigitsOptions,
    "mnist": MnistOptions,
    "idx": IdxOptions,
    "npz": NpzOptions,
    "npy": NpyOptions,
    "text": TextOptions,
}


def read(table: Mapping[str, Any], folder: str = ".") -> Source:
    """Return the options of the recipe's table `[data]`; raise UsageError for unknown names.

    A `kind` with a colon is a user's function, of a module in `folder` or an installed one, and the
    other keys are its arguments.
    """
    if usercode.is_target(table):
        arguments = {key: value for key, value in table.items() if key != "kind"}
        return FunctionData(target=table["kind"], arguments=arguments, folder=folder)
    return config.read_kind(DATA, table, "data")
