"""Gradients that `ht.torch.sync` sums: absent ones, dtypes, late, sparse and failing ones."""

from __future__ import annotations

import logging

import pytest
import torch
from guests.test_synchronous import WIRES, one_thread  # noqa: F401  (a fixture)
from torch import nn

from hpctrain.collectives import ALLREDUCE
from hpctrain.core.errors import UsageError
from hpctrain.gradients.reducer import WireOptions
from hpctrain.torch.gradient_sync.synchronous import GradientSync
from hpctrain.transport.threads.ranks import run_ranks
from hpctrain.world import over_threads

pytestmark = pytest.mark.either
THREAD = WIRES["buckets in a thread"]


class Weights(nn.Module):
    """Parameters of chosen gradients: forward returns the sum of each times its gradient."""

    def __init__(self, dtype=torch.float64, length=5):
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.ones(length, dtype=dtype)) for _ in range(2))

    def forward(self, **gradients):
        terms = [(getattr(self, name) * g).sum() for name, g in gradients.items()]
        return sum(terms).real


def run(body, size, options=WIRES["after backward"], make=Weights, optimizer=None):
    """Return what `body(synced, module, rank)` returns on each rank."""

    def rank(link):
        module = make()
        built = None if optimizer is None else optimizer(module)
        with GradientSync(over_threads(link), module, built, options) as synced:
            return body(synced, module, link.rank)

    return run_ranks(size, rank, 20.0)


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("algorithm", ["auto", *ALLREDUCE])
def test_an_absent_gradient_stays_absent_with_every_algorithm(algorithm, size):
    """A real gradient of -0.0 alone is none of them."""

    def body(synced, module, rank):
        minus_zero = torch.full((5,), -0.0, dtype=torch.float64)
        for _ in range(2):
            module.zero_grad()
            module(a=minus_zero).backward()
            assert module.b.grad is None
            assert module.a.grad is not None and not module.a.grad.any()
        return True

    assert all(run(body, size, WireOptions(algorithm=algorithm)))


def make_optimizer(module):
    module.optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    return module.optimizer


DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.complex64, torch.complex128]


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_dtypes_of_parameters_are_summed(dtype, wire):
    def body(synced, module, rank):
        gradient = torch.arange(5).to(dtype) * (1j if dtype.is_complex else 1)
        module(a=gradient * (rank + 1)).backward()
        assert module.b.grad is None and module.a.grad.dtype is dtype
        return module.a.grad, (gradient * 1.5).conj()

    for gradient, expected in run(body, 2, WIRES[wire], lambda: Weights(dtype)):
        assert torch.equal(gradient, expected)


def test_parameters_of_several_dtypes_and_empty_ones_have_planes_of_their_own():
    class Mixed(Weights):
        def __init__(self):
            super().__init__()
            self.c = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
            self.empty = nn.Parameter(torch.ones(0, dtype=torch.float64))

    def body(synced, module, rank):
        module(a=torch.ones(5), c=torch.full((3,), rank)).backward()
        return [module.a.grad[0].item(), module.b.grad, module.c.grad[0].item()]

    assert run(body, 2, make=Mixed) == [[1.0, None, 0.5]] * 2


class Failure(Exception):
    pass


def fail(gradient):
    raise Failure


def backward(module, fails, rank, value):
    """Sum (rank + 1) * value over the ranks for b; `fails`: after b's gradient, before a's."""
    last = module.a * (rank + 1) * value
    if fails:
        last.register_hook(fail)
    first = module.b * (rank + 1) * value
    (first.sum() + (last * 1.0 * 1.0).sum()).backward()


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("size", [2, 3])
def test_the_step_after_a_failed_backward_is_right(size, wire):
    def body(synced, module, rank):
        for step in range(6):
            module.zero_grad()
            try:
                backward(module, step in (0, 2, 3), rank, step)
            except Failure:
                assert step in (0, 2, 3)
                continue
            for p in module.parameters():
                assert torch.allclose(p.grad, torch.tensor(step * (size + 1) / 2).double())
        return True

    assert all(run(body, size, WIRES[wire]))


@pytest.mark.parametrize("size", [2, 3])
def test_a_backward_that_failed_on_one_rank_alone_is_one_error_on_all(size):
    """Where a part was sent; else its next backward pass takes the place of the failed one."""

    def body(synced, module, rank):
        errors = []
        for step in range(3):
            try:
                backward(module, rank == 1 and step == 0, rank, 1.0)
            except (Failure, UsageError) as error:
                errors.append(error)
                if isinstance(error, UsageError):
                    break
        assert f"failed on 1 rank of {size}" in str(errors[-1])
        module.zero_grad()
        backward(module, False, rank, 1.0)
        return module.a.grad[0].item()

    assert run(body, size, THREAD) == pytest.approx([(size + 1) / 2] * size)


