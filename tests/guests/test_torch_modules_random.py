"""Random numbers of a forward pass: of samples where they can be, and announced where not.

tests/guests/modules.py compares passes with all kinds of them on 1, 2 and 3 ranks.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from guests.plain import CLASSES, FEATURES, difference, make_samples, train_on
from guests.test_torch_modules import make_mlp
from ranks import run_on
from torch import nn

import hpctrain as ht
from hpctrain.nn.layer import Key
from hpctrain.torch.modules.draws import DRAWS, SampleDraws, gradient_key

pytestmark = pytest.mark.either


class Drawing(nn.Module):
    """Keeps the numbers that `draw` returns in each forward pass from number `begin` on."""

    def __init__(self, draw, begin=0):
        super().__init__()
        self.linear, self.draw, self.begin = nn.Linear(FEATURES, CLASSES).double(), draw, begin
        self.drawn = []

    def forward(self, x):
        if self.training:
            is_due = len(self.drawn) >= self.begin
            self.drawn.append(self.draw(x).clone() if is_due else None)
        return self.linear(x)


def draw_for_all(x):
    return torch.rand(())


def draw_for_each(x):
    return nn.functional.dropout(torch.ones_like(x))


def train(module, **options):
    def fit(world):
        with ht.torch.Trainer(module, "sgd", world=world) as trainer:
            trainer.fit(make_samples(), steps=4, batch=8, **options)
            return trainer.replica._draws.is_on

    return run_on("threads", 1, fit)[0]


def test_a_draw_for_the_whole_batch_is_of_the_piece_repeats_and_is_announced_once(caplog):
    first, second = Drawing(draw_for_all), Drawing(draw_for_all)
    for module in (first, second):
        assert train(module, micro_batches=2)
    assert len({x.item() for x in first.drawn}) == 8
    assert torch.equal(torch.stack(first.drawn), torch.stack(second.drawn))
    assert caplog.text.count("random numbers of aten.rand.default are of each rank") == 2


def test_a_draw_for_each_sample_does_not_depend_on_the_pieces(caplog):
    whole, parts = Drawing(draw_for_each), Drawing(draw_for_each)
    assert train(whole) and train(parts, micro_batches=2)
    assert torch.equal(torch.cat(whole.drawn), torch.cat(parts.drawn))
    assert 0.3 < (torch.cat(whole.drawn) == 0).double().mean() < 0.7
    assert "random numbers" not in caplog.text


@pytest.mark.parametrize("draws", [True, False])
def test_a_module_is_watched_from_its_first_draw_on(caplog, draws):
    """Its first pass has none: so the pass that has is announced, and the next ones are right."""
    reference, late = Drawing(draw_for_each), Drawing(draw_for_each, begin=2 if draws else 9)
    train(reference)
    assert train(late) == draws
    assert ("the first pass that draws any" in caplog.text) == draws
    if draws:
        assert torch.equal(reference.drawn[3], late.drawn[3])
        assert not torch.equal(reference.drawn[2], late.drawn[2])


def test_compiled_modules_are_not_watched_but_announced(caplog):
    compiled = torch.compile(Drawing(draw_for_each), backend="eager")
    assert not train(compiled)
    assert "random numbers of compiled code are of each rank" in caplog.text


def test_dropout_layers_need_no_watch(caplog):
    assert not train(make_mlp(nn.Dropout(0.5)))
    assert "random numbers" not in caplog.text


def test_a_layer_of_dropout_in_place_drops_in_place():
    module, plain = (make_mlp(nn.Dropout(0.5, inplace=inplace)) for inplace in (True, False))
    data = make_samples()
    assert difference(*(train_on(1, m, data)[0] for m in (module, plain))) == 0


#: name of the operator: (draws n x 4000 numbers, mean, standard deviation)
MOMENTS = {
    "bernoulli": (lambda x: torch.bernoulli(torch.full_like(x, 0.2)), 0.2, 0.4),
    "bernoulli_": (lambda x: torch.empty_like(x).bernoulli_(0.2), 0.2, 0.4),
    "rand": (lambda x: torch.rand(x.shape), 0.5, 12**-0.5),
    "rand_like": (torch.rand_like, 0.5, 12**-0.5),
    "uniform_": (lambda x: torch.empty_like(x).uniform_(1, 3), 2.0, 2 * 12**-0.5),
    "randn": (lambda x: torch.randn(x.shape), 0.0, 1.0),
    "randn_like": (torch.randn_like, 0.0, 1.0),
    "normal": (lambda x: torch.normal(torch.full_like(x, 3), torch.full_like(x, 2)), 3.0, 2.0),
    "normal_": (lambda x: torch.empty_like(x).normal_(3, std=2), 3.0, 2.0),
    "exponential_": (lambda x: torch.empty_like(x).exponential_(2.0), 0.5, 0.5),
    "native_dropout": (lambda x: torch.native_dropout(torch.ones_like(x), 0.2, True)[0], 1.0, 0.5),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", MOMENTS)
def test_numbers_have_the_distribution_of_the_operator(name, dtype):
    draw, mean, deviation = MOMENTS[name]
    assert MOMENTS.keys() == DRAWS.keys()

    def numbers(first, rows):
        with gradient_key(Key(3, 2, first), rows), SampleDraws(is_compiled=False):
            return draw(torch.zeros(rows, 4000, dtype=dtype)).double().numpy()

    drawn = numbers(0, 5)
    assert np.array_equal(drawn[3:], numbers(3, 2)) and not np.array_equal(drawn[0], drawn[1])
    assert abs(drawn.mean() - mean) < 5 * deviation / 20000**0.5
    assert drawn.std() == pytest.approx(deviation, rel=0.05)
