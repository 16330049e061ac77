"""What scripts of Horovod train by, on ranks of MPI: each row against plain PyTorch on one rank.

`mpiexec -n P python horovod_training.py [ROW...]` runs the rows in their order, and prints their
names; an error of any rank ends the job.
"""

from __future__ import annotations

import copy
import gc
import warnings
import weakref

import torch
from horovod_rows import (
    STEPS,
    differ,
    loss_of,
    make_batches,
    make_model,
    names,
    raises,
    row,
    run,
    sgd,
)  # fmt: skip
from torch import nn

import hpctrain.horovod.torch as hvd
from hpctrain.horovod.torch import job


class Halves(hvd.Compression.none):
    """A compressor of a user's own, which has a context."""

    @staticmethod
    def compress(tensor):
        return tensor.float() / 2, tensor.dtype

    @staticmethod
    def decompress(tensor, ctx):
        return tensor.to(ctx) * 2


#: Options of DistributedOptimizer by the model, the optimizer, and the largest difference.
OPTIONS = {
    "names": (names, sgd, 1e-13),
    "no names": (lambda model: {}, sgd, 1e-13),
    "shuffled names": (lambda model: {"named_parameters": [*model.named_parameters()][::-1]},
                       sgd, 1e-13),
    "Adam": (names, lambda model: torch.optim.Adam(model.parameters(), lr=0.1), 1e-11),
    "passes": (lambda model: {"backward_passes_per_step": 2}, sgd, 1e-13),
    "predivided": (lambda model: {"gradient_predivide_factor": 3.0}, sgd, 1e-13),
    "sum": (lambda model: {"op": hvd.Sum}, sgd, 1e-13),
    "2 groups": (lambda model: {"groups": 2}, sgd, 1e-13),
    "listed groups": (lambda model: {"groups": [[model[0].bias, model[2].weight]]}, sgd, 1e-13),
    "fp16": (lambda model: {"compression": hvd.Compression.fp16}, sgd, 1e-3),
    "bf16": (lambda model: {"compression": hvd.Compression.bf16}, sgd, 1e-2),
    "own compressor": (lambda model: {"compression": Halves}, sgd, 1e-6),
}  # fmt: skip


@row
def options():
    for threaded in (False, True):
        job.state().settings = job.state().settings._replace(threaded=threaded)
        for name, (make_options, make_optimizer, limit) in OPTIONS.items():
            model, expected = make_model(), make_model()
            options = make_options(model)
            inner, plain = make_optimizer(model), make_optimizer(expected)
            optimizer = hvd.DistributedOptimizer(inner, **options)
            assert isinstance(optimizer, type(plain)) and optimizer.state is inner.state
            passes = options.get("backward_passes_per_step", 1)
            scale = hvd.size() if options.get("op") == hvd.Sum else 1
            for step, batch in enumerate(make_batches(passes)):
                optimizer.zero_grad(set_to_none=step % 2 == 0)
                plain.zero_grad()
                for x in batch:
                    (loss_of(model, x[hvd.rank()]) / scale).backward()
                    loss_of(expected, x.flatten(0, 1)).backward()
                optimizer.step()
                plain.step()
            assert differ(model, expected) <= limit, (name, threaded, differ(model, expected))
            assert optimizer.state_dict().keys() == plain.state_dict().keys()


class Towers(nn.Module):
    """A layer for each rank: the other layers have no gradient there."""

    def __init__(self):
        super().__init__()
        self.towers = nn.ModuleList(make_model(i) for i in range(hvd.size() + 1))

    def forward(self, x, rank):
        return self.towers[rank](x)


