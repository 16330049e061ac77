"""Files of each format with the same samples, and their reading by the format's own library.

A sample is a row of 12 KiB, float32, with a label. A writer takes the samples in pieces and returns
the keys of `[data]` that read its file; a reader yields batches (x, y) in the order of the file, as
the documentation of its library shows.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

MIB = 1 << 20
COLUMNS, ROW_BYTES, CHUNK_ROWS = 3072, 12_288, 128
PIECE_ROWS = 1024  #: written at once: a shard, or a large row group
Rows = tuple[np.ndarray, np.ndarray]
Table = dict[str, Any]


def pieces(count: int) -> Iterator[Rows]:
    """Yield samples of numbers that compress to about a third."""
    rng = np.random.default_rng(0)
    for start in range(0, count, PIECE_ROWS):
        rows = np.arange(start, min(start + PIECE_ROWS, count))
        yield rng.integers(0, 256, (len(rows), COLUMNS), np.uint8).astype(np.float32), rows % 10


def _slices(length: int, batch: int) -> Iterator[slice]:
    return (slice(start, start + batch) for start in range(0, length, batch))


def write_npy(folder: Path, count: int) -> Table:
    x = np.lib.format.open_memmap(folder / "x.npy", "w+", np.float32, (count, COLUMNS))
    y = np.lib.format.open_memmap(folder / "y.npy", "w+", np.int64, (count,))
    _fill(x, y, count)
    x.flush()
    return {"x": str(folder / "x.npy"), "y": str(folder / "y.npy"), "classes": 10}


def _fill(x: Any, y: Any, count: int) -> None:
    start = 0
    for x_piece, y_piece in pieces(count):
        end = start + len(x_piece)
        x[start:end], y[start:end] = x_piece, y_piece
        start = end


def read_npy(folder: Path, batch: int) -> Iterator[Rows]:
    x, y = (np.load(folder / f"{name}.npy", "r") for name in "xy")
    return ((np.array(x[rows]), np.array(y[rows])) for rows in _slices(len(x), batch))


def write_hdf5(folder: Path, count: int, **keys: Any) -> Table:
    import h5py

    with h5py.File(folder / "d.h5", "w") as file:
        x = file.create_dataset("x", (count, COLUMNS), np.float32, **keys)
        _fill(x, file.create_dataset("y", (count,), np.int64), count)
    return {"path": str(folder / "d.h5"), "classes": 10}


def read_hdf5(folder: Path, batch: int) -> Iterator[Rows]:
    import h5py

    with h5py.File(folder / "d.h5") as file:
        x, y = file["x"], file["y"]
        for rows in _slices(len(x), batch):
            yield x[rows], y[rows]


def write_zarr(folder: Path, count: int) -> Table:
    import zarr

    group = zarr.open_group(str(folder / "d.zarr"), mode="w")
    kinds = {"x": ((COLUMNS,), np.float32), "y": ((), np.int64)}
    arrays = [
        group.create_array(
            name, shape=(count, *shape), chunks=(CHUNK_ROWS, *shape), dtype=np.dtype(dtype)
        )
        for name, (shape, dtype) in kinds.items()
    ]
    _fill(*arrays, count)
    return {"path": str(folder / "d.zarr"), "classes": 10}


def read_zarr(folder: Path, batch: int) -> Iterator[Rows]:
    import zarr

    group = zarr.open_group(str(folder / "d.zarr"), mode="r")
    x, y = group["x"], group["y"]
    for rows in _slices(x.shape[0], batch):
        yield x[rows], y[rows]


def _arrow_table(x: np.ndarray, y: np.ndarray) -> Any:
    import pyarrow as pa

    lists = pa.FixedSizeListArray.from_arrays(pa.array(x.ravel()), COLUMNS)
    return pa.table({"x": lists, "y": pa.array(y)})


def write_parquet(folder: Path, count: int, group_rows: int = CHUNK_ROWS) -> Table:
    from pyarrow import parquet

    writer = None
    for piece in pieces(count):
        table = _arrow_table(*piece)
        writer = writer or parquet.ParquetWriter(
            folder / "d.parquet", table.schema, use_dictionary=False
        )
        writer.write_table(table, group_rows)
    writer.close()
    return {"path": str(folder / "d.parquet"), "x": "x", "y": "y", "classes": 10}


def read_parquet(folder: Path, batch: int) -> Iterator[Rows]:
    from pyarrow import parquet

    for part in parquet.ParquetFile(folder / "d.parquet").iter_batches(batch):
        x, y = part.column("x"), part.column("y")
        yield x.flatten().to_numpy().reshape(len(y), COLUMNS), y.to_numpy()


def write_webdataset(folder: Path, count: int) -> Table:
    import webdataset

    number = 0
    for shard, (x, y) in enumerate(pieces(count)):
        with webdataset.TarWriter(str(folder / f"d-{shard:05d}.tar")) as writer:
            for row, label in zip(x, y, strict=True):
                writer.write({"__key__": f"{number:07d}", "npy": row, "cls": int(label)})
                number += 1
    return {"path": str(folder / "d-*.tar"), "x": "npy", "classes": 10}


def read_webdataset(folder: Path, batch: int) -> Iterator[Rows]:
    import webdataset

    shards = sorted(map(str, folder.glob("d-*.tar")))
    # All shards for this process, whatever the launcher's variables say.
    files = webdataset.WebDataset(shards, shardshuffle=False, nodesplitter=lambda urls: urls)
    return iter(files.decode().to_tuple("npy", "cls").batched(batch))


def write_safetensors(folder: Path, count: int) -> Table:
    from safetensors.numpy import save_file

    write_npy(folder, count)
    x, y = (np.load(folder / f"{name}.npy", "r") for name in "xy")
    save_file({"x": x, "y": y}, folder / "d.safetensors")
    for name in "xy":
        (folder / f"{name}.npy").unlink()
    return {"path": str(folder / "d.safetensors"), "classes": 10}


def read_safetensors(folder: Path, batch: int) -> Iterator[Rows]:
    from safetensors import safe_open

    with safe_open(folder / "d.safetensors", "np") as file:
        x, y = file.get_slice("x"), file.get_slice("y")
        for rows in _slices(x.get_shape()[0], batch):
            yield x[rows], y[rows]


def write_huggingface(folder: Path, count: int) -> Table:
    import datasets
    from datasets.arrow_writer import ArrowWriter

    features = datasets.Features({
        "x": datasets.Sequence(datasets.Value("float32"), length=COLUMNS),
        "y": datasets.Value("int64"),
    })  # fmt: skip
    with ArrowWriter(features=features, path=str(folder / "cache.arrow")) as writer:
        for piece in pieces(count):
            writer.write_table(_arrow_table(*piece))
        writer.finalize()
    datasets.disable_progress_bars()
    datasets.Dataset.from_file(str(folder / "cache.arrow")).save_to_disk(folder / "d")
    (folder / "cache.arrow").unlink()
    return {"path": str(folder / "d"), "x": "x", "y": "y", "classes": 10}


def read_huggingface(folder: Path, batch: int) -> Iterator[Rows]:
    import datasets

    data = datasets.load_from_disk(str(folder / "d")).with_format("numpy")
    return ((np.array(part["x"]), part["y"]) for part in data.iter(batch))


class Format(NamedTuple):
    """A format: the `kind` of `[data]`, the writer, the library's reader, and its packages."""

    kind: str
    write: Callable[[Path, int], Table]
    read: Callable[[Path, int], Iterator[Rows]]
    packages: Sequence[str]


