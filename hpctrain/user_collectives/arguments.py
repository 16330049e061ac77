"""Checks of the arguments of `ht.*` calls that one rank can make alone; faults are UsageErrors.

That all ranks call with the same arguments is checked by `collectives/signature.py`.
"""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from hpctrain import collectives
from hpctrain.collectives.direct import direct, must_be_one_node
from hpctrain.collectives.signature import Signature, signature
from hpctrain.core.errors import UsageError
from hpctrain.core.xp import Array, namespace, on_device
from hpctrain.tuning.select import allreduce_named
from hpctrain.world import World

RESULTS = ("in-place", "shared")  # of a bound call


class Accepted(NamedTuple):
    """Arguments that are valid on this rank."""

    flat: np.ndarray
    operation: Any  #: None where nothing is reduced
    call: Signature


def accepted(
    world: World,
    name: str,
    x: Any,
    rows: bool = False,
    written: bool = True,
    root_sends: bool = False,
    **options: Any,
) -> Accepted:
    """Return the arguments of call `name` if all are valid on this rank; else raise UsageError.

    `rows`: `x` has one for each rank. `written`: the call writes to `x`; with `root_sends` not to
    that of the root. `options`: those of op, algorithm, result and root that the call has.
    """
    if "root" in options:
        _must_be_a_rank(options["root"], world.size)
    x = _array(x, written and not (root_sends and options["root"] == world.rank))
    memory = _memory_of(x, world)
    if rows and (x.ndim == 0 or len(x) != world.size):
        raise UsageError(f"expected {world.size} rows, one for each rank, seen shape {x.shape}")
    if "algorithm" in options:
        _must_be_an_algorithm(options["algorithm"], len(world.main.nodes))
    if "result" in options:
        _must_be_a_result(options["result"])
    operation = _operation(x, options) if "op" in options else None
    words = tuple(map(str, options.values()))
    return Accepted(x.reshape(-1), operation, _signature(name, words, x.dtype, x.shape, memory))


@lru_cache(1024)
def _signature(
    name: str, words: tuple[str, ...], dtype: np.dtype, shape: tuple[int, ...], memory: str
) -> Signature:
    order = "" if sys.byteorder == "little" else f"{sys.byteorder}-endian "
    return signature(f"{' '.join((name, *words))} of {order}{dtype.name} {shape}{memory}")


def _operation(x: np.ndarray, options: Mapping[str, Any]) -> collectives.Operation:
    op = _text(options["op"], "op")
    if op == "mean" and "result" in options:
        raise UsageError("op 'mean' cannot be bound: bind 'sum' and divide, or call ht.allreduce")
    return collectives.operation(op, x.dtype)


def _array(x: Any, written: bool) -> Array:
    """Return `x` if calls accept it, as a plain array if its class is derived."""
    if not isinstance(x, np.ndarray):
        if not on_device(x):
            raise UsageError(f"expected an array of NumPy or CuPy, seen {type(x).__name__}")
    elif type(x) is not np.ndarray:
        if isinstance(x, np.ma.MaskedArray):
            raise UsageError("expected an array without a mask, seen a MaskedArray; use x.filled")
        x = x.view(np.ndarray)
    if not _reducible(x.dtype):
        raise UsageError(f"expected one of {', '.join(collectives.DTYPES)}, seen {x.dtype}")
    if not x.dtype.isnative:
        raise UsageError(
            f"expected an array in native byte order, seen dtype {x.dtype.str!r}; "
            "use x.astype(x.dtype.newbyteorder('='))"
        )
    if not x.flags.c_contiguous:
        raise UsageError(
            f"expected a C-contiguous array, seen shape {x.shape} with strides {x.strides}; "
            "use numpy.ascontiguousarray, or CuPy's"
        )
    if written and isinstance(x, np.ndarray):
        must_be_writable(x)
    return x


def must_be_writable(x: np.ndarray) -> None:
    """Raise UsageError for a read-only array."""
    if not x.flags.writeable:
        raise UsageError(
            "expected an array that may be written to, seen a read-only one; use a copy"
        )


@lru_cache
def _reducible(dtype: np.dtype) -> bool:
    return dtype.name in collectives.DTYPES  # the name of a dtype takes a microsecond


def _must_be_a_rank(root: Any, ranks: int) -> None:
    is_integer = isinstance(root, (int, np.integer)) and not isinstance(root, bool)
    if not (is_integer and 0 <= root < ranks):
        raise UsageError(f"expected a root in 0 .. {ranks - 1}, seen {reprlib.repr(root)}")


def _must_be_an_algorithm(name: Any, nodes: int) -> None:
    if allreduce_named(_text(name, "algorithm")) is direct:
        must_be_one_node(nodes)


def _must_be_a_result(result: Any) -> None:
    if _text(result, "result") not in RESULTS:
        raise UsageError(f"expected a result of {', '.join(RESULTS)}, seen {result!r}")


def _text(name: Any, argument: str) -> str:
    if not isinstance(name, str):
        raise UsageError(f"{argument}: expected a name, seen {reprlib.repr(name)}")
    return name


def _memory_of(x: Array, world: World) -> str:
    """Return the kind of memory of `x` as words; raise UsageError if not of the rank's device."""
    if not on_device(x):
        return ""
    device, current = x.data.device_id, namespace(x).cuda.runtime.getDevice()
    own = current if world.gpu is None else world.gpu.ordinal
    if device == own == current:
        return " of a GPU"
    raise UsageError(
        f"expected an array on the GPU of its rank, {own}, and that one current, seen one on GPU "
        f"{device}, GPU {current} being current: make arrays where ht.init() has made the GPU "
        "current, or under `with cupy.cuda.Device(world.gpu.ordinal):`"
    )
