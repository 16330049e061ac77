"""benchmarks/gpu: each script runs on stand-ins with small sizes; claims follow from its rows."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from ranks import run_on_gpus

from hpctrain.transport.gpu_probe import probe_process

FOLDER = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def script(monkeypatch):
    """Return a function that imports a script of benchmarks/gpu."""
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.syspath_prepend(str(FOLDER / "gpu"))
    before = set(sys.modules)
    yield import_module
    for name in set(sys.modules) - before:
        if str(FOLDER) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


#: script -> its words, and how many rows and claims come of it
SMALL = {
    "steps": (("--sizes", "small", "--rounds", "1"), 9, 3),
    "optimizer": (("--bytes", "1048576", "--rounds", "1"), 6, 3),
}


@pytest.mark.parametrize("name", [pytest.param("steps", marks=pytest.mark.full), "optimizer"])
def test_runs(script, gpu, monkeypatch, tmp_path, name):
    words, rows, claims = SMALL[name]
    monkeypatch.setattr(sys, "argv", [name, *words, "--json", str(tmp_path / "found.json")])
    module = script(name)

    def main(world):
        monkeypatch.setattr(module, "init", lambda device: world)
        with pytest.raises(SystemExit):
            module.main()

    run_on_gpus(1, main)
    outcome = json.loads((tmp_path / "found.json").read_text())
    assert (len(outcome["rows"]), len(outcome["claims"])) == (rows, claims)
    assert outcome["device"] == "gpu 0, GPU-0" and gpu.counts["fused"] > 0


STEPS = [{"what": "mlp", "who": "ours", "ratio": 1.4}, {"what": "mlp", "who": "torch"},
         {"what": "resnet20", "who": "ours", "ratio": 3.1}]  # fmt: skip
UPDATES = [{"what": "copy", "gb_per_s": 4000.0}, {"what": "adamw", "gb_per_s": 2900.0},
           {"what": "sgd", "gb_per_s": 2700.0}, {"what": "lamb", "gb_per_s": 1.0}]  # fmt: skip
LOSSES = [{"precision": "float32", "fault": "", "test_loss": 2.0},
          {"precision": "bf16", "fault": "", "test_loss": 2.03},
          {"precision": "fp16", "fault": "", "test_loss": 2.05},
          {"precision": "tf32", "fault": "it broke"}]  # fmt: skip
RATES = {"to the host": 50.0, "from the host": 52.0, "host to host": 10.0, "staged": 8.1}
#: script -> what its claims are made of, and how they end
CLAIMS = {
    "steps": ("make_claims", (STEPS, "2.11"), [True, False]),
    "steps without torch": (
        "make_claims", ([{"what": "mlp", "who": "ours"}], None), [None]),
    "optimizer": ("make_claims", (UPDATES,), [True, False]),
    "precision": ("make_claims", (LOSSES,), [True, False, False]),
    "precision, all failed": ("make_claims", ([{"precision": "float32", "fault": "no"}],), [False]),
    "paths": ("check_claims", (RATES,), [True, None]),
    "paths with ipc": ("check_claims", ({**RATES, "ipc": 1000.0},), [True, None]),
    "paths by pointer": (
        "check_claims", ({**RATES, "ipc": 1000.0, "cuda-aware": 810.0},), [True, True]),
    "paths, slow": (
        "check_claims", ({**RATES, "staged": 7.9, "ipc": 9.0, "gdr": 7.0},), [False, False]),
}  # fmt: skip


@pytest.mark.parametrize("case", CLAIMS)
def test_claims(script, case):
    function, arguments, ends = CLAIMS[case]
    outcome = getattr(script(case.split()[0].rstrip(",")), function)(*arguments)
    assert list(outcome.values()) == ends, outcome


def test_what_did_not_come_to_its_end_is_not_measured(script, tmp_path):
    run_all = script("run_all")
    result = tmp_path / "found.json"
    result.write_text(json.dumps({"claims": {"fast": True, "small": False, "quiet": None}}))
    pieces = [
        (run_all.Piece("a", [], 1.0, result=result), run_all.Outcome("a", False, 1.0, 1, "")),
        (run_all.Piece("b", [], 1.0, result=result), run_all.Outcome("b", False, 1.0, -11, "")),
        (run_all.Piece("c", [], 1.0), run_all.Outcome("c", True, 1.0, 0, "")),
        (run_all.Piece("d", [], 1.0, result=tmp_path / "none"),
         run_all.Outcome("d", False, 1.0, None, "ended after 1 s")),
    ]  # fmt: skip
    run_all.save_report(tmp_path / "run_all.json", {"gpus": []}, pieces)
    reported = json.loads((tmp_path / "run_all.json").read_text())["claims"]
    assert [item["outcome"] for item in reported] == [
        "held", "short", "not measured",
        "held", "short", "not measured", "not measured", "held", "not measured",
    ]  # fmt: skip
    assert reported[6]["claim"] == "all the rest: exit code -11"
    assert reported[-1] == {"piece": "d", "claim": "all of it: ended after 1 s",
                        "outcome": "not measured"}  # fmt: skip


def test_there_is_time_for_all_pieces(script, tmp_path):
    run_all = script("run_all")
    assert sum(piece.limit_s for piece in run_all.make_pieces([2, 4], tmp_path)) <= run_all.TOTAL_S


def test_the_runs_of_a_piece_end_before_it(script, monkeypatch, tmp_path):
    """However slow they are: each row is kept, and none takes the time of those behind it."""
    (piece,) = (
        item for item in script("run_all").make_pieces([2], tmp_path) if item.name == "precision"
    )
    precision, now, chosen = script("precision"), [0.0], []

    def slow(line, timeout, **_):
        chosen.append(timeout)
        now[0] += timeout
        raise subprocess.TimeoutExpired(line, timeout)

    monkeypatch.setattr(precision, "monotonic", lambda: now[0])
    expired = subprocess.TimeoutExpired
    monkeypatch.setattr(precision, "subprocess", SimpleNamespace(run=slow, TimeoutExpired=expired))
    monkeypatch.setattr(sys, "argv", piece.command[1:])
    with pytest.raises(SystemExit):
        precision.main()
    assert len(json.loads(piece.result.read_text())["rows"]) == len(chosen) == 4
    assert sum(chosen) < piece.limit_s and min(chosen) > 10


def test_what_was_found_before_the_limit_is_kept(script, monkeypatch, tmp_path):
    equal = script("equal")

    def compared(folder, name, ranks, device, precision, expected):
        if name == "ps-sync":
            raise KeyboardInterrupt  # as run_all.py ends it
        return {"regime": name, "ranks": ranks, "precision": precision, "said": "", "holds": True}

    monkeypatch.setattr(equal, "train_reference", lambda *_: np.zeros(1))
    monkeypatch.setattr(equal, "compare_run", compared)
    monkeypatch.setattr(sys, "argv", ["equal", "--json", str(tmp_path / "found.json")])
    with pytest.raises(KeyboardInterrupt):
        equal.main()
    outcome = json.loads((tmp_path / "found.json").read_text())
    assert [(item["regime"], item["precision"]) for item in outcome["rows"][:3]] == [
        ("single", "float64"), ("allreduce direct", "float64"), ("single", "float32"),
    ]  # fmt: skip
    assert len(outcome["claims"]) == len(outcome["rows"]) == 6


def test_a_run_on_the_cpu_tries_no_way_between_gpus(script, monkeypatch, tmp_path):
    equal, lines = script("equal"), []

    def run(line, **_):
        lines.append(line)
        return SimpleNamespace(returncode=1, stderr="Error")

    monkeypatch.setattr(equal, "subprocess", SimpleNamespace(run=run))
    monkeypatch.setattr(probe_process.nvidia, "driver_version", lambda: "580.1")
    monkeypatch.setattr(probe_process, "find_spec", lambda name: name)
    for device in ("cpu", "gpu"):
        equal.train_run(tmp_path / "run", 1, device, ())
    assert [probe_process.may_use_gpu(line) for line in lines] == [False, True]


def test_plots(script, monkeypatch, tmp_path):
    plot = script("plot")
    point = {"median_s": 1e-3, "bytes": 1 << 20, "gb_per_s": 2.0, "ranks": 2}
    rows = {
        "allreduce-2-ranks": [{"what": "direct", **point}, {"what": "copy", **point}],
        "paths": [{"what": "ipc", **point}],
        "optimizer": [{"what": "sgd", **point}],
        "steps": [{"what": "mlp", "who": "ours", **point}],
        "precision": [{"precision": "bf16", "curve": [[1, 2.0], [2, 1.0]]}, {"precision": "fp16"}],
    }
    for name, outcome in rows.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({"one_gpu": True, "rows": outcome}))
    monkeypatch.setattr(sys, "argv", ["plot", str(tmp_path)])
    plot.main()
    assert (tmp_path / "gpu.png").stat().st_size > 10_000
    monkeypatch.setattr(sys, "argv", ["plot", str(tmp_path / "empty")])
    with pytest.raises(SystemExit, match="nothing to draw"):
        plot.main()
