"""Values between commas: how a setting is cut, and what the members of a sweep are called."""

from __future__ import annotations

import pytest

from hpctrain.core.config import sweep
from hpctrain.core.errors import UsageError

# The text of a setting -> its values
VALUES = {
    "0.1": ["0.1"],
    "0.1,0.3": ["0.1", "0.3"],
    " 1 , 2 ": ["1", "2"],
    "[1,2]": ["[1,2]"],
    "[1,2],[3]": ["[1,2]", "[3]"],
    "[[1,2],[3]],[]": ["[[1,2],[3]]", "[]"],
    '"a,b"': ['"a,b"'],
    '"a,b",c': ['"a,b"', "c"],
    "'a,b','c'": ["'a,b'", "'c'"],
    '"a\\",b",c': ['"a\\",b"', "c"],
    "{a=1,b=2}": ["{a=1,b=2}"],
    "it's,b": ["it's", "b"],
    "a[,b": ["a[,b"],
    "": [""],
}


@pytest.mark.parametrize("text", VALUES)
def test_a_text_is_cut_at_commas_outside_of_brackets_and_quotes(text):
    assert sweep.split_values(text) == VALUES[text]


# settings -> those of one value, and the names of members
MEMBERS = {
    ("a.x=1",): (("a.x=1",), [""]),
    ("a.x=1,2", "b.y=3"): (("b.y=3",), ["x=1", "x=2"]),
    ("a.x=1,2", "b.y=c,d"): ((), ["x=1_y=c", "x=1_y=d", "x=2_y=c", "x=2_y=d"]),
    ("a.x=1,2", "b.x=3,4"): ((), [f"a.x={a}_b.x={b}" for a in (1, 2) for b in (3, 4)]),
    ("a.x=1,2", "a.x=3"): (("a.x=3",), [""]),
    ("a.x=1", "a.x=2,3"): ((), ["x=2", "x=3"]),
    ("a.x=[1,2],[3]",): ((), ["x=-1-2-", "x=-3-"]),
    ("a.x=b/c,b-c",): ((), ["0001_x=b-c", "0002_x=b-c"]),
    ("..a=1,2",): ((), ["a=1", "a=2"]),
    ("run.metrics=f1,auc",): (("run.metrics=f1,auc",), [""]),
    ("log.to=csv,",): (("log.to=csv,",), [""]),
    ('run.metrics=["f1"],["auc"]',): ((), ["metrics=-f1-", "metrics=-auc-"]),
    ("no setting",): (("no setting",), [""]),
}  # fmt: skip


@pytest.mark.parametrize("settings", MEMBERS, ids=" ".join)
def test_members_are_named_after_their_values(settings):
    axes = sweep.read_axes(settings)
    assert (axes.fixed, sweep.name_members(axes.combine())) == MEMBERS[settings]


def test_long_names_are_cut_and_stay_different():
    names = sweep.name_members([{"a.x": "9" * 300 + str(i)} for i in range(3)])
    assert len({*names}) == 3 and max(map(len, names)) == 100


REFUSED = {
    "a.x=1,": "seen value 2 of 2 empty",
    "a.x=,": "seen value 1 of 2 empty",
    "a.x=1,,2": "seen value 2 of 3 empty",
    "a.x=" + ",".join(map(str, range(1001))): "at most 1,000 members, seen 1,001",
}


@pytest.mark.parametrize("setting", REFUSED, ids=lambda text: text[:9])
def test_refusals(setting):
    with pytest.raises(UsageError, match=REFUSED[setting]):
        sweep.read_axes([setting]).combine()