@pytest.mark.parametrize("wire", WIRES)
def test_one_rank_that_trains_other_parameters_is_one_error_on_all(wire):
    def body(synced, module, rank):
        if rank == 1:
            module.b.requires_grad_(False)
        with pytest.raises(UsageError, match=r"rank 1 does not train 'b' \(5,\)"):
            backward(module, False, rank, 1.0)
        module.b.requires_grad_(True)
        module.zero_grad()
        backward(module, False, rank, 1.0)
        return module.b.grad[0].item()

    assert run(body, 2, WIRES[wire]) == [1.5, 1.5]


def test_parameters_of_a_group_that_the_model_does_not_have_are_refused():
    def body(synced, module, rank):
        module.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
        with pytest.raises(UsageError, match="holds 1 parameter that the model does not have"):
            backward(module, False, rank, 1.0)
        return True

    assert all(run(body, 2, optimizer=make_optimizer))


def test_new_layers_that_differ_become_those_of_rank_0(caplog):
    def body(synced, module, rank):
        backward(module, False, rank, 1.0)
        module.c = nn.Parameter(torch.full((2,), float(rank), dtype=torch.float64))
        module(a=torch.ones(5), c=torch.ones(2)).backward()
        return module.c.tolist(), module.c.grad.tolist()

    with caplog.at_level(logging.WARNING):
        assert run(body, 2) == [([0.0, 0.0], [1.0, 1.0])] * 2
    assert [r.message for r in caplog.records if "'c' was new" in r.message]


class Table(nn.Module):
    def __init__(self, sparse=True):
        super().__init__()
        self.table = nn.Embedding(6, 3, sparse=sparse).double()
        nn.init.ones_(self.table.weight)

    def forward(self, indexes):
        return self.table(indexes).sum()


def test_sparse_gradients_become_dense(caplog):
    def body(synced, module, rank):
        module(torch.tensor([rank, rank, 5])).backward()
        return module.table.weight.grad[:, 0].tolist()

    with caplog.at_level(logging.WARNING):
        assert run(body, 2, make=Table) == [[1.0, 1.0, 0.0, 0.0, 0.0, 1.0]] * 2
    assert sum("'table' has sparse gradients" in r.message for r in caplog.records) == 1


def test_hooks_that_get_local_gradients_are_announced(caplog):
    def make():
        module = Weights()
        module.a.register_post_accumulate_grad_hook(lambda p: None)
        return module

    with caplog.at_level(logging.WARNING):
        run(lambda synced, module, rank: None, 2, make=make)
    assert sum("hooks, which get this rank's own" in r.message for r in caplog.records) == 1


def sparse_adam(module):
    return torch.optim.SparseAdam(module.parameters())


def foreign(module):
    return torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)


REFUSALS = {
    "lazy": (lambda: nn.LazyLinear(3), None, "run one forward pass first"),
    "lazy buffers": (lambda: nn.Sequential(nn.Linear(2, 2), nn.LazyBatchNorm1d()), None, "lazy"),
    "SparseAdam": (Table, sparse_adam, "sparse=False in each Embedding"),
    "frozen": (lambda: nn.Linear(2, 2).requires_grad_(False), None, "seen none"),
    "foreign": (Weights, foreign, "build it with model.parameters"),
}


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("kind", REFUSALS)
def test_what_cannot_be_summed_is_refused_on_all_ranks(kind, size):
    make, optimizer, words = REFUSALS[kind]

    def rank(link):
        module = make()
        built = None if optimizer is None else optimizer(module)
        with pytest.raises(UsageError, match=words):
            GradientSync(over_threads(link), module, built, WireOptions())
        return True

    assert all(run_ranks(size, rank, 20.0))


def test_a_step_with_gradients_that_were_not_summed_is_refused():
    """The module is not called, so that nothing notes what was added."""

    def body(synced, module, rank):
        module.c = nn.Parameter(torch.ones(2))
        module.optimizer.add_param_group({"params": [module.c]})
        (module.c * rank).sum().backward()
        with pytest.raises(UsageError, match="gradients that were not summed"):
            module.optimizer.step()
        return True

    assert all(run(body, 2, optimizer=make_optimizer))


def test_frozen_parameters_leave_the_planes_after_some_passes():
    def body(synced, module, rank):
        module.b.requires_grad_(False)
        counts = []
        for _ in range(12):
            module.zero_grad()
            module(a=torch.ones(5)).backward()
            counts.append(len(synced._planes.parameters))
        assert module.b.grad is None
        return counts

    assert run(body, 2) == [[2] * 8 + [1] * 4] * 2
