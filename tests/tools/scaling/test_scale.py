"""`hpctrain scale` on real ranks: killed and called again; a failure; a netlab."""

from __future__ import annotations

import csv
import json
import re
import shutil
import time

import psutil
import pytest
from limits import clock
from processes import LAUNCHER, Completed
from studies import Times, write

from hpctrain.cluster.netlab.netlab import unavailable_reason
from hpctrain.commands.scale import scale
from hpctrain.tools.scaling.trial_recipe import Timing

pytestmark = [pytest.mark.processes, pytest.mark.either]
MADE_UP = Times(1.5e-3, 1e-3)
SMALL = ("--steps", 20, "--repeats", 1, "--out", "study")


def rows(folder):
    return list(csv.DictReader((folder / "scaling.csv").read_text().splitlines()))


@pytest.mark.full
def test_killed_half_way_and_called_again(start, tmp_path):
    words = ("-m", "hpctrain", "scale", "digits", "--ranks", "1,2", *SMALL)
    first = start(*words)
    first.until("messages on 2 ranks")
    deadline = clock() + 30
    while len(below := first.ranks()) < 2 and clock() < deadline:
        time.sleep(0.02)
    first.process.kill()  # it alone: those below it end with it
    assert below and not psutil.wait_procs(below, timeout=30)[1]
    study = tmp_path / "study"
    assert not (study / "scaling.csv").exists()
    made_up(study)
    again: Completed = start(*words).finish(90)
    assert again.returncode == 0, again.stdout + again.stderr
    # what was there was not run again
    assert re.findall("^(.*): running", again.stderr, re.M) == ["2 ranks, repeat 1 of 1"]
    assert "Amdahl's law: serial fraction" in again.stdout
    result = rows(study)
    assert [row["kind"] for row in result[:2]] == ["measured"] * 2
    assert float(result[0]["step_s"]) == pytest.approx(MADE_UP.step_s)
    assert result[2]["kind"] == "predicted"
    summed = [float(result[1][name]) for name in ("compute_s", "wait_s", "other_s")]
    assert sum(summed) == pytest.approx(float(result[1]["step_s"]), rel=1e-6)
    assert not list(study.rglob("checkpoints"))
    for name in ("scaling.png", "scaling.svg", "time.png", "time.svg", "report.html"):
        assert (study / name).stat().st_size > 1000
    machine = json.loads((study / "scaling.json").read_text())["machine"]
    assert machine["mpi"].startswith(("Open MPI", "MPICH"))


def made_up(study):
    """Write what a real trial on 1 rank would leave, and that messages were tried."""
    write(study / "trials/00001-ranks-00001-nodes/repeat-0", Timing.of(20), MADE_UP, 128, 1)
    (study / "links/00002-ranks-00001-nodes/link.json").write_text("{}")


def test_what_a_rank_says_is_the_reason_of_a_gap(tmp_path, monkeypatch, caplog):
    for name, value in LAUNCHER.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    slow = ("--set", "faults.slow_rank=1", "--set", "faults.slow_factor=1.0")
    words = ("digits", "--ranks", "1", "--mode", "weak", *slow, *map(str, SMALL))
    assert scale.main(words, standalone_mode=False) == 1
    assert "1 rank, repeat 1 of 1: [faults] slow_rank" in caplog.text
    result = rows(tmp_path / "study")
    assert [row["kind"] for row in result] == ["gap"]
    assert "slow_rank: expected less than 1" in result[0]["reason"]


@pytest.mark.full
def test_hosts_of_a_netlab(hpctrain, tmp_path):
    if shutil.which("tc") is None or (reason := unavailable_reason()):
        pytest.skip(reason or "needs tc")
    words = ("scale", "digits", "--nodes", "1,2,4", "--on", "netlab", "--mode", "weak", *SMALL)
    completed = hpctrain(*words, timeout=110)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    result = rows(tmp_path / "study")
    assert [(row["kind"], row["nodes"]) for row in result[:3]] == [("measured", n) for n in "124"]
    reported = json.loads((tmp_path / "study/scaling.json").read_text())
    assert reported["machine"]["hosts_seen"] == ["h1", "h2", "h3", "h4"]
    assert reported["model"]["beta_s_per_byte"] > 1e-9  # memory would be faster
