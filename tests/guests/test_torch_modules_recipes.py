"""Recipes whose function imports PyTorch itself: seeds and threads."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

MODEL = """
def make(input_shape, outputs):
    import torch
    from torch import nn

    layers = [nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, outputs)]
    return nn.Sequential(nn.Flatten(), *layers)
"""
RECIPE = """
schema = 1
[run]
name = "inside"
steps = 8
[model]
kind = "inside:make"
[data]
kind = "digits"
[optimizer]
kind = "sgd"
rate = 0.1
batch = 96
[wire]
reduction = "ordered"
blocks = 6
"""


@pytest.mark.timeout(300)
def test_ordered_sums_of_a_module_have_one_hash_on_any_number_of_ranks(hpctrain, tmp_path):
    """Its weights come from the seed, and one rank has as many threads as each of several."""
    (tmp_path / "inside.py").write_text(MODEL)
    (tmp_path / "recipe.toml").write_text(RECIPE)
    hashes, threads = set(), set()
    for ranks in (1, 2):
        out = tmp_path / str(ranks)
        words = ("launch", "-n", ranks, "train", tmp_path / "recipe.toml", "--out", out)
        completed = hpctrain(*words, env={"OMP_NUM_THREADS": ""}, cwd=tmp_path)
        assert completed.returncode == 0, completed.stderr
        summary = json.loads((out / "summary.json").read_text())
        hashes.add(summary["params_sha256"])
        threads.add(summary["threads"])
    assert len(hashes) == 1 and threads == {1}


SEEDED = """
import sys
from hpctrain.core import frameworks
with frameworks.seeded_generators(5):
    import torch
    inside = torch.rand(3)
torch.manual_seed(5)
assert torch.equal(inside, torch.rand(3))
with frameworks.seeded_generators(5):
    assert torch.equal(inside, torch.rand(3))
assert not any("Seeding" in type(finder).__name__ for finder in sys.meta_path)
torch.set_num_threads(4)
frameworks.limit_threads(2)
assert torch.get_num_threads() == 2
frameworks.limit_threads(3)
assert torch.get_num_threads() == 2
"""


@pytest.mark.either
@pytest.mark.timeout(100)
def test_pytorch_is_seeded_when_it_is_imported():
    subprocess.run([sys.executable, "-c", SEEDED], check=True)
