"""Handles of operations under way, and operations without tensors."""

from __future__ import annotations

from itertools import count
from typing import Any

from hpctrain.horovod.torch.named.requests import BARRIER, JOIN, Request
from hpctrain.horovod.torch.process_sets import ProcessSet, engine_of, global_process_set
from hpctrain.horovod.torch.submission import Call, Running, make_name

_running: dict[int, Running] = {}
_next_handle = count(1).__next__


def start(running: Running) -> int:
    """Return the handle of an operation that was submitted."""
    handle = _next_handle()
    _running[handle] = running
    return handle


def poll(handle: int) -> bool:
    """Return whether the operation of `handle` is over: then `synchronize` does not wait."""
    running = _running.get(handle)
    return running is None or running.engine.is_over(running.entry)


def synchronize(handle: int) -> Any:
    """Return the result of an asynchronous operation once it is over; None if it was before."""
    running = _running.pop(handle, None)
    return None if running is None else running.wait()


def join(device: int = -1) -> int:
    """Take part with zeros in what other ranks reduce, until all ranks have joined.

    For ranks with fewer batches. Returns the rank that joined last. `device`: ignored, tensors lie
    where other ranks have them.
    """
    return engine_of(global_process_set).run(Request(JOIN, JOIN), limit_s=float("inf"))


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return once all ranks have called, and what they submitted before has run."""
    engine = engine_of(process_set)
    engine.run(Request(make_name(Call(BARRIER, None), engine), BARRIER))
