"""Data files of other libraries: their rows as written; faulty files and keys are refused."""

from __future__ import annotations

import base64
import json
import os
import pickle
import shutil
import struct
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from data_files import ROWS, WRITERS, npy_bytes, png, write, write_tar

from hpctrain import data
from hpctrain.core.errors import DataError, UsageError
from hpctrain.data import node_rows
from hpctrain.data.formats import arrays, blocks, libraries, zarr_store
from hpctrain.data.formats.samples import FileSamples, divide_rows
from hpctrain.data.sampler import Sampler

pytestmark = pytest.mark.usefixtures("zarr_loop")
N = 50
NUMBERS = np.random.default_rng(0)
Y = np.arange(N) % 3
SAMPLES = {
    "float32": NUMBERS.standard_normal((N, 4)).astype("f4"),
    "float64": NUMBERS.standard_normal((N, 3, 2)),
    "images": NUMBERS.integers(0, 255, (N, 5, 6)).astype("u1"),
    "int16": NUMBERS.integers(-99, 99, (N, 4)).astype("i2"),
}
FULL = pytest.mark.full  # seconds, of imports and of processes
NAMES = [pytest.param(name, marks=[FULL] * (name == "huggingface")) for name in WRITERS]
ORDERS = ([7, 0, 49, 7, 20], [*range(N)], [], [49, 48, 3])


def load(table: dict, **keys: object) -> data.Split:
    return data.read({**table, **keys}).load(seed=5)


def refused(act, message: str, error_class=UsageError) -> None:
    with pytest.raises(error_class, match=message):
        act()


@pytest.mark.parametrize("kind", SAMPLES)
@pytest.mark.parametrize("name", NAMES)
def test_rows_are_as_written(tmp_path, name, kind):
    x = SAMPLES[kind]
    train = load(write(name, tmp_path, x, Y), scale="none").train
    assert (len(train), train.sample_shape) == (N, x.shape[1:])
    for order in ORDERS:
        indexes = np.array(order, np.int64)
        x_read, y_read = train.rows(indexes)
        assert x_read.dtype == x.dtype and x_read.tobytes() == x[indexes].tobytes()
        assert y_read.dtype == np.int64 and np.array_equal(y_read, Y[indexes])
        x_read[...] = 0  # a copy
    chunked = {"zarr", "parquet", "webdataset", "hdf5, gzip"}
    assert train.chunk_rows == (ROWS if name in chunked else None)


@pytest.mark.parametrize("name", NAMES)
def test_a_share_divides_a_set_by_seed_alone(tmp_path, name):
    x, table = SAMPLES["float32"], write(name, tmp_path, SAMPLES["float32"], Y)
    train, test, _ = load(table, test_share=0.3)
    rows = divide_rows(N, 0.3, seed=5)
    for samples, own in zip((train, test), rows, strict=True):
        assert np.array_equal(samples.rows(np.arange(len(samples)))[0], x[own])
    assert sorted(np.concatenate(rows)) == [*range(N)] and len(rows[1]) == 15
    assert not np.array_equal(divide_rows(N, 0.3, seed=6)[1], rows[1])
    assert train.chunk_rows == (None if load(table).train.chunk_rows is None else 4)


@pytest.mark.parametrize("name", ["hdf5, gzip", "webdataset"])
def test_pieces_end_within_chunks_which_are_decoded_once(tmp_path, monkeypatch, name):
    train, pieces, decoded = load(write(name, tmp_path, SAMPLES["float32"], Y)).train, [], []
    rows, block = FileSamples.rows, blocks.Blocks._block

    def note_rows(self, indexes, epoch=0):
        pieces.append(len(indexes))
        return rows(self, indexes, epoch)

    def note_block(self, number):
        if number not in self._kept:
            decoded.append(number)
        return block(self, number)

    sampler = Sampler(N, N, seed=0)
    layout = node_rows.choose_layout(train, sampler, node_rows.Shares((0,), 1, 1), 1 << 20, 1)
    slot = layout.arrays(np.zeros(layout.slot_bytes, np.uint8))
    monkeypatch.setattr(FileSamples, "rows", note_rows)
    monkeypatch.setattr(blocks.Blocks, "_block", note_block)
    monkeypatch.setattr(blocks, "CACHE_BYTES", 1)
    monkeypatch.setattr(node_rows, "PIECE_BYTES", 3 * layout.row_bytes)
    node_rows.FillReader(train, sampler, layout, lambda: None).read(range(1), slot)
    assert (max(pieces), sum(pieces)) == (3, N)
    assert decoded == ([*range(1, 8)] if name == "hdf5, gzip" else [])  # 0 was there
    assert np.array_equal(slot[0][:N], SAMPLES["float32"][sampler.batch_indexes(0, 1)])


