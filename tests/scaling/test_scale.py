"""`hpctrain scale` on real ranks: looked at, killed and called again; a failure; a netlab."""

from __future__ import annotations

import csv
import json
import re
import shutil

import psutil
import pytest
from conftest import Completed

from hpctrain.cluster.netlab import refusal

pytestmark = pytest.mark.processes
SMALL = ("--steps", 20, "--repeats", 1, "--out", "study")


def rows(folder):
    return list(csv.DictReader((folder / "scaling.csv").read_text().splitlines()))


def test_killed_half_way_and_called_again(start, tmp_path):
    words = ("-m", "hpctrain", "scale", "digits", "--ranks", "1,2", *SMALL)
    first = start(*words)
    first.until("2 ranks, repeat 1 of 1: running")
    below = first.ranks()
    looked = start(*words).finish(30)
    assert looked.returncode == 2
    assert "another `hpctrain scale` works on it" in looked.stderr
    assert re.search(r"│ +1 │ measured +│", looked.stderr)
    first.process.kill()  # it alone: those below it end with it
    assert not psutil.wait_procs(below, timeout=30)[1]
    study = tmp_path / "study"
    assert not (study / "scaling.csv").exists()
    done = study / "trials/00001-ranks-00001-nodes/repeat-0/summary.json"
    before = done.stat().st_mtime_ns
    again: Completed = start(*words).finish(90)
    assert again.returncode == 0, again.stdout + again.stderr
    assert done.stat().st_mtime_ns == before  # what was there was not run again
    assert re.findall("^(.*): running", again.stderr, re.M) == ["2 ranks, repeat 1 of 1"]
    assert "Amdahl's law: serial fraction" in again.stdout
    found = rows(study)
    assert [row["kind"] for row in found[:2]] == ["measured"] * 2
    assert found[2]["kind"] == "predicted"
    summed = [float(found[1][name]) for name in ("compute_s", "wait_s", "other_s")]
    assert sum(summed) == pytest.approx(float(found[1]["step_s"]), rel=1e-6)
    assert not list(study.rglob("checkpoints"))
    for name in ("scaling.png", "scaling.svg", "time.png", "time.svg", "report.html"):
        assert (study / name).stat().st_size > 1000
    machine = json.loads((study / "scaling.json").read_text())["machine"]
    assert machine["mpi"].startswith(("Open MPI", "MPICH"))


def test_what_a_rank_says_is_the_reason_of_a_gap(hpctrain, tmp_path):
    slow = ("--set", "faults.slow_rank=1", "--set", "faults.slow_factor=1.0")
    done = hpctrain("scale", "digits", "--ranks", "1", "--mode", "weak", *slow, *SMALL)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 rank, repeat 1 of 1: [faults] slow_rank" in done.stderr
    found = rows(tmp_path / "study")
    assert [row["kind"] for row in found] == ["gap"]
    assert "slow_rank: expected less than 1" in found[0]["reason"]


@pytest.mark.full
def test_hosts_of_a_netlab(hpctrain, tmp_path):
    if shutil.which("tc") is None or (reason := refusal()):
        pytest.skip(reason or "needs tc")
    words = ("scale", "digits", "--nodes", "1,2,4", "--on", "netlab", "--mode", "weak", *SMALL)
    done = hpctrain(*words, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    found = rows(tmp_path / "study")
    assert [(row["kind"], row["nodes"]) for row in found[:3]] == [("measured", n) for n in "124"]
    told = json.loads((tmp_path / "study/scaling.json").read_text())
    assert told["machine"]["hosts_seen"] == ["h1", "h2", "h3", "h4"]
    assert told["model"]["beta_s_per_byte"] > 1e-9  # memory would be faster
