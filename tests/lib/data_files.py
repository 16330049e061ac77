"""Samples written as files of each format, and the keys of [data] that read them."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray
Table = dict[str, Any]
ROWS = 7  #: of a chunk, a row group or a shard: it divides few sets


def npy(folder: Path, x: Array, y: Array) -> Table:
    np.save(folder / "x.npy", x)
    np.save(folder / "y.npy", y)
    return {"x": str(folder / "x.npy"), "y": str(folder / "y.npy")}


def hdf5(folder: Path, x: Array, y: Array, **keys: Any) -> Table:
    import h5py

    with h5py.File(folder / "d.h5", "w") as file:
        file.create_dataset("in/x", data=x, **keys)
        file["y"] = y
    return {"path": str(folder / "d.h5"), "x": "in/x", "y": "y"}


def chunked_hdf5(folder: Path, x: Array, y: Array) -> Table:
    return hdf5(folder, x, y, chunks=(ROWS, *x.shape[1:]), compression="gzip")


def zarr(folder: Path, x: Array, y: Array) -> Table:
    import zarr

    group = zarr.open_group(str(folder / "d.zarr"), mode="w")
    for name, array in {"x": x, "y": y}.items():
        group.create_array(name, data=array, chunks=(ROWS, *array.shape[1:]))
    return {"path": str(folder / "d.zarr")}


def safetensors(folder: Path, x: Array, y: Array) -> Table:
    from safetensors.numpy import save_file

    save_file({"x": x, "y": y, "z": y[:1]}, folder / "d.safetensors")
    return {"path": str(folder / "d.safetensors")}


def parquet(folder: Path, x: Array, y: Array) -> Table:
    """Write columns of numbers, or with more dims one column of lists."""
    import pyarrow as pa
    from pyarrow import parquet

    columns = {f"c{i}": x[:, i] for i in range(x.shape[1])} if x.ndim == 2 else {"x": x.tolist()}
    table = pa.table({**columns, "y": y})
    if x.ndim > 2:
        leaf = pa.from_numpy_dtype(x.dtype)
        for _ in range(x.ndim - 1):
            leaf = pa.list_(leaf)
        table = table.set_column(0, "x", pa.array(x.tolist(), leaf))
    parquet.write_table(table, folder / "d.parquet", row_group_size=ROWS)
    return {"path": str(folder / "d.parquet"), "x": list(columns) if x.ndim == 2 else "x", "y": "y"}


def png(image: Array) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(image).save(file, "png")
    return file.getvalue()


def npy_bytes(array: Array) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def webdataset(folder: Path, x: Array, y: Array) -> Table:
    """Write shards of ROWS samples: images as PNG, other samples as .npy."""
    kind = "png" if x.dtype == np.uint8 and x.ndim in (3, 4) else "npy"
    encode = png if kind == "png" else npy_bytes
    for first in range(0, len(x), ROWS):
        rows = range(first, min(first + ROWS, len(x)))
        members = {f"{i:05d}.{kind}": encode(x[i]) for i in rows}
        members |= {f"{i:05d}.cls": str(y[i]).encode() for i in rows}
        write_tar(folder / f"d-{first:05d}.tar", dict(sorted(members.items())))
    return {"path": str(folder / "d-*.tar"), "x": kind}


def write_tar(path: Path, members: dict[str, bytes]) -> None:
    with tarfile.open(path, "w") as archive:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))


def huggingface(folder: Path, x: Array, y: Array) -> Table:
    import datasets

    datasets.disable_progress_bars()
    feature = datasets.Sequence(datasets.Value(str(x.dtype)), length=x.shape[-1])
    for _ in range(x.ndim - 2):
        feature = datasets.Sequence(feature)
    features = datasets.Features({"x": feature, "y": datasets.Value("int64")})
    data = datasets.Dataset.from_dict({"x": x.tolist(), "y": y.tolist()}, features=features)
    datasets.DatasetDict({"train": data}).save_to_disk(folder / "d")
    return {"path": str(folder / "d"), "x": "x", "y": "y"}


WRITERS: dict[str, tuple[str, Callable[[Path, Array, Array], Table]]] = {
    "hdf5": ("hdf5", hdf5),
    "hdf5, gzip": ("hdf5", chunked_hdf5),
    "zarr": ("zarr", zarr),
    "safetensors": ("safetensors", safetensors),
    "parquet": ("parquet", parquet),
    "webdataset": ("webdataset", webdataset),
    "huggingface": ("huggingface", huggingface),
}


def write(name: str, folder: Path, x: Array, y: Array) -> Table:
    """Write the samples in a format of WRITERS into `folder`; return the table [data]."""
    folder.mkdir(exist_ok=True, parents=True)
    kind, writer = WRITERS[name]
    return {"kind": kind, **writer(folder, x, y)}