def test_chunks_of_a_window_that_two_fills_share_are_decoded_once(tmp_path, monkeypatch):
    monkeypatch.setattr(node_rows, "PIECE_BYTES", 1)  # of rows: pieces are single samples
    table, decoded, block = (
        write("hdf5, gzip", tmp_path, SAMPLES["float32"], Y),
        [],
        blocks.Blocks._block,
    )

    def note_block(self, number):
        if number not in self._kept:
            decoded.append(number)
        return block(self, number)

    monkeypatch.setattr(blocks, "CACHE_BYTES", 3 * ROWS * SAMPLES["float32"][0].nbytes)
    train = load(table, shuffle="chunks").train
    sampler, shares = Sampler.of(train, 5, seed=0), node_rows.Shares((0,), 1, 1)
    assert sampler.window_chunks == 2
    layout = node_rows.choose_layout(train, sampler, shares, 1 << 20, 3)
    slot = layout.arrays(np.zeros(layout.slot_bytes, np.uint8))
    monkeypatch.setattr(blocks.Blocks, "_block", note_block)
    reader = node_rows.FillReader(load(table).train, sampler, layout, lambda: None)
    fills = list(layout.fills(sampler, 0, sampler.steps_per_epoch))
    for fill in fills:
        reader.read(fill, slot)
    assert len(fills) > 3
    assert sorted(decoded) == [*range(-(-N // ROWS))]


@pytest.mark.parametrize("name, cache_rows, window", [
    ("hdf5, gzip", 3 * ROWS, 2), ("parquet", ROWS, 1), ("zarr", 1000 * ROWS, 16),
    ("webdataset", 1, 16), ("hdf5", 1, 16),
])  # fmt: skip
def test_windows_have_the_chunks_that_are_kept(tmp_path, monkeypatch, name, cache_rows, window):
    monkeypatch.setattr(blocks, "CACHE_BYTES", cache_rows * SAMPLES["float32"][0].nbytes)
    train = load(write(name, tmp_path, SAMPLES["float32"], Y), shuffle="chunks").train
    assert Sampler.of(train, 5, seed=0).window_chunks == window


PATTERNS = {
    "hdf5": "d.h5",
    "zarr": "d.zarr",
    "parquet": "d.parquet",
    "safetensors": "d.safetensors",
}


@pytest.mark.parametrize("name", PATTERNS)
def test_files_of_a_pattern_are_joined_in_the_order_of_their_names(tmp_path, monkeypatch, name):
    monkeypatch.setattr(arrays, "OPEN_FILES", 2)
    x, bounds = SAMPLES["float32"], [0, 1, 20, 33, N]
    for i, (first, end) in enumerate(pairwise(bounds)):
        table = write(name, tmp_path / f"part-{3 * i:02d}", x[first:end], Y[first:end])
    pattern = str(tmp_path / "part-*" / PATTERNS[name])
    train = load(table, path=pattern).train
    for order in ORDERS:
        x_read, y_read = train.rows(np.array(order, np.int64))
        assert np.array_equal(x_read, x[order]) and np.array_equal(y_read, Y[order])
    copy = pickle.loads(pickle.dumps(train))  # for a process that is spawned
    assert np.array_equal(copy.rows(np.array([3, 40]))[0], x[[3, 40]])
    write(name, tmp_path / "part-05", x[:4].astype("f8"), Y[:4])
    refused(
        lambda: load(table, path=pattern), r"part-05.*expected rows of float32.*as in .*part-00"
    )
    refused(lambda: load(table, path=str(tmp_path / "*.no")), "seen none that matches")


def test_a_group_of_zarr_may_lie_in_a_zip_file(tmp_path):
    table = write("zarr", tmp_path, SAMPLES["float32"], Y)
    shutil.make_archive(str(tmp_path / "d"), "zip", table["path"])
    train = load(table, path=str(tmp_path / "d.zip")).train
    assert np.array_equal(train.rows(np.arange(N))[0], SAMPLES["float32"])


def test_only_blocks_in_use_are_decoded_and_few_are_kept(monkeypatch):
    decoded = []

    def block(rows: slice) -> np.ndarray:
        decoded.append((rows.start, rows.stop))
        return np.arange(rows.start, rows.stop)[:, None]

    read = blocks.numeric_blocks(23, 5, block)
    assert read(np.array([1, 4, 22]))[:, 0].tolist() == [1, 4, 22]
    assert decoded == [(0, 5), (20, 23)]
    read(np.array([2, 21]))
    assert len(decoded) == 2
    monkeypatch.setattr(blocks, "CACHE_BYTES", 40)
    assert read(np.arange(23))[:, 0].tolist() == [*range(23)]
    assert decoded[2:] == [(5, 10), (10, 15), (15, 20), (20, 23)]  # the first was there
    read(np.array([22]))
    read(np.array([3]))
    assert decoded[6:] == [(0, 5)]


def test_sets_by_name(tmp_path):
    table = write("hdf5", tmp_path, SAMPLES["float32"], Y)
    named = load(table, x_test="in/x", y_test="y")
    assert len(named.test) == N and len(load(table, test_path=table["path"]).test) == N


@FULL
def test_splits_of_hugging_face_by_name(tmp_path):
    import datasets

    x = SAMPLES["float32"]
    features = datasets.Features({
        "x": datasets.Sequence(datasets.Value("float32"), length=4),
        "y": datasets.ClassLabel(names=["a", "b", "c", "d"]),
    })  # fmt: skip
    parts = {"train": slice(0, 30), "validation": slice(30, N)}
    datasets.disable_progress_bars()
    splits = {
        name: datasets.Dataset.from_dict({"x": x[part].tolist(), "y": Y[part]}, features=features)
        for name, part in parts.items()
    }
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "s")
    table = {"kind": "huggingface", "path": str(tmp_path / "s"), "x": "x", "y": "y"}
    train, test, classes = load(table, test_split="validation")
    assert (len(train), len(test), classes) == (30, 20, 4)  # of the label, not of its values
    assert np.array_equal(test.rows(np.array([3]))[0], x[[33]])
    refused(lambda: load(table, test_split="validatoin"), "did you mean 'validation'")
    refused(lambda: load(table, test_split="validation", test_share=0.1), "one way to a test set")


WAYS = [
    ({"x_test": "in/x", "y_test": "y", "test_share": 0.1}, "seen x_test and test_share"),
    ({"test_path": "a", "test_share": 0.1}, "seen test_path and test_share"),
    ({"x_test": "in/x"}, "x_test and y_test, seen only one"),
    ({"test_share": 0.999}, "leaves none to train on"),
    ({"test_share": 1.0}, "test_share"),
    ({"x": "in/z"}, "unknown array in .*d.h5: 'in/z'; did you mean 'in/x'"),
    ({"x": "in"}, "unknown array"),
    ({"x": ""}, "unknown array"),
    ({"x": "y"}, r"x is of shape \(50,\)"),
    ({"classes": 2}, "label 2 of sample 2 is out of range"),
    ({"path": "missing.h5"}, "expected a file, seen nothing"),
]


@pytest.mark.parametrize(("keys", "message"), WAYS)
def test_keys_that_name_no_sets_are_refused(tmp_path, keys, message):
    table = write("hdf5", tmp_path, SAMPLES["float32"], Y)
    refused(lambda: load(table, **keys), message)


def test_labels_in_files_are_checked_when_they_are_read(tmp_path):
    y = np.repeat(Y, 4).reshape(N, 2, 2)
    y[47, 1, 0] = 9
    table = write("hdf5", tmp_path, SAMPLES["float32"], y)
    train = load(table, classes=3).train
    assert np.array_equal(train.rows(np.array([5, 48]))[1], y[[5, 48]])
    message = "label 9 of sample 47, row 47 of .*d.h5: y is out of range"
    refused(lambda: train.rows(np.array([5, 47])), message, DataError)
    table = write("hdf5", tmp_path / "real", SAMPLES["float32"], np.ones((N, 2)))
    refused(lambda: load(table, classes=3), "y has dtype float64; expected integer labels")
    table = write("hdf5", tmp_path / "mask", SAMPLES["float32"], y > 1)
    assert load(table, classes=2).train.rows(np.array([5]))[1].dtype == np.int64


# --- columns -------------------------------------------------------------------------------------


def parquet_file(folder: Path, **columns: object) -> dict:
    import pyarrow as pa
    from pyarrow import parquet

    columns = {"y": [0, 1, 2], "a": [1, 2, 3], "b": [1, 2, 3], **columns}
    parquet.write_table(pa.table(columns), folder / "d.parquet", row_group_size=2)
    return {"kind": "parquet", "path": str(folder / "d.parquet"), "x": ["a", "b"], "y": "y"}


GREY = np.arange(12, dtype="u1").reshape(3, 4)
COLOUR = np.arange(36, dtype="u1").reshape(3, 4, 3)


def test_columns_side_by_side_have_a_dtype_that_holds_all(tmp_path):
    table = parquet_file(tmp_path, a=[1, 2, 3], b=[0.5, 1.5, -1.0])
    x, _ = load(table).train.rows(np.array([2, 0]))
    assert x.dtype == np.float64 and x.tolist() == [[3.0, -1.0], [1.0, 0.5]]
    table = parquet_file(tmp_path, a=[1, 2, 2**60 + 1], b=[0.5, 1.5, -1.0])
    train = load(table).train
    train.rows(np.array([0, 1]))
    refused(lambda: train.rows(np.array([2])), "a: expected integers that float64", DataError)
    table = parquet_file(tmp_path, a=np.array([1, np.nan, 2], "f4"), b=[0.5, 1.5, -1.0])
    x, _ = data.read(table).load(0, finite=False).train.rows(np.array([1, 2]))
    assert x.dtype == np.float64 and np.isnan(x[0, 0]) and x[1:].tolist() == [[2.0, -1.0]]


@pytest.mark.parametrize("image", [GREY, COLOUR], ids=["grey", "colour"])
def test_images_in_columns_and_members_are_pixels(tmp_path, image):
    images = np.stack([image, image + 1, image + 2])
    data_ = [png(item) for item in images]
    tables = [
        parquet_file(tmp_path, a=data_) | {"x": "a"},
        parquet_file(tmp_path, a=[{"bytes": item, "path": "p"} for item in data_]) | {"x": "a"},
    ]
    for table in tables:
        x, _ = load(table, scale="none").train.rows(np.array([2, 0]))
        assert x.dtype == np.uint8 and np.array_equal(x, images[[2, 0]])
    train = load(tables[0], shift=1, flip=True).train  # as images of every kind
    assert train.rows(np.array([1]))[0].max() <= 1


BAD_COLUMNS = {
    "text": ({"a": ["p", "q", "r"]}, "d.parquet: a: expected numbers.*seen string.*unique"),
    "null": ({"a": [1.0, None, 2.0]}, r"a: a value is missing \(null\) in row 1"),
    "null in the targets": ({"y": [0, 1, None]}, r"y: a value is missing \(null\) in row 2"),
    "lists": ({"a": [[1], [2], [3]]}, "a: expected a number per row.*name this column alone"),
    "time": ({"a": np.array([1, 2, 3], "M8[s]")}, "seconds as float64"),
    "no rows": ({"y": [], "a": [], "b": []}, "expected rows, seen none"),
}


@pytest.mark.parametrize("name", BAD_COLUMNS)
def test_columns_of_no_numbers_are_refused(tmp_path, name):
    columns, message = BAD_COLUMNS[name]
    table = parquet_file(tmp_path, **columns)
    refused(lambda: load(table).train.rows(np.arange(3)), message)
    refused(lambda: load(table, x=["a", "bb"]), "unknown column in .*d.parquet: 'bb'; did you")
    refused(lambda: load(table, x=[]), "expected columns, seen none")


def test_a_column_of_numbers_alone_is_written_as_a_list(tmp_path):
    table = parquet_file(tmp_path)
    refused(lambda: load(table, x="a"), r"x is of shape \(3,\).* x = \['NAME'\]")
    assert load(table, x=["a"]).train.sample_shape == (1,)


NULL = r"a: a value is missing \(null\) in row 2"
FINITE = [[1.0, 2.0], [1.0, 2.0]]
BAD_CELLS = {
    "lengths": ([*FINITE, [1.0]], "a: expected lists of 2.* seen 1 in row 2"),
    "null lists": ([*FINITE, None], NULL),
    "null in lists": ([*FINITE, [None, 1.0]], NULL),
    "not finite": ([*FINITE, [np.inf, 1.0]], "x holds inf in sample 2, row 2 of .*: a, column 0"),
    "no image": ([png(GREY), png(GREY), b"\x89PNG"], "a: row 2.*expected a whole image"),
    "cut image": ([png(GREY), png(GREY), png(GREY)[:-40]], "a: row 2.*expected a whole image"),
    "other image": ([png(GREY), png(GREY), png(COLOUR)], r"row 2: expected uint8 \(3, 4\)"),
}


@pytest.mark.parametrize("name", BAD_CELLS)
def test_cells_are_checked_when_they_are_read(tmp_path, name):
    values, message = BAD_CELLS[name]
    table = parquet_file(tmp_path, a=values) | {"x": "a"}
    refused(lambda: load(table).train.rows(np.array([0, 2])), message)


# --- damaged files -------------------------------------------------------------------------------


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])


