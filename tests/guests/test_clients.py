"""Frameworks on top of PyTorch train on two ranks as one process does, or as gloo does."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.either

CLIENTS = Path(__file__).parent / "clients"
#: script: the package that it needs, and the ranks and backend that it is compared with
SCRIPTS = {
    "lightning_ddp.py": ("lightning", (1, "hpctrain")),
    "accelerate_loop.py": ("accelerate", (1, "hpctrain")),
    # It weighs losses by its own count of ranks.
    "transformers_trainer.py": ("transformers", (2, "gloo")),
}
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("script", SCRIPTS)
def test_two_ranks_train_as_the_reference_does(start, script):
    package, reference = SCRIPTS[script]
    if not find_spec(package):
        pytest.skip(f"{package} is not installed")
    results = []
    for ranks, backend in (reference, (2, "hpctrain")):
        job = start(CLIENTS / script, ranks, backend, ranks=ranks, env=OFFLINE)
        ended = job.finish(timeout=120)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        results.append(float(re.findall(r"parameters (\S+)", ended.stdout)[0]))
    assert abs(results[0] - results[1]) < 1e-11
