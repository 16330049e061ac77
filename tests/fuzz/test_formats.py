"""Data files of other libraries with random faults, against the libraries' own plain reading.

What is accepted has the values that the library reads from the same file, or refuses at a row; all
else is refused in one way, which names the file.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from data_files import write

from fuzz import Generator, campaign, generator, in_memory, mutated, mutated_json, value_or_refusal
from hpctrain import data
from hpctrain.core.errors import HpctrainError

pytestmark = pytest.mark.usefixtures("zarr_loop")
N = 11
X = np.random.default_rng(0).standard_normal((N, 3)).astype("f4")
Y = np.arange(N) % 3


@cache
def contents(name: str) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Return the keys of [data], and the bytes of each file, of the samples in a format."""
    with TemporaryDirectory() as folder:
        table = write(name, Path(folder), X, Y)
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


READERS: dict[str, Callable[[Path], Any] | None] = {
    "hdf5": read_hdf5,
    "hdf5, gzip": read_hdf5,
    "zarr": None,
    "parquet": read_parquet,
    "safetensors": read_safetensors,
    "webdataset": None,
    "huggingface": None,
}


def case(rng: Generator, name: str, folder: Path) -> None:
    table, files = contents(name)
    shutil.rmtree(folder / "d", ignore_errors=True)
    chosen, is_whole = rng.choice(sorted(files)), rng.random() < 0.1
    for file, content in files.items():
        path = folder / "d" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(faulty(content, rng) if file == chosen and not is_whole else content)
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
        assert np.array_equal(result[0], X) and np.array_equal(result[1], Y)
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