def text(path: Path) -> None:
    path.write_text("x,y\n1,2\n" * 40)


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


FAULTS = {
    "cut": cut,
    "text": text,
    "empty": lambda path: path.write_bytes(b""),
    "FIFO": fifo,
    "missing": Path.unlink,
    "a directory": lambda path: (path.unlink(), path.mkdir()),
}
FILES = [
    ("hdf5", "d.h5"),
    ("safetensors", "d.safetensors"),
    ("parquet", "d.parquet"),
    ("webdataset", "d-00007.tar"),
    ("zarr", "d.zarr/zarr.json"),
    ("zarr", "d.zarr/x/zarr.json"),
    pytest.param("huggingface", "d/train/state.json", marks=FULL),
    pytest.param("huggingface", "d/train/data-00000-of-00001.arrow", marks=FULL),
]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(("name", "file"), FILES)
def test_files_that_are_damaged_are_refused(tmp_path, name, file, fault):
    table = write(name, tmp_path, SAMPLES["float32"], Y)
    if name == "webdataset":  # one file of a pattern
        table["path"] = str(tmp_path / file)
    FAULTS[fault](tmp_path / file)
    with pytest.raises(UsageError, match=r"expected|unknown array") as caught:
        load(table)
    assert str(tmp_path) in str(caught.value)


