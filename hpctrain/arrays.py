"""Collectives on a user's own arrays, without a trainer: `ht.allreduce` and its neighbours.

    before, ranks 0 1 2        x: a   b   c                      x: (a0 a1 a2) (b0 b1 b2) (c0 c1 c2)

    allreduce             a+b+c on all        reduce_scatter    a0+b0+c0   a1+b1+c1   a2+b2+c2
    reduce, root 0        a+b+c  -   -        all_to_all        (a0 b0 c0) (a1 b1 c1) (a2 b2 c2)
    broadcast, root 0     a      a   a        scatter, root 0   a0         a1         a2
    all_gather            (a b c) on all      gather, root 0    (a b c)    -          -

Arrays are contiguous, of NumPy or CuPy, in bool, uint8, int8, int16, int32, int64, float16,
bfloat16 (of ml_dtypes), float32, float64, complex64 or complex128. `op` is sum, prod, min or max
(not of complex numbers), mean (not of integers), and, or, xor (of integers bitwise, of bools
logical): see `hpctrain.collectives.operations`.

All ranks must call with the same shape, dtype and arguments, and all with arrays of the host or all
of GPUs: with `check` they first compare these (Bruck, 64 bytes a rank); without it, ranks that
differ get a TransportError or wrong numbers. Results on a GPU are there for what its current stream
does next.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import numpy as np

from hpctrain import collectives, ready
from hpctrain.collectives import linear
from hpctrain.collectives.mean import mean
from hpctrain.collectives.ring import all_gather as ring_all_gather
from hpctrain.collectives.ring import reduce_scatter as ring_reduce_scatter
from hpctrain.collectives.tree import broadcast as tree_broadcast
from hpctrain.collectives.tree import reduce as tree_reduce
from hpctrain.errors import UsageError
from hpctrain.tuning.select import allreduce_named, auto, bound, prepared
from hpctrain.watch import noticed
from hpctrain.world import World, init
from hpctrain.xp import Array, namespace, on_device

SIGNATURE_BYTES = 64
ELSEWHERE = " of GPU "  # in what is said of an array that lies on another than its rank computes on
RESULTS = ("in-place", "shared")  # of a bound call
_calls = ready.calls


@noticed(lambda seen: ready.about(seen["x"]))
def allreduce(
    x: np.ndarray,
    op: str = "sum",
    algorithm: str = "auto",
    world: World | None = None,
    check: bool = True,
) -> None:
    """Reduce `x` in place over all ranks; all must call.

    `x`: any shape. `op`: as above, for the dtype of `x`. `algorithm`: auto, or a name of
    `hpctrain.collectives.ALLREDUCE`. Cost: see the file of the algorithm; of a mean also that of
    `hpctrain.collectives.mean`. Raises UsageError if an argument does not fit, or if ranks differ.
    """
    if not check:
        # The quickest way in Python to an array's call: at few bytes every 10 ns are seen. Words
        # are the same object where they come from the same place; else the call takes its time.
        try:
            dtype, by, where, call = _calls[id(x)]
        except KeyError:
            pass
        else:
            if x.dtype is dtype and op is by and world is where and algorithm == "auto":
                call()
                return
    _allreduce(x, op, algorithm, world, check)


def _allreduce(x: np.ndarray, op: str, algorithm: str, given: World | None, check: bool) -> None:
    world, function = given or init(), allreduce_named(algorithm)
    flat, operation = _flat(x), collectives.operation(op, x.dtype)
    if check:
        _compare(world, check, f"allreduce {op} {algorithm}", x)
    if op == "mean":
        mean(world.main, flat, operation, function)
        return
    function(world.main, flat, operation)
    if function is auto and not check and isinstance(x, np.ndarray) and ready.met_before(x):
        found = prepared(world.main, flat, operation)
        if found is not None:
            call, about = found
            ready.keep(x, (x.dtype, op, given, call), about)


def bind(
    x: np.ndarray,
    op: str = "sum",
    algorithm: str = "auto",
    result: str = "in-place",
    world: World | None = None,
) -> Callable[[], Any]:
    """Return a call that reduces `x`, as it is then, over all ranks; nothing is looked up again.

    All ranks must call here, and then the bound calls in the same order. `x` as in `allreduce`; in
    `world.zeros` it is reduced fastest. `op`: as in `allreduce`, but for the mean. With `result`
    "shared" the call returns the flat array that holds the sum, which may be a node neighbour's: it
    is for reading, until all ranks meet again (any collective call); `x` may be left as it is. With
    "in-place" the sum is in `x`. Raises as `allreduce`.
    """
    world, flat = world or init(), _flat(x)
    if result not in RESULTS:
        raise UsageError(f"expected a result of {', '.join(RESULTS)}, seen {result!r}")
    if op == "mean":
        raise UsageError("op 'mean' cannot be bound: bind 'sum' and divide, or call ht.allreduce")
    operation = collectives.operation(op, x.dtype)
    _compare(world, True, f"bind {op} {algorithm} {result}", x)
    return bound(world.main, flat, operation, algorithm, result == "shared")


def reduce(
    x: np.ndarray, op: str = "sum", root: int = 0, world: World | None = None, check: bool = True
) -> None:
    """Reduce `x` in place to `root`; elsewhere `x` ends with partial results.

    `x`: any shape. Binomial tree: ceil(log2 P) steps. Raises as `allreduce`.
    """
    world = world or init()
    flat, operation = _flat(x), collectives.operation(op, x.dtype)
    _compare(world, check, f"reduce {op} {_rank(root, world)}", x)
    function = partial(tree_reduce, root=root)
    if op == "mean":
        mean(world.main, flat, operation, function)
    else:
        function(world.main, flat, operation)


def broadcast(x: np.ndarray, root: int = 0, world: World | None = None, check: bool = True) -> None:
    """Copy `root`'s `x` into every rank's `x`; binomial tree, ceil(log2 P) steps."""
    world = world or init()
    _compare(world, check, f"broadcast {_rank(root, world)}", x)
    tree_broadcast(world.main, _flat(x), root)


def reduce_scatter(
    x: np.ndarray, op: str = "sum", world: World | None = None, check: bool = True
) -> np.ndarray:
    """Return this rank's row of the reduced `x` (P, ...), a view of `x`; the other rows are spoilt.

    Ring: P-1 steps, n(P-1)/P bytes sent. Raises as `allreduce`.
    """
    world = world or init()
    flat, operation = _flat(_rows(x, world)), collectives.operation(op, x.dtype)
    _compare(world, check, f"reduce_scatter {op}", x)
    if op == "mean":
        mean(world.main, flat, operation, ring_reduce_scatter)
    else:
        ring_reduce_scatter(world.main, flat, operation)
    return x[world.rank]


def all_gather(x: np.ndarray, world: World | None = None, check: bool = True) -> np.ndarray:
    """Return a new array (P, *x.shape) of every rank's `x`; ring, P-1 steps, x.nbytes each."""
    world = world or init()
    _compare(world, check, "all_gather", _checked(x))
    rows = _room_for(x, world)
    ring_all_gather(world.main, rows.reshape(-1))
    return rows