@row
def missing_gradients_count_as_zeros():
    model, rank = Towers(), hvd.rank()
    optimizer = hvd.DistributedOptimizer(sgd(model), named_parameters=model.named_parameters())
    for step, batch in enumerate(make_batches()):
        used = (rank + step) % hvd.size()
        expected = torch.autograd.grad(
            loss_of(model.towers[rank], batch[0][(rank - step) % hvd.size()]),
            model.towers[rank].parameters(),
        )
        loss_of(model.towers[used], batch[0][rank]).backward()
        optimizer.synchronize()
        for p, gradient in zip(model.towers[rank].parameters(), expected, strict=True):
            assert torch.allclose(p.grad, gradient / hvd.size())
        assert not any(p.grad.any() for p in model.towers[-1].parameters())
        with optimizer.skip_synchronize():
            optimizer.step()
        optimizer.zero_grad()


@row
def parameters_are_unfrozen_and_added():
    model, other = make_model(), nn.Linear(3, 2).double()
    hvd.broadcast_parameters(other.named_parameters(), 0)
    model[0].requires_grad_(False)
    optimizer = hvd.DistributedOptimizer(sgd(model), named_parameters=model.named_parameters())
    for step, batch in enumerate(make_batches()):
        if step == 1:
            model[0].requires_grad_(True)
        if step == 2:
            optimizer.add_param_group({"params": other.parameters(), "lr": 0.2})
        optimizer.zero_grad()
        loss_of(nn.Sequential(model, other), batch[0][hvd.rank()]).backward()
        if step < 2:
            other.zero_grad()
        optimizer.step()
        for p in (*model.parameters(), *other.parameters()):
            assert len({x.numpy().tobytes() for x in hvd.allgather_object(p.detach())}) == 1, step


@row
def sparse_gradients():
    for dense in (False, True):
        model, expected = (nn.Embedding(10, 3, sparse=True) for _ in range(2))
        hvd.broadcast_parameters(model.state_dict(), 0)
        expected.load_state_dict(model.state_dict())
        optimizers = [torch.optim.SparseAdam([m.weight], lr=0.1) for m in (model, expected)]
        optimizer = hvd.DistributedOptimizer(optimizers[0], sparse_as_dense=dense)
        rows = torch.arange(2 * hvd.size() * 3).reshape(3, hvd.size(), 2) ** 2 % 10
        for step in range(3):
            optimizer.zero_grad()
            optimizers[1].zero_grad()
            if step != 1 or hvd.rank() == 0:  # rank 1 has no gradient in the second step
                model(rows[step, hvd.rank()]).square().sum().backward()
            used = rows[step] if step != 1 else rows[step, 0]
            (expected(used).square().sum() / hvd.size()).backward()
            optimizer.step()
            optimizers[1].step()
            assert model.weight.grad.is_sparse
            assert torch.allclose(model.weight, expected.weight), (dense, step)


@row
def closures():
    makers = {
        "SGD": sgd, "LBFGS": lambda model: torch.optim.LBFGS(model.parameters(), max_iter=3),
    }  # fmt: skip
    for make in makers.values():
        model, expected = make_model(), make_model()
        optimizer, plain = hvd.DistributedOptimizer(make(model)), make(expected)
        for batch in make_batches():

            def close(model, optimizer, x):
                optimizer.zero_grad()
                loss = loss_of(model, x)
                loss.backward()
                return loss

            optimizer.step(lambda: close(model, optimizer, batch[0][hvd.rank()]))  # noqa: B023
            plain.step(lambda: close(expected, plain, batch[0].flatten(0, 1)))  # noqa: B023
        assert differ(model, expected) < 1e-12


@row
def hooks_of_a_step_are_called_once():
    """Also after a scheduler wrapped `step` of the given optimizer, and a state was loaded."""
    model, expected, calls = make_model(), make_model(), []
    inner, plain = sgd(model), sgd(expected)
    torch.optim.lr_scheduler.StepLR(inner, 1)
    inner.register_step_pre_hook(lambda *_: calls.append(1))
    optimizer = hvd.DistributedOptimizer(inner, **names(model))
    for step, batch in enumerate(make_batches()):
        optimizer.zero_grad()
        plain.zero_grad()
        loss_of(model, batch[0][hvd.rank()]).backward()
        loss_of(expected, batch[0].flatten(0, 1)).backward()
        optimizer.step()
        plain.step()
        if step == 1:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert differ(model, expected) < 1e-13 and len(calls) == STEPS


