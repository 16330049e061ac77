"""`auto` for arrays on GPUs: their own tables and defaults, and the path of messages."""

from __future__ import annotations

import logging
from dataclasses import replace

import fakes
import numpy as np
import pytest
from ranks import STAGED, on_gpus, on_ranks, run_on, run_on_gpus

from hpctrain.collectives import Group
from hpctrain.core import thresholds
from hpctrain.core.errors import UsageError
from hpctrain.tools.bench import tune
from hpctrain.transport.paths import RankPlace, Verdict
from hpctrain.tuning import choose, defaults_gpu, select, table
from hpctrain.tuning.choose import AlgorithmTime
from hpctrain.tuning.gpu_layout import GpuLayout

KIB, MIB = 1 << 10, 1 << 20
RANKS = 3


def named(world, nbytes: int, on_gpu: bool) -> str:
    """Return what `auto` takes for a plain array."""
    import cupy

    x = (cupy if on_gpu else np).zeros(nbytes, np.uint8)
    return select.algorithm_name(select.auto, world.main, x)


def made(world, on_gpu: bool) -> table.Table:
    """Return a table that fits `world`: on GPUs trees, from 3 KiB on rings, else double trees."""
    local = table.make_fingerprint(world.main, False, world.gpus if on_gpu else None)
    if on_gpu:
        rows = [AlgorithmTime("tree", False, KIB, 1e-6), AlgorithmTime("ring", False, KIB, 1e-4)]
        rows += [
            AlgorithmTime("tree", False, 9 * KIB, 1e-4),
            AlgorithmTime("ring", False, 9 * KIB, 1e-6),
        ]
    else:
        rows = [AlgorithmTime("double-tree", False, KIB, 1e-6)]
    buckets = [(MIB, 1e-9 if on_gpu else 1e-6), (8 * MIB, 2e-9)]
    return table.Table(local, rows, buckets)


@pytest.fixture
def tables(gpu, tmp_path, monkeypatch):
    """Return what keeps tables where worlds look for them."""
    monkeypatch.setenv(table.FILE_VARIABLE, str(tmp_path))
    first = run_on_gpus(RANKS, lambda w: [made(w, on_gpu) for on_gpu in (False, True)])[0]

    def keep(*kinds: bool, **facts) -> list:
        paths = []
        for item in (first[kind] for kind in kinds):
            local = replace(item.fingerprint, **facts)
            paths.append(table.default_file(local))
            table.write_table(replace(item, fingerprint=local), paths[-1])
        return paths

    return keep


def picks(world) -> list[str]:
    return [named(world, n, on_gpu) for on_gpu in (True, False) for n in (KIB, 9 * KIB)]


def test_each_kind_of_memory_has_a_table_of_its_own(tables):
    usual = run_on_gpus(RANKS, picks)[0]
    paths = tables(False, True)
    assert len(set(paths)) == 2 and "-gpu-" in paths[1].name
    for result in run_on_gpus(RANKS, picks):
        assert result == ["tree", "ring", "double-tree", "double-tree"]
    paths[0].unlink()
    assert run_on_gpus(RANKS, picks)[0] == ["tree", "ring", *usual[2:]]
    assert run_on("threads", RANKS, lambda w: named(w, KIB, False))[0] == usual[2]


def test_buckets_of_either_kind(tables):
    tables(False, True)

    def body(world):
        import cupy

        planes = cupy.zeros(64 * MIB, np.uint8), np.broadcast_to(np.uint8(0), 64 * MIB)
        return [select.bucket_bytes(world.main, plane) for plane in planes]

    assert run_on_gpus(RANKS, body) == [[MIB, 8 * MIB]] * RANKS


#: What is another -> the table of GPUs is not for us.
REST = {"device": "Abacus 9, 3 ranks on 1 GPU: 0 1 2", "paths": "same GPU gdr", "mpi": "LAM 7"}


