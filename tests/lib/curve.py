"""A run whose ranks, threads, are all killed, that goes on with others, and then loses rank 0.

    python curve.py KIND FOLDER

Rows every 2 steps, a checkpoint every 8 steps, all ranks killed after step 14, resumed at step 8 on
three ranks, rank 0 lost after step 20; 32 steps. Prints what the tracker's own reader returns.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import trackers

import hpctrain as ht
from hpctrain.core.errors import RankKilled
from hpctrain.training.loggers import LOGGERS, run_loggers
from hpctrain.transport.threads.ranks import run_ranks
from hpctrain.world import over_threads

NEVER = 10**9
LIMIT_S = 300.0
X = np.random.default_rng(0).standard_normal((60, 8)).astype(np.float32)


class Killed:
    """A callback by which this rank ends at the row of `step`, as if by SIGKILL.

    Its logger is idle then: of a rank that is a thread it would go on.
    """

    def __init__(self, step: int, logger: Any):
        self.step, self.logger = step, logger

    def on_row(self, row: dict) -> None:
        if row["step"] == self.step:
            if (feed := self.logger._feed) is not None:
                idle = threading.Event()
                if self.logger.kind == "wandb":  # its process ends with that of a rank
                    feed._worker.put(lambda: sys.modules["wandb"].teardown())
                feed._worker.put(idle.set)
                idle.wait(LIMIT_S)
            raise RankKilled


def train(kind: str, out: str, ranks: int, victims: dict[int, int], resume: bool = False) -> None:
    """Train on threads; `victims`: the step after which a rank is killed."""

    def body(link):
        world = over_threads(link)
        step, logger = victims.get(link.rank), LOGGERS[kind](config={"mine": [1, 2]})
        trainer = ht.Trainer(
            ht.nn.Model([ht.nn.Linear(3)], 8),
            ht.optim.sgd(rate=0.1),
            ht.engines.AllReduce(reduction="ordered"),
            world=world,
            callbacks=[logger, *[Killed(step, logger)] * bool(step)],
        )
        trainer.fit(
            (X, X[:, :3].argmax(1)),
            steps=32,
            batch=12,
            out=out,
            resume=resume,
            options=ht.FitOptions(interval_steps=2, evaluate_steps=4),
            checkpoints=ht.CheckpointOptions(every_steps=8),
            evaluate=(X, X[:, :3].argmax(1)),
        )
        trainer.close()

    run_ranks(ranks, body, LIMIT_S, {0: NEVER})


def main(kind: str, out: str) -> None:
    os.register_at_fork(before=lambda: os._exit(99))  # not before `exec` of subprocess
    run_loggers.END_S = LIMIT_S
    train(kind, out, 2, {0: 14, 1: 14})
    train(kind, out, 3, {0: 20}, resume=True)
    print(json.dumps(trackers.read(kind, Path(out))))


if __name__ == "__main__":
    main(*sys.argv[1:])
