"""Training regimes of all engines, and data on which each of them learns."""

from __future__ import annotations

from functools import cache

from hpctrain import data, engines

REGIMES = {
    "single": engines.Single(),
    "allreduce": engines.AllReduce(),
    "sharded": engines.AllReduce(shard_optimizer=True),
    "ps-sync": engines.PsSync(servers=2, placement="colocated"),
    "ps-async": engines.PsAsync(),
    "local-sgd": engines.LocalSgd(period=3),
    "averaged": engines.LocalSgd(period=3, momentum="averaged"),
    "delayed": engines.LocalSgd(period=3, delay=1),
    "diloco": engines.LocalSgd(period=3, outer="nesterov"),
    "easgd": engines.Easgd(period=3),
    "gossip": engines.Gossip(),
    "gossip, ring": engines.Gossip(graph="ring"),
}


@cache
def digits() -> data.Dataset:
    return data.DigitsOptions().load(0).train