def gather(
    x: np.ndarray, root: int = 0, world: World | None = None, check: bool = True
) -> np.ndarray | None:
    """Return a new array (P, *x.shape) of every rank's `x` on `root`, None elsewhere."""
    world = world or init()
    _compare(world, check, f"gather {_rank(root, world)}", _checked(x))
    if world.rank != root:
        world.link.isend(x, root).wait()
        return None
    rows = _room_for(x, world)
    linear.gather(world.main, rows.reshape(-1), root)
    return rows


def scatter(
    x: np.ndarray, root: int = 0, world: World | None = None, check: bool = True
) -> np.ndarray:
    """Return row r of `root`'s `x` (P, ...) on rank r: a view of its own `x`, which receives it."""
    world = world or init()
    flat = _flat(_rows(x, world))
    _compare(world, check, f"scatter {_rank(root, world)}", x)
    linear.scatter(world.main, flat, root)
    return x[world.rank]


def all_to_all(x: np.ndarray, world: World | None = None, check: bool = True) -> np.ndarray:
    """Return a new array like `x` (P, ...): on rank r, row s is row r of rank s."""
    world = world or init()
    flat, out = _flat(_rows(x, world)), namespace(x).empty_like(x)
    _compare(world, check, "all_to_all", x)
    linear.all_to_all(world.main, flat, out.reshape(-1))
    return out


