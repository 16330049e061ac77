"""The checks of a whole job: rows with planted faults, one rank after the other."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from dataclasses import replace
from itertools import combinations, count
from pathlib import Path

import pytest
from ranks import on_ranks

from hpctrain import collectives
from hpctrain import world as worlds
from hpctrain.core.names import fold_names
from hpctrain.hardware.nics import Nic
from hpctrain.tools.doctor import show
from hpctrain.tools.doctor.check import Check, compute_median_mad, node_list
from hpctrain.tools.doctor.job import (
    binding,
    consistency,
    cores,
    known_sums,
    output_folder,
    ping_pong,
)
from hpctrain.tools.doctor.job.consistency import RankFacts, facts_from_table
from hpctrain.tools.doctor.job.cores import CoreTiming
from hpctrain.tools.doctor.job.output_folder import FolderState
from hpctrain.tools.doctor.job.ping_pong import Ping
from hpctrain.tools.doctor.job.result import JobResult, gather_json
from hpctrain.transport.placement.check import RankBinding
from hpctrain.transport.placement.nearest_nics import NicPorts
from hpctrain.transport.threads.ranks import run_ranks
from hpctrain.watch.trace import Reading

GIB = 1 << 30


def result(checks, name):
    """Return verdict, what was seen and remedy of the check of that name."""
    check = next(check for check in checks if check.name == name)
    return check.verdict, check.seen, check.remedy


@pytest.mark.parametrize(
    "hosts, text",
    [
        ([], ""),
        (["n1"], "n1"),
        (["n3", "n1", "n2", "n10", "n1"], "n[1-3,10]"),
        (["n008", "n009", "n010"], "n[008-010]"),
        (["n09", "n10", "n11", "n100"], "n[09-11],n100"),
        (["n0", "n9", "n10"], "n[0,9-10]"),
        (["n08", "n9"], "n08,n9"),
        (["r1n1", "r1n2", "r2n1", "login"], "login,r1n[1-2],r2n1"),
        (["n1.site", "n2.site"], "n1.site,n2.site"),
        (["n" + "1" * 5000, "n1"], "n" + "1" * 5000 + ",n1"),
    ],
)
def test_nodes_as_slurm_writes_them(hosts, text):
    assert node_list(hosts) == text
    assert ",".join(fold_names(hosts)) == text  # as pages of runs write them


# figures -> those that stick out
FIGURES = {
    "alike": ([1.0, 1.1, 0.9, 1.0], []),
    "one": ([1.0], []),
    "one of two": ([2.0, 1.0], [2.0]),
    "half of six": ([1, 1, 1, 9, 9, 9], [9, 9, 9]),
    "a little more": ([1.0, 1.0, 1.0, 1.4], []),
    "wide spread": ([1.0, 1.3, 1.6, 2.0, 2.4, 2.8, 4.0], []),
    "one in a thousand": ([1.0] * 999 + [1.6], [1.6]),
}


@pytest.mark.parametrize("case", FIGURES)
def test_outliers(case):
    values, out = FIGURES[case]
    assert [value for value in values if value > compute_median_mad(values).limit] == out


# ---- what must be the same on all ranks ----

REPORTED = RankFacts({"python": "3.12", "MPI": "Open MPI 5"}, "", "MULTIPLE", False, "k")
HOSTS = ("n1", "n1", "n2", "n3")


def ranks_of(**changed):
    """Return what four ranks tell; `r2={...}` changes what rank 2 does."""
    return [replace(REPORTED, **changed.get(f"r{rank}", {})) for rank in range(4)]


OTHER = {"versions": {"python": "3.11", "MPI": "Open MPI 5"}}
# what ranks tell -> verdict, words of what was seen, blamed nodes
VERSIONS = {
    "the same": (ranks_of(), "ok", "python 3.12, MPI Open MPI 5", ()),
    "one": (ranks_of(r2=OTHER), "bad", "python: 3.12, but rank 2 on n2 has 3.11", ("n2",)),
    "rank 0 itself": (ranks_of(r0=OTHER), "bad", "3.12, but rank 0 on n1 has 3.11", ("n1",)),
    "two": (ranks_of(r2=OTHER, r3=OTHER), "bad", "ranks 2-3 on n[2-3] have 3.11", ("n2", "n3")),
    "none": (ranks_of(r3={"versions": {"python": "3"}}), "bad", "but rank 3 on n3 has none",
             ("n3",)),
}  # fmt: skip


@pytest.mark.parametrize("case", VERSIONS)
def test_versions(case):
    reported, verdict, words, nodes = VERSIONS[case]
    check = consistency.check_versions(reported, HOSTS)
    assert (check.verdict, check.nodes) == (verdict, nodes)
    assert words in check.seen
    assert bool(check.remedy) == (verdict == "bad")


HASH, GONE = {"recipe": "a" * 64}, {"recipe": "refused: recipe x: No such file"}
ALL = {f"r{rank}": HASH for rank in range(4)}
# what ranks tell -> verdict, words
RECIPES = {
    "the same": (ranks_of(**ALL), "ok", "SHA-256 aaaaaaaaaaaa on all"),
    "another": (ranks_of(**ALL | {"r1": {"recipe": "b" * 64}}), "bad", "rank 1 on n1 has bbbb"),
    "none there": (ranks_of(**ALL | {"r3": GONE}), "bad", "rank 3 on n3 has refused: recipe x"),
    "nowhere": (ranks_of(**dict.fromkeys(ALL, GONE)), "bad", "refused: recipe x: No such"),
}


@pytest.mark.parametrize("case", RECIPES)
def test_recipes(case):
    reported, verdict, words = RECIPES[case]
    (check,) = consistency.check_recipe(reported, HOSTS)
    assert check.verdict == verdict
    assert words in check.seen


def test_no_recipe_was_asked_for():
    assert consistency.check_recipe(ranks_of(), HOSTS) == []


def test_two_machines_of_one_name():
    (check,) = consistency.check_host_names(ranks_of(r1={"kernel": "other"}), HOSTS)
    assert (check.verdict, "n1 is the name of 2 machines" in check.seen) == ("bad", True)
    assert consistency.check_host_names(ranks_of(), HOSTS) == []


FINE, TINY = Check("shm", "ok", "9 GiB"), Check("shm", "bad", "1 MiB", "grow it")
# checks of nodes -> verdict, what was seen, blamed nodes
NODES = {
    "alike": ({"n1": FINE, "n2": FINE}, "ok", "9 GiB", ()),
    "one": ({"n1": FINE, "n2": TINY, "n3": FINE}, "bad", "n2: 1 MiB", ("n2",)),
    "all": ({"n1": TINY, "n2": TINY}, "bad", "1 MiB", ()),
    "figures": ({"n1": FINE, "n2": replace(FINE, seen="8 GiB")}, "ok", "9 GiB; 1 more like it", ()),
    "two kinds": (
        {"n1": TINY, "n2": TINY, "n3": replace(TINY, seen="2 MiB"), "n4": FINE},
        "bad", "n[1-2]: 1 MiB; n3: 2 MiB", ("n1", "n2", "n3"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", NODES)
def test_checks_of_all_nodes_as_one_row(case):
    by_node, *expected = NODES[case]
    (check,) = consistency.merge_checks({node: [item] for node, item in by_node.items()})
    assert [check.verdict, check.seen, check.nodes] == expected
    assert bool(check.remedy) == (check.verdict == "bad")


# ---- seats ----

SEAT = RankBinding("n1", "srun", 0, "0", 2, 1)
NEXT = replace(SEAT, local_rank=1, cores="1")
ON_GPU, BESIDE = replace(SEAT, gpu="G0", gpus=2), replace(NEXT, gpu="G0", gpus=2)
EQUAL = NicPorts(("m0:1", "m1:1", "m2:1", "m3:1"), ("m0:1", "m1:1", "m2:1", "m3:1"))
# seats -> name of a check, verdict, words of what was seen, of the remedy
SEATS = {
    "a core each": ([SEAT, NEXT], "cores", "ok", "its own", ""),
    "alone": ([SEAT], "ranks", "note", "start as many ranks as the training", "srun"),
    "ranks": ([SEAT, NEXT], "ranks", "ok", "2 ranks on 1 node, by srun", ""),
    "doubled GPU": ([ON_GPU, BESIDE], "GPUs shared", "bad", "ranks 0-1 share G0 of n1",
                    "--gpu-bind=none"),
    "one GPU": ([replace(ON_GPU, gpus=1), replace(BESIDE, gpus=1)], "GPUs", "note",
                "ranks 0-1 of n1 share G0", ""),
    "a GPU each": ([ON_GPU, replace(BESIDE, gpu="G1")], "GPUs", "ok", "its own", ""),
    "oversubscribed BLAS": ([SEAT, replace(NEXT, blas_threads=64)], "BLAS threads", "bad",
                            "64 BLAS threads on 1 core", "OMP_NUM_THREADS"),
    "one core": ([SEAT, replace(NEXT, cores="0")], "cores shared", "bad", "all run on core 0",
                 "--cpus-per-task"),
    "a daemon's": ([SEAT, replace(NEXT, local_rank=0)], "local ranks", "bad", "SLURM_LOCALID",
                   "srun --mpi=pmix"),
    "too many ranks": ([replace(SEAT, cores="0-1", local_rank=n) for n in range(3)], "cores",
                       "slow", "share 2 cores: they take turns", "fewer ranks"),
    "equally near": ([replace(s, nics=EQUAL) for s in (SEAT, NEXT, replace(SEAT, host="n2"))],
                     "NICs", "note", "ranks 0-1 of n1 are equally near 4 ports", "HPCTRAIN_NIC"),
    "a port each": ([replace(s, nics=replace(EQUAL, nearest=("m0:1",))) for s in
                     (SEAT, NEXT, replace(SEAT, host="n2"))], "NICs", "ok", "the map shows", ""),
    "one port for all": ([replace(s, nics=replace(EQUAL, named=("m0:1",))) for s in
                          (SEAT, NEXT, replace(SEAT, host="n2"))], "NICs shared", "slow",
                         "ranks 0-1 of n1 all name m0:1", "unset UCX_NET_DEVICES"),
    "no such port": ([replace(SEAT, nics=replace(EQUAL, faults=("m9:1 is down",))), NEXT,
                      replace(SEAT, host="n2")], "NICs named", "bad", "m9:1 is down", "doctor"),
    "not bound": ([replace(SEAT, cores="0-1", local_rank=None)] * 2, "cores", "note",
                  "not bound", "hpctrain launch"),
}  # fmt: skip


@pytest.mark.parametrize("case", SEATS)
def test_seats(case):
    of, name, verdict, words, remedy = SEATS[case]
    message = result(binding.check_bindings(of), name)
    assert message[0] == verdict
    assert words in message[1]
    assert remedy in message[2]


def test_the_map():
    named = replace(ON_GPU, host="n2", nics=NicPorts(nearest=("m0:1",), named=("m1:1",)))
    nearby = replace(NEXT, host="n2", nics=NicPorts(nearest=("m0:1", "m1:1")))
    rows = binding.binding_rows([SEAT, nearby, named])
    assert rows[0] == ("0", "n1", "0", "0", "1", "-", "-")
    assert rows[1][-1] == "m0:1, m1:1"
    assert rows[2] == ("2", "n2", "1", "0", "1", "G0", "m1:1 (named)")


# ---- the output folder ----

GOOD = FolderState(9 * GIB, 0.001)
# what nodes found -> name of a check, verdict, words, blamed nodes
FOLDERS = {
    "room": ({"n1": GOOD}, "disk", "ok", "9.0 GiB free", ()),
    "little": ({"n1": GOOD, "n2": FolderState(GIB // 2, 0.001)}, "disk", "slow", "0.5 GiB free",
               ()),
    "full": ({"n1": FolderState(0, None, "No space left on device")}, "disk", "bad", "0.0 GiB", ()),
    "refused": ({"n1": FolderState(0, None, "No space left on device")}, "output folder", "bad",
                "n1: /x: No space left", ()),
    "refused on one": ({"n1": GOOD, "n2": FolderState(9, None, "Read-only file system")},
                       "output folder", "bad", "n2: /x: Read-only", ("n2",)),
    "not one": ({"n1": GOOD, "n2": replace(GOOD, shared=False)}, "output folder", "bad",
                "n2 does not see the file that rank 0 wrote", ()),
    "fast": ({"n1": GOOD, "n2": replace(GOOD, fsync_s=0.02)}, "file system", "ok", "median 1.0 ms",
             ()),
    "one slow": ({"n1": GOOD, "n2": replace(GOOD, fsync_s=0.3)}, "file system", "slow",
                 "n2: up to 300 ms", ("n2",)),
    "all slow": ({"n1": replace(GOOD, fsync_s=2.0)}, "file system", "slow", "up to 2000 ms", ()),
}  # fmt: skip


@pytest.mark.parametrize("case", FOLDERS)
def test_output_folder(case, tmp_path):
    nodes, name, verdict, words, blamed = FOLDERS[case]
    (check,) = (item for item in output_folder.check_folder(Path("/x"), nodes) if item.name == name)
    assert (check.verdict, check.nodes) == (verdict, blamed)
    assert words in check.seen
    assert bool(check.remedy) == (verdict != "ok")


def test_a_folder_is_looked_at_and_left_as_it_was(tmp_path):
    place = output_folder.nearest_existing_folder(tmp_path / "runs" / "new")
    assert place == tmp_path
    marked, word = output_folder.make_probe(place)
    observed = output_folder.inspect_folder(place, marked, word)
    assert (observed.fault, observed.shared) == ("", True)
    assert observed.free > 0 and observed.fsync_s > 0
    assert not output_folder.inspect_folder(place, marked, "another word").shared
    output_folder.remove_probe(marked)
    assert not output_folder.inspect_folder(place, marked, word).shared
    assert list(tmp_path.iterdir()) == []


def test_a_slow_disk_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(output_folder.time, "perf_counter", count(0.0, 1.5).__next__)
    check = result(
        output_folder.check_folder(
            tmp_path, {"n1": output_folder.inspect_folder(tmp_path, "", "")}
        ),
        "file system",
    )
    assert check[:2] == ("slow", "median 1500.0 ms to write 64 KiB and fsync (MAD 0.0); n1: up to "
                         "1500 ms")  # fmt: skip
    assert "[checkpoint] every_epochs" in check[2] and "--out" in check[2]


@pytest.mark.parametrize("requested", ["afile", "afile/x"])
def test_what_lies_there_is_no_folder(requested, tmp_path):
    (tmp_path / "afile").touch()
    place = output_folder.nearest_existing_folder(tmp_path / requested)
    checks = output_folder.check_folder(
        place, {"n1": output_folder.inspect_folder(place, *output_folder.make_probe(place))}
    )
    assert result(checks, "output folder")[:2] == ("bad", f"n1: {tmp_path}/afile: Not a directory")


@pytest.fixture
def full(monkeypatch):
    """A folder on a file system without room: a small tmpfs, or what looks like one."""
    place = Path(tempfile.mkdtemp())  # where the reaper unmounts it if the tests are killed
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", place]).returncode
    if mounted:
        usage = output_folder.shutil.disk_usage(place)._replace(free=0)
        monkeypatch.setattr(output_folder.shutil, "disk_usage", lambda _: usage)

        def refuse(*_):
            raise OSError(28, os.strerror(28))

        monkeypatch.setattr(output_folder.os, "write", refuse)
        yield place
        return
    (place / "filler").write_bytes(bytes(60 << 10))
    yield place
    subprocess.run(["umount", place], check=True)


def test_a_full_disk(full):
    checks = output_folder.check_folder(full, {"n1": output_folder.inspect_folder(full, "", "")})
    assert result(checks, "disk")[0] == "bad"
    assert "No space left on device" in result(checks, "output folder")[1]
    assert "--out" in result(checks, "output folder")[2]


# ---- cores and clocks ----


def test_every_core_of_a_machine_is_tried_once():
    free = replace(SEAT, cores="0-4")
    assert cores.assign_cores([free, free], "aa") == [[0, 2, 4], [1, 3]]
    assert cores.assign_cores([SEAT, NEXT], "aa") == [[0], [1]]
    assert cores.assign_cores([SEAT, SEAT, replace(SEAT, host="n2")], "aab") == [[0], [], [0]]


def test_speed_of_cores():
    fine = [CoreTiming(rank, f"n{rank}", 7, 0.030, 1.0) for rank in range(4)]
    assert cores.check_cores(fine).verdict == "ok"
    check = cores.check_cores([*fine, CoreTiming(4, "n9", 3, 0.060, 0.49)])
    assert (check.verdict, check.nodes) == ("slow", ("n9",))
    for words in ("median 30.0 ms", "core 3 of n9 (rank 4): 2.0 x", "given 49% of its time"):
        assert words in check.seen
    assert "ps -eLo psr" in check.remedy
    assert "a slow core" in cores.check_cores([*fine, CoreTiming(4, "n9", 3, 0.060, 1.0)]).seen
    assert cores.check_cores([]).verdict == "note"


# shares of its time that each core was given -> verdict, cores that are named
SHARES = {
    "quiet": ((1.0, 0.99), "ok", ()),
    "a daemon wakes up": ((0.87, 1.0), "ok", ()),
    "at the threshold": ((0.8, 1.0), "ok", ()),
    "below it": ((0.79, 1.0), "slow", (0,)),
    "busy": ((0.35, 0.27), "slow", (0, 1)),  # all alike: by the median nothing sticks out
    "one is busy": ((1.0, 0.5), "slow", (1,)),
    "one core, busy": ((0.5,), "slow", (0,)),
}


@pytest.mark.parametrize("shares", SHARES)
def test_cores_that_somebody_else_uses(shares):
    arguments, verdict, named = SHARES[shares]
    check = cores.check_cores(
        [CoreTiming(r, "n1", r, 0.030 / s, s) for r, s in enumerate(arguments)]
    )
    assert check.verdict == verdict
    for core, share in enumerate(arguments):
        words = f"core {core} of n1 (rank {core}): "
        assert (words in check.seen) == (core in named)
        reason = f"given {share:.0%} of its time (expected: 80%): something else runs there"
        assert (reason in check.seen) == (core in named)
    assert (f"given {min(arguments):.0%} of their time or more" in check.seen) == (verdict == "ok")


def test_a_core_is_tried_again_where_somebody_else_ran(monkeypatch):
    tries = iter([(0.06, 0.5), (0.03, 1.0), (0.06, 0.4), (0.05, 0.6), (0.03, 0.9)])
    monkeypatch.setattr(cores, "_time_computation", lambda: next(tries))
    shares = [cores._measure_best_of_two()[1] for _ in range(3)]
    assert shares == [1.0, 0.6, 0.9]


def test_a_core_under_a_quota():
    fine = [CoreTiming(rank, f"n{rank}", 7, 0.030, 1.0) for rank in range(4)]
    check = cores.check_cores([*fine, CoreTiming(4, "n9", 3, 0.150, 0.2, quota=0.2)])
    assert "core 3 of n9 (rank 4): 5.0 x, given 20% of its time: a quota of 0.2" in check.seen
    assert "limits.cpu" in check.remedy


@pytest.mark.parametrize(
    "arguments, verdict, words",
    [
        ({"n1": None, "n2": None}, None, ""),
        ({"n1": 4.0, "n2": None}, "ok", "4 BLAS threads on n1, quota: the time of 4 cores"),
        ({"n1": 2.5, "n2": 1.0}, "bad", "2 BLAS threads on n2, quota: the time of 1 cores, and 1"),
    ],
)
def test_cpu_quotas(arguments, verdict, words):
    sitting = [replace(SEAT, blas_threads=2)] * 2 + [replace(SEAT, host="n2", blas_threads=2)]
    result = cores.check_quotas(sitting, arguments)
    assert [item.verdict for item in result] == ([verdict] if verdict else [])
    assert all(words in item.seen for item in result)
    assert all("limits.cpu" in item.remedy for item in result if verdict == "bad")


def test_a_core_is_tried_and_left():
    before = os.sched_getaffinity(0)
    (item,) = cores.measure_cores(0, "n1", [min(before), 100_000])
    assert item.core == min(before)
    assert item.seconds > 0 and 0 < item.share <= 1.1
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize(
    "behind, verdict, words, nodes",
    [
        ({"n1": 0.0, "n2": 0.001}, "ok", "1.0 ms at most", ()),
        ({"n1": 0.0, "n2": -0.5}, "note", "n2 is 0.5 s ahead of rank 0's", ()),
        ({"n1": 0.0, "n2": 0.2, "n3": 7.0}, "slow", "n3 is 7.0 s behind rank 0's", ("n3",)),
    ],
)
def test_clocks(behind, verdict, words, nodes):
    check = consistency.check_clocks({node: Reading(0.0, s, 1e-5) for node, s in behind.items()})
    assert (check.verdict, check.nodes) == (verdict, nodes)
    assert words in check.seen


@on_ranks(3, mpi=(3,))
def test_clocks_are_read_once_per_kernel(ranks):
    readings = ranks(lambda world: (world.rank, consistency.measure_clock_offset(world, "aba")))
    for rank, item in readings:
        assert abs(item.offset_s) < 1.0
        assert (item.uncertainty_s > 0) == (rank == 1)


# ---- messages ----


@pytest.mark.parametrize("size", range(1, 10))
def test_everybody_meets_everybody_once(size):
    met = []
    for round_ in range(size - 1 + size % 2):
        partners = [ping_pong.find_partner(rank, round_, size) for rank in range(size)]
        for rank, other in enumerate(partners):
            assert other is None or (other != rank and partners[other] == rank)
            met += [(rank, other)] if other is not None and rank < other else []
    assert sorted(met) == list(combinations(range(size), 2))


@pytest.mark.parametrize("layout", ["aaaa", "aabb", "abc", "aabbb", "ab"])
def test_all_pairs_are_measured(layout):
    def body(link):
        return ping_pong.measure_all_pairs(
            worlds.over_threads(link, [f"n{name}" for name in layout])
        )

    measured = [item for subset in run_ranks(len(layout), body) for item in subset]
    local = [layout[:rank].count(name) for rank, name in enumerate(layout)]
    expected = [
        (a, b, layout[a] == layout[b])
        for a, b in combinations(range(len(layout)), 2)
        if layout[a] == layout[b] or local[a] == local[b]
    ]
    assert sorted((item.a, item.b, item.inside) for item in measured) == expected
    assert all(item.small_s > 0 and item.large_s > 0 for item in measured)


@on_ranks(3, mpi=(3,))
def test_pairs_over_mpi(ranks):
    def body(world):
        own = [(item.a, item.b) for item in ping_pong.measure_all_pairs(world)]
        return sorted(tuple(pair) for message in world.gather(json.dumps(own))
                      for pair in json.loads(message))  # fmt: skip

    for measured in ranks(body):
        assert measured == list(combinations(range(3), 2))


def links(hosts, slow=(), inside=False, times=9.0):
    """Return the pings of all pairs; those of `slow` ranks or pairs take `times` as long."""
    return [
        Ping(a, b, inside, 2e-6, 1e-4 * (times if {a, b, (a, b)} & set(slow) else 1))
        for a, b in combinations(range(len(hosts)), 2)
    ]


FOUR = ("n1", "n2", "n3", "n4")
# pings, hosts -> verdict, words, blamed nodes
LINKS = {
    "alike": (links(FOUR), FOUR, "ok", "6 pairs: 8 B median 2.0 us (MAD 0.0), 1 MiB median 10,000",
              ()),
    "a slow node": (links(FOUR, [2]), FOUR, "bad", "1 MiB: rank 2 on n3 takes 9.0 x at best",
                    ("n3",)),
    "of three": (links(FOUR[:3], [0]), FOUR[:3], "bad", "rank 0 on n1 takes 9.0 x", ("n1",)),
    "a bit slow": (links(FOUR, [3], times=2.0), FOUR, "slow", "rank 3 on n4 takes 2.0 x", ("n4",)),
    "a slow link": (links(FOUR, [(0, 3)]), FOUR, "bad", "ranks 0 and 3 (n1, n4) take 9.0 x", ()),
    "two nodes": (links(FOUR[:2]), FOUR[:2], "ok", "1 pair: ", ()),
    "inside": (links(("n1",) * 4, [1], True), ("n1",) * 4, "slow", "rank 1 on n1", ("n1",)),
}  # fmt: skip


HDR, DOWN = (
    Nic("mlx5_0:1", "InfiniBand", True, 200.0, ""),
    Nic("mlx5_1:1", "RoCE", False, 400.0, ""),
)
SOCKETS = Nic("eth0", "Ethernet", True, 25.0, "")
# seconds of 1 MiB, the ports of each node -> verdict and words, None where nothing is said
RATES = {
    "RDMA": (
        6e-5,
        [[HDR, DOWN], [HDR, SOCKETS]],
        ("ok", "16,667 MiB/s at best, 70% of"),
    ),
    "fallen back": (9e-4, [[HDR], [HDR]], ("slow", "1,111 MiB/s at best, 5% of")),
    "sockets alone": (9e-4, [[SOCKETS], [SOCKETS]], None),
    "a node without": (9e-4, [[HDR], [SOCKETS]], None),
    "a node whose port is down": (9e-4, [[HDR], [DOWN]], None),
}


@pytest.mark.parametrize("case", RATES)
def test_messages_are_held_against_the_rate_of_adapters(case):
    seconds, ports, expected = RATES[case]
    measured = [Ping(0, 1, True, 1e-6, 1e-5), Ping(0, 2, False, 2e-6, seconds)]
    measured.append(Ping(1, 3, False, 2e-6, 2 * seconds))
    result = ping_pong.check_rdma(measured, ports)
    assert [(item.verdict, bool(item.remedy)) for item in result] == (
        [(expected[0], expected[0] == "slow")] if expected else []
    )
    assert all(expected[1] in item.seen for item in result)
    assert ping_pong.check_rdma(measured[:1], ports) == []


@pytest.mark.parametrize("case", LINKS)
def test_slow_links_are_named(case):
    measured, hosts, verdict, words, nodes = LINKS[case]
    (check,) = ping_pong.check_links(measured, hosts, oversubscribed=False)
    assert (check.verdict, check.nodes) == (verdict, nodes)
    assert words in check.seen
    assert bool(check.remedy) == (verdict != "ok")


def test_ranks_that_take_turns_are_not_judged():
    (check,) = ping_pong.check_links(links(FOUR, [2]), FOUR, oversubscribed=True)
    assert (check.verdict, "no verdict" in check.seen) == ("note", True)


# ---- sums ----


@on_ranks(1, 2, 3, 5, mpi=(1, 3))
def test_sums_are_right(ranks):
    wrong = ranks(known_sums.find_failed_algorithms)
    assert not any(wrong)
    assert known_sums.check_sums(wrong, ["ring"]).verdict == "ok"


@on_ranks(3, mpi=(3,))
def test_a_wrong_sum_is_named(ranks, monkeypatch):
    def off_by_one(group, x, op):
        collectives.tree(group, x, op)
        x[-1:] += group.link.rank == 1

    monkeypatch.setitem(collectives.ALLREDUCE, "ring", off_by_one)
    wrong = ranks(lambda world: world.gather(",".join(known_sums.find_failed_algorithms(world))))
    assert all(item == ["", "ring", ""] for item in wrong)
    check = known_sums.check_sums([[], ["ring"], []], ["auto", "ring"])
    assert (check.verdict, "ring is wrong on rank 1" in check.seen) == ("bad", True)
    assert "the MPI library's own" in known_sums.check_sums([["native"]], ["native"]).seen


def test_direct_is_left_out_where_there_are_several_nodes():
    body = lambda link: known_sums.algorithm_names(worlds.over_threads(link, ("a", "b")))  # noqa: E731
    assert all("direct" not in names and "ring" in names for names in run_ranks(2, body))


# ---- answers, and what is shown ----


@on_ranks(1, 3, mpi=(3,))
def test_rank_0_hears_all(ranks):
    message = ranks(lambda world: (world.rank, gather_json(world.link, {"is": "ä" * world.rank})))
    for rank, heard in message:
        assert heard == ([] if rank else [{"is": "ä" * r} for r in range(ranks.size)])


def test_what_is_shown(capsys):
    drawn = [
        replace(REPORTED, topology_lines=(f"node {host}", "  NUMA 0, cores 0-3: -"))
        for host in FOUR
    ]
    reported = [facts_from_table({**vars(item), "checks": []}) for item in drawn]
    faults = [
        Check("links", "bad", "rank 1", "look", ("n2",)),
        Check("x", "slow", "y", "z", ("n3",)),
    ]
    job = JobResult(FOUR, (SEAT,) * 4, reported, faults)
    show.print_job(job)
    out = capsys.readouterr().out
    assert out.count("NUMA 0") == 1
    assert "node n[1-4]\n" in out
    assert "links: look\n" in out
    assert out.endswith("--exclude=n[2-3]\n")
    table = job.table()
    assert (table["exit_code"], table["exclude"]) == (1, "n[2-3]")
    assert table["ranks"][3]["cores"] == "0"


def test_not_all_nodes_are_left_out():
    assert JobResult(("n1",), checks=[Check("x", "bad", "", "", ("n1",))]).excluded_nodes == ""


def test_a_long_map_is_cut():
    rows = [("0",) * len(binding.COLUMNS)] * (show.MAX_SHOWN_RANKS + 2)
    assert show.binding_table(rows).caption == "and 2 ranks more: --json"


def test_what_many_nodes_say_fits_on_a_page(capsys):
    hosts = [f"n{node:02}" for node in range(1, 65) for _ in range(8)]
    sitting = [replace(SEAT, host=host, local_rank=n % 8) for n, host in enumerate(hosts)]
    sitting[-1] = replace(sitting[-1], blas_threads=9)  # the last node is another kind
    reported = [
        replace(REPORTED, topology_lines=(f"node {host}", "  NUMA 0, cores 0-63: -"))
        for host in hosts
    ]
    between = combinations(range(0, len(hosts), 8), 2)
    slow = [Ping(a, b, False, 2e-6, 9e-4 if a // 8 % 2 else 1e-4) for a, b in between]
    job = JobResult(
        tuple(hosts),
        tuple(sitting),
        reported,
        ping_pong.check_links(slow, hosts, oversubscribed=False),
    )
    show.print_job(job)
    out = capsys.readouterr().out
    assert "node n[01-64]" in out
    assert "n[02-63] are bound as n01: --json" in out
    assert len(out.splitlines()) < 60
    assert len(job.table()["ranks"]) == 512
