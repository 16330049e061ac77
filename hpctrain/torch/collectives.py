"""The collectives of `torch.distributed` on flat arrays, by our algorithms.

Operands are the arrays of this rank; lengths may differ between ranks where a name ends in
`_uneven`. Results are written in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from hpctrain.collectives import Group
from hpctrain.collectives.all_gathers import ALL_GATHERS, ranks_share_memory
from hpctrain.collectives.chunks import bounds, chunks
from hpctrain.collectives.direct import reduce_scatter as direct_reduce_scatter
from hpctrain.collectives.mean import SumFunction, mean
from hpctrain.collectives.ordered import sum_blocks
from hpctrain.collectives.reductions.operations import Operation, operation
from hpctrain.collectives.ring import reduce_scatter as ring_reduce_scatter
from hpctrain.collectives.rooted import gather_parts, scatter_parts
from hpctrain.collectives.signature import Signature, bind_match
from hpctrain.collectives.tree import broadcast
from hpctrain.collectives.tree import reduce as tree_reduce
from hpctrain.core.xp import Array, namespace, on_device
from hpctrain.tuning.select import auto, bind

Arrays = Sequence[Array]


def bind_all_reduce(
    group: Group, x: Array, name: str, ordered: bool, call: Signature | None
) -> Callable[[], Any]:
    """Return a call that reduces `x` in place by operation `name`; "mean" divides the sum.

    `ordered`: sums are added in the order of ranks, so that their bits depend on no algorithm.
    """
    if group.link.size == 1:
        return _do_nothing
    if name == "mean":
        reduce = _sum_in_order if ordered else auto
        return _matched(group, call, partial(_reduce_to_mean, group, x, reduce))
    op = operation(name, x.dtype)
    if ordered and name == "sum":
        return _matched(group, call, partial(_sum_in_order, group, x, op))
    return bind(group, x, op, auto, call)


def _matched(group: Group, call: Signature | None, reduce: Callable[[], Any]) -> Callable[[], Any]:
    """Return `reduce` behind the comparison of ranks' calls; without a `call`, `reduce`."""
    if call is None:
        return reduce
    match = bind_match(group, call)

    def match_and_reduce() -> None:
        match()
        reduce()

    return match_and_reduce


def reduce(group: Group, x: Array, name: str, root: int) -> None:
    """Reduce `x` in place on `root`; elsewhere `x` is unchanged."""
    target = x if group.link.rank == root else x.copy()
    if name == "mean":
        _reduce_to_mean(group, target, partial(tree_reduce, root=root))
    else:
        tree_reduce(group, target, operation(name, x.dtype), root)


def all_gather(group: Group, x: Array, rows: Array) -> None:
    """Fill `rows` (P n,) with every rank's `x` (n,)."""
    chunks(rows, group.link.size)[group.link.rank][:] = x
    ALL_GATHERS["auto"](group, rows)


def all_gather_uneven(group: Group, x: Array, outputs: Arrays) -> None:
    """Fill output r with rank r's `x`; each is broadcast by its owner."""
    outputs[group.link.rank][:] = x
    for root, output in enumerate(outputs):
        broadcast(group, output, root)


def reduce_scatter(group: Group, rows: Array, name: str, output: Array, ordered: bool) -> None:
    """Write this rank's row of the reduced `rows` (P n,) to `output` (n,); overwrites `rows`."""
    if group.link.size > 1:
        reduce = _sum_in_order if ordered and name in ("sum", "mean") else _reduce_rows
        if name == "mean":
            _reduce_to_mean(group, rows, reduce)
        else:
            reduce(group, rows, operation(name, rows.dtype))
    output[:] = chunks(rows, group.link.size)[group.link.rank]


def _reduce_rows(group: Group, rows: Array, op: Operation) -> Array:
    """Reduce this rank's row of `rows` (P n,), and return it; the others are overwritten."""
    if on_device(rows) and ranks_share_memory(group):
        return direct_reduce_scatter(group, rows, op, bounds(rows.size, group.link.size))
    return ring_reduce_scatter(group, rows, op)


def gather(group: Group, inputs: Arrays, outputs: Arrays, root: int) -> None:
    """Fill the root's output r with the only input of rank r."""
    if group.link.rank == root:
        outputs[root][:] = inputs[0]
    gather_parts(group, inputs[0], outputs, root)


def scatter(group: Group, inputs: Arrays, outputs: Arrays, root: int) -> None:
    """Fill the only output of rank r with the root's input r."""
    if group.link.rank == root:
        outputs[0][:] = inputs[root]
    scatter_parts(group, inputs, outputs[0], root)


def _do_nothing() -> None:
    """Reduce over one rank."""


def _sum_in_order(group: Group, x: Array, _: Operation) -> None:
    sum_blocks(group, [x], group.link.size, ALL_GATHERS["auto"])


def _reduce_to_mean(group: Group, x: Array, reduce: SumFunction) -> None:
    """Replace the ranks' `x`, or this rank's part, by their mean; integers rounded toward zero."""
    op = operation("sum", x.dtype)
    if x.dtype.kind not in "biu":
        mean(group, x, op, reduce)
        return
    total = reduce(group, x, op)
    total, ranks = x if total is None else total, group.link.size
    total -= namespace(x).fmod(total, ranks)
    total //= ranks
