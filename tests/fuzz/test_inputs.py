"""Data files, initial weights and sites with random faults, against simple readers.

What is accepted is what NumPy, or a reader of a few lines, finds in the file; what was not changed
is accepted; all else is refused in one way, which names the file.
"""

from __future__ import annotations

import gzip
import io
import json
import shlex
import struct
import warnings
import zipfile
from functools import partial
from importlib import resources
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import tomli_w

from fuzz import Generator, campaign, in_memory, mutated, mutated_json, value_or_refusal
from hpctrain import data
from hpctrain.cluster.slurm import site
from hpctrain.core.config import toml
from hpctrain.core.errors import HpctrainError
from hpctrain.training import weights

DTYPES = ("u1", "i1", "<i4", ">i2", "<f4", ">f8", "<f2", "?", "<i8")
IDX = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
SHAPES = (
    "(3, 2)",
    "(-3, 2)",
    "(0, 2)",
    "(0, 1 << 70)",
    "()",
    "(3,)",
    "(3, 2.0)",
    "(True, 2)",
    "(4294967296, 4294967296)",
    "(1,) * 3",
    str((1,) * 70),
    "[3, 2]",
    "(" * 3000,
    "None",
)
DESCRS = ("'<f4'", "'|O'", "'|V0'", "'<U3'", "'<c8'", "[('a', '<f4')]", "('<f4', (2,))", "'<M8[s]'",
          "'>f8'", "'|u1'", "3", "'x'", "b'<f4'", "'<f16'", "'" + "<f4," * 500 + "'")  # fmt: skip


