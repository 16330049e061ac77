"""Claim: a reader per node reads HDF5 5 times as fast as DataLoaders.

    python benchmarks/node_reader.py [--ranks 2] [--mib 256] [--steps 85]

Samples of 12 KiB in .npy files, in HDF5 without chunks, and in HDF5 with chunks of 1.5 MiB,
compressed by gzip; the files are four times as large as `read_ahead_bytes` (64 MiB), and are
dropped from the page cache before each training. The ranks train a linear model on them, with
batches of 128 per rank, and with `[data] reader = "node"` or "rank", `shuffle = "chunks"` or
"samples" (of gzip fewer steps, as each sample then needs a chunk). Beside them each rank reads its
share through a DataLoader of h5py with one worker, shuffled, without training.
Needs h5py; DataLoaders need PyTorch. See data_formats.py for other formats, and for the memory.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

import h5py
import numpy as np
from lib.common import make_parser, report_result, start_world
from lib.formats import MIB, ROW_BYTES, Table, write
from lib.node_memory import drop_cache

import hpctrain as ht
from hpctrain import data
from hpctrain.training.run_options import FitOptions
from hpctrain.world import World

READ_AHEAD_BYTES, BATCH, FEW_STEPS = 64 * MIB, 128, 6
NAMES = {"small": "npy", "contiguous": "hdf5", "gzip": "hdf5, gzip"}
SPEED_UP = 5.0


class Items:
    """The same file as items for a DataLoader, opened by its worker."""

    def __init__(self, path: Path):
        self._path, self._file = path, None

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        self._file = self._file or h5py.File(self._path)
        return self._file["x"][index], int(self._file["y"][index])


def forget_files(world: World, folder: Path) -> None:
    """Let the system read the files from the disk again; collective."""
    world.barrier()
    if world.rank == 0:
        drop_cache(folder)
    world.barrier()


def train(world: World, folder: Path, table: Table, steps: int) -> Any:
    """Return the summary of a training."""
    forget_files(world, folder)
    samples = data.read({**table, "read_ahead_bytes": READ_AHEAD_BYTES}).load(0).train
    model = ht.nn.Model([ht.nn.Linear(10)], samples.sample_shape)
    with ht.Trainer(model, ht.optim.sgd(1e-9), world=world) as trainer:
        options = FitOptions(interval_steps=steps)
        return trainer.fit(samples, batch=BATCH * world.size, steps=steps, options=options)


def read_by_loaders(world: World, path: Path, steps: int) -> float:
    """Return the samples per second of a DataLoader with one worker on each rank."""
    from torch.utils.data import DataLoader

    forget_files(world, path.parent)
    with h5py.File(path) as file:
        count = len(file["y"])
    order = np.random.default_rng(1).permutation(count)[world.rank :: world.size]
    loader = DataLoader(
        Items(path), BATCH, sampler=order.tolist(), num_workers=1,
        multiprocessing_context="forkserver",
    )  # fmt: skip
    batches = iter(loader)
    next(batches)  # the worker's start is not counted
    world.barrier()
    start, samples = perf_counter(), 0
    for _, (x, _) in zip(range(steps), batches, strict=False):
        samples += len(x)
    rates = [float(text) for text in world.gather(repr(samples / (perf_counter() - start)))]
    return sum(rates)


def measure(world: World, folder: Path, tables: dict[str, Table], most_steps: int) -> Any:
    rows = []
    for kind, table in tables.items():
        for shuffle in ("chunks", "samples"):
            is_slow = kind == "gzip" and shuffle == "samples"
            for reader in ("node", "rank"):
                reading = {"reader": reader, "shuffle": shuffle}
                steps = FEW_STEPS if is_slow else most_steps
                summary = train(world, folder / kind, {**table, **reading}, steps)
                keys = ("samples_per_s", "data_wait_s", "wall_s", "params_sha256")
                rows.append({"file": kind, **reading, **{key: summary[key] for key in keys}})
        if kind != "small" and importlib.util.find_spec("torch"):
            steps = FEW_STEPS if kind == "gzip" else most_steps
            rate = read_by_loaders(world, Path(table["path"]), steps)
            rows.append({"file": kind, "reader": "DataLoader", "samples_per_s": rate})
    return rows


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--mib", type=int, default=256, help="size of the files")
    parser.add_argument("--steps", type=int, help="of a training; an epoch if not given")
    arguments = parser.parse_args()
    logging.getLogger("hpctrain").setLevel(logging.ERROR)
    world = start_world(arguments.ranks)
    folder = Path(world.from_first(lambda: tempfile.mkdtemp(prefix="node-reader-")))
    try:
        tables = world.from_first(lambda: {
            kind: write(name, folder / kind, arguments.mib) for kind, name in NAMES.items()
        })  # fmt: skip
        load = world.from_first(lambda: os.getloadavg()[0])
        steps = arguments.steps or arguments.mib * MIB // ROW_BYTES // (BATCH * world.size)
        rows = measure(world, folder, tables, steps)
    finally:
        world.barrier()
        if world.rank == 0:
            shutil.rmtree(folder)
    speeds = {
        (row["file"], row["reader"]): row["samples_per_s"]
        for row in rows
        if row.get("shuffle") != "samples"
    }
    claims = {}
    for (kind, reader), speed in speeds.items():
        if reader == "DataLoader":
            ratio = speeds[kind, "node"] / speed
            claim = f"{kind}, chunks: {ratio:.1f} x DataLoader (num_workers=1), >= {SPEED_UP:g}"
            claims[claim] = ratio >= SPEED_UP
    about = {
        "sample_bytes": ROW_BYTES, "read_ahead_bytes": READ_AHEAD_BYTES, "steps": steps,
        "mib": arguments.mib, "load": load,
    }  # fmt: skip
    report_result(world, f"node-reader-{world.size}-ranks", rows, claims, **about)


if __name__ == "__main__":
    main()
