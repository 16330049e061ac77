"""`ht.torch.sync` between processes: what threads of one process cannot show."""

from __future__ import annotations

import pytest

COMPILED = """
import torch, hpctrain as ht
from torch import nn
torch.set_num_threads(1)
world = ht.init("cpu")
X = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(4, 6)
def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).double()
expected = make()
for rank in range(world.size):
    (expected(X * (1 + rank)).square().sum() / world.size).backward()
for when, options in [
    ("before", {"backend": "eager", "fullgraph": True}),
    ("after", {"backend": "aot_eager"}),
    ("in place", {"backend": "eager"}),
]:
    torch._dynamo.reset()
    module = called = synced = make()
    if when == "in place":
        module.compile(**options)
    else:
        called = torch.compile(module, **options)
        synced = called if when == "before" else module
    with ht.torch.sync(synced):
        for step in range(2):
            module.zero_grad()
            for buffer in module.buffers():
                buffer += world.rank
            called(X * (1 + world.rank)).square().sum().backward()
            assert module[1].num_batches_tracked == step + 1  # from the buffers of rank 0
            for p, q in zip(module.parameters(), expected.parameters(), strict=True):
                assert torch.allclose(p.grad, q.grad)
module = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
for algorithm in ("auto", "native"):
    with ht.torch.sync(module, algorithm=algorithm) as synced:
        module.zero_grad()
        module[0](torch.ones(2)).sum().backward()
        assert module[1].weight.grad is None and module[0].weight.grad is not None
print("compiled", flush=True)
"""


@pytest.mark.timeout(200)
def test_a_compiled_module_is_summed(start):
    """So is one that MPI's own all-reduce sums: what no rank has stays None."""
    completed = start("-c", COMPILED, ranks=2).finish(timeout=180)
    assert completed.returncode == 0, completed.stderr
    assert completed.stdout.count("compiled") == 2


UNEVEN = """
import numpy as np, torch, hpctrain as ht
torch.set_num_threads(1)
world = ht.init("cpu")
model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.BatchNorm1d(4))
ht.torch.sync(model, overlap="{overlap}")
for step in range(10 - 5 * world.rank):
    model(torch.ones(3, 8)).sum().backward()
ht.allreduce(np.ones(1))
"""


@pytest.mark.timeout(150)
@pytest.mark.parametrize("overlap", ["auto", pytest.param("always", marks=pytest.mark.full)])
def test_a_rank_that_leaves_its_loop_early_for_another_call_is_named(start, overlap):
    completed = start("-c", UNEVEN.format(overlap=overlap), ranks=2).finish(timeout=120)
    assert completed.returncode == 86
    text = completed.stderr
    assert "hung: rank 0 waits in ht.torch.sync backward (<string>:8), rank 1 in " in text
    assert "(<string>:9): do ranks have different numbers of batches?" in text
