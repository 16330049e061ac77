"""The benchmark of a link: what arrives, which ranks, what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from ranks import on_ranks, run_on

from hpctrain.bench import p2p
from hpctrain.errors import UsageError

ASKED = {"ranks": None, "iterations": 2, "warm_up": 0, "json": None, "plot": None}


def asked(sizes="1B,4KiB,70000B", **changes):
    return p2p.check(sizes, **{**ASKED, **changes})


@on_ranks(2, 3, mpi=(2, 3))
def test_rows_of_both_ways(ranks):
    for rows in ranks(lambda world: p2p.run(world, asked())):
        assert [row["algorithm"] for row in rows] == ["ping-pong", "one-way"] * 3
        assert [row["bytes"] for row in rows[::2]] == [1, 4096, 70000]
        assert all(row["correct"] and (row["from"], row["to"]) == (0, 1) for row in rows)


def test_other_ranks():
    for rows in run_on("threads", 3, lambda world: p2p.run(world, asked("4B", ranks="2,0"))):
        assert {(row["from"], row["to"], row["correct"]) for row in rows} == {(2, 0, True)}


def test_a_message_that_goes_wrong_is_seen():
    def body(world):
        ends, x = p2p.Ends(world.link, 0, 1), np.zeros(100, np.uint8)

        def damaged():
            p2p._window(ends, x, 2)()
            x[world.rank * 50] ^= world.rank

        return p2p._right(ends, x, damaged)

    assert run_on("threads", 2, body) == [False, False]


REFUSED = {
    "one": ({"ranks": "1"}, "--ranks: expected two different ranks such as 0,1, seen '1'"),
    "same": ({"ranks": "1,1"}, "seen '1,1'"),
    "none": ({"ranks": "0,7"}, "--ranks: expected ranks below 2, seen 7"),
}


@pytest.mark.parametrize("wrong", REFUSED)
def test_refused(wrong):
    changes, message = REFUSED[wrong]
    with pytest.raises(UsageError) as error:
        run_on("threads", 2, lambda world: p2p.run(world, asked(**changes)))
    assert message in str(error.value)


def test_alone_there_is_no_link():
    with pytest.raises(UsageError, match="p2p needs two ranks"):
        run_on("threads", 1, lambda world: p2p.run(world, asked()))
