"""Agreement of ranks: what each call sends, what it raises, and how it ends when a rank is lost."""

from __future__ import annotations

import math

import pytest
from ranks import on_ranks

from hpctrain.collectives.small_messages import gather_distinct
from hpctrain.core.errors import HpctrainError, LostRankError, SaveError, UsageError
from hpctrain.transport.paths import RankPlace
from hpctrain.transport.threads.ranks import run_ranks
from hpctrain.world.agreement import AgreeingRanks

SIZES = (1, 2, 3, 8, 13, 64)
HEAD = 128  #: bytes of a length and the first 120 bytes of a text
LONG = "x" * 1000


def agreeing(link) -> AgreeingRanks:
    return AgreeingRanks(link, tuple(RankPlace(f"host{rank}") for rank in range(link.size)))


def sent_by(link, call):
    """Return the messages and bytes that `call()` sends on `link`."""
    traffic = link.endpoint.traffic
    messages, nbytes = traffic.messages_sent, traffic.bytes_sent
    call()
    return traffic.messages_sent - messages, traffic.bytes_sent - nbytes


def steps(size):
    return math.ceil(math.log2(size))


def children(rank, size):
    """Return the number of children of `rank` in the binomial tree of rank 0."""
    bits = [1 << i for i in range(steps(size))]
    return sum(rank % (2 * bit) == 0 and rank + bit < size for bit in bits)


# The call on one rank, its messages, and its bytes, of rank r of p
CALLS = {
    "on_all_ranks": (
        lambda ranks: ranks.on_all_ranks(lambda: LONG),
        lambda r, p: steps(p),
        lambda r, p: 8 * steps(p),
    ),
    "must_agree": (
        lambda ranks: ranks.must_agree(LONG, "it"),
        lambda r, p: steps(p),
        lambda r, p: 32 * steps(p),
    ),
    "from_first": (
        lambda ranks: ranks.from_first(lambda: "short"),
        lambda r, p: children(r, p),
        lambda r, p: HEAD * children(r, p),
    ),
    "from_first, long": (
        lambda ranks: ranks.from_first(lambda: LONG),
        lambda r, p: 2 * children(r, p),
        lambda r, p: (HEAD + len(f'[["{LONG}"], ""]')) * children(r, p),
    ),
    "gather": (
        lambda ranks: ranks.gather("short"),
        lambda r, p: steps(p),
        lambda r, p: HEAD * (p - 1),
    ),
    "gather, long": (
        lambda ranks: ranks.gather(LONG if ranks.link.rank == 0 else ""),
        lambda r, p: 2 * steps(p),
        lambda r, p: (HEAD + len(LONG)) * (p - 1),
    ),
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", CALLS)
def test_messages_and_bytes(name, size):
    call, messages, nbytes = CALLS[name]

    sent = run_ranks(size, lambda link: sent_by(link, lambda: call(agreeing(link))))
    assert sent == [(messages(r, size), nbytes(r, size)) for r in range(size)]


def fail_on_first(ranks, count):
    """Raise an error of its own on each of the first `count` ranks."""

    def act():
        if ranks.link.rank < count:
            raise SaveError(f"text {ranks.link.rank}")

    ranks.on_all_ranks(act)


def differ_on_last(ranks, count):
    """Give a text of its own on each of the last `count` ranks."""
    rank = ranks.link.rank
    ranks.must_agree(f"text {rank * (rank >= ranks.link.size - count)}", "it")


# The call; bytes per exchange of its votes and digests, and texts before those of other ranks;
# the error, of texts i .. i + n
FAULTS = {
    "on_all_ranks": (
        fail_on_first, 8 + 32, 0,
        lambda i, n: "\n".join(f"rank {r} on host{r}: text {r}" for r in range(n))
        + "\nand other ranks" * (n == 8),
    ),
    "must_agree": (
        differ_on_last, 32, 1,
        lambda i, n: "it must be the same on all ranks; rank 0 has text 0, but "
        + "; ".join(f"rank {r} has text {r}" for r in range(i, i + n)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("size, count", [(2, 1), (3, 2), (13, 12)])
@pytest.mark.parametrize("name", FAULTS)
def test_only_the_texts_of_eight_ranks_travel(name, size, count):
    call, exchanged_bytes, texts_before, make_text = FAULTS[name]
    named = min(count, 8)

    def body(link):
        def act():
            with pytest.raises(HpctrainError) as error:
                call(agreeing(link), count)
            assert str(error.value) == make_text(size - count, named)

        return sent_by(link, act)[1]

    # One for each text, and one whether ranks have more; must_agree does not ask after eight.
    votes = named + (named < 8 or name == "on_all_ranks")
    assert sum(run_ranks(size, body)) == (
        (exchanged_bytes + 8 * votes) * steps(size) * size
        + HEAD * (size - 1) * (texts_before + named)
    )


@on_ranks(1, 3, mpi=(1, 3))
def test_a_fault_of_the_first_rank_is_raised_on_all(ranks):
    def body(world):
        def act():
            assert world.rank == 0, "called on another rank"
            raise SaveError("no space")

        with pytest.raises(HpctrainError) as error:
            world.from_first(act)
        kind = SaveError if world.rank == 0 else UsageError
        host = f"rank 0 on {world.hosts[0]}: " if world.size > 1 else ""
        assert (type(error.value), str(error.value)) == (kind, f"{host}no space")
        assert world.from_first(lambda: [world.rank, None, "a"]) == [0, None, "a"]

    ranks(body)


def test_names_that_are_not_utf_8_are_told():
    names = ["a", "\udcff", "a"]  # as os.listdir returns them
    found = run_ranks(3, lambda link: gather_distinct(link, names[link.rank]))
    assert found == [names[:2]] * 3


# Of three ranks, rank 1 is killed in its n-th call of the link
@pytest.mark.parametrize("calls", [1, 2, 3])
@pytest.mark.parametrize("name", [*CALLS, *FAULTS])
def test_no_rank_waits_for_a_lost_one(name, calls):
    def body(link):
        ranks = agreeing(link)
        try:
            if name in FAULTS:
                FAULTS[name][0](ranks, 1)
            else:
                CALLS[name][0](ranks)
            link.barrier()  # a rank may have what it needs before the other is lost
        except LostRankError:
            return "lost"

    assert run_ranks(3, body, 10, kills={1: calls}) == ["lost", None, "lost"]
