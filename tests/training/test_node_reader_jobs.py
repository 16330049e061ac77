"""One reader per node in real jobs: no process is started, and failures end the job as ever."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from data_files import write

from hpctrain.core.run_files import run_folder

pytestmark = [pytest.mark.processes, pytest.mark.either]

CODE = """
import sys, threading, time
import numpy as np
from hpctrain.core.errors import DataError
from hpctrain.data import ReadOptions, ReadSamples, Split

X = np.random.default_rng(0).standard_normal((103, 4)).astype("float32")


class Stored:
    source, sample_shape, chunk_rows = "set.h5: x, y", (4,), 10

    def __init__(self, fault):
        self.fault = fault

    def __len__(self):
        return len(X)

    def rows(self, indexes, epoch=0):
        if 31 in indexes and threading.current_thread().name == "hpctrain-reader":
            if self.fault == "value":
                raise DataError("set.h5: x holds nan in sample 31")
            if self.fault == "system":
                raise OSError(5, "Input/output error")
            if self.fault == "hang":
                time.sleep(3600)
            if self.fault == "fork":
                import subprocess
                subprocess.run(["true"])
        return X[indexes], indexes % 3


def refuse_forks(event, args):
    if event in ("os.fork", "os.forkpty", "os.posix_spawn", "subprocess.Popen"):
        print("a rank was forked:", event, args, file=sys.stderr, flush=True)


def load(fault, reader):
    sys.addaudithook(refuse_forks)
    options = ReadOptions(reader=reader, shuffle="chunks", read_ahead_bytes=4000)
    return Split(ReadSamples(Stored(fault), options), None, 3)
"""
RECIPE = """
schema = 1
[run]
name = "node-reader"
epochs = 2
timeout_s = {timeout_s}
[model]
kind = "mlp"
widths = [4, 8, 3]
[data]
kind = "samples:load"
fault = "{fault}"
reader = "{reader}"
[optimizer]
kind = "sgd"
rate = 0.1
batch = 20
"""
PARQUET = RECIPE.partition("[data]")[0].format(timeout_s=60).replace("epochs", "steps")
PARQUET += "[data]\n" + RECIPE.partition('reader = "{reader}"\n')[2]
#: fault: exit code, and what is said
FAULTS = {
    "value": (2, r"set\.h5: x holds nan in sample 31"),
    "system": (1, r"set\.h5: x, y: sample 31 could not be read: OSError: \[Errno 5\] Input/output"),
    "hang": (1, r"no batch was read within 2 s by rank 0 on \S+, which reads set\.h5: x, y"),
    "fork": (0, r"a rank was forked: subprocess\.Popen"),
}  # fmt: skip


@pytest.fixture
def trained(hpctrain, tmp_path: Path):
    """Return a function that trains on `ranks`; it returns what was said, and the summary."""
    (tmp_path / "samples.py").write_text(CODE)

    def train(fault: str, reader: str, ranks: int = 3):
        timeout_s = 2 if fault == "hang" else 60
        recipe, out = tmp_path / f"{reader}.toml", tmp_path / f"{fault}-{reader}"
        recipe.write_text(RECIPE.format(fault=fault, reader=reader, timeout_s=timeout_s))
        ended = hpctrain("train", recipe, "--out", out, ranks=ranks)
        return ended, run_folder.read_summary(out)

    return train


def test_no_process_is_started_and_the_result_is_that_of_each_rank(trained):
    runs = [trained("none", reader) for reader in ("node", "rank")]
    assert [ended.returncode for ended, _ in runs] == [0, 0], runs[0][0].stderr
    assert len({summary["params_sha256"] for _, summary in runs}) == 1
    assert "was forked" not in runs[0][0].stderr
    assert (
        "one rank of each node reads for all of its ranks, 2 x 3 steps ahead" in runs[0][0].stderr
    )
    for _, summary in runs:
        assert 0 < summary["data_wait_s"] <= summary["wall_s"]


@pytest.mark.sample(2)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_reader_that_fails_ends_the_job(trained, fault):
    code, message = FAULTS[fault]
    ended, summary = trained(fault, "node")
    assert ended.returncode == code, ended.stderr
    assert re.search(message, ended.stderr), ended.stderr
    if code:
        assert re.search(message, summary["reason"]) and summary["exit_code"] == code


@pytest.mark.parametrize("jobs", [1, pytest.param(10, marks=pytest.mark.full)])
def test_ranks_that_read_parquet_end_by_themselves(hpctrain, tmp_path, jobs):
    """Arrow has threads of its own: none of them may need the interpreter when it ends."""
    x = np.random.default_rng(0).standard_normal((700, 4)).astype("f4")
    table = write("parquet", tmp_path, x, np.arange(700) % 3)
    keys = [f"data.{key}={json.dumps(value)}" for key, value in table.items()]
    recipe = tmp_path / "parquet.toml"
    recipe.write_text(PARQUET)
    words = [word for key in keys for word in ("--set", key)]
    for number in range(jobs):
        ended = hpctrain("train", recipe, *words, "--out", tmp_path / f"run-{number}", ranks=2)
        assert ended.returncode == 0 and "Fatal" not in ended.stderr, ended.stderr
