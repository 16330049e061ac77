"""Options of the engine `allreduce` that exclude each other, each pair with its message."""

from __future__ import annotations

from collections.abc import Iterator

from hpctrain.gradients.reducer import WireOptions


def contradictions(
    options: WireOptions, shards_optimizer: bool, shares_parameters: bool
) -> Iterator[tuple[bool, str]]:
    """Yield each pair of options that exclude each other: whether both are given, and a message.

    `shards_optimizer`, `shares_parameters`: the options `shard_optimizer` and `share_parameters`.
    """
    is_ordered, compression = options.reduction == "ordered", options.compression
    yield (
        shards_optimizer and shares_parameters,
        "[engine] shard_optimizer: expected without share_parameters, seen both; where "
        "parameters are shared, a rank keeps only a part of the optimizer's state anyway",
    )
    for key, is_set in {
        "shard_optimizer": shards_optimizer,
        "share_parameters": shares_parameters,
    }.items():
        yield (
            is_set and compression != "none",
            f"[engine] {key}: ranks exchange ranges of the gradient as it is; "
            f"expected [wire] compression none, seen {compression}",
        )
    yield (
        shares_parameters and is_ordered,
        "[engine] share_parameters: ranks add what their neighbours have, in the order of "
        "ranks; expected [wire] reduction 'fast', seen 'ordered'",
    )
    yield (
        shares_parameters and options.overlap == "always",
        "[engine] share_parameters: sums are made in the pass of the update, after "
        "backward; expected [wire] overlap 'auto' or 'never', seen 'always'",
    )
    yield (
        shards_optimizer and options.algorithm not in ("auto", "ring"),
        "[engine] shard_optimizer: ranks exchange ranges along a ring; expected [wire] "
        f"algorithm auto or ring, seen {options.algorithm}",
    )
    beside_priority = {
        "shard_optimizer": shards_optimizer,
        "share_parameters": shares_parameters,
        "compression": compression != "none",
        "reduction 'ordered'": is_ordered,
    }
    for key, is_set in beside_priority.items():
        yield (
            is_set and options.priority,
            "[wire] priority: expected all parameters on each rank, updated bucket by bucket "
            f"from plain sums; seen {key}",
        )
