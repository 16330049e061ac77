"""Optimizers against their equations written out, and against another library where it is."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from hpctrain import optim
from hpctrain.config import read_kind
from hpctrain.errors import UsageError
from hpctrain.optim.optimizer import BLOCK


def falling(step: int) -> float:
    return 0.1 / (1 + step)


def run_ours(optimizer, w, grads):
    w = w.copy()
    state = optimizer.init(w)
    for g in grads:
        optimizer.update(g, state, w, [], lambda partials: partials)
    return w


def sgd_equations(rate, momentum):
    def run(w, grads):
        v = 0
        for step, g in enumerate(grads):
            v = momentum * v + g
            w = w - rate(step) * v
        return w

    return run


def adamw_equations(rate, b1=0.9, b2=0.999, e=1e-8, decay=0.01):
    def run(w, grads):
        m = v = 0
        for t, g in enumerate(grads, 1):
            m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
            w = w * (1 - rate(t - 1) * decay)
            w = w - rate(t - 1) * (m / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + e)
        return w

    return run


def torch_run(name, **keywords):
    def run(w, grads):
        torch = pytest.importorskip("torch")
        p = torch.tensor(w, requires_grad=True)
        optimizer = getattr(torch.optim, name)([p], **keywords)
        for g in grads:
            p.grad = torch.tensor(g)
            optimizer.step()
        return p.detach().numpy()

    return run


OTHER = {"beta1": 0.8, "beta2": 0.9, "epsilon": 1e-3, "weight_decay": 0.3}
ROWS = {
    "sgd": (optim.sgd(0.1), sgd_equations(lambda step: 0.1, 0)),
    "sgd falling": (optim.sgd(falling), sgd_equations(falling, 0)),
    "momentum": (optim.sgd(0.1, 0.9), sgd_equations(lambda step: 0.1, 0.9)),
    "momentum falling": (optim.sgd(falling, momentum=0.5), sgd_equations(falling, 0.5)),
    "adamw": (optim.adamw(0.1), adamw_equations(lambda step: 0.1)),
    "adamw other": (optim.adamw(falling, **OTHER), adamw_equations(falling, 0.8, 0.9, 1e-3, 0.3)),
    "torch sgd": (optim.sgd(0.1, 0.9), torch_run("SGD", lr=0.1, momentum=0.9)),
    "torch adamw": (optim.adamw(0.1), torch_run("AdamW", lr=0.1)),
}


@pytest.mark.parametrize("size", [0, 1, 7, BLOCK + 3])
@pytest.mark.parametrize("name", ROWS)
def test_the_parameters_after_five_steps_are_those_of_the_equations(name, size):
    optimizer, reference = ROWS[name]
    generator = np.random.default_rng(0)
    w, grads = generator.standard_normal(size), generator.standard_normal((5, size))
    np.testing.assert_allclose(
        run_ours(optimizer, w, grads), reference(w, grads), rtol=1e-12, atol=1e-13
    )


def test_two_steps_by_hand():
    # v1 = 2, w1 = 1 - 0.2 = 0.8; v2 = 0.5 * 2 + 4 = 5, w2 = 0.8 - 0.5 = 0.3
    w = run_ours(optim.sgd(0.1, 0.5), np.array([1.0]), np.array([[2.0], [4.0]]))
    assert w == pytest.approx(0.3)
    # The first step of Adam is the rate in the direction of the sign; decay takes 0.1 * 0.5.
    w = run_ours(optim.adamw(0.1, weight_decay=0.5), np.array([1.0]), np.array([[-7.0]]))
    assert w == pytest.approx(1 - 0.05 + 0.1)


BOTH = {"sgd": optim.sgd(0.1, 0.9), "adamw": optim.adamw(0.1)}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", BOTH)
def test_an_update_is_in_place_keeps_dtypes_and_leaves_the_gradient(name, dtype):
    w, g = np.ones(10, dtype), np.ones(10, dtype)
    state = BOTH[name].init(w)
    arrays = {k: (v, v.dtype, v.shape) for k, v in state.items()}
    for _ in range(3):
        assert BOTH[name].update(g, state, w, [], None) is None
    assert all(state[k] is v and v.dtype == d and v.shape == s for k, (v, d, s) in arrays.items())
    assert state["step"].tolist() == [3] and state["step"].dtype == np.int64
    assert all(v.dtype == dtype and v.shape == (10,) for k, v in state.items() if k != "step")
    assert np.array_equal(g, np.ones(10)) and (w < 0.9).all()


@pytest.mark.parametrize("name", BOTH)
def test_a_state_carried_over_goes_on_with_the_same_bytes(name):
    optimizer = BOTH[name]
    w, grads = np.ones(50), np.random.default_rng(0).standard_normal((6, 50))
    state = optimizer.init(w)
    for i, g in enumerate(grads):
        optimizer.update(g, state, w, [], None)
        if i == 2:
            state = {k: v.copy() for k, v in state.items()}
    assert w.tobytes() == run_ours(optimizer, np.ones(50), grads).tobytes()


@pytest.mark.parametrize("name", BOTH)
def test_an_update_needs_no_array_of_full_length(name):
    w, g = np.ones(20 * BLOCK), np.ones(20 * BLOCK)
    state = BOTH[name].init(w)
    tracemalloc.start()
    BOTH[name].update(g, state, w, [], None)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 * BLOCK * w.itemsize


REFUSED = [
    (lambda: optim.sgd(0.1, 1.0), r"momentum must be in \[0, 1\), seen 1.0"),
    (lambda: optim.adamw(0.1, beta2=1.0), "beta1 and beta2 must be in"),
    (lambda: optim.adamw(0.1, epsilon=0.0), "epsilon > 0"),
    (lambda: read_kind(optim.OPTIMIZERS, {"kind": "sdg"}, "optimizer"), "did you mean 'sgd'"),
    (lambda: read_kind(optim.OPTIMIZERS, {"kind": "sgd", "rate": -1.0}, "optimizer"), "rate"),
    (lambda: read_kind(optim.SCHEDULES, {"kind": "cosin"}, "schedule"), "did you mean 'cosine'"),
]


@pytest.mark.parametrize(("act", "message"), REFUSED)
def test_what_cannot_work_is_refused(act, message):
    with pytest.raises(UsageError, match=message):
        act()


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ({"kind": "sgd", "rate": 1, "momentum": 0.5}, optim.sgd(0.25, 0.5)),
        ({"kind": "adamw", "rate": 1.0, **OTHER}, optim.adamw(0.25, **OTHER)),
    ],
)
def test_a_table_of_a_recipe_builds_the_optimizer_with_its_schedule(table, expected):
    options = read_kind(optim.OPTIMIZERS, table, "optimizer")
    built = options.build(lambda step: 0.25 * options.rate)
    w, grads = np.ones(4), np.arange(12.0).reshape(3, 4)
    assert np.array_equal(run_ours(built, w, grads), run_ours(expected, w, grads))
