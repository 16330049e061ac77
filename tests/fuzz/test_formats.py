"""Data files of other libraries with random faults, against the libraries' own plain reading.

What is accepted has the values that the library reads from the same file, or refuses at a row; all
else is refused in one way, which names the file.
"""

from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from data_files import png, write, write_tar

from fuzz import Generator, campaign, generator, in_memory, mutated, mutated_json, value_or_refusal
from hpctrain import data
from hpctrain.core.errors import HpctrainError, UsageError
from hpctrain.data.formats.info import examine

pytestmark = pytest.mark.usefixtures("zarr_loop")
N = 11
X = np.random.default_rng(0).standard_normal((N, 3)).astype("f4")
Y = np.arange(N) % 3
IMAGES = np.random.default_rng(0).integers(0, 255, (N, 4, 5, 3)).astype("u1")


def zarr_2(folder: Path) -> dict[str, Any]:
    """Write format 2 as xarray does: compressed, with marks, and metadata in one file, too."""
    import numcodecs
    import zarr

    group = zarr.open_group(str(folder / "d.zarr"), mode="w", zarr_format=2)
    for key, array in {"in/x": X, "y": Y}.items():
        attributes = {"_ARRAY_DIMENSIONS": ["n", "c"][: array.ndim], "missing_value": 99}
        keys = {"chunks": (4, *array.shape[1:]), "fill_value": -9, "attributes": attributes}
        keys["compressors"] = numcodecs.Blosc() if key == "in/x" else numcodecs.Zlib()
        group.create_array(key, shape=array.shape, dtype=array.dtype, **keys)[:] = array
    zarr.consolidate_metadata(str(folder / "d.zarr"))
    return {"kind": "zarr", "path": str(folder / "d.zarr"), "x": "in/x"}


def zarr_shards(folder: Path) -> dict[str, Any]:
    """Write shards of chunks, in a .zip file."""
    import zarr

    group = zarr.open_group(str(folder / "d.zarr"), mode="w")
    for key, array in {"x": X, "y": Y}.items():
        chunks, shards = ((n, *array.shape[1:]) for n in (2, 6))
        group.create_array(key, data=array, chunks=chunks, shards=shards)
    with zipfile.ZipFile(folder / "d.zip", "w") as archive:
        for path in sorted((folder / "d.zarr").rglob("*")):
            if path.is_file():
                archive.write(path, path.relative_to(folder / "d.zarr"))
    shutil.rmtree(folder / "d.zarr")
    return {"kind": "zarr", "path": str(folder / "d.zip")}


def image_shards(folder: Path) -> dict[str, Any]:
    """Write images with targets in JSON, under names that need a header of their own."""
    members = {f"{'n' * 120}/{i:03d}.png": png(IMAGES[i]) for i in range(N)}
    members |= {f"{'n' * 120}/{i:03d}.json": b"%d.5" % Y[i] for i in range(N)}
    write_tar(folder / "d.tar", dict(sorted(members.items())))
    return {"kind": "webdataset", "path": str(folder / "d.tar"), "x": "png", "y": "json"}


def image_columns(folder: Path) -> dict[str, Any]:
    """Write images and labels, in several record batches of a set without splits."""
    import datasets

    datasets.disable_progress_bars()
    features = datasets.Features(
        {"x": datasets.Image(), "y": datasets.ClassLabel(names=["a", "b", "c"])}
    )
    images = [{"bytes": png(image), "path": None} for image in IMAGES]
    data = datasets.Dataset.from_dict({"x": images, "y": Y.tolist()}, features=features)
    data.save_to_disk(folder / "d", num_shards=2)
    return {"kind": "huggingface", "path": str(folder / "d"), "x": "x", "y": "y"}


def nested_columns(folder: Path) -> dict[str, Any]:
    """Write lists of lists, and targets that are lists, in two splits."""
    import datasets

    datasets.disable_progress_bars()
    columns = {"x": X.reshape(N, 1, 3).tolist(), "y": np.stack([Y, Y], 1).tolist()}
    data = datasets.Dataset.from_dict(columns)
    splits = {"train": data, "test": data.select(range(3))}
    datasets.DatasetDict(splits).save_to_disk(folder / "d")
    return {"kind": "huggingface", "path": str(folder / "d"), "x": "x", "y": "y", "classes": 3}


VARIANTS = {
    "zarr 2": zarr_2,
    "zarr, shards": zarr_shards,
    "webdataset, images": image_shards,
    "huggingface, images": image_columns,
    "huggingface, lists": nested_columns,
}


