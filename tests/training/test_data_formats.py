"""Runs on data files of other libraries: the bytes of a run on .npy files, on any ranks."""

from __future__ import annotations

import json
import sys
from itertools import chain, product
from pathlib import Path

import numpy as np
import pytest
from data_files import WRITERS, npy, write
from ranks import on_ranks, run_on

from hpctrain.cluster.netlab.netlab import unavailable_reason
from hpctrain.core.errors import BadDataError, StoppedError, UsageError
from hpctrain.core.run_files import run_folder
from hpctrain.core.signals import StopRequest
from hpctrain.training import recipe, runs

N = 53
Y = np.arange(N) % 3
NUMBERS = np.random.default_rng(0)
COLUMNS = (NUMBERS.normal(size=(N, 4)) + Y[:, None]).astype(np.float32)
IMAGES = NUMBERS.integers(0, 256, (N, 5, 6)).astype(np.uint8)
SAMPLES = {"columns": COLUMNS, "images": IMAGES}
IN_FULL = {"huggingface"}  #: its library takes 2 s to import, on each MPI rank
pytestmark = pytest.mark.usefixtures("zarr_loop")


def tables(table: dict, samples: str, **run: object) -> dict:
    x = SAMPLES[samples]
    return {
        "schema": 1, "run": {"name": "formats", "epochs": 2, "device": "cpu", **run},
        "model": {"kind": "mlp", "widths": [int(np.prod(x.shape[1:])), 8, 3]},
        "data": {**table, "test_share": 0.2} if table["kind"] != "npy" else table,
        "optimizer": {"kind": "sgd", "rate": 0.1, "momentum": 0.9, "batch": 10},
    }  # fmt: skip


def spec(table: dict, samples: str, **run: object) -> recipe.Recipe:
    return recipe.check(tables(table, samples, **run))


def written(name: str, folder, samples: str) -> dict:
    """Write the samples; of npy the training and the test set that a share of 0.2 gives."""
    from hpctrain.data.formats.samples import divide_rows

    x, folder = SAMPLES[samples], folder / name
    if name != "npy":
        return write(name, folder, x, Y)
    train, test = divide_rows(N, 0.2, seed=0)
    tables = []
    for part, rows in {"train": train, "test": test}.items():
        (folder / part).mkdir(parents=True)
        tables.append(npy(folder / part, x[rows], Y[rows]))
    tests = {f"{key}_test": path for key, path in tables[1].items()}
    return {"kind": "npy", **tables[0], **tests, "classes": 3}


def check_equal(ranks, name: str, samples: str, folder) -> None:
    def body(world):
        summaries = []
        for kind in ("npy", name):
            table = world.from_first(lambda kind=kind: written(kind, folder, samples))
            out = world.from_first(lambda kind=kind: str(folder / f"run-{kind}"))
            summaries.append(runs.train(spec(table, samples), world, Path(out), resume=False))
        return summaries

    for expected, observed in ranks(body):
        keys = ("params_sha256", "test_loss", "test_accuracy", "steps")
        assert [observed[key] for key in keys] == [expected[key] for key in keys]
        assert expected["steps"] == 2 * 5  # 42 samples to train on


@pytest.mark.parametrize("samples", SAMPLES)
@pytest.mark.parametrize("name", WRITERS)
@on_ranks(1, 2, 3, 4, 5, mpi=())
def test_a_run_has_the_bytes_of_a_run_on_npy(tmp_path, ranks, name, samples):
    check_equal(ranks, name, samples, tmp_path)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.full] * (n in IN_FULL)) for n in WRITERS]
)
@on_ranks(mpi=(1, 2, 3, 4, 5))
def test_a_run_on_mpi_has_the_bytes_of_a_run_on_npy(tmp_path, ranks, name):
    check_equal(ranks, name, "images", tmp_path)


