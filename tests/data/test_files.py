"""Data sets in files: contents as written; faulty files are refused with a reason."""

from __future__ import annotations

import gzip
import os
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from hpctrain import data
from hpctrain.core import labels
from hpctrain.core.errors import UsageError
from hpctrain.data import text

RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (20, 5, 4)).astype(np.uint8)
LABELS = (np.arange(20) % 3).astype(np.uint8)
SUBSET = np.array([7, 0, 19])
TYPES = {"u1": 0x08, "i1": 0x09, ">i2": 0x0B, ">i4": 0x0C, ">f4": 0x0D, ">f8": 0x0E}


def idx(x: np.ndarray) -> bytes:
    """Return an array as an IDX file has it."""
    (code,) = (code for name, code in TYPES.items() if x.dtype == np.dtype(name))
    return struct.pack(f">BBBB{x.ndim}I", 0, 0, code, x.ndim, *x.shape) + x.tobytes()


def load(kind: str, **keys: object) -> data.Split:
    return data.read({"kind": kind, **keys}).load(seed=0)


def refused(act, message: str, *names: Path) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        act()
    assert all(str(name) in str(caught.value) for name in names)


# --- idx -----------------------------------------------------------------------------------------


@pytest.fixture
def mnist_like(tmp_path):
    """Paths of good images and labels, as keys of [data]."""
    (tmp_path / "images").write_bytes(idx(IMAGES))
    (tmp_path / "labels").write_bytes(idx(LABELS))
    return {"images": str(tmp_path / "images"), "labels": str(tmp_path / "labels")}


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
@pytest.mark.parametrize("dtype", TYPES)
def test_idx(tmp_path, mnist_like, dtype, pack):
    x = IMAGES.astype(dtype)
    (tmp_path / "images").write_bytes(pack(idx(x)))
    (tmp_path / "labels").write_bytes(pack(idx(LABELS)))
    test = {f"test_{key}": path for key, path in mnist_like.items()}
    train, seen_test, classes = load("idx", **mnist_like, **({} if dtype != "u1" else test))
    assert (len(train), train.sample_shape, classes) == (20, (5, 4), 3)
    observed, y = train.rows(SUBSET)
    expected = x[SUBSET] / np.float32(255) if dtype == "u1" else x[SUBSET]
    assert np.array_equal(observed, expected) and y.dtype == np.int64
    assert np.array_equal(y, LABELS[SUBSET]) and (seen_test is None) == (dtype != "u1")
    assert observed.dtype == (np.float32 if dtype == "u1" else np.dtype(dtype))


GOOD = idx(IMAGES)
WRONG_IMAGES = {
    "text": (b"label,pixel0\n5,0\n", "seen text: 'label,pixel0'"),
    "text, gzipped": (gzip.compress(b"label,pixel0\n"), "seen text: 'label,pixel0'"),
    "empty": (b"", "seen 0 blank bytes"),
    "png": (b"\x89PNG\r\n\x1a\n" + GOOD, "seen bytes 89 50 4e 47"),
    "unknown type": (b"\0\0\x07" + GOOD[3:], "expected an IDX file"),
    "no sizes": (GOOD[:9], "expected the sizes of 3 dims"),
    "cut": (GOOD[:-1], "expected 416 bytes, as its header says.* seen 415; copy it again"),
    "too long": (GOOD + b"\0", "seen 417"),
    "cut, gzipped": (gzip.compress(GOOD)[:-9], "expected a whole gzip file"),
    "cut before it was gzipped": (gzip.compress(GOOD[:-1]), "seen 399 bytes; copy it again"),
    "damaged gzip": (gzip.compress(GOOD)[:20] + b"\xff" * 40, "gzip|IDX|as its header says"),
    "labels": (idx(LABELS), r"x is of shape \(20,\)"),
    "255 dims": (b"\0\0\x08\xff" + b"\0\0\0\x01" * 255 + b"\1", "seen 255 dims"),
    "255 dims, gzipped": (
        gzip.compress(b"\0\0\x08\xff" + b"\0\0\0\x01" * 255 + b"\1"),
        "seen 255 dims",
    ),
    "more than there is": (
        gzip.compress(b"\0\0\x08\x03" + b"\xff" * 12),
        "expected 79228162458924105385300197375 b",
    ),
    "longer, gzipped": (gzip.compress(GOOD + b"\0"), "expected 400 bytes, .* seen more; copy"),
    "fewer": (idx(IMAGES[:19]), "19 samples but y has 20;"),
}


@pytest.mark.parametrize("name", WRONG_IMAGES)
def test_files_that_are_no_images_are_refused(mnist_like, name):
    content, message = WRONG_IMAGES[name]
    Path(mnist_like["images"]).write_bytes(content)
    refused(lambda: load("idx", **mnist_like), message, mnist_like["images"])


