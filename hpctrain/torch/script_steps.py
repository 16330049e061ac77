"""The steps of a user's script: their trace, and their times for `hpctrain scale`.

    step   batch | forward, backward         | wait for gradients | update
           other   compute                     wait                 compute      of the main thread

A step ends with a step of the optimizer that the script calls first, on every rank. Collectives and
waits add spans to the trace of the World, as those of a Trainer do: of ht.torch.sync, of a process
group, of hvd. What lies between them, and between the batches of a DataLoader, is compute.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import sys
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from threading import get_ident
from time import perf_counter
from typing import Any, NoReturn

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import dataloader

from hpctrain.core import launchers
from hpctrain.core.printing import say
from hpctrain.core.run_files import run_folder
from hpctrain.training.run_options import TraceOptions
from hpctrain.training.timeline import Timeline
from hpctrain.watch.trace import Span, Trace
from hpctrain.world import World, current_world

#: The variables of the folder of a trace, and of a trial: the fields of `Trial` as JSON.
TRACE, TRIAL = "HPCTRAIN_TRACE", "HPCTRAIN_TRIAL"
TIMES = ("compute_s", "wire_s", "wait_s")
MAX_SPANS = 1 << 20  #: of an interval
NO_RANKS = (
    "its ranks do not train together by hpctrain: expected a process group of the backend "
    '"hpctrain", ht.torch.sync or hvd.init()'
)
NO_SAMPLES = "no DataLoader yielded samples: give their number by --samples-per-step"


@dataclass(frozen=True)
class Trial:
    """A trial of `hpctrain scale`: its folder, and its numbers of steps."""

    out: str
    interval: int  #: steps of a row
    total: int
    samples: int | None  #: of a step on all ranks; None: those that DataLoaders yield


def watch(environ: MutableMapping[str, str]) -> None:
    """Let the steps of this process be recorded, if a variable asks for it; not of its children."""
    trial, folder = environ.pop(TRIAL, ""), environ.pop(TRACE, "")
    if trial:
        TrialRecorder(Trial(**json.loads(trial))).watch()
    elif folder:
        TraceRecorder(Path(folder)).watch()


class Recorder:
    """The steps of this process; derived classes use their spans."""

    def __init__(self) -> None:
        self.step, self.trace = 0, Trace()
        self.world: World | None = None
        self.samples = 0  #: that this rank has read for training
        self._optimizer = 0  # its identity
        self._process, self._thread = os.getpid(), 0
        self._end_s = 0.0  # of the last step

    def watch(self) -> None:
        """Register the hooks of optimizers and of DataLoaders."""
        register_optimizer_step_post_hook(self._end_step)
        make_batch = dataloader._BaseDataLoaderIter.__next__

        def make_timed_batch(loader: Any) -> Any:
            start_s = perf_counter()
            batch = make_batch(loader)
            self.trace.add("batch", "other", start_s, perf_counter())
            if torch.is_grad_enabled():  # not for an evaluation
                self.samples += batch_length(batch)
            return batch

        dataloader._BaseDataLoaderIter.__next__ = make_timed_batch

    def _end_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self._optimizer = self._optimizer or id(optimizer)
        if id(optimizer) != self._optimizer or os.getpid() != self._process:
            return
        if self.step == 0:
            self.world, self._thread = current_world(), get_ident()
            if self.world is None and launchers.launched(os.environ).size > 1:
                self.refuse(NO_RANKS)
                return
            self.trace = self.trace if self.world is None else self.world.trace
            self.begin(optimizer)
        else:
            self.add_step(self._end_s, perf_counter())
        self.step += 1
        self.trace.step = self.step
        self.end_step()
        self._end_s = perf_counter()

    def main_spans(self, spans: Sequence[Span]) -> list[Span]:
        """Return the spans of the thread that makes steps."""
        return [span for span in spans if span.thread == self._thread]

    def _exit(self) -> None:
        if os.getpid() == self._process:
            self.end()

    def refuse(self, reason: str) -> None:
        """Handle a script whose steps cannot be recorded."""
        raise NotImplementedError

    def begin(self, optimizer: torch.optim.Optimizer) -> None:
        """Begin to record, at the end of the first step; collective."""
        raise NotImplementedError

    def add_step(self, start_s: float, stop_s: float) -> None:
        """Record a step between two readings of the clock."""
        raise NotImplementedError

    def end_step(self) -> None:
        """Handle the end of step number `step`; collective."""

    def end(self) -> None:
        """Handle the end of the script; collective if it is one without an error."""


class TraceRecorder(Recorder):
    """Writes the timeline of a script: `hpctrain launch --trace DIR -- PROGRAM`."""

    def __init__(self, folder: Path):
        super().__init__()
        self._folder, self._span_count = folder, 0
        self._timeline: Timeline | None = None

    def refuse(self, reason: str) -> None:
        self._optimizer = -1  # of none
        if launchers.launched(os.environ).rank == 0:
            say(f"hpctrain: no trace of this script: {reason}", err=True)

    def begin(self, optimizer: torch.optim.Optimizer) -> None:
        if self.world is None:
            self.refuse(NO_RANKS)
            return
        self._timeline = Timeline(self.world, self._folder, TraceOptions(enabled=True))
        self._timeline.begin()
        atexit.register(self._exit)  # the last one is called first: MPI runs

    def add_step(self, start_s: float, stop_s: float) -> None:
        spans = self.trace.spans(self._span_count)
        main = self.main_spans(spans)
        wait_end_s = max((span.stop for span in main if span.category != "other"), default=stop_s)
        for gap in gaps(main, start_s, stop_s):
            name = "update" if gap[0] >= wait_end_s else "forward, backward"
            self.trace.add(name, "compute", *gap)
        self._span_count += len(self.trace.spans(self._span_count))

    def end(self) -> None:
        if self._timeline is not None:
            self._timeline.end()


class TrialRecorder(Recorder):
    """Times the steps of a trial of `hpctrain scale`, and ends the script after the last one."""

    def __init__(self, trial: Trial):
        super().__init__()
        self._trial, self._out = trial, Path(trial.out)
        self._times = dict.fromkeys(TIMES, 0.0)
        self._rows: list[dict[str, float]] = []
        self._start_s, self._gradient_bytes = 0.0, 0
        self._is_over = False
        atexit.register(self._exit)

    def refuse(self, reason: str) -> NoReturn:
        self._fail(reason)
        raise SystemExit(1)

    def begin(self, optimizer: torch.optim.Optimizer) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._gradient_bytes = sum(p.numel() * p.element_size() for p in parameters)
        self._start_s, self.samples = perf_counter(), 0
        self._forget_spans()

    def _forget_spans(self) -> None:
        self.trace.start(range(1 << 62), MAX_SPANS)

    def add_step(self, start_s: float, stop_s: float) -> None:
        spans = self.trace.spans()
        main = self.main_spans(spans)
        compute_s = sum(stop - start for start, stop in gaps(main, start_s, stop_s))
        batch_s = sum(span.stop - span.start for span in main if span.category == "other")
        self._times["compute_s"] += compute_s
        self._times["wait_s"] += max(0.0, stop_s - start_s - compute_s - batch_s)
        wire = [span.stop - span.start for span in spans if span.category == "wire"]
        self._times["wire_s"] += sum(wire)
        self._forget_spans()

    def end_step(self) -> None:
        if self.step % self._trial.interval == 0:
            wall_s = perf_counter() - self._start_s
            self._rows.append({"wall_s": wall_s, "samples": self.samples, **self._times})
        if self.step == self._trial.total:
            self._finish()

    def _finish(self) -> NoReturn:
        """Write the rows of all ranks; collective."""
        self._is_over = True
        world, own = self.world, {"host": socket.gethostname(), "rows": self._rows}
        texts = [json.dumps(own)] if world is None else world.gather(json.dumps(own))
        if world is None or world.rank == 0:
            self._write([json.loads(text) for text in texts])
        raise SystemExit(0)

    def _write(self, ranks: Sequence[dict[str, Any]]) -> None:
        interval, samples = self._trial.interval, self._trial.samples
        moments = [*zip(*(rank["rows"] for rank in ranks), strict=True)]
        counted = sum(row["samples"] for row in moments[-1]) - sum(
            row["samples"] for row in moments[0]
        )
        per_step = samples or round(counted / interval / max(len(moments) - 1, 1))
        if not per_step:
            self._fail(NO_SAMPLES)
            return
        if len(ranks) > 1 and not any(row["wire_s"] for row in moments[-1]):
            self._fail(NO_RANKS)
            return
        walls = [moment[0]["wall_s"] for moment in moments]
        rates = [interval * per_step / (stop - start) for start, stop in pairwise(walls)]
        rows = [
            {
                "step": interval * number, "steps": interval, "since_step": 0, "wall_s": wall_s,
                "samples_per_s": rate,
                "ranks": {name: [row[name] for row in moment] for name in TIMES},
            }
            for number, (moment, wall_s, rate) in enumerate(
                zip(moments, walls, [rates[0], *rates], strict=True), start=1
            )
        ]  # fmt: skip
        run_folder.append_row(self._out, *rows)
        facts = {"samples_per_step": per_step, "gradient_bytes": self._gradient_bytes}
        hosts = [*dict.fromkeys(rank["host"] for rank in ranks)]
        end = {"status": "done", "exit_code": 0, "steps": self.step, "world_size": len(ranks)}
        run_folder.write_summary(self._out, {**end, "hosts": hosts, **facts})

    def end(self) -> None:
        """Report a script that ended too early; one with an error has printed it."""
        if not self._is_over and vars(sys).get("last_value") is None:
            total = self._trial.total
            self._fail(f"the script ended after {self.step} of {total} steps: let it train longer")

    def _fail(self, reason: str) -> None:
        self._is_over = True
        if launchers.launched(os.environ).rank == 0:
            end = {"status": "failed", "exit_code": 1, "reason": reason}
            run_folder.write_summary(self._out, end)


def gaps(spans: Sequence[Span], start_s: float, stop_s: float) -> Iterator[tuple[float, float]]:
    """Yield the times between `start_s` and `stop_s` that no span covers."""
    for span in sorted(spans, key=lambda span: span.start):
        if span.start > start_s:
            yield start_s, min(span.start, stop_s)
        start_s = max(start_s, span.stop)
    if stop_s > start_s:
        yield start_s, stop_s


def batch_length(batch: Any) -> int:
    """Return the length of the first tensor in a batch; 0 if there is none."""
    if isinstance(batch, torch.Tensor):
        return len(batch) if batch.dim() else 1
    parts = batch.values() if isinstance(batch, Mapping) else batch
    nested = isinstance(batch, Mapping | list | tuple)
    return next(filter(None, map(batch_length, parts)), 0) if nested else 0
