"""The state of every regime, read from the memory of survivors: the bytes of the checkpoint."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from ranks import run_on
from regimes import REGIMES, digits

from hpctrain import checkpoint, engines, nn, optim
from hpctrain.checkpoint import MemoryCopies, Piece, live_state, newest_whole
from hpctrain.engines.saved_state import SavedState
from hpctrain.training.trainer import Trainer
from hpctrain.transport.threads.ranks import run_ranks

SIZE, HOSTS = 4, "aabb"
MORE_REGIMES = {
    "shared": engines.AllReduce(share_parameters=True),
    "top-k": engines.AllReduce(compression="top-k", compression_ratio=0.05),
    "powersgd": engines.AllReduce(compression="powersgd", compression_rank=2),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Train by a regime; return the folder of the run, the copies of all ranks, live states."""

    def train(name):
        out, save = tmp_path_factory.mktemp("run"), checkpoint.save
        size = 1 if name == "single" else SIZE
        copies, live = [MemoryCopies() for _ in range(size)], {}

        def save_in_memory(run, step, pieces, about, link, *args, **options):
            copies[link.rank].write(step, pieces, about, link, HOSTS[:size])
            copies[link.rank].commit()
            owned = [Piece(*piece[:3], piece.array.copy()) for piece in pieces]
            live[link.rank] = live_state(step, owned, about)
            return save(run, step, pieces, about, link, *args, **options)

        def body(world):
            model = nn.MlpOptions(widths=[64, 3600, 10]).build((8, 8), 10)
            regime = {**REGIMES, **MORE_REGIMES}[name]
            trainer = Trainer(model, optim.adamw(0.01), regime, world=world)
            trainer.fit(digits(), steps=7, batch=64, out=out)
            trainer.close()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(checkpoint, "save", save_in_memory)
            run_on("threads", size, body)
        return out, copies, live

    return train


def request_all(reader):
    """Request each array as it is, and as an engine does: as a mean if only workers have it."""
    reader.request_whole(reader.sizes)
    saved = SavedState(reader, 3.0)
    means = {name: np.zeros(size) for name, size in saved.sizes.items()}
    for name, out in means.items():
        saved.request(name, out)
    reader.means = means


def held(copies, lost):
    """Return the places of the pieces that are held without the `lost` ranks."""
    alive = (own.committed.pieces for rank, own in enumerate(copies) if rank not in lost)
    return {piece[:2] for pieces in alive for piece in pieces}


def survivors_of(copies, lost, fresh):
    """Return the copies of the ranks after a loss, the `fresh` ones, which have none, first."""
    alive = [own for rank, own in enumerate(copies) if rank not in lost]
    return [MemoryCopies() for _ in range(fresh)] + alive


@pytest.mark.sample(1)
@pytest.mark.parametrize("regime", [*REGIMES, *MORE_REGIMES])
def test_survivors_read_the_bytes_of_the_checkpoint(saved, regime):
    out, copies, live = saved(regime)
    expected = read_from_disk(out)
    for count in range(len(copies)):
        for lost in combinations(range(len(copies)), count):
            whole = held(copies, lost) == held(copies, ())
            for fresh in (0, 1):
                ranks = survivors_of(copies, lost, fresh)
                for reader in run_ranks(len(ranks), lambda link, r=ranks: read(r[link.rank], link)):
                    assert (reader is not None) == whole
                    if whole:
                        assert_equal(reader, expected)
    readers = run_ranks(
        len(copies), lambda link: fetch(newest_whole(link, [live[link.rank]]), link)
    )
    for reader in readers:
        assert_equal(reader, expected)


def read_from_disk(out):
    readers = []

    def request(reader):
        request_all(reader)
        readers.append(reader)

    run_ranks(1, lambda link: checkpoint.load(out, link, request=request))
    return readers[0]


def read(copies, link):
    reader = copies.reader(link)
    return None if reader is None else fetch(reader, link)


def fetch(reader, link):
    request_all(reader)
    reader.fetch(link)
    reader.finish()
    return reader


def assert_equal(reader, expected):
    assert (reader.step, reader.about) == (expected.step, expected.about)
    for one, other in ((reader.arrays, expected.arrays), (reader.means, expected.means)):
        assert one.keys() == other.keys()
        for name, x in other.items():
            assert one[name].dtype == x.dtype and one[name].tobytes() == x.tobytes(), name
