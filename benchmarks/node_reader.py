"""Claims: a reader per node reads HDF5 5 times as fast as DataLoaders, within its memory.

    python benchmarks/node_reader.py [--ranks 2] [--mib 256] [--large-mib 2048] [--steps 84]

Samples of 12 KiB in an .npy file, in HDF5 without chunks, and in HDF5 with chunks of 1 MiB,
compressed by gzip; the files are four times as large as `read_ahead_bytes` (64 MiB), and are
dropped from the page cache before each training. The ranks train a linear model on them, with
batches of 128 per rank, and with `[data] reader = "node"` or "rank", `shuffle = "chunks"` or
"samples" (of gzip fewer steps, as each sample then needs a chunk). Beside them each rank reads its
share through a DataLoader of h5py with one worker, shuffled, without training. Last, the memory of
all ranks (anonymous and shared, not mapped files) while they read an .npy file of 2 GiB.
Needs h5py; DataLoaders need PyTorch.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import h5py
import numpy as np
from lib.common import make_parser, report_result, start_world

import hpctrain as ht
from hpctrain.data import ReadOptions, ReadSamples, Samples
from hpctrain.data.stored import StoredSamples
from hpctrain.training.run_options import FitOptions
from hpctrain.world import World

SHAPE, ROW_BYTES, CHUNK_ROWS, MIB = (32, 32, 3), 12_288, 85, 1 << 20
READ_AHEAD_BYTES, SLACK_BYTES, BATCH, FEW_STEPS = 64 * MIB, 64 * MIB, 128, 6
SPEED_UP = 5.0


class Hdf5Samples:
    """Samples in a file of HDF5, read by runs of rows, or by chunks."""

    sample_shape = SHAPE

    def __init__(self, path: Path):
        self.source, self._file = str(path), h5py.File(path)
        self._x, self._y = self._file["x"], self._file["y"][:].astype(np.int64)
        self.chunk_rows = self._x.chunks[0] if self._x.chunks else None

    def __len__(self) -> int:
        return len(self._y)

    def rows(self, indexes: np.ndarray, epoch: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Return (x, y) at `indexes`; sorted ones need each chunk once."""
        order = np.argsort(indexes, kind="stable")
        ordered, x = indexes[order], np.empty((len(indexes), *SHAPE), self._x.dtype)
        groups = ordered // self.chunk_rows if self.chunk_rows else ordered - np.arange(len(order))
        for part in np.split(np.arange(len(order)), np.flatnonzero(np.diff(groups)) + 1):
            if len(part):
                first, last = ordered[part[0]], ordered[part[-1]]
                x[order[part]] = self._x[first : last + 1][ordered[part] - first]
        return x, self._y[indexes]


class Items:
    """The same file as items for a DataLoader, opened by its worker."""

    def __init__(self, path: Path):
        self._path, self._file = path, None

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        self._file = self._file or h5py.File(self._path)
        return self._file["x"][index], int(self._file["y"][index])


def write_npy(folder: Path, name: str, mib: int) -> None:
    """Write samples of numbers that compress to about a third."""
    rng, count = np.random.default_rng(0), mib * MIB // ROW_BYTES
    x = np.lib.format.open_memmap(folder / f"{name}-x.npy", "w+", np.float32, (count, *SHAPE))
    for start in range(0, count, 1000):
        part = x[start : start + 1000]
        part[:] = rng.integers(0, 256, part.shape, np.uint8)
    x.flush()
    np.save(folder / f"{name}-y.npy", np.arange(count) % 10)


def write_files(folder: Path, mib: int, large_mib: int) -> None:
    write_npy(folder, "small", mib)
    write_npy(folder, "large", large_mib)
    x = np.load(folder / "small-x.npy", "r")
    options = {"contiguous": {}, "gzip": {"chunks": (CHUNK_ROWS, *SHAPE), "compression": 1}}
    for name, keys in options.items():
        with h5py.File(folder / f"{name}.h5", "w") as file:
            stored = file.create_dataset("x", x.shape, x.dtype, **keys)
            for start in range(0, len(x), CHUNK_ROWS):
                stored[start : start + CHUNK_ROWS] = x[start : start + CHUNK_ROWS]
            file["y"] = np.load(folder / "small-y.npy")


def open_samples(folder: Path, kind: str) -> Samples:
    if kind in ("contiguous", "gzip"):
        return Hdf5Samples(folder / f"{kind}.h5")
    paths = [folder / f"{kind}-{name}.npy" for name in "xy"]
    return StoredSamples(*(np.load(path, "r") for path in paths), 10, str(paths[0]))


def drop_cache(world: World, folder: Path) -> None:
    """Let the system forget the files, so that they are read from the disk."""
    world.barrier()
    if world.rank == 0:
        for path in folder.iterdir():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    world.barrier()