def test_no_more_is_unpacked_than_the_header_says(mnist_like):
    """64 MiB of zeros behind a good file take 64 KiB when they are packed."""
    packed = gzip.compress(GOOD) + gzip.compress(bytes(64 << 20), 9)
    Path(mnist_like["images"]).write_bytes(packed)
    tracemalloc.start()
    refused(lambda: load("idx", **mnist_like), "expected 400 bytes, .* seen more")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 << 20


@pytest.mark.parametrize("kind, keys", [("npy", ("x", "y")), ("idx", ("images", "labels"))])
def test_homes_of_nobody(kind, keys):
    extra = {"classes": 3} if kind == "npy" else {}
    refused(
        lambda: load(kind, **dict.fromkeys(keys, "~nobody-of-that-name/x"), **extra),
        "expected the home folder of a user",
    )


WRONG_LABELS = {
    "images": (GOOD, r"expected labels, integers of shape \(samples,\), seen uint8 \(20, 5, 4\)"),
    "negative": (idx(np.array([0, -1] * 10, "i1")), "label -1 of sample 1; expected labels from 0"),
    "floats": (idx(LABELS.astype(">f4")), "expected labels, integers .* seen >f4"),
    "none": (idx(LABELS[:0]), "expected labels"),
    "text": (b"5\n0\n", "seen text: '5'"),
}


@pytest.mark.parametrize("name", WRONG_LABELS)
def test_files_that_are_no_labels_are_refused(mnist_like, name):
    content, message = WRONG_LABELS[name]
    Path(mnist_like["labels"]).write_bytes(content)
    refused(lambda: load("idx", **mnist_like), message, mnist_like["labels"])


def test_idx_test_sets_that_do_not_fit_are_refused(tmp_path, mnist_like):
    (tmp_path / "t").write_bytes(idx(LABELS + 1))
    keys = {**mnist_like, "test_images": mnist_like["images"]}
    refused(lambda: load("idx", **keys), "test_images and test_labels, seen only one")
    refused(
        lambda: load("idx", **keys, test_labels=str(tmp_path / "t")), "t: label 3 of sample 2 is"
    )
    refused(lambda: load("idx", **keys, test_labels=str(tmp_path / "no")), "seen nothing")
    refused(lambda: load("idx", **keys, test_labels=str(tmp_path)), "seen a directory")


# --- npy -----------------------------------------------------------------------------------------


@pytest.fixture
def arrays(tmp_path):
    """Paths of good samples and labels, as keys of [data]."""
    np.save(tmp_path / "x.npy", IMAGES)
    np.save(tmp_path / "y.npy", LABELS)
    return {"x": str(tmp_path / "x.npy"), "y": str(tmp_path / "y.npy"), "classes": 3}


@pytest.mark.parametrize("version", [(1, 0), (2, 0)])
@pytest.mark.parametrize("dtype", ["u1", "f4", ">f8", "bool", "f2"])
def test_npy(arrays, dtype, version):
    x = IMAGES.astype(dtype)
    with open(arrays["x"], "wb") as file:
        np.lib.format.write_array(file, x, version)
    train, test, classes = load("npy", **arrays, x_test=arrays["x"], y_test=arrays["y"])
    assert (len(train), train.sample_shape, classes, len(test)) == (20, (5, 4), 3, 20)
    observed, y = train.rows(SUBSET)
    expected = x[SUBSET] / np.float32(255) if dtype == "u1" else x[SUBSET]
    assert np.array_equal(observed, expected) and np.array_equal(y, LABELS[SUBSET])
    observed[...] = 1  # a copy, not the file
    assert np.array_equal(train.rows(SUBSET)[0], expected) and y.dtype == np.int64
    assert [len(part) for part in train.rows(np.array([], np.int64))] == [0, 0]


def npy(header: str, version: bytes = b"\x01\x00") -> bytes:
    """Return an npy file of that header and one byte."""
    return b"\x93NUMPY" + version + struct.pack("<H", len(header)) + header.encode() + b"\0"


def described(descr: str = "'|u1'", shape: str = "(1, 1)") -> str:
    return f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}}}"