CHUNKS = {"zarr": ("d.zarr/x/c/6/0", b"", 0), "hdf5, gzip": ("d.h5", b"\x78\x5e", 12)}


@pytest.mark.parametrize("name", CHUNKS)
def test_chunks_that_are_damaged_are_named_when_they_are_read(tmp_path, name):
    table, (file, mark, offset) = write(name, tmp_path, SAMPLES["float32"], Y), CHUNKS[name]
    content = bytearray((tmp_path / file).read_bytes())
    at = (content.rfind(mark) if mark else 0) + offset
    content[at : at + 16] = b"\xff" * 16
    (tmp_path / file).write_bytes(content)
    train = load(table).train
    train.rows(np.arange(42))
    with pytest.raises(DataError, match=r"x, rows 4\d .. 49: expected .*; copy it again"):
        for i in range(42, N):
            train.rows(np.array([i, 49]))


@FULL
def test_a_file_that_another_process_writes_to_is_refused(tmp_path):
    table = write("hdf5", tmp_path, SAMPLES["float32"], Y)
    script = f"import h5py; f = h5py.File({table['path']!r}, 'r+'); print(1, flush=True); input()"
    writer = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        writer.stdout.readline()
        refused(lambda: load(table), "d.h5: .* locked.*HDF5_USE_FILE_LOCKING")
    finally:
        writer.communicate(b"\n")
    assert len(load(table).train) == N


