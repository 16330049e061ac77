"""Lost ranks on links between threads: every wait ends, agreements are uniform, others shrink."""

from __future__ import annotations

import threading
from functools import cache

import numpy as np
import pytest

from hpctrain.collectives.ring import ring
from hpctrain.core.errors import LostRankError
from hpctrain.transport.threads.ranks import run_ranks
from hpctrain.world import over_threads
from hpctrain.world.job import Job, fill_places, min_ranks_requested, spares_requested
from hpctrain.world.world import World

STEPS = 4


def steps_of_survivors(world: World, agree: bool = True) -> tuple[int, list[tuple[int, int]]]:
    """Return the steps done, and at each loss the step and the number of ranks left."""
    step, losses = 0, []
    while step < STEPS:
        try:
            x = np.full(7, 1.0)
            ring(world.main, x, np.add)
            world.barrier()
            if agree:
                world.link.endpoint.survivors.agree()
            assert x[0] == world.size
            step += 1
        except LostRankError:
            while True:
                try:
                    world.membership.renew()
                    break
                except LostRankError:
                    pass
            losses.append((step, world.size))
    return step, losses


@cache
def calls_before() -> int:
    """Return the calls of a rank's links until its World is made."""
    all_counted = threading.Barrier(4)  # who ends is lost: none may end while another calls

    def body(link):
        over_threads(link)
        calls = link.hub.job.calls[link.rank]
        all_counted.wait(60)
        return calls

    return max(run_ranks(4, body, 10, kills={0: 10**9}))


def run(kills: dict[int, int], **options: bool) -> list:
    """Return the results of the ranks that are left of four; kills count from the first step on."""

    def body(link):
        world = over_threads(link)
        return steps_of_survivors(world, **options)

    kills = {rank: calls_before() + call for rank, call in kills.items()}
    return [result for result in run_ranks(4, body, 10, kills) if result is not None]


@pytest.mark.parametrize("call", range(20, 90, 3))
def test_survivors_of_a_kill_in_any_call_take_the_same_steps(call):
    results = run({call % 4: call})
    assert len({str(result) for result in results}) == 1
    assert {step for step, _ in results} == {STEPS}


@pytest.mark.parametrize("call", range(20, 90, 7))
def test_two_kills_at_once_and_in_a_recovery(call):
    results = run({call % 4: call, (call + 1) % 4: call + call % 9})
    assert len({str(result) for result in results}) == 1


def test_without_agreements_steps_differ():
    """The planted error: a rank that leaves a barrier counts a step that another does not."""
    results = [run({call % 4: call}, agree=False) for call in range(20, 80)]
    assert any(len({str(rank) for rank in ranks}) > 1 for ranks in results)


# members, ranks that are left, unit -> new members
PLACES = {
    "nobody is lost": ((0, 1, 2), (0, 1, 2), 1, (0, 1, 2)),
    "a spare takes the place": ((0, 1, 2), (0, 2, 3, 4), 1, (0, 3, 2)),
    "two places": ((0, 1, 2), (2, 3, 4), 1, (3, 4, 2)),
    "no spare": ((0, 1, 2), (1, 2), 1, (1, 2)),
    "too few spares": ((0, 1, 2, 3), (1, 2, 4), 1, (4, 1, 2)),
    "whole replicas": ((0, 1, 2, 3), (0, 2, 3), 2, (0, 2)),
    "no whole replica": ((0, 1), (1,), 2, ()),
    "a lost spare": ((0, 1), (0, 1), 1, (0, 1)),
    "an earlier spare is lost": ((0, 3, 2), (0, 2, 4), 1, (0, 4, 2)),
}


@pytest.mark.parametrize("members, left, unit, expected", PLACES.values(), ids=PLACES)
def test_places_of_lost_ranks(members, left, unit, expected):
    assert fill_places(members, left, unit) == expected


@pytest.mark.parametrize("text", ["-1", "x", "4", "1.5"])
def test_variables_are_checked(text):
    for name, read in (("HPCTRAIN_SPARES", spares_requested),):
        with pytest.raises(ValueError, match=f"{name}: expected a number from 0 to 3, seen"):
            read({name: text}, 4)
    assert (spares_requested({}, 4), min_ranks_requested({}, 4)) == (0, 1)


def test_a_spare_sleeps_until_a_note_comes():
    all_made = threading.Barrier(3)  # who ends is lost: none may end while another calls

    def body(link):
        world = over_threads(link, spares=1)
        all_made.wait(60)
        job = world.membership.job
        assert isinstance(job, Job) and (job.spares, world.size) == ([2], 2)
        assert (world.is_spare, world.rank) == (link.rank == 2, link.rank)
        assert isinstance(world, World)
        own = world.membership.world  # of a spare alone
        assert (own.rank, own.size) == ((0, 1) if world.is_spare else (link.rank, 2))
        if world.is_spare:
            return job.await_note()
        job.dismiss_spares(b"the end")
        return None

    assert run_ranks(3, body, 10, kills={0: 10**6})[2] == b"the end"
