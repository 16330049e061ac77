"""The part of the time in which steps are completed while ranks are killed again and again."""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from lib.survival_job import RANKS, TRAIN, Job, progress, settings, share_of_a_core

CALIBRATION_STEPS = 20  #: between the checkpoints whose cost is measured
TARGETS = {5.0: 0.88, 30.0: 0.97}  #: seconds from fault to fault: the ETTR to reach with spares


def measure_ettr(arguments: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, bool]]:
    """Return a row per variant: spares for all losses, one spare, and restarts alone."""
    period, part = arguments.period, f"{arguments.period:g} s"
    checkpoint_s, restart_s, step_s = calibrate(arguments.seed)
    interval_s = math.sqrt(2 * checkpoint_s * period)  # Young, 1974
    every_steps = max(1, round(interval_s / step_s))
    facts = {
        "period_s": period, "duration_s": arguments.duration,
        "checkpoint_s": checkpoint_s, "restart_s": restart_s, "step_s": step_s,
        "checkpoint_steps": every_steps,
        "daly": daly(interval_s, checkpoint_s, restart_s, period),
    }  # fmt: skip
    spares = {"spares": arguments.spares, "one spare": 1, "restart": 0}
    rows = []
    for variant in arguments.variants.split(","):
        trial = Trial(variant, spares[variant], every_steps, arguments.seed)
        row = {"part": f"{part}, {variant}", "variant": variant, "spares": spares[variant], **facts}
        rows.append({**row, **trial.run(period, arguments.duration)})
        print(rows[-1], flush=True)
    return rows, ettr_claims(period, rows)


def ettr_claims(period: float, rows: Sequence[dict[str, Any]]) -> dict[str, bool]:
    row = next((row for row in rows if row["variant"] == "spares"), None)
    if row is None:
        return {}
    target, share = TARGETS.get(period, 0.88), max(row["spares_share_of_a_core"], default=0.0)
    return {
        f"{row['part']}: ETTR {row['ettr']:.1%} with {row['spares']} spares, >= {target:.0%}": (
            row["ettr"] >= target
        ),
        f"{row['part']}: a spare uses {share:.2%} of a core at most, <= 1 %": share <= 0.01,
    }


def daly(interval_s: float, checkpoint_s: float, restart_s: float, mtbf_s: float) -> float:
    """Return the expected part of the time that is useful, with exponentially spread faults.

    Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", 2006,
    equation 20: the time for T seconds of work is
    M exp(R / M) (exp((interval + C) / M) - 1) T / interval.
    """
    cycle = math.expm1((interval_s + checkpoint_s) / mtbf_s)
    return interval_s / (mtbf_s * math.exp(restart_s / mtbf_s) * cycle)


def calibrate(seed: int) -> tuple[float, float, float]:
    """Return the seconds of a checkpoint, of a restart, and of a step, of jobs without ULFM."""
    with tempfile.TemporaryDirectory() as out:
        arguments = [*TRAIN, *settings(f"checkpoint.every_steps={CALIBRATION_STEPS}")]
        restarts = []
        with Job([*arguments, "--out", out, "--resume"], RANKS, elastic=False) as job:
            job.await_steps(RANKS, 20 * CALIBRATION_STEPS)
            times, steps = progress(list(job.events().values()))
            kill = job.kill(random.Random(seed))
            job.process.wait(60)
        with Job([*arguments, "--out", out, "--resume"], RANKS, elastic=False) as job:
            job.await_steps(RANKS, 1)
            restarts.append(float(progress(list(job.events().values()))[0][0]) - kill.at_s)
        gaps = np.diff(times)
        after_checkpoint = steps[:-1] % CALIBRATION_STEPS == 0
        step_s = float(np.median(gaps[~after_checkpoint]))
        checkpoint_s = float(np.median(gaps[after_checkpoint])) - step_s
    return max(checkpoint_s, 1e-4), float(np.mean(restarts)), step_s


class Trial:
    """A training whose ranks are killed, and which is started again where it ends."""

    def __init__(self, variant: str, spares: int, every_steps: int, seed: int):
        self._out = tempfile.mkdtemp(prefix="survival-run-")
        # With a spare for each loss no checkpoint is read, so none is written before the end.
        checkpoints = [] if variant == "spares" else [f"checkpoint.every_steps={every_steps}"]
        arguments = [*TRAIN, *settings(*checkpoints), "--out", self._out, "--resume"]
        elastic = variant != "restart"
        self._start = lambda: Job(arguments, RANKS, spares, elastic, min_ranks=RANKS)
        self._jobs: list[Job] = []
        self._chance = random.Random(f"{seed} {variant}")

    def run(self, period_s: float, duration_s: float) -> dict[str, Any]:
        """Return the facts of the time from the first steps on."""
        with ExitStack() as stack:
            stack.callback(shutil.rmtree, self._out, True)
            job = self._begin(stack)
            job.await_steps(RANKS, 50, timeout_s=240)
            shares = share_of_a_core(job.spares(), 4.0)
            begin_s = time.monotonic()
            self._kill_until(stack, begin_s, period_s, begin_s + duration_s)
            end_s = time.monotonic()
            summary = self._stop()
            return {**self._describe(begin_s, end_s), "spares_share_of_a_core": shares, **summary}

    def _begin(self, stack: ExitStack) -> Job:
        job = stack.enter_context(self._start())
        self._jobs.append(job)
        return job

    def _kill_until(self, stack: ExitStack, begin_s: float, period_s: float, end_s: float) -> None:
        """Kill a rank in each period, wherever the job is then."""
        next_s = begin_s + period_s * self._chance.random()
        faults = 0
        while (now_s := time.monotonic()) < end_s:
            if self._jobs[-1].process.poll() is not None:
                self._begin(stack)
            if now_s >= next_s and self._jobs[-1].live():
                self._jobs[-1].kill(self._chance)
                faults += 1
                next_s = begin_s + period_s * (faults + self._chance.random())
            time.sleep(0.02)

    def _stop(self) -> dict[str, Any]:
        """Stop the last job, and return the entries on losses of its summary."""
        job = self._jobs[-1]
        if not job.await_steps(RANKS, 1, timeout_s=60):
            return {"ended": job.tail()}
        job.stop()
        summary = json.loads(Path(self._out, "summary.json").read_text())
        keys = ("ettr", "lost_s", "wall_s", "spares_used")
        losses = len(summary.get("recoveries", []))
        return {"summary": {**{key: summary.get(key) for key in keys}, "recoveries": losses}}

    def _describe(self, begin_s: float, end_s: float) -> dict[str, Any]:
        """Return the part of the time with progress, and what a step takes without losses."""
        times, _ = progress([e for job in self._jobs for e in job.events().values()])
        times = times[(times >= begin_s) & (times <= end_s)]
        kills = np.array([kill.at_s for job in self._jobs for kill in job.kills])
        ends = np.concatenate([[begin_s], times, [end_s]])
        gaps = np.diff(ends)
        is_lost = np.histogram(kills, ends)[0] > 0
        wall_s, step_s = end_s - begin_s, float(np.median(gaps[~is_lost]))
        return {
            "faults": len(kills), "jobs": len(self._jobs), "wall_s": wall_s, "steps": len(times),
            "ettr": 1 - float(gaps[is_lost].sum()) / wall_s,
            "goodput": len(times) * step_s / wall_s, "median_step_s": step_s,
            "lost_s_per_fault": float(gaps[is_lost].sum()) / max(len(kills), 1),
        }  # fmt: skip