FORMATS = {
    "npy": Format("npy", write_npy, read_npy, ["numpy"]),
    "hdf5": Format("hdf5", write_hdf5, read_hdf5, ["h5py"]),
    "hdf5, gzip": Format(
        "hdf5",
        partial(write_hdf5, chunks=(CHUNK_ROWS, COLUMNS), compression=1),
        read_hdf5,
        ["h5py"],
    ),
    "zarr": Format("zarr", write_zarr, read_zarr, ["zarr"]),
    "parquet": Format("parquet", write_parquet, read_parquet, ["pyarrow"]),
    "parquet, groups of 12 MiB": Format(
        "parquet", partial(write_parquet, group_rows=PIECE_ROWS), read_parquet, ["pyarrow"]
    ),
    "webdataset": Format("webdataset", write_webdataset, read_webdataset, ["webdataset"]),
    "safetensors": Format("safetensors", write_safetensors, read_safetensors, ["safetensors"]),
    "huggingface": Format("huggingface", write_huggingface, read_huggingface, ["datasets"]),
}


def write(name: str, folder: Path, mib: int) -> Table:
    """Write a file of `mib` MiB of samples into an empty `folder`; return the table `[data]`."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return {"kind": FORMATS[name].kind, **FORMATS[name].write(folder, mib * MIB // ROW_BYTES)}
