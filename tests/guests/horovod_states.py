"""What ranks of Horovod's scripts share: parameters, changes, states, objects, statistics.

`mpiexec -n P python horovod_states.py [ROW...]`: as `horovod_training.py`.
"""

from __future__ import annotations

import inspect
import threading

import torch
from horovod_rows import differ, loss_of, make_batches, make_model, raises, row, run, sgd
from torch import nn

import hpctrain.horovod.torch as hvd


@row
def parameters_of_a_root():
    root = hvd.size() - 1
    for kind in ("dict", "named", "list", "strided"):
        model = make_model(hvd.rank())
        if kind == "strided":
            for p in model.parameters():
                p.data = torch.stack([p, p], -1)[..., 0].detach()
        arguments = {"dict": model.state_dict(), "list": [*model.parameters()]}
        hvd.broadcast_parameters(arguments.get(kind, model.named_parameters()), root)
        assert differ(model, make_model(root)) == 0, kind
    for bad in (3, torch.ones(2), {"extra": "text"}):
        with raises(ValueError, "invalid params"):
            hvd.broadcast_parameters(bad, root)


def optimizer_classes():
    values = {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.01, "amsgrad": True}
    for name in sorted(torch.optim.__all__):
        kind = getattr(torch.optim, name)
        if isinstance(kind, type) and name not in ("Optimizer", "LBFGS", "SparseAdam"):
            names = inspect.signature(kind.__init__).parameters
            yield kind, {key: value for key, value in values.items() if key in names}


def take_step(model, optimizer, seed):
    generator = torch.Generator().manual_seed(seed)
    optimizer.zero_grad()
    loss_of(model, torch.randn(4, 5, generator=generator).double()).backward()
    optimizer.step()


def shape_model(kind):
    """Return a model that `kind` can optimize: Muon takes matrices alone."""
    model = make_model()
    return nn.Linear(5, 3, bias=False).double() if kind.__name__ == "Muon" else model


@row
def states_of_all_optimizers():
    for kind, arguments in optimizer_classes():
        for root_is_new in (False, True):
            is_root = hvd.rank() == 0
            model, expected, start = (shape_model(kind) for _ in range(3))
            rate = 0.01 if is_root else 0.5
            if kind is torch.optim.SGD:
                rate = torch.tensor(rate)
            optimizer = kind(model.parameters(), **{**arguments, "lr": rate})
            plain = kind(expected.parameters(), **arguments)
            if root_is_new != is_root:
                take_step(model, optimizer, 0)
            if not root_is_new:
                take_step(expected, plain, 0)
                hvd.broadcast_parameters(model.state_dict(), 0)
                start.load_state_dict(model.state_dict())
            model.load_state_dict(start.state_dict())
            hvd.broadcast_optimizer_state(optimizer, 0)
            assert differ(model, start) == 0, (kind, "parameters have changed")
            assert isinstance(optimizer.param_groups[0]["lr"], type(rate))
            for seed in (7, 8):
                take_step(model, optimizer, seed)
                take_step(expected, plain, seed)
            assert differ(model, expected) <= 1e-7, (kind, root_is_new, differ(model, expected))
    model = make_model()
    with raises(ValueError, "cannot broadcast torch.optim.LBFGS state"):
        hvd.broadcast_optimizer_state(torch.optim.LBFGS(model.parameters()), 0)
    subset = [*model.parameters()][: 4 - (hvd.rank() == 1)]
    with raises(ValueError, "seen others on ranks [1]"):
        hvd.broadcast_optimizer_state(torch.optim.SGD(subset, lr=0.1), 0)


@row
def objects():
    rank, size = hvd.rank(), hvd.size()
    own = {"rank": rank, "many": list(range(10 * rank))} if rank else "another type"
    for root in range(size):
        result = hvd.broadcast_object(own, root, name=None if root else "named")
        assert result == hvd.broadcast_object(result) and (rank != root or result is own)
        assert (result["rank"] == root) if root else result == own or rank
    assert [isinstance(module, str) for module in hvd.allgather_object(own)] == [
        r == 0 for r in range(size)
    ]
    bad = threading.Lock() if rank == 1 else 3
    with raises((TypeError, ValueError), "pickle"):
        hvd.broadcast_object(bad, 1)
    with raises((TypeError, ValueError), "pickle"):
        hvd.allgather_object(bad)
    subset = hvd.add_process_set([*range(1, size)])
    if subset.included():
        assert hvd.broadcast_object(rank, size - 1, process_set=subset) == size - 1
    hvd.remove_process_set(subset)


