"""The last sentence of a hang's report, for one straggler, several, and none that can be known."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpctrain.watch import Call, Snapshot, make_report

NOW = 1000.0
LINE = "train.py:9 main, ring.py:57 ring"
DEAD, COMPUTES, ENDS, ABSENT = "dead", "computes", "ends", "absent"


def rank(peer: int | str, line: str = LINE, operation: str = "sendrecv") -> Snapshot | None:
    """Return the record of a rank that waits for `peer`, or of one that does what is named."""
    if peer == ABSENT:
        return None
    is_waiting = isinstance(peer, int)
    call = Call("main", operation, 5, peer if is_waiting else 0, 64, NOW - 10, is_waiting)
    heartbeat = NOW - 60 * (peer == DEAD)
    return Snapshot(0, 0, 7, "n0", heartbeat, 5, line, (call,), has_ended=peer == ENDS)


ELSE = ("train.py:12 main", "barrier")
#: the peers of ranks 0, 1, ...: the sentence
ROWS = {
    "one is dead": (
        [rank(3), rank(DEAD), rank(1), rank(2)],
        "3 of 4 ranks wait at sendrecv (train.py:9 main); rank 1 is where the bug is "
        "(stopped or dead)",
    ),
    "other lines of one collective": (
        [rank(-1), rank(COMPUTES), rank(1, "train.py:9 main, ring.py:61 ring")],
        "2 of 3 ranks wait at sendrecv (train.py:9 main); rank 1 is where the bug is "
        "(alive, computing, perhaps only slow)",
    ),
    "several": (
        [rank(-1), rank(ENDS), rank(-1), rank(DEAD)],
        "2 of 4 ranks wait at sendrecv (train.py:9 main); ranks 1,3 are where the bug is "
        "(has ended its script, stopped or dead)",
    ),
    "another that nobody waits for": (
        [rank(1), rank(DEAD), rank(COMPUTES)],
        "1 of 3 ranks waits at sendrecv (train.py:9 main); rank 1 is where the bug is "
        "(stopped or dead); rank 2 does not wait either",
    ),
    "two wait for each other": (
        [rank(1), rank(0), rank(COMPUTES)],
        "2 of 3 ranks wait at sendrecv (train.py:9 main); which rank the bug is on cannot be "
        "known: compare peers, lengths and the network; rank 2 does not wait either",
    ),
    "one in another call": (
        [rank(-1), rank(-1, *ELSE), rank(-1)],
        "2 of 3 ranks wait at sendrecv (train.py:9 main), rank 1 at barrier (train.py:12 main); "
        "which rank the bug is on cannot be known: the calls differ",
    ),
    "no record": (
        [rank(-1), rank(ABSENT), rank(-1)],
        "2 of 3 ranks wait at sendrecv (train.py:9 main); where the bug is cannot be known: see "
        "rank 1 (no record)",
    ),
    "nobody waits": (
        [rank(COMPUTES), rank(DEAD)],
        "0 of 2 ranks wait; where the bug is cannot be known",
    ),
    "many places": (
        [rank(-1, f"train.py:{line} main") for line in range(5)],
        "1 of 5 ranks waits at sendrecv (train.py:0 main), rank 1 at sendrecv (train.py:1 main), "
        "rank 2 at sendrecv (train.py:2 main), others at 2 more; which rank the bug is on cannot "
        "be known: the calls differ",
    ),
}


@pytest.mark.parametrize("case", ROWS)
def test_the_last_sentence_of_a_report(case):
    records, sentence = ROWS[case]
    snapshots = [
        replace(record, rank=number, size=len(records))
        for number, record in enumerate(records)
        if record is not None
    ]
    assert make_report(snapshots, NOW, 300).text.splitlines()[-1] == sentence
