"""Tables to options: every fault is reported, with the nearest known name."""

from __future__ import annotations

from typing import Annotated, Literal

import pytest
from pydantic import Field

from hpctrain.core import config
from hpctrain.core.errors import UsageError


@config.options
class Oven:
    degrees: Annotated[int, Field(ge=1)]
    mode: Literal["top", "bottom"] = "top"
    slack: float = 0.5
    trays: list[int] | None = None


@config.options
class Grill:
    gas: bool = True


KINDS = {"oven": Oven, "grill": Grill}

# A table -> the faults that are told, a line each
FAULTS = [
    ({}, ["[kitchen] degrees is missing"]),
    ({"degres": 9}, ["[kitchen] degrees is missing",
                     "unknown key in [kitchen]: 'degres'; did you mean 'degrees'?"]),
    ({"degrees": 9, "xyz": 1}, ["unknown key in [kitchen]: 'xyz'; "
                                "choose one of: degrees, mode, slack, trays"]),
    ({"degrees": 9, "self": 1}, ["unknown key in [kitchen]: 'self'; "]),
    ({"degrees": "9"}, ["[kitchen] degrees: input should be a valid integer, seen '9'"]),
    ({"degrees": True}, ["[kitchen] degrees: input should be a valid integer, seen True"]),
    ({"degrees": 1.0}, ["[kitchen] degrees: input should be a valid integer, seen 1.0"]),
    ({"degrees": 0}, ["[kitchen] degrees: input should be greater than or equal to 1, seen 0"]),
    ({"degrees": 9, "mode": "side"}, ["[kitchen] mode: input should be 'top' or 'bottom', "
                                      "seen 'side'"]),
    ({"degrees": 9, "trays": [1, "2"]}, ["[kitchen] trays.1: input should be a valid integer, "
                                         "seen '2'"]),
    ({"degrees": 0, "slack": "a"}, ["[kitchen] degrees: input should be g", "[kitchen] slack:"]),
]  # fmt: skip


@pytest.mark.parametrize("table, reported", FAULTS)
def test_faults_are_told(table, reported):
    with pytest.raises(UsageError) as error:
        config.read(Oven, table, "kitchen")
    lines = sorted(str(error.value).splitlines())
    assert len(lines) == len(reported)
    assert all(line.startswith(start) for line, start in zip(lines, sorted(reported), strict=True))


def test_what_may_have_been_meant_is_told_before_what_is_missing():
    with pytest.raises(UsageError, match=r"^unknown key .*'degrees'\?\n.* degrees is missing$"):
        config.read(Oven, {"degres": 9}, "kitchen")


def test_what_fits_is_taken_as_it_is():
    observed = config.read(Oven, {"degrees": 9, "slack": 1, "trays": [1]}, "kitchen")
    assert observed == Oven(degrees=9, mode="top", slack=1.0, trays=[1])


@pytest.mark.parametrize(
    "table, reported",
    [
        ({}, "[kitchen] kind is missing; choose one of: oven, grill"),
        ({"kind": "oben"}, "unknown [kitchen] kind 'oben'; did you mean 'oven'?"),
        ({"kind": 3}, "unknown [kitchen] kind '3'; choose one of: oven, grill"),
        (
            {"kind": "grill", "degrees": 3},
            "unknown key in [kitchen]: 'degrees'; choose one of: gas",
        ),
    ],
)
def test_kinds(table, reported):
    with pytest.raises(UsageError) as error:
        config.read_kind(KINDS, table, "kitchen")
    assert str(error.value) == reported


def test_options_made_in_code_are_checked_too():
    with pytest.raises(ValueError, match="greater than or equal to 1"):
        Oven(degrees=0)