@row
def schedulers_and_scalers():
    model, expected = make_model(), make_model()
    optimizer, plain = hvd.DistributedOptimizer(sgd(model), **names(model)), sgd(expected)
    schedulers = [torch.optim.lr_scheduler.StepLR(module, 2, 0.5) for module in (optimizer, plain)]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for batch in make_batches():
        optimizer.zero_grad()
        plain.zero_grad()
        scaler.scale(loss_of(model, batch[0][hvd.rank()])).backward()
        loss_of(expected, batch[0].flatten(0, 1)).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        for module in (model, expected):
            nn.utils.clip_grad_norm_(module.parameters(), 0.05)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
        plain.step()
        for scheduler in schedulers:
            scheduler.step()
    assert differ(model, expected) < 1e-13


@row
def calls_in_a_wrong_order():
    model = make_model()
    optimizer = hvd.DistributedOptimizer(sgd(model), **names(model))
    x = make_batches()[0, 0, hvd.rank()]
    loss_of(model, x).backward()
    with raises(AssertionError, "optimizer.zero_grad() was called after loss.backward()"):
        optimizer.zero_grad()
    with raises(AssertionError, "Increase backward_passes_per_step"):
        loss_of(model, x).backward()
    optimizer.synchronize()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        optimizer.step()
    assert "optimizer.step() called without optimizer.skip_synchronize()" in str(warned[0].message)
    optimizer.set_backward_passes_per_step(2)
    loss_of(model, x).backward()
    loss_of(model, x).backward()
    optimizer.step()


@row
def bad_arguments():
    model = make_model()
    weight = model[0].weight
    for error, text, options in (
        (ValueError, "tuples (name, parameter)", {"named_parameters": model.parameters()}),
        (ValueError, "duplicates: a", {"named_parameters": [("a", p) for p in model.parameters()]}),
        (ValueError, "were not named", {"named_parameters": [*model.named_parameters()][1:]}),
        (ValueError, "op != Average", {"op": hvd.Sum, "gradient_predivide_factor": 2.0}),
        (ValueError, "must be > 0", {"backward_passes_per_step": 0}),
        (ValueError, "groups should be", {"groups": -1}),
        (ValueError, "only appear once", {"groups": [[weight], [weight]]}),
        (ValueError, "consist of torch.Tensor", {"groups": [["weight"]]}),
    ):
        with raises(error, text):
            hvd.DistributedOptimizer(sgd(model), **options)


@row
def joined_ranks_count_as_zeros():
    """Rank r has 2 + r batches; a rank of fewer leaves `join` with the last one."""
    model, expected, rank, last = make_model(), make_model(), hvd.rank(), hvd.size() - 1
    optimizer = hvd.DistributedOptimizer(sgd(model), **names(model))
    plain = sgd(expected)
    for step, batch in enumerate(make_batches()[: 2 + last]):
        if step < 2 + rank:
            optimizer.zero_grad()
            loss_of(model, batch[0][rank]).backward()
            optimizer.step()
        plain.zero_grad()
        for r in range(max(0, step - 1), hvd.size()):
            (loss_of(expected, batch[0][r]) / hvd.size()).backward()
        plain.step()
    assert hvd.join() == last
    hvd.broadcast_parameters(model.state_dict(), last)
    assert differ(model, expected) < 1e-13


@row
def an_optimizer_is_not_kept_alive():
    model = make_model()
    optimizer = hvd.DistributedOptimizer(sgd(model), **names(model))
    loss_of(model, make_batches()[0, 0, 0]).backward()
    optimizer.step()
    reference = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert reference() is None
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    loss_of(model, make_batches()[0, 0, 0]).backward()


if __name__ == "__main__":
    run()