def samples(rng: Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return x (n, ...) and labels below 3, small."""
    n, shape = rng.randint(1, 5), (rng.randint(1, 3),) * rng.randint(1, 3)
    numbers = np.random.default_rng(rng.getrandbits(32))
    x = numbers.integers(0, 100, (n, *shape)).astype(rng.choice(DTYPES))
    return x, numbers.integers(0, 3, n).astype(rng.choice(("u1", "<i4", ">i2")))


def npy(x: np.ndarray, rng: Generator) -> bytes:
    """Return an npy file, sometimes with a header that says something else."""
    file = io.BytesIO()
    np.lib.format.write_array(file, x, rng.choice(((1, 0), (2, 0), None)))
    return file.getvalue()


def forged(rng: Generator) -> bytes:
    """Return an npy file whose header is one of many that were made up."""
    order, shape = rng.choice(("False", "True", "3")), rng.choice(SHAPES)
    header = f"{{'descr': {rng.choice(DESCRS)}, 'fortran_order': {order}, 'shape': {shape}}}\n"
    text = header.encode()
    length = rng.choice((len(text), len(text), 2**32 - 1, 0, 70_000))
    return b"\x93NUMPY\x02\x00" + struct.pack("<I", length) + text + bytes(24)


def faulty(content: bytes, rng: Generator) -> tuple[bytes, bool]:
    """Return the content of a file, and whether it is whole; half of the faults lie in front."""
    if rng.random() < 0.2:
        return content, True
    if rng.random() < 0.5:
        return mutated(content[:160], rng) + content[160:], False
    return mutated(content, rng), False


def loaded(keys: dict[str, Any], complete: bool, *names: object) -> data.Split | None:
    """Return what `data` reads, None if it refuses."""
    result = value_or_refusal(lambda: data.read(keys).load(0), *names)
    if isinstance(result, HpctrainError):
        assert not complete, result
        return None
    return result


def are_those_of(result: data.Split, x: np.ndarray, y: np.ndarray, *names: object) -> None:
    """Compare all rows; bytes are divided by 255, rows that are not finite are refused."""
    x = x.astype(np.float32) / 255 if x.dtype == np.uint8 else x
    rows = value_or_refusal(lambda: result.train.rows(np.arange(len(result.train))), *names)
    if isinstance(rows, HpctrainError):
        assert not np.isfinite(x).all()
        return
    assert rows[0].dtype == x.dtype and rows[0].tobytes() == np.ascontiguousarray(x).tobytes()
    assert rows[0].shape == x.shape and np.array_equal(rows[1], y)


def numpys(path: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return np.load(path, allow_pickle=False)


def npy_case(rng: Generator, folder: Path) -> None:
    (x, y), paths = samples(rng), [folder / "x.npy", folder / "y.npy"]
    content, complete = (forged(rng), False) if rng.random() < 0.3 else faulty(npy(x, rng), rng)
    paths[0].write_bytes(content)
    paths[1].write_bytes(npy(y, rng))
    keys = {"kind": "npy", "x": str(paths[0]), "y": str(paths[1]), "classes": 3}
    if result := loaded(keys, complete, paths[0]):
        are_those_of(result, numpys(paths[0]), y, paths[0])


def npz_case(rng: Generator, folder: Path) -> None:
    (x, y), path, file = samples(rng), folder / "d.npz", io.BytesIO()
    method = rng.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED] * 5 + [zipfile.ZIP_LZMA])
    extra = bytes(1 << 20) if rng.random() < 0.05 and method == zipfile.ZIP_DEFLATED else b""
    inner = forged(rng) if rng.random() < 0.2 else npy(x, rng)
    with zipfile.ZipFile(file, "w", method) as archive:
        archive.writestr("x.npy", inner + extra)
        archive.writestr("y.npy", npy(y, rng))
    content, _ = faulty(file.getvalue(), rng)
    path.write_bytes(content)
    if result := loaded({"kind": "npz", "path": str(path)}, False, path):
        with numpys(path) as arrays:
            are_those_of(result, arrays["x"], arrays["y"], path)
    elif content == file.getvalue() and method != zipfile.ZIP_LZMA:
        assert extra or inner[:8] == b"\x93NUMPY\x02\0"  # which may be forged


def plain_idx(content: bytes) -> np.ndarray:
    """Return the array of an IDX file as its two lines of documentation say."""
    dtype, dims = np.dtype(IDX[content[2]]), content[3]
    shape = struct.unpack(f">{dims}I", content[4 : 4 + 4 * dims])
    assert content[:2] == b"\0\0" and len(content) == 4 + 4 * dims + prod(shape) * dtype.itemsize
    return np.frombuffer(content, dtype, offset=4 + 4 * dims).reshape(shape)


def idx(x: np.ndarray, code: int) -> bytes:
    sizes = struct.pack(f">{x.ndim}I", *x.shape)
    return bytes([0, 0, code, x.ndim]) + sizes + x.astype(IDX[code]).tobytes()


def idx_case(rng: Generator, folder: Path) -> None:
    (x, y), paths = samples(rng), [folder / "images", folder / "labels"]
    content, complete = faulty(idx(x, rng.choice(list(IDX))), rng)
    if rng.random() < 0.05:
        content, complete = content + bytes(1 << 20), False
    zipped = rng.random() < 0.5
    if zipped:
        content = gzip.compress(content, 1)
        content, still = faulty(content, rng)
        complete = complete and still
    paths[0].write_bytes(content)
    paths[1].write_bytes(idx(y, 0x08))
    keys = {"kind": "idx", "images": str(paths[0]), "labels": str(paths[1])}
    if result := loaded(keys, complete, paths[0]):
        observed = plain_idx(gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content)
        are_those_of(result, observed, y, paths[0])


def weights_case(rng: Generator, folder: Path) -> None:
    path, (x, y) = folder / "a.safetensors", samples(rng)
    x = x.astype("f4")
    content, complete = faulty(safetensors.numpy.save({"a": x, "b": y.astype("f8")}), rng)
    path.write_bytes(content)
    result = value_or_refusal(lambda: weights.read(path), path)
    if isinstance(result, HpctrainError):
        assert not complete, result
        return
    (length,) = struct.unpack_from("<Q", content)
    reported = json.loads(content[8 : 8 + length])
    for name, observed in result.items():
        start, stop = reported[name]["data_offsets"]
        assert observed.tobytes() == content[8 + length :][start:stop]
        assert list(observed.shape) == reported[name]["shape"]


SITES = [
    toml.parse(item.read_text(), item.name)
    for item in sorted(
        resources.files("hpctrain.cluster.slurm").joinpath("sites").iterdir(), key=str
    )
    if item.name.endswith(".toml")
]


def sites_case(rng: Generator, folder: Path) -> None:
    tables, path = rng.choice(SITES), folder / "s.toml"
    changed = rng.random() < 0.5
    if changed:
        tables = mutated_json(tables, rng)
    try:
        content = tomli_w.dumps(tables).encode()
    except (TypeError, ValueError, AttributeError):  # what TOML cannot say, as null
        return
    content, complete = faulty(content, rng) if not changed else (content, False)
    path.write_bytes(content)
    result = value_or_refusal(lambda: site.load_site(str(path)), path)
    if isinstance(result, HpctrainError):
        assert not complete, result
        return
    assert site.load_site(str(path)) == result
    for nodes in filter(None, (result.cpu, result.gpu)):
        exports = result.environment | nodes.environment | {"HPCTRAIN_LAUNCHER": result.launcher}
        exports |= result.environment | nodes.environment
        shell = {}
        for line in result.site_env(nodes).splitlines():
            words = shlex.split(line, comments=True)  # as a shell would read it
            if words[:1] == ["export"]:
                shell |= dict([words[1].split("=", 1)])
        assert shell.items() >= exports.items()


CASES = [npy_case, npz_case, idx_case, weights_case, sites_case]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "count", [200, pytest.param(20_000, marks=[pytest.mark.full, pytest.mark.timeout(3600)])]
)
@pytest.mark.parametrize("case", CASES)
def test_inputs(case, count):
    with in_memory() as folder:
        campaign(case.__name__, count, partial(case, folder=folder))
