"""Claims: two ranks train at 0.9 of the rate at which a format's library reads, in bounded memory.

    python benchmarks/data_formats.py [--ranks 2] [--rounds 7] [--mib 256] [--large-mib 2048]
                                      [--formats "hdf5;zarr"]

Per format: samples of 12 KiB in files of `--mib`, which the system has cached. In turns rank 0
reads them by the format's own library, alone, in batches in the order of the file; and the ranks
train on them, shuffled by chunks, with the reader of the node (`node`), and as `[data] reader` does
by default (`auto`; files without chunks are read by each rank). The model looks at eight numbers of
a sample, so that the training does nothing else than read. Last, the memory of all ranks
(anonymous and shared, not mapped files) while the node reads a file of `--large-mib` from the disk.
Each format has a job of its own; files are written before it. Needs the libraries of all formats.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
from argparse import Namespace
from collections.abc import Mapping
from functools import partial
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from lib.common import machine_facts, make_parser, save_result
from lib.formats import FORMATS, MIB, Table, write
from lib.node_memory import drop_cache, peak_bytes

import hpctrain as ht
from hpctrain import data
from hpctrain.cluster.launch import launch_program
from hpctrain.core import launchers
from hpctrain.nn.layer import PlainLayer
from hpctrain.training.run_options import FitOptions
from hpctrain.world import World

READ_AHEAD_BYTES, SLACK_BYTES, BATCH = 64 * MIB, 64 * MIB, 128
NUMBERS = 8  #: of a sample that the model looks at
SHARE = 0.9


class FirstNumbers(PlainLayer):
    """Pass on a few numbers of each sample."""

    def output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (NUMBERS,)

    def forward(self, p: Any, x: np.ndarray, key: Any) -> tuple[np.ndarray, None]:
        return x[:, :NUMBERS], None

    def backward(self, p: Any, g: Any, saved: None, dy: np.ndarray, want_dx: bool) -> None:
        return None


def train(world: World, table: Table, reader: str) -> float:
    """Train an epoch; return the samples per second."""
    limits = {"reader": reader, "shuffle": "chunks", "read_ahead_bytes": READ_AHEAD_BYTES}
    samples = data.read({**table, **limits}).load(0).train
    model = ht.nn.Model([FirstNumbers(), ht.nn.Linear(10)], samples.sample_shape)
    steps = -(-len(samples) // (BATCH * world.size))
    options = FitOptions(interval_steps=steps)
    with ht.Trainer(model, ht.optim.sgd(1e-9), world=world) as trainer:
        summary = trainer.fit(samples, batch=BATCH * world.size, steps=steps, options=options)
    return summary["samples_per_s"]


def read_alone(name: str, folder: Path, batch: int) -> float:
    """Return the samples per second of the format's own library."""
    start = perf_counter()
    samples = sum(len(x) for x, _ in FORMATS[name].read(folder, batch))
    return samples / (perf_counter() - start)


def measure_rates(world: World, name: str, folder: Path, table: Table, rounds: int) -> Any:
    """Return rows of the rates, medians over rounds in turns, after a round that is not counted."""
    alone = partial(read_alone, name, folder, BATCH * world.size)
    contenders = {
        "library": lambda: world.from_first(alone),
        "node": lambda: train(world, table, "node"),
        "auto": lambda: train(world, table, "auto"),
    }
    rates: dict[str, list[float]] = {contender: [] for contender in contenders}
    for number in range(rounds + 1):
        for contender, measure in contenders.items():
            world.barrier()
            rate = measure()
            rates[contender] += [rate] * (number > 0)
    return [
        {
            "format": name,
            "reader": contender,
            "samples_per_s": float(np.median(values)),
            "least": min(values),
            "most": max(values),
            "to_library": float(np.median(np.divide(values, rates["library"]))),
            "rounds": values,
        }
        for contender, values in rates.items()
    ]


