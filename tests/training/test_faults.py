"""[faults]: planted delays take the requested time, in the right place, and change no result."""

from __future__ import annotations

import numpy as np
import pytest
from ranks import on_ranks, run_on

from hpctrain import data, engines, nn, optim
from hpctrain.core.errors import UsageError
from hpctrain.gradients import arena as arenas
from hpctrain.training.faults import FaultsOptions, Slowdown, SlowedReplica, uniform
from hpctrain.training.trainer import Trainer

SEED, STEP = 7, 11
KEY = nn.Key(SEED, STEP, 0)
COMPUTE = [0.2, 0.1, 0.4, 0.05]  # seconds before and after what is not compute: see Timed


class Clock:
    """A clock that only sleeps, and work that says how long it takes, move."""

    def __init__(self, late: float = 0.0):
        self.now, self.late, self.sleeps = 100.0, late, []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now += seconds + self.late


class Timed:
    """A Replica that takes COMPUTE, and whatever its callbacks take."""

    def __init__(self, clock: Clock):
        self.arena, self.clock = arenas.make_arena({"a": (3,), "b": (2,)}, "float64"), clock

    def gradient(self, batch, scale, key, on_ready):
        outside = [lambda: on_ready("b"), lambda: key.sum_over_ranks(np.ones(2)),
                   lambda: on_ready("a"), lambda: None]  # fmt: skip
        for seconds, call in zip(COMPUTE, outside, strict=True):
            self.clock.now += seconds
            call()
        return {"loss": nn.Total(1.5, 3)}


def gradient(options: FaultsOptions, rank: int, clock: Clock) -> list[tuple[str, float]]:
    """Return when the callbacks were called on a slowed replica; each takes 5 seconds."""
    calls = []

    def take_note(name):
        calls.append((str(name), clock.now))
        clock.now += 5

    slowed = SlowedReplica(Timed(clock), Slowdown(options, rank, clock.sleep, clock))
    key = KEY._replace(sum_over_ranks=take_note)
    assert slowed.gradient(None, 1.0, key, take_note) == {"loss": nn.Total(1.5, 3)}
    return calls


JITTER = 1 + 0.5 * uniform(SEED, 1, STEP)
# What is asked, of which rank -> how long its seconds are, and the sleep before it begins
SLEEPS = {
    "factor": ({"slow_rank": 1, "slow_factor": 3}, 1, 3.0, 0.0),
    "another rank": ({"slow_rank": 1, "slow_factor": 3}, 0, 1.0, 0.0),
    "jitter": ({"jitter": 0.5}, 1, JITTER, 0.0),
    "step": ({"step_ms": 20.0}, 0, 1.0, 0.02),
    "step of a slow rank": ({"step_ms": 20.0, "slow_rank": 0, "slow_factor": 3}, 0, 3.0, 0.06),
    "all": ({"step_ms": 20.0, "slow_rank": 1, "slow_factor": 3, "jitter": 0.5}, 1, 3 * JITTER,
            0.06 * JITTER),
    "nothing": ({}, 0, 1.0, 0.0),
}  # fmt: skip


@pytest.mark.parametrize("kind", SLEEPS)
def test_sleeps(kind):
    keys, rank, stretch, before = SLEEPS[kind]
    clock = Clock()
    start = clock.now
    calls = gradient(FaultsOptions(**keys), rank, clock)
    expected = [before, *((stretch - 1) * seconds for seconds in COMPUTE)]
    assert clock.sleeps == pytest.approx([s for s in expected if s > 0])
    # What the callbacks take, the wire or other ranks, is not stretched, and comes after the sleep.
    times = start + before + stretch * np.cumsum(COMPUTE[:-1]) + [0, 5, 10]
    assert [time for _, time in calls] == pytest.approx(times.tolist())
    assert [name for name, _ in calls] == ["b", "[1. 1.]", "a"]


