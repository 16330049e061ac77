"""Checkpoints read by range: each byte once by the job, in bounded memory, each unit verified."""

from __future__ import annotations

import hashlib
import json
import os
import threading
import tracemalloc
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from ranks import on_ranks

from hpctrain import checkpoint
from hpctrain.checkpoint import Piece, exchange, hashes, manifest, parts, reader
from hpctrain.collectives.chunks import bounds
from hpctrain.core import files
from hpctrain.core.errors import SaveError, UsageError
from hpctrain.gradients import arena as arenas
from hpctrain.optim.optimizer import BLOCK_ELEMENTS
from hpctrain.training import weights
from hpctrain.transport.threads.ranks import run_ranks

BLOCK = hashes.BLOCK_ELEMENTS
#: Tensors of several blocks, within one block, over a bound of blocks, and of nothing
SHAPES = {"a": (3, BLOCK), "b": (7,), "empty": (0,), "c": (BLOCK, 2), "d": (BLOCK // 2 + 1,)}


def arena_of(step: int) -> arenas.Arena:
    arena = arenas.make_arena(SHAPES, "float32")
    for name, view in arena.views(arena.param).items():
        view[...] = np.random.default_rng([step, len(name)]).normal(size=view.shape)
    return arena


def state(step: int) -> dict[str, np.ndarray]:
    """Return parameters, moments of the optimizer, and an array per worker."""
    param, rng = arena_of(step).param, np.random.default_rng(step)
    moments = {f"m{i}": rng.normal(size=param.size) for i in range(2)}
    own = {f"worker.{i}.x": np.full(1000, i, np.float32) for i in range(4)}
    return {"param": param, **moments, **own, "step": np.array([step])}


def save(run: Path, step: int, size: int, state_of=lambda rank: {}) -> Path:
    about = {"weights": weights.layout(arena_of(step))}

    def rank(link):
        own = []
        for name, x in state(step).items():
            start, stop = bounds(x.size, size, BLOCK)[link.rank :][:2]
            own.append(Piece(name, start, x.size, x[start:stop]))
        return checkpoint.save(run, step, own, about, link, state=state_of(link.rank))

    return run_ranks(size, rank)[0]


def load(run: Path, size: int, request=None) -> list[checkpoint.Loaded]:
    return run_ranks(size, lambda link: checkpoint.load(run, link, request=request))


class Reads:
    """The bytes that each rank reads of checkpoints."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._bytes: dict[int, int] = {}  # by thread
        self._preadv, self._read_bytes = os.preadv, files.read_bytes
        monkeypatch.setattr(os, "preadv", self._counted_preadv)
        monkeypatch.setattr(files, "read_bytes", self._counted_read_bytes)

    def _counted_preadv(self, handle, buffers, offset):
        count = self._preadv(handle, buffers, offset)
        self._count(count)
        return count

    def _counted_read_bytes(self, path, limit, *levels):
        data = self._read_bytes(path, limit, *levels)
        self._count(len(data))
        return data

    def _count(self, count):
        self._bytes[threading.get_ident()] = self.of_rank() + count

    def of_rank(self):
        return self._bytes.get(threading.get_ident(), 0)


#: what rank r of P requests of the moments: all of them, or its own range
REQUESTS = {
    "replicated": lambda size, rank, ranks: (0, size),
    "sharded": lambda size, rank, ranks: tuple(bounds(size, ranks, BLOCK)[rank:][:2]),
    "cut anywhere": lambda size, rank, ranks: tuple(bounds(size, ranks)[rank:][:2]),
}


@pytest.mark.parametrize("name", REQUESTS)
@pytest.mark.parametrize("writers", [1, 3])
@on_ranks(1, 2, 4, 5, mpi=(4,))
def test_a_job_reads_each_byte_once(ranks, tmp_path, monkeypatch, name, writers):
    def body(world):
        link = world.link
        run = Path(world.gather(str(tmp_path))[0])
        files_of = save(run, 7, writers).iterdir() if world.rank == 0 else ()
        size_bytes = sum(file.stat().st_size for file in files_of)
        before = reads.of_rank()
        link.barrier()
        param, own = np.zeros(state(7)["param"].size, np.float32), {}

        def request(reader):
            reader.request("param", param)
            for key in ("m0", "m1"):
                start, stop = REQUESTS[name](param.size, link.rank, link.size)
                own[key] = start, np.zeros(stop - start)
                reader.request(key, own[key][1], start)
            for i in range(link.rank, 4, link.size):
                own[f"worker.{i}.x"] = 0, np.zeros(1000, np.float32)
                reader.request(f"worker.{i}.x", own[f"worker.{i}.x"][1])

        checkpoint.load(run, link, request=request)
        expected = state(7)
        assert np.array_equal(param, expected["param"])
        for key, (start, x) in own.items():
            assert np.array_equal(x, expected[key][start : start + x.size])
        observed = sum(map(int, world.gather(str(reads.of_rank() - before))))
        size_bytes = int(world.gather(str(size_bytes))[0])
        assert 0.99 * size_bytes < observed <= 1.01 * size_bytes

    reads = Reads(monkeypatch)
    ranks(body)


@pytest.mark.parametrize("size", [1, 4])
def test_memory_beside_the_arrays_is_two_extents_per_rank(tmp_path, monkeypatch, size):
    length, extent = 64 * BLOCK, 4 * BLOCK * 4
    monkeypatch.setattr(parts, "MAX_EXTENT_BYTES", extent)
    arrays = {name: np.ones(length, np.float32) for name in ("common", "sharded")}
    common = [np.zeros(length, np.float32) for _ in range(size)]
    cut = bounds(length, size, BLOCK)
    sharded = [np.zeros(b - a, np.float32) for a, b in pairwise(cut)]

    def saved(link):
        own = [
            Piece(name, cut[link.rank], length, x[cut[link.rank] : cut[link.rank + 1]])
            for name, x in arrays.items()
        ]
        return checkpoint.save(tmp_path, 1, own, {}, link)

    def loaded(link):
        def request(reader):
            reader.request("common", common[link.rank])
            reader.request("sharded", sharded[link.rank], cut[link.rank])

        return checkpoint.load(tmp_path, link, request=request)

    peaks = []
    for act in (saved, loaded):
        tracemalloc.start()
        run_ranks(size, act)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert all(x.all() for x in (*common, *sharded))
    slack = 2 << 20
    assert peaks[0] < size * extent + slack < arrays["common"].nbytes  # to check what was written
    assert peaks[1] < size * 2 * extent + slack < arrays["common"].nbytes


def merged(path: Path, count: int) -> None:
    """Merge the parts of a checkpoint into `count` files of the safetensors library."""
    table = json.loads((path / "manifest.json").read_text())
    del table["sha256"]
    groups = [table["parts"][i::count] for i in range(count)]
    table["parts"] = [merged_part(path, i, group) for i, group in enumerate(groups)]
    (path / "manifest.json").write_text(
        json.dumps({**table, "sha256": manifest._hash_table(table)})
    )


def merged_part(path: Path, number: int, group: list[dict]) -> dict:
    tensors = {}
    pieces = {f"{p['array']}@{p['offset']}": p for part in group for p in part["pieces"]}
    for part in group:
        tensors |= safetensors.numpy.load_file(path / part["file"])
        (path / part["file"]).unlink()
    file = path / f"node{number}.safetensors"
    safetensors.numpy.save_file(tensors, file)
    data = file.read_bytes()
    length = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:length])
    for key, piece in pieces.items():
        piece["begin"] = length + header[key]["data_offsets"][0]
    return {
        "file": file.name,
        "size_bytes": len(data),
        "header_bytes": length,
        "header_sha256": hashlib.sha256(data[:length]).hexdigest(),
        "pieces": sorted(pieces.values(), key=lambda piece: piece["begin"]),
    }


@pytest.mark.parametrize("readers", [1, 3])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_parts_merged_by_others_into_fewer_files_are_loaded(tmp_path, count, readers):
    path = save(tmp_path, 3, 4)
    (expected,) = {loaded.params_sha256 for loaded in load(tmp_path, 1)}
    merged(path, count)
    assert sorted(file.name for file in path.glob("*.safetensors")) == [
        f"node{i}.safetensors" for i in range(count)
    ]
    assert checkpoint.verify(path) is None
    for loaded in load(tmp_path, readers):
        assert loaded.params_sha256 == expected
        for name, x in state(3).items():
            assert np.array_equal(loaded.arrays[name], x)


@pytest.mark.parametrize("writers", [1, 2, 3, 5, 9])
def test_the_hash_of_the_parameters_is_in_the_manifest_whoever_wrote_them(tmp_path, writers):
    save(tmp_path, 5, writers)
    (loaded,) = load(tmp_path, 1, lambda reader: None)
    assert loaded.params_sha256 == arenas.params_sha256(arena_of(5)) and not loaded.arrays


def test_a_piece_that_cuts_a_unit_takes_the_hash_and_nothing_else(tmp_path):
    arena = arena_of(1)
    about, size = {"weights": weights.layout(arena)}, arena.param.size
    for cut, known in ((BLOCK, True), (BLOCK + 1, False), (arena.slots[1].offset, True)):
        own = [Piece("param", 0, size, arena.param[:cut])]
        own += [Piece("param", cut, size, arena.param[cut:])]
        run_ranks(1, lambda link, p=own: checkpoint.save(tmp_path, 1, p, about, link))
        (loaded,) = load(tmp_path, 1)
        assert np.array_equal(loaded.arrays["param"], arena.param)
        assert loaded.params_sha256 == (arenas.params_sha256(arena) if known else None)


def test_state_that_is_no_array(tmp_path):
    own = [{"seen": 2**40, "worker.0.name": "a"}, {"worker.1.name": "b", "seen": 2**40}]
    save(tmp_path, 1, 2, lambda rank: own[rank])
    for loaded in load(tmp_path, 3):
        assert loaded.state == {**own[0], **own[1]}
    with pytest.raises(SaveError, match=r"states of 'seen' are of 1 and of 2"):
        save(tmp_path, 2, 2, lambda rank: {"seen": rank + 1})
    with pytest.raises(SaveError, match=r"state\.x"):
        save(tmp_path, 2, 1, lambda rank: {"x": 0.5})


@pytest.mark.sample(1)
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("array", ["param", "m1", "worker.3.x"])
def test_nothing_of_a_damaged_checkpoint_stays(tmp_path, size, array):
    """What it has written is overwritten by the one before; what waits for the end never came."""
    save(tmp_path, 1, 2)
    path = save(tmp_path, 2, 2)
    flip_last_of(path, array)

    def rank(link):
        steps, outputs = [], {name: np.full(x.size, 9, x.dtype) for name, x in state(1).items()}

        def request(reader):
            for name, x in outputs.items():
                reader.request(name, x)
            reader.on_arrival(lambda: steps.append(reader.step))

        loaded = checkpoint.load(tmp_path, link, request=request)
        return loaded.set_aside, steps, outputs

    for set_aside, steps, outputs in run_ranks(size, rank):
        assert f"of '{array}' do not have the SHA-256" in set_aside[0] and steps == [1]
        assert all(np.array_equal(outputs[name], x) for name, x in state(1).items())


def flip_last_of(path: Path, array: str) -> None:
    """Flip a bit in the last byte of an array."""
    table = json.loads((path / "manifest.json").read_text())
    pieces = [(part, p) for part in table["parts"] for p in part["pieces"] if p["array"] == array]
    part, piece = max(pieces, key=lambda entry: entry[1]["offset"])
    itemsize = np.dtype(table["arrays"][array]["dtype"]).itemsize
    data = bytearray((path / part["file"]).read_bytes())
    data[piece["begin"] + piece["length"] * itemsize - 1] ^= 1
    (path / part["file"]).write_bytes(data)


def test_damage_in_what_no_rank_requests_is_not_read(tmp_path):
    flip_last_of(save(tmp_path, 2, 2), "m1")
    x = np.zeros(1000, np.float32)
    (loaded,) = load(tmp_path, 1, lambda reader: reader.request("worker.1.x", x))
    assert loaded.step == 2 and (x == 1).all()


@pytest.mark.full
def test_any_flipped_byte_is_outputs(tmp_path):
    x = {"a": np.arange(9, dtype=np.float32), "b": np.zeros(5, bool), "c": np.ones(3, np.int16)}
    own = [Piece(name, 0, len(array), array) for name, array in x.items()]
    places = {"w": {"shape": [3], "offset": 0}, "v": {"shape": [4], "offset": 5}}
    about = {"weights": {"a": places}}
    (path,) = run_ranks(1, lambda link: checkpoint.save(tmp_path, 1, own, about, link))
    for file in path.iterdir():
        data = file.read_bytes()
        for at in range(len(data)):
            flipped = bytearray(data)
            flipped[at] ^= 1
            if file.name == "manifest.json" and same_json(data, flipped):
                continue  # white space, or a letter that JSON reads alike
            file.write_bytes(flipped)
            assert checkpoint.verify(path) is not None, (file.name, at)
        file.write_bytes(data)
    assert checkpoint.verify(path) is None


def same_json(first: bytes, second: bytes) -> bool:
    try:
        return json.loads(first) == json.loads(second)
    except ValueError:
        return False


@pytest.mark.parametrize("seed", range(20))
def test_requests_of_any_ranges_get_what_was_saved(tmp_path, monkeypatch, seed):
    rng = np.random.default_rng(seed)
    monkeypatch.setattr(parts, "MAX_EXTENT_BYTES", int(rng.choice([1, 1 << 19, 1 << 22])))
    length, size = int(rng.integers(1, 6 * BLOCK)), int(rng.integers(1, 6))
    x = rng.integers(0, 1 << 30, length)
    cut = np.unique([0, *rng.integers(0, length + 1, 3), length])
    own = [Piece("x", int(a), length, x[a:b]) for a, b in pairwise(cut)]
    run_ranks(1, lambda link: checkpoint.save(tmp_path, 1, own, {}, link))
    counts = rng.integers(0, 4, size)
    spans = [np.sort(rng.integers(0, length + 1, (count, 2))) for count in counts]

    def rank(link):
        outs = [np.zeros(b - a, np.int64) for a, b in spans[link.rank]]
        total = np.full(length // 2, 5.0)

        def request(reader):
            for (a, _), out in zip(spans[link.rank], outs, strict=True):
                reader.request("x", out, int(a))
            reader.request("x", total)
            reader.request("x", total, length - total.size, turn=1)

        checkpoint.load(tmp_path, link, request=request)
        assert all(
            np.array_equal(out, x[a:b]) for (a, b), out in zip(spans[link.rank], outs, strict=True)
        )
        half = length // 2
        assert np.array_equal(total, x[:half] + x[length - half :])

    run_ranks(size, rank)


def test_a_range_beyond_the_array_is_refused(tmp_path):
    save(tmp_path, 1, 1)

    def request(reader):
        reader.request("worker.0.x", np.zeros(10, np.float32), 991)

    with pytest.raises(UsageError, match=r"'worker\.0\.x' has 1000 elements; expected 10 from 991"):
        load(tmp_path, 1, request)


def test_shards_begin_at_bounds_of_units():
    assert BLOCK_ELEMENTS % BLOCK == 0


def test_extents_are_dealt_evenly():
    extents = [parts.Extent("f", 0, "x", "float32", [i, i + 1], [""]) for i in range(10)]
    tasks = [exchange.Read(extent, {0, 1, 2}) for extent in extents]
    tasks += [exchange.Read(extent, {2}) for extent in extents[:3]]
    assert [len(own) for own in reader._deal_reads(tasks, 4)] == [4, 3, 6, 0]