def measure_memory(world: World, name: str, folder: Path, table: Table) -> Any:
    """Return the row of the most memory that a node needs, from a file that is not cached."""
    peak: list[int] = []
    data.read(table).load(0)  # the memory of the libraries is no part of it
    if world.rank == 0:
        drop_cache(folder)
    world.barrier()
    with peak_bytes(world, peak):
        rate = train(world, table, "node")
    row = {"format": name, "reader": "node, from the disk", "samples_per_s": rate}
    return [{**row, "node_peak_bytes": peak[0]}]


def measure(options: Namespace) -> None:
    """Measure the file of a folder on this rank; rank 0 writes the rows beside it."""
    logging.getLogger("hpctrain").setLevel(logging.ERROR)
    world, folder = ht.init(), options.folder
    table, name = json.loads((folder / "table.json").read_text()), options.formats
    if options.part == "rates":
        rows = measure_rates(world, name, folder / "files", table, options.rounds)
    else:
        rows = measure_memory(world, name, folder / "files", table)
    if world.rank == 0:
        result = {"machine": machine_facts(world), "rows": rows}
        (folder / "result.json").write_text(json.dumps(result))


def run_part(options: Namespace, name: str, part: str, mib: int) -> dict[str, Any]:
    """Write a file, measure it in a job, and return the result."""
    print(f"{name}: {part}, {mib} MiB, load {os.getloadavg()[0]:.1f}", flush=True)
    with tempfile.TemporaryDirectory(prefix="data-formats-") as folder:
        table = write(name, Path(folder, "files"), mib)
        Path(folder, "table.json").write_text(json.dumps(table))
        words = ["--formats", name, "--part", part, "--folder", folder]
        command = [sys.executable, __file__, *words, "--rounds", str(options.rounds)]
        if code := launch_program(options.ranks, command):
            sys.exit(code)
        return json.loads(Path(folder, "result.json").read_text())


def claims_of(rows: list[Mapping[str, Any]]) -> dict[str, bool]:
    claims = {}
    for row in rows:
        if row["reader"] == "auto":
            claim = f"{row['format']}: {row['to_library']:.2f} of its library's rate, >= {SHARE}"
            claims[claim] = row["to_library"] >= SHARE
        if "node_peak_bytes" in row:
            claim = f"{row['format']}: a node needs {row['node_peak_bytes'] / MIB:.0f} MiB"
            is_held = row["node_peak_bytes"] <= READ_AHEAD_BYTES + SLACK_BYTES
            claims[f"{claim}, <= read_ahead_bytes + 64 MiB"] = is_held
    return claims


def main() -> None:
    parser = make_parser(__doc__)
    parser.set_defaults(rounds=7)
    parser.add_argument("--mib", type=int, default=256, help="size of the files in the cache")
    parser.add_argument("--large-mib", type=int, default=2048, help="of the files on the disk")
    parser.add_argument("--formats", default=";".join(FORMATS), help="names, with ; between them")
    parser.add_argument("--part", choices=("rates", "memory"), help="of a job")
    parser.add_argument("--folder", type=Path, help="of a job")
    options = parser.parse_args()
    if launchers.launched(os.environ).size > 1:
        measure(options)
        return
    names, load = options.formats.split(";"), os.getloadavg()[0]
    sizes = {"rates": options.mib, "memory": options.large_mib}
    results = [run_part(options, name, part, mib) for name in names for part, mib in sizes.items()]
    rows = [row for result in results for row in result["rows"]]
    about = {
        "machine": results[0]["machine"],
        "libraries": {package: version(package) for name in names
                      for package in FORMATS[name].packages},
        "load": load, "mib": options.mib, "large_mib": options.large_mib,
        "read_ahead_bytes": READ_AHEAD_BYTES, "batch_per_rank": BATCH,
    }  # fmt: skip
    claims = claims_of(rows)
    save_result(f"data-formats-{options.ranks}-ranks", about, rows, claims)
    sys.exit(not all(claims.values()))


if __name__ == "__main__":
    main()