FORKED = """
import os, sys
import numpy as np
from hpctrain import data
train = data.read({"kind": "hdf5", "path": sys.argv[1], "x": "in/x"}).load(0).train
train.rows(np.arange(2))
if os.fork():
    os.wait()
else:
    try:
        train.rows(np.arange(2))
    except Exception as error:
        print(error, flush=True)
    os._exit(0)
"""


@FULL
def test_hdf5_does_not_cross_a_fork(tmp_path):
    table = write("hdf5", tmp_path, SAMPLES["float32"], Y)
    command = [sys.executable, "-c", FORKED, table["path"]]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "before this process was forked" in output and "by spawn" in output


def hdf5_with(folder: Path, change) -> dict:
    import h5py

    table = write("hdf5", folder, SAMPLES["float32"], Y)
    with h5py.File(table["path"], "r+") as file:
        change(file, h5py)
    return table


@pytest.mark.parametrize("kind", ["parquet", "zarr", "safetensors", "webdataset", "huggingface"])
def test_a_file_of_another_kind_is_named(tmp_path, kind):
    path = write("hdf5", tmp_path, SAMPLES["float32"], Y)["path"]
    table = {"kind": kind, "path": path, "x": "x", "y": "y"}
    refused(lambda: load(table), "seen 'hdf5': set .data. kind = 'hdf5'")


