"""Optimizers against their equations, and against PyTorch where it is installed."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from hpctrain import optim
from hpctrain.core.config import read_kind
from hpctrain.core.errors import UsageError
from hpctrain.gradients.arena import lay_out
from hpctrain.optim.optimizer import BLOCK_ELEMENTS

LAYOUTS = {
    "nothing": [],
    "one number": [()],
    "vectors": [(7,), (1,), (16,)],
    "over blocks": [
        (3, 5),
        (300, 300),
        (9,),
        (2, BLOCK_ELEMENTS),
        (BLOCK_ELEMENTS // 2, 2),
        (5, 1),
    ],
}


def slots_of(shapes, itemsize=8):
    return lay_out({str(i): shape for i, shape in enumerate(shapes)}, itemsize)


def flat(tensors, shapes, dtype="float64"):
    """Return the tensors in one array, with zero gaps."""
    slots, length = slots_of(shapes)
    x = np.zeros(length, dtype)
    for slot, tensor in zip(slots, tensors, strict=True):
        x[slot.offset : slot.stop] = tensor.ravel()
    return x


def numbers(shapes, steps=5):
    """Return a start and `steps` gradients: a list of tensors, and a list of such lists."""
    draw = np.random.default_rng(0).standard_normal
    return [draw(s) for s in shapes], [[draw(s) for s in shapes] for _ in range(steps)]


def alone(rows):
    return rows


def run_ours(optimizer, w, grads, slots=()):
    w = w.copy()
    state = optimizer.init(w)
    for g in grads:
        optimizer.update(g, state, w, slots, alone)
    return w


# --- the equations, tensor by tensor -----------------------------------------------------------


def norm(x):
    return np.sqrt((x**2).sum())


def clipped(gs, limit):
    size = np.sqrt(sum(norm(g) ** 2 for g in gs))
    return gs if limit is None else [g * min(1, limit / size) for g in gs]


def equations(item, clip=None):
    """Return the run of `one(tensor, its gradients) -> tensor` on each tensor."""

    def run(ws, grads):
        grads = [clipped(gs, clip) for gs in grads]
        return [item(w, [gs[i] for gs in grads]) for i, w in enumerate(ws)]

    return run


def falling(step):
    return 0.1 / (1 + step)


def always(step):
    return 0.1


def sgd(rate=always, momentum=0.0, nesterov=False, decay=0.0, exempt=False):
    def item(w, grads):
        v = 0
        for step, g in enumerate(grads):
            h = g + (0 if exempt and w.ndim < 2 else decay) * w
            v = momentum * v + h
            w = w - rate(step) * (h + momentum * v if nesterov else v)
        return w

    return item


def adamw(rate=always, b1=0.9, b2=0.999, e=1e-8, decay=0.01, exempt=False):
    def item(w, grads):
        m = v = 0
        for t, g in enumerate(grads, 1):
            m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
            w = w * (1 - rate(t - 1) * (0 if exempt and w.ndim < 2 else decay))
            w = w - rate(t - 1) * (m / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + e)
        return w

    return item


def lars(rate=always, momentum=0.9, decay=0.0, trust=0.001, exempt=True):
    def item(w, grads):
        v = 0
        vector = exempt and w.ndim < 2
        beta = 0 if vector else decay
        for step, g in enumerate(grads):
            local = 1 if vector else trust * norm(w) / (norm(g) + beta * norm(w))
            v = momentum * v + rate(step) * local * (g + beta * w)
            w = w - v
        return w

    return item


def lamb(rate=always, b1=0.9, b2=0.999, e=1e-6, decay=0.01, exempt=True):
    def item(w, grads):
        m = v = 0
        vector = exempt and w.ndim < 2
        for t, g in enumerate(grads, 1):
            m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
            r = (m / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + e)
            u = r + (0 if vector else decay) * w
            w = w - rate(t - 1) * (1 if vector else norm(w) / norm(u)) * u
        return w

    return item


def torch_run(name, clip=None, **keywords):
    """Return torch's own run; `keywords` of vectors may differ."""
    vectors = keywords.pop("vectors", {})

    def run(ws, grads):
        torch = pytest.importorskip("torch")
        params = [torch.tensor(w, requires_grad=True) for w in ws]
        groups = [{"params": [p], **(vectors if p.ndim < 2 else {})} for p in params]
        optimizer = getattr(torch.optim, name)(groups or [torch.zeros(1)], **keywords)
        for gs in grads:
            for p, g in zip(params, gs, strict=True):
                p.grad = torch.tensor(g)
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(params, clip)
            optimizer.step()
        return [p.detach().numpy() for p in params]

    return run