RUNS = """
import json, sys
from pathlib import Path
import hpctrain
from hpctrain.data.node_rows import FillReader
from hpctrain.training import recipe, runs

read_rows, rows = FillReader._read_rows, []


def note_rows(self, indexes, epoch):
    rows.extend((epoch, index) for index in indexes.tolist())
    return read_rows(self, indexes, epoch)


FillReader._read_rows = note_rows
world, folder = hpctrain.init(), Path(sys.argv[1])
for name, tables in json.loads((folder / "runs.json").read_text()).items():
    rows.clear()
    summary = runs.train(recipe.check(tables), world, folder / f"run-{name}", resume=False)
    read = [json.loads(text) for text in world.gather(json.dumps(rows))]
    if world.rank == 0:
        print("run", json.dumps([name, summary["params_sha256"], read]))
"""


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.timeout(240)
@pytest.mark.parametrize("per_host", [1, 2])
def test_on_two_hosts_runs_have_the_bytes_of_a_run_on_npy_and_read_each_row_once(
    hpctrain, tmp_path, per_host
):
    if reason := unavailable_reason():
        pytest.skip(reason)
    names = ["npy", *WRITERS]
    sources = {name: {**written(name, tmp_path, "images"), "reader": "node"} for name in names}
    recipes = {name: tables(table, "images") for name, table in sources.items()}
    (tmp_path / "runs.json").write_text(json.dumps(recipes))
    lab = ("netlab", "--hosts", 2, "--ranks-per-host", per_host, "--")
    ended = hpctrain(*lab, sys.executable, "-c", RUNS, tmp_path, timeout=220)
    assert ended.returncode == 0, ended.stderr
    lines = [line for line in ended.stdout.splitlines() if line.startswith("run ")]
    results = [json.loads(line.removeprefix("run ")) for line in lines]
    assert [name for name, _, _ in results] == names
    assert len({sha256 for _, sha256, _ in results}) == 1
    for _, _, rows in results:
        assert [bool(read) for read in rows] == [rank % per_host == 0 for rank in range(len(rows))]
        assert sorted(chain(*rows)) == [list(row) for row in product(range(2), range(42))]


@pytest.mark.sample(2)
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", WRITERS)
def test_a_run_that_stopped_within_an_epoch_resumes_with_its_bytes(
    tmp_path, monkeypatch, name, size
):
    table = written(name, tmp_path, "images")

    def train(out, resume=False):
        recipe_spec = spec(table, "images", prefetch=2)
        return run_on("threads", size, lambda world: runs.train(recipe_spec, world, out, resume))[0]

    complete = train(tmp_path / "whole")
    observed = iter(range(10**6))
    with monkeypatch.context() as patch:
        patch.setattr(
            StopRequest, "requested",
            property(lambda self: next(observed) >= 3 * size, lambda self, value: None),
            raising=False,
        )  # fmt: skip
        with pytest.raises(StoppedError):
            train(tmp_path / "cut")
    assert run_folder.read_summary(tmp_path / "cut")["steps"] % 5
    assert train(tmp_path / "cut", resume=True)["params_sha256"] == complete["params_sha256"]


def test_a_missing_value_ends_a_run_and_names_its_row(tmp_path):
    import h5py

    table = written("hdf5, gzip", tmp_path, "columns")
    with h5py.File(table["path"], "r+") as file:
        file["in/x"][17, 2] = 2.0**99
        file["in/x"].attrs["_FillValue"] = np.float32(2.0**99)
    with pytest.raises(
        BadDataError, match=r"d.h5: in/x: row 17 holds 6.33\S+ at \(2,\), which marks a"
    ):
        run_on("threads", 1, lambda w: runs.train(spec(table, "columns"), w, tmp_path / "r", False))


def test_targets_in_files_that_are_no_single_numbers_need_the_number_of_classes(tmp_path):
    table = write("hdf5", tmp_path, IMAGES[:, 0], np.stack([Y, Y], axis=1))
    recipe_spec = spec(table, "images")
    with pytest.raises(UsageError, match="for labels in files give"):
        run_on("threads", 1, lambda w: runs.train(recipe_spec, w, tmp_path / "r", resume=False))