def external(file, h5py) -> None:
    del file["in/x"]
    file["in/x"] = h5py.ExternalLink("other.h5", "x")


def virtual(file, h5py) -> None:
    del file["in/x"]
    layout = h5py.VirtualLayout((N, 4), "f4")
    layout[:] = h5py.VirtualSource("other.h5", "x", (N, 4))
    file.create_virtual_dataset("in/x", layout)


def replaced(array: object):
    def change(file, h5py) -> None:
        del file["in/x"]
        file["in/x"] = array

    return change


ODD_ARRAYS = {
    "a link to another file": (external, "seen a link to other.h5"),
    "virtual": (virtual, "one in other files"),
    "texts": (replaced(["a"] * N), "in/x: expected real numbers"),
    "complex": (replaced(np.ones((N, 2), complex)), "seen dtype complex128"),
    "records": (replaced(np.zeros(N, "i4,f4")), "expected real numbers"),
    "a number": (replaced(1.0), r"expected an array of rows, seen shape \(\)"),
    "no rows": (replaced(np.zeros((0, 4))), "expected an array of rows"),
    "fewer": (replaced(np.zeros((3, 4))), "x has 3 samples but y has 50"),
    "packed": (lambda file, _: file["in/x"].attrs.update(scale_factor=2.0), "packed ones"),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD_ARRAYS)
def test_arrays_of_no_rows_of_numbers_are_refused(tmp_path, name):
    change, message = ODD_ARRAYS[name]
    table = hdf5_with(tmp_path, change)
    refused(lambda: load(table), message)