OTHER = {"beta1": 0.8, "beta2": 0.9, "epsilon": 1e-3, "weight_decay": 0.3}
SAME = (0.8, 0.9, 1e-3, 0.3)
NESTEROV = {"momentum": 0.9, "nesterov": True}
ROWS = {
    "sgd": (optim.sgd(0.1), equations(sgd())),
    "sgd falling": (optim.sgd(falling), equations(sgd(falling))),
    "sgd decay": (optim.sgd(0.1, weight_decay=0.2), equations(sgd(decay=0.2))),
    "momentum": (optim.sgd(0.1, 0.9), equations(sgd(momentum=0.9))),
    "momentum falling": (optim.sgd(falling, momentum=0.5), equations(sgd(falling, 0.5))),
    "momentum decay": (
        optim.sgd(falling, 0.9, weight_decay=0.2, clip_norm=3.0),
        equations(sgd(falling, 0.9, decay=0.2), 3.0),
    ),
    "momentum exempt": (
        optim.sgd(0.1, 0.9, weight_decay=0.2, exempt_vectors=True),
        equations(sgd(momentum=0.9, decay=0.2, exempt=True)),
    ),
    "nesterov": (optim.sgd(0.1, **NESTEROV), equations(sgd(**NESTEROV))),
    "nesterov decay": (
        optim.sgd(0.1, **NESTEROV, weight_decay=0.2, exempt_vectors=True, clip_norm=1.0),
        equations(sgd(**NESTEROV, decay=0.2, exempt=True), 1.0),
    ),
    "adamw": (optim.adamw(0.1), equations(adamw())),
    "adamw other": (optim.adamw(falling, **OTHER), equations(adamw(falling, *SAME))),
    "adamw exempt": (
        optim.adamw(0.1, **OTHER, exempt_vectors=True, clip_norm=0.1),
        equations(adamw(always, *SAME, exempt=True), 0.1),
    ),
    "not clipped": (optim.adamw(0.1, clip_norm=1e9), equations(adamw())),
    "lars": (optim.lars(0.1), equations(lars())),
    "lars other": (
        optim.lars(falling, 0.5, 0.3, 0.2, exempt_vectors=False, clip_norm=1.0),
        equations(lars(falling, 0.5, 0.3, 0.2, exempt=False), 1.0),
    ),
    "lars decay": (optim.lars(0.1, weight_decay=0.3), equations(lars(decay=0.3))),
    "lamb": (optim.lamb(0.1), equations(lamb())),
    "lamb other": (
        optim.lamb(falling, **OTHER, exempt_vectors=False, clip_norm=1.0),
        equations(lamb(falling, *SAME, exempt=False), 1.0),
    ),
    "lamb no decay": (optim.lamb(0.1, weight_decay=0.0), equations(lamb(decay=0.0))),
    "torch sgd": (optim.sgd(0.1, 0.9), torch_run("SGD", lr=0.1, momentum=0.9)),
    "torch nesterov": (
        optim.sgd(0.1, **NESTEROV, weight_decay=0.2, exempt_vectors=True),
        torch_run("SGD", lr=0.1, **NESTEROV, weight_decay=0.2, vectors={"weight_decay": 0}),
    ),
    "torch adamw": (optim.adamw(0.1), torch_run("AdamW", lr=0.1)),
    "torch adamw exempt": (
        optim.adamw(0.1, exempt_vectors=True),
        torch_run("AdamW", lr=0.1, vectors={"weight_decay": 0}),
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ROWS)
def test_the_parameters_after_five_steps_are_those_of_the_equations(name, layout):
    optimizer, reference = ROWS[name]
    shapes = LAYOUTS[layout]
    ws, grads = numbers(shapes)
    result = run_ours(
        optimizer, flat(ws, shapes), [flat(gs, shapes) for gs in grads], slots_of(shapes)[0]
    )
    expected = flat(reference(ws, grads), shapes)  # with gaps, which must have stayed zero
    np.testing.assert_allclose(result, expected, rtol=1e-11, atol=1e-12)


def test_clipping_is_that_of_torch():
    # It divides by the norm + 1e-6, so equality goes no further.
    shapes = LAYOUTS["over blocks"]
    ws, grads = numbers(shapes)
    expected = torch_run("SGD", clip=2.0, lr=0.1)(ws, grads)
    optimizer, slots = optim.sgd(0.1, clip_norm=2.0), slots_of(shapes)[0]
    result = run_ours(optimizer, flat(ws, shapes), [flat(gs, shapes) for gs in grads], slots)
    np.testing.assert_allclose(result, flat(expected, shapes), atol=1e-7)


def worked(optimizer, w, grads):
    """Return the parameters of a model of one matrix with one row."""
    slots, _ = slots_of([(1, len(w))])
    return run_ours(optimizer, np.array(w), np.array(grads, float), slots).tolist()


#: optimizer, start, gradients, end; worked out by hand
BY_HAND = {
    # v1 = 2, w1 = 1 - 0.2 = 0.8; v2 = 0.5 * 2 + 4 = 5, w2 = 0.8 - 0.5
    "momentum": (optim.sgd(0.1, 0.5), [1.0], [[2], [4]], [0.3]),
    # h1 = 2, w1 = 1 - 0.1 (2 + 0.5 * 2) = 0.7; v2 = 5, w2 = 0.7 - 0.1 (4 + 0.5 * 5)
    "nesterov": (optim.sgd(0.1, 0.5, nesterov=True), [1.0], [[2], [4]], [0.05]),
    # decay first takes 0.1 * 0.5; the first step of Adam is the rate in the direction of the sign
    "adamw": (optim.adamw(0.1, epsilon=1e-12, weight_decay=0.5), [1.0], [[-7]], [1 - 0.05 + 0.1]),
    # the norm 10 becomes 5: g = (3, 4)
    "clipping": (optim.sgd(0.1, clip_norm=5.0), [0.0, 0.0], [[6, 8]], [-0.3, -0.4]),
    # |w| = 5, |g| = 10: l = 0.1 * 5 / (10 + 2 * 5) = 0.025; v = 2 * 0.025 * (g + 2 w)
    "lars": (optim.lars(2.0, 0.9, 2.0, 0.1), [3.0, 4.0], [[8, -6]], [3 - 0.7, 4 - 0.1]),
    # r = (1, -1), u = r + 2 w = (7, 7), |u| = 7 sqrt(2); w - 0.1 * 5 / |u| * u
    "lamb": (
        optim.lamb(0.1, weight_decay=2.0, epsilon=1e-12),
        [3.0, 4.0],
        [[8, -6]],
        [3 - 0.5 / 2**0.5, 4 - 0.5 / 2**0.5],
    ),
    # a tensor of zeros takes the plain rate, or it would stay one for good
    "lars from 0": (optim.lars(0.1), [0.0], [[2]], [-0.2]),
    "lamb from 0": (optim.lamb(0.1, epsilon=1e-12), [0.0], [[2]], [-0.1]),
    # and without a gradient nothing moves, or divides by 0
    "lars at rest": (optim.lars(0.1), [1.0], [[0]], [1.0]),
    # l = 0.1 * 5 / (0 + 2 * 5) = 0.05: decay takes 2 * 0.05 * 2 w, a share of w whatever decay is
    "lars, decay alone": (optim.lars(2.0, 0.9, 2.0, 0.1), [3.0, 4.0], [[0, 0]], [2.4, 3.2]),
    "lamb at rest": (optim.lamb(0.1, weight_decay=0.0), [1.0], [[0]], [1.0]),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_steps_by_hand(name):
    optimizer, w, grads, expected = BY_HAND[name]
    assert worked(optimizer, w, grads) == pytest.approx(expected, rel=1e-12)


def test_nesterov_is_the_method_of_the_paper():
    # Sutskever et al. (2013), equations 3 and 4, on f(x) = x^2; ours holds the point ahead.
    rate, momentum, x, v, ahead = 0.1, 0.9, 1.0, 0.0, np.array([1.0])
    optimizer = optim.sgd(rate, momentum, nesterov=True)
    state = optimizer.init(ahead)
    for _ in range(20):
        v = momentum * v - rate * 2 * (x + momentum * v)
        x = x + v
        optimizer.update(2 * ahead, state, ahead, [], alone)
        assert ahead[0] == pytest.approx(x + momentum * v, rel=1e-12)


FOUR = {
    "sgd": optim.sgd(0.1, 0.9, nesterov=True, weight_decay=0.1, clip_norm=1.0),
    "adamw": optim.adamw(0.1, clip_norm=1.0),
    "lars": optim.lars(0.1, weight_decay=0.1, clip_norm=1.0),
    "lamb": optim.lamb(0.1, clip_norm=1.0),
}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", FOUR)
def test_an_update_is_in_place_keeps_dtypes_and_leaves_the_gradient(name, dtype):
    w, g = np.ones(16, dtype), np.ones(16, dtype)
    slots, _ = slots_of([(4, 4)])
    state = FOUR[name].init(w)
    arrays = {k: (v, v.dtype, v.shape) for k, v in state.items()}
    for _ in range(3):
        assert FOUR[name].update(g, state, w, slots, alone) is None
    assert all(state[k] is v and v.dtype == d and v.shape == s for k, (v, d, s) in arrays.items())
    assert state["step"].tolist() == [3] and state["step"].dtype == np.int64
    assert all(v.dtype == dtype and v.shape == (16,) for k, v in state.items() if k != "step")
    assert np.array_equal(g, np.ones(16)) and (w < 1).all()


@pytest.mark.parametrize("name", FOUR)
def test_a_state_carried_over_goes_on_with_the_same_bytes(name):
    optimizer, (slots, _) = FOUR[name], slots_of([(8, 7)])
    w, grads = np.ones(56), np.random.default_rng(0).standard_normal((6, 56))
    state = optimizer.init(w)
    for i, g in enumerate(grads):
        optimizer.update(g, state, w, slots, alone)
        if i == 2:
            state = {k: v.copy() for k, v in state.items()}
    assert w.tobytes() == run_ours(optimizer, np.ones(56), grads, slots).tobytes()


@pytest.mark.parametrize("name", FOUR)
def test_an_update_needs_no_array_of_full_length(name):
    w, g = np.ones(20 * BLOCK_ELEMENTS), np.ones(20 * BLOCK_ELEMENTS)
    slots, _ = slots_of([(20, BLOCK_ELEMENTS)])
    state = FOUR[name].init(w)
    tracemalloc.start()
    FOUR[name].update(g, state, w, slots, alone)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * BLOCK_ELEMENTS * w.itemsize


REFUSED = [
    (lambda: optim.sgd(0.1, 1.0), "sgd momentum: input should be less than 1, seen 1.0"),
    (lambda: optim.sgd(0.1, nesterov=True), "nesterov: expected a momentum above 0"),
    (lambda: optim.sgd(0.1, weight_decay=-1.0), "sgd weight_decay: .* or equal to 0, seen -1.0"),
    (lambda: optim.adamw(0.1, beta2=1.0), "adamw beta2: input should be less than 1"),
    (lambda: optim.adamw(0.1, epsilon=0.0), "adamw epsilon: input should be greater than 0"),
    (lambda: optim.lars(0.1, trust=0.0), "lars trust: input should be greater than 0"),
    (lambda: optim.lamb(0.1, epsilon=0.0), "lamb epsilon: input should be greater than 0"),
    (lambda: optim.lamb(0.1, clip_norm=0.0), "lamb clip_norm: input should be greater than 0"),
    (lambda: read_kind(optim.OPTIMIZERS, {"kind": "sdg"}, "optimizer"), "did you mean 'sgd'"),
    (lambda: read_kind(optim.OPTIMIZERS, {"kind": "sgd", "rate": -1.0}, "optimizer"), "rate"),
    (lambda: read_kind(optim.SCHEDULES, {"kind": "cosin"}, "schedule"), "did you mean 'cosine'"),
]


@pytest.mark.parametrize(("act", "message"), REFUSED)
def test_what_cannot_work_is_refused(act, message):
    with pytest.raises(UsageError, match=message):
        act()


ALL = {"weight_decay": 0.2, "exempt_vectors": False, "clip_norm": 1.5}
LARS = {"momentum": 0.5, "trust": 0.1, **ALL}
TABLES = [
    ({"kind": "sgd", "rate": 1, "momentum": 0.5}, optim.sgd(0.25, 0.5)),
    ({"kind": "sgd", "rate": 1.0, **NESTEROV, **ALL}, optim.sgd(0.25, **NESTEROV, **ALL)),
    ({"kind": "adamw", "rate": 1.0, **OTHER}, optim.adamw(0.25, **OTHER)),
    ({"kind": "adamw", "rate": 1.0, **ALL}, optim.adamw(0.25, **ALL)),
    ({"kind": "lars", "rate": 1.0, **LARS}, optim.lars(0.25, **LARS)),
    ({"kind": "lars", "rate": 1.0}, optim.lars(0.25)),
    ({"kind": "lamb", "rate": 1.0, **OTHER}, optim.lamb(0.25, **OTHER)),
    ({"kind": "lamb", "rate": 1.0, **ALL}, optim.lamb(0.25, **ALL)),
]


@pytest.mark.parametrize(("table", "expected"), TABLES)
def test_a_table_of_a_recipe_builds_the_optimizer_with_its_schedule(table, expected):
    options = read_kind(optim.OPTIMIZERS, table, "optimizer")
    built = options.build(lambda step: 0.25 * options.rate)
    shapes = [(2, 3), (4,)]
    ws, grads = numbers(shapes)
    result, target = (
        run_ours(item, flat(ws, shapes), [flat(g, shapes) for g in grads], slots_of(shapes)[0])
        for item in (built, expected)
    )
    assert np.array_equal(result, target)
