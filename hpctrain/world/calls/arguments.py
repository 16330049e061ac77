"""Checks of the arguments of `ht.*` calls on one rank; faults are UsageErrors.

`collectives/signature.py` checks that all ranks call with the same arguments.
"""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from hpctrain import collectives
from hpctrain.collectives.direct import direct, require_one_node
from hpctrain.collectives.signature import Signature, make_signature
from hpctrain.core.errors import UsageError
from hpctrain.core.xp import Array, namespace, on_device
from hpctrain.tuning.select import find_allreduce
from hpctrain.world import World

RESULTS = ("in-place", "shared")  # of a bound call


class ValidArguments(NamedTuple):
    """Arguments that are valid on this rank."""

    flat: np.ndarray
    operation: Any  #: None where nothing is reduced
    call: Signature


def validate_arguments(
    world: World,
    name: str,
    x: Any,
    has_rows: bool = False,
    writes_x: bool = True,
    root_sends: bool = False,
    **options: Any,
) -> ValidArguments:
    """Return the arguments of call `name` if all are valid on this rank; else raise UsageError.

    `has_rows`: `x` needs one row for each rank. `writes_x`: the call writes to `x`; with
    `root_sends` on all ranks but the root. `options`: op, algorithm, result and root, where the
    call has them.
    """
    if "root" in options:
        root = options["root"]
        is_integer = isinstance(root, (int, np.integer)) and not isinstance(root, bool)
        if not (is_integer and 0 <= root < world.size):
            raise UsageError(f"expected a root in 0 .. {world.size - 1}, seen {reprlib.repr(root)}")
    x = _check_array(name, x, writes_x and not (root_sends and options["root"] == world.rank))
    memory = _describe_memory(x, world)
    if has_rows and (x.ndim == 0 or len(x) != world.size):
        raise UsageError(f"expected {world.size} rows, one for each rank, seen shape {x.shape}")
    if (
        "algorithm" in options
        and find_allreduce(_check_string(options["algorithm"], "algorithm")) is direct
    ):
        require_one_node(len(world.main.nodes))
    if "result" in options and _check_string(options["result"], "result") not in RESULTS:
        raise UsageError(f"expected a result of {', '.join(RESULTS)}, seen {options['result']!r}")
    operation = _find_operation(x, options) if "op" in options else None
    option_words = tuple(map(str, options.values()))
    return ValidArguments(
        x.reshape(-1), operation, _make_signature(name, option_words, x.dtype, x.shape, memory)
    )


@lru_cache(1024)
def _make_signature(
    name: str, option_words: tuple[str, ...], dtype: np.dtype, shape: tuple[int, ...], memory: str
) -> Signature:
    byte_order = "" if sys.byteorder == "little" else f"{sys.byteorder}-endian "
    return make_signature(
        f"{' '.join((name, *option_words))} of {byte_order}{dtype.name} {shape}{memory}"
    )


def _find_operation(x: np.ndarray, options: Mapping[str, Any]) -> collectives.Operation:
    op = _check_string(options["op"], "op")
    if op == "mean" and "result" in options:
        raise UsageError("op 'mean' cannot be bound: bind 'sum' and divide, or call ht.allreduce")
    return collectives.operation(op, x.dtype)


def _check_array(name: str, x: Any, writes_x: bool) -> Array:
    """Return `x` if calls accept it, as a plain array if its class is derived."""
    if not isinstance(x, np.ndarray):
        if not on_device(x):
            raise UsageError(
                f"expected an array of NumPy or CuPy, seen {type(x).__name__}{_hint(name, x)}"
            )
    elif type(x) is not np.ndarray:
        if isinstance(x, np.ma.MaskedArray):
            raise UsageError("expected an array without a mask, seen a MaskedArray; use x.filled")
        x = x.view(np.ndarray)
    if not _is_reducible(x.dtype):
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
    if writes_x and isinstance(x, np.ndarray):
        check_writable(x)
    return x


def _hint(name: str, x: Any) -> str:
    """Return the call that takes `x`, which another library made; empty if there is none."""
    libraries = {kind.__module__.split(".")[0] for kind in type(x).__mro__}
    if "torch" in libraries:
        return f"; ht.torch.{name} takes tensors"
    if "jax" in libraries or "jaxlib" in libraries:
        return "; ht.jax.allreduce takes arrays of JAX"
    return ""


def check_writable(x: np.ndarray) -> None:
    """Raise UsageError for a read-only array."""
    if not x.flags.writeable:
        raise UsageError(
            "expected an array that may be written to, seen a read-only one; use a copy"
        )


@lru_cache
def _is_reducible(dtype: np.dtype) -> bool:
    return dtype.name in collectives.DTYPES  # the name of a dtype takes a microsecond


def _check_string(name: Any, argument: str) -> str:
    if not isinstance(name, str):
        raise UsageError(f"{argument}: expected a name, seen {reprlib.repr(name)}")
    return name


def _describe_memory(x: Array, world: World) -> str:
    """Return words for the memory of `x`; raise UsageError if it is not on the rank's device."""
    if not on_device(x):
        return ""
    gpu, current_gpu = x.data.device_id, namespace(x).cuda.runtime.getDevice()
    own_gpu = current_gpu if world.gpu is None else world.gpu.ordinal
    if gpu == own_gpu == current_gpu:
        return " of a GPU"
    raise UsageError(
        f"expected an array on the GPU of its rank, {own_gpu}, and that one current, seen one on "
        f"GPU {gpu}, GPU {current_gpu} being current: make arrays where ht.init() has made the GPU "
        "current, or under `with cupy.cuda.Device(world.gpu.ordinal):`"
    )