MEMBERS = {"a.npy": npy_bytes(GREY), "a.cls": b"1"}
ODD_SHARDS = {
    "no members": ({}, "expected samples, seen none"),
    "another extension": (
        {"a.npy": npy_bytes(GREY), "a.txt": b"1"},
        "'a': unknown extension 'cls'",
    ),
    "text": (MEMBERS | {"a.cls": b"cat"}, r"\.cls of row 0: expected a number of.*'cat'"),
    "a long number": (
        MEMBERS | {"b.npy": npy_bytes(GREY), "b.cls": b"1" + b" " * 64},
        r"\.cls of row 1: expected a number of at most 64 bytes, seen '1'",
    ),
    "one lacks": (MEMBERS | {"b.cls": b"1"}, "sample 'b': unknown extension 'npy'"),
    "other shape": (
        MEMBERS | {"b.npy": npy_bytes(GREY[:1]), "b.cls": b"1"},
        "npy of row 1: expected",
    ),
    "objects": (MEMBERS | {"a.npy": npy_bytes(np.array([None]))}, "seen Python objects"),
}


@pytest.mark.parametrize("name", ODD_SHARDS)
def test_shards_of_odd_members_are_refused(tmp_path, name):
    members, message = ODD_SHARDS[name]
    write_tar(tmp_path / "d.tar", members)
    table = {"kind": "webdataset", "path": str(tmp_path / "d.tar"), "x": "npy"}
    refused(lambda: load(table).train.rows(np.arange(2)), message)


def test_numbers_of_members_are_read_to_their_last_digit(tmp_path):
    members = {"a.npy": npy_bytes(GREY), "a.cls": b"1.2345678901234567e-05"}
    write_tar(tmp_path / "d.tar", members)
    table = {"kind": "webdataset", "path": str(tmp_path / "d.tar"), "x": "npy"}
    assert load(table).train.rows(np.arange(1))[1].tolist() == [1.2345678901234567e-05]


MARKED = "in/x: row 3 holds -999.0 at \\(1,\\), which marks a missing value"
NO_MARK = "in/x: expected a number as the mark of missing values, seen _FillValue = "
MARKS = {
    "base64": ({"_FillValue": base64.b64encode(struct.pack("<d", -999.0)).decode()}, MARKED),
    "several": ({"missing_value": [-1.5, -999.0]}, MARKED),
    "fill value": ({"_ARRAY_DIMENSIONS": ["n", "c"]}, MARKED),
    "text": ({"_FillValue": "no data"}, NO_MARK + "'no data'"),
    "null": ({"_FillValue": None}, NO_MARK + "None"),
}


@pytest.mark.parametrize("name", MARKS)
def test_missing_values_of_xarray_are_refused(tmp_path, name):
    import zarr

    x, (attributes, message) = SAMPLES["float32"].copy(), MARKS[name]
    x[3, 1] = -999.0
    zarr_format = 2 if name == "fill value" else 3
    group = zarr.open_group(str(tmp_path / "d.zarr"), mode="w", zarr_format=zarr_format)
    keys = {"shape": x.shape, "dtype": "f4", "fill_value": -999.0, "attributes": attributes}
    group.create_array("in/x", **keys)[:] = x
    group.create_array("y", shape=N, dtype="i8")[:] = Y
    table = {"kind": "zarr", "path": str(tmp_path / "d.zarr"), "x": "in/x"}
    with pytest.raises((DataError, UsageError), match=message):
        load(table).train.rows(np.arange(5))


