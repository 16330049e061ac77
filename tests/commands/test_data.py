"""`hpctrain data info`: the contents of files, and a table [data] that reads them."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tomli_w
from click.testing import CliRunner
from data_files import WRITERS, npy, write

from hpctrain import data
from hpctrain.commands.data import data as command
from hpctrain.core.config import toml
from hpctrain.core.errors import UsageError

pytestmark = pytest.mark.usefixtures("zarr_loop")
N = 20
Y = np.arange(N) % 3
IMAGES = np.random.default_rng(0).integers(0, 255, (N, 5, 6)).astype("u1")
COLUMNS = np.arange(4.0 * N, dtype="f4").reshape(N, 4)


def info(*arguments: str) -> str:
    return CliRunner().invoke(command, ["info", *arguments], catch_exceptions=False).stdout


GOLDEN = {
    "hdf5, gzip": """\
  in/x  uint8 (20, 5, 6)  gzip, chunks of 7 rows
  y     int64 (20,)       contiguous, labels 0 .. 2
""",
    "zarr": """\
  x  uint8 (20, 5, 6)  3 of 3 chunks stored, chunks of 7 rows
  y  int64 (20,)       3 of 3 chunks stored, chunks of 7 rows, labels 0 .. 2
""",
    "parquet": """\
  x  uint8 (20, 5, 6)  3 row groups, chunks of 7 rows
  y  int64 (20,)       3 row groups, chunks of 7 rows, labels 0 .. 2
""",
    "webdataset": """\
  cls  int64 (20,)       7 members, chunks of 7 rows, labels 0 .. 2
  png  uint8 (20, 5, 6)  7 members, chunks of 7 rows
""",
    "huggingface": """\
  x  uint8 (20, 5, 6)  mapped
  y  int64 (20,)       mapped, labels 0 .. 2
  split train: 20 rows
""",
}


@pytest.mark.parametrize("name", WRITERS)
def test_the_table_that_is_shown_reads_the_file(tmp_path, name):
    table = write(name, tmp_path, IMAGES, Y)
    output = info(table["path"])
    head, _, rest = output.partition("\n")
    contents, _, suggested = rest.partition("\n[data]\n")
    assert head.startswith(f"{table['path']}: {table['kind']}, ") and head.endswith(" bytes")
    assert contents == GOLDEN.get(name, contents)
    keys = toml.parse(suggested, "table")
    assert keys == {"y": keys["y"], "x": keys["x"], **table, "test_share": 0.2}
    train, test, _ = data.read(keys).load(0)
    assert (len(train), len(test), train.sample_shape) == (16, 4, (5, 6))
    (entry,) = json.loads(info(table["path"], "--json"))
    assert entry["table"] == keys and {tuple(a["shape"]) for a in entry["arrays"]} >= {(N, 5, 6)}


def test_columns_faults_and_missing_values_are_shown(tmp_path):
    import pyarrow as pa
    from pyarrow import parquet

    columns = {
        "name": ["cat"] * N,
        "age": [None, *range(N - 1)],
        "height": [float("nan"), *np.arange(N - 1.0)],
        "weight": COLUMNS[:, 0],
        "label": Y,
    }
    parquet.write_table(pa.table(columns), tmp_path / "d.parquet")
    lines = info(str(tmp_path / "d.parquet")).splitlines()
    assert "cannot be used: " in lines[1] and "seen string" in lines[1]
    assert "a value is missing (null) in row 0" in lines[2]
    assert lines[3] == "  height  float64 (20,)  1 row group, chunks of 20 rows, 1 value not finite"
    assert lines[4].endswith("finite") and lines[5].endswith("labels 0 .. 2")
    assert 'x = [\n    "height",\n    "weight",\n]\ny = "label"' in "\n".join(lines)


def test_files_of_numpy_and_test_sets_by_key(tmp_path):
    table = npy(tmp_path, COLUMNS, Y)
    assert info(table["x"]).splitlines()[1:] == [
        "  float32 (20, 4)  finite", "", "[data]", *tomli_w.dumps(
            {"kind": "npy", "x": table["x"], "y": "the file of y"}).splitlines(),
    ]  # fmt: skip
    np.savez(tmp_path / "d.npz", x=COLUMNS, y=Y)
    assert "  y  int64 (20,)      labels 0 .. 2\n" in info(str(tmp_path / "d.npz"))
    import h5py

    with h5py.File(tmp_path / "d.h5", "w") as file:
        for name, array in {"image": IMAGES, "label": Y}.items():
            file[name] = file[f"{name}_test"] = array
    assert 'x_test = "image_test"\ny_test = "label_test"' in info(str(tmp_path / "d.h5"))


REFUSED = {
    "text": (
        lambda p: p.write_text("a,b\n1,2\n"),
        "expected a file of one of the kinds .*read_csv",
    ),
    "empty": (lambda p: p.touch(), "seen 0 bytes"),
    "a folder": (lambda p: p.mkdir(), "seen another folder"),
    "missing": (lambda p: None, "seen nothing"),
    "a cut file": (
        lambda p: p.write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(90)),
        "expected an HDF5 file",
    ),
    "a cut tar": (lambda p: p.write_bytes(bytes(257) + b"ustar" + bytes(90)), "expected a tar"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_files_of_no_known_kind_are_refused(tmp_path, name):
    make, message = REFUSED[name]
    make(tmp_path / "d")
    with pytest.raises(UsageError, match=message):
        info(str(tmp_path / "d"))
