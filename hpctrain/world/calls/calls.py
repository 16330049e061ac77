"""Collectives on a user's arrays, without a trainer: `ht.allreduce` and the others.

    before, ranks 0 1 2        x: a   b   c                      x: (a0 a1 a2) (b0 b1 b2) (c0 c1 c2)

    allreduce             a+b+c on all        reduce_scatter    a0+b0+c0   a1+b1+c1   a2+b2+c2
    reduce, root 0        a+b+c  -   -        all_to_all        (a0 b0 c0) (a1 b1 c1) (a2 b2 c2)
    broadcast, root 0     a      a   a        scatter, root 0   a0         a1         a2
    all_gather            (a b c) on all      gather, root 0    (a b c)    -          -

Arrays are C-contiguous, of NumPy or CuPy, in native byte order, in bool, uint8, int8, int16, int32,
int64, float16, bfloat16 (of ml_dtypes), float32, float64, complex64 or complex128; a call's results
need a writable array. `op` is sum, prod, min or max (not of complex numbers), mean (not of
integers), and, or, xor (of integers bitwise, of bools logical): see
`collectives/reductions/operations.py`.

All ranks must call with the same shape, dtype and arguments, and either all with arrays on the host
or all with arrays on GPUs. With `check`, ranks first compare a digest of the call
(collectives/signature.py): a fault on any rank is one UsageError on all ranks, before any data
moves. Without `check`, a rank with an invalid argument raises alone, and different calls lead to an
error or wrong numbers. Results on a GPU are ready for later work on its current stream.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from hpctrain.collectives import rooted
from hpctrain.collectives.direct import direct, direct_shared
from hpctrain.collectives.mean import SumFunction, mean
from hpctrain.collectives.ring import all_gather as ring_all_gather
from hpctrain.collectives.ring import reduce_scatter as ring_reduce_scatter
from hpctrain.collectives.signature import fault_signature, must_match
from hpctrain.collectives.tree import broadcast as tree_broadcast
from hpctrain.collectives.tree import reduce as tree_reduce
from hpctrain.core.errors import UsageError
from hpctrain.core.xp import namespace, on_device
from hpctrain.tuning import select
from hpctrain.watch import frameless
from hpctrain.world import World, init
from hpctrain.world.calls.arguments import ValidArguments, check_writable, validate_arguments
from hpctrain.world.calls.bound_calls import checked_calls, remember_call, unchecked_calls


def allreduce(
    x: np.ndarray,
    op: str = "sum",
    algorithm: str = "auto",
    world: World | None = None,
    check: bool = True,
) -> None:
    """Reduce `x` in place over all ranks; all must call.

    `x`: any shape. `op`: as above, for the dtype of `x`. `algorithm`: auto, or a name of
    `hpctrain.collectives.ALLREDUCE`. Cost: see the file of the algorithm; for a mean also
    `hpctrain.collectives.mean`. Raises UsageError if an argument does not fit, or if ranks differ.
    """
    # Fast path: at few bytes every 10 ns count. Strings from the same source line are the same
    # object; equal strings from elsewhere take the slower path.
    calls = checked_calls if check else unchecked_calls
    try:
        dtype, shape, bound_op, bound_world, bound_call, _ = calls[id(x)]
    except KeyError:
        pass
    else:
        if (
            (x.dtype is dtype and op is bound_op and world is bound_world and algorithm == "auto")
            and x.flags.carray  # contiguous, aligned, and writable, which may have changed
            and x.shape == shape
        ):
            del x  # the watch looks at this frame, and must not hold the array
            bound_call()  # named as the watch expects
            return
    _allreduce(x, op, algorithm, world, check)


def _allreduce(
    x: np.ndarray, op: str, algorithm: str, requested_world: World | None, check: bool
) -> None:
    world = requested_world or init()
    flat, operation, signature = _validate(
        world, "allreduce", x, check=check, op=op, algorithm=algorithm
    )
    bind_array = partial(
        select.bind,
        world.main,
        op=operation,
        allreduce=_divided_if_mean(op, select.find_allreduce(algorithm)),
        signature=signature if check else None,
    )
    bind_array(flat)()
    if algorithm == "auto" and type(x) is np.ndarray and x.flags.carray:
        remember_call(x, op, requested_world, check, bind_array)


def bind(
    x: np.ndarray,
    op: str = "sum",
    algorithm: str = "auto",
    result: str = "in-place",
    world: World | None = None,
) -> Callable[[], Any]:
    """Return a call that reduces the current contents of `x` over all ranks, without look-ups.

    All ranks must call `bind`, and then the bound calls in the same order. `x` is as in
    `allreduce`; an array from `world.zeros` is reduced fastest. `op` is as in `allreduce`, but not
    "mean". With `result` "in-place" the sum is in `x`. With "shared" the call returns a flat array
    with the sum, which may belong to another rank of the node: it is read-only, and valid until the
    next collective call; `x` may stay unchanged. Raises as `allreduce`.
    """
    world, flat, operation = _validate_and_match(
        world, "bind", x, check=True, op=op, algorithm=algorithm, result=result
    )
    function = select.resolve_auto(select.find_allreduce(algorithm), world.main, flat, operation)
    if function is direct and result == "shared":
        function = direct_shared
    bound_call = frameless(select.bind(world.main, flat, operation, function))
    host_x = np.empty(0) if on_device(x) else x

    def reduce_x() -> Any:
        if not host_x.flags.writeable:  # a call of `check_writable` would double the cost
            check_writable(host_x)
        total = bound_call()  # named as the watch expects
        return flat if total is None else total

    return reduce_x


def reduce(
    x: np.ndarray, op: str = "sum", root: int = 0, world: World | None = None, check: bool = True
) -> None:
    """Reduce `x` in place to `root`; elsewhere `x` ends with partial results.

    `x`: any shape. Binomial tree: ceil(log2 P) steps. Raises as `allreduce`.
    """
    world, flat, operation = _validate_and_match(world, "reduce", x, check=check, op=op, root=root)
    _divided_if_mean(op, partial(tree_reduce, root=root))(world.main, flat, operation)


def broadcast(x: np.ndarray, root: int = 0, world: World | None = None, check: bool = True) -> None:
    """Copy `root`'s `x` into every rank's `x`; binomial tree, ceil(log2 P) steps.

    `root`'s own may be read-only. Raises as `allreduce`.
    """
    world, flat, _ = _validate_and_match(
        world, "broadcast", x, check=check, root=root, root_sends=True
    )
    tree_broadcast(world.main, flat, root)


def reduce_scatter(
    x: np.ndarray, op: str = "sum", world: World | None = None, check: bool = True
) -> np.ndarray:
    """Return this rank's row of reduced `x` (P, ...), a view of `x`; it overwrites other rows.

    Ring: P-1 steps, n(P-1)/P bytes sent. Raises as `allreduce`.
    """
    world, flat, operation = _validate_and_match(
        world, "reduce_scatter", x, check=check, op=op, has_rows=True
    )
    _divided_if_mean(op, ring_reduce_scatter)(world.main, flat, operation)
    return x[world.rank]


def all_gather(x: np.ndarray, world: World | None = None, check: bool = True) -> np.ndarray:
    """Return a new array (P, *x.shape) of every rank's `x`; ring, P-1 steps, x.nbytes each.

    `x` may be read-only. Raises as `allreduce`.
    """
    world, *_ = _validate_and_match(world, "all_gather", x, check=check, writes_x=False)
    rows = _allocate_rows(x, world)
    ring_all_gather(world.main, rows.reshape(-1))
    return rows


def gather(
    x: np.ndarray, root: int = 0, world: World | None = None, check: bool = True
) -> np.ndarray | None:
    """Return a new array (P, *x.shape) of every rank's `x` on `root`, None elsewhere.

    `x` may be read-only. Raises as `allreduce`.
    """
    world, flat, _ = _validate_and_match(world, "gather", x, check=check, root=root, writes_x=False)
    if world.rank != root:
        world.link.isend(flat, root).wait()
        return None
    rows = _allocate_rows(x, world)
    rooted.gather(world.main, rows.reshape(-1), root)
    return rows


def scatter(
    x: np.ndarray, root: int = 0, world: World | None = None, check: bool = True
) -> np.ndarray:
    """Return row r of `root`'s `x` (P, ...) on rank r: a view of rank r's `x`, filled by the call.

    `root`'s own may be read-only. Raises as `allreduce`.
    """
    world, flat, _ = _validate_and_match(
        world, "scatter", x, check=check, root=root, has_rows=True, root_sends=True
    )
    rooted.scatter(world.main, flat, root)
    return x[world.rank]


def all_to_all(x: np.ndarray, world: World | None = None, check: bool = True) -> np.ndarray:
    """Return a new array like `x` (P, ...): on rank r, row s is row r of rank s.

    `x` may be read-only. Raises as `allreduce`.
    """
    world, flat, _ = _validate_and_match(
        world, "all_to_all", x, check=check, has_rows=True, writes_x=False
    )
    out = namespace(x).empty(x.shape, x.dtype)
    rooted.all_to_all(world.main, flat, out.reshape(-1))
    return out


def barrier(world: World | None = None) -> None:
    """Wait until every rank has called this; collective."""
    (world or init()).barrier()


def _divided_if_mean(op: str, function: SumFunction) -> Callable[..., Any]:
    """Return `function`, a reduction; for the mean, its sum divided by the number of ranks."""
    return partial(mean, reduce=function) if op == "mean" else function


def _validate_and_match(
    requested_world: World | None, name: str, x: Any, *, check: bool, **arguments: Any
) -> tuple[World, np.ndarray, Any]:
    """Return the World, flat `x` and the operation; with `check`, ranks compare their calls."""
    world = requested_world or init()
    flat, operation, call = _validate(world, name, x, check=check, **arguments)
    if check:
        must_match(world.main, call)
    return world, flat, operation


def _validate(world: World, name: str, x: Any, *, check: bool, **arguments: Any) -> ValidArguments:
    """Return the arguments if valid; else raise UsageError, with `check` on all ranks."""
    try:
        return validate_arguments(world, name, x, **arguments)
    except UsageError as error:
        fault = error
    if check:  # outside of `except`: all ranks' error has no earlier traceback before it
        must_match(world.main, fault_signature(str(fault)))
    raise fault


def _allocate_rows(x: np.ndarray, world: World) -> np.ndarray:
    """Return an array (P, *x.shape) that holds `x` in this rank's row."""
    rows = namespace(x).empty((world.size, *x.shape), x.dtype)
    rows[world.rank] = x
    return rows
