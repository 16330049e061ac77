"""`ht.allreduce` and the other public collectives, against NumPy over the arrays of all ranks."""

from __future__ import annotations

import warnings
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from ranks import on_ranks, run_on

from hpctrain.collectives import ALLREDUCE
from hpctrain.core.errors import UsageError
from hpctrain.tuning.choose import TuningPlan, make_choices
from hpctrain.world.calls import calls as user_calls
from hpctrain.world.calls.arguments import RESULTS
from hpctrain.world.calls.bound_calls import NO_CALL, checked_calls, unchecked_calls
from hpctrain.world.calls.calls import allreduce


def refusal(function):
    """Return kind and text of the error that `function()` raises."""
    with pytest.raises(UsageError) as error:
        function()
    return type(error.value), str(error.value)


REDUCED = {"sum": np.sum, "mean": np.mean, "min": np.min, "max": np.max}
PAIRS = [(op, dtype) for op in REDUCED for dtype in ("float32", "float64", "int32", "int64")
         if (op, dtype[:3]) != ("mean", "int")]  # fmt: skip


@on_ranks(1, 2, 3, 4, mpi=(1, 4))
@pytest.mark.parametrize("op, dtype", PAIRS)
def test_allreduce(ranks, op, dtype):
    inputs = np.arange(ranks.size * 10).reshape(ranks.size, 2, 5).astype(dtype) ** 2
    expected = REDUCED[op](inputs, axis=0)

    def body(world):
        x = inputs[world.rank].copy()
        allreduce(x, op=op, algorithm="ring", world=world)
        return np.array_equal(x, expected) and x.dtype == dtype

    assert all(ranks(body))


@on_ranks(1, 2, 3, 4, mpi=(1, 3))
@pytest.mark.parametrize("algorithm", ["auto", "native", "direct", "ring"])
@pytest.mark.parametrize("length", [1, 10_000, 300_000])
def test_bound_calls(ranks, algorithm, length):
    """The same call reduces what lies in `x` each time, in place or into one shared array."""
    sizes = ranks.size * (ranks.size + 1) // 2

    def body(world):
        for result in RESULTS:
            for x in (world.zeros(length), np.zeros(length, np.float32)):
                call = user_calls.bind(x, algorithm=algorithm, result=result, world=world)
                for factor in (1, 2):
                    x[:] = factor * (world.rank + 1)
                    total = call()
                    assert ((x if result == "in-place" else total) == factor * sizes).all()
                    world.link.barrier()

    ranks(body)


# operation, dtype, shape -> whether the next call of the same finds what was made ready
AGAIN = [
    *[("sum", "f4", (2, 3), again) for again in (False, False, True, True)],
    *[("sum", "i4", (2, 3), again) for again in (False, True, True)],
    *[("sum", "i4", (3, 2), again) for again in (False, True)],
    *[("max", "i4", (3, 2), again) for again in (False, True)],
]


