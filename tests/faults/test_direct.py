"""A rank is killed or stopped inside `direct`, while its neighbours wait for it."""

from __future__ import annotations

import pytest
from jobs import MARK, memory_files, wait_until_removed
from tables import rows_of

pytestmark = pytest.mark.processes

SUMS = """
import os, signal, sys
from pathlib import Path
import numpy as np
import hpctrain as ht
from hpctrain.collectives.direct import direct

def springs(a, b, out):
    if world.rank == 1 and out[0] == 2:
        os.kill(os.getpid(), getattr(signal, sys.argv[1]))
    np.add(a, b, out=out)

from hpctrain.world import watched
world = ht.init()
x = world.zeros(100_000)
with watched(world, Path(sys.argv[2]), timeout_s=1):
    for step in range(2):
        world.threads.record.step = step  # the limit does not hold in the first
        x[:] = 1 + step
        world.link.barrier()
        print("step", step, flush=True)
        direct(world.main, x, springs)
        world.link.barrier()
print("never comes here")
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize("signal, message", [("SIGKILL", ""), ("SIGSTOP", "a collective with all")])
def test_a_rank_that_is_lost_in_direct(start, mark, tmp_path, signal, message):
    """The launcher sees that one was killed, the watch that one was stopped."""
    before = memory_files()
    job = start("-c", SUMS, signal, tmp_path / "run", ranks=2, env={MARK: mark})
    ended = job.finish()
    assert ended.returncode != 0
    assert "step 1" in ended.stdout
    assert "never comes here" not in ended.stdout
    assert message in ended.stderr
    wait_until_removed(memory_files() - before)


STAYS_AWAY = """
import sys, time
from pathlib import Path
from dataclasses import replace
import numpy as np
import hpctrain as ht
from hpctrain.tuning.choose import TuningPlan, make_choices
from hpctrain.world.calls.calls import bind

from hpctrain.world import watched
world = ht.init()
native = ((0, "native"),)
plan = TuningPlan(native, native, ((0, "ring"),), (), True)
world = replace(world, main=replace(world.main, choices=make_choices(plan)))
x = np.ones(1)
reduce = {
    "plain": lambda: ht.allreduce(x, check=False, world=world),
    "native": lambda: world.link.endpoint.native.bind_allreduce(x, np.add)(),
    "bound": bind(x, algorithm="native"),
}[sys.argv[1]]
with watched(world, Path(sys.argv[2]), timeout_s=1):
    for step in range(4):
        world.threads.record.step = step  # the limit does not hold in the first
        if step == 3 and world.rank == 1:
            time.sleep(600)
        reduce()
print("never comes here")
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize("call", rows_of(("plain", "native", "bound"), "native"))
def test_who_stays_in_a_call_that_notes_nothing_is_seen(start, tmp_path, call):
    ended = start("-c", STAYS_AWAY, call, tmp_path / "run", ranks=2).finish()
    assert ended.returncode != 0
    waits_for, waiting = ended.stderr.split("the job waits for:")[1].split("these wait:")
    assert "rank 1 on" in waits_for
    assert "waiting; in MPI_Allreduce with all ranks" in waiting, waiting
    assert "never comes here" not in ended.stdout