@cache
def contents(name: str) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Return the keys of [data], and the bytes of each file, of the samples in a format."""
    with TemporaryDirectory() as folder:
        make = VARIANTS.get(name) or (lambda folder: write(name, folder, X, Y))
        table = make(Path(folder))
        files = {
            str(path.relative_to(folder)): path.read_bytes()
            for path in sorted(Path(folder).rglob("*"))
            if path.is_file()
        }
        return table | {"path": str(Path(table["path"]).relative_to(folder))}, files


def faulty(content: bytes, rng: Generator) -> bytes:
    """Return the content with faults, half of them in its first or its last bytes."""
    place = rng.random()
    if content[:1] == b"{" and place < 0.7:
        try:
            return json.dumps(mutated_json(json.loads(content), rng)).encode()
        except (TypeError, ValueError):
            return mutated(content, rng)
    if place < 0.25:
        return mutated(content[:512], rng) + content[512:]
    if place < 0.5:
        return content[:-512] + mutated(content[-512:], rng)
    return mutated(content, rng)


def put(path: Path, content: bytes, others: list[bytes], rng: Generator) -> None:
    """Write a file with faults: in its content, or another file, nothing or a folder instead."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = rng.random()
    if kind < 0.9:
        path.write_bytes(faulty(content, rng))
    elif kind < 0.94:
        path.write_bytes(rng.choice([b"", rng.choice(others), content * 2]))
    elif kind < 0.96:
        path.mkdir()
    elif kind < 0.98:
        path.symlink_to(rng.choice([path.name, "/dev/zero", "/proc/self/mem", "missing"]))


def read_hdf5(path: Path) -> Any:
    import h5py

    with h5py.File(path, "r") as file:
        return file["in/x"][:], file["y"][:]


def read_parquet(path: Path) -> Any:
    from pyarrow import parquet

    table = parquet.read_table(path, use_threads=False).to_pydict()
    columns = [table[f"c{i}"] for i in range(3)]
    return np.array(columns, "f4").T, np.array(table["y"])


def read_safetensors(path: Path) -> Any:
    tensors = safetensors.numpy.load_file(path)
    return tensors["x"], tensors["y"]


def read_zarr(path: Path) -> Any:
    import zarr

    group = zarr.open_group(str(path), mode="r")
    return np.asarray(group["x"][:]), np.asarray(group["y"][:])


def read_huggingface(path: Path) -> Any:
    import datasets

    columns = datasets.load_from_disk(str(path))["train"].to_dict()
    return np.array(columns["x"], "f4"), np.array(columns["y"])


READERS: dict[str, Callable[[Path], Any] | None] = {
    "hdf5": read_hdf5,
    "hdf5, gzip": read_hdf5,
    "zarr": read_zarr,
    "parquet": read_parquet,
    "safetensors": read_safetensors,
    "webdataset": None,
    "huggingface": read_huggingface,
    **dict.fromkeys(VARIANTS),
}


def case(rng: Generator, name: str, folder: Path) -> None:
    table, files = contents(name)
    shutil.rmtree(folder / "d", ignore_errors=True)
    chosen, is_whole = rng.choice(sorted(files)), rng.random() < 0.1
    for file, content in files.items():
        path = folder / "d" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        if file == chosen and not is_whole:
            put(path, content, [*files.values()], rng)
        else:
            path.write_bytes(content)
    table = table | {"path": str(folder / "d" / table["path"]), "scale": "none"}
    place = folder / "d"

    def read() -> tuple[np.ndarray, np.ndarray]:
        train = data.read(table).load(0, finite=False).train
        pieces = [train.rows(np.arange(min(N, len(train))))]
        pieces.append(train.rows(np.arange(len(pieces[0][0]))[::-2]))
        assert np.array_equal(pieces[1][0], pieces[0][0][::-2], equal_nan=True)
        return pieces[0]

    result = value_or_refusal(read, place, "[data]")
    if is_whole:
        assert not isinstance(result, HpctrainError), result
        if name not in VARIANTS:
            assert np.array_equal(result[0], X) and np.array_equal(result[1], Y)
    if rng.random() < 0.2:
        value_or_refusal(lambda: examine(table["path"]), place, "[data]")
    reader = READERS[name]
    if isinstance(result, HpctrainError) or reader is None:
        return
    try:
        x, y = reader(Path(table["path"]))
    except Exception:  # of columns, or rows, that ours did not read
        return
    assert np.array_equal(result[0], x[:N], equal_nan=True) and result[0].dtype == x.dtype
    assert np.array_equal(result[1], y[:N].astype(result[1].dtype), equal_nan=True)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "count", [200, pytest.param(20_000, marks=[pytest.mark.full, pytest.mark.timeout(3600)])]
)
@pytest.mark.parametrize("name", READERS)
def test_formats(name, count):
    with in_memory() as folder:
        case(generator("imports", 0), name, folder)  # they take longer than a case may
        campaign(f"format {name}", count, partial(case, name=name, folder=folder))


OFFSETS = {
    "huggingface, lists": np.arange(0, 3 * N, 3),
    "huggingface, images": np.cumsum([0, *(len(png(image)) for image in IMAGES[:4])]),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("value", [-1, 1, 1 << 30, -(1 << 31)])
@pytest.mark.parametrize("name", OFFSETS)
def test_offsets_in_arrow_that_are_damaged_do_not_end_the_process(tmp_path, name, value):
    table, mark = VARIANTS[name](tmp_path), OFFSETS[name].astype("<i4").tobytes()
    path = next(path for path in tmp_path.rglob("*.arrow") if mark in path.read_bytes())
    content = bytearray(path.read_bytes())
    place = content.index(mark) + 8  # of the third offset
    content[place : place + 4] = np.array([value], "<i4").tobytes()
    path.write_bytes(content)
    with pytest.raises(UsageError, match=r"expected a .*data set of Hugging Face, seen: .*offset"):
        data.read(table | {"scale": "none"}).load(0).train.rows(np.arange(N))