@pytest.mark.parametrize("fact", REST)
def test_a_table_of_other_gpus_or_paths_is_not_taken(tables, fact, monkeypatch, caplog):
    usual = run_on_gpus(RANKS, picks)[0]
    (path,) = tables(True, **{fact: REST[fact]})
    assert run_on_gpus(RANKS, picks)[0] == usual and not caplog.text
    monkeypatch.setenv(table.FILE_VARIABLE, str(path))  # a user who names it is told
    with caplog.at_level(logging.WARNING):
        assert run_on_gpus(RANKS, picks)[0] == usual
    (message,) = [r.getMessage() for r in caplog.records]
    assert f"its {fact} is '{REST[fact]}'" in message and message.endswith("tune --device gpu")


@pytest.mark.parametrize("kind", [False, True])
def test_one_file_that_is_named_serves_its_kind_alone(tables, kind, monkeypatch, caplog):
    usual = run_on_gpus(RANKS, picks)[0]
    (path,) = tables(kind)
    monkeypatch.setenv(table.FILE_VARIABLE, str(path))
    result = run_on_gpus(RANKS, picks)[0]
    assert result == (["tree", "ring", *usual[2:]] if kind else [*usual[:2], *["double-tree"] * 2])
    assert not caplog.text


def test_the_key_names_devices_ranks_on_each_and_paths(gpu):
    def body(world):
        verdict = Verdict("ipc", "cuda-aware", "gdr", "")
        return table.make_fingerprint(world.main, False, replace(world.gpus, verdict=verdict))

    local = run_on_gpus(2, body)[0]
    assert local.device == "Stand-in 0, 2 ranks on 1 GPU: 0 1" and local.on_gpu
    assert local.paths == "same GPU ipc, same node cuda-aware, across gdr"


# ---- guesses ----

POINTER = Verdict("cuda-aware", "cuda-aware", "cuda-aware", "")
#: A path on which few bytes cost 1 us and long messages 100 MB/s.
CRAWLS = tuple((n, 1e-6 + n * 1e-8) for n in (KIB, MIB, 32 * MIB))


def guess(nodes: str, cards: str, verdict: Verdict, seen=True, **figures):
    """Return the plan for ranks on nodes and GPUs of these letters."""
    places = tuple(RankPlace(n, f"GPU-{c}") for n, c in zip(nodes, cards, strict=True))
    ranks = range(len(nodes))
    of = tuple(tuple(r for r in ranks if nodes[r] == n) for n in dict.fromkeys(nodes))
    gpus = GpuLayout("X", places, replace(verdict, **figures), seen)
    return defaults_gpu.default_plan(Group(None, nodes=of), gpus)


def test_neighbours_memory_is_read_where_it_is_seen():
    for cards in ("0000", "0123"):
        plan = guess("aaaa", cards, STAGED)
        for choices in (plan.in_node_memory, plan.default):  # others are copied through it
            assert thresholds.lookup(choices, 16 * MIB) == "direct"
        plan = guess("aaaa", cards, STAGED, seen=False)
        assert thresholds.lookup(plan.default, 16 * MIB) != "direct"
    slow = guess("aaaa", "0123", POINTER, mapped_gb_s={"same_node": 0.1})
    assert thresholds.lookup(slow.in_node_memory, 16 * MIB) != "direct"


def test_nothing_is_reduced_by_the_library_or_where_it_cannot_be():
    for nodes, cards in (("aaaa", "0000"), ("aabb", "0101"), ("abcd", "0000")):
        plan = guess(nodes, cards, POINTER)
        names = {
            name for stair in (plan.default, plan.in_node_memory, plan.non_mpi) for _, name in stair
        }
        assert "native" not in names and ("direct" in names) == (nodes == "aaaa")
        assert ("hierarchical" in names) == (nodes == "aabb")
        assert [b for b, _ in plan.buckets] == sorted(b for b, _ in plan.buckets)


def test_figures_of_the_trial_go_before_those_of_common_machines():
    reference = [{}, {"across": CRAWLS}, {"same_node": CRAWLS}]
    usual, other, slow = (guess("aaaa", "0123", POINTER, False, seconds=item) for item in reference)
    assert other == usual != slow
    assert per_byte(slow) > 10 * per_byte(usual)
    assert thresholds.lookup(slow.default, 64 * MIB) in (
        "ring",
        "halving-doubling",
    )  # the fewest bytes