def test_sleeps_that_take_too_long_are_made_up_for():
    clock = Clock(late=0.03)
    start = clock.now
    gradient(FaultsOptions(slow_rank=0, slow_factor=2, step_ms=100), 0, clock)
    late = clock.now - start - 15 - (0.2 + 2 * sum(COMPUTE))
    assert 0 <= late <= 0.03 + 1e-9


def test_random_numbers_belong_to_seed_rank_and_step():
    places = [(seed, rank, step) for seed in range(2) for rank in range(16) for step in range(64)]
    drawn = {place: uniform(*place) for place in places}
    assert {place: uniform(*place) for place in reversed(places)} == drawn
    assert len(set(drawn.values())) == len(places)
    numbers = np.array(list(drawn.values()))
    assert ((numbers >= 0) & (numbers < 1)).all()
    for side in (numbers.reshape(32, 64).mean(axis=0), numbers.reshape(32, 64).mean(axis=1)):
        assert (abs(side - 0.5) < 0.2).all()  # 4 standard deviations of a mean of 32
    assert drawn[1, 3, 5] == pytest.approx(PINNED)


STEPS = 8
CUT = engines.AllReduce(bucket_bytes=64)  # several buckets
PINNED = 0.8604763121240243  # NumPy promises the bits of Philox for good


def fit(world, faults: FaultsOptions, engine=CUT):
    """Return the hash of the parameters, and the seconds of compute on this rank."""
    random = np.random.default_rng(0)
    y = np.arange(40) % 3
    train = data.Dataset(random.normal(y[:, None], 1.0, (40, 4)).astype(np.float32), y)
    layers = {"in": nn.Linear(5), "norm": nn.BatchNorm(), "relu": nn.ReLU(), "out": nn.Linear(3)}
    trainer = Trainer(
        nn.Model(layers, (4,)), optim.sgd(0.1, 0.9), engine, world=world, faults=faults
    )
    summary = trainer.fit(train, steps=STEPS, batch=9)
    compute_s = trainer.engine.times.compute_s
    trainer.close()
    return summary["params_sha256"], compute_s


SLOW = FaultsOptions(slow_rank=0, slow_factor=4.0, jitter=0.5, step_ms=1.0)


@on_ranks(1, 2, 3)
def test_faults_take_time_and_change_nothing(ranks):
    plain = ranks(fit, FaultsOptions())
    slowed = ranks(fit, SLOW)
    assert [item[0] for item in plain] == [item[0] for item in slowed]
    assert all(item[1] >= STEPS * SLOW.step_ms / 1e3 for item in slowed)  # it counts as compute


# What does not fit two ranks -> what is said
REFUSED = {
    "rank": (
        {"slow_rank": 2, "slow_factor": 3.0},
        "expected less than 2, the number of ranks, seen 2",
    ),
    "no factor": ({"slow_rank": 1}, "needs both of slow_rank and slow_factor, or neither; seen"),
    "no rank": ({"slow_factor": 3.0}, "seen slow_rank None, slow_factor 3.0"),
}


@pytest.mark.parametrize("wrong", REFUSED)
def test_refused(wrong):
    keys, message = REFUSED[wrong]

    def body(world):
        with pytest.raises(UsageError, match=message):
            fit(world, FaultsOptions(**keys))

    run_on("threads", 2, body)


def test_a_server_cannot_be_slow():
    def body(world):
        with pytest.raises(UsageError, match=r"^\[faults\] .* seen 2, which is a server"):
            fit(world, FaultsOptions(slow_rank=2, slow_factor=3.0), "ps-sync")

    run_on("threads", 3, body)


@pytest.mark.parametrize("keys", [{"slow_rank": -1}, {"slow_factor": 0.9}, {"jitter": -0.1},
                                  {"jitter": float("nan")}, {"step_ms": -1.0},
                                  {"step_ms": float("inf")}, {"slow_ranks": 1}])  # fmt: skip
def test_values_are_checked(keys):
    with pytest.raises(UsageError):
        FaultsOptions(**keys)
