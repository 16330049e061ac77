"""Parts of a model and products that run later: the bytes of the whole model, computed at once."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest

from hpctrain import nn
from hpctrain.core.errors import HpctrainError
from hpctrain.gradients.replica import Batch, ModelReplica, ignore_ready, split_batch
from hpctrain.nn import part as part_module
from hpctrain.nn.layer import run_now, takes_later
from hpctrain.nn.part import GradientSums, Part


@dataclass(frozen=True)
class OwnScale:
    """A layer of a user: `backward` has five arguments and computes everything at once."""

    def output_shape(self, shape):
        return shape

    def parameters(self, shape):
        return {"scale": nn.Parameter(shape, nn.layer.ones)}

    def forward(self, p, x, key):
        return x * p["scale"], x

    def backward(self, p, g, saved, dy, want_dx):
        np.sum(dy * saved, axis=0, out=g["scale"])
        return dy * p["scale"]


def transformer(tied=True, **options):
    model = nn.TransformerOptions(layers=2, width=8, heads=2, dropout=0.3, **options).build(
        (6,), 256
    )
    out = {} if tied else {"out": nn.Linear(256, per_position=True)}
    return nn.Model(model.layers | out, model.input_shape)


def shared_by_three():
    layers = {"in": nn.Embedding(9, 4), "mid": nn.Unembedding("in", 9), "back": nn.Linear(4, True),
              "own": OwnScale(), "out": nn.Unembedding("in", 9)}  # fmt: skip
    return nn.Model(layers, (6,))


def shared_inside():
    pair = nn.Chain(
        {"in": nn.Embedding(9, 4), "own": OwnScale(), "out": nn.Unembedding("both.in", 9)}
    )
    return nn.Model({"both": pair, "last": nn.Linear(9, True)}, (6,))


MODELS = {
    "mlp": lambda: nn.MlpOptions(widths=[64, 20, 16, 10], dropout=0.3).build((8, 8), 10),
    "cnn": lambda: nn.CnnOptions(channels=[3, 4], hidden=9, dropout=0.3).build((8, 8), 10),
    "tied": transformer,
    "untied": lambda: transformer(tied=False),
    "recompute": lambda: transformer(recompute=True),
    "three": shared_by_three,
    "inside": shared_inside,
}
SCALE = 1 / 13


def batch(model):
    generator = np.random.default_rng(0)
    if model.targets > 1:
        x, y = generator.integers(0, model.output_shape[-1], (2, 13, *model.input_shape))
        return Batch.of(x, y)
    x = generator.standard_normal((13, *model.input_shape)).astype(np.float32)
    return Batch.of(x, generator.integers(0, 10, 13))


def replica(model, micro_batches):
    created = ModelReplica(model, 3, np.float32)
    created.micro_batches = micro_batches
    return created


def key(first=0):
    return nn.Key(7, 5, first, samples=13)


def expected_of(model, micro_batches):
    """Return the gradient and the sums of one rank, and the order of its slots."""
    one, ready = replica(model, micro_batches), []
    sums = one.gradient(batch(model), SCALE, key(), ready.append)
    return one.arena.grad.copy(), sums, ready


class Stages:
    """The parts of a model between `cuts`, each with its sums, in the planes of one arena."""

    def __init__(self, model, cuts, micro_batches):
        self.model, self.one, self.ready = model, replica(model, micro_batches), []
        bounds = [0, *cuts, len(model.layers)]
        self.parts = [Part(model, *bound) for bound in pairwise(bounds)]
        arena = self.one.arena
        self.params, grads = arena.views(arena.param), arena.views(arena.grad)
        arena.grad[...] = np.nan
        for slot in arena.slots:
            grads[slot.name][...] = np.nan
        self.sums = []
        for part in self.parts:
            own = {name: grads[name] for name in part.parameters}
            self.sums.append(GradientSums(part, own, micro_batches, self.ready.append))

    def used(self, part):
        return {name: self.params[name] for name in [*part.parameters, *part.shared]}

    def run(self, later=lambda stage: run_now):
        """Compute all micro-batches, with copies at the bounds as messages make them."""
        total = {}
        for piece, first in split_batch(batch(self.model), self.one.micro_batches):
            x, tapes = self.model.prepare_samples(piece.inputs, self.one.arena.param), []
            for part in self.parts:
                x, tape = part.forward(self.used(part), np.array(x, order="C"), key(first))
                tapes.append(tape)
            sums, dy = self.model.loss_gradient(x, piece.targets, SCALE)
            total = nn.add(total, nn.losses.wait_for_sums(sums))
            for i in reversed(range(len(self.parts))):
                params, tape = self.used(self.parts[i]), tapes.pop()
                dy = self.parts[i].backward(params, self.sums[i], tape, dy.copy(), later(i))
        assert dy is None
        return total

    def finish(self):
        """Complete the gradients of parameters that several parts use, as stages do by messages."""
        totals = [own.totals() for own in self.sums]
        for i, part in enumerate(self.parts):
            for name in part.tied:
                foreign = [(layer, x) for j, own in enumerate(totals) if j != i
                           for layer, other, x in own if other == name]  # fmt: skip
                if name in part.parameters:
                    self.sums[i].finish(name, foreign)
        for own in self.sums:
            own.check_complete()


def check(stages, sums, expected):
    grad, expected_sums, ready = expected
    assert sums == expected_sums
    assert sorted(stages.ready) == sorted(ready)
    for slot in stages.one.arena.slots:
        part = slice(slot.offset, slot.stop)
        assert stages.one.arena.grad[part].tobytes() == grad[part].tobytes(), slot.name


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_two_parts_give_the_bytes_of_the_whole_model_wherever_it_is_cut(name, micro_batches):
    model = MODELS[name]()
    expected = expected_of(model, micro_batches)
    for cut in range(1, len(model.layers)):
        stages = Stages(model, [cut], micro_batches)
        sums = stages.run()
        stages.finish()
        check(stages, sums, expected)


@pytest.mark.parametrize("name", MODELS)
def test_a_part_per_layer_with_products_at_the_end_gives_the_same_bytes(name):
    model = MODELS[name]()
    expected = expected_of(model, 3)
    stages = Stages(model, range(1, len(model.layers)), 3)
    waiting = [[] for _ in stages.parts]
    sums = stages.run(lambda stage: waiting[stage].append)
    assert stages.ready == []
    for products in waiting:  # in another order of stages than backward
        for product in products:
            product()
    stages.finish()
    check(stages, sums, expected)


@pytest.mark.parametrize("name", MODELS)
def test_the_gradient_of_one_batch_is_that_of_a_replica(name):
    model = MODELS[name]()
    grad, expected_sums, expected_ready = expected_of(model, 1)
    one, ready, item = replica(model, 1), [], batch(model)
    views = [one.arena.views(plane) for plane in (one.arena.param, one.arena.grad)]
    sums = model.gradient(*views, item.inputs, item.targets, SCALE, key(), ready.append)
    assert (sums, ready) == (expected_sums, expected_ready)
    assert one.arena.grad.tobytes() == grad.tobytes()
    assert ready == list(model.parameters)[::-1]


def test_one_rank_sums_each_use_of_a_shared_parameter_over_the_micro_batches():
    """The order of additions: (o0 + o1 + o2) + (m0 + m1 + m2) + (e0 + e1 + e2)."""
    model = shared_by_three()
    uses = {}
    for i, (piece, first) in enumerate(split_batch(batch(model), 3)):
        stages = Stages(model, [1, 2, 3, 4], 1)
        x, tapes = model.prepare_samples(piece.inputs, stages.one.arena.param), []
        for part in stages.parts:
            x, tape = part.forward(stages.used(part), x, key(first))
            tapes.append(tape)
        _, dy = model.loss_gradient(x, piece.targets, SCALE)
        for part, own, tape in reversed(list(zip(stages.parts, stages.sums, tapes, strict=True))):
            dy = part.backward(stages.used(part), own, tape, dy)
            for layer, _, array in own.totals():
                uses[layer, i] = array
    totals = [uses[layer, 0] + uses[layer, 1] + uses[layer, 2] for layer in (4, 1, 0)]
    grad = totals[0] + totals[1] + totals[2]
    one = replica(model, 3)
    one.gradient(batch(model), SCALE, key(), ignore_ready)
    assert np.array_equal(one.arena.views(one.arena.grad)["in.table"], grad)


def swapped(products):
    return products[len(products) // 2 :] + products[: len(products) // 2]


PLANTED = {
    "twice": lambda products: products + products[-1:],
    "dropped": lambda products: products[:-1],
    "other order of micro-batches": swapped,
}


@pytest.mark.parametrize("fault", PLANTED)
@pytest.mark.parametrize("name", ["mlp", "tied"])
def test_products_that_run_twice_or_never_or_in_another_order_are_refused(name, fault):
    model = MODELS[name]()
    stages = Stages(model, [len(model.layers) // 2], 2)
    waiting = [[], []]
    stages.run(lambda stage: waiting[stage].append)
    with pytest.raises(HpctrainError, match=r"expected (micro-batch \d next|2 micro-batches)"):
        for product in waiting[0] + PLANTED[fault](waiting[1]):
            product()
        stages.finish()


def test_a_weight_product_that_is_dropped_changes_bytes():
    model = MODELS["mlp"]()
    expected = expected_of(model, 3)
    stages, waiting = Stages(model, [3], 3), []
    sums = stages.run(lambda stage: waiting.append)
    for i, product in enumerate(waiting):
        if i != 4:
            product()
    stages.finish()
    with pytest.raises(AssertionError):
        check(stages, sums, expected)


def test_more_micro_batches_than_announced_are_refused():
    model = MODELS["mlp"]()
    stages = Stages(model, [], 1)
    stages.run()
    with pytest.raises(HpctrainError, match="1 micro-batches: expected no further backward"):
        stages.run()


LAYERS = {
    "linear": (nn.Linear(4), (6,)),
    "linear-positions": (nn.Linear(4, per_position=True), (2, 3)),
    "conv": (nn.Conv2d(3, kernel=3, padding=1), (5, 4, 2)),
    "conv-1x1": (nn.Conv2d(3, kernel=1, bias=False), (2, 3, 2)),
    "attention": (nn.CausalAttention(heads=2), (5, 4)),
    "embedding": (nn.Embedding(7, 3), (4,)),
    "positions": (nn.Positions(), (4, 3)),
    "unembedding": (nn.Unembedding("in", 7), (4, 3)),
    "layer-norm": (nn.LayerNorm(), (3, 5)),
    "batch-norm": (nn.BatchNorm(), (2, 3, 4)),
    "own": (OwnScale(), (4,)),
    "chain": (nn.Chain({"a": nn.Linear(4), "own": OwnScale(), "b": nn.Linear(3)}), (4,)),
    "residual": (nn.Residual({"a": nn.Linear(4), "n": nn.LayerNorm()}, {"a": nn.Linear(4)}), (4,)),
    "recompute": (nn.Recompute(nn.Chain({"a": nn.Linear(4), "d": nn.Dropout(0.5)})), (4,)),
    "concatenate": (nn.Concatenate({"m": {"a": nn.Linear(3)}, "n": {"a": nn.Linear(2)}}),
                    {"m": (4,), "n": (3,)}),
}  # fmt: skip
AT_ONCE = {"layer-norm", "batch-norm", "own"}


@pytest.mark.parametrize("name", LAYERS)
def test_products_of_a_layer_may_run_later(name):
    layer, shape = LAYERS[name]
    generator = np.random.default_rng(0)
    kinds = layer.parameters(shape)
    p = {k: v + 0.1 for k, v in nn.initial_values(kinds, 0).items()}
    x = {k: generator.standard_normal((3, *s)) for k, s in shape.items()} \
        if isinstance(shape, dict) else generator.standard_normal((3, *shape))  # fmt: skip
    x = generator.integers(0, 7, (3, *shape)) if name == "embedding" else x
    results, products = [], []
    for later in (run_now, products.append):
        g = {k: np.full(kinds[k].shape, np.nan) for k in p if kinds[k].trainable}
        y, saved = layer.forward(p, x, nn.Key(1, 2, 3, 4))
        dy = np.random.default_rng(1).standard_normal(y.shape)
        extra = (later,) if takes_later(type(layer)) else ()
        before = dy.copy()
        dx = layer.backward(p, g, saved, dy, name != "concatenate", *extra)
        dx = None if dx is None else dx.copy()
        if later is not run_now and name not in AT_ONCE:
            assert any(np.isnan(array).any() for array in g.values())
        for product in products:
            product()
        assert np.array_equal(dy, before)
        results.append((dx, g))
    (dx, g), (later_dx, later_g) = results
    assert (dx is None and later_dx is None) or dx.tobytes() == later_dx.tobytes()
    assert all(g[k].tobytes() == later_g[k].tobytes() for k in g)
    assert bool(products) == (name not in AT_ONCE)


def test_a_stage_draws_its_own_initial_values_alone():
    model = MODELS["tied"]()
    everything, part = nn.initial_values(model.parameters, 3), Part(model, 3, 7)
    own = nn.initial_values(model.parameters, 3, part.parameters)
    assert list(own) == list(part.parameters) and list(part.shared) == ["embedding.table"]
    assert all(np.array_equal(own[name], everything[name]) for name in own)


def test_parameters_of_parts_are_those_of_the_model():
    model = MODELS["tied"]()
    parts = [Part(model, 0, 3), Part(model, 3, 4), Part(model, 4, len(model.layers))]
    assert [n for part in parts for n in part.parameters] == list(model.parameters)
    assert [list(part.shared) for part in parts] == [[], [], ["embedding.table"]]
    assert [part.tied for part in parts] == [("embedding.table",), (), ("embedding.table",)]


def test_totals_of_shared_parameters_do_not_wait_for_other_products():
    model = MODELS["tied"]()
    stages, waiting = Stages(model, [3, 6], 1), [[], [], []]
    stages.run(lambda stage: waiting[stage].append)
    for product in waiting[2]:  # of the last stage alone
        product()
    assert stages.sums[1].totals() == []
    assert [(i, name) for i, name, _ in stages.sums[2].totals()] == [(6, "embedding.table")]
    with pytest.raises(HpctrainError, match=r"'embedding.table': expected 1 micro-batches"):
        stages.sums[0].totals()


def test_arrays_of_waiting_products_are_created_when_they_run():
    model, created = MODELS["recompute"](), []
    stages, waiting = Stages(model, [], 2), []
    empty_like = part_module._empty_like
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(part_module, "_empty_like", lambda x: created.append(x) or empty_like(x))
        stages.run(lambda stage: waiting.append)
        before = len(created)
        for product in waiting:
            product()
    norms = sum("norm" in name for name in model.parameters)  # their sums are computed at once
    assert (before, len(created)) == (norms + 1, len(model.parameters) + 2)