def per_byte(plan) -> float:
    """Return the seconds per byte of the longest bucket."""
    return max(plan.buckets)[1]


def test_ranks_that_stage_share_the_way_of_their_gpu():
    for seconds in ({}, {"same_node": CRAWLS, "same_gpu": CRAWLS}):
        plans = [guess("aaaa", c, STAGED, False, seconds=seconds) for c in ("0123", "0000")]
        assert per_byte(plans[1]) > 2 * per_byte(plans[0])


# ---- measured ----


@pytest.mark.full
def test_tune_on_gpus_and_auto_after_it(tmp_path, monkeypatch, capsys):
    """On arrays of GPUs alone, whose table is then taken; the library's own is not among them."""
    monkeypatch.setenv(table.FILE_VARIABLE, str(tmp_path))
    requested = tune.parse_options("4B:256KiB*256", 3, None, None, "gpu", keep_noisy=True)
    with fakes.installed(lazy=True, ipc_within=True) as machine:
        run_on_gpus(2, lambda world: tune.run(world, requested))
        assert machine.counts["implicit"] == 0
        assert machine.counts["raw kernel"] > 0 and machine.counts["D2H"] > 0
        (path,) = tmp_path.iterdir()
        result = table.read_table(path)
        names = {(row.algorithm, row.in_memory) for row in result.rows}
        assert {("direct", True), ("ring", False)} <= names
        assert "native" not in {name for name, _ in names}
        assert result.node.alpha > 0 and result.fingerprint.on_gpu
        output = capsys.readouterr().out
        assert "arrays on Stand-in 0, 2 ranks on 1 GPU: 0 1" in output
        assert "neighbours see it" in output
        assert run_on_gpus(2, lambda w: w.main.choices.gpus.measured) == [True, True]
        assert run_on_gpus(2, lambda w: w.main.choices.measured) == [False, False]
    tune.show_table(None, 2, None, "gpu")
    assert capsys.readouterr().out == output
    with pytest.raises(UsageError, match=r"no tuning table of 2 ranks of this machine in"):
        tune.show_table(None, 2, None)


@pytest.mark.parametrize(
    ("options", "message"),
    [(None, "expected a GPU for every rank, seen none"), ({"memory_bytes": MIB}, "are free; take")],
)
def test_what_cannot_be_measured_is_said_before(options, message):
    requested = tune.parse_options("64MiB", 3, None, None, "gpu")
    with fakes.installed(**options or {}), pytest.raises(UsageError, match=message):
        ranks = run_on_gpus if options else lambda n, body: run_on("threads", n, body)
        ranks(2, lambda world: tune.run(world, requested))


STEPS = ((0, "staged"), (100 * KIB, "pointer"))


@on_ranks(2, mpi=(2,))
def test_what_auto_takes_goes_the_way_of_its_length(ranks, lazy_gpu):
    """By a made-up table, whose all-reduce sends the whole array, and made-up lengths of paths."""
    import cupy

    def body(plain):
        world = on_gpus(plain)
        world.link.endpoint.traffic.set_paths(["cuda-aware"] * 2, [STEPS] * 2)
        doubling = choose.TuningPlan(*(((0, "recursive-doubling"),),) * 3, (), True)
        ring = choose.TuningPlan(*(((0, "ring"),),) * 3, (), True)
        kinds = replace(choose.make_choices(ring), gpus=choose.make_choices(doubling))
        group = replace(world.main, choices=kinds)
        for nbytes, staged in ((4 * KIB, True), (200 * KIB, False)):
            x = cupy.full(nbytes // 4, world.rank + 1.0, np.float32)
            before, sent = group.host_bytes, group.link.endpoint.traffic.bytes_sent
            select.auto(group, x, np.add)
            assert (x.get() == 3).all() and group.link.endpoint.traffic.bytes_sent - sent == nbytes
            by_host = staged or world.transport == "local"
            assert group.host_bytes - before == (2 * nbytes if by_host else 0)

    ranks(body)
