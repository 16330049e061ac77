"""`ht.torch.allreduce` and the others: tensors of every dtype and layout, or one error on all."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from guests.test_synchronous import one_thread  # noqa: F401  (a fixture)

import hpctrain as ht
from hpctrain.core.errors import UsageError
from hpctrain.transport.threads.ranks import run_ranks
from hpctrain.world import over_threads

pytestmark = pytest.mark.either
SIZE = 3
SHAPE = (SIZE, 2, 4)
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
DTYPES = [
    *FLOATS, torch.complex64, torch.complex128, torch.bool, torch.uint8, torch.int8, torch.int16,
    torch.int32, torch.int64,
]  # fmt: skip


def values(rank, dtype):
    return ((torch.arange(24).reshape(SHAPE) + rank) % 3).to(dtype)


def contiguous(x):
    return x.clone()


def transposed(x):
    return x.transpose(0, 2).contiguous().transpose(0, 2)


def part(x):
    return torch.zeros(SIZE, 3, 8, dtype=x.dtype)[:, :2, ::2].copy_(x)


def conjugated(x):
    return x.conj().resolve_conj().conj() if x.is_complex() else x.clone()


LAYOUTS = [contiguous, transposed, part, conjugated]
#: name: the call; what rank r has, of the values x (P, ...) of all ranks
CALLS = {
    "allreduce": (lambda t, **o: ht.torch.allreduce(t, "max", **o), lambda x, r: x.amax(0)),
    "reduce": (lambda t, **o: ht.torch.reduce(t, "max", 1, **o),
               lambda x, r: x.amax(0) if r == 1 else None),
    "broadcast": (lambda t, **o: ht.torch.broadcast(t, 1, **o), lambda x, r: x[1]),
    "reduce_scatter": (lambda t, **o: ht.torch.reduce_scatter(t, "max", **o),
                       lambda x, r: x.amax(0)[r]),
    "all_gather": (ht.torch.all_gather, lambda x, r: x),
    "gather": (lambda t, **o: ht.torch.gather(t, 1, **o), lambda x, r: x if r == 1 else None),
    "scatter": (lambda t, **o: ht.torch.scatter(t, 1, **o), lambda x, r: x[1][r]),
    "all_to_all": (ht.torch.all_to_all, lambda x, r: x[:, r]),
}  # fmt: skip
IN_PLACE = ("allreduce", "reduce", "broadcast")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_each_call_on_each_dtype_and_layout(name, dtype):
    call, expect = CALLS[name]
    has_order = not dtype.is_complex and dtype is not torch.bool
    if not has_order and name in ("allreduce", "reduce", "reduce_scatter"):
        pytest.skip("max is not defined")
    everything = torch.stack([values(rank, dtype) for rank in range(SIZE)])

    def body(link):
        world = over_threads(link)
        for layout in LAYOUTS:
            tensor = layout(values(link.rank, dtype))
            strides, version = tensor.stride(), tensor._version
            result = call(tensor, world=world)
            expected = expect(everything, link.rank)
            value = tensor if name in IN_PLACE and expected is not None else result
            assert (value is expected) if expected is None else torch.equal(value, expected)
            assert tensor.stride() == strides
            assert name in ("all_gather", "gather", "all_to_all") or tensor._version > version
        return True

    assert all(run_ranks(SIZE, body, 20.0))


def test_sums_means_numbers_and_parameters():
    def body(link):
        world = over_threads(link)
        number, weight = torch.tensor(float(link.rank)), torch.nn.Parameter(torch.ones(3))
        empty, products = torch.zeros(0), torch.full((2,), 2j)
        ht.torch.allreduce(number, "mean", world=world)
        ht.torch.allreduce(weight, world=world)
        ht.torch.allreduce(empty, world=world)
        ht.torch.allreduce(products, "prod", "ring", world=world, check=False)
        assert weight.requires_grad and weight.is_leaf
        return number.item(), weight.tolist(), products.tolist()

    assert run_ranks(SIZE, body, 20.0) == [(1.0, [3.0] * 3, [(2j) ** 3] * 2)] * SIZE


def test_a_bound_call_reduces_what_the_tensor_holds():
    def body(link):
        world, tensor = over_threads(link), torch.ones(5, dtype=torch.bfloat16)
        reduce = ht.torch.bind(tensor, world=world)
        results = []
        for value in (1, 2):
            tensor.fill_(value)
            reduce()
            results.append(tensor.tolist())
        with pytest.raises(UsageError, match="expected a contiguous tensor"):
            ht.torch.bind(torch.ones(4, 4).T, world=world)
        return results

    assert run_ranks(SIZE, body, 20.0) == [[[3.0] * 5, [6.0] * 5]] * SIZE


def in_graph():
    return torch.ones(3, requires_grad=True) * 2


REFUSALS = {
    "an array": (lambda: np.ones(3), "expected a tensor, seen ndarray"),
    "a graph": (in_graph, r"use \.detach\(\)"),
    "sparse": (lambda: torch.ones(3).to_sparse(), r"\.to_dense\(\)"),
    "meta": (lambda: torch.ones(3, device="meta"), r"on meta"),
    "expanded": (lambda: torch.ones(1).expand(3), "memory of their own"),
    "float8": (lambda: torch.ones(3).to(torch.float8_e4m3fn), "seen torch.float8_e4m3fn"),
}


@pytest.mark.parametrize("kind", REFUSALS)
def test_what_one_rank_cannot_send_is_one_error_on_all(kind):
    make, words = REFUSALS[kind]

    def body(link):
        tensor = make() if link.rank == 1 else torch.ones(3)
        with pytest.raises(UsageError, match=rf"rank 1: ht.torch.allreduce: .*{words}"):
            ht.torch.allreduce(tensor, world=over_threads(link))
        return True

    assert all(run_ranks(SIZE, body, 20.0))


def test_a_graph_notices_that_a_tensor_was_written_to():
    def body(link):
        x, weight = torch.ones(3), torch.ones(3, requires_grad=True)
        y = (weight * x).sum()
        ht.torch.allreduce(x, world=over_threads(link))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward()
        return True

    assert all(run_ranks(2, body, 20.0))


@pytest.mark.parametrize("name", ["allreduce", "all_gather", "bind"])
def test_calls_on_arrays_name_those_on_tensors(name):
    def body(link):
        with pytest.raises(UsageError, match=f"seen Tensor; ht.torch.{name} takes tensors"):
            getattr(ht, name)(torch.ones(3), world=over_threads(link))
        return True

    assert all(run_ranks(2, body, 20.0))
