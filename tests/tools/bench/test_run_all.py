"""benchmarks/gpu/run_all.py: its message without a GPU, and the end of pieces that hang."""

from __future__ import annotations

import re
import sys
import time
from importlib import util
from pathlib import Path

import pytest

from hpctrain.transport.device import gpus

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "gpu" / "run_all.py"


@pytest.fixture
def run_all(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(SCRIPT.parent), *sys.path])
    spec = util.spec_from_file_location("run_all", SCRIPT)
    module = util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "run_all", module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.processes
@pytest.mark.either
def test_without_a_gpu_it_says_so(start, tmp_path):
    if gpus.driver_cuda_version():
        pytest.skip("this machine has a GPU")
    completed = start(SCRIPT, "--out", tmp_path / "out").finish(30)
    assert completed.returncode == 2
    assert completed.stderr.startswith("no GPU here, nothing was measured: ")
    assert not (tmp_path / "out").exists()


# a program, its limit, good codes -> whether it is good, its code, what is said
PIECES = {
    "good": ("pass", 30, (0,), True, 0, ""),
    "another code": ("raise SystemExit(1)", 30, (0, 1), True, 1, ""),
    "fails": ("raise SystemExit('so it is')", 30, (0,), False, 1, "so it is"),
    "hangs": ("import time; time.sleep(60)", 0.2, (0,), False, None, r"ended after \d+ s"),
}


@pytest.mark.parametrize("case", PIECES)
def test_pieces(run_all, case):
    program, limit_s, codes, good, code, message = PIECES[case]
    piece = run_all.Piece("one", [sys.executable, "-c", program], limit_s, codes)
    outcome = run_all.run_piece(piece, time.monotonic() + 100)
    assert (outcome.holds, outcome.code) == (good, code)
    assert re.fullmatch(message, outcome.said)


def test_what_would_come_too_late_is_not_begun(run_all):
    piece = run_all.Piece("one", [sys.executable, "-c", "import time; time.sleep(60)"], 30)
    assert run_all.run_piece(piece, time.monotonic() - 1).said == "ended after 0 s"


def test_pieces_fit_into_ten_minutes_and_can_be_chosen(run_all, tmp_path):
    pieces = run_all.make_pieces([2, 4], tmp_path)
    assert sum(piece.limit_s for piece in pieces) <= 600
    requested = {"ranks": "2", "out": tmp_path, "small": False}
    arguments = run_all.Namespace(only="p2p,equal", **requested)
    assert [piece.name for piece in run_all.select_pieces(arguments)] == ["equal", "p2p"]
    with pytest.raises(SystemExit, match="no none; there are doctor"):
        run_all.select_pieces(run_all.Namespace(only="none", **requested))
