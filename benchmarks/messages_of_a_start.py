"""Claims: a start of a training sends 8 times fewer bytes per rank than with all-gathers, P >= 64.

    python benchmarks/messages_of_a_start.py [--ranks 2,8,64,512]

Messages and bytes that each rank sends, counted on all its links. Ranks are threads of one process,
8 to a node, and train a perceptron of 650 parameters on digits with the engine allreduce, P samples
per step, without a folder:

    world     the start of the World: node memory, choices of `auto`
    trainer   the construction of the Trainer: options, layout, parameters of rank 0
    fit       the first call of `fit`: one step, the hash of the parameters, the summary
    step      one further step: a call of `fit` of two steps, less a call of one step

Between threads a split of a link sends no message, and a rank knows all hosts: over MPI both add to
the start. Rows of calls are closed forms, not counted here: of the docstrings in
hpctrain/world/agreement.py, which tests/world/test_agreement.py counts, and of the all-gather of
short texts that stood for each of these calls before. messages-of-a-start-before.json has counts of
commit e270110a, the last one with all-gathers.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from lib.common import RESULTS, short_text
from lib.results import read_text, write_text

from hpctrain import data, nn, optim
from hpctrain.training.trainer import Trainer
from hpctrain.transport.machine import facts
from hpctrain.transport.threads.hub import Hub
from hpctrain.transport.threads.link import LocalLink
from hpctrain.transport.threads.ranks import run_ranks
from hpctrain.world import over_threads

RANKS_PER_NODE = 8
HEAD_BYTES = 128  # of a length and a short text
PHASES = ("world", "trainer", "fit", "step")
BEFORE = RESULTS / "messages-of-a-start-before.json"
RESULT = RESULTS / "messages-of-a-start.json"
LARGEST_RANKS = 10_000  #: of closed forms
Row = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", default="2,8,64,512")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    sizes = [int(size) for size in arguments.ranks.split(",")]
    rows = [row for size in sizes for row in rows_of_phases(size, count_phases(size))]
    claims = claims_of(rows, json.loads(read_text(BEFORE))["rows"])
    rows += [row for size in [*sizes, LARGEST_RANKS] for row in rows_of_calls(size)]
    document = {"machine": facts(["this"], "threads"), "claims": claims, "rows": rows}
    write_text(RESULT, json.dumps(document, indent=1) + "\n")
    for row in rows:
        print("  ".join(f"{key}={short_text(value)}" for key, value in row.items()))
    for claim, is_held in claims.items():
        print("holds:" if is_held else "DOES NOT HOLD:", claim)
    return int(not all(claims.values()))


def count_phases(size: int) -> np.ndarray:
    """Return the messages and bytes of each rank in each phase, (ranks, phases, 2)."""
    hosts = tuple(f"node-{rank // RANKS_PER_NODE}" for rank in range(size))
    train = data.DigitsOptions().load(0).train
    links: dict[int, list[LocalLink]] = {rank: [] for rank in range(size)}
    make = LocalLink.__init__

    def make_noted(link: LocalLink, hub: Hub, rank: int) -> None:
        make(link, hub, rank)
        links[hub.members[rank]].append(link)

    def act(link: LocalLink) -> np.ndarray:
        sums: list[np.ndarray] = []

        def end_phase() -> None:
            link.barrier()
            traffics = [own.endpoint.traffic for own in links[link.rank]]
            sums.append(np.sum([(x.messages_sent, x.bytes_sent) for x in traffics], axis=0))
            link.barrier()

        end_phase()
        world = over_threads(link, hosts)
        end_phase()
        model = nn.MlpOptions(widths=[64, 10]).build((8, 8), 10)
        trainer = Trainer(model, optim.sgd(0.1), world=world)
        end_phase()
        for steps in (1, 1, 2):
            trainer.fit(train, batch=size, steps=steps)
            end_phase()
        world_sums, trainer_sums, first_fit, one_step, two_steps = np.diff(sums, axis=0)
        return np.stack([world_sums, trainer_sums, first_fit, two_steps - one_step])

    LocalLink.__init__ = make_noted  # type: ignore[method-assign]
    try:
        return np.stack(run_ranks(size, act, timeout_s=600))
    finally:
        LocalLink.__init__ = make  # type: ignore[method-assign]


def rows_of_phases(size: int, counts: np.ndarray) -> list[Row]:
    """Return the row of each phase, and of the whole start, of `counts` (ranks, phases, 2)."""
    counts_by_name = {phase: counts[:, i] for i, phase in enumerate(PHASES)}
    counts_by_name["start"] = counts[:, : PHASES.index("step")].sum(axis=1)
    return [
        {
            "phase": phase,
            "ranks": size,
            "by": "count",
            "messages": float(table[:, 0].mean()),
            "bytes": float(table[:, 1].mean()),
            "messages_max": int(table[:, 0].max()),
            "bytes_max": int(table[:, 1].max()),
        }
        for phase, table in counts_by_name.items()
    ]


#: Messages and bytes of the rank that sends most; p: ranks, s: ceil(log2 p)
CLOSED_FORMS: dict[str, Callable[[int, int], tuple[int, int]]] = {
    "on_all_ranks": lambda p, s: (s, 8 * s),
    "must_agree": lambda p, s: (s, 32 * s),
    "from_first": lambda p, s: (s, HEAD_BYTES * s),
    "gather": lambda p, s: (s, HEAD_BYTES * (p - 1)),
}


def rows_of_calls(size: int) -> list[Row]:
    """Return a row for each call of World, by its closed form."""
    rows = []
    for call, closed_form in CLOSED_FORMS.items():
        messages, nbytes = closed_form(size, math.ceil(math.log2(size)))
        rows.append(
            {
                "call": call,
                "ranks": size,
                "by": "closed form",
                "messages_max": messages,
                "bytes_max": nbytes,
            }
        )
    return rows


def claims_of(rows: list[Row], rows_before: list[Row]) -> dict[str, bool]:
    """Return whether the start and the step fell for all numbers of ranks that both have."""
    before = {(row["phase"], row["ranks"]): row for row in rows_before}
    claims = {}
    for row in rows:
        earlier = before.get((row["phase"], row["ranks"]))
        if earlier is None or row["phase"] not in ("start", "step"):
            continue
        least = 8 if row["phase"] == "start" and row["ranks"] >= 64 else 1
        claims[
            f"a {row['phase']} on {row['ranks']} ranks: {row['messages']:.1f} messages and "
            f"{row['bytes']:.0f} bytes per rank; before {earlier['messages']:.1f} and "
            f"{earlier['bytes']:.0f}, >= {least} times as many"
        ] = earlier["bytes"] >= least * row["bytes"]
    return claims


if __name__ == "__main__":
    sys.exit(main())