def adasum(a, b):
    product = (a * b).sum()
    return (1 - product / (2 * a.square().sum())) * a + (1 - product / (2 * b.square().sum())) * b


@row
def adasum_of_changes():
    if hvd.size() != 2:
        return
    for compression, limit in ((hvd.Compression.none, 1e-12), (hvd.Compression.fp16, 1e-3)):
        model, copies = make_model(), [make_model() for _ in range(2)]
        optimizer = hvd.DistributedOptimizer(sgd(model), op=hvd.Adasum, compression=compression)
        plains = [sgd(module) for module in copies]
        for batch in make_batches():
            starts = [p.detach().clone() for p in model.parameters()]
            optimizer.zero_grad()
            loss_of(model, batch[0][hvd.rank()]).backward()
            optimizer.step()
            for module, plain, x in zip(copies, plains, batch[0], strict=True):
                plain.zero_grad()
                loss_of(module, x).backward()
                plain.step()
            changes = zip(
                model.parameters(), starts, *(m.parameters() for m in copies), strict=True
            )
            for p, start, *ends in changes:
                with torch.no_grad():
                    expected = start + adasum(*(end - start for end in ends))
                    assert torch.allclose(p, expected, atol=limit, rtol=limit)
                    for end in ends:
                        end.copy_(p)
        with (
            raises(AssertionError, "not supported when using Adasum"),
            optimizer.skip_synchronize(),
        ):
            pass


#: Options of batch normalization, the shape of a sample, the dtype and the largest difference.
NORMS = {
    "1d": ({}, (), torch.float64, 1e-12),
    "2d float32": ({}, (4, 3), torch.float32, 2e-6),
    "3d": ({"eps": 0.1}, (3, 2, 2), torch.float64, 1e-12),
    "mean of all batches": ({"momentum": None}, (2,), torch.float64, 1e-12),
    "not affine": ({"affine": False}, (2,), torch.float64, 1e-12),
    "not tracked": ({"track_running_stats": False}, (2,), torch.float64, 1e-12),
    "bfloat16": ({}, (4, 3), torch.bfloat16, 0.05),
}


def batch_norm(sample, **arguments):
    kind = (nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[len(sample)]
    return kind(4, **arguments)


@row
def synchronized_batch_norms():
    rank, size = hvd.rank(), hvd.size()
    counts = [3 * r for r in range(size)]  # rank 0 has no samples
    for name, (arguments, sample, dtype, limit) in NORMS.items():
        wide = torch.float64 if dtype is torch.bfloat16 else dtype
        norm = hvd.SyncBatchNorm(4, **arguments).to(dtype)
        expected = batch_norm(sample, **arguments).to(wide)
        generator = torch.Generator().manual_seed(5)
        for training in (True, True, False):
            norm.train(training)
            expected.train(training)
            x = 5 + torch.randn(sum(counts), 4, *sample, generator=generator).to(dtype)
            weight = torch.randn(x.shape, generator=generator).to(dtype)
            full = x.to(wide).clone().requires_grad_()
            own = x.split(counts)[rank].clone().requires_grad_()
            right, result = expected(full), norm(own)
            (right * weight.to(wide)).sum().backward()
            (result * weight.split(counts)[rank]).sum().backward()
            pairs = [(result, right.split(counts)[rank]), (own.grad, full.grad.split(counts)[rank])]
            pairs += zip(norm.buffers(), expected.buffers(), strict=True)
            for p, q in zip(norm.parameters(), expected.parameters(), strict=True):
                pairs.append((hvd.allreduce(p.grad, op=hvd.Sum), q.grad))
            for a, b in pairs:
                scale = max([1.0, *b.abs().reshape(-1).tolist()])
                assert torch.allclose(a.to(b.dtype), b, 0.0, limit * scale), (name, training)
            norm.zero_grad()
            expected.zero_grad()
    with raises(ValueError, "at least 2D"):
        norm(torch.ones(3))


if __name__ == "__main__":
    run()
