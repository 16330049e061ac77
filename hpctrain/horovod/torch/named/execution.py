"""The operations that all ranks have submitted, run by our collectives on the memory of tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from time import perf_counter
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch

from hpctrain.collectives import broadcast
from hpctrain.collectives.rooted import exchange_parts
from hpctrain.core.errors import UsageError
from hpctrain.horovod.torch.named.entries import Entry
from hpctrain.horovod.torch.named.flat_reduction import (
    FlatReduction,
    finish_reduction,
    is_narrow,
    scale,
)
from hpctrain.horovod.torch.named.requests import (
    ALLGATHER,
    ALLREDUCE,
    ALLTOALL,
    BROADCAST,
    JOIN,
    REDUCESCATTER,
    Decision,
    Request,
)
from hpctrain.horovod.torch.named.settings import Settings
from hpctrain.torch import collectives
from hpctrain.torch.operations import for_each
from hpctrain.torch.tensors import as_array, as_bytes, copy_back, own_stream
from hpctrain.watch.trace import Trace
from hpctrain.world import World

Tensor: TypeAlias = torch.Tensor
Agreed: TypeAlias = tuple[Request, Entry | None]  #: None: this rank has joined

SMALL_BYTES = 1 << 16  #: A single tensor of more is reduced in its own memory.


class Execution:
    """Runs agreed operations in their order; one thread at a time may call."""

    timeline: ClassVar[Any] = None  #: see timeline.py; None: nothing is written

    def __init__(self, world: World, ranks: Sequence[int], settings: Settings, trace: Trace):
        """`ranks`: the global rank of each rank of `world`. `trace`: of the job."""
        self._trace = trace
        self._world, self._group, self._ranks = world, world.main, tuple(ranks)
        self._fusion_bytes, self._is_ordered = settings.fusion_bytes, settings.is_ordered
        self._agreed: list[Agreed] = []
        self._reduction = FlatReduction(world, self._is_ordered)
        self._runs: dict[str, Callable[[Entry], Any]] = {
            ALLGATHER: self._all_gather,
            BROADCAST: self._broadcast,
            ALLTOALL: self._all_to_all,
            REDUCESCATTER: self._reduce_scatter,
        }

    def add(self, decision: Decision, entries: dict[str, Entry]) -> None:
        """Let the next `run` do what was decided; `entries`: this rank's, under way.

        An entry that is over leaves `entries`.
        """
        name = decision.request.name
        entry = entries.get(name)
        if decision.error or decision.last_joined >= 0:
            self.run()  # what was decided before
            if entry is None:
                return
            del entries[name]
            if decision.error:
                entry.fail(decision.error)
            else:
                entry.finish(self._ranks[decision.last_joined])
            return
        assert entry is not None or JOIN in entries, f"'{name}' was never submitted here"
        self._entries = entries
        self._agreed.append((decision.request, entry))

    def run(self) -> None:
        """Run the operations that were added."""
        agreed, self._agreed = self._agreed, []
        alike: dict[Any, list[Agreed]] = {}
        for request, entry in agreed:
            if request.kind == ALLREDUCE:
                key = request[2:3] + request[4:]  # all but name, kind and shapes
                alike.setdefault(key, []).append((request, entry))
                continue
            self._run_all_reduces(alike)
            alike = {}
            if entry is not None:
                self._run([(request, entry)], self._run_other)
        self._run_all_reduces(alike)

    def _run_all_reduces(self, alike: dict[Any, list[Agreed]]) -> None:
        for agreed in alike.values():
            for batch in self._cut(agreed):
                self._run(batch, self._all_reduce)

    def _cut(self, agreed: list[Agreed]) -> Iterator[list[Agreed]]:
        """Yield the operations in batches of at most `fusion_bytes`."""
        batch: list[Agreed] = []
        nbytes = 0
        for request, entry in agreed:
            own_bytes = _length(request) * getattr(torch, request.dtype).itemsize
            if batch and (request.op == "Adasum" or nbytes + own_bytes > self._fusion_bytes):
                yield batch
                batch, nbytes = [], 0
            batch.append((request, entry))
            nbytes += own_bytes
        yield batch

    def _run(self, batch: list[Agreed], function: Callable[[list[Agreed]], None]) -> None:
        """Run `function` on a batch; its entries are over afterwards.

        A UsageError, which all ranks raise, fails the batch; any other error leaves its entries.
        """
        entries = [entry for _, entry in batch if entry is not None]
        start_s = perf_counter()
        try:
            waits = [entry for entry in entries if entry.event is not None]
            infers = any(entry.inputs and entry.inputs[0].is_inference() for entry in entries)
            with (
                torch.inference_mode() if infers else nullcontext(),
                _after_callers(waits) if waits else nullcontext(),
            ):
                function(batch)
                for entry in entries:
                    for_each(copy_back, entry.outputs, entry.targets or entry.outputs)
        except UsageError as error:
            for entry in entries:
                entry.fail(f"{entry.request}: {error}", error)
        stop_s = perf_counter()
        self._trace.add(f"{batch[0][0].kind} ({len(batch)})", "wire", start_s, stop_s)
        for entry in entries:
            self._entries.pop(entry.request.name, None)
            entry.is_over = True
        if (timeline := self.timeline) is not None:
            timeline.add(entries, start_s, stop_s)

    def _run_other(self, batch: list[Agreed]) -> None:
        ((request, entry),) = batch
        assert entry is not None
        if request.kind in self._runs:
            entry.result = self._runs[request.kind](entry)

    def _all_reduce(self, batch: list[Agreed]) -> None:
        request = batch[0][0]
        sources: list[Tensor] = []
        targets: list[Tensor] = []
        for one, entry in batch:
            if entry is None:
                options: Any = {"dtype": getattr(torch, one.dtype), "device": one.device}
                sources += [torch.zeros(shape, **options) for shape in one.shapes]
            else:
                sources += entry.inputs
                targets += entry.outputs
        nbytes = sum(source.nbytes for source in sources)
        if len(sources) == 1 and nbytes > SMALL_BYTES:
            flat = (targets or sources)[0].view(-1)
            if flat.data_ptr() != sources[0].data_ptr():
                flat.copy_(sources[0].view(-1))
            self._reduction.reduce(flat, request)
        elif len(sources) == 1 and nbytes:
            flat = self._reduction.buffer(nbytes, sources[0]).view(sources[0].dtype)
            flat.copy_(sources[0].view(-1))
            self._reduction.reduce(flat, request)
            if targets:
                targets[0].view(-1).copy_(flat)
        elif nbytes:
            flat = self._reduction.buffer(nbytes, sources[0]).view(sources[0].dtype)
            torch.cat([source.view(-1) for source in sources], out=flat)
            self._reduction.reduce(flat, request)
            if targets and len(targets) == len(sources):
                views = flat.split([target.numel() for target in targets])
                torch._foreach_copy_([target.view(-1) for target in targets], list(views))
            elif targets:
                self._copy_to_present(batch, flat)
        for _, entry in batch:
            if entry is not None:
                entry.result = list(entry.outputs)

    def _copy_to_present(self, batch: list[Agreed], flat: Tensor) -> None:
        """Copy the results of the entries that this rank has, where it has not joined in all."""
        start = 0
        for request, entry in batch:
            for i, shape in enumerate(request.shapes):
                stop = start + math.prod(shape)
                if entry is not None:
                    entry.outputs[i].view(-1).copy_(flat[start:stop])
                start = stop

    def _all_gather(self, entry: Entry) -> list[Tensor]:
        return [self._all_gather_tensor(source) for source in entry.inputs]

    def _all_gather_tensor(self, source: Tensor) -> Tensor:
        source = source.reshape(1) if source.dim() == 0 else source
        rows = self._gather_numbers([len(source)])[:, 0].tolist()
        result = source.new_empty((sum(rows), *source.shape[1:]))
        if len({*rows}) == 1:
            collectives.all_gather(self._group, as_bytes(source), as_bytes(result))
        else:
            parts = list(map(as_bytes, result.split(rows)))
            collectives.all_gather_uneven(self._group, as_bytes(source), parts)
        return result

    def _gather_numbers(self, numbers: Sequence[int]) -> np.ndarray:
        """Return the numbers of each rank in a row."""
        own = np.array(numbers, np.int64)
        rows = np.zeros(own.size * self._group.link.size, np.int64)
        collectives.all_gather(self._group, own, rows)
        return rows.reshape(-1, own.size)

    def _broadcast(self, entry: Entry) -> list[Tensor]:
        source, target = entry.inputs[0], entry.outputs[0]
        root = self._ranks.index(entry.request.root)
        if self._world.rank == root and target.data_ptr() != source.data_ptr():
            target.copy_(source)
        if self._group.link.size > 1 and target.numel():
            broadcast(self._group, as_bytes(target), root)
        return [target]

    def _all_to_all(self, entry: Entry) -> tuple[Tensor, Tensor]:
        """Return the parts that all ranks sent to this one, and their numbers of rows."""
        source = entry.inputs[0]
        rows = self._gather_numbers(entry.splits)[:, self._world.rank].tolist()
        result = source.new_empty((sum(rows), *source.shape[1:]))
        sent, received = source.split(list(entry.splits)), result.split(rows)
        exchange_parts(self._group, list(map(as_bytes, sent)), list(map(as_bytes, received)))
        return result, torch.tensor(rows, dtype=torch.int32)

    def _reduce_scatter(self, entry: Entry) -> list[Tensor]:
        return [self._reduce_scatter_tensor(source, entry.request) for source in entry.inputs]

    def _reduce_scatter_tensor(self, source: Tensor, request: Request) -> Tensor:
        """Return this rank's rows of the sum; the first ranks get one more if it is uneven."""
        rank, size, rows = self._world.rank, self._group.link.size, len(source)
        counts = [rows // size + (r < rows % size) for r in range(size)]
        total = source.clone().view(-1)
        own = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
        if rows % size or size == 1 or is_narrow(source):
            self._reduction.reduce(total, request)
            return total.view_as(source)[own].clone()
        scale(total, request.prescale)
        result = source.new_empty((counts[rank], *source.shape[1:]))
        collectives.reduce_scatter(
            self._group, as_array(total), "sum", as_array(result.view(-1)), self._is_ordered
        )
        finish_reduction(result, request, size)
        return result


def _length(request: Request) -> int:
    return sum(map(math.prod, request.shapes))


@contextmanager
def _after_callers(entries: Sequence[Entry]) -> Iterator[None]:
    """Work on a GPU in a stream of its own, after the callers' work before their calls."""
    with own_stream(entries[0].inputs[0]):
        for entry in entries:
            torch.cuda.current_stream(entry.inputs[0].device).wait_event(entry.event)
        yield
