"""The features of `torch.distributed` and PyTorch's own tests of a backend, on ranks of MPI."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from guests import features, pytorch_suite

HERE = Path(__file__).parent


@pytest.mark.timeout(400)
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.full), 4])
def test_each_feature_equals_a_single_process(start, ranks):
    ended = start(HERE / "features.py", ranks=ranks).finish(timeout=380)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    lines = dict(line.split(": ") for line in ended.stdout.splitlines() if line.count(": ") == 1)
    assert lines.keys() >= features.FEATURES.keys()
    skipped = [name for name in features.FEATURES if lines[name].startswith("not for")]
    assert skipped == (["hsdp", "fsdp2 and tensor parallel"] if ranks % 2 else [])


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_a_compiled_model_equals_a_single_process(start):
    ended = start(HERE / "features.py", "compiled with inductor", ranks=2).finish(timeout=280)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.timeout(60)
def test_the_table_of_features_detects_a_difference(start):
    ended = start("-c", WRONG, ranks=2, env={"PYTHONPATH": str(HERE)}).finish()
    assert ended.returncode == 1
    assert "differ by more than 1e-12: ddp" in ended.stderr


WRONG = """
import features, sys
features.reference = lambda: features.parameters_of(features.make_model())
sys.argv[1:] = ["ddp"]
features.main()
"""


@pytest.mark.either
@pytest.mark.timeout(600)
def test_the_tests_of_pytorch_pass_that_pass_with_gloo(start, tmp_path):
    """Listed in pytorch_suite.json: outcomes of gloo, and the exceptions with their reasons."""
    record = json.loads((HERE / "pytorch_suite.json").read_text())
    ended = start(HERE / "pytorch_suite.py", tmp_path, ranks=3).finish(timeout=580)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    outcomes = pytorch_suite.read_outcomes(tmp_path)
    failed = {name for name, outcome in outcomes.items() if outcome == "failed"}
    assert failed == record["exceptions"].keys()
    passed = {name for name, outcome in outcomes.items() if outcome == "passed"}
    assert passed >= set(record["passed"])
