"""The World: collectives, node memory and barriers of all ranks."""

from __future__ import annotations

import os
from threading import Timer

import pytest
from ranks import on_ranks
from tables import rows_of

from hpctrain import world as worlds
from hpctrain.core.errors import HereError, HpctrainError, SaveError, StoppedError, UsageError
from hpctrain.transport import abort


def refusal(function):
    """Return kind and text of the error that `function()` raises."""
    with pytest.raises(HpctrainError) as error:
        function()
    return type(error.value), str(error.value)


@on_ranks(1, 2, 3, 5, mpi=(1, 4))
def test_gather(ranks):
    texts = [f"{'ä' * rank}|" for rank in range(ranks.size)]
    assert all(
        observed == texts for observed in ranks(lambda world: world.gather(texts[world.rank]))
    )


@on_ranks(1, 2, 4, mpi=(1, 4))
def test_together_returns_what_each_rank_made(ranks):
    def body(world):
        return world.on_all_ranks(lambda: world.rank) == world.rank

    assert all(ranks(body))


# Who fails, with which error -> the error of those that failed, that of the others
FAULTS = [
    ([1], SaveError, SaveError, UsageError),
    ([0, 2], UsageError, UsageError, UsageError),
]


@on_ranks(3, mpi=(3,))
@pytest.mark.parametrize("failing, kind, own, rest", FAULTS)
def test_together_tells_all_who_failed(ranks, failing, kind, own, rest):
    def body(world):
        def act():
            if world.rank in failing:
                raise kind(f"fault {world.rank}")

        observed, text = refusal(lambda: world.on_all_ranks(act))
        assert observed is (own if world.rank in failing else rest)
        assert text == "\n".join(f"rank {r} on {world.hosts[r]}: fault {r}" for r in failing)

    ranks(body)


@on_ranks(1, 3, mpi=(1, 3))
def test_together_says_once_what_all_have_seen(ranks):
    def body(world):
        def act():
            raise UsageError("no such file")

        return refusal(lambda: world.on_all_ranks(act))

    assert all(observed == (UsageError, "no such file") for observed in ranks(body))


@on_ranks(3, mpi=(3,))
@pytest.mark.parametrize(
    "message, reported",
    [
        ("aaa", None),
        ("aba", "rank 0 has a, but rank 1 has b"),
        ("abc", "rank 0 has a, but rank 1 has b; rank 2 has c"),
    ],
)
def test_must_agree(ranks, message, reported):
    def body(world):
        def act():
            world.must_agree(message[world.rank], "it")

        if reported is None:
            return act()
        text = f"it must be the same on all ranks; {reported}"
        assert refusal(act) == (UsageError, text)

    ranks(body)


ENDS = """
import hpctrain as ht
from hpctrain.core.errors import {0}
ht.init()
raise {0}("as it was to be")
"""


@pytest.mark.processes
@pytest.mark.parametrize("error, code", [("StoppedError", 75), ("TrainingError", 3)])
def test_an_error_nobody_catches_gives_a_script_its_exit_code(start, error, code):
    ended = start("-c", ENDS.format(error)).finish()
    assert ended.returncode == code, ended.stderr
    assert ended.stderr.count(": as it was to be") == 1


#: error that three ranks raise: the tracebacks that are printed
TRACEBACKS = {"UsageError": 1, "StoppedError": 0, "TrainingError": 1, "HpctrainError": 3}


@pytest.mark.sample(1)
@pytest.mark.processes
@pytest.mark.parametrize("error", rows_of(TRACEBACKS, "UsageError", "StoppedError"))
def test_an_error_of_all_ranks_is_reported_by_one(start, error):
    ended = start("-c", ENDS.format(error), ranks=3).finish()
    assert ended.stderr.count("Traceback") == TRACEBACKS[error], ended.stderr
    if error == "StoppedError":
        assert ended.returncode == StoppedError.exit_code and "MPI_A" not in ended.stderr
        assert ended.stderr.count("hpctrain: as it was to be") == 1


RANK_2 = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
RANK_3 = RANK_2 | {"PMI_RANK": "3", "MPI_LOCALRANKID": "1"}
OPEN_MPI = {f"OMPI_COMM_WORLD_{n}": v
            for n, v in {"RANK": "3", "SIZE": "4", "LOCAL_RANK": "1"}.items()}  # fmt: skip
# what the launcher told a rank, what it refuses -> whether it says so, beside rank 0
SPEAKERS = {
    "rank 0": ({}, UsageError("a typo"), "[before MPI was started]"),
    "another rank": (RANK_2, UsageError("a typo"), ""),
    "the first of a host": (RANK_2, HereError("no GPU"), "[rank 2 on "),
    "another of a host": (RANK_3, HereError("no GPU"), ""),
    "whom Open MPI let live": (OPEN_MPI, UsageError("a typo"), "[rank 3 on "),
    "a bug": (RANK_3, KeyError("no such name"), "[before MPI was started]"),
}  # fmt: skip


@pytest.mark.parametrize("case", SPEAKERS)
def test_who_says_what_went_wrong_before_mpi(case, monkeypatch, capsys):
    reported, error, begins = SPEAKERS[case]
    for name in (*RANK_2, *OPEN_MPI, "SLURM_STEP_ID", "SLURM_STEPID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in reported.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("hpctrain.world.process._world", None)
    waited = []
    monkeypatch.setattr(abort.time, "sleep", waited.append)
    worlds.fail_alone(error)
    message = capsys.readouterr().err
    assert message.startswith(begins) and bool(message) == bool(begins)
    assert any(waited) == (bool(reported) and case != "a bug")  # rank 0 is to be the first


@pytest.mark.parametrize("delay_s", [0.2, None])
def test_a_report_waits_until_the_launcher_has_read_it(delay_s, monkeypatch):
    """MPICH's launcher drops what it has not read when a rank aborts; None: it reads nothing."""
    reader, writer = os.pipe()
    monkeypatch.setattr(abort, "OUTPUT_S", 0.5)
    received = []
    if delay_s is not None:
        read = Timer(delay_s, lambda: received.append(os.read(reader, 1000)))
        read.start()
    with os.fdopen(reader), os.fdopen(writer, "w") as pipe:
        monkeypatch.setattr("sys.stderr", pipe)
        abort.report(ValueError("a reason"), "rank 0")
        assert len(received) == (delay_s is not None)
