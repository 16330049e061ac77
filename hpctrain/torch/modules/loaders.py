"""The arguments of a DataLoader: which the Trainer uses, and how.

    dataset, collate_fn, shuffle, sampler, batch_sampler, drop_last, generator        used
    num_workers, worker_init_fn, timeout, prefetch_factor, multiprocessing_context    used
    batch_size, pin_memory, pin_memory_device, in_order, persistent_workers           announced

Refused are what has no meaning where the Trainer makes the batches (a batch_sampler of another
class, batch_size=None), and workers that start by fork: they would hold the MPI of their rank.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, get_worker_info

from hpctrain.core.errors import UsageError
from hpctrain.torch.modules.row_reader import RowReader
from hpctrain.torch.modules.samplers import TorchOrder, is_replaceable

START_METHOD = "forkserver"  #: of workers, unless the user asks for "spawn"
BATCHES_AHEAD = 2  #: per worker, as in PyTorch


@dataclass(frozen=True)
class LoaderOptions:
    """The arguments of a DataLoader that the Trainer uses."""

    loader: DataLoader[Any]
    batches: BatchSampler
    order: TorchOrder | None  #: None: the Trainer's own
    method: str  #: by which workers start

    @property
    def steps_ahead(self) -> int:
        """The batches that workers read ahead; 0 without workers."""
        return self.loader.num_workers * (self.loader.prefetch_factor or BATCHES_AHEAD)

    def check_workers(self, reader: RowReader) -> None:
        """Raise UsageError where workers could not be started."""
        if not self.loader.num_workers:
            return
        try:
            pickle.Pickler(_Sink()).dump((reader, self.loader.worker_init_fn))
        except Exception as error:
            raise UsageError(
                f"num_workers is {self.loader.num_workers}, whose processes start by "
                f"'{self.method}', never by fork beside MPI: expected data set, collate_fn and "
                f"worker_init_fn that can be pickled, seen {type(error).__name__}: {error}; "
                "define them at the top of a module, or take num_workers=0"
            ) from error

    def read(
        self, reader: RowReader, batches: Iterable[tuple[int, np.ndarray]]
    ) -> Iterator[tuple[Any, Any]]:
        """Yield the rows of `batches`, which worker processes read ahead."""
        loader = self.loader
        workers = DataLoader(
            reader,
            batch_size=None,
            sampler=batches,
            num_workers=loader.num_workers,
            collate_fn=_pass,
            timeout=loader.timeout,
            worker_init_fn=_WorkerStart(loader.worker_init_fn),
            multiprocessing_context=self.method,
            generator=loader.generator,
            prefetch_factor=loader.prefetch_factor,
        )
        yield from workers

    def describe_unused(self, batch: int | None) -> str:
        """Describe the unused arguments; `batch`: samples per step, None for an evaluation."""
        loader, parts = self.loader, []
        if batch is not None and self.batches.batch_size != batch:
            size = self.batches.batch_size
            parts.append(f"batch_size={size} (a step has batch={batch} samples over all ranks)")
        is_shuffled = isinstance(self.batches.sampler, RandomSampler)
        if batch is not None and self.order is None and not is_shuffled:
            parts.append("shuffle=False (samples come in the Trainer's order, by its seed)")
        if loader.pin_memory:
            parts.append("pin_memory, pin_memory_device (batches are copied as arrays)")
        if not loader.in_order:
            parts.append("in_order=False (batches come in the order of steps)")
        if loader.num_workers and batch is None:
            parts.append(
                f"num_workers={loader.num_workers} (ranks read for evaluations themselves)"
            )
        elif loader.num_workers and not loader.persistent_workers:
            parts.append("persistent_workers=False (workers live as long as the call of fit)")
        return f"DataLoader: not used are {', '.join(parts)}" if parts else ""


def read_options(loader: DataLoader[Any], reader: RowReader) -> LoaderOptions:
    """Return the options of a loader; raise UsageError for those that the Trainer cannot use."""
    batches: Any = loader.batch_sampler
    if batches is None:
        raise UsageError(
            "DataLoader: expected a batch_size, seen None: an item would be a batch of its own, "
            "which ranks could not divide; give the data set of single samples"
        )
    if type(batches) is not BatchSampler:
        raise UsageError(
            f"DataLoader: expected a torch.utils.data.BatchSampler as batch_sampler, seen "
            f"{type(batches).__name__}: the Trainer cuts the batches itself, `batch` samples over "
            "all ranks; give the order of samples as sampler="
        )
    order = None
    if not is_replaceable(batches.sampler, len(reader)):
        order = TorchOrder(batches.sampler, len(reader), loader.generator)
    options = LoaderOptions(loader, batches, order, _start_method(loader))
    options.check_workers(reader)
    return options


def _start_method(loader: DataLoader[Any]) -> str:
    """Return the method by which workers start; raise UsageError for "fork"."""
    context = loader.multiprocessing_context
    if context is None:
        return START_METHOD
    method: str = context.get_start_method()
    if method == "fork":
        raise UsageError(
            "DataLoader: expected multiprocessing_context 'forkserver' or 'spawn', seen 'fork': "
            "workers would hold the MPI of their rank; leave it out"
        )
    return method


@dataclass(frozen=True)
class _WorkerStart:
    """Shows a worker the user's data set, as get_worker_info().dataset, and calls the user's."""

    init: Callable[[int], None] | None

    def __call__(self, worker: int) -> None:
        info = get_worker_info()
        assert info is not None
        object.__setattr__(info, "dataset", info.dataset.dataset)
        if self.init is not None:
            self.init(worker)


class _Sink:
    """A file that keeps nothing."""

    def write(self, data: Any) -> int:
        return len(data)


def _pass(rows: Any) -> Any:
    return rows
