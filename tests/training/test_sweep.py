"""The members of a sweep of a recipe: each is checked before any starts."""

from __future__ import annotations

import logging
from functools import partial

import pytest

from hpctrain.core.config.sweep import NAME_LISTS
from hpctrain.core.errors import UsageError
from hpctrain.training import recipe
from hpctrain.training.sweep import read_members

load = partial(recipe.load, "digits")


def test_a_member_is_the_run_of_its_settings():
    settings = ["run.epochs=2", "optimizer.rate=0.1,0.3", "model.widths=[64,8,10],[64,16,10]"]
    members = read_members(settings, load)
    assert [member.spec.optimizer.rate for member in members] == [0.1, 0.1, 0.3, 0.3]
    assert {member.spec.run.epochs for member in members} == {2}
    for member in members:
        assert load([*member.settings]).sha256 == member.spec.sha256
    assert read_members(["run.epochs=2", "model.widths=[64,8,10]"], load) == []


REFUSED = {
    "optimizer.rate=0.1,abc": r"optimizer.rate=abc: \[optimizer\] rate: input should be a valid",
    "optimizer.rte=0.1,0.2": r"unknown key in \[optimizer\]: 'rte'; did you mean 'rate'",
    "optimiser.rate=0.1,0.2": "unknown table 'optimiser'; did you mean 'optimizer'",
    "optimizer.rate=0.1,1e-1": "the same: optimizer.rate=0.1 and optimizer.rate=1e-1",
    "run.metrics=[1],[2]": r"run.metrics=\[1\]: \[run\] metrics.0",
    "optimizer.batch=128,2": "optimizer.batch=2: .*4 workers",
    "run.seed=" + ",".join(map(str, range(1001))): "at most 1,000 members",
}


@pytest.mark.parametrize("setting", REFUSED, ids=lambda text: text[:24])
def test_a_member_that_is_refused_is_named_by_its_values(setting):
    with pytest.raises(UsageError, match=REFUSED[setting]):
        read_members([setting], load, ranks=4)


# A text with a comma -> whether it was one valid value
TEXTS = {"run.name=a,b": True, "model.init=a,b": True, "optimizer.rate=0.1,0.2": False}


@pytest.mark.parametrize("setting", TEXTS)
def test_a_text_with_a_comma_that_is_now_a_sweep_is_announced(setting, caplog):
    caplog.set_level(logging.INFO)
    assert len(read_members([setting], load)) == 2
    assert "a sweep of 2 members over " in caplog.text
    assert ("stands in quotes" in caplog.text) == TEXTS[setting]


@pytest.mark.parametrize("key", NAME_LISTS)
def test_names_with_commas_stay_one_list(key):
    names = {"run.metrics": "f1,auc", "log.to": "csv,tensorboard"}[key]
    assert read_members([f"{key}={names}"], load) == []
    assert load([f"{key}={names}"]).tables[key.split(".")[0]][key.split(".")[1]] == names
