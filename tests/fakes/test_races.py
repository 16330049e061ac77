"""The detector of races finds planted ones on any schedule, and none in their clean twins."""

from __future__ import annotations

import numpy as np
import pytest
from ranks import on_ranks

import fakes
from fakes.planted import PLANTED, ROWS, by_pointer, two_streams
from fakes.races import RaceError
from hpctrain.transport.threads import ranks as thread_ranks
from hpctrain.transport.threads.ranks import run_ranks


def run(body, clean: bool, **options) -> None:
    with fakes.installed(**options):
        import cupy

        x, device = cupy.zeros(ROWS), cupy.cuda.Device()
        device.synchronize()
        body(cupy, x, clean)
        device.synchronize()


#: As late as can be, at once, and at random
SCHEDULES = [{"lazy": True, "seed": None}, {}, *({"lazy": True, "seed": i} for i in range(18))]


@pytest.mark.parametrize("body", PLANTED)
def test_planted_races(monkeypatch, body):
    """Found where work runs at once, too: no wrong value is there to be seen."""
    monkeypatch.setattr(thread_ranks, "GRACE_S", 0)
    for options in SCHEDULES:
        run(body, clean=True, **options)
        with pytest.raises(RaceError) as error:
            run(body, clean=False, **options)
        for line, words in zip(str(error.value).splitlines()[-2:], PLANTED[body], strict=True):
            assert words in line


@on_ranks(mpi=(2,))
def test_messages_of_mpi_are_watched(ranks):
    """A pointer is sent before, and after, what is there was computed."""

    def body(world):
        with pytest.raises(RaceError), fakes.installed():
            import cupy

            from hpctrain.transport.mpi.requests import gpu_buffer_spec  # which needs MPI

            x, peer = cupy.zeros(ROWS), 1 - world.rank
            message = [gpu_buffer_spec(x.data.ptr, x.nbytes)]
            cupy.cuda.get_current_stream().synchronize()
            received = world.link.irecv(np.empty(ROWS), peer)
            world.link.post_send(message, peer).wait()
            received.wait()
            x += 1
            world.link.post_send(message, peer)

    ranks(body)


def test_a_seed_is_a_schedule():
    """Some of what waits has run; with each seed other work, with the same seed the same."""

    def order(seed):
        with fakes.installed(lazy=True, seed=seed):
            import cupy

            result = []
            for number, stream in enumerate(two_streams(cupy) * 4):
                stream.put(lambda number=number: result.append(number))
            return result

    runs = [order(seed) for seed in (1, 2, 3)]
    assert order(None) == [] and runs == [order(seed) for seed in (1, 2, 3)]
    assert len({*map(tuple, runs)}) > 1
    for numbers in runs:
        for stream in (0, 1):
            own = [number for number in numbers if number % 2 == stream]
            assert own == sorted(own)


def test_memory_of_the_pool_is_given_out_again(lazy_gpu):
    """To the stream it was for, the last first, and full of rubbish in the order of that stream."""
    import cupy

    x = cupy.ones(ROWS)
    place, read = x.data.ptr, x * 2
    with cupy.cuda.Stream(non_blocking=True):
        assert cupy.empty(ROWS).data.ptr != place
    del x
    y = cupy.empty(ROWS)
    assert y.data.ptr == place
    assert np.isnan(y.get()).all() and (read.get() == 2).all()


def test_threads_without_a_context_are_refused(gpu):
    """MPI would ask CUDA about the pointer there."""
    import cupy

    x = cupy.zeros(ROWS)

    def rank(link):
        (link.isend(by_pointer(x), 0) if link.rank else link.irecv(np.empty(ROWS), 1)).wait()

    with pytest.raises(fakes.CUDARuntimeError, match="this thread has no context"):
        run_ranks(2, rank)