@on_ranks(1, 2, 3, mpi=(1, 2, 3))
@pytest.mark.parametrize("chosen", ["native", "direct", "ring"])
@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("times", [1, 8000])
def test_calls_made_ready(ranks, chosen, check, times):
    """Where an array comes again, here on one rank only, changed at times; all exchange alike."""
    plan = TuningPlan(((0, chosen),), ((0, chosen),), ((0, "ring"),), (), True)
    target = {"sum": ranks.size * (ranks.size + 1) // 2, "max": ranks.size}

    calls = checked_calls if check else unchecked_calls

    def body(world):
        world = replace(world, main=replace(world.main, choices=make_choices(plan)))
        for flat in (world.zeros(6 * times), np.zeros(6 * times, np.float32)):
            same = flat[:]
            for op, dtype, (rows, columns), again in AGAIN:
                same.dtype, same.shape = dtype, (rows, columns * times)
                x = same.view() if world.rank != ranks.size - 1 else same
                x[:] = world.rank + 1
                outcome = calls.get(id(x), NO_CALL)[:3] == (x.dtype, x.shape, op)
                assert outcome == (again and x is same)
                allreduce(x, op, world=world, check=check)
                assert (x == target[op]).all()

    ranks(body)


@on_ranks(2, mpi=(2,))
@pytest.mark.parametrize("chosen", ["native", "direct", "ring"])
def test_what_was_made_ready_is_compared_again(ranks, chosen):
    """Arrays that one rank has changed meanwhile, or made read-only, are refused on all."""
    plan = TuningPlan(((0, chosen),), ((0, chosen),), ((0, "ring"),), (), True)
    changes = {
        "read-only": (lambda x: x.setflags(write=False), "rank 1: .* read-only"),
        "shape": (lambda x: setattr(x, "shape", (2, 3)), r"rank 1 has .* \(2, 3\)"),
        "dtype": (lambda x: setattr(x, "dtype", "i4"), "rank 1 has .* int32"),
    }

    def body(world):
        world = replace(world, main=replace(world.main, choices=make_choices(plan)))
        for change, reported in changes.values():
            x = np.ones(6, np.float32)
            for _ in range(3):
                allreduce(x, "max", world=world)
            assert id(x) in checked_calls
            if world.rank == 1:
                change(x)
            with pytest.raises(UsageError, match=reported):
                allreduce(x, "max", world=world)
            assert (x.view("f4") == 1).all()

    ranks(body)


@on_ranks(mpi=(2,))
@pytest.mark.skipif(np.__version__ < "2", reason="NumPy 1 keeps what it warns of by thread")
@pytest.mark.parametrize("dtype", ["float32", "complex128"])
@pytest.mark.parametrize("times", [1, 3])
def test_an_infinite_sum_where_mpi_adds_is_silent_with_the_check_of_arguments_too(
    ranks, dtype, times
):
    def body(world):
        plan = TuningPlan(((0, "native"),), ((0, "native"),), ((0, "ring"),), (), True)
        world = replace(world, main=replace(world.main, choices=make_choices(plan)))
        settings, x = np.geterr(), np.empty(3, dtype)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(times):
                x[:] = np.finfo(dtype).max
                allreduce(x, world=world)
        assert np.isinf(x).all() and np.geterr() == settings

    ranks(body)


@on_ranks(1, mpi=(1,))
@pytest.mark.parametrize("algorithm", ["auto", "native", "direct", "ring"])
def test_a_read_only_array_is_never_written_to(ranks, algorithm):
    """Nor by a call that was bound, or made ready, while it could be written to."""

    def body(world):
        x = np.ones(6, np.float32)
        calls = [
            user_calls.bind(x, algorithm=algorithm, world=world),
            lambda: allreduce(x, algorithm=algorithm, world=world, check=False),
        ]
        for call in calls * 3:
            call()
        x.flags.writeable = False
        for call in calls:
            assert "read-only" in refusal(call)[1]

    ranks(body)


@pytest.mark.parametrize("options, reported", [
    ({"result": "there"}, "expected a result of in-place, shared, seen 'there'"),
    ({"op": "mean"}, "op 'mean' cannot be bound: bind 'sum' and divide"),
    ({"algorithm": "tre"}, "did you mean 'tree'?"),
])  # fmt: skip
def test_bind_refuses(options, reported):
    def body(world):
        return refusal(lambda: user_calls.bind(np.ones(3), world=world, **options))[1]

    assert all(reported in message for message in run_on("threads", 2, body))


def read_only(x):
    x.flags.writeable = False
    return x


# x of a rank, further arguments -> what every rank is told
WRONG = {
    "no array": (lambda rank: [1.0], {}, "expected an array of NumPy or CuPy, seen list"),
    "dtype": (lambda rank: np.ones(3, "m8[s]"), {}, "seen timedelta64[s]"),
    "masked": (lambda rank: np.ma.ones(3), {}, "seen a MaskedArray"),
    "byte order": (lambda rank: np.ones(3, ">f4"), {}, "expected an array in native byte order"),
    "read-only": (lambda rank: read_only(np.ones(3)), {}, "seen a read-only one"),
    "op is no name": (lambda rank: np.ones(3), {"op": ["sum"]}, "expected a name, seen ['sum']"),
    "no Unicode": (lambda rank: np.ones(3), {"op": "s\ud800"}, "unknown op 's\\ud800'"),
    "algorithm is no name": (
        lambda rank: np.ones(3), {"algorithm": None}, "algorithm: expected a name, seen None"),
    "strided": (lambda rank: np.ones((4, 4))[:, ::2], {}, "use numpy.ascontiguousarray"),
    "transposed": (lambda rank: np.ones((2, 3)).T, {}, "use numpy.ascontiguousarray"),
    "op": (lambda rank: np.ones(3), {"op": "summ"}, "unknown op 'summ'; did you mean 'sum'?"),
    "op of another library": (lambda rank: np.ones(3), {"op": "avg"},
                              "unknown op 'avg'; float64 has: sum, prod, min, max, mean"),
    "mean of integers": (lambda rank: np.ones(3, int), {"op": "mean"},
                         "op 'mean' is not defined for int64; int64 has: sum, prod, min, max, and"),
    "order of complex numbers": (lambda rank: np.ones(3, complex), {"op": "max"},
                                 "op 'max' is not defined for complex128; complex128 has: sum, "),
    "algorithm": (lambda rank: np.ones(3), {"algorithm": "tre"}, "did you mean 'tree'?"),
    "lengths": (lambda rank: np.ones(3 + (rank == 1)), {},
        "ranks 0, 2 have allreduce sum auto of float64 (3,), but "
        "rank 1 has allreduce sum auto of float64 (4,)"),
    "shapes": (lambda rank: np.ones((3, 2) if rank == 2 else (2, 3)), {},
               "but rank 2 has allreduce sum auto of float64 (3, 2)"),
    "dtypes": (lambda rank: np.ones(3, "f4" if rank else "f8"), {},
               "rank 0 has allreduce sum auto of float64 (3,), but "
               "ranks 1, 2 have allreduce sum auto of float32 (3,)"),
}  # fmt: skip


@pytest.mark.sample(4)
@on_ranks(3, mpi=(3,))
@pytest.mark.parametrize("wrong", WRONG)
def test_allreduce_refuses(ranks, wrong):
    make, options, reported = WRONG[wrong]

    def body(world):
        kind, text = refusal(lambda: allreduce(make(world.rank), world=world, **options))
        assert kind is UsageError
        assert reported in text

    ranks(body)


@on_ranks(2, mpi=(2,))
def test_the_array_is_left_alone_where_ranks_differ(ranks):
    def body(world):
        x = np.full(3 + world.rank, 7.0)
        refusal(lambda: allreduce(x, world=world))
        return (x == 7).all()

    assert all(ranks(body))


def rows(size: int) -> np.ndarray:
    """Return an array (P, P, 3): what each rank holds, a row for each rank."""
    return np.arange(size * size * 3, dtype=np.float64).reshape(size, size, 3) ** 2


# call(x, world) on rank r's x = rows(P)[r] -> what rank r must get, from all = rows(P)
CALLS = {
    "all_gather": (lambda x, w: user_calls.all_gather(x, w), lambda all_, r: all_),
    "all_to_all": (lambda x, w: user_calls.all_to_all(x, w), lambda all_, r: all_[:, r]),
    "reduce_scatter": (
        lambda x, w: user_calls.reduce_scatter(x, world=w), lambda all_, r: all_.sum(0)[r]),
    "reduce_scatter mean": (
        lambda x, w: user_calls.reduce_scatter(x, "mean", w), lambda all_, r: all_.mean(0)[r]),
    "gather": (
        lambda x, w: user_calls.gather(x, 1, w), lambda all_, r: all_ if r == 1 else None),
    "scatter": (lambda x, w: user_calls.scatter(x, 1, w), lambda all_, r: all_[1, r]),
    "broadcast": (lambda x, w: [user_calls.broadcast(x, 1, w), x][1], lambda all_, r: all_[1]),
    "reduce": (
        lambda x, w: [user_calls.reduce(x, "max", 1, w), x][1] if w.rank == 1 else
        user_calls.reduce(x, "max", 1, w),
        lambda all_, r: all_.max(0) if r == 1 else None),
}  # fmt: skip


@on_ranks(2, 3, 4, mpi=(2, 4))
@pytest.mark.parametrize("name", CALLS)
def test_calls(ranks, name):
    call, expected = CALLS[name]
    everything = rows(ranks.size)

    def body(world):
        outcome, target = (
            call(everything[world.rank].copy(), world),
            expected(everything, world.rank),
        )
        if target is None:
            assert outcome is None
        else:
            np.testing.assert_allclose(outcome, target, rtol=1e-15)

    ranks(body)


@on_ranks(3, mpi=(3,))
@pytest.mark.parametrize(
    ("call", "reported"),
    [
        (lambda x, w: user_calls.reduce_scatter(x[:1], world=w), "expected 3 rows"),
        (lambda x, w: user_calls.all_to_all(x[0, 0], w), "seen int|expected an array of NumPy"),
        (lambda x, w: user_calls.broadcast(x, 3, w), r"root in 0 \.\. 2, seen 3"),
        (lambda x, w: user_calls.scatter(x[:, ::2], 0, w), "ascontiguousarray"),
        (
            lambda x, w: user_calls.reduce(x, root=w.rank, world=w),
            r"rank 1 has reduce sum 1 of float64 \(3, 3\)",
        ),
    ],
)
def test_calls_refuse(ranks, call, reported):
    def body(world):
        with pytest.raises(UsageError, match=reported):
            call(rows(3)[world.rank].copy(), world)

    ranks(body)


# every function of `ht.*` with the arguments that it has; x (P, 3), float64
FUNCTIONS = {
    "allreduce": (user_calls.allreduce, {"op", "algorithm"}),
    "bind": (user_calls.bind, {"op", "algorithm", "result"}),
    "reduce": (user_calls.reduce, {"op", "root"}),
    "broadcast": (user_calls.broadcast, {"root"}),
    "reduce_scatter": (user_calls.reduce_scatter, {"op"}),
    "all_gather": (user_calls.all_gather, set()),
    "gather": (user_calls.gather, {"root"}),
    "scatter": (user_calls.scatter, {"root"}),
    "all_to_all": (user_calls.all_to_all, set()),
}
READS = ("all_gather", "gather", "all_to_all")  # never writes to `x`
# argument -> what one rank gives in its place -> what is said of it
FAULTS = {
    "x": [
        (lambda x: x.tolist(), "expected an array of NumPy or CuPy, seen list"),
        (lambda x: None, "seen NoneType"),
        (lambda x: x.astype(object), "seen object"),
        (lambda x: x.astype(">f8"), "native byte order, seen dtype '>f8'"),
        (lambda x: np.asfortranarray(np.ones((len(x), 3))), "C-contiguous"),
        (lambda x: x.astype("f4"), "of float32 "),
        (lambda x: x.reshape(-1), " of float64 (6,)|expected 2 rows"),
        (lambda x: x[..., None], " of float64 (2, 3, 1)"),
    ],
    "op": [("summ", "did you mean 'sum'?"), (0, "op: expected a name, seen 0"), ("max", " max "),
           ("avg", "float64 has: ")],
    "algorithm": [("tre", "did you mean 'tree'?"), (b"ring", "expected a name"), ("ring", "ring")],
    "result": [("there", "expected a result of in-place, shared"), (1, "result: expected a name")],
    "root": [(0.5, "root in 0 .. 1, seen 0.5"), ("0", "seen '0'"), (True, "seen True"),
             (None, "seen None"), (-1, "seen -1"), (np.zeros(2), "seen array"), (1, " 1 of ")],
}  # fmt: skip


@pytest.mark.sample(3)
@on_ranks(2, mpi=(2,))
@pytest.mark.parametrize("name", FUNCTIONS)
def test_one_rank_is_wrong(ranks, name):
    """All ranks raise the same text and none waits, whichever rank and argument; then all go on."""
    function, takes = FUNCTIONS[name]
    faults = [(wrong, *fault) for wrong in ("x", *sorted(takes)) for fault in FAULTS[wrong]]

    def body(world):
        for argument, value, reported in faults:
            for culprit in range(2):
                x, options = np.ones((2, 3)), {}
                if world.rank == culprit and argument == "x":
                    x = value(x)
                elif world.rank == culprit:
                    options = {argument: value}
                text = refusal(lambda: function(x, world=world, **options))[1]  # noqa: B023
                assert any(part in text for part in reported.split("|")), (argument, text)
                assert f"rank {culprit}" in text
                assert set(world.gather(text)) == {text}
        function(np.ones((2, 3)), world=world)

    ranks(body)


@on_ranks(2, mpi=(2,))
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_read_only_array_on_one_rank(ranks, name):
    """Refused on all ranks where it would be written to, taken where it is only read."""
    function, _ = FUNCTIONS[name]

    def body(world):
        for culprit in range(2):
            x = np.ones((2, 3))
            x.flags.writeable = world.rank != culprit
            sends = name in READS or (name in ("broadcast", "scatter") and culprit == 0)
            if sends:
                function(x, world=world)
            else:
                assert f"rank {culprit}: " in refusal(lambda: function(x, world=world))[1]  # noqa: B023
            assert (x == 1).all()

    ranks(body)


def misaligned(x):
    """Return a copy of `x` whose elements lie 4 bytes off, or, of 4 bytes, 2."""
    skip = x.itemsize // 2
    outcome = np.zeros(x.nbytes + skip, np.uint8)[skip:].view(x.dtype).reshape(x.shape)
    outcome[...] = x
    assert not outcome.flags.aligned
    return outcome


@on_ranks(3, mpi=(3,))
@pytest.mark.parametrize("algorithm", ["auto", *(name for name in ALLREDUCE if name != "null")])
def test_misaligned_arrays(ranks, algorithm):
    """The right sum, whoever's array is misaligned, in every way to call."""

    def body(world):
        for length in (3, 40_000):
            for culprits in ((0, 1, 2), (0,), (2,)):
                x = np.full(length, world.rank + 1.0, "f8" if length > 3 else "f4")
                x = misaligned(x) if world.rank in culprits else x
                for check in (True, False, False, False):
                    x[:] = world.rank + 1
                    allreduce(x, algorithm=algorithm, world=world, check=check)
                    assert (x == 6).all()
                x[:] = world.rank + 1
                user_calls.bind(x, algorithm=algorithm, world=world)()
                assert (x == 6).all()

    ranks(body)


@on_ranks(2, mpi=(2,))
@pytest.mark.parametrize("name", CALLS)
def test_calls_with_misaligned_arrays(ranks, name):
    call, expected = CALLS[name]
    everything = rows(ranks.size)

    def body(world):
        for culprits in ((0, 1), (0,), (1,)):
            x = everything[world.rank].copy()
            outcome = call(misaligned(x) if world.rank in culprits else x, world)
            target = expected(everything, world.rank)
            assert (outcome is None) == (target is None)
            assert target is None or np.array_equal(outcome, target)

    ranks(body)


@on_ranks(4, mpi=(4,))
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_means(ranks, dtype):
    def body(world):
        x = np.full(10, world.rank, np.dtype(getattr(ml_dtypes, dtype, dtype)))
        allreduce(x, "mean", world=world)
        return (x == 1.5).all()

    assert all(ranks(body))


@on_ranks(2, mpi=(2,))
def test_native_refuses_what_mpi_cannot_add(ranks):
    def body(world):
        if world.transport == "mpi":
            x = np.ones(3, np.float16)
            assert (
                "take an algorithm of hpctrain"
                in refusal(lambda: allreduce(x, algorithm="native", world=world))[1]
            )

    ranks(body)