WRONG_ARRAYS = {
    "deep header": (lambda p: p.write_bytes(npy("(" * 9000)), "expected an .npy file"),
    "long header": (lambda p: p.write_bytes(npy(" " * 20000)), "seen: a header of 20000 bytes"),
    "unknown version": (lambda p: p.write_bytes(npy("", b"\x09\0")), r"seen: version \(9, 0\)"),
    "negative dims": (
        lambda p: p.write_bytes(npy(described(shape="(-1, -1)"))),
        "dims of 0 or more, seen",
    ),
    "many dims": (
        lambda p: p.write_bytes(npy(described(shape=str((1,) * 99)))),
        "expected the shape of an",
    ),
    "huge and empty": (
        lambda p: p.write_bytes(npy(described(shape=str((0, 1 << 70))))[:-1]),
        "the shape of an ar",
    ),
    "records": (lambda p: np.save(p, np.zeros(3, "i4,f4")), "of numbers, seen dtype"),
    "numbers without bytes": (lambda p: p.write_bytes(npy(described("'|V0'"))), "of numbers, seen"),
    "FIFO": (lambda p: (p.unlink(), os.mkfifo(p)), "expected a regular file, seen a FIFO"),
    "text": (lambda p: p.write_text("1,2\n"), "expected an .npy file"),
    "npz": (lambda p: p.write_bytes(b"PK\x03\x04" + b"0" * 400), "expected an .npy file"),
    "empty": (lambda p: p.write_bytes(b""), "expected an .npy file"),
    "cut": (lambda p: p.write_bytes(p.read_bytes()[:-1]), "seen 527; copy it again"),
    "Fortran": (lambda p: np.save(p, np.asfortranarray(IMAGES)), "seen Fortran order"),
    "objects": (
        lambda p: np.save(p, IMAGES.astype(object)),
        r"seen Python objects: .*to_numpy\(dtype='float32'\); then write it with numpy.save",
    ),
    "words": (
        lambda p: np.save(p, IMAGES.astype(str)),
        r"expected real numbers: give each text a number, as numpy.unique\(column, return_inverse",
    ),
    "fewer": (lambda p: np.save(p, IMAGES[:3]), "3 samples but y has 20;"),
    "vectors": (lambda p: np.save(p, LABELS), r"x is of shape \(20,\)"),
    "nothing": (lambda p: p.unlink(), "seen nothing"),
}


@pytest.mark.parametrize("name", WRONG_ARRAYS)
def test_files_that_are_no_arrays_are_refused(arrays, name):
    make, message = WRONG_ARRAYS[name]
    make(Path(arrays["x"]))
    refused(lambda: load("npy", **arrays), message, arrays["x"])


def test_whatever_byte_of_a_header_is_wrong_nothing_but_a_refusal_comes(arrays):
    path = Path(arrays["x"])
    complete = path.read_bytes()
    for at in range(128):
        content = bytearray(complete)
        content[at] ^= int(RNG.integers(1, 256))
        path.write_bytes(content)
        try:
            train = load("npy", **arrays).train
        except UsageError:
            continue
        assert len(train) == 20 and len(train.rows(SUBSET)[0]) == 3  # a dtype, say


WRONG_NUMBERS = {
    "label": (np.where(np.arange(20) == 7, 3, 0), "label 3 of sample 7 is .* labels in 0 .. 2"),
    "negative": (np.where(np.arange(20) == 19, -1, 0), "label -1 of sample 19"),
    "huge": (np.full(20, 2**63, np.uint64), "label 9223372036854775808 of sample 0"),
    "floats": (LABELS * 1.0, "y has dtype float64"),
    "none": (LABELS[:0], "x has 20 samples but y has 0;"),
    "text": (LABELS.astype(str), r"classes, y = numpy.unique\(y, return_inverse=True\)"),
}


@pytest.mark.parametrize("name", WRONG_NUMBERS)
def test_labels_are_checked_before_a_run(tmp_path, arrays, name):
    labels, message = WRONG_NUMBERS[name]
    np.save(tmp_path / "y.npy", labels)
    refused(lambda: load("npy", **arrays), message, arrays["y"])


def test_the_one_wrong_label_of_many_is_found(monkeypatch, tmp_path, arrays):
    monkeypatch.setattr(labels, "LABELS_PER_CHECK", 6)  # looked at in blocks of so many
    test_labels_are_checked_before_a_run(tmp_path, arrays, "negative")


WRONG_ROWS = {
    "nan": (
        {"x": np.where(np.arange(20) == 7, np.nan, 0)[:, None]},
        "x holds nan in sample 7, column 0; ex",
    ),
    "pixel": (
        {"x": np.where(np.arange(400).reshape(20, 5, 4) == 146, np.inf, 0)},
        r"x holds inf in sample 7, at \(1, 2\); expected finite numbers: replace or remove it, or",
    ),
}


@pytest.mark.parametrize("name", WRONG_ROWS)
def test_rows_are_checked_when_they_are_read(tmp_path, arrays, name):
    content, message = WRONG_ROWS[name]
    for key, values in content.items():
        np.save(tmp_path / f"{key}.npy", values)
    train = load("npy", **arrays).train
    train.rows(np.array([0, 1, 18]))
    refused(lambda: train.rows(SUBSET), message, arrays["x"])