@pytest.mark.parametrize("mark", [{}, {"_FillValue": 0}])
def test_zeros_of_zarr_are_values_unless_an_attribute_marks_them(tmp_path, caplog, mark):
    import zarr

    zarr_store._announce_zeros.cache_clear()
    x = SAMPLES["images"].copy()
    x[3, 1, 2] = 0
    for part in ("a", "b"):
        group = zarr.open_group(str(tmp_path / f"{part}.zarr"), mode="w", zarr_format=2)
        for key, array in {"x": x, "y": Y}.items():
            attributes = {"_ARRAY_DIMENSIONS": ["n", "h", "w"][: array.ndim]}
            attributes |= mark if key == "x" else {}
            keys = {"shape": array.shape, "dtype": array.dtype, "fill_value": 0}
            group.create_array(key, attributes=attributes, **keys)[:] = array
    table = {"kind": "zarr", "path": str(tmp_path / "*.zarr"), "scale": "none"}
    train = load(table).train
    if mark:
        refused(lambda: train.rows(np.arange(5)), r"x: row 3 holds 0 at \(1, 2\)", DataError)
        return
    read_x, read_y = train.rows(np.arange(2 * N))
    assert np.array_equal(read_x, [*x, *x]) and np.array_equal(read_y, [*Y, *Y])
    messages = [record.getMessage() for record in caplog.records]
    assert [text[:30] for text in messages] == [
        "[data] x: values of 0 are read", "[data] y: values of 0 are read"
    ]  # fmt: skip


def reshape(shape: list[int], *names: str):
    def change(folder: Path) -> None:
        for name in names:
            path = folder / name / "zarr.json"
            path.write_text(json.dumps(json.loads(path.read_text()) | {"shape": shape}))

    return change


def replace_chunk(make):
    def change(folder: Path) -> None:
        chunk = folder / "x/c/1/0"
        chunk.unlink()
        make(chunk)

    return change


HOSTILE_GROUPS = {
    "a FIFO": (replace_chunk(os.mkfifo), "c/1/0: expected a .*file, seen a FIFO"),
    "a device": (replace_chunk(lambda path: path.symlink_to("/dev/zero")), "seen a device"),
    "a link to itself": (replace_chunk(lambda path: path.symlink_to(path)), "symbolic links"),
    "wide rows": (reshape([N, 1 << 31], "x"), "x: expected at most 100000 chunks across a row"),
    "long labels": (reshape([1 << 40], "y"), "x has 50 samples but y has 1099511627776"),
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", HOSTILE_GROUPS)
def test_groups_of_zarr_that_would_be_read_without_an_end_are_refused(tmp_path, name):
    change, message = HOSTILE_GROUPS[name]
    table = write("zarr", tmp_path, SAMPLES["float32"], Y)
    change(Path(table["path"]))
    refused(lambda: load(table).train.rows(np.arange(N)), message)


def test_rows_of_an_array_of_any_length_take_their_own_memory():
    part = arrays.Part("d.zarr: y", (1 << 45,), np.dtype("i8"), None, lambda: lambda rows: 2 * rows)
    array = arrays.FileArray([part])
    assert array[5:8].tolist() == [10, 12, 14] and array[-1:].tolist() == [2**46 - 2]
    assert (array[7], array[-1]) == (14, 2**46 - 2)
    with pytest.raises(IndexError):
        array[1 << 45]
    few = array.select(np.arange(3))
    assert np.asarray(few).tolist() == [0, 2, 4]
    with pytest.raises(ValueError, match="expected copy"):
        few.__array__(copy=False)
    refused(array.load, "d.zarr: y: expected values that fit into memory, seen 281474976710656 by")


def test_a_pickle_in_a_zarr_array_is_not_run(tmp_path):
    import zarr

    group = zarr.open_group(str(tmp_path / "d.zarr"), mode="w", zarr_format=2)
    for key in "xy":
        group.create_array(key, shape=(N, 4), chunks=(ROWS, 4), dtype="f4")
        path = tmp_path / "d.zarr" / key / ".zarray"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"compressor": {"id": "pickle"}}))
    table = {"kind": "zarr", "path": str(tmp_path / "d.zarr")}
    # Newer versions of Zarr refuse it themselves.
    refused(lambda: load(table), "seen pickles, which can run any code|object_codec_id.*pickle")


def test_a_library_that_is_missing_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "h5py", None)
    refused(lambda: libraries.load_library("h5py", "hdf5"), r"pip install 'hpctrain\[hdf5\]'")
