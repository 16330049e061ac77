"""After `ht.torch.sync` a module is copied, pickled, averaged, compiled and exported as before."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import subprocess
import sys
import weakref

import pytest
import torch
from guests.test_synchronous import WIRES, one_thread  # noqa: F401  (a fixture)
from torch import nn
from torch.optim.swa_utils import AveragedModel

from hpctrain.torch.gradient_sync.synchronous import GradientSync
from hpctrain.transport.threads.ranks import run_ranks
from hpctrain.world import over_threads

pytestmark = pytest.mark.either
X = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(4, 6)


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).double()


def save(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def average(module):
    averaged = AveragedModel(module)
    averaged.update_parameters(module)
    return averaged.module


def export(module):
    return torch.export.export(module.train(), (X,)).module()


COPIES = {
    "deepcopy": copy.deepcopy,
    "copy of a copy": lambda module: pickle.loads(pickle.dumps(copy.deepcopy(module))),
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "save": save,
    "average": average,
    "export": export,
}


@pytest.mark.parametrize("kind", COPIES)
def test_a_copy_works_on_one_rank_alone(kind):
    """Rank 0 copies; what its copy sends would wait for the others."""

    def rank(link):
        module, alone = make(), make()
        with GradientSync(over_threads(link), module, None, WIRES["after backward"]):
            module(X).sum().backward()
            module.zero_grad()
            if link.rank == 0:
                twin = COPIES[kind](module)
                alone.load_state_dict(module.state_dict())
                losses = [net(X).square().sum() for net in (twin, alone) for _ in range(2)]
                assert torch.equal(losses[0], losses[2]) and torch.equal(losses[1], losses[3])
                if kind != "export":  # that has the parameters of the module itself
                    losses[0].backward()
            module(X).sum().backward()
        return True

    with torch.random.fork_rng():
        assert all(run_ranks(2, rank, 120.0))


def test_a_pickled_module_loads_where_hpctrain_is_not(tmp_path):
    def rank(link):
        module = make()
        with GradientSync(over_threads(link), module, None, WIRES["after backward"]):
            torch.save(module, tmp_path / f"{link.rank}.pt")
        return True

    run_ranks(2, rank, 20.0)
    code = (
        "import sys, torch; sys.modules['hpctrain'] = None; "
        "m = torch.load(sys.argv[1], weights_only=False); print(m(torch.ones(3, 6).double()).shape)"
    )
    completed = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "0.pt"], capture_output=True, text=True, timeout=60
    )
    assert "torch.Size([3, 3])" in completed.stdout, completed.stderr


def test_a_module_is_deleted_with_its_planes_and_hooks():
    def rank(link):
        module = make()
        synced = GradientSync(over_threads(link), module, None, WIRES["buckets in a thread"])
        module(X).sum().backward()
        references = [weakref.ref(module), weakref.ref(synced), weakref.ref(synced._planes)]
        link.barrier()
        del module, synced
        gc.collect()
        return [reference() is None for reference in references]

    assert run_ranks(2, rank, 20.0) == [[True] * 3] * 2


class Twice(nn.Module):
    """Statistics of two inputs before one backward pass; uses its buffer in the graph."""

    def __init__(self):
        super().__init__()
        self.body = make()
        self.register_buffer("factor", torch.full((3,), 2.0, dtype=torch.float64))

    def forward(self, x):
        return self.body(x) * self.factor


@pytest.mark.parametrize("size", [2, 3])
def test_a_module_is_called_twice_before_backward(size):
    def rank(link):
        module = Twice()
        with GradientSync(over_threads(link), module, None, WIRES["after backward"]):
            for step in range(3):
                with torch.no_grad():
                    module.factor += link.rank  # the forward pass takes that of rank 0
                x = X + link.rank + step
                (module(x) - module(-x)).square().sum().backward()
                if link.rank > 0:
                    assert torch.equal(module.factor, torch.full((3,), 2.0).double())
        return module.body[3].weight.grad, [b.clone() for b in module.buffers()]

    first, *rest = run_ranks(size, rank, 20.0)
    for gradient, _ in rest:
        assert torch.equal(gradient, first[0])


def test_hooks_of_a_closed_sync_are_gone():
    def rank(link):
        module = make()
        GradientSync(over_threads(link), module, None, WIRES["after backward"]).close()
        assert not module._forward_pre_hooks
        if link.rank == 0:
            module(X).sum().backward()
        return all(p.grad is None for p in module.parameters())

    assert run_ranks(2, rank, 20.0) == [False, True]