def test_npy_test_sets_that_do_not_fit_are_refused(tmp_path, arrays):
    np.save(tmp_path / "t.npy", IMAGES[:, :4])
    refused(lambda: load("npy", **arrays, x_test="a"), "x_test and y_test, seen only one")
    keys = {**arrays, "x_test": str(tmp_path / "t.npy"), "y_test": arrays["y"]}
    refused(lambda: load("npy", **keys), r"test samples have shape \(4, 4\)")


# --- mnist ---------------------------------------------------------------------------------------


def test_mnist():
    train, test, classes = load("mnist")
    assert train.x.shape == (4000, 28, 28) and test.x.shape == (1000, 28, 28) and classes == 10
    assert train.x.dtype == np.float32 and train.x.min() == 0 and train.x.max() == 1
    assert (
        np.bincount(test.y).tolist() == [100] * 10 and np.bincount(train.y).tolist() == [400] * 10
    )
    everything = {x.tobytes() for x in (*train.x, *test.x)}
    assert len(everything) == 5000  # no image is on both sides


# --- text ----------------------------------------------------------------------------------------

PARTS = [b"The first", b"", b"\x00\xff", b" and the second text.\n", b"end"]
WHOLE = b"".join(PARTS)  # 36 bytes


@pytest.fixture
def texts(tmp_path):
    for i, part in enumerate(PARTS):
        (tmp_path / f"{i}.txt").write_bytes(part)
    (tmp_path / "folder.txt").mkdir()
    return tmp_path


def windows(samples) -> list[tuple[bytes, bytes]]:
    x, y = samples.rows(np.arange(len(samples)))
    assert x.dtype == np.uint8 and y.dtype == np.int64 and x.shape == y.shape
    return [(a.tobytes(), b.astype(np.uint8).tobytes()) for a, b in zip(x, y, strict=True)]


@pytest.mark.parametrize("length", [1, 2, 5, 17, 35])
def test_windows_cover_the_text_whatever_files_it_lies_in(texts, length):
    train, test, classes = load("text", files=[f"{texts}/*.txt"], length=length, test_fraction=0.3)
    observed = windows(train) + (windows(test) if test else [])
    assert (classes, train.sample_shape, len(observed)) == (256, (length,), 35 // length)
    for i, (x, y) in enumerate(observed):
        start = i * length
        assert (x, y) == (WHOLE[start : start + length], WHOLE[start + 1 : start + length + 1])
    assert (0 if test is None else len(test)) == int(len(observed) * 0.3)


def test_files_come_in_the_order_given_and_each_once(texts):
    split = load("text", files=[f"{texts}/4.txt", f"{texts}/**/*.txt"], length=5, test_fraction=0.0)
    assert b"".join(x for x, _ in windows(split.train)) == (b"end" + WHOLE)[:35]
    assert split.test is None


def test_the_sources_of_python_are_the_text_where_no_files_are_given():
    split = load("text", length=100)
    paths = text.standard_library_files()
    assert paths == sorted(paths) and {p.name for p in paths} >= {"ast.py", "random.py"}
    assert (len(split.train) + len(split.test)) * 100 > 4e6
    assert len(split.test) == int((len(split.train) + len(split.test)) * 0.05)
    assert not [p for p in paths if {"test", "site-packages"} & set(p.parts)]
    assert bytes(split.train.rows(np.array([0]))[0]) == paths[0].read_bytes()[:100]


WRONG_TEXTS = [
    ({"files": ["{}/*.txt"], "length": 36}, "expected a text of 37 bytes.* seen 36 bytes in 5"),
    ({"files": ["{}/1.txt"]}, "expected a text of 129 bytes or more.* seen 0 bytes"),
    ({"files": ["{}/*.txt", "{}/*.md"]}, "seen none that matches '.*md'"),
    ({"files": ["{}"]}, "seen none that matches"),
    ({"length": 0}, "length"),
    ({"test_fraction": 1.0}, "test_fraction"),
]


@pytest.mark.parametrize(("keys", "message"), WRONG_TEXTS)
def test_texts_without_a_window_are_refused(texts, keys, message):
    if "files" in keys:
        keys = {**keys, "files": [name.format(texts) for name in keys["files"]]}
    refused(lambda: load("text", **keys), message)


def test_a_text_that_shrinks_during_the_run_is_told(texts):
    train = load("text", files=[f"{texts}/3.txt"], length=4, test_fraction=0.0).train
    (texts / "3.txt").write_bytes(b"short")
    refused(lambda: train.rows(np.array([3])), "became shorter", texts / "3.txt")
