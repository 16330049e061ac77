"""TensorBoard: an event file per part of a run, with a scalar per number."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from hpctrain.core import opening
from hpctrain.core.strict_json import to_json
from hpctrain.training.loggers.tracker import Tracker, Values, flatten, present


class TensorBoardTracker(Tracker):
    """Events, an event per step; scalars are float32, as TensorBoard has them.

    A part that goes on after a step begins with a session of that step, by which TensorBoard drops
    the later events of the files before it.
    """

    kind = "tensorboard"

    def begin(self, step: int, has_rows: bool) -> int:
        from tensorboard.compat.proto import event_pb2
        from tensorboard.plugins.hparams import summary_v2

        last_step = self._last_step(step)
        names = [name for name in opening.names_in(self.folder) if ".tfevents." in name]
        numbers = [int(name.rpartition(".")[2]) for name in names]
        stamp, host = int(time.time()), os.uname().nodename
        name = f"events.out.tfevents.{stamp:010d}.{host}.{max(numbers, default=-1) + 1:06d}"
        self._file = opening.create(self.folder / name, 2, exclusive=True)
        self._write(event_pb2.Event(file_version="brain.Event:2"))
        if numbers:
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._write(event_pb2.Event(step=step + 1, session_log=start))
        leaves = {name: value for name, value in flatten(self.target.config) if value is not None}
        self._write(event_pb2.Event(step=step, summary=summary_v2.hparams_pb(leaves)))
        self._write_text("config", self.target.config_json, step)
        self._step = step
        return last_step

    def log(self, step: int, values: Values) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2

        scalars = [
            summary_pb2.Summary.Value(tag=name, simple_value=value)
            for name, value in present(values).items()
        ]
        self._write(event_pb2.Event(step=step, summary=summary_pb2.Summary(value=scalars)))
        self._step = step

    def end(self, summary: Mapping[str, Any]) -> None:
        self._write_text("summary", to_json(summary, indent=1), self._step)
        self._file.close()

    def _write(self, event: Any) -> None:
        """Write an event whole or not at all: TensorBoard reads no file beyond a torn one."""
        from io import BytesIO

        from tensorboard.summary.writer.record_writer import RecordWriter

        event.wall_time = time.time()
        record, handle = BytesIO(), self._file.fileno()
        RecordWriter(record).write(event.SerializeToString())
        end = os.fstat(handle).st_size
        try:
            if os.write(handle, record.getvalue()) != len(record.getvalue()):
                raise OSError(f"no room for {self._file.name}")
        except OSError:
            os.ftruncate(handle, end)
            os.lseek(handle, end, os.SEEK_SET)
            raise

    def _write_text(self, tag: str, text: str, step: int) -> None:
        from tensorboard.compat.proto import event_pb2
        from tensorboard.plugins.text import summary_v2

        self._write(event_pb2.Event(step=step, summary=summary_v2.text_pb(tag, text)))

    def _last_step(self, step: int) -> int:
        """Return the last step, at most `step`, with events that no later session has dropped."""
        from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
        from tensorboard.compat.proto import event_pb2

        last_step = 0
        names = sorted(
            (name for name in opening.names_in(self.folder) if ".tfevents." in name),
            key=lambda name: int(name.rpartition(".")[2]),
        )
        for name in names:
            for record in RawEventFileLoader(str(self.folder / name)).Load():
                event = event_pb2.Event.FromString(record)
                if event.HasField("session_log"):
                    last_step = min(last_step, event.step - 1)
                else:
                    last_step = max(last_step, event.step)
        return min(last_step, step)
