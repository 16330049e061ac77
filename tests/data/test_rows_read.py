"""Rows read per rank: each sample is read once per epoch, by one rank, and no rank reads all."""

from __future__ import annotations

import mmap
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from ranks import run_on

from hpctrain import data, nn, optim
from hpctrain.core.errors import HpctrainError, UsageError
from hpctrain.data import Dataset, Sampler, share, stored
from hpctrain.data.augment import AugmentedSamples
from hpctrain.data.npy import map_file
from hpctrain.training.run_options import FitOptions
from hpctrain.training.trainer import Trainer

N, BATCH, EPOCHS = 103, 20, 3
X = np.random.default_rng(0).standard_normal((N, 4)).astype(np.float32)
Y = np.arange(N) % 3


class Counted(Dataset):
    """A set that takes note of what is read."""

    def rows(self, indexes, epoch=0):
        self.__dict__.setdefault("seen", []).extend((epoch, int(i)) for i in indexes)
        return super().rows(indexes, epoch)


def fitted(world, train, test=None, prefetch=None, **keys):
    model = nn.MlpOptions(widths=[4, 8, 3]).build((4,), 3)
    trainer = Trainer(model, optim.sgd(0.1), precision="float64", world=world)
    trainer.fit(train, batch=BATCH, evaluate=test, **keys, options=FitOptions(prefetch=prefetch))
    trainer.close()
    return trainer.replica.arena.param.tobytes()


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_each_sample_is_read_once_in_an_epoch_by_one_rank(size, prefetch):
    def body(world):
        train, test = Counted(X, Y), Counted(X, Y)
        fitted(world, train, test, prefetch, epochs=EPOCHS)
        return train.seen, test.seen

    trains, tests = zip(*run_on("threads", size, body), strict=True)
    expected = {(epoch, i): 1 for epoch in range(EPOCHS) for i in range(N)}
    assert Counter(item for observed in trains for item in observed) == expected
    assert Counter(item for observed in tests for item in observed) == {
        (0, i): EPOCHS for i in range(N)
    }
    for observed in trains:  # a rank's share, to within a sample per step
        assert abs(len(observed) - N * EPOCHS / size) <= EPOCHS * -(-N // BATCH)


def test_a_run_that_ends_within_an_epoch_reads_nothing_beyond():
    train = Counted(X, Y)
    run_on("threads", 1, lambda world: fitted(world, train, prefetch=5, steps=8))
    assert len(train.seen) == N + 2 * BATCH


def resident(path: Path) -> int:
    """Return the bytes of a mapped file that this process has looked at."""
    text = Path("/proc/self/smaps").read_text()
    block = text.split(str(path), 1)[1].split("VmFlags")[0]
    return int(re.search(r"^Rss:\s+(\d+) kB", block, re.M)[1]) * 1024


def sparse(path: Path, shape: tuple[int, ...]) -> None:
    """Write an array of zeros that takes no room."""
    with open(path, "wb") as file:
        header = {"descr": "|u1", "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(file, header)
        file.truncate(file.tell() + int(np.prod(shape)))


def test_of_a_set_larger_than_memory_a_rank_reads_its_rows_alone(tmp_path):
    n, row = 400_000, 250_000  # 100 GB
    sparse(tmp_path / "x.npy", (n, row))
    sparse(tmp_path / "y.npy", (n,))
    table = {"kind": "npy", "x": str(tmp_path / "x.npy"), "y": str(tmp_path / "y.npy")}
    train = data.read({**table, "classes": 2, "scale": "none"}).load(0).train
    assert resident(tmp_path / "x.npy") == 0
    sampler, read = Sampler(n, 24, seed=0), 0
    for step in range(4):
        _, own = share(sampler.batch_indexes(step), 1, 3)
        x, _ = train.rows(own)
        assert x.shape == (8, row)
        read += x.nbytes
    # Rows begin and end within pages; that is all that may come along.
    assert read <= resident(tmp_path / "x.npy") <= read + 32 * 2 * 4096


@pytest.mark.parametrize("prefetch", [0, 3])
def test_files_and_memory_train_the_same_bytes(tmp_path, prefetch):
    np.save(tmp_path / "x.npy", X)
    np.save(tmp_path / "y.npy", Y)
    table = {"kind": "npy", "x": str(tmp_path / "x.npy"), "y": str(tmp_path / "y.npy")}
    stored = data.read({**table, "classes": 3}).load(0).train
    for size in (1, 3):
        target = run_on("threads", size, lambda w: fitted(w, stored, None, prefetch, epochs=2))
        local = run_on("threads", size, lambda w: fitted(w, Dataset(X, Y), epochs=2))
        assert target == local


def test_augmented_samples_are_the_same_on_any_number_of_ranks():
    images = Dataset(X.reshape(N, 2, 2), Y)

    def body(world):
        model = nn.MlpOptions(widths=[4, 8, 3]).build((2, 2), 3)
        trainer = Trainer(model, optim.sgd(0.1, 0.9), precision="float64", world=world)
        start = trainer.replica.arena.param.copy()
        trainer.fit(AugmentedSamples(images, 0, 1, True), batch=BATCH, epochs=EPOCHS)
        trainer.close()
        return start, trainer.replica.arena.param

    start, alone = run_on("threads", 1, body)[0]
    plain = np.frombuffer(run_on("threads", 1, lambda w: fitted(w, Dataset(X, Y), epochs=3))[0])
    way = np.linalg.norm(alone - start)
    assert np.linalg.norm(alone - plain) > 0.1 * way
    for size in (2, 3, 5):
        for _, w in run_on("threads", size, body):
            assert np.linalg.norm(w - alone) <= 1e-10 * way


class Failing(Dataset):
    def rows(self, indexes, epoch=0):
        if epoch == 1:
            raise UsageError("label 12 of sample 3 is out of range")
        return super().rows(indexes, epoch)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_fault_found_while_reading_ends_the_run_with_its_message(prefetch):
    with pytest.raises(HpctrainError, match="label 12 of sample 3"):
        run_on("threads", 1, lambda world: fitted(world, Failing(X, Y), None, prefetch, epochs=2))


def test_where_all_lies_in_memory_no_thread_reads_ahead(tmp_path):
    split = data.read({"kind": "text", "length": 64}).load(0)
    assert data.batches_to_read_ahead(split.train) == 2
    images = data.read({"kind": "digits", "shift": 1}).load(0)
    assert [data.batches_to_read_ahead(item) for item in (images.train, images.test)] == [0, 0]


class Advised:
    """A mapped file that takes note of the pages that are requested."""

    def __init__(self):
        self.pages = list[tuple[int, int]]()

    def madvise(self, advice: int, start: int, length: int) -> None:
        assert advice == mmap.MADV_WILLNEED and start % mmap.PAGESIZE == 0
        self.pages.append((start // mmap.PAGESIZE, length // mmap.PAGESIZE))


#: (offset and bytes of a row in pages, sorted rows): (first page, pages) of each request
REQUESTS = [
    (0, 1, [0, 1, 2], [(0, 3)]),
    (0, 2, [1, 5, 5, 6], [(2, 2), (10, 4)]),
    (0.5, 1, [0, 3], [(0, 2), (3, 2)]),
    (0.5, 1, [0, 1, 3], [(0, 5)]),
    (0, 0.25, [0, 1, 2, 3, 4], [(0, 2)]),
    (0, 0.25, [0, 9, 40], []),  # three pages for less than one
]


@pytest.mark.parametrize("offset, row, rows, requests", REQUESTS)
def test_pages_of_mapped_rows_are_requested_together(offset, row, rows, requests):
    memory = Advised()
    offset_bytes, row_bytes = (int(pages * mmap.PAGESIZE) for pages in (offset, row))
    stored._request_rows(memory, offset_bytes, row_bytes, np.array(rows))
    assert memory.pages == requests


@pytest.mark.parametrize("rows", [[], [2], [7, 0, 7, 3]])
def test_rows_of_a_mapped_file_are_new_arrays(tmp_path, rows):
    x = np.arange(8 * 2000, dtype="f4").reshape(8, 2000)
    np.save(tmp_path / "x.npy", x)
    mapped, indexes = map_file(str(tmp_path / "x.npy")), np.array(rows, np.int64)
    for array in (x, mapped, mapped[:, ::2], np.load(tmp_path / "x.npy", "r")):
        taken = stored.take_rows(array, indexes)
        assert np.array_equal(taken, np.array(array)[indexes])
        assert not np.shares_memory(taken, array)