def train(world: World, folder: Path, kind: str, reading: ReadOptions, steps: int) -> Any:
    """Return the summary of a training."""
    drop_cache(world, folder)
    model = ht.nn.Model([ht.nn.Flatten(), ht.nn.Linear(10)], SHAPE)
    samples = ReadSamples(open_samples(folder, kind), reading)
    with ht.Trainer(model, ht.optim.sgd(1e-9), world=world) as trainer:
        options = FitOptions(interval_steps=steps)
        return trainer.fit(samples, batch=BATCH * world.size, steps=steps, options=options)


def read_by_loaders(world: World, folder: Path, kind: str, steps: int) -> float:
    """Return the samples per second of a DataLoader with one worker on each rank."""
    from torch.utils.data import DataLoader

    drop_cache(world, folder)
    count = len(open_samples(folder, kind))
    order = np.random.default_rng(1).permutation(count)[world.rank :: world.size]
    loader = DataLoader(
        Items(folder / f"{kind}.h5"), BATCH, sampler=order.tolist(), num_workers=1,
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


def used_bytes() -> int:
    """Return this rank's part of the memory that is no file's."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    fields = {line.split(":")[0]: line.split()[1] for line in lines[1:]}
    return (int(fields["Pss_Anon"]) + int(fields["Pss_Shmem"])) << 10


@contextmanager
def peak_bytes(peak: list[int]) -> Iterator[None]:
    """Append the most that this rank's memory grows by, looked at ten times a second."""
    before, ended, most = used_bytes(), threading.Event(), [0]

    def look() -> None:
        while not ended.wait(0.1):
            most[0] = max(most[0], used_bytes() - before)

    thread = threading.Thread(target=look)
    thread.start()
    yield
    ended.set()
    thread.join()
    peak.append(most[0])


def measure_memory(world: World, folder: Path) -> list[dict[str, Any]]:
    rows = []
    for shuffle in ("chunks", "samples"):
        reading = ReadOptions(reader="node", read_ahead_bytes=READ_AHEAD_BYTES, shuffle=shuffle)
        peak: list[int] = []
        steps = len(open_samples(folder, "large")) // (BATCH * world.size)
        with peak_bytes(peak):
            train(world, folder, "large", reading, steps)
        node_bytes = sum(map(int, world.gather(str(peak[0]))))
        rows.append({"file": "npy, large", "shuffle": shuffle, "node_peak_bytes": node_bytes})
    return rows


def measure_speed(world: World, folder: Path, most_steps: int) -> list[dict[str, Any]]:
    rows = []
    for kind in ("small", "contiguous", "gzip"):
        for shuffle in ("chunks", "samples"):
            is_slow = kind == "gzip" and shuffle == "samples"
            for reader in ("node", "rank"):
                steps = FEW_STEPS if is_slow else most_steps
                reading = ReadOptions(
                    reader=reader, read_ahead_bytes=READ_AHEAD_BYTES, shuffle=shuffle
                )
                summary = train(world, folder, kind, reading, steps)
                keys = ("samples_per_s", "data_wait_s", "wall_s", "params_sha256")
                facts = {key: summary[key] for key in keys}
                rows.append({"file": kind, "shuffle": shuffle, "reader": reader, **facts})
        if kind != "small" and importlib.util.find_spec("torch"):
            rate = read_by_loaders(world, folder, kind, FEW_STEPS if kind == "gzip" else most_steps)
            rows.append({"file": kind, "reader": "DataLoader", "samples_per_s": rate})
    return rows


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--mib", type=int, default=256, help="size of the small files")
    parser.add_argument("--large-mib", type=int, default=2048)
    parser.add_argument("--steps", type=int, help="of a training; an epoch if not given")
    arguments = parser.parse_args()
    world = start_world(arguments.ranks)
    folder = Path(world.from_first(lambda: tempfile.mkdtemp(prefix="node-reader-")))
    try:
        if world.rank == 0:
            write_files(folder, arguments.mib, arguments.large_mib)
        world.barrier()
        steps = arguments.steps or arguments.mib * MIB // ROW_BYTES // (BATCH * world.size)
        rows = measure_speed(world, folder, steps) + measure_memory(world, folder)
    finally:
        world.barrier()
        if world.rank == 0:
            shutil.rmtree(folder)
    claims = {
        f"node, {row['shuffle']}: memory <= read_ahead_bytes + 64 MiB": row["node_peak_bytes"]
        <= READ_AHEAD_BYTES + SLACK_BYTES
        for row in rows
        if "node_peak_bytes" in row
    }
    speeds = {
        (row["file"], row["reader"]): row["samples_per_s"]
        for row in rows
        if row.get("shuffle") != "samples" and "samples_per_s" in row
    }
    for (kind, reader), speed in speeds.items():
        if reader == "DataLoader":
            ratio = speeds[kind, "node"] / speed
            claims[f"{kind}, chunks: >= 5 x DataLoader (num_workers=1)"] = ratio >= SPEED_UP
    about = {
        "sample_bytes": ROW_BYTES, "read_ahead_bytes": READ_AHEAD_BYTES, "steps": steps,
        "mib": arguments.mib, "large_mib": arguments.large_mib,
    }  # fmt: skip
    report_result(world, f"node-reader-{world.size}-ranks", rows, claims, **about)


if __name__ == "__main__":
    main()
