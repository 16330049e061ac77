"""Scripts of PyTorch start on six sites as they are, with no variable exported: tests/lib/sites.py.

Two ranks of this machine stand for those of a site: they have the variables of its launcher alone.
"""

from __future__ import annotations

import json
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import sites
import torch
from guests import torchrun_scripts

HERE = Path(__file__).parent
SCRIPTS = {
    "DDP": (torchrun_scripts.__file__, "tutorial", "gloo"),
    "FSDP2": (torchrun_scripts.__file__, "sharded", "gloo"),
    "lightning": (HERE / "clients/lightning_ddp.py", 2, "gloo"),
    "accelerate": (HERE / "clients/accelerate_loop.py", 2, "gloo"),
}
#: each site with one script; the others, with --full
FIRST = dict(zip(sites.SITES, [*SCRIPTS, *SCRIPTS], strict=False))
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}


def trained_alone() -> float:
    """Return the sum of the parameters after two steps of the clients' training in one process."""
    torch.manual_seed(1)
    inputs, targets = torch.randn(64, 8).double(), torch.randn(64, 1).double()
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    return sum(parameter.sum().item() for parameter in model.parameters())


@pytest.mark.timeout(240)
@pytest.mark.either
@pytest.mark.parametrize(
    ("site", "script"),
    [
        pytest.param(site, script, marks=[pytest.mark.full] * (FIRST[site] != script))
        for site in sites.SITES
        for script in SCRIPTS
    ],
)
def test_a_script_starts_as_it_is(start, site, script):
    if script in ("lightning", "accelerate") and not find_spec(script):
        pytest.skip(f"{script} is not installed")
    words = (sites.__file__, site, sys.executable, "-m", "hpctrain.torch", *SCRIPTS[script])
    ended = start(*words, ranks=2, env=OFFLINE).finish(timeout=200)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    if script in ("lightning", "accelerate"):
        (result,) = re.findall(r"parameters (\S+)", ended.stdout)
        assert abs(float(result) - trained_alone()) < 1e-9
    else:
        expected = torchrun_scripts.reference(SCRIPTS[script][1])
        assert json.loads(ended.stdout) == pytest.approx(expected, abs=1e-12)