def _checked(x: Any) -> np.ndarray:
    if not isinstance(x, np.ndarray) and not on_device(x):
        raise UsageError(f"expected an array of NumPy or CuPy, seen {type(x).__name__}")
    if not _reducible(x.dtype):
        raise UsageError(f"expected one of {', '.join(collectives.DTYPES)}, seen {x.dtype}")
    if not x.flags.c_contiguous:
        raise UsageError(
            f"expected a C-contiguous array, seen shape {x.shape} with strides {x.strides}; "
            "use numpy.ascontiguousarray, or CuPy's"
        )
    return x


@lru_cache
def _reducible(dtype: np.dtype) -> bool:
    return dtype.name in collectives.DTYPES  # to be named takes a dtype a microsecond


def _flat(x: Any) -> np.ndarray:
    return x if _checked(x).ndim == 1 else x.reshape(-1)


def _rows(x: Any, world: World) -> np.ndarray:
    """Return `x` if it has a row for each rank."""
    if _checked(x).ndim == 0 or len(x) != world.size:
        raise UsageError(f"expected {world.size} rows, one for each rank, seen shape {x.shape}")
    return x


def _room_for(x: np.ndarray, world: World) -> np.ndarray:
    """Return an array (P, *x.shape) that holds `x` in this rank's row."""
    rows = namespace(x).empty((world.size, *x.shape), x.dtype)
    rows[world.rank] = x
    return rows


def _rank(root: int, world: World) -> int:
    if not 0 <= root < world.size:
        raise UsageError(f"expected a root in 0 .. {world.size - 1}, seen {root}")
    return root


def _compare(world: World, check: bool, call: str, x: np.ndarray) -> None:
    """Compare call, shape and dtype over all ranks; raise UsageError that names whoever differs."""
    if not check:
        return
    text = f"{x.size} {x.dtype.name}{_where(x, world)} {call}".encode()
    said = text[:SIGNATURE_BYTES].ljust(SIGNATURE_BYTES)
    rows = collectives.all_gather_short(world.link, np.frombuffer(said, np.uint8))
    if ELSEWHERE.encode() not in rows.tobytes() and (rows == rows[0]).all():
        return
    words = [bytes(row).decode().strip() for row in rows]
    elsewhere = [f"rank {rank} has {one}" for rank, one in enumerate(words) if ELSEWHERE in one]
    if elsewhere:
        raise UsageError(
            f"expected arrays on the GPU of their rank, and that one current; "
            f"{', '.join(elsewhere[:8])}: make them where ht.init() has made the GPU current, or "
            "under `with cupy.cuda.Device(world.gpu.ordinal):`"
        )
    wrong = [f"rank {rank} has {one}" for rank, one in enumerate(words) if one != words[0]]
    raise UsageError(
        "length, dtype and call must be the same on all ranks; "
        f"rank 0 has {words[0]}, but {', '.join(wrong[:8])}"
    )


def _where(x: Array, world: World) -> str:
    """Return in which memory `x` lies, in a few words; ELSEWHERE in them if not in the rank's."""
    if not on_device(x):
        return ""
    there, current = x.data.device_id, namespace(x).cuda.runtime.getDevice()
    own = current if world.gpu is None else world.gpu.ordinal
    if there == own == current:
        return " of a GPU"
    return f"{ELSEWHERE}{there}, not of its own {own}" + f", current {current}" * (own != current)
